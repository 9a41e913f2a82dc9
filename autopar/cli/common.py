"""Helpers shared by the commands: option types, progress, errors, loading of models and plans.

Nothing heavy is imported at the top: ``autopar --help`` must not wait for torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from autopar.cli.answers import print_json as print_json
from autopar.cli.terminal import err as err
from autopar.cli.terminal import out as out
from autopar.cli.terminal import print_lines as print_lines
from autopar.cli.terminal import styled as styled
from autopar.errors import AutoparError, ModelError
from autopar.words.texts import show_bytes as show_bytes
from autopar.words.texts import show_seconds as show_seconds
from hardware_profiles.strict import MOST_COUNTED, shortened

if TYPE_CHECKING:
    import torch

    from autopar.capture import Captured
    from autopar.frontends.models import Loaded
    from autopar.planfile import Document
    from autopar.planner.inter_op.replan import Replanner
    from autopar.plans.pins import Pins
    from autopar.plans.plan import Plan, Solution
    from autopar.words.graph import Graph
    from autopar.words.precision import Precision
    from hardware_profiles import Cluster


Model = Annotated[str, typer.Argument(metavar="MODEL", help="PATH.py:factory, or hf:PATH/config.json.")]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="The model, if not the one that the file names.")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON on standard output.")]


def within(low: float, high: float = MOST_COUNTED) -> Callable[[typer.CallbackParam, float | None], float | None]:
    """Return an option callback that refuses numbers outside of a range, and nan."""

    def check(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not low <= value <= high:
            given = shortened(f"{value}")
            raise UsageError(f"{param.opts[0]} is {given}; give a number from {_plain(low)} to {_plain(high)}")
        return value

    return check


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def seconds_within(param: typer.CallbackParam, value: float | None) -> float | None:
    """Refuse a number of seconds that a 32-bit count of milliseconds cannot hold."""
    return within(0.001, MOST_SECONDS)(param, value)


def _device(param: typer.CallbackParam, value: str) -> str:
    if value not in DEVICES:
        raise UsageError(f"{param.opts[0]} is {shortened(value)}; give {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    return value


MOST_SECONDS = 1_000_000
"""Largest number of seconds of an option: eleven days."""
MOST_RANKS_HERE = 256
"""Most processes, or ranks in one process, that a command starts."""
MOST_LAYOUTS = 1000
"""Most layouts that are shown."""
DEVICES = ("cpu", "cuda", "auto")
Batch = Annotated[
    int | None, typer.Option("--batch", help="Batch size of the example inputs (hf: models only).", callback=within(1))
]
Seq = Annotated[
    int | None,
    typer.Option("--seq", help="Sequence length of the example inputs (hf: models only).", callback=within(1)),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", help="cpu, cuda or auto: GPUs if there is one for each process, else the CPU.", callback=_device
    ),
]


Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Import the .py file that the plan names, which runs its code; --model needs no --trust."
    ),
]


class UsageError(AutoparError):
    """A command line that cannot be understood."""


class UntrustedModelError(ModelError):
    """A plan file that names Python code which the user has not allowed to run."""


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show progress on standard error: a spinner on a terminal, a line now and then elsewhere.

    Yields a function that takes the current state as text.
    """
    console = err()
    start = time.perf_counter()
    if not console.is_terminal:
        is_log = sys.stderr is sys.__stderr__  # callers from Python that capture standard error get errors only
        yield _lines(console, what, start) if is_log else lambda _: None
        return
    with console.status(Text(what), spinner="dots") as status:
        yield lambda text: status.update(Text(f"{what}: {text}" if text else what))
    seconds = time.perf_counter() - start
    if seconds > 1:
        console.print(styled("[dim]{}[/dim]", f"{what}: {seconds:.1f} s"))


def _lines(console: Console, what: str, start: float) -> Callable[[str], None]:
    """Return a function that logs progress: first after some seconds, then at growing intervals."""
    after = start + FIRST_LINE_SECONDS

    def say(text: str) -> None:
        nonlocal after
        now = time.perf_counter()
        if text and now >= after:
            after = now + max(FIRST_LINE_SECONDS, (now - start) * LINES_APART)
            console.print(f"{what}, {now - start:.0f} s: {text}", soft_wrap=True)

    return say


FIRST_LINE_SECONDS, LINES_APART = 2.0, 0.1
"""Until the first line of progress in a log, and between two of them; and the share of all seconds that they are apart
at least, so that a search of an hour writes some sixty lines."""


def print_error(error: BaseException) -> None:
    """Print an error as one red paragraph."""
    message = re.sub(r"\S{400,}", lambda word: shortened(word[0], 200), str(error))  # input may be of any length
    err().print(styled("[bold red]error:[/bold red] [red]{}[/red]", message), soft_wrap=True)


