"""What people do with a parallel module, each a function that two ranks run; every one leaves the ranks in step.

Models are small and in float64, cuts are forced, and the same is done to a copy in eager mode on every rank. Functions
return nothing and assert; docs/what-people-do.md names them.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import io
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from procs.cases import TWO, device_mesh, whole
from procs.in_turn import wrong
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import swa_utils

import autopar
from autopar.errors import CaptureError, RunError
from autopar.runtime.batches.outputs import Unread
from autopar.runtime.pipelines.stage_in_flight import Flight
from autopar.runtime.ranks.collectives import reduce_scatter_flat
from autopar.runtime.ranks.failures import Failures
from autopar.runtime.repairs import dtensor_fixes
from autopar.runtime.stages.stage import Stage

CASES: dict[str, Callable[[], None]] = {}
COLUMN_ROW = {"first": {"data": "n"}, "second": {"data": "k"}}
ROWS = {"*:linear*": {"data": "b"}}
CUTS = (COLUMN_ROW, ROWS)
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def case(fn: Callable[[], None]) -> Callable[[], None]:
    CASES[fn.__name__] = fn
    return fn


def every(names: Sequence[str]) -> dict[str, str]:
    """Run these cases; what went wrong in each, by name."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        torch.manual_seed(0)
        found[name] = wrong(CASES[name])
    return found


