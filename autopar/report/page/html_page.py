"""A plan with its model as one self-contained HTML page.

All texts are escaped, and the page's content security policy allows nothing but its own script and style, so a model or
a module may have any name.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from autopar.plans.plan import Plan
from autopar.plans.plan_options import pin_words
from autopar.plans.stage_graphs import StageGraph
from autopar.report import Facts
from autopar.report.axes_in_words import AxisUse, axes_in_words
from autopar.report.block_names import lists_of
from autopar.report.layouts import LayoutRow, layout_row
from autopar.report.page.block_cards import COLOURS, model_section, stage_cards
from autopar.report.page.gantt import gantt, is_aggregated
from autopar.report.page.link_load import link_kinds, links_section
from autopar.report.page.markup import legend, table
from autopar.report.page.memory_chart import CATEGORIES, WORDS, bars, curves
from autopar.report.page.seconds_spent import step_parts, tallies
from autopar.report.page.seconds_table import seconds_table
from autopar.report.page.tradeoff import Pricing, alternatives_section, devices_section
from autopar.report.parts import ModelPart, layout_of_parts
from autopar.report.plan_in_words import plan_in_words
from autopar.report.stages import share_filled, stage_rows
from autopar.report.workload import MANY, Workload, cost_of, grouped, short_count, workload_of
from autopar.words.graph import Graph
from autopar.words.texts import printable, show_bytes, show_seconds
from cost_models.schedules import Timeline
from hardware_profiles import Cluster
from hardware_profiles.strict import read_text

ACTIONS = (
    ("F", "forward"), ("B", "backward"), ("I", "backward, gradients of inputs"),
    ("W", "backward, gradients of weights"), ("FB", "forward beside backward"),
    ("X", "communication: inside an action, and between groups"), ("O", "once a step"), ("idle", "idle"),
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """The subject of a page.

    Attributes:
        name: the name of the model, as the plan file has it.
        graph: the graph of the whole model for one microbatch; ``graphs`` are its stages.
        timeline: the timeline of a simulated step.
        alternatives: this layout and others, the fastest first; empty if none were planned.
        by_devices: this layout and those of other numbers of devices; empty if none were planned.
        not_planned: numbers of devices for which there is no plan, and why.
        kind: the class of the model; empty if it is not known.
        amount: tokens, or samples, whose cost is shown; None for a billion tokens, or a million samples.
        price_per_hour: of one device; None if nobody said it.
    """

    name: str
    graph: Graph
    graphs: Sequence[StageGraph]
    plan: Plan
    timeline: Timeline
    cluster: Cluster
    alternatives: Sequence[LayoutRow] = ()
    by_devices: Sequence[LayoutRow] = ()
    not_planned: Sequence[tuple[int, str]] = ()
    kind: str = ""
    amount: float | None = None
    price_per_hour: float | None = None

    def pricing(self, unit: str) -> Pricing:
        """Return how layouts are paid for; ``unit`` is what a step trains."""
        amount = MANY[unit] if self.amount is None else self.amount
        return Pricing(unit, amount, short_count(amount), self.price_per_hour)


def html_page(subject: Subject) -> str:
    """Return the page."""
    plan, timeline, cluster = subject.plan, subject.timeline, subject.cluster
    of_stages = tallies(subject.graphs, plan, cluster)
    rows = stage_rows(subject.graph, plan, timeline, cluster)
    spent = step_parts(plan, timeline, of_stages)
    layout = layout_row("", plan, timeline, subject.graph, cluster)
    links = link_kinds(subject.graphs, plan, cluster, of_stages)
    use, work = AxisUse(subject.graph), workload_of(subject.graph, plan)
    pricing = subject.pricing(work.unit)
    called = subject.kind or subject.name
    style, script = _text("palette.css") + _text("page.css"), _text("page.js")
    page = _template().render(
        called=called, name=subject.name, work=work.words, words=plan_in_words(subject.graph, plan, use),
        axes=axes_in_words(use.shares(plan.stages)), plan=plan, cluster=cluster,
        style=Markup(style), script=Markup(script),
        style_hash=_hash(style), script_hash=_hash(script),
        numbers=_numbers(subject, layout, work, pricing), pins=pin_words(plan.pins),
        parts=_parts_table(layout_of_parts(subject.graph, plan, use)),
        model=model_section(stage_cards(subject.graphs, plan, cluster), plan, timeline, lists_of(subject.graph)),
        gathers=any(stage.price.gathered_bytes for stage in plan.stages), cut_legend=legend(COLOURS),
        gantt=gantt(plan, timeline, of_stages), aggregated=is_aggregated(timeline),
        action_legend=legend(_actions_of(timeline)), schedule_text=_schedule_text(plan),
        stages=_stages_table(rows), memory_bars=bars(plan, rows), memory_curves=curves(plan, timeline, rows),
        memory_legend=legend([(f"m-{c}", WORDS[c]) for c in CATEGORIES]),
        spent=seconds_table(spent, plan.seconds), links=links_section(links, plan.seconds),
        abstract=bool(cluster.abstract),
        alternatives=alternatives_section(subject.alternatives, pricing) if len(subject.alternatives) > 1 else None,
        by_devices=devices_section(subject.by_devices, pricing) if len(subject.by_devices) > 1 else None,
        not_planned=subject.not_planned,
    )  # fmt: skip
    return printable(page)  # HTML has no way to write an escape character, and an editor or terminal would obey it


def _numbers(
    subject: Subject, layout: LayoutRow, work: Workload, pricing: Pricing
) -> list[tuple[str, str, str, object]]:
    """Return the numbers at the top: ``(what, value, words below, exact value)``."""
    plan, timeline = subject.plan, subject.timeline
    groups = plan.schedule.n_ranks
    limit = max(map(share_filled, stage_rows(subject.graph, plan, timeline, subject.cluster)))
    cost = cost_of(layout, pricing.amount, pricing.price_per_hour)
    full = f"{limit:.0%}" if limit >= 0.01 else "less than 1%"
    numbers: list[tuple[str, str, str, object]] = [
        ("a step", show_seconds(plan.seconds), f"{plan.microbatches} microbatches" if plan.microbatches > 1
         else "one microbatch", plan.seconds),
        ("memory of a device", show_bytes(plan.memory_bytes), f"{full} of what it may fill", plan.memory_bytes),
        ("devices", f"{plan.n_devices:,}", f"{groups} groups, {len(plan.stages)} stages" if groups > 1 else "one group",
         plan.n_devices),
        ("idle", f"{timeline.bubble_fraction:.1%}", f"schedule {plan.schedule.name}", timeline.bubble_fraction),
        ("of peak flops", f"{layout.utilisation:.1%}", "by the model's own contractions", layout.utilisation),
        (f"{work.unit} a second", f"{layout.tokens_per_second:,.0f}", "of all devices together",
         layout.tokens_per_second),
        (f"device-hours for {pricing.in_words} {work.unit}", grouped(cost.device_hours), cost.time,
         cost.device_hours),
    ]  # fmt: skip
    if cost.money is not None:
        words = f"at {pricing.price_per_hour:g} for a device-hour"
        numbers.append((f"price of {pricing.in_words} {work.unit}", grouped(cost.money), words, cost.money))
    return numbers


def _actions_of(timeline: Timeline) -> list[tuple[str, str]]:
    """Return the legend of the colours that the schedule uses."""
    kinds = {action.kind for _, action in timeline.schedule.actions()}
    pairs = any(not hasattr(step, "kind") for row in timeline.schedule.rows for step in row)
    shown = kinds | {"X", "O", "idle"} | ({"FB"} if pairs else set())
    return [(kind, words) for kind, words in ACTIONS if kind in shown]


def _stages_table(rows: Sequence[Facts]) -> Markup:
    heads = (
        "stage", "group", "begins at", "forward", "backward", "in flight", *(WORDS[c] for c in CATEGORIES),
        "memory", "limit",
    )  # fmt: skip
    lines = [
        [
            r["stage"], r["group"], r["begins_at"], show_seconds(r["forward_seconds"]),
            show_seconds(r["backward_seconds"]), r["in_flight"],
            *(show_bytes(r[f"{c}_bytes"]) for c in CATEGORIES), show_bytes(r["memory_bytes"]),
            show_bytes(r["limit_bytes"]),
        ] for r in rows
    ]  # fmt: skip
    return table(heads, lines, numbers=(0, 1, *range(3, len(heads))), label="stages")


def _parts_table(parts: Sequence[ModelPart]) -> Markup | None:
    """Return how each part of a model is laid out; None for a model without parts."""
    if not parts:
        return None
    rows = [
        [part.name, short_count(part.parameters), f"{part.share:.1%}", part.stages, part.layout] for part in parts
    ]  # fmt: skip
    heads = ["part", "parameters", "of the FLOPs", "computed by", "laid out as"]
    if not any(part.stages for part in parts):
        for row in (heads, *rows):
            del row[3]
    return table(heads, rows, numbers=(1, 2), label="parts of the model")


MOST_TEXT = 60_000
"""Most characters of a schedule that a page includes as text."""


def _schedule_text(plan: Plan) -> str | None:
    text = plan.schedule.text()
    return text if len(text) <= MOST_TEXT else None


@cache
def _text(name: str) -> str:
    return read_text(Path(__file__).with_name(name))


def _hash(text: str) -> str:
    """Return the hash of a script or style, as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.globals |= {"show_seconds": show_seconds, "show_bytes": show_bytes}
    return environment.from_string(_text("page.html.j2"))
