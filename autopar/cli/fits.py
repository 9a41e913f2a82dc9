"""``autopar fits``: check a layout against the devices' memory, and list near layouts that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    Batch,
    Json,
    Model,
    Seq,
    UsageError,
    load_and_capture,
    print_json,
    print_lines,
    progress,
    show_bytes,
    show_seconds,
)
from autopar.errors import AutoparError
from autopar.report import Facts

if TYPE_CHECKING:
    from autopar.planner.layouts.pricing import PricedLayout, PricedLayouts
    from autopar.report.alternatives import BesidePlan
    from hardware_profiles.published_errors import ErrorBand

MOST_TRIED = 8
"""Most other layouts that are priced to find one that fits."""


def fits(
    model: Model,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="Name of a cluster, 'NAME as TRAINER', or a .toml or .json file.")
    ],
    like: Annotated[
        str, typer.Option("--like", help="The layout, in the words of autopar plan --like: tp=8,dp=8,sp,zero=1,mbs=1.")
    ],
    batch: Batch = None,
    seq: Seq = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Bytes per device: 70GiB. Default: the usable memory.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Precision policy, such as bf16-mixed; see autopar plan.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="adamw (the default), sgd or sgd_momentum.")
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option("--offload", help="What is kept in the host's memory: activations, optimizer, parameters, with "
                     "commas; optimizer=0.5: half of it; auto: all. Default: nothing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a layout against the devices' memory: exit code 0 if it fits, 1 if it does not.

    Nothing is searched. The answer comes with the seconds of a step, the error of memory predictions against published
    runs of this software on this device, and, if the layout does not fit, similar layouts that do: with smaller
    microbatches, recomputation or sharded parameters, or with a part of it in the memory of the host (--offload).

    Examples: autopar fits hf:llama/config.json --batch 128 --seq 8192 -c dgx-h100-x8 --like tp=8,dp=8,sp,zero=1

    autopar fits gpt.py:make -c 'dgx-a100 as megatron-2023' --like dp=8,mbs=4,recompute=full --json
    """
    from autopar.planner.layouts.layout_words import parse_layout
    from autopar.planner.layouts.pricing import PricedLayouts
    from autopar.planner.planning import options_of
    from autopar.plans.clusters import get_cluster
    from autopar.plans.request import as_option, request_of
    from autopar.report import on_host
    from autopar.report.on_host import on_hosts
    from hardware_profiles.published_errors import error_band

    hardware = get_cluster(cluster)
    layout = parse_layout(like)
    layout.check_devices(hardware.n_devices)
    given = {"memory_limit": memory_limit, "precision": precision, "optimizer": optimizer, "offload": offload}
    wanted = request_of({name: value for name, value in given.items() if value is not None}, spelled=as_option)
    for word, of_words, of_flag in (("precision", layout.precision, wanted.pins.precision if precision else None),
                                    ("optimizer", layout.optimizer, optimizer)):  # fmt: skip
        if of_words is not None and of_flag is not None and of_words != of_flag:
            raise UsageError(f"--{word} says {of_flag}, --like {of_words}; give one of them")
    policy = layout.precision if layout.precision is not None else wanted.pins.precision
    loaded, captured = load_and_capture(model, batch, seq, precision=policy, by_default=True)
    of_model = PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs), options_of(wanted))
    with progress(f"pricing {like}"):
        found = of_model.price(cluster, layout)
        others = [] if found.fits else nearby(of_model, cluster, found)
        if not found.fits and offload is None:
            others += on_the_host(of_model, cluster, found)
    band, kept_there = error_band(hardware), on_hosts(found.pinned.graph, found.plan, hardware)
    if as_json:
        print_json({**_facts(found, band, others), **on_host.facts(kept_there)}, "fits")
    else:
        print_lines(*answer(found, band, others, on_host.lines(kept_there, len(found.plan.stages))))
    if not found.fits:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Nearby:
    """A layout near the one that was asked about: its price, or why it is impossible."""

    text: str
    found: PricedLayout | None
    error: str = ""
    is_offloaded: bool = False

    @property
    def fits(self) -> bool:
        """It is possible, and every device has the memory."""
        return self.found is not None and self.found.fits

    def beside(self) -> BesidePlan:
        """Return it with the reason for or against it."""
        from autopar.report.alternatives import beside_plan

        return beside_plan(
            self.text, self.found, self.error,
            lambda found: f"fits, {show_bytes(found.limit_bytes - found.memory_bytes)} left",
        )  # fmt: skip


def nearby(layouts: PricedLayouts, cluster: str, found: PricedLayout) -> list[Nearby]:
    """Price layouts near one that does not fit, the nearest first."""
    tried = []
    for text in smaller(found.layout.text)[:MOST_TRIED]:
        try:
            tried.append(Nearby(text, layouts.price(cluster, text)))
        except AutoparError as error:  # rows that do not divide, nothing to recompute
            tried.append(Nearby(text, None, str(error)))
    return tried


def on_the_host(layouts: PricedLayouts, cluster: str, found: PricedLayout) -> list[Nearby]:
    """Price a layout with more and more of it in the memory of the host, until it fits."""
    tried: list[Nearby] = []
    for offload in ("activations", "optimizer", "auto"):
        text = f"{found.layout.text} --offload {offload}"
        try:
            tried.append(Nearby(text, layouts.price(cluster, found.layout, offload), is_offloaded=True))
        except AutoparError as error:  # no way to the host is known, or its memory is too small
            tried.append(Nearby(text, None, str(error), is_offloaded=True))
        if tried[-1].fits:
            break
    return tried


