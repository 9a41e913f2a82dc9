"""Descriptions of what each mesh axis shards: the batch, the sequence, features, experts.

Names of axes are only names: a search gives them in order, and the axis ``data`` of one plan may cut what ``tensor``
cuts in another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping

from autopar.capture.batch_factor import inputs_with_rows
from autopar.planner.layouts.dim_classes import DimClasses
from autopar.planner.layouts.operator_cuts import OperatorCuts
from autopar.plans.plan import Plan, StagePlan
from autopar.rules.experts.expert_block import BLOCK, TRAVEL
from autopar.rules.notation import Rule
from autopar.rules.option_names import factor_and_block
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from cost_models.operator_cost import COMPUTE_KINDS

BATCH, SEQUENCE, FEATURES, EXPERTS, NOTHING = "the batch", "the sequence", "features", "experts", "nothing"
IDLE = "nothing: every rank computes the same, since sharding is impossible or costs more than it saves"
SHOWN = 0.005
"""Least share of the work that is named."""


Shares = dict[str, dict[str, float]]
"""By axis, ``tensor=4``: the shares of :data:`BATCH`, :data:`SEQUENCE`, :data:`FEATURES`, :data:`EXPERTS` and
:data:`NOTHING` (every rank of the axis computes the same)."""


class AxisUse:
    """Dims that mesh axes shard, as shares of the floating-point operations of products and attention.

    ``graph`` is the whole model's, of one microbatch.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.rules = graph, rules_of(graph)
        of_inputs = [node.out.shape[0] for _, node in graph.of_kind("input") if node.out.shape]
        rows = inputs_with_rows(graph, int(of_inputs[0])).rows if of_inputs else frozenset()
        self.cuts = OperatorCuts(DimClasses(graph, self.rules, rows), "")

    def flops(self, name: str) -> float:
        """Return the floating-point operations of a product or attention; 0 for other operators."""
        i = self.graph.index.get(name)
        rule = self.rules[i] if i is not None else None
        return rule.flops_at({}) if rule is not None and rule.kind in COMPUTE_KINDS else 0.0

    def shares(self, stages: Iterable[StagePlan], only: Container[str] | None = None) -> Shares:
        """Return the shares of some stages; ``only`` counts the operators of these names."""
        work: dict[str, Counter[str]] = {}
        for stage in stages:
            for name, options in stage.ops.items():
                flops = self.flops(name) if only is None or name in only else 0.0
                if not flops:
                    continue
                i = self.graph.index[name]
                rule = self.rules[i]
                assert rule is not None
                for option, (axis, size) in zip(options, stage.mesh, strict=True):
                    if size > 1:
                        what = _cut(self.cuts, i, rule, option)
                        work.setdefault(f"{axis}={size}", Counter())[what] += flops  # type: ignore[assignment]
        return {
            axis: {what: n / total for what, n in of_axis.most_common()}
            for axis, of_axis in work.items() if (total := sum(of_axis.values()))
        }  # fmt: skip


def axis_shares(graph: Graph, plan: Plan) -> Shares:
    """Return what each axis of a plan shards; ``graph`` is the whole model's, of one microbatch."""
    return AxisUse(graph).shares(plan.stages)


def _cut(cuts: OperatorCuts, i: int, rule: Rule, option: str) -> str:
    """Return what an option shards."""
    factor = factor_and_block(option)[0]
    if factor not in rule.sizes:
        return NOTHING
    if factor in (TRAVEL, "e") and cuts.graph.nodes[i].target == BLOCK:
        return EXPERTS
    classes = {cuts.classes.root((i, f)) for f in (factor, *rule.together.get(factor, ()))}
    if classes & cuts.classes.batch:
        return BATCH
    return SEQUENCE if classes & cuts.sequences else FEATURES


def axes_in_words(shares: Mapping[str, Mapping[str, float]]) -> str:
    """Return the shares as one line: ``data=2 shards the batch; tensor=4 shards features (93%), the sequence (7%)``."""
    texts, idle = [], []
    for axis, of_axis in shares.items():
        named = {what: share for what, share in of_axis.items() if share >= SHOWN}
        replicated = named.pop(NOTHING, 0.0)
        alone = len(named) == 1 and not replicated
        shown = [what if alone else f"{what} ({share:.0%})" for what, share in named.items()]
        shown += [f"{replicated:.0%} replicated"] if replicated and named else []
        if shown:
            texts.append(f"{axis} shards {', '.join(shown)}")
        else:
            idle.append(axis)
    if idle:
        texts.append(f"{', '.join(idle)} {'shard' if len(idle) > 1 else 'shards'} {IDLE}")
    return "; ".join(texts)
