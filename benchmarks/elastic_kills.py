"""Random kills of a job's ranks: ``python benchmarks/elastic_kills.py [--stages 3] [--kills 20] [--ranks 3]``

Ranks of ``examples/train_elastic.py`` under ``autopar.elastic`` are killed at random moments: in a step, in a save,
while they start, plan or load. The job has to come to its end with the losses of one device, and never to go back
behind the last whole checkpoint that there was at a kill. It prints a row for each kill.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_elastic as example

PAUSE, MOST_SECONDS = "0.1", 6.0


def newest(folder: Path) -> int:
    """The last whole checkpoint's step."""
    return max((int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*") if (p / "checkpoint.json").exists()),
               default=0)  # fmt: skip


def run(kills: int, ranks: int, stages: int, epochs: int, seed: int) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as several:
        assert example.started(1, Path(one), "0", str(stages), str(epochs)).wait(600) == 0
        right = {line["step"]: line["loss"] for line in example.losses(Path(one))}
        folder, job, saves = Path(several), None, []
        job = example.started(ranks, folder, PAUSE, str(stages), str(epochs))
        try:
            for kill in range(kills):
                before, limit = len(example.losses(folder)), time.monotonic() + 200 * (draw.random() < 0.8)
                while len(example.losses(folder)) == before and time.monotonic() < limit:
                    time.sleep(0.05)
                time.sleep(draw.uniform(0, MOST_SECONDS))
                there: list[int] = []
                while not there:
                    assert job.poll() is None, f"the job has ended after {kill} kills; give more --epochs"
                    there = example.ranks_of(job.pid)
                saves.append((len(example.losses(folder)), newest(folder)))
                os.kill(draw.choice(there), signal.SIGKILL)
                done, saved = saves[-1]
                print(f"kill {kill + 1:3}: of {len(there)} ranks, after {done} steps, checkpoint {saved}", flush=True)
                gone, limit = set(there), time.monotonic() + 60
                while gone & set(example.ranks_of(job.pid)) and time.monotonic() < limit:
                    time.sleep(0.05)  # the agent ends the others
            assert job.wait(1200) == 0
        finally:
            job.kill()
        lines = example.losses(folder)
    worst = max(abs(line["loss"] - right[line["step"]]) for line in lines)
    for done, saved in saves:
        after = [line["step"] for line in lines[done + 1 :]]  # a step may have ended while it was killed
        assert min(after, default=saved) >= saved, (done, saved, min(after))
    counts = sorted({int(line["ranks"]) for line in lines})
    assert {line["step"] for line in lines} == set(right) and worst < 1e-9
    print(f"{kills} kills, {stages} stages: {len(right)} steps, {len(lines) - len(right)} done again, on {counts} "
          f"ranks; losses differ from one device by {worst:.1e}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"kills": 20, "ranks": 3, "stages": 1, "epochs": 20, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    run(**vars(parser.parse_args()))
