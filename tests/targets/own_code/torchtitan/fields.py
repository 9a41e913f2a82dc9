"""What the reader knows of torchtitan, from its own code: fields of releases, and its own configs with their models.

    .venvs/torchtitan/bin/python fields.py FOLDER [0.2.2=PATH/torchtitan ...]

writes ``fields.json`` (names and defaults of every release's fields) and ``configs.json`` (what the functions of its
``config_registry`` modules set, and sizes of models by module and flavor). The installed release is read by import, the
sources of older ones, unpacked, from their dataclasses' text.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODULES = ("llama3", "qwen3", "deepseek_v3", "gpt_oss")
POLICIES = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory-budget"}
READ = ("training.", "parallelism.", "compile.", "activation_checkpoint", "optimizer.")


def plain(value: object) -> bool:
    """Whether a value can be kept as JSON."""
    return value is None or isinstance(value, (bool, int, float, str)) or (
        isinstance(value, list) and all(plain(each) for each in value)
    )  # fmt: skip


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a config with their values; of a config inside, those of its fields."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        if field.name == "activation_checkpoint":
            yield name, POLICIES.get(type(value).__qualname__.split(".")[0], "none") if value is not None else "none"
        if dataclasses.is_dataclass(value) and field.name != "model_spec":
            yield from walk(value, name + ".")
        elif field.name != "model_spec" and field.name != "activation_checkpoint":
            yield name, value if plain(value) else None


def installed_fields() -> dict[str, Any]:
    """Return the fields of the installed release, those of every policy of recomputation, too."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.trainer import Trainer

    config = Trainer.Config(
        dataloader=HuggingFaceTextDataLoader.Config(), optimizer=default_adamw(), checkpoint=CheckpointManager.Config()
    )
    found = dict(walk(config))
    for policy in (SelectiveAC, FullAC, MemoryBudgetAC):
        found |= dict(walk(policy.Config(), "activation_checkpoint."))
    return {**found, "hf_model": ""}


def default_of(value: ast.expr | None) -> Any:
    """Return a field's default from its text; of one that is made, what the function returns."""
    made = [each.value.body for each in getattr(value, "keywords", ()) if isinstance(each.value, ast.Lambda)]
    try:
        return ast.literal_eval(made[0] if made else value) if value is not None else None
    except ValueError:  # an empty list
        return []


def fields_of_source(folder: Path) -> dict[str, Any]:
    """Return the fields of an older release from the text of its job config."""
    file = next(path for path in (folder / "config" / "job_config.py", folder / "config_manager.py") if path.exists())
    classes = {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}

    def inside(name: str, prefix: str) -> Iterator[tuple[str, Any]]:
        for node in classes[name].body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            kind = ast.unparse(node.annotation)
            if kind in classes:
                yield from inside(kind, f"{prefix}{node.target.id}.")
                continue
            yield prefix + node.target.id, default_of(node.value)

    return dict(inside("JobConfig", ""))


def sizes_of(model: Any) -> dict[str, int]:
    """Return the sizes of a decoder's config by the names of Hugging Face configs."""
    layer, last = model.layers[0], model.layers[-1]
    attention = layer.attention
    found = {
        "hidden_size": model.dim, "vocab_size": model.vocab_size, "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": getattr(attention, "n_kv_heads", None) or attention.n_heads,
    }  # fmt: skip
    if layer.feed_forward is not None:
        found["intermediate_size"] = layer.feed_forward.w1.out_features
    moe = getattr(last, "moe", None)
    if moe is not None:
        found["num_experts"] = moe.num_experts
        found["num_experts_per_tok"] = moe.router.top_k
        found["moe_intermediate_size"] = moe.routed_experts.inner_experts.hidden_dim
    return found


def registered() -> dict[str, Any]:
    """Return what torchtitan's own configs set beside defaults, and the sizes of its models."""
    from torchtitan.trainer import Trainer

    defaults = installed_fields()
    configs: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for name in MODULES:
        module = importlib.import_module(f"torchtitan.models.{name}.config_registry")
        for key, function in vars(module).items():
            if not callable(function) or not key.startswith(name.split("_")[0]) or key[0] == "_":
                continue
            try:
                config = function()
            except Exception as error:
                print(f"{name}.{key}: {type(error).__name__}: {str(error)[:90]}", file=sys.stderr)
                continue
            if not isinstance(config, Trainer.Config) or config.model_spec is None:
                continue
            spec = config.model_spec
            models.setdefault(name, {})[spec.flavor] = sizes_of(spec.model)
            said = {k: v for k, v in walk(config) if k.startswith(READ) and defaults.get(k, ...) != v}
            names = {group.optimizer_name for group in config.optimizer.param_groups}
            said["optimizer.name"] = " and ".join(sorted(names))
            configs.setdefault(name, {})[key] = {"flavor": spec.flavor, **said}
        own = importlib.import_module(f"torchtitan.models.{name}")
        for flavor in next(value for key, value in vars(own).items() if key.endswith("_configs")):
            models[name].setdefault(flavor, sizes_of(own.model_registry(flavor).model))
    return {"version": version("torchtitan"), "configs": configs, "models": models}


def dump(value: object) -> str:
    """Return JSON with a line for each field."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Write both files."""
    out, *older = sys.argv[1:]
    fields = {version("torchtitan"): installed_fields()}
    for text in older:
        release, _, folder = text.partition("=")
        fields[release] = fields_of_source(Path(folder))
    (Path(out) / "fields.json").write_text(dump(fields))
    (Path(out) / "configs.json").write_text(dump(registered()))


if __name__ == "__main__":
    main()
