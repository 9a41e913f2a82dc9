"""Writes and aliases: every way to write a tensor through another gives what eager mode gives, or one clear error.

Each habit is the ``forward`` of a small module with two linear layers ``a`` and ``b`` (8 to 8), a few buffers and a
plain tensor, called with x [4 8] in float64. Its captured program on one device is compared with the module itself over
two batches: loss, parameter gradients, and the buffers that the batches leave behind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from procs.in_turn import marked
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.comparison.in_process_ranks import run_step
from autopar.comparison.program_vs_eager import inputs_of, one_device, state_of
from autopar.errors import CaptureError
from autopar.lower.emit import lower
from autopar.plans.plan import StagePlan

Forward = Callable[["Habit", Tensor], Tensor]
HABITS: dict[str, Forward] = {}
REFUSED: dict[str, tuple[Forward, str]] = {}


class Habit(nn.Module):
    """What a habit may use; ``forward`` is the habit."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.body = forward
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("state", torch.zeros(4, 8))
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(6, 8))
        self.plain = torch.zeros(4, 8, dtype=torch.float64)
        self.twin = nn.Linear(8, 8)
        self.register_buffer("part", torch.zeros(8))
        self.register_buffer("part_of", self.part[:4])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def habit(forward: Forward) -> Forward:
    HABITS[forward.__name__] = forward
    return forward


def refused(match: str) -> Callable[[Forward], Forward]:
    def register(forward: Forward) -> Forward:
        REFUSED[forward.__name__] = forward, match
        return forward

    return register


# -- filled, one part after the other


@habit
def two_halves_of_two_zeros(s: Habit, x: Tensor) -> Tensor:
    p = torch.zeros(4, 8, dtype=x.dtype)
    p[:, :4] = s.a(x)[:, :4]
    q = torch.zeros(4, 8, dtype=x.dtype)
    q[:, 4:] = s.b(x)[:, 4:]
    return (p * q.roll(4, 1) + p - 2 * q).square().sum()


@habit
def outputs_filled_in_a_loop(s: Habit, x: Tensor) -> Tensor:
    out = x.new_empty(3, 4, 8)
    h = x
    for i in range(3):
        h = s.a(h)
        out[i] = h
    return (out * torch.arange(1, 25).reshape(3, 1, 8)).sum() + out[1].square().sum()


@habit
def lists_of_tensors_written_later(s: Habit, x: Tensor) -> Tensor:
    caches = [torch.zeros(4, 4, 8, dtype=x.dtype) for _ in range(2)]
    for t in range(3):
        for i, cache in enumerate(caches):
            cache[:, t] = s.a(x) * (t + i + 1)
    return sum((c * c.flip(1)).sum() * (i + 1) for i, c in enumerate(caches))


@habit
def a_cache_grows_by_slices(s: Habit, x: Tensor) -> Tensor:
    k = x.new_zeros(4, 6, 8)
    total = x.sum()
    for t in range(0, 6, 2):
        k[:, t : t + 2] = s.a(x).unsqueeze(1)
        total = total + (k[:, : t + 2].clone() * s.b(x).unsqueeze(1)).sum()
    return total


