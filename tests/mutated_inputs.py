"""Inputs that somebody got wrong, or made to be wrong, by the hundred: plans, profiles, clusters, configs and options.

Each case is a file or a command line that was right, with one thing changed; the same seed gives the same cases. A
command that gets one ends within 30 seconds of the processor and 2 GB, by itself or with one error, never with a
traceback::

    python tests/mutated_inputs.py 1200        # all of them, and what came of each that was not right

:func:`tried` runs them in one process, because starting the command takes longer than most of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

MOST_SECONDS, MOST_BYTES = 30, 2 * 10**9

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def make():
    return Net(2), (torch.zeros(8, 16), torch.zeros(8, 16))
"""
CLUSTER = {
    "name": "mine", "description": "two kinds",
    "devices": {"own": {
        "memory_bytes": 4e10, "memory_bytes_per_second": 1e12, "launch_seconds": 5e-6, "efficiency": "hopper",
        "peak_flops": {"bfloat16": 4e14, "float32": 1.9e13}, "sources": {"memory_bytes": "its data sheet"},
    }},
    "links": {"ring": {"latency_seconds": 5e-6, "bandwidth_bytes_per_second": 6e9, "curve": "nvlink4"}},
    "node": [
        {"name": "box", "device": "own", "n_devices": 2, "count": 1, "level": [{"link": "ring"}],
         "uplink": {"link": "ib-ndr", "devices": 1}},
        {"name": "box2", "device": "L4", "n_devices": 2, "count": 1, "level": [{"link": "ring"}],
         "uplink": {"link": "ib-ndr", "devices": 1}},
    ],
}  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "float32", "rope_scaling": None, "head_dim": 8,
}  # fmt: skip
LINE = [[1024, 1e-4], [1048576, 1e-3]]
PROFILE = {
    "autopar_profile": 1, "cluster": "local-x2",
    "provenance": {
        "date": "2026-01-31", "torch": "2.13.0", "processor": "some", "threads": 1, "processes": 2, "rounds": 9,
        "load": 0.5, "others": 0.0, "model": "models.py:make", "meshes": [], "left_out": [],
    },
    "corrections": {kind: {"forward": [1e-6, 1.1], "backward": [2e-6, 1.2]} for kind in ("matmul", "other")},
    "overheads": {
        f"{name}_seconds": 1e-5
        for name in ("forward", "backward", "input", "weight", "input_op", "weight_op", "step")
    },
    "accumulate": LINE, "accumulate_new": LINE, "transfers": {"all_gather": LINE, "all_reduce": LINE},
    "optimizers": {"adamw": {"tensor_seconds": 1e-5, "byte_seconds": 1e-9}},
    "ops": {"aten.relu.default(float32[8 32]*)": {
        "kind": "pointwise", "forward_seconds": 1e-5, "backward_seconds": 1e-5, "input_seconds": 1e-5,
        "weight_seconds": 0.0,
    }},
}  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2, 3, 7, 1_000_000, 10**9, 2**31, 2**63, 10**70, -(10**400), 0.5, -1e-9, 1e-320, 1e300, "",
    "x", "²", "٣", "none", "auto", "S0", "I", "*", "data=2", "a" * 5_000, "9" * 5_000, "a" * 5_000 + ".json",
    "a" * 5_000 + ".py:make", "hf:" + "a" * 5_000, "\x1b[2J\x07", "\u202e", "a\0b",
    "../../x", "/dev/zero", "nan", [], {}, [[]], [None], {"a": 1}, ["x"] * 100, [0, 1], {"": ""},
)  # fmt: skip
"""What is put in the place of a value."""
TEXTS = (
    "", "0", "-1", "1", "3", "²", "٣", "1e9", "1000000000", "16777217", "9" * 5_000, "nan", "inf", "-inf", "1e400",
    "0x10", "1_0", " 1", "a", "none", "auto", "a,b", "data=2,data=2", "data=0", "data=1000000000", "data=²",
    "\x1b[2J", "a\nb", "*", "**" * 40, "[", "S0", "up:tensor=n", "*.weight=S0", "../../x", ".", "/dev/null/x",
    "/dev/zero", "local-x1000000", "local-x0", "x" * 5_000, "x" * 5_000 + ".json", "x" * 5_000 + ".py:make",
    "hf:" + "x" * 5_000, "--", "=", ":", "a:b", "é" * 300,
)  # fmt: skip
"""What is given to an option."""


