"""Structures, outputs, losses, dtypes, autocast and operators at their edges."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from habits.base import PAD, ROWS, WIDTH, Habit, Tokens, habit

HALF = WIDTH // 2


@habit
class LossOutside(Habit):
    outside = True

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


@habit
class LossOutsideAfterWrites(Habit):
    """The output is written to after it was made; the loss reads the last value."""

    outside = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = h.view(-1)
        h[:, 0] = 0
        return out.view(ROWS, WIDTH)


@habit
class DictOutput(Habit):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.a(x)
        return {"logits": h, "loss": F.mse_loss(self.b(h), y)}


@habit
class TupleOutput(Habit):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, None]:
        h = self.a(x)
        return h, F.mse_loss(self.b(h), y), None


class _Named(NamedTuple):
    loss: Tensor
    hidden: Tensor


@habit
class NamedTupleOutput(Habit):
    def forward(self, x: Tensor, y: Tensor) -> _Named:
        h = self.a(x)
        return _Named(F.mse_loss(self.b(h), y), h)


@dataclass
class _Record:
    loss: Tensor
    hidden: Tensor


@habit
class DataclassOutput(Habit):
    def forward(self, x: Tensor, y: Tensor) -> _Record:
        h = self.a(x)
        return _Record(F.mse_loss(self.b(h), y), h)


@habit
class DataclassInside(Habit):
    """A dataclass between two modules is nobody's business."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        record = _Record(y, self.a(x))
        record.hidden = record.hidden * 2
        return F.mse_loss(self.b(record.hidden), record.loss)


@habit
class OrderedDictOutput(Habit):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.a(x)
        return OrderedDict(loss=F.mse_loss(self.b(h), y), hidden=[h, (h * 2,)])


@habit
class OutputThatIsWrittenLater(Habit):
    """A tensor is put into the output, then changed."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.a(x)
        out = {"hidden": h}
        h.mul_(2)
        out["loss"] = F.mse_loss(self.b(out["hidden"]), y)
        return out


@habit
class AuxiliaryLoss(Habit):
    """Modules collect a second loss in an attribute of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary: list[Tensor] = []

    def keep(self, h: Tensor) -> Tensor:
        self.auxiliary.append(h.square().mean())
        return h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.auxiliary = []
        h = self.keep(self.b(self.keep(self.a(x))))
        return F.mse_loss(h, y) + 0.1 * sum(self.auxiliary)


@habit
class EmptyCat(Habit):
    """``cat`` that starts with an empty tensor, as caches are begun."""

    def body(self, x: Tensor) -> Tensor:
        kept = torch.tensor([], dtype=x.dtype)
        for layer in (self.a, self.b):
            kept = torch.cat([kept, layer(x)], dim=0)
        return kept.view(2, ROWS, WIDTH).sum(0)


@habit
class EmptyCatOfLike(Habit):
    """The same with an empty tensor of the right rank."""

    def body(self, x: Tensor) -> Tensor:
        past = x.new_zeros(ROWS, 0)
        return torch.cat([past, self.a(x)[:, :3], self.b(x)[:, 3:]], dim=-1)


@habit
class StackOfList(Habit):
    def body(self, x: Tensor) -> Tensor:
        hidden = [x]
        for layer in (self.a, self.b):
            hidden.append(layer(hidden[-1]))
        return torch.stack(hidden, dim=1).mean(1) + torch.vstack(hidden[:1]) + torch.hstack([hidden[0]])


@habit
class ScalarParameter(Habit):
    """A temperature that is learned, as a number of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * self.scale.exp().clamp(max=100)


@habit
class UnusedParameter(Habit):
    def body(self, x: Tensor) -> Tensor:
        return self.a(x)


@habit
class ParameterInAList(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH) * i) for i in (1, 2)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(WIDTH))})

    def body(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = self.a(x) * scale
        return x + self.named["bias"]


@habit
class MixedPrecision(Habit):
    """A region of autocast."""

    def body(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
        return self.b(h.to(x.dtype))


@habit
class AutocastOff(Habit):
    """A region in which autocast is off, as ``transformers`` writes it around rotary positions."""

    def body(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            angle = torch.arange(WIDTH, dtype=torch.float64).sin()
        return self.a(x) * angle


@habit
class UpcastNorm(Habit):
    """A norm in another precision and back."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        wide = h.to(torch.float64)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.b(wide.to(h.dtype))


@habit
class IntegerDivision(Tokens):
    """Buckets of positions, as T5 computes them."""

    def body(self, ids: Tensor) -> Tensor:
        position = torch.arange(WIDTH)
        distance = (position[None, :] - position[:, None]).abs()
        bucket = torch.where(distance < 3, distance, (distance.double().log() * 2).long().clamp(max=7))
        weights = self.embed(bucket)[..., 0]
        return self.head(weights @ self.embed(ids))


@habit
class LeftPadding(Tokens):
    """Positions are counted from the first token that is no padding."""

    def body(self, ids: Tensor) -> Tensor:
        mask = ids != PAD
        position = mask.long().cumsum(-1) - 1
        position.masked_fill_(mask == 0, 1)
        return self.head(self.embed(ids) + self.embed(position))


