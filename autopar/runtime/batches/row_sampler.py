"""The rows of a data set that each rank loads, with a position that a checkpoint holds, for any number of ranks.

All ranks draw from one order of the rows of an epoch, as ``DistributedSampler`` does. The position is how many rows of
that order all ranks together have been given, so a run that goes on with another number of ranks begins at the right
row. A ``DataLoader`` with workers asks for rows before the loop has them; the position is that of the loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from autopar.errors import RunError
from autopar.torch_private import caller_that_loads


class RowSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that knows its position.

    >>> for epoch in range(sampler.epoch, epochs):
    ...     sampler.set_epoch(epoch)
    ...     for batch in DataLoader(dataset, 8, sampler=sampler): ...

    With ``together`` rows at once, a rank has that many consecutive rows of the order where DistributedSampler gives it
    every nth: a batch of all ranks has the order that it has on one device.
    """

    def __init__(
        self, dataset: Dataset[Any], ranks: int, place: int, *, shuffle: bool, seed: int, drop_last: bool,
        together: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(dataset, ranks, place, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.together = together
        self._begins = 0
        """Rows of the epoch that the next iteration leaves out, which were given before."""
        self._began = self._drawn = 0
        self._loads: Any = None
        """The iterator of the loader that draws here, if it has workers, which ask for rows ahead."""
        self._at_load: torch.Tensor | None = None
        """The state of torch's generator from which the iteration goes on that a checkpoint was in."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; the epoch of a loaded checkpoint goes on where that ended."""
        if epoch != self.epoch:
            self._begins = self._began = self._drawn = 0
            self._loads = self._at_load = None
        super().set_epoch(epoch)

    def _order(self, begin: int) -> list[int]:
        """List the rows from a position on, as many as divide among the ranks."""
        n = len(self.dataset)  # type: ignore[arg-type]
        rows = list(range(n))
        if self.shuffle:
            rows = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        left = max(0, n - begin)
        count = (left if self.drop_last else left + self.num_replicas - 1) // self.num_replicas * self.num_replicas
        if not rows or not count:
            return []
        there = rows[begin : begin + count]
        while len(there) < count:  # filled up with the first rows
            there += rows[: count - len(there)]
        return there

    def __iter__(self) -> Iterator[int]:
        begin, self._begins = self._begins, 0
        self._began, self._drawn = begin, 0
        self._undraw_seed_of_loader()
        loads = caller_that_loads()
        self._loads = loads if loads is not None and loads._num_workers else None
        return self._rows(self._order(begin))

    def _undraw_seed_of_loader(self) -> None:
        """Put torch's generator back to where a checkpoint had it, if a loader's own seed is all that was drawn since.

        A ``DataLoader`` draws a seed for its workers where an iteration begins. The iteration that a checkpoint was in
        had begun before it was saved, so the run that goes on would draw once more, and have other noise from there on.
        """
        before, self._at_load = self._at_load, None
        if before is None:
            return
        generator = torch.Generator()
        generator.set_state(before)
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        if torch.equal(generator.get_state(), torch.get_rng_state()):
            torch.set_rng_state(before)

    def goes_on_from_here(self) -> None:
        """Remember that the generators are as the checkpoint has them, whose position was loaded before."""
        if self._at_load is not None:
            self._at_load = torch.get_rng_state()

    def _rows(self, order: list[int]) -> Iterator[int]:
        batch = self.together * self.num_replicas
        for first in range(0, len(order), batch):
            rows = order[first : first + batch]
            mine = len(rows) // self.num_replicas
            here = rows[self.rank * mine :][:mine] if self.together > 1 else rows[self.rank :: self.num_replicas]
            for row in here:
                self._drawn += 1
                yield row

    def _given(self) -> int:
        """Return the rows of this iteration that this rank's loop has been given.

        Raises:
            RunError: a loader with workers draws in batches of which it is not known how large they are.
        """
        loads = self._loads
        if loads is None:
            return self._drawn
        size = getattr(loads._index_sampler, "batch_size", None)
        if size is None:
            raise RunError(
                "the position of pm.sampler(dataset) is not known: a DataLoader with workers asks for rows ahead, and "
                "its batch_sampler has no batch_size; use num_workers=0, or a DataLoader with batch_size="
            )
        return min(int(loads._num_yielded) * int(size), self._drawn)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many of its rows all ranks together have been given."""
        rows = self._begins or self._began + self._given() * self.num_replicas
        return {"epoch": self.epoch, "rows": rows, "seed": self.seed, "of": len(self.dataset)}  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there, with any number of ranks.

        Raises:
            RunError: it is of a data set of another size, or of another seed.
        """
        here = {"of": len(self.dataset), "seed": self.seed}  # type: ignore[arg-type]
        for key, name in (("of", "rows in the data set"), ("seed", "as the sampler's seed")):
            if state[key] != here[key]:
                raise RunError(
                    f"the checkpoint's sampler has {state[key]} {name}, this one {here[key]}: the rows from its "
                    "position on would be others; go on with the same data, and the same seed"
                )
        self.epoch, self._begins = int(state["epoch"]), int(state["rows"])
        self._began = self._drawn = 0
        self._loads, self._at_load = None, torch.get_rng_state()


class Samplers:
    """The samplers of one module in their order; a state loaded before one is made is kept for it."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[RowSampler]] = []
        self.loaded: list[Mapping[str, int] | None] = []

    def add(self, sampler: RowSampler) -> RowSampler:
        """Add a sampler, which goes on at its position in a loaded checkpoint."""
        number = len(self.made)
        self.made.append(weakref.ref(sampler))
        if number < len(self.loaded) and (state := self.loaded[number]) is not None:
            sampler.load_state_dict(state)
        return sampler

    def state_dict(self) -> dict[str, Any]:
        """Return the positions; None for a sampler that is gone."""
        there = [ref() for ref in self.made]
        return {"samplers": [sampler.state_dict() if sampler is not None else None for sampler in there]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions of all samplers.

        Raises:
            RunError: as for :meth:`RowSampler.load_state_dict`.
        """
        self.loaded = list(state["samplers"])
        for ref, of_one in zip(self.made, self.loaded, strict=False):
            if (sampler := ref()) is not None and of_one is not None:
                sampler.load_state_dict(of_one)

    def go_on_from_here(self) -> None:
        """Call :meth:`RowSampler.goes_on_from_here` of each, when a checkpoint is loaded."""
        for ref in self.made:
            if (sampler := ref()) is not None:
                sampler.goes_on_from_here()
