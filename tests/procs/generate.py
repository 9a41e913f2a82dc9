"""What one rank does in the tests of models that generate."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cached_decoder import Sizes, greedy, made, prompt_of
from generating_models import LENGTH, MODELS, ROWS, VOCABULARY, HandedCaches
from procs.cached import ranks_of
from torch.distributed.tensor import DTensor

import autopar

COUNT = 32
"""Tokens that are made."""


def tokens(
    name: str, mesh: Mapping[str, int] | None, cut: Mapping[str, str] | None, stages: int | None, *hows: str
) -> dict[str, Any]:
    """Generate in some ways and compare with one device; every rank has a seed of its own, and draws as the first."""
    of = MODELS[name]()
    alone = copy.deepcopy(of.model).eval()
    pins = {"*:scaled_dot_product_attention*": cut} if cut else None
    model = autopar.parallelize(
        of.model, ranks_of(mesh), of.example, mode="inference", cache_length=LENGTH, constraints=pins, stages=stages
    )
    same, distinct = {}, 0
    for how in hows:
        wanted = of.tokens(alone, how, COUNT)
        distinct = max(distinct, len({*wanted.flatten().tolist()}))
        same[how] = torch.equal(of.tokens(model, how, COUNT, seed=3 + dist.get_rank()), wanted)
    caches = [getattr(model.calls.module, one) for one in model.calls.cache_names]
    return {
        "same": same,
        "caches": {tuple(one.to_local().shape if isinstance(one, DTensor) else one.shape) for one in caches},
        "distinct": distinct,
        "names": set(model.state_dict()) ^ set(alone.state_dict()),
    }


def plain_tokens(stages: int | None) -> list[bool]:
    """Generate with a plain model whose caches are buffers, and with one that is handed them."""
    sizes = Sizes(rope=True)
    model = made(sizes)
    alone = copy.deepcopy(model)
    example = prompt_of(sizes, 10)
    pm = autopar.parallelize(model, dist.get_world_size(), example, mode="inference", stages=stages)
    prompt = prompt_of(sizes, 7, seed=2)[0]
    same = [torch.equal(pm.generate(prompt, 40)[:, 7:], greedy(alone, prompt, 40))]
    if stages is None:
        torch.manual_seed(0)
        handed = HandedCaches().double().eval()
        alone_too = copy.deepcopy(handed)
        prompt = torch.randint(VOCABULARY, (ROWS, 6))
        pins = {"*:scaled_dot_product_attention*": {"tensor": "h"}}
        pm = autopar.parallelize(
            handed, ranks_of({"tensor": dist.get_world_size()}), (prompt, torch.arange(6), handed.caches()),
            mode="inference", constraints=pins,
        )  # fmt: skip
        same.append(torch.equal(pm.generate(prompt, 40), alone_too.greedy(prompt, 40)))
        same.append(tuple(pm.cache_0.to_local().shape) == (ROWS, 1, 80, 8))
    return same


def without_values() -> bool:
    """Generate with a model from the meta device, and with one on one device that has its values."""
    of = MODELS["gpt2"]()
    kind, config = type(of.model), of.model.config
    with torch.device("meta"):
        model = kind(config)
    model = autopar.parallelize(
        model, dist.get_world_size(), of.example, mode="inference", cache_length=LENGTH, stages=1
    )  # fmt: skip
    state = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in model.state_dict().items()}
    alone = kind(config).eval()
    alone.load_state_dict(state, strict=False)
    return torch.equal(of.tokens(model, "greedy", COUNT), of.tokens(alone, "greedy", COUNT))


def refused() -> list[str]:
    """Return what is said of calls that the ranks' caches cannot hold, and whether the next call is right."""
    of = MODELS["gpt2"]()
    alone = copy.deepcopy(of.model).eval()
    model = autopar.parallelize(of.model, dist.get_world_size(), of.example, mode="inference", cache_length=LENGTH)
    said = []
    for options in ({"max_new_tokens": 200}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}):
        try:
            model.generate(**of.call, pad_token_id=0, **options)
        except autopar.RunError as error:
            said.append(str(error))
    said.append(str(torch.equal(of.tokens(model, "greedy", 8), of.tokens(alone, "greedy", 8))))
    return said


def batching(path: str) -> list[bool]:
    """Run the small case of the example of continuous batching on this rank."""
    example = runpy.run_path(str(Path(path)))
    same: list[bool] = example["small_case"]()
    return same
