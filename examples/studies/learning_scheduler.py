"""A scheduler that learns layouts by trying them, next to the planner, which has autopar's prices.

``python examples/studies/learning_scheduler.py [plot.svg]`` prices layouts (tp, pp, dp) of Llama-3-8B on 64 H100 for
sequences of 2k to 32k tokens, and lets a bandit, a policy gradient and a planner that learns schedule traces of these
lengths (:mod:`scheduler_environment`). docs/studies/learning_scheduler.md has the result and what it assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotting
import torch
from scheduler_environment import LayoutScheduling, Planner, PriceTable, price_table
from torch import nn

CLUSTER, TOKENS, LENGTHS = "dgx-h100-x8", 2**20, (2048, 8192, 16384, 32768)
LAYOUTS = ((1, 1, 64), (1, 2, 32), (1, 4, 16), (2, 1, 32), (2, 2, 16), (4, 1, 16), (4, 2, 8), (8, 1, 8))
SHARES = (0.4, 0.3, 0.2, 0.1)
"""Of the lengths among the stays of a stationary trace."""
STEPS, SEEDS, NEAR, WINDOW = 3000, 2, 0.95, 250
STAY, NOISE = 100, 0.05
"""Steps for which a length stays, and noise of a step, where nothing else is said."""
BELIEVED_ERROR, BELIEVED_NOISE = 0.1, 0.1
"""What the planner that learns believes of its prices, and of a step."""


def llama_8b(length: int) -> nn.Module:
    """The model of Llama-3-8B's sizes, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def trace_of(steps: int, stay: int, draw: np.random.Generator, drifts: bool, n: int) -> np.ndarray:
    """Return one of `n` lengths for each step; each stays for `stay` steps. ``drifts``: from short to long ones."""
    shares = np.array(SHARES[:n]) / sum(SHARES[:n])
    parts = np.arange(0, steps, stay) / steps
    mixed = [(1 - part) * shares + part * shares[::-1] if drifts else shares for part in parts]
    return np.repeat([draw.choice(n, p=share) for share in mixed], stay)[:steps]


def truths(table: PriceTable, error: float, draw: np.random.Generator, steps: int, every: int = 0) -> np.ndarray:
    """Return true seconds over priced ones, ``[t, l, a]``: wrong by `error`, and others after `every` steps (0: never).

    A layout is off by a factor of its own, and by one at each length; both have half of the variance.
    """
    def drawn() -> np.ndarray:
        n_lengths, n_layouts = table.seconds.shape
        of_layout, own = draw.standard_normal((1, n_layouts)), draw.standard_normal((n_lengths, n_layouts))
        return np.exp(error * math.sqrt(0.5) * (of_layout + own))

    return np.repeat([drawn() for _ in range(0, steps, every or steps)], every or steps, 0)[:steps]


# --- who schedules


class Bandit:
    """Discounted UCB with a table for each length. It has no prices; it is told what fits if `told`."""

    def __init__(self, environment: LayoutScheduling, told: bool = True, discount: float = 0.999, width: float = 0.05):
        self.sums, self.counts = (np.zeros(environment.table.seconds.shape) for _ in range(2))
        self.told, self.discount, self.width = told, discount, width

    def choose(self, seen: np.ndarray, info: dict[str, Any]) -> int:
        counts = np.maximum(self.counts[info["length"]], 1e-9)
        means = self.sums[info["length"]] / counts
        bound = means + self.width * max(means.max(), 1e-9) * np.sqrt(np.log(1 + counts.sum()) / counts)
        return int(np.argmax(np.where(info["fits"] | (not self.told), bound, -1.0)))

    def learn(self, info: dict[str, Any], action: int, reward: float, after: dict[str, Any]) -> None:
        self.sums *= self.discount
        self.counts *= self.discount
        self.sums[info["length"], action] += reward
        self.counts[info["length"], action] += 1


