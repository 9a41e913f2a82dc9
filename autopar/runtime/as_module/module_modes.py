"""Which modules of a parallel module train, and whether a program is one of these modes.

A program is captured with every module in one of two modes. ``eval()`` of the whole is mostly the same graph, whose
operators are told (:mod:`autopar.capture.evaluation`), so one program does for both. Anything else is captured anew, by
the next call (:mod:`~autopar.runtime.variants.program_cache`): norms of a backbone in eval mode while the rest trains,
dropout that stays on in eval mode, a model that writes to buffers in eval mode or computes something else in it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterable, Iterator

import torch

from autopar.errors import first_few

Training = frozenset[str]
"""Paths of the modules that train; '' is the whole."""


class Modes:
    """The modes that the modules of a model have in its parallel module.

    Args:
        model: in the modes in which it is captured.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._first: dict[str, str] = {}
        """Of every path of a module the first one."""
        seen: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._first[path] = seen.setdefault(id(module), path)
        modes = {path: module.training for path, module in model.named_modules()}
        self.at_first: Training = frozenset(path for path, mode in modes.items() if mode)
        self.training: Training = self.at_first
        self._with_whole = {path for path, mode in modes.items() if mode or not model.training}
        """What ``train()`` of the whole sets to training: parts that were in eval mode stay in it."""

    def set_whole(self, mode: bool) -> None:
        """``train(mode)`` of the whole."""
        self._set(frozenset(self._with_whole) if mode else frozenset())

    def set_parts(self, paths: Iterable[str], mode: bool) -> None:
        """``train(mode)`` of parts, by all their paths."""
        firsts = {self._first.get(path, path) for path in paths}
        if mode:
            self._with_whole |= firsts
        self._set(self.training | firsts if mode else self.training - firsts)

    def _set(self, training: Training) -> None:
        if training != self.training:
            self.training = self.at_first if training == self.at_first else training

    def trains(self, path: str) -> bool:
        """Whether a module trains."""
        return self._first.get(path, "") in self.training

    def shown(self) -> str:
        """What ranks tell each other of the modes: they are alike where this is."""
        checksum = zlib.crc32(" ".join(sorted(self.training)).encode())
        others = {*self._first.values()} - self.training if "" in self.training else self.training
        mode = "eval mode" if "" in self.training else "training"
        names = f"{len(others)} modules in {mode}, " if others else ""
        return f"the whole in {'training' if '' in self.training else 'eval mode'}, {names}checksum {checksum:08x}"


@contextlib.contextmanager
def in_modes(model: torch.nn.Module, training: Collection[str]) -> Iterator[None]:
    """The modules of a model in these modes, and then in their own again."""
    now = [(module, module.training) for module in model.modules()]
    try:
        for path, module in model.named_modules():
            module.training = path in training
        yield
    finally:
        for module, mode in now:
            module.training = mode


def difference(before: Training, now: Training, shown: int = 4) -> str:
    """In what the modes of a call differ from those of a program, for a message."""
    said = []
    for paths, mode in ((now - before, "training"), (before - now, "eval mode")):
        if paths:
            names = [repr(path) if path else "the whole" for path in sorted(paths)]
            said.append(f"{first_few(names, shown)} in {mode}")
    return ", ".join(said)


__all__ = ["Modes", "Training", "difference", "in_modes"]
