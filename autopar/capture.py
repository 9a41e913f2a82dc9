"""Capture: a model and example inputs become a :class:`~autopar.graph.Graph`.

``torch.export`` (pre-dispatch ATen, non-strict) does the tracing. What follows is a list of small rewrites that leave
one spelling for each thing, so that rules see few operators:

* views are ``reshape`` with the full shape, transposes are ``permute``, factories are ``full`` and ``arange``;
* in-place operators become functional; buffers that the forward changes are listed in ``Graph.updates``;
* casts that change nothing, ``contiguous``, ``clone``, ``alias``, inactive dropout and metadata asserts vanish;
* ``no_grad`` regions are inlined with their inputs detached;
* tied parameters are one node with their other names in ``Graph.tied``.

While tracing, Python branches on tensors that are the same for every input (position ids, say) are answered by
evaluating them, so libraries take the same path as in eager mode; a branch on data is an error that names the line.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError
from autopar.graph import Graph, Node, Ref, Spec, map_refs, refs_in
from autopar.normalize import DROPPED, FUNCTIONAL, normalize


@dataclass(frozen=True)
class Captured:
    """A graph with what is needed to call it like the model.

    Attributes:
        in_spec: pytree of ``(args, kwargs)``; its leaves are the graph's inputs and the values in ``literals``.
        literals: leaves that are no tensors, by position; they are part of what was captured.
        inputs: for every leaf, the graph node that holds it (None for a literal or an unused input).
        out_spec: pytree of the model's output, whose leaves are ``graph.outputs``.
        constants: tensors that the model's code makes and that are no registered buffers, by buffer name.
    """

    graph: Graph
    in_spec: pytree.TreeSpec
    literals: Mapping[int, Any]
    inputs: tuple[int | None, ...]
    out_spec: pytree.TreeSpec
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)


class WithLoss(torch.nn.Module):
    """``loss_fn(model(*args, **kwargs), *targets)`` as a module: the targets follow the model's positional args."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor], n_args: int) -> None:
        super().__init__()
        self.model, self.loss_fn, self.n_args = model, loss_fn, n_args

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss_fn(self.model(*args[: self.n_args], **kwargs), *args[self.n_args :])


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
) -> Captured:
    """Capture ``model(*args, **kwargs)``, or ``loss_fn(model(...), *targets)``, as a graph.

    Args:
        model: any module; its parameters may be on the meta device. Its training mode is kept.
        args, kwargs: example inputs with global shapes: tensors, nested containers, None, numbers.
        loss_fn: called with the model's output and the targets; with it the graph's output is the loss.

    Raises:
        CaptureError: the model branches on tensor values, has data-dependent shapes, or uses what cannot be traced;
            the message names the source line and what to change.
    """
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"expected a torch.nn.Module, got {type(model).__name__}; pass the model object itself")
    kwargs = dict(kwargs or {})
    prefix = ""
    module: torch.nn.Module = model
    if loss_fn is not None:
        module, args, prefix = WithLoss(model, loss_fn, len(args)), (*args, *targets), "model."
    elif targets:
        raise CaptureError(f"{len(targets)} targets were given without a loss_fn; pass loss_fn(output, *targets)")
    args, kwargs = _without_aliases((tuple(args), kwargs))
    exported = _export(module, args, kwargs)
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    builder = _Builder(module, exported, prefix)
    graph, user_inputs = builder.build()
    literals = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    if len(user_inputs) != len(leaves):
        raise CaptureError(f"the model takes {len(leaves)} input leaves, the captured graph {len(user_inputs)}")
    inputs = tuple(None if i in literals else user_inputs[i] for i in range(len(leaves)))
    return Captured(graph, in_spec, literals, inputs, exported.call_spec.out_spec, builder.constants)


def _without_aliases(inputs: Any) -> Any:
    """Copies of tensors that stand in several places: else the graph would read one place for all."""
    seen: set[int] = set()

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in seen:
                return leaf.clone()
            seen.add(id(leaf))
        return leaf

    return pytree.tree_map(fresh, inputs)


# --- tracing ---------------------------------------------------------------------------------------------------------


