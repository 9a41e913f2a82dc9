"""A captured graph beside the model itself: the same loss, gradients and buffers, or the module that differs.

Everything behind capture is proved against the graph, so the graph has to be what the model does. Both run once on one
device, in the model's own precision. Random operators draw the same on both sides: the generator is seeded before each
of them. Nothing of the model is changed: gradients go nowhere, and buffers, Python attributes and the states of all
generators are put back.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from autopar.capture import Captured
from autopar.capture.python.guards import is_plain
from autopar.errors import AutoparError, CaptureError
from autopar.graph import Graph, Node, Spec
from autopar.lower.emit import lower
from autopar.lower.program import Program
from autopar.planner.intra_op.single import one_device
from autopar.rules.local import resolve
from autopar.rules.registry import rules_of
from autopar.runtime.reached import reached_whatever_is_drawn
from autopar.torch_private import TorchDispatchMode, pytree

LIMITS = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative difference that rounding explains, by precision."""
LOW = (torch.float32, torch.bfloat16, torch.float16)
"""Precisions that a comparison in double precision replaces."""
FLOPS = {"cpu": 2e10, "cuda": 1e14}
"""Operations of a forward up to which a model is compared unasked: some seconds on the kind of device."""
BYTES = 4 * 2**30
"""Bytes of parameters up to which a model is compared unasked: their gradients are made twice."""
_SEED = 20240229
_AFTER = "_post_accumulate_grad_hooks"


@dataclass(frozen=True)
class Comparison:
    """Worst relative differences between graph and model, with the name of the tensor; all 0 where nothing was run.

    Attributes:
        note: why nothing was compared; empty where it was.
    """

    loss: float = 0.0
    gradient: float = 0.0
    gradient_of: str = ""
    buffer: float = 0.0
    buffer_of: str = ""
    limit: float = 0.0
    note: str = ""

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient, self.buffer)

    @property
    def same(self) -> bool:
        """Whether rounding explains the differences (true where nothing was compared)."""
        return bool(self.note) or self.worst <= self.limit


TWICE = (
    "all outputs and gradients are the same: the batch norm is in a region under activation checkpointing, which eager "
    "mode runs once more in the backward, so that it counts every batch twice; the program counts each once\n"
    "  leave out the checkpoint, and pass recompute= to parallelize for the same saving; or verify_capture=False, to "
    "go on with statistics that count once"
)


