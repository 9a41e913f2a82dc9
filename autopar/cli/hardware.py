"""``autopar devices`` and ``autopar clusters``: hardware profiles, those that are there and new ones."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperGroup

from autopar.cli.common import Json, out, print_json
from autopar.cli.exit_codes import EPILOG
from autopar.cli.new_cluster import new
from autopar.cli.stopping import to_its_end
from autopar.report import Facts
from autopar.report.fitted_tables import FittedTable


def devices(as_json: Json = False) -> None:
    """List the devices that cluster files can name.

    Links are those of a domain, such as nvlink4 x 8; curves are "own" where operators were measured on the device, else
    those of a family with similar cores. --json has the source of every number.

    Example: autopar devices
    """
    from hardware_profiles import list_devices, load_device
    from hardware_profiles.usable_memory import usable_memory

    usable = usable_memory()
    profiles = [load_device(name) for name in list_devices()]
    if as_json:
        rows = [
            {
                "name": d.name, "memory_bytes": d.memory_bytes,
                "memory_bytes_per_second": d.memory_bytes_per_second, "peak_flops": dict(d.peak_flops),
                "launch_seconds": d.launch_seconds, "usable_bytes": usable.get(d.name),
                "power_watts": d.power_watts, "link": d.link or None, "domain": d.domain,
                "host_link": d.host_link or None, "sources": dict(d.sources),
            }
            for d in profiles
        ]  # fmt: skip
        print_json({"devices": rows}, "devices")
        return
    dtypes = "bfloat16", "float32", "float8"
    table = FittedTable("device")
    for name in ("memory GB", "bandwidth GB/s", *(f"{dtype} TFLOP/s" for dtype in dtypes), "power W"):
        table.add_column(name, justify="right")
    table.add_column("link", below=1)
    table.add_column("curves", below=2)
    for d in profiles:
        rates = [f"{d.peak_flops[t] / 1e12:.4g}" if t in d.peak_flops else "-" for t in dtypes]
        family = d.sources.get("efficiency", "own")
        table.add_row(
            d.name, f"{d.memory_bytes / 1e9:.4g}", f"{d.memory_bytes_per_second / 1e9:.4g}", *rates,
            f"{d.power_watts:g}" if d.power_watts else "-", f"{d.link} x {d.domain}" if d.link else "-",
            family.partition("inherits from ")[2].partition(";")[0] or "own",
        )  # fmt: skip
    out().print(table)


def clusters(
    names: Annotated[list[str] | None, typer.Argument(help="Clusters to describe: names or files.")] = None,
    as_json: Json = False,
) -> None:
    """List the built-in clusters and the trainers with known prices, or describe some clusters.

    Most names take a suffix: dgx-h100-x8 is eight machines, local-x4 four processes on this one. 64xH100-SXM-80GB/8 is
    64 of any known device, 8 to a machine. Your own .toml or .json file can be given wherever a name can.

    Examples: autopar clusters; autopar clusters dgx-h100-x8 my-cluster.toml
    """
    from hardware_profiles import list_clusters, load_cluster
    from hardware_profiles.software import software

    listed = [load_cluster(name) for name in names or list_clusters()]
    rows: list[Facts] = []
    for c in listed:
        kinds: dict[str, int] = {}
        for d in c.devices:
            kinds[d.name] = kinds.get(d.name, 0) + 1
        rows.append(
            {"name": c.name, "devices": c.n_devices, "nodes": c.n_nodes, "kinds": kinds, "description": c.description}
        )
    if as_json:
        print_json({"clusters": rows}, "clusters")
    elif names:
        for c in listed:
            out().print(c.describe(), markup=False)
    else:
        table = FittedTable("cluster")
        for name in ("devices", "nodes"):
            table.add_column(name, justify="right")
        table.add_column("kind")
        table.add_column("description", below=1, named=False)
        for row in rows:
            kinds_text = ", ".join(f"{n} x {k}" for k, n in row["kinds"].items())
            table.add_row(row["name"], str(row["devices"]), str(row["nodes"]), kinds_text, row["description"])
        out().print(table)
        title = "trainers: --as NAME, or 'CLUSTER as NAME'"
        trainers = FittedTable("trainer", title=title, title_style="bold")
        trainers.add_column("factor", justify="right")
        trainers.add_column("description", below=1, named=False)
        for record in software().values():
            trainers.add_row(record.name, f"{record.factor:.3g}", record.description)
        out().print(trainers)


class ListsByDefault(TyperGroup):
    """A group of commands whose words are those of ``list`` unless they begin with another command's name."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Put the name of the default command in front of words that begin with no command."""
        if not args or args[0] not in (*self.commands, "-h", "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


clusters_app = typer.Typer(
    name="clusters", cls=ListsByDefault, rich_markup_mode="rich", epilog=EPILOG,
    help="List the built-in clusters, describe some ('autopar clusters NAME'), or write the file of your own "
    "('autopar clusters new').\n\nExamples: autopar clusters; autopar clusters dgx-h100-x8 my.toml --json; autopar "
    "clusters new --gpu A100-SXM-40GB --nodes 4 --network 200Gb/s -o my.toml",
)  # fmt: skip
clusters_app.command("list", epilog=EPILOG)(to_its_end(clusters))
clusters_app.command("new", epilog=EPILOG)(to_its_end(new))
