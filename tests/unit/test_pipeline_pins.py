"""What a user asks of a pipeline: stages, cuts, schedule, microbatches, and wishes about operators and parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn
from zoo import ZOO

from autopar import planfile as files
from autopar.capture import Captured, capture
from autopar.errors import AutoparError
from autopar.parallelizing import arguments
from autopar.planner import planning
from autopar.planner.inter_op.stage_pins import of_stage, starts_of
from autopar.planner.intra_op.mesh_plan import Options
from autopar.plans.plan import Plan
from autopar.plans.request import request_of
from autopar.plans.stage_graphs import cut
from autopar.words.labels import op_labels
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from hardware_profiles import load_cluster


@pytest.fixture(scope="module")
def captured() -> Captured:
    case = ZOO["gpt2"](layers=3)
    return capture(case.model, case.args, case.kwargs)


def planned(captured: Captured, cluster: str = "local-x4", **asked: Any) -> Plan:
    """A plan of four microbatches of what was captured."""
    arguments.check(**asked)
    wanted = request_of({"stages": 2, "microbatches": 4, "schedule": "1f1b", **asked})
    where = load_cluster(cluster)
    return planning.find(nn.Identity(), captured, tuple, where, where.n_devices, wanted).plan


def test_cuts_by_module_by_label_and_by_name(captured: Captured) -> None:
    labels = op_labels(captured.graph)
    (start,) = starts_of(captured.graph, ["transformer.h.1"])
    assert labels[start].startswith("transformer.h.1.ln_1:")
    assert starts_of(captured.graph, [labels[start]]) == starts_of(captured.graph, [start]) == (start,)
    plan = planned(captured, cuts=["transformer.h.1"])
    assert plan.starts == (start,)
    three = planned(captured, "local-x3", stages=None, cuts=["transformer.h.1", "transformer.ln_f"])
    assert [labels[s].split(":")[0] for s in three.starts] == ["transformer.h.1.ln_1", "transformer.ln_f"]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_cuts_of_groups_with_two_stages(captured: Captured, schedule: str) -> None:
    cuts = ["transformer.h.1", "transformer.h.2", "transformer.ln_f"]
    plan = planned(captured, "local-x2", schedule=schedule, cuts=cuts)
    assert len(plan.stages) == 4 and plan.schedule.n_ranks == 2


def test_a_file_keeps_the_wishes(captured: Captured) -> None:
    plan = planned(
        captured, mesh="tensor=2", cuts=["transformer.h.2"],
        constraints={"transformer.h.0.attn.c_attn": {"tensor": "n"}},
        params={"transformer.h.*.mlp.c_fc.weight": "S1 use"}, placements={0: "I"}, memory_limit="4GiB",
    )  # fmt: skip
    pins = plan.pins
    assert (pins.stages, pins.cuts, pins.schedules, pins.microbatches) == (2, ("transformer.h.2",), ("1f1b",), 4)
    assert pins.memory_limit_bytes == 4 * 2**30 and pins.outputs == {0: State.of("I")}
    text = files.dumps(plan, captured.graph)
    again = files.loads(text, captured.graph)
    assert again.pins == pins and files.dumps(again, captured.graph) == text
    assert planned(captured, schedule=None).pins.schedules == ()


@pytest.mark.parametrize(
    "pins, message",
    [
        ({"stagez": 2}, "pins.stagez: unknown key; did you mean 'stages'?"),
        ({"stages": 0}, "pins.stages: got 0; expected a whole number of 1 or more"),
        ({"cuts": "h.1"}, 'pins.cuts: got "h.1"; expected a list'),
        ({"mesh": "data"}, "pins.mesh: mesh 'data': 'data' is no axis=size"),
        ({"params": {"*": "S0 zig"}}, "'zig' is no lifetime"),
    ],
)
def test_a_file_with_bad_wishes(captured: Captured, pins: dict[str, Any], message: str) -> None:
    document = json.loads(files.dumps(planned(captured), captured.graph))
    with pytest.raises(AutoparError) as error:
        files.loads(json.dumps({**document, "pins": pins}), captured.graph)
    assert message in str(error.value)


def test_wishes_about_operators_and_parameters(captured: Captured) -> None:
    """Each reaches the stage that it concerns, by name and by pattern; others are not disturbed."""
    plan = planned(
        captured, mesh="tensor=2", cuts=["transformer.h.1"],
        constraints={"transformer.h.2.mlp.c_fc": {"tensor": "n"}, "transformer.h.*.mlp.c_proj": {"tensor": "k"}},
        params={"transformer.wpe.weight": "S1", "transformer.h.*.attn.c_attn.weight": "replicate"},
    )  # fmt: skip
    stages = cut(captured.graph, plan.starts)
    cuts: dict[str, tuple[str, ...]] = {}
    for stage, choice in zip(stages, plan.stages, strict=True):
        labels = op_labels(stage.graph)
        cuts |= {labels[n.name]: choice.ops[n.name] for n in stage.graph.nodes if n.kind == "op"}
    kept = {name: c.stored for choice in plan.stages for name, c in choice.params.items()}
    assert cuts["transformer.h.2.mlp.c_fc:addmm"] == ("n",)
    assert {v for k, v in cuts.items() if k.endswith(".mlp.c_proj:addmm")} == {("k",)}
    assert kept["transformer.wpe.weight"] == State.of("S1")
    assert {v for k, v in kept.items() if k.endswith("attn.c_attn.weight")} == {State.of("I")}


def test_wishes_choose_the_mesh(captured: Captured) -> None:
    """Groups of four and of two have shapes with an axis ``tensor``; over groups of one device nothing is cut."""
    plan = planned(captured, stages="auto", schedule=None, constraints={"transformer.h.0.mlp.c_fc": {"tensor": "n"}})
    assert all(dict(stage.mesh).get("tensor", 1) > 1 for stage in plan.stages)


def test_outputs_and_inputs_go_to_their_stage(captured: Captured) -> None:
    stages = cut(captured.graph, starts_of(captured.graph, ["transformer.h.1"]))
    asked = Options(inputs={"input_ids": State.of("R"), "labels": State.of("S0")}, outputs={0: State.of("I")})
    first, last = (of_stage(asked, stage, Mesh.of(data=2)) for stage in stages)
    assert set(first.inputs or {}) == {"input_ids"} and first.outputs is None
    assert set(last.inputs or {}) == {"labels"} and last.outputs == {0: State.of("I")}


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"cuts": ["transformer.h.7"]}, "cut 'transformer.h.7': no module or operator that depends on a parameter"),
        ({"cuts": ["transformer.wte"]}, "cut 'transformer.wte' is where the model begins"),
        ({"cuts": ["transformer.h.1", "transformer.h.2"]}, "2 cuts make 3 stages, which 2 groups cannot hold (1f1b"),
        (
            {"cuts": ["transformer.h.1"], "stages": None, "schedule": "zb-v"},
            "cannot hold (zb-v: 2 a group)",
        ),
        ({"cuts": ["transformer.h.2", "transformer.h.1"], "stages": 4}, "3 stages, which 4 groups cannot hold"),
        ({"cuts": ["transformer.h.1", "transformer.h.2"], "stages": 3}, "a number of stages that divides 4"),
        ({"cuts": "transformer.h.1"}, "cuts is 'transformer.h.1'; give a list"),
        ({"constraints": {"h.9": {"data": "b"}}}, "constraint 'h.9' matches no op"),
        ({"constraints": {"*.c_fc": {"data": "zz"}}}, "no op there has factor 'zz'"),
        ({"constraints": {"*.c_fc": {"mine": "n"}}}, "(data=2), whose axes have names among data, tensor, context"),
        ({"params": {"*.gamma": "replicate"}}, "'*.gamma' matches no parameter"),
        ({"mesh": "data=2", "placements": {"ids": "S0"}}, "no input 'ids'"),
        ({"mesh": "data=2", "constraints": {"*.c_fc": {"tensor": "n"}}}, "names axis 'tensor'; the mesh has data"),
    ],
)
def test_what_cannot_be(captured: Captured, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(AutoparError) as error:
        planned(captured, **asked)
    assert message in str(error.value)


def test_cuts_out_of_order(captured: Captured) -> None:
    with pytest.raises(
        AutoparError, match=r"'transformer.h.1' is operator \d+ in execution order, 'transformer.h.2' be"
    ):
        planned(captured, "local-x3", stages=3, cuts=["transformer.h.2", "transformer.h.1"])