def _constant(tensor: Any, read: Callable[[torch.Tensor], Any] = lambda t: t) -> Any:
    """``read(value)`` of a traced tensor that depends on no input, parameter or buffer; None for any other."""
    proxy_mode = get_proxy_mode()
    if proxy_mode is None or not isinstance(tensor, torch.Tensor):
        return None
    slot = proxy_mode.tracer.tensor_tracker.get(tensor)
    if slot is None:
        return None
    values: dict[torch.fx.Node, Any] = {}

    def value(node: torch.fx.Node) -> Any:
        if node not in values:
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                raise LookupError
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise LookupError
            a = torch.fx.node.map_arg(node.args, value)
            k = dict(torch.fx.node.map_arg(node.kwargs, value))
            if "device" in k:
                k["device"] = torch.device("cpu")
            values[node] = node.target(*a, **k)
        return values[node]

    try:
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
        from torch.utils._python_dispatch import _disable_current_modes

        with torch._C.DisableTorchFunction(), _disable_current_modes(), disable_proxy_modes_tracing():
            with unset_fake_temporarily():
                return read(value(slot.proxy.node))
    except LookupError:
        return None


class _AnswerConstants(TorchFunctionMode):
    """Answers ``bool(t)``, ``t.item()``, ``int(t)`` for tensors that do not depend on data."""

    ASKED = (
        torch.Tensor.__bool__,
        torch.Tensor.item,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.tolist,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ASKED and args:
            known = _constant(args[0], lambda t: func(t, *args[1:]))
            if known is not None:
                return known
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _like_eager() -> Iterator[None]:
    """Let libraries take their eager path: no 'we are exporting' flags, constants can be asked for their value."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.compiler, "is_exporting", lambda: False))
        stack.enter_context(mock.patch.object(torch.compiler, "is_compiling", lambda: False))
        hf = sys.modules.get("transformers.utils.import_utils")
        if hf is not None and hasattr(hf, "is_fake_tensor"):
            is_fake = hf.is_fake_tensor
            stack.enter_context(mock.patch.object(hf, "is_fake_tensor", lambda x: is_fake(x) and _constant(x) is None))
        stack.enter_context(_AnswerConstants())
        yield


def _export(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _like_eager(), _quiet():
                return torch.export.export(module, args, kwargs, strict=False)
        except Exception as error:
            raise CaptureError(_explain(error, module)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs and prints about a failed export: the error says it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    said = io.StringIO()
    failed = True
    try:
        with contextlib.redirect_stderr(said):
            yield
        failed = False
    finally:
        logging.disable(before)
        if not failed and said.getvalue():  # of the model itself
            sys.stderr.write(said.getvalue())


_STDLIB = sysconfig.get_path("stdlib")


def _explain(error: Exception, module: torch.nn.Module) -> str:
    """One message for what torch.export raised: what, where in the user's code, what to do."""
    where = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        own = file.startswith(_STDLIB) and "site-packages" not in file
        if not own and "/torch/" not in file and not file.startswith("<") and "/autopar/" not in file:
            where = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    kind = type(error).__name__
    text = str(error).strip().splitlines()
    first = next((t.strip() for t in text if t.strip()), kind)
    if "DataDependent" in kind or "data-dependent" in str(error).lower() or "data dependent" in str(error).lower():
        what = "its Python code branches on the value of a tensor, or a shape depends on one"
        do = "compute the branch with torch.where, or from sizes or configuration, or move it out of forward()"
    elif (isinstance(error, TypeError) and "forward" in str(error)) or (
        "argument" in first and isinstance(error, TypeError)
    ):
        what = f"the example inputs do not match its forward(): {first}"
        do = "pass the inputs that you would call the model with"
    elif isinstance(error, (RuntimeError, ValueError, IndexError)) and "Dynamo" not in kind:
        what = f"running it on the example inputs failed: {first}"
        do = "check that model(*example_inputs) runs, and that no operation leaves torch"
    else:
        what = f"{kind}: {first}"
        do = "replace the construct that torch.export cannot trace"
    return f"cannot capture {type(module).__name__}: {what}" + (f"\n  at {where}" if where else "") + f"\n  {do}"


# --- from the exported program to a Graph -----------------------------------------------------------------------------


class _Builder:
    """Walks the exported FX graph once, in order, rewriting as it goes."""

    def __init__(self, module: torch.nn.Module, exported: Any, prefix: str) -> None:
        self.exported, self.prefix = exported, prefix
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        self.nodes: list[Node] = []
        self.names: set[str] = set()
        self.value: dict[torch.fx.Node, Any] = {}
        self.base: dict[Ref, tuple[str, Ref, tuple[Any, ...]]] = {}
        self.now: dict[Ref, Ref] = {}
        self.cse: dict[Any, int] = {}
        self.constants: dict[str, torch.Tensor] = {}

    # -- placeholders

    def build(self) -> tuple[Graph, list[Any]]:
        signature = self.exported.graph_signature
        specs = {s.arg.name: s for s in signature.input_specs}
        by_storage: dict[Any, int] = {}
        tied: dict[str, str] = {}
        user: list[Any] = []
        for fx in self.exported.graph.nodes:
            if fx.op != "placeholder":
                continue
            spec = specs[fx.name]
            kind = spec.kind.name
            val = fx.meta.get("val")
            if kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
                target = spec.target.removeprefix(self.prefix)
                tensor = self.parameters.get(spec.target) if kind == "PARAMETER" else self.buffers.get(spec.target)
                if tensor is None:
                    tensor = self.exported.constants.get(spec.target)
                    if tensor is None:
                        tensor = self.exported.state_dict[spec.target]
                    self.constants[target] = tensor
                key = id(tensor)
                if key in by_storage:
                    tied[target] = self.nodes[by_storage[key]].target
                    self.value[fx] = Ref(by_storage[key])
                    continue
                grads = kind == "PARAMETER" and bool(tensor.requires_grad)
                self.value[fx] = self._add(
                    Node(target, "param" if kind == "PARAMETER" else "buffer", target, outs=(_spec(val),),
                         needs_grad=grads, hot=kind == "PARAMETER", module=target.rpartition(".")[0])
                )  # fmt: skip
                by_storage[key] = self.value[fx].node
            elif kind == "USER_INPUT":
                if isinstance(val, torch.Tensor):
                    name = fx.name
                    self.value[fx] = self._add(Node(name, "input", name, outs=(_spec(val),)))
                    user.append(self.value[fx].node)
                else:
                    self.value[fx] = val
                    user.append(None)
            else:
                raise CaptureError(f"the model has an input of kind {kind} ({fx.name}), which cannot be planned")
        # every name of a tied parameter, also those that torch.export left out
        for name, tensor in self.parameters.items():
            node = by_storage.get(id(tensor))
            short = name.removeprefix(self.prefix)
            if node is not None and self.nodes[node].target != short:
                tied.setdefault(short, self.nodes[node].target)
        self._walk(self.exported.graph_module)
        outputs, loss = self._outputs()
        graph = Graph(tuple(self.nodes), outputs, loss, tied, self._updates())
        return _without_dead(graph, user)

    def _add(self, node: Node) -> Ref:
        name = node.name
        count = 1
        while name in self.names:
            name, count = f"{node.name}_{count}", count + 1
        self.names.add(name)
        if name != node.name:
            node = Node(**{**node.__dict__, "name": name})
        self.nodes.append(node)
        return Ref(len(self.nodes) - 1)

    # -- operators

    def _walk(self, gm: torch.fx.GraphModule, no_grad: bool = False) -> Any:
        for fx in gm.graph.nodes:
            if fx.op == "placeholder":
                continue
            if fx.op == "output":
                return torch.fx.node.map_arg(fx.args[0], self._look)
            if fx.op == "get_attr":
                attr = _get(gm, str(fx.target))
                if isinstance(attr, torch.Tensor):
                    name = f"const.{fx.target}"
                    self.constants[name] = attr
                    self.value[fx] = self._add(Node(name, "buffer", name, outs=(_spec(attr),)))
                else:
                    self.value[fx] = attr
                continue
            self._operator(fx, gm, no_grad)
        return None

    def _look(self, fx: torch.fx.Node) -> Any:
        return self._current(self.value[fx])

    def _current(self, value: Any) -> Any:
        while isinstance(value, Ref) and value in self.now:
            value = self.now[value]
        return value

    def _operator(self, fx: torch.fx.Node, gm: torch.fx.GraphModule, no_grad: bool) -> None:
        target = fx.target
        if target is operator.getitem:
            container = self.value[fx.args[0]]  # type: ignore[index]
            item = container[fx.args[1]]  # type: ignore[index]
            self.value[fx] = item
            return
        name = str(target)
        if "wrap_with_set_grad_enabled" in name:
            self._region(fx, bool(fx.args[0]))
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(
                f"cannot capture '{name}' in '{_module(fx)}'" + _at(fx) + "\n  higher-order operators "
                "(control flow, autocast regions) cannot be planned; write that part with plain tensor operations"
            )
        args = torch.fx.node.map_arg(fx.args, self._look)
        kwargs = dict(torch.fx.node.map_arg(fx.kwargs, self._look))
        if name in DROPPED:
            self.value[fx] = args[0] if args and not name.startswith("aten._assert") else None
            return
        if name == "aten.broadcast_tensors.default":
            self.value[fx] = [
                self._emit_form(
                    fx,
                    normalize("aten.expand.default", (v, list(o.shape)), {}, (_spec(o),), self._spec_of),
                    v,
                    o,
                    no_grad,
                )
                for v, o in zip(list(args[0]), fx.meta["val"], strict=True)  # type: ignore[arg-type]
            ]
            return
        shapes = [n for v in _flat(fx.meta.get("val")) if isinstance(v, torch.Tensor) for n in v.shape]
        if any(
            isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool))
            for v in (*pytree.tree_leaves((args, kwargs)), *shapes)
        ):
            raise CaptureError(
                f"'{name}' in '{_module(fx)}' has a size that depends on data" + _at(fx) + "\n  use fixed sizes: "
                "a mask or torch.where instead of selecting"
            )
        self.value[fx] = self._emit(fx, name, args, kwargs, fx.meta.get("val"), no_grad)

    def _emit(self, fx: torch.fx.Node, name: str, args: Any, kwargs: Any, val: Any, no_grad: bool) -> Any:
        mutated: Ref | None = None
        if _is_inplace(fx.target) and name in FUNCTIONAL:
            mutated = args[0]
            name = FUNCTIONAL[name]
        elif _is_inplace(fx.target):
            raise CaptureError(f"in-place '{name}' in '{_module(fx)}'" + _at(fx) + "\n  write it out of place")
        outs = tuple(_spec(v) if isinstance(v, torch.Tensor) else None for v in _flat(val))
        form = normalize(name, args, kwargs, outs, self._spec_of)
        if form is None:  # nothing happens: the result is the first argument
            result: Any = args[0]
        else:
            target, args, kwargs = form
            result = self._op(fx, target, args, kwargs, outs, no_grad)
        if mutated is not None:
            self._write_back(fx, mutated, result)
        elif isinstance(result, Ref) and isinstance(fx.args[0] if fx.args else None, torch.fx.Node):
            if name in _VIEW_WRITES and isinstance(args[0], Ref):
                self.base[result] = (name, args[0], tuple(args[1:]))
        return result

    def _emit_form(self, fx: torch.fx.Node, form: Any, same: Any, val: Any, no_grad: bool) -> Any:
        if form is None:
            return same
        target, args, kwargs = form
        return self._op(fx, target, args, kwargs, (_spec(val),), no_grad)

    def _op(self, fx: torch.fx.Node, target: str, args: Any, kwargs: Any, outs: Any, no_grad: bool) -> Any:
        refs = [*refs_in(args), *refs_in(kwargs)]
        hot = any(self.nodes[r.node].hot for r in refs)
        grads = (
            not no_grad
            and target != "aten.detach.default"
            and any(self.nodes[r.node].needs_grad and self._spec_of(r).is_float for r in refs)
        )
        floats = any(o is not None and o.is_float for o in outs)
        key = None
        if not hot and not _is_random(target):
            key = (target, repr(args), repr(sorted(kwargs.items())), outs)
            if key in self.cse:
                number = self.cse[key]
                return Ref(number) if len(outs) == 1 else [Ref(number, i) for i in range(len(outs))]
        ref = self._add(
            Node(fx.name, "op", target, tuple(args), dict(kwargs), outs, _module(fx).removeprefix(self.prefix),
                 _source(fx), grads and floats, hot)
        )  # fmt: skip
        if key is not None:
            self.cse[key] = ref.node
        if len(outs) == 1 and (_gives_one(target) or not isinstance(fx.meta.get("val"), (tuple, list))):
            return ref
        return [Ref(ref.node, i) for i in range(len(outs))]

    def _region(self, fx: torch.fx.Node, enabled: bool) -> None:
        body = self.value[fx.args[1]]  # type: ignore[index]
        inputs = [self._look(a) if isinstance(a, torch.fx.Node) else a for a in fx.args[2:]]
        if not enabled:
            inputs = [
                self._op(fx, "aten.detach.default", (v,), {}, (self._spec_of(v),), True)
                if isinstance(v, Ref) and self.nodes[v.node].needs_grad else v
                for v in inputs
            ]  # fmt: skip
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for placeholder, v in zip(placeholders, inputs, strict=True):
            self.value[placeholder] = v
        self.value[fx] = self._walk(body, not enabled)

    # -- writes

    def _write_back(self, fx: torch.fx.Node, old: Any, new: Any) -> None:
        """Make ``new`` the current value of ``old``, and of every tensor that ``old`` is a view of."""
        if not isinstance(old, Ref) or not isinstance(new, Ref):
            return
        self.now[old] = new
        if old not in self.base:
            return
        op, base, rest = self.base[old]
        spec = self._spec_of(base)
        base = self._current(base)
        if op == "aten.slice.Tensor":
            dim = rest[0] if rest else 0
            full: tuple[Any, ...] = (base, new, dim, *rest[1:])
            updated = self._op(fx, "aten.slice_scatter.default", full, {}, (spec,), False)
        elif op == "aten.select.int":
            updated = self._op(fx, "aten.select_scatter.default", (base, new, *rest), {}, (spec,), False)
        else:
            raise CaptureError(
                f"in-place write through '{op}' in '{_module(fx)}'" + _at(fx) + "\n  write it out of place"
            )
        original = self.base[old][1]
        self._write_back(fx, original, updated)

    def _updates(self) -> dict[str, Ref]:
        return {
            self.nodes[old.node].target: self._current(old) for old in self.now if self.nodes[old.node].kind == "buffer"
        }

    def _outputs(self) -> tuple[tuple[Any, ...], int | None]:
        names = [
            s.arg for s in self.exported.graph_signature.output_specs if s.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")
        ]
        fx_out = next(n for n in self.exported.graph.nodes if n.op == "output")
        flat = list(fx_out.args[0])[-len(names) :] if names else []
        outputs = tuple(self._look(v) if isinstance(v, torch.fx.Node) else v for v in flat)
        loss = None
        for i, out in enumerate(outputs):
            if isinstance(out, Ref) and self.nodes[out.node].needs_grad and self._spec_of(out).shape == ():
                loss = i
                break
        return outputs, loss

    def _spec_of(self, ref: Ref) -> Spec:
        spec = self.nodes[ref.node].outs[ref.out]
        assert spec is not None
        return spec


