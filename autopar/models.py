"""Models by name: ``path.py:factory``, or ``hf:path/to/config.json``.

A factory takes no argument and returns a model and its example inputs: a tuple of args, a dict of kwargs, or both::

    def make():
        return Model(), (x, target)
        return Model(), {"input_ids": ids, "labels": ids}
        return Model(), (x,), {"mask": mask}

A Hugging Face config becomes the model that its ``architectures`` names, on the meta device, with example inputs of the
given batch and sequence length. Nothing is downloaded, and no code that a config points to is executed.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from autopar.errors import ModelError
from hardware_profiles.strict import Unreadable, parse_json, read_text

DEFAULT_BATCH, DEFAULT_SEQ = 8, 2048


@dataclass(frozen=True)
class Loaded:
    """A model with its example inputs, and the words with which a plan file names it.

    ``parts``: into how many microbatches the example batch was cut before it was captured; None for not at all.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: str
    batch: int | None = None
    seq: int | None = None
    parts: int | None = None

    def named(self, folder: Path) -> dict[str, Any]:
        """For a plan file in ``folder``: the spec with its path relative to that folder."""
        prefix, path, factory = _split(self.spec)
        relative = os.path.relpath(Path(path).resolve(), folder.resolve())
        named: dict[str, Any] = {"spec": prefix + Path(relative).as_posix() + (f":{factory}" if factory else "")}
        for key, value in (("batch", self.batch), ("seq", self.seq), ("parts", self.parts)):
            if value is not None:
                named[key] = value
        return named


def load_model(
    spec: str, batch: int | None = None, seq: int | None = None, *, folder: Path | None = None, device: str = "meta"
) -> Loaded:
    """The model that ``spec`` names.

    Args:
        batch, seq: for a Hugging Face config; a factory makes its own inputs.
        folder: where relative paths start; the current one by default.
        device: for a Hugging Face config: ``meta`` allocates nothing.

    Raises:
        ModelError: the file or the factory is missing, or does not give a model and inputs.
    """
    prefix, path, factory = _split(spec)
    file = (folder or Path()) / path
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise ModelError(f"model '{spec}': {path} {what}; give PATH.py:factory or hf:PATH.json")
    if prefix:
        if (batch is not None and batch < 1) or (seq is not None and seq < 1):
            raise ModelError(f"model '{spec}': batch {batch} and seq {seq} must be 1 or more")
        return _from_config(spec, file, batch, seq, device)
    for name, value in (("--batch", batch), ("--seq", seq)):
        if value is not None:
            raise ModelError(
                f"model '{spec}': {name} is for hf: models; the factory '{factory}' makes its own example inputs"
            )
    return _from_factory(spec, file, factory)


def _split(spec: str) -> tuple[str, str, str]:
    """``(prefix, path, factory)`` of a spec."""
    if spec.startswith("hf:"):
        if not spec[3:]:
            raise ModelError("model 'hf:' names no file; write hf:path/to/config.json")
        return "hf:", spec[3:], ""
    path, colon, factory = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not factory:
        raise ModelError(
            f"model '{spec}' is neither PATH.py:factory nor hf:PATH.json; write for example gpt.py:make, where make() "
            "returns a model and its example inputs"
        )
    return "", path, factory


# --- a factory in a file ---------------------------------------------------------------------------------------------


