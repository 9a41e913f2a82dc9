"""Copies of a parameter that are no copies any more: noticed, whichever element it is, and named with the operator."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from zoo import ZOO

from autopar.capture import capture
from autopar.errors import RunError
from autopar.rules.families.fixed_order import _BACKWARD, _FORWARD, without_fixed_order
from autopar.runtime.batches.same_batch import _compare_parameters, compare, first_readers, is_checked
from autopar.runtime.batches.samples import Copy, Seen, fingerprint, sums_of
from autopar.words.placements import State

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
          torch.bool, torch.complex64, torch.float8_e4m3fn]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (33, 1000)])
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_every_element_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape).mul(100).to(dtype)
    assert fingerprint(x) == fingerprint(x.clone())
    if not x.numel():
        return
    other = x.clone().flatten()
    other[-1] = torch.logical_not(other[-1]) if dtype is torch.bool else (other[-1].cfloat() * 2 + 3).to(dtype)
    assert fingerprint(x) != fingerprint(other.view(shape))


def test_rows_in_another_order_are_another_batch() -> None:
    ids = torch.arange(12).view(4, 3)
    assert fingerprint(ids) != fingerprint(ids.flip(0))


def test_sums_bear_rounding_and_no_more() -> None:
    x = torch.randn(100, 100)
    near, far = sums_of(x * (1 + 1e-6)), sums_of(torch.randn(100, 100))
    assert (sums_of(x) - near).abs().max() < 1e-2 * near[-1] < (sums_of(x) - far).abs().max()


def test_how_often() -> None:
    assert [call for call in range(1, 2000) if is_checked(call)] == [1, 2, 3, 10, 100, 1000]
    assert [call for call in range(1, 20) if is_checked(call, 6)] == [6, 12, 18]
    assert not any(is_checked(call, 0) for call in range(1, 2000))


def test_the_first_that_differs_is_named_with_its_operator() -> None:
    case = ZOO["gpt2"]()
    graph = capture(case.model, *case.batch).graph
    names = [name for name, _ in case.model.named_parameters()]

    def copies(scale: dict[str, float]) -> dict[Copy, Any]:
        seen = Seen()
        params = {name: p.detach() * scale.get(name, 1.0) for name, p in case.model.named_parameters()}
        seen.add_parameters(sorted(params.items()), first=True)
        (values,) = seen.arriving(torch.device("cpu")).values()
        assert values is not None
        return values[1]

    late, early = (next(n for n in names if part in n) for part in ("h.1.mlp.c_fc.weight", "h.0.attn.c_attn.weight"))
    reader = first_readers([graph])
    _compare_parameters([copies({}), copies({})], reader)
    with pytest.raises(RunError) as raised:
        _compare_parameters([copies({}), copies({late: 2.0, early: 2.0})], reader)
    assert f"parameter '{early}' (read by {reader(early)[1]}) has other values on rank 1" in str(raised.value)
    assert "c_attn" in reader(early)[1]


class _Loose(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.interpolate(self.conv(x), scale_factor=2, mode="bilinear")
        nearest = torch.nn.functional.interpolate(x, scale_factor=2)  # no gradient, and nothing is added
        z = self.linear(y.mean((2, 3)))
        w = torch.zeros_like(z).index_add(0, index, z)
        return torch.zeros_like(z).index_put((index,), w, accumulate=True).sum() + nearest.mean()


def test_operators_without_a_fixed_order_are_listed() -> None:
    graph = capture(_Loose(), (torch.rand(2, 3, 8, 8), torch.tensor([0, 0])), {}).graph
    found = [(op.node.target.split(".")[1], op.when) for op in without_fixed_order(graph)]
    assert found == [
        ("conv2d", "forward and backward"), ("upsample_bilinear2d", "backward"), ("index_add", "forward"),
        ("index_put", "forward"),
    ]  # fmt: skip


def test_every_operator_of_the_list_is_one_of_torch() -> None:
    assert all(hasattr(torch.ops.aten, name.removeprefix("aten.")) for name in (*_FORWARD, *_BACKWARD))


def test_equal_pieces_on_all_ranks_are_told() -> None:
    """A whole batch of half the length is no pair of pieces; what all ranks pass alike may be one."""

    def ranks(*ids: torch.Tensor) -> list[Any]:
        told = []
        for place, x in enumerate(ids):
            seen = Seen()
            seen.coordinate = (place,)
            seen.add("args[0]", "ids", x, State.of("S1"))
            told += seen.arriving(torch.device("cpu")).values()
        return told

    reader = first_readers([])
    half = torch.arange(8).view(2, 4)
    with pytest.warns(UserWarning, match=r"args\[0\] of shape \(2, 4\) has the same values on all 2 ranks"):
        compare(ranks(half, half.clone()), reader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(ranks(half, half + 8), reader)
        compare(ranks(half), reader)