@dataclass
class _Ran:
    """What one side gives: outputs, gradients by name, new buffers by name."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def compare_with_eager(
    captured: Captured, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any],
    targets: Sequence[Any] = (), *, bounded: bool = True,
) -> Comparison:  # fmt: skip
    """Run the graph and the model on one batch, and compare loss, gradients and new buffers.

    Args:
        args, kwargs, targets: a batch with values, of the captured shapes.
        bounded: leave out models that would take long; the note says so.

    Raises:
        CaptureError: they differ by more than rounding; it names the first module whose output does.
    """
    note = reason_not_to(captured, model, (args, kwargs, targets), bounded)
    if note:
        return Comparison(note=note)
    side = _Sides(captured, model, args, kwargs, targets)
    try:
        theirs = side.eager()
    except Exception as error:
        return Comparison(
            note=f"the model itself fails on these inputs ({type(error).__name__}: {error})".split("\n")[0]
        )
    mine = side.captured_()
    difference = _difference(captured.graph, mine, theirs)
    if difference.worst <= difference.limit:
        return difference
    if difference.limit > LIMITS["float64"] and _same_in_double(captured, model, args, kwargs, targets):
        return replace(difference, limit=difference.worst)  # rounding alone: it vanishes with the precision
    raise CaptureError(side.explained(difference))


def reason_not_to(captured: Captured, model: torch.nn.Module, batch: Any, bounded: bool, times: int = 1) -> str:
    """Why a model is not run on a batch to compare something; empty if nothing speaks against it.

    Args:
        bounded: what takes long does.
        times: how often as large as what was captured the batch is.
    """
    tensors = [*model.parameters(), *model.buffers(), *(x for x in pytree.tree_leaves(batch) if _is_tensor(x))]
    if any(t.is_meta or type(t) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for t in tensors):
        return "model or inputs have no values"
    if len({t.device for t in tensors}) > 1:
        return "model and inputs are on several devices"
    flops = times * sum(rule.flops_at({}) for rule in rules_of(captured.graph) if rule is not None)
    n_bytes = sum(node.out.n_bytes for _, node in captured.graph.of_kind("param"))
    kind = tensors[0].device.type if tensors else "cpu"
    if bounded and (flops > FLOPS.get(kind, FLOPS["cuda"]) or n_bytes > BYTES):
        return f"it would take long ({flops:.1e} operations in a forward, {n_bytes / 2**30:.1f} GiB of parameters)"
    return ""


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


class _Sides:
    """The two sides of a comparison: how to run them, and what to say where they differ."""

    def __init__(self, captured: Captured, model: Any, args: Any, kwargs: Any, targets: Any) -> None:
        self.captured, self.model = captured, model
        self.args, self.kwargs, self.targets = tuple(args), dict(kwargs), tuple(targets)
        self.loss_fn = captured.example.loss_fn if captured.example is not None else None
        self.named = _named(model, self.loss_fn)
        self.program = _program(captured.graph, next((p.device for p in self.named.values()), torch.device("cpu")))
        self.leaves = [*pytree.tree_leaves(((*self.args, *self.targets), self.kwargs))]

    # -- the model

    def eager(self) -> _Ran:
        with kept(self.model, self.loss_fn), _same_draws(), torch.enable_grad():
            if self.captured.guards.filled:  # the first call fills caches, and later ones read them
                with torch.no_grad():
                    self._call(self.leaves)
                self._reset_buffers()
            inputs = [x.detach().clone().requires_grad_(x.requires_grad) if _is_tensor(x) else x for x in self.leaves]
            outputs = pytree.tree_leaves(self._call(inputs))
            gradients = self._gradients(outputs, self.named, dict(zip(self._input_names(), inputs, strict=True)))
            now = self._now()
            names = [node.target for _, node in self.captured.graph.of_kind("buffer")]
            buffers = {name: now[name].detach().clone() for name in names if name in now}
        return _Ran([x.detach() if _is_tensor(x) else x for x in outputs], gradients, buffers)

    def _call(self, leaves: Sequence[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(list(leaves), self.captured.in_spec)
        if self.loss_fn is None:
            return self.model(*args, **kwargs)
        n = len(self.args)
        return self.loss_fn(self.model(*args[:n], **kwargs), *args[n:])

    def _now(self) -> dict[str, torch.Tensor]:
        return _named(self.model, self.loss_fn)

    def _reset_buffers(self) -> None:
        for name, value in self._now().items():
            before = self.buffers_before.get(name)
            if before is not None:
                with torch.no_grad():
                    value.copy_(before)

    @property
    def buffers_before(self) -> dict[str, torch.Tensor]:
        return {n: t for n, t in self.named.items() if not isinstance(t, torch.nn.Parameter)}

    def _input_names(self) -> list[str]:
        nodes = self.captured.graph.nodes
        return [f"input '{nodes[n].target}'" if n is not None else "" for n in self.captured.inputs]

    # -- the graph

    def captured_(self, keep: list[torch.Tensor] | None = None) -> _Ran:
        graph, values, named, buffers_before = self.captured.graph, [], {}, {}
        inputs = {}
        for number, leaf in zip(self.captured.inputs, self.leaves, strict=True):
            if number is not None:
                inputs[graph.nodes[number].target] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        for slot in self.program.slots:
            if slot.kind == "input":
                values.append(inputs[slot.name])
            elif slot.kind == "seed":
                values.append(torch.zeros((), dtype=torch.int64))
            else:
                value = self.captured.constants.get(slot.name, self.named.get(slot.name))
                assert value is not None, slot.name
                if slot.kind == "param":
                    value = named[slot.name] = value.detach().requires_grad_(slot.needs_grad)
                else:  # some operators write to it
                    value = buffers_before[slot.name] = value.detach().clone()
                values.append(value)
        with _same_draws(), torch.enable_grad(), generators_kept():
            if keep is None:
                flat = self.program.runnable(*values)
            else:
                flat = _Keeping(self.program.module, keep).run(*values)
            count = len(self.program.outputs)
            names = {f"input '{k}'": x for k, x in inputs.items()}
            gradients = self._gradients(flat[:count], named, names)
        buffers = buffers_before | {n: x.detach() for n, x in zip(self.program.updates, flat[count:], strict=True)}
        return _Ran([x.detach() if _is_tensor(x) else x for x in flat[:count]], gradients, buffers)

    # -- both

    def _gradients(self, outputs: Sequence[Any], params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        """Gradients of the loss, or of a fixed weighting of all outputs where there is none."""
        graph = self.captured.graph
        names = [node.target for _, node in graph.of_kind("param") if node.needs_grad]
        wanted = {n: params[n] for n in names if n in params}
        wanted |= {n: x for n, x in inputs.items() if _is_tensor(x) and x.requires_grad}
        if graph.loss is not None:
            roots = [outputs[graph.loss]]
        else:
            roots = [(o * _weights(o)).sum() for o in outputs if _is_tensor(o) and o.is_floating_point()]
        roots = [r for r in roots if r.requires_grad]
        if not roots or not wanted:
            return {}
        before = {n: x.grad for n, x in wanted.items()}
        try:  # not autograd.grad: a backward of the model's own may call backward inside
            for x in wanted.values():
                x.grad = None
            sum(roots[1:], roots[0]).backward()
            return {n: x.grad.detach() for n, x in wanted.items() if x.grad is not None}
        finally:
            for n, x in wanted.items():
                x.grad = before[n]

    # -- where they differ

    def explained(self, difference: Comparison) -> str:
        compared = (
            ("the loss", difference.loss),
            (f"the gradient of {difference.gradient_of}", difference.gradient),
            (f"buffer {difference.buffer_of}", difference.buffer),
        )
        what = [f"{name} by {off:.1e}" for name, off in compared if off > difference.limit]
        return (
            f"the captured graph of {type(self.model).__name__} is not what the model does in eager mode: on the same "
            f"inputs they differ in {', '.join(what)} (relative; rounding explains {difference.limit:.0e})\n  "
            + (
                TWICE
                if self._counts_twice(difference)
                else f"{self._first(difference)}\n  write that part in another way, and please report it; "
                "verify_capture=False goes on without a check"
            )
        )

    def _counts_twice(self, difference: Comparison) -> bool:
        """Whether only statistics of a batch norm differ that eager mode runs again in the backward."""
        again = any(n.again >= 0 and "batch_norm" in str(n.target) for n in self.captured.graph.nodes)
        statistics = difference.buffer_of.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
        return again and statistics and max(difference.loss, difference.gradient) <= difference.limit

    def _first(self, difference: Comparison) -> str:
        values: list[torch.Tensor] = []
        self.captured_(values)
        module_outputs: list[tuple[str, str, list[torch.Tensor]]] = []
        hooks = []

        def note(path: str, kind: str) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                tensors = [x.detach().clone() for x in pytree.tree_leaves(output) if _is_tensor(x)]
                module_outputs.append((path, kind, tensors))

            return hook

        for path, module in self.model.named_modules():
            hooks.append(module.register_forward_hook(note(path, type(module).__name__)))
        try:
            self.eager()
        finally:
            for hook in hooks:
                hook.remove()
        by_shape: dict[Any, list[torch.Tensor]] = {}
        for value in values:
            by_shape.setdefault(tuple(value.shape), []).append(value)
        for path, kind, tensors in module_outputs:
            for x in tensors:
                if not any(_relative(v, x) <= difference.limit for v in by_shape.get(tuple(x.shape), ())):
                    return f"the first module whose output differs is '{path or '<model>'}' ({kind})"
        if difference.loss > difference.limit:
            return "the output of every module is the same; what is computed after them differs"
        return self._first_gradient(difference)

    def _first_gradient(self, difference: Comparison) -> str:
        mine, theirs = self.captured_().gradients, self.eager().gradients
        users = self.captured.graph.consumers
        order = {}
        for i, node in enumerate(self.captured.graph.nodes):
            if node.kind == "param":
                order[node.target] = max((u for (ref, us) in users.items() if ref.node == i for u, _ in us), default=0)
        largest = max((g.abs().max().item() for g in theirs.values() if g.numel()), default=1.0)
        wrong = [n for n in theirs | mine if _off(mine.get(n), theirs.get(n), largest) > difference.limit]
        if not wrong:
            return "all outputs and gradients are the same; buffers differ"
        last = max(wrong, key=lambda n: order.get(n, -1))
        module = last.rpartition(".")[0] if last in order else ""
        return (
            f"all outputs are the same; going backward, the first gradient that differs is that of {last}, in module "
            f"'{module or '<model>'}': a custom backward, a hook or a detached tensor after it is not in the graph"
        )


def _named(model: torch.nn.Module, loss_fn: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the names that a graph has for them."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    if isinstance(loss_fn, torch.nn.Module):
        for name, tensor in (*loss_fn.named_parameters(), *loss_fn.named_buffers()):
            named.setdefault(f"loss_fn.{name}", tensor)
    return named


def _program(graph: Graph, device: torch.device) -> Program:
    """The program of one device, in which random operators are torch's own."""
    program = lower(graph, one_device(graph), device)
    for fx in program.module.graph.nodes:
        if fx.op == "call_function" and "seed" in fx.kwargs and "shards" in fx.kwargs:
            node = graph.nodes[graph.index[fx.meta["autopar"]["node"]]]
            eager_kwargs = {k: v for k, v in fx.kwargs.items() if k not in ("cut", "seed", "site", "shape", "shards")}
            if not node.refs and "size" not in eager_kwargs:
                eager_kwargs["device"] = device
            fx.target, fx.kwargs = resolve(node.target), eager_kwargs
    program.module.recompile()
    return program


