"""Attention with dropout of its probabilities, some queries at a time: no tensor has queries by keys elements.

A block of queries sees all of its keys at once, so no running softmax is needed. Forward and backward make the block's
probabilities, use them and let them go; the backward makes them again from queries, keys and the log-sum-exp of each
query's scores, and draws the same bits again. What is kept for it is queries, keys, values, the mask, the result, the
log-sum-exps, and one hash for each query and key: for S of both, and blocks of B queries, memory is S B in place of
S S. Which element is dropped is decided by its place in the whole tensor (:mod:`.sharded_random`), so neither blocks
nor meshes change the numbers.

On GPUs with Triton the forward is one kernel and the backward are two (:mod:`.attention_triton`), which keep the same
and make no block in memory; the passes here take over where a call has no kernel (a mask that learns, float64).

The result lies as [.. q h e], so that what most models do next, the heads of a query side by side, is no copy.

In a compiled program the call is one operator of its own, forward and backward: a compiler that saw into it would take
the backward's probabilities for those of the forward, and keep them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from autopar.rules.attention.attention_on_gpus import fits_kernels, has_kernels_for, kernels
from autopar.rules.families.sharded_random import dropping
from autopar.torch_private import safe_softmax
from autopar.words.tracing import is_traced
from autopar.words.trees import Context, PyTree

QUERIES, MOST_BLOCKS = 128, 64
"""Queries of a block, and blocks of a call: longer calls have larger blocks."""
FEWEST_SCORES = 1024 * 1024
"""Queries by keys from which on a call goes in blocks (``benchmarks/attention_dropout.py`` has the times of both)."""


class AttentionForm(NamedTuple):
    """The arguments of a call that are no tensors."""

    is_causal: bool
    scale: float
    threshold: int
    keeps_share: float

    def in_one(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, row: Any, column: Any
    ) -> Any:
        """Compute the call at once: the reference, also used for gradients of gradients."""
        return self.with_drop(q, k, v, mask, dropping(row, column, self.threshold))

    def with_drop(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, drop: Any) -> Any:
        """Compute the call at once with given dropout.

        Args:
            drop: sets weights [.. h q k] that are dropped to zero.
        """
        weights = safe_softmax(_scores(q, k, mask, slice(0, q.shape[-2]), self), -1)  # zeros for who sees no key
        return _rejoined(torch.matmul(_folded(drop(weights), v), v), q) * self.unscaled

    @property
    def unscaled(self) -> float:
        """The factor by which the sum of what was kept is multiplied."""
        return 1 / self.keeps_share if self.keeps_share > 0 else 0.0


def goes_in_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Check that a call is worth computing in blocks: long or with kernels, and only keys and values broadcast.

    Not where sizes are no numbers, as on simulated ranks with uneven shards.
    """
    if any(isinstance(n, torch.SymInt) for x in (q, k, v) for n in x.shape):
        return False
    is_short = q.shape[-2] * k.shape[-2] < FEWEST_SCORES or q.shape[-2] <= QUERIES
    if is_short and not (has_kernels_for if is_traced() else fits_kernels)(q, k, v):
        return False
    if k.dim() != q.dim():
        return False
    leading = zip(q.shape[:-3], k.shape[:-3], v.shape[:-3], strict=True) if v.dim() == q.dim() else ()
    return v.dim() == q.dim() and all(of_k in (1, n) and of_v in (1, n) for n, of_k, of_v in leading)


