"""A step as generated Python: one function forward, one or two backward, with every tensor freed after its last use."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from building import Step
from passes import overlapped

from autopar.torch_private import OpOverload

Function = Callable[[list[Any]], tuple[Any, ...]]


def fast(target: Any) -> Any:
    """Return the shortest way from Python to an operator: its overload without the checks of ``OpOverload``."""
    return target._op if isinstance(target, OpOverload) else target


_BINDINGS = [torch, torch.nn.functional, torch.Tensor]


def bound(node: torch.fx.Node) -> Any:
    """Return what calls a node's operator: torch's own binding, which parses arguments faster, where it takes them."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return fast(target)
    name = target._schema.name.split("::")[1]
    val = node.meta.get("val")
    fakes = [x.meta.get("val") for x in node.all_input_nodes]
    if not isinstance(val, torch.Tensor) or not all(isinstance(x, torch.Tensor) for x in fakes) or name in _NOT:
        return fast(target)
    for home in _BINDINGS:
        found = getattr(home, name, None)
        if found is None or isinstance(found, types.FunctionType):  # one in Python is slower than the overload
            continue
        try:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with torch.no_grad(), val.fake_mode:
                got = found(*args, **kwargs)
        except Exception:  # it takes other arguments
            continue
        if isinstance(got, torch.Tensor) and got.shape == val.shape and got.dtype == val.dtype:
            return found
    return fast(target)


_NOT = {"native_batch_norm", "_native_batch_norm_legit", "copy_", "set_", "resize_"}
_bound: dict[Any, Any] = {}


