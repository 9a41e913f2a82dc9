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
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from autopar.capture import Captured
from autopar.capture.evaluation import Skeleton
from autopar.capture.python.guards import Change, refusal
from autopar.errors import AutoparError, RunError
from autopar.graph import Graph
from autopar.lower.emit import lower
from autopar.placements import State, format_state, is_cut, whole_placement, whole_state
from autopar.plan import Plan
from autopar.rules.notation import Rule
from autopar.rules.registry import rules_of
from autopar.runtime import prefetch
from autopar.runtime.agree import together
from autopar.runtime.batch import Batch
from autopar.runtime.original import unheard
from autopar.runtime.outputs import Meeting
from autopar.runtime.state import as_dtensor, joined, local_piece, torch_placements

KEPT = 8
"""Programs of one module that are kept beside the one that runs."""
CHANGED = (
    "values that forward reads have changed there, and not in the same way on every rank; change them on all ranks "
    "alike, before the same call"
)

PlanAgain = Callable[[Captured, Mapping[str, str]], Plan]
"""Of a captured graph and of how parameters are stored, by name: a plan, the same on all ranks."""

Compare = Callable[[Captured, torch.nn.Module], None]
"""Refuses a capture that is not what the model does."""
AllWell = Callable[[BaseException | None], None]
"""Called on every rank at the same places with what went wrong there; raises if anything did on any rank."""
Fields = dict[str, Any]
_PROGRAM = ("_captured", "_plan", "_program", "_skeleton", "_evaluation", "_batch", "_run")
"""What of a module is another with other literals."""
_PLANNED = (
    "_helds", "_held_buffers", "_followed", "_gradients", "_units", "_schedule", "_template", "_copied",
    "_input_slots", "_seed_slot", "_param_slots", "_distributed",
)  # fmt: skip
"""What of a module is another under another plan."""


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
        self.meeting = Meeting(ranks) if len(ranks) > 1 else None
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

        def all_well(error: BaseException | None) -> None:
            if error is not None:
                if not isinstance(error, AutoparError):
                    error = RunError(f"capturing again failed: {type(error).__name__}: {error}")
                error = type(error)(f"{error}\n{refusal(changes)}")
            together(group, error)

        model, example = self.model(), pm._captured.example
        new: Captured | None = None
        error: BaseException | None = None
        try:
            if model is None or example is None:
                raise RunError("the model that was captured is gone, so it cannot be captured again; keep it")
            with _in_modes(model, self.modes):
                new = example.capture(model)
        except Exception as e:
            error = e
        all_well(error)
        assert new is not None and model is not None
        all_well(_of_another_model(new, group))
        try:
            if self.compare is not None:
                with _in_modes(model, self.modes):
                    self.compare(new, model)
        except Exception as e:
            error = e
        all_well(error)
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