class Net(nn.Module):
    """Two layers [b 8] -> [b 4], and what ``give`` makes of the result and the target."""

    def __init__(self, give: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first, self.second, self.give = nn.Linear(8, 16), nn.Linear(16, 4), give

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        out = self.second(torch.tanh(self.first(x)))
        return out if self.give is None else self.give(out, y)


def mse(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((out - y) ** 2).mean()


def with_output(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mse(out, y), out


def batch(rows: int = 8, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank."""
    made = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))
    x = torch.randn(rows, 8, generator=made)
    return x.requires_grad_(grad), torch.randn(rows, 4, generator=made)


def pair(model: nn.Module, example: Any, **options: Any) -> tuple[Any, nn.Module]:
    """The model on both ranks, and a copy of it in eager mode."""
    eager = copy.deepcopy(model)
    options.setdefault("constraints", COLUMN_ROW)
    return autopar.parallelize(model, device_mesh(TWO), example, **options), eager


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    assert (a is None) == (b is None), (a, b)
    if a is not None and b is not None:
        torch.testing.assert_close(whole(a), b, **CLOSE)


def same_gradients(module: nn.Module, eager: nn.Module) -> None:
    mine = dict(module.named_parameters())
    for name, p in eager.named_parameters():
        same(mine[name].grad, p.grad)


def same_weights(module: nn.Module, eager: nn.Module) -> None:
    mine = dict(module.named_parameters())
    for name, p in eager.named_parameters():
        same(mine[name].detach(), p.detach())


# --- gradients of inputs ---------------------------------------------------------------------------------------------


@case
def input_gradients() -> None:
    for cuts in CUTS:
        x, y = batch(grad=True)
        module, eager = pair(Net(mse), (x, y), constraints=cuts)
        for _ in range(2):
            x, y = batch(grad=True)
            module(x, y).backward()
            mine, x.grad = x.grad, None
            eager(x, y).backward()
            same(mine, x.grad)
            same_gradients(module, eager)


@case
def a_layer_in_front() -> None:
    front, (x, y) = nn.Linear(8, 8), batch()
    module, eager = pair(Net(mse), (front(x).detach().requires_grad_(), y), constraints=ROWS)
    other = copy.deepcopy(front)
    mine = torch.optim.SGD([*front.parameters(), *module.parameters()], lr=0.1)
    theirs = torch.optim.SGD([*other.parameters(), *eager.parameters()], lr=0.1)
    for _ in range(3):
        x, y = batch()
        for optimizer, before, model in ((mine, front, module), (theirs, other, eager)):
            optimizer.zero_grad()
            model(torch.tanh(before(x)), y).backward()
            optimizer.step()
    same_weights(module, eager)
    same_weights(front, other)


@case
def generator_and_discriminator() -> None:
    """One of two models is parallel; it is frozen while the other trains."""
    score = Net(lambda out, _: out)
    generator, (x, _) = nn.Linear(3, 8), batch()
    module, eager = pair(score, (x.clone().requires_grad_(),), constraints=ROWS)
    other = copy.deepcopy(generator)
    for made, judge in ((generator, module), (other, eager)):
        torch.manual_seed(1)
        opt_g, opt_d = torch.optim.SGD(made.parameters(), 0.1), torch.optim.SGD(judge.parameters(), 0.1)
        for step in range(3):
            z, real = torch.randn(8, 3), torch.randn(8, 8)
            judge.requires_grad_(False)
            opt_g.zero_grad()
            nn.functional.softplus(-judge(made(z))).mean().backward()
            opt_g.step()
            assert all(p.grad is None for p in judge.parameters()) or step, "frozen"
            judge.requires_grad_(True)
            opt_d.zero_grad()
            fake = made(z).detach()
            loss = nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(fake)).mean()
            loss.backward()
            opt_d.step()
    same_weights(module, eager)
    same_weights(generator, other)


@case
def frozen_parameters_for_a_perceptual_loss() -> None:
    features = Net(mse).requires_grad_(False)
    x, y = batch(grad=True)
    for cuts in CUTS:
        module, eager = pair(copy.deepcopy(features), (x, y), constraints=cuts)
        (mine,) = torch.autograd.grad(module(x, y), x)
        (theirs,) = torch.autograd.grad(eager(x, y), x)
        same(mine, theirs)


@case
def adversarial_training() -> None:
    x, y = batch(grad=True)
    module, eager = pair(Net(mse), (x, y))
    for model in (module, eager):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(model(x, y), x)
        assert all(p.grad is None for p in model.parameters()), "autograd.grad accumulates nothing"
        model((x + 0.1 * grad.sign()).detach(), y).backward()
    same_gradients(module, eager)


@case
def an_input_that_was_not_to_want_a_gradient() -> None:
    x, y = batch(grad=True)
    fixed, _ = pair(Net(mse), batch(), shapes="fixed")
    with pytest.raises(RunError, match="its gradient was not planned: pass an example that requires_grad_"):
        fixed(x, y)
    with torch.no_grad():
        fixed(x, y)
    module, eager = pair(Net(mse), batch())
    for rows in (8, 5):  # without a gradient first, and then with one, as of a discriminator
        x, y = (t[:rows] for t in batch())
        module(x, y).backward()
        eager(x, y).backward()
        grads = []
        for model in (module, eager):
            x = x.detach().requires_grad_()
            model(x, y).backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
    same_gradients(module, eager)


@case
def a_pinned_input_of_which_all_is_passed() -> None:
    x, y = batch(grad=True)
    module, eager = pair(Net(mse), (x, y), constraints=ROWS, placements={"x": "S0", "y": "S0"})
    module(x, y).backward()
    mine, x.grad = x.grad, None
    eager(x, y).backward()
    same(mine, x.grad)
    same_gradients(module, eager)


# --- computing with parameters and their gradients -------------------------------------------------------------------


ZERO_FIRST: dict[str, Any] = {"constraints": ROWS, "params": {"first.*": "S0 use", "second.*": "replicate"}}


@case
def numbers_of_gradients() -> None:
    """The habits of clipping by hand, of trust ratios, and of skipping a step."""
    (x, y) = batch()
    module, eager = pair(Net(mse), (x, y), **ZERO_FIRST)
    for _ in range(2):
        module(x, y).backward()
        eager(x, y).backward()
        for model in (module, eager):
            norm = sum(p.grad.norm(2).item() ** 2 for p in model.parameters()) ** 0.5
            skipped = any(bool((p.grad.abs() > 0.08).any()) for p in model.parameters())
            rates = [0.1 * float(p.norm()) / (norm * float(p.grad.sum().abs() + 1)) for p in model.parameters()]
            for p, rate in zip(model.parameters(), rates, strict=True):
                p.data.add_(p.grad, alpha=-rate * (0.5 if skipped else 1.0))
                p.grad = None
        same_weights(module, eager)


@case
def values_are_assigned_to_data() -> None:
    """A step written by hand, and averaged weights that are put in for a while."""
    for options in ({}, ZERO_FIRST):
        (x, y) = batch()
        module, eager = pair(Net(mse), (x, y), **options)
        losses = []
        for model in (module, eager):
            model(x, y).backward()
            for p in model.parameters():
                p.data = p.data - 0.5 * p.grad.data
                p.grad = None
            averaged, kept = [0.5 * p.data for p in model.parameters()], [p.data for p in model.parameters()]
            for p, value in zip(model.parameters(), averaged, strict=True):
                p.data = value
            losses.append([model(x, y).detach()])
            for p, value in zip(model.parameters(), kept, strict=True):
                p.data = value
            losses[-1].append(model(x, y).detach())
        for mine, theirs in zip(*losses, strict=True):
            same(mine, theirs)
        same_weights(module, eager)
        for vectors in (nn.utils.parameters_to_vector(module.parameters()), torch.linspace(-1, 1, 212)):
            nn.utils.vector_to_parameters(vectors.detach() / 2, module.parameters())
            whole_vector = vectors.full_tensor() if isinstance(vectors, DTensor) else vectors
            nn.utils.vector_to_parameters(whole_vector.detach() / 2, eager.parameters())
            same(module(x, y), eager(x, y))
            same_weights(module, eager)
    with pytest.raises(RunError, match=r"the parameter is a DTensor of shape \(16, 8\), and the value .* \(8, 8\)"):
        next(module.parameters()).data = torch.zeros(8, 8)


@case
def parameters_are_copied_with_their_gradients() -> None:
    """Gradients that were sliced, and those that came in one bucket, hold memory of their own on every rank."""
    for options in ({"constraints": {}, "params": {"*": "S0"}}, {"constraints": ROWS}, ZERO_FIRST):
        (x, y) = batch()
        module, eager = pair(Net(mse), (x, y), **options)
        for model in (module, eager):
            model(x, y).backward()
        for p, e in zip(module.parameters(), eager.parameters(), strict=True):
            local = p.grad.to_local()
            assert local.untyped_storage().nbytes() == local.nbytes
            copied = copy.deepcopy(p)
            for tensor, gradient in ((p, p.grad), (copied, copied.grad), (p, copy.deepcopy(p.grad))):
                same(tensor, e)
                same(gradient, e.grad)


LISTS_OF_DTENSORS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]] = {
    "all_gather": (dist.all_gather, lambda d, plain: ([d, d], plain)),
    "reduce_scatter": (dist.reduce_scatter, lambda d, plain: (plain, [d, d])),
    "gather": (lambda *args: dist.gather(*args, dst=dist.get_rank()), lambda d, plain: (plain, [d, d])),
    "scatter": (lambda *args: dist.scatter(*args, src=dist.get_rank()), lambda d, plain: (plain, [d, d])),
}
"""Collectives whose lists of tensors torch's dispatcher does not see: DTensors there had no memory to be read."""


@case
def gradients_are_reduced_by_hand() -> None:
    """DDP's work done by hand is refused, and changes nothing; plain tensors are reduced as ever."""
    (x, y) = batch()
    module, eager = pair(Net(mse), (x, y), **ZERO_FIRST)
    for model in (module, eager):
        model(x, y).backward()
    for p in module.parameters():
        for call in (lambda p: dist.all_reduce(p.grad), lambda p: dist.reduce(p.grad, 0)):
            with pytest.raises(RunError, match=r"already reduced over its ranks; remove the (all_)?reduce \(and"):
                call(p)
        with pytest.raises(RunError, match="broadcast of a DTensor: all ranks have the same parameters already"):
            dist.broadcast(p.data, 0)
        with pytest.raises(RunError, match=r"all_gather of a DTensor: .*x\.full_tensor\(\)"):
            dist.all_gather([torch.empty_like(p.to_local()) for _ in range(2)], p.data)
        with pytest.raises(RunError, match="reduce_scatter of a DTensor: gradients of a parallel module are already"):
            reduce_scatter_flat(p.grad, torch.empty(2, *p.shape).flatten(0, 1))
        for listed, (call, arguments) in LISTS_OF_DTENSORS.items():
            with pytest.raises(RunError, match=f"distributed.{listed} of a DTensor: "):
                call(*arguments(p.data, p.to_local()))
    same_gradients(module, eager)
    same_weights(module, eager)
    plain = torch.ones(3)
    dist.all_reduce(plain)
    assert plain.tolist() == [2.0] * 3


@case
def a_module_is_replaced() -> None:
    (x, y) = batch()
    module, eager = pair(Net(mse), (x, y))
    with pytest.raises(RunError, match="module 'second' of a parallel module was replaced by a Linear"):
        module.second = nn.Linear(16, 4)
    same(module(x, y), eager(x, y))


@case
def penalties_of_parameters() -> None:
    """Terms of the loss that are computed from parameters by hand, in the ways in which scripts write them."""

    def in_place(model: nn.Module) -> torch.Tensor:
        total = torch.zeros(())
        for p in model.parameters():
            total += p.abs().sum() + p.sum()
        return total

    def orthogonal(model: Any) -> torch.Tensor:
        return ((model.first.weight.t() @ model.first.weight - torch.eye(8)) ** 2).sum()

    penalties: list[Callable[[Any], Any]] = [
        lambda model: sum(p.pow(2).sum() for p in model.parameters()),
        lambda model: torch.tensor(0.0) + sum(torch.norm(p) for p in model.parameters()),
        lambda model: torch.stack([p.norm() for p in model.parameters()]).sum(),
        lambda model: torch.cat([p.reshape(-1) for p in model.parameters()]).norm(1),
        lambda model: sum((torch.ones(p.shape) * (p - torch.ones(p.shape)) ** 2).mean() for p in model.parameters()),
        orthogonal, in_place,
    ]  # fmt: skip
    x, y = batch()
    for options in ({}, ZERO_FIRST):
        module, eager = pair(Net(mse), (x, y), **options)
        for penalty in penalties:
            losses = []
            for model in (module, eager):
                model.zero_grad()
                loss = model(x, y) + 0.1 * penalty(model)
                loss.backward()
                losses.append(loss)
            assert type(losses[0]) is torch.Tensor, "one rank alone may print it"
            same(losses[0].detach(), losses[1].detach())
            same_gradients(module, eager)
            assert all(p.grad is not None and p.grad.placements == p.placements for p in module.parameters())


@case
def plain_tensors_beside_parameters() -> None:
    """Other models, averages and learned numbers of the script: they stay plain."""
    x, y = batch()
    for options in ({}, ZERO_FIRST):
        module, eager = pair(Net(mse), (x, y), **options)
        found = []
        for model in (module, eager):
            torch.manual_seed(1)
            beside, weight, centre = nn.Linear(8, 1), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(8))
            trained = [*model.parameters(), *beside.parameters(), weight, centre]
            optimizer = torch.optim.AdamW(trained, lr=0.01)
            averages = [torch.zeros(p.shape) for p in model.parameters()]
            followers = [torch.zeros(p.shape) for p in model.parameters()]
            for _ in range(2):
                penalty = sum(p.abs().sum() for p in model.parameters())
                loss = model(x, y) + beside(x).mean() + weight * penalty + ((model.first.weight - centre) ** 2).sum()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained, 0.5)
                optimizer.step()
                for average, p in zip(averages, model.parameters(), strict=True):
                    average.mul_(0.9).add_(p.data, alpha=0.1)
                torch._foreach_lerp_(followers, [p.data for p in model.parameters()], 0.1)
            with torch.no_grad():
                for average, p in zip(averages, model.parameters(), strict=True):
                    p.copy_(0.5 * average)
                    p.mul_(average > 0)
            found.append([whole(t.detach()) for t in (*trained, *averages, *followers)])
        for mine, theirs in zip(*found, strict=True):
            same(mine, theirs)


@case
def norms_and_flags_of_gradients() -> None:
    """Numbers for the log that DTensors of torch get wrong."""
    x, y = batch()
    module, eager = pair(Net(mse), (x, y))
    numbers = []
    for model in (module, eager):
        model(x, y).backward()
        grads = [p.grad for p in model.parameters()]
        norms = torch.stack([g.norm() for g in grads])
        flags = [(g > g.min()).any().float() for g in grads]
        numbers.append([float(norms.sum()), float(norms.mean()), float(norms.norm()), *map(float, flags)])
        numbers[-1] += [float(f"{g.norm():.9f}") for g in grads] + [g.norm().tolist() for g in grads]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-12)
    for call in (lambda p: p.numpy(), lambda p: p.tolist(), np.asarray):
        with pytest.raises(RunError, match=r"of a DTensor, which holds this rank's piece only; x\.full_tensor\(\)\."):
            call(next(module.parameters()).detach())


@case
def averaged_weights() -> None:
    """A copy of the module that follows it, and one that goes with a copy of its optimizer."""
    x, y = batch()
    for options in ({}, ZERO_FIRST):
        module, eager = pair(Net(mse), (x, y), **options)
        found = []
        for model in (module, eager):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            averages = [swa_utils.AveragedModel(model)]
            averages.append(swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)))
            for _ in range(3):
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                for average in averages:
                    average.update_parameters(model)
            other, its = copy.deepcopy((model, optimizer))
            other(x, y).backward()
            assert all(p.grad is None for p in model.parameters())
            its.step()
            with torch.no_grad():
                found.append([average.eval()(x, y) for average in averages] + [other(x, y), model(x, y)])
        for mine, theirs in zip(*found, strict=True):
            same(mine, theirs)
    with pytest.raises(RunError, match=r"save pm.state_dict\(\)"):
        torch.save(module, io.BytesIO())


