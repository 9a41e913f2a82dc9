"""Contents of a device's memory at the peak of a step, by category and by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.contents import (
    CATEGORIES,
    COMMUNICATION,
    WORKSPACE,
    HeldMemory,
    StageContents,
    by_category,
)
from autopar.planner.intra_op.pins.options import device_limit
from autopar.plans.plan import Plan
from autopar.plans.prices import bytes_together
from autopar.plans.stage_graphs import cut
from autopar.report import Facts
from autopar.words.graph import Graph
from autopar.words.labels import op_labels
from autopar.words.texts import show_bytes
from hardware_profiles import Budget, Cluster, budget_of


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of the devices of one group: one of their stages is at its peak, the others keep what they hold.

    Attributes:
        group: number of the group of devices.
        stages: numbers of the stages on it.
        running: the stage that is at its peak.
        contents: the contents of each stage.
        limit_bytes: upper limit of the counted peak.
        budget: division of the smallest device's memory.
    """

    group: int
    stages: tuple[int, ...]
    running: int
    contents: tuple[StageContents, ...]
    limit_bytes: float
    budget: Budget

    @cached_property
    def held(self) -> list[tuple[int, HeldMemory]]:
        """Everything held, with its stage."""
        held = []
        for number, stage in zip(self.stages, self.contents, strict=True):
            of_stage = stage.at_fullest() if number == self.running else [
                *stage.stored(), *stage.gradients(), *stage.kept(stage.plan.in_flight)
            ]  # fmt: skip
            held += [(number, each) for each in of_stage]
        return held

    @cached_property
    def categories(self) -> dict[str, int]:
        """Bytes by category."""
        return by_category([each for _, each in self.held])

    @property
    def n_bytes(self) -> int:
        """All counted bytes."""
        return sum(self.categories.values())

    def moment(self) -> str:
        """Return the moment of the peak in a few words."""
        stage = self.contents[self.stages.index(self.running)]
        fullest = stage.fullest
        if fullest.moment is None:
            return f"while {stage.plan.optimizer} steps"
        node = stage.graph.nodes[fullest.moment.node]
        label = op_labels(stage.graph)[node.name]
        words = f"in the {'backward' if fullest.moment.backward else 'forward'} of {label}"
        if stage.plan.microbatches > 1:
            which = "the first microbatch" if fullest.is_first else "a microbatch"
            words += f" of {which}, with {fullest.in_flight} of {stage.plan.microbatches} in flight"
        return words

    def tensors(self, n: int) -> list[Facts]:
        """Return the ``n`` largest tensors; those of one operator or parameter in one category count together."""
        sums: dict[tuple[int, str, int | None], list[int]] = {}
        for number, each in self.held:
            entry = sums.setdefault((number, each.category, each.node), [0, 0])
            entry[0] += each.n_bytes
            entry[1] += 1
        rows = []
        for (number, category, node), (n_bytes, pieces) in sums.items():
            graph = self.contents[self.stages.index(number)].graph
            rows.append((n_bytes, {
                "stage": number, "category": category, "name": _name(graph, node), "pieces": pieces,
                "module": graph.nodes[node].module if node is not None else "", "bytes": n_bytes,
            }))  # fmt: skip
        return [row for _, row in sorted(rows, key=lambda sized: -sized[0])[:n]]

    def row(self) -> Facts:
        """Return everything as plain values."""
        return {
            "group": self.group, "stages": list(self.stages), "fullest_stage": self.running, "moment": self.moment(),
            "categories": self.categories, "bytes": self.n_bytes, "limit_bytes": self.limit_bytes,
            "usable_bytes": self.budget.usable_bytes, "reserved_bytes": self.budget.reserved_bytes,
            "margin": self.budget.margin,
        }  # fmt: skip


def _name(graph: Graph, node: int | None) -> str:
    if node is None:
        return "-"
    known = graph.nodes[node]
    return op_labels(graph)[known.name] if known.kind == "op" else known.target


def memory_of_devices(graph: Graph, plan: Plan, cluster: Cluster) -> list[DeviceMemory]:
    """Return the memory of a device of every group; ``graph`` is of the whole model, one microbatch."""
    graphs = [part.graph for part in cut(graph, plan.starts)]
    of_stages = [
        StageContents(part, stage, pricer(cluster, stage.mesh, stage.devices))
        for part, stage in zip(graphs, plan.stages, strict=True)
    ]
    devices = []
    for group, stages in enumerate(plan.schedule.stages_of_rank):
        ranks = plan.stages[stages[0]].devices
        limit = device_limit(cluster, ranks, plan.pins.memory_limit_bytes)
        smallest = min((cluster.device(rank) for rank in ranks), key=lambda device: device.memory_bytes)
        running = max(stages, key=lambda s: plan.stages[s].price.transient_bytes)
        devices.append(DeviceMemory(
            group, tuple(stages), running, tuple(of_stages[s] for s in stages), limit, budget_of(cluster, smallest)
        ))  # fmt: skip
        assert devices[-1].n_bytes == bytes_together([plan.stages[s].price for s in stages]), "categories add up"
    return devices


def sentence(devices: Sequence[DeviceMemory]) -> str:
    """Return one sentence about where and when the memory of a plan peaks."""
    full = max(devices, key=lambda device: device.n_bytes / device.limit_bytes)
    where = f"group {full.group} of {len(devices)}" if len(devices) > 1 else "every device"
    if len(full.stages) > 1:
        where += f", stage {full.running}"
    return (
        f"Memory peaks {full.moment()}, on {where}: {show_bytes(full.n_bytes)} of "
        f"{show_bytes(full.limit_bytes)} usable ({full.n_bytes / full.limit_bytes:.1%})."
    )


def limit_words(device: DeviceMemory, requested: float | None) -> str:
    """Return the source of a device's memory limit in words."""
    budget = device.budget
    if requested is not None:
        return f"The limit of {show_bytes(requested)} was requested; the device has {show_bytes(budget.usable_bytes)}."
    if not budget.is_known:
        return f"The limit is {1 - budget.limit_bytes / budget.usable_bytes:.0%} below the data sheet's bytes."
    return (
        f"The device gives {show_bytes(budget.usable_bytes)}: {show_bytes(budget.reserved_bytes)} are for the context, "
        f"libraries and communication buffers, {budget.margin:.0%} of the count for the allocator's fragmentation and "
        "the error of the count."
    )


__all__ = [
    "CATEGORIES", "COMMUNICATION", "WORKSPACE", "DeviceMemory", "limit_words", "memory_of_devices", "sentence",
]  # fmt: skip