def smaller(text: str) -> list[str]:
    """Return layouts that need less memory: with one change first, then with several."""
    from autopar.planner.layouts.layout_words import words_of

    words = words_of(text)
    ways: list[dict[str, str | None]] = []
    if words.get("mbs", "1") != "1":
        ways.append({"mbs": str(max(1, int(words["mbs"]) // 2))})
    for word in {"m", "gas"} & words.keys():
        ways.append({word: str(2 * int(words[word]))})
    if "tp" in words and "sp" not in words and words["tp"] != "1":
        ways.append({"sp": ""})
    replicas = any(words.get(word, "1").partition(":")[0] != "1" for word in ("dp", "cp"))
    if replicas and words.get("zero", "0") == "0" and "fsdp" not in words:
        ways.append({"zero": "1"})
    if words.get("recompute", "none") != "full":
        ways.append({"recompute": "full"})
    if replicas and words.get("zero") != "3" and words.get("fsdp", "keep") == "keep":
        ways.append({"zero": "3", "fsdp": None})
    together: dict[str, str | None] = {}
    listed = list(ways)
    for way in ways:
        together = {**together, **way}
        if len(together) > 1:
            listed.append(dict(together))
    return list(dict.fromkeys(_changed(words, way) for way in listed))


def _changed(words: dict[str, str], way: dict[str, str | None]) -> str:
    """Return the words of a layout with some of them changed; None leaves a word out."""
    merged = {**words, **way}
    return ",".join(word if not value else f"{word}={value}" for word, value in merged.items() if value is not None)


def answer(
    found: PricedLayout, band: ErrorBand | None, others: list[Nearby], kept_there: list[str] | None = None
) -> list[str]:
    """Return the answer as lines of text; ``kept_there``: those about what is in the memory of the host."""
    from autopar.plans.lacking_memory import lacking_memory

    layout, pinned = found.layout, found.pinned
    over = found.memory_bytes - found.limit_bytes
    side = f"{show_bytes(over)} too much" if over > 0 else f"{show_bytes(-over)} left"
    lines = [
        f"{'yes' if found.fits else 'no'}: {layout.text} needs {show_bytes(found.memory_bytes)} of the "
        f"{show_bytes(found.limit_bytes)} that the fullest device may fill, {side}; a step takes "
        f"{show_seconds(found.seconds)}"
    ]
    lacking = lacking_memory(found.plan, found.memory_bytes, found.limit_bytes)
    if lacking is not None:
        lines.append(f"  {lacking.text}: they are {show_bytes(lacking.largest_bytes)} of it")
    lines += [f"  {line}" for line in (*(kept_there or ()), *pinned.notes)]
    lines.append("  " + certainty(found, band))
    if found.fits:
        return lines
    for other in others:
        if other.found is not None and other.fits:
            lines.append(
                f"  fits: {other.text}: {show_bytes(other.found.memory_bytes)}, "
                f"{show_seconds(other.found.seconds)} a step"
            )
    if not any(other.fits for other in others):
        lines.append(
            "  none of the layouts near it fits (smaller microbatches, recompute=full, zero=3): use more devices, a "
            "larger tp or pp, or devices with more memory"
        )
    for other in others:
        if other.found is not None and not other.fits:
            lines.append(f"  {other.text}: {other.beside().reason}")
    lines += dict.fromkeys(f"  {other.error}" for other in others if other.is_offloaded and other.error)
    return lines


def certainty(found: PricedLayout, band: ErrorBand | None) -> str:
    """Return the certainty of the answer according to published runs."""
    if band is None or band.memory_90 is None:
        return "the error of this prediction is not known: no published run of this software reports its memory"
    what = f"{band.memory_rows} published runs of {band.software}"
    where = "" if band.device == "any" else f" on {band.device}"
    known = f"of {what}{where}, nine of ten were within {band.memory_90:.0%}"
    least, most = (found.memory_bytes * (1 + sign * band.memory_90) for sign in (-1, 1))
    if least <= found.limit_bytes < most:
        return f"{known}: too close to the limit to be certain"
    return f"{known}: far enough from the limit"


def _facts(found: PricedLayout, band: ErrorBand | None, others: list[Nearby]) -> Facts:
    """Return the answer as values for JSON."""
    from autopar.plans.lacking_memory import lacking_memory
    from autopar.report.alternatives import ranked

    return {
        "like": found.layout.text, "fits": found.fits, "runs": found.pinned.runs, "memory_bytes": found.memory_bytes,
        "limit_bytes": found.limit_bytes, "over_bytes": found.memory_bytes - found.limit_bytes,
        "seconds": found.seconds, "error_band": band, "notes": list(found.pinned.notes),
        "refused": lacking_memory(found.plan, found.memory_bytes, found.limit_bytes),
        "would_do": [
            {"like": other.text, "memory_bytes": other.found.memory_bytes, "seconds": other.found.seconds}
            for other in others if other.found is not None and other.fits
        ],
        "alternatives": ranked([other.beside() for other in others]),
    }  # fmt: skip
