"""No two modules, and no two public classes, of one name for different things."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("autopar", "cost_models", "hardware_profiles")

SAME_THING = {"plan", "simulate", "stages", "verify", "layouts", "clusters", "errors", "regather"}
"""Module names that stand twice for one thing: a command and what it runs or shows, the words of a thing on a lower
floor and what is done with it."""


def modules() -> dict[str, list[str]]:
    found = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.stem.startswith("__"):
                found[path.stem].append(path.relative_to(ROOT).as_posix())
    return found


def classes() -> dict[str, list[str]]:
    found = defaultdict(list)
    for paths in modules().values():
        for path in paths:
            for name in re.findall(r"^class ([A-Za-z]\w*)", (ROOT / path).read_text(encoding="utf-8"), re.M):
                found[name].append(path)
    return found


def test_modules_have_names_of_their_own() -> None:
    twice = {name: paths for name, paths in modules().items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in SAME_THING} == {}
    assert SAME_THING - twice.keys() == set(), "these stand once: take them off the list"


def test_classes_have_names_of_their_own() -> None:
    assert {name: paths for name, paths in classes().items() if len(paths) > 1} == {}


PACKAGES = sorted({path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_map_of_a_package_has_every_module(package: Path) -> None:
    """The docstring of each package says what stands in which of its modules, and names no other."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = set(re.findall(r":mod:`\.(\w+)`", text)) | set(re.findall(r"``(\w+)\.py``", text))
    files = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert named == files | folders