@dataclass(frozen=True)
class Case:
    """One command on one input.

    Attributes:
        words: of the command line.
        files: that it finds, beside those that are always there.
    """

    what: str
    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of a case: ``wrong`` is empty where it ended as it should."""

    case: Case
    code: object
    said: str
    seconds: float
    n_bytes: int
    wrong: str


# --- mutations --------------------------------------------------------------------------------------------------------


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a document but itself."""
    listed = document if isinstance(document, list) else ()
    for key, value in document.items() if isinstance(document, dict) else enumerate(listed):
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(document: Any, dice: random.Random) -> tuple[str, str]:
    """``(what, JSON)``: a document with one change, as text."""
    document = json.loads(json.dumps(document))  # no list of it is another one of it
    *above, key = dice.choice(list(places(document)))
    parent = document
    for step in above:
        parent = parent[step]
    at = ".".join(map(str, (*above, key)))
    how = dice.choice(("value", "value", "value", "value", "gone", "typo", "twice", "listed", "many", "cut", "noise"))
    if how == "gone":
        del parent[key]
    elif how == "typo" and isinstance(parent, dict):
        parent[key[:1] + "q" + key[1:]] = parent.pop(key)
    elif how == "listed":
        parent[key] = [parent[key]]
    elif how == "many" and isinstance(parent[key], list):
        parent[key] = parent[key] * 300
    elif how == "value" or how in ("typo", "many"):
        value = dice.choice(VALUES)
        how, parent[key] = f"{str(value)[:20]!r}", value
    text = json.dumps(document, indent=1)
    if how == "twice":
        written = json.dumps(str(key))
        text = text.replace(f"{written}:", f"{written}: 1, {written}:", 1)
    elif how == "cut":
        text = text[: dice.randrange(len(text))]
    elif how == "noise":
        place = dice.randrange(len(text))
        text = text[:place] + dice.choice("\\\"{}[],:\x00\x1b9eE-.u") + text[place + 1 :]
    return f"{at}: {how}", text


def toml(document: dict[str, Any], path: str = "") -> str:
    """A document as TOML; what TOML has not (null) is left out."""
    lines, tables = [], []
    for key, value in document.items():
        name = json.dumps(key)
        if isinstance(value, dict):
            tables.append(f"[{path}{name}]\n{toml(value, f'{path}{name}.')}")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            tables += [f"[[{path}{name}]]\n{toml(item, f'{path}{name}.')}" for item in value]
        elif value is not None:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def cases(count: int, plans: dict[str, str], seed: int = 0) -> Iterator[Case]:
    """So many cases.

    Args:
        plans: texts of plans of ``models.py:make``, by file name.
    """
    dice = random.Random(seed)
    kinds: tuple[tuple[int, Callable[[random.Random, dict[str, str]], Case]], ...] = (
        (35, _plan), (15, _profile), (20, _cluster), (12, _config), (18, _options),
    )  # fmt: skip
    for number in range(count):
        kind = dice.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]
        yield kind(random.Random(f"{seed} {number}"), plans)


MODEL = ("--model", "models.py:make")


def _plan(dice: random.Random, plans: dict[str, str]) -> Case:
    name = dice.choice(sorted(plans))
    what, text = changed(json.loads(plans[name]), dice)
    words: tuple[str, ...] = dice.choice((
        ("show", "it.json"), ("show", "it.json", *MODEL), ("show", "it.json", *MODEL, "--json"),
        ("show", "it.json", "--trust", "--code"), ("explain", "it.json", "layers.0.up", *MODEL),
        ("explain", "it.json", "stage:1", "--trust"), ("diff", "it.json", name, *MODEL), ("diff", name, "it.json"),
        ("simulate", "it.json", *MODEL), ("report", "it.json", "-o", "page.html", *MODEL), ("check", "it.json", *MODEL),
    ))  # fmt: skip
    return Case(f"{name} {what}", words, {"it.json": text.encode("utf-8", "surrogatepass")})


def _profile(dice: random.Random, plans: dict[str, str]) -> Case:
    what, text = changed(PROFILE, dice)
    words: tuple[str, ...] = dice.choice((
        ("clusters", "it.json"), ("plan", "models.py:make", "-c", "it.json", "--mesh", "data=2"),
        ("plan", "models.py:make", "--profile", "it.json", "--mesh", "data=2"),
    ))  # fmt: skip
    return Case(f"profile {what}", words, {"it.json": text.encode("utf-8", "surrogatepass")})


def _cluster(dice: random.Random, plans: dict[str, str]) -> Case:
    what, text = changed(CLUSTER, dice)
    name = "it.json"
    if dice.random() < 0.5:
        with contextlib.suppress(ValueError):
            name, text = "it.toml", toml(json.loads(text))
    words = dice.choice((("clusters", name), ("plan", "models.py:make", "-c", name, "--mesh", "data=2")))
    return Case(f"cluster {what}", words, {name: text.encode("utf-8", "surrogatepass")})


def _config(dice: random.Random, plans: dict[str, str]) -> Case:
    what, text = changed(CONFIG, dice)
    words = ("inspect", "hf:it.json", "--batch", "2", "--seq", "8")
    return Case(f"config {what}", words, {"it.json": text.encode("utf-8", "surrogatepass")})


