"""A pipeline that never drains: PipeDream and PipeDream-2BW (:mod:`cost_models.schedules.asynchronous` defines both).

A call of ``train_step`` brings a batch. Stage s of S does its forwards, each followed by the backward of the microbatch
S - 1 - s before it, so that a batch's last backwards on a stage are in the next call, or in :meth:`Stream.drain`. The
stage is updated right behind the backward that completes its gradient, by the optimizer that the call was given, with
the learning rate (and the other options that schedulers change) of the call that brought the batch. Nothing in a call
waits for other ranks but messages between stages: the loss is a tensor that is waited for when it is read.

Between calls stages have weights of different updates. Whatever reads or writes a whole model is refused there until
``drain()`` has emptied the pipeline; the next call then begins a stream anew, with the weights of now as version 0.
"""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.errors import RunError
from autopar.plans.weight_versions import check_asynchronous
from autopar.runtime.gradients.reached import Reached
from autopar.runtime.pipelines.pipeline_runs import PipelineBatches
from autopar.runtime.pipelines.ready_runs import Ready
from autopar.runtime.pipelines.stage_in_flight import Flight
from autopar.runtime.pipelines.weight_versions import WeightVersions
from autopar.runtime.pipelines.wires import Post, pairs_of
from autopar.torch_private import functional_collectives
from autopar.words.trees import PyTree
from cost_models.schedules.actions import KINDS, Action

SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""Options of an optimizer that schedulers change; a batch's update has those of the call that brought it."""
UNDER_WAY = 2
"""Calls whose losses, and seeds, need not have gone around: of those before, all ranks have done their parts."""

Options = list[dict[str, Any]]


class AsynchronousSteps(PipelineBatches):
    """The steps of a pipeline that never drains.

    Attributes:
        stream: the batches that are in flight; None before the first one.
    """

    stream: Stream | None = None

    def step_of_stream(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
    ) -> torch.Tensor:  # fmt: skip
        """Bring a batch; arguments as of ``ParallelModule.train_step``.

        Returns:
            The loss of the batch, of the weights that it was computed with: it is waited for when it is read.

        Raises:
            RunError: no optimizer, a scaler, a batch that is not the planned one, or a stream that has broken off.
        """
        name = self.plan.schedule.name
        self.check_trains()
        if not optimizers:
            raise RunError(
                f"schedule '{name}' updates each stage's weights within train_step, while other microbatches are in "
                "flight: call train_step(*batch, optimizer=optimizer), without step() and zero_grad() of your own"
            )
        if scaler is not None:
            raise RunError(
                f"schedule '{name}' with a GradScaler: whether a step is skipped depends on the gradients of all "
                "stages, which are updated at different times; train in bfloat16, which needs none, or with schedule "
                "1f1b"
            )
        stream = self.stream
        if stream is not None:
            stream.check_whole()
            stream.check_unwritten(optimizers)
        with self.all_in_step("train_step"):
            ready = self.ready_runs(args, kwargs, "to train on")
            numbers = [each.run.microbatches for each in ready]
            if numbers != [self.plan.microbatches] or self.plan.schedule.name != name:
                counts = " and ".join(map(str, numbers))
                raise RunError(
                    f"the batch makes {counts} microbatches of the planned size, and a step of schedule '{name}' has "
                    f"{self.plan.microbatches}: leave out the last, smaller batch of an epoch (drop_last=True)"
                )
            if stream is None or stream.stages is not self.stages:
                if stream is not None:
                    stream.check_at_rest("a batch of other shapes, or a model with other values, than those in flight")
                stream = self.stream = Stream(self)
            ready[0].batch.check_planned(ready[0].callers)
            with stream.seeding() as taken:
                seeds = self.seeds_of(ready)[0]
            return stream.step(ready[0], seeds, optimizers, taken)

    def drain(self) -> None:
        """Empty the pipeline of an asynchronous schedule; of others it is empty after each step."""
        if self.stream is not None and not self.stream.at_rest:
            self.stream.check_whole()
            with self.all_in_step("drain"):
                self.stream.drain()

    def check_at_rest(self, what: str) -> None:
        """Refuse what needs the model as a whole while microbatches of an asynchronous schedule are in flight."""
        if self.stream is not None:
            self.stream.check_at_rest(what)


