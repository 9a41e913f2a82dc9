"""What one rank does in the tests of mixed precision."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autopar
import autopar.words.precision
from autopar.rules.families.sharded_random import bits_at
from autopar.runtime.parameters import rounded_steps

CUTS: dict[str, dict[str, Any]] = {
    "data": {"constraints": {"*up": {"data": "b"}}},
    "zero": {"constraints": {"*up": {"data": "b"}}, "params": {"*.weight": "S0 use"}},
    "tensor": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}},
}


class Net(nn.Module):
    """A tied weight, so that its cast is used twice, and a norm, which stays in float32."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 12)
        self.up, self.norm, self.down = nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 12)
        self.head = nn.Linear(12, 16, bias=False)
        self.head.weight = self.words.weight
        self.inside = inside

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.inside or torch.is_autocast_enabled("cpu")):
            x = self.words(ids)
            with torch.autocast("cpu", enabled=False):
                x = x + x.float().square().to(x.dtype)
            return self.head(self.down(self.norm(self.up(x)).relu()))


def batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 16, (8, 6), generator=generator)
    return ids, ids.roll(1, 1)


def spread(model: nn.Module, example: Any, mesh: tuple[int, ...], **options: Any) -> Any:
    names = ("data", "tensor")[: len(mesh)]
    return autopar.parallelize(model, init_device_mesh("cpu", mesh, mesh_dim_names=names), example, **options)


def apart(pm: Any, alone: nn.Module) -> float:
    """By how much gradients differ: the norm of the difference by that of the gradient, the worst of all parameters."""
    worst = 0.0
    for name, param in pm.named_parameters():
        theirs = alone.get_parameter(name).grad
        assert theirs is not None
        mine = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        worst = max(worst, float((mine - theirs).norm() / theirs.norm()))
    return worst