@case
def averages_of_a_model_from_before() -> None:
    """Plain copies that follow the parallel module, by hand and as torch does it."""
    x, y = batch()
    module, eager = pair(Net(mse), (x, y))
    before, found = copy.deepcopy(eager), []
    for model in (module, eager):
        by_hand, average = copy.deepcopy(before), swa_utils.AveragedModel(before)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            now = dict(model.named_parameters())
            with torch.no_grad():
                for name, p in by_hand.named_parameters():
                    p.mul_(0.9).add_(now[name], alpha=0.1)
            average.update_parameters(model)
        found.append([p.detach() for p in (*by_hand.parameters(), *average.parameters())])
    for mine, theirs in zip(*found, strict=True):
        assert type(mine) is torch.Tensor
        same(mine, theirs)


@case
def statistics_taken_anew() -> None:
    """``update_bn``, of the parallel module and of an average of it; training goes on with the momentum of before."""
    x, y = batch()
    torch.manual_seed(0)
    eager = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.3), nn.Linear(16, 4), nn.BatchNorm1d(4, momentum=None)
    ).double()
    module = autopar.parallelize(copy.deepcopy(eager), device_mesh(TWO), x, constraints={"0": {"data": "n"}})
    for model in (module, eager):
        average = swa_utils.AveragedModel(model)
        model(2 * x)
        for each in (model, average):
            swa_utils.update_bn([x, (3 * x - 1, y), x[:6]], each)
            assert each.training
        model(x)
    assert not module[1].running_mean.eq(0).all() and module[1].momentum == 0.3
    mine = autopar.full_state_dict(module, all_ranks=True)
    for name, value in eager.state_dict().items():
        same(mine[name], value)


@case
def one_rank_reads_a_number() -> None:
    """The habit of logging on rank 0: another collective of the other ranks would answer."""
    x, y = batch()
    module, eager = pair(Net(mse), (x, y))
    for step in range(3):
        for model in (module, eager):
            model.zero_grad()
            model(x, y).backward()
        norm = module.first.weight.grad.norm()
        if dist.get_rank() == step % 2:
            at = f"rank {1 - step % 2} is at call {step + 2} of a module"
            with pytest.raises(RunError, match=rf"reads a number of a parameter or gradient, {at}(.|\n)*if rank == 0"):
                print(norm.item())
    module(x, y)
    assert norm.item() == pytest.approx(float(eager.first.weight.grad.norm()))


@case
def a_number_of_a_stage() -> None:
    module, _ = pipeline()
    module.train_step(*batch())
    with mock.patch.object(dtensor_fixes, "_said", set()), pytest.warns(UserWarning, match="that of this rank's stage"):
        assert float(sum(p.grad.norm() for p in module.parameters())) > 0


@case
def a_compiled_module() -> None:
    """torch.compile of the module itself, or of a function that calls it, compiles its program, and no hook of ours."""
    x, y = batch()
    for way in ("module", "function"):
        module, eager = pair(Net(mse), (x, y))
        graphs: list[str] = []

        def backend(graph: Any, inputs: Any, graphs: list[str] = graphs) -> Any:
            graphs.append(str(graph.graph))
            return graph

        @torch.compile(backend=backend)
        def step(x: torch.Tensor, y: torch.Tensor, module: Any = module) -> None:
            (2 * module(x, y)).backward()

        if way == "function":
            step(x, y)
        else:
            (2 * torch.compile(module, backend=backend)(x, y)).backward()
        (eager(x, y) * 2).backward()
        same_gradients(module, eager)
        of_program = sum("linear" in graph or "mm" in graph for graph in graphs)
        assert of_program == 2 and len(graphs) <= 5, len(graphs)  # forward and backward


