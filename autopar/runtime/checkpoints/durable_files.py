"""Files whose bytes, and folders whose names, are on the disk when a call returns, as power may fail.

Of a file that is written here the checksum is known at the end, at no second reading: a CRC-32 of the bytes as they are
written, which costs a few percent of writing them. Whoever reads the file later compares.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

READ_BYTES = 1 << 22
"""Bytes that are read at a time to sum them up."""


class Sum(NamedTuple):
    """The size and CRC-32 of a file's bytes."""

    size: int
    crc: int


class SummedFile:
    """A new file that sums up what is written to it.

    Attributes:
        error: the first error of a write. Libraries that write through C++ raise another one in its place.
    """

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("wb")
        self.size, self.crc = 0, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, all of them.

        Raises:
            OSError: they could not be written.
        """
        try:
            count = self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.size, self.crc = self.size + count, zlib.crc32(data, self.crc)
        return count

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self.file.flush()

    def fileno(self) -> int:
        """Return the system's number of the file, whose bytes have all been given to the system."""
        self.file.flush()
        return self.file.fileno()

    def close(self) -> None:
        """Do nothing: :func:`summed` closes the file."""

    def writable(self) -> bool:
        """Return True."""
        return True


@contextlib.contextmanager
def summed(path: Path, sums: dict[str, Sum]) -> Iterator[SummedFile]:
    """Open a new file whose bytes are on disk at the end; its checksum is added to ``sums`` under its name.

    Raises:
        OSError: it could not be written.
    """
    file = SummedFile(path)
    try:
        yield file
        os.fsync(file.fileno())
    except Exception as error:
        if file.error is not None and error is not file.error:
            raise file.error from error
        raise
    finally:
        with contextlib.suppress(OSError):  # of bytes that had no room before, either
            file.file.close()
    sums[path.name] = Sum(file.size, file.crc)


def sum_of(path: Path) -> Sum:
    """Compute the checksum of an existing file.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    size, crc = 0, 0
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size, crc = size + count, zlib.crc32(buffer[:count], crc)
    return Sum(size, crc)


@contextlib.contextmanager
def on_disk(path: Path) -> Iterator[BinaryIO]:
    """Open a new file whose bytes are on disk at the end."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
