"""Images that are tensors: noise that follows from the file's name."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch


class _Image(torch.Tensor):
    def convert(self, mode: str) -> _Image:
        return self

    def split(self) -> list[torch.Tensor]:  # type: ignore[override]
        plain = self.as_subclass(torch.Tensor)
        return [plain, plain, plain]


def open(path: str) -> _Image:
    """300 x 300, of one channel."""
    generator = torch.Generator().manual_seed(zlib.crc32(Path(path).name.encode()))
    torch.Tensor.copy = torch.Tensor.clone  # type: ignore[attr-defined]
    return torch.rand(1, 300, 300, generator=generator).as_subclass(_Image)
