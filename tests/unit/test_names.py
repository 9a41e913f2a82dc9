"""No two public classes have one name, package docstrings list every module, references name things that exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("autopar", "cost_models", "hardware_profiles")

def classes() -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(encoding="utf-8"), re.M):
            found[name].append(path.relative_to(ROOT).as_posix())
    return found


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


def named_things() -> tuple[set[str], set[str]]:
    """Dotted names of all modules, and of what stands in them: functions, classes, their members, imports, numbers."""
    modules, things = set(), set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules.add(module)
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            inside = statement.body if isinstance(statement, ast.ClassDef) else []
            names = names_in(statement)
            things |= {f"{module}.{name}" for name in names}
            things |= {f"{module}.{name}.{member}" for name in names for part in inside for member in names_in(part)}
    return modules, things


def names_in(statement: ast.stmt) -> set[str]:
    """What a statement gives names to."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return {alias.asname or alias.name for alias in aliases}
        case ast.Assign() | ast.AnnAssign() | ast.If() | ast.Try():
            return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return set()


REFERENCE = r":(mod|func|class|meth|attr|data|exc):`~?((?:\.|autopar\.|cost_models\.|hardware_profiles\.)[\w.]+)`"
"""To something in here, by its whole name or the end of it."""


def test_references_in_docstrings_name_what_there_is() -> None:
    """A module that was moved, or a function that was renamed, is named as it is now."""
    modules, things = named_things()
    offered = {f"autopar.{name}" for name in autopar.__all__}
    gone = []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        for kind, name in re.findall(REFERENCE, text):
            known = modules if kind == "mod" else things | offered
            if name not in known and not (name.startswith(".") and any(other.endswith(name) for other in known)):
                gone.append(f"{path.relative_to(ROOT).as_posix()}: {name}")
    assert gone == []
