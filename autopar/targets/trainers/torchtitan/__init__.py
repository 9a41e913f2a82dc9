"""TorchTitan 0.3: its config functions and command lines of overrides, and the TOML of releases before."""

from __future__ import annotations

from autopar.targets.target import Target
from autopar.targets.trainers.torchtitan.layouts import WORDS, refuses
from autopar.targets.trainers.torchtitan.reading import read, reads
from autopar.targets.trainers.torchtitan.writing import write

TARGET = Target(
    name="torchtitan",
    title="TorchTitan 0.3",
    software="torchtitan",
    words=WORDS,
    refuses=refuses,
    write=write,
    reads=reads,
    read=read,
    environment={"OMP_NUM_THREADS": "1"},
)