def trained(cut: str, inside: bool, mesh: tuple[int, ...] = (2,)) -> tuple[float, float, int]:
    """Three steps beside one device: the worst difference under autocast, and without it, and how many captures.

    Where autocast is around the call, the second step is without: another program over the same parameters.
    """
    pm = spread(Net(inside), batch()[:1], mesh, **CUTS[cut])
    alone = Net(inside)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pm, alone)]
    low = full = 0.0
    for step in range(4):
        ids, labels = batch(step)
        on = not inside and step % 2 == 1
        for model in (pm, alone):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                out = model(ids)
                assert out.dtype == (torch.bfloat16 if inside or on else torch.float32)
            F.cross_entropy(out.flatten(0, 1).float(), labels.flatten()).backward()
        if inside or on:
            low = max(low, apart(pm, alone))
        else:
            full = max(full, apart(pm, alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        autopar.load_full_state_dict(pm, alone.state_dict())
    return low, full, pm._autopar.programs.captures


def scaled(cut: str, infinite_on: int | None) -> tuple[float, float, bool]:
    """A step with a gradient scaler and clipping beside one device: the worst difference of a parameter, the scale
    afterwards, and whether the step was skipped.

    Args:
        infinite_on: the rank on whose piece of a gradient there is an infinity.
    """
    pm, alone = spread(Net(True), batch()[:1], (2,), **CUTS[cut]), Net(True)
    before = {name: value.clone() for name, value in alone.state_dict().items()}
    scale = 0.0
    for model in (pm, alone):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        ids, labels = batch()
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())
        scaler.scale(loss).backward()
        grad = model.up.weight.grad
        if infinite_on is not None and model is pm:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local[0, 0] = torch.inf if dist.get_rank() == infinite_on else local[0, 0]
        elif infinite_on is not None:
            grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        assert scale in (0.0, scaler.get_scale())
        scale = scaler.get_scale()
    whole = autopar.full_state_dict(pm, all_ranks=True)
    worst = max(float((whole[name] - value).abs().max()) for name, value in alone.state_dict().items())
    return worst, scale, all(torch.equal(value, before[name]) for name, value in whole.items())


def scaled_steps(cut: str, infinite_in: str) -> tuple[float, float, list[float], list[float]]:
    """Three calls of ``train_step`` with a gradient scaler beside one device; in the second a gradient overflows.

    Args:
        cut: one of :data:`CUTS`, or "stages".
        infinite_in: the parameter whose gradient overflows in the second step.

    Returns:
        The worst difference of a loss and of a parameter, and the scale after each step, here and on one device.
    """
    if cut == "stages":
        pm = autopar.parallelize(
            Net(False), 2, batch()[0], loss_fn=loss_of, stages=2, microbatches=1, schedule="1f1b", cuts=["norm"]
        )
    else:
        pm = spread(Net(False), batch()[0], (2,), loss_fn=loss_of, **CUTS[cut])
    alone = Net(False)
    scales: list[list[float]] = []
    losses: list[list[float]] = []
    for model in (pm, alone):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        scales.append([])
        losses.append([])
        for number in range(3):
            params = dict(model.named_parameters())
            hook = None
            if number == 1 and infinite_in in params:
                hook = params[infinite_in].register_hook(lambda grad: grad * torch.inf)
            ids = batch(number)[0]
            if model is alone:
                loss = loss_of(alone(ids))
                scaler.scale(loss).backward()
            if number == 2:  # with clipping, the caller's own steps
                loss = loss if model is alone else pm.train_step(ids, scaler=scaler)
                scaler.unscale_(optimizer)
                if cut == "stages" and model is pm:
                    pm.clip_grad_norm_(0.01)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if number == 2 or model is alone:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            else:
                loss = pm.train_step(ids, optimizer=optimizer, scaler=scaler)
            if hook is not None:
                hook.remove()
            losses[-1].append(float(loss.detach()))
            scales[-1].append(scaler.get_scale())
    whole = autopar.full_state_dict(pm, all_ranks=True)
    worst = max(float((whole[name] - value).abs().max()) for name, value in alone.state_dict().items())
    return max(abs(a - b) / b for a, b in zip(*losses, strict=True)), worst, scales[0], scales[1]


def low(cut: str, mesh: tuple[int, ...] = (2,)) -> float:
    """Steps of a model in bfloat16 beside one device; the worst difference of gradients."""
    pm = spread(Net(False).bfloat16(), batch()[:1], mesh, **CUTS[cut])
    alone = Net(False).bfloat16()
    worst = 0.0
    for step in range(3):
        ids, labels = batch(step)
        for model in (pm, alone):
            F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten()).backward()
        worst = max(worst, apart(pm, alone))
        for model in (pm, alone):
            assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in model.parameters() if p.grad is not None)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        autopar.load_full_state_dict(pm, alone.state_dict())
    return worst


WIDE = autopar.Precision(params="float32", master="float64", moments="float64", reduce="float64")
"""The steps of ``bf16-mixed`` in formats in which sums in another order differ by 1e-7 alone."""
NARROW = autopar.Precision(params="float32", master="float64", moments="float32", reduce="float64")
ROUNDED = autopar.Precision(
    params="float32", master="float64", moments="bfloat16", reduce="float64", stochastic_rounding=True
)
BY_NAME = {"wide": WIDE, "narrow": NARROW, "rounded": ROUNDED}


