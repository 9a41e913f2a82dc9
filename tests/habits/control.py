"""Branches, Python state, random draws outside torch, values that are asked for."""

from __future__ import annotations

import functools
import math
import random
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from habits.base import PAD, ROWS, WIDTH, Habit, Tokens, habit


@habit
class EarlyReturn(Habit):
    """A configuration decides."""

    def __init__(self, residual: bool = False) -> None:
        super().__init__()
        self.residual = residual

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.residual:
            return h
        return h + self.b(x)


@habit
class TrainingFlag(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h * 0.5 if self.training else h


@habit
class BranchOnShape(Habit):
    def body(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2 and x.dim() == 2 and len(x) % 2 == 0:
            x = x / math.sqrt(x.size(-1))
        return self.a(x)


@habit
class BranchOnData(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h * 2 if h.sum() > 0 else h


@habit
class BranchOnPadding(Tokens):
    """Whether there is padding in this batch is asked in Python."""

    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        if (ids == PAD).any():
            h = h * (ids != PAD)[..., None]
        return self.head(h)


@habit
class BranchOnBuffer(Habit):
    refused = "branches on data"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def body(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.a(x) if self.steps > 1 else self.b(x)


@habit
class BranchOnConstantTensor(Habit):
    """A tensor that no input reaches may be asked."""

    def body(self, x: Tensor) -> Tensor:
        rates = torch.linspace(0, 0.5, 4)
        return self.a(x) * (1 - rates[1].item()) if rates.max() < 1 else x


@habit
class BranchOnWrittenConstant(Habit):
    """What is asked was written to before, by an element: its value is the same in each call, so it is answered."""

    def body(self, x: Tensor) -> Tensor:
        n = torch.zeros(3)
        n[1] = 5
        n += 1
        scale = n.max().item()
        n.zero_()
        return self.a(x) * scale if n.sum() == 0 else x


@habit
class PythonCounter(Habit):
    """``self.step += 1`` in forward, read in the same forward."""

    refused = "'step', from 1 to 2"

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def body(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.a(x) * self.step


@habit
class PythonCounterUnread(Habit):
    """A counter that nothing in forward depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.a(x)


@habit
class TemperatureSchedule(Habit):
    """A temperature that forward lowers at every call."""

    refused = "'temperature', from"

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def body(self, x: Tensor) -> Tensor:
        out = (self.a(x) / self.temperature).softmax(-1)
        if self.training:
            self.temperature = max(0.5, self.temperature * 0.7)
        return out


@habit
class EveryOtherStep(Habit):
    """A branch on a counter."""

    refused = "'step', from"

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def body(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.a(x) if self.step % 2 else self.b(x)


@habit
class FirstCallOnly(Habit):
    """Lazy initialization by a flag."""

    refused = "first call of forward"

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def body(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            x = x * 3
        return self.a(x)


@habit
class CounterInADict(Habit):
    """State in a dict that belongs to the module."""

    refused = "'state', from"

    def __init__(self) -> None:
        super().__init__()
        self.state = {"step": 0}

    def body(self, x: Tensor) -> Tensor:
        self.state["step"] += 1
        return self.a(x) * self.state["step"]


@habit
class CounterInAConfig(Habit):
    """State in an object that is no module."""

    refused = "'config.scale', from"

    class Config:
        scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Config()

    def body(self, x: Tensor) -> Tensor:
        self.config.scale *= 2
        return self.a(x) * self.config.scale


@habit
class CounterInAList(Habit):
    refused = "'seen', from"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def body(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return self.a(x) * len(self.seen)


_CALLS = [0]


@habit
class CounterInAGlobal(Habit):
    refused = "global '_CALLS'"

    def __init__(self) -> None:
        super().__init__()
        _CALLS[0] = 0

    def body(self, x: Tensor) -> Tensor:
        _CALLS[0] += 1
        return self.a(x) * _CALLS[0]


@habit
class RandomFactor(Habit):
    random = True

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * random.random()


@habit
class LayerDrop(Habit):
    """Python's own random numbers decide which layers run."""

    random = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and random.uniform(0, 1) < 0.5:
                continue
            x = torch.tanh(layer(x))
        return x + self.a(x)


@habit
class NumpyNoise(Habit):
    refused = "random|numpy"

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * float(np.random.rand())


@habit
class NumpyArray(Habit):
    """A whole array of noise."""

    refused = "random|numpy"

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) + torch.from_numpy(np.random.randn(ROWS, WIDTH))


@habit
class NumpyGenerator(Habit):
    """A generator of its own."""

    refused = "random|numpy|Generator"

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * float(self.rng.random())


@habit
class OwnRandomObject(Habit):
    refused = "random|Random"

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * self.rng.uniform(0.5, 1.5)


@habit
class ShuffledLayers(Habit):
    """The order of layers is drawn."""

    refused = "random"

    def body(self, x: Tensor) -> Tensor:
        layers = [self.a, self.b]
        random.shuffle(layers)
        return layers[1](torch.tanh(layers[0](x)))


@habit
class OwnTorchGenerator(Habit):
    """Draws of a torch generator that the module holds."""

    refused = "[gG]enerator"

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.rand(WIDTH, generator=self.generator, dtype=x.dtype)


@habit
class SeededInside(Habit):
    """``manual_seed`` in forward: in eager mode the noise is the same at every call."""

    refused = "seed"

    def body(self, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return self.a(x) * torch.rand(WIDTH, dtype=x.dtype)


@habit
class ReorderedList(Habit):
    """A list of modules in another order, and sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        for layer in self.layers[1:3]:
            x = layer(x)
        return x


@habit
class ModulesMadeInForward(Habit):
    """A module without parameters that is made at every call."""

    def body(self, x: Tensor) -> Tensor:
        return nn.Sequential(nn.Tanh(), nn.LayerNorm(WIDTH, elementwise_affine=False, dtype=x.dtype))(self.a(x))


@habit
class CachedTensor(Habit):
    """A mask that is made at the first call and kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDTH, WIDTH, dtype=x.dtype).tril()
        return self.a(x) @ self.mask


@habit
class CachedFromData(Habit):
    """What is kept from the first call is a function of its batch."""

    refused = "attribute|assign|data"

    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        if self.center is None:
            self.center = x.detach().mean(0)
        return self.a(x - self.center)


@habit
class ItemOfInput(Habit):
    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * x.detach().abs().max().item()


@habit
class ToList(Tokens):
    """Lengths as Python numbers."""

    def body(self, ids: Tensor) -> Tensor:
        lengths = (ids != PAD).sum(1).tolist()
        h = self.embed(ids)
        return self.head(torch.stack([row * n for row, n in zip(h, lengths)]))


@habit
class NumpyOfInput(Habit):
    refused = "value of a tensor|numpy"

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * float(x.detach().numpy().max())


@habit
class SelectedRows(Tokens):
    """A loss over the tokens that a mask selects: the shape depends on data."""

    refused = "depend"

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))
        seen = labels != -100
        return F.cross_entropy(logits[seen], labels[seen])


@habit
class NonzeroRows(Habit):
    """All rows are computed, and those that are not selected are left out."""

    def body(self, x: Tensor) -> Tensor:
        rows = (x.sum(1) > 0).nonzero().squeeze(1)
        return self.a(x).index_add(0, rows, self.b(x[rows]))


@habit
class AssertsOnData(Habit):
    """An assertion on values is a branch; what it guards does not change."""

    def body(self, x: Tensor) -> Tensor:
        assert not torch.isnan(x).any(), "nan"
        return self.a(x)


@habit
class TryExcept(Habit):
    """An error is caught on the way."""

    def body(self, x: Tensor) -> Tensor:
        try:
            h = self.a(x.view(-1, 3))
        except RuntimeError:
            h = self.a(x)
        return h


@habit
class Warns(Habit):
    """A warning and a print with a number of the trace."""

    def body(self, x: Tensor) -> Tensor:
        warnings.warn(f"rows: {x.shape[0]}", stacklevel=2)
        return self.a(x)


@habit
class WhileLoop(Habit):
    """A loop whose end follows from sizes."""

    def body(self, x: Tensor) -> Tensor:
        width = WIDTH
        while width > 2:
            width //= 2
            x = x + self.a(x)[:, :width].sum(1, keepdim=True)
        return x


@habit
class Interpolated(Habit):
    """A literal argument with a default, and a lambda that is called."""

    def body(self, x: Tensor, scale: float = 0.5, fn=lambda h: h * 3) -> Tensor:
        return fn(self.a(x)) * scale


@habit
class TrainingSwitched(Habit):
    """The model switches one of its parts to eval mode inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def body(self, x: Tensor) -> Tensor:
        self.drop.eval()
        return self.drop(self.a(x))


@habit
class HiddenInAnAttribute(Habit):
    """A hidden state in an attribute, which is None before the first call."""

    refused = "keeps a tensor"

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x) if self.hidden is None else self.a(x) + self.hidden
        self.hidden = h.detach()
        return h


@habit
class LastActivationsKept(Habit):
    """Activations are left in attributes for whoever looks; no forward reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        self.last = h.detach()
        return self.b(h)


@habit
class ShownAsNumpy(Habit):
    """A numpy array of activations, for plots."""

    refused = "makes a numpy array of a tensor"

    def body(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        self.shown = h.detach().numpy()
        return self.b(h)


@habit
class CachedInADict(Habit):
    """Constants by their size, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def body(self, x: Tensor) -> Tensor:
        if WIDTH not in self.masks:
            self.masks[WIDTH] = torch.ones(WIDTH, WIDTH, dtype=x.dtype).tril()
        return self.a(x) @ self.masks[WIDTH]


@habit
class StatisticsInADict(Habit):
    """What is kept there follows from the first batch."""

    refused = "keeps|changes|first call"

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}

    def body(self, x: Tensor) -> Tensor:
        if "mean" not in self.seen:
            self.seen["mean"] = x.detach().mean(0)
        return self.a(x - self.seen["mean"])


@habit
class SeededInAFork(Habit):
    """The same noise at every call, without a trace of it outside."""

    refused = "seed"

    def body(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            noise = torch.randn(WIDTH, dtype=x.dtype)
        return self.a(x) + noise


@habit
class HiddenInADict(Habit):
    """A hidden state under a key that is there from the start."""

    refused = "keeps a tensor"

    def __init__(self) -> None:
        super().__init__()
        self.state = {"h": torch.zeros(ROWS, WIDTH, dtype=torch.float64)}

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x) + self.state["h"]
        self.state["h"] = h.detach()
        return h


@functools.lru_cache(maxsize=4)
def _table(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float64).sin()


@habit
class MemoizedTable(Habit):
    """A function that remembers its tensors is called while tracing, and later in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        _table.cache_clear()

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * _table(WIDTH)
