"""A job that goes on when a rank dies: ``python examples/train_elastic.py``

It starts ``train`` on three ranks under ``autopar.elastic``, kills one, and shows that the job goes on with two, from
its last checkpoint, and with three again from the next one; the losses are those of one device. Start a script of your
own with ``python -m autopar.elastic --nproc-per-node 8 train.py``, as with torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

RANKS, BATCH, EPOCHS, EVERY = 3, 12, 3, 5


class Net(nn.Module):
    """A small network with dropout, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU()) for _ in range(4)]
        self.layers = nn.Sequential(*blocks, nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - y).square().mean()


def train(folder: Path, pause: float = 0.0, stages: int = 1, epochs: int = EPOCHS) -> None:
    """What a script does that goes on where its last checkpoint ended, on as many ranks as there are.

    Args:
        pause: seconds after each step, as if it took longer.
        stages: of a pipeline, at most; a batch is two microbatches then.
    """
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rows = TensorDataset(torch.randn(240, 16), torch.randn(240, 4))
    cut = {"params": {"*": "S0 use"}} if ranks > 1 else {}  # by itself so small a model is not cut
    options = {"stages": min(stages, ranks), "microbatches": 2} if stages > 1 else cut
    pm = autopar.parallelize(Net(), ranks, rows[:BATCH], **options)  # a plan for the ranks that there are now
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    sampler = pm.sampler(rows)  # its position is in the checkpoint
    loader = DataLoader(rows, BATCH, sampler=sampler)
    checkpoint = autopar.Checkpoint(folder / "checkpoints", model=pm, optimizer=optimizer)

    step = checkpoint.load() or 0
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = float(pm.train_step(x, y, optimizer=optimizer))
            if dist.get_rank() == 0:
                with (folder / "losses.jsonl").open("a") as log:
                    log.write(json.dumps({"step": step, "loss": loss, "ranks": ranks}) + "\n")
            step += 1
            time.sleep(pause)
            if step % EVERY == 0:
                checkpoint.save(step)
    dist.destroy_process_group()


# --- the rest starts it, and kills a rank


def losses(folder: Path) -> list[dict[str, float]]:
    """What rank 0 has written: a step that was done again has two lines."""
    log = folder / "losses.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def ranks_of(agent: int) -> list[int]:
    """The processes that an agent has started."""
    children = []
    for task in Path(f"/proc/{agent}/task").iterdir():
        children += [int(pid) for pid in (task / "children").read_text().split()]
    return children


def started(ranks: int, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "autopar.elastic", "--nproc-per-node", str(ranks), __file__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen([*command, *arguments], env=environment)


def main() -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as several:
        assert started(1, Path(one)).wait(300) == 0
        job = started(RANKS, Path(several), "0.2")
        try:
            while len(losses(Path(several))) < 2 * EVERY + 2:
                assert job.poll() is None
                time.sleep(0.05)
            os.kill(ranks_of(job.pid)[1], signal.SIGKILL)
            assert job.wait(300) == 0
        finally:
            job.kill()
        right = {line["step"]: line["loss"] for line in losses(Path(one))}
        mine = losses(Path(several))
    ranks = [int(line["ranks"]) for line in mine]
    print(f"steps by number of ranks: { {n: ranks.count(n) for n in sorted(set(ranks))} }")
    worst = max(abs(line["loss"] - right[line["step"]]) for line in mine)
    print(f"{len(right)} steps, {len(mine) - len(right)} done again; losses differ from one device by {worst:.1e}")
    assert {line["step"] for line in mine} == set(right) and worst < 1e-9
    assert set(ranks) == {RANKS - 1, RANKS} and len(mine) - len(right) <= EVERY


if __name__ == "__main__":
    if "RANK" in os.environ:
        folder, *given = sys.argv[1:]
        pause, stages, epochs = [*given, *("0", "1", str(EPOCHS))[len(given) :]]
        train(Path(folder), float(pause), int(stages), int(epochs))
    else:
        main()
