"""The error where nothing fits: what was tried, and the least change that would do."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from autopar.errors import InfeasibleError, PlanError
from autopar.planner.inter_op.candidates import PipelineOptions
from autopar.planner.inter_op.per_microbatch_count import OneNumber
from autopar.planner.intra_op.memory.memory_errors import host_hint
from autopar.words.texts import show_bytes


def nothing_fits(
    searches: Sequence[OneNumber], request: PipelineOptions, n_devices: int
) -> PlanError | InfeasibleError:  # fmt: skip
    """Return the error where no layout was planned: what was tried, and the least change that would do."""
    counts = ", ".join(str(s.request.microbatches) for s in searches)
    groups = f"{request.groups} group{'s' * (request.groups > 1)}" if request.groups else "any number of groups"
    devices = f"{n_devices} device{'s' * (n_devices > 1)}"
    tried = f"{groups} of {devices}, {counts} microbatches, schedules {', '.join(request.schedules)}"
    cluster, options = searches[-1].cluster, request.options
    hint = host_hint(options, cluster.slowest(range(n_devices)), searches[-1].graph.forward_only)
    leanest = min((s.leanest for s in searches if s.leanest is not None), default=None, key=lambda need: need.n_bytes)
    if leanest is not None and len(searches) > 1:
        again = ", operators that run again where that helps" if request.may_recompute else ""
        factor = leanest.n_bytes / leanest.limit_bytes
        least = (
            f"devices of which {show_bytes(leanest.n_bytes)} may be filled, or about {ceil(factor * n_devices)} of "
            "these"
            if factor > 1
            else "more devices, or a smaller batch: what fits on average does not fit in every stage"
        )
        return InfeasibleError(
            f"no plan fits {show_bytes(leanest.limit_bytes)} per device; tried: {tried}{again}\n"
            f"  the leanest, {leanest.groups} group(s) of {leanest.mesh.shown()} with {leanest.microbatches} "
            f"microbatches, needs about {show_bytes(leanest.n_bytes)} with one of them in flight; the least that would "
            f"do: {least}{hint}"
        )
    return next((s.infeasible for s in reversed(searches) if s.infeasible), None) or PlanError(
        f"no schedule of {', '.join(request.schedules)} allows {' or '.join(counts.split(', '))} microbatches on "
        f"{groups}, of {devices} together; change the microbatches or the schedules, or take fewer groups: operators "
        "that read and write one buffer stay in one stage, and there may be too few cuts between them"
    )
