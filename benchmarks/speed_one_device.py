"""A training step of the program against the eager model, on a mesh of one device and with one thread.

Runs alternate between the two, so that what else the machine does hits both; the ratio is that of the medians, and the
spread of the ratios of neighbouring runs is shown beside it. ``python benchmarks/speed_one_device.py [--runs 15]``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, ResNetConfig
from transformers import ResNetForImageClassification as ResNet

import autopar


def gpt2() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = GPT2Config(
        vocab_size=4096, n_positions=128, n_embd=256, n_layer=6, n_head=8, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    ids = torch.randint(0, 4096, (4, 128))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    ids = torch.randint(0, 4096, (4, 128))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def resnet18() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=100
    )
    return ResNet(config), {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 100, (8,))}


MODELS = {"gpt2": gpt2, "llama": llama, "resnet18": resnet18}


def stepper(model: torch.nn.Module, batch: dict[str, Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare(name: str, runs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    eager = stepper(copy.deepcopy(model), batch)
    program = stepper(autopar.parallelize(model, 1, batch), batch)
    for _ in range(3):
        eager()
        program()
    seconds: dict[str, list[float]] = {"eager": [], "program": []}
    for i in range(runs):
        pair = [("eager", eager), ("program", program)]
        for which, step in pair if i % 2 else pair[::-1]:
            seconds[which].append(timed(step))
    ratios = sorted(p / e for p, e in zip(seconds["program"], seconds["eager"], strict=True))
    median = {which: statistics.median(values) for which, values in seconds.items()}
    return {
        "model": name, "eager_seconds": median["eager"], "program_seconds": median["program"],
        "ratio": median["program"] / median["eager"],
        "ratio_of_minima": min(seconds["program"]) / min(seconds["eager"]), "median_ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        result = compare(name, options.runs)
        if options.json:
            print(json.dumps(result), flush=True)
        else:
            low, high = result["quartiles"]
            print(
                f"{name:9} eager {result['eager_seconds'] * 1e3:7.1f} ms  "
                f"program {result['program_seconds'] * 1e3:7.1f} ms  ratio {result['ratio']:.3f}  "
                f"(minima {result['ratio_of_minima']:.3f}, pairs {low:.3f}..{high:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
