"""Writes through views, and reads through views that were taken before or after a write."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from habits.base import PAD, ROWS, WIDTH, Habit, Tokens, habit

HALF = WIDTH // 2


@habit
class TwoFilledBuffers(Habit):
    """Two fresh buffers of one shape are two, though they are made by the same words."""

    def body(self, x: Tensor) -> Tensor:
        p = torch.zeros(ROWS, WIDTH, dtype=x.dtype)
        p[:, :HALF] = self.a(x)[:, :HALF]
        q = torch.zeros(ROWS, WIDTH, dtype=x.dtype)
        q[:, HALF:] = self.b(x)[:, HALF:]
        return p * 2 + q


@habit
class WriteThroughViews(Habit):
    """A value is written through a view of each kind; a ``reshape`` of a contiguous tensor is one."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x).contiguous()
        h.view(ROWS, 2, HALF).flatten(1).clamp_(-0.3, 0.3)
        h.unsqueeze(0).mul_(3)
        h.t()[0].mul_(5)
        h.view(ROWS, 2, HALF).permute(2, 0, 1)[1:3].mul_(self.b.weight[0, 0])
        h.as_strided((ROWS, 2), (WIDTH, 3)).mul_(2)
        h.select(1, 3).neg_()
        h.narrow(1, 2, 3).add_(self.b(x).narrow(1, 0, 3))
        h.narrow(1, 5, 1).copy_(self.b(x).narrow(1, 0, 1))
        h[0] = h[1] * 2
        h[:, -1] = 1
        h.transpose(0, 1)[2:4] = 0
        h.reshape(-1)[:5].zero_()
        return h


@habit
class WriteThroughDiagonal(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x) @ self.b(x).T
        h.diagonal().mul_(0)
        return h @ x


@habit
class DiagonalFilled(Habit):
    """Nobody attends to itself."""

    def body(self, x: Tensor) -> Tensor:
        scores = self.a(x) @ x.T
        scores.diagonal().fill_(-1e4)
        return scores.softmax(-1) @ self.b(x)


@habit
class StaleView(Habit):
    """A view that was taken before a write sees it."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        v = h.view(-1)
        h.mul_(2)
        return self.b(h) + v.view(ROWS, WIDTH)


@habit
class ViewOfViewWritten(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.view(ROWS, 2, HALF)[:, 1].view(ROWS, 2, 2)[..., 0].mul_(-1)
        return h


@habit
class SiblingViews(Habit):
    """One view is written, the other is read."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        front, whole = h[:, :HALF], h.view(ROWS * 2, HALF)
        front.add_(self.b(x)[:, :HALF])
        return whole.reshape(ROWS, WIDTH) * h


@habit
class MaskFilledThroughTranspose(Tokens):
    """The padding mask of a batch is written through the transpose of the attention mask."""

    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        mask = torch.ones(ROWS, WIDTH, WIDTH, dtype=h.dtype).tril()
        mask.transpose(1, 2).masked_fill_((ids == PAD)[:, :, None], 0)
        return self.head(h + mask @ h / 8)


