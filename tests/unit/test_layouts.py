"""Layouts in the words that people use, and rows of layouts side by side."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.layouts.layout_words import parse_layout
from autopar.report.layouts import LayoutRow, model_flops, tokens_of, with_front
from autopar.words.meshes import Mesh


def graph_of(rows: int, seq: int, hidden: int, layers: int):  # type: ignore[no-untyped-def]
    config = GPT2Config(vocab_size=64, n_positions=seq, n_embd=hidden, n_layer=layers, n_head=2, use_cache=False)
    with torch.device("meta"):
        model, ids = GPT2LMHeadModel(config), torch.zeros(rows, seq, dtype=torch.long)
    return capture(model, (), {"input_ids": ids, "labels": ids}).graph


def test_words() -> None:
    layout = parse_layout("tp=8,pp=16,dp=128,vp=8,zero=1,sp")
    assert layout.mesh == Mesh.of(data=128, tensor=8) and layout.n_devices == 16384
    assert layout.schedule == "interleaved-1f1b:8" and layout.zero == 1 and layout.sequence_parallel
    assert layout.microbatches_of(2048) == 16
    graph = graph_of(2, 16, 32, 3)
    said = layout.said(graph, Options(), 16384, 2048)
    assert (said.microbatches, said.groups, said.chunks, said.mesh) == (16, 16, 8, layout.mesh)
    assert not said.options.recompute
    full = parse_layout("dp=2,m=4,recompute=full,optimizer=sgd").said(graph, Options(), 2, 8)
    assert full.options.recompute == ("transformer.h.*",) and full.options.optimizer == "sgd"
    some = parse_layout("dp=2,recompute=selective:mlp+attn").said(graph, Options(), 2, 8)
    assert some.options.recompute == ("transformer.h.*.mlp", "transformer.h.*.attn")
    first = parse_layout("pp=2,recompute=full:1,m=4").said(graph_of(2, 16, 32, 4), Options(), 2, 8)
    assert first.options.recompute == ("transformer.h.0", "transformer.h.2")
    second = parse_layout("dp=2,recompute=every:2").said(graph_of(2, 16, 32, 4), Options(), 2, 8)
    assert second.options.recompute == ("transformer.h.1", "transformer.h.3")
    assert parse_layout("tp=1").mesh == Mesh.of(data=1)
    assert parse_layout("pp=4,schedule=zb-h1").schedule == "zb-h1"
    assert (parse_layout("pp=2,schedule=zb-v").schedule, parse_layout("pp=2,schedule=zb-v").chunks) == ("zb-v", 2)
    assert parse_layout("cp=4").way == "ring" and parse_layout("cp=4:ulysses").way == "ulysses"
    assert parse_layout("dp=8,fsdp").zero == 3 and parse_layout("dp=8,gas=4").microbatches == 4
    experts = parse_layout("dp=8,ep=4,tp=2,pp=2")
    assert experts.mesh == Mesh.of(data=2, expert=4, tensor=2) and experts.n_devices == 32
    assert parse_layout("dp=8,ep=8").mesh == Mesh.of(expert=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=8,zz=3", "'zz=3' is no word of a layout"),
        ("tp=8,tp=4", "'tp' stands there twice"),
        ("tp=x", "tp is 'x'; give a whole number of 1 or more: tp=8"),
        ("recompute=some", "recompute is 'some'; use none, full"),
        ("zero=4", "zero is '4'; write zero=0, 1, 2 or 3"),
        ("mbs=1,m=4", "mbs, m and gas say the same"),
        ("recompute=selective", "name the modules of a block that run again"),
        ("dp=4,sp", "sp cuts the residual over the ranks of tp, which is 1"),
        ("cp=2:rings", "after the number stands ring, allgather, ulysses"),
        ("dp=2,etp=2", "etp=2 is neither 1 nor tp=1"),
        ("zero=3,fsdp", "fsdp is zero=3; give one of them"),
        ("vp=2", "vp=2 needs a pipeline"),
        ("dp=8,ep=3", "ep=3 does not divide dp=8; rows travel to experts among ranks of dp, so dp counts them, too: "
                      "dp=24,ep=3"),
        ("tp=2,ep=4", "ep=4 does not divide dp, 1 where it is not given"),
        ("ep=4", "so dp counts them, too: dp=4,ep=4"),
        ("pp=2,vp=2,schedule=1f1b", "1f1b puts 1 stages on each of several groups, pp=2 with vp=2"),
        ("pp=2,schedule=fifo", "no schedule 'fifo'"),
    ],
)
def test_words_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_layout(text)
    assert said in str(error.value)


def test_layouts_for_other_devices_and_batches() -> None:
    graph = graph_of(2, 16, 32, 3)
    with pytest.raises(PlanError, match="dp=4 x pp=2 makes 8 devices, the cluster has 4"):
        parse_layout("dp=4,pp=2").said(graph, Options(), 4, 8)
    with pytest.raises(PlanError, match="with 2 microbatches gradients are whole"):
        parse_layout("dp=4,zero=2").said(graph, Options(), 4, 8)
    with pytest.raises(PlanError, match="once a use, not once a microbatch; write zero=1 or fsdp"):
        parse_layout("dp=4,fsdp=keep").said(graph, Options(), 4, 8)
    with pytest.raises(PlanError, match="a batch of 6 rows cannot be cut by dp=4 with mbs=1"):
        parse_layout("dp=4").said(graph, Options(), 4, 6)


def test_flops_are_six_for_every_parameter_and_token() -> None:
    """Twelve squares of the hidden size in a layer, the head, and attention's two products."""
    rows, seq, hidden, layers = 4, 32, 64, 3
    graph = graph_of(rows, seq, hidden, layers)
    tokens = rows * seq
    assert tokens_of(graph) == tokens
    weights = 6 * tokens * (layers * 12 * hidden**2 + 64 * hidden)
    attention = 3 * layers * 2 * 2 * rows * seq * seq * hidden
    assert weights < model_flops(graph) <= weights + attention


def test_the_front_of_time_against_memory() -> None:
    rows = [LayoutRow(str(k), s, 0.0, b, 1.0, 0.5) for k, (s, b) in enumerate([(3.0, 1.0), (1.0, 5.0), (2.0, 7.0)])]
    assert [(r.what, r.on_front) for r in with_front(rows)] == [("1", True), ("2", False), ("0", True)]
