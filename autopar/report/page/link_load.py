"""Load of each kind of link in a step, on the routes from which prices are computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from autopar.planner.inter_op.simulating.timing import stage_edge_messages
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph
from autopar.report.page.markup import bar, filled, joined, table
from autopar.report.page.seconds_spent import StageTally
from autopar.words.meshes import Mesh
from autopar.words.texts import show_bytes, show_seconds
from cost_models.mesh_links import link_bytes
from cost_models.reshard_paths import Edge, reshard_path
from hardware_profiles import Cluster

COLOURS = 6
"""Colours of what loads a link: at most five axes, and transfers between stages."""
Loads = defaultdict[str, float]
"""Bytes on a link by their source."""


@dataclass
class LinkKind:
    """Links of one name and bandwidth.

    Attributes:
        n_links: the number of them in the cluster, each direction counted.
        used: how many of the followed ones carry anything.
        most_bytes, mean_bytes: per step, of the fullest link and of those that carry anything.
        by: ``{what: bytes}`` of the fullest: mesh axes, and ``between stages``.
    """

    name: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    n_links: int = 0
    used: int = 0
    most_bytes: float = 0.0
    mean_bytes: float = 0.0
    by: Loads = field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        """Seconds that the fullest link sends at its data-sheet bandwidth."""
        return self.most_bytes / self.bandwidth_bytes_per_second if self.bandwidth_bytes_per_second else 0.0


def link_kinds(
    graphs: Sequence[StageGraph], plan: Plan, cluster: Cluster, of_stages: Sequence[StageTally]
) -> list[LinkKind]:
    """Return the links of the cluster by kind, with their load in a step."""
    carried: defaultdict[Edge, Loads] = defaultdict(lambda: defaultdict(float))
    for stages in plan.schedule.stages_of_rank:
        meshes: dict[tuple[Mesh, tuple[int, ...]], defaultdict[tuple[str, str], float]] = {}
        for number in stages:
            stage = plan.stages[number]
            sums = meshes.setdefault((stage.mesh, stage.devices), defaultdict(float))
            for key, n_bytes in of_stages[number].traffic.items():
                sums[key] += n_bytes
        for (mesh, devices), traffic in meshes.items():
            for axis in {axis for axis, _ in traffic}:
                alone = {key: n for key, n in traffic.items() if key[0] == axis}
                for edge, n_bytes in link_bytes(cluster, mesh.size_of, devices, alone).items():
                    carried[edge][f"axis {axis}"] += n_bytes
    if not cluster.abstract:
        _between_stages(carried, graphs, plan, cluster)
    kinds: dict[tuple[str, float], LinkKind] = {}
    for a, b, link in cluster.graph.edges(data="link"):
        name, bandwidth = link.name, link.bandwidth_bytes_per_second
        kind = kinds.setdefault((name, bandwidth), LinkKind(name, bandwidth, link.latency_seconds))
        kind.n_links += 1
        loads = carried.get((a, b))
        if loads:
            total = sum(loads.values())
            kind.used += 1
            kind.mean_bytes += total
            if total > kind.most_bytes:
                kind.most_bytes, kind.by = total, loads
    for kind in kinds.values():
        kind.mean_bytes /= max(1, kind.used)
    return sorted(kinds.values(), key=lambda kind: -kind.seconds)


def _between_stages(
    carried: defaultdict[Edge, Loads], graphs: Sequence[StageGraph], plan: Plan, cluster: Cluster
) -> None:
    """Add the transfers between stages, priced as going between the first devices of both."""
    group = plan.schedule.rank_of_stage
    for part in graphs:
        for stage_edge in part.takes:
            if group[stage_edge.source] == group[part.number]:
                continue
            sides = stage_edge.sides(plan.stages, part.number)
            for near, far in (sides, sides[::-1]) if stage_edge.needs_grad else (sides,):
                n_bytes = max((n.n_bytes for n in stage_edge_messages(stage_edge.spec, near, far)), default=0)
                for edge in reshard_path(cluster.graph, near.devices[0], far.devices[0]):
                    carried[edge]["between stages"] += n_bytes * plan.microbatches


def links_section(kinds: Sequence[LinkKind], seconds: float) -> Markup:
    """Return a row for each kind of link: the utilization of the fullest over a step of `seconds`."""
    colours = [f"l-{k}" for k in range(COLOURS)]
    axes = sorted({what for kind in kinds for what in kind.by})
    lines = []
    for kind in kinds:
        pieces = [
            (colours[axes.index(what) % COLOURS], n / kind.bandwidth_bytes_per_second, f"{what}: {show_bytes(n)}")
            for what, n in kind.by.items()
        ]
        share = f"{kind.seconds / seconds:.1%} of the step" if kind.used else "idle"
        lines.append(filled(
            '<div class="row"><span class="row-name">{}</span>{}<span class="row-number">{}</span></div>', kind.name,
            bar(pieces, max(seconds, kind.seconds)), share,
        ))  # fmt: skip
    rows = [
        [
            kind.name, f"{kind.bandwidth_bytes_per_second / 1e9:.4g} GB/s", show_seconds(kind.latency_seconds),
            kind.n_links, show_bytes(kind.most_bytes), show_bytes(kind.mean_bytes), show_seconds(kind.seconds),
            ", ".join(f"{what} {show_bytes(n)}" for what, n in sorted(kind.by.items(), key=lambda e: -e[1])),
        ] for kind in kinds
    ]  # fmt: skip
    heads = (
        "link", "bandwidth", "latency", "links, each way", "the fullest carries", "mean of those used",
        "at full bandwidth", "of which",
    )  # fmt: skip
    keys = joined(filled('<li><i class="{}"></i>{}</li>', colours[k % COLOURS], what) for k, what in enumerate(axes))
    return filled(
        '<ul class="legend">{}</ul>{}{}', keys, joined(lines),
        table(heads, rows, numbers=(1, 2, 3, 4, 5, 6), label="links"),
    )  # fmt: skip