def _from_factory(spec: str, file: Path, factory: str) -> Loaded:
    module = _import(spec, file)
    make = getattr(module, factory, None)
    if not callable(make):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        near = get_close_matches(factory, names, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"it defines {', '.join(names) or 'no function'}"
        raise ModelError(f"model '{spec}': {file.name} has no function '{factory}'; {hint}")
    if _needs_arguments(make):
        raise ModelError(
            f"model '{spec}': '{factory}' takes arguments {inspect.signature(make)}; a factory takes none: give them "
            "defaults, or wrap it in a function without arguments"
        )
    try:
        made = make()
    except Exception as error:
        raise ModelError(f"model '{spec}': '{factory}' raised {_cause(error, file)}; correct it there") from error
    return _checked(spec, factory, made)


def _import(spec: str, file: Path) -> Any:
    name = f"autopar_model_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    folder = str(file.resolve().parent)
    added = folder not in sys.path
    if added:
        sys.path.insert(0, folder)  # as if the file were run as a script
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ModelError(
            f"model '{spec}': importing {file.name} raised {_cause(error, file)}; correct it there"
        ) from error
    finally:
        if added:
            sys.path.remove(folder)
    return module


def _cause(error: Exception, file: Path) -> str:
    """``ValueError: text (file.py:3)``, with the last line of the user's file that was running."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or file).name}:{error.lineno})"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == file.name]
    text = str(error).strip().splitlines()
    what = type(error).__name__ + (f": {text[0]}" if text else "")
    return what + (f" ({file.name}:{lines[-1]})" if lines else "")


def _needs_arguments(make: Any) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _checked(spec: str, factory: str, made: Any) -> Loaded:
    def wrong(got: str) -> ModelError:
        return ModelError(
            f"model '{spec}': '{factory}' returned {got}; return a model and its example inputs: (model, (x, y)), "
            '(model, {"input_ids": ids}) or (model, args, kwargs)'
        )

    if isinstance(made, torch.nn.Module):
        raise wrong("a model without example inputs")
    if not isinstance(made, (tuple, list)):
        raise wrong(_a(made))
    if len(made) not in (2, 3):
        raise wrong(f"{len(made)} values")
    model, *inputs = made
    if not isinstance(model, torch.nn.Module):
        raise wrong(f"{_a(model)} where the model should be")
    if len(inputs) == 1 and isinstance(inputs[0], tuple) and len(inputs[0]) == 2:
        first, second = inputs[0]
        if isinstance(first, tuple) and isinstance(second, dict):
            inputs = [first, second]
    args: Any = ()
    kwargs: Any = {}
    if len(inputs) == 2:
        args, kwargs = inputs
    elif isinstance(inputs[0], Mapping):
        kwargs = inputs[0]
    else:
        args = (inputs[0],) if isinstance(inputs[0], torch.Tensor) else inputs[0]
    if not isinstance(args, (tuple, list)):
        raise wrong(f"{_a(args)} where the example inputs should be")
    if not isinstance(kwargs, Mapping) or not all(isinstance(k, str) for k in kwargs):
        raise wrong(f"{_a(kwargs)} where the keyword inputs should be")
    return Loaded(model, tuple(args), dict(kwargs), spec)


def _a(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else ("an " if name[0] in "aeiouAEIOU" else "a ") + name


# --- a Hugging Face config -------------------------------------------------------------------------------------------

CAUSAL = ("ForCausalLM", "LMHeadModel")
SEQ2SEQ = ("ForConditionalGeneration", "ForSpeechSeq2Seq")
TEXT_LABELS = {"ForMaskedLM": "token", "ForTokenClassification": "token", "ForSequenceClassification": "row"}
KINDS = (
    "ForCausalLM, LMHeadModel, ForMaskedLM, ForSequenceClassification, ForConditionalGeneration, ForImageClassification"
)


def _from_config(spec: str, file: Path, batch: int | None, seq: int | None, device: str) -> Loaded:
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(f"model '{spec}' needs the package transformers; install it with: pip install transformers")
    try:
        values = parse_json(read_text(file))
    except Unreadable as error:
        raise ModelError(f"model '{spec}': {file.name}: {error}; give a config.json") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ModelError(
            f"model '{spec}': {file.name} has no 'model_type'; give the config.json of a transformers model"
        )
    import transformers

    kind = values.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        near = get_close_matches(str(kind), list(transformers.CONFIG_MAPPING.keys()), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "use another version of it"
        raise ModelError(
            f"model '{spec}': transformers {transformers.__version__} does not know model type '{kind}'; {hint}"
        )
    architectures = values.get("architectures") or []
    name = architectures[0] if isinstance(architectures, list) and architectures else ""
    cls = getattr(transformers, name, None) if name else None
    if cls is None:
        got = f"names '{name}', which transformers {transformers.__version__} does not have" if name else "is missing"
        raise ModelError(
            f"model '{spec}': 'architectures' {got}; write the model class there, such as "
            f'["{_suggest(transformers, kind)}"]'
        )
    values.pop("auto_map", None)
    try:
        config = transformers.CONFIG_MAPPING[kind](**values)
        config.use_cache = False
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = (
                getattr(config, "pad_token_id", None) or 0
            )  # files often leave it to the task
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        with torch.device(device):
            model = cls._from_config(config, dtype=dtype)
        batch = DEFAULT_BATCH if batch is None else batch
        kwargs, seq = _hf_inputs(spec, name, config, batch, seq, dtype, device)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"model '{spec}': building {name} raised {_cause(error, file)}; correct the config") from error
    return Loaded(model.train(), (), kwargs, spec, batch, seq)


def _suggest(transformers: Any, kind: str) -> str:
    for mapping in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION"):
        names = getattr(transformers.models.auto.modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
        if kind in names:
            return str(names[kind])
    return "GPT2LMHeadModel"


def _hf_inputs(
    spec: str, name: str, config: Any, batch: int, seq: int | None, dtype: torch.dtype, device: str
) -> tuple[dict[str, torch.Tensor], int | None]:
    """``(kwargs, sequence length)``: example inputs of a transformers model by the ending of its class name."""
    vocabulary = int(getattr(config, "vocab_size", 2) or 2)

    def ids(*shape: int, high: int = vocabulary) -> torch.Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=torch.int64, device=device)
        return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0)).to(device)

    def floats(*shape: int) -> torch.Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    if name.endswith("ForImageClassification"):
        if seq is not None:
            raise ModelError(f"model '{spec}': {name} takes images, no sequence; leave --seq out")
        side = getattr(config, "image_size", 224)
        height, width = side if isinstance(side, (tuple, list)) else (side, side)
        images = floats(batch, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": images, "labels": ids(batch, high=config.num_labels)}, None
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    if seq is None:
        seq = min(longest or DEFAULT_SEQ, DEFAULT_SEQ)
    elif longest is not None and seq > longest:
        raise ModelError(
            f"model '{spec}': --seq {seq} is longer than the {longest} positions that the config allows; use at most "
            f"{longest}"
        )
    if name.endswith(SEQ2SEQ) and hasattr(config, "num_mel_bins"):
        features = floats(batch, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features, "labels": ids(batch, seq)}, seq
    if name.endswith((*CAUSAL, *SEQ2SEQ)):
        tokens = ids(batch, seq)
        return {"input_ids": tokens, "labels": ids(batch, seq)}, seq
    for ending, labels in TEXT_LABELS.items():
        if name.endswith(ending):
            label = ids(batch, seq) if labels == "token" else ids(batch, high=config.num_labels)
            return {"input_ids": ids(batch, seq), "labels": label}, seq
    raise ModelError(
        f"model '{spec}': example inputs of {name} are not known; use a class that ends in one of {KINDS}, or write a "
        "factory that returns the model and its inputs"
    )


__all__ = ["Loaded", "load_model"]