@case
def optimizers_of_torch() -> None:
    """Those for which DTensor has no way to cut an operator."""
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        torch.optim.Adafactor, torch.optim.Rprop, lambda params: torch.optim.SGD(params, 0.1, fused=True),
    ]  # fmt: skip
    for make in makers:
        module, eager = pair(Net(mse), (x := batch()))
        for model in (module, eager):
            optimizer = make(list(model.parameters()))
            for _ in range(2):
                model(*x).backward()
                optimizer.step()
                optimizer.zero_grad()
        same_weights(module, eager)


@case
def losses_of_parameters() -> None:
    """Functions of torch on parameters: values and gradients, of which DTensor gets some wrong in silence."""
    f, target = nn.functional, torch.linspace(-1, 1, 32).reshape(8, 4)
    rows = torch.tensor([[1, 7], [3, 0]])
    functions: list[Callable[[Any], Any]] = [
        lambda w: f.mse_loss(w, target), lambda w: f.smooth_l1_loss(w, target), lambda w: f.huber_loss(w, target),
        lambda w: f.binary_cross_entropy(w.sigmoid(), target.sigmoid()), lambda w: f.soft_margin_loss(w, target.sign()),
        lambda w: f.cosine_embedding_loss(w, target, torch.ones(8)), lambda w: f.embedding(rows, w).sum(),
        lambda w: f.cross_entropy(w, torch.arange(8) % 4), lambda w: w.gather(0, rows).norm(), lambda w: w.abs().amax(),
        lambda w: f.conv1d(w[None], torch.ones(2, 8, 3)).norm(), lambda w: w.flatten().topk(5)[0].sum(),
        lambda w: f.cosine_similarity(w, target, dim=1).mean(), lambda w: torch.linalg.svdvals(w).sum(),
        lambda w: torch.cdist(w, target).mean(), lambda w: w[w > 0.1].sum(), lambda w: w.std() + w.var(0).sum(),
        lambda w: w.amax(), lambda w: w.amin(), lambda w: w.norm(float("inf")), lambda w: w.exp().sum(()),
        lambda w: w.mean(()) + (w * torch.any(w.detach() > 0, dim=())).norm(), lambda w: w.cumsum(-1).norm(),
        lambda w: (w.cumprod(-2) + w.logcumsumexp(-2)).norm(), lambda w: w.select(-1, 1).norm(),
        lambda w: (w * w.argmax(-2, keepdim=True)).norm(),
        lambda w: f.binary_cross_entropy_with_logits(w[:, 1:], target[:, 1:].sigmoid()),
    ]  # fmt: skip
    mesh, drawn = device_mesh(TWO), torch.randn(8, 4)
    pair(Net(mse), batch())  # DTensors of this mesh are put right with a parallel module on it
    for placement in (Shard(0), Shard(1)):
        for function in functions:
            mine, plain = nn.Parameter(distribute_tensor(drawn, mesh, [placement])), nn.Parameter(drawn.clone())
            values = [function(mine), function(plain)]
            same(values[0].detach(), values[1].detach())
            for value in values:
                value.backward()
            same(mine.grad, plain.grad)
    target = torch.linspace(-1, 1, 25).reshape(5, 5)
    for placement in (Shard(0), Shard(1)):  # pieces of 3 and of 2 rows: the mean of their means is another one
        for function in (*functions[:5], lambda w: f.binary_cross_entropy_with_logits(w, target.sigmoid())):
            mine = nn.Parameter(distribute_tensor(target * 2, mesh, [placement]))
            same(function(mine).detach(), function(target * 2))


@case
def writes_to_parts_of_parameters() -> None:
    """Padding that is zeroed, weights that are partly loaded, pruned, projected: torch loses most of these."""
    writes: list[Callable[[Any], Any]] = [
        lambda w: w[0].zero_(), lambda w: w.__setitem__(5, 0.0), lambda w: w[2:6].copy_(torch.ones(4, 4)),
        lambda w: w.data[:, 1].mul_(3), lambda w: w.detach()[1:][2].zero_(), lambda w: w[::2, 1:3].fill_(0.5),
        lambda w: w.__setitem__(w.abs() < 0.2, 0.0), lambda w: w.__setitem__(torch.tensor([1, 6]), torch.ones(4)),
        lambda w: w.index_copy_(0, torch.tensor([1, 6]), torch.ones(2, 4)), lambda w: w.diagonal().zero_(),
        lambda w: w.t()[2].add_(1), lambda w: w.view(-1)[9].fill_(7), lambda w: w.chunk(2, 0)[1].neg_(),
        lambda w: w.unbind(0)[4].zero_(), lambda w: w.renorm_(2, 0, 0.5), lambda w: w.triu_(), nn.init.eye_,
        lambda w: w.fill_(torch.tensor(2.0)), lambda w: [x.mul_(i) for i, x in enumerate(w.split([3, 5], 0))],
    ]  # fmt: skip
    mesh, drawn = device_mesh(TWO), torch.randn(8, 4)
    pair(Net(mse), batch())  # DTensors of this mesh are put right with a parallel module on it
    for placement in (Shard(0), Shard(1), Replicate()):
        for i, write in enumerate(writes):
            mine, plain = nn.Parameter(distribute_tensor(drawn, mesh, [placement])), nn.Parameter(drawn.clone())
            with torch.no_grad():
                write(plain)
                write(mine)
            assert mine.placements == (placement,), i
            same(mine.detach(), plain.detach())
    (x, y) = batch()
    module, eager = pair(Net(mse), (x, y), **ZERO_FIRST)
    for model in (module, eager):
        with torch.no_grad():
            model.first.weight[3].zero_()
            model.second.weight[:, :2] = 0.25
    same_weights(module, eager)
    same(module(x, y).detach(), eager(x, y).detach())


