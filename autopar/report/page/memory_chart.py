"""Memory of a device by category and over the step."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from autopar.plans.plan import Plan
from autopar.plans.prices import bytes_together
from autopar.report import Facts
from autopar.report.page.markup import bar, filled, joined
from autopar.words.texts import show_bytes
from cost_models.schedules import Timeline
from cost_models.schedules.actions import parts

CATEGORIES = ("parameter", "gradient", "optimizer", "gathered", "activation", "working")
WORDS = {
    "parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer state",
    "gathered": "gathered copies", "activation": "activations", "working": "working memory",
}  # fmt: skip
MOST_PANELS = 8
POINTS = 400
"""Most points of a curve; of longer ones the maximum of every interval is drawn."""


def by_category(plan: Plan, group: int) -> dict[str, int]:
    """Return the bytes by category that a device of a group holds, over all its stages.

    Working memory is the rest of the peak; zero where the other categories are not all live at once.
    """
    prices = [plan.stages[s].price for s in plan.schedule.stages_of_rank[group]]
    sizes = {c: sum(getattr(price, f"{c}_bytes") for price in prices) for c in CATEGORIES}
    beside = fullest(plan, group) - sum(n for c, n in sizes.items() if c != "working")
    return {c: max(0, beside if c == "working" else n) for c, n in sizes.items()}


def fullest(plan: Plan, group: int) -> int:
    """Return the peak bytes of a device of a group in a step."""
    return bytes_together([plan.stages[s].price for s in plan.schedule.stages_of_rank[group]])


def bars(plan: Plan, rows: Sequence[Facts]) -> Markup:
    """Return a bar for every group, groups with equal numbers once; ``rows`` are those of ``stage_rows``."""
    limits = _limits(plan, rows)
    sizes = [by_category(plan, group) for group in range(plan.schedule.n_ranks)]
    top = max(sum(size.values()) for size in sizes)
    scale = max(limits) if top > max(limits) / 4 else top
    alike: dict[tuple[object, ...], list[int]] = {}
    for group, size in enumerate(sizes):
        alike.setdefault((*size.values(), fullest(plan, group), limits[group]), []).append(group)
    lines = []
    for groups in alike.values():
        size, limit = sizes[groups[0]], limits[groups[0]]
        total = fullest(plan, groups[0])
        parts_of_bar = [(f"m-{c}", n, f"{WORDS[c]} {show_bytes(n)}") for c, n in size.items()]
        words = f"{show_bytes(total)} of {show_bytes(limit)} ({total / limit:.1%})"
        lines.append(filled(
            '<div class="row"><span class="row-name">{}</span>{}<span class="row-number">{}</span></div>',
            group_words(groups), bar(parts_of_bar, max(scale, sum(size.values()))), words,
        ))  # fmt: skip
    return joined(lines)


def group_words(groups: Sequence[int]) -> str:
    """Return group numbers as ``group 3``, ``groups 1-14`` or ``groups 0, 2, 5``."""
    if len(groups) == 1:
        return f"group {groups[0]}"
    ranges: list[list[int]] = []
    for group in groups:
        if ranges and group == ranges[-1][1] + 1:
            ranges[-1][1] = group
        else:
            ranges.append([group, group])
    return "groups " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def curves(plan: Plan, timeline: Timeline, rows: Sequence[Facts]) -> Markup:
    """Return memory over the step: a panel for each group; of many groups the fullest and some others."""
    limits, n = _limits(plan, rows), plan.schedule.n_ranks
    shown = range(n)
    if n > MOST_PANELS:
        totals = [sum(by_category(plan, group).values()) for group in range(n)]
        spread = {round(k * (n - 1) / (MOST_PANELS - 2)) for k in range(MOST_PANELS - 1)}
        shown = sorted(spread | {totals.index(max(totals))})  # type: ignore[assignment]
    walks = {group: activations(timeline, plan, group) for group in shown}
    static = {group: {c: b for c, b in by_category(plan, group).items() if c != "activation"} for group in shown}
    tops = {g: sum(static[g].values()) + max(y for _, y in walks[g]) for g in shown}
    highest = max(tops.values()) or 1.0
    scale = max(highest * 1.05, *(limits[g] for g in shown if limits[g] < 4 * highest), 1.0)
    return joined(
        _panel(plan, g, walks[g], static[g], tops[g], limits[g], scale, timeline.makespan_seconds) for g in shown
    )


def activations(timeline: Timeline, plan: Plan, group: int) -> list[tuple[float, float]]:
    """Return ``(seconds, bytes)`` of a group's activations over the step, with recomputed segments.

    Within an action they are interpolated linearly.
    """
    times = timeline.times
    kept, points = 0.0, [(0.0, 0.0)]
    row = timeline.schedule.rows[group]
    for step, start, end in zip(row, timeline.starts[group], timeline.ends[group], strict=True):
        again = sum(plan.stages[a.stage].price.again_bytes for a in parts(step) if a.kind != "F")
        points.append((start, kept + again))
        for stage, kind, _ in parts(step):
            whole, late = times.activation_bytes[stage], times.weight_grad_bytes[stage]
            kept += {"F": whole, "B": -whole, "I": late - whole, "W": -late}[kind]
        points += [(end, kept + (again if len(parts(step)) == 1 and kept else 0.0)), (end, kept)]
    points.append((timeline.makespan_seconds, kept))
    if len(points) <= POINTS:
        return points
    width = timeline.makespan_seconds / (POINTS // 2)
    highest: dict[int, float] = {}
    for at, n_bytes in points:
        highest[int(at / width)] = max(highest.get(int(at / width), 0.0), n_bytes)
    return [(at * width, n_bytes) for at, n_bytes in sorted(highest.items())] + [(timeline.makespan_seconds, 0.0)]


def _panel(
    plan: Plan, group: int, walk: Sequence[tuple[float, float]], static: dict[str, int], top: float, limit: float,
    scale: float, seconds: float,
) -> Markup:  # fmt: skip
    height, at, bands = 100.0, 0.0, []
    for category, n_bytes in static.items():
        size = height * n_bytes / scale
        if size:
            bands.append(filled(
                '<rect class="m-{}" x="0" y="{}" width="1000" height="{}"/>', category, f"{height - at - size:.3f}",
                f"{size:.3f}",
            ))  # fmt: skip
        at += size
    points = " ".join(
        f"{1000 * x / seconds if seconds else 0:.1f},{height - at - height * y / scale:.2f}" for x, y in walk
    )
    area = filled(
        '<polygon class="m-activation" points="0,{} {} 1000,{}"/>', f"{height - at:.2f}", points, f"{height - at:.2f}"
    )
    line, beyond = Markup(""), ""
    if limit <= scale:
        y = f"{height - height * limit / scale:.2f}"
        line = filled('<line class="limit" x1="0" x2="1000" y1="{}" y2="{}"/>', y, y)
    else:
        beyond = " (far above this chart)"
    stages = plan.schedule.stages_of_rank[group]
    most = max(y for _, y in walk)
    stored = ", ".join(f"{WORDS[c]} {show_bytes(n)}" for c, n in static.items() if n)
    words = f"{stored}; activations up to {show_bytes(most)}; limit {show_bytes(limit)}{beyond}"
    return filled(
        '<figure class="panel" tabindex="0"><figcaption><b>group {}</b> stage{} {}<span>{}</span></figcaption>'
        '<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{}">{}{}{}</svg>'
        "<small>{}</small></figure>",
        group, "s" if len(stages) > 1 else "", _few(stages), f"most {show_bytes(top)}", words, joined(bands), area,
        line, words,
    )  # fmt: skip


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 4 else f"{numbers[0]}, {numbers[1]}, .. {numbers[-1]}"


def _limits(plan: Plan, rows: Sequence[Facts]) -> list[float]:
    """Return the memory limit of a device of each group."""
    limits = []
    for stages in plan.schedule.stages_of_rank:
        first = stages[0]
        others = [plan.stages[s].price for s in stages[1:]]
        rest = sum(price.memory_bytes - price.transient_bytes for price in others)
        limits.append(max(1.0, rows[first]["limit_bytes"] + rest))
    return limits
