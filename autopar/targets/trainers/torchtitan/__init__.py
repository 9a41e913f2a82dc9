"""TorchTitan 0.3: its config functions and command lines of overrides, and the TOML of releases before.

================ ======================================================================================================
:mod:`.commands` fields out of command lines and the shell scripts that hold them; nothing is run
:mod:`.fields`   the fields of torchtitan's releases with their defaults, its own configs, and the sizes of its
                 models, as data
:mod:`.layouts`  what torchtitan 0.3.0 can run, from its code: words of layouts, and what it refuses of them
:mod:`.meaning`  what torchtitan's fields mean in the words of layouts
:mod:`.models`   the models that torchtitan has code for, with the sizes of a Hugging Face config
:mod:`.reading`  files of torchtitan that are priced: commands, config functions, and TOML of the releases before 0.3
:mod:`.texts`    fields out of TOML, and out of config functions, which are read as text and never run
:mod:`.writing`  the files that run a plan under torchtitan: a module with a config function, and what the environment
                 needs
================ ======================================================================================================
"""

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
    environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},  # as run_train.sh
    offloads=("parameters",),
)
