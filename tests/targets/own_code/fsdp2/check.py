"""Usage: check.py FOLDER ...: train folders on one process and on those they are for; exit code 1 if losses differ.

Four steps of AdamW in float64 agree to 1e-10, in float32 to 1e-6. Run by a Python without autopar.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).resolve().parent / "run_folder.py"
MOST = {"float64": 1e-10, "float32": 1e-6}


def losses(folder: Path, n: int, dtype: str) -> list[float]:
    """Return the losses of four steps on so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(n), "--master-addr", "127.0.0.1"]
    launcher = [*launcher, "--master-port", port] if n > 1 else []
    full = ["--float64"] if dtype == "float64" else []
    words = ["--steps", "4", "--device", "cpu", "--dtype", dtype, "--losses", "losses.json"]
    ran = subprocess.run(
        [sys.executable, *launcher, str(RUN), ".", f"counts{n}.json", *full, "--", *words], cwd=folder,
        capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"{folder.name}: {n} processes: {ran.stderr[-3000:]}")
    return json.loads((folder / "losses.json").read_text())


def main(folders: list[str]) -> int:
    """Check folders."""
    assert importlib.util.find_spec("autopar") is None, "autopar is there: this environment proves nothing"
    failed = 0
    for folder in map(Path, folders):
        devices = json.loads((folder / "case.json").read_text())["devices"]
        for dtype, most in MOST.items():
            alone, ours = losses(folder, 1, dtype), losses(folder, devices, dtype)
            worst = max(abs(a - b) for a, b in zip(alone, ours, strict=True))
            failed += worst > most
            print(
                f"{folder.name}: {dtype}: {devices} processes, losses differ by {worst:.1e} of {most:.0e}", flush=True
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
