"""Rows of an epoch on other numbers of ranks, from a position on: those that one device would have been given next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from autopar.errors import RunError
from autopar.runtime.batches.row_sampler import RowSampler, Samplers

ROWS, BATCH = range(100), 12


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_it_draws_what_distributed_sampler_draws(ranks: int, drop_last: bool, shuffle: bool) -> None:
    for rank in range(ranks):
        options: Any = {"shuffle": shuffle, "seed": 3, "drop_last": drop_last}
        mine, torchs = RowSampler(ROWS, ranks, rank, **options), DistributedSampler(ROWS, ranks, rank, **options)  # type: ignore[arg-type]
        for epoch in (0, 2):
            mine.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(mine) == list(torchs) and len(mine) == len(torchs)


def batches(
    ranks: int, state: dict[str, int] | None = None, stop: int | None = None, workers: int = 0, together: bool = True
) -> tuple[list[list[int]], dict[str, int]]:
    """The batches of all ranks in an epoch, up to a number of them; and where the samplers are then."""
    samplers = [
        RowSampler(
            ROWS, ranks, rank, shuffle=True, seed=1, drop_last=False, together=BATCH // ranks if together else 1,  # type: ignore[arg-type]
        ) for rank in range(ranks)
    ]  # fmt: skip
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
            assert sampler.state_dict() == state
        sampler.set_epoch(1)
    found = []
    loaders = [iter(DataLoader(ROWS, BATCH // ranks, sampler=s, num_workers=workers)) for s in samplers]  # type: ignore[arg-type]
    for parts in zip(*loaders, strict=True):
        found.append(torch.cat(parts).tolist())
        if len(found) == stop:
            break
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    return found, states[0]


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 6), (1, 2), (6, 1)])
@pytest.mark.parametrize("together", [True, False])
def test_another_number_of_ranks_goes_on_at_the_right_row(before: int, after: int, together: bool) -> None:
    whole, _ = batches(1)
    first, state = batches(before, stop=3, together=together)
    assert state == {"epoch": 1, "rows": 36, "seed": 1, "of": 100}
    second, end = batches(after, state, together=together)
    for mine, right in zip((first + second)[:8], whole[:8], strict=True):
        assert mine == right if together else sorted(mine) == sorted(right)
    assert len(first + second) == len(whole) and end["rows"] >= 100
    assert batches(2, end)[0] == []  # the epoch is over


def test_rows_that_a_loaders_workers_have_asked_for_are_not_given_yet() -> None:
    first, state = batches(2, stop=3, workers=2)
    assert state["rows"] == 36 and (first + batches(3, state)[0])[:8] == batches(1)[0][:8]
    sampler = RowSampler(ROWS, 1, 0, shuffle=False, seed=0, drop_last=False)  # type: ignore[arg-type]
    loader: Any = DataLoader(ROWS, batch_sampler=Pairs(sampler), num_workers=1)  # type: ignore[arg-type]
    next(iter(loader))
    with pytest.raises(RunError, match="has no batch_size; use num_workers=0"):
        sampler.state_dict()


class Pairs:
    """A batch sampler of a script's own."""

    def __init__(self, sampler: RowSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        rows = iter(self.sampler)
        yield from zip(rows, rows, strict=True)


def test_other_data_or_another_seed_is_refused() -> None:
    state = RowSampler(ROWS, 1, 0, shuffle=True, seed=1, drop_last=False).state_dict()  # type: ignore[arg-type]
    for rows, seed, text in ((range(90), 1, "100 rows in the data set, this one 90"), (ROWS, 2, "1 as the sampler's")):
        with pytest.raises(RunError, match=text):
            RowSampler(rows, 1, 0, shuffle=True, seed=seed, drop_last=False).load_state_dict(state)  # type: ignore[arg-type]


def test_a_sampler_that_is_made_after_loading_goes_on_too() -> None:
    def made() -> RowSampler:
        return RowSampler(ROWS, 1, 0, shuffle=True, seed=1, drop_last=False)  # type: ignore[arg-type]

    before, after = Samplers(), Samplers()
    first, gone, third = before.add(made()), before.add(made()), before.add(made())
    del gone
    next(iter(first))
    third.set_epoch(2)
    early = after.add(made())
    after.load_state_dict(before.state_dict())
    assert early.state_dict()["rows"] == 1 and after.add(made()).epoch == 0 and after.add(made()).epoch == 2
