"""A GPT in two pipeline stages, each on two ranks: four ranks of this machine. ``python examples/train_pipeline.py``

A step is four microbatches under a zero-bubble schedule: gradients of weights are computed when a rank would wait. The
losses are those of one device. With accelerators start ``main`` with ``torchrun --nproc-per-node 4``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from train_gpt import GPT, loss_of

import autopar
from cost_models.schedules import grid

VOCABULARY, TOKENS, BATCH, MICROBATCHES, STEPS = 128, 64, 16, 4, 8


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)  # the same batches on every rank
    starts = torch.randint(0, VOCABULARY, (STEPS, BATCH, 1), generator=generator)
    rows = (starts + 3 * torch.arange(TOKENS + 1)) % VOCABULARY  # sequences that count in threes
    return [(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows]


def main() -> list[float]:
    torch.manual_seed(0)
    data = batches()
    ids, labels = data[0]  # the batch of a step
    model = autopar.parallelize(
        GPT(VOCABULARY), dist.get_world_size(), ids, loss_fn=loss_of, targets=labels,
        stages=2, schedule="zb-h1", microbatches=MICROBATCHES,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in data:
        loss = model.train_step(*batch)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        for number, stage in enumerate(model.plan.stages):
            print(f"stage {number} begins at {stage.first}, ranks {list(stage.devices)}, mesh {stage.mesh}")
        print(grid(model.plan.schedule))
        print("losses", " ".join(f"{x:.4f}" for x in losses), flush=True)
    return losses


def alone() -> list[float]:
    """The same training on one device."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids, labels in batches():
        loss = loss_of(model(ids), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    ranks = autopar.run_local(main, 4)
    assert all(r == ranks[0] for r in ranks), "ranks disagree"
    worst = max(abs(a - b) for a, b in zip(ranks[0], alone(), strict=True))
    print(f"largest difference of a loss to one device: {worst:.1e}")
    assert worst < 1e-4
    assert ranks[0][-1] < ranks[0][0]
