"""The saves of a folder: which are whole, what each consists of, and what is left of broken ones.

A save is a folder ``step-00000200``. While it is written its name begins with a dot. Its last file,
``checkpoint.json``, lists all others with their sizes and checksums, and has a checksum of its own: so a folder that
has it is whole, whatever its name. A save that takes the place of another one has it before the other one goes, so that
at any moment one of them is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import RunError, first_few
from autopar.runtime.checkpoints.durable_files import Sum, on_disk, sum_of, sync_folder
from autopar.runtime.checkpoints.folder_owner import Ownership
from hardware_profiles.strict import Unreadable, parse_json, read_text

FORMAT = 2
"""Version of ``checkpoint.json``; the first one had no checksums."""
STEP = re.compile(r"step-(\d{8,})")
UNNAMED = re.compile(r"\.step-(\d{8,})-.*")
LEFT = re.compile(r"\.(step|removed)-.*")
MANIFEST = "checkpoint.json"
MOST_LOOKS, LOOK_SECONDS = 5, 0.02
"""How often a folder is looked through for a save that is not found at once."""
AGAIN = "copy it again from where it is whole, or load another step"


def name_of_step(step: int) -> str:
    """Return the name of a save's folder."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Manifest:
    """The content of ``checkpoint.json``.

    Attributes:
        ranks: how many have written.
        others: names of what was saved beside model and optimizer.
        optimizer: whether there was one; None if that was not written down.
        sums: checksums of all other files; None if there are none.
        order: which save of its folder it is, as they were written; 0 if that was not written down.
    """

    step: int
    ranks: int
    others: tuple[str, ...]
    optimizer: bool | None = None
    sums: Mapping[str, Sum] | None = None
    order: int = 0

    def write(self, folder: Path) -> None:
        """Write it, as the last file of a folder: it is on the disk, with all names, at the end."""
        assert self.sums is not None
        table: dict[str, Any] = {
            "format": FORMAT, "step": self.step, "ranks": self.ranks, "others": list(self.others),
            "optimizer": self.optimizer, "order": self.order,
            "files": {name: list(sum_) for name, sum_ in sorted(self.sums.items())},
        }  # fmt: skip
        with on_disk(folder / MANIFEST) as file:
            file.write(json.dumps({**table, "checksum": _checksum(table)}).encode())
        sync_folder(folder)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a save.

        Raises:
            RunError: it is missing or damaged, or written by a later autopar.
        """
        try:
            table = parse_json(read_text(folder / MANIFEST))
        except Unreadable as error:
            raise RunError(f"{folder / MANIFEST} is damaged: {error}; {AGAIN}") from error
        if not isinstance(table, dict):
            raise RunError(f"{folder / MANIFEST} is damaged: it is no table; {AGAIN}")
        checksum = table.pop("checksum", None)
        if checksum is not None and checksum != _checksum(table):
            raise RunError(f"{folder / MANIFEST} is damaged: its checksum is {_checksum(table)}, and it says {checksum}"
                           f"; {AGAIN}")  # fmt: skip
        if (found := table.get("format")) not in (1, FORMAT):
            raise RunError(f"it is of format {found}, this autopar reads 1 and {FORMAT}: load it with a newer one")
        if (checksum is None) != (found == 1):
            raise RunError(f"{folder / MANIFEST} is damaged: it is of format {found} with checksum {checksum}; {AGAIN}")
        try:
            sums = {str(name): Sum(*map(int, sum_)) for name, sum_ in table["files"].items()} if found != 1 else None
            step, ranks, others = int(table["step"]), int(table["ranks"]), tuple(map(str, table["others"]))
            order = int(table.get("order", 0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{folder / MANIFEST} is damaged: {type(error).__name__}: {error}; {AGAIN}") from error
        match = STEP.fullmatch(folder.name) or UNNAMED.fullmatch(folder.name)
        if match and int(match[1]) != step:
            raise RunError(f"{folder.name} is a save of step {step} by its {MANIFEST}: give it the name that it had")
        return Manifest(step, ranks, others, table.get("optimizer"), sums, order)

    def check(self, folder: Path, share: int, shares: int) -> None:
        """Read a share of the files, and see whether they are what was written.

        Raises:
            RunError: one is not.
        """
        for name in sorted(self.sums or {})[share::shares]:
            assert self.sums is not None
            path, wanted = folder / name, self.sums[name]
            try:
                there = path.stat().st_size
                got = sum_of(path) if there == wanted.size else Sum(there, 0)
            except OSError as error:
                raise RunError(f"{path} cannot be read: {error.strerror or error}; {AGAIN}") from error
            if got.size != wanted.size:
                raise RunError(f"{path} is damaged: it has {got.size:,} bytes, {wanted.size:,} were written; {AGAIN}")
            if got.crc != wanted.crc:
                raise RunError(
                    f"{path} is damaged: the checksum of its bytes is {got.crc:08x}, {wanted.crc:08x} was written; "
                    f"{AGAIN}"
                )


def _checksum(table: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(table, sort_keys=True).encode()):08x}"


@contextlib.contextmanager
def read_on(folder: Path) -> Iterator[None]:
    """Keep a save from being removed by its job as an old one, where the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # of what is not there: whoever reads it hears that
            file = stack.enter_context((folder / MANIFEST).open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def _is_read(folder: Path) -> bool:
    """Check whether somebody is within :func:`read_on`."""
    try:
        with (folder / MANIFEST).open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def saves_in(folder: Path) -> dict[int, Path]:
    """List the whole saves in the order in which they were written, the newest last.

    They include those that were completed before they had their names. One whose order cannot be read comes after
    those of earlier steps and those written before it.
    """
    found: dict[int, Path] = {}
    entries = [entry for entry in (folder.iterdir() if folder.is_dir() else ()) if (entry / MANIFEST).is_file()]
    for pattern in (UNNAMED, STEP):
        for entry in sorted(entries, key=_when):
            if match := pattern.fullmatch(entry.name):
                found[int(match[1])] = entry
    orders = {step: _order(entry) for step, entry in found.items()}

    def place(step: int) -> tuple[float, int]:
        if (order := orders[step]) is not None:
            return order, step
        when = _when(found[step])
        before = (order for other, order in orders.items() if other < step or _when(found[other]) <= when)
        return 0.5 + max((order for order in before if order is not None), default=0), step

    return {step: found[step] for step in sorted(found, key=place)}


def _order(folder: Path) -> int | None:
    """Return the order number of a save in its folder; None if it cannot be read."""
    try:
        table = parse_json(read_text(folder / MANIFEST))
        checksum = table.pop("checksum", None)
        if checksum != _checksum(table) and not (checksum is None and table.get("format") == 1):
            return None
        return int(table.get("order", 0))
    except (Unreadable, TypeError, ValueError, AttributeError):
        return None


def next_order(folder: Path) -> int:
    """Return the order number of a save that is now written."""
    return 1 + max((_order(entry) or 0 for entry in saves_in(folder).values()), default=0)


def _when(folder: Path) -> float:
    """Return when a save was completed; 0 if it is gone by now."""
    try:
        return (folder / MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def newest_folder(folder: Path) -> int | None:
    """Return the step of the newest folder that has the name of a save, whole or not."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return max((int(match[1]) for entry in entries if (match := STEP.fullmatch(entry.name))), default=None)


def which(folder: Path, step: int | None) -> tuple[int, Path] | None:
    """Return the save of a step, by default the newest; None if there is none at all.

    Raises:
        RunError: there is no such save, or it is not whole.
    """
    for tries in range(MOST_LOOKS):  # a job that saves there may name and remove some between two looks
        newest, saves = newest_folder(folder), saves_in(folder)
        if step is not None:
            wanted = step
        elif newest is not None and newest > max(saves, default=-1):
            wanted = newest  # which is not whole
        else:
            wanted = next(reversed(saves), None)
        if wanted is None:
            return None
        if wanted in saves:
            return wanted, saves[wanted]
        if tries + 1 < MOST_LOOKS:
            time.sleep(LOOK_SECONDS)
    assert wanted is not None
    has = f"it has {first_few([*map(str, saves)]) or 'none'}"
    path = folder / name_of_step(wanted)
    if path.exists():
        raise RunError(f"{path} has no {MANIFEST}, its last file, so it is not whole; {has} that are: load one of them "
                       "by load(step), or copy this one again")  # fmt: skip
    raise RunError(f"{folder} has no save of step {wanted}; {has}")


def give_name(unnamed: Path, owner: Ownership, number: str) -> Path:
    """Give a whole save its name, replacing an earlier one of that step, which is removed.

    An earlier one that is being read stays, under another name, until :func:`remove_left`.
    """
    match = UNNAMED.fullmatch(unnamed.name)
    assert match is not None
    target = unnamed.parent / name_of_step(int(match[1]))
    earlier = target.parent / f".removed-{target.name}-{number}" if target.exists() else None
    if earlier is not None:
        target.rename(earlier)
    unnamed.rename(target)
    sync_folder(target.parent)
    owner.busy.discard(unnamed.name)
    if earlier is not None and not _is_read(earlier):
        shutil.rmtree(earlier, ignore_errors=True)
    return target


def remove_old(folder: Path, keep: int | None, number: str) -> None:
    """Remove the oldest saves, but for those that are being read; the owner calls it."""
    for old in list(saves_in(folder).values())[:-keep] if keep is not None else []:
        if _is_read(old):
            continue
        gone = folder / f".removed-{old.name}-{number}"
        with contextlib.suppress(OSError):
            old.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def remove_left(folder: Path, owner: Ownership, number: str) -> None:
    """Remove what broken saves left, and give those their names that lack nothing else.

    Nothing is removed if it is not sure that nobody writes it.
    """
    if not owner.proves:
        return
    whole = set(saves_in(folder).values())
    for entry in sorted(folder.iterdir()):
        if entry.name not in owner.busy and LEFT.fullmatch(entry.name):
            if entry in whole:
                give_name(entry, owner, number)
            else:
                shutil.rmtree(entry, ignore_errors=True)
