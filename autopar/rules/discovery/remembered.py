"""Files with what was discovered, for later processes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.rules.discovery.proposal import Discovered, Factor
from autopar.rules.local_calls import resolve
from autopar.rules.registry import Sample
from autopar.words.trees import PyTree
from hardware_profiles.strict import Unreadable, parse_json, read_text

FORMAT = 1


def folder() -> Path:
    """Return the folder of the files."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "autopar" / "rules"


def key_of(target: str, sample: Sample) -> str:
    """Return the key of a small call, which changes with the operator's schema and with torch."""
    schema = getattr(resolve(target), "_schema", target)
    text = f"{FORMAT} {torch.__version__} {schema} {sample.args!r} {sorted(sample.kwargs.items())!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def recall(key: str) -> Discovered | None:
    """Read a file; None if there is none that can be read."""
    with contextlib.suppress(OSError, Unreadable, KeyError, TypeError, ValueError):
        return _read(parse_json(read_text(folder() / f"{key}.json")))
    return None


def keep(key: str, discovered: Discovered) -> None:
    """Write it for later; where nothing can be written, later processes find it again."""
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), delete=False, encoding="utf-8") as file:
            json.dump(dataclasses.asdict(discovered), file)
        os.replace(file.name, folder() / f"{key}.json")


def _read(value: PyTree) -> Discovered:
    def dims(values: Any) -> tuple[int | None, ...]:
        return tuple(None if v is None else int(v) for v in values)

    def ints(values: Any) -> tuple[int, ...]:
        return tuple(int(v) for v in values)

    def path(values: Sequence[int | str] | None) -> tuple[int | str, ...] | None:
        return None if values is None else tuple(v if isinstance(v, str) else int(v) for v in values)

    shape_arg = value["shape_arg"]
    return Discovered(
        factors=tuple(
            Factor(dims(f["ins"]), dims(f["outs"]), ints(f["additive"]), path(f["halved"])) for f in value["factors"]
        ),
        linear=tuple(map(ints, value["linear"])), even=ints(value["even"]), needs_some=ints(value["needs_some"]),
        shape_arg=None if shape_arg is None else (int(shape_arg[0]), str(shape_arg[1])),
        whole_gradients=bool(value["whole_gradients"]), why_whole=str(value["why_whole"]),
        small_ins=tuple(map(ints, value["small_ins"])), small_outs=tuple(map(ints, value["small_outs"])),
    )  # fmt: skip
