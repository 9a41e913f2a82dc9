"""Proof of a rule on numbers: every option it offers, forward and backward.

The operator runs whole, on random inputs, with a random output gradient. Then, for every strategy on a mesh, it runs
in pieces the way a program would run it (:func:`autopar.rules.local_calls.local_call`), many ranks in this process; the
pieces of outputs and of input gradients are joined by their placements and compared. Pending inputs are random
terms of a sum, so that an operator that is not linear is caught.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import Any

import torch

from autopar.rules.axis_options import Option, axis_options
from autopar.rules.local_calls import Seed, ShardSize, local_call, resolve
from autopar.rules.lowering_helpers.local_shard import length_of
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call, In
from autopar.rules.proving.many_ranks import join, many_ranks, piece
from autopar.rules.registry import Sample, T, rule_for
from autopar.rules.strategy import can_be_cut
from autopar.torch_private import LocalTensor
from autopar.words.exchanges import exchange_of
from autopar.words.graph import Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import PENDING, State, axis_and_block
from autopar.words.shards import fits, shard_of
from autopar.words.trees import PyTree


class RuleIsWrong(AssertionError):
    """An option gives other numbers than the whole operator; the message names it."""


def draw(spec: T, generator: torch.Generator) -> torch.Tensor:
    """Draw a random tensor of a sample."""
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.randint(int(spec.low), int(spec.high) or 2, spec.shape, generator=generator).to(dtype)
    if spec.low or spec.high:
        low, high = spec.low, spec.high or spec.low + 1
        return (torch.rand(spec.shape, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)
    return torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(dtype)


class Case:
    """One sample: its tensors, its call, the whole operator's outputs and gradients."""

    def __init__(
        self, target: str, sample: Sample, seed: int = 0, rule_of: Callable[[Call], Rule] = rule_for,
        device: str = "cpu", dtype: str = "float64",
    ) -> None:  # fmt: skip
        """Draw the sample's tensors and run the whole operator on them.

        Args:
            rule_of: gives the rule to prove: the registered one, or one that is being tried.
            device: where the operator runs; the numbers are drawn on the CPU, so they are the same on every device.
            dtype: the dtype in which tensors that the sample has in float64 are computed.
        """
        generator = torch.Generator().manual_seed(seed)
        self.device = torch.device(device)
        self.tensors: list[torch.Tensor] = []
        grads: list[bool] = []

        def take(value: PyTree) -> PyTree:
            if isinstance(value, T):
                tensor = draw(value, generator).to(self.device)
                if tensor.dtype == torch.float64:
                    tensor = tensor.to(getattr(torch, dtype))
                self.tensors.append(tensor)
                grads.append(value.grad and tensor.is_floating_point())
                return In(len(self.tensors) - 1)
            if isinstance(value, (list, tuple)):
                return type(value)(take(v) for v in value)
            if isinstance(value, str) and hasattr(torch, value) and isinstance(getattr(torch, value), torch.dtype):
                return getattr(torch, value)
            return value

        self.args = tuple(take(a) for a in sample.args)
        self.kwargs = {k: take(v) for k, v in sample.kwargs.items()}
        ins = tuple(Spec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in self.tensors)
        leaves = [t.clone().requires_grad_(g) for t, g in zip(self.tensors, grads, strict=True)]
        probe = Call(target, self.args, self.kwargs, ins, ())
        outs = _flat(invoke(resolve(target), probe.args, probe.kwargs, leaves))
        specs = tuple(
            Spec(tuple(o.shape), str(o.dtype).removeprefix("torch.")) if isinstance(o, torch.Tensor) else None
            for o in outs
        )
        self.call = Call(target, self.args, self.kwargs, ins, specs)
        self.rule: Rule = rule_of(self.call)
        whole = Mesh.of(one=1)
        if self.rule.random:  # the reference of a random operator is its own lowering on one device
            names = axis_options(self.rule, grads, [o is not None and o.is_float for o in specs])
            with many_ranks(whole):
                simulated = [LocalTensor({0: x.detach()}).requires_grad_(g) for x, g in zip(leaves, grads, strict=True)]
                outs = _run(self.call, self.rule, [names[0]], whole, simulated)
            leaves = simulated
        tensors = [o for o in outs if isinstance(o, torch.Tensor)]
        self.out_grads = [any(grads) and t.is_floating_point() and t.requires_grad for t in tensors]
        self.grads = [g and any(self.out_grads) for g in grads]
        self.cotangents = [
            torch.randn(t.shape, generator=generator, dtype=torch.float64).to(self.device, t.dtype) for t in tensors
        ]
        self.outs = [_pieces(t, 1)[0] for t in tensors]
        self.gradients: list[torch.Tensor | None] = [None] * len(leaves)
        if any(self.out_grads):
            pairs = [(t, c) for t, c, g in zip(tensors, self.cotangents, self.out_grads, strict=True) if g]
            wanted = [x for x, g in zip(leaves, self.grads, strict=True) if g]
            with many_ranks(whole) if self.rule.random else contextlib.nullcontext():
                if self.rule.random:
                    pairs = [(t, LocalTensor({0: c})) for t, c in pairs]
                got = torch.autograd.grad([t for t, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
            gradients = iter(None if x is None else _pieces(x, 1)[0] for x in got)
            self.gradients = [next(gradients) if g else None for g in self.grads]
        self.after = [_pieces(x, 1)[0] for x in leaves]  # operators such as batch norm write to their inputs

    def options(self, blocks: Sequence[tuple[str, int]] = ()) -> list[Option]:
        """List every option on one axis, those of ``(factor, elements of a block)`` too."""
        return axis_options(self.rule, self.grads, self.out_grads, blocks)


def strategies_of(case: Case, mesh: Mesh, blocks: Sequence[tuple[str, int]] = ()) -> list[tuple[Option, ...]]:
    """List every legal combination of options, those of ``(factor, elements of a block)`` among them.

    A bound on rows that travel depends on where they go, so only the one that none can exceed is among them.
    """
    legal = []
    options = [o for o in case.options(blocks) if exchange_of(o.name)[1].bound in (0.0, inf)]
    for picked in product(options, repeat=len(mesh)):
        if not can_be_cut(case.rule, picked, mesh):
            continue
        ins, outs = _states(picked)
        shapes = [s.shape for s in (*case.call.ins, *(o for o in case.call.outs if o is not None))]
        if all(fits(shape, state, mesh) for shape, state in zip(shapes, (*ins, *outs), strict=True)):
            legal.append(picked)
    return legal


def prove(
    case: Case, picked: Sequence[Option], mesh: Mesh, tolerance: float = 1e-9, in_turn: bool = False
) -> None:
    """Run one strategy in pieces and compare.

    Args:
        in_turn: the ranks run one after the other on plain tensors, which any process may do, also one that has a
            process group of its own; for what has no collectives inside.

    Raises:
        RuleIsWrong: an output, an input gradient or a value written in place differs from the whole operator's.
    """
    n = mesh.n_devices
    ins, outs = _states(picked)
    rng = random.Random(1)
    names = {axis: option.name for (axis, _), option in zip(mesh, picked, strict=True)}
    where = f"{case.call.target} [{case.rule}] with {names}"
    if any(s.dtype in ("float32", "bfloat16") for s in (*case.call.ins, *filter(None, case.call.outs))):
        tolerance = max(tolerance, 1e-5)
    leaves = [_spread(t, state, mesh, rng) for t, state in zip(case.tensors, ins, strict=True)]
    cotangents = [_spread(c, state.adjoint, mesh, rng) for c, state in zip(case.cotangents, outs, strict=True)]
    if in_turn:
        ran = [_pass(case, picked, mesh, [t[r] for t in leaves], [c[r] for c in cotangents], r) for r in range(n)]
        results, leaf_grads, after = (_by_tensor([part[k] for part in ran], where) for k in range(3))
    else:
        with many_ranks(mesh):
            ran_at_once = _pass(case, picked, mesh, [*map(LocalTensor, leaves)], [*map(LocalTensor, cotangents)])
            results, leaf_grads, after = ([None if t is None else _pieces(t, n) for t in part] for part in ran_at_once)

    def check(pieces: Any, state: State, expected: torch.Tensor, what: str) -> None:
        joined = _joined(pieces, state, mesh, f"{where}: {what}", tolerance)
        _compare(joined, expected, f"{where}: {what}", tolerance)

    if len(results) != len(case.outs):
        raise RuleIsWrong(f"{where}: {len(results)} outputs, the whole operator gives {len(case.outs)}")
    for number, (pieces, state, expected) in enumerate(zip(results, outs, case.outs, strict=True)):
        check(pieces, state, expected, f"output {number}")
    for number, (state, gradient) in enumerate(zip(ins, case.gradients, strict=True)):
        if gradient is not None:
            if leaf_grads[number] is None:
                raise RuleIsWrong(f"{where}: input {number} has no gradient")
            check(leaf_grads[number], state.adjoint, gradient, f"gradient {number}")
        if PENDING not in state:
            check(after[number], state, case.after[number], f"input {number} after")


def _pass(
    case: Case, picked: Sequence[Option], mesh: Mesh, tensors: Sequence[Any], cotangents: Sequence[Any],
    rank: int | None = None,
) -> tuple[list[Any], list[Any], list[Any]]:  # fmt: skip
    """Return outputs, gradients and inputs after a forward and a backward, of one rank or of all at once."""
    leaves = [t.requires_grad_(g) for t, g in zip(tensors, case.grads, strict=True)]
    results = _run(case.call, case.rule, picked, mesh, leaves, rank)
    pairs = [(t, c) for t, c, g in zip(results, cotangents, case.out_grads, strict=False) if g and t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [c for _, c in pairs])
    return results, [leaf.grad for leaf in leaves], leaves


def _by_tensor(ranks: Sequence[Sequence[torch.Tensor | None]], where: str) -> list[list[torch.Tensor] | None]:
    """Regroup lists of tensors by rank into lists by tensor; None if ranks have none."""
    if len({len(of_rank) for of_rank in ranks}) != 1:
        raise RuleIsWrong(f"{where}: ranks give {', '.join(str(len(of_rank)) for of_rank in ranks)} tensors")
    result: list[list[torch.Tensor] | None] = []
    for of_ranks in zip(*ranks, strict=True):
        there = [t.detach() for t in of_ranks if t is not None]
        if there and len(there) != len(of_ranks):
            raise RuleIsWrong(f"{where}: some ranks have a gradient, others have none")
        result.append(there or None)
    return result


def _states(picked: Sequence[Option]) -> tuple[list[State], list[State]]:
    n_in, n_out = len(picked[0].ins), len(picked[0].outs)
    ins = [State(o.ins[i] for o in picked) for i in range(n_in)]
    return ins, [State(o.outs[i] for o in picked) for i in range(n_out)]


def _run(
    call: Call, rule: Rule, picked: Sequence[Option], mesh: Mesh, tensors: Sequence[Any], rank: int | None = None
) -> list[Any]:
    local = local_call(call, rule, picked, mesh, site=3)
    n = mesh.n_devices
    seed = torch.tensor(11, device=tensors[0].device if tensors else None)

    def fill(value: PyTree) -> PyTree:
        if isinstance(value, Seed):
            return LocalTensor({r: seed.clone() for r in range(n)})
        if isinstance(value, ShardSize):
            return length_of(value.n, value.axes) if rank is None else _length_on(value, mesh, rank)
        if isinstance(value, (list, tuple)):
            return type(value)(fill(v) for v in value)
        return tensors[value.position] if isinstance(value, In) else value

    kwargs = {k: fill(v) for k, v in local.kwargs.items()}
    return [t for t in _flat(local.fn(*(fill(a) for a in local.args), **kwargs)) if isinstance(t, torch.Tensor)]


def invoke(fn: Any, args: PyTree, kwargs: PyTree, tensors: Sequence[torch.Tensor]) -> PyTree:
    """Call ``fn`` with tensors in place of each :class:`In` among its arguments."""

    def fill(value: PyTree) -> PyTree:
        if isinstance(value, (list, tuple)):
            return type(value)(fill(v) for v in value)
        return tensors[value.position] if isinstance(value, In) else value

    return fn(*(fill(a) for a in args), **{k: fill(v) for k, v in kwargs.items()})


def _flat(value: PyTree) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _length_on(size: ShardSize, mesh: Mesh, rank: int) -> int:
    """Return how many elements one rank has of a size that differs between ranks."""
    n, at = size.n, dict(zip((axis for axis in mesh.names), mesh.coordinate(rank), strict=True))
    for text in size.axes:
        axis, unit = axis_and_block(text)
        n = shard_of(n, mesh.size_of[axis], at[axis], unit)[1]
    return n


def _spread(whole: torch.Tensor, state: State, mesh: Mesh, rng: random.Random) -> dict[int, torch.Tensor]:
    """Return the pieces of a tensor, by rank; a pending one is split into random terms."""
    pieces = {r: piece(whole, state, mesh, r) for r in range(mesh.n_devices)}
    if PENDING in state and whole.is_floating_point():
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        noise = torch.randn(whole.shape, generator=generator, dtype=torch.float64).to(whole)
        axis = state.index(PENDING)
        clean = state.started(grad=False)
        for r in pieces:
            at = mesh.coordinate(r)[axis]
            others = mesh.coordinate(r)[axis + 1 :]
            if at < 2 and not any(c for c, p in zip(others, state[axis + 1 :], strict=True) if p.is_pending):
                pieces[r] = pieces[r] + (piece(noise, clean, mesh, r) if at == 0 else -piece(noise, clean, mesh, r))
    return pieces


def _pieces(value: PyTree, n: int) -> list[torch.Tensor]:
    if isinstance(value, LocalTensor):
        return [value._local_tensors[r].detach() for r in range(n)]
    return [value.detach()] * n


def _joined(
    pieces: Sequence[torch.Tensor], state: State, mesh: Mesh, where: str, tolerance: float
) -> torch.Tensor:
    """Join shards by :func:`~autopar.rules.proving.many_ranks.join`, and prove that replicated copies agree."""
    parts = list(pieces)
    for axis in reversed(range(len(mesh))):
        name, size = mesh[axis]
        placement = state[axis]
        groups = [parts[i : i + size] for i in range(0, len(parts), size)]
        for first, *others in groups if placement.is_replicated else ():
            for copy in others:
                if first.shape != copy.shape or not _close(copy, first, max(1e-6, tolerance), tolerance):
                    raise RuleIsWrong(f"{where}: the copies on axis '{name}' differ ({state.text})")
        parts = [join(group, State((placement,)), Mesh([(name, size)])) for group in groups]
    return parts[0]


def _close(mine: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float) -> bool:
    """Return whether two tensors agree.

    Above the rounding of float64 the absolute limit is a share of the largest value, because a sum in low precision
    loses digits of its largest term.
    """
    mine, expected = mine.double(), expected.double()
    if absolute > 1e-6 and expected.numel():
        absolute *= max(1.0, float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()))
    return torch.allclose(mine, expected, rtol=relative, atol=absolute, equal_nan=True)


def _compare(mine: torch.Tensor, expected: torch.Tensor, where: str, tolerance: float) -> None:
    if mine.shape != expected.shape:
        raise RuleIsWrong(f"{where}: shape {tuple(mine.shape)}, the whole operator gives {tuple(expected.shape)}")
    if mine.dtype != expected.dtype:
        raise RuleIsWrong(f"{where}: {mine.dtype}, the whole operator gives {expected.dtype}")
    if not _close(mine, expected, tolerance, tolerance):
        worst = (mine.double() - expected.double()).abs().max().item()
        raise RuleIsWrong(f"{where}: differs by {worst:.3g}")
