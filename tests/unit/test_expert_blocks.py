"""Routed experts as one operator: rows that travel to their experts, on many ranks in one process."""

from __future__ import annotations

import pytest
import torch
from cut_experts import cut_equally
from skewed_experts import MODELS, mixtral

import autopar
from autopar.certificate.recount import check
from hardware_profiles import load_cluster

FIRST = ("mixtral", "data=2,expert=2")
CASES = [
    ("mixtral", "expert=2"), ("mixtral", "expert=4"), ("mixtral", "data=2,expert=4"), ("switch", "expert=2"),
    ("switch", "expert=4"), ("switch", "data=2,expert=4"), ("deepseek", "expert=2"), ("deepseek", "expert=4"),
    ("deepseek", "expert=8"), ("deepseek", "expert=2,tensor=4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), [FIRST, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)])
def test_rows_travel(name: str, mesh: str) -> None:
    model, kwargs = MODELS[name]()
    _, report = cut_equally(model, (), mesh, {"*:expert_block*": {"expert": "travel"}}, kwargs, certified=True)
    assert report is not None
    layers = {"mixtral": 2, "switch": 2, "deepseek": 1}[name]
    assert report.collectives["expert", "all_to_all"] >= layers * 5  # counts, rows there and back, and their gradients


FEATURES = [("mixtral", "tensor=2", {"tensor": "ffn"}), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
    ("mixtral", "tensor=4", {"tensor": "ffn"}),
    ("mixtral", "expert=2,tensor=2", {"expert": "travel", "tensor": "ffn"}),
    ("mixtral", "expert=2,tensor=2", {"expert": "e", "tensor": "ffn"}),
    ("deepseek", "expert=2,tensor=2", {"expert": "travel", "tensor": "ffn"}),
    ("deepseek", "data=2,tensor=2", {"data": "s", "tensor": "ffn"}),
])]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh", "cut"), FEATURES)
def test_features_of_experts_are_cut(name: str, mesh: str, cut: dict[str, str]) -> None:
    """Tensor parallelism inside experts, alone and beside expert parallelism on another axis."""
    model, kwargs = MODELS[name]()
    plan, report = cut_equally(model, (), mesh, {"*:expert_block*": cut}, kwargs, certified=True)
    assert report is not None
    assert report.price.compute_seconds == pytest.approx(plan.only().price.compute_seconds, rel=1e-3)
    layers = {"mixtral": 2, "deepseek": 1}[name]
    assert report.collectives["tensor", "all_to_all"] >= 2 * layers  # gate and up are one matrix


def test_experts_of_other_ranks_are_not_counted() -> None:
    model, kwargs = mixtral()
    captured, cluster = autopar.capture(model, (), example_kwargs=kwargs), load_cluster("local-x2")
    plan = autopar.plan(
        model, cluster, (), example_kwargs=kwargs, captured=captured, mesh="expert=2",
        constraints={"*:expert_block*": {"expert": "e"}},
    )  # fmt: skip
    report = check(plan.stages[0], captured.graph, cluster)
    assert report.ok, report.failures
    assert report.price.compute_seconds == pytest.approx(plan.stages[0].price.compute_seconds, rel=1e-3)


def test_widths_that_the_grouped_product_of_gpus_takes() -> None:
    """It reads 16 bytes at once: eight elements of bfloat16, in rows or in columns."""
    from autopar.rules.experts.experts import _is_aligned

    for shape, fits in (((4, 16), True), ((4, 12), False), ((3, 8, 24), True), ((3, 8, 20), False)):
        matrix = torch.zeros(shape, dtype=torch.bfloat16)
        assert _is_aligned(matrix) == fits, shape
    assert _is_aligned(torch.zeros(16, 5, dtype=torch.bfloat16).t()) is False
    assert _is_aligned(torch.zeros(5, 16, dtype=torch.bfloat16).t()) is True
