"""Pairs of a rank's queries and the keys that they meet, where attention's sequence is cut: kernel calls as slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

MOST_SCORES = 1024 * 1024
"""Queries by keys of one head that are computed at once where there is dropout."""


class Stretch(NamedTuple):
    """Neighbouring places of a sequence that a rank has."""

    start: int
    length: int
    at: int
    """Where they lie in the rank's tensor."""

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.length


class Met(NamedTuple):
    """Queries of a rank and keys that it has now, which meet in one call of a kernel."""

    rows: slice
    keys: slice
    places: slice
    """The places of the keys in the whole sequence, for a mask."""
    diagonal: bool = False


def zigzag_stretches(number: int, pieces: int, length: int) -> list[Stretch]:
    """Return the two halves that rank ``number`` of ``pieces`` holds after the exchange of halves.

    One is from the front of the sequence and one from the back, ``length`` positions together.
    """
    half, last = length // 2, 2 * pieces - 1
    return [Stretch(number * half, half, 0), Stretch((last - number) * half, half, half)]


def pairs(rows: Sequence[Stretch], keys: Sequence[Stretch], causal: bool) -> Iterator[Met]:
    """Yield what each query of ``rows`` sees of ``keys``: all, or if causal those at its position and before."""
    for q in rows:
        for k in keys:
            if not causal:
                yield _pair(q, k, q.start, q.end, k.start, k.end)
                continue
            before = min(k.end, q.start)  # keys before all of these queries
            yield _pair(q, k, q.start, q.end, k.start, before)
            first, last = max(k.start, q.start), min(k.end, q.end)
            yield _pair(q, k, first, last, first, last, diagonal=True)
            yield _pair(q, k, last, q.end, first, last)


def own(stretches: Sequence[Stretch]) -> Met:
    """Return the causal pair of queries and keys at the same positions.

    Each position sees those before it, so one call with a diagonal serves any number of stretches. Its positions are
    not those of the whole sequence.
    """
    length = sum(x.length for x in stretches)
    return Met(slice(0, length), slice(0, length), slice(0, length), diagonal=True)


def _pair(q: Stretch, k: Stretch, first: int, last: int, key: int, last_key: int, diagonal: bool = False) -> Met:
    rows = slice(q.at + first - q.start, q.at + max(first, last) - q.start)
    keys = slice(k.at + key - k.start, k.at + max(key, last_key) - k.start)
    return Met(rows, keys, slice(key, last_key), diagonal)


def joined(of_pairs: Iterator[Met]) -> list[Met]:
    """Join the non-empty pairs that are neighbours where one kernel call can compute both."""
    result: list[Met] = []
    for pair in of_pairs:
        if pair.rows.start >= pair.rows.stop or pair.keys.start >= pair.keys.stop:
            continue
        last = result[-1] if result else None
        if last is None or last.diagonal or pair.diagonal:
            result.append(pair)
        elif last.rows == pair.rows and last.keys.stop == pair.keys.start and last.places.stop == pair.places.start:
            keys, places = slice(last.keys.start, pair.keys.stop), slice(last.places.start, pair.places.stop)
            result[-1] = Met(pair.rows, keys, places)
        elif last.keys == pair.keys and last.places == pair.places and last.rows.stop == pair.rows.start:
            result[-1] = Met(slice(last.rows.start, pair.rows.stop), pair.keys, pair.places)
        else:
            result.append(pair)
    return result


def in_blocks(of_pairs: Sequence[Met]) -> Iterator[Met]:
    """Yield the pairs with larger ones split by queries; the part before a diagonal is its own pair."""
    for pair in of_pairs:
        n_rows, n_keys = pair.rows.stop - pair.rows.start, pair.keys.stop - pair.keys.start
        size = max(1, MOST_SCORES // n_keys)
        if size >= n_rows:
            yield pair
            continue
        for first in range(0, n_rows, size):
            last = min(first + size, n_rows)
            rows = slice(pair.rows.start + first, pair.rows.start + last)
            if not pair.diagonal:
                yield Met(rows, pair.keys, pair.places)
                continue
            for start, stop, diagonal in ((0, first, False), (first, last, True)):
                if start < stop:
                    keys, places = (slice(at.start + start, at.start + stop) for at in (pair.keys, pair.places))
                    yield Met(rows, keys, places, diagonal)


def mask_of(mask: torch.Tensor | None, pair: Met) -> torch.Tensor | None:
    """Return the part of a mask for a pair; dims of size 1 are broadcast."""
    if mask is None:
        return None
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., pair.rows, :]
    return mask[..., pair.places] if mask.shape[-1] > 1 else mask
