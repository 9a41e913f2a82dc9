"""Seconds of local ops, measured in the order and the circumstances in which a program runs them.

A round runs a sequence of ops as a stage runs a microbatch: every op once forward, its outputs kept; then every op once
backward, last first, each with its autograd graph. Inputs were just written, as by the op before; parameters were last
read a round ago; outputs are fresh memory. The measured interval is the call from Python, as an emitted program makes
it. Seconds are those that the calling thread has worked, so other load counts only by its use of caches and bandwidth;
on a GPU, those of its stream (:mod:`.clock`). The price of entering autograd's engine (once per microbatch in a
program) is subtracted from a backward. All processes measure at the same time, since they share memory and its
bandwidth when they train, and each starts at another place of the sequence, since then too they run different ops.

Every third round runs the backward in two halves: first the gradients of activations, then those of parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from autopar.profiling.clock import Clock
from autopar.profiling.ops import LocalOp, TensorArgument, values_of
from autopar.profiling.quiet import QUIET, CpuWatch, quietest, until_quiet
from autopar.rules.local_calls import Seed, resolve
from autopar.rules.operator_call import In
from autopar.words.trees import PyTree

LEAST_ROUNDS, MOST_ROUNDS = 3, 30
"""Most rounds of a sequence after the first, which is not counted; every third splits the backward."""
ENOUGH_ROUNDS = 6
"""Rounds on a quiet machine after which a measurement no longer waits for quiet."""

Round = tuple[bool, float, "dict[str, Taken]"]
"""``(backward was split, CPUs that others kept busy, seconds of every op)``."""


@dataclass
class Taken:
    """Seconds of one op, every time that it was measured."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, another: Taken) -> None:
        """Add the measurements of another round."""
        for mine, more in ((self.forward, another.forward), (self.backward, another.backward),
                          (self.inputs, another.inputs), (self.weights, another.weights)):  # fmt: skip
            mine.extend(more)

    def medians(self) -> tuple[float, float, float, float]:
        """Return the medians of forward, backward, and its halves; 0 without measurements."""
        rows = (self.forward, self.backward, self.inputs, self.weights)
        forward, backward, inputs, weights = (median(row) if row else 0.0 for row in rows)
        return forward, backward, inputs, weights


class _Live:
    """An op in a round: its tensors, and the results of its forward."""

    def __init__(
        self, op: LocalOp, params: dict[int, torch.Tensor], sources: dict[TensorArgument, torch.Tensor], clock: Clock
    ) -> None:
        self.op, self.sources, self.clock = op, sources, clock
        self.fn = resolve(op.fn) if isinstance(op.fn, str) else op.fn
        self.kept: PyTree = None
        self.params = params
        self.roots: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []

    def forward(self) -> float:
        """Return the seconds of the forward."""
        op, values, seed = self.op, [], torch.tensor(7, device=self.clock.device)
        self.leaves = []
        for i, tensor in enumerate(op.ins):
            if i in self.params:
                values.append(self.params[i])
                continue
            value = self.sources[tensor].clone()
            if tensor.grad:
                value.requires_grad_(True)
                self.leaves.append(value)
            values.append(value)

        def fill(value: PyTree) -> PyTree:
            if isinstance(value, In):
                return values[value.position]
            if isinstance(value, Seed):
                return seed
            if isinstance(value, (tuple, list)):
                return type(value)(fill(v) for v in value)
            return value

        args, kwargs = fill(op.args), {k: fill(v) for k, v in op.kwargs.items()}
        fn = self.fn
        worked = self.clock.work()
        result = fn(*args, **kwargs)
        seconds = worked()
        outs = result if isinstance(result, (tuple, list)) else (result,)
        self.roots = [x for x in outs if isinstance(x, torch.Tensor) and x.requires_grad]
        self.kept = result
        return seconds

    def runs(self, failed: dict[str, str]) -> bool:
        """Return True if the op runs on generated values."""
        try:
            self.forward()
            if self.roots:
                self.backward()
        except Exception as error:  # any kernel may fail for any reason: report it and leave out the op
            failed[self.op.key] = str(error).strip().split("\n")[0]
            return False
        self.roots, self.leaves, self.kept = [], [], None
        return True

    def gradients(self) -> list[torch.Tensor]:
        """Return freshly written gradients of the outputs that have any."""
        return [torch.full_like(x, 1e-3) for x in self.roots]

    def backward(self) -> float:
        """Return the seconds of the whole backward, including freeing its memory."""
        roots, grads = self.roots, self.gradients()
        self.roots, self.kept = [], None
        worked = self.clock.work()
        torch.autograd.backward(roots, grads)
        del roots, grads
        seconds = worked()
        self.leaves = []
        for param in self.params.values():
            param.grad = None
        return seconds

    def half(self, wanted: Sequence[torch.Tensor]) -> float:
        """Return the seconds of the gradients of some inputs alone."""
        grads = self.gradients()
        worked = self.clock.work()
        gradients = torch.autograd.grad(self.roots, list(wanted), grads, retain_graph=True, allow_unused=True)
        del grads
        seconds = worked()
        del gradients
        return seconds


