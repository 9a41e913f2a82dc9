"""Choices that pins leave: strategies of operators, storage of parameters, placements of inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from autopar.errors import InfeasibleError, MeshError, PlanError, first_few
from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.integer_program import Problem
from autopar.planner.intra_op.pins.host_storage import HostStorage, why_never_there
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.intra_op.pins.small_parameters import (
    TooSmallError,
    asks_for_what_fits,
    memory_of,
    stored_and_lifetime,
    why_too_small,
)  # fmt: skip
from autopar.planner.intra_op.written_buffers import held_whole, holds_whole
from autopar.plans.plan import ParamChoice
from autopar.plans.prices import ONE_VERSION
from autopar.rules.experts.expert_load import ROUTED
from autopar.rules.notation import Rule
from autopar.rules.option_names import factor_and_block, listed, option_written
from autopar.rules.strategy import Strategy, options_of, why_not_cut
from autopar.words.graph import Graph, Node, Ref
from autopar.words.labels import matches, op_labels
from autopar.words.meshes import Mesh
from autopar.words.placements import REPLICATE, State, kinds_listed
from autopar.words.shards import fits

SHOWN = 20
"""Pins that do not fit, that a message lists."""


class PinnedChoices:
    """The user's constraints as predicates over strategies and parameter choices."""

    def __init__(self, graph: Graph, rules: Sequence[Rule | None], mesh: Mesh, options: Options) -> None:
        self.graph, self.mesh, self.options = graph, mesh, options
        self.ops: dict[str, dict[int, str]] = {}
        self.params: dict[str, str] = {}
        self.offered: dict[str, dict[str, None]] = {}  # how pinned parameters could be stored
        self.uncut = {graph.nodes[i].name: positions for i, positions in held_whole(graph).items()}
        self._ops(rules)
        self._params()
        self.host = HostStorage(graph, options.offload, self.params)
        never = why_never_there(options.optimizer, [options.versions]) if self.host.is_asked else ""
        if never:
            other = "a schedule that drains" if options.versions != ONE_VERSION else "adamw"
            raise PlanError(f"{never}: leave offload to activations, or plan for {other}")
        self._places()

    def _ops(self, rules: Sequence[Rule | None]) -> None:
        axes = {name: a for a, (name, _) in enumerate(self.mesh)}
        labels = op_labels(self.graph) if self.options.constraints else {}
        for pattern, wanted in (self.options.constraints or {}).items():
            hit: set[str] = set()
            offered: dict[str, None] = {}
            absent: dict[str, str] = {}
            seen = False
            for axis, factor in wanted.items():
                if axis not in axes:
                    raise PlanError(f"constraint '{pattern}' names axis '{axis}'; the mesh has {', '.join(axes)}")
                name = option_written(factor)
                for node, rule in zip(self.graph.nodes, rules, strict=True):
                    if node.kind != "op" or rule is None or not matches(pattern, node, labels[node.name]):
                        continue
                    seen = True
                    names = list(options_of(self.graph, node, rule, rule.blocks_on(self.mesh)))
                    offered[f"{labels[node.name]}: {listed(names, ' ')}"] = None
                    if name in rule.absent:
                        absent.setdefault(name, rule.absent[name])
                    if name in names:
                        size = self.mesh.size_of[axis]
                        cut, block = factor_and_block(name)
                        why = why_not_cut(rule, cut, [(size, block)]) if cut in rule.sizes else ""
                        if why:
                            raise InfeasibleError(
                                f"constraint '{pattern}': factor '{name}' of {node.where} {why}, on axis '{axis}'; use "
                                f"an axis size that divides {rule.sizes[cut]}"
                            )
                        self.ops.setdefault(node.name, {})[axes[axis]] = name
                        hit.add(axis)
            if not seen:
                modules = sorted({n.module for n in self.graph.nodes if n.kind == "op" and n.module})
                routed = [labels[n.name] for n in self.graph.nodes if n.target in ROUTED]
                one = f"; a loop over experts is one op: {first_few(routed)}" if routed else ""
                raise PlanError(f"constraint '{pattern}' matches no op; modules are {first_few(modules)}{one}")
            for axis in wanted:
                if axis not in hit:
                    lines = "\n  ".join(list(offered)[:6])
                    why = f" ({absent[wanted[axis]]})" if wanted[axis] in absent else ""
                    raise PlanError(
                        f"constraint '{pattern}': no op there has factor '{wanted[axis]}'{why}; they offer\n  {lines}"
                    )

    def _params(self) -> None:
        request: dict[str, str] = {}
        for pattern, how in (self.options.params or {}).items():
            matched = [n.target for _, n in self.graph.of_kind("param") if fnmatchcase(n.target, pattern)]
            if not matched:
                names = [n.target for _, n in self.graph.of_kind("param")]
                raise PlanError(f"'{pattern}' matches no parameter; parameters are {first_few(names)}")
            placement, lifetime = stored_and_lifetime(how)
            if lifetime == "use" and self.options.versions.number > 1:
                raise PlanError(
                    f"'{pattern}': '{how}' asks for a copy gathered for each use, and a pipeline that keeps "
                    f"{self.options.versions.number} versions of its weights gathers them once a step: write "
                    f"'{placement}', or plan for a schedule that drains"
                )
            if placement != REPLICATE and not _is_storage(placement, self.mesh):
                raise PlanError(
                    f"'{pattern}': '{how}' is neither 'replicate' nor a placement with {len(self.mesh)} parts, each a "
                    "shard or I, such as "
                    + State.of("S0", *["I"] * (len(self.mesh) - 1)).text
                    + ", after which may stand a lifetime, 'step' or 'use', and 'host' or 'device'"
                )
            request.update(dict.fromkeys(matched, pattern))
        self._params_large_enough(request)

    def _params_large_enough(self, request: Mapping[str, str]) -> None:
        """Pin parameters as requested, or replicated if they are too small and a wildcard matched them."""
        hows = self.options.params or {}
        shapes = {node.target: node.out.shape for _, node in self.graph.of_kind("param")}
        small = {name: why_too_small(name, shapes[name], hows[pattern], self.mesh) for name, pattern in request.items()}
        lines: list[str] = []
        names: list[str] = []
        for name in shapes:
            if name not in request:
                continue
            pattern = request[name]
            may_stay = asks_for_what_fits(pattern)
            self.params[name] = hows[pattern]
            if small[name] and may_stay:
                self.params[name] = " ".join([REPLICATE, memory_of(hows[pattern])]).strip()
            if small[name] and not may_stay:
                shape = " ".join(map(str, shapes[name]))
                lines.append(f"{name} [{shape}] as {stored_and_lifetime(hows[pattern])[0]}: {small[name]}")
                names.append(name)
        if lines:
            shown = "\n  ".join(lines[:SHOWN]) + (f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
            raise TooSmallError(
                f"{len(lines)} of {len(self.params)} parameters that were pinned are too small\n  {shown}\n  use "
                "smaller axes, or except them: a later pattern of params= goes before an earlier one, so end "
                f"it with '{names[0]}': 'replicate' and so on (--keep-replicated '{names[0]}')"
            )

    def _places(self) -> None:
        for name, state in (self.options.inputs or {}).items():
            node = next((n for _, n in self.graph.of_kind("input") if n.target == name), None)
            if node is None:
                raise PlanError(
                    f"no input '{name}'; inputs are {', '.join(n.target for _, n in self.graph.of_kind('input'))}"
                )
            self._place(f"input '{name}'", node.out.shape, state, "SI" if node.needs_grad else "SR")
        for number, state in (self.options.outputs or {}).items():
            outputs = self.graph.outputs
            if not 0 <= number < len(outputs):
                raise PlanError(f"no output {number}; the model has {len(outputs)}, counted from 0")
            out = outputs[number]
            if not isinstance(out, Ref):
                raise PlanError(f"output {number} is no tensor and has no placement")
            grad = self.graph.nodes[out.node].needs_grad and self.graph.spec(out).is_float
            self._place(f"output {number}", self.graph.spec(out).shape, state, "SIRP" if grad else "SRP")

    def _place(self, what: str, shape: tuple[int, ...], state: State, kinds: str) -> None:
        if len(state) != len(self.mesh):
            raise PlanError(
                f"{what}: {state.text} has {len(state)} placements, the mesh {len(self.mesh)} axes"
            )
        if any(p.kind not in kinds for p in state) or not fits(shape, state, self.mesh):
            mesh = self.mesh.shown(", ")
            allowed = kinds_listed(kinds)
            raise PlanError(
                f"{what} of shape {shape} cannot be placed as {state.text} on mesh {mesh}; use {allowed}, and "
                "shards of dims that exist and have something for every rank"
            )

    def uniform(self, folding: Fold) -> bool:
        """Return whether all nodes of every fold class are pinned alike."""
        nodes = self.graph.nodes
        return not (self.ops or self.params or self.uncut) or all(
            self.uncut.get(nodes[i].name) == self.uncut.get(nodes[r].name)
            and self.ops.get(nodes[i].name) == self.ops.get(nodes[r].name)
            and self.params.get(nodes[i].target) == self.params.get(nodes[r].target)
            for i, r in enumerate(folding.representative)
        )

    def op(self, node: Node, strategy: Strategy) -> bool:
        """Return whether pins allow a strategy; without, whether it keeps whole what other operators write to."""
        wanted = self.ops.get(node.name)
        if wanted is None:
            return holds_whole(strategy, self.uncut.get(node.name, ()))
        return all(
            strategy.options[a].name == name or self.mesh.size(a) == 1 for a, name in wanted.items()
        )

    def param(self, node: Node, choice: ParamChoice) -> bool:
        """Return whether the pins allow an option to store a parameter."""
        how = self.params.get(node.target)
        if how is None:
            return True
        placement, lifetime = stored_and_lifetime(how)
        self.offered.setdefault(node.target, {})[_said(choice)] = None
        if placement == REPLICATE:
            return not choice.stored.is_cut and (not choice.on_host or not lifetime or choice.lifetime == lifetime)
        pinned = State.parse(placement, self.mesh, f"'{node.target}'")
        is_stored_so = all(
            # on one rank, a piece is the whole; whole is I where there is a gradient, and R of frozen parameters
            stored == wanted or size == 1 or not (stored.is_shard or wanted.is_shard)
            for stored, wanted, (_, size) in zip(choice.stored, pinned, self.mesh, strict=True)
        )
        gathers = choice.on_host or any(
            a.is_shard and not b.is_shard for a, b in zip(choice.stored, choice.used, strict=True)
        )
        return is_stored_so and (not lifetime or not gathers or choice.lifetime == lifetime)

    def require(self, problem: Problem) -> None:
        """Name the items that the pins leave without a strategy."""
        empty = [item.name for item in problem.items if not item.seconds]
        if not empty:
            return
        lines = []
        for name in empty:
            node = self.graph.nodes[self.graph.index[name]] if name in self.graph.index else None
            pinned = {self.mesh.name(a): f for a, f in self.ops.get(name, {}).items()}
            pinned_param = self.params.get(node.target) if node else None
            where = node.where if node else name
            if node is not None and pinned_param is not None:
                shape, offered = " ".join(map(str, node.out.shape)), first_few(list(self.offered.get(node.target, ())))
                lines.append(f"parameter '{node.target}' [{shape}]: pinned to '{pinned_param}'; there is {offered}")
                continue
            lines.append(f"{where}: pinned to {pinned or 'what its neighbours were pinned to'}")
        raise InfeasibleError(
            "the pins leave no strategy for\n  " + "\n  ".join(lines[:SHOWN])
            + (f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
            + "\n  remove or change one of them"
        )


def _is_storage(text: str, mesh: Mesh) -> bool:
    """Return whether a text names, for each axis of a mesh, a placement in which a parameter can be stored."""
    try:
        return not any(placement.is_pending for placement in State.parse(text, mesh, ""))
    except MeshError:
        return False


def _said(choice: ParamChoice) -> str:
    """Return how a choice stores a parameter, as a pin would say it: ``'S0,I use host'``."""
    where = " host" if choice.on_host else ""
    return f"'{choice.stored.text} {choice.lifetime}{where}'"