def generated(
    name: str, given: Sequence[torch.fx.Node], nodes: Iterable[torch.fx.Node], results: Sequence[Any]
) -> tuple[Function, str]:
    """Return a function from a list of values, which it empties, to a tuple of results, and its text."""
    nodes = list(nodes)
    last: dict[torch.fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for x in (*node.all_input_nodes, *node.meta.get("guard", ())):
            last[x] = i
    kept = {x for x in results if isinstance(x, torch.fx.Node)}
    ends: dict[int, list[torch.fx.Node]] = {}
    for x, i in last.items():
        if x not in kept:
            ends.setdefault(i, []).append(x)
    names: dict[torch.fx.Node, str] = {}
    space: dict[str, Any] = {}
    calls: dict[Any, str] = {}

    def constant(value: Any) -> str:
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return repr(value)
        if isinstance(value, torch.fx.Node):
            return names[value]
        if type(value) in (list, tuple, torch.fx.immutable_collections.immutable_list):
            inside = ", ".join(map(constant, value))
            return f"[{inside}]" if type(value) is not tuple else f"({inside},)" if value else "()"
        key = f"_k{len(space)}"
        space[key] = value
        return key

    def called(node: torch.fx.Node) -> str:
        fakes = tuple(
            (tuple(x.meta["val"].shape), x.meta["val"].dtype) if isinstance(x.meta.get("val"), torch.Tensor) else None
            for x in node.all_input_nodes
        )
        key = node.target, str(node.args and [type(a) for a in node.args]), tuple(node.kwargs), fakes
        if key not in _bound:
            _bound[key] = bound(node)
        function = _bound[key]
        if function not in calls:
            calls[function] = f"_{getattr(node.target, '__name__', 'f').replace('.', '_')}_{len(calls)}"
            space[calls[function]] = function
        return calls[function]

    for k, x in enumerate(given):
        names[x] = f"v{k}"
    lines = [f"def {name}(values):"]
    if given:
        lines.append("    " + ", ".join(names[x] for x in given) + ("," if len(given) == 1 else "") + " = values")
    lines.append("    values.clear()")
    unread = [names[x] for x in given if x not in last and x not in kept]
    if unread:
        lines.append(f"    del {', '.join(unread)}")
    guard: tuple[torch.fx.Node, ...] = ()
    after: list[str] = []  # freed behind a block that may not run
    for i, node in enumerate(nodes):
        names[node] = f"x{i}"
        now = node.meta.get("guard", ())
        if now != guard:
            if guard and after:
                lines.append(f"    del {', '.join(after)}")
            guard, after = now, []
            if guard:
                inside = [f"x{i}"]
                for k in range(i + 1, len(nodes)):
                    if nodes[k].meta.get("guard", ()) != guard:
                        break
                    inside.append(f"x{k}")
                lines.append(f"    {' = '.join(inside)} = None")
                lines.append(f"    if {' or '.join(f'{names[x]} is not None' for x in guard)}:")
        if getattr(node.target, "__name__", "") == "getitem":
            line = f"    {names[node]} = {names[node.args[0]]}[{node.args[1]!r}]"
        else:
            given_args = [constant(a) for a in node.args] + [f"{k}={constant(v)}" for k, v in node.kwargs.items()]
            line = f"    {names[node]} = {called(node)}({', '.join(given_args)})"
        freed = [names[x] for x in ends.get(i, ())]
        if node not in last and node not in kept:
            freed.append(names[node])
        if guard:
            after.extend(freed)
            lines.append("    " + line)
        else:
            lines.append(line + (f"; del {', '.join(freed)}" if freed else ""))
    if guard and after:
        lines.append(f"    del {', '.join(after)}")
    lines.append(f"    return ({''.join(constant(x) + ', ' for x in results)})")
    text = "\n".join(lines) + "\n"
    exec(compile(text, f"<{name}>", "exec"), space)
    return space[name], text


class Functions:
    """The functions of a step.

    Attributes:
        forward: the values of all slots to the results, then what is saved.
        backward: what is saved, then gradients of roots, to gradients of slots in the order of ``slots``.
        inputs, weights: the same in halves: the first gives the gradients of slots that are no parameters, and what
            the second reads; None without a split.
    """

    def __init__(self, step: Step, split: bool = False) -> None:
        nodes = [n for n in step.graph.nodes if n.op == "call_function"]
        needed = _needed([*step.grads.values(), *(x for x in step.results if isinstance(x, torch.fx.Node))])
        early = [n for n in nodes if not n.meta["late"] and (n in needed or n.target.__class__ is not OpOverload)]
        late = overlapped([n for n in nodes if n.meta["late"] and n in needed])
        early = overlapped(early)
        self.roots = list(step.roots)
        self.slots = list(step.grads)
        arriving = list(step.roots.values())
        before = {*early, *step.placeholders}
        self.saved = _read_of(late, step.grads.values(), before)
        self.n_results = len(step.results)
        self.forward, self.text = generated("forward", step.placeholders, early, [*step.results, *self.saved])
        grads = list(step.grads.values())
        self.backward, text = generated("backward", [*self.saved, *arriving], late, grads)
        self.text += "\n\n" + text
        self.n_forward, self.n_backward = len(early), len(late)
        self.inputs: Function | None = None
        if split:
            self._split(step, late, arriving)

    def _split(self, step: Step, late: list[torch.fx.Node], arriving: list[torch.fx.Node]) -> None:
        weights = set(step.weights)
        self.first = [k for k in step.grads if k not in weights]
        self.second = [k for k in step.grads if k in weights]
        toward = _needed([step.grads[k] for k in self.first])
        first = [n for n in late if n in toward]
        second = [n for n in late if n not in toward]
        given = [*self.saved, *arriving]
        self.between = _read_of(second, [step.grads[k] for k in self.second], {*given, *first})
        self.inputs, a = generated("inputs", given, first, [*(step.grads[k] for k in self.first), *self.between])
        self.weights, b = generated("weights", self.between, second, [step.grads[k] for k in self.second])
        self.text += "\n\n" + a + "\n\n" + b


def _needed(ends: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    needed: set[torch.fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo.extend((*node.all_input_nodes, *node.meta.get("guard", ())))
    return needed


def _read_of(nodes: Iterable[torch.fx.Node], ends: Iterable[Any], before: set[torch.fx.Node]) -> list[torch.fx.Node]:
    read = dict.fromkeys(x for n in nodes for x in (*n.all_input_nodes, *n.meta.get("guard", ())) if x in before)
    read.update(dict.fromkeys(x for x in ends if x in before))
    return list(read)


def pairs(numbers: Sequence[int], values: Sequence[Any]) -> Mapping[int, Any]:
    """Return values by number."""
    return dict(zip(numbers, values, strict=False))
