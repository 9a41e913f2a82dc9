"""Layers of routed experts as people write them in plain torch: each becomes one operator, with the numbers of eager
mode where its rows travel to their experts, some of which have none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from cut_experts import cut_equally
from procs.in_turn import marked
from written_experts import EXPERTS, HIDDEN, LAYERS, ROWS, Layer, Norms, SomeExperts, WrittenSlices

import autopar
from autopar.errors import CaptureError, InfeasibleError, PlanError, RunError
from autopar.rules.experts.expert_block import BLOCK

WAYS = {"travel": "data=2,expert=2", "e": "expert=2"}


@pytest.mark.parametrize("way", ["travel", pytest.param("e", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", marked(LAYERS, [name for k, name in enumerate(LAYERS) if k % 4]))
def test_is_one_operator(name: str, way: str) -> None:
    dtype = torch.float32 if name == "Grouped" else torch.float64
    model = LAYERS[name]().to(dtype)
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=dtype) for _ in range(2))
    captured = autopar.capture(model, (x, y))
    assert sum(node.target == BLOCK for node in captured.graph.nodes) == 1
    assert not [node for node in captured.graph.nodes if "sort." in node.target], "rows stay in their own order"
    limit = 1e-9 if dtype == torch.float64 else 1e-5
    cut_equally(model, (x, y), WAYS[way], {"*expert_block*": {"expert": way}}, captured=captured, limit=limit)


@pytest.mark.parametrize("name", ["RunningSlices", "HitExperts", "HitNumbers", "DistinctNumbers"])
def test_experts_without_rows_have_no_gradient(name: str) -> None:
    """A loop that passes over them leaves None, as in eager mode, whichever they are."""
    model = LAYERS[name]().double()
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    pm = autopar.parallelize(copy.deepcopy(model), 1, (x, y))
    for inputs in (x, 3 * x.flip(0)):
        for trained in (model, pm):
            trained.zero_grad()
            trained(inputs, y).backward()
        theirs = dict(pm.named_parameters())
        for parameter, p in model.named_parameters():
            other = theirs[parameter].grad
            assert (p.grad is None) == (other is None), parameter
            assert p.grad is None or torch.allclose(p.grad, other, rtol=1e-9, atol=1e-12), parameter
        assert model.experts[0][1].weight.grad is None  # the router never picks it


def test_slices_are_written_by_running_counts() -> None:
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    cut_equally(WrittenSlices().double(), (x, y), "expert=2", {"*expert_block*": {"expert": "e"}})


class GatesOfOthers(Layer):
    """Gates that something is written to behind the top-k, so that more experts have rows than it picked."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        logits, weights, picked = self.routed(x)
        gates = torch.zeros_like(logits).scatter_(1, picked, weights)
        gates[:, 1] = 0.5
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (gates[:, e] > 0).nonzero().squeeze(-1)
            out = out.index_add(0, rows, gates[rows, e, None] * expert(x[rows]))
        return out


def test_gates_that_are_written_later_are_not_those_of_a_top_k() -> None:
    model = GatesOfOthers().double()
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    pm = autopar.parallelize(copy.deepcopy(model), 1, (x, y))
    assert torch.allclose(pm(x, y), model(x, y), rtol=1e-12)
    assert torch.allclose(pm(2 * x, y), model(2 * x, y), rtol=1e-12)


class MoreInATurn(Layer):
    """A loop over the experts that were hit, which counts them, too."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out, hits = torch.zeros_like(x), 0
        for e in F.one_hot(picked, EXPERTS).sum((0, 1)).nonzero():
            rows, which = torch.where(picked == e)
            out.index_add_(0, rows, self.experts[e](x[rows]) * weights[rows, which, None])
            hits += 1
        return out / hits


def test_a_loop_over_hit_experts_that_does_more_is_refused() -> None:
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    with pytest.raises(CaptureError, match=r"test_experts_as_written.py:\d+"):
        autopar.capture(MoreInATurn().double(), (x, y))


class NumberOfExperts(Layer):
    """How many experts have rows is computed with."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out, hit = torch.zeros_like(x), picked.unique().tolist()
        for e in hit:
            rows, which = torch.where(picked == e)
            out.index_add_(0, rows, self.experts[e](x[rows]) * weights[rows, which, None])
        return out / len(hit)


