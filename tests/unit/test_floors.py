"""Imports go to the same floor or a lower one, and never in a circle: those inside of functions and for types too."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {
    "hardware_profiles": 0, "cost_models": 1, "autopar.errors": 2, "autopar.torch_private": 2, "autopar.allocations": 2,
    "autopar.progress": 2, "autopar.garbage_collection": 2, "autopar.words": 2, "autopar.plans": 2, "autopar.rules": 3,
    "autopar.plans.regather": 3, "autopar.capture": 4, "autopar.planner": 5, "autopar.planner.planning": 6,
    "autopar.lower": 6, "autopar.runtime": 7, "autopar.certificate": 8, "autopar.comparison": 8, "autopar.planfile": 8,
    "autopar.frontends": 8, "autopar.report": 8, "autopar.profiling": 8, "autopar.launching": 8, "autopar.targets": 8,
    "autopar.parallelizing": 9, "autopar.api": 9, "autopar.plan_calls": 9, "autopar.cli": 9, "autopar.elastic": 9,
    "autopar.__main__": 9, "autopar.integrations": 9, "autopar.mcp_server": 9, "autopar.inference": 9,
    "autopar.serving": 9, "autopar.serving.records": 2,
}  # fmt: skip


FOLDERS = ("autopar", "cost_models", "hardware_profiles")


def name_of(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def imported(text: str, name: str, is_package: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """``(module, names)`` of every import in a file, wherever it stands; relative ones by their full name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            yield ".".join([*above, *([node.module] if node.module else [])]), tuple(a.name for a in node.names)


def edges(known: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """From each module to those that it imports: to the submodule that is named, not to the package that it is in."""
    for name, path in known.items():
        for base, names in imported(path.read_text(encoding="utf-8"), name, path.name == "__init__.py"):
            for target in {f"{base}.{n}" if f"{base}.{n}" in known else base for n in names} or {base}:
                if target in known and target != name:
                    yield name, target


def floor_of(module: str) -> int | None:
    if module == "autopar":
        return FLOORS["autopar.api"]  # which it offers, lazily
    floors = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    return FLOORS[max(floors, key=len)] if floors else None


def test_every_module_stands_on_a_floor() -> None:
    assert [name for name in modules() if floor_of(name) is None] == []


def test_imports_go_down() -> None:
    wrong = []
    for name, target in all_edges():
        here, there = floor_of(name), floor_of(target)
        assert here is not None and there is not None
        if there > here:
            wrong.append(f"{name} (floor {here}) imports {target} (floor {there})")
    assert not wrong, "\n".join(sorted(set(wrong)))


LAYERS = (
    "ranks", "parameters", "repairs", "gradients", "optimizers", "batches", "stages", "variants", "one_mesh",
    "pipelines", "checkpoints", "as_module",
)  # fmt: skip
"""Rooms of the runtime, the lowest first: ranks; what is stored; programs of a stage; the step; the module."""


def room_of(module: str) -> str:
    """The room of the runtime that a module is in; empty if it is in none."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["autopar", "runtime"] and len(parts) > 2 else ""


def test_rooms_of_the_runtime_import_lower_ones_alone() -> None:
    """Also inside of functions and for types; what each room's ``__init__`` would import counts, too."""
    assert {*LAYERS} == {room_of(name) for name in modules()} - {""}
    wrong = []
    for name, target in all_edges():
        here, there = room_of(name), room_of(target)
        if here and there and LAYERS.index(there) > LAYERS.index(here):
            wrong.append(f"{name} imports {target}, which is above it")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_steps_of_the_search_over_stages_import_earlier_ones_alone() -> None:
    """And a step knows nothing of what drives the search."""
    inter_op = "autopar.planner.inter_op"
    steps = [f"{inter_op}.{step}" for step in ("simulating", "estimating", "exact")]
    driving = ("per_microbatch_count", "single_stage", "incumbents", "stage_search")
    drivers = tuple(f"{inter_op}.{name}" for name in driving)
    step_of = {name: k for name in modules() for k, step in enumerate(steps) if name.startswith(step)}
    assert set(step_of.values()) == {0, 1, 2} and all(name in modules() for name in drivers)
    assert [(a, b) for a, b in all_edges() if a in step_of and (step_of.get(b, -1) > step_of[a] or b in drivers)] == []


@cache
def all_edges() -> list[tuple[str, str]]:
    return list(edges(modules()))


def circles(links: Iterable[tuple[str, str]]) -> list[list[str]]:
    graph = nx.DiGraph(links)
    return [sorted(ring) for ring in nx.strongly_connected_components(graph) if len(ring) > 1]


def test_no_circles() -> None:
    assert circles(all_edges()) == []


def test_the_search_sees_all_imports(tmp_path: Path) -> None:
    """Inside of functions, under ``TYPE_CHECKING``, relative."""
    files = {
        "pack/__init__.py": "",
        "pack/a.py": "def f():\n    from pack import b",
        "pack/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .inner.c import C",
        "pack/inner/__init__.py": "from . import c",
        "pack/inner/c.py": "from ..a import f",
    }
    known = {}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        known[name_of(path, tmp_path)] = path
    assert circles(edges(known)) == [["pack.a", "pack.b", "pack.inner.c"]]
    assert ("pack.inner", "pack.inner.c") in edges(known)