class PolicyGradient:
    """REINFORCE on a net with one hidden layer, which sees the state; it has no prices, and is told what fits."""

    def __init__(self, environment: LayoutScheduling, batch: int = 16, horizon: float = 0.5) -> None:
        n_lengths, n_layouts = environment.table.seconds.shape
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(n_lengths + 2 * n_layouts, 64), nn.Tanh(), nn.Linear(64, n_layouts))
        self.optimizer = torch.optim.Adam(self.net.parameters(), 2e-2)
        self.batch, self.horizon, self.usual = batch, horizon, np.zeros(n_lengths)
        self.draw, self.kept = np.random.default_rng(1), []

    def choose(self, seen: np.ndarray, info: dict[str, Any]) -> int:
        self.seen = torch.as_tensor(seen), torch.as_tensor(info["fits"])
        with torch.no_grad():
            chances = self.net(self.seen[0]).masked_fill(~self.seen[1], -torch.inf).softmax(-1).double().numpy()
        return int(self.draw.choice(len(chances), p=chances / chances.sum()))

    def learn(self, info: dict[str, Any], action: int, reward: float, after: dict[str, Any]) -> None:
        length = info["length"]
        self.usual[length] += 0.05 * (reward - self.usual[length]) if self.usual[length] else reward
        self.kept.append((*self.seen, action, reward / self.usual[length] - 1))
        if len(self.kept) < self.batch:
            return
        seen, fits, actions, gains = zip(*self.kept)
        returns = [0.0]
        for gain in reversed(gains):
            returns.append(gain + self.horizon * returns[-1])
        value = torch.tensor(returns[:0:-1], dtype=torch.float32)
        logs = self.net(torch.stack(seen)).masked_fill(~torch.stack(fits), -1e9).log_softmax(-1)
        taken = logs[torch.arange(self.batch), torch.tensor(actions)]
        entropy = -(logs.exp() * logs).sum(-1)
        loss = -(taken * (value - value.mean()) + 0.001 * entropy).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.kept = []


class LearningPlanner:
    """Thompson sampling around the prices: a belief about how far each is off, and switches that must pay.

    A switch pays over the steps for which a length has stayed so far. ``forgets``: variance that each step adds.
    """

    def __init__(self, environment: LayoutScheduling, forgets: float = 1e-5) -> None:
        self.environment, self.forgets, self.draw = environment, forgets, np.random.default_rng(2)
        shape = environment.table.seconds.shape
        self.off, self.variance = np.zeros(shape), np.full(shape, BELIEVED_ERROR**2)
        self.steps, self.stays, self.last = 0, 1, -1

    def choose(self, seen: np.ndarray, info: dict[str, Any]) -> int:
        length, env = info["length"], self.environment
        if length != self.last:  # one belief for a stay: another one at each step would switch at each
            self.sample = self.draw.standard_normal(len(self.off[length]))
        self.steps, self.stays, self.last = self.steps + 1, self.stays + (length != self.last), length
        off = self.off[length] + np.sqrt(self.variance[length]) * self.sample
        seconds = np.where(info["fits"], env.table.seconds[length] * np.exp(off), np.inf)
        switch = [env.switch(info["layout"], a) for a in range(len(seconds))]
        return int(np.argmin(seconds + np.array(switch) / max(1.0, self.steps / self.stays)))

    def learn(self, info: dict[str, Any], action: int, reward: float, after: dict[str, Any]) -> None:
        at = info["length"], action
        found = math.log((after["seconds"] - after["switch_seconds"]) / self.environment.table.seconds[at])
        self.variance = np.minimum(self.variance + self.forgets, BELIEVED_ERROR**2)
        weight = self.variance[at] / (self.variance[at] + BELIEVED_NOISE**2)
        self.off[at] += weight * (found - self.off[at])
        self.variance[at] *= 1 - weight


LEARNERS = {"bandit (UCB)": Bandit, "policy gradient": PolicyGradient, "planner that learns": LearningPlanner}
UNTOLD = {"bandit not told what fits": lambda env: Bandit(env, told=False)}
TRUE = {"planner with true speeds": lambda env: Planner(env, env.table.seconds * env.truth[0])}


# --- trials


def run(environment: LayoutScheduling, scheduler: Any, seed: int) -> np.ndarray:
    """Return tokens and seconds of each step, ``[t, 2]``."""
    seen, info = environment.reset(seed=seed)
    done, rows = False, []
    while not done:
        action = scheduler.choose(seen, info)
        seen, reward, _, done, after = environment.step(action)
        scheduler.learn(info, action, reward, after)
        rows.append((after["tokens"], after["seconds"]))
        info = after
    return np.array(rows)


