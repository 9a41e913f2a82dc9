"""``autopar plan --mode inference``: a deployment of a model for serving, and what it serves."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.common import UsageError, print_json, print_lines, progress, show_bytes, show_seconds
from autopar.cli.output_files import Force, OutputFile, OutputKind
from autopar.plans.plan_options import INFERENCE, MODES, PLAN_OPTIONS, TRAINING

if TYPE_CHECKING:
    from autopar.serving.front import PricedDeployment
    from autopar.serving.planning import Answer
    from autopar.serving.records import ServingLoad

SERVING_PLAN = OutputKind("a serving plan", re.compile(r'\s*\{.*"autopar-serving-plan"', re.DOTALL).match)
PLOT = OutputKind("a plot of autopar", re.compile(r"<svg.*autopar", re.DOTALL).match)


@dataclass(frozen=True)
class ServingFlag:
    """An option that is for serving alone.

    Attributes:
        name: of the option, without its dashes.
        kind: type of its value.
        help: what it says.
    """

    name: str
    kind: type
    help: str

    @property
    def parameter(self) -> str:
        """Name of the command's parameter."""
        return self.name.replace("-", "_")


FLAGS = (
    ServingFlag("isl", int, "Inference: tokens of a prompt, with its prefix."),
    ServingFlag("osl", int, "Inference: tokens of an answer."),
    ServingFlag("prefix", int, "Inference: tokens of the prompt that are in the cache already."),
    ServingFlag("ttft", str, "Inference: limit on the mean time to the first token: 1s, 300ms."),
    ServingFlag("tpot", str, "Inference: limit on the mean time per output token: 30ms."),
    ServingFlag("rate", str, "Inference: requests that arrive: 20/s."),
    ServingFlag("engine", str, "Inference: vllm, sglang, tensorrt-llm or autopar; prices are those of its steps."),
    ServingFlag("cache-precision", str, "Inference: format of the cache, bf16 or fp8."),
    ServingFlag("devices", int, "Inference: how many devices of the cluster to use."),
    ServingFlag("cost-per-hour", float, "Inference: cost of one device for an hour, in any currency."),
    ServingFlag("plot", Path, "Inference: file for a plot of the front, .svg."),
)
KEPT = frozenset({"precision"})
"""Options of training plans that mean something here."""


def with_serving_flags(command: Any) -> Any:
    """Add ``--mode`` and the options of serving to a command, which gets them among its other options."""
    signature = inspect.signature(command, eval_str=True)
    mode = Annotated[str, typer.Option("--mode", help="training, or inference: a deployment that serves requests.")]
    added = [inspect.Parameter("mode", inspect.Parameter.KEYWORD_ONLY, default=TRAINING, annotation=mode)]
    for flag in FLAGS:
        given: Any = flag.kind | None
        annotation = Annotated[given, typer.Option(f"--{flag.name}", help=flag.help)]
        kind = inspect.Parameter.KEYWORD_ONLY
        added.append(inspect.Parameter(flag.parameter, kind, default=None, annotation=annotation))
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])
    command.__annotations__ = {p.name: p.annotation for p in command.__signature__.parameters.values()}
    return command


def requested(chosen: Mapping[str, Any]) -> bool:
    """Return whether a deployment for serving is asked for.

    Raises:
        UsageError: the mode is not known, or options of serving are given without it.
    """
    mode = chosen["mode"]
    if mode not in MODES:
        raise UsageError(f"--mode is '{mode}'; give training or inference")
    given = [flag.name for flag in FLAGS if chosen[flag.parameter] is not None]
    if mode == TRAINING and given:
        raise UsageError(f"--{given[0]} is for serving; add --mode inference, or leave it out")
    return bool(mode == INFERENCE)


