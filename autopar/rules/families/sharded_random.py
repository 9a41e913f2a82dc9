"""Random numbers that do not depend on the mesh.

Element i of the output of call ``site`` in a step with seed s is a hash of (s, site, i), where i is its position in the
whole tensor. So every rank draws exactly its part of what one device would draw, for any cut, and a recomputed forward
draws the same again. (The numbers differ from torch's own generator.)

Where a step goes through in microbatches, positions are those in the whole batch: what a row draws depends on its place
there, and not on how many microbatches there are. So the seed of a microbatch also says where its rows are
(:func:`seed_at`), and the site which dims of the tensor have rows (``Node.rows``).

The hash: a 64-bit one (splitmix64) of each row gives 32 bits, another of each column 32 more; their sum passes two
multiply-xorshift rounds. Rows are all dims but the last, so the expensive part is small and the rest is a few 32-bit
passes.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import spmd_types as spmd
import torch

from autopar.rules.families.hash_multipliers import MULTIPLIERS, SPLITMIX
from autopar.rules.lowering_helpers.local_shard import Cuts, positions
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample
from autopar.words.graph import RowsAt
from autopar.words.tracing import is_traced
from autopar.words.trees import Context, PyTree

Shards = Sequence[Sequence[str]]
Site = int | tuple[int, tuple[RowsAt, ...] | None]
"""The number of a call; and, unless it draws once for all rows of the batch, where these are in what it draws (None
if that is not known: then each microbatch draws numbers of its own)."""
NOT_FIRST = 1 << 32
"""More than any dim has elements: the stride of a second dim that has rows."""


_GOLDEN, _M1, _M2 = SPLITMIX


def _splitmix(z: torch.Tensor) -> torch.Tensor:
    """Hash int64 numbers bijectively."""
    z = z * _GOLDEN
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _M1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _M2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def one_of_two(site: Site, which: int, above: int) -> Site:
    """Return the site of draw number ``which`` (0 or 1) of a call, numbered above all other draws."""
    number = 2 * (site if isinstance(site, int) else site[0]) + which + above
    return number if isinstance(site, int) else (number, site[1])


def seed_at(seed: torch.Tensor, first: int, block: int, stride: int) -> torch.Tensor:
    """Return the seed of a microbatch, int64 [4].

    Args:
        seed: the seed of the step, int64 [].
        first, block, stride: row ``r`` of the microbatch is row ``r // block * stride + first + r % block`` of the
            batch: where ranks have rows of their own, a microbatch has ``block`` of each of them, and these are
            ``stride`` rows apart.
    """
    return torch.stack([seed, *(torch.full_like(seed, n) for n in (first, block, stride))])


def bits(seed: torch.Tensor, site: Site, shape: Sequence[int], shards: Shards, device: torch.device) -> torch.Tensor:
    """Draw uniform int32 for this rank's piece of a tensor of global ``shape``; ``shards`` has the axes of each dim."""
    # -> [*local shape]
    return bits_at(seed, site, shape, [positions(n, axes, device) for n, axes in zip(shape, shards, strict=True)])


