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
from autopar.report.layouts import LayoutRow, layout_row
from autopar.report.page.block_cards import COLOURS, model_section, stage_cards
from autopar.report.page.gantt import gantt, is_aggregated
from autopar.report.page.link_load import link_kinds, links_section
from autopar.report.page.markup import bar, legend, table
from autopar.report.page.memory_chart import CATEGORIES, WORDS, bars, curves
from autopar.report.page.seconds_spent import AGAIN, BACKWARD, BESIDE, FORWARD, IDLE, LATER, SLICES, step_parts, tallies
from autopar.report.page.tradeoff import alternatives_section
from autopar.report.stages import share_filled, stage_rows
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
    """

    name: str
    graph: Graph
    graphs: Sequence[StageGraph]
    plan: Plan
    timeline: Timeline
    cluster: Cluster
    alternatives: Sequence[LayoutRow] = ()


def html_page(subject: Subject) -> str:
    """Return the page."""
    plan, timeline, cluster = subject.plan, subject.timeline, subject.cluster
    of_stages = tallies(subject.graphs, plan, cluster)
    rows = stage_rows(subject.graph, plan, timeline, cluster)
    spent = step_parts(plan, timeline, of_stages)
    layout = layout_row("", plan, timeline, subject.graph, cluster)
    links = link_kinds(subject.graphs, plan, cluster, of_stages)
    style, script = _text("page.css"), _text("page.js")
    page = _template().render(
        name=subject.name, plan=plan, cluster=cluster, style=Markup(style), script=Markup(script),
        style_hash=_hash(style), script_hash=_hash(script),
        numbers=_numbers(subject, layout), pins=pin_words(plan.pins),
        model=model_section(stage_cards(subject.graphs, plan, cluster), plan, timeline), cut_legend=legend(COLOURS),
        gantt=gantt(plan, timeline, of_stages), aggregated=is_aggregated(timeline),
        action_legend=legend(_actions_of(timeline)), schedule_text=_schedule_text(plan),
        stages=_stages_table(rows), memory_bars=bars(plan, rows), memory_curves=curves(plan, timeline, rows),
        memory_legend=legend([(f"m-{c}", WORDS[c]) for c in CATEGORIES]),
        spent=_spent(spent, plan.seconds), links=links_section(links, plan.seconds),
        abstract=bool(cluster.abstract),
        alternatives=alternatives_section(subject.alternatives) if len(subject.alternatives) > 1 else None,
    )  # fmt: skip
    return printable(page)  # HTML has no way to write an escape character, and an editor or terminal would obey it


def _numbers(subject: Subject, layout: LayoutRow) -> list[tuple[str, str, str, object]]:
    """Return the numbers at the top: ``(what, value, words below, exact value)``."""
    plan, timeline = subject.plan, subject.timeline
    groups = plan.schedule.n_ranks
    limit = max(map(share_filled, stage_rows(subject.graph, plan, timeline, subject.cluster)))
    full = f"{limit:.0%}" if limit >= 0.01 else "less than 1%"
    return [
        ("a step", show_seconds(plan.seconds), f"{plan.microbatches} microbatches" if plan.microbatches > 1
         else "one microbatch", plan.seconds),
        ("memory of a device", show_bytes(plan.memory_bytes), f"{full} of what it may fill", plan.memory_bytes),
        ("devices", f"{plan.n_devices:,}", f"{groups} groups, {len(plan.stages)} stages" if groups > 1 else "one group",
         plan.n_devices),
        ("idle", f"{timeline.bubble_fraction:.1%}", f"schedule {plan.schedule.name}", timeline.bubble_fraction),
        ("of peak flops", f"{layout.utilisation:.1%}", "by the model's own contractions", layout.utilisation),
        ("tokens a second", f"{layout.tokens_per_second:,.0f}", "or rows, where there are none",
         layout.tokens_per_second),
    ]  # fmt: skip


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


def _spent(parts: dict[str, float], seconds: float) -> Markup:
    """Return the parts of a step as a bar and as a table, the largest first."""
    kinds = {
        FORWARD: "F", BACKWARD: "B", AGAIN: "t-again", SLICES: "t-slices", BESIDE: "t-beside", IDLE: "idle",
        LATER: "idle",
    }  # fmt: skip
    moves = [kind for kind in parts if kind not in kinds]
    kinds |= {kind: f"x-{k % 6}" for k, kind in enumerate(moves)}
    order = [kind for kind in kinds if kind in parts]
    pieces = [(kinds[kind], parts[kind], f"{kind} {show_seconds(parts[kind])}") for kind in order]
    rows = [
        [
            Markup('<i class="swatch {}"></i>{}').format(kinds[kind], kind), show_seconds(part),
            f"{part / seconds:.1%}",
        ] for kind, part in sorted(parts.items(), key=lambda entry: -entry[1])
    ]  # fmt: skip
    rows.append(["the step", show_seconds(sum(parts.values())), "100%"])
    return Markup('<div class="tall">{}</div>{}').format(
        bar(pieces, seconds), table(("what", "seconds", "of the step"), rows, numbers=(1, 2), label="seconds of a step")
    )


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
