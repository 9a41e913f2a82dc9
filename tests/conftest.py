"""One thread and a fixed seed for every test: losses are compared bit by bit, and there are few cores to share."""

import random
import zlib

import numpy as np
import pytest
import torch

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
