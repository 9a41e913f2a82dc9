"""Train a small ResNet on two ranks, with batch norm over the whole batch. ``python examples/train_resnet.py``

The pictures are noise with a bright square; the class is the quadrant that it lies in.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar

BATCH, SIZE, STEPS = 32, 32, 30


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(c_out), nn.BatchNorm2d(c_out)
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b c y x] -> [b c y x]
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Residual(16, 16, 1),
        Residual(16, 32, 2), Residual(32, 64, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 4),
    )  # fmt: skip


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    classes = torch.randint(0, 4, (BATCH,), generator=generator)
    half = SIZE // 2
    for image, quadrant in zip(images, classes.tolist(), strict=True):
        top, left = (quadrant // 2) * half, (quadrant % 2) * half
        image[:, top + 4 : top + 12, left + 4 : left + 12] += 1.0
    return images, classes


def main() -> tuple[list[float], float]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    images, classes = batch(generator)
    model = autopar.parallelize(resnet(), dist.get_world_size(), images, loss_fn=F.cross_entropy, targets=classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    losses = []
    for step in range(STEPS):
        loss = model.train_step(*batch(generator), optimizer=optimizer)
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
    mean = autopar.full_state_dict(model, all_ranks=True)["1.running_mean"].norm().item()
    if dist.get_rank() == 0:
        print(f"last loss {losses[-1]:.3f}, mesh {model.plan.mesh}, norm of the first running mean {mean:.4f}")
    return losses, mean


if __name__ == "__main__":
    first, second = autopar.run_local(main, 2)
    assert first == second, "ranks disagree"
    assert first[0][-1] < 0.5 * first[0][0]
