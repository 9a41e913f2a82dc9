"""The frontend ``hf:path/to/config.json``: a Hugging Face config becomes the model that its ``architectures`` names.

Nothing is downloaded, and no code that a config points to is executed.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from autopar.capture.untraceable_modules import MOST_MODULES
from autopar.errors import ModelError
from autopar.frontends import Loaded, cause_in, frontend
from autopar.words.precision import PRESETS
from hardware_profiles.strict import Unreadable, parse_json, read_text, shortened

DEFAULT_BATCH, DEFAULT_SEQ = 8, 2048
TRAINED_IN = {torch.bfloat16: PRESETS["bf16-mixed"], torch.float16: PRESETS["16-mixed"]}
"""Default precision policy by a config's dtype, as such models are trained."""

KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
CAUSAL = ("ForCausalLM", "LMHeadModel")
SEQ2SEQ = ("ForConditionalGeneration", "ForSpeechSeq2Seq")
TEXT_LABELS = {"ForMaskedLM": "token", "ForTokenClassification": "token", "ForSequenceClassification": "row"}
KINDS = (
    "ForCausalLM, LMHeadModel, ForMaskedLM, ForSequenceClassification, ForConditionalGeneration, ForImageClassification"
)


@frontend("hf:PATH.json")
def from_config(spec: str, file: Path, batch: int | None, seq: int | None, device: str) -> Loaded:
    """Make the model of a Hugging Face config, and its example inputs."""
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
    if not isinstance(kind, str):
        raise ModelError(f"model '{spec}': 'model_type' is {_shown(kind)}; give a string such as \"llama\"")
    if kind not in transformers.CONFIG_MAPPING:
        near = get_close_matches(kind, list(transformers.CONFIG_MAPPING.keys()), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "use another version of it"
        raise ModelError(
            f"model '{spec}': transformers {transformers.__version__} does not know model type '{shortened(kind)}'; "
            f"{hint}"
        )
    architectures = values.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(
            f"model '{spec}': 'architectures' is {_shown(architectures)}; give a list of strings such as "
            f'["{_suggest(transformers, kind)}"]'
        )
    name = architectures[0] if architectures else ""
    cls = getattr(transformers, name, None) if name else None
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        lacks = (
            f"names '{shortened(name)}', which is no model of transformers {transformers.__version__}" if name
            else "is missing"
        )  # fmt: skip
        raise ModelError(
            f"model '{spec}': 'architectures' {lacks}; write the model class there, such as "
            f'["{_suggest(transformers, kind)}"]'
        )
    values = _without_code(values)
    try:
        config = transformers.CONFIG_MAPPING[kind](**values)
        config.use_cache = False
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = (
                getattr(config, "pad_token_id", None) or 0
            )  # files often leave it to the task
        dtype = torch.float32 if config.dtype is None else config.dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ModelError(
                f"model '{spec}': 'dtype' is {_shown(dtype)}; give the name of a floating point format of torch, such "
                'as "bfloat16"'
            )
        with torch.device(device), _few_modules(spec):
            model = cls._from_config(config, dtype=dtype)
        batch = DEFAULT_BATCH if batch is None else batch
        kwargs, seq = _hf_inputs(spec, name, config, batch, seq, dtype, device)
    except ModelError:
        raise
    except Exception as error:
        why = cause_in(error, file)
        raise ModelError(f"model '{spec}': building {name} raised {why}; correct the config") from error
    return Loaded(model.train(), (), kwargs, spec, batch, seq, precision=TRAINED_IN.get(dtype))


def _without_code(value: Any) -> Any:
    """Return a config without what transformers would download and run: ``auto_map`` classes, hub kernels."""
    if isinstance(value, dict):
        return {
            key: _without_code(item) for key, item in value.items()
            if key != "auto_map" and not (key in KERNELS and "/" in str(item))
        }  # fmt: skip
    return [_without_code(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _few_modules(spec: str) -> Iterator[None]:
    """Refuse a config with more modules than can be captured, before they fill the memory."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise ModelError(
                f"model '{spec}': the config makes more than {MOST_MODULES:,} modules, the most that are captured; "
                "check its numbers of layers and experts"
            )

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def _shown(value: object) -> str:
    return shortened(repr(value))


def _suggest(transformers: ModuleType, kind: str) -> str:
    for mapping in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION"):
        names = getattr(transformers.models.auto.modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
        if kind in names:
            return str(names[kind])
    return "GPT2LMHeadModel"


def _hf_inputs(
    spec: str, name: str, config: Any, batch: int, seq: int | None, dtype: torch.dtype, device: str
) -> tuple[dict[str, torch.Tensor], int | None]:
    """Return ``(kwargs, sequence length)``: example inputs of a transformers model by its class name's ending."""
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
