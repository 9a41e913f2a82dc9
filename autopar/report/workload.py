"""What a plan trains: parameters, batch, sequence, precision; and what a number of tokens costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autopar.plans.plan import Plan
from autopar.report.layouts import LayoutRow, tokens_of
from autopar.words.graph import Graph

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
HOUR, DAY = 3600.0, 86400.0
MANY = {"tokens": 1e9, "samples": 1e6}
"""Tokens, or samples, for which a page gives the cost where nobody said how many."""


@dataclass(frozen=True)
class Workload:
    """The work of one step.

    Attributes:
        parameters: elements of all parameters.
        rows: rows of the batch of a step.
        sequence: the length of a row; None of a model whose inputs are no sequences of integers.
        precision: the policy, or the dtype of the parameters.
        unit: what is counted: ``tokens`` or ``samples``.
    """

    parameters: int
    rows: int
    sequence: int | None
    precision: str
    unit: str

    @property
    def words(self) -> str:
        """The work in words: ``8.03B parameters, batch 64, sequence 4,096, bf16-mixed``."""
        sequence = f", sequence {self.sequence:,}" if self.sequence is not None else ""
        return f"{short_count(self.parameters)} parameters, batch {self.rows:,}{sequence}, {self.precision}"


def workload_of(graph: Graph, plan: Plan) -> Workload:
    """Return the work of a plan's step; ``graph`` is the whole model's, of one microbatch."""
    params = [node.out for _, node in graph.of_kind("param")]
    inputs = [node.out for _, node in graph.of_kind("input") if node.out.shape]
    sequences = [spec.shape for spec in inputs if not spec.is_float and len(spec.shape) > 1]
    longest = max(sequences, key=prod, default=None)
    rows = max((int(spec.shape[0]) for spec in inputs), default=1)
    dtypes = {spec.dtype: prod(spec.shape) for spec in params}
    precision = graph.precision or max(dtypes, key=dtypes.__getitem__, default="float32")
    unit = "tokens" if longest is not None and tokens_of(graph) == prod(longest) else "samples"
    return Workload(
        sum(prod(spec.shape) for spec in params), rows * plan.microbatches,
        int(longest[1]) if longest is not None else None, str(precision), unit,
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingCost:
    """The cost of a number of tokens or samples.

    Attributes:
        amount: their number.
        seconds: from the beginning to the end.
        device_hours: hours of all devices together.
        money: device-hours times the price of one, in its currency; None without a price.
    """

    amount: float
    seconds: float
    device_hours: float
    money: float | None

    @property
    def time(self) -> str:
        """The time in words: ``24.1 days``."""
        for size, unit in ((DAY, "days"), (HOUR, "hours"), (60.0, "minutes")):
            if self.seconds >= 2 * size:
                return f"{self.seconds / size:,.4g} {unit}"
        return f"{self.seconds:,.3g} seconds"

    @property
    def words(self) -> str:
        """Device-hours, and the price if there is one: ``37,100 device-hours, price 92,800``."""
        money = f", price {grouped(self.money)}" if self.money is not None else ""
        return f"{grouped(self.device_hours)} device-hours{money}"


def cost_of(row: LayoutRow, amount: float, price_per_hour: float | None = None) -> TrainingCost:
    """Return the cost of ``amount`` tokens, or samples, with a layout.

    The devices are paid from the first step to the last, as ``amount`` divided by what a second trains.
    """
    seconds = amount / row.tokens_per_second
    hours = seconds / HOUR * row.devices
    return TrainingCost(amount, seconds, hours, None if price_per_hour is None else hours * price_per_hour)


def parse_amount(text: str) -> float | None:
    """Return a number with a suffix K, M, B or T, such as ``1.5T``; None if it is none that is above 0."""
    text = text.strip().replace(",", "").replace("_", "")
    size = SUFFIXES.get(text[-1:].upper(), 1.0)
    digits = text[:-1] if text[-1:].upper() in SUFFIXES else text
    try:
        amount = float(digits) * size
    except ValueError:
        return None
    return amount if 0 < amount < 1e24 else None


def short_count(n: float) -> str:
    """Return a number as ``8.03B``, ``124M`` or ``912``."""
    for suffix, size in reversed(SUFFIXES.items()):
        if n >= 0.9995 * size:
            return f"{n / size:.3g}{suffix}"
    return f"{n:.3g}"


def grouped(n: float) -> str:
    """Return a number with three significant digits, in groups of thousands: ``37,100``."""
    if n >= 1000:
        digits = len(str(int(n))) - 3
        return f"{round(n / 10**digits) * 10**digits:,}"
    return f"{n:.3g}"