@habit
class ShiftedTokens(Tokens):
    """Decoder inputs as MBart and Marian make them: a fresh tensor filled by two writes."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        shifted = labels.new_zeros(labels.shape)
        shifted[:, 1:] = labels[:, :-1].clone()
        shifted[:, 0] = 3
        shifted.masked_fill_(shifted == -100, PAD)
        logits = self.head(self.embed(shifted) + self.embed(ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@habit
class ShiftedInPlace(Tokens):
    """MBart's wrapped shift: the last token of each row goes to its front, read by gather before the writes."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        previous = labels.clone()
        previous.masked_fill_(previous == -100, PAD)
        last = (previous.ne(PAD).sum(dim=1) - 1).clamp(min=0).unsqueeze(-1)
        starts = previous.gather(1, last).squeeze()
        previous[:, 1:] = previous[:, :-1].clone()
        previous[:, 0] = starts
        logits = self.head(self.embed(previous) + self.embed(ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@habit
class ChunkThenInPlace(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        left, right = h[:, :HALF], h[:, HALF:]
        for part in torch.stack([left, right]).unbind():
            part.relu()
        gate = self.b(x)
        first, second = gate.view(2, -1), gate.view(-1)
        with torch.no_grad():
            first[0].mul_(0.5)
        return h + second.view(ROWS, WIDTH).detach()


@habit
class ChunksOfDataWritten(Tokens):
    """Pieces of ``chunk`` are views of a tensor without gradients, which may be written."""

    def body(self, ids: Tensor) -> Tensor:
        positions = ids.clone()
        left, right = positions.chunk(2, dim=1)
        left += 1
        left.clamp_(max=15)
        right.mul_(2).clamp_(max=15)
        return self.head(self.embed(positions) * self.embed(left).sum(1, keepdim=True))


@habit
class PartsWritten(Habit):
    """Parts and rows of tensors without gradients are written one by one."""

    def body(self, x: Tensor) -> Tensor:
        columns, rows = x.detach().clone(), x.detach().clone()
        one, two = columns.split([3, 5], dim=1)
        one.zero_()
        two.add_(one.sum() + 1)
        for i, row in enumerate(rows.unbind(0)):
            row.fill_(i + 1.0)
        return self.a(x) * (columns + rows)


@habit
class StepSliceWritten(Habit):
    """Rotary positions as some write them: every other channel."""

    def body(self, x: Tensor) -> Tensor:
        h, out = self.a(x), torch.empty(ROWS, WIDTH, dtype=x.dtype)
        out[:, 0::2] = h[:, 0::2] * 0.6 - h[:, 1::2] * 0.8
        out[:, 1::2] = h[:, 0::2] * 0.8 + h[:, 1::2] * 0.6
        return out


@habit
class WriteToExpandedAfterClone(Habit):
    def body(self, x: Tensor) -> Tensor:
        row = self.a.bias.expand(ROWS, WIDTH).clone()
        row[1:, :2] += self.b(x)[1:, :2]
        return row


@habit
class AsStridedRead(Habit):
    """Overlapping windows by strides, as Longformer makes them."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x).contiguous()
        windows = h.as_strided((ROWS, 3, HALF), (WIDTH, 2, 1))
        return self.b(h) + windows.sum((1, 2))[:, None]


@habit
class UnfoldRead(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h[:, :4] @ self.b.weight[:4] + h.unfold(1, 4, 2).sum((1, 2))[:, None]


@habit
class UnfoldWritten(Habit):
    """Windows that do not overlap may be written."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.unfold(1, 4, 4)[:, 0].mul_(3)
        return h


@habit
class SlidingWindow(Habit):
    """Scores of a band are written into a diagonal layout by slices, as in a chunked attention."""

    def body(self, x: Tensor) -> Tensor:
        q, k = self.a(x).view(ROWS, 4, 2), self.b(x).view(ROWS, 4, 2)
        band = q.new_empty(ROWS, 4, 3)
        band[:, :, 1] = (q * k).sum(-1)
        band[:, 1:, 0] = (q[:, 1:] * k[:, :-1]).sum(-1)
        band[:, :-1, 2] = (q[:, :-1] * k[:, 1:]).sum(-1)
        band[:, 0, 0] = -torch.inf
        band[:, -1, 2] = -torch.inf
        weights = band.softmax(-1)
        return (weights @ x.new_ones(3, 2)).reshape(ROWS, WIDTH) * x + weights[:, :, 1].sum(1, keepdim=True)


@habit
class SkewedScores(Habit):
    """The relative shift of Transformer-XL: padding, a view of another shape, a slice."""

    def body(self, x: Tensor) -> Tensor:
        h = (self.a(x)[:, :, None] * self.b(x)[:, None, :]).contiguous()  # [4 8 8]
        padded = torch.cat([h.new_zeros(ROWS, WIDTH, 1), h], dim=2)
        shifted = padded.view(ROWS, WIDTH + 1, WIDTH)[:, 1:].view_as(h)
        return shifted.sum(1)


@habit
class PreallocatedCache(Habit):
    """Keys are written into a preallocated cache step by step, as in decoding with a static cache."""

    def body(self, x: Tensor) -> Tensor:
        cache = torch.zeros(ROWS, WIDTH, WIDTH, dtype=x.dtype)
        out = x
        for t in range(3):
            cache[:, t] = self.a(out)
            out = self.b(cache[:, : t + 1].mean(1))
        return out + cache.sum(1)


@habit
class RealViewWritten(Habit):
    """Rotary positions by complex numbers, and a write through the real view."""

    def body(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(self.a(x).view(ROWS, HALF, 2).contiguous())
        turned = h * torch.polar(torch.ones(HALF, dtype=x.dtype), torch.arange(HALF, dtype=x.dtype))
        flat = torch.view_as_real(turned)
        flat[..., 0].mul_(2)
        return torch.view_as_real(turned).flatten(1)


@habit
class RotaryByComplex(Habit):
    """The same without a write, as in the first Llama."""

    def body(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(self.a(x).view(ROWS, HALF, 2))
        turned = h * torch.polar(torch.ones(HALF, dtype=x.dtype), torch.arange(HALF, dtype=x.dtype))
        return torch.view_as_real(turned).flatten(1)


@habit
class ReshapeThatCopies(Habit):
    """``reshape`` of a transpose is a copy: a write to it is lost in eager mode too."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        copy = h.t().reshape(-1)
        copy.mul_(7)
        return h + copy.view(WIDTH, ROWS).t()


@habit
class ContiguousThatCopies(Habit):
    """``contiguous`` of a transpose is a copy, of anything else the tensor itself."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        other, same = h.t().contiguous(), h.contiguous()
        other.mul_(3)
        same.add_(1)
        return h + other.t()


@habit
class AdvancedIndexIsACopy(Habit):
    """Rows by a list of numbers are a copy; writing to them changes nothing else."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        some = h[[0, 2]]
        some.mul_(9)
        return h + some.sum()
