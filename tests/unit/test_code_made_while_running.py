"""A model whose class was made by ``exec`` is refused with the line of its forward, as others with file and line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError

SOURCE = """
class Made(nn.Module):
    def forward(self, x):
        y = torch.tanh(x)
        return y.numpy().sum()
"""


def test_the_line_is_said() -> None:
    names: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(SOURCE, names)
    with pytest.raises(CaptureError, match=r"at line 5 of forward\(\) in <string>, code made while running"):
        autopar.capture(names["Made"](), torch.randn(4, 4))
