"""What is searched where nothing is asked: everything by ``plan``; by ``parallelize`` all that goes on with
``loss = pm(batch); loss.backward()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zoo import ZOO

import autopar
from autopar.capture import Captured
from autopar.errors import InfeasibleError, RunError
from autopar.planner import planning
from autopar.planner.inter_op.per_microbatch_count import OneNumber
from autopar.planner.inter_op.stage_search import INTERRUPTED
from hardware_profiles import load_cluster

SMALL = "4.5MiB"
"""Less than the whole batch needs on one device, more than a part of it."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


X = torch.randn(512, 64)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return autopar.capture(Net(), X)


def test_a_plan_is_found_where_one_fits(captured: Captured) -> None:
    """In microbatches, or in stages, whatever it takes; restricted, it says what was tried."""
    one = autopar.plan(Net(), "local-x1", X, memory_limit=SMALL, captured=captured)
    assert one.microbatches > 1 and one.memory_bytes <= 4.5 * 2**20
    two = autopar.plan(Net(), "local-x2", X, memory_limit="2MiB", captured=captured)
    assert len(two.stages) == 2 and two.memory_bytes <= 2 * 2**20
    with pytest.raises(InfeasibleError, match=r"no plan fits 4\.50 MiB per device: the smallest needs 4\.59 MiB"):
        autopar.plan(Net(), "local-x1", X, memory_limit=SMALL, captured=captured, microbatches=1)
    with pytest.raises(InfeasibleError, match=r"tried: 1 group of 2 devices, 1, 2, 4.*\n.*the least that would do"):
        autopar.plan(Net(), "local-x2", X, memory_limit="1MiB", captured=captured, stages=1, microbatches=[1, 2, 4])


@pytest.mark.slow
def test_a_plan_is_found_where_one_fits_on_several_devices(captured: Captured) -> None:
    four = {"mesh": "data=2", "memory_limit": "2.5MiB", "microbatches": "auto"}
    some = autopar.plan(Net(), "local-x4", X, captured=captured, **four)  # type: ignore[arg-type]
    assert some.n_devices == 2 and some.microbatches > 1


def test_what_runs_again_is_chosen_as_freely_in_one_group_of_devices(captured: Captured) -> None:
    """A model without repeats is cut into pieces where stages may begin; that is no bound of what runs again. And the
    plan is searched as near to its bound as is asked, though the search over stages began with less."""
    for limit in ("7MiB", "5.5MiB"):
        staged = autopar.plan(Net(), "local-x1", X, memory_limit=limit, captured=captured, microbatches=1)
        alone = autopar.plan(Net(), "local-x1", X, memory_limit=limit, captured=captured, mesh="data=1")
        assert staged.memory_bytes == alone.memory_bytes and staged.seconds == pytest.approx(alone.seconds)


@pytest.mark.slow
def test_a_plan_fits_at_the_fullest_moment_of_its_step() -> None:
    """With many words that is the loss's backward, where the sum of what stays would fit."""
    case = ZOO["gpt2"](vocabulary=50257)
    asked = {"example_kwargs": case.kwargs, "mesh": "data=2", "stages": 1, "microbatches": 1}
    free = autopar.plan(case.model, "local-x2", case.args, **asked)
    limit = 0.9 * free.memory_bytes
    assert free.price.memory_bytes - free.price.working_bytes < limit
    with pytest.raises(InfeasibleError, match="no plan fits"):
        autopar.plan(case.model, "local-x2", case.args, **asked, memory_limit=limit)
    more = {**asked, "microbatches": "auto"}
    tight = autopar.plan(case.model, "local-x2", case.args, **more, memory_limit=limit)  # type: ignore[arg-type]
    assert tight.microbatches > 1 and tight.memory_bytes <= limit


def test_the_batch_is_that_of_a_step(captured: Captured) -> None:
    """However the number of microbatches came about."""
    for asked in (4, [4]):
        plan = autopar.plan(Net(), "local-x2", X, stages=1, microbatches=asked, captured=captured)
        assert plan.fingerprint == autopar.capture(Net(), X[:128]).graph.fingerprint
    assert autopar.plan(Net(), "local-x2", X, microbatches=1, captured=captured).fingerprint == (
        captured.graph.fingerprint
    )


def test_a_parallel_module_takes_the_whole_batch() -> None:
    """Unless told otherwise: a script that calls ``backward`` itself goes on."""
    eager, pm = Net(), autopar.parallelize(Net(), 1, X)
    assert pm.plan.microbatches == len(pm.plan.stages) == 1
    pm(X).backward()
    eager(X).backward()
    wanted = dict(eager.named_parameters())
    assert all(torch.allclose(p.grad, wanted[name].grad, atol=1e-6) for name, p in pm.named_parameters())
    with pytest.raises(InfeasibleError, match=r"as pm\(batch\) and loss.backward\(\) run it; microbatches=\d+ would"):
        autopar.parallelize(Net(), 1, X, memory_limit="4.5MiB")
    with pytest.raises(InfeasibleError, match=r"nor in microbatches or stages: no plan fits 1\.00 MiB"):
        autopar.parallelize(Net(), 1, X, memory_limit="1MiB")


def test_the_mesh_is_by_default_all_ranks() -> None:
    assert autopar.parallelize(Net(), example_inputs=X).plan.n_devices == 1


@pytest.mark.parametrize("asked", ["auto", 4])
def test_microbatches_of_a_parallel_module(asked: Any) -> None:
    """They are cut from the batch in ``train_step``, with the numbers of the whole; called with it, it says so."""
    eager = Net()
    pm = autopar.parallelize(Net(), 1, X, memory_limit=SMALL, microbatches=asked)
    parts = pm.plan.microbatches
    assert parts > 1
    loss = pm.train_step(X)
    whole = eager(X)
    whole.backward()
    assert torch.allclose(loss, whole.detach(), rtol=1e-5)
    wanted = dict(eager.named_parameters())
    assert all(torch.allclose(p.grad, wanted[name].grad, atol=1e-6) for name, p in pm.named_parameters())
    with pytest.raises(RunError, match=rf"512 rows, the batch of a step, and the plan cuts it into {parts} micro"):
        pm(X)
    pm(X[: 512 // parts]).backward()


def test_a_plan_of_an_interrupted_search_says_so(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    real, looked = OneNumber.candidates, []

    def candidates(self: Any, *args: Any, **kwargs: Any) -> Any:
        if looked:
            raise KeyboardInterrupt
        looked.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(OneNumber, "candidates", candidates)
    plan = autopar.plan(Net(), "local-x2", X, captured=captured)
    assert looked and INTERRUPTED in plan.notes


def test_an_interrupted_choice_of_a_mesh_keeps_the_best_so_far(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, shapes = planning.on_mesh, []

    def on_mesh(graph: Any, cluster: Any, mesh: Any, *rest: Any) -> Any:
        shapes.append(mesh)
        if len(shapes) == at:
            raise KeyboardInterrupt
        return real(graph, cluster, mesh, *rest)

    monkeypatch.setattr(planning, "on_mesh", on_mesh)
    wanted, cluster = planning.PlanRequest(piped=False, numbers=None), load_cluster("local-x4")
    at = 2
    found = planning.on_best_mesh(captured, cluster, 4, wanted, "local-x4")
    assert found.plan.mesh == shapes[0] and INTERRUPTED in found.plan.notes and len(shapes) == 2
    at = 3
    with pytest.raises(KeyboardInterrupt):
        planning.on_best_mesh(captured, cluster, 4, wanted, "local-x4")