def run(
    model: str, cluster: str | None, chosen: Mapping[str, Any], others: Mapping[str, object], *, like: list[str],
    top: int, output: Path | None, force: Force, as_json: bool,
) -> None:  # fmt: skip
    """Plan a deployment and print it.

    Args:
        model, cluster: as they were given.
        chosen: values of options, by parameter.
        others: values of the command's other options that mean nothing here, by option.
        like: layouts to price.
        top: how many layouts to print.
        output: file of the plan.
        force: write over files of other kinds.
        as_json: print JSON.
    """
    from autopar.frontends.models import load_model
    from autopar.serving.planning import plan_serving
    from autopar.serving.records import DEFAULT_ENGINE
    from hardware_profiles import load_cluster

    _check_options(chosen, others)
    if cluster is None:
        raise UsageError("give the cluster to serve on with --cluster (autopar clusters lists them)")
    plot = chosen["plot"]
    files = {option: OutputFile(path, kind, option, force) for option, path, kind in
             (("-o", output, SERVING_PLAN), ("--plot", plot, PLOT)) if path is not None}  # fmt: skip
    for file in files.values():
        file.check()
    load, hardware = load_of(chosen), load_cluster(cluster)
    with progress(f"loading {model}"):
        loaded = load_model(model)
    with progress("planning") as say:
        answer = plan_serving(
            loaded.model, hardware, (loaded.args, loaded.kwargs), load, engine=chosen["engine"] or DEFAULT_ENGINE,
            precision=chosen["precision"] or "bf16", cache_precision=chosen["cache_precision"] or "bf16",
            devices=chosen["devices"], cost_per_hour=chosen["cost_per_hour"], like=like, named=model,
            cluster_name=cluster, say=say,
        )  # fmt: skip
    if output is not None:
        from autopar.serving.plan_file import dumps

        files["-o"].write(dumps(answer.plan))
    if plot is not None:
        from autopar.report.serving_plot import front_plot

        points = [
            (d.served.tokens_per_second_per_user, d.served.tokens_per_second_per_device, _of(d)) for d in answer.front
        ]
        served = answer.plan.served
        chosen_point = served.tokens_per_second_per_user, served.tokens_per_second_per_device
        files["--plot"].write(front_plot(points, chosen_point, f"{model} on {cluster}"))
    if as_json:
        print_json(facts(answer, top, like), "serving")
        return
    show(answer, top, like)
    for path in (output, plot):
        if path is not None:
            print_lines(f"written to {path}")


def _check_options(chosen: Mapping[str, Any], others: Mapping[str, object]) -> None:
    training = [
        flag.names[0] for option in PLAN_OPTIONS for flag in option.flags
        if flag.parameter not in KEPT and chosen[flag.parameter] not in (None, [])
    ] + [name for name, value in others.items() if value not in (None, [])]  # fmt: skip
    if training:
        raise UsageError(
            f"{training[0]} is for training plans and means nothing with --mode inference; leave it out"
            + ("; requests are said by --isl and --osl" if training[0] in ("--batch", "--seq") else "")
        )
    for name in ("isl", "osl"):
        if chosen[name] is None:
            raise UsageError("--mode inference needs --isl and --osl, the tokens of a prompt and of an answer")


def load_of(chosen: Mapping[str, Any]) -> ServingLoad:
    """Return the load that options describe."""
    from autopar.serving.records import ServingLoad

    return ServingLoad(
        chosen["isl"], chosen["osl"], chosen["prefix"] or 0, _seconds("--ttft", chosen["ttft"]),
        _seconds("--tpot", chosen["tpot"]), _rate(chosen["rate"]),
    )  # fmt: skip


def _seconds(option: str, text: str | None) -> float | None:
    """Return the seconds of ``30ms``, ``1s`` or ``0.5``."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s|)\s*", text)
    value = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}[match[2]] if match else 0.0
    if not 0 < value < 1e9:
        raise UsageError(f"{option} is '{text}'; give a time such as 30ms or 1.5s")
    return value


def _rate(text: str | None) -> float | None:
    """Return the requests a second of ``20/s``, ``600/min`` or ``20``."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(?:/\s*(s|min|h))?\s*", text)
    value = float(match[1]) / {"s": 1, "min": 60, "h": 3600, None: 1}[match[2]] if match else 0.0
    if not 0 < value < 1e9:
        raise UsageError(f"--rate is '{text}'; give requests that arrive, such as 20/s")
    return value


# --- what is printed --------------------------------------------------------------------------------------------------

COLUMNS = 80
"""Most columns of what is printed."""


def _print_wrapped(text: str, indent: str = "  ") -> None:
    """Print a line, the rest of a long one below with two further spaces."""
    print_lines(*textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False,
        break_on_hyphens=False,
    ))  # fmt: skip