def where_to_run(requested: str, processes: int) -> tuple[str, str]:
    """Return the device type (``cpu`` or ``cuda``) for the local `processes`, and a description for people."""
    import torch

    if requested not in ("cpu", "cuda", "auto"):
        raise UsageError(f"--device is {requested}; it is cpu, cuda or auto")
    check_ranks_here(processes)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cuda" and gpus < processes:
        raise UsageError(
            f"--device is cuda, {processes} processes are to run on this machine, and "
            + (f"torch finds {gpus} GPUs" if gpus else "torch finds no GPU")
            + "; use --device cpu, or a plan for as many devices as there are"
        )
    if requested != "cpu" and gpus >= processes:
        return "cuda", f"{processes} of {gpus} GPUs ({torch.cuda.get_device_name(0)})"
    few = f"; {gpus} GPUs are too few" if requested == "auto" and gpus else ""
    return "cpu", f"{processes} processes on the CPU{few}"


def check_ranks_here(n: int) -> None:
    """Refuse more ranks than one machine can run."""
    if n > MOST_RANKS_HERE:
        raise UsageError(
            f"{n:,} ranks are too many for this machine, the most is {MOST_RANKS_HERE}; use a mesh or a plan of fewer "
            "devices, or start it under torchrun on machines that have them"
        )


def moved(loaded: Loaded, device: str) -> Loaded:
    """Return the model and its example inputs on a device."""
    import torch

    from autopar.torch_private import pytree

    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), (loaded.args, loaded.kwargs))
    return dataclasses.replace(loaded, model=loaded.model.to(device), args=args, kwargs=kwargs)


# --- models, plans, clusters -----------------------------------------------------------------------------------------


