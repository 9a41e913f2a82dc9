"""Python values that a program was captured with: set on the parallel module, checked at each call, captured again.

The model that was parallelized is the owner of its numbers and flags. What is set on the parallel module, or on a part
of it, goes there; what was changed there is an error at the next call, or (``on_change="recapture"``) the model is
captured again, and the plan is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.capture.evaluation import Skeleton
from autopar.capture.python.guards import Guards, refusal, show
from autopar.errors import AutoparError, RunError
from autopar.graph import Graph
from autopar.lower.emit import lower
from autopar.runtime import prefetch
from autopar.runtime.agree import together


def assigned(guards: Guards, path: str, name: str, value: Any) -> bool:
    """Whether an attribute is one that the program was captured with; then it is set on the model.

    Raises:
        RunError: the model is gone, so the program cannot be made anew.
    """
    read = guards.read(path, name)
    if read is None:
        return False
    owner = guards.owner(path)
    if owner is not None:
        setattr(owner, name, value)
    elif value is not read.value and value != read.value:
        raise RunError(
            f"{read.label} was {show(read.value)} when the model was captured, and is part of the program; the model "
            f"is gone, so it cannot be {value!r} now: keep the model beside the parallel module, or set it before "
            "parallelize"
        )
    return True


def check_values(pm: Any) -> None:
    """Have the program compute with the values that the model has.

    Raises:
        RunError: it was captured with others, and they cannot or shall not be captured again.
    """
    guards = pm._captured.guards
    if guards.same():
        return
    changes = guards.changes()
    if pm.__dict__.get("_on_change") != "recapture":
        raise RunError(refusal(changes))
    error: BaseException | None = None
    made = None
    try:
        made = _again(pm)
    except Exception as e:
        error = e if isinstance(e, AutoparError) else RunError(f"capturing again failed: {type(e).__name__}: {e}")
        error = type(error)(f"{error}\n{refusal(changes)}")
    together(pm._ranks()[0] if dist.is_initialized() else None, error)
    assert made is not None
    captured, plan, program = made
    put = object.__setattr__
    put(pm, "_captured", captured)
    put(pm, "_plan", plan)
    put(pm, "_program", program)
    put(pm, "_run", prefetch.with_gathers(program, pm._helds, pm._schedule))
    if pm._skeleton is not None:  # what eval mode is seen from has the new values too
        put(pm, "_skeleton", Skeleton(pm._model_ref()))
    if pm._evaluation is not None:
        pm.prepare_evaluation()


def _again(pm: Any) -> tuple[Captured, Any, Any]:
    """The capture, plan and program of the model as it is."""
    old: Captured = pm._captured
    model = pm._model_ref()
    if model is None or old.example is None:
        raise RunError("the model that was captured is gone, so it cannot be captured again; keep it")
    new = old.example.capture(model)
    other = _other(old, new)
    if other:
        raise RunError(
            f"with the values that it has now the model is another one ({other}), for which the plan does not hold; "
            "parallelize it again, and load this state_dict()"
        )
    plan = replace(pm._plan, fingerprint=new.graph.fingerprint)
    captured = replace(old, graph=new.graph, guards=new.guards)
    return captured, plan, lower(captured.graph, plan, pm._device)


def _other(old: Captured, new: Captured) -> str:
    """What two captures differ in beside numbers; empty where it is nothing."""
    a, b = old.graph, new.graph
    if len(a.nodes) != len(b.nodes):
        return f"{len(b.nodes)} operators and inputs, and had {len(a.nodes)}"
    for x, y in zip(a.nodes, b.nodes, strict=True):
        if (x.name, x.kind, x.target, x.outs, x.needs_grad, x.refs) != (
            y.name, y.kind, y.target, y.outs, y.needs_grad, y.refs,
        ):  # fmt: skip
            return f"{y.where} for {x.where}"
    if _told(a) != _told(b):
        return "outputs, or buffers that change"
    for name, value in new.constants.items():
        before = old.constants.get(name)
        if before is None or before.shape != value.shape or not torch.equal(before, value):
            return f"the tensor {name} that its code makes"
    return ""


def _told(graph: Graph) -> tuple[Any, ...]:
    return graph.outputs, graph.loss, graph.tied, graph.updates


__all__ = ["assigned", "check_values"]
