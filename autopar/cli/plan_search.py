"""The search of ``autopar plan`` under one precision policy, or under several to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from autopar.cli.common import UsageError, load_and_capture, progress
from autopar.report import Facts

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.frontends import Loaded
    from autopar.planner.planning import Outcome
    from autopar.plans.plan import Plan
    from autopar.plans.request import PlanRequest
    from autopar.words.graph import Graph
    from autopar.words.precision import Precision
    from hardware_profiles import Cluster


@dataclass(frozen=True)
class UnderPolicy:
    """A model as it was captured under one policy, and the request under that policy."""

    loaded: Loaded
    captured: Captured
    request: PlanRequest


@dataclass(frozen=True)
class PlanSearch:
    """A search for a plan of a model, the batch of a step, a cluster and a request.

    Attributes:
        model, batch, seq: the model as :func:`~autopar.cli.common.load_and_capture` takes it.
        cluster: the cluster's name; ``hardware``: itself.
        wanted: the request; of its precision nothing is read.
        chosen: values of the command's options, by parameter.
        likes: layouts are priced beside.
    """

    model: str
    batch: int | None
    seq: int | None
    cluster: str
    hardware: Cluster
    wanted: PlanRequest
    chosen: Facts
    likes: bool

    def under(self, policy: Precision | None) -> UnderPolicy:
        """Capture the model under a policy; without one as it is, or as the frontend has it."""
        from autopar.capture.microbatches import first_part
        from autopar.planner import planning
        from autopar.profiling.measured_load import with_measured_load
        from autopar.rules.experts.expert_load import with_load

        wanted, parts = self.wanted, self.wanted.microbatches
        loaded, captured = load_and_capture(
            self.model, self.batch, self.seq, parts=parts if parts > 1 else None, precision=policy, by_default=True
        )
        _check_kept(self.chosen, captured.graph)
        example = loaded.args, loaded.kwargs
        request = with_measured_load(wanted, captured, loaded.model, first_part(example, parts))
        captured = replace(captured, graph=with_load(captured.graph, request.pins.expert_load))
        request = replace(request, pins=replace(request.pins, precision=captured.graph.precision))
        if (self.likes or wanted.top != 1) and not planning.can_be_cut(captured.graph, example):
            raise UsageError("--like and --top need a model that returns its loss, and a batch with rows")
        return UnderPolicy(loaded, captured, request)

    def find(self, under: UnderPolicy) -> Outcome:
        """Return the best plan under a policy."""
        from autopar.planner import planning
        from autopar.progress import heard

        example = under.loaded.args, under.loaded.kwargs
        with progress("planning") as say, heard(say):
            return planning.find(
                under.loaded.model, under.captured, lambda: example, self.hardware, self.hardware.n_devices,
                under.request, self.cluster, runs=False, say=say,
            )  # fmt: skip

    def fastest(self, allowed: Sequence[Precision]) -> tuple[UnderPolicy, Outcome, str]:
        """Return what :func:`~autopar.parallelizing.precisions.fastest` of the policies is, its plan, and a note."""
        from autopar.parallelizing.precisions import fastest

        made: dict[Precision, tuple[UnderPolicy, Outcome]] = {}

        def plan_under(policy: Precision) -> Plan:
            under = self.under(policy)
            made[policy] = under, self.find(under)
            return made[policy][1].plan

        best, _, note = fastest(allowed, plan_under)
        return (*made[best], note)


def _check_kept(chosen: Facts, graph: Graph) -> None:
    """Refuse a parameter that ``--keep-replicated`` and ``--pin-param`` both name.

    Later patterns override earlier ones, and the order of the two options is not known here.
    """
    whole = chosen["keep_replicated"] or []
    pinned = [text.partition("=")[::2] for text in chosen["pin_param"] or []]
    for _, node in graph.of_kind("param"):
        both = [
            (a, b, how) for a in whole if fnmatchcase(node.target, a)
            for b, how in pinned if fnmatchcase(node.target, b)
        ]  # fmt: skip
        if both:
            a, b, how = both[0]
            raise UsageError(
                f"parameter '{node.target}' is named by --keep-replicated '{a}' and by --pin-param '{b}={how}'; say "
                f"both by --pin-param, of which a later one overrides: --pin-param '{b}={how}' --pin-param "
                f"'{a}=replicate'"
            )


def precision_note(policy: Precision | None, loaded: Loaded, captured: Captured, hardware: Cluster) -> str:
    """Return what a reader should know of the precision that was not asked for; empty if it was."""
    from autopar.report.layouts import flops_by_dtype
    from cost_models.operator_cost import peak_flops

    if policy is not None:
        return ""
    if loaded.precision is not None:
        return _policy_of(loaded.precision)
    device = hardware.devices[0]
    times = peak_flops(device, "bfloat16") / peak_flops(device, "float32")
    if flops_by_dtype(captured.graph).get("float32", 0.0) < 0.5 or times < MANY_TIMES:
        return ""
    return (
        f"float32 throughout, as the model is; {device.name} multiplies bfloat16 {times:.0f} times as fast: "
        "--precision bf16-mixed computes in it, on float32 masters"
    )


MANY_TIMES = 4.0
"""So many times faster products in bfloat16 are worth a note."""


def _policy_of(precision: Precision) -> str:
    """Return a note about a precision policy that was chosen by default."""
    return (
        f"precision {precision}, as the config is in {precision.params}: it computes so, on {precision.master} masters "
        f"with {precision.moments} moments, and adds gradients up in {precision.reduce}; --precision bf16-true for the "
        "config's own format throughout"
    )
