"""Scaled dot-product attention: batch, heads (groups of them that share keys), queries, or queries and keys may be cut.

Cut along ``q``, each rank has some of the queries and all keys and values, gathered. Cut as a ``ring``, keys and values
are in pieces like the queries and travel (:mod:`.ring_attention`). The inner dim stays whole, and so does that of the
values: a cut of it would repeat the scores on every rank, and leave the fused kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import spmd_types as spmd
import torch

from autopar.rules.attention.attention_in_blocks import AttentionForm, goes_in_blocks, in_blocks
from autopar.rules.attention.ring_attention import QUERIES, RING, attention_across, exchanges_halves
from autopar.rules.families.sharded_random import Shards, Site, halves, threshold_of
from autopar.rules.lowering_helpers.local_shard import Cuts
from autopar.rules.notation import Comm, Lowering, Rule, line
from autopar.rules.operator_call import Call, In
from autopar.rules.registry import T, rule, sample
from autopar.words.placements import REPLICATED, shard


def attention_with_dropout(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, cut: Cuts, seed: Any, site: Site, shape: Sequence[int],
    shards: Shards,
) -> torch.Tensor:  # fmt: skip
    """Compute attention with dropout that does not depend on the mesh; if it is long, in blocks."""
    # q [.. h q d], k [.. g k d], v [.. g k e] -> [.. h q e]
    drawn = (*shape[:-1], k.shape[-2])
    row, column = halves(seed, site, drawn, (*shards[:-1], ()), q.device)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    form = AttentionForm(is_causal, scale, threshold_of(dropout_p), 1 - dropout_p)
    if goes_in_blocks(q, k, v) and not spmd.is_type_checking():
        return in_blocks(q, k, v, attn_mask, row, column, form)
    return form.in_one(q, k, v, attn_mask, row, column)


def _term(shape: Sequence[int], names: Sequence[str]) -> str:
    """Return the dims, right-aligned to ``names``; a dim of size 1 is a broadcast."""
    return " ".join("1" if n == 1 else name for n, name in zip(shape, names[len(names) - len(shape) :], strict=True))


_Q, _K = T((2, 4, 6, 8)), T((2, 4, 6, 8))
_GQA = (T((2, 8, 4, 4)), T((2, 4, 4, 4)), T((2, 4, 4, 4)))


@rule(
    "aten.scaled_dot_product_attention.default",
    samples=[
        sample(_Q, _K, _K),
        sample(_Q, _K, _K, None, 0.0, True),
        sample(*_GQA, None, 0.0, True, enable_gqa=True),
        sample(*_GQA, T((4, 4), "bool", grad=False), enable_gqa=True, scale=0.3),
        sample(*_GQA, T((2, 1, 4, 4), grad=False), enable_gqa=True),
        sample(*_GQA, T((1, 8, 4, 4)), enable_gqa=True),
        sample(T((2, 4, 4, 8)), T((2, 4, 6, 8)), T((2, 4, 6, 4)), T((2, 4, 4, 6))),
        sample(T((2, 4, 4, 8)), T((2, 4, 6, 8)), T((2, 4, 6, 8)), T((2, 1, 1, 6), "bool", grad=False)),
        sample(T((4, 4, 8)), T((4, 6, 8)), T((4, 6, 8))),
        sample(T((2, 8, 4, 4)), T((2, 1, 4, 4)), T((2, 1, 4, 4)), enable_gqa=True),
        sample(T((2, 2, 8, 4)), T((2, 2, 8, 4)), T((2, 2, 8, 4)), None, 0.0, True),
        sample(T((2, 2, 8, 4)), T((2, 2, 8, 4)), T((2, 2, 8, 6))),
        sample(T((1, 4, 8, 4)), T((1, 2, 8, 4)), T((1, 2, 8, 4)), None, 0.0, True, enable_gqa=True, scale=0.7),
        sample(T((2, 2, 5, 4)), T((2, 2, 3, 4)), T((2, 2, 3, 4)), None, 0.0, True),
        sample(_Q, _K, _K, None, 0.25, True),
        sample(*_GQA, T((4, 4), grad=False), 0.5, enable_gqa=True),
        sample(T((2, 2, 8, 4)), T((2, 2, 8, 4)), T((2, 2, 8, 4)), None, 0.25, True),
    ],
)
def attention(call: Call) -> Rule:
    """Make the rule of ``aten.scaled_dot_product_attention``."""
    causal = bool(call.arg(5, "is_causal", False))
    dropout_p = call.arg(4, "dropout_p", 0.0)
    mask = call.arg(3, "attn_mask")
    q, k = call.ins[0].shape, call.ins[1].shape
    batch = ["b", "s", "t"][: len(q) - 3] if len(q) > 3 else []
    sizes: dict[str, int] = {}
    heads = ["h"] if len(q) > 2 else []
    kv_heads = heads
    if heads and q[-3] != k[-3] and k[-3] > 1:
        heads, kv_heads = ["(g r)"], ["g"]
        sizes = {"g": k[-3], "r": q[-3] // k[-3]}
    lead, kv_lead = [*batch, *heads], [*batch, *kv_heads]
    n_mask = 1 if isinstance(mask, In) else 0
    terms = [
        _term(q[:-2], lead) + " q d",
        _term(k[:-2], kv_lead) + " k d",
        _term(call.ins[2].shape[:-2], kv_lead) + " k e",
    ]
    if n_mask:
        terms.append(_term(call.ins[3].shape, [*lead, "q", "k"]))
    d, e = q[-1], call.ins[2].shape[-1]
    of_attention = line(
        ", ".join(terms) + " -> " + _term(call.out.shape[:-2], lead) + " q e",
        call,
        sizes=sizes,
        whole="k d e",
        linear=[{2}],
        random=dropout_p > 0,
        lowerings=(Lowering(attention_with_dropout),) if dropout_p > 0 else (),
        kind="attention",
        flops=(2 / d + 2 / e) * (0.5 if causal else 1.0),
        saves=tuple(range(3 + n_mask)),
        saves_out=True,
    )
    of_attention = _along_the_sequence(of_attention, call, causal)
    if n_mask and call.ins[3].is_float:  # torch's kernels give no gradient of the mask where there are no scores
        return replace(of_attention, needs_some=frozenset(of_attention.sizes))
    return of_attention


def _along_the_sequence(whole: Rule, call: Call, causal: bool) -> Rule:
    """Add the cuts of the sequence to the rule of an attention: ``q`` where the mask is causal, and the ring.

    The factor of the ring counts positions of the sequence, or pairs of them where ranks exchange halves of their
    shards.
    """
    q, k, *rest = call.ins
    length = q.shape[-2]
    halves = causal and exchanges_halves(length)
    unit = 2 if halves else 1
    rows = Lowering(attention_across, frozenset({QUERIES}), uneven=True, most_work=_of_last_rank)
    if length != k.shape[-2] or length < 2:
        n_keys = k.shape[-2]
        why = f"its {length} queries meet {n_keys} keys, and a ring takes as many of both" if length != n_keys else (
            f"its sequence has {length} place"
        )
        return replace(whole, lowerings=whole.lowerings + ((rows,) if causal else ()), absent={RING: why})
    round_once, home, exchanged = _travels(whole, call, unit)
    comm = round_once + exchanged if halves else round_once + (home,)
    most_work = _of_last_rank if causal and not halves else None
    ring = Lowering(attention_across, frozenset({RING}), comm, uneven=True, most_work=most_work)
    both = replace(rows, factors=frozenset({QUERIES, RING}), comm=(*round_once, home))
    ins = [shard(len(x.shape) - 2) for x in (q, k, rest[0])]
    for mask in rest[1:]:
        has_rows = len(mask.shape) > 1 and mask.shape[-2] > 1
        ins.append(shard(len(mask.shape) - 2) if has_rows else REPLICATED)
    return replace(
        whole,
        sizes={**whole.sizes, RING: length // unit},
        flops=whole.flops * unit / length,
        together={RING: frozenset({QUERIES})},
        even=whole.even | {RING} if halves else whole.even,
        in_as={RING: tuple(ins)},
        out_as={RING: (shard(len(call.out.shape) - 2),)},
        lowerings=whole.lowerings + ((rows, ring, both) if causal else (ring,)),
    )


def _of_last_rank(cuts: Mapping[str, int | Fraction]) -> float:
    """Return the work of the rank with the last queries of a causal attention, over the mean of all ranks.

    These queries see all keys. Of n ranks its queries see (2 n - 1) / (2 n) of the keys, where the mean is a half.
    """
    return 2.0 - 1.0 / float(prod(cuts.get(f, 1) for f in (QUERIES, RING)))


def _travels(whole: Rule, call: Call, unit: int) -> tuple[tuple[Comm, ...], Comm, tuple[Comm, ...]]:
    """Return the messages of a ring, its last message, and those of ranks that first exchange halves, which replace it.

    Keys and values go round forward and backward, their gradients go round and home. Two halves of each tensor go
    elsewhere: of queries, of keys and values, of results; in the backward of results and gradients. On two ranks one
    half of each stays.

    Args:
        unit: the number of places in an element of the ring's factor.
    """

    def factors(term: Any) -> tuple[str, ...]:
        return tuple(RING if f in (QUERIES, "k") else f for dim in term for f in dim)

    q, k = factors(whole.inputs[0]), factors(whole.inputs[1])
    item, exact = call.out.item_bytes, max(4, call.out.item_bytes)
    d, e = call.ins[0].shape[-1], call.ins[2].shape[-1]

    def both(item_bytes: int) -> int:
        return -(-unit * item_bytes * (d + e) // d)

    comm = (
        Comm(RING, "send_recv", k, both(item), in_ring=True, overlaps=True),
        Comm(RING, "send_recv", k, both(item), backward=True, in_ring=True, overlaps=True),
        Comm(RING, "send_recv", k, both(exact), backward=True, in_ring=True, overlaps=True),
    )
    home = Comm(RING, "send_recv", k, both(exact), backward=True)
    of_q, of_out = unit * item, -(-unit * item * e // d)
    moved = ((q, of_q, False), (k, both(item), False), (q, of_out, False), (q, 2 * of_out, True), (q, of_q, True))
    exchanged = tuple(
        Comm(RING, "send_recv", over, -(-n // 2), backward, from_pieces=pieces)
        for over, n, backward in moved
        for pieces in (3, 2)
    )
    # Gradients of keys and values come from the next rank: on two and on three one half of each is where it belongs.
    exchanged += tuple(Comm(RING, "send_recv", k, -(-both(item) // 2), True, from_pieces=n) for n in (2, 4))
    return comm, home, exchanged
