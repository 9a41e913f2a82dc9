"""A pattern of users is one file, which the rest of autopar does without."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.capture import patterns
from autopar.capture.trace import patches
from autopar.capture.trace.contexts import PATCHES, handlers
from autopar.capture.trace.patches import Handler, in_order

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in Path(patterns.__file__).parent.glob("*.py") if path.stem != "__init__")

WITHOUT_EACH = """
import os, pkgutil, sys
import torch
import torch.export

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()

listed = pkgutil.iter_modules
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            pkgutil.iter_modules = lambda *a: [m for m in listed(*a) if m.name != name]
            sys.modules[f"autopar.capture.patterns.{name}"] = None
            from autopar.capture import capture
            assert len(capture(Small(), (torch.randn(2, 4),)).graph.nodes) > 5
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(f"without {name}")
"""


def test_capture_works_without_each_of_them() -> None:
    """The file of a pattern is not there, and whoever imports it by name gets an error."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EACH, *NAMES], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_nothing_outside_imports_one_by_name() -> None:
    for path in (ROOT / "autopar").rglob("*.py"):
        if path.parent.name == "patterns":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(m.startswith("autopar.capture.patterns.") for m in modules), path


def test_handlers_keep_the_order_that_they_ask_for() -> None:
    made = [Handler(name, "", lambda _: None, before=before) for name, before in (("a", ()), ("b", ("a",)), ("c", ()))]
    assert [handler.name for handler in in_order(made)] == ["b", "a", "c"]
    with pytest.raises(AssertionError, match="before each other"):
        in_order([Handler("a", "", lambda _: None, before=("b",)), Handler("b", "", lambda _: None, before=("a",))])


def test_every_patch_and_handler_has_a_name_of_its_own_and_a_reason() -> None:
    patterns.load()
    for entries in ([*PATCHES, *patches.PATCHES.values()], handlers()):
        names = [entry.name for entry in entries]
        assert len(set(names)) == len(names) > 5
        assert all(len(entry.reason) > 15 for entry in entries)
