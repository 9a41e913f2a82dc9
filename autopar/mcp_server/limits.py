"""Names that a client may use: files below the server's folder, models that run no code unless in a trusted folder.

A client's words may come from anyone whose text an agent has read. Importing a Python file runs it with all rights of
the user, and a file that is written over is lost; so both are limited when the server is started, not when it is asked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from hardware_profiles.strict import Unreadable, parse_json, read_text, shortened

CONFIG = "hf:"
"""The prefix of models that are built from a config, which runs no code of a client."""


class LimitError(AutoparError):
    """A file or a model that a client may not name."""


@dataclass(frozen=True)
class ServerLimits:
    """The folders of a server.

    Attributes:
        folder: files are read and written below it; relative paths start there.
        trusted: Python files below these folders may be imported as models, and other files there read.
    """

    folder: Path
    trusted: tuple[Path, ...] = ()

    def readable(self, name: str) -> str:
        """Return the path of a file that a tool reads."""
        return str(self._below(name, (self.folder, *self.trusted), "is read"))

    def writable(self, name: str) -> str:
        """Return the path of a file or folder that a tool writes."""
        return str(self._below(name, (self.folder,), "is written"))

    def model(self, spec: str) -> str:
        """Return the spec of a model that a tool may load."""
        if spec.startswith(CONFIG):
            return CONFIG + self.readable(spec.removeprefix(CONFIG))
        path, colon, factory = spec.rpartition(":")
        if not colon:
            path, factory = spec, ""
        if not self._is_trusted(self._real(path)):
            raise LimitError(
                f"model '{shortened(spec)}' is a Python file, and importing it would run its code; give an hf: config, "
                "or have the server started with --trust and the folder of the file"
            )
        return f"{self._real(path)}{colon}{factory}"

    def cluster(self, name: str) -> str:
        """Return a cluster: a name as it is, a file of one if it may be read."""
        text, as_, software = name.partition(" as ")
        text, at, ranks = text.partition("@")
        if "/" in text or os.sep in text or text.endswith((".toml", ".json")):
            text = self.readable(text)
        return text + at + ranks + as_ + software

    def trusts_plan(self, path: str) -> bool:
        """Return True if the model that a plan file names is a Python file of a trusted folder."""
        try:
            raw: Any = parse_json(read_text(path), [])
        except Unreadable:
            return False  # the command says why
        model = raw.get("model") if isinstance(raw, dict) else None
        spec = model.get("spec") if isinstance(model, dict) else None
        if not isinstance(spec, str) or spec.startswith(CONFIG):
            return False
        file = spec.rpartition(":")[0] or spec
        return self._is_trusted(Path(os.path.realpath(Path(path).parent / file)))

    def _below(self, name: str, folders: Sequence[Path], what: str) -> Path:
        real = self._real(name)
        if not any(real.is_relative_to(folder) for folder in folders):
            raise LimitError(
                f"'{shortened(name)}' {what} and is not below {' or '.join(map(str, folders))}, the folders of this "
                "server; give a path in there"
            )
        return real

    def _is_trusted(self, real: Path) -> bool:
        return any(real.is_relative_to(folder) for folder in self.trusted)

    def _real(self, name: str) -> Path:
        """Return a path without links, so that none leads out of a folder."""
        try:
            return Path(os.path.realpath(self.folder / name))
        except (OSError, ValueError) as error:  # a NUL, too long
            raise LimitError(f"'{shortened(name)}' is no path: {error}; give the path of a file") from None


def limits_of(folder: Path, trusted: Sequence[Path]) -> ServerLimits:
    """Return the limits of a server; its folders have to exist, and ``~`` is the user's."""
    folder, trusted = folder.expanduser(), [each.expanduser() for each in trusted]
    for each in (folder, *trusted):
        if not each.is_dir():
            raise LimitError(f"{each} is no folder; make it first, or give another")
    return ServerLimits(Path(os.path.realpath(folder)), tuple(Path(os.path.realpath(each)) for each in trusted))
