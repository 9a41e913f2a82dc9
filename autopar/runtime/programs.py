"""Programs of one module, by the values that its model had when they were captured (``on_change="recapture"``).

A flag, a module's ``p`` or a schedule may change what a model computes. Then the model is captured again, and what the
change has done decides the rest:

* only literals of operators differ: the plan holds, and a new program reads the parameters as the old one did;
* operators differ: it is planned again, with the user's pins and with every parameter stored as it is, so the same
  ``Parameter`` objects go on, and the state that an optimizer keeps for them. What is gathered or reduced, and when, is
  the new plan's own.

Programs are kept with the values that their capture read, the :data:`KEPT` that were used last, so that a flag that is
toggled in every other step captures twice in all. Ranks tell each other their calls through the process group's store;
where values have changed they wait for each other, and go on only if all have the same change.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.capture.python.guards import Change, refusal
from autopar.errors import AutoparError, RunError
from autopar.plan import StagePlan
from autopar.runtime.agree import everywhere
from autopar.runtime.original import unheard
from autopar.runtime.outputs import CollectiveLog

KEPT = 8
"""Programs of one module that are kept beside the one that runs."""
CHANGED = (
    "values that forward reads have changed there, and not in the same way on every rank; change them on all ranks "
    "alike, before the same call"
)

PlanAgain = Callable[[Captured, Mapping[str, str]], StagePlan]
"""Of a captured graph and of how parameters are stored, by name: a plan, the same on all ranks."""

Compare = Callable[[Captured, torch.nn.Module], None]
"""Refuses a capture that is not what the model does."""
AllWell = Callable[[], contextlib.AbstractContextManager[None]]
"""Gives contexts (:func:`~autopar.runtime.agree.everywhere`): what fails in one on any rank is raised on all."""
Fields = dict[str, Any]
class Programs:
    """The programs that one module has had.

    Args:
        model: that the module was made of; it owns the values.
        ranks: of all processes that hold a part of the module.
        plan_again: makes a plan for a graph with other operators; None where that is not possible.
        compare: for every new capture; None where captures are trusted.
    """

    def __init__(
        self, model: torch.nn.Module, ranks: list[int], plan_again: PlanAgain | None,
        compare: Compare | None,
    ) -> None:  # fmt: skip
        self.model = weakref.ref(model)
        self.modes = {path: module.training for path, module in model.named_modules()}
        self.plan_again, self.compare = plan_again, compare
        self.kept: list[Fields] = []
        """Programs that do not run now, the one that was used last at the end."""
        self.meeting = CollectiveLog(ranks) if len(ranks) > 1 else None
        self.calls = 0

    def follow(self, pm: Any) -> None:
        """Have ``pm`` run the program of the values that its model has; call it before each call, on every rank.

        Raises:
            RunError: ranks have changed different values, or the change cannot be followed; it names the change.
        """
        self.calls += 1
        call = f"call {self.calls}"
        if pm._captured.guards.same():
            if self.meeting is not None:
                self.meeting.note(f"{call} without a change")
            return
        changes = pm._captured.guards.changes()
        place = next((i for i, fields in enumerate(self.kept) if fields["_captured"].guards.same()), None)
        if self.meeting is not None:
            checksum = zlib.crc32(f"{place} {sorted(map(str, changes))}".encode())
            what = f"{call} with changed values (checksum {checksum:08x})"
            self.meeting.meet("is at", what, f"{CHANGED}\n{refusal(changes)}")
        if pm._in_step():
            raise RunError(f"values have changed between two microbatches of one step\n{refusal(changes)}")
        before = pm._kept_program()
        try:
            if place is None:
                self._captured_again(pm, changes)
            else:
                pm._resume_program(self.kept.pop(place))
            if not pm.training and pm._captured_training:
                pm._change_mode(False)
        except BaseException:
            pm._resume_program(before)
            raise
        self.kept = [*self.kept, before][-KEPT:]

    def _captured_again(self, pm: Any, changes: list[Change]) -> None:
        group = pm._ranks()[0] if dist.is_initialized() else None

        def told(error: Exception) -> Exception:
            if not isinstance(error, AutoparError):
                error = RunError(f"capturing again failed: {type(error).__name__}: {error}")
            return type(error)(f"{error}\n{refusal(changes)}")

        def all_well() -> contextlib.AbstractContextManager[None]:
            return everywhere(group, told)

        model, example = self.model(), pm._captured.example
        with all_well():
            if model is None or example is None:
                raise RunError("the model that was captured is gone, so it cannot be captured again; keep it")
            with _in_modes(model, self.modes):
                new = example.capture(model)
        assert model is not None
        with all_well():
            _check_same(new, group)
        with all_well():
            if self.compare is not None:
                with _in_modes(model, self.modes):
                    self.compare(new, model)
        pm._take_program(new, self.plan_again, all_well)


@contextlib.contextmanager
def _in_modes(model: torch.nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    now = [(module, module.training) for module in model.modules()]
    try:
        for path, module in model.named_modules():
            module.training = modes.get(path, module.training)
        with unheard():
            yield
    finally:
        for module, mode in now:
            module.training = mode


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


__all__ = ["KEPT", "AllWell", "Compare", "Fields", "PlanAgain", "Programs"]