def show(answer: Answer, top: int, like: list[str]) -> None:
    """Print a plan, other layouts, and the front, at most 80 columns wide."""
    plan = answer.plan
    load, served = plan.load, plan.served
    print_lines(
        f"{plan.model} on {plan.cluster}, {plan.devices} devices, for {plan.engine}",
        f"  {load.input_tokens:,} tokens in" + (f" ({load.prefix_tokens:,} cached)" if load.prefix_tokens else "")
        + f", {load.output_tokens:,} out; weights {plan.formats.weights}, cache {plan.formats.cache}",
    )  # fmt: skip
    for worker in plan.workers:
        memory = worker.memory
        _print_wrapped(
            f"{worker.replicas} x {worker.phase}: {worker.layout.words}, {worker.requests} requests in flight, "
            f"steps of {worker.tokens_per_step:,}"
        )
        print_lines(
            f"    memory {show_bytes(memory.total)} of {show_bytes(memory.limit)}: weights "
            f"{show_bytes(memory.weights)}, cache {show_bytes(memory.cache)}",
        )
    print_lines(
        f"  time to first token {show_seconds(served.first_token_seconds)}, per output token "
        f"{show_seconds(served.token_seconds)}",
        f"  {served.requests_per_second:.3g} requests/s, {served.tokens_per_second_per_device:,.1f} tokens/s per "
        f"device, {served.tokens_per_second_per_user:,.1f} per user",
    )
    _print_wrapped(_parts(served))
    if served.transfer_seconds:
        print_lines(f"  the cache of a prompt moves in {show_seconds(served.transfer_seconds)}")
    if served.cost_per_million_tokens is not None:
        print_lines(f"  {served.cost_per_million_tokens:.3g} per million output tokens")
    if served.binding:
        _print_wrapped(f"binds: {served.binding}")
    for words, each in zip(like, answer.like, strict=True):
        _table(f"as given, {words}", [each])
        memory = each.workers[0].memory
        fits = "fits" if memory.total <= memory.limit else "does not fit"
        _print_wrapped(_parts(each.served), "    ")
        print_lines(f"    memory {show_bytes(memory.total)} of {show_bytes(memory.limit)}: {fits}")
    if top > 1:
        _table("layouts that keep the limits", answer.ranked[:top])
        _table("front: tokens/s per device against tokens/s per user", answer.front)
    for note in plan.notes:
        _print_wrapped(f"note: {note}")


def _parts(served: Any) -> str:
    """Return the seconds of a step of decodes by part, in words."""
    return "a step of full decodes: " + ", ".join(f"{k} {show_seconds(v)}" for k, v in served.parts.items() if v > 0)


def _table(title: str, rows: Any) -> None:
    print_lines("", f"  {title}", f"    {'workers':<34}{'tok/s/dev':>10}{'tok/s/user':>11}{'TTFT':>9}{'TPOT':>9}")
    for each in rows:
        served, name = each.served, _of(each)
        if len(name) > 33:  # on a line of its own
            print_lines(f"    {name}")
            name = ""
        print_lines(
            f"    {name:<34}{served.tokens_per_second_per_device:>10,.1f}"
            f"{served.tokens_per_second_per_user:>11,.1f}{show_seconds(served.first_token_seconds):>9}"
            f"{show_seconds(served.token_seconds):>9}"
        )


def _of(each: PricedDeployment) -> str:
    """Return workers in few words: ``2 x tp=4 x32``, prefill and decode apart by a plus."""
    return " + ".join(f"{w.replicas}x {w.layout.words} r{w.requests}" for w in each.workers)


def facts(answer: Answer, top: int, like: list[str]) -> dict[str, Any]:
    """Return an answer as values for JSON."""
    from autopar.serving.plan_file import dumps
    from hardware_profiles.strict import parse_json

    return {
        "plan": parse_json(dumps(answer.plan)), "ranked": [_row(each) for each in answer.ranked[:top]],
        "front": [_row(each) for each in answer.front],
        "like": [{"words": words, **_row(each)} for words, each in zip(like, answer.like, strict=True)],
    }  # fmt: skip


def _row(each: PricedDeployment) -> dict[str, Any]:
    served = each.served
    return {
        "workers": [
            {"phase": w.phase, "layout": w.layout.words, "replicas": w.replicas, "requests": w.requests,
             "memory_bytes": w.memory.total, "limit_bytes": w.memory.limit} for w in each.workers
        ],
        "devices": each.devices, "first_token_seconds": served.first_token_seconds,
        "token_seconds": served.token_seconds, "tokens_per_second_per_device": served.tokens_per_second_per_device,
        "tokens_per_second_per_user": served.tokens_per_second_per_user,
        "requests_per_second": served.requests_per_second, "cost_per_million_tokens": served.cost_per_million_tokens,
        "binding": served.binding, "parts_seconds": served.parts, "transfer_seconds": served.transfer_seconds,
    }  # fmt: skip


__all__ = ["FLAGS", "facts", "load_of", "requested", "run", "show", "with_serving_flags"]