def measure_pass(
    ops: Sequence[LocalOp], seconds: float, failed: dict[str, str], clock: Clock, before: Sequence[Round] = (),
    note: Callable[[Sequence[Round]], None] | None = None,
) -> tuple[dict[str, Taken], float]:  # fmt: skip
    """Measure a sequence of ops on all ranks at once for about `seconds`.

    Also return the CPUs that others kept busy in the busiest round that counts. ``failed`` gets the reasons why ops do
    not run alone, by key; ``before`` are rounds of an interrupted measurement; ``note`` is given all rounds after each
    one.
    """
    began = CpuWatch()
    sources = {t: values_of(t).to(clock.device) for op in ops for t in op.ins}
    lives = _turned(_running(ops, sources, failed, clock, seconds))
    entry = engine_seconds(clock)
    rounds, pieces = list(before), 1
    for number in range(-1, MOST_ROUNDS - len(before)):
        split = (len(before) + number) % 3 == 2
        spent = began.others()[1]
        if number > 0 and sum(others <= QUIET for _, others, _ in rounds) < ENOUGH_ROUNDS and rounds[-1][1] > QUIET:
            until_quiet((seconds - spent) / 4)
        watch = CpuWatch()
        of_round, pieces = _round_that_fits(lives, entry, split, pieces, failed, clock)
        others, took = watch.others()  # all ranks wait here, so they start rounds at once
        if number >= 0:
            rounds.append((split, others, of_round))
            if note is not None:
                note(rounds)
        if len(rounds) >= LEAST_ROUNDS and began.others()[1] + took > seconds:
            break
    taken = {live.op.key: Taken() for live in lives if live.op.key not in failed}
    kept = [r for way in (False, True) for r in quietest([r for r in rounds if r[0] is way], lambda r: r[1], 2)]
    for _, _, of_round in kept:
        for key in taken.keys() & of_round.keys():
            taken[key].add(of_round[key])
    return taken, max(r[1] for r in kept)


def _running(
    ops: Sequence[LocalOp], sources: dict[TensorArgument, torch.Tensor], failed: dict[str, str], clock: Clock,
    seconds: float,
) -> list[_Live]:  # fmt: skip
    """Return the ops that run on generated values, each tried once, for at most half of the time."""
    lives: list[_Live] = []
    tried: set[str] = set()
    began = time.perf_counter()
    for op in ops:
        params = {
            i: values_of(t).to(clock.device).requires_grad_(t.grad) for i, t in enumerate(op.ins) if t.param
        }  # fmt: skip
        live = _Live(op, params, sources, clock)
        if op.key not in tried and op.key not in failed and time.perf_counter() - began > seconds / 2:
            failed[op.key] = f"the time was over before it was tried; give more than {seconds:.0f} s"
        if op.key not in failed and (op.key in tried or live.runs(failed)):
            lives.append(live)
        tried.add(op.key)
    return lives


def _round_that_fits(
    lives: list[_Live], entry: float, split: bool, pieces: int, failed: dict[str, str], clock: Clock
) -> tuple[dict[str, Taken], int]:
    """Run a round, divided into parts that fit into the device's memory; also return the number of parts.

    An op that does not fit even alone is left out from then on.
    """
    while True:
        of_round = {live.op.key: Taken() for live in lives}
        size = max(1, -(-len(lives) // pieces))
        at = 0
        try:
            for at in range(0, len(lives), size):
                _round(lives[at : at + size], of_round, entry, split=split)
            return of_round, pieces
        except torch.OutOfMemoryError as error:
            reason = str(error).split("\n")[0]
        for live in lives:
            live.roots, live.leaves, live.kept = [], [], None
        if size == 1:
            failed[lives[at].op.key] = reason
            lives[:] = [live for live in lives if live.op.key not in failed]
        pieces *= 2
        clock.free()


def _turned(lives: list[_Live]) -> list[_Live]:
    """Return the sequence rotated to this rank's start: while ranks train, they run different ops at a time."""
    if not dist.is_initialized():
        return lives
    share = sum(sum(live.op.seconds) for live in lives) * dist.get_rank() / dist.get_world_size()
    for first, live in enumerate(lives):
        share -= sum(live.op.seconds)
        if share < 0:
            return [*lives[first:], *lives[:first]]
    return lives


def _round(lives: Sequence[_Live], taken: dict[str, Taken], entry: float, *, split: bool) -> None:
    for live in lives:
        taken[live.op.key].forward.append(live.forward())
    if not split:
        for live in reversed(lives):
            if live.roots:
                taken[live.op.key].backward.append(max(0.0, live.backward() - entry))
            live.kept = None
        return
    for live in reversed(lives):
        if live.roots and live.leaves:
            taken[live.op.key].inputs.append(max(0.0, live.half(live.leaves) - entry))
    for live in reversed(lives):
        params = [p for p in live.params.values() if p.requires_grad]
        if live.roots and params:
            taken[live.op.key].weights.append(max(0.0, live.half(params) - entry))
        live.roots, live.leaves, live.kept = [], [], None


def engine_seconds(clock: Clock) -> float:
    """Return the seconds of entering autograd for a backward of almost nothing."""
    times = []
    for _ in range(200):
        x = torch.zeros(1, requires_grad=True, device=clock.device)
        y, grad = x.view_as(x), torch.ones(1, device=clock.device)
        worked = clock.work()
        torch.autograd.backward([y], [grad])
        times.append(worked())
    return median(times) - view_seconds(clock)


def view_seconds(clock: Clock) -> float:
    """Return the seconds of one more node, such as a view, in the backward."""
    times: dict[int, list[float]] = {1: [], 65: []}
    for n in [1, 65] * 50:
        y = x = torch.zeros(1, requires_grad=True, device=clock.device)
        for _ in range(n):
            y = y.view_as(x)
        grad = torch.ones(1, device=clock.device)
        worked = clock.work()
        torch.autograd.backward([y], [grad])
        times[n].append(worked())
    return max(0.0, (median(times[65]) - median(times[1])) / 64)
