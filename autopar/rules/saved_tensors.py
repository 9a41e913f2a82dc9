"""The tensors that autograd saves of one call, and the aliasing of its results: found by calling the operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.rules.axis_options import Option
from autopar.rules.function import PREFIX
from autopar.rules.kernels import OF_GPU, as_on_gpu
from autopar.rules.local_calls import LocalCall, Seed, ShardSize, local_call
from autopar.rules.lowering_helpers.local_shard import length_of
from autopar.rules.lowering_helpers.lowering_trial import trial
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call, In, call_of
from autopar.rules.strategy import Strategy, grads_of
from autopar.torch_private import FakeTensorMode, pytree
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.narrow_products import NARROW_LINEAR
from autopar.words.placements import State, axis_and_block
from autopar.words.shards import local_shape
from autopar.words.trees import PyTree

Strides = tuple[int, ...]
T = TypeVar("T")

BY_DEVICE = frozenset({
    "aten.scaled_dot_product_attention.default", "aten.batch_norm.default", "aten.layer_norm.default",
})  # fmt: skip
"""Operators that choose their kernel by the device: on ``meta`` there is no fused attention, a batch norm in eval mode
makes statistics that nobody needs, and those of a layer norm in bfloat16 are in float32. They are tried on fake tensors
of the CPU."""
LOWERED_ALIKE = frozenset({"aten.scaled_dot_product_attention.default", "aten.layer_norm.default"})
"""Operators of :data:`BY_DEVICE` whose distributed lowerings take the kernels of the CPU on ``meta`` too, where a trial
takes a quarter of the time of one on fake tensors."""

CANNOT_BE_TRIED = (RuntimeError, ZeroDivisionError)
"""What torch raises for a call that cannot be made without values: an operator without a kernel for ``meta``
(``NotImplementedError``, a ``RuntimeError``), sizes or numbers that depend on values, a gradient asked of an argument
that has none, the variance of a single value (``ZeroDivisionError``). Anything else is a defect of a rule or a
lowering, and shows as such."""


class LocalLayout(NamedTuple):
    """One tensor as it lies on one rank."""

    shape: tuple[int, ...]
    strides: Strides
    dtype: str
    grad: bool

    @property
    def n_bytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


class Result(NamedTuple):
    """One output: in the memory of an input (``source``), or in that of the call's own number ``memory``."""

    strides: Strides
    source: int | None
    memory: int


@dataclass(frozen=True)
class Saved:
    """The tensors that a call saves.

    Attributes:
        ins: positions of the inputs whose memory autograd keeps.
        results: one for every output that is a tensor.
        memories: ``(bytes, whether autograd keeps it)`` of the memory that outputs lie in, but for that of inputs.
        inside_bytes: bytes of memory that no output lies in and autograd keeps.
    """

    ins: tuple[int, ...]
    results: tuple[Result, ...]
    memories: tuple[tuple[int, bool], ...]
    inside_bytes: int = 0

    @property
    def keeps(self) -> bool:
        """True if anything is saved."""
        return bool(self.ins or self.inside_bytes or any(kept for _, kept in self.memories))


def contiguous(shape: Sequence[int]) -> Strides:
    """Return the strides of a tensor in row-major order."""
    strides, step = [0] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def lie_alike(shape: Sequence[int], some: Strides, others: Strides) -> bool:
    """Check that two tensors have the same order of strides; strides of dims of size 1 do not count."""
    return all(n == 1 or one == other for n, one, other in zip(shape, some, others, strict=True))


def is_contiguous(shape: Sequence[int], strides: Strides) -> bool:
    """Check that a tensor is in row-major order."""
    return lie_alike(shape, strides, contiguous(shape))


def strides_of_copy(shape: Sequence[int], strides: Strides) -> Strides:
    """Return the strides of a copy that preserves the order of dims: the tensor's own unless it has gaps or repeats."""
    step = 1
    for stride, n in sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n != 1):
        if stride != step:
            return contiguous(shape)
        step *= n
    return strides


_known: dict[object, Saved] = {}


def saved_by(
    call: Call, rule: Rule, options: Sequence[Option], mesh: Mesh, ins: Sequence[LocalLayout], gpu: bool = False
) -> Saved:  # fmt: skip
    """Return what is saved of a call on one rank.

    Args:
        ins: its inputs on that rank.
        gpu: by the kernels of a GPU.
    """
    gpu = gpu and call.target in OF_GPU
    key = key_of_call(call, rule, options, mesh, ins), gpu
    if key not in _known:
        _known[key] = _narrowed(_tried(call, rule, options, mesh, ins, gpu), call, ins)
    return _known[key]


