"""What the commands share: consoles, progress, words on the command line, loading models and plans.

Nothing heavy is imported at the top: ``autopar --help`` must not wait for torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from autopar.cli.terminal import err as err
from autopar.cli.terminal import out as out
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.models import Loaded
    from autopar.placements import Mesh
    from autopar.plan import Pins, Plan, Solution
    from autopar.planfile import Document
    from autopar.runtime.executor import ParallelModule
    from hardware_profiles import Cluster


Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Batch size of the example inputs (hf: models only).")]
Seq = Annotated[int | None, typer.Option("--seq", help="Sequence length of the example inputs (hf: models only).")]


class UsageError(AutoparError):
    """A word on the command line cannot be understood."""


def print_json(value: Any) -> None:
    """JSON on standard output; infinite numbers become null."""

    def plain(v: Any) -> Any:
        if dataclasses.is_dataclass(v) and not isinstance(v, type):
            v = dataclasses.asdict(v)
        if isinstance(v, dict):
            return {str(k): plain(x) for k, x in v.items()}
        if isinstance(v, (list, tuple)):
            return [plain(x) for x in v]
        if isinstance(v, float) and not math.isfinite(v):
            return None
        return v

    sys.stdout.write(json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error while something takes its time; nothing where that is no terminal. What it gives is
    told how far that is."""
    console = err()
    start = time.perf_counter()
    with console.status(what, spinner="dots") as status:
        yield lambda text: status.update(escape(f"{what}: {text}" if text else what))
    seconds = time.perf_counter() - start
    if seconds > 1 and console.is_terminal:
        console.print(f"[dim]{escape(what)}: {seconds:.1f} s[/dim]")


def print_error(error: BaseException) -> None:
    """One red paragraph."""
    err().print(f"[bold red]error:[/bold red] [red]{escape(str(error))}[/red]", soft_wrap=True)


# --- words on the command line ---------------------------------------------------------------------------------------

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_bytes(text: str) -> float:
    """``70GiB``, ``80 GB``, ``123456``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise UsageError(f"'{text}' is no size; write it like 70GiB, 80GB or a number of bytes")
    return float(match[1]) * UNITS[match[2].upper()]


def parse_pin(text: str) -> tuple[str, dict[str, str]]:
    """``layers.*.mlp.up:tensor=n`` -> pattern and ``{axis: factor}``."""
    pattern, colon, rest = text.rpartition(":")
    wanted = parse_choices(rest) if colon and pattern else None
    if wanted is None:
        raise UsageError(f"pin '{text}' is no PATTERN:axis=factor; write it like 'layers.*.mlp.up:tensor=n'")
    return pattern, wanted


def parse_choices(text: str) -> dict[str, str] | None:
    """``tensor=k,data=b``; None if it is nothing like that."""
    wanted = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\w+)\s*", part)
        if match is None or match[1] in wanted:
            return None
        wanted[match[1]] = match[2]
    return wanted


def parse_place(text: str, mesh: Mesh, option: str) -> tuple[str, tuple[str, ...]]:
    """``x=S0,R`` -> name and placement."""
    from autopar.placements import parse_state

    name, equals, state = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{option} '{text}' is no NAME=PLACEMENT; write it like {option} x=" + ",".join(
            ["S0", *["R"] * (len(mesh) - 1)]))  # fmt: skip
    return name, parse_state(state, mesh, f"{option} {name}")


# --- models, plans, clusters -----------------------------------------------------------------------------------------


def load_and_capture(
    spec: str, batch: int | None = None, seq: int | None = None, *, folder: Path | None = None, device: str = "meta",
    parts: int | None = None, input_gradients: bool = False,
) -> tuple[Loaded, Captured]:  # fmt: skip
    """The model that ``spec`` names, and its graph; of one microbatch, if its example inputs are that of ``parts``.

    Args:
        input_gradients: all inputs that can want gradients do.
    """
    with progress(f"loading {spec}"):
        from dataclasses import replace

        from autopar.capture import capture
        from autopar.capture.parts import first_part
        from autopar.capture.trace.progress import heard
        from autopar.models import load_model

        loaded = replace(load_model(spec, batch, seq, folder=folder, device=device), parts=parts)
        if input_gradients:
            from autopar.verify import wanting

            args, kwargs = wanting((loaded.args, loaded.kwargs))
            loaded = replace(loaded, args=args, kwargs=kwargs)
    with progress(f"capturing {type(loaded.model).__name__}") as say, heard(say):
        args, kwargs = first_part((loaded.args, loaded.kwargs), parts or 1)
        return loaded, capture(loaded.model, args, kwargs)


def check_values(loaded: Loaded, name: str) -> None:
    """Refuse a model or example inputs without values, where they are really run.

    Raises:
        UsageError: a parameter, a buffer or an input is on the meta device.
    """
    from torch.utils import _pytree as pytree

    named = {f"'{k}'": t for k, t in loaded.model.state_dict().items()}
    leaves, _ = pytree.tree_flatten_with_path((loaded.args, loaded.kwargs))
    named |= {f"example input {pytree.keystr(path)}": t for path, t in leaves}
    missing = next((k for k, t in named.items() if getattr(t, "is_meta", False)), None)
    if missing is not None:
        raise UsageError(f"{missing} of {name} is on the meta device and has no value; build it on the CPU")


def open_plan(path: Path) -> Document:
    """A plan file, its form checked."""
    from autopar.planfile import open_

    return open_(path)


def model_of(
    document: Document, path: Path, model: str | None, batch: int | None = None, seq: int | None = None,
    device: str = "meta",
) -> tuple[Loaded, Captured]:  # fmt: skip
    """The model that a plan file is for: the one given, or the one that the file names.

    Raises:
        ModelError: the file names none, or it cannot be loaded.
    """
    from autopar.errors import ModelError

    if model is not None:
        return load_and_capture(model, batch, seq, device=device)
    named = document.model
    if named is None or "spec" not in named:
        raise ModelError(f"{path} does not say which model it is for; give it with --model PATH.py:factory")
    return load_and_capture(
        named["spec"], batch or named.get("batch"), seq or named.get("seq"), folder=path.parent, device=device
    )


def bound(document: Document, captured: Captured) -> tuple[Plan, Cluster]:
    """The plan of a file for a captured model, with the cluster that prices it."""
    from autopar.planfile import bind

    cluster = document.cluster()
    return bind(document, captured.graph, cluster), cluster


def on_ranks(loaded: Loaded, captured: Captured, plan: Plan) -> ParallelModule:
    """The model on the ranks of this process group; every rank has built it alike.

    Raises:
        MeshError: the process group has another size than the plan's mesh.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.errors import MeshError
    from autopar.runtime.agree import ensure_process_group, first_seed, together
    from autopar.runtime.executor import ParallelModule

    ensure_process_group()
    if dist.get_world_size() != plan.n_devices:
        raise MeshError(
            f"the plan is for {plan.n_devices} ranks ({show_mesh(plan.mesh)}), {dist.get_world_size()} are running; "
            f"start them with torchrun --nproc-per-node {plan.n_devices}, or plan for another mesh"
        )
    device = next((p.device.type for p in loaded.model.parameters()), "cpu")
    mesh = init_device_mesh(device, tuple(n for _, n in plan.mesh), mesh_dim_names=tuple(name for name, _ in plan.mesh))
    seed, error, made = first_seed(dist.group.WORLD), None, None
    try:
        made = ParallelModule(loaded.model, captured, plan, mesh, seed=seed)
    except Exception as e:
        error = e
    together(dist.group.WORLD, error)
    assert made is not None
    return made