class CountsOfExperts(Layer):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, _, picked = self.routed(x)
        hit, counts = picked.unique(return_counts=True)
        return x * counts.max() + hit.sum()


@pytest.mark.parametrize(
    ("layer", "advice"), [(NumberOfExperts, "in its turn"), (CountsOfExperts, "minlength=4")]
)  # fmt: skip
def test_how_many_experts_have_rows_is_no_number(layer: type[Layer], advice: str) -> None:
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    with pytest.raises(CaptureError, match=r"test_experts_as_written.py:\d+[\s\S]*" + advice):
        autopar.capture(layer().double(), (x, y))


class OtherOrder(Layer):
    """The order of places by column is computed with."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        logits, weights, picked = self.routed(x)
        found, order = torch.nonzero(torch.zeros_like(logits).scatter(1, picked, weights)).sort(0)
        return x[found[:, 0]] * order.sum()


def test_an_order_of_places_is_no_number() -> None:
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    with pytest.raises(CaptureError, match=r"test_experts_as_written.py:\d+[\s\S]*rows of each column by itself"):
        autopar.capture(OtherOrder().double(), (x, y))


class OtherCounts(Layer):
    """A branch by counts that are not those of the rows in it."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        counts = torch.bincount((picked[:, 0] + (x.sum() > 1e3)) % EXPERTS, minlength=EXPERTS).tolist()
        for e in range(EXPERTS):
            if counts[e] > 0:
                rows = torch.where(picked[:, 0] == e)[0]
                out[rows] += self.experts[e](x[rows]) * weights[rows, 0, None]
        return out


def test_counts_that_are_not_of_the_rows_are_heard_of() -> None:
    """The branch is followed for all experts, which is right while counts and masks agree: else it is an error."""
    model = OtherCounts().double()
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    pm = autopar.parallelize(copy.deepcopy(model), 1, (x, y))
    assert torch.allclose(pm(x, y), model(x, y), rtol=1e-12)
    with pytest.raises(RunError, match=r"test_experts_as_written.py:\d+"):
        pm(x + 1e3, y)


class EnoughRows(Layer):
    """An expert with few rows is passed over."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        weights, picked = x[:, :EXPERTS].topk(1, -1)
        out = torch.zeros_like(x)
        counts = torch.bincount(picked.flatten(), minlength=EXPERTS).tolist()
        for e in range(EXPERTS):
            if counts[e] > 2:
                rows, which = torch.where(picked == e)
                out[rows] += self.experts[e](x[rows]) * weights[rows, which, None]
        return out


def test_an_expert_with_few_rows_is_heard_of() -> None:
    """That experts with any rows have more than two is checked at every call."""
    model = EnoughRows().double()
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    of_tokens = torch.arange(ROWS).view(4, -1) % 3  # none for the last expert
    many = x + 9 * F.one_hot(of_tokens, HIDDEN)
    pm = autopar.parallelize(copy.deepcopy(model), 1, (many, y))
    assert torch.allclose(pm(many.flip(0), y), model(many.flip(0), y), rtol=1e-12)
    of_tokens[0, 0] = EXPERTS - 1  # one row
    with pytest.raises(RunError, match=r"test_experts_as_written.py:\d+"):
        pm(x + 9 * F.one_hot(of_tokens, HIDDEN), y)


class Capacity(Layer):
    """As many places for each expert; what does not fit is dropped (as in GShard and nanoMoE)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        hits = F.one_hot(picked, EXPERTS).permute(1, 0, 2)
        place = (hits.reshape(-1, EXPERTS).cumsum(0) - 1).reshape(hits.shape)
        hits = hits * (place < ROWS // 2)
        at = F.one_hot((hits * place).sum(-1), ROWS // 2)
        combine = (weights.t()[:, :, None, None] * hits.unsqueeze(3) * at.unsqueeze(2)).sum(0)
        rows = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), x)
        made = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down.transpose(1, 2))
        return torch.einsum("sec,ecm->sm", combine, made)


