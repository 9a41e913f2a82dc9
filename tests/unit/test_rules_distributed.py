"""Distributed lowerings under the spmd-types checker, and the quality of mesh-independent random numbers.

The numbers of every lowering are proved elsewhere (``test_rules``). Here each runs once per pair of options on one rank
of a fake 2x2 mesh with typed inputs: forward and backward collectives have to fit, and outputs have to leave as the
placements that the option promises.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import spmd_types as spmd
import torch
from spmd_types.checker import typecheck

from autopar.rules import saved_tensors, working_memory
from autopar.rules.attention import attention
from autopar.rules.axis_options import axis_options
from autopar.rules.families import contraction, conv, embedding, loss, norm, sharded_random
from autopar.rules.local_calls import LocalCall, Seed, cuts_of, local_call, resolve
from autopar.rules.operator_call import Call, In
from autopar.rules.proving.many_ranks import fake_world
from autopar.rules.registry import RULES, SAMPLES, Sample, T, rule_for
from autopar.rules.strategy import can_be_cut
from autopar.words.graph import Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import fits, local_shape

MESH = Mesh.of(data=2, tensor=2)
TYPES = {"S": spmd.V, "I": spmd.I, "R": spmd.R, "P": spmd.P}
MODULES = {m.__name__ for m in (attention, contraction, conv, embedding, loss, norm, sharded_random)}
RANDOM_WITHOUT_INPUT = ("aten.rand.", "aten.randn.", "aten.randint.")


@pytest.fixture(scope="module")
def mesh() -> Any:
    with fake_world(MESH) as device_mesh:
        yield device_mesh


def draw(t: T, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, t.dtype)
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype).requires_grad_(t.grad)
    return torch.randint(0, t.high or 2, shape).to(dtype)


def replace(value: Any, fn: Any) -> Any:
    """``value`` with every ``T``, ``In`` and ``Seed`` in nested lists and tuples replaced by ``fn`` of it."""
    if isinstance(value, (T, In, Seed)):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replace(v, fn) for v in value)
    return value


def call_of_sample(target: str, sample: Sample) -> tuple[Call, list[T], list[bool]]:
    """The call, its tensors, and which of its outputs have gradients."""
    tensors: list[T] = []

    def number(t: T) -> In:
        tensors.append(t)
        return In(len(tensors) - 1)

    args = replace(sample.args, number)
    kwargs = {name: replace(value, number) for name, value in sample.kwargs.items()}
    values = [draw(t, t.shape) for t in tensors]
    out = resolve(target)(
        *replace(args, lambda v: values[v.position]),
        **{name: replace(value, lambda v: values[v.position]) for name, value in kwargs.items()},
    )
    outs = out if isinstance(out, (tuple, list)) else [out]

    def spec(x: torch.Tensor) -> Spec:
        return Spec(tuple(x.shape), str(x.dtype).removeprefix("torch."))

    call = Call(target, args, kwargs, tuple(map(spec, values)), tuple(map(spec, outs)))
    return call, tensors, [o.requires_grad for o in outs]


CASES = [
    pytest.param(target, sample, id=f"{target.split('.')[1]}-{i}")
    for target, samples in SAMPLES.items()
    for i, sample in enumerate(samples)
    if RULES[target].__module__ in MODULES and not target.startswith(RANDOM_WITHOUT_INPUT)
]


@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target, sample", CASES)
def test_lowering_is_typed(mesh: Any, target: str, sample: Sample, dtype: str) -> None:
    def cast(t: Any) -> Any:
        return dataclasses.replace(t, dtype=dtype) if isinstance(t, T) and t.dtype == "float64" else t

    sample = Sample(replace(sample.args, cast), {name: replace(value, cast) for name, value in sample.kwargs.items()})
    call, tensors, out_grads = call_of_sample(target, sample)
    rule = rule_for(call)
    if not rule.lowerings:
        return
    options = axis_options(rule, [t.grad and s.is_float for t, s in zip(tensors, call.ins)], out_grads)
    for pair in itertools.product(options, options):
        ins = [State(o.ins[i] for o in pair) for i in range(len(call.ins))]
        outs = [State(o.outs[i] for o in pair) for i in range(len(call.outs))]
        pieces = cuts_of(rule, pair, MESH)[0]
        local = local_call(call, rule, pair, MESH, site=3)
        fitting = all(fits(s.shape, state, MESH) for s, state in zip((*call.ins, *call.outs), [*ins, *outs]))
        fitting = fitting and can_be_cut(rule, pair, MESH)
        if not local.distributed or not fitting or any(rule.sizes[f] % n for f, n in pieces.items()):
            continue
        values = [draw(t, local_shape(t.shape, state, MESH)) for t, state in zip(tensors, ins)]
        seed = torch.tensor(1)
        with spmd.set_current_mesh(mesh), typecheck():
            for x, state in zip([*values, seed], [*ins, State.of("R", "R")]):
                spmd.assert_type(x, {axis: TYPES[p.kind] for (axis, _), p in zip(MESH, state)})

            def put(v: Any, values: Any = values, seed: Any = seed) -> torch.Tensor:
                return seed if isinstance(v, Seed) else values[v.position]

            out = local.fn(*replace(local.args, put), **{k: replace(v, put) for k, v in local.kwargs.items()})
            for (axis, _), placement in zip(MESH, outs[0]):
                got = spmd.get_axis_local_type(out, axis)
                assert got is TYPES[placement.kind], f"{[o.name for o in pair]}: {axis} is {got}, not {placement}"
            assert tuple(out.shape) == local_shape(call.out.shape, outs[0], MESH)
            assert str(out.dtype) == f"torch.{call.out.dtype}", [o.name for o in pair]
        if out.requires_grad:
            out.backward(torch.ones_like(out))
            assert all(x.grad is not None for x in values if x.requires_grad)


def mask(seed: int, site: int, shape: tuple[int, ...], p: float = 0.5) -> torch.Tensor:
    return sharded_random.kept(p, torch.tensor(seed), site, shape, [()] * len(shape), torch.device("cpu")).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Standard deviations from zero of the correlation of two fair masks."""
    return float(((a - 0.5) * (b - 0.5)).mean() * 4 * a.numel() ** 0.5)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_dropout_rate(p: float) -> None:
    kept = mask(3, 5, (1024, 1024), p)
    n = kept.numel()
    assert abs(float(kept.sum()) - n * (1 - p)) < 4 * (n * p * (1 - p)) ** 0.5
    for dim in (0, 1):  # the counts of rows and of columns scatter as binomial counts do
        counts = kept.sum(dim)
        assert abs(float(((counts - 1024 * (1 - p)) ** 2).mean() / (1024 * p * (1 - p))) - 1) < 0.2


