"""What one rank does in the slow tests of whole models under the compiler."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from procs.cases import whole
from procs.compiled import check_order, noted, run_inductors_graphs
from procs.habits import difference
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from zoo import ZOO, loss_of

import autopar

PIPED: dict[str, Any] = {"stages": 2, "schedule": "1f1b", "microbatches": 2}
CUTS: dict[str, dict[str, Any]] = {
    "searched": {},
    "again": {"params": {"*": "S0 use"}},
    "stages": PIPED,
}
AGAIN = {"gpt2": ["*h.*"], "llama": ["*layers.*"], "resnet": ["*layers.*"], "t5": ["*block.*"]}
"""By model, what runs again in ``again``."""


def fewer(batch: Any, rows: int) -> Any:
    """The first rows of a batch."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x[:rows] if x.dim() else x, batch)


def compiled_models(names: Sequence[str], cut: str) -> dict[str, float]:
    """By model, how far losses and gradients are from those of the program that is not compiled; of two steps, and
    where it is on one mesh of one with five rows."""
    return {
        name: _compiled(name, CUTS[cut] | ({"recompute": AGAIN[name]} if cut == "again" else {})) for name in names
    }


def _compiled(name: str, options: dict[str, Any]) -> float:
    case = ZOO[name](**({"dropout": 0.1} if name in ("gpt2", "t5") else {}))
    piped = "stages" in options

    def made(**more: Any) -> Any:
        mesh = 2 if piped else init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        torch.manual_seed(3)
        model = copy.deepcopy(case.model)
        return autopar.parallelize(model, mesh, case.args, example_kwargs=case.kwargs, **options, **more)

    modules = made(compile={"backend": run_inductors_graphs, "fullgraph": True}), made()
    if "recompute" in options:
        assert any("segment" in node.meta for node in modules[0].program.module.graph.nodes), "nothing runs again"
    worst = 0.0
    with noted():
        for batch in [case.batch, case.batch2, *([] if piped else [fewer(case.batch, 5)])]:
            results = []
            for module in modules:
                module.zero_grad()
                torch.manual_seed(5)
                args, kwargs = batch
                if piped:
                    loss = module.train_step(*args, **kwargs)
                else:
                    loss = loss_of(module(*args, **kwargs))
                    loss.backward()
                gradients = [whole(p.grad).clone() for p in module.parameters() if p.grad is not None]
                results.append([loss.detach(), *gradients])
            worst = max(worst, *(difference(a, b) for a, b in zip(*results, strict=True)))
    if not piped:
        check_order()
    return worst