def rate(rows: np.ndarray) -> float:
    return float(rows[:, 0].sum() / rows[:, 1].sum())


def near_from(rows: np.ndarray, planner: np.ndarray, window: int) -> float:
    """Return the step from which on every window of steps is within 5% of the planner's; infinite for none."""
    good = [rate(rows[k : k + window]) >= NEAR * rate(planner[k : k + window]) for k in range(0, len(rows), window)]
    first = max((k + 1 for k, near in enumerate(good) if not near), default=0)
    return first * window if first < len(good) else math.inf


def trial(
    table: PriceTable, learners: dict[str, Any], *, steps: int = STEPS, seeds: int = SEEDS, stay: int = STAY,
    noise: float = NOISE, error: float = 0.0, every: int = 0, drifts: bool = False,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Return by learner its tokens/s over the planner's in the second half, and from which step on it is near."""
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        trace = trace_of(steps, stay, draw, drifts, len(table.lengths))
        environment = LayoutScheduling(table, trace, truth=truths(table, error, draw, steps, every), noise=noise)
        planner = run(environment, Planner(environment), seed)
        for name, make in learners.items():
            rows = run(environment, make(environment), seed)
            ratio = rate(rows[steps // 2 :]) / rate(planner[steps // 2 :])
            found.setdefault(name, []).append((ratio, near_from(rows, planner, min(WINDOW, steps // 4))))
    return {name: tuple(map(float, np.mean(of_seeds, 0))) for name, of_seeds in found.items()}


Trials = dict[str, dict[float, dict[str, tuple[float, float]]]]


def study(table: PriceTable, **sizes: int) -> Trials:
    """Return the trials by what changes and its value; ``sizes``: ``steps`` and ``seeds``."""
    kinds: dict[str, tuple[Sequence[float], Callable[[float], dict[str, Any]]]] = {
        "noise": ((0.02, 0.1, 0.3, 1.0), lambda x: {"noise": x}),
        "noise, lengths drift": ((0.1,), lambda x: {"noise": x, "drifts": True}),
        "steps that a length stays": ((1, 10, 30, 100, 300), lambda x: {"stay": int(x)}),
        "error of prices": ((0.05, 0.1, 0.2, 0.4), lambda x: {"error": x}),
        "steps that speeds stay": ((100, 300, 1000, 3000), lambda x: {"error": 0.2, "every": int(x)}),
    }
    found: Trials = {}
    for kind, (values, of_value) in kinds.items():
        for x in values:
            learners = LEARNERS | (UNTOLD if "noise" in kind else TRUE if "error" in kind else {})
            found.setdefault(kind, {})[x] = row = trial(table, learners, **of_value(x), **sizes)
            cells = (f"{name} {ratio:.3f} from {near:.0f}" for name, (ratio, near) in row.items())
            print(f"{kind} {x:g}: " + ", ".join(cells), flush=True)
    return found


def main(plot: Path | None) -> None:
    table = price_table(llama_8b, CLUSTER, LENGTHS, LAYOUTS, TOKENS)
    for length, seconds, memory in zip(table.lengths, table.seconds, table.memory):
        cells = (f"{table.named(a)} {s:.2f} s, {m / 2**30:.0f} GiB" for a, (s, m) in enumerate(zip(seconds, memory)))
        print(f"{length} tokens: {'; '.join(cells)}")
    print(f"limit {table.limit / 2**30:.1f} GiB; moves of {table.moves[table.moves > 0].min():.3f} s and more")
    draw_plot(study(table), plot)


def draw_plot(found: Trials, plot: Path | None) -> None:
    panels = [
        plotting.Panel(kind, kind, "tokens/s over the planner's",
                       [plotting.Line(name, [(x, row[name][0]) for x, row in found[kind].items()])
                        for name in LEARNERS], log_x=True)
        for kind in ("steps that a length stays", "error of prices", "steps that speeds stay")
    ]  # fmt: skip
    if plot is not None:
        plotting.write(plot, panels)


if __name__ == "__main__":
    plotting.run(main)
