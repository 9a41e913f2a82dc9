"""``autopar clusters new``: write the file of one's own cluster, from flags or from answers on a terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar, cast

import typer

from autopar.cli.common import Json, UsageError, out, print_json, within
from autopar.cli.output_files import Force, OutputFile, OutputKind

if TYPE_CHECKING:
    from hardware_profiles.describing import NewDevice

CLUSTER = OutputKind("a cluster file", re.compile(r".*^\[\[node\]\]", re.DOTALL | re.MULTILINE).match)
MOST_DEVICES = 65_536
T = TypeVar("T", int, float)


def new(
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Device of 'autopar devices', or the name of a new one.")
    ] = None,
    per_node: Annotated[
        int | None, typer.Option("--per-node", help="Devices per machine (8).", callback=within(1, MOST_DEVICES))
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Machines. Default: 1.", callback=within(1, MOST_DEVICES))
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option("--inside", help="Link in a machine: nvlink4, pcie4, or its rate in a direction, such as 300GB/s. "
                     "Default: that of the device; of a new one PCIe 4."),
    ] = None,
    network: Annotated[
        str | None, typer.Option("--network", help="Rate of one network adapter: 200Gb/s, HDR, '50Gb/s Ethernet'.")
    ] = None,
    adapters: Annotated[
        int | None,
        typer.Option("--adapters", help="Adapters of a machine, which its devices share. Default: 1.",
                     callback=within(1, MOST_DEVICES)),
    ] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Of a new device: its memory, such as 80GB.")] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option("--memory-bandwidth", help="Of a new device: its memory bandwidth in GB/s.",
                     callback=within(1e-3, 1e9)),
    ] = None,
    tflops: Annotated[
        str | None,
        typer.Option("--tflops", help="Of a new device: dense peak rates in TFLOP/s, such as bfloat16=989,float32=67."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option("--like", help="Of a new device: the family with the most similar cores: volta, turing, ampere, "
                     "ada, hopper, blackwell, cdna, ..."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, such as my.toml. Default: standard output.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write a cluster file: the device, how many a machine has, how many machines, and the links.

    On a terminal it asks for what no flag says. The file can be given wherever a cluster can, and edited: it has a line
    for every number. A device that 'autopar devices' does not list needs the numbers of its data sheet.

    Example: autopar clusters new --gpu A100-SXM-40GB --per-node 8 --nodes 4 --network 200Gb/s --adapters 1 -o my.toml
    """
    from hardware_profiles import build_cluster
    from hardware_profiles.describing import adapters_of, described_cluster, network_words, toml_of
    from hardware_profiles.strict import parse_toml

    file = OutputFile(output, CLUSTER, "--output", force) if output is not None else None
    if file is not None:
        if output is not None and output.suffix != ".toml":
            raise UsageError(f"--output is {output}; cluster files end in .toml, such as {output.stem}.toml")
        file.check()
    asks = asks_here() and not as_json
    if gpu is None and not asks:
        raise UsageError(
            "--gpu is missing: name the device, and --per-node, --nodes, --network for machines; for example: autopar "
            "clusters new --gpu A100-SXM-40GB --per-node 8 --nodes 4 --network 200Gb/s -o my.toml"
        )
    gpu = gpu if gpu is not None else _ask("device (autopar devices lists the known ones)", "H100-SXM-80GB")
    device = _device(gpu, (memory, bandwidth, tflops, like), asks)
    per_node = per_node or (_number("devices of a machine", 8) if asks else 8)
    nodes = nodes or (_number("machines", 1) if asks else 1)
    if inside is None:
        inside = _ask("link inside a machine: a name such as nvlink4, a rate such as 300GB/s, nothing for the "
                      "usual one", "") if asks and per_node > 1 else ""  # fmt: skip
    between = ""
    if nodes > 1:
        if network is None and not asks:
            raise UsageError(f"--network is missing, and there are {nodes} machines: give the rate of an adapter, "
                             "such as --network 200Gb/s, and --adapters if a machine has several")  # fmt: skip
        network = network if network is not None else _ask("rate of one network adapter", "200Gb/s")
        adapters = adapters or (_number("adapters of a machine", 1) if asks else 1)
        between = adapters_of(network, adapters, per_node)
    elif network is not None or adapters is not None:
        raise UsageError("--network and --adapters are for several machines, and --nodes is 1; leave them out")
    name = output.stem if output is not None else "my-cluster"
    document = described_cluster(name, device, per_node, nodes, inside, between)
    text = toml_of(document)
    cluster = build_cluster(parse_toml(text), str(output or "my-cluster.toml"), name)  # what the file will be read as
    if file is not None:
        file.write(text)
    if as_json:
        print_json({"file": str(output) if output else None, "document": document, "devices": cluster.n_devices,
                    "nodes": cluster.n_nodes, "network": between or None}, "new-cluster")  # fmt: skip
        return
    if output is None:
        typer.echo(text, nl=False)
        return
    out().print(cluster.describe(), markup=False)
    if between:
        other = 1 if adapters == per_node else per_node
        words = f"  between machines: {network_words(between, per_node)}; for {other} in a machine: --adapters {other}"
        out().print(words, markup=False)
    out().print(f"written to {output}; plan for it with: autopar plan MODEL --cluster {output}", soft_wrap=True)