_VIEW_WRITES = frozenset(
    {"aten.slice.Tensor", "aten.select.int", "aten.view.default", "aten.transpose.int", "aten.permute.default"}
)


def _gives_one(target: str) -> bool:
    """Operators that always give one tensor, also where they stand for one that gave several."""
    return target in ("aten.expand.default", "aten.detach.default")


def _flat(val: Any) -> list[Any]:
    return list(val) if isinstance(val, (tuple, list)) else [val]


def _spec(val: Any) -> Spec:
    return Spec(tuple(int(n) for n in val.shape), str(val.dtype).removeprefix("torch."))


def _is_inplace(target: Any) -> bool:
    name = target._schema.name.split("::")[-1]
    return name.endswith("_") and not name.endswith("__")


def _is_random(target: str) -> bool:
    return any(word in target for word in ("dropout", "bernoulli", "rand", "normal"))


def _module(fx: torch.fx.Node) -> str:
    stack = fx.meta.get("nn_module_stack") or {}
    last = list(stack.values())[-1] if stack else ("", "")
    path = last[0]
    return path.replace("L['self'].", "").replace("L['self']", "")


def _source(fx: torch.fx.Node) -> str:
    """``file.py:12`` of the innermost line outside torch."""
    trace = fx.meta.get("stack_trace") or ""
    found = ""
    for text in trace.splitlines():
        text = text.strip()
        if text.startswith("File ") and "/torch/" not in text:
            parts = text.split('"')
            number = text.split(", line ")[-1].split(",")[0]
            found = f"{parts[1].rsplit('/', 1)[-1]}:{number}"
    return found


