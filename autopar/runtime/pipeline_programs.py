"""Programs of a pipeline by the values that its model has: its stages can have other numbers, and nothing else.

Messages, groups and schedule follow from the first program, so another graph needs another pipeline.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.capture import Captured
from autopar.errors import RunError
from autopar.runtime.batch import Batch
from autopar.runtime.programs import AllWell, Fields
from autopar.runtime.reached import reached_by
from autopar.runtime.recaptured import differs, skeleton_of, with_buffers_of
from autopar.staging import cut

PROGRAM = ("_captured", "_parts", "_plan", "_skeleton", "_evaluates", "_batch", "_reached_by")
"""What is another with other values, beside the programs of the stages."""


def fields_of(pm: Any) -> Fields:
    """What makes up the programs that a pipeline runs now."""
    stages = {s: (flight.part, flight.stage) for s, flight in pm._work.flights.items()}
    return {"_stages": stages, **{name: pm.__dict__[name] for name in PROGRAM}}


def resume(pm: Any, fields: Fields) -> None:
    """Have ``pm`` run programs that were kept, with the buffers as they are by now."""
    for name in PROGRAM:
        setattr(pm, name, fields[name])
    for s, (part, stage) in fields["_stages"].items():
        flight = pm._work.flights[s]
        now, flight.part, flight.stage = flight.stage.buffers, part, stage
        with_buffers_of(pm, stage, now)


def take(pm: Any, new: Captured, all_well: AllWell) -> None:
    """Have the stages run ``new``, which differs in nothing but literals.

    Raises:
        RunError: it differs in more; on all ranks.
    """
    reason = differs(pm._captured, new)
    with all_well():
        if reason:
            raise RunError(
                f"with the values that it has now the model is another one ({reason}), and the stages of a "
                "pipeline can only have other numbers; parallelize it again, and load this full_state_dict()"
            )
    with all_well():
        cuts = cut(new.graph, pm._plan.starts)  # crossings stay those that the wires know
        parts = tuple(replace(part, graph=c.graph) for part, c in zip(pm._parts, cuts, strict=True))
        plan = pm._plan.of_graphs(new.graph.fingerprint, [part.graph.fingerprint for part in parts])
        for s, flight in pm._work.flights.items():
            flight.part, flight.stage = parts[s], flight.stage.with_other_literals(parts[s].graph)
        pm._captured, pm._parts, pm._plan = new, parts, plan
        pm._skeleton, pm._evaluates = skeleton_of(pm), False
        pm._batch = Batch(new, pm._signature, pm._device)
        pm._reached_by = reached_by(new.graph, pm._device)


__all__ = ["PROGRAM", "fields_of", "resume", "take"]