def asks_here() -> bool:
    """Return True if there is a terminal with somebody to answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _device(gpu: str, numbers: tuple[str | None, float | None, str | None, str | None], asks: bool) -> str | NewDevice:
    """Return the name of a known device, or a new one with its numbers.

    Raises:
        UsageError: a new device lacks numbers; or a known one has some.
    """
    from autopar.words.texts import parse_bytes
    from hardware_profiles import ProfileError
    from hardware_profiles.composed import device_of
    from hardware_profiles.describing import NewDevice
    from hardware_profiles.load import builtin_devices, near_names

    given = dict(zip(("--memory", "--memory-bandwidth", "--tflops", "--like"), numbers, strict=True))
    try:
        device_of(gpu)
    except ProfileError:
        pass
    else:
        extra = [flag for flag, value in given.items() if value is not None]
        if extra:
            raise UsageError(f"{', '.join(extra)} describe a new device, and '{gpu}' is a known one; leave them "
                             "out, or give the new device another name")  # fmt: skip
        return gpu
    memory, bandwidth, tflops, like = numbers
    missing = [flag for flag, value in given.items() if value is None]
    near = near_names(gpu, builtin_devices())
    if missing and not asks:
        raise UsageError(
            f"'{gpu}' is no known device{f' ({near})' if near else ''}; to describe a new one, give "
            f"{', '.join(missing)}: for example --memory 80GB --memory-bandwidth 3350 --tflops bfloat16=989,float32=67 "
            "--like hopper"
        )
    if missing:
        typer.echo(
            f"'{gpu}' is no known device{f' ({near})' if near else ''}: give the numbers of its data sheet", err=True
        )
    memory = memory or _ask("memory", "80GB")
    bandwidth = bandwidth or _number("memory bandwidth in GB/s", 3350.0, 1e9)
    tflops = tflops or _ask("dense peak rates in TFLOP/s", "bfloat16=989,float32=67")
    like = like or _ask("family with the most similar cores", "hopper")
    return NewDevice(gpu, parse_bytes(memory) or 0.0, bandwidth * 1e9, _rates(tflops), like)


def _rates(text: str) -> dict[str, float]:
    """Return FLOP/s by format from ``bfloat16=989,float32=67``, in TFLOP/s.

    Raises:
        UsageError: it has another form.
    """
    rates = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+\d+)\s*=\s*(\d{1,9}(?:\.\d{1,9})?)\s*", part)
        if match is None or not float(match[2]):
            raise UsageError(f"--tflops is '{text}'; write FORMAT=NUMBER, such as bfloat16=989,float32=67")
        rates[match[1]] = float(match[2]) * 1e12
    return rates


def _ask(what: str, default: str) -> str:
    return str(typer.prompt(what, default=default, err=True)).strip()


def _number(what: str, default: T, most: float = MOST_DEVICES) -> T:
    """Return a number that is asked for, of the default's type.

    Raises:
        UsageError: it is below 1, or too large.
    """
    kind = type(default)
    value = kind(typer.prompt(what, default=default, type=kind, err=True))  # type: ignore[call-arg]
    return cast(T, within(1, most)(_Asked([what]), value))  # type: ignore[arg-type]


class _Asked(NamedTuple):
    """A question in place of an option, for messages."""

    opts: list[str]
