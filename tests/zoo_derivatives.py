"""Families of plain torch for the wide zoo whose forward takes gradients: forces, penalties, equations, inner loops."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_plain import SEQ, VOCAB, WIDTH, family
from zoo_recurrent import PLAIN

HALF, TASKS = 3, 2


def _points(g: torch.Generator) -> tuple[Any, ...]:
    return (torch.rand(16, 2, generator=g),)


def _phases(g: torch.Generator) -> tuple[Any, ...]:
    return torch.randn(8, 4, generator=g), torch.randn(8, 4, generator=g)


def _two_pictures(g: torch.Generator) -> tuple[Any, ...]:
    return torch.rand(4, 3, 16, 16, generator=g), torch.rand(4, 3, 16, 16, generator=g)


def _tasks(g: torch.Generator) -> tuple[Any, ...]:
    return torch.randn(4, 2 * HALF, 8, generator=g), torch.randn(4, 2 * HALF, TASKS, generator=g)


def _molecules(g: torch.Generator) -> tuple[Any, ...]:
    return (
        torch.randint(0, 5, (4, 6), generator=g), torch.randn(4, 6, 3, generator=g), torch.randn(4, generator=g),
        torch.randn(4, 6, 3, generator=g),
    )  # fmt: skip


def _sentences(g: torch.Generator) -> tuple[Any, ...]:
    return torch.randint(0, VOCAB, (4, SEQ), generator=g), torch.randint(0, VOCAB, (4, SEQ), generator=g)


@family(_points)
class BurgersEquation(nn.Module):
    """A physics-informed network: the residual of a differential equation, with a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.net = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), hidden, nn.Linear(WIDTH, 1))

    def forward(self, xt: Tensor) -> Tensor:
        xt.requires_grad_(True)
        u = self.net(xt)
        du = torch.autograd.grad(u, xt, torch.ones_like(u), create_graph=True)[0]
        u_x, u_t = du[:, :1], du[:, 1:]
        u_xx = torch.autograd.grad(u_x, xt, torch.ones_like(u_x), create_graph=True)[0][:, :1]
        return (u_t + u * u_x - 0.01 * u_xx).pow(2).mean()


@family(_two_pictures)
class GradientPenalty(nn.Module):
    """The critic of a Wasserstein GAN, whose gradient between real and generated pictures should have length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 5, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(72, 1),
        )  # fmt: skip

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.linspace(0, 1, len(real), dtype=real.dtype).view(-1, 1, 1, 1)
        mixed = (share * real + (1 - share) * fake).requires_grad_(True)
        score = self.net(mixed)
        slope = torch.autograd.grad(
            outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True,
            only_inputs=True,
        )[0]  # fmt: skip
        penalty = ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        return self.net(fake).mean() - self.net(real).mean() + 10 * penalty


@family(_phases)
class HamiltonianNet(nn.Module):
    """Motion from an energy that is learned: its gradient, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(4, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1)
        )  # fmt: skip

    def forward(self, x: Tensor, motion: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            slope = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        dq, dp = slope.chunk(2, -1)
        return F.mse_loss(torch.cat([dp, -dq], -1), motion)


@family(_tasks)
class MetaLearner(nn.Module):
    """MAML: some steps of descent on each task inside, differentiated as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 8) * 0.3), nn.Parameter(torch.zeros(8))
        self.v = nn.Parameter(torch.randn(1, 8) * 0.3)

    def net(self, x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w, b)), v).squeeze(-1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for task in range(TASKS):
            fast = [self.w, self.b, self.v]
            for _ in range(2):
                loss = F.mse_loss(self.net(x[:, :HALF], *fast), y[:, :HALF, task])
                steps = torch.autograd.grad(loss, fast, create_graph=True)
                fast = [p - 0.1 * step for p, step in zip(fast, steps, strict=True)]
            losses.append(F.mse_loss(self.net(x[:, HALF:], *fast), y[:, HALF:, task]))
        return torch.stack(losses).sum()


@family(_two_pictures)
class LangevinSteps(nn.Module):
    """An energy-based model: steps down its own energy, as constants, give what real pictures are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1), nn.SiLU(), nn.AvgPool2d(4), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(128, 1),
        )  # fmt: skip

    def forward(self, real: Tensor, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x)
            x = (x - 0.1 * slope).clamp(-2, 2)
        a, b = self.energy(real), self.energy(x.detach())
        return (a - b).mean() + 0.1 * (a**2 + b**2).mean()


@family(_molecules)
class ForceField(nn.Module):
    """SchNet's idea: the energy of a molecule from distances, forces as its gradient; both are learned."""

    centres: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.update = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Sequential(nn.Linear(8, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH))
        self.out = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("centres", torch.linspace(0, 4, 8))

    def forward(self, kinds: Tensor, places: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
        places.requires_grad_()
        h = self.embed(kinds)
        distance = ((places[:, :, None] - places[:, None]) ** 2).sum(-1).add(1e-6).sqrt()
        others = 1 - torch.eye(places.shape[1], dtype=places.dtype)
        weight = self.filter(torch.exp(-((distance[..., None] - self.centres) ** 2))) * others[None, :, :, None]
        for _ in range(2):
            h = h + self.update((weight * h[:, None]).sum(2))
        found = self.out(h).sum((1, 2))
        pull = -torch.autograd.grad(found.sum(), places, create_graph=True)[0]
        return F.mse_loss(found, energy) + F.mse_loss(pull, forces)


@family(_sentences)
class AdversarialEmbeddings(nn.Module):
    """A step of embeddings against the loss, through a norm, attention and a cross entropy; trained on both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        moved = torch.full_like(x, 0.01).requires_grad_()
        (slope,) = torch.autograd.grad(self.loss(x + moved, labels), moved)
        moved = (moved + 0.1 * slope / slope.norm()).detach()
        return self.loss(x, labels) + self.loss(x + moved, labels)


DERIVATIVES = (
    "burgers_equation", "gradient_penalty", "hamiltonian_net", "meta_learner", "langevin_steps", "force_field",
    "adversarial_embeddings",
)  # fmt: skip

__all__ = ["DERIVATIVES", "PLAIN"]
