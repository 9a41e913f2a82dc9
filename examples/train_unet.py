"""A U-Net in three pipeline stages on three ranks, skip connections across them. ``python examples/train_unet.py``

The cuts come from the graph: what the way down makes is sent to the stage of the way up that reads it, past the stages
between. The model marks the bright disc in noise; its losses are those of one device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.plans.stage_graphs import cut
from cost_models.schedules import grid

SIZE, BATCH, MICROBATCHES, STEPS = 32, 16, 4, 8


def double(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1), nn.GroupNorm(4, c_out), nn.ReLU(),
        nn.Conv2d(c_out, c_out, 3, padding=1), nn.GroupNorm(4, c_out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Levels of 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = double(3, 16), double(16, 32), double(32, 64)
        self.rise2, self.up2 = nn.ConvTranspose2d(64, 32, 2, stride=2), double(64, 32)
        self.rise1, self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2), double(32, 16)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b 3 y x] -> [b 2 y x]
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.bottom(F.max_pool2d(b, 2))
        y = self.up2(torch.cat([self.rise2(y), b], dim=1))
        return self.head(self.up1(torch.cat([self.rise1(y), a], dim=1)))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)  # the same batches on every rank
    y, x = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    found = []
    for _ in range(STEPS):
        middle = torch.randint(8, SIZE - 8, (BATCH, 2, 1, 1), generator=generator)
        disc = (y - middle[:, 0]) ** 2 + (x - middle[:, 1]) ** 2 < 36
        noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
        found.append((noise + disc[:, None], disc.long()))
    return found


def main() -> list[float]:
    torch.manual_seed(0)
    data = batches()
    images, discs = data[0]  # the batch of a step
    model = autopar.parallelize(
        UNet(), dist.get_world_size(), images, loss_fn=F.cross_entropy, targets=discs,
        stages=3, schedule="1f1b", microbatches=MICROBATCHES,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [model.train_step(*batch, optimizer=optimizer).item() for batch in data]
    if dist.get_rank() == 0:
        graph = autopar.capture(UNet(), images, loss_fn=F.cross_entropy, targets=discs).graph
        for choice, stage in zip(model.plan.stages, cut(graph, model.plan.starts), strict=True):
            print(f"stage {stage.number} begins at {choice.first}, on rank {choice.devices[0]}")
            for stage_edge in stage.takes:
                between = stage.number - stage_edge.source - 1
                past = f", past {between} stage" if between else ""
                print(f"    takes {stage_edge.tensor} from stage {stage_edge.source}{past}")
        print(grid(model.plan.schedule))
        print("losses", " ".join(f"{x:.4f}" for x in losses), flush=True)
    return losses


def alone() -> list[float]:
    """The same training on one device."""
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for images, discs in batches():
        loss = F.cross_entropy(model(images), discs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    ranks = autopar.run_local(main, 3)
    assert all(r == ranks[0] for r in ranks), "ranks disagree"
    worst = max(abs(a - b) for a, b in zip(ranks[0], alone(), strict=True))
    print(f"largest difference of a loss to one device: {worst:.1e}")
    assert worst < 1e-4
    assert ranks[0][-1] < ranks[0][0]
