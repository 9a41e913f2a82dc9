"""What checksums cost: saves and loads of a :class:`autopar.Checkpoint` with and without them, by turns in one process.

Without them torch sums up each tensor instead, and compares that never. A save's time is that of writing and of
bringing to the disk; beside it stands the time of the process's CPU, which another load of the machine changes less.
``python benchmarks/checkpoints.py [--mb 512] [--runs 7] [--folder /dev/shm]``
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import autopar
from autopar.runtime.checkpoints import durable_files, saves_in_folder, stored_shards


@contextlib.contextmanager
def unsummed() -> Iterator[None]:
    """As ``torch.distributed.checkpoint`` saves: torch's sums of tensors, and none of files."""
    no_sums = mock.patch.object(durable_files.zlib, "crc32", lambda data, value=0: 0)
    with no_sums, mock.patch.object(stored_shards, "without_torchs_sums", contextlib.nullcontext):
        yield


def seconds(does: Any) -> tuple[float, float]:
    """Of the clock, and of the process's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    does()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Print medians, and medians of the ratios of two runs beside each other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=512, help="of model and optimizer together")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", default=None, help="on the disk that is to be measured")
    options = parser.parse_args()
    width = int((options.mb * 2**20 / 4 / 3 / 8) ** 0.5)  # eight layers, float32, with two values of AdamW's each
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        checkpoint = autopar.Checkpoint(folder, model, optimizer, keep=1)
        checkpoint.save(0)
        rows: dict[str, list[tuple[tuple[float, float], tuple[float, float]]]] = {"save": [], "load": []}
        for run in range(options.runs):
            pair = []
            for summed in (True, False) if run % 2 else (False, True):
                if summed:
                    pair.append(seconds(lambda: checkpoint.save(1)))
                else:
                    with unsummed():
                        pair.append(seconds(lambda: checkpoint.save(1)))
            rows["save"].append((pair[0], pair[1]) if run % 2 else (pair[1], pair[0]))
        checkpoint.save(1)
        for _ in range(options.runs):
            with mock.patch.object(saves_in_folder.Manifest, "check", lambda *_: None):
                without = seconds(checkpoint.load)
            rows["load"].append((seconds(checkpoint.load), without))
        data = bytes(64 << 20)
        rate = 64 / 1024 / min(seconds(lambda: zlib.crc32(data))[0] for _ in range(3))
        print(f"{options.mb} MiB in {folder.parent}; CRC-32 of {rate:.1f} GiB/s")
        for name, pairs in rows.items():
            for k, of in enumerate(("s", "CPU-s")):
                withs, withouts = [a[k] for a, _ in pairs], [b[k] for _, b in pairs]
                ratio = statistics.median(a / b for a, b in zip(withs, withouts, strict=True))
                print(
                    f"{name}: {statistics.median(withs):.3f} {of} with checksums, {statistics.median(withouts):.3f} "
                    f"without; {ratio:.3f} times"
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
