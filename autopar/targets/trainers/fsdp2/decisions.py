"""From a plan to tables: what ``parallelize.py`` and ``train.py`` are filled with."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.frontends import split_spec
from autopar.planner.layouts.stage_starts import blocks_of
from autopar.targets.target import Export
from autopar.targets.trainers.fsdp2.batch_loss import loss_of_batch
from autopar.targets.trainers.fsdp2.inputs import inputs_with_rows, loss_position, named_inputs
from autopar.targets.trainers.fsdp2.patterns import compressed
from autopar.targets.trainers.fsdp2.staging import pipeline_of
from autopar.targets.trainers.fsdp2.tensor_styles import tensor_table
from autopar.words.precision import OWN

Table = dict[str, Any]
OPTIMIZERS: dict[str, Table] = {
    "adamw": {"name": "adamw", "lr": 1e-3},
    "sgd": {"name": "sgd", "lr": 1e-2},
    "sgd_momentum": {"name": "sgd", "lr": 1e-2, "momentum": 0.9},
}


def parallel_tables(export: Export) -> dict[str, Any]:
    """Return the tables of parallelize.py by name."""
    layout = export.layout
    blocks = compressed(list(blocks_of(export.priced.captured.graph)), export.loaded.model)
    return {
        "MESH": mesh_of(export),
        "BATCH": {
            "rows": export.rows, "sequence": export.sequence, "microbatches": export.microbatches,
            "inputs": inputs_with_rows(export), **loss_of_batch(export),
        },
        "FULLY_SHARD": {"modules": blocks, "zero": layout.zero},
        "CHECKPOINT": checkpointed(export),
        "PRECISION": precision_of(export),
        "TENSOR": tensor_table(export),
        "PIPELINE": pipeline_of(export),
    }  # fmt: skip


def mesh_of(export: Export) -> dict[str, int]:
    """Return the sizes of the mesh. Shards are neighbours; without ZeRO, all of ``dp`` are replicas."""
    layout = export.layout
    dp = layout.sizes["dp"]
    shard = layout.shards if layout.shards > 1 else dp if layout.zero else 1
    return {"pipeline": layout.groups, "replicate": dp // shard, "shard": shard, "tensor": layout.sizes["tp"]}


def checkpointed(export: Export) -> list[str]:
    """Return patterns of the modules that are recomputed: the outermost ones that the plan's patterns name."""
    kind, _, which = export.layout.recompute.partition(":")
    if kind == "none":
        return []
    blocks = list(blocks_of(export.priced.captured.graph))
    if kind == "full" and not which:
        return compressed(blocks, export.loaded.model)
    patterns = export.priced.plan.pins.recompute
    if kind == "selective":
        return list(patterns)
    return [block for block in blocks if any(fnmatchcase(block, pattern) for pattern in patterns)]


def precision_of(export: Export) -> dict[str, str]:
    """Return the formats of stored parameters, of computation and of reductions; empty for those of the model.

    Raises:
        PlanError: FSDP2's policy cannot say it.
    """
    policy = export.precision
    if policy is None:
        return {}
    where = f"fsdp2: precision {policy}"
    if policy.products:
        raise PlanError(f"{where}: products in {policy.products} need torchao; use precision={policy.wide}")
    if policy.params == "float16":
        raise PlanError(f"{where}: float16 needs scaled losses, which the script does not have; use bf16-mixed")
    if policy.params == OWN:
        return {"reduce": policy.reduce}
    if policy.moments != policy.master:
        raise PlanError(
            f"{where}: torch's optimizers keep moments in the parameters' format, {policy.master}, not in "
            f"{policy.moments}; use moments={policy.master}"
        )
    return {"parameters": policy.master, "compute": policy.params, "reduce": policy.reduce}


def model_tables(export: Export) -> dict[str, Table]:
    """Return the tables of train.py by name."""
    prefix, path, factory = split_spec(export.loaded.spec)
    optimizer = OPTIMIZERS[export.optimizer]
    if prefix != "hf:":
        if prefix:
            raise PlanError(f"fsdp2: models of '{prefix}' cannot be written; give FILE.py:make or hf:config.json")
        loss = loss_position(export)
        return {
            "MODEL": {"file": Path(path).name, "factory": factory, "loss": loss}, "EXAMPLE": {}, "OPTIMIZER": optimizer,
        }  # fmt: skip
    dtype = next(p.dtype for p in export.loaded.model.parameters())
    model = {
        "config": "config.json", "architecture": type(export.loaded.model).__name__,
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    example = {name: random_spec(name, value, export.model.config, model["architecture"])
               for name, value in named_inputs(export).items()}  # fmt: skip
    return {"MODEL": model, "EXAMPLE": example, "OPTIMIZER": optimizer}


def random_spec(name: str, value: torch.Tensor, config: Mapping[str, Any], architecture: str) -> Table:
    """Return the shape of an input of a transformers model, its format, and for integers below what they are."""
    spec: Table = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if not value.is_floating_point():
        of_classes = name == "labels" and (value.dim() == 1 or architecture.endswith("ForTokenClassification"))
        classes = len(config.get("id2label") or ()) or config.get("num_labels") or 2
        spec["high"] = int(classes if of_classes else config.get("vocab_size") or 2)
    return spec
