"""Buffers in unsigned integers, such as token numbers in 16 bits: captured, planned, and the same on four ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.comparison.program_vs_eager import verify
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster


class Coded(nn.Module):
    """Words by their codes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 4)
        self.register_buffer("codes", torch.arange(16).flip(0).to(dtype))
        self.register_buffer("first", torch.arange(8).to(dtype))

    def forward(self, ids: Tensor) -> Tensor:
        scale = self.first.float().sum()
        return (self.words(self.codes.long()[ids]) * scale).square().mean() + self.words(self.first.int()).sum()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_buffers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, ids = Coded(dtype), (torch.randint(16, (8,)),)
    rows = verify(capture(model, ids), model, ids, {}, Mesh.of(data=2, tensor=2), load_cluster("local-x4"))
    assert max(row.worst for row in rows[1:]) < 1e-9


FIRST_TO_IMPORT = """
import sys, torch
from autopar.capture import capture
class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
    def forward(self, x, ends):
        from torch.nn.attention.varlen import varlen_attn
        q, k, v = self.qkv(x).view(-1, 3, 2, 4).unbind(1)
        return varlen_attn(q, k, v, ends, ends, 5, 5).square().mean()
assert "torch.nn.attention.varlen" not in sys.modules
graph = capture(Packed(), (torch.randn(8, 8), torch.tensor([0, 3, 8], dtype=torch.int32))).graph
assert any("attention" in node.target for node in graph.nodes)
"""


@pytest.mark.slow
def test_varlen_attention_that_a_forward_is_the_first_to_import() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_TO_IMPORT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
