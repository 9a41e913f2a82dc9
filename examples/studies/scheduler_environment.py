"""A scheduler's decisions as a reinforcement learning environment: gymnasium's interface over autopar's prices.

A cluster trains a model on batches of so many tokens; the length of their sequences changes from step to step. Before
each step a scheduler picks the layout ``(tp, pp, dp)`` of the devices. It sees the length and the memory, and gets the
tokens per second of the step, the move of weights and optimizer state to another layout included. Seconds and memory
are autopar's prices (``autopar.layouts``, the move of ``autopar reshard``), looked up in a :class:`PriceTable`.

With the extra ``autopar[studies]`` the environment is a ``gymnasium.Env``; without gymnasium it has the same ``reset``
and ``step`` and no spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import autopar
from autopar.errors import InfeasibleError, PlanError
from autopar.plans.clusters import get_cluster
from autopar.plans.moving import stored_parameters
from autopar.plans.moving_cost import move

try:
    import gymnasium
    from gymnasium import spaces
except ImportError:  # the interface is the same, but nothing checks it
    gymnasium = spaces = None

BASE: Any = object if gymnasium is None else gymnasium.Env
MOMENTS = 2
"""Tensors of AdamW's state for each parameter, which move with it."""


@dataclass(frozen=True)
class PriceTable:
    """Prices of layouts by length, and of moves between layouts.

    Attributes:
        lengths: tokens of a sequence, by length number ``l``.
        layouts: ``(tp, pp, dp)``, by layout number ``a``.
        seconds: ``[l, a]``, of a step; infinite where a layout cannot cut the batch.
        memory: ``[l, a]``, bytes of the fullest device; infinite where there is no step.
        moves: ``[a, b]``, seconds of moving weights and optimizer state from layout a to b.
        limit: bytes that a device may fill.
        tokens: tokens of a step.
    """

    lengths: tuple[int, ...]
    layouts: tuple[tuple[int, int, int], ...]
    seconds: np.ndarray
    memory: np.ndarray
    moves: np.ndarray
    limit: float
    tokens: int

    @property
    def fits(self) -> np.ndarray:
        """``[l, a]``: whether a layout can do a step and has the memory for it."""
        return np.isfinite(self.seconds) & (self.memory <= self.limit)

    def named(self, layout: int) -> str:
        """Return a layout as people write it."""
        words = zip(("tp", "pp", "dp"), self.layouts[layout])
        return ",".join(f"{word}={n}" for word, n in words if n > 1)


def words_of(layout: tuple[int, int, int]) -> str:
    """Return the words of a layout for ``autopar plan --like``: optimizer state in shards, sequence parallelism."""
    tp, pp, dp = layout
    return f"tp={tp},pp={pp},dp={dp},zero=1" + (",sp" if tp > 1 else "")