def bits_at(seed: torch.Tensor, site: Site, shape: Sequence[int], places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Draw uniform int32 for the elements of a tensor of global ``shape`` at `places` along each dim."""
    # -> [*local shape]
    if not shape:
        return bits_at(seed, site, (1,), (torch.zeros(1, dtype=torch.int64, device=seed.device),)).reshape(())
    return _mixed(*hashes_at(seed, site, shape, places))


def halves(
    seed: torch.Tensor, site: Site, shape: Sequence[int], shards: Shards, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hashes of the rows [*local shape without the last dim] and of the columns [last local dim], int32."""
    number, rows = (site, ()) if isinstance(site, int) else site
    in_order = rows == () or (seed.dim() == 0 and (rows is None or all(at[:2] == (0, 1) for at in rows)))
    if in_order and not any(shards) and has_kernels(seed) and seed.device == device:
        from autopar.rules.families import dropout_triton

        row, column = dropout_triton.hashes(seed, number, None, None, math.prod(shape[:-1]), shape[-1])
        return row.view(tuple(shape[:-1])), column
    return hashes_at(seed, site, shape, [positions(n, axes, device) for n, axes in zip(shape, shards, strict=True)])


def hashes_at(
    seed: torch.Tensor, site: Site, shape: Sequence[int], places: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hashes of the elements at `places`."""
    number, rows = (site, ()) if isinstance(site, int) else site
    device, order = places[-1].device, list(range(len(places) - 1))
    value = seed if seed.dim() == 0 else seed[0]
    if rows is None:
        value = _splitmix(value + seed[1]) if seed.dim() else value
    elif rows:
        places = in_batch(seed.to(device) if seed.dim() else None, rows, places)
        with_rows = [at[0] for at in rows]
        shape = [NOT_FIRST if d in with_rows else n for d, n in enumerate(shape)]
        order.sort(key=lambda d: d not in with_rows)  # so that they need not know how many rows the batch has
    row, last = torch.zeros((), dtype=torch.int64, device=device), places[-1]
    for d in order:
        row = row.unsqueeze(-1) * shape[d] + places[d]
    if order != sorted(order):
        row = row.permute([order.index(d) for d in range(len(order))]).contiguous()
    if has_kernels(row, last):
        from autopar.rules.families import dropout_triton

        numbers, columns = row.reshape(-1), last.to(torch.int64).contiguous()
        of_rows, of_columns = dropout_triton.hashes(
            value.to(device), number, numbers, columns, numbers.numel(), columns.numel()
        )
        return of_rows.view(row.shape), of_columns
    key = _splitmix(_splitmix(value.to(device) + 1) + number)
    row = _splitmix(row + key)
    column = _splitmix(last ^ _splitmix(key + _M1))
    return row.to(torch.int32), column.to(torch.int32)


def in_batch(
    seed: torch.Tensor | None, rows: Sequence[RowsAt], places: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Translate positions in a microbatch's draw to positions in the draw of the whole batch.

    Along a dim with rows, the row comes first.

    Args:
        seed: the seed of the microbatch; None if it is the batch.
    """
    moved = list(places)
    for d, outer, n, inner in rows:
        if d >= len(moved) or (seed is None and outer == 1):  # each channel of a row is dropped as a whole
            continue
        at = moved[d]
        row = at.div(inner, rounding_mode="floor") % n
        if seed is not None:
            _, first, block, stride = seed
            row = row.div(block, rounding_mode="floor") * stride + first + row % block
        moved[d] = (row * outer + at.div(inner * n, rounding_mode="floor")) * inner + at % inner
    return moved


def _mixed(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return the random bits of all elements from the hashes of their rows and columns."""
    z = row.unsqueeze(-1) + column
    # arithmetic shifts: the sign bits smear, which costs one bit in 2^32 and saves two passes
    z ^= z >> 16
    z *= MULTIPLIERS[0]
    z ^= z >> 15
    z *= MULTIPLIERS[1]
    return z


def kept(p: float, seed: torch.Tensor, site: Site, shape: Sequence[int], shards: Shards, device: Any) -> torch.Tensor:
    """Draw a bool mask that is True with probability ``1 - p``."""
    return bits(seed, site, shape, shards, device) < threshold_of(p)


def threshold_of(p: float) -> int:
    """Return the threshold below which a share of ``1 - p`` of all int32 lies."""
    return min(round((1 - p) * 2**32) - 2**31, 2**31 - 1)


def uniform(
    seed: torch.Tensor, site: Site, shape: Sequence[int], shards: Shards, device: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Draw uniform numbers in [0, 1), as fine as ``dtype`` allows up to 24 bits."""
    n_bits = {torch.bfloat16: 8, torch.float16: 11}.get(dtype, 24)
    fraction = (bits(seed, site, shape, shards, device) >> (32 - n_bits)) + (1 << (n_bits - 1))
    return fraction.to(dtype) * 2.0**-n_bits


def dropout(
    x: torch.Tensor, p: float, train: bool = True, *, cut: Cuts, seed: Any, site: Site, shape: Sequence[int],
    shards: Shards,
) -> torch.Tensor:
    """Compute ``aten.dropout`` in training; on GPUs in one pass (:class:`_Dropped`)."""
    if shape and _has_pass(x):
        row, column = halves(seed, site, shape, shards, x.device)
        return _Dropped.apply(x, row, column, threshold_of(p), 1 / (1 - p) if p < 1 else 0.0)
    return x * kept(p, seed, site, shape, shards, x.device) * (1 / (1 - p) if p < 1 else 0.0)


def dropping(row: torch.Tensor, column: torch.Tensor, threshold: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that sets elements of a tensor to zero without scaling, the same ones for several tensors.

    Args:
        row, column: what :func:`halves` gives for the tensor.
        threshold: what :func:`threshold_of` gives.
    """
    on_kernels = has_kernels(row)
    keep = None if on_kernels else _mixed(row, column) < threshold

    def drop(x: torch.Tensor) -> torch.Tensor:
        if on_kernels and _has_pass(x):
            return _Dropped.apply(x, row, column, threshold, 1.0)
        return x * (keep if keep is not None else _mixed(row, column) < threshold)

    return drop


KERNELS_ON = {"cuda"}
"""Types of devices on which dropout is Triton's kernels: one pass that reads and writes, in place of ten, and one
launch for its hashes, in place of sixty."""
_PASSES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of the pass; a scale in double precision cannot be handed to a kernel."""


def has_kernels(*tensors: torch.Tensor) -> bool:
    """Check that Triton's kernels may be called: not while types are checked, nor where the program is compiled."""
    if not all(type(x) is torch.Tensor and x.device.type in KERNELS_ON for x in tensors):
        return False
    return not (spmd.is_type_checking() or is_traced()) and _has_triton(tensors[0].device)


def _has_pass(x: torch.Tensor) -> bool:
    return has_kernels(x) and x.dtype in _PASSES


@functools.cache
def _has_triton(device: torch.device) -> bool:
    """Check that Triton makes kernels for a device; GPUs must not be too old."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (7, 0)


class _Dropped(torch.autograd.Function):
    """Dropout as one kernel forward and one backward.

    Nothing of the size of ``x`` is saved: the backward draws the same bits again from the hashes of rows and columns.
    """

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, row: torch.Tensor, column: torch.Tensor, threshold: int, scale: float
    ) -> torch.Tensor:
        from autopar.rules.families import dropout_triton

        ctx.save_for_backward(row, column)
        ctx.numbers = threshold, scale
        return dropout_triton.dropped(x, row, column, threshold, scale)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from autopar.rules.families import dropout_triton

        return dropout_triton.dropped(grads[0], *ctx.saved_tensors, *ctx.numbers), None, None, None, None


@rule(
    "aten.dropout.default",
    "aten.feature_dropout.default",
    samples=[sample(T((4, 2, 8)), 0.25, True), sample(T((8,)), 0.5, True), sample(T((4, 8)), 0.5, False)],
)
def dropout_rule(call: Call) -> Rule:
    p, train = call.arg(1, "p", 0.5), call.arg(2, "train", True)
    draws = bool(train) and p > 0
    lowering = Lowering(dropout if call.target == "aten.dropout.default" else feature_dropout)
    return line("... -> ...", call, linear=[{0}], random=draws, lowerings=(lowering,) if draws else ())


def feature_dropout(
    x: torch.Tensor, p: float, train: bool = True, *, cut: Cuts, seed: Any, site: Site, shape: Sequence[int],
    shards: Shards,
) -> torch.Tensor:
    """Compute ``aten.feature_dropout`` (``nn.Dropout2d``): whole channels of x [b c ...] are dropped."""
    mask = kept(p, seed, site, shape[:2], shards[:2], x.device)
    return x * mask.reshape(*mask.shape, *[1] * (x.dim() - 2)) * (1 / (1 - p) if p < 1 else 0.0)


def _dtype(kwargs: Mapping[str, PyTree], x: torch.Tensor | None) -> torch.dtype:
    return kwargs.get("dtype") or (x.dtype if isinstance(x, torch.Tensor) else torch.get_default_dtype())


def _device(kwargs: Mapping[str, PyTree], x: torch.Tensor | None, seed: torch.Tensor) -> torch.device:
    return torch.device(kwargs.get("device") or (x.device if isinstance(x, torch.Tensor) else seed.device))


def rand(
    x: torch.Tensor, *_: Any, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards, **kwargs: PyTree
) -> torch.Tensor:
    """Draw for ``aten.rand`` and ``aten.rand_like``."""
    return uniform(seed, site, shape, shards, _device(kwargs, x, seed), _dtype(kwargs, x))


def randn(
    x: torch.Tensor | None, *_: Any, cut: Cuts | None, seed: Any, site: Site, shape: Sequence[int], shards: Shards,
    **kwargs: PyTree,
) -> torch.Tensor:  # fmt: skip
    """Draw for ``aten.randn`` and ``aten.randn_like``, by Box and Muller."""
    device, dtype = _device(kwargs, x, seed), _dtype(kwargs, x)
    u, v = (uniform(seed, one_of_two(site, i, 1 << 40), shape, shards, device, torch.float32) for i in (0, 1))
    return (torch.sqrt(-2 * torch.log1p(-u)) * torch.cos(2 * math.pi * v)).to(dtype)


def randint(
    *args: PyTree, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards, **kwargs: PyTree
) -> torch.Tensor:
    """Draw for ``aten.randint`` with ``(high, size)`` or ``(low, high, size)``."""
    low, high = (0, args[0]) if len(args) == 2 else args[:2]
    draw = bits(seed, site, shape, shards, _device(kwargs, None, seed)).to(torch.int64)
    return (((draw + 2**31) * (high - low)) >> 32).add(low).to(kwargs.get("dtype") or torch.int64)


def bernoulli(
    x: torch.Tensor, p: Any = None, *, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards, **_: Any
) -> Any:
    """Draw for ``aten.bernoulli``: probabilities ``x``, or one ``p`` in the shape of ``x``."""
    u = uniform(seed, site, shape, shards, x.device, torch.float32)
    return (u < (x.detach() if p is None else p)).to(x.dtype)