@habit
class PaddingMaskAttention(Tokens):
    """Additive attention mask from padding, filled with the smallest number."""

    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        mask = torch.zeros(ROWS, 1, WIDTH, WIDTH, dtype=h.dtype)
        mask.masked_fill_((ids == PAD)[:, None, None, :], torch.finfo(h.dtype).min)
        mask[..., torch.arange(WIDTH), torch.arange(WIDTH)] = 0
        q = h.unsqueeze(1)
        return self.head(F.scaled_dot_product_attention(q, q, q, attn_mask=mask).squeeze(1))


@habit
class CausalBuffer(Tokens):
    """GPT-2's own way: a boolean triangle in a buffer, scores filled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(32, 32, dtype=torch.bool)))

    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        scores = h @ h.transpose(-1, -2)
        scores.masked_fill_(~self.bias[:WIDTH, :WIDTH], -1e9)
        return self.head(scores.softmax(-1) @ h)


@habit
class LabelsWritten(Tokens):
    """Labels are the tokens, with padding set to -100 in place."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        own = ids.clone()
        own[own == PAD] = -100
        return (
            F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), own.flatten())
            + (labels > 0).double().sum() * 0.01
        )


@habit
class LastToken(Tokens):
    """A sentence is judged by its last token that is no padding."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        last = (ids != PAD).sum(1) - 1
        logits = self.head(self.embed(ids))[torch.arange(ROWS), last]
        return F.cross_entropy(logits, labels[:, 0].clamp(min=0))


@habit
class MeanPooled(Tokens):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = (ids != PAD)[..., None].expand(-1, -1, WIDTH).to(self.head.weight.dtype)
        pooled = (self.embed(ids) * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return F.cross_entropy(self.head(pooled), labels[:, 1].clamp(min=0))


@habit
class Contrastive(Habit):
    """In-batch negatives: every row against every other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        p, q = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
        scores, target = p @ q.T * 5, torch.arange(ROWS)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


@habit
class RollAndFlip(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h.roll(1, 0) + h.flip(1) + torch.roll(h, shifts=(1, 2), dims=(0, 1))


@habit
class PaddedConvolution(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")

    def body(self, x: Tensor) -> Tensor:
        h = F.pad(self.a(x), (1, -1)).view(ROWS, 2, HALF)
        return self.conv(h).flatten(1) + F.pad(x[None], (2, 2), "reflect")[0, :, 2:-2]


@habit
class Recurrence(Habit):
    """A loop over time with a cell, and outputs collected in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        h, seen = x.new_zeros(ROWS, WIDTH), []
        for t in range(4):
            h = self.cell(x[:, 2 * t : 2 * t + 2], h)
            seen.append(h)
        return self.a(torch.stack(seen).mean(0))


@habit
class EinsumAndOuter(Habit):
    def body(self, x: Tensor) -> Tensor:
        h, k = self.a(x), self.b(x)
        mixed = torch.einsum("bi,bj->bij", h, k)
        return torch.einsum("bij,jk->bik", mixed, self.a.weight).mean(1) + torch.outer(h[:, 0], k[0])


@habit
class RepeatAndTile(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)[:, :2]
        return h.repeat(1, 4) + h.repeat_interleave(4, dim=1) + torch.tile(h, (4,)) + h[:, :1].expand(-1, WIDTH)


@habit
class NegativeDimsAndEllipsis(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x).view(ROWS, 2, HALF)
        h[..., -1] = h[..., 0] * 2
        h[:, None, 0, :2] += 1
        return h.movedim(-1, 1).transpose(-1, -2).flatten(-2)


@habit
class BoolAndNone(Habit):
    """None and numbers among the arguments of submodules."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, flags: Any = ()) -> Any:
            h = self.a(x) * scale
            return (h if mask is None else h * mask), None, {"n": len(flags)}

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def body(self, x: Tensor) -> Tensor:
        h, nothing, numbers = self.part(x, scale=0.5, flags=[1, 2])
        assert nothing is None
        return self.part(h, (x > 0).to(x.dtype))[0] * numbers["n"]


@habit
class MixtureOfExperts(Habit):
    """Dense routing: every expert runs on all rows, and the result is accumulated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out += expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
        return out


@habit
class GradientPenaltyFree(Habit):
    """An orthogonality term on weights, beside the loss on the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gram = self.a.weight @ self.a.weight.T
        gram.diagonal().sub_(1)
        return F.mse_loss(self.b(self.a(x)), y) + 0.1 * gram.square().sum()


@habit
class FlattenedParameters(Habit):
    """Weights that are views of one long parameter, as packed RNNs and hypernetworks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH * WIDTH + WIDTH))

    def body(self, x: Tensor) -> Tensor:
        weight = self.flat[: WIDTH * WIDTH].view(WIDTH, WIDTH)
        return F.linear(self.a(x), weight, self.flat[WIDTH * WIDTH :])
