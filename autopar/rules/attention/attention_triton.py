"""Attention with dropout as Triton's kernels: one forward, two backward, none with a tensor of queries by keys.

As flash attention (Dao, arXiv:2205.14135 and 2307.08691): a block of queries meets the keys block by block under a
running softmax, and the backward makes probabilities again from the log-sum-exp of each query. Which probabilities are
dropped is a hash of their row's and column's hashes (:mod:`.sharded_random`), made in registers where a block is made:
the same elements for any blocks, cuts and devices, where kernels of torch's draw by how a launch numbers its elements.
The softmax is over all keys, dropped ones included, so the sum that divides counts all and the product only what is
kept.

Only this module imports triton; whoever imports it has asked
:func:`~autopar.rules.attention.attention_on_gpus.has_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from autopar.rules.families.hash_multipliers import MULTIPLIERS

_FIRST, _SECOND = (tl.constexpr(n) for n in MULTIPLIERS)
_NO_MASK, _BOOL_MASK, _ADDED_MASK = (tl.constexpr(n) for n in range(3))


@triton.jit
def _is_kept(row, column, threshold):
    """Compute which elements of a block are kept, by the hash of :mod:`~autopar.rules.families.sharded_random`."""
    z = row[:, None] + column[None, :]
    z = z ^ (z >> 16)
    z = z * _FIRST
    z = z ^ (z >> 15)
    z = z * _SECOND
    return z < threshold


@triton.jit
def _tile(base, rows, columns, n_rows, n_columns, row_stride, column_stride):
    """Load a block of a matrix, with zeros beyond its end."""
    at = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
    return tl.load(at, mask=(rows[:, None] < n_rows) & (columns[None, :] < n_columns), other=0.0)


@triton.jit
def _scores(
    q, k, mask, queries, keys, n_queries, n_keys, scale, mask_q, mask_k,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scores of a block, -inf where a query does not see a key; ``mask`` points to the head's."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    seen = (queries[:, None] < n_queries) & (keys[None, :] < n_keys)
    if MASK != _NO_MASK:
        at = mask + queries[:, None].to(tl.int64) * mask_q + keys[None, :].to(tl.int64) * mask_k
        of_mask = tl.load(at, mask=seen, other=0)
        if MASK == _BOOL_MASK:
            seen = seen & (of_mask != 0)
        else:
            scores += of_mask.to(tl.float32)
    if CAUSAL:
        seen = seen & (keys[None, :] <= queries[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def forward_kernel(
    q, k, v, mask, row, column, out, log_sum,
    scale, threshold, unscaled, n_heads, n_shared, n_queries, n_keys, n_inner, n_values,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, mask_b, mask_h, mask_q, mask_k, out_b, out_h, out_n,
    out_d,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, INNER: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of queries of one head: its result, and the log-sum-exp of its scores."""
    batch, head = (tl.program_id(1) // n_heads).to(tl.int64), (tl.program_id(1) % n_heads).to(tl.int64)
    queries = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inner, values = tl.arange(0, INNER), tl.arange(0, VALUES)
    of_keys = head // n_shared
    q_block = _tile(q + batch * q_b + head * q_h, queries, inner, n_queries, n_inner, q_n, q_d)
    k += batch * k_b + of_keys * k_h
    v += batch * v_b + of_keys * v_h
    mask += batch * mask_b + head * mask_h
    at_rows = (batch * n_heads + head) * n_queries + queries
    of_rows = tl.load(row + at_rows, mask=queries < n_queries, other=0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, VALUES], tl.float32)
    end = n_keys
    if CAUSAL:
        end = tl.minimum(n_keys, (tl.program_id(0) + 1) * QUERIES)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k_block = _tile(k, keys, inner, n_keys, n_inner, k_n, k_d)
        scores = _scores(
            q_block, k_block, mask, queries, keys, n_queries, n_keys, scale, mask_q, mask_k, CAUSAL, MASK, PRECISION
        )
        raised = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp(scores - base[:, None])
        shrinks = tl.exp(highest - base)
        total = total * shrinks + tl.sum(weights, 1)
        of_columns = tl.load(column + keys, mask=keys < n_keys, other=0)
        weights = tl.where(_is_kept(of_rows, of_columns, threshold), weights, 0.0)
        v_block = _tile(v, keys, values, n_keys, n_values, v_n, v_d)
        result = result * shrinks[:, None]
        result += tl.dot(weights.to(v_block.dtype), v_block, input_precision=PRECISION)
        highest = raised
    divisor = tl.where(total == 0.0, 1.0, total)  # a query that sees no key has zeros
    result = result * (unscaled / divisor)[:, None]
    out += batch * out_b + head * out_h
    at = out + queries[:, None].to(tl.int64) * out_n + values[None, :].to(tl.int64) * out_d
    inside = (queries[:, None] < n_queries) & (values[None, :] < n_values)
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)
    tl.store(log_sum + at_rows, highest + tl.log(total), mask=queries < n_queries)


