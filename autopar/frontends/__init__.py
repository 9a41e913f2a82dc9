"""Sources of models, each known by the prefix of its specs.

``hf:path/to/config.json`` is read by the frontend of the prefix ``hf:`` (:mod:`.hugging_face`); a spec without a prefix
is ``path.py:factory``, read by :mod:`.models`, which asks all frontends.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.errors import ModelError
from autopar.words.precision import Precision
from autopar.words.trees import PyTree


@dataclass(frozen=True)
class Loaded:
    """A model with its example inputs, and its name in a plan file.

    Attributes:
        parts: number of microbatches into which the example batch is divided before the capture; None for no division.
        precision: the default policy of the frontend; None for the model's own formats.
    """

    model: torch.nn.Module
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    spec: str
    batch: int | None = None
    seq: int | None = None
    parts: int | None = None
    precision: Precision | None = None

    def named(self, folder: Path) -> dict[str, str | int]:
        """Return the entry of a plan file in ``folder``: the spec with its path relative to that folder."""
        prefix, path, factory = split_spec(self.spec)
        relative = os.path.relpath(Path(path).resolve(), folder.resolve())
        named: dict[str, str | int] = {"spec": prefix + Path(relative).as_posix() + (f":{factory}" if factory else "")}
        for key, value in (("batch", self.batch), ("seq", self.seq), ("parts", self.parts)):
            if value is not None:
                named[key] = value
        return named


Load = Callable[[str, Path, int | None, int | None, str], Loaded]
"""``(spec, file, batch, seq, device)`` -> the model; ``batch`` and ``seq`` are None if nobody asked for any, and on
the device ``meta`` nothing is allocated. Raises :class:`~autopar.errors.ModelError`."""


@dataclass(frozen=True)
class Frontend:
    """One source of models.

    Attributes:
        form: form of its specs, for messages: ``hf:PATH.json``.
        load: makes the model.
    """

    form: str
    load: Load


FRONTENDS: dict[str, Frontend] = {}
"""Frontends by prefix, colon included."""


def frontend(form: str) -> Callable[[Load], Load]:
    """Register a function as the frontend of specs of `form`, such as ``hf:PATH.json``."""

    def register(load: Load) -> Load:
        FRONTENDS[form.partition(":")[0] + ":"] = Frontend(form, load)
        return load

    return register


def forms() -> str:
    """Return the forms of specs, for messages."""
    return " or ".join(["PATH.py:factory", *(frontend.form for frontend in FRONTENDS.values())])


def split_spec(spec: str) -> tuple[str, str, str]:
    """Return ``(prefix, path, factory)`` of a spec."""
    for prefix in FRONTENDS:
        if spec.startswith(prefix):
            path = spec.removeprefix(prefix)
            if not path:
                raise ModelError(f"model '{spec}' names no file; write {FRONTENDS[prefix].form}")
            return prefix, path, ""
    path, colon, factory = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not factory:
        raise ModelError(
            f"model '{spec}' is neither {forms().replace(' or ', ' nor ')}; write for example gpt.py:make, where "
            "make() returns a model and its example inputs"
        )
    return "", path, factory


def runs_code(spec: str) -> bool:
    """Return True if loading the model executes a Python file; frontends only read one."""
    return not split_spec(spec)[0]


def cause_in(error: BaseException, file: Path) -> str:
    """Return ``ValueError: text (file.py:3)``, with the last line of the user's file that was running."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or file).name}:{error.lineno})"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == file.name]
    text = str(error).strip().splitlines()
    first = " ".join(line.strip() for line in text[: 2 if text and text[0].endswith(":") else 1])
    what = type(error).__name__ + (f": {first}" if text else "")
    return what + (f" ({file.name}:{lines[-1]})" if lines else "")


__all__ = ["FRONTENDS", "Frontend", "Loaded", "cause_in", "forms", "frontend", "runs_code", "split_spec"]
