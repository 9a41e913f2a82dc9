"""Counts of how far a reader goes through the tree: the way of a model through ``parallelize`` and ``autopar plan``.

A profiler notes the order in which modules of the tree are first entered (a function of theirs is called). The model is
the GPT of ``examples/train_gpt.py``, on one rank, and planned for ``dgx-h100`` with a search over stages. A *part* is a
folder or module right below ``autopar``, or one of the two other packages.

=========== ==========================================================================================================
rooms       modules that are first entered from another part
climbs      steps of that order, among modules on the floors of the rules and above, that go to a part on a higher floor
            (floors: ``tests/unit/test_floors.py``)
returns     entries of that order into a part that was left before
=========== ==========================================================================================================

A reading by hand of 309bad0 counted 63 rooms, 19 climbs and 57 returns for ``parallelize``, 54, 15 and 65 for ``plan``;
this script 73, 19, 55 and 63, 17, 72 a few days later. Other counts are of the text of the three packages and of the
documentation: ``python benchmarks/rooms.py [--json] [--text]``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import pkgutil
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "examples")]

import train_gpt as gpt  # noqa: E402
from unit.test_docstrings import begins_without_a_verb, is_property  # noqa: E402
from unit.test_floors import floor_of  # noqa: E402

import autopar  # noqa: E402
from autopar.cli import start  # noqa: E402

PACKAGES = ("autopar", "cost_models", "hardware_profiles")
GENERATED = ("accuracy.md", "cli.md", "errors.md", "zoo.md")
"""Pages of the documentation that a command writes."""
MODEL = """
import torch
from train_gpt import BATCH, GPT, TOKENS, loss_of


class Model(GPT):
    def forward(self, ids, labels):
        return loss_of(super().forward(ids), labels)


def make():
    return Model(64), (torch.zeros(BATCH, TOKENS, dtype=torch.long),) * 2
"""


def part_of(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("autopar") else 1])


def first_entries(call: Callable[[], object]) -> list[tuple[str, str | None]]:
    """Modules of the tree in the order in which ``call`` enters them, each with the module that called it."""
    names: dict[str, str | None] = {}
    entered: dict[str, str | None] = {}

    def module_of(file: str) -> str | None:
        if file not in names:
            parts = Path(file).with_suffix("").parts[len(ROOT.parts) :] if file.startswith(f"{ROOT}/") else ()
            names[file] = ".".join(parts).removesuffix(".__init__") if parts and parts[0] in PACKAGES else None
        return names[file]

    def profile(frame: Any, event: str, _argument: object) -> None:
        module = module_of(frame.f_code.co_filename)
        if event != "call" or module is None or module in entered or not frame.f_code.co_flags & 2:
            return  # a body of a module or class is no function
        caller = frame.f_back
        while caller is not None and module_of(caller.f_code.co_filename) is None:
            caller = caller.f_back
        entered[module] = module_of(caller.f_code.co_filename) if caller is not None else None

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return list(entered.items())


def way(entries: list[tuple[str, str | None]]) -> dict[str, int]:
    rooms = [module for module, caller in entries if caller is None or part_of(caller) != part_of(module)]
    left: set[str] = set()
    returns, last = 0, ""
    for module, _ in entries:
        if (part := part_of(module)) != last:
            returns += part in left
            left.add(last)
            last = part
    floors = [floor for module, _ in entries if (floor := floor_of(module) or 0) >= 3]
    climbs = sum(a < b for a, b in itertools.pairwise(floors))
    return {"modules": len(entries), "rooms": len(rooms), "climbs": climbs, "returns": returns}


def ways() -> dict[str, dict[str, int]]:
    """The counts of both calls; all modules are imported before, so that imports are no entries."""
    for package in PACKAGES:
        for found in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if not found.name.endswith(("__main__", "_triton")):
                importlib.import_module(found.name)
    ids = torch.randint(0, 64, (gpt.BATCH, gpt.TOKENS), generator=torch.Generator().manual_seed(0))

    def parallelize() -> None:
        autopar.parallelize(gpt.GPT(64), 1, ids, loss_fn=gpt.loss_of, targets=ids.roll(-1, 1))
        dist.destroy_process_group()

    def plan() -> None:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
            (Path(folder) / "model.py").write_text(MODEL)
            sys.argv = ["autopar", "plan", f"{folder}/model.py:make", "--cluster", "dgx-h100", "-o", f"{folder}/p.json"]
            try:
                start()
            except SystemExit as ended:
                assert not ended.code, ended.code

    return {call.__name__: way(first_entries(call)) for call in (parallelize, plan)}


def trees() -> Iterator[tuple[Path, str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield path, text, ast.parse(text)


def text_counts() -> dict[str, int]:
    """Counts of the text of the three packages, and words of the documentation that no command writes."""
    counts = dict.fromkeys(("files", "lines", "Any", "function modes", "dispatch modes", "context variables",
                            "mock.patch", "contexts of tracing", "docstrings without a verb"), 0)  # fmt: skip
    ours: set[str] = set()
    for path, text, tree in trees():
        counts["files"] += 1
        counts["lines"] += text.count("\n")
        counts["Any"] += len(re.findall(r"\bAny\b", text))
        counts["context variables"] += len(re.findall(r"\bContextVar\(|\bContextVar\[[^\n]*\]\(", text))
        counts["mock.patch"] += len(re.findall(r"\bmock\.patch|\bpatch\.(?:object|dict|multiple)\(", text))
        ours |= set(re.findall(r"\b_autopar_\w+", text))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = " ".join(map(ast.unparse, node.bases))
                counts["function modes"] += "TorchFunctionMode" in bases
                counts["dispatch modes"] += "TorchDispatchMode" in bases
            elif isinstance(node, ast.FunctionDef) and not is_property(node):
                counts["docstrings without a verb"] += begins_without_a_verb(ast.get_docstring(node))
            elif isinstance(node, ast.With) and path.name == "tracing.py":
                counts["contexts of tracing"] += len(node.items)
        if path.name == "tracing.py":
            counts["contexts of tracing"] += text.count("enter_context(")
        counts["contexts of tracing"] += len(re.findall(r"^    Patch\(", text, re.MULTILINE))  # of the table
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst"), ROOT / "README.md"]
    written = [p for p in pages if p.name not in GENERATED]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in written)
    return {**counts, "_autopar_ names": len(ours), "words of docs": words}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--text", action="store_true", help="only the counts of text, which take seconds")
    options = parser.parse_args()
    found: dict[str, dict[str, int]] = {} if options.text else ways()
    found["text"] = text_counts()
    if options.json:
        print(json.dumps(found))
        return
    for title, counts in found.items():
        print(title)
        for name, count in counts.items():
            print(f"  {name:28} {count:8,}")


if __name__ == "__main__":
    main()
