"""The load of routed experts as an input of prices: the rank that has most rows is the one that is priced."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from skewed_experts import MODELS, mixtral

import autopar
from autopar import planfile
from autopar.certificate.recount import check
from autopar.cli import main
from autopar.errors import PlanError
from autopar.plans.plan import Plan
from autopar.profiling.measured_load import measured_load
from autopar.rules.experts.expert_load import with_load
from autopar.words.load_shares import busiest, grown, parse_load, path_to_busiest, uniform
from hardware_profiles import load_cluster

SKEWED = [5, 1, 1, 1]


def planned(name: str, mesh: str, option: str, load: Any, axis: str = "expert") -> tuple[Plan, Any]:
    model, kwargs = MODELS[name]()
    captured = autopar.capture(model, (), example_kwargs=kwargs)
    sizes = [int(part.partition("=")[2]) for part in mesh.split(",")]
    plan = autopar.plan(
        model, f"local-x{torch.tensor(sizes).prod()}", (), example_kwargs=kwargs, captured=captured, mesh=mesh,
        constraints={"*:expert_block*": dict.fromkeys(axis.split(","), option)}, expert_load=load,
    )  # fmt: skip
    return plan, captured


def test_shares_and_the_way_to_the_busiest() -> None:
    load = parse_load([1, 1, 6, 0, 0, 0, 0, 2], "x")["*"]
    assert busiest(load, 2) == (0, 0.8) and busiest(load, 4) == (1, 0.6)
    [first, second] = path_to_busiest(load, [2, 2])
    assert first == (0, pytest.approx([0.8, 0.2])) and second == (1, pytest.approx([0.25, 0.75]))
    assert grown(load, [2, 2]) == pytest.approx([1.6, 2.4])
    assert grown(uniform(8), [2, 4]) == pytest.approx([1, 1])
    assert busiest(uniform(10), 4) == (0, pytest.approx(0.3))  # 3, 3, 3 and 1 of them


@pytest.mark.parametrize("option", ["travel", "e"])
@pytest.mark.parametrize(("name", "mesh", "axis"), [
    ("mixtral", "expert=2", "expert"),
    pytest.param("mixtral", "data=2,expert=2", "data,expert", marks=pytest.mark.slow),
    pytest.param("mixtral", "data=2,expert=2", "expert", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_busiest_rank_is_priced(name: str, mesh: str, axis: str, option: str) -> None:
    """Seconds and bytes are those of the emitted program on as many rows as that rank has."""
    even, _ = planned(name, mesh, option, None, axis)
    plan, captured = planned(name, mesh, option, SKEWED, axis)
    assert plan.fingerprint == even.fingerprint
    assert plan.seconds > even.seconds
    if option == "travel":
        assert plan.price.activation_bytes > even.price.activation_bytes
    n = 4 if "," in axis else 2
    share = 5 / 8 if n == 4 else 6 / 8
    [note] = [note for note in plan.notes if "slowest" in note]
    assert f"rank 0 of the {n} along {' x '.join(axis.split(','))}" in note and f"{share:.1%} of the rows" in note
    assert not any("slowest" in note for note in even.notes)
    graph = with_load(captured.graph, plan.pins.expert_load)
    report = check(plan.stages[0], graph, load_cluster(plan.cluster))
    assert report.ok, report.failures
    assert report.price.compute_seconds == pytest.approx(plan.price.compute_seconds, rel=1e-3)
    assert report.price.activation_seconds == pytest.approx(plan.price.activation_seconds, rel=2e-2)


def test_features_are_exchanged_of_the_rows_that_came() -> None:
    model, kwargs = mixtral()
    captured = autopar.capture(model, (), example_kwargs=kwargs)
    cut = {"*:expert_block*": {"expert": "travel", "tensor": "ffn"}}
    even, plan = (
        autopar.plan(model, "local-x4", (), example_kwargs=kwargs, captured=captured, mesh="expert=2,tensor=2",
                     constraints=cut, expert_load=load)
        for load in (None, SKEWED)
    )  # fmt: skip
    assert plan.price.activation_seconds > even.price.activation_seconds
    report = check(plan.stages[0], with_load(captured.graph, plan.pins.expert_load), load_cluster(plan.cluster))
    assert report.ok, report.failures
    assert report.price.activation_seconds == pytest.approx(plan.price.activation_seconds, rel=1e-2)


def test_layers_may_have_loads_of_their_own_and_files_keep_them(tmp_path: Path) -> None:
    loads = {"*": [1, 1, 1, 1], "model.layers.1.*": SKEWED}
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(loads))
    plan, captured = planned("mixtral", "expert=2", "travel", str(path))
    [note] = [note for note in plan.notes if "slowest" in note]
    assert "layers.1." in note and "layers.0." not in note
    saved = tmp_path / "plan.json"
    planfile.save(saved, plan, captured.graph, None)
    assert planfile.load(saved, captured.graph) == plan
    raw = json.loads(saved.read_text())
    raw["pins"]["expert_load"]["model.layers.1.*"] = [1, 1, 1, 5]
    saved.write_text(json.dumps(raw))
    again = planfile.load(saved, captured.graph)  # priced anew
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-9)
    raw["pins"]["expert_load"] = {"*": [1.0]}
    saved.write_text(json.dumps(raw))
    with pytest.raises(PlanError, match=r"is of 1 experts, .* has 4"):
        planfile.load(saved, captured.graph)


def test_measured_is_what_the_routers_do() -> None:
    model, kwargs = mixtral()
    captured = autopar.capture(model, (), example_kwargs=kwargs)
    loads = measured_load(captured, model, (), kwargs)
    assert len(loads) == 2
    seen: list[torch.Tensor] = []
    hooks = [
        m.register_forward_hook(lambda m, args, out: seen.append(out[2]))
        for path, m in model.named_modules() if path.endswith("mlp.gate")
    ]  # fmt: skip
    with torch.no_grad():
        model(**kwargs)
    for hook in hooks:
        hook.remove()
    for load, picked in zip(loads.values(), seen, strict=True):
        counts = picked.flatten().bincount(minlength=4).double()
        assert load == pytest.approx((counts / counts.sum()).tolist())
    plan, _ = planned("mixtral", "expert=2", "travel", "measured")
    assert dict(plan.pins.expert_load) == loads and any("slowest" in note for note in plan.notes)


@pytest.mark.parametrize(("load", "said"), [
    ([1, 2], r"of 2 experts, .* has 4"), ({"nothing.*": SKEWED}, "matches no routed experts"),
    ([1, -1, 1, 1], "expert 1 has -1"), ([1e308] * 4, "at most 1e"), ([1, 10**400, 1, 1], "at most 1e"),
    ([0, 0, 0, 0], "all 4 experts have 0 rows"), ("no-such-file.json", "no file"),
])  # fmt: skip
def test_what_is_no_load_is_refused(load: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned("mixtral", "expert=2", "travel", load)


def test_models_without_values_are_not_measured() -> None:
    model, kwargs = mixtral()
    with pytest.raises(PlanError, match="meta device"):
        autopar.plan(model.to("meta"), "local-x2", (), example_kwargs=kwargs, expert_load="measured")


def test_the_command_measures(tmp_path: Path) -> None:
    """A factory's model is loaded with its values, and the plan file keeps what was measured."""
    (tmp_path / "moe.py").write_text(
        "from skewed_experts import mixtral\ndef make():\n    model, kwargs = mixtral()\n    return model, (), kwargs\n"
    )
    out = tmp_path / "plan.json"
    said = [f"{tmp_path / 'moe.py'}:make", "-c", "local-x2", "-m", "expert=2", "--pin", "*:expert_block*:expert=travel"]
    printed = io.StringIO()
    for words in (["plan", *said, "--expert-load", "measured", "-o", str(out)], ["show", str(out), "--trust"]):
        with mock.patch.object(sys, "argv", ["autopar", *words]), pytest.raises(SystemExit) as end:
            with contextlib.redirect_stdout(printed):
                main()
        assert not end.value.code
    assert " ".join(printed.getvalue().split()).count("is the slowest") >= 2  # of each layer, in plan and in show
    loads = json.loads(out.read_text())["pins"]["expert_load"]
    assert len(loads) == 2 and all(len(load) == 4 for load in loads.values())
