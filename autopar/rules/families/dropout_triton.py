"""Dropout as Triton kernels: one launch for the hashes of rows and columns, one that reads, drops and writes.

The hashes are those of :mod:`.sharded_random`, bit for bit. As operators of torch they take about sixty launches for a
call of dropout, which takes longer on the host than a layer of GPT-2 takes on an H200 (``hardware_profiles/measured``).

Only this module imports triton for dropout; whoever imports it has asked whether there is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autopar.rules.families.hash_multipliers import MULTIPLIERS, SPLITMIX

_FIRST, _SECOND = (tl.constexpr(n) for n in MULTIPLIERS)
_GOLDEN, _M1, _M2 = (tl.constexpr(n) for n in SPLITMIX)
_BLOCK = 1024


@triton.jit
def _splitmix(z):
    """Hash 64-bit numbers; arithmetic shifts are masked into logical ones."""
    z = z * _GOLDEN
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _M1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _M2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@triton.jit(do_not_specialize=["site", "n_rows", "n_columns"])
def _hashes(
    seed, numbers, places, row, column, site, n_rows, n_columns, CUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the hashes of a block of rows and of a block of columns."""
    key = _splitmix(_splitmix(tl.load(seed) + 1) + site)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number, place = at, at
    if CUT:
        number = tl.load(numbers + at, mask=at < n_rows, other=0)
        place = tl.load(places + at, mask=at < n_columns, other=0)
    tl.store(row + at, _splitmix(number + key).to(tl.int32), mask=at < n_rows)
    tl.store(column + at, _splitmix(place ^ _splitmix(key + _M1)).to(tl.int32), mask=at < n_columns)


@triton.jit(do_not_specialize=["threshold", "n_columns", "n"])
def _dropped(x, row, column, out, threshold, scale, n_columns, n, BLOCK: tl.constexpr):
    """Scale the kept elements of one block and zero the others."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    of_row = tl.load(row + at // n_columns, mask=inside, other=0)
    of_column = tl.load(column + at % n_columns, mask=inside, other=0)
    z = of_row + of_column
    z = z ^ (z >> 16)
    z = z * _FIRST
    z = z ^ (z >> 15)
    z = z * _SECOND
    value = tl.load(x + at, mask=inside, other=0.0)
    kept = tl.where(z < threshold, value.to(tl.float32) * scale, 0.0)
    tl.store(out + at, kept.to(out.dtype.element_ty), mask=inside)


def hashes(
    seed: torch.Tensor, site: int, numbers: torch.Tensor | None, places: torch.Tensor | None, n_rows: int,
    n_columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the hashes of rows, int32 [n_rows], and of columns, int32 [n_columns].

    Args:
        seed: the seed of the step, an int64 scalar on the device.
        numbers, places: the numbers of the rows and columns of the whole tensor, int64; None for all of them in order.
    """
    row, column = (torch.empty(n, dtype=torch.int32, device=seed.device) for n in (n_rows, n_columns))
    is_cut = numbers is not None
    _hashes[(triton.cdiv(max(n_rows, n_columns), _BLOCK),)](
        seed, numbers if is_cut else seed, places if is_cut else seed, row, column, site, n_rows, n_columns,
        CUT=is_cut, BLOCK=_BLOCK,
    )  # fmt: skip
    return row, column


def dropped(
    x: torch.Tensor, row: torch.Tensor, column: torch.Tensor, threshold: int, scale: float
) -> torch.Tensor:
    """Return ``x`` with zeros for dropped elements and the others scaled; ``x`` [rows columns] has 16 or 32 bits."""
    x, row, column = x.detach().contiguous(), row.contiguous(), column.contiguous()
    if row.numel() * column.numel() != x.numel():
        raise ValueError(f"{row.numel()} rows by {column.numel()} columns are not the {x.numel()} elements of x")
    out = torch.empty_like(x)
    n = x.numel()
    if n:
        _dropped[(triton.cdiv(n, _BLOCK),)](x, row, column, out, threshold, scale, x.shape[-1], n, BLOCK=_BLOCK)
    return out
