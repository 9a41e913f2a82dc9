"""A step as generated Python: a function forward and one backward, in which every tensor is freed after its last use.

Running a step is then calling one function: there is no graph to walk, and nothing to decide. Operators between what is
not for compilers may be one call of a compiled graph (:data:`Compiler`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx

from autopar.lower.steps.adjoints import acts
from autopar.lower.steps.building import StepGraph
from autopar.lower.steps.halves import in_halves
from autopar.lower.steps.order import is_start, overlapped
from autopar.torch_private import OpOverload, direct_call

Function = Callable[[list[Any]], tuple[Any, ...]]
"""A function of a list of values, which it empties, so that it alone holds them."""
Compiler = Callable[[torch.fx.GraphModule], Function]
"""Compiles a graph of operators, whose placeholders have ``meta["val"]``."""
_SHORT = (type(None), bool, int, str)


@dataclass
class Printed:
    """A function and its text."""

    run: Function
    text: str


class _Names:
    """Names of nodes, of what they call and of values that have no short text."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {}
        self.of_node: dict[torch.fx.Node, str] = {}
        self._of_object: dict[int, str] = {}

    def of_object(self, value: Any, word: str = "value") -> str:
        """Return the name of an object in the text."""
        if id(value) not in self._of_object:
            name = f"{word}_{len(self.space)}"
            self._of_object[id(value)], self.space[name] = name, value
        return self._of_object[id(value)]

    def of_call(self, target: Any) -> str:
        """Return the name of a function."""
        word = getattr(target, "__name__", "call").replace(".", "_")
        return self.of_object(direct_call(target), word if word.isidentifier() else "call")

    def text(self, value: Any) -> str:
        """Return the text of an argument."""
        if isinstance(value, torch.fx.Node):
            return self.of_node[value]
        if type(value) in _SHORT or (isinstance(value, float) and abs(value) < float("inf")):
            return repr(value)
        if isinstance(value, tuple):
            return f"({''.join(self.text(x) + ', ' for x in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        return self.of_object(value)


def printed(
    name: str, given: Sequence[torch.fx.Node], nodes: Sequence[torch.fx.Node], results: Sequence[Any],
    constants: dict[torch.fx.Node, torch.Tensor],
) -> Printed:  # fmt: skip
    """Return a function that runs nodes.

    Args:
        given: the nodes whose values it takes.
        results: nodes and other values that it returns.
        constants: tensors that stand in the text, by node.
    """
    kept = {x for x in results if isinstance(x, torch.fx.Node)} | set(constants)
    last = {x: i for i, node in enumerate(nodes) for x in read_by(node)}
    ends: dict[int, list[torch.fx.Node]] = {}
    for x, i in last.items():
        if x not in kept:
            ends.setdefault(i, []).append(x)
    names = _Names()
    names.of_node.update((x, names.of_object(value, "constant")) for x, value in constants.items())
    names.of_node.update((x, f"v{k}") for k, x in enumerate(given))
    lines = [f"def {name}(values):"]
    if given:
        lines.append(f"    {', '.join(names.of_node[x] for x in given)}, = values")
    lines.append("    values.clear()")
    lines.extend(_deleted("    ", [names.of_node[x] for x in given if x not in last and x not in kept]))
    guard: tuple[torch.fx.Node, ...] = ()
    after: list[str] = []  # freed behind a block that may not run
    for i, node in enumerate(nodes):
        names.of_node[node] = f"x{i}"
        if node.meta["guard"] != guard:
            lines.extend(_deleted("    ", after))
            guard, after = node.meta["guard"], []
            if guard:
                block = [f"x{k}" for k in range(i, _end_of_block(nodes, i))]
                lines.append(f"    {' = '.join(block)} = None")
                lines.append(f"    if {' or '.join(f'{names.of_node[x]} is not None' for x in guard)}:")
        free = [names.of_node[x] for x in ends.get(i, ())]
        if node not in last and node not in kept:
            free.append(names.of_node[node])
        indent = "        " if guard else "    "
        lines.extend(_statement(names, node, indent, () if guard else free))
        if guard:
            after.extend(free)
    lines.extend(_deleted("    ", after))
    lines.append(f"    return ({''.join(names.text(x) + ', ' for x in results)})")
    text = "\n".join(lines) + "\n"
    exec(compile(text, f"<{name} of a step>", "exec"), names.space)
    return Printed(names.space[name], text)


