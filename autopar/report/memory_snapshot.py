"""A step's memory as a snapshot of torch's allocator, for https://pytorch.org/memory_viz.

The format is that of ``torch.cuda.memory._snapshot()``: a dict with ``segments`` and ``device_traces``, pickled. Events
are in the order of the step; their times count events, not microseconds. The stack of a block is the one operator that
it belongs to.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from autopar.planner.intra_op.memory.contents import StageContents
from autopar.planner.intra_op.memory.microbatch_timeline import SLOTS, Lifetime
from autopar.planner.intra_op.memory.moments import StepMoments
from autopar.plans.plan import Plan
from autopar.report import Facts
from autopar.report.memory_contents import DeviceMemory
from autopar.words.labels import op_labels
from cost_models.schedules.actions import parts

MOST_EVENTS = 200_000
"""Most events of one snapshot; of longer steps the first microbatches are shown to their end, with the peak."""
BASE_ADDRESS = 1 << 40
BLOCK = 512
"""Alignment of addresses in bytes, as in torch's allocator."""


class _Device:
    """Events of one device; a new block reuses a freed one of the same size, else is appended."""

    def __init__(self) -> None:
        self.events: list[Facts] = []
        self.end, self.live = BASE_ADDRESS, 0
        self.freed: dict[int, list[int]] = defaultdict(list)
        self.blocks: dict[int, tuple[int, list[Facts]]] = {}
        self.most = 0

    def alloc(self, n_bytes: int, frames: list[Facts]) -> int:
        """Record an allocation and return its address."""
        size = -(-n_bytes // BLOCK) * BLOCK
        if self.freed[size]:
            address = self.freed[size].pop()
        else:
            address, self.end = self.end, self.end + size
        self._event("alloc", address, n_bytes, frames)
        self.blocks[address] = n_bytes, frames
        self.live += n_bytes
        self.most = max(self.most, self.live)
        return address

    def free(self, address: int) -> None:
        """Record that a block is freed."""
        n_bytes, frames = self.blocks.pop(address)
        for action in ("free_requested", "free_completed"):
            self._event(action, address, n_bytes, frames)
        self.freed[-(-n_bytes // BLOCK) * BLOCK].append(address)
        self.live -= n_bytes

    def _event(self, action: str, address: int, n_bytes: int, frames: list[Facts]) -> None:
        self.events.append({
            "action": action, "addr": address, "size": n_bytes, "stream": 0, "time_us": len(self.events),
            "frames": frames,
        })  # fmt: skip

    def segment(self) -> Facts:
        """Return all addresses as one segment, in their final state."""
        blocks, at = [], BASE_ADDRESS
        for address in sorted(self.blocks):
            n_bytes, frames = self.blocks[address]
            if address > at:
                blocks.append(_block(at, address - at, 0, "inactive", []))
            size = -(-n_bytes // BLOCK) * BLOCK
            blocks.append(_block(address, size, n_bytes, "active_allocated", frames))
            at = address + size
        if self.end > at:
            blocks.append(_block(at, self.end - at, 0, "inactive", []))
        used = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        return {
            "device": 0, "address": BASE_ADDRESS, "total_size": self.end - BASE_ADDRESS, "allocated_size": used,
            "active_size": used, "requested_size": self.live, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
        }  # fmt: skip


def _block(address: int, size: int, requested: int, state: str, frames: list[Facts]) -> Facts:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


class _Stage:
    """One stage on the device, with its microbatches; the first backward allocates the gradients of parameters."""

    def __init__(self, contents: StageContents, device: _Device) -> None:
        self.contents, self.device = contents, device
        self.labels = op_labels(contents.graph)
        self.variants: dict[bool, StepMoments] = {}
        self.kept: dict[int, dict[int, list[int]]] = {}  # by microbatch and moment: addresses that are freed after it
        self.of_microbatch: dict[int, bool] = {}
        self.accumulates = False

    def frames(self, node: int | None, kind: str) -> list[Facts]:
        """Return the stack frames of a block."""
        known = self.contents.graph.nodes[node] if node is not None else None
        name = kind if known is None else f"{kind} of {self.labels.get(known.name, known.target)}"
        return [{"name": name, "filename": known.module if known is not None else "", "line": 0}]

    def begin(self) -> None:
        """Allocate everything that is stored between steps."""
        for held in self.contents.stored():
            self.device.alloc(held.n_bytes, self.frames(held.node, held.category))

    def moments(self, accumulates: bool) -> StepMoments:
        """Return the moments of a pass."""
        if accumulates not in self.variants:
            self.variants[accumulates] = self.contents.moments(accumulates)
        return self.variants[accumulates]

    def run(self, microbatch: int, backward: bool) -> None:
        """Record the forward of a microbatch, or its backward."""
        if backward:
            moments = self.moments(self.accumulates)
            first, end = moments.n, (1 + SLOTS) * moments.n + 1
            self.accumulates = True
        else:
            moments = self.moments(True)
            first, end = 0, moments.n
        assert moments.lifetimes is not None
        begins: dict[int, list[Lifetime]] = defaultdict(list)
        for life in moments.lifetimes:
            if first <= life.first < end:
                begins[life.first].append(life)
        frees = self.kept.pop(microbatch, {}) if backward else {}
        for at in range(first, end):
            for life in begins[at]:
                address = self.device.alloc(life.n_bytes, self.frames(life.node, life.kind))
                if life.kind != "parameter gradient":
                    frees.setdefault(life.last, []).append(address)
            if at < len(moments.beside) and moments.beside[at] > 0:
                node = moments.moment(at).node
                self.device.free(self.device.alloc(moments.beside[at], self.frames(node, "inside")))
            for address in frees.pop(at, ()):
                self.device.free(address)
        if not backward:
            self.kept[microbatch] = frees
        else:
            for addresses in frees.values():
                for address in addresses:
                    self.device.free(address)

    def step(self) -> None:
        """Record the optimizer's step."""
        peaks = self.contents.peaks
        if peaks.optimizer_bytes:
            self.device.free(self.device.alloc(peaks.optimizer_bytes, self.frames(None, "the optimizer's step")))


def snapshot(plan: Plan, memory: DeviceMemory) -> tuple[Facts, int, int]:
    """Return the snapshot of a device over a step, its peak bytes, and the number of actions shown.

    Buffers of transfers between stages are not shown; of a split backward everything is freed in the first half.
    """
    device = _Device()
    stages = {n: _Stage(contents, device) for n, contents in zip(memory.stages, memory.contents, strict=True)}
    for stage in stages.values():
        stage.begin()
    shown = 0
    row: Sequence[Any] = plan.schedule.rows[memory.group]
    for step in row:
        for action in parts(step):
            if action.kind != "W":  # gradients of weights keep nothing for a later action
                stages[action.stage].run(action.microbatch, action.kind != "F")
        shown += 1
        if len(device.events) > MOST_EVENTS:
            break
    else:
        for stage in stages.values():
            stage.step()
    data = {
        "segments": [device.segment()], "device_traces": [device.events], "allocator_settings": {},
        "external_annotations": [],
    }  # fmt: skip
    return data, device.most, shown


def pickled(data: Facts) -> bytes:
    """Return a snapshot as the bytes of its file."""
    return pickle.dumps(data)
