"""Which modules of a parallel module train, and whether a program is one of these modes.

A program is captured with every module in one of two modes. ``eval()`` of the whole is mostly the same graph, whose
operators are told (:mod:`autopar.capture.evaluation`), so one program does for both. Anything else is captured anew, by
the next call (:mod:`~autopar.runtime.variants.program_cache`): norms of a backbone in eval mode while the rest trains,
dropout that stays on in eval mode, a model that writes to buffers in eval mode or computes something else in it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterator

import torch

from autopar.errors import first_few

Training = frozenset[str]
"""Paths of the modules that train; '' is the whole."""


class Modes:
    """The modes of the modules of a model.

    Attributes:
        at_first: the modules that trained when it was captured first.
        stale: a mode has been set since they were last looked at.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.at_first: Training = self._now()
        self._training, self.stale = self.at_first, False

    def _now(self) -> Training:
        return frozenset(path for path, module in self._modules.items() if module.training)

    @property
    def training(self) -> Training:
        """The modules that train."""
        if self.stale:
            now = self._now()
            if now != self._training:
                self._training = self.at_first if now == self.at_first else now
            self.stale = False
        return self._training

    def shown(self) -> str:
        """Return what ranks tell each other of the modes: they are alike where this is."""
        training = self.training
        checksum = zlib.crc32(" ".join(sorted(training)).encode())
        others = {*self._modules} - training if "" in training else training
        mode = "eval mode" if "" in training else "training"
        names = f"{len(others)} modules in {mode}, " if others else ""
        return f"the whole in {'training' if '' in training else 'eval mode'}, {names}checksum {checksum:08x}"


@contextlib.contextmanager
def in_modes(model: torch.nn.Module, training: Collection[str]) -> Iterator[None]:
    """Put the modules named in `training` into training mode in this scope, all others into eval mode."""
    now = [(module, module.training) for module in model.modules()]
    try:
        for path, module in model.named_modules():
            module.training = path in training
        yield
    finally:
        for module, mode in now:
            module.training = mode


def difference(before: Training, now: Training, shown: int = 4) -> str:
    """Say in what the modes of a call differ from those of a program, for a message."""
    said = []
    for paths, mode in ((now - before, "training"), (before - now, "eval mode")):
        if paths:
            names = [repr(path) if path else "the whole" for path in sorted(paths)]
            said.append(f"{first_few(names, shown)} in {mode}")
    return ", ".join(said)