@triton.jit
def _gradient_of_scores(scores, log_sum, of_weights, product):
    """Compute a block's probabilities, and gradients of its scores from those of the kept probabilities."""
    weights = tl.exp(scores - log_sum[:, None])
    return weights, weights * (of_weights - product[:, None])


@triton.jit
def backward_to_queries(
    q, k, v, mask, row, column, out, log_sum, grad, product, of_q,
    scale, threshold, unscaled, n_heads, n_shared, n_queries, n_keys, n_inner, n_values,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, mask_b, mask_h, mask_q, mask_k, out_b, out_h, out_n,
    out_d, grad_b, grad_h, grad_n, grad_d,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, INNER: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute, for a block of queries of one head, their gradient and the product of each result with its gradient."""
    batch, head = (tl.program_id(1) // n_heads).to(tl.int64), (tl.program_id(1) % n_heads).to(tl.int64)
    queries = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inner, values = tl.arange(0, INNER), tl.arange(0, VALUES)
    of_keys = head // n_shared
    q_block = _tile(q + batch * q_b + head * q_h, queries, inner, n_queries, n_inner, q_n, q_d)
    g_block = _tile(grad + batch * grad_b + head * grad_h, queries, values, n_queries, n_values, grad_n, grad_d)
    o_block = _tile(out + batch * out_b + head * out_h, queries, values, n_queries, n_values, out_n, out_d)
    k += batch * k_b + of_keys * k_h
    v += batch * v_b + of_keys * v_h
    mask += batch * mask_b + head * mask_h
    at_rows = (batch * n_heads + head) * n_queries + queries
    of_rows = tl.load(row + at_rows, mask=queries < n_queries, other=0)
    sums = tl.load(log_sum + at_rows, mask=queries < n_queries, other=0.0)
    sums = tl.where(sums == float("-inf"), 0.0, sums)
    products = tl.sum(g_block.to(tl.float32) * o_block.to(tl.float32), 1)
    tl.store(product + at_rows, products, mask=queries < n_queries)
    total = tl.zeros([QUERIES, INNER], tl.float32)
    end = n_keys
    if CAUSAL:
        end = tl.minimum(n_keys, (tl.program_id(0) + 1) * QUERIES)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k_block = _tile(k, keys, inner, n_keys, n_inner, k_n, k_d)
        v_block = _tile(v, keys, values, n_keys, n_values, v_n, v_d)
        scores = _scores(
            q_block, k_block, mask, queries, keys, n_queries, n_keys, scale, mask_q, mask_k, CAUSAL, MASK, PRECISION
        )
        of_columns = tl.load(column + keys, mask=keys < n_keys, other=0)
        of_weights = tl.dot(g_block, tl.trans(v_block), input_precision=PRECISION) * unscaled
        of_weights = tl.where(_is_kept(of_rows, of_columns, threshold), of_weights, 0.0)
        _, of_scores = _gradient_of_scores(scores, sums, of_weights, products)
        total += tl.dot(of_scores.to(k_block.dtype), k_block, input_precision=PRECISION)
    of_q += (batch * n_heads + head) * n_queries * n_inner
    at = of_q + queries[:, None].to(tl.int64) * n_inner + inner[None, :]
    inside = (queries[:, None] < n_queries) & (inner[None, :] < n_inner)
    tl.store(at, (total * scale).to(of_q.dtype.element_ty), mask=inside)


@triton.jit
def backward_to_keys(
    q, k, v, mask, row, column, log_sum, grad, product, of_k, of_v,
    scale, threshold, unscaled, n_heads, n_shared, n_queries, n_keys, n_inner, n_values,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, mask_b, mask_h, mask_q, mask_k, grad_b, grad_h, grad_n,
    grad_d,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, INNER: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values, of all heads that share them."""
    n_groups = n_heads // n_shared
    batch, group = (tl.program_id(1) // n_groups).to(tl.int64), (tl.program_id(1) % n_groups).to(tl.int64)
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    inner, values = tl.arange(0, INNER), tl.arange(0, VALUES)
    k_block = _tile(k + batch * k_b + group * k_h, keys, inner, n_keys, n_inner, k_n, k_d)
    v_block = _tile(v + batch * v_b + group * v_h, keys, values, n_keys, n_values, v_n, v_d)
    of_columns = tl.load(column + keys, mask=keys < n_keys, other=0)
    to_k = tl.zeros([KEYS, INNER], tl.float32)
    to_v = tl.zeros([KEYS, VALUES], tl.float32)
    first = 0
    if CAUSAL:  # queries before the block's first key see none of it
        first = (tl.program_id(0) * KEYS) // QUERIES * QUERIES
    for head in range(group * n_shared, (group + 1) * n_shared):
        q_head, grad_head = q + batch * q_b + head * q_h, grad + batch * grad_b + head * grad_h
        mask_head = mask + batch * mask_b + head * mask_h
        rows_before = (batch * n_heads + head) * n_queries
        for start in range(first, n_queries, QUERIES):
            queries = start + tl.arange(0, QUERIES)
            q_block = _tile(q_head, queries, inner, n_queries, n_inner, q_n, q_d)
            g_block = _tile(grad_head, queries, values, n_queries, n_values, grad_n, grad_d)
            is_there = queries < n_queries
            of_rows = tl.load(row + rows_before + queries, mask=is_there, other=0)
            sums = tl.load(log_sum + rows_before + queries, mask=is_there, other=0.0)
            sums = tl.where(sums == float("-inf"), 0.0, sums)
            products = tl.load(product + rows_before + queries, mask=is_there, other=0.0)
            scores = _scores(
                q_block, k_block, mask_head, queries, keys, n_queries, n_keys, scale, mask_q, mask_k, CAUSAL, MASK,
                PRECISION,
            )  # fmt: skip
            kept = _is_kept(of_rows, of_columns, threshold)
            of_weights = tl.dot(g_block, tl.trans(v_block), input_precision=PRECISION) * unscaled
            of_weights = tl.where(kept, of_weights, 0.0)
            weights, of_scores = _gradient_of_scores(scores, sums, of_weights, products)
            dropped = tl.where(kept, weights, 0.0) * unscaled
            to_v += tl.dot(tl.trans(dropped).to(g_block.dtype), g_block, input_precision=PRECISION)
            to_k += tl.dot(tl.trans(of_scores).to(q_block.dtype), q_block, input_precision=PRECISION)
    rows_before = (batch * n_groups + group) * n_keys
    of_k += rows_before * n_inner
    of_v += rows_before * n_values
    at_k = of_k + keys[:, None].to(tl.int64) * n_inner + inner[None, :]
    at_v = of_v + keys[:, None].to(tl.int64) * n_values + values[None, :]
    is_there = keys[:, None] < n_keys
    tl.store(at_k, (to_k * scale).to(of_k.dtype.element_ty), mask=is_there & (inner[None, :] < n_inner))
    tl.store(at_v, to_v.to(of_v.dtype.element_ty), mask=is_there & (values[None, :] < n_values))


# --- calls ----------------------------------------------------------------------------------------------------------


def blocks_of(dtype: torch.dtype, n_inner: int, n_values: int) -> dict[str, int]:
    """Return sizes of blocks, such that what threads share is less than 99 KiB, which all GPUs from the A10 on have."""
    n_bytes = dtype.itemsize * max(n_inner, n_values)
    size = 64 if dtype.itemsize == 2 and n_bytes <= 256 else 32 if dtype.itemsize == 2 or n_bytes <= 256 else 16
    return {
        "QUERIES": size, "KEYS": size, "INNER": max(16, triton.next_power_of_2(n_inner)),
        "VALUES": max(16, triton.next_power_of_2(n_values)), "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


class _Call:
    """The arguments that all three kernels share in one call.

    Args:
        tensors: queries [b h q d], keys [b g k d], values [b g k e], mask [b h q k] or None, with strides of 0 where
            dims are repeated; hashes of rows [b h q] and columns [k], without holes.
        form: what of the call is no tensor: ``is_causal``, ``scale``, ``threshold`` and ``unscaled``.
    """

    def __init__(self, tensors: tuple[Any, ...], form: Any) -> None:
        q, k, v, mask, _, _ = tensors
        self.n_batch, self.n_heads, self.n_queries, inner = q.shape
        self.n_groups, self.n_keys, values = k.shape[1], k.shape[2], v.shape[3]
        kind = _NO_MASK if mask is None else _BOOL_MASK if mask.dtype == torch.bool else _ADDED_MASK
        self.numbers = (
            form.scale, form.threshold, form.unscaled, self.n_heads, self.n_heads // self.n_groups, self.n_queries,
            self.n_keys, inner, values,
        )  # fmt: skip
        self.inputs = (q, k, v, q if mask is None else mask.view(torch.uint8) if kind == _BOOL_MASK else mask)
        of_mask = (0, 0, 0, 0) if mask is None else mask.stride()
        self.strides = (*q.stride(), *k.stride(), *v.stride(), *of_mask)
        self.blocks: dict[str, Any] = blocks_of(q.dtype, inner, values)
        self.options = {
            **self.blocks, "CAUSAL": form.is_causal, "MASK": kind.value, "PRECISION": _precision(q.dtype),
        }  # fmt: skip

    def over_queries(self) -> tuple[int, int]:
        """Return the launch of the kernels with one block of queries each."""
        return triton.cdiv(self.n_queries, self.blocks["QUERIES"]), self.n_batch * self.n_heads

    def over_keys(self) -> tuple[int, int]:
        """Return the launch of the kernel with one block of keys each."""
        return triton.cdiv(self.n_keys, self.blocks["KEYS"]), self.n_batch * self.n_groups


def forward(tensors: tuple[Any, ...], form: Any, out: torch.Tensor, log_sum: torch.Tensor) -> None:
    """Fill ``out`` [b h q e], of any strides, and ``log_sum`` [b h q], float32 without holes."""
    call = _Call(tensors, form)
    forward_kernel[call.over_queries()](
        *call.inputs, *tensors[4:], out, log_sum, *call.numbers, *call.strides, *out.stride(), **call.options
    )


def backward(
    grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, tensors: tuple[Any, ...], form: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of queries [b h q d], keys [b g k d] and values [b g k e], without holes."""
    call = _Call(tensors, form)
    q, k, v = tensors[:3]
    of_q, of_k, of_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    product = torch.empty_like(log_sum)
    backward_to_queries[call.over_queries()](
        *call.inputs, *tensors[4:], out, log_sum, grad, product, of_q, *call.numbers, *call.strides, *out.stride(),
        *grad.stride(), **call.options,
    )  # fmt: skip
    backward_to_keys[call.over_keys()](
        *call.inputs, *tensors[4:], log_sum, grad, product, of_k, of_v, *call.numbers, *call.strides, *grad.stride(),
        **call.options,
    )  # fmt: skip
    return of_q, of_k, of_v
