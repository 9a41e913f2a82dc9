"""Tokens that a model generates with its caches as buffers, beside those that transformers generates by itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch

import autopar
from gpu_rows.models import make
from gpu_rows.ranks import alone
from gpu_rows.table import Result

ROWS = 4


def generated(name: str, device: str, quick: bool) -> Result:
    """Greedy tokens of a model in float32, its own and autopar's, with the seconds of a token."""
    given, new = (8, 8) if quick else (64, 64)
    with alone(device):
        model, batch = make(name, device, quick, torch.float32)
        model = model.eval()
        model.config.use_cache = model.generation_config.use_cache = True
        prompt = batch["input_ids"][:, :given].repeat(ROWS, 1)[:ROWS]
        mask = torch.ones_like(prompt)

        def run(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
            def tokens() -> torch.Tensor:
                with torch.no_grad():
                    return model.generate(  # type: ignore[no-any-return, operator]
                        prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                        pad_token_id=0,
                    )  # fmt: skip

            return tokens

        eager = run(copy.deepcopy(model))
        ours = run(autopar.parallelize(model, 1, prompt, mode="inference", cache_length=given + new))
        seconds: dict[str, float] = {}
        tokens: dict[str, torch.Tensor] = {}
        for way, call in (("eager", eager), ("autopar", ours)):
            call()
            began = time.perf_counter()
            tokens[way] = call().cpu()
            seconds[way] = time.perf_counter() - began
    same = torch.equal(tokens["eager"], tokens["autopar"])
    a, b = (1e3 * seconds[way] / new for way in ("eager", "autopar"))
    said = f"{ROWS} x {new} tokens {'equal' if same else 'NOT equal'}; ms a token: eager {a:.2f}, autopar {b:.2f}"
    return Result(said, same, {"seconds": seconds})


__all__ = ["generated"]
