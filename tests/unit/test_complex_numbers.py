"""Complex parameters, Python's complex numbers, and conjugates that torch makes lazily, on two ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.comparison import program_vs_eager as V
from autopar.words.meshes import Mesh
from hardware_profiles import abstract_cluster

MESH = Mesh.of(data=2)
CLUSTER = abstract_cluster(dict(MESH), alpha=(1e-6,), beta=(1e-9,))


class Conjugates(nn.Module):
    """Cumulative sums want the dim whole that they go along: what is cut along it is brought together."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.randn(8, dtype=torch.cfloat))
        self.out = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        z = (self.a(x) * self.scale.conj() - 1j).conj().cumsum(0).conj().cumsum(1)
        z = z.conj() @ self.out.mH + (2 - 1j) * z
        return z.real.square().mean() + z.conj().imag.mean()


def test_they_are_the_same_on_two_ranks() -> None:
    torch.manual_seed(0)
    model, x = Conjugates(), torch.randn(8, 4)
    found = V.verify(capture(model, (x,)), model, (x,), {}, MESH, CLUSTER, random_plans=4)
    assert len(found) == 6
    for row in found[1:]:  # in double precision, the complex numbers too
        assert row.worst <= 1e-9, row
