"""A program: the code that every rank runs on its own shards, and its text as readable Python."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch.fx

from autopar.lower.segments import with_segments
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import local_shape


@dataclass(frozen=True)
class Slot:
    """An input of a program: ``kind`` is ``param``, ``buffer``, ``input`` or ``seed``; ``state`` is its placement."""

    kind: str
    name: str
    state: State
    shape: tuple[int, ...]
    dtype: str
    needs_grad: bool = False


@dataclass(frozen=True)
class Program:
    """The rewritten model.

    Attributes:
        module: ``module(*values)`` with one value per slot, tensors local; returns a flat tuple: the model's outputs,
            then the new values of the buffers in ``updates``. Recomputed segments are inlined.
        slots: the positional inputs.
        outputs: placement of each output (None for an output that is no tensor).
        updates: buffers whose new values follow the outputs.
        mesh: axis names and sizes.
        device: the device of tensors that the program creates.
    """

    module: torch.fx.GraphModule
    slots: tuple[Slot, ...]
    outputs: tuple[State | None, ...]
    updates: tuple[str, ...]
    mesh: Mesh
    device: str | torch.device = "cpu"

    @cached_property
    def runnable(self) -> torch.fx.GraphModule:
        """The module to run: recomputed segments are submodules that run again in the backward."""
        return with_segments(self.module)

    @property
    def code(self) -> str:
        """The program as readable Python: one line per op, on the shapes of one rank."""
        return code_of(self)


def code_of(program: Program) -> str:
    """Return the function that every rank runs: a line per operator on local shapes, and per input with placement."""
    lines = [line for line in program.module.code.splitlines() if line.strip()]
    start = next(k for k, line in enumerate(lines) if line.startswith("def forward("))
    body = []
    for line in lines[start + 1 :]:
        line = re.sub(r";\s+(\w+ = )+None\s*(#.*)?$", "", line)
        line = re.sub(r"\bautopar_rules_([a-z]+)_", r"\1.", line)
        line = line.replace("autopar_lower_regather_", "regather.").replace("autopar_lower_segments_", "segments.")
        line = line.replace("autopar_lower_freed_", "freed.")
        body.append(line.replace("autopar_lower_collectives_", "collectives.").replace("torch.ops.", ""))
    mesh = program.mesh.shown(", ")
    freed = "freed, " if any("freed." in line for line in body) else ""
    head = [
        f"# mesh {mesh}; shapes are those of one rank",
        f"from autopar.lower import collectives, {freed}regather, segments",
        "",
        "",
        "def forward(",
    ]
    names = [node.name for node in program.module.graph.nodes if node.op == "placeholder"]
    for name, slot in zip(names, program.slots, strict=True):
        shape = " ".join(map(str, local_shape(slot.shape, slot.state, program.mesh)))
        head.append(f"    {name},  # {slot.dtype}[{shape}] {slot.state.text}  {slot.kind} {slot.name}")
    return "\n".join([*head, "):", *body])
