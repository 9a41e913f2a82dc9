"""The nodes of a backward in two halves: order of writes, collectives of one call, results of one operator."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from autopar.lower.steps.halves import in_halves

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class Backward:
    """A backward in the making: ``grad`` arrives, ``kept`` was saved."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.grad, self.kept = (self.graph.placeholder(name) for name in ("grad", "kept"))
        self.late: list[torch.fx.Node] = []

    def __call__(self, target: Any, *args: Any, call: str = "", guard: tuple[torch.fx.Node, ...] = ()) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update(call=call, guard=guard)
        self.late.append(node)
        return node

    def first(self, *wanted: torch.fx.Node) -> list[torch.fx.Node]:
        first, second = in_halves(self.late, wanted)
        assert sorted([*first, *second], key=self.late.index) == self.late
        for half in (first, second):
            assert half == sorted(half, key=self.late.index)
        assert not {x for node in first for x in node.all_input_nodes} & {*second}
        return first


def test_what_leads_to_a_gradient_comes_first() -> None:
    b = Backward()
    of_input = b(aten.mm.default, b.grad, b.kept)
    b(aten.mm.default, b.kept, b.grad)
    before = b(aten.tanh_backward.default, of_input, b.kept)
    assert b.first(before) == [of_input, before]
    assert b.first() == []


def test_results_of_one_operator_are_apart_before_the_second_half() -> None:
    """Else the operator's results would all be kept for the one that is read."""
    b = Backward()
    norm = b(aten.native_layer_norm_backward.default, b.grad, b.kept)
    of_input, of_weight = (b(operator.getitem, norm, k) for k in range(2))
    kept = b(aten.clone.default, of_weight)
    assert b.first(of_input) == [norm, of_input, of_weight]
    assert kept in b.late


def test_what_a_block_waits_for_comes_before_it() -> None:
    b = Backward()
    arrived = b(aten.clone.default, b.grad)
    inside = b(aten.neg.default, b.kept, guard=(arrived,))
    assert b.first(inside) == [arrived, inside]


def test_a_write_through_a_view_comes_before_what_reads_the_memory() -> None:
    b = Backward()
    zeros = b(aten.zeros_like.default, b.grad)
    part = b(aten.select.int, zeros, 0, 0)
    write = b(aten.copy_.default, part, b.kept)
    read = b(aten.neg.default, zeros)
    b(aten.mm.default, b.kept, b.grad)
    assert b.first(read) == [zeros, part, write, read]


def test_a_read_comes_before_a_later_write() -> None:
    b = Backward()
    memory = b(aten.clone.default, b.grad)
    of_weight = b(aten.mm.default, b.kept, memory)  # would read what is written below
    total = b(aten.add_.Tensor, memory, b.kept)
    other = b(aten.mm.default, b.kept, total)
    assert b.first(total) == [memory, of_weight, total]
    assert other in b.late


def test_sums_in_place_pull_nothing_along() -> None:
    """Of memory that nobody else reads, as a residual sum is."""
    b = Backward()
    of_input = b(aten.mm.default, b.grad, b.kept)
    of_weight = b(aten.mm.default, b.kept, b.grad)
    total = b(aten.add_.Tensor, of_input, b.grad)
    before = b(aten.mm.default, total, b.kept)
    sums = [total, before, b(aten.add_.Tensor, before, total)]
    assert b.first(sums[-1]) == [of_input, *sums]
    assert of_weight in b.late


def test_collectives_of_one_call_are_in_one_half() -> None:
    """Another rank may read what this one does not; those of other calls are by themselves."""
    b = Backward()
    nodes = []
    for call in ("ring", "ring", "other"):
        start = b(c10d.all_reduce.default, b.grad, "sum", "0", call=call)
        nodes += [start, b(c10d.wait_tensor.default, start, call=call)]
    read = b(aten.neg.default, nodes[1])
    assert b.first(read) == [*nodes[:4], read]
