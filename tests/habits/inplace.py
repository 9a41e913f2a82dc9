"""In-place operators, copies that are changed, ``out=``, indexed writes, casts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from habits.base import PAD, ROWS, WIDTH, Habit, Tokens, habit

HALF = WIDTH // 2


@habit
class CloneChanged(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        z = h.clone()
        z.mul_(2)
        return h + z * z


@habit
class SourceOfCloneChanged(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        kept = h.clone()
        h.relu_()
        return h * 2 - kept


@habit
class SameExpressionTwice(Habit):
    """Two values made by the same words, each changed in another way."""

    def body(self, x: Tensor) -> Tensor:
        m = torch.arange(WIDTH, dtype=x.dtype)
        m += 3
        n = torch.arange(WIDTH, dtype=x.dtype)
        n += 3
        m += 3
        return self.a(x) * m - n


@habit
class AddTwice(Habit):
    """The same write twice is two writes."""

    def body(self, x: Tensor) -> Tensor:
        m = torch.arange(WIDTH, dtype=x.dtype)
        m += 3
        m += 3
        return self.a(x) * m


@habit
class ReadBetweenWrites(Habit):
    def body(self, x: Tensor) -> Tensor:
        m = torch.ones(WIDTH, dtype=x.dtype)
        first = m * 2
        m.add_(1)
        second = m * 2
        m.add_(1)
        return self.a(x) * first + self.b(x) * second + m


@habit
class Activations(Habit):
    """Every in-place activation of ``torch.nn.functional`` on a fresh value."""

    def body(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for fn in (F.relu_, F.leaky_relu_, F.elu_, F.celu_, F.selu_, F.hardtanh_):
            total = total + fn(self.a(x))
        for fn in (F.silu, F.mish, F.hardswish, F.hardsigmoid, F.relu6):
            total = total + fn(self.b(x), inplace=True)
        return total + F.threshold_(self.a(x), 0.1, 0.2)


@habit
class ActivationModules(Habit):
    """``inplace=True`` in a Sequential, whose input is read again for a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Hardswish(inplace=True),
            nn.Linear(WIDTH, WIDTH), nn.SiLU(True), nn.Linear(WIDTH, WIDTH), nn.Mish(True), nn.Linear(WIDTH, WIDTH),
            nn.Hardsigmoid(True),
        )  # fmt: skip

    def body(self, x: Tensor) -> Tensor:
        return self.layers(x) + x


@habit
class PreActivationOverwritten(Habit):
    """The pre-activation residual of early ResNets: ``relu_`` changes what the shortcut reads."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = self.b(F.relu(h, inplace=True))
        return out + h


@habit
class ZeroDropoutInPlace(Habit):
    """An in-place operator that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0, inplace=True)

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.drop(h)
        return self.b(h)


@habit
class DropoutInPlaceInEval(Habit):
    """A part of the model is in eval mode for good."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5, inplace=True)

    def train(self, mode: bool = True) -> DropoutInPlaceInEval:
        super().train(mode)
        self.drop.train(False)
        return self

    def body(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.a(x)))


@habit
class DropoutInPlace(Habit):
    random = True

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        F.dropout(h, 0.3, True, inplace=True)
        return h + self.b(x)


@habit
class FeatureDropouts(Habit):
    random = True

    def body(self, x: Tensor) -> Tensor:
        h = F.dropout1d(self.a(x).view(ROWS, 2, HALF), 0.5, True).flatten(1)
        return h + F.alpha_dropout(self.b(x), 0.2, True)


@habit
class BooleanMaskWrite(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[x > 0.5] = 0.25
        return h


@habit
class RowMaskWrite(Tokens):
    """Whole rows of a three-dimensional tensor are written where a mask says so, as with mask tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.full((WIDTH,), 0.3))

    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h[ids == 5] = self.mask_token
        return self.head(h)


