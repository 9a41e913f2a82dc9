"""Text and graph -> plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase, translate
from math import prod
from pathlib import Path
from typing import Any

from autopar.clusters import check_mesh
from autopar.errors import AutoparError, MeshError, PlanError, closest
from autopar.graph import Graph, Ref
from autopar.labels import matches, op_labels
from autopar.pins import parse_kept
from autopar.placements import State, fits, format_mesh, format_state, has_pieces, parse_state, step_is_legal
from autopar.placements import path as way
from autopar.plan import ParamChoice, Pins, Plan, Price, Recompute, Solution, route_key, segment_numbers
from autopar.planfile.form import Document, Failures, parse
from autopar.planfile.write import decisions, rest, route_keys
from autopar.planner.intra_op.complete import complete, demand, needs
from autopar.planner.intra_op.ledger import ledger, seconds_again
from autopar.planner.intra_op.price import pricer
from autopar.planner.intra_op.recompute import segments_of
from autopar.rules.notation import Option
from autopar.rules.registry import rules_of
from autopar.rules.strategy import Strategy, can_be_cut, combine, options_of, why_not_cut
from autopar.staging import first_op
from hardware_profiles import Cluster
from hardware_profiles.strict import Unreadable, read_text

Route = tuple[tuple[State, State], ...]


def load(path: str | Path, graph: Graph, cluster: Cluster | None = None) -> Plan:
    """Read a plan file for a model; see :func:`loads`."""
    return bind(open_(path), graph, cluster)


def open_(path: str | Path) -> Document:
    """A plan file, its form checked."""
    return parse(read(path), str(path), Path(path).parent)


def read(path: str | Path) -> str:
    """The text of a plan file.

    Raises:
        PlanError: the file cannot be read.
    """
    try:
        return read_text(path)
    except Unreadable as error:
        raise PlanError(f"cannot read the plan {path}: {error}") from error


def loads(text: str, graph: Graph, cluster: Cluster | None = None, *, where: str = "plan") -> Plan:
    """The plan in ``text``, for the model with this graph.

    Args:
        cluster: prices what has to be priced anew; by default the cluster that the file names, and only when needed.

    Raises:
        PlanError: whatever does not fit, all failures at once, each with its place in the file, the numbers on both
            sides and what to do.
    """
    return bind(parse(text, where), graph, cluster)


def bind(
    document: Document, graph: Graph, cluster: Cluster | Callable[[], Cluster] | None = None, *,
    devices: Sequence[int] | None = None, anew: bool = False,
) -> Plan:  # fmt: skip
    """The plan of a parsed file for the model with this graph; see :func:`loads`.

    Args:
        cluster: as for :func:`loads`, or what gives it; called only when it is needed.
        devices: on which the plan is priced, in row-major order of its mesh; by default the cluster's first.
        anew: price it even though nothing was edited.
    """
    raw, bad = document.raw, Failures(document.where)
    if raw["fingerprint"] != graph.fingerprint:
        bad.add(
            "fingerprint",
            f"the plan is for a model with fingerprint {raw['fingerprint']}, this one has {graph.fingerprint} "
            "(operators, shapes or names differ); plan this model again, or write its fingerprint into the file to "
            "try these decisions on it",
        )
        bad.raise_if_any()
    reader = _Binder(document, graph, bad, cluster or document.cluster, devices, anew)
    decided = reader.ops()
    params = reader.params()
    buffers = reader.places("buffers", "buffer")
    inputs = reader.places("inputs", "input")
    outputs = reader.outputs()
    routes = reader.routes()
    pins = reader.pins()
    again = reader.recompute()
    bad.raise_if_any()
    return replace(reader.plan(decided, params, buffers, inputs, outputs, routes, pins, again), pins=pins)


class _Binder:
    """Meets the entries of a file with the nodes of a graph."""

    def __init__(
        self, document: Document, graph: Graph, bad: Failures, cluster: Cluster | Callable[[], Cluster],
        devices: Sequence[int] | None, anew: bool,
    ) -> None:  # fmt: skip
        self.cluster, self.devices, self.anew = cluster, devices, anew
        self.raw, self.mesh, self.where = document.raw, document.mesh, document.where
        self.graph, self.bad = graph, bad
        self.rules = rules_of(graph)
        self.labels = op_labels(graph)
        self.options: dict[int, dict[str, Option]] = {}
        self.axes = {name: a for a, (name, _) in enumerate(self.mesh)}

    # -- ops

    def ops(self) -> dict[int, Strategy]:
        """Strategies of the ops that the file names, and of those that are whole because it does not."""
        ops = [(i, node) for i, node in enumerate(self.graph.nodes) if node.kind == "op"]
        last: dict[int, tuple[str, dict[str, str]]] = {}  # the entry that counts for each op
        for pattern, entry in self.raw["ops"].items():
            path = f"ops[{json.dumps(pattern)}]"
            for axis in entry:
                if axis not in self.axes:
                    self.bad.add(f"{path}.{axis}", f"the mesh has no axis '{axis}'; it has {', '.join(self.axes)}")
            match = re.compile(translate(pattern)).match
            found = [i for i, n in ops if match(self.labels[n.name])]
            if not found:
                found = [i for i, n in ops if match(n.module) or n.name == pattern]
                able = [i for i in found if all(_option(f) in self._options(i) for f in entry.values())]
                found = able or found  # a module: those of its ops that have the factors
            if not found:
                known = [*self.labels.values(), *dict.fromkeys(n.module for _, n in ops if n.module)]
                self.bad.add(path, f"matches no op of the model; {closest(pattern, known)}")
            last.update((i, (path, entry)) for i in found)
        decided = {}
        for i, node in ops:
            if i in last:
                path, entry = last[i]
                strategy = self._named(path, i, entry)
                if strategy is not None and self._divides(path, i, strategy):
                    decided[i] = strategy
            elif node.hot:
                decided[i] = combine([self._options(i)["I"]] * len(self.mesh))
        return decided

    def _options(self, i: int) -> dict[str, Option]:
        """The options of an op on one axis, by name."""
        if i not in self.options:
            rule = self.rules[i]
            assert rule is not None
            self.options[i] = options_of(self.graph, self.graph.nodes[i], rule)
        return self.options[i]

    def _named(self, path: str, i: int, entry: Mapping[str, str]) -> Strategy | None:
        """The strategy that an entry names for an op."""
        options, fine = self._options(i), True
        picked = [options["I"]] * len(self.mesh)
        for axis, factor in entry.items():
            if _option(factor) not in options:
                self._no_factor(f"{path}.{axis}", i, factor, options)
                fine = False
            elif axis in self.axes:
                picked[self.axes[axis]] = options[_option(factor)]
        return combine(picked) if fine else None

    def _no_factor(self, path: str, i: int, factor: str, options: Mapping[str, Any]) -> None:
        node, rule = self.graph.nodes[i], self.rules[i]
        offers = ", ".join("replicate" if o == "I" else o for o in options)
        self.bad.add(path, f"{node.where} has no factor '{factor}'; it offers {offers} (rule: {rule})")

    def _divides(self, path: str, i: int, strategy: Strategy) -> bool:
        """Whether an op can be cut so; if not, that is a failure."""
        node, rule = self.graph.nodes[i], self.rules[i]
        assert rule is not None
        cut: dict[str, list[int]] = {}
        for name, (axis, size) in zip(strategy.names, self.mesh, strict=True):
            if name in rule.sizes and size > 1:
                cut.setdefault(name, []).append(size)
                if why := why_not_cut(rule, name, cut[name]):
                    self.bad.add(
                        f"{path}.{axis}",
                        f"factor '{name}' of {node.where} {why}; use another factor, or a mesh whose axes divide "
                        f"{rule.sizes[name]}",
                    )
                    return False
        if not can_be_cut(rule, strategy.options, self.mesh):
            self.bad.add(path, f"{node.where} cannot be cut so: together, these factors need equal pieces; use others")
            return False
        outs = [o for o in node.outs if o is not None]
        shapes = [*(self.graph.spec(r).shape for r in node.refs), *(o.shape for o in outs)]
        for shape, state in zip(shapes, (*strategy.ins, *strategy.outs), strict=True):
            if not fits(shape, state, self.mesh):
                self.bad.add(
                    path,
                    f"{node.where}: a tensor of shape {shape} cannot be cut as {format_state(state)} on mesh "
                    f"{format_mesh(self.mesh)}; use another factor",
                )
                return False
        return True

    # -- placements

    def _state(
        self, path: str, text: str, shape: Sequence[int], kinds: str, uneven: bool = False
    ) -> State | None:
        try:
            state = parse_state(text, self.mesh, path)
        except MeshError as error:
            self.bad.lines.append(str(error))
            return None
        for placement, (axis, _) in zip(state, self.mesh, strict=True):
            if placement[0] not in kinds:
                allowed = ", ".join("S<dim>" if k == "S" else k for k in kinds)
                self.bad.add(path, f"'{placement}' on axis '{axis}' is not possible here; use {allowed}")
                return None
        if not (has_pieces if uneven else fits)(shape, state, self.mesh):
            self.bad.add(
                path,
                f"a tensor of shape {tuple(shape)} cannot be cut as {text} on mesh {format_mesh(self.mesh)}; shard "
                "another dim, or keep it whole",
            )
            return None
        return state

    def _matched(self, section: str, every: Mapping[str, int]) -> dict[str, tuple[str, Any]]:
        """``{name: (path in the file, entry)}`` of the last entry that matches each name."""
        found: dict[str, tuple[str, Any]] = {}
        for pattern, entry in self.raw.get(section, {}).items():
            path = f"{section}[{json.dumps(pattern)}]"
            match = re.compile(translate(pattern)).match
            hits = [name for name in every if match(name)]
            if not hits:
                what = {"params": "parameter", "routes": "tensor"}.get(section, section[:-1])
                self.bad.add(path, f"matches no {what} of the model; {closest(pattern, every)}")
            found.update((name, (path, entry)) for name in hits)
        return found

    def params(self) -> dict[int, ParamChoice]:
        """How every parameter is kept."""
        nodes = {node.target: i for i, node in self.graph.of_kind("param")}
        found = self._matched("params", nodes)
        missing = [name for name in nodes if name not in found]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            self.bad.add("params", f"no entry for parameter {', '.join(missing[:4])}{more}; add one, or plan again")
        result = {}
        for name, (path, entry) in found.items():
            node = self.graph.nodes[nodes[name]]
            shape = node.out.shape
            stored = self._state(f"{path}.stored", entry["stored"], shape, "SI" if node.needs_grad else "SR", True)
            used = self._state(f"{path}.used", entry["used"], shape, "SIR" if node.needs_grad else "SR")
            if stored is None or used is None:
                continue
            if way(stored, used) is None:
                self.bad.add(
                    path,
                    f"'{name}' cannot go from stored {format_state(stored)} to used {format_state(used)} one axis at a "
                    "time, the last axis first; store it as it is used, or whole",
                )
                continue
            result[nodes[name]] = ParamChoice(stored, used, entry.get("lifetime", "step"))
        return result

    def places(self, section: str, kind: str) -> dict[str, State]:
        """Placements of buffers or inputs by name."""
        nodes = {node.target: i for i, node in self.graph.of_kind(kind)}
        result = {}
        for name, (path, text) in self._matched(section, nodes).items():
            node = self.graph.nodes[nodes[name]]
            state = self._state(path, text, node.out.shape, "SI" if node.needs_grad else "SR")
            if state is not None:
                result[name] = state
        return result

    def outputs(self) -> dict[int, State]:
        """Placements of outputs by position."""
        given = self.raw["outputs"]
        if len(given) != len(self.graph.outputs):
            self.bad.add("outputs", f"has {len(given)} entries, the model has {len(self.graph.outputs)} outputs")
            return {}
        result = {}
        for k, (text, out) in enumerate(zip(given, self.graph.outputs, strict=True)):
            if (text is None) != (not isinstance(out, Ref)):
                is_not = "is a tensor; give its placement" if text is None else "is no tensor; write null"
                self.bad.add(f"outputs[{k}]", f"output {k} of the model {is_not}")
            elif text is not None:
                state = self._state(f"outputs[{k}]", text, self.graph.spec(out).shape, "SIRP")
                if state is not None:
                    result[k] = state
        return result

    def routes(self) -> dict[str, Route]:
        """The routes that the file gives, by key of ``Plan.routes``."""
        keys = route_keys(self.graph)
        every = {name: k for k, name in enumerate(keys)}
        result = {}
        for name, (path, entry) in self._matched("routes", every).items():
            key = keys[name]
            node, _, number = key.partition("#")
            shape = self.graph.spec(Ref(self.graph.index[node], int(number or 0))).shape
            steps: list[tuple[State, State]] = []
            for k, text in enumerate(entry):
                at = f"{path}[{k}]"
                ends = [self._state(at, part.strip(), shape, "SIRP") for part in text.split("->")]
                a, b = ends
                if a is None or b is None:
                    continue
                changed = [axis for axis in range(len(a)) if a[axis] != b[axis]]
                if len(changed) != 1:
                    self.bad.add(at, f"the step '{text}' changes {len(changed)} axes; a step changes one")
                elif not step_is_legal(a, changed[0], b[changed[0]]):
                    self.bad.add(
                        at,
                        f"the step '{text}' is not possible: '{a[changed[0]]}' cannot become '{b[changed[0]]}' there; "
                        "remove the entry to have the route found anew",
                    )
                elif steps and a != steps[0][0] and all(a != done for _, done in steps):
                    self.bad.add(at, f"the step '{text}' begins where no earlier step ends; put the steps in order")
                else:
                    steps.append((a, b))
            if steps:
                result[key] = tuple(steps)
        return result

    def pins(self) -> Pins:
        """What the user asked for; patterns, axes and names must be there."""
        raw = self.raw.get("pins", {})
        nodes = [n for n in self.graph.nodes if n.kind == "op"]
        for pattern, axes in raw.get("ops", {}).items():
            at = f"pins.ops[{json.dumps(pattern)}]"
            if not any(matches(pattern, n, self.labels[n.name]) for n in nodes):
                self.bad.add(at, f"matches no op of the model; {closest(pattern, list(self.labels.values()))}")
            for axis in axes:
                if axis not in self.axes:
                    self.bad.add(f"{at}.{axis}", f"the mesh has no axis '{axis}'; it has {', '.join(self.axes)}")
        shapes = {n.target: n.out.shape for kind in ("param", "input") for _, n in self.graph.of_kind(kind)}
        params, inputs, outputs = {}, {}, {}
        for pattern, how in raw.get("params", {}).items():
            at = f"pins.params[{json.dumps(pattern)}]"
            names = [n.target for _, n in self.graph.of_kind("param")]
            if not any(fnmatchcase(name, pattern) for name in names):
                self.bad.add(at, f"matches no parameter of the model; {closest(pattern, names)}")
            try:
                params[pattern] = parse_kept(how, self.mesh, at)
            except AutoparError as error:
                self.bad.lines.append(str(error))
        for name, text in raw.get("inputs", {}).items():
            at = f"pins.inputs[{json.dumps(name)}]"
            names = [n.target for _, n in self.graph.of_kind("input")]
            if name not in names:
                self.bad.add(at, f"no input of the model; {closest(name, names)}")
            elif (state := self._state(at, text, shapes[name], "SR")) is not None:
                inputs[name] = state
        for number, text in raw.get("outputs", {}).items():
            at, count = f"pins.outputs[{json.dumps(number)}]", len(self.graph.outputs)
            out = self.graph.outputs[int(number)] if int(number) < count else None
            if not isinstance(out, Ref):
                self.bad.add(at, f"no tensor among the {count} outputs of the model, which count from 0")
            elif (state := self._state(at, text, self.graph.spec(out).shape, "SIRP")) is not None:
                outputs[int(number)] = state
        ops = {pattern: dict(axes) for pattern, axes in raw.get("ops", {}).items()}
        again = tuple(raw.get("recompute", ()))
        for k, pattern in enumerate(again):
            try:
                segments_of(self.graph, self.rules, (pattern,))
            except PlanError as error:
                self.bad.add(f"pins.recompute[{k}]", str(error))
        return Pins(ops, params, inputs, outputs, raw.get("memory_limit_bytes"), again)

    def recompute(self) -> Recompute:
        """The segments that run again, their operators by node name."""
        named = {label: name for name, label in self.labels.items()}
        names = {*named.values()}
        segments = []
        for k, segment in enumerate(self.raw.get("recompute", ())):
            for name in segment:
                if name not in named and name not in names:
                    self.bad.add(f"recompute[{k}]", f"'{name}' is no op of the model; {closest(name, list(named))}")
            first, last = (named.get(name, name) for name in segment)
            segments.append((first, last))
        found = tuple(segments)
        if all(name in names for segment in found for name in segment):
            try:
                segment_numbers(self.graph, found)
            except PlanError as error:
                self.bad.lines.append(str(error))
        return found

    def gather_again(self) -> tuple[str, ...]:
        """The tensors whose gathered copies are gathered again, by the plan's own keys."""
        named, found = route_keys(self.graph), []
        for k, name in enumerate(self.raw.get("gather_again", ())):
            if name not in named:
                self.bad.add(f"gather_again[{k}]", f"'{name}' is no tensor of the model; {closest(name, list(named))}")
            else:
                found.append(named[name])
        return tuple(sorted(found))

    # -- the plan

    def plan(
        self, decided: dict[int, Strategy], params: dict[int, ParamChoice], buffers: dict[str, State],
        inputs: dict[str, State], outputs: dict[int, State], routes: dict[str, Route], pins: Pins, again: Recompute,
    ) -> Plan:  # fmt: skip
        """The plan of the decisions: as the file has it if nothing was edited, else completed and priced anew."""
        raw, graph = self.raw, self.graph
        chosen, held = demand(graph, self.rules, self.mesh, decided)
        held.update(buffers)
        made, wanted, out_states = needs(graph, self.mesh, chosen, params, held, inputs, outputs)
        checksum = raw.get("checksum") or {}
        plan = Plan(
            graph.fingerprint, raw["cluster"], self.mesh,
            {node.name: chosen[i].names for i, node in enumerate(graph.nodes) if node.kind == "op"},
            {graph.nodes[i].target: choice for i, choice in sorted(params.items())},
            held, tuple(out_states), {}, inputs, raw["optimizer"], 1, raw["microbatches"],
            notes=tuple(raw.get("notes", ())), pins=pins, recompute=again, gather_again=self.gather_again(),
            in_flight=raw.get("in_flight", 1), first=first_op(graph),
            devices=tuple(self.devices if self.devices is not None else range(prod(n for _, n in self.mesh))),
        )  # fmt: skip
        edited = decisions(plan) != checksum.get("decisions")
        kept: dict[str, Route] = {}
        anew = False
        for ref, goals in wanted.items():
            key = route_key(graph, ref)
            given = routes.pop(key, ())
            problem = _misfit(made[ref], goals, given)
            if not problem:
                kept.update({key: given} if given else {})
            elif edited or not given:
                anew = True
            else:
                self.bad.add(f"routes: {key}", problem)
        if not edited:
            for key in routes:
                self.bad.add(f"routes: {key}", "nobody reads that tensor in another placement; remove the entry")
        self.bad.raise_if_any()
        if not edited and not anew and not self.anew and raw.get("price") is not None:
            price = Price(**raw["price"])
            solution = Solution(**raw["solution"]) if raw.get("solution") else None
            asis = replace(plan, routes=kept, price=price, solution=solution)
            if rest(asis) == checksum.get("rest"):
                return asis
        return self._anew(plan, decided, params, buffers, outputs, kept)

    def _anew(
        self, plan: Plan, decided: dict[int, Strategy], params: dict[int, ParamChoice], buffers: dict[str, State],
        outputs: dict[int, State], kept: dict[str, Route],
    ) -> Plan:  # fmt: skip
        cluster = self.cluster if isinstance(self.cluster, Cluster) else self.cluster()
        check_mesh(self.mesh, cluster)
        priced = pricer(cluster, self.mesh, self.devices)
        try:
            done = complete(
                self.graph, self.rules, priced, decided, params, outputs, inputs=plan.inputs, buffers=buffers,
                cluster=plan.cluster, optimizer=plan.optimizer, microbatches=plan.microbatches,
                recompute=plan.recompute, in_flight=plan.in_flight, devices=plan.devices,
                gather_again=plan.gather_again,
            )  # fmt: skip
        except PlanError as error:
            raise PlanError(f"{self.where}: {error}") from error
        extra = 0.0
        keys = {route_key(self.graph, Ref(i, k)): Ref(i, k) for i, n in enumerate(self.graph.nodes)
                for k, o in enumerate(n.outs) if o is not None}  # fmt: skip
        for key, route in kept.items():
            spec, node = self.graph.spec(keys[key]), self.graph.nodes[keys[key].node]
            grad = node.needs_grad and spec.is_float
            extra += sum(priced.step(spec, grad, a, b) for a, b in route)
            extra -= sum(priced.step(spec, grad, a, b) for a, b in done.routes.get(key, ()))
        routes = {**done.routes, **kept}
        price = done.price
        if kept:
            chosen = {i: combine([self._options(i)[name] for name in done.ops[n.name]])
                      for i, n in enumerate(self.graph.nodes) if n.kind == "op"}  # fmt: skip
            mine, theirs = (
                ledger(self.graph, self.rules, done.mesh, chosen, found, plan.recompute, done.gather_again)
                for found in (routes, done.routes)
            )
            extra += seconds_again(self.graph, self.rules, priced, chosen, mine)[1]
            extra -= seconds_again(self.graph, self.rules, priced, chosen, theirs)[1]
            held = plan.in_flight * mine.kept_bytes + mine.again_bytes
            price = replace(
                price, activation_seconds=price.activation_seconds + extra * plan.microbatches,
                activation_bytes=held, again_bytes=mine.again_bytes,
            )  # fmt: skip
        return replace(done, routes=routes, price=price, notes=plan.notes)


def _option(factor: str) -> str:
    """The name of an option, as plans store it."""
    return "I" if factor == "replicate" else factor


def _misfit(made: State, goals: Mapping[State, None], route: Route) -> str:
    """Why a route does not bring a tensor from where it is made to where it is wanted; empty if it does."""
    if route and route[0][0] != made:
        return f"begins at {format_state(route[0][0])}, the tensor is made as {format_state(made)}; remove the entry"
    reached = {made, *(b for _, b in route)}
    missing = [g for g in goals if g not in reached]
    if missing:
        return f"does not reach {format_state(missing[0])}, as which the tensor is wanted; remove the entry"
    return ""
