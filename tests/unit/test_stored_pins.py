"""Pins of how parameters are stored: what they mean beside a gradient, and one error where nothing can honour them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError, PlanError

WIDTH = 64


class Model(nn.Module):
    """Two products and a frozen one, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.down(torch.relu(self.up(x)))).square().mean()


def planned(**options: Any) -> autopar.Plan:
    options = {"mesh": {"data": 4, "tensor": 2}, **options}
    return autopar.plan(Model(), "dgx-h100", (torch.randn(16, WIDTH),), **options)


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
@pytest.mark.parametrize("how", ["S0,R use", "S0,I use"])
def test_whole_on_an_axis_is_one_word_for_trained_and_for_frozen_parameters(how: str, precision: str | None) -> None:
    stage = planned(params={"*.weight": how}, precision=precision).only()
    assert {name: stage.params[name].stored.text for name in stage.params if name.endswith("weight")} == {
        "up.weight": "S0,I", "down.weight": "S0,I", "frozen.weight": "S0,R",
    }  # fmt: skip


def test_pending_sums_are_no_way_to_store_a_parameter() -> None:
    with pytest.raises(PlanError, match=r"'up\.weight': 'P,I' is neither 'replicate' nor a placement with 2 parts"):
        planned(params={"up.weight": "P,I"})


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_a_pin_beside_columns_that_are_cut_says_what_there_is(precision: str | None) -> None:
    columns = {"down": {"data": "b", "tensor": "k"}}
    stage = planned(params={"down.weight": "S0,S1 use"}, constraints=columns, precision=precision).only()
    assert stage.params["down.weight"].stored.text == "S0,S1" and stage.params["down.weight"].used[1].dim == 1
    with pytest.raises(InfeasibleError) as caught:
        planned(params={"down.weight": "S0,I use"}, constraints=columns, precision=precision)
    said = str(caught.value)
    assert "parameter 'down.weight' [64 128]: pinned to 'S0,I use'; there is 'I,S1 step'" in said
    assert "'S0,S1 use'" in said


def test_copies_for_each_use_and_versions_of_weights() -> None:
    options = {"mesh": {"data": 4}, "stages": 2, "microbatches": 2, "schedule": "pipedream"}
    with pytest.raises(PlanError, match=r"'S0 use' asks for a copy gathered for each use.*2 versions.*write 'S0'"):
        planned(params={"down.weight": "S0 use"}, **options)
    assert planned(params={"down.weight": "S0"}, **options).stages


def test_shards_gathered_for_each_use_go_to_the_host_with_the_optimizer() -> None:
    stage = planned(mesh={"data": 2}, params={"*": "S0 use"}, offload="optimizer=1").only()
    trained = [choice for name, choice in stage.params.items() if not name.startswith("frozen")]
    assert trained and all(choice.on_host and choice.lifetime == "use" for choice in trained)


def test_activations_and_parameters_share_the_memory_of_a_host(tmp_path: Path) -> None:
    """Each of them fits the host's memory, and both together do not."""
    host = (Path(__file__).parents[1] / "data" / "beside-a-host.toml").read_text()
    assert "\nmemory_bytes = 6.4e10\n" in host
    small = tmp_path / "small-host.toml"  # four devices of 500 kB each: state takes 271 kB, results some 400 kB
    small.write_text(host.replace("\nmemory_bytes = 6.4e10\n", "\nmemory_bytes = 2e6\n"))

    def plan(offload: Any) -> autopar.Plan:
        x = torch.randn(4 * 512, WIDTH)
        return autopar.plan(
            Model(), str(small), (x,), mesh={"data": 4}, offload=offload, constraints={"*": {"data": "b"}},
            params={"*": "replicate"}, recompute="none",
        )  # fmt: skip

    assert plan("optimizer=1").notes and plan(["activations=*"]).stages
    with pytest.raises(InfeasibleError, match=r"the plan moves .* beside .* of parameters, gradients and state, in"):
        plan(["activations=*", "optimizer=1"])
