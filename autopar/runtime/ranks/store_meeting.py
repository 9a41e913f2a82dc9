"""Ranks that meet in the process group's store, where waiting costs nothing and no collective's time runs out.

While one rank plans or captures for minutes, the others must not wait in a collective: NCCL ends the job when its
time-out (600 seconds by default) is over, and its kernel spins on the GPU until then. In the store a rank looks now and
then whether what it waits for is there.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterator

import torch.distributed as dist

from autopar.errors import RunError, first_few
from autopar.runtime.ranks.ended import SILENT, WITHOUT_A_WORD, ended, say_at_exit
from autopar.runtime.ranks.presence import news_of, within
from autopar.runtime.ranks.pulse import ELSEWHERE_SECONDS, wait_elsewhere
from autopar.runtime.ranks.store_names import name_of, next_number
from autopar.torch_private import default_store, timeout_of_world

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.002, 0.25
"""How long a waiting rank sleeps between two looks: little at first, then longer and longer."""
LEAST_SECONDS = 1800.0
"""How long ranks wait for each other at least, whatever the time-out of collectives is."""
TOLD_AFTER_SECONDS = 60.0
"""After how long a rank that waits says for whom."""
ON_ALL_RANKS = "call the same functions of autopar on all ranks, at the same places"
PIECE_BYTES = 1 << 22
"""Bytes of one entry of the store, which takes 8 MiB at most; longer texts have several entries."""


def _place(ranks: tuple[int, ...]) -> tuple[dist.Store, int]:
    """Return where `ranks` meet next: a part of the store, and the number of the meeting."""
    say_at_exit()
    store = dist.PrefixStore(f"autopar/meeting/{name_of(ranks)}", default_store())
    return store, next_number("meeting", ranks)


def _ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def meet(group: dist.ProcessGroup | None) -> None:
    """Wait until every rank of the group is here.

    Raises:
        RunError: some did not come in time.
    """
    said_by(_ranks_of(group), None)


def any_of(ranks: tuple[int, ...], says: bool) -> bool:
    """Return whether any of `ranks` passes True in `says`; all of them call it, and wait until every one is here.

    Raises:
        RunError: as for :func:`said_by`.
    """
    return bool(said_by(ranks, "so" if says else None))


def said_by(ranks: tuple[int, ...], text: str | None) -> dict[int, str]:
    """Map those of `ranks` that have a text to it; all of them call it, and wait until every one is here.

    Raises:
        RunError: some did not come in time; or one has ended.
    """
    store, number = _place(ranks)
    rank = dist.get_rank()
    if len(ranks) == 1:
        return {} if text is None else {rank: text}
    if text is not None:
        store.set(f"{number}/text {rank}", text)
        store.set(f"{number}/says", "so")
    store.set(f"{number}/{rank}", "here")
    if store.add(f"{number}/count", 1) == len(ranks):
        store.set(f"{number}/all", "here")
    began, told = time.monotonic(), False
    looked = began
    most = max(LEAST_SECONDS, timeout_of_world().total_seconds())
    for _ in looks():
        news = news_of(ranks)  # before the next look: who left because of what was said here, left after that
        how_ended = ended(ranks) if time.monotonic() - began > LONGEST_LOOK_SECONDS else {}
        if store.check([f"{number}/all"]):
            break
        if news:
            raise RunError(news)
        for each, how in how_ended.items():
            if not store.check([f"{number}/{each}"]):
                raise RunError(_gone(each, how))
        waited = time.monotonic() - began
        if waited > ELSEWHERE_SECONDS and time.monotonic() > looked + ELSEWHERE_SECONDS / 4:
            looked, missing = time.monotonic(), [each for each in ranks if not store.check([f"{number}/{each}"])]
            if missing and (elsewhere := wait_elsewhere(missing)):
                raise RunError(f"rank {rank} waited for others, and {elsewhere}: {ON_ALL_RANKS}")
        if waited > most or (waited > TOLD_AFTER_SECONDS and not told):
            told, missing = True, [each for each in ranks if not store.check([f"{number}/{each}"])]
            named = f"{'rank' if len(missing) == 1 else 'ranks'} {first_few([*map(str, missing)])}"
            if waited > most:
                raise RunError(f"rank {rank} waited for {named}, which did not come: {ON_ALL_RANKS}")
            if missing and rank == next(each for each in ranks if each not in missing):
                print(
                    f"autopar: rank {rank} has waited {waited:.0f} s for {named}; it goes on for {most - waited:.0f} s",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    if not store.check([f"{number}/says"]):
        return {}
    speaking = [each for each in ranks if store.check([f"{number}/text {each}"])]
    return {each: store.get(f"{number}/text {each}").decode() for each in speaking}


def _gone(rank: int, how: str) -> str:
    text = f"rank {dist.get_rank()} waited for rank {rank}, which {how}"
    return text if how.startswith((SILENT, WITHOUT_A_WORD)) else f"{text}: {ON_ALL_RANKS}"


def from_all(group: dist.ProcessGroup | None, text: str) -> list[str]:
    """Return the texts of all ranks of the group, in their order, on every one.

    Raises:
        RunError: some did not come in time.
    """
    ranks = _ranks_of(group)
    said = said_by(ranks, text)
    return [said[rank] for rank in ranks]


def from_first(group: dist.ProcessGroup | None, text: str | None) -> str:
    """Return the first rank's text on every rank of the group, however long the first rank takes to come here.

    Raises:
        RunError: the first rank has ended, or has not come in time. Within a call of all of them
            (:func:`~autopar.runtime.ranks.presence.alive`) it has all the time that it lives.
    """
    ranks = _ranks_of(group)
    store, number = _place(ranks)
    if dist.get_rank() == ranks[0]:
        assert text is not None
        sent(store, f"{number}/", text)
        return text
    end = time.monotonic() + max(LEAST_SECONDS, timeout_of_world().total_seconds())
    for _ in looks():
        news, how_ended = news_of(ranks), ended(ranks[:1])
        if (told := received(store, f"{number}/", keep=True)) is not None:
            return told
        if news:
            raise RunError(news)
        if how_ended:
            raise RunError(_gone(ranks[0], how_ended[ranks[0]]))
        if time.monotonic() > end and not within(ranks):
            raise RunError(f"rank {ranks[0]} decides for all ranks, and has not come to it in time")
    raise AssertionError("looks have no end")


def sent(store: dist.Store, key: str, text: str) -> None:
    """Put a text of any length into the store."""
    data = zlib.compress(text.encode(), 1)
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    for i, piece in enumerate(pieces):
        store.set(f"{key}piece {i}", piece)  # type: ignore[arg-type]
    store.set(f"{key}pieces", str(len(pieces)))


def received(store: dist.Store, key: str, keep: bool = False) -> str | None:
    """Take the text stored under a key, and remove it unless others want it; None if it is not there yet."""
    if not store.check([f"{key}pieces"]):
        return None
    names = [f"{key}piece {i}" for i in range(int(store.get(f"{key}pieces")))]
    text = zlib.decompress(b"".join(store.get(name) for name in names)).decode()
    for name in () if keep else (*names, f"{key}pieces"):
        store.delete_key(name)
    return text


def looks() -> Iterator[None]:
    """Yield repeatedly, with a sleep between that becomes longer and longer."""
    seconds = FIRST_LOOK_SECONDS
    while True:
        yield
        time.sleep(seconds)
        seconds = min(1.3 * seconds, LONGEST_LOOK_SECONDS)
