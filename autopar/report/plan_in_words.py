"""A plan in the terms of trainers: ``TP 4, PP 8 (interleaved 4), DP 2, ZeRO-1``.

Names of mesh axes are only names, so the terms come from what each axis shards. Where an axis does not do one thing
alone, the shares of the work are written behind its term.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod

from autopar.planner.layouts.layout_words import words_of
from autopar.plans.memory_decisions import OFFLOAD
from autopar.plans.plan import Plan, StagePlan, segment_numbers
from autopar.report.axes_in_words import BATCH, EXPERTS, FEATURES, NOTHING, SEQUENCE, SHOWN, AxisUse
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh

TERMS = {FEATURES: "TP", SEQUENCE: "CP", EXPERTS: "EP", BATCH: "DP"}
"""Terms of what an axis shards, in the order in which they are written."""
WORDS = {
    "tp": "TP {}", "cp": "CP {}", "ep": "EP {}", "etp": "ETP {}", "pp": "PP {}", "dp": "DP {}", "zero": "ZeRO-{}",
    "fsdp": "FSDP {}", "sp": "SP", "recompute": "recompute {}", "mbs": "microbatches of {}", "m": "{} microbatches",
    "gas": "{} microbatches", "schedule": "{}", "optimizer": "{}", "precision": "{}",
}  # fmt: skip
"""Words of a requested layout, in the order in which they are written."""
ONE = "one device"
DEFAULTS = {**dict.fromkeys(("tp", "cp", "ep", "pp", "dp"), "1"), "zero": "0", "recompute": "none"}
"""Values that say what is so without the word."""
MOSTLY, ALL = 0.5, 0.9
"""Shares of the work from which an axis has the term of what it shards, and from which recomputation is called full."""


def plan_in_words(graph: Graph, plan: Plan, use: AxisUse | None = None) -> str:
    """Return a plan in the terms of trainers.

    Args:
        graph: the whole model's, of one microbatch.
        plan: a plan of it.
        use: what axes shard, if the caller has it already.

    Returns:
        ``TP 4, PP 8 (interleaved 4), DP 2, ZeRO-1``; the words of the requested layout, if one was requested; stage
        by stage, if stages have different meshes.
    """
    requested = getattr(plan.pins, "layout", "") or ""
    if requested:
        return layout_in_words(requested)
    use = use or AxisUse(graph)
    sizes = {node.target: prod(node.out.shape) for _, node in graph.of_kind("param")}
    pipeline, again = _pipeline(plan), _recompute(graph, use, plan) + _offload(plan)
    if len({stage.mesh for stage in plan.stages}) == 1:
        return ", ".join(_terms(use, plan.stages, sizes, pipeline=pipeline) + again) or ONE
    return "; ".join(filter(None, [", ".join(pipeline + again), mesh_by_mesh(use, plan.stages, None, sizes)]))


def mesh_by_mesh(
    use: AxisUse, stages: Sequence[StagePlan], only: Container[str] | None, sizes: Mapping[str, int]
) -> str:
    """Return the terms of stages; of stages with different meshes, those of each mesh.

    Args:
        use: what axes shard.
        stages: the stages.
        only: names of the operators that count; None for all.
        sizes: elements of the parameters that count.
    """
    by_mesh: dict[Mesh, list[StagePlan]] = {}
    for stage in stages:
        by_mesh.setdefault(stage.mesh, []).append(stage)
    said = {
        f"mesh {mesh.shown() or 'of one device'}": ", ".join(_terms(use, alike, sizes, only)) or ONE
        for mesh, alike in by_mesh.items()
    }
    return "; ".join(f"{which}: {terms}" if len(said) > 1 else terms for which, terms in said.items())


def layout_in_words(text: str) -> str:
    """Return a requested layout, ``tp=4,pp=8,vp=4,dp=2,zero=1``, in the terms of trainers."""
    given = words_of(text)
    terms = []
    for word, template in WORDS.items():
        value = given.pop(word, None)
        if value is None or value == DEFAULTS.get(word):
            continue
        shown = value.replace(":", ", ")
        if word == "pp" and given.get("vp", "1") != "1":
            shown += f" (interleaved {given['vp']})"
        terms.append(template.format(shown).strip())
    given.pop("vp", None)
    return ", ".join(terms + [f"{word}={value}" if value else word for word, value in given.items()]) or ONE


def _pipeline(plan: Plan) -> list[str]:
    """Return ``PP 8 (interleaved 4)``; nothing for one group of devices."""
    groups, stages = plan.schedule.n_ranks, len(plan.stages)
    if groups == 1:
        return []
    chunks = f"interleaved {stages // groups}, " if stages > groups else ""
    return [f"PP {groups} ({chunks}{plan.schedule.name})"]


def _terms(
    use: AxisUse, stages: Sequence[StagePlan], elements: Mapping[str, int], only: Container[str] | None = None,
    pipeline: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Return the terms of stages of one mesh, with the pipeline before the data ranks."""
    sizes: dict[str, int] = {}
    notes: dict[str, dict[str, str]] = {}
    axes: dict[str, int] = {}
    others: list[str] = []
    data: list[str] = []
    for axis, shares in use.shares(stages, only).items():
        name, _, size = axis.rpartition("=")
        what = _what(shares)
        if what is None:
            others.append(f"{axis} ({_listed(shares)})")
            continue
        for term in dict.fromkeys((what, BATCH) if what == EXPERTS and shares.get(BATCH, 0) >= SHOWN else (what,)):
            sizes[term] = sizes.get(term, 1) * int(size)
        rest = {k: v for k, v in shares.items() if k != what and not (what == EXPERTS and k == BATCH) and v >= SHOWN}
        if rest:
            notes.setdefault(what, {})[axis] = _listed(rest)
        axes[what] = axes.get(what, 0) + 1
        if what in (BATCH, EXPERTS):
            data.append(name)

    def with_notes(what: str) -> str:
        of_axes = [text if axes[what] == 1 else f"{axis}: {text}" for axis, text in notes.get(what, {}).items()]
        return f"{TERMS[what]} {sizes[what]}" + (f" ({'; '.join(of_axes)})" if of_axes else "")

    said = [with_notes(what) for what in TERMS if what in sizes and what != BATCH] + list(pipeline)
    if BATCH in sizes:
        said.append(with_notes(BATCH))
    return said + others + _zero(stages, data, elements)


