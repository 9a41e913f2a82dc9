"""Prices of published runs through autopar's planner, with the layout pinned."""

from __future__ import annotations

import hashlib
import pickle
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from published.built_clusters import cluster_of
from published.built_models import attention_of, batch_of, key_of, model_of
from published.rows import GIB, Run, UnpricedError

if TYPE_CHECKING:
    from autopar.words.graph import Graph
    from hardware_profiles import Cluster

CAPTURE_SECONDS = 240.0
"""CPU-seconds that the captures of one model may take; it is not tried again for its other rows."""
ROWS = (4, 2)
"""Rows of the two batches that are captured, from which a graph of any number of rows is made."""


@dataclass
class Priced:
    """A run beside its price.

    Attributes:
        seconds: of a step, by the price; None where the run has no price.
        factor: the software factor in ``seconds``.
        gib: the predicted peak of memory of a device, in GiB of what is allocated.
        fits: whether that is within the device's limit.
        parts: seconds of a step on the busiest device: compute, collectives of activations, those of parameters, and
            the rest, during which the device waits or hides nothing.
        why: why there is no price.
        standin: precision that the policy only approximates.
    """

    run: Run
    seconds: float | None = None
    factor: float = 1.0
    gib: float | None = None
    fits: bool | None = None
    limit_gib: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    why: str = ""
    standin: str = ""
    cpu_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


# --- precision -------------------------------------------------------------------------------------------------------

_SIXTEEN_BIT_SUMS = (
    "megatron-2021", "megatron-deepspeed-2022", "megatron-deepspeed-2020", "fms-fsdp", "nemo", "mlperf", "deepspeed",
    "deepspeed-eager", "accelerate",
)  # fmt: skip
"""Software whose gradients are added up over ranks in 16 bits: Megatron with --fp16 unless it was told otherwise,
fms-fsdp's bfSixteen policy, NVIDIA's performance recipes (grad_reduce_in_fp32=False), DeepSpeed with bf16
(communication_data_type) and accelerate's FSDP with it."""


def policies_of(run: Run) -> tuple[str, ...]:
    """Precision policies for a run, in autopar's words: the first that the planner knows is taken; the last one is
    known always."""
    text = run.precision.lower()
    low = "float16" if "fp16" in text or "float16" in text else "bfloat16"
    if "mp mode pure" in run.notes.lower() or "bf16 states" in run.optimizer.lower():
        return ("bf16-true",)
    if "tf32" in text or "fp32" in text.split():
        return ("32-true",)
    wide = {"bloom", "zero"} & set(run.source.lower().split())  # BLOOM and the zero-bubble paper trained in bfloat16
    reduce = low if run.software in _SIXTEEN_BIT_SUMS and not wide else "float32"
    plain = f"params={low},reduce={reduce}"
    if "fp4" in text:
        narrow = ("nvfp4", "mxfp8")
    elif "mx" in text:
        narrow = ("mxfp8", "fp8")
    else:
        narrow = ("fp8",) if "fp8" in text else ()
    return *(f"products={name},reduce={reduce}" for name in narrow), plain


def _policy_of(run: Run) -> tuple[Any, str]:
    from autopar.errors import AutoparError
    from autopar.words.precision import parse_precision

    for text in policies_of(run):
        try:
            return parse_precision(text), text
        except AutoparError:
            continue
    raise UnpricedError(f"precision {run.precision} has no policy")


class _TooLong(Exception):
    """A row took more seconds than it may."""


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process's work, whatever else the machine does
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# --- graphs ----------------------------------------------------------------------------------------------------------


