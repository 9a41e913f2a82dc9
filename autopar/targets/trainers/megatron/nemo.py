"""Fields of NeMo, Megatron-Bridge and Megatron's own yaml as options of Megatron-LM.

Names of fields: NeMo's examples/nlp/language_modeling/conf of v1.18 to v2.2 and the NeMo Framework Launcher's
conf/training for 1.x, nemo/lightning and nemo/collections/llm of v2.4 for 2.x, and the dataclasses of Megatron-Bridge
(src/megatron/bridge/training/config.py) with those of megatron-core; ``nemo_fields.json`` has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from autopar.errors import closest
from autopar.targets.field_lists import field_list
from autopar.targets.trainers.megatron.fields import FLAG, kinds, options_by_dest
from autopar.targets.trainers.megatron.options import MegatronOptions
from autopar.targets.trainers.megatron.shell import unknown

ALIASES = {
    "num_moe_experts": "--num-experts", "moe_num_experts": "--num-experts",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "virtual_pipeline_parallelism": "--num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "fp8_param": "--fp8-param-gather", "fp4_param": "--fp4-param-gather", "fp8_params": "--fp8-param-gather",
    "activations_checkpoint_granularity": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-method",
    "activations_checkpoint_num_layers": "--recompute-num-layers",
    "encoder_seq_length": "--seq-length", "tensor_parallelism": "--tensor-model-parallel-size",
    "overlap_grad_sync": "--overlap-grad-reduce", "overlap_param_sync": "--overlap-param-gather",
    "ub_tp_comm_overlap": "--tp-comm-overlap", "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "grad_reduce_in_bf16": "--grad-reduce-in-bf16",
}  # fmt: skip
"""Fields with another name than the option's."""
OF_NUMBERS = ("fp8", "fp8_e4m3", "fp8_hybrid", "precision", "bf16", "fp16", "fp32", "grad_reduce_in_fp32", "fp4",
              "fp8_recipe", "fp8_enabled")  # fmt: skip
"""Fields of number formats, which are read together."""
CHANGES = {
    "num_micro_batches_with_partial_activation_checkpoints": "some microbatches keep what others recompute",
    "activations_checkpoint_layers_per_pipeline": "later stages recompute fewer layers",
    "sharp": "switches of the network add up gradients", "peft": "adapters alone are trained; the price trains all",
    "cpu_offloading": "activations are moved to the host; the price keeps them on the device",
    "ub_tp_comm_overlap_cfg": "",
}  # fmt: skip
"""Fields without an option that change time or memory."""
OFF = (None, False, "null", "None", "none", "false", "False", "")
MIXED = {
    "delayed_scaling": ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
    "current_scaling": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "subchannel": ["--fp8-format", "hybrid", "--fp8-recipe", "blockwise"],
    "mxfp8": ["--fp8-format", "hybrid", "--fp8-recipe", "mxfp8"],
    "nvfp4": ["--fp4-format", "e2m1"],
}
"""What a name of a precision of NeMo 2 and Megatron-Bridge has in it (megatron/bridge/training/mixed_precision.py)."""
Fields = Mapping[Any, Any]


@cache
def known(kind: str) -> dict[str, frozenset[str]]:
    """Return the fields of every section: of ``nemo1``, ``nemo2`` or ``bridge``."""
    sections = field_list(__package__, "nemo_fields.json")[kind]
    return {section: frozenset(names.split()) for section, names in sections.items()}


def take(options: MegatronOptions, where: str, fields: Fields, names: Iterable[str]) -> None:
    """Take the fields of a section.

    Args:
        where: what stands before a field in messages: ``model.``.
        names: the fields that the section has.

    Raises:
        ConfigError: a field is none of the section.
    """
    names = set(names)
    for key, value in fields.items():
        name = str(key)
        field = f"{where}{name}"
        options_of_name = option_of(name)
        if options_of_name is None and name not in names and not name.startswith("_"):
            raise options.source.error(field, f"is no field that is known here; {closest(name, sorted(names))}")
        if name in OF_NUMBERS:
            continue
        if options_of_name is None:
            why = CHANGES.get(name, "")
            if why and value not in OFF:
                options.unpriced.append(f"{field}: {why}")
        else:
            set_option(options, options_of_name, field, value)


def option_of(name: str) -> str | None:
    """Return the option of a field; None where there is none."""
    if name in ALIASES:
        return ALIASES[name]
    found = options_by_dest().get(name)
    if found:
        exact = f"--{name.replace('_', '-')}"
        return exact if exact in found else found[0]
    return None


def set_option(options: MegatronOptions, option: str, field: str, value: object) -> None:
    """Set an option to the value of a field; what is not set, or is the default of a flag, is left out."""
    options.names[option] = field
    if value in (None, "null", "None"):
        return
    if kinds()[option] == FLAG:
        turned = option.startswith(("--no-", "--disable-", "--untie-"))
        plain = option[2:].replace("-", "_")
        positive = field.rpartition(".")[2] == plain or not turned
        if (value in OFF) != positive:
            options.values[option] = []
        return
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):  # a list on a command line
        value = value[1:-1].split(",")
    values = value if isinstance(value, list) else [value]
    texts = [text for one in values for text in (str(one).split() if isinstance(one, str) else [str(one)])]
    options.values[option] = [unknown(text) if "${" in text or text == "???" else text for text in texts]


def set_numbers(options: MegatronOptions, field: str, name: str) -> None:
    """Set the options of a named precision, such as ``bf16-mixed`` or ``bf16_with_mxfp8_mixed``."""
    text = name.lower().replace("-", "_")
    options.names["--bf16"] = options.names["--fp16"] = field
    if "bf16" in text or "bfloat16" in text:
        options.values["--bf16"] = []
    elif "16" in text:
        options.values["--fp16"] = []
        options.values["--accumulate-allreduce-grads-in-fp32"] = []
    elif "32" not in text:
        raise options.source.error(field, f"is '{name}'; use bf16-mixed, 16-mixed or 32")
    for part, words in MIXED.items():
        if part in text:
            options.values |= {option: [value] for option, value in zip(words[::2], words[1::2], strict=True)}


def resolved(tree: object, root: Mapping[object, object] | None = None, path: tuple[str, ...] = ()) -> object:
    """Return a yaml with the references of OmegaConf, such as ``${model.hidden_size}``, put in where they can be."""
    if root is None and isinstance(tree, dict):
        root = tree
    if isinstance(tree, dict):
        return {key: resolved(value, root, (*path, str(key))) for key, value in tree.items()}
    if isinstance(tree, str) and root is not None:
        found = re.fullmatch(r"\$\{(?:training\.)?([.\w]+)\}", tree)
        product = re.fullmatch(r"\$\{multiply:\s*([^,]+),\s*([^,]+)\}", tree)
        if product:
            parts = [resolved(part.strip(), root, path) for part in product.groups()]
            numbers = [int(str(part)) for part in parts if str(part).isdigit()]
            return numbers[0] * numbers[1] if len(numbers) == 2 else tree
        if found:
            return _looked_up(root, found[1], path, tree)
    return tree


def _looked_up(root: Mapping[object, object], name: str, path: tuple[str, ...], text: str) -> object:
    """Return what a reference names; the reference itself where it names nothing, or another reference."""
    dots = len(name) - len(name.lstrip("."))
    parts = [*(path[: len(path) - dots] if dots else ()), *name.strip(".").split(".")]
    at: object = root
    for part in parts:
        at = at.get(part) if isinstance(at, dict) else None
    return text if at is None or isinstance(at, dict) or (isinstance(at, str) and "${" in at) else at
