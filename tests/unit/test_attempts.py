"""Ranks that were started again agree on a name, and see nothing of what those before them have left."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from autopar.runtime.ranks import attempts
from autopar.runtime.ranks.attempts import of_attempt

SECONDS = timedelta(seconds=20)


def agreed(store: dist.Store, ranks: int, late: int | None = None) -> list[bytes]:
    """What each rank reads that rank 0 of its attempt has written; in threads, one of them late."""
    read: list[bytes] = [b""] * ranks

    def one(rank: int) -> None:
        if rank == late:
            time.sleep(0.2)
        mine = of_attempt(store, rank, ranks, SECONDS)
        if rank == 0:
            mine.set("address", uuid.uuid4().hex)
        mine.wait(["address"], SECONDS)
        read[rank] = mine.get("address")

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return read


@pytest.mark.parametrize("after", [3, 2, 4, 1])
@pytest.mark.parametrize("late", [None, 0, 1])
def test_each_attempt_reads_its_own(after: int, late: int | None) -> None:
    store = dist.HashStore()
    with mock.patch.object(attempts, "name_attempt"):
        first, second = agreed(store, 3), agreed(store, after, late)
        third = agreed(store, 3)
    assert all(len(set(read)) == 1 and read[0] for read in (first, second, third))
    assert len({first[0], second[0], third[0]}) == 3


def test_one_that_was_killed_while_it_asked_leaves_no_trouble() -> None:
    store = dist.HashStore()
    place = dist.PrefixStore("autopar/attempts", store)
    place.set("asks 1", "a rank that is gone")
    place.set("asks 2", "another one")
    with mock.patch.object(attempts, "name_attempt"):
        assert len(set(agreed(store, 3, late=1))) == 1


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(dist.DistStoreError, match=r"rank 0 waited .* for rank 1, 2 at init_process_group"):
        of_attempt(dist.HashStore(), 0, 3, timedelta(seconds=0.1))
