"""A save in which anything is damaged: a load gives one error and changes nothing, and an earlier save loads."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import RunError
from autopar.runtime.checkpoints import folder_owner, stored_shards
from autopar.runtime.checkpoints.durable_files import sum_of

FILES = (".metadata", "__0_0.distcp", "checkpoint.json", "rank-00000.pt")


class Run:
    """A model, AdamW with a step taken, and a scheduler."""

    def __init__(self, folder: Path, layers: int = 2, width: int = 8, optimizer: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(layers + width)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.checkpoint = autopar.Checkpoint(folder, self.model, self.optimizer, scheduler=self.scheduler)
        self.step()

    def step(self) -> None:
        self.model(torch.ones(1, self.model[0].in_features)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def values(self) -> list[Any]:
        """All that a load may change."""
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        tensors = [*self.model.state_dict().values(), *state, torch.get_rng_state()]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return [*(t.clone() for t in tensors), groups, self.scheduler.state_dict(), random.getstate()]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(share * path.stat().st_size))


def flipped(place: float, bit: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(place * (len(data) - 1))] ^= 1 << bit
        path.write_bytes(data)

    return flip


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def of_other_save(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-00000001" / path.name, path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink, "empty": cut(0), "first byte": lambda path: os.truncate(path, 1), "half": cut(0.5),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1), "of another save": of_other_save,
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\n\x00"), "a folder": as_folder,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("oops"),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("x")),
    "halves exchanged": lambda path: path.write_bytes((d := path.read_bytes())[len(d) // 2 :] + d[: len(d) // 2]),
    "bit at 0": flipped(0, 0), "bit at 0.1": flipped(0.1, 3), "bit at 0.5": flipped(0.5, 6),
    "bit at 0.9": flipped(0.9, 7), "last bit": flipped(1, 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with saves of two steps."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    run = Run(folder)
    run.checkpoint.save(1)
    run.step()
    run.checkpoint.save(2)
    return folder


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_error_and_nothing_changes(saved: Path, tmp_path: Path, file: str, damage: str) -> None:
    """Of 17 kinds in each of four files; the save before loads."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns(".owner"))
    DAMAGES[damage](folder / "step-00000002" / file)
    run = Run(folder)
    run.step()
    before = run.values()
    with pytest.raises(RunError, match="step-00000002") as caught:
        run.checkpoint.load()
    assert len(str(caught.value).splitlines()) == 1 and file in str(caught.value)
    assert same(before, run.values())
    assert run.checkpoint.load(1) == 1


def test_no_bit_may_flip(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns(".owner"))
    run, flips = Run(folder), random.Random(0)
    for k in range(60):
        path = folder / "step-00000002" / FILES[k % len(FILES)]
        whole = path.read_bytes()
        flipped(flips.random(), flips.randrange(8))(path)
        with pytest.raises(RunError):
            run.checkpoint.load()
        path.write_bytes(whole)
    assert run.checkpoint.load() == 2


def test_a_save_under_another_steps_name_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step-00000001", tmp_path / "step-00000007")
    with pytest.raises(RunError, match="step-00000007 is a save of step 1"):
        Run(tmp_path).checkpoint.load()


class Evil:
    """What runs code where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def written_by_a_stranger(folder: Path, name: str) -> None:
    """A file is another one, with the checksums that belong to it."""
    table = json.loads((folder / "checkpoint.json").read_text())
    table["files"][name] = list(sum_of(folder / name))
    del table["checksum"]
    table["checksum"] = f"{zlib.crc32(json.dumps(table, sort_keys=True).encode()):08x}"
    (folder / "checkpoint.json").write_text(json.dumps(table))


@pytest.mark.parametrize("file", [".metadata", "rank-00000.pt", "__0_0.distcp"])
def test_nothing_runs_that_a_stranger_has_written(saved: Path, tmp_path: Path, file: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns(".owner"))
    path, step = folder / "step-00000002" / file, folder / "step-00000002"
    ran = tmp_path / "ran"
    if file == ".metadata":
        metadata = stored_shards.read_metadata(step)
        metadata.planner_data = {"x": Evil(ran)}
        path.write_bytes(pickle.dumps(metadata))
    elif file == "rank-00000.pt":
        torch.save({"others": {"scheduler": Evil(ran)}}, path)
    else:  # every value of the file, tensors and others
        metadata = stored_shards.read_metadata(step)
        data = path.read_bytes()
        torch.save(Evil(ran), path)
        size = path.stat().st_size
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, size
        (step / ".metadata").write_bytes(pickle.dumps(metadata))
        written_by_a_stranger(step, ".metadata")
        assert len(data) > 0
    written_by_a_stranger(step, file)
    run = Run(folder)
    before = run.values()
    with pytest.raises(RunError):
        run.checkpoint.load()
    assert not ran.exists() and same(before, run.values())


def test_a_file_outside_of_the_folder_is_not_read(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns(".owner"))
    step = folder / "step-00000002"
    metadata = stored_shards.read_metadata(step)
    for info in metadata.storage_data.values():
        info.relative_path = "../step-00000001/__0_0.distcp"
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    written_by_a_stranger(step, ".metadata")
    with pytest.raises(RunError, match="which is not in its own folder"):
        Run(folder).checkpoint.load()


OTHERS = {"shallower": (1, 8), "deeper": (3, 8), "wider": (2, 16), "narrower": (2, 4)}


@pytest.mark.parametrize("other", OTHERS)
def test_a_save_of_another_model_is_one_error(saved: Path, other: str) -> None:
    run = Run(saved, *OTHERS[other])
    before = run.values()
    with pytest.raises(RunError, match="it is of another model") as caught:
        run.checkpoint.load()
    assert same(before, run.values())
    if other in ("shallower", "deeper"):
        assert ("1.weight" in str(caught.value)) == (other == "shallower")
        assert run.checkpoint.load(strict=False) == 2  # what both have
    else:
        width = OTHERS[other][1]
        assert f"of shape (8, 8) in the save, and of shape ({width}, {width}) here" in str(caught.value)
        with pytest.raises(RunError, match="it is of another model"):
            run.checkpoint.load(strict=False)


def momentum(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr, momentum=0.9)


@pytest.mark.parametrize("theirs", [momentum, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_a_save_of_another_optimizer_is_one_error(saved: Path, theirs: Any) -> None:
    run = Run(saved, optimizer=theirs)
    before = run.values()
    with pytest.raises(RunError, match="it is of another optimizer"):
        run.checkpoint.load()
    assert same(before, run.values())


def test_what_was_given_is_in_the_save(tmp_path: Path) -> None:
    run = Run(tmp_path)
    autopar.Checkpoint(tmp_path, run.model, scheduler=run.scheduler).save(1)
    with pytest.raises(RunError, match="it was saved without an optimizer"):
        run.checkpoint.load()
    assert run.checkpoint.load(strict=False) == 1
    assert autopar.Checkpoint(tmp_path, run.model).load() == 1


class Fails:
    """Something that cannot take its state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["value"] == 1:
            raise ValueError("not this one")
        self.value = state["value"]