def _folded(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Fold the heads of ``x`` [.. h q c] that share keys into the rows, [.. g (r q) c]; ``like`` has g heads."""
    if x.dim() < 3 or x.shape[-3] == like.shape[-3]:
        return x
    g = like.shape[-3]
    return x.unflatten(-3, (g, -1)).flatten(-3, -2)


def _rejoined(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo :func:`_folded`: [.. g (r q) c] to [.. h q c], with the heads and rows of ``like``."""
    if x.dim() < 3 or x.shape[-3] == like.shape[-3]:
        return x
    return x.unflatten(-2, (-1, like.shape[-2])).flatten(-4, -3)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, rows: slice, form: AttentionForm
) -> torch.Tensor:
    """Compute the scores of a block of queries, [.. h q k], memory of their own; ``mask`` is the block's."""
    scores = _rejoined(torch.matmul(_folded(q * form.scale, k), k.transpose(-2, -1)), q)
    if form.is_causal:
        row, column = (torch.arange(a, b, device=q.device) for a, b in ((rows.start, rows.stop), (0, k.shape[-2])))
        scores = scores.masked_fill(column > row.unsqueeze(-1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def _of_rows(x: torch.Tensor, rows: slice, n: int) -> torch.Tensor:
    """Return the block of a mask [.. q|1 k], or of what has size 1 along queries; its first ``n`` keys."""
    x = x if x.dim() < 2 or x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., :n]


class _Block(NamedTuple):
    """Some queries, and as many of the keys as they can see."""

    rows: slice
    n_keys: int
    scores: torch.Tensor
    drop: Callable[[torch.Tensor], torch.Tensor]


def _blocks(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, row: Any, column: Any, form: AttentionForm
) -> Iterator[_Block]:
    """Yield blocks of queries, the last ones first, since those see the most keys."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    size = max(QUERIES, -(-n_queries // (MOST_BLOCKS * QUERIES)) * QUERIES)
    for start in reversed(range(0, n_queries, size)):
        rows = slice(start, min(start + size, n_queries))
        seen = min(rows.stop, n_keys) if form.is_causal else n_keys
        of_mask = _of_rows(mask, rows, seen) if mask is not None else None
        scores = _scores(q[..., rows, :], k[..., :seen, :], of_mask, rows, form).to(_adds_in(q.dtype))
        yield _Block(rows, seen, scores, dropping(row[..., rows], column[:seen], form.threshold))
        del scores  # before those of the next block are made


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, row: torch.Tensor,
        column: torch.Tensor, form: AttentionForm,
    ) -> torch.Tensor:  # fmt: skip
        tensors = q, k, v, mask, row, column
        out, log_sum = _forward(tensors, form)
        ctx.save_for_backward(*tensors, out, log_sum)
        ctx.form = form
        return out

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _differentiable(ctx, grads[0])
        *tensors, out, log_sum = ctx.saved_tensors
        gradients = _backward(grads[0], out, log_sum, tensors, ctx.needs_input_grad[:4], ctx.form)
        return *gradients, None, None, None


def _results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate a result [.. h q e], which lies as [.. q h e], and of log-sum-exps [.. h q]."""
    log_sum = q.new_empty(q.shape[:-1], dtype=_adds_in(q.dtype))
    if q.dim() < 3:
        return q.new_empty(*q.shape[:-1], v.shape[-1]), log_sum
    *lead, heads, n_queries, _ = q.shape
    return q.new_empty(*lead, n_queries, heads, v.shape[-1]).transpose(-3, -2), log_sum


def _forward(tensors: Sequence[Any], form: AttentionForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of ``tensors``: queries, keys, values, mask or None, hashes of rows and of columns.

    Returns:
        The result, and the log-sum-exp of each query's scores [.. h q], in float32 or more.
    """
    q, k, v, mask, row, column = tensors
    out, log_sum = _results(q, v)
    if fits_kernels(q, k, v) and kernels.forward(tensors, form, out, log_sum):
        return out, log_sum
    for block in _blocks(q, k, mask, row, column, form):
        rows, seen = block.rows, block.n_keys
        highest = block.scores.amax(-1, keepdim=True)
        highest.masked_fill_(highest == -math.inf, 0.0)
        weights = block.scores.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        log_sum[..., rows] = (highest + total.log()).squeeze(-1)
        dropped = _folded(block.drop(weights).to(v.dtype), v)
        del block, weights
        part = _rejoined(torch.matmul(dropped, v[..., :seen, :]), q[..., rows, :])
        del dropped
        total.masked_fill_(total == 0.0, 1.0)  # who sees no key has zeros
        out[..., rows, :] = part * (form.unscaled / total)
    return out, log_sum


def _backward(
    gradient: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, tensors: Sequence[Any], wanted: Sequence[bool],
    form: AttentionForm,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Compute the gradients of queries, keys, values and mask, those that are wanted, from the result's."""
    q, k, v, mask, row, column = tensors
    to_q, to_k, to_v, to_mask = wanted
    if not to_mask and fits_kernels(q, k, v):
        by_kernels = kernels.backward(gradient, out, log_sum, tensors, form)
        if by_kernels is not None:
            return *(x if is_wanted else None for x, is_wanted in zip(by_kernels, wanted, strict=False)), None
    of_q, of_k, of_v = torch.empty_like(q) if to_q else None, _Sum(k), _Sum(v)
    of_mask = _Sum(mask) if to_mask else None
    for block in _blocks(q, k, mask, row, column, form):
        rows, keys, part = block.rows, slice(0, block.n_keys), q[..., block.rows, :]
        sums = log_sum[..., rows].unsqueeze(-1)
        weights = block.scores.sub_(sums.masked_fill(sums == -math.inf, 0.0)).exp_()
        grad = gradient[..., rows, :]
        product = (grad * out[..., rows, :]).sum(-1, keepdim=True, dtype=weights.dtype)
        grad = _folded(grad * form.unscaled, v)
        if to_v:
            dropped = _folded(block.drop(weights).to(v.dtype), v)
            of_v.add(torch.matmul(dropped.transpose(-2, -1), grad), keys)
            del dropped
        of_scores = _rejoined(torch.matmul(grad, v[..., keys, :].transpose(-2, -1)), part)
        of_scores = block.drop(of_scores).to(weights.dtype).sub_(product).mul_(weights)
        del block, weights
        if of_mask is not None:
            of_mask.add_block(of_scores, rows, keys)
        of_scores = _folded(of_scores.to(k.dtype), k)
        if of_q is not None:
            of_q[..., rows, :] = _rejoined(torch.matmul(of_scores, k[..., keys, :]), part) * form.scale
        if to_k:
            of_k.add(torch.matmul(of_scores.transpose(-2, -1), _folded(part * form.scale, k)), keys)
        del of_scores
    return (
        of_q, of_k.total() if to_k else None, of_v.total() if to_v else None,
        of_mask.total() if of_mask is not None else None,
    )  # fmt: skip


class _Sum:
    """The gradient of keys, values or a mask, from blocks that all add to it.

    Args:
        like: what it is the gradient of. Formats of 16 bits add up in 32.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.sum: torch.Tensor | None = None
        self.parts: list[torch.Tensor] = []

    def add(self, x: torch.Tensor, rows: slice) -> None:
        """Add to the rows [.. rows c] from the first on; the first block has the most of them."""
        x = x.sum_to_size(*self.like.shape[:-2], x.shape[-2], self.like.shape[-1]).to(_adds_in(self.like.dtype))
        if self.sum is None:
            self.sum = x
        else:
            self.sum[..., rows, :] += x

    def add_block(self, x: torch.Tensor, rows: slice, keys: slice) -> None:
        """Add scores of a block to the mask that was added to them."""
        shape = self.like.shape
        if shape[-1] > 1 and keys.stop < shape[-1]:
            x = pad(x, (0, shape[-1] - keys.stop))
        if len(shape) > 1 and shape[-2] > 1:
            self.parts.append(x.sum_to_size(*shape[:-2], rows.stop - rows.start, shape[-1]))
            return
        x = x.sum_to_size(shape).to(_adds_in(self.like.dtype))
        self.sum = x if self.sum is None else self.sum + x

    def total(self) -> torch.Tensor:
        """Return the gradient after all blocks have been added."""
        if self.parts:
            return torch.cat(self.parts[::-1], -2)
        assert self.sum is not None
        unseen = self.like.shape[-2] - self.sum.shape[-2] if self.like.dim() > 1 else 0
        return (pad(self.sum, (0, 0, 0, unseen)) if unseen else self.sum).to(self.like.dtype)


def _adds_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks are accumulated."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _differentiable(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Compute gradients that have gradients themselves, from the call as a whole."""
    tensors = ctx.saved_tensors[:6]
    wanted = [x for x, needed in zip(tensors, ctx.needs_input_grad, strict=False) if needed]
    gradients = iter(torch.autograd.grad(ctx.form.in_one(*tensors), wanted, grad, create_graph=True))
    return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:4]), None, None, None


