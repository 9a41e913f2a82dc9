"""Private names of torch and spmd-types are in one module, each says what it is for, none is left over."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from autopar import torch_private

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "autopar" / "torch_private.py"
FOLDERS = ("autopar", "cost_models", "hardware_profiles", "benchmarks", "examples")
PACKAGES = ("torch", "spmd_types")
OPERATORS = "torch.ops."  # names of operators, which say what schema they have, not who may call them


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """``(line, name)`` of what a file imports, reads or replaces that is private to torch or spmd-types.

    Followed are names that imports bind, and attributes of them; what a tensor or module has inside is not.
    """
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    bound[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else ""
                    if any(map(private, alias.name.split("."))):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = node.module.split(".")[0] in PACKAGES
            for alias in node.names:
                if inside or node.module == "autopar.torch_private":
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if inside and any(map(private, f"{node.module}.{alias.name}".split("."))):
                    yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and (name := dotted(node, bound)):
            if not name.startswith(OPERATORS):
                yield node.lineno, name
        elif isinstance(node, ast.Call) and len(node.args) > 1 and (name := dotted(node.args[0], bound)):
            key = node.args[1]  # getattr(torch.x, "_y"), mock.patch.object(torch.x, "_y", ...)
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and private(key.value):
                yield node.lineno, f"{name}.{key.value}"


def dotted(node: ast.AST, bound: dict[str, str]) -> str | None:
    """``torch.x.y`` of an attribute of something imported from torch; None for anything else."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join([bound[node.id] or node.id, *reversed(path)])


def test_no_other_file_has_private_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")) if path != MODULE
        for line, name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    ]  # fmt: skip
    assert not wrong, "take these from autopar.torch_private:\n" + "\n".join(wrong)


def test_the_search_finds_them_all() -> None:
    text = """
import torch, spmd_types._mesh
import torch._ops as ops
from torch.utils import _pytree
from torch.nn.utils import clip_grad
from autopar.torch_private import pytree

def f(x):
    import torch.export._trace
    torch.ops.aten._local_scalar_dense(x)
    x._version, torch.__version__
    getattr(torch.nn, "_reduction"), pytree._private, clip_grad._get_total_norm, torch._C._x
"""
    assert sorted(name for _, name in private_names(ast.parse(text))) == [
        "autopar.torch_private.pytree._private", "spmd_types._mesh", "torch._C", "torch._C._x", "torch._ops",
        "torch.export._trace", "torch.nn._reduction", "torch.nn.utils.clip_grad._get_total_norm", "torch.utils._pytree",
    ]  # fmt: skip


def test_each_says_what_it_is_for() -> None:
    lines = MODULE.read_text(encoding="utf-8").splitlines()
    first, last = (next(i for i, line in enumerate(lines) if f"isort: {word}" in line) for word in ("off", "on"))
    silent = [
        lines[i] for i in range(first, last)
        if lines[i].startswith(("import ", "from ")) and not lines[i - 1].startswith(("#", "from "))
    ]  # fmt: skip
    body = ast.parse("\n".join(lines)).body
    for node, following in zip(body, [*body[1:], None]):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not ast.unparse(node).startswith("__all__"):
            if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
                silent.append(ast.unparse(node))
    assert not silent


def test_none_is_left_over() -> None:
    used = {
        alias.name
        for path in (ROOT / "autopar").rglob("*.py")
        if "autopar.torch_private" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == "autopar.torch_private"
        for alias in node.names
    }
    assert sorted({*torch_private.__all__} - used - {"Replaceable"}) == []


def test_everything_that_is_replaced_is_there() -> None:
    """Names that are looked up when they are needed would be missed only then, on a version that lacks them."""
    every: list[object] = list(vars(torch_private).values())
    every += [item for value in every if isinstance(value, tuple) for item in value]
    replaced = [value for value in every if isinstance(value, torch_private.Replaceable)]
    assert len(replaced) > 30
    for one in replaced:
        assert one.get() is not None, one


def test_a_newer_torch_is_told_of_once() -> None:
    code = "import torch; torch.__version__ = '2.99.0'; import autopar.torch_private, autopar.api"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.count("autopar was tested with torch") == 1, done.stderr
