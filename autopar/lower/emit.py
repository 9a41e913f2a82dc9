"""Lowering: a graph and a plan become one SPMD program, an FX graph of local ops and explicit collectives.

Every rank runs the same code; what differs is its data and, inside collectives, its coordinate. The passes are:

1. placeholders: parameters in their used placement, buffers, the batch, the seed of random ops;
2. every operator in order, on local shapes, or its distributed lowering; operators that overlap the collectives of
   another one are between its parts (:mod:`autopar.rules.lowering_helpers.overlapped_steps`);
3. before each operator, the steps of the plan's reshard paths that bring its inputs to the states it needs, each once;
4. after the last reader of a tensor that is regathered, recomputed or refilled for the backward, its release;
5. outputs in the plan's placements, new values of updated buffers after them.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.fx

from autopar.errors import PlanError
from autopar.lower.collectives import state_step
from autopar.lower.freed_tensors import backwards_of, give_up
from autopar.lower.offloaded import settle
from autopar.lower.program import Program, Slot
from autopar.lower.regather import free_until_backward
from autopar.lower.segments import make_again
from autopar.plans.plan import StagePlan, reshard_key, segment_numbers
from autopar.plans.regather import makes_memory, regathered, segment_outputs, waiting
from autopar.rules.aliasing import may_alias
from autopar.rules.families.torch_draws import by_torch, whole_draw
from autopar.rules.local_calls import Seed, ShardSize, gives_list, is_told_device, local_call
from autopar.rules.lowering_helpers.local_shard import length_of
from autopar.rules.lowering_helpers.overlapped_steps import OverlappedStep, beside, in_order, lowering_in_parts
from autopar.rules.notation import CallPart
from autopar.rules.operator_call import In, call_of
from autopar.rules.registry import rules_of
from autopar.rules.saved_tensors import saved_of
from autopar.rules.strategy import Strategy, strategy_in_plan
from autopar.words.graph import Graph, Node, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import State, Step, whole_state
from autopar.words.shards import local_shape
from autopar.words.trees import PyTree


def lower(
    graph: Graph, plan: StagePlan, device: str | torch.device = "cpu", draws_by_torch: bool = False
) -> Program:
    """Return the program of ``plan``.

    With ``draws_by_torch`` random operators draw as :mod:`autopar.rules.families.torch_draws` says.

    Raises:
        PlanError: the plan is for another graph, or leaves out an operator or a reshard path.
    """
    if plan.fingerprint != graph.fingerprint:
        raise PlanError(
            f"the plan was made for a model with fingerprint {plan.fingerprint}, this one has {graph.fingerprint}: "
            "shapes, operators or names differ; plan this model again"
        )
    return _Emitter(graph, plan, torch.device(device), draws_by_torch).emit()


class _Emitter:
    def __init__(self, graph: Graph, plan: StagePlan, device: torch.device, draws_by_torch: bool) -> None:
        self.graph, self.plan, self.device, self.draws_by_torch = graph, plan, device, draws_by_torch
        self.mesh = plan.mesh
        self.fx = torch.fx.Graph()
        self.slots: list[Slot] = []
        self.value: dict[tuple[Ref, State], torch.fx.Node] = {}
        self.made: dict[Ref, State] = {}
        self.before: dict[Ref, dict[State, State]] = {}
        self.seed: torch.fx.Node | None = None
        self.names = {"seed"}
        self.segments = segment_numbers(graph, plan.recompute)
        self.chosen: dict[int, Strategy] = {}
        self.rules = rules_of(graph)
        self.parts: dict[int, tuple[list[CallPart], torch.fx.Node]] = {}  # those to come, and the call before them
        self.ends: dict[torch.fx.Node, torch.fx.Node] = {}  # by the parts before it, that which gives the result
        self.backwards: dict[torch.fx.Node, torch.fx.Node] = {}  # by the operator whose backward they stand for

    def emit(self) -> Program:
        graph, rules = self.graph, self.rules
        for i, node in enumerate(graph.nodes):
            if node.kind != "op":
                self._placeholder(i, node)
        if any(rule is not None and rule.random for rule in rules):
            self.seed = self.fx.placeholder("seed")
            whole = whole_state(self.mesh)
            self.seed.meta["autopar"] = {"outs": [whole]}
            self.slots.append(Slot("seed", "seed", whole, (), "int64"))
        for i, node in graph.of_kind("op"):
            self.chosen[i] = self._strategy(i, node)
        plans = beside(graph, rules, self.mesh, self.chosen, self.plan.reshard_paths, self.segments)
        begins = {(m.first or (m.op,))[0]: m for m in plans}
        computes, ends = {m.op: m for m in plans}, {(m.last or (m.op,))[-1]: m for m in plans}
        for i in in_order(graph, plans):
            last = next(iter(reversed(self.fx.nodes)))
            if i in begins:
                self._begin(begins[i])
            if i in computes:
                self._compute(computes[i])
            else:
                self._op(i)
            if i in ends:
                self._end(ends[i])
            if i in self.segments:
                self._belongs(last, self.segments[i])
        leaving = self._free_copies()
        outputs: list[PyTree] = []
        for out, state in zip(graph.outputs, self.plan.outputs, strict=True):
            outputs.append(self._get(out, state) if isinstance(out, Ref) and state is not None else out)
        for name, ref in graph.updates.items():
            outputs.append(self._get(ref, self.plan.buffers[name]))
        if leaving:
            made = tuple(x for x in outputs[: len(self.graph.outputs)] if isinstance(x, torch.fx.Node))
            self.fx.call_function(settle, (tuple(leaving), made)).meta["autopar"] = {"alias": False}
        self.fx.output(tuple(outputs))
        module = torch.fx.GraphModule(torch.nn.Module(), self.fx, class_name="Program")
        return Program(module, tuple(self.slots), self.plan.outputs, tuple(graph.updates), self.mesh, self.device)

    def _placeholder(self, i: int, node: Node) -> None:
        if node.kind == "param":
            choice = self.plan.params.get(node.target)
            if choice is None:
                raise PlanError(f"the plan does not say how parameter '{node.target}' is stored")
            state = choice.used
        elif node.kind == "buffer":
            state = self.plan.buffers.get(node.target, whole_state(self.mesh))
        else:
            state = self.plan.inputs.get(node.target, whole_state(self.mesh))
        name = _identifier(node.name)
        while name in self.names:
            name += "_"
        self.names.add(name)
        fx = self.fx.placeholder(name)
        fx.meta["autopar"] = {"outs": [state], "node": node.name}
        if node.kind == "buffer":
            kind = "renewed" if node.target in self.graph.updates else "changing" if node.out.is_float else ""
            fx.meta["autopar"]["buffer"] = kind  # for segments that read it
        self.slots.append(Slot(node.kind, node.target, state, node.out.shape, node.out.dtype, node.needs_grad))
        self._made(Ref(i), state, fx)

    def _made(self, ref: Ref, state: State, fx: torch.fx.Node) -> None:
        self.value[ref, state] = fx
        self.made[ref] = state
        steps = self.plan.reshard_paths.get(reshard_key(self.graph, ref), ())
        self.before[ref] = {dst: src for src, dst in steps}

    def _get(self, ref: Ref, state: State) -> torch.fx.Node:
        """Return ``ref`` in ``state``; reshard steps are emitted where first needed."""
        emitted = self.value.get((ref, state))
        if emitted is not None:
            return emitted
        src = self.before[ref].get(state)
        if src is None:
            raise PlanError(
                f"tensor {reshard_key(self.graph, ref)} is made as {self.made[ref].text} and needed as {state.text}, "
                "and the plan has no reshard path between them; plan the model again, or remove 'routes' from the plan "
                "file to have them searched again"
            )
        x = self._get(ref, src)
        axis = Step.between(src, state).axis
        if self.mesh.size(axis) == 1:
            fx = x
        else:
            fn, args = state_step(self.graph.spec(ref).shape, src, state, self.mesh)
            fx = self.fx.call_function(fn, (x, *args))  # type: ignore[arg-type]
            fx.meta["autopar"] = {
                "step": (src, state), "outs": [state], "ins": [src], "ref": ref,
                "alias": not makes_memory(src, state, self.mesh),
            }  # fmt: skip
        self.value[ref, state] = fx
        return fx

    def _free_copies(self) -> list[torch.fx.Node]:
        """Free regathered and recomputed tensors after their last reader, until the backward.

        Return the last ones whose copies to the host may be under way at the end.
        """
        plan = self.plan
        copies = regathered(self.graph, self.mesh, plan.reshard_paths, plan.gather_again, self.segments, self.chosen)
        remade = {ref: self.made[ref] for ref in segment_outputs(self.graph, plan.make_again, self.segments)}
        waits = waiting(self.graph, plan.memory, self.segments)
        position = {fx: float(k) for k, fx in enumerate(self.fx.nodes)} if copies or remade or waits else {}
        read = {ref: self._readers(self.value[ref, self.made[ref]], position) for ref in waits}
        for ref, state in remade.items():
            whole = self.value[ref, state]
            last, results = self._readers(whole, position)
            outside = tuple(fx for fx in results if "segment" not in fx.meta)  # what runs again fills what it reads
            backwards = self._backwards(outside, position)
            with self.fx.inserting_after(max((last, *backwards), key=position.__getitem__)):
                freed = self.fx.call_function(make_again, (whole, backwards))
            position[freed] = position[last] + 0.5
        for (ref, state), (source, steps) in copies.items():
            copy = self.value[ref, state]
            last, results = self._readers(copy, position)
            gathers = []
            for src, dst in steps:
                gather, args = state_step(self.graph.spec(ref).shape, src, dst, self.mesh)
                gathers.append((gather.__name__, args))  # type: ignore[attr-defined]
            backwards = self._backwards(results, position)
            arguments: tuple[PyTree, ...] = copy, self.value[ref, source], tuple(gathers), backwards
            with self.fx.inserting_after(max((last, *backwards), key=position.__getitem__)):
                freed = self.fx.call_function(free_until_backward, arguments)
            position[freed] = position[last] + 0.5  # it may read a piece that lies in another copy
        in_order = sorted(waits.items(), key=lambda item: (position[read[item[0]][0]], item[0].node))
        away: list[torch.fx.Node] = []  # by decisions with copies beside compute
        for ref, record in in_order:
            whole, (last, results) = self.value[ref, self.made[ref]], read[ref]
            asking = (*results, whole) if self._keeps_its_result(ref.node) else results
            backwards = self._backwards(asking, position)
            before = (away[-record.ahead],) if 0 < record.ahead <= len(away) else ()
            latest = away[-1:] if record.ahead else []
            with self.fx.inserting_after(max((last, *backwards, *latest), key=position.__getitem__)):
                freed = self.fx.call_function(give_up, (whole, backwards, record.name, *before))
            freed.meta["autopar"] = {"decision": record.name}
            if record.ahead:
                position[freed] = position[last] + 0.5 + 1e-6 * len(away)
                away.append(freed)
        return away[-max((record.ahead for record in waits.values()), default=0):] if away else []

    def _keeps_its_result(self, i: int) -> bool:
        """Return whether an operator's backward reads its one result."""
        rule = self.rules[i]
        assert rule is not None
        saved = saved_of(self.graph, i, rule, self.chosen[i], self.mesh)
        (result,) = saved.results
        return result.source is None and saved.memories[result.memory][1]

    def _backwards(
        self, readers: tuple[torch.fx.Node, ...], position: dict[torch.fx.Node, float]
    ) -> tuple[torch.fx.Node, ...]:
        """Return a node for each reader's backward, taken where it ran: its result may be freed before others run."""
        nodes = []
        for reader in readers:
            if reader not in self.backwards:
                with self.fx.inserting_after(reader):
                    taken = self.backwards[reader] = self.fx.call_function(backwards_of, (reader,))
                taken.meta["autopar"] = {"alias": False}
                position[taken] = position[reader] + 0.25
            nodes.append(self.backwards[reader])
        return tuple(nodes)

    def _readers(
        self, whole: torch.fx.Node, position: Mapping[torch.fx.Node, float]
    ) -> tuple[torch.fx.Node, tuple[torch.fx.Node, ...]]:
        """Return the last reader of a tensor and its views, and all operators among the readers."""
        faces, readers = [whole], {}
        for face in faces:
            for part in face.users:
                user = self.ends.get(part, part)
                readers[user] = None
                if user.meta.get("autopar", {}).get("alias", True):
                    faces.append(user)
        results = tuple(fx for fx in readers if "node" in fx.meta.get("autopar", {}) and fx not in faces)
        return max(readers, key=position.__getitem__), results

    def _belongs(self, last: torch.fx.Node, segment: int) -> None:
        """Put what was emitted after a node into a segment."""
        for fx in reversed(self.fx.nodes):
            if fx is last:
                return
            fx.meta["segment"] = segment

    def _strategy(self, i: int, node: Node) -> Strategy:
        names, rule = self.plan.ops.get(node.name), self.rules[i]
        if names is None:
            raise PlanError(f"the plan does not say how {node.where} is cut")
        assert rule is not None
        return strategy_in_plan(self.graph, node, rule, names, self.mesh)

    def _begin(self, overlap: OverlappedStep) -> None:
        """Emit the first part of an operator that others overlap, after the collectives that those others need."""
        i = overlap.op
        rule = self.rules[i]
        assert rule is not None
        self._reads(overlap.first)
        _, args, kwargs = self._call(i)
        lowering = lowering_in_parts(rule, self.chosen[i], self.mesh)
        assert lowering is not None and lowering.in_parts is not None
        first, *rest = lowering.in_parts(args, kwargs)
        self.parts[i] = rest, self._part(i, first)

    def _compute(self, overlap: OverlappedStep) -> None:
        """Emit the second part."""
        (second, last), leaving = self.parts[overlap.op]
        self._reads(overlap.last)
        self.parts[overlap.op] = [last], self._part(overlap.op, second, leaving)

    def _end(self, overlap: OverlappedStep) -> None:
        """Emit the last part, which gives the result of the operator."""
        (last,), computing = self.parts.pop(overlap.op)
        self._made_by(overlap.op, last.function, (computing, *last.args), dict(last.kwargs))
        end = next(iter(reversed(self.fx.nodes)))
        self.ends |= {computing: end, computing.all_input_nodes[0]: end}

    def _part(self, i: int, part: CallPart, *before: torch.fx.Node) -> torch.fx.Node:
        fx = self.fx.call_function(part.function, (*before, *part.args), dict(part.kwargs))
        fx.meta["autopar"] = {"part": self.graph.nodes[i].name, "alias": False}
        return fx

    def _reads(self, ops: Sequence[int]) -> None:
        """Emit the reshard steps to what the operators `ops` read."""
        for i in ops:
            for ref, state in zip(self.graph.nodes[i].refs, self.chosen[i].ins, strict=True):
                if ref.node not in ops:
                    self._get(ref, state)

    def _op(self, i: int) -> None:
        self._made_by(i, *self._call(i))

    def _call(self, i: int) -> tuple[Callable[..., object], tuple[PyTree, ...], dict[str, PyTree]]:
        """Return what a rank calls for an operator, on values that are emitted here."""
        node, rule, strategy = self.graph.nodes[i], self.rules[i], self.chosen[i]
        assert rule is not None
        inputs = [self._get(ref, state) for ref, state in zip(node.refs, strategy.ins, strict=True)]
        whole = call_of(node, self.graph.spec)
        number = node.site if node.site >= 0 else i
        site: object = number if node.rows == () else (number, node.rows)
        by_torch_here = self.draws_by_torch and rule.random
        if by_torch_here:
            draw = whole_draw(node, self.graph.spec)
            site = number, None if draw is None else tuple(draw)
        call = local_call(whole, rule, strategy.options, self.mesh, site=site)

        def fill(value: PyTree) -> PyTree:
            if isinstance(value, In):
                return inputs[value.position]
            if isinstance(value, Seed):
                return self.seed
            if isinstance(value, ShardSize):
                return self.fx.call_function(length_of, (value.n, value.axes))
            if isinstance(value, (tuple, list)):
                return type(value)(fill(v) for v in value)
            if isinstance(value, dict):
                return {k: fill(v) for k, v in value.items()}
            return value

        kwargs = {k: fill(v) for k, v in call.kwargs.items()}
        if is_told_device(whole):
            kwargs["device"] = self.device
        fn = by_torch(call.fn) if by_torch_here else call.fn
        return fn, tuple(fill(a) for a in call.args), kwargs

    def _made_by(self, i: int, fn: Callable[..., object], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        """Emit the call that gives the results of an operator."""
        node, strategy = self.graph.nodes[i], self.chosen[i]
        fx = self.fx.create_node("call_function", fn, args, kwargs, name=node.name)
        fx.meta["autopar"] = {
            "node": node.name, "ins": list(strategy.ins), "outs": list(strategy.outs), "options": strategy.names,
            "alias": may_alias(call_of(node, self.graph.spec)),
        }  # fmt: skip
        if len(node.outs) == 1 and not gives_list(fn):
            self._made(Ref(i), strategy.outs[0], fx)
            return
        states = iter(strategy.outs)
        for number, out in enumerate(node.outs):
            if out is not None:
                item = self.fx.call_function(operator.getitem, (fx, number))
                state = next(states)
                item.meta["autopar"] = {"outs": [state], "item": number}
                self._made(Ref(i, number), state, item)


def _identifier(name: str) -> str:
    """Return a Python name for a parameter, buffer or input; modules in a Sequential begin with a digit."""
    name = re.sub(r"\W", "_", name)
    return f"_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else name


def used_shape(slot: Slot, mesh: Mesh) -> tuple[int, ...]:
    """Return the local shape of a program input."""
    return local_shape(slot.shape, slot.state, mesh)
