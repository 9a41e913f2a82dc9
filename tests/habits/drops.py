"""Branches on random numbers of torch: layers that are left out at random, in the spellings of real model code.

Nothing else draws here, and draws that are not always made have a shape of their own, so that
:mod:`unit.test_branches` can hand a program's draws to eager mode.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from habits.base import WIDTH, Habit, habit


class Drops(Habit):
    """Four layers and a head."""

    random = True
    drop: float = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


@habit
class LayerDropByTorch(Habit):
    """As ``transformers`` writes it."""

    random = True

    def body(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            if self.training and torch.rand([]) < 0.5:
                continue
            x = torch.tanh(layer(x))
        return x + F.linear(x, self.a.weight)


@habit
class DropByItem(Drops):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(1).item() < self.drop:
                continue
            x = torch.tanh(layer(x))
        return self.a(x)


@habit
class DropByArithmetic(Drops):
    """Python computes with the number, and uses it."""

    def body(self, x: Tensor) -> Tensor:
        for depth, layer in enumerate(self.layers):
            rate = torch.rand(()).item()
            if 1 - rate > 0.2 * (depth + 1):
                x = x + layer(x) * (0.5 + rate)
        return self.a(x)


@habit
class KeepByTorch(Drops):
    """The larger side is where the answer is yes."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.4:
                x = x + torch.tanh(layer(x))
        return self.a(x)


@habit
class DropByDie(Drops):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.randint(0, 3, (1,)) == 0:
                continue
            x = x + torch.tanh(layer(x))
        return self.a(x)


@habit
class DropByDieInPlace(Drops):
    """``random_(from, to)``, on integers and as noise."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.empty((), dtype=torch.int64).random_(0, 3) == 0:
                continue
            x = x + torch.tanh(layer(x))
        return self.a(x) * torch.empty(WIDTH, dtype=x.dtype).random_(1, 4)


@habit
class DropByDieItem(Drops):
    """Some numbers of a die, and its truth as a number."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            die = torch.randint(4, ()).item()
            if die and die != 3:
                x = x + torch.tanh(layer(x))
        return self.a(x)


@habit
class DropByCoin(Drops):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if bool(torch.bernoulli(torch.tensor(0.6))):
                x = x + torch.tanh(layer(x))
        return self.a(x)


@habit
class DropByUniform(Drops):
    """A number drawn in place, in memory made like the data."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.new_empty(1).uniform_() < 0.5:
                continue
            x = x + torch.tanh(layer(x))
        return self.a(x)


@habit
class DropsDrawnBefore(Drops):
    """One draw for all layers, before the loop."""

    def body(self, x: Tensor) -> Tensor:
        draws = torch.rand(len(self.layers))
        for layer, draw in zip(self.layers, draws, strict=True):
            if draw < self.drop:
                continue
            x = torch.tanh(layer(x))
        return self.a(x)


@habit
class DropsListed(Drops):
    """The draws as a list of numbers."""

    def body(self, x: Tensor) -> Tensor:
        for layer, draw in zip(self.layers, torch.rand(4).tolist(), strict=True):
            x = x if draw < self.drop else torch.tanh(layer(x))
        return self.a(x)


class Block(nn.Module):
    """A block that leaves itself out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.4:
            return x
        return x + self.inner(x)


@habit
class BlocksThatDropThemselves(Habit):
    """Six of one kind: repeated blocks."""

    random = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))

    def body(self, x: Tensor) -> Tensor:
        return self.a(self.blocks(x))


