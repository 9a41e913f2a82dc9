"""What exported folders of the Hugging Face stack share: the model, ``run.json``, Trainer arguments, train.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from autopar.frontends import split_spec
from autopar.targets.target import ConfigError, Export, WrittenFiles
from autopar.words.precision import OWN, Precision
from hardware_profiles.strict import read_text


def shared_files(
    export: Export, policy: Precision, target: str, run: Mapping[str, Any], arguments: Mapping[str, Any] | None
) -> WrittenFiles:
    """Return the files that every folder has, with what to fill in and notes.

    Args:
        policy: the precision that the trainer follows.
        target: the trainer, whose package has ``train.py.j2``.
        run: the trainer's own fields of ``run.json``.
        arguments: the trainer's own fields of TrainingArguments; None where these cannot say the plan.
    """
    files, model = model_files(export)
    said: dict[str, Any] = {
        "model": model, "batch": export.rows, "sequence": export.sequence, "recompute": export.layout.recompute,
        "recompute_classes": list(blocks_wrapped(export)), **run,
    }  # fmt: skip
    fill_in = ["batch_of in train.py: your data"]
    notes = []
    if export.loaded.spec.startswith("hf:"):
        said["inputs"] = inputs_of(export)
    else:
        fill_in.append(f"what {model.partition(':')[0]} imports has to be importable")
    files |= {"run.json": json.dumps(said, indent=1) + "\n", "train.py": script(target)}
    if arguments is not None:
        files["training_arguments.json"] = training_arguments(export, policy, arguments)
        notes.append("training_arguments.json has the same decisions for who trains with transformers' Trainer")
    if export.model.batch_norms:
        notes.append("batch norms take statistics of the rows of one rank in one microbatch")
    return WrittenFiles(files, ("train.py",), tuple(fill_in), tuple(notes))


def model_files(export: Export) -> tuple[dict[str, str], str]:
    """Return the files of the user's model by name, and its spec within the folder.

    A Hugging Face config is written as ``model/config.json``, a file with a factory is copied.
    """
    prefix, path, factory = split_spec(export.loaded.spec)
    if prefix:
        return {"model/config.json": json.dumps(dict(export.model.config), indent=1, default=str) + "\n"}, "model"
    name = f"model/{Path(path).name}"
    return {name: read_text(Path(path))}, f"{name}:{factory}"


def inputs_of(export: Export) -> dict[str, dict[str, Any]]:
    """Return shape, format and number of values of every input of a transformers model, for made-up data."""
    config = export.model.config
    words = export.model.number("vocab_size") or 2
    names = config.get("architectures")
    labels = words
    if isinstance(names, (list, tuple)) and names and str(names[0]).endswith("Classification"):
        classes = config.get("id2label")
        labels = len(classes) if isinstance(classes, Mapping) else 2
    return {
        name: {
            "shape": [export.rows, *value.shape[1:]], "dtype": str(value.dtype).removeprefix("torch."),
            "below": labels if name == "labels" else words,
        }
        for name, value in export.loaded.kwargs.items() if isinstance(value, torch.Tensor)
    }  # fmt: skip


def blocks_wrapped(export: Export) -> tuple[str, ...]:
    """Return the class names of the model's blocks, by which trainers wrap them."""
    names: dict[str, None] = {}
    for path in export.model.lists:
        for child in export.loaded.model.get_submodule(path).children():
            names[type(child).__name__] = None
    return tuple(names)


def policy_of(export: Export, name: str) -> Precision:
    """Return the export's precision, that of the model's own formats if there is none.

    Raises:
        ConfigError: the trainer `name` cannot say it.
    """
    policy = export.precision or Precision(params=OWN)
    for what, wrong in (("products", policy.products), ("stochastic_rounding", policy.stochastic_rounding)):
        if wrong:
            raise ConfigError(f"{name}: precision {policy}: {what} cannot be said there; use bf16-mixed")
    if policy.moments != policy.master:
        raise ConfigError(f"{name}: precision {policy}: moments in {policy.moments} beside masters in {policy.master} "
                          "cannot be said there; use bf16-mixed")  # fmt: skip
    return policy


def training_arguments(export: Export, policy: Precision, more: Mapping[str, Any]) -> str:
    """Return TrainingArguments with the decisions of a plan, for who trains with the Trainer."""
    values: dict[str, Any] = {
        "output_dir": "checkpoints", "per_device_train_batch_size": export.rows_of_rank,
        "gradient_accumulation_steps": export.microbatches, "bf16": policy.params == "bfloat16",
        "fp16": policy.params == "float16", "gradient_checkpointing": False,
        "optim": "adamw_torch" if export.optimizer == "adamw" else "sgd", **more,
    }  # fmt: skip
    return json.dumps(values, indent=1) + "\n"


def script(package: str) -> str:
    """Return the text of the script that a trainer's folder has: ``train.py``."""
    here = Path(str(files("autopar.targets.trainers")))
    common = read_text(here / "hugging_face" / "model_and_data.py.j2")
    return read_text(here / package / "train.py.j2").replace("{{ model_and_data }}", common.strip())

