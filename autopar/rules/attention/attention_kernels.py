"""Attention over a part of the keys, and how parts are put together: what one rank computes of a distributed attention.

The softmax over all keys is a weighted mean of those over parts of them. With ``l = log sum_k exp(s_k)`` of a part,
its *log-sum-exp*, the result over two parts is ``exp(l1 - l) o1 + exp(l2 - l) o2``, ``l = log(exp(l1) + exp(l2))``
(Milakov and Gimelshein, arXiv:1805.02867; flash attention keeps the same number per query). The backward of a part
needs the result and the log-sum-exp over *all* keys: probabilities are ``exp(s - l)``, and their gradients need nothing
of the other parts but the product of the result with its gradient.

Everything here is on plain tensors of one rank: queries ``[.. h q d]``, keys ``[.. g k d]``, values ``[.. g k e]``,
where ``g`` divides ``h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

FUSED_ON_CUDA = (torch.float16, torch.bfloat16)
"""Precisions of torch's flash attention on GPUs."""
LIKE_CPU = ("cpu", "meta")
"""Types of devices with the kernels of the CPU: tensors without values stand for its own."""


class Dropping(NamedTuple):
    """Dropout of the probabilities: the function that zeroes dropped ones, and the factor of the others."""

    drop: Callable[[torch.Tensor], torch.Tensor]
    unscaled: float


