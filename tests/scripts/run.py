"""Runs other people's scripts as they are and, with their diffs, on two ranks: ``run.py FOLDER [NAME ...]``.

``FOLDER`` has a checkout of each repository of ``table.py`` under its name (``nanoGPT``, ``minGPT``, ``examples``), at
the commit that stands there. Every number that a script reads of a tensor must be the same in both: 1e-5 relative, in
float32. The exit status says whether all were. With ``--float64`` scripts compute in that: 1e-10, which tells rounding
from what is wrong. Those of Hugging Face read their data with ``datasets``:
``pip install -c constraints.txt datasets``; makemore needs ``tensorboard``, x-transformers ``einx``, ``einops``,
``loguru`` and ``torch-einops-utils``, cleanrl ``tensorboard``, ``gymnasium`` and ``tyro``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from safetensors.torch import load_file  # noqa: E402

from scripts.started import WIDE  # noqa: E402
from scripts.table import SCRIPTS, Script  # noqa: E402

TOLERANCE = 1e-5
WIDE_TOLERANCE = 1e-10
SECONDS = 400


class WrongError(Exception):
    """A script that does not do on two ranks what it does on one."""


def prepared(name: str, script: Script, repositories: Path, place: Path, *, changed: bool) -> Path:
    """A copy of the script's repository with data, and with its diff if ``changed``; the folder to run in."""
    repository = script.source.split("@")[0].split("/")[1]
    within = Path(script.path)
    top = repositories / repository
    if not (top / within).is_file():
        raise WrongError(f"{top / within} is not there: check out {script.source} as {top}")
    part = within.parts[0] if repository == "examples" else ""
    shutil.copytree(top / part, place / part, ignore=shutil.ignore_patterns(".git", "assets"))
    folder = place / within.parent
    script.data(folder)
    diffs = [HERE / "today" / f"{script.today}.diff"] if script.today else []
    for diff in [*diffs, HERE / "diffs" / f"{script.diff or name}.diff"] if changed else diffs:
        subprocess.run(["patch", "-s", "-p1", "-d", str(place), "-i", str(diff)], check=True)
    return folder


def numbers_of(script: Script, folder: Path, args: tuple[str, ...], ranks: int, cut: str) -> list[list[float]]:
    """What each rank has read; ``ranks`` 0 is the script by itself, without torchrun."""
    out = folder / "numbers"
    searched = [str(folder), str(HERE / script.stubs), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    if script.path.startswith("projects/"):
        searched.insert(0, str(folder.parents[1]))
    if script.source.startswith("vwxyzjn/cleanrl"):
        searched.insert(0, str(folder.parent))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(searched), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    if script.wide:
        environment[WIDE] = "1"
    start = [sys.executable]
    if ranks:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    start += [str(HERE / "started.py"), str(out), script.reads, cut]
    command = [*start, Path(script.path).name, *script.args, *args]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode and not (script.fails_at_end and not ranks):
        raise WrongError("\n".join((done.stdout + done.stderr).splitlines()[-60:]))
    kept = [line for line in done.stdout.splitlines() if line.startswith(f"cut {cut}")]
    if kept:
        print(f"    {kept[0]}")
    norms: list[float] = []
    if script.weights:
        norms = [float(value.double().norm()) for _, value in sorted(load_file(folder / script.weights).items())]
    read = [Path(f"{out}.{rank}").read_text().split() for rank in range(max(ranks, 1))]
    return [[*map(float, lines), *norms] for lines in read]


def check(name: str, script: Script, repositories: Path) -> None:
    """Every run of a script under every cut.

    Raises:
        WrongError: with what is different, or with the end of what the script said.
    """
    for kind, args in script.runs:
        with tempfile.TemporaryDirectory() as place:
            folder = prepared(name, script, repositories, Path(place) / "one", changed=kind == "random")
            expected = numbers_of(script, folder, args, int(kind == "random"), "-")[0]
        if len(expected) < 4:
            raise WrongError(f"only {len(expected)} numbers were read")
        for cut in script.cuts:
            with tempfile.TemporaryDirectory() as place:
                folder = prepared(name, script, repositories, Path(place) / "two", changed=True)
                ranks = numbers_of(script, folder, args, 2, cut)
            for rank, given in enumerate(ranks):
                count = min(len(given), len(expected)) if script.fails_at_end else len(expected)
                far = [abs(a - b) / max(abs(a), 1e-6) for a, b in zip(expected[:count], given[:count], strict=True)]
                where = max(range(count), key=far.__getitem__)
                shown = f"{name} {kind} cut {cut} rank {rank}: {count} numbers, worst {far[where]:.1e} at {where}"
                print(f"    {shown} ({expected[where]:.6g}, {given[where]:.6g})", flush=True)
                if far[where] > (WIDE_TOLERANCE if script.wide else TOLERANCE):
                    raise WrongError(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="with the repositories")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SCRIPTS)}; all by default")
    parser.add_argument("--float64", action="store_true", help="compute in it: is a difference rounding?")
    given = parser.parse_args()
    wrong = []
    for name in given.names or SCRIPTS:
        try:
            script = replace(SCRIPTS[name], wide=SCRIPTS[name].wide or given.float64)
            check(name, script, given.folder.resolve())
            print(f"ok    {name}", flush=True)
        except (WrongError, ValueError, subprocess.SubprocessError) as error:
            wrong.append(name)
            print(f"WRONG {name}: {error}", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
