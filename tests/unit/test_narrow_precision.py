"""Policies with products in eight and four bits: which products, their seconds and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import autopar
from autopar.errors import AutoparError, PlanError
from autopar.planner.intra_op.building import parameter_sharding
from autopar.planner.intra_op.building.narrow_prices import SCALE_KERNELS
from autopar.plans.clusters import get_cluster
from autopar.plans.plan import ParamChoice
from autopar.report.rows import rule_text
from autopar.rules.registry import rules_of
from autopar.rules.saved_tensors import saved_of
from autopar.words.graph import Graph, Spec
from autopar.words.meshes import Mesh
from autopar.words.narrow_products import FORMATS, NARROW_LINEAR
from autopar.words.placements import State, shard, whole_state
from autopar.words.precision import PRESETS, Precision, parse_precision
from cost_models import costs_of
from cost_models.operator_cost import op_seconds
from hardware_profiles import load_device

NARROW = {name: f"{name}-mixed" for name in FORMATS}
WIDTH, ROWS = 4096, 8192


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.few, self.down = nn.Linear(width, 8), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(torch.relu(self.q(h) * self.k(h))) + self.few(h).mean()


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().logsumexp(-1).mean()


def model() -> Model:
    with torch.device("meta"):
        return Model()


def ids(rows: int = ROWS) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.long, device="meta")


def graph_of(precision: str) -> Graph:
    return autopar.capture(model(), (ids(),), precision=precision).graph


def plan_of(precision: str, cluster: str = "dgx-h100", **options: Any) -> autopar.Plan:
    wanted = {"mesh": {"data": 1}, "microbatches": 1, "stages": 1, "recompute": "none"} | options
    return autopar.plan(model(), cluster, (ids(),), precision=precision, **wanted)


def test_linear_layers_of_blocks_are_narrow_and_nothing_else() -> None:
    graph = graph_of("fp8-mixed")
    narrow = {node.module for _, node in graph.of_kind("op") if node.narrow is not None}
    assert narrow == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("q", "k", "down")}
    weights = {node.target for _, node in graph.of_kind("param") if node.narrow is not None}
    assert weights == {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("q", "k", "down")}
    shared = {node.module: node.narrow.shared for _, node in graph.of_kind("op") if node.narrow is not None}
    assert shared["blocks.0.q"] == shared["blocks.0.k"] == 2 and shared["blocks.0.down"] == 1
    targets = {node.module: node.target for _, node in graph.of_kind("op") if "linear" in node.target}
    assert {m for m, target in targets.items() if target == NARROW_LINEAR} == narrow
    assert all("narrow" not in node.target for node in graph_of("mxfp8-mixed").nodes)  # priced, not run
    assert not any(node.narrow for node in graph_of("bf16-mixed").nodes)


def test_reports_say_what_is_narrow() -> None:
    graph = graph_of("fp8-mixed")
    texts = {
        node.module: rule_text(node, rule)
        for node, rule in zip(graph.nodes, rules_of(graph), strict=True) if rule is not None and rule.kind == "matmul"
    }  # fmt: skip
    assert texts["blocks.0.q"].endswith("(in fp8)") and not texts["head"].endswith("(in fp8)")


def test_a_policy_is_wide_for_what_is_no_weight_of_a_narrow_product() -> None:
    graph = graph_of("mxfp8-mixed")
    policies = {node.target: graph.policy_of(node) for _, node in graph.of_kind("param")}
    assert policies["blocks.0.q.weight"] == PRESETS["mxfp8-mixed"]
    assert policies["words.weight"] == policies["blocks.0.norm.weight"] == PRESETS["bf16-mixed"]


def test_a_narrow_product_takes_its_rate_and_its_casts() -> None:
    """The difference of two plans is what the formulas give, operator by operator."""
    device = load_device("H100-SXM-80GB")
    costs = costs_of(get_cluster("dgx-h100"))
    gemm, flops = (ROWS, WIDTH, WIDTH), 2.0 * ROWS * WIDTH * WIDTH
    elements = ROWS * WIDTH
    wide = op_seconds(device, "matmul", flops, 0, "bfloat16", gemm)
    narrow = op_seconds(device, "matmul", flops, 0, "float8_e4m3fn", gemm)
    assert 1.3 < wide / narrow < 2
    # forward: activation and weight; backward: gradient and weight; with the kernels that find three scales
    there, back = elements + WIDTH * WIDTH, elements + WIDTH * WIDTH
    casts = costs.copy(device, there * (2 * 2 + 2), "bfloat16") + costs.copy(device, back * (2 * 2 + 2), "bfloat16")
    scales = 3 * SCALE_KERNELS * costs.copy(device, 4, "float32")
    per_block = 3 * (3 * (narrow - wide) + casts + scales)
    difference = plan_of("fp8-mixed").price.compute_seconds - plan_of("bf16-mixed").price.compute_seconds
    assert difference == pytest.approx(2 * per_block, rel=0.03, abs=60e-6)
    with_wide = plan_of("fp8-row-mixed").price.compute_seconds - plan_of("bf16-mixed").price.compute_seconds
    assert with_wide - difference == pytest.approx(2 * 3 * (wide - narrow - elements * 4 / 2.5e12), rel=0.2)


def test_software_that_fuses_shares_casts_and_keeps_those_of_weights() -> None:
    own, theirs = plan_of("fp8-mixed"), plan_of("fp8-mixed", "dgx-h100 as megatron-2023")
    weights = 2 * 3 * WIDTH * WIDTH
    wide = plan_of("bf16-mixed", "dgx-h100 as megatron-2023").price
    assert theirs.price.gathered_bytes - wide.gathered_bytes == pytest.approx(2 * weights, rel=1e-6)
    assert theirs.price.compute_seconds < own.price.compute_seconds


def test_formats_are_faster_the_narrower_they_are() -> None:
    seconds = {name: plan_of(name, "dgx-b200").seconds for name in ("bf16-mixed", *NARROW.values())}
    assert seconds["nvfp4-mixed"] < seconds["mxfp8-mixed"] < seconds["fp8-mixed"] < seconds["bf16-mixed"]
    assert seconds["fp8-delayed-mixed"] < seconds["fp8-mixed"]


def test_state_has_both_narrow_copies_beside_the_wide_one() -> None:
    weights = 2 * 3 * WIDTH * WIDTH
    bf16 = plan_of("bf16-mixed").price
    for name, bytes_of_copies in (("fp8", 0.0), ("mxfp8", 2 + 2 / 32), ("nvfp4", 1 + 2 / 16)):
        price = plan_of(f"{name}-mixed", "dgx-b200").price
        assert price.gathered_bytes - bf16.gathered_bytes == pytest.approx(weights * bytes_of_copies, rel=1e-6)
        assert (price.parameter_bytes, price.optimizer_bytes) == (bf16.parameter_bytes, bf16.optimizer_bytes)
    gathered = plan_of("products=mxfp8,narrow_gathers=true", "dgx-b200").price  # two narrow copies, no wide one
    assert gathered.gathered_bytes - bf16.gathered_bytes == pytest.approx(weights * (2 / 32), rel=1e-6)


def test_the_backward_keeps_activations_in_narrow_copies() -> None:
    """A product keeps its activations; a narrow one a copy, where that is shared one for all that read the same."""
    elements = ROWS * WIDTH
    kept = {}
    for name in ("bf16-mixed", "fp8-mixed", "nvfp4-mixed"):
        graph = graph_of(name)
        rules = rules_of(graph)
        saved = {
            graph.nodes[i].module: saved_of(graph, i, rule, None, Mesh())
            for i, rule in enumerate(rules) if rule is not None and rule.kind == "matmul"
        }  # fmt: skip
        kept[name] = {module: (0 in each.ins, each.inside_bytes) for module, each in saved.items()}
    assert kept["bf16-mixed"]["blocks.0.q"] == kept["bf16-mixed"]["blocks.0.down"] == (True, 0)
    # a copy of its own for each product that runs, and two scales
    assert {kept["fp8-mixed"][f"blocks.0.{name}"] for name in ("q", "k", "down")} == {(False, elements + 8)}
    assert kept["nvfp4-mixed"]["blocks.0.q"] == kept["nvfp4-mixed"]["blocks.0.k"] == (False, elements * 9 // 32)
    assert kept["nvfp4-mixed"]["blocks.0.down"] == (False, elements * 9 // 16)
    assert kept["fp8-mixed"]["blocks.0.few"] == kept["fp8-mixed"]["head"] == (True, 0)


def test_experts_keep_rows_and_hidden_activations_narrow() -> None:
    """Of 512 MiB of rows and 192 MiB of what the second product reads a half each."""
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        experts = Qwen3MoeForCausalLM(config)
    batch = torch.zeros(4, 4096, dtype=torch.long, device="meta")
    kept = {}
    for name in ("bf16-mixed", "fp8-mixed"):
        graph = autopar.capture(experts, {"input_ids": batch, "labels": batch}, precision=name).graph
        rules = rules_of(graph)
        at = next(i for i, node in enumerate(graph.nodes) if node.target.startswith("autopar.expert_block"))
        rule = rules[at]
        assert rule is not None
        kept[name] = saved_of(graph, at, rule, None, Mesh()).inside_bytes
        narrow = {node.module.rpartition(".")[2] for node in graph.nodes if node.kind == "op" and node.narrow}
    assert narrow == {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}  # the router is not
    assert kept["bf16-mixed"] - kept["fp8-mixed"] == (512 + 192) * 2**20 // 2


def test_narrow_gathers_move_a_byte_an_element() -> None:
    spec, mesh = Spec((WIDTH, WIDTH), "bfloat16"), Mesh((("data", 8),))
    choice = ParamChoice(State((shard(0),)), whole_state(mesh), "use")
    moved = {}
    for name in ("bf16-mixed", "fp8-mixed", "products=fp8,narrow_gathers=true"):
        policy = parse_precision(name)
        collectives = parameter_sharding.collectives(spec, True, choice, mesh, 2, policy)
        moved[name] = {kind: (n_bytes, times) for _, kind, n_bytes, times in collectives}
    n = WIDTH * WIDTH
    assert moved["fp8-mixed"] == moved["bf16-mixed"] == {"all_gather": (2 * n, 4), "reduce_scatter": (4 * n, 2)}
    assert moved["products=fp8,narrow_gathers=true"] == {"all_gather": (n, 4), "reduce_scatter": (4 * n, 2)}


def test_copies_of_a_weight() -> None:
    spec, mesh, n = Spec((WIDTH, WIDTH), "bfloat16"), Mesh((("data", 8),)), 1 << 24
    kept, anew = (ParamChoice(whole_state(mesh), whole_state(mesh), lifetime) for lifetime in ("step", "use"))
    fp8, gathers = PRESETS["fp8-mixed"], parse_precision("products=fp8,narrow_gathers=true")
    assert gathers is not None
    assert parameter_sharding.cast_bytes(spec, kept, n, 4, fp8) == 6 * n
    assert parameter_sharding.cast_bytes(spec, anew, n, 4, fp8) == 8 * 6 * n
    assert parameter_sharding.cast_bytes(spec, anew, n, 4, gathers) == 0
    assert parameter_sharding.cast_bytes(spec, kept, n, 4, PRESETS["bf16-mixed"]) == 0
    assert parameter_sharding.copy_bytes(fp8, n, 2) == 4 * n and parameter_sharding.copy_bytes(gathers, n, 2) == 2 * n


def test_weights_are_cast_once_a_step_by_software_that_keeps_copies() -> None:
    device = load_device("B200")
    weights = 2 * 3 * WIDTH * WIDTH
    wide = plan_of("bf16-mixed", "dgx-b200").price.optimizer_seconds
    once = plan_of("nvfp4-mixed", "dgx-b200").price.optimizer_seconds - wide
    bandwidth = device.memory_bytes_per_second * device.efficiency["pointwise"].fraction
    assert once == pytest.approx((2 * 2 + 2 * 9 / 16) * weights / bandwidth, rel=0.1)
    assert plan_of("products=nvfp4,narrow_gathers=true", "dgx-b200").price.optimizer_seconds == pytest.approx(wide)
    assert plan_of("fp8-mixed", "dgx-b200").price.optimizer_seconds == pytest.approx(wide)  # cast for each use


@pytest.mark.parametrize(
    ("precision", "cluster", "said"),
    [
        ("fp8-mixed", "dgx-a100", "need cores with a rate for float8, and A100-SXM-80GB has rates for bfloat16"),
        ("mxfp8-mixed", "dgx-h100", "products in mxfp8 need cores with a rate for float4"),
        ("nvfp4-mixed", "dgx-h200", "take another precision, such as bf16-mixed, or other devices"),
    ],
)
def test_devices_without_such_cores_are_refused(precision: str, cluster: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_of(precision, cluster)


@pytest.mark.parametrize("name", [f"{name}-mixed" for name, numbers in FORMATS.items() if not numbers.runs])
def test_nobody_runs_what_is_priced_alone(name: str) -> None:
    net = Model(32, 1)
    with pytest.raises(PlanError, match=r"planned and priced, but not run: run fp8-mixed, fp8-row-mixed, or 'bf"):
        autopar.parallelize(net, 1, (torch.zeros(16, dtype=torch.long),), precision=name)


def test_words_of_policies() -> None:
    both = parse_precision("products=mxfp8,narrow_gathers=true,moments=bfloat16")
    assert both == Precision(products="mxfp8", narrow_gathers=True, moments="bfloat16")
    assert both is not None and parse_precision(both.text) == both
    assert PRESETS["nvfp4-mixed"].wide == PRESETS["bf16-mixed"] and PRESETS["nvfp4-mixed"].text == "nvfp4-mixed"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("products=fp6", "give fp8, fp8-row, fp8-delayed, mxfp8, nvfp4"),
        ("modules=layers.*", "give products, or leave it out"),
        ("products=fp8-row,narrow_gathers=true", "scales of other rows in the forward and in the backward"),
        ("params=own,products=fp8", "give params a format"),
        ("narrow_gathers=true", "applies to narrow products"),
        ("products=fp8,narrow_gathers=maybe", "give bf16-mixed"),
    ],
)
def test_policies_that_mean_nothing(given: str, said: str) -> None:
    with pytest.raises(AutoparError, match=said):
        parse_precision(given)