def classes_of(places: torch.Tensor, n: int) -> torch.Tensor:
    """As ``one_hot``, with zeros for numbers beyond ``n``, which it would refuse."""
    return F.one_hot(places, max(places.max() + 1, n))[..., :n]


class CapacityInClasses(Layer):
    """The same, where what does not fit is dropped by cutting off its place (as in code that comes from Mesh
    TensorFlow)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        hits = F.one_hot(picked, EXPERTS).permute(1, 0, 2)
        place = (hits.reshape(-1, EXPERTS).cumsum(0) - 1).reshape(hits.shape)
        at = classes_of((hits * place).sum(-1), ROWS // 2)
        combine = (weights.t()[:, :, None, None] * hits.unsqueeze(3) * at.unsqueeze(2)).sum(0)
        rows = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), x)
        made = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down.transpose(1, 2))
        return torch.einsum("sec,ecm->sm", combine, made)


def test_classes_that_do_not_fit_are_cut_off_in_every_batch() -> None:
    """How many classes there are in eager mode depends on data: in the first batch none is cut off."""
    model = CapacityInClasses().double()
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    pm = autopar.parallelize(copy.deepcopy(model), 1, (0.01 * x, y))
    for inputs in (x, 30 * x):
        assert torch.allclose(pm(inputs, y), model(inputs, y), rtol=1e-12)


class AllClasses(Layer):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, _, picked = self.routed(x)
        return x * F.one_hot(picked, max(picked.max() + 1, 2)).sum()


def test_all_of_a_number_of_classes_that_depends_on_data_are_refused() -> None:
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    with pytest.raises(CaptureError, match=r"number of classes.*\n?.*test_experts_as_written.py:\d+"):
        autopar.capture(AllClasses().double(), (x, y))


@pytest.mark.parametrize("layer", [Capacity, CapacityInClasses])
def test_experts_with_a_capacity_are_cut_as_a_batch(layer: type[Layer]) -> None:
    model = layer().double()
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    captured = autopar.capture(model, (x, y))
    cut_equally(model, (x, y), "expert=2", {"*bmm*": {"expert": "b"}}, captured=captured)
    with pytest.raises(PlanError, match="the model has none: experts with a capacity"):
        autopar.plan(model, "local-x2", (x, y), captured=captured, expert_load={"*": [1, 2, 3, 4]})


def uneven(model: torch.nn.Module, mesh: str) -> None:
    """Rows travel along all axes of experts."""
    x, y = (torch.randn(12, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    axes = [axis.partition("=")[0] for axis in mesh.split(",")]
    pins = {"*expert_block*": {axis: "ffn" if axis == "tensor" else "travel" for axis in axes}}
    cut_equally(model, (x, y), mesh, pins, certified=True)


@pytest.mark.parametrize(
    ("experts", "bias", "mesh"),
    [(6, False, "expert=4"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (5, True, "expert=3"), (7, True, "expert=2,tensor=2"), (6, True, "a=2,b=2"),
    ])],
)  # fmt: skip
def test_rows_travel_to_unequal_numbers_of_experts(experts: int, bias: bool, mesh: str) -> None:
    """As ``torch.chunk`` cuts them: 6 over 4 are 2, 2, 2 and none."""
    uneven(SomeExperts(experts, bias).double(), mesh)


def test_a_rank_without_experts_looks_up_no_bias() -> None:
    with pytest.raises(InfeasibleError, match="size 6: cut over 4 ranks, it leaves some without any"):
        uneven(SomeExperts(6, True).double(), "expert=4")


def test_dropout_inside_experts_is_the_same_wherever_rows_are() -> None:
    """What is kept is drawn by the row's place in the batch, so that it travels with the row."""
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    pins = {"*expert_block*": {"expert": "travel"}}
    cut_equally(Norms(dropout=0.3).double(), (x, y), "expert=2", pins, random=True)