def _of_another_model(new: Captured, group: Any) -> RunError | None:
    """An error if ranks have captured different graphs."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    prints: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(prints, new.graph.fingerprint, group=group)
    if len(set(prints)) == 1:
        return None
    return RunError(f"ranks captured different models again (fingerprints {', '.join(prints)}): {CHANGED}")


def differs(old: Captured, new: Captured) -> str:
    """In what two captures differ beside literals; empty where it is nothing."""
    a, b = old.graph, new.graph
    if len(a.nodes) != len(b.nodes):
        return f"{len(b.nodes)} operators and inputs, and had {len(a.nodes)}"
    for x, y in zip(a.nodes, b.nodes, strict=True):
        if (x.name, x.kind, x.target, x.outs, x.needs_grad, x.refs, x.again) != (
            y.name, y.kind, y.target, y.outs, y.needs_grad, y.refs, y.again,
        ):  # fmt: skip
            return f"{y.where} for {x.where}"
    rules = zip(rules_of(a), rules_of(b), strict=True)
    for x, y, (mine, theirs) in zip(a.nodes, b.nodes, rules, strict=True):
        if (x.args, x.kwargs) != (y.args, y.kwargs) and _cuts(mine) != _cuts(theirs):
            return f"{y.where} can be cut in other ways"
    if _told(a) != _told(b) or old.out_spec != new.out_spec:
        return "outputs, or buffers that change"
    for name, value in new.constants.items():
        before = old.constants.get(name)
        if before is None or before.shape != value.shape or not torch.equal(before, value):
            return f"the tensor {name} that its code makes"
    return ""


def _cuts(rule: Rule | None) -> Any:
    """What a plan knows of an operator."""
    if rule is None:
        return None
    return (
        rule.sizes, rule.inputs, rule.outputs, rule.whole, rule.linear, rule.additive, rule.shape_arg, rule.random,
        [lowering.factors for lowering in rule.lowerings], rule.out_as, rule.in_as, rule.whole_gradients,
    )  # fmt: skip


def _told(graph: Graph) -> tuple[Any, ...]:
    return graph.outputs, graph.loss, graph.tied, graph.updates


# --- one module's program ---------------------------------------------------------------------------------------------


def fields_of(pm: Any) -> Fields:
    """What makes up the program that a module runs now."""
    return {name: pm.__dict__[name] for name in (*_PROGRAM, *_PLANNED)}


def take(pm: Any, new: Captured, plan_again: PlanAgain | None, all_well: AllWell) -> None:
    """Have a module run ``new``: under the plan that it has, if that fits, else under a new one."""
    reason = differs(pm._captured, new)
    plan: Plan | None = None
    error: BaseException | None = None
    if reason:
        if plan_again is None:
            error = RunError(
                f"with the values that it has now the model is another one ({reason}), for which the plan does not "
                "hold; parallelize it again, and load this state_dict()"
            )
        all_well(error)
        assert plan_again is not None
        try:
            plan = plan_again(new, _stored(pm))
        except Exception as e:  # the same on all ranks
            error = e
        all_well(error)
    try:
        if plan is None:
            with_other_literals(pm, new)
        else:
            under_another_plan(pm, new, plan)
        object.__setattr__(pm, "_skeleton", skeleton_of(pm))
    except Exception as e:
        error = e
    all_well(error)


def skeleton_of(pm: Any) -> Skeleton | None:
    """What eval mode is seen from, with the values that the model has now."""
    model = pm._model_ref()
    return Skeleton(model) if pm._skeleton is not None and model is not None else None


def _stored(pm: Any) -> dict[str, str]:
    """How the parameters are stored, as pins; none on one device, where nothing is placed."""
    found = {}
    for name, param in pm.named_parameters(remove_duplicate=False):
        if isinstance(param, DTensor):
            whole = whole_placement(param.requires_grad)
            found[name] = ",".join(f"S{p.dim}" if isinstance(p, Shard) else whole for p in param.placements)
    return found


def with_other_literals(pm: Any, new: Captured) -> None:
    """Have ``pm`` run ``new``, which differs from what it runs in nothing but literals, under the same plan."""
    plan = replace(pm._plan, fingerprint=new.graph.fingerprint)
    program = lower(new.graph, plan, pm._device)
    fields: Fields = {
        "_captured": new, "_plan": plan, "_program": program, "_evaluation": None,
        "_batch": Batch(new, program, pm._signature, pm._mesh, pm._device),
        "_run": compiled(pm, prefetch.with_gathers(program, pm._helds, pm._schedule)),
    }  # fmt: skip
    pm.__dict__.update(fields)


def under_another_plan(pm: Any, new: Captured, plan: Plan) -> None:
    """Have ``pm`` run ``new`` under a plan of its own, with the parameters and buffers that there are.

    Raises:
        RunError: the plan stores a parameter in another way, or the model has another one.
    """
    registered = dict(pm.named_parameters(remove_duplicate=False))
    wrong = []
    for name, choice in plan.params.items():
        param = registered.get(name)
        if param is None:
            raise RunError(f"the model reads a parameter '{name}' now that it did not have when it was parallelized")
        if isinstance(param, DTensor) and tuple(param.placements) != tuple(torch_placements(choice.stored)):
            wrong.append(f"'{name}' as {format_state(choice.stored)}")
    if wrong:
        raise RunError(f"no plan with these values keeps parameters where they are; it would store {', '.join(wrong)}")
    buffers = dict(pm.named_buffers(remove_duplicate=False))
    of_the_code = [n.target for n in new.graph.nodes if n.kind == "buffer" and n.target not in buffers]
    unknown = [name for name in of_the_code if name not in new.constants]
    if unknown:
        raise RunError(f"the model reads buffers now that it did not have when it was parallelized: {unknown}")
    program, before = lower(new.graph, plan, pm._device), pm._held_buffers
    wanted = {name: plan.buffers.get(name, state) for name, (_, state) in before.items()}
    placed = _placed_again(pm, before, wanted)
    for name in of_the_code:
        state = plan.buffers.get(name, whole_state(plan.mesh))
        local = local_piece(new.constants[name].detach(), state, pm._mesh)
        placed[name] = local.to(pm._device, copy=True).contiguous(), state
    fields: Fields = {
        "_captured": new, "_plan": plan, "_program": program, "_evaluation": None, "_helds": {},
        "_held_buffers": placed,
    }  # fmt: skip
    pm.__dict__.update(fields)
    pm._hold_parameters(registered)
    pm._prepare()


def resume(pm: Any, fields: Fields) -> None:
    """Have ``pm`` run a program that was kept, with the buffers as they are by now."""
    now = pm._held_buffers
    pm.__dict__.update(fields)
    if pm._held_buffers is not now:
        wanted = {name: state for name, (_, state) in pm._held_buffers.items()}
        pm._held_buffers.update(_placed_again(pm, now, wanted))
        pm._take_buffers()


def _placed_again(
    pm: Any, now: Mapping[str, tuple[torch.Tensor, State]], wanted: Mapping[str, State]
) -> dict[str, tuple[torch.Tensor, State]]:
    """The module's own buffers in the placements that a program wants: mostly those that they have.

    Args:
        now: of the program that ran last; tensors that its code made stay out.
    """
    names: dict[str, list[tuple[torch.nn.Module, str]]] = {}
    for name, _ in pm.named_buffers(remove_duplicate=False):
        source = pm._captured.graph.tied.get(name, name)
        names.setdefault(source if source in now else name, []).append(pm._owner(name))
    placed: dict[str, tuple[torch.Tensor, State]] = {}
    for name, owners in names.items():
        if name not in now:
            continue
        owner, key = owners[0]
        shown, state = owner._buffers[key], now[name][1]
        assert shown is not None
        local = shown._local_tensor if isinstance(shown, DTensor) else shown
        if wanted.get(name, state) != state:
            whole = joined(local, state, shown.shape, pm._mesh)
            shape, state = tuple(whole.shape), wanted[name]
            local = local_piece(whole, state, pm._mesh).clone(memory_format=torch.contiguous_format)
            value = as_dtensor(local, state, shape, pm._mesh) if is_cut(state) else local
            for owner, key in owners:
                owner._buffers[key] = value
        placed[name] = local, state
    return placed


def compiled(pm: Any, run: Any) -> Any:
    """A program as ``pm.compile()`` wants it."""
    return run if pm._compile is None else torch.compile(run, *pm._compile[0], **pm._compile[1])


__all__ = [
    "KEPT", "AllWell", "Compare", "Fields", "PlanAgain", "Programs", "compiled", "differs", "fields_of", "resume",
    "skeleton_of", "take", "with_other_literals",
]  # fmt: skip