@habit
class IndexPutAccumulate(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = torch.zeros(ROWS, WIDTH, dtype=x.dtype)
        h.index_put_((torch.tensor([0, 1, 1, 3]),), self.a(x), accumulate=True)
        return h


@habit
class IndexAdd(Habit):
    """Messages of edges are summed at nodes."""

    def body(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out.index_add_(0, torch.tensor([1, 0, 3, 1]), self.a(x))
        return self.b(out)


@habit
class IndexCopyAndFill(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.index_copy_(0, torch.tensor([2, 0]), self.b(x)[:2])
        h.index_fill_(1, torch.tensor([1]), 0.5)
        return h


@habit
class Scatter(Tokens):
    """Labels become smoothed targets by ``scatter_``, as label smoothing by hand does."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids)).log_softmax(-1)
        seen = labels != -100
        target = torch.full_like(logits, 0.1 / 15)
        target.scatter_(2, labels.clamp(min=0).unsqueeze(-1), 0.9)
        target.masked_fill_(~seen.unsqueeze(-1), 0)
        return -(target * logits).sum() / seen.sum()


@habit
class ScatterAdd(Habit):
    def body(self, x: Tensor) -> Tensor:
        added, reduced = (torch.zeros(ROWS, WIDTH, dtype=x.dtype) for _ in range(2))
        added.scatter_add_(1, (x > 0).long(), self.a(x))
        reduced.scatter_reduce_(1, (x < 1).long(), self.a(x), "sum")
        return added + 2 * reduced + self.b(x)


@habit
class TopKMask(Habit):
    """Only the largest two of each row stay, as a router keeps its experts."""

    def body(self, x: Tensor) -> Tensor:
        scores = self.a(x)
        mask = torch.zeros_like(scores)
        mask.scatter_(1, scores.topk(2, dim=1).indices, 1.0)
        return scores.softmax(-1) * mask * self.b(x)


@habit
class OutArgument(Habit):
    """``out=`` is a write too; with gradients torch refuses it, so the tables are data."""

    def body(self, x: Tensor) -> Tensor:
        table = torch.empty(WIDTH, dtype=x.dtype)
        torch.arange(WIDTH, dtype=x.dtype, out=table)
        torch.mul(table, 2, out=table)
        doubled = torch.empty(ROWS, WIDTH, dtype=x.dtype)
        torch.add(x.detach(), table, out=doubled)
        return self.a(x) + doubled


@habit
class SinusoidTable(Habit):
    """The sinusoids of Marian: a table that ``forward`` fills."""

    def body(self, x: Tensor) -> Tensor:
        angle = torch.arange(ROWS, dtype=x.dtype)[:, None] / 10 ** torch.arange(HALF, dtype=x.dtype)
        table = torch.zeros(ROWS, WIDTH, dtype=x.dtype)
        table[:, 0:HALF] = torch.sin(angle)
        table[:, HALF:] = torch.cos(angle)
        table.detach_()
        return self.a(x + table)


@habit
class Arithmetic(Habit):
    """In-place arithmetic with every operator that Python has."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x) + 0.0
        h += self.b(x)
        h -= 0.5
        h *= 1.5
        h /= x.detach().abs() + 1
        h **= 2
        h = h.clone().neg_().exp_()
        h = h.clone().sqrt_()
        h = h.clone().reciprocal_()
        h = h.clone().log1p_()
        h = h.clone().sigmoid_()
        return h.clone().tanh_() * 2


@habit
class IntegerArithmetic(Tokens):
    """The same with whole numbers and masks."""

    def body(self, ids: Tensor) -> Tensor:
        n = ids.clone()
        n += 1
        n //= 2
        n %= 5
        mask = ids != PAD
        mask &= n > 0
        mask |= n == 4
        mask ^= n == 2
        n <<= 1
        return self.head(self.embed(n) * mask[..., None])


@habit
class FusedInPlace(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x) + 0.0
        h.addcmul_(x, self.b(x), value=0.5)
        h.addcdiv_(x, x.detach() ** 2 + 1)
        h.lerp_(self.b(x), 0.3)
        h.addmm_(x[:, :HALF], self.a.weight[:HALF])
        return h.clamp_min_(-0.5)


@habit
class WhereGuard(Habit):
    """A square root that is guarded on both sides, as double ``where`` is written."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        safe = torch.where(h > 0, h, torch.ones_like(h))
        return torch.where(h > 0, safe.sqrt(), torch.zeros_like(h))


@habit
class NanToNum(Habit):
    def body(self, x: Tensor) -> Tensor:
        scores = self.a(x).masked_fill(x > 100, -torch.inf)
        return torch.nan_to_num_(scores + 0.0, neginf=-2.0) + self.b(x).nan_to_num(0.0)


@habit
class CastThenInPlace(Habit):
    """``float()`` of a double is a copy, ``double()`` of one the tensor itself."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        same, other = h.double(), h.float()
        same.mul_(2)
        other.mul_(100)
        return h + other.double() * 0.0


@habit
class ToThatReturnsItself(Habit):
    """``to`` of the own dtype is the tensor itself, with ``copy=True`` a copy."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.to(x.dtype).add_(1)
        h.to(x.dtype, copy=True).add_(100)
        h.type_as(x).mul_(2)
        return h


@habit
class CopyWithCastAndBroadcast(Habit):
    def body(self, x: Tensor) -> Tensor:
        table = torch.zeros(ROWS, WIDTH, dtype=x.dtype)
        table.copy_(torch.arange(WIDTH))
        table[:2].copy_(self.b.bias)
        return self.a(x) * table


@habit
class FillFromTensor(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = torch.empty_like(x)
        h.fill_(self.a.bias.sum())
        h[:, 0].fill_(2)
        h[:, 1] = self.b.bias[0]
        return h * x


@habit
class UniformInPlace(Habit):
    """Noise drawn into a fresh tensor: two draws are two."""

    random = True

    def body(self, x: Tensor) -> Tensor:
        one = torch.empty_like(x).uniform_(-1, 1)
        two = torch.empty_like(x).uniform_(-1, 1)
        return self.a(x) * one + two


@habit
class NormalInPlace(Habit):
    random = True

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) + torch.zeros_like(x).normal_(0, 0.1) + torch.empty_like(x).bernoulli_(0.5)


@habit
class ResizeAndSet(Habit):
    """The swap of two names is no swap of tensors."""

    def body(self, x: Tensor) -> Tensor:
        p, q = self.a(x), self.b(x)
        p, q = q, p
        p.mul_(2)
        q, r = p, q
        q += 1
        return p - r


@habit
class InPlaceOnInput(Habit):
    """The batch itself is normalized in place; eager mode changes the caller's tensor."""

    learns_inputs = False
    refused = "writes to (its )?input|in place"

    def body(self, x: Tensor) -> Tensor:
        x.sub_(x.mean(1, keepdim=True)).div_(2)
        return self.a(x)


@habit
class CumulativeInPlace(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x) + 0.0
        h.cumsum_(1)
        return h.tril_() + self.b(x).triu_(1)


@habit
class SortedAndFlipped(Habit):
    def body(self, x: Tensor) -> Tensor:
        h, order = self.a(x).sort(dim=1, descending=True)
        out = torch.empty_like(h)
        out.scatter_(1, order, h.flip(1))
        return out
