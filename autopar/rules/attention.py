"""Scaled dot-product attention: batch, heads (groups of them that share keys) and queries may be cut.

Keys and the inner dim stay whole: cutting them needs a running softmax across ranks. The value dim stays whole too:
a cut of it would repeat the scores on every rank, and leave the fused kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import spmd_types as spmd
import torch

from autopar.rules.attention_in_blocks import AttentionForm, goes_in_blocks, in_blocks
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call, In
from autopar.rules.random import halves, threshold_of
from autopar.rules.registry import T, rule, sample


def attention_with_dropout(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, cut: Any, seed: Any, site: int, shape: Any, shards: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention with dropout of its probabilities that does not depend on the mesh; where it is long, in blocks."""
    # q [.. h q d], k [.. g k d], v [.. g k e] -> [.. h q e]
    drawn = (*shape[:-1], k.shape[-2])
    row, column = halves(seed, site, drawn, (*shards[:-1], ()), q.device)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    form = AttentionForm(is_causal, scale, threshold_of(dropout_p), 1 - dropout_p)
    if goes_in_blocks(q, k, v) and not spmd.is_type_checking():
        return in_blocks(q, k, v, attn_mask, row, column, form)
    return form.in_one(q, k, v, attn_mask, row, column)


def _term(shape: Sequence[int], names: Sequence[str]) -> str:
    """Dims right-aligned to ``names``; a dim of size 1 is a broadcast."""
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
        sample(_Q, _K, _K, None, 0.25, True),
        sample(*_GQA, T((4, 4), grad=False), 0.5, enable_gqa=True),
    ],
)
def attention(call: Call) -> Rule:
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
        whole="k d e" + (" q" if causal else ""),
        linear=[{2}],
        random=dropout_p > 0,
        lowerings=(Lowering(attention_with_dropout),) if dropout_p > 0 else (),
        kind="attention",
        flops=(2 / d + 2 / e) * (0.5 if causal else 1.0),
        saves=tuple(range(3 + n_mask)),
        saves_out=True,
    )
    if n_mask and call.ins[3].is_float:  # torch's kernels give no gradient of the mask where there are no scores
        return replace(of_attention, needs_some=frozenset(of_attention.sizes))
    return of_attention