class _Keeping(torch.fx.Interpreter):
    """Runs a program and keeps every tensor."""

    def __init__(self, module: torch.fx.GraphModule, into: list[torch.Tensor]) -> None:
        super().__init__(module)
        self.into = into

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        self.into.extend(x.detach() for x in pytree.tree_leaves(value) if _is_tensor(x))
        return value


# --- the same random numbers, and everything put back ----------------------------------------------------------------


class _Seeded(TorchDispatchMode):
    """Seeds the generator before each random operator: operators of one kind and shape draw the same numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(_SEED)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    with generators_kept(), _Seeded():
        yield


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """The states of all generators are put back."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None and states[1] is not None:
                numpy.random.set_state(states[1])


@contextlib.contextmanager
def kept(*roots: Any) -> Iterator[None]:
    """Buffers, hooks of parameters and Python attributes of modules are put back."""
    modules = [m for root in roots if isinstance(root, torch.nn.Module) for m in root.modules()]
    attributes = []
    for module in modules:
        entries = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        inside = {k: copy.copy(v) for k, v in entries.items() if isinstance(v, (dict, list, set)) and not is_plain(v)}
        attributes.append((module, entries, inside, dict(module._buffers)))
    values = [(b, b.detach().clone()) for *_, buffers in attributes for b in buffers.values() if b is not None]
    params = [p for m in modules for p in m._parameters.values() if p is not None]
    hooked: list[Any] = [hooks for p in params for hooks in (p._backward_hooks, getattr(p, _AFTER, None)) if hooks]
    removed = [dict(hooks) for hooks in hooked]
    for hooks in hooked:  # they belong to the reduced gradient, not to this comparison
        hooks.clear()
    try:
        yield
    finally:
        for hooks, hooks_before in zip(hooked, removed, strict=True):
            hooks.update(hooks_before)
        for module, entries, inside, buffers in attributes:
            new = vars(module).keys() - entries.keys() - {"_parameters", "_buffers", "_modules"}
            for name in new:
                del module.__dict__[name]
            module.__dict__.update(entries)
            for name, before in inside.items():
                value = entries[name]
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, before in values:
                if not _same_bits(buffer, before):
                    buffer.copy_(before)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.detach(), b)