class Stream:
    """Batches on their way through the stages, from an empty pipeline to the next time that it is empty.

    Attributes:
        stages: this rank's, as the run has them.
        begun: batches that were brought.
    """

    def __init__(self, pm: PipelineBatches) -> None:
        schedule = pm.plan.schedule
        self.pm, self.stages, self.name = pm, pm.stages, schedule.name
        self.in_2bw = self.name == "pipedream-2bw"
        self.n_stages, self.microbatches = schedule.n_stages, schedule.n_microbatches
        check_asynchronous(schedule, pm.parts, pm.plan.stages)
        ((self.stage_number, stage),) = pm.stages.items()
        wires, _ = pm.lines
        self.group_of = {d: s for s, of_stage in enumerate(pm.plan.stages) for d in of_stage.devices}
        self.wires = wires
        self.post = self._empty_post()
        self.flight = Flight(
            pm.parts[self.stage_number], stage, wires, (), pm.work.input_gradients,
            leads=pm.rank == pm.plan.stages[self.stage_number].devices[0],
        )  # fmt: skip
        self.everyone = pm.work.everyone
        self.shares: dict[int, float] = {}
        self.options: dict[int, Options] = {}
        self.optimizers: Sequence[torch.optim.Optimizer] = ()
        self.told: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.begun = 0
        self.versions: WeightVersions | None = None
        self.broken = ""
        self.left = [0]  # batches that are not finished, for a warning at the end of the process
        if pm.rank == 0:
            weakref.finalize(self, _warn_of_left, self.name, self.left)

    def _empty_post(self) -> Post:
        pm, channels = self.pm, self.pm.groups.channels(pairs_of(self.wires))
        return Post(pm.rank, pm.device, self.wires, self.microbatches, {}, channels=channels)

    # -- what may be done when

    @property
    def at_rest(self) -> bool:
        """Nothing is in flight."""
        return not self.begun and not self.broken

    def check_whole(self) -> None:
        """Refuse to go on behind a step that has broken off.

        Raises:
            RunError: it says where that was.
        """
        if self.broken:
            raise RunError(
                f"schedule '{self.name}': {self.broken}, with microbatches in flight, so the stages have weights of "
                "different updates: start again from the last checkpoint"
            )

    def check_at_rest(self, what: str) -> None:
        """Refuse what needs the model as a whole while microbatches are in flight.

        Raises:
            RunError: it says how many, and what to call.
        """
        self.check_whole()
        if self.begun:
            raise RunError(
                f"{what}: {self.n_stages - 1} microbatches of schedule '{self.name}' are in flight, and the stages "
                "have weights of different updates: call drain() on all ranks first"
            )

    def check_unwritten(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse parameters that were written in between, and another optimizer.

        Raises:
            RunError: it says which, and what to call.
        """
        if self.begun and [*map(id, optimizers)] != [*map(id, self.optimizers)]:
            raise RunError(
                f"train_step was given another optimizer than the calls before, whose last updates are still to come "
                f"(schedule '{self.name}'): call drain() on all ranks first"
            )
        if self.begun and self.versions is not None and (param := self.versions.changed()):
            raise RunError(
                f"parameter '{param}' was written between two steps of schedule '{self.name}', while microbatches "
                "computed with what it was are in flight: call drain() on all ranks first"
            )

    # -- a step

    @contextlib.contextmanager
    def seeding(self) -> Iterator[list[int]]:
        """Let this rank take seeds in this scope without waiting for the first rank, if both were seeded alike.

        Yields:
            the seeds to compare with those of other ranks.
        """
        seeds = self.pm.seeds
        taken: list[int] = []
        if seeds.mode == "sharded" and seeds.alike:
            seeds.own = taken
        try:
            yield taken
        finally:
            seeds.own = None

    def step(
        self, ready: Ready, seeds: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer], taken: Sequence[int] = ()
    ) -> torch.Tensor:
        """Bring a batch, and return its loss, of shape [] and of the loss's dtype."""
        pm, m = self.pm, self.microbatches
        if self.flight.stage.compile_args is not None:
            raise RunError(
                f"schedule '{self.name}' does not run compiled programs, which are not known to read another tensor "
                "for each version of a weight: leave out compile(), or use schedule 1f1b"
            )
        with self._breaking(f"step {self.begun} broke off"):
            if not self.begun:
                pm.unfinished.clear()
                self.optimizers = optimizers
                self.shares, self.told = {}, []
                self.flight.begin(self.shares, pm.rows)
                self.flight.stage.gradients.forget()
                self.versions, self.flight.begun = WeightVersions(self.flight.stage), True
            first = self.begun * m
            rows = {rank: self._row(s, first, first + m) for rank, s in self.group_of.items()}
            self.post.add(rows)
            if not self.begun:
                self.post.begin()
            self.options[self.begun] = scheduled(optimizers)
            once = 1 if self.in_2bw else m  # each microbatch of PipeDream is a batch of its own
            self.shares.update({first + k: share * once for k, share in enumerate(ready.weights)})
            self.begun += 1
            self.left[0] = self.begun
            reached = ready.reached(seeds)
            total = torch.zeros((), dtype=torch.float64, device=pm.device)
            for action in rows[pm.rank]:
                with self._recorded(action):
                    if action.kind == "B":
                        self._backward(action)
                        continue
                    k = action.microbatch - first
                    there = None if reached is None else reached[k]
                    total += ready.weights[k] * self._forward(action.microbatch, ready, k, seeds[k], there)
            self.post.forget()
            loss_of_all = functional_collectives.all_reduce(total.to(ready.loss_dtype), "sum", self.everyone)
            largest: torch.Tensor | None = None
            if taken:
                drawn = torch.stack([_number(n, pm.device) for seed in taken for n in (seed, -seed)])
                largest = functional_collectives.all_reduce(drawn.view(-1, 2), "max", self.everyone)
            self.told.append((loss_of_all, largest))
            while len(self.told) > UNDER_WAY:
                _check_told(*self.told.pop(0))
            return loss_of_all

    def drain(self) -> None:
        """Do the backwards and updates of all that is in flight; then stages have weights of the same updates."""
        self.check_whole()
        if not self.begun:
            return
        pm, n = self.pm, self.begun * self.microbatches
        with self._breaking("drain() broke off"):
            rows = {rank: self._row(s, n, n + self.n_stages - 1 - s, "B") for rank, s in self.group_of.items()}
            self.post.add(rows)
            for action in rows[pm.rank]:
                with self._recorded(action):
                    self._backward(action, draining=True)
            self.post.end()
            for loss, largest in self.told:
                _check_told(loss, largest)
            assert not self.flight.flying, f"in flight after all backwards: {list(self.flight.flying)}"
            self.begun = self.left[0] = 0
            self.told, self.options, self.versions = [], {}, None
            self.post = self._empty_post()

    def _row(self, stage: int, first: int, end: int, kinds: str = "FB") -> list[Action]:
        """Return what a stage does from the forward of one microbatch to that of another."""
        late = self.n_stages - 1 - stage
        behind = {"F": 0, "B": late}
        return [Action(stage, kind, g - behind[kind]) for g in range(first, end) for kind in kinds if g >= behind[kind]]

    def _version(self, microbatch: int) -> int:
        """Return the version of a microbatch's forward and backward on this stage."""
        return max(0, microbatch // self.microbatches - 1) if self.in_2bw else self._versions.newest

    @property
    def _versions(self) -> WeightVersions:
        assert self.versions is not None
        return self.versions

    def _forward(self, microbatch: int, ready: Ready, k: int, seed: Any, reached: Reached | None) -> torch.Tensor | int:
        """Do the forward of microbatch ``k`` of a batch; return its loss where this rank has it, else 0.

        Nothing outlives it here but what its backward needs: the rest would hold its version of the weights.
        """
        self._versions.begin(microbatch, self._version(microbatch))
        loss, _ = self.flight.forward(self.post, microbatch, ready.batches[k], ready.batch.shown, seed, False, reached)
        return loss.detach().double() if loss is not None and self.flight.leads else 0

    def _backward(self, action: Action, draining: bool = False) -> None:
        """Do a backward and, if it completes a gradient, the update."""
        versions, flight, k = self._versions, self.flight, action.microbatch
        updates = not self.in_2bw or (k + 1) % self.microbatches == 0
        versions.use(versions.in_flight[k])
        flight.last = action if updates else None
        flight.backward(self.post, action)
        versions.end(k)
        del self.shares[k]
        if not updates:
            return
        flight.stage.gradients.give()
        behind = k + self.n_stages - self.stage_number  # the microbatch of the next forward
        coming = max(0, behind // self.microbatches - 1) if self.in_2bw and not draining else versions.newest + 1
        with scheduled_as(self.optimizers, self.options[k // self.microbatches]):
            versions.update(self._step, coming)
        if (k + 1) % self.microbatches == 0:
            del self.options[k // self.microbatches]

    def _step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for held_param in self._versions.held:
            held_param.param.grad = None

    @contextlib.contextmanager
    def _recorded(self, action: Action) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.pm.spans is not None:
            self.pm.spans.append((str(action), KINDS[action.kind], began, time.perf_counter()))

    @contextlib.contextmanager
    def _breaking(self, what: str) -> Iterator[None]:
        """Note an error, behind which the stages no longer fit each other."""
        try:
            yield
        except BaseException:
            self.broken, self.left[0] = what, 0
            self.pm.groups.aborted = True  # what is posted there would take the messages of the next module
            raise


def scheduled(optimizers: Sequence[torch.optim.Optimizer]) -> Options:
    """Return the options of optimizers that schedulers change, by group of parameters."""
    return [
        {
            name: value.clone() if isinstance(value := group[name], torch.Tensor) else value
            for name in SCHEDULED if name in group
        } for optimizer in optimizers for group in optimizer.param_groups
    ]  # fmt: skip


@contextlib.contextmanager
def scheduled_as(optimizers: Sequence[torch.optim.Optimizer], options: Options) -> Iterator[None]:
    """Give optimizers the options of a call in this scope."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    now = [{name: group[name] for name in of_call} for group, of_call in zip(groups, options, strict=False)]
    try:
        for group, of_call in zip(groups, options, strict=False):
            group.update(of_call)
        yield
    finally:
        for group, before in zip(groups, now, strict=False):
            group.update(before)


def _number(number: int, device: torch.device) -> torch.Tensor:
    """Return an integer on a device, int64 [], written by a kernel: a copy from the host would be waited for."""
    return torch.full((), number, dtype=torch.int64, device=device)


def _check_told(loss: torch.Tensor, largest: torch.Tensor | None) -> None:
    """Wait for what ranks have told each other in a call, and compare the seeds.

    Args:
        largest: of each seed the largest of all ranks, and that of its negative, int64 [n, 2]; None without any.

    Raises:
        RunError: ranks took different ones.
    """
    functional_collectives.wait_tensor(loss)
    if largest is not None and (functional_collectives.wait_tensor(largest).sum(1) != 0).any():
        raise RunError(
            "the ranks draw different random numbers: their generators were seeded alike when the steps of this "
            "asynchronous pipeline began, and not since; call torch.manual_seed with the same number on all ranks, or "
            "on none, and start again from the last checkpoint"
        )


def _warn_of_left(name: str, left: Sequence[int]) -> None:
    if left[0]:
        warnings.warn(
            f"a model with schedule '{name}' was given up after {left[0]} batches without drain(): the last updates of "
            "its first stages are missing; call drain() before saving, evaluating or ending",
            stacklevel=1,
        )