def key_of_call(
    call: Call, rule: Rule, options: Sequence[Option], mesh: Mesh, ins: Sequence[LocalLayout]
) -> object:
    """Return the key of a call's trial: all that its result depends on."""
    return (
        call.target, repr(call.args), repr(call.kwargs), call.outs, tuple(o.name for o in options), mesh, tuple(ins),
        tuple(s.shape for s in call.ins) if rule.localize is not None or rule.random else (), call.load, call.narrow,
    )  # fmt: skip


def _narrowed(saved: Saved, call: Call, ins: Sequence[LocalLayout]) -> Saved:
    """Return what a narrow product saves: transposed narrow copies in place of its activations.

    An operator that multiplies so was tried, and saves what it saved there.

    Experts, two products in one operator, save the rows in the order of experts and what the second product reads in
    memory of their own.
    """
    use = call.narrow
    if use is None or not saved.keeps or call.target == NARROW_LINEAR:
        return saved
    cast = [position for position in use.activations if position in saved.ins]
    elements, narrow = sum(prod(ins[position].shape) for position in cast), use.numbers.item_bytes
    inside = saved.inside_bytes + elements * narrow / use.shared
    if len(use.weights) > 1:
        x = ins[use.activations[0]]
        rows = prod(x.shape[:-1])
        of_own = rows * (ins[use.weights[1]].shape[-2] + (x.shape[-1] if not cast else 0))
        inside -= min(saved.inside_bytes, of_own * (x.n_bytes / max(1, prod(x.shape)) - narrow))
    ins_kept = tuple(position for position in saved.ins if position not in cast)
    return replace(saved, ins=ins_kept, inside_bytes=round(inside))


def saved_of(
    graph: Graph, i: int, rule: Rule, strategy: Strategy | None, mesh: Mesh, gpu: bool = False
) -> Saved:  # fmt: skip
    """Return what is saved of operator ``i``, whose inputs are in row-major order; of the whole operator if not cut."""
    node = graph.nodes[i]
    states = strategy.ins if strategy is not None else (State(),) * len(node.refs)
    ins = []
    for spec, state, grad in zip(map(graph.spec, node.refs), states, grads_of(graph, node)[0], strict=True):
        shape = local_shape(spec.shape, state, mesh)
        ins.append(LocalLayout(shape, contiguous(shape), spec.dtype, grad))
    options = strategy.options if strategy is not None else ()
    return saved_by(call_of(node, graph.spec), rule, options, mesh, ins, gpu)


def keeps(graph: Graph, rules: Sequence[Rule | None], i: int) -> bool:
    """Check whether autograd saves anything of node ``i``."""
    rule = rules[i]
    return rule is not None and graph.nodes[i].needs_grad and saved_of(graph, i, rule, None, Mesh()).keeps


def _tried(
    call: Call, rule: Rule, options: Sequence[Option], mesh: Mesh, ins: Sequence[LocalLayout], gpu: bool
) -> Saved:  # fmt: skip
    saved = trial_of(_watched, call, rule, options, mesh, ins, gpu)
    return saved if saved is not None else _said(call, rule, options, mesh)


def trial_of(
    observe: Callable[[LocalCall, Sequence[LocalLayout], Mapping[str, int], str], T], call: Call, rule: Rule,
    options: Sequence[Option], mesh: Mesh, ins: Sequence[LocalLayout], gpu: bool = False,
) -> T | None:  # fmt: skip
    """Return what ``observe`` finds in one rank's call on tensors without values; None if that cannot be tried.

    Args:
        observe: is given the call, its inputs' layouts, the mesh's sizes and the device of those tensors.
        gpu: the stand-in for a GPU's kernel is called in place of the operator.
    """
    if call.target.startswith(PREFIX):
        return None
    local = local_call(call, rule, options, mesh)
    key = observe, _key_of_trial(local, call, mesh, ins), gpu
    if key not in _trials:
        try:
            if gpu:
                with as_on_gpu():
                    _trials[key] = observe(local, ins, mesh.size_of, "meta")
            elif call.target in BY_DEVICE and not (local.distributed and call.target in LOWERED_ALIKE):
                with FakeTensorMode():
                    _trials[key] = observe(local, ins, mesh.size_of, "cpu")
            else:
                _trials[key] = observe(local, ins, mesh.size_of, "meta")
        except CANNOT_BE_TRIED:
            _trials[key] = None
    return cast("T | None", _trials[key])


