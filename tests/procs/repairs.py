"""What each repair of torch's DTensor is for: a case on two ranks, whose answer torch alone has not."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.errors import RunError
from autopar.runtime.repairs.dtensor_fixes import REPAIRS, correct
from autopar.runtime.repairs.mixed import mix_on

RIGHT = "right"


def _piece(mesh: DeviceMesh, whole: torch.Tensor) -> DTensor:
    return distribute_tensor(whole, mesh, [Shard(0)])


def _values(n: int) -> torch.Tensor:
    return torch.arange(1.0, 4 * n + 1).view(2 * n, 2)


def numbers(mesh: DeviceMesh, n: int) -> bool:
    return float(_piece(mesh, _values(n)).sum()) == float(_values(n).sum())


def overflows(mesh: DeviceMesh, n: int) -> bool:
    infinite = _values(n)
    infinite[-1] = torch.inf  # of the last rank alone
    grads = [distribute_tensor(_values(n), mesh, [Replicate()]), _piece(mesh, infinite)]
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.ones(()))
    return float(found) == 1.0


def collectives(mesh: DeviceMesh, n: int) -> bool:
    dist.all_reduce(_piece(mesh, _values(n)))
    return False


def collectives_of_lists(mesh: DeviceMesh, n: int) -> bool:
    piece = _piece(mesh, _values(n))
    dist.reduce_scatter(torch.zeros(n, 2), [piece, piece])
    return False


def sums_of_norms(mesh: DeviceMesh, n: int) -> bool:
    tensors = [_values(n), _values(n).flip(0)] * n  # not proportional, for which a sum of parts would do
    total = torch.stack([_piece(mesh, x).norm() for x in tensors]).sum().full_tensor()
    return torch.allclose(total, 2 * n * _values(n).norm())


def anys(mesh: DeviceMesh, n: int) -> bool:
    there = torch.isnan(_piece(mesh, torch.full((2 * n, 2), torch.nan))).any().float()
    return float(there.full_tensor()) == 1.0


def no_dims(mesh: DeviceMesh, n: int) -> bool:
    return float(_piece(mesh, _values(n)).sum(()).full_tensor()) == float(_values(n).sum(()))


def formats(mesh: DeviceMesh, n: int) -> bool:
    return f"{_piece(mesh, _values(n)).sum():.1f}" == f"{_values(n).sum():.1f}"


def tolist(mesh: DeviceMesh, n: int) -> bool:
    return _piece(mesh, _values(n)).sum().tolist() == float(_values(n).sum())


def numpy(mesh: DeviceMesh, n: int) -> bool:
    _piece(mesh, _values(n)).numpy()
    return False


def addresses(mesh: DeviceMesh, n: int) -> bool:
    first, second = (_piece(mesh, _values(n)) for _ in range(2))
    return first.data_ptr() != second.data_ptr()


def files(mesh: DeviceMesh, n: int) -> bool:
    mix_on(mesh)  # as on those of parallel modules
    file = io.BytesIO()
    torch.save(distribute_tensor(_values(n), mesh, [Replicate()]), file)
    file.seek(0)
    return type(torch.load(file, weights_only=False)) is torch.Tensor


def data(mesh: DeviceMesh, n: int) -> bool:
    mine = _piece(mesh, _values(n))
    mine.data = _piece(mesh, 5 * _values(n))
    return torch.equal(mine.full_tensor(), 5 * _values(n))


CASES: dict[str, tuple[Callable[[DeviceMesh, int], bool], bool]] = {
    "numbers are read whole": (numbers, True), "overflows of a gradient scaler": (overflows, True),
    "collectives": (collectives, True), "collectives of lists": (collectives_of_lists, False),
    "sums of norms": (sums_of_norms, True), "any": (anys, True), "reductions over no dims": (no_dims, True),
    "formats": (formats, True), "tolist": (tolist, True), "numpy": (numpy, True), "addresses": (addresses, True),
    "files": (files, True), "assignments to data": (data, True),
}  # fmt: skip
"""By repair, its case, and whether the case may be run without the repair: a collective would read missing memory."""


def outcome(case: Callable[[DeviceMesh, int], bool], mesh: DeviceMesh, n: int) -> str:
    try:
        return RIGHT if case(mesh, n) else "wrong"
    except RunError:
        return RIGHT if case in (collectives, collectives_of_lists, numpy) else "refused"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


@contextmanager
def without(name: str) -> Iterator[None]:
    repair = next(repair for repair in REPAIRS if repair.name == name)
    repair.undo()
    try:
        yield
    finally:
        repair.apply()


def with_and_without() -> dict[str, tuple[str, str | None, bool]]:
    """By repair: what its case gives with it, and without it (None if that cannot be tried); and whether this version
    of torch is said to need it. Sizes differ, because DTensor remembers how it cut an operator."""
    mesh = init_device_mesh("cpu", (2,))
    correct()
    results: dict[str, tuple[str, Any, bool]] = {}
    for number, repair in enumerate(REPAIRS):
        case, may_go = CASES[repair.name]
        repaired = outcome(case, mesh, 3 + 2 * number)
        alone = None
        if may_go:
            with without(repair.name):
                alone = outcome(case, mesh, 4 + 2 * number)
        results[repair.name] = repaired, alone, repair.is_needed
    return results


__all__ = ["CASES", "RIGHT", "with_and_without"]
