"""Placements of stages on ranks."""

from __future__ import annotations


def loop_placement(n_stages: int, n_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Put stage s on rank s mod n_ranks; unequal numbers of stages per rank raise ValueError."""
    _whole(n_stages, n_ranks)
    return tuple(tuple(range(rank, n_stages, n_ranks)) for rank in range(n_ranks))


def v_placement(n_stages: int, n_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Put stages to and fro: 0 1 .. P-1, then P-1 .. 0, and so on.

    With two stages a rank the last one is next to the first.
    """
    _whole(n_stages, n_ranks)
    placed: list[list[int]] = [[] for _ in range(n_ranks)]
    for stage in range(n_stages):
        turn, place = divmod(stage, n_ranks)
        placed[place if turn % 2 == 0 else n_ranks - 1 - place].append(stage)
    return tuple(tuple(stages) for stages in placed)


def _whole(n_stages: int, n_ranks: int) -> None:
    if n_ranks < 1 or n_stages < 1 or n_stages % n_ranks:
        raise ValueError(
            f"{n_stages} stages on {n_ranks} ranks: every rank must hold the same number of stages; "
            f"use {max(1, round(n_stages / max(1, n_ranks))) * max(1, n_ranks)} stages, or as many ranks as divide them"
        )