def in_stages() -> tuple[float, float, float]:
    """A pipeline that was captured in float32, and is called under autocast: how far its losses are from those of one
    device under the same autocast, its weights after the step, and how far autocast is from float32."""
    pm = autopar.parallelize(
        Net(False), 2, batch()[0], loss_fn=loss_of, stages=2, microbatches=2, schedule="1f1b", cuts=["norm"]
    )
    alone = Net(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pm, alone)]
    apart_by, full = 0.0, float(loss_of(alone(batch()[0])))
    for on in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            mine = float(pm.train_step(batch()[0]))
        theirs = 0.0
        for ids in batch()[0].chunk(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                loss = loss_of(alone(ids)) / 2
            loss.backward()
            theirs += float(loss.detach())
        apart_by = max(apart_by, abs(mine - theirs) / theirs)
        if full:
            low, full = abs(theirs - full) / full, 0.0
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = autopar.full_state_dict(pm, all_ranks=True)
    return apart_by, max(float((whole[n] - v).abs().max()) for n, v in alone.state_dict().items()), low


def policy_step(master: nn.Module, low: nn.Module, optimizer: Any, policy: autopar.Precision, parts: int = 1) -> Any:
    """A step of the policy written out, on one device: gradients of microbatches add up in the reduction's format.

    Args:
        master: what the optimizer steps on; ``low`` is the same model, to compute with.
    """
    with torch.no_grad():
        for p, q in zip(low.parameters(), master.parameters(), strict=True):
            p.copy_(q)
    wide = getattr(torch, policy.reduce)
    sums = [torch.zeros_like(p, dtype=wide) for p in master.parameters()]
    total = 0.0
    for ids in batch()[0].chunk(parts):
        low.zero_grad()
        loss = loss_of(low(ids)) / parts
        loss.backward()
        total += float(loss.detach())
        for kept, p in zip(sums, low.parameters(), strict=True):
            kept += 0 if p.grad is None else p.grad
    for p, kept in zip(master.parameters(), sums, strict=True):
        p.grad = kept.to(p.dtype)
    optimizer.step()
    _round(master, optimizer, policy)
    return total


def _round(master: nn.Module, optimizer: Any, policy: autopar.Precision) -> None:
    """What one device has of moments that are kept in another format than it steps in."""
    if policy.moments == policy.master:
        return
    for name, p in master.named_parameters():
        state = optimizer.state[p]
        for position, key in ((2, "exp_avg"), (3, "exp_avg_sq")):
            kept = nearest = state[key].to(getattr(torch, policy.moments))
            if policy.stochastic_rounding:
                places = [torch.arange(n) for n in p.shape]
                random = bits_at(state["step"].long(), rounded_steps._site(name, position), tuple(p.shape), places)
                kept = rounded_steps.stochastically_rounded(state[key], random)
                assert not torch.equal(kept, nearest)
            state[key].copy_(kept)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1).float(), torch.arange(out.shape[0] * out.shape[1]) % 16)


def policy(name: str, cut: str, mesh: tuple[int, ...] = (2,), stages: int | None = None) -> dict[str, Any]:
    """Steps under a policy beside one device, and bytes beside those that the plan counts."""
    chosen = BY_NAME.get(name, name)
    parsed = autopar.words.precision.parse_precision(chosen)
    parts = 2 if stages else 1
    options: dict[str, Any] = dict(CUTS[cut]) if cut else {}
    if stages:
        pm = autopar.parallelize(
            Net(False), 2, batch()[0], loss_fn=loss_of, precision=chosen, stages=stages, microbatches=parts,
            schedule="1f1b", cuts=["norm"], **options,
        )  # fmt: skip
    else:
        pm = spread(Net(False), batch()[:1], mesh, loss_fn=loss_of, precision=chosen, **options)
    master, low_model = Net(False).to(getattr(torch, parsed.master)), Net(False).to(parsed.low)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pm, master)]
    worst = 0.0
    for _ in range(3):
        mine = pm.train_step(batch()[0])
        of_one = policy_step(master, low_model, optimizers[1], parsed, parts)
        worst = max(worst, abs(float(mine) - of_one) / abs(of_one), *([] if stages else [apart(pm, master)]))
        local = sum(_local(p.grad).nbytes for p in set(pm.parameters()))
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert {p.dtype for p in pm.parameters()} == {getattr(torch, parsed.master)}
    whole = autopar.full_state_dict(pm, all_ranks=True)
    values = max(float((whole[n] - v).abs().max()) for n, v in master.state_dict().items())
    assert whole["up.weight"].dtype == getattr(torch, parsed.master)
    if stages:
        return {"worst": worst, "values": values}
    price = pm.plan.price
    for_one_use = [prod(h.used_shape) * h.dtype.itemsize for h in pm._autopar.held_params.values() if h.per_use]
    state = [v for p in optimizers[0].state.values() for v in p.values()]
    return {
        "worst": worst, "values": values,
        "counted": (price.parameter_bytes, price.gradient_bytes, price.optimizer_bytes, price.gathered_bytes),
        "there": (
            sum(_local(p).nbytes for p in set(pm.parameters())), local, sum(_local(v).nbytes for v in state),
            sum(h.leaf.nbytes for h in pm._autopar.held_params.values() if not h.alias and not h.per_use)
            + 2 * max(for_one_use, default=0),  # this one and the next, which is fetched ahead
        ),
    }  # fmt: skip


def _local(x: Any) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
