"""Parameters whose state is in the memory of the host: chosen, pinned, priced, certified, written and exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import planfile
from autopar.capture import Captured
from autopar.certificate import check
from autopar.certificate.peak import peak_of
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.host_bytes import host_bytes
from autopar.plans.plan import Plan, StagePlan
from autopar.targets import target_named
from autopar.targets.host_shares import HostShares, host_shares
from autopar.targets.target import ConfigError
from cost_models.host_link import host_copies
from cost_models.host_step import host_step_seconds
from hardware_profiles import load_cluster

CLUSTER = Path(__file__).parents[1] / "data" / "beside-a-host.toml"
ROWS, WIDTH, BLOCKS = 64, 64, 4
MESHES = ("data=1", "data=2", "data=2,tensor=2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def captured() -> Captured:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    x, y = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    return autopar.capture(model, (x,), loss_fn=nn.functional.mse_loss, targets=(y,))


def planned(captured: Captured, mesh: str = "data=1", cluster: Any = CLUSTER, **options: Any) -> Plan:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    return autopar.plan(model, cluster, (torch.ones(ROWS, WIDTH),), mesh=mesh, captured=captured, **options)


def on_host(stage: StagePlan) -> set[str]:
    return {name for name, choice in stage.params.items() if choice.on_host}


@pytest.mark.parametrize("offload", [{"optimizer": 1}, {"optimizer": 0.5}, {"parameters": 1}])
@pytest.mark.parametrize("mesh", MESHES)
def test_certificates_count_what_the_plan_says(captured: Captured, mesh: str, offload: Mapping[str, float]) -> None:
    (stage,) = planned(captured, mesh, offload=offload).stages
    report = check(stage, captured.graph, load_cluster(str(CLUSTER)))
    assert report.ok, report.failures
    counted = peak_of(stage, captured.graph).n_bytes
    assert counted == pytest.approx(stage.price.memory_bytes, rel=2e-3)
    if 1 in offload.values():
        price = stage.price
        assert price.parameter_bytes == price.gradient_bytes == price.optimizer_bytes == 0 < price.gathered_bytes
        lifetimes = {choice.lifetime for choice in stage.params.values()}
        assert lifetimes == ({"use"} if "parameters" in offload else {"step"})


def test_nothing_is_on_the_host_unless_it_is_asked_for(captured: Captured) -> None:
    free = planned(captured)
    assert not on_host(free.stages[0]) and free.pins.offload == ""
    allowed = planned(captured, offload="optimizer")
    assert not on_host(allowed.stages[0]), "where there is room, the device is faster"
    assert allowed.price == free.price


def test_the_limit_decides_how_much(captured: Captured) -> None:
    """The lower the limit, the more is on the host; never slower than all of it there."""
    free = planned(captured).memory_bytes
    every = planned(captured, offload={"optimizer": 1})
    shares = []
    for part in (0.9, 0.75, 0.6):
        plan = planned(captured, offload="optimizer", memory_limit=int(part * free), recompute="none")
        assert plan.memory_bytes <= part * free
        assert plan.seconds <= every.seconds * 1.001
        shares.append(host_shares(plan, captured.graph).steps)
    assert 0 < shares[0] < shares[1] < shares[2] <= 1


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_a_share_is_kept_at_least(captured: Captured, share: float) -> None:
    plan = planned(captured, offload={"optimizer": share})
    found = host_shares(plan, captured.graph)
    assert share <= found.steps < share + 0.27 and found.parameters == 0  # whole classes of parameters


def test_pins_say_where_a_parameter_is(captured: Captured) -> None:
    stage = planned(captured, params={"*.up.weight": "I step host"}).stages[0]
    assert on_host(stage) == {f"{k}.up.weight" for k in range(BLOCKS)}
    stage = planned(captured, params={"*.up.weight": "I use host"}).stages[0]
    assert {stage.params[name].lifetime for name in on_host(stage)} == {"use"}
    stage = planned(captured, offload={"optimizer": 1}, params={"*.up.weight": "I device"}).stages[0]
    assert on_host(stage) == {name for name in stage.params if not name.endswith("up.weight")}
    with pytest.raises(PlanError, match="'there' is no lifetime"):
        planned(captured, params={"*.up.weight": "I there"})


def test_plan_files_remember_it(captured: Captured, tmp_path: Path) -> None:
    plan = planned(captured, "data=2", offload={"optimizer": 0.5, "parameters": 0.25})
    planfile.save(tmp_path / "plan.json", plan, captured.graph)
    again = planfile.load(tmp_path / "plan.json", captured.graph)
    assert again.stages[0].params == plan.stages[0].params and again.stages[0].price == plan.stages[0].price
    assert again.pins.offload == "optimizer=0.5,parameters=0.25"
    moved = replace(plan.stages[0], params={n: replace(c, on_host=False) for n, c in plan.stages[0].params.items()})
    edited = planfile.dumps(replace(plan, stages=(moved,)), captured.graph)
    assert '"on_host"' not in edited and '"on_host": true' in (tmp_path / "plan.json").read_text()


def test_a_device_without_a_host_is_refused(captured: Captured) -> None:
    for wish in ({"offload": {"optimizer": 1}}, {"offload": "auto"}, {"params": {"*.up.weight": "I host"}}):
        with pytest.raises(PlanError, match="offload: device cpu-core has no memory of a host that is known here"):
            planned(captured, cluster="local-x1", **wish)


def test_a_step_on_the_host_is_bound_by_its_memory() -> None:
    """An AdamW step moves seven times the bytes, at the rate of memory that all devices of a machine share."""
    device = load_cluster("dgx-h100").devices[0]
    alone, eight = (host_step_seconds("adamw", 4e9, host_copies(device, n)) for n in (1, 8))
    assert alone == pytest.approx(7 * 4e9 / (0.8 * 307.2e9)) and eight == pytest.approx(4 * alone)
    assert host_step_seconds("sgd_momentum", 4e9, host_copies(device, 1)) == pytest.approx(5 / 7 * alone)


def test_shares_of_a_plan(captured: Captured) -> None:
    assert host_shares(planned(captured), captured.graph) == HostShares(0.0, 0.0)
    assert host_shares(planned(captured, offload={"parameters": 1}), captured.graph) == HostShares(1.0, 1.0)


def test_trainers_say_what_they_can_keep_on_the_host() -> None:
    from autopar.capture import capture
    from autopar.frontends import Loaded
    from autopar.planner.intra_op.pins.options import Options
    from autopar.planner.layouts.pricing import PricedLayouts
    from autopar.plans.offload_options import parse_offload
    from autopar.targets.exporting import Exporter
    from autopar.targets.host_shares import check_said
    from autopar.targets.trainers.deepspeed.writing import _on_host as deepspeed
    from autopar.targets.trainers.megatron.writing import _on_host as megatron

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Block() for _ in range(2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    loaded = Loaded(Net(), (torch.zeros(ROWS, WIDTH),), {}, "net.py:make")
    whole = capture(loaded.model, loaded.args)

    def exported(target: str, words: str, offload: str) -> Any:
        options = Options(offload=parse_offload(offload))
        layouts = PricedLayouts(loaded.model, whole, (loaded.args, {}), options)
        exporter = Exporter(target_named(target), loaded, whole, layouts, "dgx-h100", rows=ROWS)
        found = exporter.layouts.price(exporter.where, words)
        check_said(target_named(target), found)
        return type("Said", (), {"priced": found, "layout": found.layout})

    said = deepspeed(exported("deepspeed", "dp=8,zero=1,mbs=1", "optimizer=1"), 1)
    assert said == {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    said = deepspeed(exported("deepspeed", "dp=8,zero=3,mbs=1", "parameters=1"), 3)
    assert set(said) == {"offload_optimizer", "offload_param"}
    with pytest.raises(ConfigError, match=r"ratio is of ZeRO-3, the layout has zero=1 and keeps \d+%"):
        deepspeed(exported("deepspeed", "dp=8,zero=1,mbs=1", "optimizer=0.5"), 1)
    said = megatron(exported("megatron", "dp=8,zero=1,mbs=1", "optimizer=1"))
    assert said["--optimizer-offload-fraction"] == "1.000" and "--use-precision-aware-optimizer" in said
    with pytest.raises(ConfigError, match="cannot be told to keep parameters on the host, where the plan keeps 100%"):
        exported("megatron", "dp=8,zero=1,mbs=1", "parameters=1")
    with pytest.raises(ConfigError, match="FSDP2 cannot be told to keep optimizer on the host"):
        exported("fsdp2", "dp=8,zero=1,mbs=1", "optimizer=1")


def test_a_plan_says_what_the_host_holds_and_a_small_host_is_refused(captured: Captured, tmp_path: Path) -> None:
    """Values, gradients and two moments, in float32, and a count of steps for each parameter."""
    n = sum(node.out.n_bytes for _, node in captured.graph.of_kind("param"))
    plan = planned(captured, offload={"optimizer": 1})
    assert host_bytes(captured.graph, plan.stages[0]) == 4 * n + 4 * len(plan.params)
    assert any(note.startswith("on the host: ") for note in plan.notes)
    small = tmp_path / "small.toml"
    small.write_text(CLUSTER.read_text().replace("memory_bytes = 6.4e10", "memory_bytes = 1e6"))
    with pytest.raises(InfeasibleError, match=r"the host has 244.14 KiB for each device, and the plan keeps 2.* MiB"):
        planned(captured, cluster=small, offload={"optimizer": 1})


def test_steps_on_whole_matrices_stay_on_the_device(captured: Captured) -> None:
    with pytest.raises(PlanError, match="muon multiplies whole matrices in its step"):
        planned(captured, optimizer="muon", offload="optimizer")


def test_auto_takes_what_can_be_moved(captured: Captured) -> None:
    """With Muon, and in a pipeline that never drains, that is activations; by name more is refused."""
    free = planned(captured, offload="auto")
    assert free.pins.offload == "auto" and not any("activations alone" in note for note in free.notes)
    tight = 0.97 * planned(captured, optimizer="muon").stages[0].price.memory_bytes
    plan = planned(captured, optimizer="muon", offload="auto", memory_limit=tight)
    (note,) = [note for note in plan.notes if note.startswith("offload: activations alone may wait on the host: muon")]
    assert "whole matrices" in note and not on_host(plan.stages[0]) and plan.stages[0].memory.get("offload")
    loss: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "targets": (torch.ones(ROWS, WIDTH),)}
    wish: dict[str, Any] = {"mesh": "data=2", "stages": 2, "microbatches": 4, "schedule": "pipedream", **loss}
    piped = planned(captured, **wish, offload="auto")  # whose last stage keeps one version, and steps all the time
    assert any("activations alone may wait on the host: a pipeline that" in note for note in piped.notes)
    assert not any(map(on_host, piped.stages))
    with pytest.raises(PlanError, match="keeps them on the device: leave offload to activations"):
        planned(captured, **wish, offload="activations,optimizer,parameters")
