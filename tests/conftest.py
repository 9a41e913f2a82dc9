"""One thread and a fixed seed for every test: losses are compared bit by bit, and there are few cores to share."""

import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from autopar.runtime import launch

torch.set_num_threads(1)
launch.PRELOADED += [
    f"transformers.models.{name}.modeling_{name}"
    for name in ("gpt2", "llama", "bert", "t5", "vit", "resnet", "whisper")
]


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
