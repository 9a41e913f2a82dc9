"""Ranks that meet in the process group's store, where waiting costs nothing and no collective's time runs out.

While one rank plans or captures for minutes, the others must not wait in a collective: NCCL ends the job when its
time-out (600 seconds by default) is over, and its kernel spins on the GPU until then. In the store a rank looks now and
then whether what it waits for is there.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from autopar.errors import RunError
from autopar.torch_private import default_store, timeout_of_world

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.002, 0.25
"""How long a waiting rank sleeps between two looks: little at first, then longer and longer."""
LEAST_SECONDS = 1800.0
"""How long ranks wait for each other at least, whatever the time-out of collectives is."""
BEAT_SECONDS = 5.0
"""How often a rank that the others wait for shows that it is alive."""
PIECE_BYTES = 1 << 22
"""Bytes of one entry of the store, which takes 8 MiB at most; longer texts have several entries."""

_worlds: dict[str, Any] = {}
_numbers: dict[tuple[int, ...], Iterator[int]] = {}


def _store(ranks: Sequence[int]) -> dist.Store:
    """The part of the store where these ranks meet."""
    name = "-".join(map(str, ranks)) if len(ranks) < 9 else f"{len(ranks)} {zlib.crc32(repr(ranks).encode())}"
    return dist.PrefixStore(f"autopar/meeting/{name}", default_store())


def _place(ranks: tuple[int, ...]) -> tuple[dist.Store, int]:
    """Where these ranks meet next: a part of the store, and the number of the meeting."""
    if _worlds.get("last") is not dist.group.WORLD:
        _worlds["last"] = dist.group.WORLD
        _numbers.clear()
    return _store(ranks), next(_numbers.setdefault(ranks, itertools.count()))


def _ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def meet(group: Any) -> None:
    """Wait until every rank of the group is here.

    Raises:
        RunError: some did not come in time.
    """
    any_of(_ranks_of(group), False)


def any_of(ranks: tuple[int, ...], says: bool) -> bool:
    """Whether one of these ranks says so; all of them call it, and wait until every one is here.

    Raises:
        RunError: some did not come in time.
    """
    store, number = _place(ranks)
    if len(ranks) == 1:
        return says
    rank = dist.get_rank()
    if says:
        store.set(f"{number}/says", "so")
    store.set(f"{number}/{rank}", "here")
    if store.add(f"{number}/count", 1) == len(ranks):
        store.set(f"{number}/all", "here")
    end = time.monotonic() + max(LEAST_SECONDS, timeout_of_world().total_seconds())
    for _ in _looks():
        if store.check([f"{number}/all"]):
            break
        if time.monotonic() > end:
            missing = [each for each in ranks if not store.check([f"{number}/{each}"])]
            raise RunError(
                f"rank {rank} waited for {'rank' if len(missing) == 1 else 'ranks'} "
                f"{', '.join(map(str, missing))}, which did not come: call the same functions of autopar on all ranks"
            )
    return bool(store.check([f"{number}/says"]))


def from_all(group: Any, text: str) -> list[str]:
    """The texts of all ranks of the group, in their order, on every one.

    Raises:
        RunError: some did not come in time.
    """
    ranks = _ranks_of(group)
    store, number = _place(ranks)
    store.set(f"{number}/text {dist.get_rank()}", text)
    any_of(ranks, False)
    return [store.get(f"{number}/text {rank}").decode() for rank in ranks]


def from_first(group: Any, text: str | None) -> str:
    """The first rank's text on every rank of the group, however long the first rank takes to come here.

    Raises:
        RunError: the first rank has shown no sign of life for a long time (:func:`alive`).
    """
    ranks = _ranks_of(group)
    store, number = _place(ranks)
    if dist.get_rank() == ranks[0]:
        assert text is not None
        data = zlib.compress(text.encode(), 1)
        pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
        for i, piece in enumerate(pieces):
            store.set(f"{number}/piece {i}", piece)  # type: ignore[arg-type]
        store.set(f"{number}/pieces", str(len(pieces)))
        return text
    silence = max(LEAST_SECONDS, timeout_of_world().total_seconds())
    beats, heard, looked = -1, time.monotonic(), 0.0
    for _ in _looks():
        if store.check([f"{number}/pieces"]):
            break
        now = time.monotonic()
        if now - looked > BEAT_SECONDS:
            looked, count = now, store.add("beats", 0)
            beats, heard = count, now if count != beats else heard
        if now - heard > silence:
            raise RunError(f"rank {ranks[0]} decides for all ranks, and has not been heard of for {silence:g} s")
    count = int(store.get(f"{number}/pieces"))
    return zlib.decompress(b"".join(store.get(f"{number}/piece {i}") for i in range(count))).decode()


@contextlib.contextmanager
def alive(group: Any) -> Iterator[None]:
    """While the first rank of a group does in this context what the others wait for, they hear that it is alive."""
    if dist.get_world_size(group) == 1 or dist.get_rank(group) != 0:
        yield
        return
    store = _store(_ranks_of(group))
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # the store may be gone
            while not done.wait(BEAT_SECONDS):
                store.add("beats", 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _looks() -> Iterator[None]:
    """Between two looks, sleep; longer and longer."""
    seconds = FIRST_LOOK_SECONDS
    while True:
        yield
        time.sleep(seconds)
        seconds = min(1.3 * seconds, LONGEST_LOOK_SECONDS)


__all__ = ["alive", "any_of", "from_all", "from_first", "meet"]