_trials: dict[object, object] = {}
"""What was observed of the calls of one rank: the same pieces come of many meshes and numbers of microbatches."""


def _key_of_trial(local: LocalCall, call: Call, mesh: Mesh, ins: Sequence[LocalLayout]) -> object:
    """Return the key of one rank's trial: of a mesh, only the sizes of the axes that it asks about."""
    args = repr(local.args), repr(sorted(local.kwargs.items(), key=itemgetter(0)))
    asked: object = mesh
    if not any(ShardSize.__name__ in text for text in args) and (not local.distributed or "cut" in local.kwargs):
        axes = {axis_and_block(axis)[0] for of_factor in local.kwargs.get("cut", {}).values() for axis in of_factor}
        asked = tuple(sorted((axis, mesh.size_of[axis]) for axis in axes))
    return local.fn, args, call.target in BY_DEVICE, tuple(ins), asked


def without_values(ins: Sequence[LocalLayout], device: str) -> list[torch.Tensor]:
    """Return the tensors that lie as the inputs of a call do on one rank."""
    return [
        torch.empty_strided(x.shape, x.strides, dtype=getattr(torch, x.dtype), device=device).requires_grad_(x.grad)
        for x in ins
    ]


def _watched(local: LocalCall, ins: Sequence[LocalLayout], sizes: Mapping[str, int], device: str) -> Saved:
    tensors = without_values(ins, device)
    args, kwargs = filled(local, tensors, sizes, device)
    packed: list[weakref.ref[_Packed]] = []

    def pack(x: torch.Tensor) -> _Packed:
        packing = _Packed(x.detach())  # an output in its own node's hand would keep both alive for ever
        packed.append(weakref.ref(packing))
        return packing

    with torch.enable_grad(), trial(sizes), saved_tensors_hooks(pack, lambda packing: packing.tensor):
        results_of_call = local.fn(*args, **kwargs)
    alive = [packing.tensor for packing in (ref() for ref in packed) if packing is not None]
    kept = {_storage(x): x for x in alive}
    given = {_storage(x): position for position, x in reversed([*enumerate(tensors)])}
    numbers: dict[int, int] = {}
    memories: list[tuple[int, bool]] = []
    results = []
    for x in pytree.tree_leaves(results_of_call):
        if not isinstance(x, torch.Tensor):
            continue
        storage = _storage(x)
        if storage in given:
            results.append(Result(x.stride(), given[storage], 0))
            continue
        if storage not in numbers:
            numbers[storage] = len(memories)
            memories.append((x.untyped_storage().nbytes(), storage in kept))
        results.append(Result(x.stride(), None, numbers[storage]))
    seeds = {_storage(x) for x in pytree.tree_leaves(kwargs) if isinstance(x, torch.Tensor)} - given.keys()
    inside = sum(
        x.untyped_storage().nbytes() for storage, x in kept.items()
        if storage not in given and storage not in numbers and storage not in seeds
    )  # fmt: skip
    positions = tuple(p for p, x in enumerate(tensors) if _storage(x) in kept)
    return Saved(positions, tuple(results), tuple(memories), inside)


def filled(
    local: LocalCall, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int], device: str
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call on one rank: its tensors, a seed, and the sizes of the first rank's shards."""
    seed = torch.empty((), dtype=torch.int64, device=device)

    def fill(value: PyTree) -> PyTree:
        if isinstance(value, In):
            return tensors[value.position]
        if isinstance(value, Seed):
            return seed
        if isinstance(value, ShardSize):
            with trial(sizes):
                return length_of(value.n, value.axes)
        if isinstance(value, (tuple, list)):
            return type(value)(fill(v) for v in value)
        return value

    kwargs = {name: fill(value) for name, value in local.kwargs.items()}
    if not tensors and not local.distributed:
        kwargs["device"] = device
    return list(map(fill, local.args)), kwargs


class _Packed:
    """A stand-in that an autograd node saves in place of a tensor; it dies with the node."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _said(call: Call, rule: Rule, options: Sequence[Option], mesh: Mesh) -> Saved:
    """Return what the rule says is saved, where a call cannot be tried: results in memory of their own."""
    specs = [spec for spec in call.outs if spec is not None]
    results, memories = [], []
    for k, spec in enumerate(specs):
        shape = local_shape(spec.shape, State(option.outs[k] for option in options), mesh)
        results.append(Result(contiguous(shape), None, k))
        memories.append((prod(shape) * spec.item_bytes, rule.saves_out))
    return Saved(rule.saves, tuple(results), tuple(memories))
