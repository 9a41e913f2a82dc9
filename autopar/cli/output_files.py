"""Files that commands write: never over a file of another kind without ``--force``, and through no link.

A name on the command line is easily one too many: ``-o models.py`` for ``-o plan.json``, a plan for its page. An
existing file is overwritten without ``--force`` only if it is of the kind that the command writes, so a plan can be
made anew.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.common import UsageError
from hardware_profiles.strict import LARGEST_FILE_BYTES, Unreadable, read_beginning, read_text

Force = Annotated[bool, typer.Option("--force", help="Write the output even over a file of another kind, or a link.")]


@dataclass(frozen=True)
class OutputKind:
    """A kind of file that a command writes.

    Attributes:
        name: the file's name with its article, for messages.
        recognizes: returns True for a text of this kind; a plan with a mistake from an edit is still one.
        is_binary: the file is not text; ``recognizes`` gets its bytes as characters.
    """

    name: str
    recognizes: Callable[[str], object]
    is_binary: bool = False


def _json_with(key: str) -> Callable[[str], object]:
    return re.compile(rf'\s*\{{.*"{key}"\s*:', re.DOTALL).match


PLAN = OutputKind("a plan", re.compile(r'\s*\{.*"(?:autopar_(?:plan|pipeline)"\s*:|kind"\s*:\s*"autopar-serving-plan")',
                                       re.DOTALL).match)  # fmt: skip
PROFILE = OutputKind("a profile", _json_with("autopar_profile"))
SNAPSHOT = OutputKind("a snapshot of memory", re.compile("\x80.*device_traces", re.DOTALL).match, is_binary=True)
PAGE = OutputKind("a page of autopar report", re.compile("<!doctype html>.*: an autopar plan</title>", re.DOTALL).match)


@dataclass(frozen=True)
class OutputFile:
    """A file that a command will write.

    Attributes:
        option: the command-line option that names it, for messages.
        force: overwrite any existing file; a link is replaced by the file.
    """

    path: Path
    kind: OutputKind
    option: str
    force: bool = False

    def check(self) -> None:
        """Refuse a path that cannot or must not be written, before the command spends time."""
        subject = f"{self.option} is {self.path}"
        try:
            has_folder = self.path.parent.is_dir()
            mode = self.path.lstat().st_mode if os.path.lexists(self.path) else None
        except (OSError, ValueError) as error:  # too long, not permitted, a NUL
            raise UsageError(f"{subject}: {getattr(error, 'strerror', None) or error}; choose another file") from None
        if not has_folder:
            raise UsageError(f"{subject}, and there is no folder {self.path.parent}; make it first, or choose another")
        if mode is None:
            return
        if stat.S_ISDIR(mode):
            raise UsageError(f"{subject}, which is a folder; give a file in it")
        if self.force:
            return
        if stat.S_ISLNK(mode):
            raise UsageError(
                f"{subject}, a link to {os.readlink(self.path)}; links are not followed: give the file itself, or "
                "--force to replace the link by a file"
            )
        if stat.S_ISREG(mode) and not self._is_of_kind():
            raise UsageError(
                f"{subject}, which exists and is not {self.kind.name}; give another name, or --force to overwrite it"
            )

    def _is_of_kind(self) -> bool:
        """Return True if the existing file is of this kind, or empty."""
        try:
            binary = read_beginning(self.path, LARGEST_FILE_BYTES) if self.kind.is_binary else None
            text = read_text(self.path) if binary is None else binary.decode("latin-1")
        except (Unreadable, OSError):
            return False
        return not text or bool(self.kind.recognizes(text))

    def write(self, text: str) -> None:
        """Write the file after checking the path once more."""
        self.write_bytes(text.encode())

    def write_bytes(self, content: bytes) -> None:
        """Write bytes as :meth:`write` writes text."""
        self.check()
        try:
            if self.force and self.path.is_symlink():
                self.path.unlink()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except OSError as error:
            raise UsageError(
                f"cannot write {self.kind.name} to {self.path}: {error.strerror}; choose another file"
            ) from None
