"""Whole programs on a mesh of 2x2, many ranks in one process on the device, beside one device."""

from __future__ import annotations

import torch

from gpu_rows.models import make
from gpu_rows.table import Result

LIMIT = 1e-9


def program(name: str, device: str, quick: bool, layers: int, random_plans: int) -> Result:
    """The best plan and random plans of a model in float64: loss, gradients and weights after two steps of SGD.

    Widths are those of the model; ``layers`` says how many of its layers, so that all ranks fit one device.
    """
    import autopar
    from autopar.comparison import program_vs_eager as v
    from autopar.words.meshes import Mesh
    from hardware_profiles import load_cluster

    model, batch = make(name, device, quick, torch.float64, layers=layers)
    if not quick:
        batch = {k: x[:2, :256] if x.ndim == 2 else x[:4] for k, x in batch.items()}
    captured = autopar.capture(model, batch)
    mesh = Mesh.of(data=2, tensor=2)
    cluster = load_cluster("local-x4" if device == "cpu" else "dgx-h100")
    rows = v.verify(captured, model, (), batch, mesh, cluster, random_plans=random_plans)
    worst = {row.name: row.worst for row in rows if "eager" not in row.name}
    noise = {row.name: row.rounding for row in rows if row.shows_nothing}
    said = ", ".join(f"{row.name} {row.worst:.0e}" for row in rows)
    if noise:
        said += f"; one device differs from itself by {max(noise.values()):.0e} with the last digits of weights moved"
    ok = all(error <= LIMIT or name in noise for name, error in worst.items())
    return Result(f"{layers} layers: {said} from one device", ok, {"rows": {r.name: r.worst for r in rows}})


__all__ = ["program"]
