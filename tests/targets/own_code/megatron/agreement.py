"""Random layouts before autopar's ``refuses`` and Megatron's own checks: both have to refuse the same ones.

python agreement.py write FILE [NUMBER]                 with autopar: layouts, arguments, and what is refused
.venvs/megatron/bin/python agreement.py compare FILE    with Megatron: prints where it decides otherwise
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHORT = {"llama3_8b": 0, "qwen3_4b": 0, "mixtral_8x7b": 8, "qwen3_30b_a3b": 128}
OTHER = {
    "gpt2_xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 4096,
                "vocab_size": 50257, "activation_function": "gelu_new", "tie_word_embeddings": True},
    "deepseek_v3_short": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_shared_experts": 1, "n_routed_experts": 64, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e4},
    },
}  # fmt: skip


def words_of(rng: random.Random, experts: int) -> str:
    """Return the words of a random layout."""
    tp, pp = rng.choice([1, 1, 2, 3, 4, 5, 8]), rng.choice([1, 1, 2, 3, 4, 5, 8, 16])
    words = {"tp": tp, "pp": pp, "cp": rng.choice(["1", "1", "1", "2:ring", "4:allgather", "2:ulysses", "4:ulysses"]),
             "mbs": rng.choice([1, 1, 2])}  # fmt: skip
    flags = ["sp"] if tp > 1 and rng.random() < 0.8 else []
    if pp > 1 and rng.random() < 0.6:
        words["vp"] = rng.choice([2, 3, 4, 6])
    dp = rng.choice([1, 2, 3, 4, 8])
    if rng.random() < (0.7 if experts else 0.05):
        ep = rng.choice([1, 2, 3, 4, 6, 8])
        dp *= ep
        words["ep"] = ep * tp if rng.random() < 0.3 else ep
        if words["ep"] != ep:
            words["etp"] = 1
    words["dp"] = dp
    storage = rng.choice([None, "zero=1", "zero=1", "fsdp"])
    again = rng.choice(["none", "none", "full", "full:1", "full:2", "selective:mlp",
                        "selective:input_layernorm+post_attention_layernorm"])  # fmt: skip
    parts = [f"{word}={value}" for word, value in words.items() if str(value) != "1" or word == "mbs"]
    return ",".join(
        [*parts, *flags, *([storage] if storage else []), *([] if again == "none" else [f"recompute={again}"])]
    )


def one(rng: random.Random, name: str, config: dict[str, Any], experts: int) -> dict[str, Any] | None:
    """Return a random layout with the arguments that are written for it; None if its words mean nothing."""
    from autopar.errors import AutoparError
    from autopar.planner.layouts.layout_words import parse_layout
    from autopar.planner.layouts.stage_starts import sizes_of
    from autopar.targets import target_named
    from autopar.targets.space import refusal
    from autopar.targets.target import ModelFacts
    from autopar.targets.trainers.megatron.layouts import check_batch, layout_arguments
    from autopar.targets.trainers.megatron.models import model_arguments

    words = words_of(rng, experts)
    layers = int(config.get("num_hidden_layers", config.get("n_layer", 0)))
    facts = ModelFacts(config["model_type"], config, layers, ("model.layers",), 0, experts)
    try:
        layout = parse_layout(words)
    except AutoparError:
        return None
    m, places = rng.choice([1, 2, 4, 6, 8, 16]), rng.choice([1024, 1024, 4096, 1000])
    rows = m * layout.rows * layout.sizes["dp"]
    stages = layout.groups * layout.chunks
    export: Any = SimpleNamespace(layout=layout, model=facts, rows=rows, sequence=places, microbatches=m,
                                  rows_of_rank=layout.rows)  # fmt: skip
    refused = refusal(target_named("megatron"), layout, facts)
    try:
        check_batch(export)
    except AutoparError as error:
        refused = refused or str(error)
    sizes = sizes_of(layers, stages)
    if min(sizes) < 0:  # there are no arguments to ask Megatron about
        return None
    arguments = model_arguments(facts, places, layout.sizes["tp"]) | layout_arguments(export, sizes) | {"--bf16": ""}
    line = [part for option, value in arguments.items() for part in (option, *value.split())]
    return {"model": name, "words": words, "m": m, "places": places, "refused": refused, "arguments": line,
            "world": layout.n_devices, "fsdp": layout.zero == 3}  # fmt: skip


def write(path: Path, number: int) -> None:
    """Write so many random layouts."""
    rng = random.Random(2026)
    stored = json.loads((Path(__file__).parents[1] / "models.json").read_text())
    configs = {**{name: stored[name] for name in SHORT}, **OTHER}
    for config in configs.values():
        config |= {} if config["model_type"] == "gpt2" else {"hidden_act": "silu"}
    experts = {**SHORT, "gpt2_xl": 0, "deepseek_v3_short": 64}
    found: list[dict[str, Any]] = []
    while len(found) < number:
        name = rng.choice(list(configs))
        case = one(rng, name, configs[name], experts[name])
        found += [case] if case else []
    path.write_text(json.dumps(found))
    print(f"{number} layouts, {sum(bool(case['refused']) for case in found)} refused")


def compare(path: Path) -> int:
    """Print layouts that only one of both refuses; return how many."""
    from own_megatron import checked

    differ = 0
    cases = json.loads(path.read_text())
    for case in cases:
        try:
            checked([*case["arguments"], "--mock-data"], case["world"], None if case["fsdp"] else "1")
            theirs = ""
        except Exception as error:
            theirs = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if bool(theirs) != bool(case["refused"]):
            differ += 1
            print(f"{case['model']} {case['words']} m={case['m']} places={case['places']}\n  autopar: "
                  f"{case['refused'] or 'fine'}\n  Megatron: {theirs or 'fine'}")  # fmt: skip
    print(f"{len(cases)} layouts, {differ} decided otherwise")
    return differ


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 600)
    else:
        sys.exit(1 if compare(Path(sys.argv[2])) else 0)
