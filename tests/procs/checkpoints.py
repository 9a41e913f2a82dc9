"""What one rank does in the tests of checkpoints of a run."""

from __future__ import annotations

import contextlib
import copy
import random
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from procs.habits import difference, said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.checkpoints.stored_shards import ShardsToWrite

STEPS = 6


class Net(nn.Module):
    """Dropout, a buffer that each forward changes, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.norm = nn.Embedding(20, 8), nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.down, self.head = nn.Dropout(0.2), nn.Linear(16, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.up(self.embed(x)))).relu()
        return nn.functional.cross_entropy(self.head(self.down(h)), y)


class Data:
    """Draws batches from the generator of torch, and knows how many it has drawn."""

    def __init__(self) -> None:
        self.position = 0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.position += 1
        x = torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(self.position))
        return x, (x * 3 + 1) % 20

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


HOW: dict[str, dict[str, Any]] = {
    "batch": {"constraints": {"*up": {"data": "b"}}},
    "zero": {"constraints": {"*up": {"data": "b"}}, "params": {"*.weight": "S0 use", "*.bias": "S0 step"}},
    "tensor": {"constraints": {"*up": {"data": "n"}}},
    "pipeline": {"stages": 2, "schedule": "1f1b", "microbatches": 2, "cuts": ["down"]},
}


class Run:
    """A script: model, optimizer, scheduler and data, with a checkpoint of all of them."""

    def __init__(self, how: str, folder: str, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        model = Net()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * seed)
        self.model: Any = model
        if how != "plain":
            in_stages = how == "pipeline"
            mesh = 2 if in_stages else init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
            self.model = autopar.parallelize(model, mesh, Data().batch(), **HOW[how])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.data = Data()
        self.checkpoint = autopar.Checkpoint(
            folder, self.model, self.optimizer, scheduler=self.scheduler, data=self.data, **options
        )
        self.losses: list[torch.Tensor] = []

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors that this rank has."""
        tensors = dict(self.model.state_dict())
        for i, values in enumerate(self.optimizer.state.values()):
            tensors |= {f"{i} {key}": value for key, value in values.items()}
        local = {name: getattr(value, "_local_tensor", value) for name, value in tensors.items()}
        return {name: value.clone() for name, value in local.items()} | {"position": torch.tensor(self.data.position)}

    def step(self) -> torch.Tensor:
        batch = self.data.batch()
        if hasattr(self.model, "train_step"):
            loss = self.model.train_step(*batch)
        else:
            loss = self.model(*batch)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.losses.append(loss.detach())
        return loss.detach()


def resumed(how: str, folder: str, wait: bool) -> tuple[list[str], list[str], float]:
    """A run that goes through, and one that begins in the middle: losses and draws that follow, to the bit."""
    path = f"{folder}/{how}-{wait}"
    run = Run(how, path)
    for _ in range(STEPS):
        run.step()
        if len(run.losses) == 3:
            run.checkpoint.save(3, wait=wait)
            at_save = random.random(), float(torch.rand(()))
    run.checkpoint.wait()
    random.seed(dist.get_rank())
    later = Run(how, path, seed=1)
    assert later.checkpoint.load() == 3
    again = random.random(), float(torch.rand(()))
    for _ in range(3, STEPS):
        later.step()
    mine, theirs = (autopar.full_state_dict(r.model, all_ranks=True) for r in (run, later))
    worst = max(difference(theirs[name], value) for name, value in mine.items())
    assert again == at_save
    return [float(x).hex() for x in run.losses[3:]], [float(x).hex() for x in later.losses], worst