def test_a_load_that_fails_at_its_end_changes_nothing(tmp_path: Path) -> None:
    run, last = Run(tmp_path), Fails()
    last.value = 1
    checkpoint = autopar.Checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler, last=last)
    checkpoint.save(1)
    last.value = 7
    run.step()
    before = run.values()
    with pytest.raises(RunError, match="ValueError: not this one"):
        checkpoint.load()
    assert same(before, run.values()) and last.value == 7
    run.step()


def test_a_state_that_could_not_be_loaded_is_refused_at_once(tmp_path: Path) -> None:
    run, last = Run(tmp_path), Fails()
    last.value = FilesOf()  # type: ignore[assignment]
    checkpoint = autopar.Checkpoint(tmp_path, run.model, last=last)
    with pytest.raises(RunError, match=r"the state_dict\(\) of last holds .*FilesOf, and loading that would run code"):
        checkpoint.save(1)
    assert checkpoint.steps() == [] and not any(tmp_path.iterdir())


class FilesOf:
    """A class of a script's own."""


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, momentum, torch.optim.AdamW])
def test_learning_rates_are_those_of_the_save(tmp_path: Path, optimizer: Any) -> None:
    """Of an optimizer that keeps no state, too: a scheduler computes the next rate from the present one."""
    run = Run(tmp_path, optimizer=optimizer)
    run.step()
    run.checkpoint.save(2)
    wanted = []
    for _ in range(3):
        run.step()
        wanted.append(run.optimizer.param_groups[0]["lr"])
    later = Run(tmp_path, optimizer=optimizer)
    assert later.checkpoint.load() == 2
    assert later.optimizer.param_groups[0]["lr"] == 0.05
    got = []
    for _ in range(3):
        later.step()
        got.append(later.optimizer.param_groups[0]["lr"])
    assert got == wanted


def test_an_optimizer_before_its_first_step_is_so_again(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint = autopar.Checkpoint(tmp_path, model, optimizer)
    checkpoint.save(0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    assert checkpoint.load() == 0
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


def test_gradients_and_missing_state_do_not_keep_a_state_from_being_loaded(saved: Path) -> None:
    """torch makes no state where there are gradients, or some state: what the save has would be left out."""
    wanted = Run(saved)
    wanted.checkpoint.load()
    for some in (False, True):
        run = Run(saved)
        run.optimizer.state.clear()
        run.model(torch.ones(1, 8)).sum().backward()
        gradient = run.model[0].weight.grad
        if some:
            run.optimizer.step()
            del run.optimizer.state[run.model[1].weight]
        assert run.checkpoint.load() == 2
        for a, b in zip(run.model.parameters(), wanted.model.parameters(), strict=True):
            assert torch.equal(run.optimizer.state[a]["exp_avg"], wanted.optimizer.state[b]["exp_avg"])
        assert run.model[0].weight.grad is gradient


def test_a_save_of_the_first_format_loads(saved: Path, tmp_path: Path) -> None:
    """Which had no checksums; nothing but tensors and names is read of it, either."""
    step = tmp_path / "run" / "step-00000002"
    shutil.copytree(saved / "step-00000002", step)
    (step / "checkpoint.json").write_text('{"format": 1, "step": 2, "ranks": 1, "others": ["scheduler"]}')
    run, wanted = Run(tmp_path / "run"), Run(saved)
    assert run.checkpoint.load() == wanted.checkpoint.load() == 2
    assert same(run.values(), wanted.values())
    (step / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(RunError, match="damaged"):
        run.checkpoint.load()
    assert not (tmp_path / "ran").exists()


def test_a_save_of_a_later_format_says_so(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step-00000002", tmp_path / "step-00000002")
    (tmp_path / "step-00000002" / "checkpoint.json").write_text('{"format": 3, "step": 2}')
    with pytest.raises(RunError, match="it is of format 3, this autopar reads 1 and 2"):
        Run(tmp_path).checkpoint.load()


def test_what_readers_do_is_no_trace(saved: Path) -> None:
    before = sorted(path.name for path in saved.rglob("*") if folder_owner.OWNER not in path.parts)
    Run(saved).checkpoint.load(1)
    assert sorted(path.name for path in saved.rglob("*") if folder_owner.OWNER not in path.parts) == before
