"""One thread and a fixed seed for every test: losses are compared bit by bit, and there are few cores to share."""

import atexit
import gc
import os
import random
import shutil
import tempfile
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sweeps import mark

from autopar import progress
from autopar.runtime.ranks import launch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels run on processors; read when it is imported
os.environ.pop("COLUMNS", None)  # workers of pytest-xdist have one, of which commands would make their tables narrow
CACHE = tempfile.mkdtemp(prefix="autopar-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE  # no files of the user's are read or written
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
launch.PRELOADED += [
    f"transformers.models.{name}.modeling_{name}"
    for name in ("gpt2", "llama", "bert", "t5", "vit", "resnet", "whisper")
] + ["warmed"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the sweeps before those that are not asked for are deselected."""
    mark(items, not any("::" in arg for arg in config.args))


def pytest_collection_finish() -> None:
    """What is imported by now stays; tests that look for garbage need not walk through it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)  # captures make millions of objects: else 8% of the time is walks through them


FREEZE_EVERY = 200
"""Tests, after which what has stayed is passed over by the collector, too: caches of captured models grow all along,
and each walk through them takes longer."""
_done = 0


def pytest_runtest_logfinish() -> None:
    global _done
    _done += 1
    if _done % FREEZE_EVERY == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The seed follows from the test's name, so that a test gives the same numbers alone and among others."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A process group that ``parallelize`` made here would be in the way of tests with many ranks in this process."""
    before = dist.is_initialized()
    yield
    if not before and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _progress_is_heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that may be told is told, as on a machine so slow that each module takes long: who listens may not
    change what is captured."""
    monkeypatch.setattr(progress, "SECONDS", -1.0)
    with progress.heard(lambda text: None):
        yield