@case
def an_overflow_in_one_piece() -> None:
    """GradScaler: all ranks skip the step though only one has the infinite element, and the first gradient is whole."""
    (x, y) = batch()
    module, _ = pair(Net(mse), (x, y), params={"first.*": "replicate", "second.*": "S0 use"}, constraints=ROWS)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(module(x, y)).backward()
    before = [whole(p.detach()).clone() for p in module.parameters()]
    if dist.get_rank() == 0:
        dict(module.named_parameters())["second.weight"].grad._local_tensor[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for p, value in zip(module.parameters(), before, strict=True):
        same(p.detach(), value)


# --- derivatives otherwise -------------------------------------------------------------------------------------------


@case
def gradients_of_parameters_by_autograd_grad() -> None:
    x, y = batch(grad=True)
    for cuts in CUTS:
        stored = {"*.weight": "S0"} if cuts is ROWS else None
        module, eager = pair(Net(mse), (x, y), constraints=cuts, params=stored)
        mine = torch.autograd.grad(module(x, y), [*module.parameters(), x])
        theirs = torch.autograd.grad(eager(x, y), [*eager.parameters(), x])
        for a, b in zip(mine, theirs, strict=True):
            same(a, b)
        assert all(p.grad is None for p in module.parameters())


@case
def backward_of_some_inputs() -> None:
    module, eager = pair(Net(mse), batch(), constraints=ROWS)
    x, y = batch()
    module(x, y).backward(inputs=[module.first.weight])
    eager(x, y).backward(inputs=[eager.first.weight])
    same_gradients(module, eager)


@case
def backward_twice() -> None:
    module, eager = pair(Net(with_output), batch())
    x, y = batch()
    for model in (module, eager):
        loss, out = model(x, y)
        loss.backward(retain_graph=True)
        out.sin().mean().backward()
    same_gradients(module, eager)
    loss, _ = module(x, y)
    loss.backward()
    with pytest.raises(RunError, match="retain_graph=True"):
        loss.backward()


@case
def a_gradient_penalty() -> None:
    x, y = batch(grad=True)
    module, eager = pair(Net(mse), (x, y))
    with pytest.raises(RunError, match="create_graph=True"):
        torch.autograd.grad(module(x, y), x, create_graph=True)
    with pytest.raises(RunError, match="create_graph=True"):
        module(x, y).backward(create_graph=True)
    module(x, y).backward()
    x.grad = None
    eager(x, y).backward()
    same_gradients(module, eager)


@case
def a_step_between_forward_and_backward() -> None:
    module, _ = pair(Net(mse), batch(), constraints=ROWS, params={"*": "S0"})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    early = module(*batch())
    for foreach in (False, True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=foreach)
        early = module(*batch())
        module(*batch()).backward()
        optimizer.step()
        with pytest.raises(RunError, match="was changed after the forward"):
            early.backward()


@case
def a_parameter_that_is_thawed() -> None:
    model = Net(mse)
    model.first.requires_grad_(False)
    module, eager = pair(model, batch(), constraints=ROWS)
    x, y = batch()
    module(x, y).backward()
    eager(x, y).backward()
    same_gradients(module, eager)
    module.first.weight.requires_grad_(True)
    with pytest.raises(RunError, match=r"'first.weight' requires grad now and was frozen when the model was captured"):
        module(x, y)


# --- hooks -----------------------------------------------------------------------------------------------------------


@case
def a_hook_on_a_parameter() -> None:
    for cuts in CUTS:
        module, eager = pair(Net(mse), batch(), constraints=cuts)
        for model in (module, eager):
            model.second.weight.register_hook(lambda g: g * 2)
            model.first.bias.register_hook(lambda g: g.clamp(-0.01, 0.01))
        for _ in range(2):  # hooks see this backward's gradient, not the sum
            x, y = batch()
            module(x, y).backward()
            eager(x, y).backward()
            same_gradients(module, eager)
        seen: list[Any] = []
        module.first.weight.register_hook(lambda g, seen=seen: seen.append(whole(g)))
        module.train_step(torch.cat([x, x]), torch.cat([y, y]), microbatches=2)
        eager.zero_grad()
        eager(x, y).backward()
        assert len(seen) == 1, "once a step, on the sum of its microbatches"
        same(seen[0], eager.first.weight.grad)


@case
def an_optimizer_in_backward() -> None:
    module, eager = pair(Net(mse), batch(), constraints=ROWS)
    for model in (module, eager):
        own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p: torch.Tensor, own: Any = own) -> None:
            own[p].step()
            own[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        x, y = batch()
        module(x, y).backward()
        eager(x, y).backward()
    assert all(p.grad is None for p in module.parameters())
    same_weights(module, eager)


@case
def a_hook_on_a_parameter_before() -> None:
    model = Net(mse)
    model.first.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match=r"of parameter 'first.weight'\n  register them after parallelize"):
        pair(model, batch())


@case
def hooks_on_modules_before() -> None:
    for register, text in (
        ("register_forward_hook", "forward hook .*of module 'first'"),
        ("register_forward_pre_hook", "forward pre-hook .*of module 'first'"),
        ("register_full_backward_hook", "backward hook .*of module 'first'"),
        ("register_full_backward_pre_hook", "backward pre-hook .*of module 'first'"),
    ):
        model = Net(mse)
        getattr(model.first, register)(lambda *_: None)
        with pytest.raises(CaptureError, match=text):
            pair(model, batch())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"forward hook .* of all modules"):
        pair(Net(mse), batch())
    handle.remove()


@case
def hooks_on_modules_after() -> None:
    module, _ = pair(Net(mse), batch())
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        with pytest.raises(RunError, match="a hook on a part of a parallel module would never run"):
            getattr(module.first, register)(lambda *_: None)
    seen: list[Any] = []
    module.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    module.register_full_backward_hook(lambda module, before, after: seen.append(after[0]))
    module(*batch(grad=False)).backward()
    assert seen[0] == () and seen[1].item() == 1.0


@case
def a_forward_hook_that_is_traced() -> None:
    model = Net(mse)
    model.first.register_forward_hook(lambda module, args, out: out * 0.5)
    module, eager = pair(model, batch(), hooks="trace")
    x, y = batch()
    module(x, y).backward()
    eager(x, y).backward()
    same_gradients(module, eager)


@case
def weight_norm_and_spectral_norm() -> None:
    model = Net(mse)
    nn.utils.parametrizations.weight_norm(model.first)
    eager = copy.deepcopy(model)
    module = autopar.parallelize(model, dist.get_world_size(), batch())
    x, y = batch()
    module(x, y).backward()
    eager(x, y).backward()
    same_gradients(module, eager)
    old = Net(mse)
    nn.utils.weight_norm(old.first)
    eager = Net(mse)
    nn.utils.weight_norm(eager.first)
    eager.load_state_dict(old.state_dict())
    module = autopar.parallelize(old, dist.get_world_size(), batch())
    module(x, y).backward()
    eager(x, y).backward()
    same_gradients(module, eager)


# --- outputs ---------------------------------------------------------------------------------------------------------

LARGE = 64


def large(**more: Any) -> tuple[Any, nn.Module]:
    """A module whose second output stays in pieces until it is read: its rows are cut."""
    x, y = batch(LARGE)
    module, eager = pair(Net(with_output), (x, y), constraints=ROWS, **more)
    return module, eager


def in_shards() -> tuple[Any, nn.Module]:
    """The same, with the second output left in pieces by its plan."""
    x, y = batch(LARGE)
    captured = autopar.capture(Net(with_output), (x, y))
    found = autopar.plan(
        Net(with_output), "local-x2", (x, y), mesh={"data": 2}, constraints=ROWS, placements={1: "S0"},
        captured=captured,
    )  # fmt: skip
    plan = dataclasses.replace(found, pins=dataclasses.replace(found.pins, outputs={}))
    module, eager = pair(Net(with_output), (x, y), plan=plan, constraints=None)
    assert module.plan.outputs[1] == ("S0",), module.plan.outputs
    return module, eager


@case
def a_term_of_another_output() -> None:
    for made in (large, in_shards):
        module, eager = made()
        x, y = batch(LARGE)
        for model in (module, eager):
            loss, out = model(x, y)
            assert out.shape == (LARGE, 4)
            (loss + out.sin().mean() + out.abs().max()).backward()
        same_gradients(module, eager)
        loss, out = module(x, y)
        assert isinstance(out, torch.Tensor) and not hasattr(out, "placements")
        same(out.mean().detach(), eager(x, y)[1].mean().detach())


