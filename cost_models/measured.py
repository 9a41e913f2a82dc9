"""Costs from measurements: ops at measured sizes, corrected formulas elsewhere, interpolated transfers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hardware_profiles import Cluster, Device, software_named
from hardware_profiles.measurements import OTHER, Correction, Measured, Points
from hardware_profiles.software import OWN

from .collective_cost import AxisCost
from .costs import OpSeconds, OpWork, StageSeconds, StageWork, cost_source
from .data_sheet_costs import Roofline
from .optimizer_bytes import BESIDE_MUON, MUON

SINGULAR = 1e-9
"""Below this share of its largest value the determinant of a fit is rounding: all computed seconds are alike."""


@dataclass(frozen=True, eq=False)
class MeasuredCosts:
    """Costs by a profile, and by formulas where it has no entry (:class:`cost_models.costs.Costs`).

    Attributes:
        formulas: the same cluster by its data sheets.
        measured: the tables of the profile.
    """

    formulas: Roofline
    measured: Measured
    _wires: dict[tuple[int, int], AxisCost | MeasuredAxis] = field(default_factory=dict, init=False, repr=False)

    share_bounds = False
    fuses = False

    @property
    def bucket_bytes(self) -> float:
        """Bucket size of the formulas."""
        return self.formulas.bucket_bytes

    @property
    def provenance(self) -> Mapping[str, object]:
        """Date, machine and method of the measurement."""
        return self.measured.provenance

    def op(self, device: Device, work: OpWork) -> OpSeconds:
        """Return the measured seconds of an operator, or the formulas' corrected by its kind."""
        key = work.key()
        measured = self.measured.ops.get(key) if key is not None else None
        if measured is not None:
            forward, backward = measured.forward_seconds, measured.backward_seconds
            if not work.differentiable:
                return OpSeconds(forward, forward, from_profile=True)
            split = 0.0
            if measured.weight_seconds and measured.input_seconds:
                split = max(0.0, measured.input_seconds + measured.weight_seconds - backward)
            return OpSeconds(forward, forward + backward, min(measured.weight_seconds, backward), split, True)
        plain = self.formulas.op(device, work)
        forward, backward = corrected(
            self.measured, work.kind, plain.forward, plain.total - plain.forward, work.differentiable
        )
        total, weights = forward + backward, 0.0
        if work.weight_gradients:
            weights = forward * work.weight_gradients
            weights *= (total - forward) / (forward * work.gradients) if forward else 0.0
        return OpSeconds(forward, total, weights)

    def copy(self, device: Device, n_bytes: float, dtype: str) -> float:
        """Return the formulas' seconds of a copy; profiles measure operators of the model only."""
        return self.formulas.copy(device, n_bytes, dtype)

    def axes(self, shape: Mapping[str, int], devices: Sequence[int]) -> Mapping[str, AxisCost | MeasuredAxis]:
        """Return the axes as measured between two devices, scaled by the formulas for more."""
        plain = self.formulas.axes(shape, devices)
        if self.formulas.cluster.n_devices < 2:
            return plain
        pair = self.formulas.axes({"pair": 2}, (0, 1))["pair"]
        return {name: MeasuredAxis(axis, self.measured, pair) for name, axis in plain.items()}

    def transfer(self, source: int, target: int, n_bytes: float) -> float:
        """Return the measured seconds of a message."""
        if (source, target) not in self._wires:
            self._wires[source, target] = self.axes({"pair": 2}, (source, target))["pair"]
        return self._wires[source, target].seconds("send_recv", n_bytes)

    def stage(self, work: Callable[[], StageWork]) -> StageSeconds | None:
        """Return the executor's own seconds.

        * forward: handling of one microbatch;
        * backward: the same; gradients that arrive over several ways are added up, and weight gradients to those of
          earlier microbatches;
        * halves, where the backward is split: the same for each half, and more for every op, since autograd's graph
          is searched for the cuts and run in two parts;
        * step: the optimizer, and what is done once a step.
        """
        stage_work, measured = work(), self.measured
        overheads = measured.overheads
        if stage_work.forward_only:
            return StageSeconds(overheads.forward_seconds, 0.0, 0.0, 0.0, 0.0, 0.0)
        summed = to_earlier = to_earlier_anew = 0.0
        for additions, n_bytes in stage_work.summed:
            summed += additions * between(measured.accumulate, n_bytes)
        often = (stage_work.microbatches - 1) / stage_work.microbatches
        step = overheads.step_seconds
        step += stage_work.matrix_seconds
        optimizer = measured.optimizers.get(BESIDE_MUON if stage_work.optimizer == MUON else stage_work.optimizer)
        for used, stored in stage_work.parameters:
            to_earlier += often * between(measured.accumulate, used)
            to_earlier_anew += often * between(measured.accumulate_new, used)  # halves of a backward sum up anew
            if optimizer is not None:
                step += optimizer.tensor_seconds + optimizer.byte_seconds * stored
        return StageSeconds(
            overheads.forward_seconds, overheads.backward_seconds + summed + to_earlier,
            overheads.input_seconds + stage_work.n_ops * overheads.input_op_seconds,
            overheads.weight_seconds + stage_work.n_ops * overheads.weight_op_seconds + to_earlier_anew, step, summed,
        )  # fmt: skip


