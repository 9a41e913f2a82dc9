"""What trainers ask of a model, read off the model and its graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.capture import Captured
from autopar.planner.layouts.stage_starts import blocks_of, lists_of_blocks
from autopar.targets.target import ModelFacts

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Fields of Hugging Face configs that say how many routed experts a layer has."""

BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
"""Norms over the rows of a microbatch."""


def facts_of(model: torch.nn.Module, captured: Captured) -> ModelFacts:
    """Return what trainers ask of a model; ``captured``: at any number of rows."""
    config = config_of(model)
    blocks = blocks_of(captured.graph)
    facts = ModelFacts(
        str(config.get("model_type") or ""), config, len(blocks), tuple(lists_of_blocks(captured.graph)),
        sum(parameter.numel() for parameter in model.parameters()),
        batch_norms=any(isinstance(m, BATCH_NORMS) for m in model.modules()),
    )  # fmt: skip
    experts = facts.number(*EXPERTS) or 0
    return ModelFacts(**{**vars(facts), "experts": experts})


def config_of(model: torch.nn.Module) -> Mapping[str, object]:
    """Return a Hugging Face model's config as a dict; empty for other models."""
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    return to_dict() if callable(to_dict) else {}