class PartOfAttention:
    """The attention of some queries to some keys.

    Args:
        scale: the scale of the scores; None for ``1 / sqrt(d)``.
        diagonal: query i sees key j where j <= i; there are as many keys as queries.
        mask: bool (True: sees) or added to the scores, broadcast to ``[.. h q k]``; not with ``diagonal``.
        mask_learns: whether a gradient of the mask is asked for.
        dropping: the dropout of the probabilities ``[.. h q k]``. It is not counted in the log-sum-exp.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, diagonal: bool = False,
        mask: torch.Tensor | None = None, mask_learns: bool = False,
        dropping: Dropping | None = None,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.mask = q, k, v, mask
        self.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.diagonal, self.mask_learns, self.dropping = diagonal, mask_learns, dropping

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention to this part's keys alone, in the queries' precision, and its log-sum-exp ``[.. h q]``.

        The log-sum-exp is float32 or wider. A query that sees none of these keys has zeros and -inf.
        """
        if self._flash_on_cuda():
            attended = torch.ops.aten._scaled_dot_product_flash_attention(
                self.q, self.k, self.v, 0.0, self.diagonal, scale=self.scale
            )
            return attended[0], attended[1]
        if self._flash_on_cpu():
            out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                self.q, self.k, self.v, 0.0, self.diagonal, attn_mask=self._added(), scale=self.scale
            )
            blind = self._blind()
            return out, log_sum if blind is None else log_sum.masked_fill(blind, -math.inf)
        scores = self._scores()
        log_sum = torch.logsumexp(scores, -1)
        v = self._wide(self.v).to(log_sum.dtype)
        weights = self._dropped(self._probabilities(scores, log_sum))
        return torch.matmul(weights, v).to(self.q.dtype), log_sum

    def gradients(
        self, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return this part's contribution to the gradients of queries, keys, values and, if it is learned, the mask.

        Args:
            grad: the gradient of the result over all keys.
            out, log_sum: the result and its log-sum-exp.
        """
        log_sum = log_sum.masked_fill(log_sum == -math.inf, 0.0)  # exp(-inf - 0) of who sees nothing is 0
        if self._flash_on_cuda():
            of_inputs = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, self.q, self.k, self.v, out, log_sum, None, None, self.q.shape[-2], self.k.shape[-2], 0.0,
                self.diagonal, *self._no_random_state(), scale=self.scale,
            )  # fmt: skip
            return of_inputs[0], of_inputs[1], of_inputs[2], None
        if self._flash_on_cpu():
            of_inputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, self.q, self.k, self.v, out, log_sum, 0.0, self.diagonal, attn_mask=self._added(),
                scale=self.scale,
            )  # fmt: skip
            return of_inputs[0], of_inputs[1], of_inputs[2], None
        q, k, v = (x.to(log_sum.dtype) for x in (self.q, self._wide(self.k), self._wide(self.v)))
        grad, out = grad.to(log_sum.dtype), out.to(log_sum.dtype)
        weights = self._probabilities(self._scores(), log_sum)
        of_weights = self._dropped(torch.matmul(grad, v.transpose(-2, -1)))
        of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True))
        of_k = torch.matmul(of_scores.transpose(-2, -1), q) * self.scale
        of_v = torch.matmul(self._dropped(weights).transpose(-2, -1), grad)
        of_mask = None
        if self.mask_learns and self.mask is not None:
            of_mask = of_scores.sum_to_size(self.mask.shape).to(self.mask.dtype)
        of_q = (torch.matmul(of_scores, k) * self.scale).sum_to_size(self.q.shape)
        return of_q.to(self.q.dtype), self._narrow(of_k, self.k), self._narrow(of_v, self.v), of_mask

    # -- which kernel

    def _fits_flash(self) -> bool:
        """Check that shapes fit the fused kernels: one shared batch dim, values as wide as keys."""
        lead = self.q.shape[:1]
        fits = self.q.dim() == self.k.dim() == self.v.dim() == 4 and lead == self.k.shape[:1] == self.v.shape[:1]
        if self.dropping is not None:  # torch's kernels would draw numbers of their own
            return False
        return fits and self.q.shape[-1] == self.v.shape[-1] and self.k.shape[1] == self.v.shape[1]

    def _flash_on_cpu(self) -> bool:
        mask = self.mask
        fits = self.q.device.type in LIKE_CPU and self._fits_flash() and not self.mask_learns
        return fits and (mask is None or mask.dim() in (2, 4)) and min(self.q.shape) > 0 and min(self.k.shape) > 0

    def _flash_on_cuda(self) -> bool:
        fits = self.q.device.type == "cuda" and self._fits_flash() and self.mask is None
        return fits and self.q.dtype in FUSED_ON_CUDA and self.q.shape[-1] % 8 == 0 and self.q.shape[-1] <= 256

    def _no_random_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Seed and offset of a dropout that there is none of."""
        empty = torch.empty((), dtype=torch.int64, device=self.q.device)
        return empty, empty

    # -- step by step

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dropping is None else self.dropping.drop(x) * self.dropping.unscaled

    def _added(self) -> torch.Tensor | None:
        """Return the mask as numbers that are added to the scores."""
        if self.mask is None or self.mask.dtype != torch.bool:
            return None if self.mask is None else self.mask.to(self.q.dtype)
        return torch.zeros_like(self.mask, dtype=self.q.dtype).masked_fill_(~self.mask, -math.inf)

    def _blind(self) -> torch.Tensor | None:
        """Return which queries see none of this part's keys under the mask, broadcast to ``[.. h q]``."""
        if self.mask is None:
            return None
        return ~self.mask.any(-1) if self.mask.dtype == torch.bool else (self.mask == -math.inf).all(-1)

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat keys or values, each as often as queries' heads share it."""
        if x.dim() < 3 or x.shape[-3] in (1, self.q.shape[-3]):
            return x
        return x.repeat_interleave(self.q.shape[-3] // x.shape[-3], -3)

    def _narrow(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Reduce the gradient of broadcast keys or values (see :meth:`_wide`) to that of the originals."""
        if x.dim() > 2 and x.shape[-3] not in (1, grad.shape[-3]):
            repeats = grad.shape[-3] // x.shape[-3]
            grad = grad.unflatten(-3, (x.shape[-3], repeats)).sum(-3)
        return grad.sum_to_size(x.shape).to(x.dtype)

    def _scores(self) -> torch.Tensor:
        exact = torch.promote_types(self.q.dtype, torch.float32)
        q, k = self.q.to(exact) * self.scale, self._wide(self.k).to(exact)
        scores = torch.matmul(q, k.transpose(-2, -1))
        if self.diagonal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if self.mask is None:
            return scores
        is_bool = self.mask.dtype == torch.bool
        return scores.masked_fill(~self.mask, -math.inf) if is_bool else scores + self.mask

    def _probabilities(self, scores: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
        return torch.exp(scores - log_sum.masked_fill(log_sum == -math.inf, 0.0).unsqueeze(-1))


def add_part(
    out: torch.Tensor, log_sum: torch.Tensor, part: torch.Tensor, log_of_part: torch.Tensor
) -> None:
    """Merge the attention over another part of the keys into ``out`` [.. h q e] and its log-sum-exp [.. h q].

    Both are written in place, in their precision.
    """
    both = torch.logaddexp(log_sum, log_of_part)
    base = both.masked_fill(both == -math.inf, 0.0)
    weight, weight_of_part = (torch.exp(x - base).unsqueeze(-1).to(out.dtype) for x in (log_sum, log_of_part))
    out.mul_(weight).addcmul_(part.to(out.dtype), weight_of_part)
    log_sum.copy_(both)
