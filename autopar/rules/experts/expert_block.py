"""Routed experts as one operator: all that happens to a row between its way to an expert and its way back.

``autopar.expert_block(tensors, body)`` computes, row by row, what a short program says: products with the matrices of
the row's expert and, between them, operators that work on each row by itself. Tensors are rows ``[rows ...]``, what
every expert has of its own ``[experts ...]``, what all have in common, and last the expert of each row, int [rows].
On one device it is the sequence of these operators. Its reason are the ways to cut it:

* ``s``: every rank has all experts and computes its rows;
* ``e``: every rank has some experts and all rows, and a term of the result, which is zero for rows of other experts;
* ``travel``: every rank has some experts and some rows; rows travel to their expert and back, once each way
  (:mod:`autopar.rules.experts.expert_all_to_all`);
* ``ffn``: every rank has the same piece of the features between the products
  (:mod:`autopar.rules.experts.expert_features`), of all its experts, and a term of the result; also beside ``e`` or
  ``travel`` on other axes.

Capture finds such blocks (:mod:`autopar.capture.graph.expert_blocks`) and writes the program down as text
(:mod:`autopar.rules.experts.expert_program`), so that a plan, a fingerprint and a printed program have it like any
other argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import spmd_types as spmd
import torch

from autopar.rules.experts.expert_all_to_all import Passage, Trip, untyped
from autopar.rules.experts.expert_features import LOOKUP, SPLIT, features_of
from autopar.rules.experts.expert_program import COMMON, EXPERT, ROW, Body, Value, body_of, computed
from autopar.rules.experts.experts import EXPERTS, most_rows
from autopar.rules.lowering_helpers.collective_helpers import pending
from autopar.rules.lowering_helpers.local_shard import Cuts, Sizes, axes_of, first, n_shards
from autopar.rules.notation import CallPart, Comm, Lowering, Parts, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample
from autopar.words.exchanges import exchanges_along, ways_to_exchange
from autopar.words.load_shares import path_to_busiest
from autopar.words.placements import PENDING, REPLICATED, Placement, shard
from autopar.words.trees import PyTree

BLOCK = "autopar.expert_block.default"


_library = torch.library.Library("autopar", "FRAGMENT")


_library.define("expert_block(Tensor[] tensors, str body) -> Tensor")


_library.impl("expert_block", lambda tensors, body: computed(tensors, body_of(body)), "CompositeImplicitAutograd")


def own_experts_block(
    tensors: Sequence[torch.Tensor], body: str, *, cut: Cuts, sizes: Sizes = None, load: Any = ()
) -> torch.Tensor:
    """Compute the block with the experts cut: rows of other ranks' experts are zeros, and the sum is pending."""
    if FFN in cut and spmd.is_type_checking():
        with spmd.no_typecheck():
            made = _of_own_experts(tensors, body, cut, sizes)
        made = untyped(_multiplied(tensors), made)
    else:
        made = _of_own_experts(tensors, body, cut, sizes)
    return pending(made, axes_of(cut, "e", FFN))


def _of_own_experts(tensors: Sequence[torch.Tensor], body: str, cut: Cuts, sizes: Sizes) -> torch.Tensor:
    program, given, axis = body_of(body), list(tensors), _axis_of_features(cut)
    if "e" not in cut:
        return computed(given, program, axis)
    weight = given[program.roles.index(EXPERT)]
    local = given[-1] - first(cut, sizes, "e", weight, 0)
    mine = (local >= 0) & (local < weight.shape[0])
    made = computed([*given[:-1], local], program, axis)
    return torch.where(mine.reshape(-1, *[1] * (made.dim() - 1)), made, 0)


def _axis_of_features(cut: Cuts) -> str | None:
    """Return the axis along which features are exchanged, if one cuts them."""
    return next(iter(axes_of(cut, FFN)), None)


