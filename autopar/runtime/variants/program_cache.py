"""Programs of one module: by the shapes that it is called with, and by the values that its model has.

A program is for the shapes, and for the flags and numbers, that its model had when it was captured. The last batch of
an epoch is smaller, validation has larger ones, sentences have other lengths; a flag, a module's ``p`` or a schedule
may change what a model computes. Then the model is captured again, and what has changed decides the rest:

* only literals of operators differ: the plan holds, and a new program reads the parameters as the old one did;
* shapes, the autocast around the call or operators differ: it is planned again, with the user's pins and with every
  parameter stored as it is, so the same ``Parameter`` objects go on, and the state that an optimizer keeps for them.
  What is gathered or reduced, and when, is the new plan's own.

Programs are kept with the shapes and values of their capture, the :data:`KEPT` that were used last, so that a smaller
last batch is captured once, and a flag that is toggled in every other step twice in all. Ranks tell each other their
calls through the process group's store; where something has changed they wait for each other, and go on only if all
have the same change.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import Captured, Example
from autopar.capture.in_parts import InParts, decided_for_steps, in_parts_of, is_at_once, no_rows_in
from autopar.capture.microbatches import rows_of
from autopar.capture.python.guards import Change, refusal
from autopar.capture.unread import changed_strings, unread_strings
from autopar.errors import AutoparError, RunError, first_few
from autopar.plans.plan import StagePlan
from autopar.runtime.batches.batch import Batch as BatchOfProgram
from autopar.runtime.batches.module_calls import Batch, ModuleCall, batch_rows, check_autocast
from autopar.runtime.ranks.agree import everywhere
from autopar.runtime.ranks.collective_log import CollectiveLog
from autopar.runtime.variants.module_modes import difference, in_modes
from autopar.runtime.variants.program_run import Fields
from autopar.runtime.variants.run import OtherPrograms, ParallelRun
from autopar.torch_private import functorch_is_active, pytree
from autopar.words.autocasting import autocast_now

KEPT = 8
"""Programs of one module that are kept beside the one that runs."""
KEPT_IN_INFERENCE = 64
"""The same of a module that runs forward alone: one for each bucket of batch and length."""
MOST_GATHERED = 4 * 2**30
"""Bytes of a model that is gathered on every rank to be captured again and compared with eager mode; of a larger one
a capture reads shapes alone."""
CHANGED = (
    "values that forward reads have changed there, and not in the same way on every rank; change them on all ranks "
    "alike, before the same call"
)
OTHER_CALL = (
    "all ranks are called with the same shapes: with the whole batch (no DistributedSampler, and drop_last alike), or, "
    "with batch='local', with equally many rows each; give all ranks batches alike"
)
OTHER_MODES = (
    "train() and eval() of parts are the program's, which all ranks compute together: call them on all ranks alike, "
    "before the same call"
)
ON_ALL = (
    "ranks compute together, in evaluation too, so every rank makes the same calls in the same order; evaluate on all "
    "ranks (and print on one)"
)
ON_ALL_METHOD = (
    "parameters are gathered for it from all ranks, so every rank calls it, at the same place in the script (and one "
    "prints)"
)

Replan = Callable[[Captured, Mapping[str, str]], StagePlan]
"""Makes, for a captured graph and how parameters are stored by name, a plan, the same on all ranks."""

Compare = Callable[[Captured, torch.nn.Module, Batch], None]
"""Refuses a capture that is not what the model does with a batch."""


class Programs(OtherPrograms):
    """The programs that one module has had.

    Args:
        model: the module, which owns the values.
        example: how it was called when it was captured first.
        ranks: the numbers of all processes that hold a part of the module.
        plan_again: makes a plan for a graph with other operators, as the module's ``_take_program`` calls it; None
            if that is not possible.
        compare: for every new capture; None where captures are trusted.
        shapes: follow calls with other shapes; else these are refused.
        values: follow values that change; else these are refused.
        most: how many programs are kept beside the one that runs.
    """

    def __init__(
        self, model: torch.nn.Module, example: Example | None, ranks: list[int], replan: Callable[..., Any] | None,
        compare: Compare | None, *, shapes: bool, values: bool, most: int = KEPT,
    ) -> None:  # fmt: skip
        self.example = example
        self.ranks, self.replan, self.compare = ranks, replan, compare
        self.shapes, self.values, self.most = shapes, values, most
        self.kept: list[Fields] = []
        """Programs that do not run now, the one that was used last at the end."""
        self.meeting = CollectiveLog(ranks) if len(ranks) > 1 else None
        self.strings_read: set[frozenset[int]] = set()
        """Places of strings of calls that the model was found to read: that is tried once."""
        self.calls = self.captures = 0
        self.rows: int | None = None
        """The rows of a microbatch of the program that was captured first; 0 if that is not known."""
        self.way: tuple[str, int | None] = ("in training" if model.training else "in eval mode", None)
        """The mode and the microbatches of the last call: a rank that goes into eval mode by itself would compute with
        steps of the others, and one that has another number of microbatches would wait for more than they send."""

    def meet_all(self, what: str, broken_off: Callable[[], str]) -> None:
        """Wait until all ranks call a method of the model, or a function on it.

        Args:
            broken_off: what is known of a rank that comes to nothing any more; or empty.

        Raises:
            RunError: others go on with something else.
        """
        if self.meeting is not None:
            self.meeting.broken_off = broken_off
            self.meeting.meet("calls", f"{what}() behind call {self.calls}", ON_ALL_METHOD)

    def of_copy(self, model: torch.nn.Module) -> Programs:
        """Return the programs of a copy of the module, which follows shapes as this one does; values stay."""
        twin = copy.copy(self)
        twin.kept, twin.calls, twin.captures, twin.values = [], 0, 0, False
        twin.meeting = CollectiveLog(self.ranks) if self.meeting is not None else None
        return twin

    def follow(self, run: ParallelRun, call: ModuleCall) -> None:
        """Run the program of a call and of the values that its model has; before each call, on every rank.

        Raises:
            RunError: ranks are called differently, or have changed different values; or the change cannot be followed,
                and it is named.
        """
        self.calls += 1
        if self.meeting is not None:
            self.meeting.broken_off = run.failures.heard if run.failures is not None else str
        with run.user.as_captured():
            same = run.captured.guards.same()
            changes = [] if same else run.captured.guards.changes()
        of_example = self._of_example(run, call)
        fits = self._fits(run, call) and of_example is None and not self._is_of_fewer(run, run.captured, call)
        in_mode = run.runs_in(run.trained)
        if not same and not self.values:
            raise RunError(refusal(changes))
        mode = "in training" if run.training else "in eval mode"
        mode += "" if torch.is_grad_enabled() else " without gradients"
        rows_differ = same and not self.shapes and run.local_batch is not None and not self._fits_as_captured(run, call)
        if rows_differ and self.meeting is not None:  # maybe on this rank alone, and others wait for its rows
            self.meeting.meet("is at", f"call {self.calls} with {_unmarked(call.shown())}", OTHER_CALL)
        way_before = self.way
        self.way = mode, way_before[1] if call.of_step else call.parts_of(run.captured)
        if same and fits and in_mode and self.way == way_before:
            if self.meeting is not None:
                self.meeting.note(f"call {self.calls} without a change")
            return
        if same and fits and in_mode:
            if self.meeting is not None:
                parts = f" in {self.way[1]} microbatches" if self.way[1] is not None else ""
                why = ON_ALL if mode != way_before[0] else OTHER_CALL
                self.meeting.meet("is at", f"call {self.calls} {mode}{parts}", why)
            return
        takes = (i for i, fields in enumerate(self.kept) if self._is_for(run, fields, call))
        place = next((i for i in takes if not self._is_of_fewer(run, self.kept[i]["captured"], call)), None)
        place = of_example if of_example is not None else place
        self._meet(place, changes, None if fits else call, "" if in_mode else run.modes.shown())
        if run.in_step():
            what = self._change(run, changes, call, fits)
            raise RunError(f"values, shapes or modes have changed between two microbatches of one step\n{what}")
        if not fits:
            one_of_several = run.training and not call.in_parts
            run.batch.check_other(call.args, call.kwargs, run.plan.microbatches if one_of_several else 1)
        before = run.kept_program()
        try:
            if place is None:
                self._captured_again(run, changes, call, fits)
            else:
                run.resume_program(self.kept.pop(place))
            if run.modes.training != run.trained and not run.have_evaluation():
                self._captured_again(run, changes, call, fits=False)  # eval mode is another graph
        except BaseException:
            run.resume_program(before)
            raise
        run.compared.next_one()
        self.kept = [*self.kept, before][-self.most :]

    def _fits(self, run: ParallelRun, call: ModuleCall) -> bool:
        """Check whether the running program takes a call; where shapes are not followed, it raises its own error.

        Raises:
            RunError: the call is under another autocast, and other calls are not followed.
        """
        if not self.shapes:
            check_autocast(run.captured)
        return self._takes(run.captured, run.batch, call)

    def _takes(self, captured: Captured, batch: BatchOfProgram, call: ModuleCall) -> bool:
        if not self.shapes:
            return True
        if self._for_steps(captured, call) is not None:
            return False
        under = captured.autocast == autocast_now()
        if call.one is not None:
            return under and batch.fits(*call.one)
        return under and (bool(batch.pieces) or batch.fits(call.args, call.kwargs, call.in_parts))

    @staticmethod
    def _for_steps(captured: Captured, call: ModuleCall) -> InParts | None:
        """Return how a program of a batch at once is to be captured again for a step of several microbatches.

        It then reads what their losses divide by in the whole batch. None if it takes the step as it is.
        """
        parts = call.parts if call.parts is not None else call.parts_of(captured)
        if ((parts or 1) == 1 and not call.of_several) or not is_at_once(captured):
            return None
        return decided_for_steps(captured)[1]

    def _is_counted(self, run: ParallelRun, call: ModuleCall) -> bool:
        """Check whether the number of microbatches of a step follows from its rows and those of the example."""
        if self.rows is None:
            self.rows = batch_rows(run.captured) if run.captured.example is not None else 0
        whole = call.in_parts and call.one is None and call.parts is None
        return whole and self.shapes and run.buckets is None and self.rows > 0

    def _of_example(self, run: ParallelRun, call: ModuleCall) -> int | None:
        """Return which kept program is of the example's rows and takes a step that a smaller one takes in more parts.

        The batch statistics of these would be others. None if there is no such program, or it runs now.
        """
        if not self._is_counted(run, call) or batch_rows(run.captured) == self.rows:
            return None
        return next(
            (
                i for i, fields in enumerate(self.kept)
                if batch_rows(fields["captured"]) == self.rows and self._is_for(run, fields, call)
            ), None,
        )  # fmt: skip

    def _is_of_fewer(self, run: ParallelRun, captured: Captured, call: ModuleCall) -> bool:
        """Check whether a step with fewer rows than the example would be cut, if it is one microbatch."""
        if not self._is_counted(run, call):
            return False
        have = rows_of((call.args, dict(call.kwargs)), no_rows_in(captured))
        return have < (self.rows or 0) and batch_rows(captured) != have

    def _fits_as_captured(self, run: ParallelRun, call: ModuleCall) -> bool:
        args, kwargs = call.one or (call.args, call.kwargs)
        return bool(run.batch.fits(args, kwargs, call.in_parts and call.one is None))

    def _is_for(self, run: ParallelRun, fields: Fields, call: ModuleCall) -> bool:
        captured = fields["captured"]
        fits = run.runs_in(fields["trained"]) and captured.guards.same()
        return fits and self._takes(captured, fields["batch"], call)

    def _meet(
        self, place: int | None, changes: list[Change], call: ModuleCall | None, modes: str
    ) -> None:  # fmt: skip
        """Wait for all ranks, and go on if they have the same change.

        Args:
            call: where its shapes are what has changed.
            modes: where these are.
        """
        if self.meeting is None:
            return
        shown = _unmarked(call.shown()) if call is not None else ""
        checksum = zlib.crc32(f"{place} {sorted(map(str, changes))}".encode())
        what = f"call {self.calls} with changed values (checksum {checksum:08x})" if changes else f"call {self.calls}"
        what += f" with {shown}" if shown else ""
        what += f" in other modes ({_unmarked(modes)})" if modes else ""
        why = OTHER_MODES if modes else OTHER_CALL
        self.meeting.meet("is at", what, f"{CHANGED}\n{refusal(changes)}" if changes else why)

    @staticmethod
    def _change(run: ParallelRun, changes: list[Change], call: ModuleCall, fits: bool) -> str:
        """Return what has changed since the program that runs now, for a message."""
        if changes:
            return refusal(changes)
        if fits and (modes := difference(run.trained, run.modes.training)):
            return f"  called with {modes}"
        return f"  called with {call.shown()}"

    def _captured_again(self, run: ParallelRun, changes: list[Change], call: ModuleCall, fits: bool) -> None:
        """Capture the model, plan if that is needed, and have it run.

        Args:
            fits: the call is one of the program that runs now, and only values have changed.
        """
        if functorch_is_active():
            raise RunError(
                "a parallel module was called within torch.func (vmap, grad, jvp) in another way than it was captured, "
                "which cannot be captured there\n  call it on the whole batch, or use torch.func with a copy of the "
                "model made before parallelize"
            )
        group = run.ranks()[0] if dist.is_initialized() else None
        what = self._change(run, changes, call, fits)
        if self.example is not None and self.example.decisions.listed:
            lines = dict.fromkeys(site.partition("@")[0] for site in self.example.decisions.listed)
            what += (
                f"\n  integers that the model reads from its inputs at {first_few(list(lines))} are those of the first "
                "example here, too: for others, parallelize the model with a batch that has them"
            )

        def told(error: Exception) -> Exception:
            if not isinstance(error, AutoparError):
                error = RunError(f"capturing again failed: {type(error).__name__}: {error}")
            return type(error)(f"{error}\n{what}")

        def all_well() -> contextlib.AbstractContextManager[None]:
            return everywhere(group, told)

        training = run.captures_in()
        values = run.whole_values() if _is_small(run) and not (fits and run.user.on_meta) else {}
        with all_well():
            if self.example is None:
                raise RunError("there is no example call, so the model cannot be captured again")
            batch, loss_fn = call.of(self.example, batch_rows(run.captured))
            example = run.captured.example if fits else Example(
                *batch[:2], loss_fn, batch[2], self.example.decisions, self.example.precision,
                self._for_steps(run.captured, call) or in_parts_of(run.captured),
            )  # fmt: skip
            assert example is not None
            with run.user.as_written(values) as source, in_modes(source, training):
                new = _captured(example, source)
                changed = [] if fits else changed_strings(run.captured, new)
                if groups := [group for group in changed if group not in self.strings_read]:
                    new = replace(new, unread=unread_strings(new, source, groups))
                    self.strings_read.update(group for group in groups if not group <= new.unread)
        with all_well():
            _check_same(new, group)
        if self.compare is not None and values and _is_whole(batch, new):
            with all_well(), run.user.as_written(values) as source, in_modes(source, training):
                self.compare(new, source, batch)
        run.take_program(new, call, self.replan, all_well)
        run.trained = training
        self.captures += 1
        if self.captures == self.most + 1 and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(
                f"this module has been captured {self.captures} times since parallelize, for calls and values that "
                f"differ, and keeps the {self.most} programs that were used last: each new one costs seconds. Pad "
                "batches to a few sizes, and pass numbers that change as tensors\n" + what,
                stacklevel=6,
            )


def _is_small(run: ParallelRun) -> bool:
    """Return whether all values are gathered to capture a model again."""
    return sum(p.nbytes for p in {id(p): p for p in run.user.params.values()}.values()) <= MOST_GATHERED


def _captured(example: Example, source: torch.nn.Module) -> Captured:
    """Capture a call, and another one where numbers of a microbatch may follow from how many rows there are."""
    if example.in_parts is None or not example.in_parts.found.open_literals:
        return example.capture(source)

    def take(batch: Batch) -> Captured:
        return replace(plain, args=batch[0], kwargs=batch[1], targets=batch[2]).capture(source)

    plain = replace(example, in_parts=None)
    one = plain.capture(source)
    done: Captured = example.in_parts.settled(one, take).of(one)
    return done


def _unmarked(text: str) -> str:
    """Return a text that may stand in what ranks tell each other."""
    return text.replace("|", " ").replace(";", " ")


def _is_whole(batch: Batch, captured: Captured) -> bool:
    """Check whether a batch has the captured shapes; ranks may have passed their shards."""
    example = captured.example
    assert example is not None
    wanted = pytree.tree_leaves((example.args, dict(example.kwargs), example.targets))
    have = pytree.tree_leaves((batch[0], dict(batch[1]), batch[2]))
    return len(have) == len(wanted) and all(
        x.shape == y.shape for x, y in zip(have, wanted, strict=True) if isinstance(x, torch.Tensor)
    )


def _check_same(new: Captured, group: Any) -> None:
    """Refuse different graphs on the ranks.

    Raises:
        RunError: with their fingerprints.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    prints: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(prints, new.graph.fingerprint, group=group)
    if len(set(prints)) > 1:
        raise RunError(f"ranks captured different models again (fingerprints {', '.join(prints)}): {CHANGED}")