def load_and_capture(
    spec: str, batch: int | None = None, seq: int | None = None, *, folder: Path | None = None, device: str = "meta",
    parts: int | None = None, input_gradients: bool = False, precision: Precision | None = None,
    by_default: bool = False, within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[Loaded, Captured]:  # fmt: skip
    """Load the model that ``spec`` names and capture its graph.

    With ``parts`` the graph is that of one microbatch. ``input_gradients`` makes all floating-point inputs require
    gradients where the model runs with such inputs. Without ``precision``, ``by_default`` takes the frontend's policy.
    ``within`` is entered when the model's file has run: what that registers is known there.
    """
    with progress(f"loading {spec}"):
        from dataclasses import replace

        from autopar.capture import capture
        from autopar.capture.in_parts import captured_in_parts
        from autopar.errors import CaptureError
        from autopar.frontends.models import load_model
        from autopar.progress import heard

        loaded = replace(load_model(spec, batch, seq, folder=folder, device=device), parts=parts)
    with progress(f"capturing {type(loaded.model).__name__}") as say, heard(say), within():
        if precision is None and by_default:
            precision = loaded.precision

        def of_model(loaded: Loaded) -> tuple[Loaded, Captured]:
            return loaded, captured_in_parts(
                lambda batch: capture(loaded.model, batch[0], batch[1], precision=precision),
                (loaded.args, loaded.kwargs, ()), parts or 1, loaded.model,
            )  # fmt: skip

        refused: CaptureError | None = None
        if input_gradients:
            from autopar.comparison.program_vs_eager import wanting

            args, kwargs = wanting((loaded.args, loaded.kwargs))
            try:
                return of_model(replace(loaded, args=args, kwargs=kwargs))
            except CaptureError as error:  # a forward that writes its input, or sets requires_grad of a view of it
                refused = error
        loaded, captured = of_model(loaded)
    if refused is not None:
        reason = str(refused).splitlines()[0]
        err().print(f"gradients of the inputs are not compared: where the inputs require gradients, {reason}")
    return loaded, captured


def check_values(loaded: Loaded, name: str) -> None:
    """Refuse a model or example inputs on the meta device, which have no values to run with."""
    from autopar.torch_private import pytree

    named = {f"'{k}'": t for k, t in loaded.model.state_dict().items()}
    leaves, _ = pytree.tree_flatten_with_path((loaded.args, loaded.kwargs))
    named |= {f"example input {pytree.keystr(path)}": t for path, t in leaves}
    missing = next((k for k, t in named.items() if getattr(t, "is_meta", False)), None)
    if missing is not None:
        raise UsageError(f"{missing} of {name} is on the meta device and has no value; build it on the CPU")


def cluster_from(cluster: str, folder: Path) -> str:
    """Return the cluster as a plan file in ``folder`` names it: profile files by relative path, others by name."""
    from autopar.plans.clusters import in_file

    return in_file(cluster, lambda path: Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix())


def open_plan(path: Path) -> Document:
    """Read a plan file and check its form."""
    from autopar.planfile import open_

    return open_(path)


def model_of(
    document: Document, path: Path, model: str | None = None, device: str = "meta", *, trust: bool
) -> tuple[Loaded, Captured]:
    """Load and capture the model of a plan file: ``model`` if it is given, else the one that the file names.

    The graph is that of one microbatch. A Python file that only the plan file names is imported only with ``trust``: a
    plan may come from anyone, and its model would run with all rights of the user who looks at it.
    """
    from autopar.planner.layouts.pricing import graph_for
    from autopar.rules.experts.expert_load import with_load

    named = document.model or {}
    spec, folder = spec_of(document, path, model, trust=trust)
    loaded, captured = load_and_capture(
        spec,
        named.get("batch"),
        named.get("seq"),
        folder=folder,
        device=device,
        parts=named.get("parts"),
        precision=document.precision,
    )
    graph = with_load(captured.graph, document.expert_load)
    if (document.raw.get("pins") or {}).get("layout"):
        graph = graph_for(graph, document.raw["fingerprint"])
    return loaded, dataclasses.replace(captured, graph=graph)


def spec_of(document: Document, path: Path, model: str | None, *, trust: bool) -> tuple[str, Path | None]:
    """Return the spec of a plan file's model, and the folder in which its relative path starts."""
    from autopar.frontends.models import runs_code

    spec = model if model is not None else (document.model or {}).get("spec")
    if spec is None:
        raise ModelError(f"{path} does not say which model it is for; give it with --model PATH.py:factory")
    if model is None and not trust and runs_code(spec):
        raise UntrustedModelError(
            f"{path} names the model '{spec}', and importing that file would run its code; if you trust it, give "
            f"--trust, or name the file yourself: --model {path.parent / spec}"
        )
    return spec, path.parent if model is None else None


def bound(document: Document, captured: Captured) -> tuple[Plan, Cluster]:
    """Return the plan of a file for a captured model, and the cluster that prices it."""
    from autopar.planfile import bind
    from autopar.plans.device_groups import check_within

    cluster = document.cluster()
    plan = bind(document, captured.graph, cluster)
    there = f"devices are in cluster '{plan.cluster}'"
    check_within([stage.devices for stage in plan.stages], cluster.n_devices, there)
    return plan, cluster


def what_if(captured: Captured, plan: Plan, cluster: Cluster) -> Replanner:
    """Return the replanner of a plan, which re-solves and simulates it."""
    from autopar.planner.inter_op.replan import Replanner
    from autopar.planner.planning import wishes_of

    return Replanner(captured.graph, plan, cluster, wishes_of(plan))


def opened(path: Path, model: str | None = None, *, trust: bool) -> tuple[Captured, Replanner]:
    """Return the captured model of a plan file, and the replanner of its plan."""
    document = open_plan(path)
    _, captured = model_of(document, path, model, trust=trust)
    return captured, what_if(captured, *bound(document, captured))


def optimizers_of(
    name: str, graph: Graph, params: Mapping[str, torch.nn.Parameter], lr: float
) -> list[torch.optim.Optimizer]:  # fmt: skip
    """Return the torch optimizers of a plan that names one: of ``muon`` two, if this rank has parameters for both.

    Args:
        graph: the model's.
        params: what this rank trains, by name.
    """
    from autopar.plans.stepped_by import stepped_by

    of_name: dict[str, list[torch.nn.Parameter]] = {}
    for _, node in graph.of_kind("param"):
        if node.target in params:
            of_name.setdefault(stepped_by(graph, node, name), []).append(params[node.target])
    return [optimizer_of(each, mine, lr) for each, mine in of_name.items()]


def optimizer_of(name: str, params: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return the torch optimizer of a name; ``muon`` takes matrices alone."""
    import torch

    classes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "muon": torch.optim.Muon,
        "sgd_momentum": partial(torch.optim.SGD, momentum=0.9),
    }  # fmt: skip
    return classes[name](params, lr=lr)


# --- numbers for people ----------------------------------------------------------------------------------------------


def show_solution(solution: Solution | None) -> str:
    """Return the proof of a plan in words: ``highs: within gap, gap 0.35%: no plan is faster by more than that``."""
    if solution is None:
        return "no proof of optimality: the plan was edited by hand, and priced anew"
    gap = (
        f"{solution.gap:.2%}" if solution.status == "optimal" or solution.gap >= 1e-3 else f"{100 * solution.gap:.1g}%"
    )
    text = f"{solution.solver}: {solution.status}, gap {gap}"
    text += "" if solution.status == "optimal" else ": no plan is faster by more than that"
    return f"{text}; more memory may allow a faster one" if solution.binds else text


def show_pins(pins: Pins) -> str:
    """Return the user's constraints in words: ``layers.*.up: tensor=n; at most 70.00 GiB per device``."""
    from autopar.plans.plan_options import pin_words

    return "; ".join(pin_words(pins))
