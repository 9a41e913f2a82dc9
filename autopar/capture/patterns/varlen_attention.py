"""``varlen_attn`` becomes attention of plain operators: documents packed into one row, told apart by where they end.

``torch.nn.attention.varlen.varlen_attn`` calls an operator for which rules see nothing and of which there is no kernel
but on CUDA. What is exchanged is that operator; torch's function checks its arguments as ever. The number of a place's
document is a comparison with the documents' ends, so the mask is one of booleans, of which each rank makes its own
rows: heads, queries and a ring are cut as under any mask. The mask is whole: nothing that it hides is skipped, unlike
in torch's kernel. The longest lengths are for that kernel alone, nobody reads them here.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from autopar.capture.trace.patches import Patch, Phase, register
from autopar.errors import CaptureError
from autopar.torch_private import VARLEN_OPERATOR

MODULE = "torch.nn.attention.varlen"


@contextlib.contextmanager
def varlen_attention_in_plain_operators() -> Iterator[None]:
    """Run ``varlen_attn`` as plain operators, which every device has."""
    try:  # a forward may be the first to import it
        importlib.import_module(MODULE)
    except ImportError:  # this torch has none
        yield
        return
    namespace, name = VARLEN_OPERATOR
    with mock.patch.object(getattr(torch.ops, namespace), name, _attention):
        yield


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor | None,
    max_q: int, max_k: int, is_causal: bool = False, scale: float | None = None, window: list[int] | None = None,
    enable_gqa: bool = False, seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:  # fmt: skip
    """Compute the operator: its result [q h e], and the log-sum-exp of each query [h q].

    ``query``, ``key``, ``value``: [q h d], [k g d], [k g e]; g divides h. ``ends_q``, ``ends_k``: int [n + 1], where
    the n documents end, 0 before the first one. ``window``: how many keys before and behind its own place a query sees,
    -1 for all. Places are counted from the ends of a document, which may have more keys than queries.
    """
    if ends_k is None or seqused_k is not None or block_table is not None:
        raise CaptureError(
            "varlen_attn with block_table, with seqused_k or without cu_seq_k reads a cache of keys, which has no "
            "backward: give it the keys of a training step, with cu_seq_k"
        )
    left, right = window or (-1, -1)
    mask = _sees(ends_q, ends_k, len(query), len(key), left, 0 if is_causal else right)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    exact = torch.promote_types(q.dtype, torch.float32)
    every_k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.matmul(q.to(exact), every_k.to(exact).transpose(-2, -1))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    log_sums = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)  # where nobody reads them, they leave the graph
    return out.squeeze(0).transpose(0, 1), log_sums.squeeze(0), None


def _sees(
    ends_q: torch.Tensor, ends_k: torch.Tensor, n_q: int, n_k: int, left: int, right: int
) -> torch.Tensor:  # [q k]
    """Return the mask of the keys of a query's own document within the window; places behind the last one see none."""
    of_q, of_k = _documents(ends_q, n_q), _documents(ends_k, n_k)
    sees = of_q.unsqueeze(1) == of_k
    sees = sees & (of_q < len(ends_q) - 1).unsqueeze(1)
    if left < 0 and right < 0:
        return sees
    if ends_q is ends_k:
        left_q, left_k = (-torch.arange(n, device=ends_q.device) for n in (n_q, n_k))
    else:
        left_q, left_k = _before_the_end(ends_q, of_q), _before_the_end(ends_k, of_k)
    # a key is left_q - left_k places behind a query; compared one by one, as no tensor [q k] but booleans is made
    if left >= 0:
        sees = sees & ((left_q + left).unsqueeze(1) >= left_k)
    return sees & ((left_q - right).unsqueeze(1) <= left_k) if right >= 0 else sees


def _documents(ends: torch.Tensor, n: int) -> torch.Tensor:
    """Return the number of the document of each of ``n`` places; of those behind the last one, that of documents."""
    return torch.bucketize(torch.arange(n, dtype=ends.dtype, device=ends.device), ends[1:], right=True)


def _before_the_end(ends: torch.Tensor, of_places: torch.Tensor) -> torch.Tensor:
    """Return the distance of each place from the end of its document."""
    last = len(ends) - 1
    return ends[(of_places + 1).clamp(max=last)] - torch.arange(len(of_places), device=ends.device)


register(Patch("varlen attention", "torch has a kernel for CUDA alone, and rules see nothing in its operator",
               lambda _record: varlen_attention_in_plain_operators(),
               Phase.TRACE | Phase.OBSERVE | Phase.COMPARE))  # fmt: skip
