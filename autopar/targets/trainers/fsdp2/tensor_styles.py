"""Tensor parallel styles of modules, from the states that a plan gives tensors on its axis ``tensor``.

A Linear whose weight is cut by output features is cut by columns, one whose weight is cut by input features by rows;
how its input comes and its output goes are the states of the tensors before and after it. Nothing is known of families
of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from autopar.errors import PlanError
from autopar.planner.layouts.operator_cuts import TENSOR
from autopar.planner.layouts.stage_starts import blocks_of
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.targets.target import Export
from autopar.targets.trainers.fsdp2.patterns import compressed_table
from autopar.targets.trainers.fsdp2.tensor_trial import GivenArguments, calls_of, problem_of
from autopar.words.graph import Graph, Ref
from autopar.words.placements import Placement

Styles = dict[str, dict[str, Any]]
LOSSES = ("cross_entropy", "nll_loss")


def tensor_table(export: Export) -> dict[str, Any]:
    """Return the table of styles; empty without tensor parallelism.

    Raises:
        PlanError: the model's own code cannot run on shards, or torch has no style for it; the module is named.
    """
    if export.layout.sizes["tp"] == 1:
        return {}
    found = _Found(export)
    calls = calls_of(export, found.watched)
    styles = found.styles(calls)
    problem = problem_of(export, styles)
    if problem and export.layout.sequence_parallel:
        styles = found.from_first_block(styles, calls)
        problem = problem_of(export, styles)
    if problem:
        raise found.refusal(problem)
    return {
        "sequence": export.layout.sequence_parallel, "loss_parallel": bool(found.heads),
        "styles": compressed_table(styles, found.model),
    }  # fmt: skip


@dataclass
class _Found:
    """What a plan says on the axis ``tensor``."""

    export: Export

    @property
    def graph(self) -> Graph:
        return self.export.priced.captured.graph

    @cached_property
    def model(self) -> nn.Module:
        return self.export.loaded.model

    def refusal(self, why: str) -> PlanError:
        """Return the error of what cannot be said."""
        return PlanError(f"fsdp2: {self.export.layout.text}: {why}; use dp with fsdp, and tp=1")

    @cached_property
    def _states(self) -> tuple[dict[Ref, Placement], dict[int, tuple[Placement, ...]]]:
        """What every operator makes, and what it wants, on the axis."""
        graph, plan = self.graph, self.export.priced.plan
        axis = plan.stages[0].mesh.names.index(TENSOR)
        ops = {name: options for stage in plan.stages for name, options in stage.ops.items()}
        rules = rules_of(graph)
        made: dict[Ref, Placement] = {}
        wanted: dict[int, tuple[Placement, ...]] = {}
        for i, node in graph.of_kind("op"):
            if not node.hot or node.name not in ops:
                continue
            strategy = strategy_named(graph, node, rules[i], ops[node.name])
            wanted[i] = tuple(state[axis] for state in strategy.ins)
            tensors = [k for k, spec in enumerate(node.outs) if spec is not None]
            made |= {Ref(i, k): state[axis] for k, state in zip(tensors, strategy.outs, strict=True)}
        return made, wanted

    @cached_property
    def _params(self) -> dict[int, Placement]:
        """How every parameter is used on the axis, by node."""
        plan = self.export.priced.plan
        axis = plan.stages[0].mesh.names.index(TENSOR)
        choices = {name: choice for stage in plan.stages for name, choice in stage.params.items()}
        return {i: choices[node.target].used[axis] for i, node in self.graph.of_kind("param") if node.target in choices}

    @cached_property
    def cut(self) -> dict[str, tuple[str, int]]:
        """The modules whose weight is cut: ``columns`` or ``rows``, and the node that reads it."""
        found: dict[str, tuple[str, int]] = {}
        for p, placement in self._params.items():
            if not placement.is_shard:
                continue
            for reader, *_ in self.graph.consumers[Ref(p)]:
                node = self.graph.nodes[reader]
                module = self.model.get_submodule(node.module)
                weight = node.refs[0 if "embedding" in node.target else 1] if len(node.refs) > 1 else None
                if type(module) not in (nn.Linear, nn.Embedding) or weight is None:
                    name = self.graph.nodes[p].target
                    raise self.refusal(
                        f"parameter {name} is cut in '{node.module}', a {type(module).__name__}, and torch has styles "
                        "for Linear and Embedding alone"
                    )
                if weight == Ref(p):
                    kind = {0: "columns", 1: "rows"}[placement.dim or 0]
                    if isinstance(module, nn.Embedding):
                        kind = {0: "rows", 1: "columns"}[placement.dim or 0]
                    found[node.module] = kind, reader
        return found

    @cached_property
    def heads(self) -> set[str]:
        """The modules whose output a loss takes in shards of the vocabulary."""
        _, wanted = self._states
        by_node = {reader: path for path, (_, reader) in self.cut.items()}
        found = set()
        for i, states in wanted.items():
            if any(word in self.graph.nodes[i].target for word in LOSSES) and states[0].is_shard:
                at = i
                while at not in by_node and self.graph.nodes[at].refs:
                    at = self.graph.nodes[at].refs[0].node
                if at not in by_node:
                    raise self.refusal(f"{self.graph.nodes[i].where} takes shards of what no Linear makes")
                found.add(by_node[at])
        return found

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The modules that read one tensor and are cut by columns, by the path of the module around them."""
        by_input: dict[Ref, list[str]] = {}
        for path, (kind, reader) in self.cut.items():
            if kind == "columns" and isinstance(self.model.get_submodule(path), nn.Linear):
                by_input.setdefault(self.graph.nodes[reader].refs[0], []).append(path)
        return {common(paths): paths for paths in by_input.values() if len(paths) > 1}

    @cached_property
    def watched(self) -> list[str]:
        """The modules whose arguments have to be known."""
        from_blocks = list(self.groups)
        return [*from_blocks, *(path for paths in self.groups.values() for path in paths), *self._first_blocks]

    @property
    def _first_blocks(self) -> list[str]:
        return list(blocks_of(self.graph))[:1]

    def styles(self, calls: GivenArguments) -> Styles:
        """Return the styles of modules by path."""
        made, _ = self._states
        found: Styles = {}
        for path, (kind, reader) in self.cut.items():
            node = self.graph.nodes[reader]
            if kind == "rows":
                found[path] = {"style": "rows", "output": self._after(reader)}
                continue
            given = node.refs[0 if isinstance(self.model.get_submodule(path), nn.Linear) else 1]
            found[path] = {"style": "columns", "input": words(made.get(given))}
            if path in self.heads:
                found[path]["local"] = False
        for around, paths in self.groups.items():
            change = calls.argument(around, paths)
            before = found[paths[0]]["input"]
            if change is not None:
                found[around] = {"style": "inputs", "count": calls.count(around), "change": {change: [before, "whole"]}}
                for path in paths:
                    found[path]["input"] = "whole"
        found |= self._in_shards(found)
        self._check_explained()
        return found

    def _after(self, reader: int) -> str:
        """Return the layout in which the readers of a pending sum want it."""
        _, wanted = self._states
        waiting = [Ref(reader)]
        while waiting:
            ref = waiting.pop()
            for at, *_ in self.graph.consumers[ref]:
                node = self.graph.nodes[at]
                for k, given in enumerate(node.refs):
                    if given != ref or at not in wanted:
                        continue
                    if not wanted[at][k].is_pending:
                        return words(wanted[at][k])
                    waiting.append(Ref(at))
        return "whole"

    def _in_shards(self, found: Styles) -> Styles:
        """Return the style of modules with whole parameters that work on shards, such as norms under ``sp``."""
        made, _ = self._states
        styles: Styles = {}
        for p, placement in self._params.items():
            if placement.is_shard:
                continue
            for reader, *_ in self.graph.consumers[Ref(p)]:
                node, out = self.graph.nodes[reader], made.get(Ref(reader))
                if node.module in found or out is None or not out.is_shard:
                    continue
                module = self.model.get_submodule(node.module)
                if isinstance(module, nn.Embedding):
                    continue  # given whole indices, it gives the whole residual, which the first block cuts
                if any(True for child in module.children() for _ in child.parameters()):
                    raise self.refusal(
                        f"parameter {self.graph.nodes[p].target} is read in '{node.module}' where the plan has shards, "
                        "and torch's SequenceParallel is for modules without others in them"
                    )
                styles[node.module] = {"style": "sequence", "dim": out.dim}
        return styles

    def _check_explained(self) -> None:
        """Refuse collectives of the plan that no style makes: shards that another operator takes whole."""
        made, wanted = self._states
        readers = {reader for _, reader in self.cut.values()}
        for i, states in wanted.items():
            node = self.graph.nodes[i]
            for ref, state in zip(node.refs, states, strict=True):
                before = made.get(ref)
                if before is None or not before.is_shard or state.is_shard or i in readers:
                    continue
                maker = self.graph.nodes[ref.node].where
                raise self.refusal(f"{node.where} takes whole what {maker} has in shards, and no style gathers it")

    def from_first_block(self, styles: Styles, calls: GivenArguments) -> Styles:
        """Return styles with which the residual is whole until the first block, and cut from there on.

        For models that read from the embedding's shape how long the sequence is.
        """
        changed = {path: dict(style) for path, style in styles.items()}
        dims = set()
        for path, style in changed.items():
            if isinstance(self.model.get_submodule(path), nn.Embedding) and style.get("output", "whole") != "whole":
                dims.add(style["output"])
                style["output"] = "whole"
        dims |= {f"shard {style['dim']}" for style in changed.values() if style["style"] == "sequence"}
        for block in self._first_blocks:
            key = calls.residual(block)
            if key is None or len(dims) != 1:
                continue
            changed[block] = {
                "style": "inputs", "count": calls.count(block), "change": {key: ["whole", min(dims)]}, "local": True,
            }  # fmt: skip
        return changed


def common(paths: Sequence[str]) -> str:
    """Return the path of the innermost module around several ones."""
    parts = [path.split(".")[:-1] for path in paths]
    shared = []
    for names in zip(*parts):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def words(placement: Placement | None) -> str:
    """Return a placement as tables write it: ``whole``, ``shard 1``."""
    return f"shard {placement.dim}" if placement is not None and placement.is_shard else "whole"
