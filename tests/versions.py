"""A slice of the tests on other versions of torch, each in a virtual environment of its own under ``build/versions``.

    python tests/versions.py [--smoke] [2.11.0 2.14.1 ...]

Without versions it is the oldest and the newest that ``autopar.torch_private`` names. The slice has every repair of
torch, every private name, every rule, and programs of one process and of ranks, compiled ones too. An environment is a
few gigabytes, which are downloaded once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.11.0", "2.14.1")
PACKAGES = (
    "transformers==5.17.0", "accelerate==1.15.0", "spmd_types==0.3.1", "pulp==3.3.2", "networkx", "numpy<2.4", "rich",
    "typer<0.30", "jinja2", "markupsafe", "pyyaml", "pytest", "pytest-xdist",
)  # fmt: skip
"""Beside torch: transformers as GPU images have it, and a numpy that Triton's interpreter takes."""
SOLVERS = {"2.11.0": "highspy==1.15.1"}
"""The newest highspy elsewhere: 1.16 prints a banner that must not be seen."""
SMOKE = ("tests/unit/test_torch_private.py", "tests/procs/test_repairs.py", "tests/unit/test_dropout_triton.py")
SLICE = (
    *SMOKE, "tests/unit/test_rules.py", "tests/unit/test_api.py", "tests/unit/test_compiled_order.py",
    "tests/unit/test_graph_compiler.py", "tests/unit/test_step_programs.py", "tests/unit/test_step_halves.py",
    "tests/unit/test_plain_tensors.py", "tests/world/test_pipelines.py", "tests/world/test_recompute.py",
    "tests/world/test_input_gradients.py", "tests/procs/test_everyday.py", "tests/procs/test_checkpoints.py",
    "tests/procs/test_mixed_precision.py", "tests/procs/test_optimizers_on_ranks.py", "tests/procs/test_compile.py",
)  # fmt: skip


def environment(version: str) -> Path:
    """Make the environment of a version, if it is not there; return its Python."""
    folder = ROOT / "build" / "versions" / version
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        solver = SOLVERS.get(version, "highspy")
        subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={version}", solver, *PACKAGES], check=True)
        (folder / "done").touch()
    return python


def run(version: str, smoke: bool) -> bool:
    """Run the slice, or the smoke; return whether all passed."""
    python = environment(version)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = "import sys, torch; print(f'torch {torch.__version__}, Python {sys.version.split()[0]}')"
    subprocess.run([python, "-c", said], env=env)
    tests: list[str | Path] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal"]
    passed = subprocess.run([*tests, *(SMOKE if smoke else SLICE)], cwd=ROOT, env=env).returncode == 0
    output = ROOT / "build" / f"first_hour_{version}.json"
    hour: list[str | Path] = [python, "benchmarks/first_hour.py", "--ranks", "1", "--device", "cpu", "--quick"]
    return subprocess.run([*hour, "--output", output], cwd=ROOT, env=env).returncode == 0 and passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--smoke", action="store_true", help="private names, repairs, and the first hour's quick rows")
    asked = parser.parse_args()
    failed = [version for version in asked.versions if not run(version, asked.smoke)]
    print(f"failed on torch {', '.join(failed)}" if failed else "passed on all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