class Graphs:
    """Graphs of models by their sizes, captured once, and kept in a folder where one is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._pairs: dict[str, Any] = {}
        self._refused: dict[str, str] = {}
        self._sized = lru_cache(maxsize=8)(self._resized)

    def of(self, run: Run, rows: int) -> Any:
        """The graph of a microbatch of so many rows.

        Raises:
            UnpricedError: the model cannot be built, or not be traced.
        """
        policy, text = _policy_of(run)
        key = f"{key_of(run)} {text}"
        if key in self._refused:
            raise UnpricedError(self._refused[key])
        if key not in self._pairs:
            try:
                with _within(CAPTURE_SECONDS):
                    self._pairs = {key: self._captured(run, policy, key)}  # rows of one model follow each other
            except _TooLong:
                self._refused[key] = f"its capture took more than {CAPTURE_SECONDS:.0f} s"
            except UnpricedError as error:
                self._refused[key] = str(error)
            if key in self._refused:
                raise UnpricedError(self._refused[key])
            self._sized.cache_clear()
        return self._sized(key, rows)

    def _captured(self, run: Run, policy: Any, key: str) -> Any:
        from autopar.capture import capture
        from autopar.errors import AutoparError

        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.pickle" if self.folder else None
        if path is not None and path.is_file():
            with path.open("rb") as file:
                return pickle.load(file)
        model = model_of(run)
        try:
            pair = tuple(capture(model, (), batch_of(n, run.shape.seq), precision=policy).graph for n in ROWS)
        except (AutoparError, NotImplementedError) as error:
            raise UnpricedError(f"cannot be captured: {str(error).splitlines()[0][:120]}") from None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(pair))
        return pair

    def _resized(self, key: str, rows: int) -> Any:
        from autopar.capture.microbatches import NotLinear, resized

        a, b = self._pairs[key]
        try:
            return resized(a, b, *ROWS, rows)
        except NotLinear as error:
            raise UnpricedError(f"sizes do not grow with the batch: {error}") from None


# --- prices ----------------------------------------------------------------------------------------------------------


def layout_of(run: Run) -> str:
    """The layout in the words of ``autopar plan --like``.

    Raises:
        UnpricedError: autopar has no words for it.
    """
    s = run.sizes
    sizes = (("tp", s.tp), ("pp", s.pp), ("dp", s.dp), ("cp", s.cp), ("ep", s.ep), ("vp", s.vp))
    words = [f"{word}={n}" for word, n in sizes if n > 1]
    words += [f"mbs={s.micro}", f"zero={s.zero}"] + ["sp"] * s.is_sequence_parallel
    words.append(f"recompute={_recomputed(run)}")
    return ",".join(words)


_FEED_FORWARD = {"gpt": "up"}


def _recomputed(run: Run) -> str:
    """What runs again, in autopar's words.

    Megatron's selective recomputation is that of attention's inside, which flash attention never keeps. FSDP's is that
    of every second block.
    """
    said, modules = (run.sizes.recompute or "none").lower(), run.sizes.modules.lower()
    if "full" in said or "uniform" in modules:
        return "full"
    if "selective" not in said:
        return "none"
    if "mlp" in modules:
        return "selective:" + _FEED_FORWARD.get(run.shape.family, "mlp")
    if run.software in ("fms-fsdp", "torchtitan", "llm-foundry"):
        return "every:2"
    return "none" if attention_of(run) == "sdpa" else "selective:attn"


def price(run: Run, graphs: Graphs, most_seconds: float = 60.0) -> Priced:
    """A run's price. Every reason why there is none is in :attr:`Priced.why`; nothing is raised."""
    from autopar.errors import AutoparError

    began = time.process_time()
    priced = Priced(run)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cluster, graph = cluster_of(run), graphs.of(run, run.sizes.dp * run.sizes.micro)
            began = time.process_time()
            with _within(most_seconds):
                _price(run, cluster, graph, priced)
    except UnpricedError as error:
        priced.why = str(error)
    except _TooLong:
        priced.why = f"its price took more than {most_seconds:.0f} s"
    except AutoparError as error:
        priced.why = _short(str(error))
    except Exception as error:  # a row never ends the run of all: it is counted, with what went wrong
        priced.why = f"{type(error).__name__}: {_short(str(error))}"
    priced.cpu_seconds = time.process_time() - began
    return priced


def _short(text: str) -> str:
    return " ".join(text.split())[:400]


def _price(run: Run, cluster: Cluster, graph: Graph, priced: Priced) -> None:
    import autopar.rules  # noqa: F401
    from autopar.planner.layouts.pricing import pinned_layout

    chosen, wanted = _policy_of(run)[1], policies_of(run)[0]
    priced.standin = f"{run.precision} priced as {chosen}" if chosen != wanted else ""
    found = pinned_layout(lambda _: graph, cluster, layout_of(run), run.sizes.batch)
    priced.seconds, priced.factor = found.seconds, cluster.software.factor
    priced.gib = found.memory_bytes / GIB
    priced.limit_gib, priced.fits = found.limit_bytes / GIB, found.fits
    priced.parts = parts_of(found.plan)


def parts_of(plan: Any) -> dict[str, float]:
    """Where the seconds of a step go, on the group of devices that works longest."""
    groups = [[plan.stages[s].price for s in group] for group in plan.schedule.stages_of_rank]
    busiest = max(groups, key=lambda prices: sum(p.seconds for p in prices))
    parts = {
        name: sum(getattr(p, f"{name}_seconds", 0.0) for p in busiest)
        for name in ("compute", "activation", "parameter", "optimizer")
    }
    return {**parts, "waiting": plan.seconds - sum(parts.values())}


@cache
def order_of(run: Run) -> tuple[object, ...]:
    """A key by which rows of one captured model follow each other."""
    return run.shape.experts, key_of(run), policies_of(run)[0], run.gpu, run.n_gpus


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Runs so that each model is captured once."""
    return sorted(runs, key=order_of)


__all__ = ["Graphs", "Priced", "in_order", "layout_of", "parts_of", "policies_of", "price"]