@cost_source
def of_profile(cluster: Cluster) -> MeasuredCosts | None:
    """Return measured costs for a cluster that came from a profile file."""
    if cluster.measured is None:
        return None
    return MeasuredCosts(Roofline(cluster, software_named(OWN)), cluster.measured)  # measured with its software


@dataclass(frozen=True, eq=False)
class MeasuredAxis:
    """An axis whose collectives were measured between two devices; formulas scale them to more devices.

    Attributes:
        formula: the axis by formula.
        measured: the tables with these transfers.
        pair: the same links with two devices, by formula.
    """

    formula: AxisCost
    measured: Measured
    pair: AxisCost

    def seconds(self, kind: str, n_bytes: float) -> float:
        """Return the seconds of one collective; 0 on an axis of size 1. Unknown kinds raise ValueError."""
        plain = self.formula.seconds(kind, n_bytes)
        points = self.measured.transfers.get(kind)
        if self.formula.size == 1 or points is None:
            return plain
        here = between(points, n_bytes)
        if self.formula.size == 2:
            return here
        formula = self.pair.seconds(kind, n_bytes)
        return here * plain / formula if formula > 0 else plain


def between(points: Points, n_bytes: float) -> float:
    """Return the seconds at a size, interpolated linearly; beyond the last point by the last slope."""
    if n_bytes <= points[0][0] or len(points) == 1:
        return points[0][1]
    i = min(max(bisect_left(points, (n_bytes, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(0.0, y0 + (y1 - y0) * (n_bytes - x0) / (x1 - x0))


def corrected(
    measured: Measured, kind: str, forward_seconds: float, backward_seconds: float, differentiable: bool
) -> tuple[float, float]:
    """Return corrected forward and backward seconds of an op that was not measured."""
    rule = measured.corrections.get(kind) or measured.corrections[OTHER]
    (base, factor), (back_base, back_factor) = rule.forward, rule.backward
    backward = back_base + back_factor * backward_seconds if differentiable else 0.0
    return base + factor * forward_seconds, backward


def fit_correction(computed: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Return ``(seconds, factor)``, both >= 0, of the line from computed to measured seconds.

    It has the least squares of relative errors.
    """
    rows = [(c / m, 1 / m) for c, m in zip(computed, measured, strict=True) if m > 0]  # factor * c/m + base * 1/m = 1
    if not rows:
        return 0.0, 1.0
    cc, cb, bb = sum(c * c for c, _ in rows), sum(c * b for c, b in rows), sum(b * b for _, b in rows)
    c1, b1 = sum(c for c, _ in rows), sum(b for _, b in rows)
    det = cc * bb - cb * cb
    if det > SINGULAR * cc * bb:
        factor, base = (c1 * bb - b1 * cb) / det, (b1 * cc - c1 * cb) / det
        if factor >= 0 and base >= 0:
            return base, factor
    only_factor, only_base = (c1 / cc if cc else 0.0), b1 / bb
    errors = [sum((f * c + s * b - 1) ** 2 for c, b in rows) for s, f in ((0.0, only_factor), (only_base, 0.0))]
    return (0.0, only_factor) if errors[0] <= errors[1] else (only_base, 0.0)


__all__ = ["Correction", "MeasuredAxis", "MeasuredCosts", "between", "corrected", "fit_correction"]