PLANNED = ("plan", "models.py:make", "-c", "local-x2", "--mesh", "data=2")
OPTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (PLANNED, ("--mesh", "--cluster", "--pin", "--keep-replicated", "--pin-param", "--pin-input", "--pin-output",
               "--recompute", "--memory-limit", "--optimizer", "--precision", "--expert-load", "--microbatches",
               "--stages", "--schedule", "--cut", "--time-limit", "--top", "--like", "--like-output", "--batch",
               "--seq", "--profile", "-o")),
    (("show", "plan.json", *MODEL), ("--stage", "--model")),
    (("explain", "plan.json", "layers.0.up", *MODEL), ("--instead", "--memory-limit", "--top", "--model")),
    (("simulate", "pipe.json", *MODEL), ("--trace", "--model")),
    (("report", "plan.json", *MODEL), ("--output", "--model")),
    (("clusters",), ("",)), (("show",), ("",)), (("inspect",), ("",)), (("diff", "plan.json"), ("",)),
    (("explain", "plan.json", "--trust"), ("",)),
    (("verify", "models.py:make"), ("--mesh", "--cluster", "--plan", "--device", "--batch")),
    (("run", "absent.json"), ("--steps", "--lr", "--timeout", "--device", "--trace", "--model")),
    (("profile", "models.py:make", "-o", "absent/x.json"),
     ("--seconds", "--processes", "--most-ops", "--timeout", "--device", "--microbatches", "--mesh", "--cluster")),
)  # fmt: skip


def _options(dice: random.Random, plans: dict[str, str]) -> Case:
    before, names = dice.choice(OPTIONS)
    name, text = dice.choice(names), dice.choice(TEXTS)
    words = (*before, *((name, text) if name else (text,)))
    return Case(f"{before[0]} {name} {text[:20]!r}", words)


# --- trying them ------------------------------------------------------------------------------------------------------


class TooLate(BaseException):
    """A command took longer than it may."""


def _stop(number: int, frame: Any) -> None:
    raise TooLate


def tried(case: Case) -> Outcome:
    """Run a case in this process and folder."""
    from autopar.cli import main

    for name, text in case.files.items():
        Path(name).write_bytes(text)
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    wrong = ""
    Path("/proc/self/clear_refs").write_text("5")  # the most memory from now on
    before, start = _memory("VmRSS"), time.process_time()
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        with mock.patch.object(sys, "argv", ["autopar", *case.words]):
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
    except SystemExit as end:
        code = end.code or 0
    except TooLate:
        wrong = "more than 30 s\n" + traceback.format_exc()
    except BaseException:
        wrong = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds, n_bytes = time.process_time() - start, _memory("VmHWM") - before
    said = err.getvalue()
    if not wrong and "Traceback" in said + out.getvalue():
        wrong = "a traceback is printed"
    if not wrong and n_bytes > MOST_BYTES:
        wrong = f"{n_bytes / 1e9:.1f} GB"
    if not wrong and (code not in (0, 1, 2) or (code == 2 and not said.strip())):
        wrong = f"exit code {code}, which says {said!r}"
    if not wrong and not (said + out.getvalue()).replace("\n", "").isprintable():
        wrong = "a character that steers the terminal is printed"
    for name in case.files:
        Path(name).unlink()
    return Outcome(case, code, said, seconds, n_bytes, wrong)


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def made_plans() -> dict[str, str]:
    """Plans of ``models.py:make``, which is written here: on a mesh, and in stages."""
    Path("models.py").write_text(MODELS)
    commands = {
        "plan.json": (*PLANNED, "--pin-input", "x=S0", "--memory-limit", "1GiB"),
        "pipe.json": ("plan", "models.py:make", "-c", "local-x2", "--stages", "2", "--microbatches", "4", "--schedule",
                      "1f1b"),
    }  # fmt: skip
    for name, words in commands.items():
        outcome = tried(Case("", (*words, "-o", name)))
        assert not outcome.wrong and outcome.code == 0, outcome
    return {name: Path(name).read_text() for name in commands}


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """In here this process gets some gigabytes of addresses more than it has, so that none fills the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + 3 * MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main(count: int, seed: int) -> int:
    """Try so many, tell what was wrong, and how long all took."""
    codes: Counter[object] = Counter()
    slowest: list[Outcome] = []
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), little_memory():
        for number, case in enumerate(cases(count, made_plans(), seed)):
            outcome = tried(case)
            codes[outcome.code] += 1
            slowest = sorted([*slowest, outcome], key=lambda o: -o.seconds)[:5]
            if outcome.wrong:
                wrong += 1
                print(f"{number}: {case.what}: {' '.join(case.words)[:120]}\n{outcome.wrong[-1500:]}", flush=True)
    for outcome in slowest:
        print(f"{outcome.seconds:.1f} s, {outcome.n_bytes / 1e6:.0f} MB: {outcome.case.what[:100]}")
    print(f"{count} inputs, {wrong} of them wrong; exit codes {dict(codes)}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(int((*sys.argv, 1200)[1]), int((*sys.argv, 0, 0)[2])))
