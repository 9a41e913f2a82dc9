"""Every example runs to its end; each asserts what it shows. (``make demo`` runs the demo.)

One runs as its reader would start it, in an interpreter of its own, and in the sweep all do. Some more run in this
process, whose server of ranks has imported torch already: an interpreter and a server for each were most of their time.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(p.name for p in FOLDER.glob("*.py") if p.name != "demo.py")
AS_SCRIPT = "train_gpt.py"
ONLY_AS_SCRIPTS = (
    "opt_mlp.py", "plan_alexnet.py", "plan_unequal.py", "train_pipeline.py", "train_elastic.py", "train_resnet.py",
    "train_t5.py", "train_unet.py", "continuous_batching.py",
)  # fmt: skip
"""In the sweep: they search for seconds, or train another model in the way that others do."""


@pytest.mark.parametrize("name", [n for n in SCRIPTS if n not in (AS_SCRIPT, *ONLY_AS_SCRIPTS)])
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [str(FOLDER / name)])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert not list(tmp_path.iterdir()), "an example leaves no files behind"


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == AS_SCRIPT else pytest.mark.slow) for n in SCRIPTS])
def test_example_as_a_script(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.strip(), "an example shows something"
    assert not list(tmp_path.iterdir()), "an example leaves no files behind"
