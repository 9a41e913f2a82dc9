"""Sums over parts of an attention, some positions of the sequence at a time."""

from __future__ import annotations

import torch

from autopar.rules.attention.attention_kernels import add_part


class PlacesWithValues:
    """The positions along a dim that have a value so far."""

    def __init__(self, *stretches: slice) -> None:
        self._stretches = list(stretches)

    def first_time(self, places: slice) -> list[slice]:
        """Mark ``places`` as filled, and return those that had no value before."""
        missing, start = [], places.start
        for stretch in self._stretches:
            if start < min(stretch.start, places.stop):
                missing.append(slice(start, min(stretch.start, places.stop)))
            start = max(start, stretch.stop)
        if start < places.stop:
            missing.append(slice(start, places.stop))
        self._stretches = sorted([*self._stretches, *missing], key=lambda stretch: stretch.start)
        return missing


class SumOfParts:
    """The gradient of ``like`` [.. s d], in the precision of sums.

    Args:
        so_far: the sum of earlier parts, which is added to.
    """

    def __init__(self, like: torch.Tensor, so_far: torch.Tensor | None = None) -> None:
        self._like, self._total, self._all = like, so_far, slice(0, like.shape[-2])
        self._places = PlacesWithValues() if so_far is None else PlacesWithValues(self._all)

    def add(self, places: slice, part: torch.Tensor) -> None:
        """Add a part at ``places``."""
        new = self._places.first_time(places)
        if self._total is None:
            if places == self._all:  # the first one is the sum itself
                self._total = part.to(precision_of_sums(part))
                return
            self._total = torch.empty_like(self._like, dtype=precision_of_sums(self._like))
        at = self._total[..., places, :]
        if new == [places]:
            at.copy_(part)
            return
        for gap in new:
            self._total[..., gap, :] = 0
        at += part

    def total(self) -> torch.Tensor:
        """Return the sum; zeros if nothing was added."""
        if self._total is None:
            return torch.zeros_like(self._like, dtype=precision_of_sums(self._like))
        for gap in self._places.first_time(self._all):
            self._total[..., gap, :] = 0
        return self._total


class AttentionSoFar:
    """The attention of queries ``q`` [.. q d] to the keys seen so far.

    Holds a result [.. q e] and its log-sum-exp [.. q], in the precision of sums.

    Args:
        width: ``e``.
        out, log_sum: over earlier keys, which are written in place.
    """

    def __init__(self, q: torch.Tensor, width: int, out: torch.Tensor | None, log_sum: torch.Tensor | None) -> None:
        self._q, self._width, self._all = q, width, slice(0, q.shape[-2])
        self._sums = None if out is None or log_sum is None else (out, log_sum)
        self._places = PlacesWithValues() if out is None else PlacesWithValues(self._all)

    def add(self, rows: slice, part: torch.Tensor, log_of_part: torch.Tensor) -> None:
        """Merge the attention of some queries to further keys."""
        new = self._places.first_time(rows)
        if self._sums is None and rows == self._all:
            self._sums = part.to(precision_of_sums(part)), log_of_part
            return
        out, log_sum = self._room()
        if new == [rows]:
            out[..., rows, :], log_sum[..., rows] = part, log_of_part
            return
        for gap in new:
            out[..., gap, :] = 0
        add_part(out[..., rows, :], log_sum[..., rows], part, log_of_part)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both; zeros and -inf for a query that has seen no key."""
        out, log_sum = self._room()
        for gap in self._places.first_time(self._all):
            out[..., gap, :] = 0
        return out, log_sum

    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sums is None:
            q, exact = self._q, precision_of_sums(self._q)
            out = q.new_empty((*q.shape[:-1], self._width), dtype=exact)
            self._sums = out, q.new_full(q.shape[:-1], -torch.inf, dtype=exact)
        return self._sums


def precision_of_sums(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which parts are summed: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)
