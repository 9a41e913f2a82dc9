"""``torch.autograd.grad`` in a forward, through operators that keep values of their own: norms, losses, dropout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.comparison import compare_with_eager
from autopar.comparison.program_vs_eager import verify
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

ROWS, CHANNELS = 4, 6
X = torch.linspace(-3, 3, ROWS * 3 * 36, dtype=torch.float64).sin().view(ROWS, 3, 6, 6)
Score = Callable[[nn.Module, Tensor], Tensor]
WEIGHTS = torch.linspace(0.5, 2, CHANNELS, dtype=torch.float64)


class Weighed(nn.Module):
    """VQGAN's adaptive weight: a loss by the size of its gradient, which is trained too where ``twice`` says so."""

    def __init__(self, inner: nn.Module, twice: bool, score: Score) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.score, self.twice = nn.Conv2d(3, CHANNELS, 3), inner, score, twice
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        loss = self.score(self, h)
        (grad,) = torch.autograd.grad(loss, self.first.weight, retain_graph=True, create_graph=self.twice)
        return loss * (grad.norm() if self.twice else grad.norm().detach()) + h.square().mean()


def means(m: nn.Module, h: Tensor) -> Tensor:
    return m.inner(h).tanh().mean((2, 3))


def plain(m: nn.Module, h: Tensor) -> Tensor:
    return means(m, h).exp().mean()


def classes(**options: object) -> Score:
    return lambda m, h: F.cross_entropy(means(m, h), torch.tensor([0, 5, -1, 2]), ignore_index=-1, **options)


CASES: dict[str, tuple[Callable[[], nn.Module], Score]] = {
    "batch norm": (lambda: nn.BatchNorm2d(CHANNELS), plain),
    "batch norm without statistics": (
        lambda: nn.BatchNorm2d(CHANNELS, affine=False, track_running_stats=False), plain
    ),
    "batch norm of all batches so far": (lambda: nn.BatchNorm2d(CHANNELS, momentum=None), plain),
    "batch norm in eval mode": (lambda: nn.BatchNorm2d(CHANNELS).eval(), plain),
    "group norm": (lambda: nn.GroupNorm(2, CHANNELS), plain),
    "instance norm": (lambda: nn.InstanceNorm2d(CHANNELS, affine=True), plain),
    "rms norm": (lambda: nn.RMSNorm([CHANNELS, 4, 4]), plain),
    "two norms": (lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.GELU(), nn.LayerNorm([4, 4])), plain),
    "dropout": (lambda: nn.Dropout(0.5), plain),
    "classes": (nn.Identity, classes()),
    "classes with weights": (nn.Identity, classes(weight=WEIGHTS)),
    "classes, smoothed, with weights": (nn.Identity, classes(weight=WEIGHTS, label_smoothing=0.1)),
    "shares of classes": (
        nn.Identity, lambda m, h: F.cross_entropy(means(m, h), means(m, h).detach().softmax(1), label_smoothing=0.1)
    ),
}  # fmt: skip


ONCE = ("batch norm", "dropout", "classes, smoothed, with weights")


@pytest.mark.parametrize(("name", "twice"), [*((name, True) for name in CASES), *((name, False) for name in ONCE)])
def test_the_numbers_of_eager_mode(name: str, twice: bool) -> None:
    inner, score = CASES[name]
    model = Weighed(inner(), twice, score)
    found = compare_with_eager(capture(model, (X,)), model, (X,), {})
    assert not found.note and found.worst < 1e-9


def test_a_batch_norm_is_one_of_the_whole_batch() -> None:
    """The statistics of rows that ranks hold are added up, in the gradient too."""
    model = Weighed(nn.BatchNorm2d(CHANNELS), True, plain)
    rows = verify(capture(model, (X,)), model, (X,), {}, Mesh.of(data=2), load_cluster("local-x2"), random_plans=2)
    assert len(rows) == 4 and all(row.fine for row in rows)
