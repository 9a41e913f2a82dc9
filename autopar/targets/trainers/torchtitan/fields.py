"""The fields of torchtitan's releases with their defaults, its own configs, and the sizes of its models, as data.

Made from torchtitan's code by ``tests/targets/own_code/torchtitan/fields.py`` and compared with it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.targets.field_lists import field_list

NEWEST = "0.3.0"
_MOVED = (
    "data_parallel_shard_degree", "data_parallel_replicate_degree", "tensor_parallel_degree", "context_parallel_degree",
    "pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatches",
    "pipeline_parallel_split_points", "enable_async_tensor_parallel", "enable_loss_parallel",
    "fsdp_reshard_after_forward",
)  # fmt: skip
"""Fields of the section ``parallelism`` that releases before 0.1 had in ``training`` or ``experimental``."""
RENAMED = {
    **{f"{section}.{name}": f"parallelism.{name}" for section in ("training", "experimental") for name in _MOVED},
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.enable_float8_linear": "float8.enable_float8_linear",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}
"""Fields by the names that the reader has for them."""
BEFORE = frozenset(
    {
        *RENAMED, "model.norm_type", "training.warmup_steps", "training.fp8_linear", "training.data_parallel_type",
        "training.enable_selective_ac", "training.gc_freq", "training.checkpoint_interval",
        "training.checkpoint_interval_type", "training.checkpoint_folder", "experimental.enable_compiled_autograd",
        "parallelism.pipeline_parallel_microbatches", "hf_transformers.model",
    }
)  # fmt: skip
"""Fields of releases before 0.1, and of states of the repository between releases, that its own configs use."""
UNCHECKED = frozenset(
    {
        "job", "profiling", "metrics", "optimizer", "lr_scheduler", "checkpoint", "comm", "validation", "debug",
        "float8", "mx", "quantize", "memory_estimation", "fault_tolerance",
    }
)
"""Sections of TOML that change neither time nor memory, in which fields that no release has are passed over."""
OF_COMPONENTS = frozenset({"dataloader", "validator", "tokenizer", "loss", "optimizer", "lr_scheduler", "checkpoint"})
"""Sections of the newest release whose fields depend on the component that the config function chose."""


@dataclass(frozen=True)
class SaidFields:
    """What a file says, by the names of fields.

    Attributes:
        values: the fields that it gives.
        is_old: it is of a release before 0.3, with TOML.
        defaults: those of fields that it does not give.
        sizes: of the model, by the names of Hugging Face configs.
        devices: as many as its launcher starts; None where it does not say it.
    """

    values: Mapping[str, Any]
    is_old: bool
    defaults: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=dict)
    devices: int | None = None

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return a field's value, its default, or `otherwise` where it is none of the release's."""
        return self.values.get(name, self.defaults.get(name, otherwise))


def releases() -> dict[str, dict[str, Any]]:
    """Return fields and defaults by release."""
    return field_list(__package__)


def registry() -> dict[str, Any]:
    """Return torchtitan's own configs and models."""
    return field_list(__package__, "configs.json")


def known(*, old: bool) -> set[str]:
    """Return the names of all fields of the releases with TOML, or of the newest."""
    if not old:
        return set(releases()[NEWEST])
    return {name for release, fields in releases().items() if release != NEWEST for name in fields} | BEFORE


def defaults(*, old: bool) -> dict[str, Any]:
    """Return defaults: of the newest release, or of the newest with TOML."""
    if not old:
        return releases()[NEWEST]
    found: dict[str, Any] = {}
    for release in sorted(release for release in releases() if release != NEWEST):
        found |= releases()[release]
    return {RENAMED.get(name, name): value for name, value in found.items()}


def sizes_of(module: str, flavor: str) -> dict[str, int]:
    """Return the sizes of a model of torchtitan's own; empty where they are not known."""
    flavors: dict[str, dict[str, int]] = registry()["models"].get(module, {})
    return next((sizes for name, sizes in flavors.items() if name.lower() == flavor.lower()), {})
