"""``nn.AdaptiveLogSoftmaxWithLoss`` trains as in eager mode: clusters without rows, one cut or several, one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.comparison.program_vs_eager import verify
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

CLASSES, WIDTH = 60, 16
X = torch.linspace(-1, 1, 8 * WIDTH).sin().view(8, WIDTH)


class Words(nn.Module):
    """The loss, and log-probabilities beside it, as a language model returns them."""

    def __init__(self, cutoffs: tuple[int, ...] = (10, 30), **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, list(cutoffs), **options)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output, loss = self.softmax(self.inner(x), target)
        return loss, output


CASES = {
    "all clusters": (Words, (X, torch.tensor([3, 59, 12, 29, 10, 0, 30, 45]))),
    "clusters without rows": (Words, (X, torch.tensor([3, 9, 2, 9, 1, 0, 3, 4]))),
    "one cut": (lambda: Words((20,)), (X, torch.tensor([3, 59, 12, 29, 10, 0, 30, 45]))),
    "several, of one size": (
        lambda: Words((5, 20, 40), div_value=1.5, head_bias=True), (X, torch.tensor([3, 59, 12, 29, 10, 0, 20, 45]))
    ),
    "one row": (Words, (X[0], torch.tensor(45))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_eager_mode(name: str) -> None:
    make, batch = CASES[name]
    model = make()
    mesh = Mesh.of(data=2, tensor=2)
    rows = verify(capture(model, batch), model, batch, {}, mesh, load_cluster("local-x4"), random_plans=1)
    assert len(rows) == 3 and all(row.fine for row in rows)


def test_a_cluster_without_rows_keeps_its_parameters() -> None:
    """As in eager mode, momentum does not move what takes no part; and a class that there is not is refused."""
    few, all_of_them = torch.tensor([3, 9, 2, 9, 1, 0, 3, 4]), torch.tensor([3, 59, 12, 29, 10, 0, 30, 45])
    model, alone = Words(), Words()
    try:
        pm = autopar.parallelize(model, 1, (X, all_of_them))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pm, alone)]
        for target in (few, all_of_them, few):
            for module, optimizer in zip((pm, alone), optimizers, strict=True):
                optimizer.zero_grad()
                module(X, target)[0].backward()
                assert (module.softmax.tail[0][0].weight.grad is None) == (target is few)
                optimizer.step()
        for name, param in pm.named_parameters():
            torch.testing.assert_close(param, dict(alone.named_parameters())[name])
        with pytest.raises(Exception, match="out of bounds"):
            pm(X, few + CLASSES)
    finally:
        dist.destroy_process_group()
