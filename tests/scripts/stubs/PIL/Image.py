"""Images that are tensors: noise that follows from the file's name."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

ANTIALIAS = None


class _Image(torch.Tensor):
    def convert(self, mode: str) -> _Image:
        return self.expand(3, -1, -1) if mode == "RGB" else self  # type: ignore[return-value]

    def resize(self, size: tuple[int, int], how: object) -> _Image:  # type: ignore[override]
        return self[..., : size[0], : size[1]]  # type: ignore[return-value]

    def split(self) -> list[torch.Tensor]:  # type: ignore[override]
        plain = self.as_subclass(torch.Tensor)
        return [plain, plain, plain]


def open(path: str) -> _Image:
    """300 x 300, of one channel."""
    generator = torch.Generator().manual_seed(zlib.crc32(Path(path).name.encode()))
    torch.Tensor.copy = torch.Tensor.clone  # type: ignore[attr-defined]
    return torch.rand(1, 300, 300, generator=generator).as_subclass(_Image)