def saved(how: str, folder: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Three steps and a save; what the model is then, and the losses of two more."""
    run = Run(how, folder)
    for _ in range(3):
        run.step()
    run.checkpoint.save(3)
    full = {k: v.clone() for k, v in autopar.full_state_dict(run.model, all_ranks=True).items()}
    return full, [run.step(), run.step()]


def loaded(how: str, folder: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The same of that save under another plan."""
    run = Run(how, folder, seed=1)
    assert run.checkpoint.load() == 3 and run.data.position == 3
    full = {k: v.clone() for k, v in autopar.full_state_dict(run.model, all_ranks=True).items()}
    return full, [run.step(), run.step()]


def refused(folder: str) -> list[str]:
    """What is said of saves that are not there, of another model, or that one rank cannot write."""
    run = Run("batch", folder)
    run.step()
    run.checkpoint.save(1)
    other, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    pm = autopar.parallelize(copy.deepcopy(other), 2, x, loss_fn=lambda out: out.mean())
    texts = [
        said(lambda: run.checkpoint.load(7)), said(lambda: autopar.Checkpoint(folder, pm).load()),
        said(lambda: autopar.Checkpoint(folder, run.model, count=3)),  # type: ignore[arg-type]
        said(lambda: autopar.Checkpoint(folder, run.model, more=Data()).load()),
        said(lambda: autopar.Checkpoint(folder, other)),
    ]  # fmt: skip
    real = torch.save
    if dist.get_rank() == 1:
        torch.save = _no_room
    try:
        texts.append(said(lambda: run.checkpoint.save(2)))
    finally:
        torch.save = real
    assert sorted(p.name for p in Path(folder).iterdir() if not p.name.startswith(".")) == ["step-00000001"]
    assert run.checkpoint.load() == 1
    run.checkpoint.save(2)
    return texts


def failing(how: str, folder: str) -> list[str]:
    """What is said where one rank's part cannot be written, or is damaged, or a load fails on one rank: on all ranks
    alike; nothing is left, nothing has changed, and the run goes on."""
    run, path = Run(how, folder), Path(folder)
    run.step()
    run.checkpoint.save(1)
    texts = []
    for wait in (True, False):
        with mock.patch.object(ShardsToWrite, "write", _no_room) if dist.get_rank() == 1 else contextlib.nullcontext():
            texts.append(said(lambda: (run.checkpoint.save(2, wait=wait), run.checkpoint.wait())))  # noqa: B023
        dist.barrier()
        assert sorted(p.name for p in path.iterdir() if p.name != ".owner") == ["step-00000001"]
        dist.barrier()
    run.checkpoint.save(2)
    run.step()
    before = run.state()
    for name, damage in (("rank-00001.pt", b""), ("__1_0.distcp", b"x" * 99), (".metadata", None)):
        damaged = path / "step-00000002" / name
        whole = damaged.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            damaged.unlink() if damage is None else damaged.write_bytes(damage)
        dist.barrier()
        texts.append(said(run.checkpoint.load))
        dist.barrier()
        damaged.write_bytes(whole)
        dist.barrier()
    if dist.get_rank() == 1:
        run.data.load_state_dict = _no_room  # type: ignore[method-assign]
    texts.append(said(run.checkpoint.load))
    assert all(torch.equal(value, before[name]) for name, value in run.state().items())
    run.data.__dict__.pop("load_state_dict", None)
    assert run.checkpoint.load() == 2
    run.step()
    return texts


class Deeper(nn.Module):
    """A chain of layers."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def of_other_models(folder: str) -> dict[str, str]:
    """What is said of a save of four layers that is loaded into others, on one mesh and in a pipeline."""
    texts = {}
    for how in ({}, {"stages": 2, "schedule": "1f1b", "microbatches": 2}):
        for layers, width in ((4, 8), (3, 8), (5, 8), (4, 16)):
            x = torch.ones(4, width)
            pm = autopar.parallelize(Deeper(layers, width), 2, (x,), **how)  # type: ignore[arg-type]
            optimizer = torch.optim.AdamW(pm.parameters())
            pm.train_step(x) if how else pm(x).backward()
            optimizer.step()
            checkpoint = autopar.Checkpoint(f"{folder}/{len(how)}", pm, optimizer)
            before = {name: value.clone() for name, value in pm.state_dict().items()}
            if (layers, width) == (4, 8):
                checkpoint.save(1)
                assert checkpoint.load() == 1
                continue
            if how and layers == 3:  # of which one rank has no parameters
                own = autopar.Checkpoint(f"{folder}/own", pm, optimizer)
                own.save(1)
                own.save(2, wait=False)
                assert own.load(1) == 1 and own.load() == 2
            texts[f"{'pipeline' if how else 'mesh'} {layers} {width}"] = said(checkpoint.load)
            assert all(bool((before[name] == value).all()) for name, value in pm.state_dict().items())
    return texts


def saved_by_torch(folder: str) -> dict[str, str]:
    """``torch.save(pm.state_dict())``: plain tensors where every rank has all, one error where it has pieces."""
    plans: dict[str, dict[str, Any]] = {
        "whole": {"constraints": {"*0": {"data": "b"}}}, "pieces": {"params": {"*": "S0 use"}},
        "stages": {"stages": 2, "schedule": "1f1b", "microbatches": 2},
    }  # fmt: skip
    texts, me = {}, dist.get_rank()
    for name, options in plans.items():
        torch.manual_seed(0)
        pm = autopar.parallelize(Deeper(4), 2, (torch.ones(4, 8),), **options)
        optimizer = torch.optim.AdamW(pm.parameters())
        pm.train_step(torch.ones(4, 8)) if name == "stages" else pm(torch.ones(4, 8)).backward()
        optimizer.step()
        path, state = Path(folder) / f"{name}-{me}.pt", pm.state_dict()
        texts[name] = said(lambda: torch.save(state, path))  # noqa: B023
        texts[f"{name}, inside"] = said(lambda: torch.save({"model": dict(state.items()), "step": 1}, path))  # noqa: B023
        texts[f"{name}, on the CPU"] = said(lambda: torch.save({k: v.cpu() for k, v in state.items()}, path))  # noqa: B023
        texts[f"{name}, parameters"] = said(lambda: torch.save(list(pm.parameters()), path))  # noqa: B023
        if name == "whole":
            torch.save(state, path)
            plain = Deeper(4)
            plain.load_state_dict(torch.load(path))
            assert all(type(value) is torch.Tensor for value in torch.load(path).values())
            pm.load_state_dict(torch.load(path))
        copy.deepcopy(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.save(optimizer.state_dict(), path)  # each rank its own: goes back into the same ranks
        texts[f"{name}, optimizer"] = " ".join(str(w.message) for w in caught)
        optimizer.load_state_dict(torch.load(path))
    return texts


def unwaited(folder: str) -> None:
    """A save that nobody waits for; rank 1 writes slowly, and the process group is ended meanwhile."""
    run = Run("zero", folder)
    run.step()
    real = ShardsToWrite.write

    def slow(self: ShardsToWrite, plan: Any) -> Any:
        time.sleep(1.0)
        return real(self, plan)

    if dist.get_rank() == 1:
        ShardsToWrite.write = slow  # type: ignore[method-assign]
    run.checkpoint.save(1, wait=False)


def _no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def kept(folder: str) -> list[int]:
    run = Run("batch", folder, keep=2)
    for step in range(5):
        run.step()
        run.checkpoint.save(step, wait=step % 2 == 0)
    run.checkpoint.wait()
    return run.checkpoint.steps()


def saving_on(folder: str) -> None:
    """Save without end: every number of the model and of the optimizer is the step's."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    pm = autopar.parallelize(model, 2, torch.ones(4, 64), loss_fn=lambda out: out.mean())
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.0)
    pm(torch.ones(4, 64)).backward()
    optimizer.step()
    checkpoint = autopar.Checkpoint(folder, pm, optimizer)
    step = 0
    while True:
        step += 1
        with torch.no_grad():
            for p in pm.parameters():
                p.fill_(step)
                optimizer.state[p]["exp_avg"].fill_(step)
        checkpoint.save(step, wait=step % 3 != 0)
