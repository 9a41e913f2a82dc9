"""The geometry of one call of attention on one rank.

Says which queries and keys this rank holds, their positions in the sequence, which of them meet, and how dropout is
drawn for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from autopar.rules.attention.attention_kernels import Dropping, PartOfAttention
from autopar.rules.attention.attention_pairs import (
    Met,
    Stretch,
    in_blocks,
    joined,
    mask_of,
    own,
    pairs,
    zigzag_stretches,
)
from autopar.rules.families.sharded_random import Shards, Site, dropping, hashes_at, threshold_of
from autopar.words.shards import nested_shard_of

Hashes = tuple[torch.Tensor | None, torch.Tensor | None]
"""Hashes of queries and of keys; None if there is no dropout."""


class Draw(NamedTuple):
    """The dropout of one call: its probability, and the hashes that decide.

    Attributes:
        p: the probability to be dropped.
        site: number of the call.
        shape: the shape of the scores of all ranks.
        shards: for their leading dims, the axes that cut each.
    """

    p: float
    site: Site
    shape: tuple[int, ...]
    shards: Shards


@dataclass(frozen=True, eq=False)
class Going:
    """The route of one call of attention round its ring.

    Attributes:
        ring: the axis that keys and values travel round; None if a rank has them all.
        group: the process group of that axis.
        number, pieces: this rank's number on `ring`, and how many ranks that has.
        row_cuts: ``(size, unit)`` of the axes that cut the queries.
        row_numbers: this rank's number on each of them.
        n_rows: queries of all ranks.
        causal, scale: as in the call of the operator.
        zigzag: ranks exchange halves first.
        mask_learns: whether the gradient of the mask is asked for.
        draw: the dropout; None without dropout.
        steps: the number of steps of the ring: as many as pieces where values count; then the second one stands for
            those left out.
        n_keys: the number of keys of all ranks, if their pieces are not equal: each has room for as many as the first,
            and what is behind the last key is none. Else 0.
    """

    ring: str | None
    group: ProcessGroup | None
    number: Any
    pieces: int
    row_cuts: tuple[tuple[int, int], ...]
    row_numbers: tuple[Any, ...]
    n_rows: int
    causal: bool
    scale: float | None
    zigzag: bool = False
    mask_learns: bool = False
    draw: Draw | None = None
    steps: int = 1
    n_keys: int = 0

    def rows(self, numbers: Sequence[int], length: int) -> list[Stretch]:
        """Return the stretches of the sequence that a rank's queries cover.

        Args:
            numbers: ``row_numbers``, of one rank where this process plays many.
            length: how many it has.
        """
        if self.zigzag:
            return zigzag_stretches(numbers[0], self.pieces, length)
        return [Stretch(nested_shard_of(self.n_rows, self.row_cuts, numbers)[0], length, 0)]

    def keys(self, number: int, length: int) -> list[Stretch]:
        """Return the stretches of the keys in shard ``number`` of the ring; all keys without a ring."""
        if self.zigzag:
            return zigzag_stretches(number, self.pieces, length)
        there = min(length, max(0, self.n_keys - number * length)) if self.n_keys else length
        return [Stretch(number * length, there, 0)]

    def parts(
        self, numbers: Sequence[int], source: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        mask: torch.Tensor | None, hashes: Hashes,
    ) -> Iterator[tuple[Met, PartOfAttention]]:  # fmt: skip
        """Return the kernel calls in which a rank's queries meet shard ``source`` of the keys."""
        rows, keys = self.rows(numbers, q.shape[-2]), self.keys(source, k.shape[-2])
        at_home = self.causal and self.draw is None and keys == rows
        meeting = [own(rows)] if at_home else joined(pairs(rows, keys, self.causal))
        for pair in meeting if self.draw is None else in_blocks(meeting):
            yield pair, PartOfAttention(
                q[..., pair.rows, :], k[..., pair.keys, :], v[..., pair.keys, :], scale=self.scale,
                diagonal=pair.diagonal, mask=mask_of(mask, pair), mask_learns=self.mask_learns,
                dropping=self._dropping(pair, *hashes),
            )  # fmt: skip

    def hashes(self, numbers: Sequence[int], seed: Any, length: int, *lead: torch.Tensor) -> Hashes:
        """Return the hashes of a rank's queries [.. h q] and of all keys [k], from which random bits are drawn.

        Args:
            length: how many queries it has.
            lead: where it is along the leading dims of the scores.
        """
        assert self.draw is not None
        device = lead[0].device if lead else seed.device
        places = [torch.arange(row.start, row.end, device=device) for row in self.rows(numbers, length)]
        keys = torch.arange(self.draw.shape[-1], device=device)
        if not isinstance(seed, torch.Tensor):  # torch's numbers: of rows with all keys, whether they are kept
            return seed.at_places(self.draw.site, (*lead, torch.cat(places), keys)), None
        return hashes_at(seed, self.draw.site, self.draw.shape, (*lead, torch.cat(places), keys))

    def _dropping(self, pair: Met, row: torch.Tensor | None, column: torch.Tensor | None) -> Dropping | None:
        if self.draw is None or row is None:
            return None
        drop = (
            row[..., pair.rows, :][..., pair.places].mul if column is None
            else dropping(row[..., pair.rows], column[pair.places], threshold_of(self.draw.p))
        )  # fmt: skip
        return Dropping(drop, 1 / (1 - self.draw.p) if self.draw.p < 1 else 0.0)
