"""Tensors in a folder, each rank's own pieces, as ``torch.distributed.checkpoint`` lays them out.

torch plans who writes and reads what, and writes and reads it. Here its steps are taken one by one, so that ranks meet
while they plan and not while they write: a thread may write on while the run goes on, or has come to its end. And
nothing of a folder is unpickled but numbers, names and tensors, since a folder may have been written by anyone.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config

from autopar.errors import RunError
from autopar.runtime.checkpoints.durable_files import Sum, summed
from autopar.torch_private import StorageInfo
from autopar.words.trees import PyTree

METADATA = ".metadata"
"""torch's own file: which pieces of which tensors are where."""

ADMITTED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("torch", "Size"), ("pathlib", "Path"), ("pathlib", "PosixPath"), ("collections", "OrderedDict"),
}  # fmt: skip
"""The names that such a file may have, and dtypes: none of them runs code of a stranger's."""


class _Names(pickle.Unpickler):
    """Reads what consists of admitted names alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for.

        Raises:
            UnpicklingError: it is not admitted.
        """
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a description of tensors")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read which tensors there are, and where.

    Raises:
        RunError: the file is none that torch has written.
        OSError: it cannot be read.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Names(file).load()
    except OSError:
        raise
    except Exception as error:  # of bytes that are no pickle anything may come
        raise RunError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise RunError(f"{path} is damaged: it describes no tensors")
    for info in metadata.storage_data.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name:
            raise RunError(f"{path} names the file {name!r}, which is not in its own folder")
    return metadata


# --- writing ---------------------------------------------------------------------------------------------------------


def without_torchs_sums() -> contextlib.AbstractContextManager[Any]:
    """Make torch write tensors without checksums of their own, in this thread.

    It never compares them, and the file's checksum covers them.
    """
    return config.patch("save.compute_crc32", False)  # type: ignore[attr-defined,no-any-return]


class _SummedFiles(FileSystem):
    """A file system that computes a checksum of every file it writes."""

    def __init__(self, sums: dict[str, Sum]) -> None:
        self.sums = sums

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        """Yield an open file."""
        with summed(Path(path), self.sums) if mode == "wb" else super().create_stream(path, mode) as file:
            yield file


class ShardsToWrite:
    """This rank's part of a state, which is to be written.

    Attributes:
        sums: checksums of the files that this rank has written, by name.
        size: bytes of this rank's tensors.
    """

    def __init__(self, folder: Path, state: dict[str, Any], first: bool, sums: dict[str, Sum], copied: bool) -> None:
        """Initialize the object.

        Args:
            first: this is the rank that plans.
            copied: the state is on the CPU, and changes no more.
        """
        self.sums = sums
        self.writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0 if copied else 10_000_000)
        self.writer.fs = _SummedFiles(sums)  # which brings its files to the disk
        self.planner = DefaultSavePlanner()
        self.planner.set_up_planner(state, self.writer.storage_meta(), first)
        self.writer.set_up_storage_writer(first)
        self.metadata: Metadata | None = None
        self.plan = self.writer.prepare_local_plan(self.planner.create_local_plan())

    def plan_all(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Say who writes what; on the first rank, of the plans of all."""
        merged, self.metadata = self.planner.create_global_plan(plans)
        return self.writer.prepare_global_plan(merged)

    def write(self, plan: SavePlan) -> list[WriteResult]:
        """Write this rank's part; no other rank is waited for.

        Raises:
            OSError: it could not be written.
        """
        with without_torchs_sums():
            written = self.writer.write_data(self.planner.finish_plan(plan), self.planner)
            written.wait()
            return written.value()

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Write down where everything is; on the first rank, with what all have written."""
        assert self.metadata is not None
        self.writer.finish(self.metadata, results)
        self.sums[METADATA] = self.sums.pop(f"{METADATA}.tmp")


Row = tuple[str, list[int] | None, int | None, int, str, int, int]
"""One piece: its name, offset and number, its bytes, and the file, place and length that it has."""


def results_as_rows(results: Iterable[WriteResult]) -> list[Row]:
    """Return what a rank has written as plain values."""
    return [
        (r.index.fqn, None if r.index.offset is None else list(r.index.offset), r.index.index, r.size_in_bytes,
         r.storage_data.relative_path, r.storage_data.offset, r.storage_data.length)
        for r in results
    ]  # fmt: skip


def results_of_rows(rows: Iterable[Row]) -> list[WriteResult]:
    """Undo :func:`results_as_rows`."""
    return [
        WriteResult(MetadataIndex(name, offset, number), size, StorageInfo(path, start, length))
        for name, offset, number, size, path, start, length in rows
    ]


# --- reading ---------------------------------------------------------------------------------------------------------


class ShardReader(FileSystemReader):
    """Reads a folder of which the description has been read."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: PyTree, **kwargs: PyTree) -> Metadata:
        """Return what was read before."""
        return self.metadata


class PlainValues(DefaultLoadPlanner):
    """Plans what is read; values that are no tensors are read without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value that is no tensor."""
        *path, key = self.mappings[read_item.dest_index.fqn]
        inside: Any = self.original_state_dict
        for step in path:
            inside = inside[step]
        inside[key] = torch.load(value, weights_only=True, map_location="cpu")


def shapes(metadata: Metadata) -> Mapping[str, tuple[int, ...] | None]:
    """Return the shape of each tensor by name; None for what is no tensor."""
    return {
        name: tuple(size) if (size := getattr(of, "size", None)) is not None else None
        for name, of in metadata.state_dict_metadata.items()
    }
