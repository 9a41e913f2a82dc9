"""A program as Python that a person can read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from autopar.placements import format_state, local_shape, mesh_text

if TYPE_CHECKING:
    from autopar.lower.emit import Program


def code_of(program: Program) -> str:
    """The function that every rank runs: one line per op on local shapes, its inputs one per line with placement."""
    lines = [line for line in program.module.code.splitlines() if line.strip()]
    start = next(k for k, line in enumerate(lines) if line.startswith("def forward("))
    body = []
    for line in lines[start + 1 :]:
        line = re.sub(r";\s+(\w+ = )+None\s*(#.*)?$", "", line)
        line = re.sub(r"\bautopar_rules_([a-z]+)_", r"\1.", line)
        line = line.replace("autopar_lower_regather_", "regather.").replace("autopar_lower_segments_", "segments.")
        body.append(line.replace("autopar_lower_collectives_", "collectives.").replace("torch.ops.", ""))
    mesh = mesh_text(program.mesh, ", ")
    head = [
        f"# mesh {mesh}; shapes are those of one rank",
        "from autopar.lower import collectives, regather, segments",
        "",
        "",
        "def forward(",
    ]
    names = [node.name for node in program.module.graph.nodes if node.op == "placeholder"]
    for name, slot in zip(names, program.slots, strict=True):
        shape = " ".join(map(str, local_shape(slot.shape, slot.state, program.mesh)))
        head.append(f"    {name},  # {slot.dtype}[{shape}] {format_state(slot.state)}  {slot.kind} {slot.name}")
    return "\n".join([*head, "):", *body])