def _multiplied(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that the result is a product of, for the type checker: without the terms that are added."""
    if not spmd.is_type_checking():
        return []
    floats = [x for x in tensors if x.is_floating_point()]
    return [x for x in floats if spmd.P not in spmd.get_local_type(x).values()]


def travelling_block(
    tensors: Sequence[torch.Tensor], body: str, *, cut: Cuts, sizes: Sizes = None, load: Any = ()
) -> torch.Tensor:
    """Compute the block with rows and experts cut by the same axes: rows travel to their expert and back, axis by axis.

    Args:
        load: the load of the experts; a run on tensors without values is that of the rank that gets most rows.
    """
    of_experts = tensors[body_of(body).roles.index(EXPERT)]
    n_experts = sizes[TRAVEL] if sizes else of_experts.shape[0] * n_shards(axes_of(cut, TRAVEL))
    begin, compute, end = travelling_in_parts(n_experts, (tensors, body), {"cut": cut, "load": load})
    leaving = begin.function(*begin.args, **begin.kwargs)
    computing = compute.function(leaving, *compute.args, **compute.kwargs)
    return end.function(computing, *end.args, **end.kwargs)  # type: ignore[no-any-return]


@dataclass
class Travelling:
    """A block whose rows are on their way, to their experts or back.

    Attributes:
        multiplied: for the type checker, tensors of which the result is a product (:func:`_multiplied`).
        trips: one for each exchange, in order.
        under_way: for each chunk of the last one, tensors of rows by their number among those of the block; in the end,
            for each chunk of the first one, the result.
    """

    multiplied: list[torch.Tensor]
    trips: list[Trip]
    under_way: list[dict[int, Passage]]


def travelling_in_parts(n_experts: int, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Parts:
    """Split :func:`travelling_block` into three calls, between which other operators may be computed.

    Only the second reads the experts' matrices: where these are gathered for their use, it waits for them.

    Args:
        n_experts: the number of experts of all ranks.
        args, kwargs: the arguments of the block on one rank, whatever stands there for tensors.
    """
    (*given, expert), body = args
    roles = body_of(body).roles
    rows = [x if role == ROW else None for x, role in zip(given, roles, strict=True)]
    others = [None if role == ROW else x for x, role in zip(given, roles, strict=True)]
    cut = {"cut": kwargs["cut"]}
    with_load = {"load": kwargs["load"]} if kwargs.get("load") else {}
    return (
        CallPart(rows_leave, (rows, expert, n_experts), {**cut, **with_load}),
        CallPart(rows_computed, (others, body), cut),
        CallPart(rows_return, (), cut),
    )


def rows_leave(rows: Sequence[Any], expert: torch.Tensor, n_experts: int, *, cut: Cuts, load: Any = ()) -> Travelling:
    """Send rows to the ranks of their experts.

    Args:
        rows: the block's tensors that are rows, None in the places of the others.
        n_experts: the number of experts of all ranks.
    """
    tensors = {k: x for k, x in enumerate(rows) if x is not None}
    travelling = Travelling(_multiplied(tensors.values()), [], [])
    with _untyped():
        exchanges = exchanges_along(cut[TRAVEL])
        sizes = [n_shards(exchange.axes) for exchange in exchanges]
        way = path_to_busiest(load, sizes) if load else [None] * len(exchanges)
        for exchange, part_of_way in zip(exchanges, way, strict=True):
            for passages in travelling.under_way:  # of the exchange before, which is made at once
                tensors |= {k: passage.arrived() for k, passage in passages.items()}
                [expert] = [chunk.expert for chunk in travelling.trips[-1].chunks]
            trip = Trip(expert, n_experts, exchange, part_of_way)
            travelling.under_way = trip.there(tensors)
            n_experts = trip.of_each
            travelling.trips.append(trip)
    return travelling


def rows_computed(travelling: Travelling, others: Sequence[Any], body: str, *, cut: Cuts) -> Travelling:
    """Compute the rows that have arrived by their experts, chunk by chunk, and send the results.

    Args:
        others: the block's tensors that are no rows, None in the places of those.
    """
    multiplied = [*travelling.multiplied, *_multiplied([x for x in others if x is not None])]
    with _untyped():
        *before, last = travelling.trips
        of_chunks = _by_chunk(others, body_of(body).roles, last)
        home = []
        for chunk, passages, given in zip(last.chunks, travelling.under_way, of_chunks, strict=True):
            arrived = {k: passage.arrived() for k, passage in passages.items()}
            tensors = [arrived[k] if x is None else x for k, x in enumerate(given)]
            home.append(chunk.back(computed([*tensors, chunk.expert], body_of(body), _axis_of_features(cut))))
        later = last
        for trip in reversed(before):
            made = later.placed([passage.arrived() for passage in home])
            home, later = [trip.chunks[0].back(made)], trip
        return Travelling(multiplied, travelling.trips, [{0: passage} for passage in home])


def _by_chunk(others: Sequence[Any], roles: Sequence[str], trip: Trip) -> list[list[Any]]:
    """Return for each chunk of an exchange what its experts have of tensors that are no rows."""
    n = len(trip.chunks)
    if n == 1:
        return [list(others)]
    parts = [
        x.split(trip.of_chunk) if role == EXPERT else [x] * n for x, role in zip(others, roles, strict=True)
    ]  # fmt: skip
    return [list(of_chunk) for of_chunk in zip(*parts, strict=True)]


def rows_return(travelling: Travelling, *, cut: Cuts) -> torch.Tensor:
    """Return the results of the rows to where the rows came from: the block's result."""
    with _untyped():
        made = travelling.trips[0].placed([passages[0].arrived() for passages in travelling.under_way])
    if not spmd.is_type_checking():
        return made
    return pending(untyped(travelling.multiplied, made), axes_of(cut, FFN))


def _untyped() -> AbstractContextManager[Any]:
    """Return a context in which the type checker checks nothing."""
    return spmd.no_typecheck() if spmd.is_type_checking() else nullcontext()


TRAVEL, FFN, COLUMNS = "travel", "ffn", "columns"


_SAMPLE = Body(
    (ROW, EXPERT, EXPERT),
    (
        (EXPERTS, (Value(0), Value(1), Value(3)), {}),
        ("aten.silu.default", (Value(4),), {}),
        (EXPERTS, (Value(5), Value(2), Value(3)), {}),
    ),
).text


_GATED = Body(
    (ROW, EXPERT, EXPERT, EXPERT),
    (
        (EXPERTS, (Value(0), Value(1), Value(4)), {}),
        (SPLIT, (Value(5), [4, 4], 1), {}),
        ("aten.silu.default", (Value(6),), {}),
        ("aten.mul.Tensor", (Value(7), Value(6, 1)), {}),
        (EXPERTS, (Value(8), Value(2), Value(4)), {}),
        ("aten.embedding.default", (Value(3), Value(4)), {}),
        ("aten.add.Tensor", (Value(9), Value(10)), {}),
    ),
).text


@rule(
    BLOCK,
    samples=[
        sample([T((8, 4)), T((4, 4, 6)), T((4, 6, 2)), T((8,), "int64", 4)], _SAMPLE),
        sample([T((12, 4)), T((6, 4, 2)), T((6, 2, 4)), T((12,), "int64", 2)], _SAMPLE),
        sample([T((8, 4)), T((4, 4, 8)), T((4, 4, 2)), T((4, 2)), T((8,), "int64", 4)], _GATED),
    ],
)  # fmt: skip
def expert_block(call: Call) -> Rule:
    """Make the rule of a block of experts from its program."""
    program = body_of(call.args[1])
    weight = program.roles.index(EXPERT)
    experts = call.ins[weight].shape[0]
    terms, whole, arrivals = [], [], []
    for k, (spec, role) in enumerate(zip(call.ins, (*program.roles, ROW), strict=True)):
        lead = {ROW: ["s"], EXPERT: ["e"], COMMON: []}[role]
        own = [f"f{k}{d}" for d in range(len(spec.shape) - len(lead))]
        terms.append([*lead, *own])
        whole += own
        if role == ROW and k < len(program.roles):
            arrivals.append((("s", *own), spec.item_bytes, spec.is_float))
    results = [f"o{d}" for d in range(1, len(call.out.shape))]
    features = features_of(program.steps, call.ins)
    text = ", ".join(" ".join(term) for term in terms) + " -> " + " ".join(["s", *results])
    comm = [Comm(TRAVEL, "all_to_all", ("e",), 8)]
    for over, item_bytes, _ in arrivals:
        comm.append(Comm(TRAVEL, "all_to_all", over, item_bytes, load=call.load, when="first"))
    back = Comm(TRAVEL, "all_to_all", ("s", *results), call.out.item_bytes, load=call.load, when="last")
    comm += [back, replace(back, backward=True)]
    comm += [
        Comm(TRAVEL, "all_to_all", over, item_bytes, backward=True, load=call.load, when="first")
        for over, item_bytes, is_float in arrivals if is_float
    ]  # fmt: skip
    sizes, together, states = {TRAVEL: experts}, {TRAVEL: frozenset("se")}, dict[str, tuple[Placement, ...]]()
    exchanges: list[Comm] = []
    if features is not None:
        sizes |= {FFN: features.size, COLUMNS: call.ins[weight].shape[-1]}
        together[FFN] = frozenset([COLUMNS] if features.dims.get(weight) == 2 else [])
        states[FFN] = tuple(
            shard(features.dims[k]) if k in features.dims else PENDING if k in features.additive else REPLICATED
            for k in range(len(call.ins))
        )
        for size, item_bytes in features.splits:
            over = "s", f"{COLUMNS}{size}"
            exchange = Comm(FFN, "all_to_all", over, item_bytes, load=call.load, load_of=TRAVEL)
            sizes[f"{COLUMNS}{size}"] = size
            together[FFN] |= {f"{COLUMNS}{size}"}
            exchanges += [exchange, replace(exchange, backward=True)]
    made = line(
        text, call, sizes=sizes, whole=" ".join((*whole, *results)), even=FFN, kind="matmul",
        saves=tuple(range(len(call.ins))),
        additive=[k for k, role in enumerate(program.roles) if role == EXPERT and k != weight],  # one is priced
    )  # fmt: skip
    if any(target == LOOKUP for target, _, _ in program.steps):  # torch looks nothing up in a table without rows
        made = replace(made, needs_some=frozenset({"e", TRAVEL}))
    matrices = [call.ins[args[1].number].shape for target, args, _ in program.steps if target == EXPERTS]
    flops = sum(2.0 * call.out.shape[0] * k * n for _, k, n in matrices)
    return replace(
        made, flops=flops / max(1, prod(made.sizes.values())), together=together, in_as=states,
        ways={TRAVEL: ways_to_exchange(experts)},
        out_as={} if features is None else {FFN: (PENDING,)},
        gemm=("s", f"f{weight}1" if features is None else COLUMNS, f"f{weight}0", "e"),
        lowerings=(
            Lowering(
                own_experts_block, frozenset(["e", *states]), tuple(exchanges), uneven=True,
                most_work=most_rows(call, "e", experts), on_one_axis=frozenset(states),
            ),
            Lowering(
                travelling_block, frozenset([TRAVEL, *states]), tuple(comm + exchanges), uneven=True,
                most_work=most_rows(call, TRAVEL, experts), on_one_axis=frozenset(states),
                in_parts=partial(travelling_in_parts, experts),
            ),
        ),
    )  # fmt: skip