@habit
class DropsInsideDrops(Drops):
    """A branch that is only come to where another one went its way."""

    def body(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.7:
            h = torch.tanh(self.layers[0](x))
            if torch.rand(1) < 0.6:
                h = h + self.layers[1](h)
            x = x + h
        if torch.rand(1, 1) < 0.7:
            h = torch.tanh(self.layers[2](x))
            if torch.rand(1, 1, 1) < 0.6:
                h = h + self.layers[3](h)
            x = x + h
        return self.a(x)


@habit
class OneLayerOrAnother(Drops):
    """Both sides have parameters."""

    def body(self, x: Tensor) -> Tensor:
        for first, second in (self.layers[:2], self.layers[2:]):
            x = torch.tanh(first(x)) if torch.rand(()) < 0.5 else torch.relu(second(x)) * 2
        return self.a(x)


@habit
class BothNumbers(Drops):
    """Two draws in one condition: the second is only made where the first says so."""

    def body(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.9 and torch.rand(1) < 0.7:
            x = torch.tanh(self.layers[0](x))
        return self.a(x)


@habit
class AllStatesAreKept(Drops):
    """Every layer's result is used at the end, beside the last."""

    def body(self, x: Tensor) -> Tensor:
        states = [x]
        for layer in self.layers:
            if torch.rand(()) >= self.drop:
                x = torch.tanh(layer(x))
            states.append(x)
        weights = torch.arange(1.0, 6.0, dtype=x.dtype)
        return self.a((torch.stack(states) * weights[:, None, None]).mean(0))


@habit
class PathsBesideEachOther(Drops):
    """Layers that do not follow each other: all meet at the end."""

    def body(self, x: Tensor) -> Tensor:
        return self.a(sum((layer(x) if torch.rand(()) < 0.6 else x * 0.1) for layer in self.layers))


@habit
class CollectedInAList(Drops):
    """The number of things that are summed is drawn."""

    def body(self, x: Tensor) -> Tensor:
        h = self.b(x)
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                h = h + layer(x)
        return self.a(torch.tanh(h))


@habit
class ExchangedAtRandom(Drops):
    """Nothing is left out: two values change places."""

    def body(self, x: Tensor) -> Tensor:
        left, right = self.layers[0](x), self.layers[1](x)
        if torch.rand(()) < 0.5:
            left, right = right, left
        return self.a(torch.tanh(left) + 2 * right)


@habit
class StatisticsOfWhatRan(Habit):
    """Batch norm on one side: its statistics and its counter change only where it runs."""

    random = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = x + layer(x)
        return self.a(x)


@habit
class CountedWhereItRan(Drops):
    """A buffer that one side writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.7:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x - self.mean
        return self.a(x)


@habit
class WrittenWhereItRan(Drops):
    """One side writes to a tensor that goes on."""

    def body(self, x: Tensor) -> Tensor:
        h = self.b(x)
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                h = h * 1.5
                h[:, :2] = layer(x)[:, 2:4]
        return self.a(torch.tanh(h))


@habit
class DropsUnderCheckpointing(Drops):
    """Layers that are run again in the backward."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.4:
                continue
            x = torch.utils.checkpoint.checkpoint(lambda h, f=layer: torch.tanh(f(h)), x, use_reentrant=False)
        return self.a(x)


@habit
class OneLossOrAnother(Habit):
    """The loss itself is one or the other."""

    random = True

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if torch.rand(()) < 0.5:
            return F.mse_loss(self.a(x), y)
        return F.l1_loss(self.b(x), y)


@habit
class InfiniteWhereItDoesNotRun(Drops):
    """What does not run would give no numbers, and no finite gradient."""

    def body(self, x: Tensor) -> Tensor:
        draw = torch.rand(())
        h = self.b(x)
        if draw < 0.9:
            h = h / (h.detach() * 0 + (draw < 0.9))
        return self.a(h)


@habit
class DropsOfOtherShapes(Habit):
    """The sides give tensors of different shapes."""

    refused = "both sides meet in tensors that differ"

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if torch.rand(()) < 0.5:
            h = h[:, :4]
        return h.mean(1, keepdim=True).expand(-1, WIDTH) + h.sum()


@habit
class ADrawnIndex(Drops):
    """A layer is chosen by its number."""

    refused = "value of a random number"

    def body(self, x: Tensor) -> Tensor:
        return self.a(self.layers[int(torch.randint(0, 4, ()))](x))


@habit
class ADrawnLength(Drops):
    """A number of layers is drawn."""

    refused = "value of a random number"

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers[: torch.randint(1, 4, (1,)).item()]:
            x = layer(x)
        return x


@habit
class DrawsOfDifferentDepth(Drops):
    """Each side asks for another number: which operators are there in both is not told."""

    refused = "only on one side of another branch"

    def body(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            if torch.rand(()) < 0.5:
                x = torch.tanh(self.layers[0](x))
        elif torch.rand(()) < 0.2:
            x = torch.relu(self.layers[1](x))
        return self.a(x)
