"""Layouts in people's words do what frameworks do under them: the collectives of a layer of the emitted program, how
parameters are stored, where stages begin; and what cannot be said is refused."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import autopar
from autopar.capture import capture
from autopar.certificate.recount import check
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.planner.inter_op.exact.exact_stages import ExactPlans
from autopar.planner.layouts.pricing import PricedLayout, PricedLayouts
from autopar.planner.layouts.stage_starts import described, sizes_of
from autopar.report.axes_in_words import axes_in_words, axis_shares
from autopar.words.placements import State
from hardware_profiles import load_cluster

ROWS, SEQUENCE, HIDDEN, FFN, VOCABULARY = 8, 32, 64, 128, 1024


def llama(layers: int) -> Any:
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False,
    ))  # fmt: skip


def mixtral(layers: int) -> Any:
    return MixtralForCausalLM(MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE, use_cache=False,
    ))  # fmt: skip


def gpt2(layers: int) -> Any:
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=HIDDEN, n_layer=layers, n_head=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    ))  # fmt: skip


@cache
def layouts_of(make: Any, layers: int) -> PricedLayouts:
    """Layouts of a small model, captured once."""
    with torch.device("meta"):
        model, ids = make(layers), torch.zeros(ROWS, SEQUENCE, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    return PricedLayouts(model, capture(model, (), batch), ((), batch))


def priced(make: Any, layers: int, words: str, cluster: str = "local-x4") -> PricedLayout:
    return layouts_of(make, layers).price(cluster, words)


def of_a_layer(make: Any, words: str) -> dict[str, int]:
    """What one more layer adds to the collectives of the emitted program, of one microbatch, counted as it runs."""
    counts: list[Counter[tuple[str, str]]] = []
    for layers in (1, 2):
        found = priced(make, layers, words)
        (stage,) = found.plan.stages
        report = check(stage, found.captured.graph, load_cluster("local-x4"))
        assert report.ok, report.failures
        counts.append(report.collectives)
    return {f"{kind} over {axis}": n for (axis, kind), n in (counts[1] - counts[0]).items()}


def gathered(found: PricedLayout) -> Counter[str]:
    """Parameters by how they are stored, used and how long a gathered copy lives."""
    (stage,) = found.plan.stages
    return Counter(f"{c.stored.text} {c.used.text} {c.lifetime}" for c in stage.params.values())


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def test_tensor_parallelism_adds_up_twice_forward_and_twice_backward() -> None:
    """Shoeybi et al. 2019, section 3: one all-reduce behind attention and one behind the feed-forward network, and as
    many of gradients."""
    assert of_a_layer(llama, "tp=4,m=1") == {"all_reduce over tensor": 4}
    found = priced(llama, 2, "tp=4,m=1")
    (stage,) = found.plan.stages
    for name, cuts in stage.ops.items():
        if "scaled_dot_product" in name:
            assert cuts == ("g",)
    weights = {name: choice.stored for name, choice in stage.params.items()}
    assert weights["model.layers.0.self_attn.q_proj.weight"] == State.of("S0")
    assert weights["model.layers.0.self_attn.o_proj.weight"] == State.of("S1")
    assert weights["model.layers.0.mlp.up_proj.weight"] == State.of("S0")
    assert weights["model.layers.0.mlp.down_proj.weight"] == State.of("S1")
    assert weights["model.layers.0.input_layernorm.weight"] == State.of("I")
    assert weights["model.embed_tokens.weight"] == weights["lm_head.weight"] == State.of("S0")


def test_sequence_parallelism_gathers_before_and_scatters_behind() -> None:
    """Korthikanti et al. 2022, section 4.2: all-gather and reduce-scatter in the place of each all-reduce; pieces are
    kept, and gathered again in the backward. Gradients of the norms are added up over the ranks."""
    collectives = of_a_layer(llama, "tp=4,sp,m=1")
    assert collectives == {
        "all_gather over tensor": 2 + 2 + 2, "reduce_scatter over tensor": 2 + 2, "parameter all_reduce over tensor": 2,
    }  # fmt: skip


def test_sequence_parallelism_keeps_the_bytes_of_tensor_parallelism() -> None:
    """What moves in a step of a route is the residual of a data rank."""
    found = priced(llama, 2, "dp=2,tp=2,sp,m=1")
    (stage,) = found.plan.stages
    graph = found.captured.graph
    name = next(n for n in stage.reshard_paths if n.startswith("linear_3"))
    node = next(n for n in graph.nodes if n.name == name)
    assert node.out.shape == (ROWS, SEQUENCE, HIDDEN)
    assert [(src.text, dst.text) for src, dst in stage.reshard_paths[name]] == [("S0,P", "S0,S1")]


def test_one_weight_for_queries_keys_and_values_is_priced_as_three() -> None:
    found = priced(gpt2, 2, "tp=4,m=1")
    assert "one matrix for each of what transformer.h.0.attn.c_attn" in found.pinned.notes[0]
    (stage,) = found.plan.stages
    assert stage.params["transformer.h.0.attn.c_attn.weight[1]"].stored == State.of("S1")
    moved = Counter(f"{src.text} {dst.text}" for steps in stage.reshard_paths.values() for src, dst in steps)
    assert moved["I R"] == 2 * 2 + 1 and moved["P I"] == 2 * 2 + 1  # of two layers; the head's input, the embedding
    with pytest.raises(PlanError, match="cannot run so: write one Linear for each"):
        found.check_fits()
    assert "one matrix" not in " ".join(priced(gpt2, 2, "dp=4,m=1").pinned.notes)


def test_what_tensor_parallelism_would_leave_to_every_rank_is_refused() -> None:
    with pytest.raises(PlanError, match=r"tp=8 would leave .* to every rank(.|\n)*has size 4, which does not divide"):
        priced(llama, 2, "tp=8,m=1", "local-x8")


# --- data parallelism ------------------------------------------------------------------------------------------------


def test_zero() -> None:
    params = 9
    assert of_a_layer(llama, "dp=4,m=1") == {"parameter all_reduce over data": params}
    assert of_a_layer(llama, "dp=4,m=1,zero=1") == {
        "parameter all_gather over data": params, "parameter reduce_scatter over data": params
    }  # fmt: skip
    assert of_a_layer(llama, "dp=4,m=1,zero=3") == {
        "parameter all_gather over data": 2 * params,  # forward, and again in the backward
        "parameter reduce_scatter over data": params,
    }  # fmt: skip
    assert gathered(priced(llama, 1, "dp=4,m=2,zero=1")) == {"S0 R step": 12}
    assert gathered(priced(llama, 1, "dp=4,m=2,fsdp")) == {"S0 R use": 12}
    assert gathered(priced(llama, 1, "dp=4,m=2")) == {"I R step": 12}


def test_parameters_in_pieces_among_a_part_of_the_ranks() -> None:
    """Hybrid sharding (Zhao et al. 2023, PyTorch FSDP, section 3.2.2): pieces in a node, replicas across."""
    assert gathered(priced(llama, 1, "dp=4,fsdp=2,m=2")) == {"I,S0 R,R use": 12}
    collectives = of_a_layer(llama, "dp=4,fsdp=2,m=1")
    assert collectives == {
        "parameter all_gather over shard": 18, "parameter reduce_scatter over shard": 9,
        "parameter all_reduce over data": 9,
    }  # fmt: skip
    with pytest.raises(PlanError, match="fsdp=3 does not divide dp=4; use a divisor"):
        priced(llama, 1, "dp=4,fsdp=3")


# --- sequences and experts -------------------------------------------------------------------------------------------


def test_a_ring_of_context_parallelism() -> None:
    collectives = of_a_layer(llama, "cp=4,m=8")
    assert collectives.pop("parameter all_reduce over context") == 9  # of gradients
    assert set(collectives) == {"send_recv over context"} and collectives["send_recv over context"] >= 3 * 3


def test_heads_are_exchanged_for_places() -> None:
    """Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv:2309.14509): queries, keys, values and results, there and back."""
    assert of_a_layer(llama, "cp=4:ulysses,m=8") == {
        "all_to_all over context": 8, "parameter all_reduce over context": 9,
    }  # fmt: skip


def test_keys_and_values_are_gathered() -> None:
    assert of_a_layer(llama, "cp=4:allgather,m=8") == {
        "all_gather over context": 2, "reduce_scatter over context": 2, "parameter all_reduce over context": 9,
    }  # fmt: skip


def test_context_beside_data_takes_the_loss_of_each_ranks_places() -> None:
    found = priced(llama, 1, "dp=2,cp=2,m=1")
    (stage,) = found.plan.stages
    assert "loss over [batch vocabulary sequence]" in found.pinned.notes[0]
    paths = stage.reshard_paths.items()
    assert not any("S2" in src.text or "I" in dst.text for name, steps in paths if name.startswith("to_")
                   for src, dst in steps)  # fmt: skip


def test_rows_travel_to_experts() -> None:
    collectives = of_a_layer(mixtral, "dp=4,ep=4,m=1")
    assert collectives["all_to_all over expert"] >= 4  # there and back, forward and backward
    (stage,) = priced(mixtral, 1, "dp=4,ep=2,m=1").plan.stages
    experts = {name: choice for name, choice in stage.params.items() if "experts" in name}
    assert experts and all(choice.stored == State.of("I", "S0") for choice in experts.values())
    assert next(cuts for name, cuts in stage.ops.items() if "expert_block" in name) == ("s", "travel")
    (stage,) = priced(mixtral, 1, "dp=2,tp=2,ep=2,m=1").plan.stages
    assert next(cuts for name, cuts in stage.ops.items() if "expert_block" in name) == ("travel", "ffn")
    (stage,) = priced(mixtral, 1, "dp=2,tp=2,ep=4,etp=1,m=1").plan.stages
    assert next(cuts for name, cuts in stage.ops.items() if "expert_block" in name) == ("travel", "travel+")
    with pytest.raises(PlanError, match="ep=2 needs routed experts, the model has none"):
        priced(llama, 1, "dp=4,ep=2,m=1")


# --- pipelines -------------------------------------------------------------------------------------------------------


def test_blocks_are_divided_evenly() -> None:
    assert sizes_of(126, 128) == [0, *[1] * 126, 0]
    assert sizes_of(8, 4) == [2, 2, 2, 2] and sizes_of(7, 4) == [2, 2, 2, 1] and sizes_of(6, 4) == [1, 2, 2, 1]
    assert described(sizes_of(126, 128)) == "blocks of the stages: 0, 126 x 1, 0" and not described([2, 2])
    found = priced(llama, 4, "pp=2,vp=2,m=4", "local-x2")
    plan = found.plan
    graph = found.captured.graph
    starts = [graph.nodes[graph.index[name]].module for name in plan.starts]
    assert [name.split(".input")[0] for name in starts] == ["model.layers.1", "model.layers.2", "model.layers.3"]
    assert plan.schedule.name.startswith("interleaved-1f1b")
    assert priced(llama, 4, "pp=4,mbs=1").plan.microbatches == ROWS
    with pytest.raises(PlanError, match=r"8 stages .pp x vp. are more than the model's 4 blocks"):
        priced(llama, 4, "pp=2,vp=4,m=4", "local-x2")


def test_recomputation() -> None:
    (none,) = priced(llama, 2, "dp=4,m=1").plan.stages
    (full,) = priced(llama, 2, "dp=4,m=1,recompute=full").plan.stages
    (part,) = priced(llama, 2, "dp=4,m=1,recompute=selective:mlp").plan.stages
    assert "recompute" not in none.memory and len(full.memory["recompute"]) == len(part.memory["recompute"]) == 2
    assert full.price.compute_seconds > part.price.compute_seconds > none.price.compute_seconds
    assert full.kept_bytes < part.kept_bytes < none.kept_bytes


# --- other models, memory, the calls ---------------------------------------------------------------------------------


def test_images_and_encoders() -> None:
    with torch.device("meta"):
        vit = ViTForImageClassification(ViTConfig(
            hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=8, image_size=32,
            patch_size=8, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ))  # fmt: skip
        pictures = {"pixel_values": torch.zeros(ROWS, 3, 32, 32), "labels": torch.zeros(ROWS, dtype=torch.long)}
        t5 = T5ForConditionalGeneration(T5Config(
            d_model=HIDDEN, d_ff=FFN, d_kv=8, num_layers=2, num_heads=8, dropout_rate=0.0, vocab_size=VOCABULARY,
            use_cache=False, decoder_start_token_id=0,
        ))  # fmt: skip
        ids = torch.zeros(ROWS, SEQUENCE, dtype=torch.long)
    for model, batch in ((vit, pictures), (t5, {"input_ids": ids, "labels": ids})):
        of_model = autopar.layouts(model, batch)
        (stage,) = of_model.price("local-x4", "tp=4,m=1").plan.stages
        sums = [name for name, steps in stage.reshard_paths.items() if any(src == State.of("P") for src, _ in steps)]
        of_blocks = [name for name in sums if not name.startswith("embedding")]
        assert len(of_blocks) == (2 * 2 if model is vit else 2 * 2 + 2 * 3)  # attentions and network
        assert of_model.price("local-x4", "dp=2,tp=2,sp,zero=1,m=2").seconds > 0
        assert of_model.price("local-x2", "pp=2,m=2").plan.n_devices == 2


def test_what_does_not_fit_has_a_price() -> None:
    with torch.device("meta"):
        model, ids = llama(2), torch.zeros(ROWS, SEQUENCE, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    found = autopar.layouts(model, batch, memory_limit="64KiB").price("local-x4", "dp=4,m=1")
    assert not found.fits and found.memory_bytes > found.limit_bytes == 2**16 and found.seconds > 0
    with pytest.raises(InfeasibleError, match=r"needs .* on its fullest device, which may fill 64.00 KiB"):
        autopar.plan(model, "local-x4", batch, like="dp=4,m=1", memory_limit="64KiB")
    with pytest.raises(AutoparError, match="like= says stages, too"):
        autopar.plan(model, "local-x4", batch, like="dp=4,m=1", stages=2)
    plan = autopar.plan(model, "local-x4", batch, like="dp=2,tp=2,m=2")
    assert plan.mesh.text == "data=2,tensor=2" and plan.microbatches == 2 and plan.pins.mesh == plan.mesh


def test_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: Any, **__: Any) -> None:
        raise AssertionError("a pinned layout was searched for")

    monkeypatch.setattr(ExactPlans, "exact", search)
    monkeypatch.setattr("autopar.planner.intra_op.mesh_problem.MeshProblem.problem", search)
    assert priced(llama, 4, "pp=2,tp=2,m=4").seconds > 0


def test_what_axes_cut_in_words() -> None:
    found = priced(llama, 2, "dp=2,tp=2,m=2")
    shares = axis_shares(found.captured.graph, found.plan)
    assert shares == {"data=2": {"the batch": 1.0}, "tensor=2": {"features": 1.0}}
    assert axes_in_words(shares) == "data=2 shards the batch; tensor=2 shards features"
    found = priced(llama, 2, "cp=2,m=8", "local-x2")
    assert axis_shares(found.captured.graph, found.plan) == {"context=2": {"the sequence": 1.0}}
    found = priced(mixtral, 1, "dp=4,ep=2,m=1")
    of_experts = axis_shares(found.captured.graph, found.plan)["expert=2"]
    assert set(of_experts) == {"experts", "the batch"}
    words = axes_in_words({"data=4": {"features": 0.9, "nothing": 0.1}})
    assert words == "data=4 shards features (90%), 10% replicated"


def test_what_context_parallelism_would_leave_to_every_rank_is_refused() -> None:
    """Products over ``(batch sequence)`` are cut by rows alone; a single row at a time has no such dim."""
    with pytest.raises(PlanError, match=r"cp=2 would have every rank compute .* take rows and places of a sequence"):
        priced(gpt2, 2, "dp=2,cp=2,m=1")
    assert priced(gpt2, 2, "cp=4,mbs=1").seconds > 0