@habit
def every_second(s: Habit, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h[..., ::2] = s.a(x)[..., :4]
    h[..., 1::2] = s.b(x)[..., 4:]
    return h.square().sum()


@habit
def negative_slices(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h[-1] = 0.5
    h[:, -3:-1] *= 2
    h[..., -1] += s.b(x)[..., 0]
    return h.square().sum()


@habit
def broadcast_into_slices(s: Habit, x: Tensor) -> Tensor:
    h = torch.zeros(4, 3, 8, dtype=x.dtype)
    h[:, 0] = s.a(x)
    h[:, 1:] = s.b(x)[:, None]
    h[1] = s.a.bias
    h[0, 0, 0] = x[0, 0]
    return h.square().sum()


@habit
def copied_with_cast_and_broadcast(s: Habit, x: Tensor) -> Tensor:
    h = torch.zeros(4, 4, 8, dtype=torch.float64)
    h.copy_(s.a(x).float())
    i = torch.zeros(4, 8, dtype=torch.int64)
    i.copy_(x[0] * 3)
    return (h.square() * i).sum()


# -- clones


@habit
def a_clone_changed(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    z = h.clone()
    z.mul_(2)
    return (h + z.square()).sum()


@habit
def the_cloned_changed(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    z = h.clone()
    h.mul_(2)
    return (h * 3 + z.square()).sum()


@habit
def contiguous_is_a_copy_of_a_transpose(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    t = h.t().contiguous()
    t[0] = 3
    return (h.square() + t.t()).sum()


@habit
def contiguous_is_the_tensor_itself(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.contiguous().mul_(2)
    h.to(torch.float64).add_(1)
    h.reshape(8, 4)[0] = 1
    h.flatten()[3:9] += 1
    return h.square().sum()


@habit
def reshape_of_a_transpose_is_a_copy(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.t().reshape(-1).mul_(5)
    h.t().flatten(0).zero_()
    return h.square().sum()


@habit
def casts_are_copies(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    f = h.float()
    f.zero_()
    h.to(torch.float64, copy=True).zero_()
    return h.square().sum() + f.sum()


@habit
def dropout_that_drops_nothing_is_the_tensor_itself(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    F.dropout(h, 0.5, training=False).mul_(2)
    F.dropout(h, 0.0, training=True).add_(1)
    return h.square().sum()


@habit
def in_place_dropout_that_drops_nothing(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    F.dropout(h, 0.0, training=True, inplace=True)
    F.dropout(h, 0.3, training=False, inplace=True)
    F.dropout1d(h, 0.3, training=False, inplace=True)
    F.alpha_dropout(h, 0.3, training=False, inplace=True)
    F.dropout(x, 0.0, inplace=True)
    return h.square().sum()


# -- written through views


@habit
def through_unsqueeze(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.unsqueeze(0).mul_(3)
    h.unsqueeze(-1).squeeze(-1).add_(1)
    return h.square().sum()


@habit
def through_the_diagonal(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.diagonal().mul_(0)
    h.diagonal(1).add_(s.b(x)[0, :4])
    g = s.b(torch.cat([x, x]))
    g.fill_diagonal_(2.0)
    return h.square().sum() + g.square().sum()


@habit
def through_transposes(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.t().mul_(torch.arange(4))
    h.view(2, 2, 8).permute(2, 0, 1)[3:5] += 1
    h.transpose(0, 1)[2].zero_()
    h.T.masked_fill_(x.t() > 0.7, 5.0)
    h.view(2, 2, 8).movedim(0, 2).mT.mul_(2)
    h.swapaxes(0, 1).swapdims(0, 1).add_(1)
    return h.square().sum()


@habit
def through_chunks(s: Habit, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = s.a(x)
        first, second = h.chunk(2, -1)
        first.mul_(2)
        u = h.split([1, 3])
        u[1].add_(1)
        for i, row in enumerate(h.unbind()):
            row.add_(i)
        torch.tensor_split(h, 3, 1)[1].zero_()
        torch.hsplit(h, 4)[3].neg_()
    return (s.b(x) * h).square().sum() + first.sum() * s.b(x).sum() + second.sum()


@habit
def through_narrow_and_select(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.narrow(1, 2, 3).mul_(2)
    h.select(0, 1).sin_()
    h[2:][:, 1:][0].add_(s.b(x)[0, 1:])
    h.view(-1)[5:21].view(4, 4)[1:3] = -1
    return h.square().sum()


@habit
def through_expand_of_one(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.expand(4, 8).mul_(2)
    h.expand(1, 4, 8).add_(1)
    h[:1].expand(3, 8)[1].mul_(3)
    return h.square().sum()


@habit
def through_strides(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.as_strided((3, 2), (9, 2), 1).mul_(7)
    t = h.t().contiguous().t()
    t.as_strided((5,), (3,), 2).add_(s.b(x)[0, :5])
    return (h.square() + t).sum() + h.as_strided((3, 3), (1, 2)).square().sum()


@habit
def through_unfold_without_overlap(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.unfold(1, 2, 2)[:, 1].mul_(3)
    h.unfold(0, 2, 2).mul_(2)
    return h.square().sum()


@habit
def through_complex_views(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    c = torch.view_as_complex(h.view(4, 4, 2))
    c.mul_(torch.tensor(2j, dtype=torch.complex128))
    c.real.add_(1)
    c.imag[1] = 3
    torch.view_as_real(c)[..., 0].mul_(2)
    return h.square().sum()


@habit
def through_another_dtype(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x).detach().clone()
    h.view(torch.int64).bitwise_and_(~0xFFFF)
    return (h * s.b(x)).sum()


@habit
def relu_of_a_view(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    F.relu(h[:, :4], inplace=True)
    h = h.clone()
    F.leaky_relu_(h[:, 4:])
    g = s.b(x)
    F.silu(g[0], inplace=True)
    F.gelu(g[1:2, 3])
    return (h * g).sum()


@habit
def broadcast_tensors_share_memory(s: Habit, x: Tensor) -> Tensor:
    h, g = s.a(x), s.b(x)
    u, _ = torch.broadcast_tensors(h, g)
    h.mul_(2)
    return (u * g).sum()


@habit
def einsum_may_be_a_view(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    e = torch.einsum("ij->ji", h)
    h.mul_(2)
    return (e * s.b(x).t()).sum()


# -- views that were taken before


@habit
def a_view_taken_before(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    v = h.view(-1)
    h.mul_(2)
    return (v * torch.arange(32)).square().sum()


@habit
def views_of_views_taken_before(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    v, w = h.view(2, 16), h.t()[3:]
    q, k = v[:, :8], v[:, 8:].unfold(1, 2, 2)
    h[1] += s.b(x)[0]
    w[0].mul_(3)
    v.neg_()
    return (v.square().sum() + (w * torch.arange(4)).sum()) * q.cos().sum() * (k.sin() * torch.arange(4)[:, None]).sum()


@habit
def a_view_written_after_its_base(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    v = h[:, 1:3]
    h.mul_(2)
    v.add_(s.b(x)[:, :2])
    h.view(-1)[0] = 4
    return h.square().sum() + v.sum()


@habit
def swapped_views(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    first, second = h[:, :4], h[:, 4:]
    keep = first.clone()
    first.copy_(second)
    second.copy_(keep)
    h[0], h[1] = h[1].clone(), h[0].clone()
    return (h * torch.arange(8)).square().sum()


@habit
def views_renamed_in_place(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.unsqueeze_(0)
    h.transpose_(1, 2)
    h.squeeze_(0)
    h.t_()
    g = h.clone()
    g.unsqueeze_(1).mul_(2)
    return (h @ g.squeeze(1).t()).square().sum()


# -- every in-place operator is its functional form


@habit
def many_in_place_operators(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    for f in (Tensor.sigmoid_, Tensor.tanh_, Tensor.exp_, Tensor.sqrt_, Tensor.atan_, Tensor.sin_, Tensor.expm1_):
        h = f(h.clone())
    for g in (F.hardsigmoid, F.mish, F.elu, F.hardswish, F.selu, F.celu, F.relu6, F.silu, F.hardtanh):
        h = g(h.clone() - 0.3, inplace=True)
    F.threshold_(h, 0.01, 0.02)
    h = h.clone()
    h.clamp_(min=-0.9).clamp_max_(0.9).addcmul_(x, x, value=0.1).addcdiv_(x, x.square() + 1).lerp_(x, 0.3)
    h = h.clone().pow_(2).add_(x, alpha=3).sub_(1).div_(3)
    h.cumsum_(1).tril_()
    return h.square().sum()


@habit
def scattered_in_place(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    i = torch.tensor([[0, 2, 1], [3, 3, 0]])
    h.scatter_add_(1, i, s.b(x)[:2, :3])
    h.scatter_(0, i[:, :2], 2.0)
    h.index_add_(0, torch.tensor([1, 1, 3]), s.b(x)[:3])
    h.index_copy_(1, torch.tensor([7]), x[:, :1])
    h.index_fill_(1, torch.tensor([2]), -1.0)
    h.index_put_((torch.tensor([0, 1]),), x[:2], accumulate=True)
    h.masked_scatter_(x > 1, x)
    h.scatter_reduce_(1, i, x[:2, :3], "sum")
    return h.square().sum()


@habit
def written_by_index_and_mask(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h[x > 0.5] = 1.5
    h[torch.tensor([0, 2])] += x[:2]
    h[:, torch.tensor([1, 3])] = x[:, :2]
    h[1:3][x[1:3] < -0.5] = 0
    h[torch.arange(4), torch.tensor([0, 5, 3, 2])] = x[:, 0]
    h[None, 0, ..., 5] = 9
    return h.square().sum()


@habit
def logic_in_place(s: Habit, x: Tensor) -> Tensor:
    m = torch.ones(4, 8, dtype=torch.bool)
    m &= x > -1
    m |= x > 1.5
    m ^= x > 0.3
    m[0].logical_not_()
    n = torch.arange(8)
    n <<= 1
    n //= 3
    n %= 4
    y = x.clone().gt_(0)
    return (s.a(x).masked_fill(m, 0.0) * n * y).square().sum()


@habit
def ranges_changed_twice(s: Habit, x: Tensor) -> Tensor:
    m = torch.arange(8)
    m += 3
    n = torch.arange(8)
    m += 3
    n *= 2
    return (s.a(x) * m + n).square().sum()


@habit
def lower_precision_stays(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x).float()
    h += x
    h.mul_(x)
    return h.double().sum()


@habit
def written_by_out(s: Habit, x: Tensor) -> Tensor:
    c = torch.empty(4, 8, dtype=x.dtype)
    d = torch.zeros(4, 16, dtype=x.dtype)
    torch.add(x, x, out=c)
    torch.mul(c, x, out=d[:, 4:12])
    with torch.no_grad():
        torch.matmul(x, s.a.weight, out=s.state)
        F.normalize(s.state, dim=0, out=s.state)
    return (s.a(x) * c).sum() + (d[:, 2:10] * s.b(x)).sum() + (s.state.clone() * s.b(x)).sum()


@habit
def many_at_once(s: Habit, x: Tensor) -> Tensor:
    g = [s.a(x), s.b(x)]
    torch._foreach_mul_(g, 2.0)
    torch._foreach_add_(g, [x, x])
    return (g[0] * g[1]).sum()


# -- histories


@habit
def written_through_detach(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.detach().mul_(2)
    h[:, :2].detach().zero_()
    return (h * x).square().sum()


@habit
def infinities_under_detach(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    d = h.detach()
    d[0] = float("inf")
    d[1] = 3
    return h.clamp(max=5).square().sum() + (h[1:] * x[1:]).sum()


@habit
def written_under_no_grad(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    v = h[:, 2:4]
    with torch.no_grad():
        h.mul_(2)
        h[0].add_(1)
        h.view(-1)[3:5] = 7
    return (h * x).square().sum() + v.sum()


@habit
def read_under_no_grad(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    with torch.no_grad():
        v = h.view(-1)
        same = h.contiguous()
        w = h.view(4, 8)
        m = h.mean()
        with torch.enable_grad():
            g = h * 2
    return (h * m + same).square().sum() + (v * w.reshape(-1)).sum() * g.sum()


@habit
def straight_through(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    q = h.round()
    return ((h + (q - h).detach()) * s.b(x)).square().sum()


@habit
def straight_through_by_data(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.data.round_()
    h.view(-1).data[3] = 2
    s.mean.data.mul_(0.5)
    return (h * s.b(x)).square().sum()


@habit
def detached_in_place(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    g = s.b(h)
    h = h.clone().detach_()
    h.mul_(2)
    k = s.b(x).detach().requires_grad_()
    return (g * h).square().sum() + k.sum()


@habit
def gradients_put_into_a_detached_tensor(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    d, e = h.detach(), h.detach()
    d[:, :4] = s.b(x)[:, :4]
    return (h * x).sum() + d.square().sum() + (e * s.b(x)).sum() + h[:, 2:6].square().sum()


@habit
def gradients_put_into_data(s: Habit, x: Tensor) -> Tensor:
    z = torch.zeros(4, 8, dtype=x.dtype)
    v = z.view(-1)
    z += s.a(x)
    before = v.sum()
    with torch.no_grad():
        z.zero_()
    return z.sum() + before * 2 + v.square().sum()


@habit
def masked_under_no_grad(s: Habit, x: Tensor) -> Tensor:
    scores = s.a(x)
    with torch.no_grad():
        scores[x < 0] = float("-inf")
    return (scores.softmax(-1) * s.b(x)).sum()


# -- what is kept


@habit
def a_counter(s: Habit, x: Tensor) -> Tensor:
    s.count += 1
    h = s.a(x) * s.count.clone()
    s.count.add_(2)
    return h.square().sum()


@habit
def a_moving_mean(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    with torch.no_grad():
        s.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return ((h - s.mean) / s.mean.clone()).square().sum()


@habit
def a_kept_tensor_read_before_it_changes(s: Habit, x: Tensor) -> Tensor:
    before = s.mean.clone()
    loss = (s.a(x) * before).square().sum()
    s.mean.mul_(0.5)
    return loss + (s.b(x) * s.mean.view(1, 8)).sum()


@habit
def a_queue(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    loss = (h @ s.queue.clone().t()).logsumexp(1).sum()
    with torch.no_grad():
        s.queue[2:] = s.queue[:-2].clone()
        s.queue[:2] = h[:2]
    return loss


@habit
def kept_tensors_exchanged(s: Habit, x: Tensor) -> Tensor:
    s.plain.add_(1)
    kept = s.state.clone()
    s.state.copy_(s.plain)
    s.plain.copy_(kept + x.detach())
    return (s.a(x) * s.state).sum() + (s.b(x) * s.plain).sum()


@habit
def a_kept_tensor_written_with_gradient(s: Habit, x: Tensor) -> Tensor:
    s.state.copy_(s.a(x).detach())
    s.state[0].zero_()
    return (s.state * s.b(x)).square().sum()


@habit
def running_statistics_read_before_and_after(s: Habit, x: Tensor) -> Tensor:
    before, view = s.norm.running_mean.clone(), s.norm.running_mean.view(1, 8)
    h = s.norm(x)
    h = s.norm(h + s.a(x))
    return (h * before).square().sum() + (h * view).sum() + (h * s.norm.running_mean).sum()


@habit
def literals_made_in_forward(s: Habit, x: Tensor) -> Tensor:
    t = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=x.dtype)
    u = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=x.dtype)
    t.mul_(2)
    u[0] = 5
    return (s.a(x) * t + u).square().sum()


# -- refused


@refused(r"writes parameter 'a.bias' in forward, which is trained, by values of the batch\n.*keep it as a buffer")
def a_parameter_centred(s: Habit, x: Tensor) -> Tensor:
    with torch.no_grad():
        s.a.bias.sub_(x.mean(0))
    return s.a(x).sum()


@refused(r"cannot capture a write through .data in '' at test_aliases.py:\d+: autograd has kept")
def data_that_autograd_has_kept(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    g = h * h
    h.data.mul_(2)
    return g.sum()


@refused("writes parameter 'twin.bias' in forward, which is trained, and reads it before")
def parameter_data(s: Habit, x: Tensor) -> Tensor:
    y = s.twin(x).sum()
    s.twin.bias.data.mul_(0.9).add_(s.a.bias.data)
    return s.a(x).sum() + y


@refused(r"at test_aliases.py:\d+ writes to its input 'x' in place")
def the_input(s: Habit, x: Tensor) -> Tensor:
    x[:, 0] = 0
    return s.a(x).sum()


@refused("several of its elements are one in memory")
def overlapping(s: Habit, x: Tensor) -> Tensor:
    s.a(x).detach().unfold(1, 3, 1).add_(1)
    return s.a(x).sum()


@refused("has the memory of 'part")
def two_buffers_of_one_memory(s: Habit, x: Tensor) -> Tensor:
    s.part.add_(1)
    return (s.a(x)[:, :4] * s.part_of).sum()


@refused("register it as a buffer that only batch norm writes")
def statistics_reset(s: Habit, x: Tensor) -> Tensor:
    s.norm.running_mean.zero_()
    return s.norm(s.a(x)).square().sum()


@refused("exchanges the memory")
def memory_exchanged(s: Habit, x: Tensor) -> Tensor:
    h = torch.zeros(4, 8, dtype=x.dtype)
    h.resize_(2, 16)
    return s.a(x).sum() + h.sum()


@refused(r"an assignment to .data in '<model>' at test_aliases.py:\d+: the tensor is no parameter or buffer")
def data_assigned(s: Habit, x: Tensor) -> Tensor:
    h = s.a(x)
    h.data = x * 2
    return h.sum()


@refused("no rule draws them alike")
def drawn_without_a_rule(s: Habit, x: Tensor) -> Tensor:
    return (s.a(x) * torch.poisson(x.abs())).sum()


# -- the comparison


def made(forward: Forward, seed: int = 0) -> Habit:
    torch.manual_seed(seed)
    module = Habit(forward).double()
    module.part_of = module.part[:4]
    return module


def captured_of(module: Habit) -> Captured:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what capture warns of, the user should not see
        warnings.simplefilter("ignore", category=DeprecationWarning)
        return capture(module, (torch.randn(4, 8, dtype=torch.float64),))


def agree(forward: Forward, captured: Captured, plan: StagePlan) -> None:
    """A plan's program against eager mode over two batches; buffers go on from the first to the second."""
    module = made(forward)
    weights, buffers = state_of(captured, module)
    for name, value in captured.constants.items():
        buffers[name] = module.plain.clone() if name == "plain" else value.clone()
    program = lower(captured.graph, plan)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        x = torch.randn(4, 8, dtype=torch.float64, generator=generator)
        done = run_step(captured.graph, plan, program, weights, buffers, inputs_of(captured, (x.clone(),), {}))
        buffers.update(done.buffers)
        module.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = module(x)
        loss.backward()
        assert captured.graph.loss is not None
        torch.testing.assert_close(done.outputs[captured.graph.loss], loss.detach(), rtol=1e-9, atol=1e-9)
        for name, parameter in module.named_parameters():
            zero = torch.zeros_like(parameter)
            mine = done.gradients.get(name, zero)
            expected = zero if parameter.grad is None else parameter.grad
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
        held = {**dict(module.named_buffers()), "plain": module.plain}
        for name, value in buffers.items():
            if name in held:
                torch.testing.assert_close(value, held[name].detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", marked(HABITS, [*HABITS][1::3]))
def test_equals_eager(name: str) -> None:
    captured = captured_of(made(HABITS[name]))
    agree(HABITS[name], captured, one_device(captured.graph))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    forward, match = REFUSED[name]
    with pytest.raises(CaptureError, match=match):
        captured_of(made(forward))
