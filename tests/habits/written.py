"""Trained parameters that a forward writes: masked weights, scales in bounds, unit rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from habits.base import WIDTH, Habit, habit

MAKE_BEFORE = "write to it before anything of the forward reads it"


class _Masked(nn.Linear):
    """MADE's and PixelCNN's usual layer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@habit
class MaskedWeights(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _Masked(), _Masked()

    def body(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


@habit
class MaskedWeightsAssigned(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)))

    def body(self, x: Tensor) -> Tensor:
        self.a.weight.data = self.a.weight.data * self.mask
        return self.a(x)


@habit
class ScaleInBounds(Habit):
    """CLIP's logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.6))

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0, 0.5)
        return self.scale.exp() * self.a(x)


@habit
class UnitPrototypes(Habit):
    """SwAV's prototypes."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.copy_(F.normalize(self.b.weight.data.clone(), dim=1))
        return self.b(self.a(x))


@habit
class RowsOfBoundedLength(Habit):
    """What has been written in part, and written by values of another parameter that was written."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            length = self.a.weight.norm(dim=1, keepdim=True)
            self.a.weight.mul_(length.clamp(max=0.4) / length)
            self.b.weight[0].copy_(self.a.weight[1])
        return self.b(self.a(x))


@habit
class EveryParameterClipped(Habit):
    """A critic of Wasserstein's distance, whose weights decay a little at every call."""

    def body(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():
            parameter.data.mul_(0.99).clamp_(-0.2, 0.2)
        return self.b(self.a(x).relu()) + (self.a.weight.detach() ** 2).sum()


@habit
class WeightOfALayerSet(Habit):
    """AWD-LSTM's weight drop."""

    refused = r"sets a weight of a recurrent layer, .*(\n.*)+functional_call\(self.rnn, {'weight_hh_l0': w}, \(x,\)\)"

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)
        self.raw = nn.Parameter(self.rnn.weight_hh_l0.data)
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.weight_hh_l0 = self.raw.data.clone()

    def body(self, x: Tensor) -> Tensor:
        self.rnn.weight_hh_l0 = self.raw.tanh()
        return self.rnn(x)[0]


@habit
class WeightOfALayerGiven(Habit):
    """The same, as the message says."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        w = self.rnn.weight_hh_l0.tanh()
        return torch.func.functional_call(self.rnn, {"weight_hh_l0": w}, (x,))[0]


@habit
class WrittenAfterItIsRead(Habit):
    refused = f"'a.weight' in forward, which is trained, and reads it before\n  {MAKE_BEFORE}"

    def body(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return y


@habit
class WrittenBetweenReads(Habit):
    refused = f"'a.weight' in forward, which is trained, and reads it before\n  {MAKE_BEFORE}"

    def body(self, x: Tensor) -> Tensor:
        before = self.a.weight.abs().sum()
        with torch.no_grad():
            self.a.weight.mul_(0.5)
        return self.a(x) * before


@habit
class FirstBatchSetsTheScale(Habit):
    """ActNorm's first batch."""

    refused = "'a.bias' in forward, which is trained, by values of the batch\n.*is there once the model has been called"

    def __init__(self) -> None:
        super().__init__()
        self.done = False

    def body(self, x: Tensor) -> Tensor:
        if not self.done:
            with torch.no_grad():
                self.a.bias.copy_(-x.mean(0))
            self.done = True
        return self.a(x)


@habit
class NoiseAddedToWeights(Habit):
    refused = "'a.weight' in forward, which is trained, by what .* gives, which another call gives otherwise"

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.add_(torch.randn_like(self.a.weight) * 0.1)
        return self.a(x)