def _end_of_block(nodes: Sequence[torch.fx.Node], begin: int) -> int:
    end = begin
    while end < len(nodes) and nodes[end].meta["guard"] == nodes[begin].meta["guard"]:
        end += 1
    return end


def _deleted(indent: str, names: Sequence[str]) -> list[str]:
    return [f"{indent}del {', '.join(names)}"] if names else []


def _statement(names: _Names, node: torch.fx.Node, indent: str, free: Sequence[str]) -> list[str]:
    """Return the lines that run a node and free what nobody reads after it."""
    name = names.of_node[node]
    if "taken" in node.meta:
        call, k = node.meta["taken"]
        line = f"{indent}{name} = {names.of_node[call]}[{k}]"
    elif node.target is operator.getitem:
        line = f"{indent}{name} = {names.text(node.args[0])}[{node.args[1]!r}]"
    elif "compiled" in node.meta:  # it empties a list, and nothing else must hold what it frees
        early = [x for x in free if x != name]
        call = f"{indent}{name} = {names.of_object(node.meta['compiled'], 'compiled')}(given)"
        given = ", ".join(map(names.text, node.args))
        return [f"{indent}given = [{given}]", *_deleted(indent, early), call, *_deleted(indent, free[len(early) :])]
    else:
        args = [*map(names.text, node.args), *(f"{key}={names.text(x)}" for key, x in node.kwargs.items())]
        line = f"{indent}{name} = {names.of_call(node.target)}({', '.join(args)})"
    return [line + (f"; del {', '.join(free)}" if free else "")]


def read_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return what a node reads, the gradients that let it run included."""
    if "taken" in node.meta:
        return [node.meta["taken"][0], *node.meta["guard"]]
    return [*node.all_input_nodes, *node.meta["guard"]]


# --- forward and backward ---------------------------------------------------------------------------------------------


class StepFunctions:
    """The functions of a step.

    Attributes:
        forward: from values of the program's inputs to its results, and behind them what is saved.
        saved: what is saved, by the names of nodes.
        unchecked: places among it of buffers whose values the backward does not depend on (running means): they may
            change before it.
        slots: the numbers of the inputs to which gradients are returned.
        arriving: the numbers of the results whose gradients arrive, with the ``strides`` of each.
        collectives: nodes that begin one, in order.
    """

    def __init__(
        self, step: StepGraph, saved: Sequence[str] | None = None, compiler: Compiler | None = None,
        first: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        """Print a step.

        Args:
            saved: what another step of the same program saves, of which this one is another backward: its forward is
                not made again.
            compiler: compiles operators; None to call them one by one.
            first: the inputs whose gradients are there after the first half of the backward; None for one that is
                not split.
        """
        ends = [*step.grads.values(), *(x for x in step.results if isinstance(x, torch.fx.Node))]
        computed = [n for n in step.graph.nodes if n.op == "call_function"]
        needed = _needed(ends, computed)
        early = overlapped([n for n in computed if n in needed and not n.meta["late"]])
        late = overlapped([n for n in computed if n in needed and n.meta["late"]])
        outside = [*step.given, *early]
        self._kept = _read_of(late, step.grads.values(), outside)
        self._step, self._late, self._compiler = step, late, compiler
        self.arriving = list(step.arriving)
        self.strides = {k: node.meta["val"].stride() for k, node in step.arriving.items()}
        self.n_results = len(step.results)
        if saved is None:
            self.saved = [n.name for n in self._kept]
            self.unchecked = {k for k, n in enumerate(self._kept) if n.meta.get("buffer") == "changing"}
            results = [*step.results, *self._kept]
            order = early if compiler is None else _compiled(early, results, compiler)
            self.forward = printed("forward", step.given, order, results, step.constants)
        else:
            by_name = {n.name: n for n in outside}
            missing = {n.name for n in self._kept} - set(saved)
            assert not missing, f"a backward reads {sorted(missing)}, which the forward does not save"
            unread = {name: step.graph.placeholder(name) for name in saved if name not in by_name}
            self.saved, self._kept = list(saved), [by_name.get(name) or unread[name] for name in saved]
        self._halves: tuple[Sequence[torch.fx.Node], ...] = ()
        self.slots = list(step.grads)
        if first is not None:
            wanted = [k for k in self.slots if k in first]
            self.slots = [*wanted, *(k for k in self.slots if k not in first)]
            self.n_first = len(wanted)
            self._halves = tuple(map(overlapped, in_halves(late, [step.grads[k] for k in wanted])))
            late = [n for half in self._halves for n in half]
        self.collectives = [n for n in [*early, *late] if is_start(n)]

    @cached_property
    def backward(self) -> Printed:
        """The backward: from what is saved and the gradients that arrive, to gradients of the inputs ``slots``."""
        return self._printed("backward", self._given, self._late, self._grads)

    @cached_property
    def inputs(self) -> Printed:
        """The first half: like :attr:`backward`, to the gradients that come first, and behind them what is left."""
        first, _ = self._halves
        return self._printed("inputs", self._given, first, [*self._grads[: self.n_first], *self._between])

    @cached_property
    def weights(self) -> Printed:
        """The second half: from what the first one left, to the other gradients."""
        _, second = self._halves
        return self._printed("weights", self._between, second, self._grads[self.n_first :])

    @property
    def _given(self) -> list[torch.fx.Node]:
        return [*self._kept, *self._step.arriving.values()]

    @property
    def _grads(self) -> list[torch.fx.Node]:
        return [self._step.grads[k] for k in self.slots]

    @cached_property
    def _between(self) -> list[torch.fx.Node]:
        first, second = self._halves
        return _read_of(second, self._grads[self.n_first :], [*self._given, *first])

    def _printed(
        self, name: str, given: Sequence[torch.fx.Node], nodes: Sequence[torch.fx.Node],
        results: Sequence[torch.fx.Node],
    ) -> Printed:  # fmt: skip
        order = nodes if self._compiler is None else _compiled(nodes, results, self._compiler)
        return printed(name, given, order, results, self._step.constants)


def _read_of(
    nodes: Iterable[torch.fx.Node], ends: Iterable[torch.fx.Node], outside: Iterable[torch.fx.Node]
) -> list[torch.fx.Node]:
    """Return what nodes read of others, and what of the ends is not theirs."""
    reads = {x for n in nodes for x in read_by(n)} | {*ends}
    return [n for n in outside if n in reads]


def _needed(ends: Iterable[torch.fx.Node], computed: Collection[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return the nodes that results need, and those that do something of which nobody reads the result."""
    needed: set[torch.fx.Node] = set()
    todo = [*ends, *filter(acts, computed)]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo.extend(read_by(node) if node.op == "call_function" else ())
    return needed


