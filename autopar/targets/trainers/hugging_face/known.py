"""Fields of accelerate 1.15.0 and of the TrainingArguments of transformers 5.23.0, from their own code.

``tests/targets/own_code/accelerate/fields.py`` writes ``fields.json``, and ``make test-targets`` compares it.
"""

from __future__ import annotations

from typing import Any

from autopar.targets.field_lists import field_list
from autopar.targets.target import ModelFacts

CAUSAL = ("ForCausalLM", "LMHeadModel")


def known() -> dict[str, Any]:
    """Return the fields of accelerate and of TrainingArguments, and the families that have a tensor parallel plan."""
    return field_list(__package__)


def is_causal(model: ModelFacts) -> bool:
    """Return whether a model is a causal language model of transformers."""
    names = model.config.get("architectures")
    return isinstance(names, (list, tuple)) and bool(names) and str(names[0]).endswith(CAUSAL)


def refuses_tensor(model: ModelFacts, tp: int) -> str:
    """Return why transformers' tensor parallel plans, which both trainers follow, cannot cut a model, or nothing.

    The plans (``base_model_tp_plan`` of a config) cut projections of attention by columns, which holds whole heads
    only where both numbers of heads divide; layers of the feed-forward network by their inner features.
    """
    if tp == 1:
        return ""
    if not model.family:
        return f"tp={tp}: it cuts models of transformers by their tensor parallel plan, a model of one's own has none"
    if model.family not in known()["tensor_parallel_families"]:
        return f"tp={tp}: transformers {known()['transformers']} has no tensor parallel plan for '{model.family}'"
    for name, number in (("num_attention_heads", model.heads), ("num_key_value_heads", model.key_heads),
                         ("intermediate_size", model.number("intermediate_size"))):  # fmt: skip
        if number is not None and number % tp:
            return f"tp={tp} does not divide {name}={number}"
    return ""
