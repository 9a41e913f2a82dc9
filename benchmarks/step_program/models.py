"""The models of the comparison: ten kinds of programs, small, each with a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Cube(torch.autograd.Function):
    """x^3 with its own backward, and Python state on the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = 3.0
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return ctx.factor * x * x * grad


class WithFunction(nn.Module):
    """Layers around a custom Function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + Cube.apply(torch.tanh(layer(x)))
        return F.cross_entropy(self.head(x), labels)


class WithHooks(WithFunction):
    """Layers whose gradients a hook on a tensor of the forward changes."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = torch.tanh(layer(x))
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 0.5)
            x = x + y
        return F.cross_entropy(self.head(x), labels)


class Lstm(nn.Module):
    """An LSTM of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.lstm = nn.LSTM(64, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(self.embed(ids))
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


def plain(kind: type[nn.Module]) -> Callable[[], Made]:
    """Return a maker of a model of vectors."""
    return lambda: (kind(), (torch.randn(8, 64), torch.randint(0, 8, (8,))), {})


def lstm() -> Made:
    """Return the LSTM with a batch."""
    ids = torch.randint(0, 64, (8, 16))
    return Lstm(), (ids, ids.clone()), {}


def of_zoo(name: str, **options: Any) -> Callable[[], Made]:
    """Return a maker of a model of the tests."""

    def make() -> Made:
        from zoo import ZOO
        from zoo_wide import WIDE

        case = ZOO[name](**options) if name in ZOO else WIDE[name]()
        return case.model, case.args, case.kwargs

    return make


def resnet50() -> Made:
    """Return ResNet-50 for small images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=10)
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}
    return ResNetForImageClassification(config), (), batch


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": of_zoo("gpt2"), "llama": of_zoo("llama"), "resnet50": resnet50, "t5": of_zoo("t5"),
    "mixtral": of_zoo("mixtral"), "unet": of_zoo("unet"), "lstm": lstm, "function": plain(WithFunction),
    "llama_one_row": of_zoo("llama", rows=1), "t5_one_row": of_zoo("t5", rows=1),
    "layerdrop": of_zoo("opt", layerdrop=0.3), "hooks": plain(WithHooks),
}  # fmt: skip
