"""Attention whose sequence is cut: queries on their ranks, keys and values gathered or travelling round a ring.

*Gathered*: a rank has some of the queries and all keys; a causal mask has to know where its queries begin.

*Ring* (Liu, Zaharia and Abbeel, arXiv:2310.01889): a rank has some of the queries and the keys and values of the same
places. These go round the axis, one rank a step, while each rank adds the attention to what has come to what it has
(:mod:`.attention_kernels`). In the backward keys and values go round again, and their gradients with them, one step
further, home. With a causal mask the last rank would work all steps and the first one a single one, so ranks first
exchange halves: of 2 n pieces, rank i gets numbers i and 2 n - 1 - i (*zigzag*, as in Llama 3, arXiv:2407.21783;
:mod:`.attention_halves`), and all have the same work in each step. Where another axis cuts the queries too, ranks skip
what the mask hides.

*Dropout* of the probabilities leaves the log-sum-exp as it is, so parts are put together as without; which element is
dropped is decided by its place in the whole sequence (:mod:`.sharded_random`). What has it is computed step by step,
some queries at a time.

A message of the ring is one all-to-all in which each rank sends to one other: a collective, which all ranks post in one
order, so nothing waits for what is posted behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from string import ascii_letters
from typing import Any

import torch
from spmd_types import rules as types

from autopar.rules.attention.attention_call import Draw, Going, Hashes
from autopar.rules.attention.attention_halves import add_to, as_message, exchanged, message_of_halves, parts_of, whole
from autopar.rules.attention.attention_pairs import mask_of
from autopar.rules.attention.attention_sums import AttentionSoFar, SumOfParts
from autopar.rules.families.sharded_random import Shards, Site
from autopar.rules.lowering_helpers.collective_helpers import permuted, sends_on
from autopar.rules.lowering_helpers.local_shard import Sizes, axes_of, cuts_on, n_shards, positions, which_shard
from autopar.rules.lowering_helpers.lowering_trial import makes_some_steps, standing_for
from autopar.torch_private import each_rank
from autopar.words.trees import Context

QUERIES, RING = "q", "ring"
TRIED_STEPS = 4
"""Steps of a ring that are made, at most, where nobody looks at values: the last rank works as much in each after its
first one, and memory is the fullest once one message is worked on while another is on its way and a third is sent."""


# --- what one rank computes with the keys that it has


def _added(
    way: Going, numbers: Sequence[int], source: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, hashes: Hashes, out: torch.Tensor | None, log_sum: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Merge the attention to the keys `k` into that to earlier ones; the first time there are none."""
    so_far = AttentionSoFar(q, v.shape[-1], out, log_sum)
    for pair, part in way.parts(numbers, source, q, k, v, mask, hashes):
        so_far.add(pair.rows, *part.result())
    return so_far.result()