def optimizer_of(name: str, params: list[Any], lr: float) -> Any:
    """The optimizer that a plan names."""
    import torch

    made = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    if name == "sgd_momentum":
        return torch.optim.SGD(params, lr=lr, momentum=0.9)
    return made[name](params, lr=lr)


# --- numbers for people ----------------------------------------------------------------------------------------------


def show_bytes(n: float) -> str:
    """``1.50 GiB``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"


def show_seconds(s: float) -> str:
    """``1.50 ms``."""
    if not math.isfinite(s):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(s) >= size:
            return f"{s / size:.3g} {unit}"
    return f"{s / 1e-6:.3g} us" if s else "0"


def show_solution(solution: Solution | None) -> str:
    """What is known of how good a plan is: ``highs: within gap, gap 0.35%: no plan is faster by more than that``."""
    if solution is None:
        return "no proof of optimality: the plan was edited by hand, and priced anew"
    gap = (
        f"{solution.gap:.2%}" if solution.status == "optimal" or solution.gap >= 1e-3 else f"{100 * solution.gap:.1g}%"
    )
    said = f"{solution.solver}: {solution.status}, gap {gap}"
    said += "" if solution.status == "optimal" else ": no plan is faster by more than that"
    return f"{said}; more memory may allow a faster one" if solution.binds else said


def show_pins(pins: Pins) -> str:
    """What the user asked for: ``layers.*.up: tensor=n; at most 70.00 GiB per device``; empty for nothing."""
    from autopar.pins import pin_lines

    limit = [] if pins.memory_limit_bytes is None else [f"at most {show_bytes(pins.memory_limit_bytes)} per device"]
    return "; ".join([*pin_lines(pins), *limit])


def show_mesh(mesh: Sequence[tuple[str, int]]) -> str:
    """``data=2 x tensor=4``."""
    from autopar.placements import mesh_text

    return mesh_text(tuple(mesh))
