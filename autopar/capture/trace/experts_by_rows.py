"""Routed experts, in the form in which they can be cut: a product of each row with the matrix of its expert.

``transformers`` runs experts in several ways: in a loop over those that were hit (its sizes depend on data), with rows
sorted by expert, or with a matrix gathered for every row. While a model is traced they all become one form, in which
rows stay in their order (:mod:`autopar.rules.experts.experts`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from autopar.rules.experts.experts import expert_product

_MODULE = "transformers.integrations.moe"


@contextlib.contextmanager
def experts_by_rows() -> Iterator[None]:
    """Trace experts of ``transformers`` row by row, however their configuration wants them to run."""
    interface = getattr(sys.modules.get(_MODULE), "ExpertsInterface", None)
    if interface is None:
        yield
        return

    with mock.patch.object(interface, "get_interface", lambda *_args, **_kwargs: _by_rows):
        yield


def rows_of(tokens: torch.Tensor, n: int) -> torch.Tensor:
    """Return a row for each of the ``n`` experts of every token: [tokens hidden] to [tokens * n hidden]."""
    count, hidden = tokens.shape
    return tokens.unsqueeze(1).expand(count, n, hidden).reshape(count * n, hidden)


def _by_rows(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute ``grouped_mm_experts_forward`` of transformers: [tokens hidden] to the same."""
    tokens = len(hidden_states)
    n = top_k_index.shape[-1]
    expert = top_k_index.reshape(-1)
    rows = rows_of(hidden_states, n)

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(self, name)
        weight = weight if self.is_transposed else weight.transpose(-2, -1)
        by_expert = expert_product(rows.to(weight.dtype), weight, expert)
        return by_expert + functional.embedding(expert, getattr(self, f"{name}_bias")) if self.has_bias else by_expert

    features = product(rows, "gate_up_proj" if self.has_gate else "up_proj")
    features = self._apply_gate(features) if self.has_gate else self.act_fn(features)
    features = product(features, "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        features = self.post_expert_norm(features)
    weighted = features * top_k_weights.reshape(-1).unsqueeze(-1)
    return weighted.view(tokens, n, -1).sum(dim=1).to(hidden_states.dtype)
