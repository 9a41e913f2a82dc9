"""Cost sources: one place chooses, everyone else asks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autopar
from cost_models import Roofline, cost_source, costs_of
from cost_models import costs as module
from cost_models.costs import Costs, OpSeconds, OpWork
from hardware_profiles import Cluster, Device, load_cluster

ROOT = Path(__file__).resolve().parents[2]
CHOOSES = "cost_models/measured.py"


class Slower(Roofline):
    """Operators take ten times as long as the data sheets say."""

    def op(self, device: Device, work: OpWork) -> OpSeconds:
        plain = super().op(device, work)
        return plain._replace(forward=10 * plain.forward, total=10 * plain.total, weights=10 * plain.weights)


@pytest.fixture
def slower(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_CHOOSERS", list(module._CHOOSERS))

    @cost_source
    def of_slow_clusters(cluster: Cluster) -> Costs | None:
        return Slower(cluster) if cluster.name == "local-x2" else None

    yield
    costs_of.cache_clear()


def compute_seconds(cluster: str) -> float:
    model = torch.nn.Linear(16, 16)
    x, y = torch.ones(8, 16), torch.zeros(8, 16)
    plan = autopar.plan(model, cluster, (x,), mesh="data=1", loss_fn=torch.nn.functional.mse_loss, targets=(y,))
    return plan.stages[0].price.compute_seconds


def test_a_source_of_ones_own_prices_plans(slower: None) -> None:
    assert isinstance(costs_of(load_cluster("local-x2")), Slower)
    assert type(costs_of(load_cluster("local-x4"))) is Roofline
    slow = compute_seconds("local-x2")
    module._CHOOSERS.pop()
    costs_of.cache_clear()
    assert slow == pytest.approx(10 * compute_seconds("local-x2"))


def test_the_slowest_device_stands_for_all() -> None:
    cluster = load_cluster(ROOT / "examples" / "clusters" / "mixed.toml")
    kinds = {cluster.slowest([rank]).name for rank in range(cluster.n_devices)}
    assert len(kinds) > 1
    slow = cluster.slowest(range(cluster.n_devices))
    assert max(slow.peak_flops.values()) == min(max(d.peak_flops.values()) for d in cluster.devices)


def test_one_place_chooses_between_sources() -> None:
    """Nobody else asks whether a cluster has measurements."""
    asking = []
    for path in sorted(p for folder in ("autopar", "cost_models") for p in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "measured" in text else ():
            test = getattr(node, "test", None)
            names = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)} if test is not None else set()
            if "measured" in names and path.relative_to(ROOT).as_posix() != CHOOSES:
                asking.append(f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not asking, "ask cost_models.costs.costs_of instead"