# --- numbers ---------------------------------------------------------------------------------------------------------


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Fixed weights of an output's elements, so that none counts like another."""
    at = torch.arange(x.numel(), device=x.device, dtype=torch.float32)
    return (1 + 0.5 * torch.sin(at)).to(x.dtype).reshape(x.shape)


def _relative(a: torch.Tensor, b: torch.Tensor, largest: float = 0.0) -> float:
    """``max|a - b|`` in units of the largest value; equal infinities and NaNs are no difference."""
    if a.shape != b.shape:
        return float("inf")
    if not b.numel():
        return 0.0
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(kind), b.to(kind)
    same = (x == y) | (x.isnan() & y.isnan())
    if same.all():
        return 0.0
    off = torch.where(same, torch.zeros_like(x), x - y).abs().max().item()
    finite = y[y.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    relative = off / (scale + 1e-3 * largest + 1e-30)
    return relative if relative == relative else float("inf")


def _off(a: torch.Tensor | None, b: torch.Tensor | None, largest: float) -> float:
    """The same where a gradient may be missing, which is zero."""
    if a is None or b is None:
        some = b if a is None else a
        return 0.0 if some is None else _relative(some, torch.zeros_like(some), largest)
    return _relative(a, b, largest)


def _difference(graph: Graph, mine: _Ran, theirs: _Ran) -> Comparison:
    kinds = {spec.dtype for node in graph.nodes for spec in node.outs if spec is not None}
    limit = max([LIMITS[k] for k in kinds if k in LIMITS], default=LIMITS["float64"])
    loss = 0.0 if len(mine.outputs) == len(theirs.outputs) else float("inf")
    for a, b in zip(mine.outputs, theirs.outputs, strict=False):
        if _is_tensor(a) and _is_tensor(b):
            loss = max(loss, _relative(a, b, 1e3 if b.ndim == 0 else 0.0))
        elif _is_tensor(a) != _is_tensor(b):
            loss = float("inf")
    largest = max((g.abs().max().item() for g in theirs.gradients.values() if g.numel()), default=1.0)
    gradient, gradient_of = 0.0, ""
    params = {node.target for _, node in graph.of_kind("param")} - reached_whatever_is_drawn(graph)
    for name in mine.gradients | theirs.gradients:
        off = _off(mine.gradients.get(name), theirs.gradients.get(name), largest)
        if name in params and (name in mine.gradients) != (name in theirs.gradients):
            off = float("inf")  # an optimizer passes over a parameter that hangs on a branch, or moves it
        gradient, gradient_of = max((gradient, gradient_of), (off, name))
    buffer, buffer_of = 0.0, ""
    for name, b in theirs.buffers.items():
        off = _relative(mine.buffers[name], b)
        buffer, buffer_of = max((buffer, buffer_of), (off, name))
    return Comparison(loss, gradient, gradient_of if gradient else "", buffer, buffer_of if buffer else "", limit)


# --- double precision ------------------------------------------------------------------------------------------------


def promoted(captured: Captured) -> Captured:
    """The same computation in float64 throughout, casts to less included, so that rounding does not blur a check."""
    low = {str(d).removeprefix("torch.") for d in LOW}

    def value(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(value(v) for v in x)
        return torch.float64 if x in LOW else x

    def spec(s: Spec | None) -> Spec | None:
        return s._replace(dtype="float64") if s is not None and s.dtype in low else s

    def node(n: Node) -> Node:
        return replace(
            n, args=value(n.args), kwargs={k: value(v) for k, v in n.kwargs.items()}, outs=tuple(map(spec, n.outs))
        )

    graph = replace(captured.graph, nodes=tuple(map(node, captured.graph.nodes)))
    return replace(captured, graph=graph)


def doubled(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in float64 of what had less precision."""
    return {
        k: v.detach().to(torch.float64 if v.dtype in LOW else v.dtype).clone().requires_grad_(v.requires_grad)
        for k, v in tensors.items()
    }


def _same_in_double(captured: Captured, model: Any, args: Any, kwargs: Any, targets: Any) -> bool:
    """Whether a copy of the model in double precision agrees with the graph in double precision."""

    def double(x: Any) -> Any:
        if not _is_tensor(x) or x.dtype not in LOW:
            return x
        return x.detach().double().requires_grad_(x.requires_grad)

    try:
        in_double = copy.deepcopy(model).double()
        args, kwargs, targets = pytree.tree_map(double, (tuple(args), dict(kwargs), tuple(targets)))
        wide = promoted(replace(captured, constants=doubled(captured.constants)))
        side = _Sides(wide, in_double, args, kwargs, targets)
        difference = _difference(wide.graph, side.captured_(), side.eager())
    except (AutoparError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return difference.worst <= 1e-6  # the model may still cast to float32 in places


__all__ = [
    "LIMITS", "LOW", "Comparison", "compare_with_eager", "doubled", "generators_kept", "kept", "promoted",
    "reason_not_to",
]  # fmt: skip
