"""Searches for the layouts that a page shows next to its plan: others of the cluster, and other numbers of devices."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.common import UsageError, load_and_capture, progress
from autopar.errors import AutoparError, ClusterError
from autopar.report.layouts import LayoutRow, layout_row, with_front
from autopar.report.page.tradeoff import THIS
from autopar.report.plan_in_words import plan_in_words
from hardware_profiles import split_software, split_subset
from hardware_profiles.software import AS

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.frontends import Loaded
    from autopar.planfile import Document
    from autopar.planner.planning import Outcome
    from autopar.plans.plan import Plan
    from autopar.words.graph import Graph
    from cost_models.schedules import Timeline
    from hardware_profiles import Cluster


@dataclass(frozen=True)
class Searches:
    """Searches under a plan's own constraints, without those of its mesh, stages and microbatches.

    Attributes:
        spec: the specification of the model; its path is relative to ``folder``.
        document: the file of the plan.
        captured: the plan's graph, of one microbatch.
    """

    spec: str
    folder: Path | None
    document: Document
    plan: Plan
    timeline: Timeline
    captured: Captured
    cluster: Cluster

    def layouts(self, top: int) -> list[LayoutRow]:
        """Return this plan and the best ``top`` layouts of its cluster, the fastest first."""
        outcome = self._find(self.plan.cluster, self.cluster, top)
        best = sorted(outcome.others, key=lambda found: found.plan.seconds)[:top]
        there = outcome.cluster or self.cluster
        rows = [self._row(f.what, f.plan, f.timeline, f.search.graph, there) for f in best]
        return with_front([self._this(), *(row for row in rows if not _same(row, self._this()))])

    def by_devices(self, counts: list[int]) -> tuple[list[LayoutRow], list[tuple[int, str]]]:
        """Return this plan and the best ones for other numbers of devices, the fewest first, and what is refused."""
        from autopar.plans.clusters import get_cluster

        rows, refused = [self._this()] if counts else [], []
        for n in counts:
            if n == self._this().devices:
                continue
            try:
                name = cluster_of(self.plan.cluster, n)
                found = self._find(name, cluster := get_cluster(name), 1)
            except AutoparError as error:
                refused.append((n, str(error)))
                continue
            plan, graph = found.plan, found.captured.graph
            there = found.cluster or cluster
            timeline = found.timeline or self._simulated(found, there)
            rows.append(self._row(f"{n} devices", plan, timeline, graph, there))
        return _faster_with_more(rows), refused

    def _this(self) -> LayoutRow:
        return self._row(THIS, self.plan, self.timeline, self.captured.graph, self.cluster)

    def _row(self, what: str, plan: Plan, timeline: Timeline, graph: Graph, cluster: Cluster) -> LayoutRow:
        return replace(layout_row(what, plan, timeline, graph, cluster), words=plan_in_words(graph, plan))

    @cached_property
    def _loaded(self) -> tuple[Loaded, Captured]:
        """The model, and its graph for the whole batch of a step."""
        from autopar.planner import planning

        named = self.document.model or {}
        loaded, whole = load_and_capture(
            self.spec, named.get("batch"), named.get("seq"), folder=self.folder, precision=self.document.precision
        )
        if not planning.can_be_cut(whole.graph, (loaded.args, loaded.kwargs)):
            raise UsageError("--top and --devices need a model that returns its loss, and a batch with rows")
        return loaded, whole

    def _find(self, name: str, cluster: Cluster, top: int) -> Outcome:
        """Return the best plan of all devices of a cluster."""
        from autopar.planner import planning
        from autopar.plans.request import PlanRequest
        from autopar.progress import heard

        loaded, whole = self._loaded
        example = (loaded.args, loaded.kwargs)
        pins = replace(self.plan.pins, stages=None, cuts=(), schedules=(), microbatches=None, mesh=None)
        wanted = PlanRequest(pins, self.plan.optimizer, top=top)
        with progress(f"planning for {cluster.n_devices} devices") as say, heard(say):
            return planning.find(
                loaded.model, whole, lambda: example, cluster, cluster.n_devices, wanted, name, runs=False, say=say
            )

    def _simulated(self, found: Outcome, cluster: Cluster) -> Timeline:
        """Return the timeline of a plan of one stage."""
        from autopar.cli.common import what_if

        return what_if(found.captured, found.plan, cluster).simulated()[1]


def _faster_with_more(rows: list[LayoutRow]) -> list[LayoutRow]:
    """Return rows, the fewest devices first, with those marked that no row of fewer devices is as fast as."""
    marked, least = [], float("inf")
    for row in sorted(rows, key=lambda row: row.devices):
        marked.append(replace(row, on_front=row.seconds < least))
        least = min(least, row.seconds)
    return marked


def cluster_of(name: str, n: int) -> str:
    """Return the name of a cluster like another one with ``n`` devices: its first ones, or more of its machines.

    Raises:
        ClusterError: it has fewer devices, and is not of a kind that can be named with more.
    """
    from autopar.plans.clusters import get_cluster

    whole, trainer = split_software(name)
    suffix = "" if trainer is None else f"{AS}{trainer}"
    cluster = get_cluster(name)
    if n == cluster.n_devices:
        return name
    plain, ranks = split_subset(whole)
    if not ranks and n < cluster.n_devices:
        return f"{plain}@0-{n - 1}{suffix}" if n > 1 else f"{plain}@0{suffix}"
    counted = re.fullmatch(r"(?P<base>.+?)(-x\d+)?", plain)
    if not ranks and not plain.endswith((".toml", ".json")) and counted is not None:
        one = get_cluster(counted["base"]).n_devices
        if n % one == 0:
            return f"{counted['base']}-x{n // one}{suffix}"
        raise ClusterError(
            f"'{name}' has {cluster.n_devices} devices, {one} to a machine, and {n} are no whole number of machines; "
            f"ask for {n - n % one} or {n - n % one + one}"
        )
    raise ClusterError(
        f"'{name}' has {cluster.n_devices} devices, and {n} were asked for; plan for a cluster with more of them, or "
        f"ask for up to {cluster.n_devices}"
    )


def _same(a: LayoutRow, b: LayoutRow) -> bool:
    """Return True if two rows appear to be of one plan."""
    return abs(a.seconds / b.seconds - 1) < 1e-9 and a.memory_bytes == b.memory_bytes
