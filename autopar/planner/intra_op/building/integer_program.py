r"""The problem: strategies, costs and reshard prices as numbers, without graph or torch.

For items ``i`` (operators and parameters, one per fold class), strategies ``s`` and tensors ``t``:

    minimise    sum_i sum_s  x[i,s] * seconds[i,s]  +  sum_t sum_a  y[t,a] * seconds[t,a]  -  sum_o hidden[o]
    such that   sum_s x[i,s] = 1                                            one strategy            (x binary)
                in(v) - out(v) + made(v) - wanted(v) = 0                    a flow per consumer of t
                y[t,a] >= flow[t,c,a]                                       a step is paid once     (y >= 0)
                hidden[o] <= sum_{i in side} sum_s x[i,s] * seconds[o,i,s]      for all sides of every overlap o
                peak >= sum_s x[i,s] * peak_bytes[i,s]                      for every i that has peak bytes
                shared[h] >= sum_{s in rows} x[i,s] - sum_{s in again} x[j,s]   for every user (i, rows) of h
                sum_{s in rows} x[i,s] <= sum_{s in of_rows} x[j,s]             for all that needs what j decides
                sum_i sum_s x[i,s] * bytes[i,s] + sum_h shared[h] * bytes[h] + peak <= limit           memory

The last is one row, or, where moments of a step are given, one for each of them with the bytes of that moment.

where ``a`` are the single-axis steps between states ``v`` of a tensor, ``made(v)`` is the sum of the producer's x over
strategies that make ``v``, ``wanted(v)`` the sum of consumer c's x over strategies that want ``v``. ``j`` is the item
that makes what is held, if it can, with its strategies ``again``, make it again in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import InfeasibleError


@dataclass(frozen=True)
class Item:
    """One decision: an operator (or a chain of operators decided as one) or a parameter.

    ``seconds`` and ``n_bytes`` have one number per strategy and are totals over all nodes of the fold class.
    ``peak_bytes`` are held only for a while: the largest of any item counts, once. Empty if there are none.
    """

    name: str
    seconds: tuple[float, ...]
    n_bytes: tuple[float, ...]
    peak_bytes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """One tensor (of a fold class) between its producer and its consumers.

    Attributes:
        producer: item number; ``made[s]`` is the state number that its strategy ``s`` makes.
        consumers: ``(item number, wanted)`` with ``wanted[s]`` the state number that strategy ``s`` wants.
        steps: ``(from, to, seconds)``; seconds are totals over ``count`` tensors.
    """

    name: str
    producer: int
    made: tuple[int, ...]
    consumers: tuple[tuple[int, tuple[int, ...]], ...]
    steps: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class SharedBytes:
    """Bytes that several items keep in common: held once if any of them picks one of its rows.

    Attributes:
        n_bytes: a total over the tensors of the class.
        users: ``(item number, strategy numbers)``.
        recomputed: the item that makes them with the strategies that recompute them, and so keep nothing for anyone.
    """

    n_bytes: float
    users: tuple[tuple[int, tuple[int, ...]], ...]
    seconds: float = 0.0
    recomputed: tuple[int, tuple[int, ...]] | None = None

    def is_held(self, picked: Sequence[int]) -> bool:
        """Return whether a choice holds the bytes."""
        if self.recomputed is not None and picked[self.recomputed[0]] in self.recomputed[1]:
            return False
        return any(picked[i] in rows for i, rows in self.users)


@dataclass(frozen=True)
class OnlyWith:
    """Strategies ``rows`` of an item that may be picked only with one of the strategies ``of_rows`` of another."""

    item: int
    rows: tuple[int, ...]
    of_item: int
    of_rows: tuple[int, ...]


@dataclass(frozen=True)
class HiddenSeconds:
    """Seconds of sides that overlap, mostly collectives and computation: the shortest side is hidden.

    ``sides`` are ``(item number, seconds per strategy)``, which are parts of the seconds of these items.
    """

    sides: tuple[tuple[tuple[int, tuple[float, ...]], ...], ...]


@dataclass(frozen=True)
class MomentBytes:
    """Bytes at one moment of a step, without the peak: of every item by strategy, and of what items share."""

    items: tuple[tuple[float, ...], ...]
    shared: tuple[float, ...]

    def n_bytes(self, problem: Problem, picked: Sequence[int]) -> float:
        """Return the bytes of a choice, without the peak."""
        of_items = sum(of_item[s] for of_item, s in zip(self.items, picked, strict=True))
        of_shared = zip(self.shared, problem.shared, strict=True)
        return of_items + sum(n_bytes for n_bytes, common in of_shared if n_bytes and common.is_held(picked))


@dataclass(frozen=True)
class Problem:
    """The numbers of an integer program.

    Attributes:
        limit_bytes: each of the ``moments`` must fit it or, where none are given, all bytes together; None: no limit.
        smallest: the fullest moment is minimised, and seconds decide between choices that are equal in it.
    """

    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]
    shared: tuple[SharedBytes, ...] = ()
    limit_bytes: float | None = None
    moments: tuple[MomentBytes, ...] = ()
    smallest: bool = False
    overlaps: tuple[HiddenSeconds, ...] = ()
    only_with: tuple[OnlyWith, ...] = ()

    @property
    def rows(self) -> tuple[MomentBytes, ...]:
        """The moments that must fit."""
        together = MomentBytes(tuple(i.n_bytes for i in self.items), tuple(h.n_bytes for h in self.shared))
        return self.moments or (together,)


ROUNDING = 1e-6
"""Relative distances below this are the solvers' tolerances: such a choice is optimal."""


class NoChoice(InfeasibleError):
    """The strategies that pins leave do not go together."""


class Beaten(Exception):
    """A search that is proven to take longer than a known plan, before its result is found.

    Args:
        seconds: a lower bound of its result, where one is known.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds


@dataclass(frozen=True)
class Choice:
    """One strategy number per item, and the solver's verdict; ``binds`` if more memory may allow a better one."""

    picked: tuple[int, ...]
    objective: float
    bound: float
    status: str
    solver: str
    binds: bool
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Relative distance of the objective to the proven bound."""
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-30)
