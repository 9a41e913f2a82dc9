"""Routed experts as one operator: rows that travel to their experts, on many ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from zoo_wide import WIDE

import autopar
from autopar.certificate.recount import check
from autopar.verify import verify
from hardware_profiles import load_cluster


def skewed(model: torch.nn.Module) -> torch.nn.Module:
    """The router prefers one expert, so that others have no rows."""
    with torch.no_grad():
        for path, param in model.named_parameters():
            if "router" in path or path.endswith("gate.weight"):
                param[0] *= 30
                param[1:3] *= 0.01
    return model


def mixtral() -> tuple[torch.nn.Module, dict[str, Any]]:
    case = WIDE["mixtral_batched"]()
    return skewed(case.model), {**case.kwargs}


def deepseek() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A shared expert and 64 routed ones, of which each token has 8, as in DeepSeek-V3."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=48, hidden_size=32, intermediate_size=48, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=64, num_experts_per_tok=8, n_shared_experts=1,
        n_group=8, topk_group=4, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=32, use_cache=False,
        experts_implementation="batched_mm",
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).double().train()
    ids = torch.randint(0, 48, (8, 8), generator=torch.Generator().manual_seed(1))
    return skewed(model), {"input_ids": ids, "labels": ids, "use_cache": False}


MODELS = {"mixtral": mixtral, "deepseek": deepseek}
FIRST = ("mixtral", "data=2,expert=2")
CASES = [
    ("mixtral", "expert=2"), ("mixtral", "expert=4"), ("deepseek", "expert=2"), ("deepseek", "expert=4"),
    ("deepseek", "expert=8"), ("deepseek", "expert=2,tensor=4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), [FIRST, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)])
def test_rows_travel(name: str, mesh: str) -> None:
    model, kwargs = MODELS[name]()
    captured = autopar.capture(model, (), example_kwargs=kwargs)
    sizes = [int(part.partition("=")[2]) for part in mesh.split(",")]
    cluster = load_cluster(f"local-x{torch.tensor(sizes).prod()}")
    plan = autopar.plan(
        model, cluster, (), example_kwargs=kwargs, captured=captured, mesh=mesh,
        constraints={"*:expert_block*": {"expert": "travel"}},
    )  # fmt: skip
    [stage] = plan.stages
    report = check(stage, captured.graph, cluster, types=True)
    assert report.ok, report.failures
    layers = {"mixtral": 2, "deepseek": 1}[name]
    assert report.collectives["expert", "all_to_all"] >= layers * 5  # counts, rows there and back, and their gradients
    for row in verify(captured, model, (), kwargs, stage.mesh, cluster, plan=plan):
        assert row.worst < 1e-9, row


def test_experts_of_other_ranks_are_not_counted() -> None:
    model, kwargs = mixtral()
    captured, cluster = autopar.capture(model, (), example_kwargs=kwargs), load_cluster("local-x2")
    plan = autopar.plan(
        model, cluster, (), example_kwargs=kwargs, captured=captured, mesh="expert=2",
        constraints={"*:expert_block*": {"expert": "e"}},
    )  # fmt: skip
    report = check(plan.stages[0], captured.graph, cluster)
    assert report.ok, report.failures
    assert report.price.compute_seconds == pytest.approx(plan.stages[0].price.compute_seconds, rel=1e-3)