@case
def outputs_that_are_not_read_cost_nothing() -> None:
    module, _ = in_shards()
    _, out = module(*batch(LARGE))
    assert isinstance(out, Unread) and out.requires_grad and out.dtype == torch.float64 and len(out) == LARGE
    assert out._plain is None, "asking for its shape gathers nothing"
    numbers = out.detach().numpy()
    assert numbers.shape == (LARGE, 4) and out._plain is not None


@case
def an_output_is_changed_in_place() -> None:
    module, eager = in_shards()
    x, y = batch(LARGE)
    for model in (module, eager):
        loss, out = model(x, y)
        out = out.clone() if model is eager else out
        out *= 2
        out[0] = 0
        (loss + out.sum()).backward()
    same_gradients(module, eager)


@case
def one_rank_reads_an_output() -> None:
    module, eager = in_shards()
    x, y = batch(LARGE)
    loss, out = module(x, y)
    if dist.get_rank() == 0:
        with pytest.raises(RunError, match="rank 0 reads output 1 of call 1, rank 1 is at the backward of call 1"):
            print(out)
    loss.backward()
    eager(x, y)[0].backward()
    same_gradients(module, eager)
    loss, out = module(x, y)
    if dist.get_rank() == 1:
        with pytest.raises(RunError, match="all ranks must read it"):
            out.sum()
    loss, out = module(x, y)  # then all goes on
    same(out.sum().detach(), eager(x, y)[1].sum().detach())


@case
def a_dict_of_losses() -> None:
    def give(out: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"near": mse(out, y), "small": out.abs().mean(), "all": mse(out, y) + out.abs().mean()}

    for chosen in (("near",), ("small",), ("near", "small"), ("all",)):
        module, eager = pair(Net(give), batch(), constraints=ROWS)
        x, y = batch()
        for model in (module, eager):
            losses = model(x, y)
            sum(losses[name] for name in chosen).backward()
        same_gradients(module, eager)


