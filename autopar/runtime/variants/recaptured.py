"""How a module takes another capture of its model (:mod:`autopar.runtime.variants.program_cache` says when).

Parameters and buffers stay where they are; another :class:`~autopar.runtime.stages.stage.Stage` reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.capture import Captured
from autopar.errors import RunError
from autopar.plans.plan import StagePlan
from autopar.rules.notation import Rule
from autopar.rules.registry import rules_of
from autopar.runtime.parameters.relayout import relaid
from autopar.runtime.parameters.state import (
    Buffers,
    as_dtensor,
    joined,
    local_of,
    local_shard,
    mesh_of,
    torch_placements,
)
from autopar.runtime.stages.home import Home
from autopar.runtime.stages.stage import Stage
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.placements import State, replicated_placement, whole_state

Planner = TypeVar("Planner")
"""The planner of a mesh's program, or of a pipeline's."""


def differs(old: Captured, new: Captured) -> str:
    """Say how two captures differ other than in literals; empty if they do not."""
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
    """Return what a plan knows of an operator."""
    if rule is None:
        return None
    return (
        rule.sizes, rule.inputs, rule.outputs, rule.whole, rule.linear, rule.additive, rule.shape_arg, rule.random,
        [lowering.factors for lowering in rule.lowerings], rule.out_as, rule.in_as, rule.whole_gradients,
    )  # fmt: skip


def _told(graph: Graph) -> tuple[Any, ...]:
    return graph.outputs, graph.loss, graph.tied, graph.updates


def planner_for(reason: str, replan: Planner | None, state_dict: str) -> Planner:
    """Return that which plans the model anew.

    Args:
        reason: in what the model is another one.
        state_dict: how the parameters are read that the model would have to be loaded with.

    Raises:
        RunError: there is none, for the plan was given.
    """
    if replan is None:
        raise RunError(
            f"with the values that it has now the model is another one ({reason}), for which the plan does not hold; "
            f"parallelize it again, and load this {state_dict}"
        )
    return replan


def stored_pins(home: Home, buffers: Buffers, graph: Graph) -> dict[str, str]:
    """Return how the parameters are stored, as pins; none on one device, where nothing is placed.

    In inference also buffers that some program writes: what one has cached is where the other reads it.

    Args:
        buffers: those of the program that runs.
        graph: the graph that is to be planned. A parameter that the module has frozen since (an average of it, say)
            wants a gradient there, and the pin of a whole one says which of them does.
    """
    pins = {}
    wanted = {node.target: node.needs_grad for _, node in graph.of_kind("param")}
    renewed = {node.target for _, node in graph.of_kind("buffer")}
    for name, param in home.named_parameters(remove_duplicate=False):
        if isinstance(param, DTensor) and name not in renewed:
            whole = replicated_placement(wanted.get(name, param.requires_grad))
            pins[name] = ",".join(f"S{p.dim}" if isinstance(p, Shard) else whole for p in param.placements)
    if home.inference:
        kept = home.written | {*graph.written}
        pins |= {name: state.text for name, (_, state) in buffers.items() if name in kept}
    return pins


def move_to_layout_of(home: Home, plan: StagePlan) -> None:
    """Store parameters as ``plan`` does, where buckets have layouts of their own.

    A backward of an earlier forward is refused then.
    """
    if home.layouts_change and relaid(dict(home.named_parameters(remove_duplicate=False)), plan.params):
        home.layout += 1


def check_stored(home: Home, plan: StagePlan) -> None:
    """Refuse a plan that stores parameters in another way than the module does.

    Raises:
        RunError: with their names; or there is no such parameter here.
    """
    registered = dict(home.named_parameters(remove_duplicate=False))
    wrong = []
    for name, choice in plan.params.items():
        param = registered.get(name)
        if param is None:
            where = "" if home.leads is None else ", or that is on the ranks of another stage"
            raise RunError(
                f"the model reads a parameter '{name}' now that it did not have when it was parallelized{where}"
            )
        if isinstance(param, DTensor) and tuple(param.placements) != tuple(torch_placements(choice.stored)):
            wrong.append(f"'{name}' as {choice.stored.text}")
    if wrong:
        raise RunError(f"no plan with these values keeps parameters where they are; it would store {', '.join(wrong)}")


def buffers_for(
    home: Home, tied: Mapping[str, str], new: Captured, graph: Graph, plan: StagePlan, device_mesh: DeviceMesh,
    before: Buffers,
) -> Buffers:  # fmt: skip
    """Return the buffers that another program reads: those that the module has, and constants of the model's code.

    Args:
        tied: first names of tied parameters and buffers by the others, of the program that ran last.
        graph: the graph of the program, or of one stage of it.
        before: the buffers of the program that ran last.

    Raises:
        RunError: there is one that the model did not have.
    """
    registered = home.registered()
    of_the_code = [n.target for n in graph.nodes if n.kind == "buffer" and n.target not in registered]
    unknown = [name for name in of_the_code if name not in new.constants]
    if unknown:
        name = unknown[0].rpartition(".")[2]
        raise RunError(
            f"the model reads buffers now that it did not have when it was parallelized: {unknown}; a parallel module "
            "keeps the buffers of that time, so parallelize the model again (weights: "
            "model.load_state_dict(autopar.full_state_dict(pm), strict=False)), or have the attribute be no buffer "
            f"(self.{name} = None), which is captured again"
        )
    wanted = {name: plan.buffers.get(name, state) for name, (_, state) in before.items()}
    placed = _placed_again(home, tied, before, wanted, device_mesh)
    for name in of_the_code:
        state = plan.buffers.get(name, whole_state(plan.mesh))
        local = local_shard(new.constants[name].detach(), state, device_mesh)
        placed[name] = local.to(home.device, copy=True).contiguous(), state
    for _, node in graph.of_kind("buffer"):
        if node.target not in placed:  # a frozen parameter that only this program writes
            placed[node.target] = _renewed_from_now_on(node.target, registered[node.target])
    return placed


def placed_buffers(home: Home, names: Collection[str], mesh: Mesh) -> Buffers:
    """Return those buffers that are registered here under some names, which the program that ran last did not read.

    Args:
        mesh: that of the plan that is to read them.
    """
    placed: Buffers = {}
    for name in names:
        if name in home.user.buffers and name in home.registered():
            owner, key = home.owner_of(name)
            buffer = owner._buffers[key]
            assert buffer is not None
            state = whole_state(mesh)
            if isinstance(buffer, DTensor):
                state = State.of(*(f"S{p.dim}" if isinstance(p, Shard) else "R" for p in buffer.placements))
            placed[name] = local_of(buffer), state
    return placed


def _renewed_from_now_on(name: str, param: torch.Tensor) -> tuple[torch.Tensor, State]:
    """Return a parameter that a program renews, as buffers are.

    Raises:
        RunError: it is stored in pieces.
    """
    if isinstance(param, DTensor) and any(isinstance(p, Shard) for p in param.placements):
        raise RunError(
            f"forward writes parameter '{name}' now, which it did not when the model was parallelized, and its pieces "
            "are on several ranks; parallelize the model as it is when it writes it, and load this state_dict()"
        )
    local = local_of(param)
    return local, whole_state(mesh_of(param.device_mesh)) if isinstance(param, DTensor) else State()


def with_buffers_of(home: Home, tied: Mapping[str, str], stage: Stage, now: Buffers) -> None:
    """Make a stage that was kept read the buffers of the one that ran last."""
    if stage.buffers is not now:
        wanted = {name: state for name, (_, state) in stage.buffers.items()}
        stage.buffers.update(_placed_again(home, tied, now, wanted, stage.device_mesh))
        stage.follow_buffers()


def _placed_again(
    home: Home, tied: Mapping[str, str], now: Buffers, wanted: Mapping[str, State], device_mesh: DeviceMesh
) -> Buffers:
    """Return the module's own buffers in the placements that a program wants: mostly those that they have.

    Args:
        now: the buffers of the program that ran last; tensors that its code made stay out.
    """
    names: dict[str, list[tuple[torch.nn.Module, str]]] = {}
    for name in home.registered():
        source = tied.get(name, name)
        names.setdefault(source if source in now else name, []).append(home.owner_of(name))
    placed: Buffers = {}
    for name, owners in names.items():
        if name not in now:
            continue
        owner, key = owners[0]
        shown, state = owner._buffers.get(key, owner._parameters.get(key)), now[name][1]
        assert shown is not None
        local = local_of(shown)
        if wanted.get(name, state) != state:
            whole = joined(local, state, shown.shape, device_mesh)
            shape, state = tuple(whole.shape), wanted[name]
            local = local_shard(whole, state, device_mesh).clone(memory_format=torch.contiguous_format)
            value = as_dtensor(local, state, shape, device_mesh) if state.is_cut else local
            for owner, key in owners:
                owner._buffers[key] = value
        placed[name] = local, state
    return placed