def _lying_like(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Cast the result to the queries' precision with the queries' strides.

    Torch's kernels do so, and a reader may view it.
    """
    if out.shape != q.shape or (out.dtype == q.dtype and out.stride() == q.stride()):
        return out.to(q.dtype)
    return torch.empty_like(q).copy_(out)


def _gradients(
    way: Going, numbers: Sequence[int], source: int, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, mask: torch.Tensor | None, hashes: Hashes, out: torch.Tensor, log_sum: torch.Tensor,
    of_q: torch.Tensor | None, of_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Add the share of the keys `k` to the gradients of the queries, and return the gradients of these keys and values.

    They are in the precision of sums; the mask's gradient is added to ``of_mask``.
    """
    sum_of_q, sum_of_k, sum_of_v = SumOfParts(q, of_q), SumOfParts(k), SumOfParts(v)
    for pair, part in way.parts(numbers, source, q, k, v, mask, hashes):
        at = (..., pair.rows, slice(None))
        into_q, into_k, into_v, into_mask = part.gradients(grad[at], out[at], log_sum[..., pair.rows])
        sum_of_q.add(pair.rows, into_q)
        sum_of_k.add(pair.keys, into_k)
        sum_of_v.add(pair.keys, into_v)
        if into_mask is not None and of_mask is not None:
            into = mask_of(of_mask, pair)
            assert into is not None
            into += into_mask
    return sum_of_q.total(), sum_of_k.total(), sum_of_v.total()


# --- the operator


class _Attention(torch.autograd.Function):
    """Attention on one of the ranks that cut its sequence.

    Saves its inputs, output and log-sum-exp and, with dropout, hashes of its queries and of the keys.
    """

    @staticmethod
    def forward(
        ctx: Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        seed: Any, way: Going,
    ) -> torch.Tensor:  # fmt: skip
        hashes: Hashes = (None, None)
        own_q = q
        if way.n_keys:  # messages are of one size
            room = -(-way.n_keys // way.pieces)
            mask = mask if mask is None else each_rank(_mask_with_room)(mask, q, room)
            q, k, v = (each_rank(_with_room)(x, room) for x in (q, k, v))
        if way.draw is not None and seed is not None:
            seed = seed.to(q.device) if isinstance(seed, torch.Tensor) else seed
            sizes = zip(way.draw.shape, way.draw.shards, strict=False)
            lead = [positions(n, axes, q.device) for n, axes in sizes]
            hashes = each_rank(way.hashes)(way.row_numbers, seed, q.shape[-2], *lead)
        given, shapes, message = q, (k.shape, v.shape), None
        if way.zigzag:
            arriving = exchanged(way, [q]), exchanged(way, [k, v])
            (halves,), halves_of_keys = (wait() for wait in arriving)
            q, message = each_rank(whole)(*halves), each_rank(message_of_halves)(*chain(*halves_of_keys))
            k, v = parts_of(message, shapes)
        out = log_sum = None
        for source, (keys, values) in _round(way, [k, v], message, backward=False):
            out, log_sum = each_rank(_added)(way, way.row_numbers, source, q, keys, values, mask, hashes, out, log_sum)
        assert out is not None
        out = each_rank(_lying_like)(out, q)
        if way.zigzag:
            (halves,) = exchanged(way, [out], back=True)()
            out = each_rank(whole)(*halves, given)
        keys_and_values = [k, v] if message is None else [message]
        ctx.save_for_backward(q, mask, out, log_sum, *hashes, *keys_and_values)
        ctx.way, ctx.shapes = way, shapes
        return each_rank(_rows_of)(out, own_q) if way.n_keys else out

    @staticmethod
    def spmd_typecheck(
        *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, seed: Any
    ) -> Any:
        if seed is not None:
            types.ignore(seed)
        letters = iter(ascii_letters)
        given = [x for x in (q, k, v, mask) if x is not None]
        if mask is not None and not mask.requires_grad:  # a constant goes with any type of the others
            types.ignore(given.pop())
        terms = ["".join(next(letters) for _ in range(x.dim())) for x in given]
        return types.einsum(f"{','.join(terms)}->{terms[0][:-1]}{terms[2][-1]}", *given, linear_in=(2,))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        way: Going = ctx.way
        q, mask, out, log_sum, of_rows, of_places, *keys_and_values = ctx.saved_tensors
        hashes, message, given = (of_rows, of_places), None, grad
        grad = each_rank(_with_room)(grad, -(-way.n_keys // way.pieces)) if way.n_keys else grad.contiguous()
        if way.zigzag:
            grad, out = (each_rank(whole)(*halves) for halves in exchanged(way, [grad, out])())
            (message,) = keys_and_values
            keys_and_values = parts_of(message, ctx.shapes)
        of_q: torch.Tensor | None = None
        of_mask = torch.zeros_like(mask) if way.mask_learns else None
        gradients: list[torch.Tensor] = []
        arriving: Callable[[], torch.Tensor] | None = None
        step = 0
        for source, (keys, values) in _round(way, keys_and_values, message, backward=True):
            of_q, *gradients = each_rank(_gradients)(
                way, way.row_numbers, source, grad, q, keys, values, mask, hashes, out, log_sum, of_q, of_mask
            )
            step += 1
            if arriving is not None:
                sums = arriving()
                each_rank(add_to)(sums, *gradients)
                gradients = parts_of(sums, ctx.shapes)
            if way.ring is not None and (step < way.steps or not way.zigzag):
                # After the last step they are one rank from home, and nothing runs meanwhile.
                sums = each_rank(as_message)(*gradients) if arriving is None else sums
                beside = way if step < way.steps else None
                arriving = permuted(sums, way.ring, way.group, _next_of(way), beside, backward=True)
        if arriving is not None and not way.zigzag:
            gradients = parts_of(arriving(), ctx.shapes)
        assert of_q is not None
        of_q, of_k, of_v = (x.to(q.dtype) for x in (of_q, *gradients))
        if way.zigzag:  # straight from the rank that has the sums to where each half belongs
            waits = exchanged(way, [of_q], back=True), exchanged(way, [of_k, of_v], back=True, from_next=True)
            of_q, of_k, of_v = (each_rank(whole)(*both) for wait in waits for both in wait())
        if way.n_keys:
            of_q, of_k, of_v = (each_rank(_rows_of)(x, given) for x in (of_q, of_k, of_v))
            of_mask = of_mask if of_mask is None else each_rank(_rows_of)(of_mask, given)
        return of_q, of_k, of_v, of_mask, None, None


def _mask_with_room(mask: torch.Tensor, q: torch.Tensor, room: int) -> torch.Tensor:
    """Pad a mask with rows after those of a rank's queries in which all keys are visible.

    A mask that is the same for all queries is returned unchanged.
    """
    if mask.dim() < 2 or mask.shape[-2] != q.shape[-2] or q.shape[-2] == room:
        return mask
    rows = (*mask.shape[:-2], room - q.shape[-2], mask.shape[-1])
    more = mask.new_ones(rows) if mask.dtype == torch.bool else mask.new_zeros(rows)
    return torch.cat([mask, more], -2)


def _with_room(x: torch.Tensor, room: int) -> torch.Tensor:
    """Pad a rank's positions [.. s d] with zeros to ``room`` in all."""
    return torch.nn.functional.pad(x, (0, 0, 0, room - x.shape[-2])).contiguous()


def _rows_of(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return as many positions of ``x`` [.. s d] as ``like`` has."""
    return x[..., : like.shape[-2], :].contiguous()


def _round(
    way: Going, tensors: list[torch.Tensor], message: torch.Tensor | None, backward: bool
) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """Yield the number and tensors of the shard that is here in each step of a ring.

    The next shard travels while a step is computed; it is forwarded as it came, so at most a rank's own shard is
    copied into a message.

    Args:
        message: the tensors as :func:`as_message` writes them, where they lie so.
    """
    shapes, ring = [x.shape for x in tensors], way.ring
    if message is None and way.steps > 1:
        message = each_rank(as_message)(*tensors)
    for step in range(way.steps):
        with standing_for(1 + way.pieces - way.steps if step == 1 else 1):
            arriving = None
            if message is not None and ring is not None and step < way.steps - 1:
                arriving = permuted(message, ring, way.group, _next_of(way), way, backward)
            yield (way.number - step) % way.pieces if step else way.number, tensors
            if arriving is not None:
                message = arriving()
                tensors = parts_of(message, shapes)


def _next_of(way: Going) -> list[int]:
    return [(i + 1) % way.pieces for i in range(way.pieces)]


def exchanges_halves(length: int) -> bool:
    """Check that a causal ring over a sequence exchanges halves: an even number of ranks may, with two halves each."""
    return length % 4 == 0


def attention_across(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, cut: Mapping[str, Sequence[str]], sizes: Sizes = None,
    seed: Any = None, site: Site = 0, shape: Sequence[int] = (), shards: Shards = (),
) -> torch.Tensor:  # fmt: skip
    """Compute ``aten.scaled_dot_product_attention`` with its queries cut and, in the ring, its keys too."""
    # q [.. h q d], k [.. g k d], v [.. g k e] -> [.. h q e]; local q, and local k in a ring
    rows, ring = cut.get(QUERIES, ()), axes_of(cut, RING)
    row_axes = tuple(axis for factor, axes in cut.items() if factor in (QUERIES, RING) for axis in axes)
    axis = ring[0] if ring else None
    group, number = (None, 0) if axis is None else (sends_on(axis), which_shard(axis))
    learns = attn_mask is not None and attn_mask.requires_grad
    places = shape[-2] if dropout_p else None if sizes is None else sizes.get(RING)  # random calls are told the shape
    n_places = places if places is not None and ring and places % n_shards(ring) else 0
    uneven = n_places > 0
    zigzag = bool(ring) and is_causal and not rows and not uneven and exchanges_halves(q.shape[-2] * n_shards(ring))
    row_numbers, pieces = tuple(map(which_shard, row_axes)), n_shards(ring)
    steps = min(pieces, TRIED_STEPS) if makes_some_steps() else pieces
    draw = None
    if dropout_p:
        n_rows = shape[-2]
        drawn = (*shape[:-1], n_places if uneven else k.shape[-2] * pieces)
        draw = Draw(dropout_p, site, drawn, tuple(shards[:-2]))
    else:
        of_all = q.shape[-2] * n_shards(row_axes) if sizes is None or QUERIES not in sizes else sizes[QUERIES]
        n_rows = n_places if uneven else of_all
    way = Going(
        axis, group, number, pieces, cuts_on(row_axes), row_numbers, n_rows, is_causal, scale, zigzag, learns,
        draw, steps, n_places,
    )  # fmt: skip
    return _Attention.apply(q, k, v, attn_mask, seed, way)  # type: ignore[no-any-return]