def _what(shares: Mapping[str, float]) -> str | None:
    """Return what an axis has its term from; None if it is idle, or does several things alike."""
    experts = shares.get(EXPERTS, 0.0) + shares.get(BATCH, 0.0)
    if shares.get(EXPERTS, 0.0) >= SHOWN and experts >= MOSTLY:
        return EXPERTS
    what, share = max(shares.items(), key=lambda entry: entry[1])
    return what if what != NOTHING and share >= MOSTLY else None


def _listed(shares: Mapping[str, float]) -> str:
    """Return shares as ``91% along features, 9% along the sequence``."""
    return ", ".join(
        f"{share:.0%} {'replicated' if what == NOTHING else f'along {what}'}"
        for what, share in shares.items() if share >= SHOWN
    )  # fmt: skip


def _zero(stages: Sequence[StagePlan], data: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Return how the states of parameters are sharded over the data ranks: ``ZeRO-1``, ``ZeRO-3``, or nothing.

    The optimizer's state is sharded like the stored parameters.
    """
    counted = {"step": 0, "use": 0, "": 0}
    for stage in stages:
        axes = [k for k, (name, size) in enumerate(stage.mesh) if name in data and size > 1]
        for name, choice in stage.params.items():
            sharded = any(choice.stored[k].is_shard and not choice.used[k].is_shard for k in axes)
            if sharded or any(not choice.used[k].is_shard for k in axes):
                counted[choice.lifetime if sharded else ""] += sizes.get(name, 0)
    total = sum(counted.values())
    words = {"step": "ZeRO-1", "use": "ZeRO-3"}
    found = {words[kind]: n / total for kind, n in counted.items() if kind and n >= SHOWN * total > 0}
    return [word if share > 1 - SHOWN else f"{word} ({share:.0%} of the parameters)" for word, share in found.items()]


def _recompute(graph: Graph, use: AxisUse, plan: Plan) -> list[str]:
    """Return how much of the work is recomputed in the backward."""
    names = [node.name for node in graph.nodes]
    again = {
        names[i] for stage in plan.stages if stage.recompute for i in segment_numbers(graph, stage.recompute)
    }  # fmt: skip
    total = sum(map(use.flops, names))
    if not again or not total:
        return []
    share = sum(map(use.flops, again)) / total
    return ["full recompute" if share >= ALL else f"recompute of {share:.0%} of the work"]


def _offload(plan: Plan) -> list[str]:
    """Return how many results of operators wait in the memory of the host, of all stages."""
    moved = sum(len(stage.memory.get(OFFLOAD, ())) for stage in plan.stages)
    return [f"offload of {moved} {'activation' if moved == 1 else 'activations'}"] if moved else []


def stages_in_words(numbers: Sequence[int]) -> str:
    """Return stage numbers as ``stage 3``, ``stages 0 to 3`` or ``stages 0, 2, 5``."""
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"stages {numbers[0]} to {numbers[-1]}"
    return "stages " + ", ".join(map(str, numbers))
