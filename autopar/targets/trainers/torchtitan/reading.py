"""Files of torchtitan that are priced: commands, config functions, and TOML of the releases before 0.3."""

from __future__ import annotations

import re

from autopar.targets.target import Config, Source
from autopar.targets.trainers.torchtitan.commands import of_command
from autopar.targets.trainers.torchtitan.meaning import config_of
from autopar.targets.trainers.torchtitan.texts import of_python, of_toml

SECTIONS = re.compile(r"^\[(parallelism|training|activation_checkpoint|job|experimental)\]", re.MULTILINE)
PROGRAM = re.compile(r"torchtitan[./]train|run_train\.sh|run_llama_train\.sh")
FIELDS = re.compile(r"--(parallelism|training|activation[-_]checkpoint)\.\w")


def reads(source: Source) -> bool:
    """Return whether a file is one of torchtitan: a job config in TOML, a config function, or a command."""
    suffix, text = source.path.suffix.lower(), source.text
    if suffix == ".toml":
        return len(set(SECTIONS.findall(text))) >= 2
    if suffix == ".py":
        return "torchtitan" in text and ("ParallelismConfig(" in text or "TrainingConfig(" in text)
    if suffix in (".sh", ".bash", ".txt", ".slurm", ".sbatch", ""):
        return bool(PROGRAM.search(text) or FIELDS.search(text))
    return False


def read(source: Source) -> Config:
    """Read a file of torchtitan.

    Raises:
        ConfigError: with the field that is unknown or cannot be honoured.
    """
    of = {".toml": of_toml, ".py": of_python}.get(source.path.suffix.lower(), of_command)
    return config_of(source, of(source))