def _compiled(nodes: Sequence[torch.fx.Node], results: Sequence[Any], compiler: Compiler) -> list[torch.fx.Node]:
    """Return the nodes with each run of operators compiled as one call."""
    order: list[torch.fx.Node] = []
    run: list[torch.fx.Node] = []
    kept = {x for x in results if isinstance(x, torch.fx.Node)}
    present = set(nodes)

    def close() -> None:
        if any(map(_is_for_compilers, run)):
            order.extend(_as_one(run, kept, present, compiler))
        else:
            order.extend(run)
        run.clear()

    for node in nodes:
        of_run = _is_for_compilers(node) or (node.target is operator.getitem and node.args[0] in run)
        if not of_run or (run and node.meta["guard"] != run[-1].meta["guard"]):
            close()
        (run if of_run else order).append(node)
    close()
    return order


def _is_for_compilers(node: torch.fx.Node) -> bool:
    """Check whether a compiler may have an operator: on tensors without values some give others than they do."""
    return isinstance(node.target, OpOverload) and not node.target.name().startswith("aten::mkldnn_rnn_layer")


def _as_one(
    run: Sequence[torch.fx.Node], kept: set[torch.fx.Node], present: set[torch.fx.Node], compiler: Compiler
) -> list[torch.fx.Node]:
    """Return a node that calls the compiled graph of a run, and its nodes that others read, which take their value."""
    inside = set(run)
    inputs = list(dict.fromkeys(x for node in run for x in node.all_input_nodes if x not in inside))
    outs = [n for n in run if n in kept or not present.intersection(n.users) <= inside]
    graph = torch.fx.Graph()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    for x in inputs:
        env[x] = graph.placeholder(x.name)
        env[x].meta["val"] = x.meta["val"]
    for node in run:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[x] for x in outs))
    call = run[0].graph.call_function(compile, tuple(inputs))  # type: ignore[arg-type]
    call.meta.update(run[0].meta, val=None, compiled=compiler(torch.fx.GraphModule(torch.nn.Module(), graph)))
    for k, node in enumerate(outs):
        node.meta["taken"] = call, k
    return [call, *outs]
