"""Who steps on which whole matrix, under an optimizer that needs matrices whole (Muon), and how much work that is.

Planner and runtime both ask here, so that what is priced is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hardware_profiles import Device

from .costs import Costs, OpWork

AT_ONCE_BYTES = 1 << 28
"""Bytes of the whole matrices that a rank owns at a time, as they are sent."""
ALONE_BELOW = 128
"""The shorter side below which each rank that stores a matrix whole steps on it itself: of m x n, m <= n, it takes
about 10 m operations for each byte that another rank's result has, fewer than a device does meanwhile."""
SENT_ITEM_BYTES = 2
"""Bytes of an element as Muon sends it, both ways: its iteration computes in bfloat16 from the first to the last."""
STEPS = 5
"""Newton-Schulz steps of Muon by default."""


class Bucket(NamedTuple):
    """Matrices that are gathered together: their numbers, and the owner of each."""

    numbers: tuple[int, ...]
    owners: tuple[int, ...]


def newton_schulz_flops(shape: Sequence[int], steps: int = STEPS) -> float:
    """Return the floating point operations of Muon's iteration on an m x n matrix, m <= n.

    A step has three products, X X^T, its square, and both times X: 4 m^2 n + 2 m^3
    (https://kellerjordan.github.io/posts/muon). Other tensors count as matrices of their last two dims, one after the
    other, vectors as one operation an element.
    """
    if len(shape) < 2:
        return float(prod(shape))
    m, n = sorted(shape[-2:])
    return prod(shape[:-2]) * steps * (4.0 * m * m * n + 2.0 * m**3)


def iteration_seconds(costs: Costs, device: Device, shape: tuple[int, ...]) -> float:
    """Return the seconds of Muon's iteration on a matrix, by its three products of each step."""
    m, n = sorted(shape)
    seconds = 0.0
    for rows, columns, inner in ((m, m, n), (m, m, m), (m, n, m)):
        n_bytes = SENT_ITEM_BYTES * (rows * inner + inner * columns + rows * columns)
        flops, gemm = 2.0 * rows * columns * inner, (rows, columns, inner)
        work = OpWork("matmul", flops, n_bytes, "bfloat16", gemm, False, 0, 0, lambda: None)
        seconds += costs.op(device, work).forward
    return STEPS * seconds


def is_alone(shape: Sequence[int], is_cut: bool) -> bool:
    """Check whether each rank steps on a matrix itself: all have it whole, and it is small."""
    return not is_cut and (len(shape) < 2 or min(shape[-2:]) < ALONE_BELOW)


def owners_of(work: Sequence[float], n: int) -> list[int]:
    """Return an owner of ``n`` for each piece of work: the largest first, each to whoever has least so far.

    At most 4/3 - 1/(3n) of the best possible (Graham 1969, "Bounds on multiprocessing timing anomalies"). All ranks
    find the same: among equals the first is taken.
    """
    load, owners = [0.0] * n, [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        owners[i] = min(range(n), key=lambda rank: (load[rank], rank))
        load[owners[i]] += work[i]
    return owners


def buckets_of(work: Sequence[float], n_bytes: Sequence[float], n: int, at_once: float = AT_ONCE_BYTES) -> list[Bucket]:
    """Divide matrices, in order, into buckets of at most ``n`` times ``at_once`` bytes, or of one matrix.

    Args:
        work: of each matrix, to give each of the ``n`` ranks about as much within a bucket.
        n_bytes: of each matrix, whole.
    """
    parts: list[list[int]] = [[]]
    size = 0.0
    for i, more in enumerate(n_bytes):
        if parts[-1] and size + more > n * at_once:
            parts.append([])
            size = 0.0
        parts[-1].append(i)
        size += more
    return [Bucket(tuple(part), tuple(owners_of([work[i] for i in part], n))) for part in parts if part]


class WholeMatrix(NamedTuple):
    """A matrix that is stepped on whole.

    Attributes:
        shape: of the whole.
        pieces: into how many different pieces the ranks of its mesh cut it; 1 if each has it whole.
        seconds: what the step on the whole takes, on one rank.
    """

    shape: tuple[int, ...]
    pieces: int
    seconds: float


class MatrixLoad(NamedTuple):
    """What a bucket of matrices asks of the ranks of its mesh.

    Attributes:
        seconds: of the owner that has most to compute; ``mean_seconds``: of all on average.
        gathered_bytes: the most that an owner receives.
        scattered_bytes: the most that an owner sends, to each rank its piece.
        stored_bytes: one rank's pieces, as they are sent.
        step_bytes: what the iteration on the largest matrix needs beside it.
    """

    seconds: float
    mean_seconds: float
    gathered_bytes: float
    scattered_bytes: float
    stored_bytes: float
    step_bytes: float

    @property
    def peak_bytes(self) -> float:
        """The most that a rank has at once, beside parameters, gradients and state.

        When the whole matrices have come, these, what came and the pieces that were sent; when updates leave, these,
        the pieces for others and the rank's own.
        """
        whole = self.gathered_bytes
        return max(self.stored_bytes + whole + max(whole, self.scattered_bytes), whole + self.step_bytes)


def loads(matrices: Sequence[WholeMatrix], n: int, item_bytes: float = SENT_ITEM_BYTES) -> list[MatrixLoad]:
    """Return the load of each bucket of matrices on ``n`` ranks; those that ranks step on themselves are a load alone.

    Args:
        item_bytes: bytes of an element as it is sent.
    """
    alone = [m for m in matrices if n == 1 or is_alone(m.shape, m.pieces > 1)]
    sent = [m for m in matrices if not (n == 1 or is_alone(m.shape, m.pieces > 1))]
    found = []
    if alone:
        seconds = sum(m.seconds for m in alone)
        found.append(MatrixLoad(seconds, seconds, 0.0, 0.0, 0.0, max(_step_bytes(m, item_bytes) for m in alone)))
    n_bytes = [item_bytes * prod(m.shape) for m in sent]
    for numbers, owners in buckets_of([newton_schulz_flops(m.shape) for m in sent], n_bytes, n):
        computes, gets, gives = [0.0] * n, [0.0] * n, [0.0] * n
        for i, owner in zip(numbers, owners, strict=True):
            computes[owner] += sent[i].seconds
            gets[owner] += n_bytes[i]
            gives[owner] += n_bytes[i] * n / sent[i].pieces
        stored = sum(n_bytes[i] / sent[i].pieces for i in numbers)
        step_bytes = max(_step_bytes(sent[i], item_bytes) for i in numbers)
        found.append(MatrixLoad(max(computes), sum(computes) / n, max(gets), max(gives), stored, step_bytes))
    return found


def peak_bytes(of_buckets: Sequence[MatrixLoad]) -> float:
    """Return the most that a rank has at once; of several buckets, the next one comes while one is computed."""
    peaks = sorted(load.peak_bytes for load in of_buckets)
    return sum(peaks[-2:])


def _step_bytes(matrix: WholeMatrix, item_bytes: float) -> float:
    """Return the bytes of the next iterate of an m x n matrix, m <= n, of X X^T and of the polynomial of that."""
    if len(matrix.shape) < 2:
        return 0.0
    m, n = sorted(matrix.shape[-2:])
    return item_bytes * (m * n + 2 * m * m)
