"""What one rank does in the slow tests of compiled programs: what else a model may ask for, under the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from procs.cases import whole
from procs.experts import HIDDEN, Stack
from procs.habits import Net, difference
from procs.in_buckets import BUCKETS, CUTS, SIZES
from procs.other_shapes import Words
from procs.other_shapes import batch as words
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Attends(nn.Module):
    """Causal attention, with dropout where it is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout = dropout
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return torch.as_tensor(self.out(y.transpose(1, 2).reshape(rows, length, 16)).square().mean())


OF_FFT = {"*fft*": {"data": "f0"}, "*mul*": {"data": "b"}, "*abs*": {"data": "replicate"}}
"""Complex rows are gathered."""


class Mixes(nn.Module):
    """A Fourier transform of each row, and complex weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 2).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(x, dim=1) * torch.view_as_complex(self.weight)).abs().mean()


class LeavesOut(nn.Module):
    """Layers of which each step leaves some out, as LayerDrop does: a branch on a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = layer(x).tanh()
        return x.square().mean()


def compared(
    make: Callable[..., Any], calls: Sequence[tuple[torch.Tensor, ...]], backend: str, fullgraph: bool = True
) -> float:
    """The worst difference of losses and gradients to the same program not compiled."""
    modules = make(compile={"backend": backend, "fullgraph": fullgraph}), make()
    worst = 0.0
    for call in calls:
        results = []
        for module in modules:
            module.zero_grad()
            torch.manual_seed(5)
            out = module(*call)
            loss = out[0] if isinstance(out, tuple) else out
            loss.backward()
            results.append([loss.detach(), *(whole(p.grad).clone() for p in module.parameters() if p.grad is not None)])
        worst = max(worst, *(difference(a, b) for a, b in zip(*results, strict=True)))
        assert [p.grad is None for p in modules[0].parameters()] == [p.grad is None for p in modules[1].parameters()]
    return worst


def features(backend: str) -> dict[str, float]:
    """By feature, what :func:`compared` gives."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    generator = torch.Generator().manual_seed(1)
    short, long = (torch.randn(2, length, 16, generator=generator).double() for length in (16, 1024))
    rows = torch.randn(8, 6, generator=generator)
    ring = {"constraints": {"*:scaled_dot_product_attention": {"data": "ring"}}}
    padded: dict[str, Any] = {"shapes": "buckets", "buckets": BUCKETS, **CUTS["tensor"]}

    def spread(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Callable[..., Any]:
        return lambda **more: autopar.parallelize(copy.deepcopy(model), mesh, inputs, **options, **more)

    torch.manual_seed(2)
    experts, tokens = Stack("SharedExpert").double(), [torch.randn(4, 4, HIDDEN).double() for _ in range(2)]
    odd = short[:, :15]
    programs: dict[str, tuple[Any, ...]] = {
        "ring": (spread(Attends(), short, **ring), [(short,)] * 2),
        "ring, unequal": (spread(Attends(), odd, **ring), [(odd,)] * 2),
        "dropout of attention, in blocks": (spread(Attends(0.2), long), [(long,)]),
        "policy": (spread(Net(0.1).float(), rows, precision="bf16-mixed"), [(rows,)] * 2),
        "branches": (spread(LeavesOut(), rows.double()), [(rows.double(),)] * 3),
        "complex numbers": (spread(Mixes(), short, constraints=OF_FFT), [(short,)] * 2),
        "buckets": (spread(Words(), *words(4, 6), **padded), [words(*size, 1) for size in SIZES[:4]]),
    }
    for way in ("travel", "travel/2", "travel@max"):
        pins = {"constraints": {"*expert_block*": {"data": way}}}
        programs[f"experts, {way}"] = spread(experts, *tokens, **pins), [tokens, tokens[::-1]]
    opaque = {"branches", *(name for name in programs if "experts" in name)}
    return {name: compared(*program, backend, name not in opaque) for name, program in programs.items()}
