"""One job at a time saves in a folder, and it alone tidies up there; any number of others read.

The job that saves holds a lock of the operating system on the file ``.owner/lock``, which has its name. The lock ends
with the process, however that ends, on all machines that see the folder. So who gets it knows that nobody else writes
there, and that what is unfinished is left by the dead. Several checkpoints of one process are one job.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from autopar.errors import RunError
from hardware_profiles.strict import Unreadable, parse_json, read_text

OWNER = ".owner"
"""A folder, as all that is in a folder of saves."""
LOCK = "lock"
WAIT_SECONDS = 5.0
"""How long a job waits for another one that is ending, as before a restart."""
POLL_SECONDS = 0.1


@dataclass
class Ownership:
    """A folder in which this process saves.

    Attributes:
        file: the file that is locked; None if the file system has no locks.
        busy: names of folders in it that are being written.
        holders: the checkpoints that hold it.
    """

    folder: Path
    file: BinaryIO | None
    busy: set[str] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)

    @property
    def proves(self) -> bool:
        """Whether it is certain that nobody else writes there."""
        return self.file is not None

    def holds(self) -> bool:
        """Check that the folder is still owned: not by a forked process, nor if somebody removed the file."""
        return _owned.get(self.folder) is self and (self.file is None or self._is_there())

    def release(self, holder: int) -> None:
        """Remove one holder; the last one releases the folder."""
        self.holders.discard(holder)
        if self.holders or _owned.get(self.folder) is not self:
            return
        del _owned[self.folder]
        if self.file is not None:
            with contextlib.suppress(OSError):
                if self._is_there():
                    (self.folder / OWNER / LOCK).unlink()
                    (self.folder / OWNER).rmdir()
            self.file.close()

    def _is_there(self) -> bool:
        """Check that the locked file is still the folder's."""
        assert self.file is not None
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.folder / OWNER / LOCK))
        except OSError:
            return False


_owned: dict[Path, Ownership] = {}


def _close_in_child() -> None:
    """Release the lock in a forked process, such as a data loader's worker, which may outlive its parent."""
    for each in _owned.values():
        if each.file is not None:
            each.file.close()
    _owned.clear()


os.register_at_fork(after_in_child=_close_in_child)


def own(folder: Path, holder: int) -> Ownership:
    """Take ownership of a folder until :meth:`Ownership.release`; checkpoints of one process share it.

    Raises:
        RunError: another job saves there.
        OSError: the folder cannot be written to.
    """
    path = folder.resolve()
    mine = _owned.get(path)
    if mine is not None and not mine.holds():
        del _owned[path]
        if mine.file is not None:
            mine.file.close()
            mine.file = _locked(path)
        _owned[path] = mine
    elif mine is None:
        mine = _owned[path] = Ownership(path, _locked(path))
    mine.holders.add(holder)
    return mine


def _locked(folder: Path) -> BinaryIO | None:
    """Open the owner's file, locked and with this job's name."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        (folder / OWNER).mkdir(exist_ok=True)
        try:
            file = (folder / OWNER / LOCK).open("a+b", buffering=0)
        except FileNotFoundError:  # the one before has just given it back
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / OWNER / LOCK)):
                break
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                file.close()
                warnings.warn(
                    f"the file system of {folder} has no locks ({error.strerror}): autopar cannot see whether another "
                    "job saves there, and removes nothing that a broken save left", stacklevel=4
                )  # fmt: skip
                return None
            if time.monotonic() > end:
                file.close()
                raise RunError(
                    f"{_owner(folder)} saves in {folder}, and this is process {os.getpid()} on "
                    f"{socket.gethostname()}: give each job a folder of its own, or end the other one first"
                ) from None
            time.sleep(POLL_SECONDS)
        file.close()
    with contextlib.suppress(OSError):  # of a full disk: the name is for people, the lock is the file's
        file.truncate(0)
        file.write(json.dumps(_name()).encode())
    return file


def _name() -> dict[str, str | int]:
    since = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
    return {"process": os.getpid(), "host": socket.gethostname(), "since": since, "script": sys.argv[0]}


def _owner(folder: Path) -> str:
    """Say who has the lock."""
    try:
        name = parse_json(read_text(folder / OWNER / LOCK))
        return f"process {name['process']} on {name['host']} ({name['script']}, since {name['since']})"
    except (Unreadable, KeyError, TypeError):
        return "another job"
