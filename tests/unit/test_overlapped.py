"""Sums of gradients that travel while the gradient of a weight is computed: numbers, order, and what is left alone."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx

from autopar.lower import collectives
from autopar.lower import overlapped_reductions as module
from autopar.lower.overlapped_reductions import overlapped, with_overlap
from autopar.lower.segments import on_mesh
from autopar.torch_private import fake_store

aten = torch.ops.aten
OPERATORS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], bool, tuple[Any, ...]]] = {
    "linear": (aten.linear.default, (4, 3, 8), (6, 8), True, ()),
    "rows": (aten.linear.default, (4, 8), (6, 8), False, ()),
    "conv1d": (aten.conv1d.default, (2, 4, 9), (6, 4, 3), True, ([2], [1])),
    "conv2d": (aten.conv2d.default, (2, 4, 6, 6), (6, 4, 3, 3), False, ([1, 1], [1, 1])),
    "groups": (aten.conv2d.default, (2, 4, 6, 6), (8, 1, 3, 3), True, ([1], [1], [1], 4)),
    "dilated": (aten.conv2d.default, (2, 4, 7, 7), (6, 4, 3, 3), True, ([1, 1], [0, 0], [2, 2])),
    "conv3d": (aten.conv3d.default, (2, 2, 4, 4, 4), (4, 2, 2, 2, 2), True, ([2, 2, 2],)),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    """One process that takes itself for rank 0 of two; what others send is nothing, so that sums are its own terms."""
    dist.init_process_group("fake", rank=0, world_size=2, store=fake_store())
    try:
        with on_mesh(dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))):
            yield
    finally:
        dist.destroy_process_group()


def tensors(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    _, of_x, of_weight, with_bias, _ = OPERATORS[name]
    torch.manual_seed(0)
    leaves = torch.randn(of_x), torch.randn(of_weight), torch.randn(of_weight[0])
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    return x, weight, bias if with_bias else None


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_are_autograds_to_the_last_bit(name: str) -> None:
    target, *_, args = OPERATORS[name]
    x, weight, bias = tensors(name)
    result, each = overlapped(target, "tensor", x, weight, bias, *args)
    (result.square().sum() + each.sin().sum()).backward()
    again = tensors(name)
    plain = target(*again, *args)
    (plain.square().sum() + again[0].sin().sum()).backward()
    assert torch.equal(result, plain) and torch.equal(each, x)
    for mine, theirs in zip((x, weight, bias), again, strict=True):
        assert mine is theirs is None or torch.equal(mine.grad, theirs.grad)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a backward does, in order, of an operator ``linear``."""
    log: list[str] = []

    class Work:
        def wait(self) -> None:
            log.append("waited")

    def all_reduce(x: torch.Tensor, group: Any, async_op: bool) -> Work:
        assert async_op and x.is_contiguous()
        log.append("sent")
        return Work()

    target = aten.linear.default
    product = module._PRODUCTS[target]

    def backward(*args: Any) -> Any:
        log.append(" ".join(name for name, wanted in zip(("input", "weight", "bias"), args[-1], strict=True) if wanted))
        return product.backward(*args)

    monkeypatch.setitem(module._PRODUCTS, target, replace(product, backward=backward))
    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    return log


def test_the_gradient_of_the_weight_is_computed_while_the_sum_travels(events: list[str]) -> None:
    x, weight, bias = tensors("linear")
    result, each = overlapped(aten.linear.default, "tensor", x, weight, bias)
    (result + aten.linear.default(each, weight)).sum().backward()
    assert events == ["input", "sent", "weight bias", "waited"]


def test_half_a_backward_computes_and_sends_what_it_is_asked_for(events: list[str]) -> None:
    x, weight, bias = tensors("linear")
    assert bias is not None
    inner = x * 2
    result, _ = overlapped(aten.linear.default, "tensor", inner, weight, bias)
    torch.autograd.grad(result.sum(), x, retain_graph=True)
    assert events == ["input", "sent", "waited"]
    events.clear()
    torch.autograd.grad(result.sum(), [weight, bias])
    assert events == ["weight bias"]


def test_without_a_gradient_nothing_is_kept(events: list[str]) -> None:
    x, weight, bias = tensors("linear")
    with torch.no_grad():
        result, each = overlapped(aten.linear.default, "tensor", x, weight, bias)
    assert not result.requires_grad and not each.requires_grad
    result, _ = overlapped(aten.linear.default, "tensor", x.detach(), weight, bias)
    result.sum().backward()
    assert not events


def program(segments: dict[str, int]) -> torch.fx.Graph:
    """A tensor that two linear layers and a sum read, and another that is a layer's weight, by segment."""
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    each = graph.call_function(collectives.convert, (x, "tensor", "I", "R"), name="each")
    first = graph.call_function(aten.linear.default, (each, weight), name="first")
    second = graph.call_function(aten.linear.default, (each, weight), name="second")
    of_weight = graph.call_function(collectives.convert, (weight, "tensor", "I", "R"), name="of_weight")
    third = graph.call_function(aten.linear.default, (x, of_weight), name="third")
    graph.output((first, second, third))
    for node in graph.nodes:
        node.meta["autopar"] = {"outs": []}
        if node.name in segments:
            node.meta["segment"] = segments[node.name]
    return graph


def test_the_first_reader_takes_the_conversion_with_it() -> None:
    graph = program({})
    with_overlap(graph)
    graph.lint()
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    linear = aten.linear.default
    assert targets == [overlapped, operator.getitem, operator.getitem, linear, collectives.convert, linear]
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    run = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert all(torch.equal(y, x @ weight.t()) for y in run(x, weight))


def test_what_runs_again_takes_nothing_from_outside() -> None:
    graph = program({"first": 0})
    with_overlap(graph)
    assert not any(node.target is overlapped for node in graph.nodes)
    graph = program({"each": 0, "first": 0, "second": 0})
    with_overlap(graph)
    assert [node.meta.get("segment") for node in graph.nodes][2:6] == [0, 0, 0, 0]