@case
def train_step_of_several_losses() -> None:
    """Trains the output that is called the loss; without one, asks which."""

    def parts(out: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"near": mse(out, y), "small": out.abs().mean()}

    def named(out: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**parts(out, y), "loss": sum(parts(out, y).values())}

    def in_a_row(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(parts(out, y).values())

    for give, names in ((parts, "near, small"), (in_a_row, "0, 1")):
        for module in (pair(Net(give), batch())[0], pipeline(Net(give))[0]):
            with pytest.raises(RunError, match=rf"several scalars .*\(outputs {names}\), none of which is called"):
                module.train_step(*batch(32))
    for make in (lambda net: pair(net, batch()), pipeline):
        module, eager = make(Net(named))
        x, y = batch(32)
        loss = module.train_step(x, y)
        expected = sum(eager(a, b)["loss"] for a, b in zip(x.split(8), y.split(8), strict=True)) / 4
        expected.backward()
        same(loss, expected.detach())
        own = dict(eager.named_parameters())
        for name, p in module.named_parameters():
            same(p.grad, own[name].grad)


@case
def a_loss_outside() -> None:
    module, eager = pair(Net(), (batch()[0],), constraints=ROWS)
    x, y = batch()
    for model in (module, eager):
        mse(model(x), y).backward()
    same_gradients(module, eager)


@case
def a_loss_is_divided_in_place() -> None:
    module, eager = pair(Net(mse), batch())
    for _ in range(2):
        x, y = batch()
        for model in (module, eager):
            loss = model(x, y)
            loss /= 2
            loss.backward()
    same_gradients(module, eager)


# --- broken steps ----------------------------------------------------------------------------------------------------


class Skip(Exception):
    """Raised by who skips a batch."""


@case
def a_backward_that_raises() -> None:
    for more in ({"constraints": COLUMN_ROW}, {"constraints": ROWS, "params": {"*": "S0 use"}}, {"constraints": ROWS}):
        x, y = batch(grad=True)
        module, eager = pair(Net(mse), (x, y), **more)
        breaks = [True]

        def hook(grad: torch.Tensor, breaks: list[bool] = breaks) -> None:
            if breaks[0]:
                raise Skip

        module.second.weight.register_hook(hook)
        x.register_hook(hook)
        for _ in range(2):
            with pytest.raises(Skip):
                module(x, y).backward()
        module.zero_grad()
        breaks[0] = False
        x, y = batch(grad=True)
        module(x, y).backward()
        eager(x, y).backward()
        same_gradients(module, eager)


@case
def a_backward_that_breaks_half_way() -> None:
    for name, more in (
        ("first.weight", {"constraints": COLUMN_ROW}), ("first.weight", {"constraints": ROWS}),
        ("first.weight", {"constraints": ROWS, "params": {"*": "S0 use"}}),
        ("second.weight", {"constraints": ROWS, "params": {"*": "S0 use"}}),
    ):  # fmt: skip
        module, eager = pair(Net(mse), batch(), **more)
        breaks = [True]
        leaf = module._autopar.held_params[name].leaf

        def out_of_memory(_: torch.Tensor, breaks: list[bool] = breaks) -> None:
            if breaks[0]:
                raise Skip

        leaf.register_post_accumulate_grad_hook(out_of_memory)
        with pytest.raises(Skip):
            module(*batch()).backward()
        with pytest.raises(Skip):
            module.train_step(*batch(16), microbatches=2)
        gathered = [held.leaf for held in module._autopar.held_params.values() if held.per_use]
        assert not any(leaf.untyped_storage().nbytes() for leaf in gathered), "nothing gathered for one use stays"
        breaks[0] = False
        assert all(p.grad is None for p in module.parameters()), "a broken step leaves no gradients"
        for _ in range(2):
            x, y = batch()
            module(x, y).backward()
            eager(x, y).backward()
        same_gradients(module, eager)
        module.zero_grad()
        eager.zero_grad()
        x, y = batch(16)
        module.train_step(x, y, microbatches=2)
        (sum(eager(a, b) for a, b in zip(x.split(8), y.split(8), strict=True)) / 2).backward()
        same_gradients(module, eager)


@case
def a_forward_that_raises() -> None:
    module, eager = pair(Net(mse), batch(), constraints=ROWS, params={"*": "S0 use"})
    run = Stage.run

    def breaking(*values: Any, **options: Any) -> tuple[Any, ...]:
        run(*values, **options)
        raise Skip

    with mock.patch.object(Stage, "run", breaking), pytest.raises(Skip):
        module(*batch())
    x, y = batch()
    module(x, y).backward()
    eager(x, y).backward()
    same_gradients(module, eager)


def pipeline(model: nn.Module | None = None, **more: Any) -> tuple[Any, nn.Module]:
    model = model or Net(mse)
    eager = copy.deepcopy(model)
    return autopar.parallelize(model, 2, batch(32), stages=2, microbatches=4, **more), eager


def short_group(seconds: float) -> DeviceMesh:
    """A mesh of both ranks whose collectives wait no longer."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=seconds))
    return DeviceMesh.from_group(group, "cpu", mesh=torch.arange(2), mesh_dim_names=("data",))


@case
def a_forward_that_raises_on_one_rank() -> None:
    """The other one, which waits for it in a collective, says which rank failed, where and how."""
    module = autopar.parallelize(Net(mse), short_group(2.0), batch(), constraints=COLUMN_ROW)
    module(*batch()).backward()

    def breaking(*values: Any, **options: Any) -> tuple[Any, ...]:
        raise ArithmeticError("trouble on rank 1")

    if dist.get_rank() == 1:
        with mock.patch.object(Stage, "run", breaking), pytest.raises(ArithmeticError):
            module(*batch())
    else:
        with pytest.raises(RunError, match="rank 1 failed in the forward of call 2: ArithmeticError: trouble on"):
            module(*batch())


@case
def a_batch_that_one_rank_skips() -> None:
    """It must not go on while the other rank is in the step that it broke off."""
    failures = Failures([0, 1])
    for rank, skips in ((0, True), (1, True), (1, False)):
        if dist.get_rank() == rank or skips:
            with pytest.raises(Skip), failures.during("the forward of call 7"):
                raise Skip
        if skips:
            failures.settle()
    failures.timeout = 0.5
    if dist.get_rank() == 1:
        with pytest.raises(RunError, match=r"rank 1 broke off the forward of call 7 and goes on, rank 0 did not in 0"):
            failures.settle()
    dist.barrier()


@case
def a_pipeline_whose_step_breaks() -> None:
    """On every rank after another number of its actions: messages are under way that nobody takes."""
    for schedule in ("1f1b", "zb-h1"):
        module, eager = pipeline(schedule=schedule)
        for at in ((3, 1), (3, 3), (2, 2), (3, 4)):
            left = at[dist.get_rank()]

            def counted(do: Any) -> Any:
                def done(*args: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left == 0:
                        raise Skip
                    return do(*args)

                return done

            doing = {name: counted(getattr(Flight, name)) for name in ("forward", "backward")}
            with mock.patch.multiple(Flight, **doing), pytest.raises(Skip):
                module.train_step(*batch(32))
            x, y = batch(32)
            loss = module.train_step(x, y)
            eager.zero_grad()
            expected = sum(eager(a, b) for a, b in zip(x.split(8), y.split(8), strict=True)) / 4
            expected.backward()
            same(loss, expected.detach())
            own = dict(eager.named_parameters())
            for name, p in module.named_parameters():
                same(p.grad, own[name].grad)
            module.zero_grad()


@case
def hooks_in_a_pipeline() -> None:
    module, eager = pipeline()
    own = dict(eager.named_parameters())
    seen = []
    for name, p in module.named_parameters():
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    x, y = batch(32)
    module.train_step(x, y)
    (sum(eager(a, b) for a, b in zip(x.split(8), y.split(8), strict=True)) / 4).backward()
    for name, p in module.named_parameters():
        same(p.grad, 2 * own[name].grad)
    assert sorted(seen) == sorted(n for n, _ in module.named_parameters())


class ReadsTwice(nn.Module):
    """Reads ``x`` in its first and its last layer, and a ``shift`` that is the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return ((self.second(torch.tanh(self.first(x + shift))) * x) ** 2).mean()


@case
def input_gradients_of_a_pipeline() -> None:
    for schedule in ("1f1b", "zb-h1"):
        model = ReadsTwice()
        eager = copy.deepcopy(model)
        example = torch.randn(32, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        module = autopar.parallelize(model, 2, example, stages=2, microbatches=4, cuts=["second"], schedule=schedule)
        for _ in range(2):
            x, shift = batch(32, grad=True)[0], torch.randn(8, generator=torch.Generator().manual_seed(3))
            twin = x.detach().clone().requires_grad_(), shift.clone().requires_grad_()
            shift.requires_grad_()
            for _ in range(2):  # a second step adds to what the first one left
                module.train_step(x, shift)
                (sum(eager(part, twin[1]) for part in twin[0].split(8)) / 4).backward()
            same(x.grad, twin[0].grad)
            same(shift.grad, twin[1].grad)
        module.train_step(x.detach(), shift.detach())
        module.evaluate(x, shift)
        assert module.eval()(x.detach(), shift.detach()).ndim == 0
        with pytest.raises(RunError, match=r"input args\[0\] requires grad, and outputs of a pipelined model have"):
            module(x, shift.detach())


@case
def a_layer_in_front_of_a_pipeline() -> None:
    """``train_step`` runs the backward of what its inputs were made from."""
    front = nn.Linear(8, 8)
    model = Net(mse)
    eager, eager_front = copy.deepcopy(model), copy.deepcopy(front)
    x, y = batch(32)
    module = autopar.parallelize(model, 2, (front(x), y), stages=2, microbatches=4)
    ours = torch.optim.SGD([*front.parameters(), *module.parameters()], lr=0.1)
    theirs = torch.optim.SGD([*eager_front.parameters(), *eager.parameters()], lr=0.1)
    for _ in range(3):
        x, y = batch(32)
        loss = module.train_step(front(x), y, optimizer=ours)
        expected = sum(eager(eager_front(a), b) for a, b in zip(x.split(8), y.split(8), strict=True)) / 4
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        same(loss, expected.detach())
        same_weights(front, eager_front)
    own = dict(eager.named_parameters())
    for name, p in module.named_parameters():
        same(p.detach(), own[name].detach())


@case
def an_input_of_a_pipeline_that_was_not_to_want_a_gradient() -> None:
    fixed, _ = pipeline(shapes="fixed")
    with pytest.raises(RunError, match=r"input args\[0\] requires grad, and the example inputs of parallelize did not"):
        fixed.train_step(*batch(32, grad=True))
    module, eager = pipeline()
    x, y = batch(32, grad=True)
    alone = x.detach().clone().requires_grad_()
    module.train_step(x, y)
    eager(alone, y).backward()
    assert x.grad is not None and alone.grad is not None
    same(x.grad, alone.grad)


@case
def parts_are_chosen_by_class() -> None:
    """Groups of parameters by module class, as minGPT makes them; in a pipeline each rank has its own stage's."""
    for module, eager in (pair(Net(mse), batch()), pipeline()):
        decay = {f"{path}.weight" for path, part in module.named_modules() if isinstance(part, nn.Linear)}
        names = dict(module.named_parameters())
        decay &= names.keys()
        assert decay == {name for name in names if name.endswith("weight")} and decay
        ours, theirs = (
            torch.optim.AdamW(
                [
                    {"params": [p for n, p in m.named_parameters() if n.endswith("weight")], "weight_decay": 0.5},
                    {"params": [p for n, p in m.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
                ],
                lr=0.1,
            ) if m is eager else torch.optim.AdamW(
                [
                    {"params": [names[n] for n in sorted(decay)], "weight_decay": 0.5},
                    {"params": [names[n] for n in sorted(names.keys() - decay)], "weight_decay": 0.0},
                ],
                lr=0.1,
            )
            for m in (module, eager)
        )  # fmt: skip
        x, y = batch(32 if len(names) == 2 else 8)
        module.train_step(x, y, optimizer=ours)
        eager(x, y).backward()
        theirs.step()
        wanted = dict(eager.named_parameters())
        for name, p in names.items():
            same(p.detach(), wanted[name].detach())


# --- batches ---------------------------------------------------------------------------------------------------------


@case
def each_rank_passes_its_own_batch() -> None:
    module, eager = pair(Net(mse), batch(), constraints=ROWS)
    x, y = batch()
    for own, input_name in (((x + dist.get_rank(), y), "args[0]"), ((x, y * (1 + dist.get_rank())), "args[1]")):
        with pytest.raises(RunError, match="has other values on rank 1 than on rank 0") as caught:
            module(*own)
        assert input_name in str(caught.value) and "placements={'" in str(caught.value)
    module(x, y).backward()
    eager(x, y).backward()
    same_gradients(module, eager)
    for _ in range(4, 10):
        module(x, y)
    with pytest.raises(RunError, match="has other values"):
        module(x + dist.get_rank(), y)  # the tenth call


@case
def one_rank_has_a_wrong_batch() -> None:
    module, _ = pair(Net(mse), batch(), constraints=ROWS, shapes="fixed")
    x, y = batch(8 if dist.get_rank() == 0 else 6)
    with pytest.raises(RunError, match="pass the whole batch on every rank") as caught:
        module(x, y)
    assert ("on rank 1: " in str(caught.value)) == (dist.get_rank() == 0)


@case
def each_rank_passes_its_own_rows_of_a_pinned_input() -> None:
    x, y = batch()
    module, eager = pair(Net(mse), (x, y), constraints=ROWS, placements={"x": "S0", "y": "S0"})
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    module(x[mine], y[mine]).backward()
    eager(x, y).backward()
    same_gradients(module, eager)


@case
def each_rank_of_a_pipeline_passes_its_own_batch() -> None:
    module, _ = pipeline()
    x, y = batch(32)
    with pytest.raises(RunError, match="has other values on rank 1 than on rank 0"):
        module.train_step(x + dist.get_rank(), y)
    module.train_step(x, y)


# --- parameters ------------------------------------------------------------------------------------------------------


@case
def ranks_write_random_numbers_of_their_own() -> None:
    """A whole parameter that is initialized, or a gradient that is made noisy, with another seed on each rank."""
    own = torch.Generator().manual_seed(1337 + dist.get_rank())
    for make, rows in ((lambda: pair(Net(mse), batch(), constraints=ROWS)[0], 8), (tied, 32)):
        module, x = make(), batch(rows)
        step = module.train_step
        step(*x)
        with torch.no_grad():
            next(module.parameters()).to_local().normal_(generator=own)
        with pytest.raises(RunError, match="has other values on rank 1 than on rank 0, and both hold the same piece"):
            step(*x)
        autopar.load_full_state_dict(module, autopar.full_state_dict(module) or None)
        step(*x)
    module, _ = pair(Net(mse), batch(), constraints=ROWS)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    module(*batch()).backward()
    grad = module.second.bias.grad.to_local()
    grad.add_(torch.randn(grad.shape, generator=own), alpha=1e-3)
    optimizer.step()
    with pytest.raises(RunError, match=r"parameter 'second\.bias' .*has other values on rank 1"):
        module(*batch())


@case
def ranks_write_to_pieces_of_their_own() -> None:
    """Each rank's piece is another one, so other values are right."""
    module, _ = pair(Net(mse), batch(), constraints=COLUMN_ROW)
    own = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        module.first.weight.to_local().normal_(generator=own)
    module(*batch()).backward()


class Tied(nn.Module):
    """Reads one weight in its first and in its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.second = nn.Parameter(torch.randn(8, 8) / 3), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse((torch.tanh(self.second(torch.tanh(x @ self.weight))) @ self.weight)[:, :4], y)


def tied() -> Any:
    """A pipeline of two stages, each of which has a copy of ``weight``."""
    return pipeline(Tied(), cuts=["second"])[0]


@case
def a_frozen_average_is_called_with_other_rows() -> None:
    """An average that samples: a copy of the parallel module, frozen, in eval mode, with batches of its own size."""
    x, _ = batch()
    module, eager = pair(Net(), x)
    averages = [copy.deepcopy(each).eval().requires_grad_(False) for each in (module, eager)]
    for rows in (3, 8):
        mine, theirs = (average(x[:rows]) for average in averages)
        assert not mine.requires_grad
        same(mine, theirs)
    for parallel, plain in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert not parallel.requires_grad and not plain.requires_grad
    same(module(x).detach(), eager(x).detach())


@case
def a_validation_in_inference_mode() -> None:
    """In parameters that are gathered, and in a program that is made there; training goes on with both shapes."""
    x, _ = batch()
    for lifetime in (" use", ""):
        module, eager = pair(Net(), x, constraints=ROWS, params={"*.weight": f"S0{lifetime}"})
        for model in (module, eager):
            model.eval()
        with torch.inference_mode():
            same(module(x[:6]), eager(x[:6]))
            same(module(x), eager(x))
            same(module(x[:6].clone()), eager(x[:6]))
        for model in (module, eager):
            model.train()
        for rows in (6, 8):
            module(x[:rows]).square().sum().backward()
            eager(x[:rows]).square().sum().backward()
        same_gradients(module, eager)


class TwoNames(nn.Module):
    """Its first layer and its last but one have one weight, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.last(self.second(torch.tanh(self.first(x)))), y)


@case
def another_parameter_in_place_of_a_tied_one_or_of_one_of_other_ranks() -> None:
    """The program would not read it, so it is refused: the tied one on all ranks, the other where it is not held."""
    for options in ({"mesh": 2}, {"mesh": 2, "stages": 2, "microbatches": 2, "cuts": ["second"]}):
        module = autopar.parallelize(TwoNames(), example_inputs=batch(), **options)
        before = dict(module.named_parameters())
        for layer, other in ((module.first, "second"), (module.second, "first")):
            with pytest.raises(RunError, match=rf"replaced by another one, and it is tied to {other}\.weight"):
                layer.weight = nn.Parameter(torch.zeros(8, 8))
        if "last.bias" not in before:
            with pytest.raises(RunError, match=r"'last\.bias' .* is in a stage of other ranks"):
                module.last.bias = nn.Parameter(torch.zeros(4))
        after = dict(module.named_parameters())
        assert [*after] == [*before] and all(after[name] is before[name] for name in before)


@case
def an_error_at_the_end_of_parallelize() -> None:
    """The model and its optimizer are as they were, on all ranks."""
    x, _ = batch()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    eager, params = copy.deepcopy(model), dict(model.named_parameters())
    eager(x).sum().backward()
    optimizer.zero_grad()
    model(x).sum().backward()
    for options in ({}, {"stages": 2, "microbatches": 2, "loss_fn": lambda out: out.square().mean()}):
        with pytest.raises(Exception, match="Invalid backend"):
            autopar.parallelize(model, 2, x, optimizer=optimizer, compile={"backend": "nope"}, **options)
        assert type(model) is Net and all(param is params[name] for name, param in model.named_parameters())
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params.values(), strict=True))
        assert all(a is b for a, b in zip(optimizer.state, params.values(), strict=True))
        same(model(x).detach(), eager(x).detach())
        same_gradients(model, eager)
