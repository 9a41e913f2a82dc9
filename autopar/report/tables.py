"""Rows as tables of rich."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.text import Text

from autopar.report import Facts
from autopar.report.fitted_tables import FittedTable
from autopar.report.rows import BlockRows, Collective, ParamRow
from autopar.report.why import Alternative
from autopar.words.meshes import Mesh
from autopar.words.placements import REPLICATE

Show = Callable[[float], str]

SHORT = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
         "all_to_all": "all-to-all"}  # fmt: skip


def block_table(
    block: BlockRows, mesh: Mesh, show_bytes: Show, show_seconds: Show, every: bool = False, title: str = ""
) -> FittedTable:
    """Return a block as a table of its ops; ``every`` includes views."""
    title = title or block.name or "outside of blocks"
    table = FittedTable(title=f"{title} (x {block.count})" if block.count > 1 else title, title_style="bold")
    table.add_column("op")
    table.add_column("rule", below=3)
    for axis, size in mesh:
        table.add_column(f"{axis}={size}")
    for name, below in (("in", 2), ("out", 0), ("collectives", 1)):
        table.add_column(name, below=below)
    table.add_column("bytes", justify="right")
    table.add_column("seconds", justify="right")
    shown = [row for row in block.ops if every or row.moves]
    for row in shown:
        rule = row.rule.split("   ")[0]
        table.add_row(
            Text(row.label), Text(rule), *(row.cuts.get(axis, "") for axis in mesh.names),
            " ".join(row.ins), "\n".join((" ".join(row.outs), *row.steps)),
            collectives_text(row.collectives) + (f"\n{show_seconds(row.hidden_seconds)} hidden" if row.beside else ""),
            show_bytes(sum(c["bytes"] for c in row.collectives)) if row.collectives else "",
            show_seconds(row.compute_seconds + row.collective_seconds),
        )  # fmt: skip
    total = sum(r.compute_seconds + r.collective_seconds for r in block.ops)
    table.add_section()
    times = f" x {block.count} = {show_seconds(total * block.count)}" if block.count > 1 else ""
    table.add_row("sum", "", *[""] * len(mesh), "", "", times, "", show_seconds(total), style="bold")
    if len(shown) < len(block.ops):
        n = len(block.ops) - len(shown)
        table.caption = f"and {n} view{'s' if n > 1 else ''}, which cost{'' if n > 1 else 's'} nothing"
        table.caption_justify = "left"
    return table


def collectives_text(collectives: Sequence[Collective]) -> str:
    """Return ``all-reduce tensor data (b)``: equal collectives counted; f is the forward, b the backward."""
    kinds: dict[tuple[str, str], dict[str, int]] = {}
    for c in collectives:
        axes = kinds.setdefault((c["kind"], c["pass"]), {})
        axes[c["axis"]] = axes.get(c["axis"], 0) + 1
    lines = []
    for (kind, direction), axes in kinds.items():
        over = " ".join(f"{n} x {axis}" if n > 1 else axis for axis, n in axes.items())
        lines.append(f"{SHORT.get(kind, kind)} {over} ({direction[0]})")
    return "\n".join(lines)


def param_table(rows: Sequence[ParamRow], show_bytes: Show, show_seconds: Show) -> FittedTable:
    """Return a table of parameters with their stored and used placements."""
    table = FittedTable(title="parameters", title_style="bold")
    table.add_column("name")
    for name in ("shape", "stored", "used", "lifetime", "collectives"):
        table.add_column(name, below=name == "collectives")
    table.add_column("bytes per rank", justify="right")
    table.add_column("seconds", justify="right")
    for r in rows:
        table.add_row(
            Text(r.name + (f" (x {r.count})" if r.count > 1 else "")), " ".join(map(str, r.shape)) or "scalar",
            f"{r.stored} on the host" if r.on_host else r.stored, r.used,
            r.lifetime if r.on_host or r.stored != r.used else "", collectives_text(r.collectives),
            show_bytes(r.stored_bytes), show_seconds(r.seconds) if r.seconds else "",
        )  # fmt: skip
    return table


def totals_table(totals: Mapping[str, Mapping[str, float]], show_bytes: Show, show_seconds: Show) -> FittedTable:
    """Return memory and time of a step next to each other."""
    table = FittedTable(title="one step on one rank", title_style="bold")
    for name in ("memory", "bytes", "time", "seconds"):
        table.add_column(name, justify="right" if name in ("bytes", "seconds") else "left")
    memory = [(k, show_bytes(v)) for k, v in totals["bytes"].items()]
    time = [(k, show_seconds(v)) for k, v in totals["seconds"].items()]
    for k in range(max(len(memory), len(time))):
        table.add_row(*(memory[k] if k < len(memory) else ("", "")), *(time[k] if k < len(time) else ("", "")))
    return table


def alternatives_table(rows: Sequence[Alternative], mesh: Mesh, show_bytes: Show, show_seconds: Show) -> FittedTable:
    """Return the strategies of one op, the chosen one marked."""
    table = FittedTable("", *(f"{axis}={size}" for axis, size in mesh))
    for name in ("compute", "reshard", "parameters", "sum", "state"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            "chosen" if r.chosen else "", *(r.cuts[axis] if r.cuts[axis] != REPLICATE else "" for axis in mesh.names),
            show_seconds(r.compute_seconds), show_seconds(r.reshard_seconds), show_seconds(r.parameter_seconds),
            show_seconds(r.seconds), show_bytes(r.stored_bytes), style="bold green" if r.chosen else None,
        )  # fmt: skip
    return table


def file_tables(raw: Facts) -> list[FittedTable]:
    """Return ops and parameters by pattern of a plan file, without its model."""
    axes = [part.split("=")[0] for part in raw["mesh"].split(",")]
    ops = FittedTable("ops", *axes, title="ops by pattern (later lines override)", title_style="bold")
    for pattern, entry in raw["ops"].items():
        ops.add_row(Text(pattern), *(_blank(entry.get(axis, "")) for axis in axes))
    params = FittedTable("parameters", "stored", "used", "lifetime", title="parameters by pattern", title_style="bold")
    for pattern, entry in raw["params"].items():
        stored = f"{entry['stored']} on the host" if entry.get("on_host") else entry["stored"]
        params.add_row(Text(pattern), stored, entry["used"], entry.get("lifetime", "step"))
    return [ops, params]


def _blank(factor: str) -> str:
    return "" if factor == REPLICATE else factor
