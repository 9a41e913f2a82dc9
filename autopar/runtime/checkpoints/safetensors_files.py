"""The safetensors format, read by pieces and written tensor by tensor, so that nobody holds a whole model.

A file is 8 bytes with the length of a header (little-endian), the header as JSON, ``{name: {"dtype", "shape",
"data_offsets": [begin, end]}}``, and the values, row-major, at these offsets from the header's end. A folder of several
files has ``model.safetensors.index.json``, whose ``weight_map`` names the file of each tensor. Both are those of
https://github.com/huggingface/safetensors and of ``save_pretrained``; nothing of either package is needed here.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from autopar.errors import RunError, first_few
from autopar.words.shards import Box
from hardware_profiles.strict import Unreadable, parse_json, read_text

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER_BYTES = 100_000_000
CHUNK_BYTES = 16 << 20
"""Values are read so many bytes at a time."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, of which pieces can be read.

    Attributes:
        start: where its values begin, in bytes from the beginning of the file.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @torch.no_grad()
    def read_into(self, target: torch.Tensor, box: Box) -> None:
        """Copy a part of it into a tensor of the part's shape, of any dtype and on any device.

        Args:
            box: ``(start, length)`` for every dim.

        Raises:
            RunError: the file ends too early.
        """
        if not target.numel():
            return
        if not self.shape:
            target.copy_(self._values(0, 1).view(self.dtype).reshape(()))
            return
        row = prod(self.shape[1:])
        rows = max(1, CHUNK_BYTES // max(1, row * self.dtype.itemsize))
        first, n_rows = box[0]
        for at in range(0, n_rows, rows):
            count = min(rows, n_rows - at)
            part = self._values((first + at) * row, count * row).view(self.dtype).reshape(count, *self.shape[1:])
            for d, (start, length) in enumerate(box[1:], 1):
                part = part.narrow(d, start, length)
            target.narrow(0, at, count).copy_(part)

    def _values(self, first: int, count: int) -> torch.Tensor:
        """Return the elements in a row, as bytes."""
        data = torch.empty(count * self.dtype.itemsize, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + first * self.dtype.itemsize)
            view, got = memoryview(data.numpy().data), 0
            while got < len(view):
                n = file.readinto(view[got:])
                if not n:
                    raise RunError(f"{self.path} ends {len(view) - got} bytes too early; copy it again")
                got += n
        return data


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of a folder by name, reading headers only.

    They are those of the index's files, of ``model.safetensors``, or of the only file that the folder has. ``folder``
    may be such a file, too.

    Raises:
        RunError: there is nothing to read, or a file is broken.
    """
    if folder.is_file() and folder.suffix == ".safetensors":
        return header_of(folder)
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = parse_json(read_text(index)).get("weight_map")
        except (Unreadable, AttributeError) as error:
            raise RunError(f"{index} is no index of safetensors files: {error}") from error
        if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
            raise RunError(f"{index} has no weight_map from names to files")
        return _of_files(folder, weight_map)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    files = [f for f in files if f.name == SINGLE] or files
    if len(files) == 1:
        return header_of(files[0])
    if not folder.exists():
        raise RunError(f"there is no folder {folder}")
    has = f"{len(files)} safetensors files and no {INDEX}" if files else "no safetensors file"
    raise RunError(f"{folder} has {has}; give a folder that save_pretrained or autopar.save_safetensors wrote")


def _of_files(folder: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    """List the tensors that an index names."""
    headers: dict[str, dict[str, StoredTensor]] = {}
    tensors = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise RunError(f"{folder / INDEX} names the file '{file}' for '{name}', which is not in its own folder")
        if file not in headers:
            headers[file] = header_of(folder / file)
        if name not in headers[file]:
            raise RunError(f"{folder / INDEX} says that '{name}' is in {file}, which has {first_few([*headers[file]])}")
        tensors[name] = headers[file][name]
    return tensors


def header_of(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one file.

    Raises:
        RunError: it is missing, broken or cut off.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise RunError(f"{path} has {size} bytes, its header alone would have {length}; it is broken")
            header = parse_json(file.read(length).decode())
    except (OSError, struct.error, UnicodeDecodeError, Unreadable) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path} is no safetensors file that can be read: {why}") from error
    if not isinstance(header, dict):
        raise RunError(f"{path} is no safetensors file: its header is no table")
    return {name: _entry(path, name, of, 8 + length, size) for name, of in header.items() if name != "__metadata__"}


def _entry(path: Path, name: str, of: Any, start: int, size: int) -> StoredTensor:
    try:
        word, shape, (begin, end) = of["dtype"], tuple(map(int, of["shape"])), map(int, of["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: '{name}' has no dtype, shape and data_offsets: {error}") from error
    if word not in DTYPES:
        raise RunError(f"{path}: '{name}' is of type {word}; torch tensors are read of {', '.join(DTYPES)}")
    n_bytes = prod(shape) * DTYPES[word].itemsize
    if end - begin != n_bytes or begin < 0 or min(shape, default=0) < 0:
        raise RunError(f"{path}: '{name}' of shape {shape} has {n_bytes} bytes, and its place {end - begin}")
    if start + end > size:
        raise RunError(
            f"{path} has {size} bytes, and '{name}' would end at {start + end}; it is cut off, copy it again"
        )
    return StoredTensor(path, shape, DTYPES[word], start + begin)


class Writer:
    """Writes one file, its tensors in the order in which they were announced."""

    def __init__(self, file: Any, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, (shape, dtype) in specs.items():
            n_bytes = prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + n_bytes]}
            at += n_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)
        self.file = file

    def add(self, value: torch.Tensor) -> None:
        """Write the next tensor."""
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        self.file.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


if sys.byteorder != "little":  # pragma: no cover
    raise RunError("safetensors files are little-endian, this machine is not")