def in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, row: torch.Tensor,
    column: torch.Tensor,
    form: AttentionForm,
) -> torch.Tensor:  # fmt: skip
    """Compute attention with dropout.

    Args:
        q, k, v: [.. h q d], [.. g k d] and [.. g k e]; h is a multiple of g.
        mask: the mask of booleans, or added to the scores; or None.
        row, column: hashes of the queries [.. h q] and keys [k] of which bits are drawn (:mod:`.sharded_random`).

    Returns:
        [.. h q e].
    """
    if is_traced():
        return torch.ops.autopar.attention_in_blocks(q, k, v, mask, row, column, *form)[0]  # type: ignore[no-any-return]
    result: torch.Tensor = _InBlocks.apply(q, k, v, mask, row, column, form)
    return result


# --- as an operator, for compiled programs ---------------------------------------------------------------------------

_library = torch.library.Library("autopar", "FRAGMENT")
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor row, Tensor column, "
    "bool is_causal, float scale, int threshold, float keeps_share"
)
_library.define(f"attention_in_blocks({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(
    "attention_in_blocks_backward(Tensor grad, Tensor out, Tensor log_sum, bool[4] wanted, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(_library, "attention_in_blocks", "CompositeExplicitAutograd")  # type: ignore[untyped-decorator]
def _run_forward(*args: PyTree) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(args[:6], AttentionForm(*args[6:]))


@torch.library.register_fake("autopar::attention_in_blocks", lib=_library)
def _shapes_of_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: PyTree
) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(q, v)


@torch.library.impl(  # type: ignore[untyped-decorator]
    _library, "attention_in_blocks_backward", "CompositeExplicitAutograd"
)
def _run_backward(
    grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, wanted: Sequence[bool], *args: PyTree
) -> tuple[torch.Tensor, ...]:
    gradients = _backward(grad, out, log_sum, args[:6], wanted, AttentionForm(*args[6:]))
    return tuple(grad.new_empty(0) if x is None else x.contiguous() for x in gradients)


@torch.library.register_fake("autopar::attention_in_blocks_backward", lib=_library)
def _shapes_of_backward(
    grad: torch.Tensor, out: Any, log_sum: Any, wanted: Sequence[bool], *args: PyTree
) -> tuple[torch.Tensor, ...]:
    return tuple(
        x.new_empty(x.shape) if is_wanted else grad.new_empty(0) for x, is_wanted in zip(args, wanted, strict=False)
    )


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.form = inputs[6:]


def _gradients(ctx: Context, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    *tensors, out, log_sum = ctx.saved_tensors
    gradients = torch.ops.autopar.attention_in_blocks_backward(grad, out, log_sum, wanted, *tensors, *ctx.form)
    return *(x if is_wanted else None for x, is_wanted in zip(gradients, wanted, strict=True)), *[None] * 6


torch.library.register_autograd("autopar::attention_in_blocks", _gradients, setup_context=_keep, lib=_library)