def test_dropout_is_not_constant_or_periodic() -> None:
    a = mask(3, 5, (1024, 1024))
    for lag in (1, 2, 3, 4, 7, 8, 16, 64, 256, 512):
        assert abs(correlation(a[:, :-lag], a[:, lag:])) < 4.5, f"columns {lag} apart"
        assert abs(correlation(a[:-lag], a[lag:])) < 4.5, f"rows {lag} apart"
        assert abs(correlation(a[:-lag, :-lag], a[lag:, lag:])) < 4.5, f"diagonals {lag} apart"
        z = 2 * a - 1  # four corners of a rectangle: where sums of a row and a column number would show
        corners = z[:-lag, :-lag] * z[lag:, :-lag] * z[:-lag, lag:] * z[lag:, lag:]
        assert abs(float(corners.mean() * corners.numel() ** 0.5)) < 4.5, f"rectangles of {lag}"


def test_dropout_differs_by_site_and_seed() -> None:
    a = mask(3, 5, (512, 1024))
    for seed, site in [(3, 6), (3, 4), (4, 5), (2, 5), (5, 3), (4, 4), (2**40, 5), (3, 2**31)]:
        assert abs(correlation(a, mask(seed, site, (512, 1024)))) < 4.5, (seed, site)
    over_seeds = torch.stack([mask(s, 0, (8, 8)).flatten() for s in range(2000)])
    assert abs(correlation(over_seeds[:-1], over_seeds[1:])) < 4.5
    assert over_seeds.mean(0).sub(0.5).abs().max() < 5 * 0.5 / 2000**0.5


def test_bytes_of_bits_are_uniform() -> None:
    a = mask(7, 1, (1024, 1024))
    for m in (a, a.T):
        counts = torch.bincount((m.reshape(-1, 8).long() * 2 ** torch.arange(8)).sum(1), minlength=256).double()
        expected = counts.sum() / 256
        assert 0.6 < float(((counts - expected) ** 2 / expected).sum() / 255) < 1.5


def test_uniform_and_normal_moments() -> None:
    draw_of = {"seed": torch.tensor(1), "site": 2, "shape": (1024, 1024), "shards": ((), ())}
    u = sharded_random.rand([0], cut={}, **draw_of)
    assert 0 <= float(u.min()) and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 0.002 and abs(float(u.var()) * 12 - 1) < 0.01
    z = sharded_random.randn([0], cut={}, **draw_of)
    assert abs(float(z.mean())) < 0.005 and abs(float(z.var()) - 1) < 0.01 and abs(float((z**4).mean()) - 3) < 0.05
    i = sharded_random.randint(-3, 10, [0], cut={}, **draw_of)
    assert int(i.min()) == -3 and int(i.max()) == 9


@pytest.mark.parametrize("tries", [saved_tensors.saved_by, working_memory.needs_of])
def test_what_cannot_be_tried_is_told_from_defects(tries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel for tensors without values the rule's word counts; an error of our own is not hidden by it."""

    def raising(error: Exception) -> Any:
        def lowering(*args: Any, **kwargs: Any) -> Any:
            raise error

        return lambda *call: LocalCall(lowering, (In(0),), {}, distributed=True)

    x = Spec((4, 6), "float32")
    call = Call("aten.relu.default", (In(0),), {}, (x,), (x,))
    rule = rule_for(call)
    layout = saved_tensors.LocalLayout((4, 6), (6, 1), "float32", True)
    arguments = call, rule, (axis_options(rule, [True], [True])[0],), Mesh.of(x=2), [layout]
    for module in (saved_tensors, working_memory):
        monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(saved_tensors, "local_call", raising(NotImplementedError("no kernel for meta")))
    assert tries(*arguments) is not None
    for module in (saved_tensors, working_memory):
        monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(saved_tensors, "local_call", raising(KeyError("a name that the lowering lacks")))
    with pytest.raises(KeyError, match="the lowering lacks"):
        tries(*arguments)