def _at(fx: torch.fx.Node) -> str:
    source = _source(fx)
    return f" at {source}" if source else ""


def _get(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _without_dead(graph: Graph, user: list[Any]) -> tuple[Graph, list[Any]]:
    """Drop operators whose result nobody reads. Parameters, buffers and inputs stay."""
    alive = {r.node for r in refs_in(graph.outputs)} | {r.node for r in graph.updates.values()}
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        if node.kind != "op" or _has_effect(node.target):
            alive.add(i)
        if i in alive:
            alive.update(r.node for r in node.refs)
    renumber = {old: new for new, old in enumerate(i for i in range(len(graph.nodes)) if i in alive)}

    def move(value: Any) -> Any:
        return map_refs(value, lambda r: Ref(renumber[r.node], r.out))

    nodes = tuple(
        Node(**{**_fields(node), "args": move(node.args), "kwargs": move(node.kwargs)})
        for i, node in enumerate(graph.nodes)
        if i in renumber
    )
    updates = {name: move(ref) for name, ref in graph.updates.items()}
    moved = [None if n is None else renumber[n] for n in user]
    return Graph(nodes, move(graph.outputs), graph.loss, graph.tied, updates), moved


def _fields(node: Node) -> dict[str, Any]:
    return {name: getattr(node, name) for name in Node.__dataclass_fields__}


def _has_effect(target: str) -> bool:
    """Operators that write to their inputs though their schema does not say so."""
    return target == "aten.batch_norm.default"