def price_table(
    model_of: Callable[[int], torch.nn.Module], cluster: str, lengths: Sequence[int],
    layouts: Sequence[tuple[int, int, int]], tokens: int,
) -> PriceTable:  # fmt: skip
    """Price every layout at every length, and every move between two layouts.

    Args:
        model_of: makes the model for a length, on the meta device; it takes ``input_ids`` and ``labels``.
        tokens: tokens of a step; a multiple of each length.
    """
    where = get_cluster(cluster)
    seconds, memory = (np.full((len(lengths), len(layouts)), np.inf) for _ in range(2))
    limit, stored = 0.0, {}
    for row, length in enumerate(lengths):
        with torch.device("meta"):
            ids = torch.zeros(tokens // length, length, dtype=torch.long)
        of_model = autopar.layouts(model_of(length), {"input_ids": ids, "labels": ids}, precision="bf16-mixed")
        for a, layout in enumerate(layouts):
            try:
                priced = of_model.price(where, words_of(layout))
            except (PlanError, InfeasibleError):  # fewer rows than dp: there is no such step
                continue
            seconds[row, a], memory[row, a], limit = priced.seconds, priced.memory_bytes, priced.limit_bytes
            if a not in stored:  # the layout of parameters does not depend on the length
                stored[a] = stored_parameters(
                    priced.plan, priced.captured.graph, range(where.n_devices), n_moments=MOMENTS
                )
    moves = np.zeros((len(layouts), len(layouts)))
    for a, old in stored.items():
        for b, new in stored.items():
            moves[a, b] = move(old, new, where).seconds if a != b else 0.0
    return PriceTable(tuple(lengths), tuple(layouts), seconds, memory, moves, limit, tokens)


class LayoutScheduling(BASE):
    """The environment: one step is one training step, one episode is one trace.

    An action is the number of a layout. One that does not fit at the step's length is a step that runs out of memory:
    ``misfit_seconds`` pass, no token is trained, and the layout stays what it was. The observation is, in this order:
    the next step's length (one-hot), the present layout (one-hot), and for each layout the part of a device's memory
    that it would fill at that length (at most 2; 2 where there is no such step). The reward is millions of tokens per
    second, of the step and its switch.

    Args:
        table: the prices.
        trace: length number of each step.
        truth: ``[l, a]`` or ``[t, l, a]``, true seconds over priced ones; None where prices are right.
        noise: standard deviation of the logarithm of a step's seconds.
        switch_seconds: seconds of a switch beside the move: new process groups, warming up.
        misfit_seconds: seconds that a step without enough memory costs.
        first: layout number at the beginning.
    """

    metadata: dict[str, Any] = {"render_modes": []}
    render_mode = None

    def __init__(
        self, table: PriceTable, trace: Sequence[int], *, truth: np.ndarray | None = None, noise: float = 0.0,
        switch_seconds: float = 5.0, misfit_seconds: float = 60.0, first: int | None = None,
    ) -> None:  # fmt: skip
        self.table, self.trace, self.noise = table, np.asarray(trace), noise
        ones = np.ones(table.seconds.shape)
        self.truth = np.broadcast_to(ones if truth is None else truth, (len(self.trace), *table.seconds.shape))
        self.switch_seconds, self.misfit_seconds = switch_seconds, misfit_seconds
        self.first = int(np.argmax(table.fits.sum(0))) if first is None else first
        n_lengths, n_layouts = table.seconds.shape
        self.filled = np.minimum(table.memory / table.limit, 2.0).astype(np.float32)
        self.eye = np.eye(n_lengths, dtype=np.float32), np.eye(n_layouts, dtype=np.float32)
        if spaces is not None:
            self.action_space = spaces.Discrete(n_layouts)
            self.observation_space = spaces.Box(0.0, 2.0, (n_lengths + 2 * n_layouts,), np.float32)
        self.rng, self.at, self.layout = np.random.default_rng(0), 0, self.first

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin the trace; ``seed`` sets the noise."""
        if gymnasium is not None:
            super().reset(seed=seed, options=options)
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.at, self.layout = 0, self.first
        return self._observation(), self._info(0.0, 0.0)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Do a training step in a layout; ``info`` has the seconds, those of the switch among them, and the tokens."""
        length, action = self.trace[self.at], int(action)
        if not self.table.fits[length, action]:
            seconds, switch, tokens = self.misfit_seconds, 0.0, 0
        else:
            switch = self.switch(self.layout, action)
            noise = np.exp(self.noise * self.rng.standard_normal() - self.noise**2 / 2)  # its mean is 1
            seconds = float(self.table.seconds[length, action] * self.truth[self.at, length, action] * noise + switch)
            tokens, self.layout = self.table.tokens, action
        self.at += 1
        done = self.at == len(self.trace)
        return self._observation(), tokens / seconds / 1e6, False, done, self._info(seconds, switch, tokens)

    def switch(self, old: int, new: int) -> float:
        """Return the seconds of a switch."""
        return float(self.table.moves[old, new] + self.switch_seconds) if old != new else 0.0

    def _observation(self) -> np.ndarray:
        length = self.trace[min(self.at, len(self.trace) - 1)]
        return np.concatenate((self.eye[0][length], self.eye[1][self.layout], self.filled[length]))

    def _info(self, seconds: float, switch: float, tokens: int = 0) -> dict[str, Any]:
        length = int(self.trace[min(self.at, len(self.trace) - 1)])
        return {"seconds": seconds, "switch_seconds": switch, "tokens": tokens, "length": length,
                "layout": self.layout, "fits": self.table.fits[length]}  # fmt: skip


class Planner:
    """The layouts that take the least time by the prices, switches included, for a trace that is known before."""

    def __init__(self, environment: LayoutScheduling, seconds: np.ndarray | None = None) -> None:
        table, trace = environment.table, environment.trace
        seconds = np.where(table.fits, table.seconds if seconds is None else seconds, np.inf)
        n = len(table.layouts)
        switch = np.array([[environment.switch(a, b) for b in range(n)] for a in range(n)])
        total, came = switch[environment.first] + seconds[trace[0]], []
        for length in trace[1:]:
            by_last = total[:, None] + switch
            came.append(by_last.argmin(0))
            total = by_last.min(0) + seconds[length]
        path = [int(total.argmin())]
        for last in reversed(came):
            path.append(int(last[path[-1]]))
        self.path, self.at = path[::-1], 0

    def choose(self, seen: np.ndarray, info: dict[str, Any]) -> int:
        self.at += 1
        return self.path[self.at - 1]

    def learn(self, info: dict[str, Any], action: int, reward: float, after: dict[str, Any]) -> None:
        """Learn nothing."""
