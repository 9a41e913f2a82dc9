"""The entries of a stage in a plan file, matched to the nodes of the stage's graph."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from autopar.errors import PlanError, closest
from autopar.planfile.file_errors import FileErrors, Section
from autopar.planfile.states import read_state
from autopar.planfile.writing import reshard_keys
from autopar.plans.memory_decisions import DECISIONS, SEGMENTS, Memory, in_order
from autopar.plans.plan import ParamChoice, Recompute, segment_numbers
from autopar.plans.regather import waiting
from autopar.rules.axis_options import Option
from autopar.rules.option_names import WHOLE, factor_and_block, listed, option_written
from autopar.rules.registry import rules_of
from autopar.rules.strategy import (
    Strategy,
    blocks_named,
    can_be_cut,
    combine,
    options_of,
    why_not_cut,
    why_not_exchanged,
)
from autopar.words.graph import Graph, Ref
from autopar.words.labels import op_labels
from autopar.words.meshes import Mesh
from autopar.words.placements import State, step_is_legal
from autopar.words.placements import path as way
from autopar.words.shards import fits

ReshardPath = tuple[tuple[State, State], ...]


@dataclass
class Decisions:
    """The decisions of a file about a stage, by node of its graph."""

    ops: dict[int, Strategy]
    params: dict[int, ParamChoice]
    buffers: dict[str, State]
    inputs: dict[str, State]
    outputs: dict[int, State]
    reshard_paths: dict[str, ReshardPath]
    memory: Memory


@dataclass
class StageReader:
    """A reader of the sections of one stage; what does not fit the graph becomes a failure in ``bad``."""

    raw: Section
    mesh: Mesh
    graph: Graph
    bad: FileErrors
    _options_of: dict[int, dict[str, Option]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rules = rules_of(self.graph)
        self.labels = op_labels(self.graph)
        self.axes = {name: a for a, (name, _) in enumerate(self.mesh)}

    def decisions(self) -> Decisions:
        """Return all decisions of the entry."""
        return Decisions(
            self.ops(), self.params(), self.places("buffers", "buffer"), self.places("inputs", "input"),
            self.outputs(), self.reshard_paths(), self.memory(),
        )  # fmt: skip

    # -- ops

    def ops(self) -> dict[int, Strategy]:
        """Return the strategies of the ops that the file names, and of those replicated by default."""
        ops = [(i, node) for i, node in enumerate(self.graph.nodes) if node.kind == "op"]
        last: dict[int, tuple[str, dict[str, str]]] = {}  # the entry that counts for each op
        for pattern, entry in self.raw["ops"].items():
            path = f"ops[{json.dumps(pattern)}]"
            for axis in entry:
                if axis not in self.axes:
                    self.bad.add(f"{path}.{axis}", f"the mesh has no axis '{axis}'; it has {', '.join(self.axes)}")
            match = re.compile(translate(pattern)).match
            matched = [i for i, n in ops if match(self.labels[n.name])]
            if not matched:
                matched = [i for i, n in ops if match(n.module) or n.name == pattern]
                able = [i for i in matched if all(option_written(f) in self.options(i, entry) for f in entry.values())]
                matched = able or matched  # a module: those of its ops that have the factors
            if not matched:
                names = [*self.labels.values(), *dict.fromkeys(n.module for _, n in ops if n.module)]
                self.bad.add(path, f"matches no op of the model; {closest(pattern, names)}")
            last.update((i, (path, entry)) for i in matched)
        decided = {}
        for i, node in ops:
            if i in last:
                path, entry = last[i]
                strategy = self._named(path, i, entry)
                if strategy is not None and self._divides(path, i, strategy):
                    decided[i] = strategy
            elif node.hot:
                decided[i] = combine([self.options(i)[WHOLE]] * len(self.mesh))
        return decided

    def options(self, i: int, entry: Mapping[str, str] | None = None) -> dict[str, Option]:
        """Return the options of an op on one axis by name; block options only if an entry names them."""
        rule = self.rules[i]
        assert rule is not None
        if i not in self._options_of:
            self._options_of[i] = options_of(self.graph, self.graph.nodes[i], rule)
        blocks = blocks_named(rule, [*(entry or {}).values()])
        return options_of(self.graph, self.graph.nodes[i], rule, blocks) if blocks else self._options_of[i]

    def _named(self, path: str, i: int, entry: Mapping[str, str]) -> Strategy | None:
        """Return the strategy that an entry names for an op."""
        options, fine = self.options(i, entry), True
        picked = [options[WHOLE]] * len(self.mesh)
        for axis, factor in entry.items():
            if option_written(factor) not in options:
                self._no_factor(f"{path}.{axis}", i, factor, options)
                fine = False
            elif axis in self.axes:
                picked[self.axes[axis]] = options[option_written(factor)]
        return combine(picked) if fine else None

    def _no_factor(self, path: str, i: int, factor: str, options: Mapping[str, object]) -> None:
        node, rule = self.graph.nodes[i], self.rules[i]
        offers = listed(options)
        why = f": {rule.absent[factor]}" if rule is not None and factor in rule.absent else ""
        self.bad.add(path, f"{node.where} has no factor '{factor}'{why}; it offers {offers} (rule: {rule})")

    def _divides(self, path: str, i: int, strategy: Strategy) -> bool:
        """Return True if an op can be sharded so; else add a failure."""
        node, rule = self.graph.nodes[i], self.rules[i]
        assert rule is not None
        cut: dict[str, list[tuple[int, int]]] = {}
        for name, (axis, size) in zip(strategy.names, self.mesh, strict=True):
            factor, block = factor_and_block(name)
            if factor in rule.sizes and size > 1:
                cut.setdefault(factor, []).append((size, block))
                if why := why_not_cut(rule, factor, cut[factor]):
                    self.bad.add(
                        f"{path}.{axis}",
                        f"factor '{name}' of {node.where} {why}; use another factor, or a mesh whose axes divide "
                        f"{rule.sizes[factor]}",
                    )
                    return False
        if why := why_not_exchanged(rule, strategy.names, self.mesh):
            self.bad.add(path, f"{node.where}: {why}")
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
                    f"{node.where}: a tensor of shape {shape} cannot be cut as {state.text} on mesh "
                    f"{self.mesh.text}; use another factor",
                )
                return False
        return True

    # -- placements

    def _state(self, path: str, text: str, shape: Sequence[int], kinds: str) -> State | None:
        return read_state(path, text, self.mesh, shape, kinds, self.bad)

    def _matched(self, section: str, every: Mapping[str, int]) -> dict[str, tuple[str, Any]]:
        """Return ``{name: (path in the file, entry)}`` of the last entry that matches each name."""
        matched: dict[str, tuple[str, Any]] = {}
        for pattern, entry in self.raw.get(section, {}).items():
            path = f"{section}[{json.dumps(pattern)}]"
            match = re.compile(translate(pattern)).match
            hits = [name for name in every if match(name)]
            if not hits:
                what = {"params": "parameter", "routes": "tensor"}.get(section, section[:-1])
                self.bad.add(path, f"matches no {what} of the model; {closest(pattern, every)}")
            matched.update((name, (path, entry)) for name in hits)
        return matched

    def params(self) -> dict[int, ParamChoice]:
        """Return the storage and use of every parameter."""
        nodes = {node.target: i for i, node in self.graph.of_kind("param")}
        matched = self._matched("params", nodes)
        missing = [name for name in nodes if name not in matched]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            self.bad.add("params", f"no entry for parameter {', '.join(missing[:4])}{more}; add one, or plan again")
        result = {}
        for name, (path, entry) in matched.items():
            node = self.graph.nodes[nodes[name]]
            shape = node.out.shape
            stored = self._state(f"{path}.stored", entry["stored"], shape, "SI" if node.needs_grad else "SR")
            used = self._state(f"{path}.used", entry["used"], shape, "SIR" if node.needs_grad else "SR")
            if stored is None or used is None:
                continue
            if way(stored, used) is None:
                self.bad.add(
                    path,
                    f"'{name}' cannot go from stored {stored.text} to used {used.text} one axis at a "
                    "time, the last axis first; store it as it is used, or whole",
                )
                continue
            result[nodes[name]] = ParamChoice(
                stored, used, entry.get("lifetime", "step"), entry.get("on_host", False)
            )
        return result

    def places(self, section: str, kind: str) -> dict[str, State]:
        """Return placements of buffers or inputs by name."""
        nodes = {node.target: i for i, node in self.graph.of_kind(kind)}
        result = {}
        for name, (path, text) in self._matched(section, nodes).items():
            node = self.graph.nodes[nodes[name]]
            state = self._state(path, text, node.out.shape, "SI" if node.needs_grad else "SR")
            if state is not None:
                result[name] = state
        return result

    def outputs(self) -> dict[int, State]:
        """Return placements of outputs by position."""
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

    def reshard_paths(self) -> dict[str, ReshardPath]:
        """Return the reshard paths of the file, by tensor key."""
        keys = reshard_keys(self.graph)
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

    def memory(self) -> Memory:
        """Return the decisions about memory."""
        return in_order({
            name: self.segments(name) if DECISIONS[name].of == SEGMENTS else self.tensors(name)
            for name in self.raw.get("memory") or ()
        })  # fmt: skip

    def segments(self, decision: str) -> Recompute:
        """Return the segments of a decision, their operators by node name."""
        at = f"memory: {decision}"
        named = {label: name for name, label in self.labels.items()}
        names = {*named.values()}
        segments = []
        for k, segment in enumerate(self.raw["memory"][decision]):
            for name in segment:
                if name not in named and name not in names:
                    self.bad.add(f"{at}[{k}]", f"'{name}' is no op of the model; {closest(name, list(named))}")
            first, last = (named.get(name, name) for name in segment)
            segments.append((first, last))
        result = tuple(segments)
        if all(name in names for segment in result for name in segment):
            try:
                segment_numbers(self.graph, result)
            except PlanError as error:
                self.bad.say(str(error))
        return result

    def tensors(self, decision: str) -> tuple[str, ...]:
        """Return the tensors of a decision, by the plan's own keys."""
        keys, again = reshard_keys(self.graph), []
        for k, name in enumerate(self.raw["memory"][decision]):
            if name not in keys:
                at = f"memory: {decision}[{k}]"
                self.bad.add(at, f"'{name}' is no tensor of the model; {closest(name, list(keys))}")
                continue
            again.append(keys[name])
            try:
                waiting(self.graph, {decision: (keys[name],)}, {})
            except PlanError as error:
                self.bad.say(str(error))
        return tuple(sorted(again))
