"""Own parsers and validators of trainers and engines on what autopar exports; README.md beside this file says how.

    python tests/targets/own_code/run.py [torchtitan megatron vllm ...]
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ENVIRONMENTS = ROOT / ".venvs"
EXPORTS = ROOT / "build" / "targets"


def environment(folder: Path) -> Path:
    """Make the environment of a trainer, if it is not there as its requirements are now; return its Python."""
    wanted = (folder / "requirements.txt").read_bytes()
    alone = folder / "alone.txt"
    wanted += alone.read_bytes() if alone.exists() else b""
    version = (folder / "python").read_text().strip() if (folder / "python").exists() else ""
    home = ENVIRONMENTS / folder.name
    stamp = home / "made-from"
    key = hashlib.sha256(wanted + version.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != key:
        maker = f"python{version}" if version else sys.executable
        if shutil.which(maker) is None:
            raise SystemExit(f"{folder.name}: needs {maker}, which is not there; install it")
        subprocess.run([maker, "-m", "venv", "--clear", home], check=True)
        python = home / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", folder / "requirements.txt"], check=True)
        if alone.exists():
            subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", alone], check=True)
        stamp.write_text(key)
    return home / "bin" / "python"


def check(folder: Path) -> bool:
    """Export a trainer's cases and let its own code read them; return whether it accepts all."""
    out = EXPORTS / folder.name
    shutil.rmtree(out, ignore_errors=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    serves = "plans" in tomllib.loads((folder / "cases.toml").read_text())
    exporter = "export_serving.py" if serves else "export_all.py"
    exported = subprocess.run([sys.executable, HERE / exporter, folder.name, out], env=env)
    if exported.returncode:
        return False
    cases = sorted(path for path in out.iterdir() if path.is_dir())
    alone = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    return subprocess.run([environment(folder), folder / "check.py", *cases], env=alone).returncode == 0


def main() -> int:
    """Check the trainers that are named, or all; return the exit code."""
    names = sys.argv[1:] or sorted(file.parent.name for file in HERE.glob("*/check.py"))
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        if not check(HERE / name):
            failed.append(name)
    print(f"refused: {', '.join(failed)}" if failed else f"accepted by all: {', '.join(names)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
