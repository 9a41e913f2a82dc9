"""Stages begin between layers where that is as good as within one: no boundary that an expert would not have drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.capture import capture
from autopar.planner.inter_op.blocks import blocks
from autopar.planner.intra_op.building.fold import fold
from autopar.planner.intra_op.memory.recomputable import block_starts
from autopar.plans.stage_graphs import hot_ops
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.labels import common_depth

LAYERS = 6


def graph_of(model: Any) -> Graph:
    ids = torch.zeros(2, 32, dtype=torch.long, device="meta")
    return capture(model, (), {"input_ids": ids, "labels": ids}).graph


def llama() -> Any:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=128,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=LAYERS, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


@pytest.mark.parametrize("make, of_layer", [(llama, "model.layers"), (gpt2, "transformer.h")])
def test_blocks_begin_with_layers(make: Any, of_layer: str) -> None:
    """Between attention and the rest of a layer as many bytes cross as between layers."""
    graph = graph_of(make())
    folding = fold(graph)
    ops = hot_ops(graph)
    firsts = [ops[b.first] for b in blocks(graph, folding, rules_of(graph, folding.representative))]
    again = block_starts(graph, folding)
    of_layers = [i for i, node in graph.of_kind("op") if node.module.startswith(f"{of_layer}.")]
    layer = {i: graph.nodes[i].module.split(".")[of_layer.count(".") + 1] for i in of_layers}
    for starts in (firsts, again):
        inside = [i for i in starts if i in layer]
        assert len(inside) >= LAYERS - 1, "one for each layer, or for each but the first"
        for i in inside:
            before = max((k for k in of_layers if k < i and graph.nodes[k].hot), default=None)
            assert before is None or layer[before] != layer[i], graph.nodes[i].where


def test_fewer_modules_are_around_two_layers_than_around_two_parts_of_one() -> None:
    assert common_depth("model.layers.0", "model.layers.1.norm") == 2
    assert common_depth("model.layers.0.attn", "model.layers.0.norm") == 3
    assert common_depth("", "model") == common_depth("", "") == common_depth("a", "b") == 0
