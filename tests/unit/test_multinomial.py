"""``torch.multinomial`` draws as often as weights say, alike on every mesh, and refuses what torch refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_trial import CLUSTER, LIMIT
from torch import nn

from autopar.capture import capture
from autopar.comparison.program_vs_eager import compare, doubled, inputs_of, one_device, promoted, state_of, train
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.pins.options import Options
from autopar.rules.families.multinomial import multinomial
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

WEIGHTS = torch.tensor([1.0, 0.0, 3.0, 2.0, 0.0, 4.0])
N_ROWS = 20_000
DEVIATION = 0.015
"""More than four standard deviations of a share of ``N_ROWS`` draws."""


def drawn(weights: torch.Tensor, n_drawn: int, replacement: bool) -> torch.Tensor:
    shape = (*weights.shape[:-1], n_drawn)
    shards = ((),) * len(shape)
    return multinomial(weights, n_drawn, replacement, cut={}, seed=torch.tensor(3), site=5, shape=shape, shards=shards)


@pytest.mark.parametrize("replacement", [True, False])
def test_places_are_drawn_as_often_as_torch_draws_them(replacement: bool) -> None:
    """The pair of the first two places drawn, which says too whether a place is drawn again."""
    torch.manual_seed(0)
    rows = WEIGHTS.expand(N_ROWS, -1)
    mine, theirs = (
        torch.bincount(pair[:, 0] * 6 + pair[:, 1], minlength=36) / N_ROWS
        for pair in (drawn(rows, 3, replacement), torch.multinomial(rows, 3, replacement))
    )
    assert torch.equal(mine == 0, theirs == 0)
    assert (mine - theirs).abs().max() < DEVIATION


def test_rare_places_are_drawn() -> None:
    """One of a million in all has the share of its weight, though its weight is below the steps of one float32 draw."""
    weights = torch.ones(1_000_000)
    places = drawn(weights, 50_000, True).double()
    assert places.unique().numel() > 45_000, "equal places of so many are seldom drawn twice"
    assert abs(places.mean() / 500_000 - 1) < DEVIATION
    permutation = drawn(weights[:1000], 1000, False)
    assert torch.equal(permutation.sort().values, torch.arange(1000)) and permutation[0] != 0


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_that_torch_refuses_are_refused(weights: list[float]) -> None:
    with pytest.raises(RuntimeError, match="a weight is inf, nan or below 0"):
        drawn(torch.tensor(weights), 1, True)


class Sampled(nn.Module):
    """Negatives as in word2vec, a next word for each row, and patches chosen as in ViLT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.register_buffer("often", torch.arange(12.0) + 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.embed(ids)
        negatives = torch.multinomial(self.often, ids.numel() * 3, replacement=True).view(-1, 3)
        scores = torch.einsum("bd,bnd->bn", words, self.embed(negatives))
        following = torch.multinomial(self.head(words).softmax(-1), 2)
        patches = torch.multinomial(torch.ones(8), 4)
        return scores.sigmoid().square().mean() + words[:, patches].square().mean() + (
            self.head(words).log_softmax(-1).gather(1, following).mean()
        )  # fmt: skip


@pytest.mark.parametrize("cuts", [{"data": "b"}, {"tensor": "n"}], ids=["rows", "words"])
def test_a_model_trains_alike_on_one_device_and_in_pieces(cuts: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, batch = Sampled(), (torch.randint(12, (8,)),)
    captured = capture(model, batch)
    double = promoted(captured)
    state, inputs = tuple(map(doubled, state_of(captured, model))), doubled(inputs_of(captured, batch, {}))
    mesh = Mesh(tuple((axis, 2) for axis in cuts))
    plan = plan_graph(double.graph, load_cluster(Path(CLUSTER)), mesh, Options(constraints={"head": cuts}))
    reference = train(double, one_device(double.graph), *state, inputs)
    difference = compare("pieces", train(double, plan, *state, inputs), reference)
    assert difference.worst <= LIMIT, str(difference)
