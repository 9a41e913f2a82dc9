"""Loops over experts: classes of ``transformers`` that run one expert after the other on the rows that hit it.

How many rows hit an expert depends on data, so such a loop cannot be traced. While a model is traced these classes
compute the same row by row, as all others do (:mod:`.experts_by_rows`): every row by the matrix of its own expert.
Where each expert is a module of its own, the code of one of them runs once on all rows, with a product by rows in the
place of each of its linear layers and the parameters of all experts stacked.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar.capture.trace.experts_by_rows import rows_of
from autopar.capture.trace.patches import Function, Patch, register
from autopar.capture.trace.unused_parameters import took_part
from autopar.rules.experts.experts import expert_product
from autopar.words.trees import PyTree


@contextlib.contextmanager
def _loops_by_rows() -> Iterator[None]:
    """Trace the classes of :data:`BY_ROWS` that are loaded row by row."""
    with contextlib.ExitStack() as stack:
        for (module, name, method), by_rows in BY_ROWS.items():
            cls = getattr(sys.modules.get(f"transformers.models.{module}"), name, None)
            if cls is not None:
                stack.enter_context(mock.patch.object(cls, method, by_rows))
        yield


class _Stacked(TorchFunctionMode):
    """Linear layers of one expert are products of each row with the matrix of its own expert.

    Args:
        experts: all of them, alike.
        expert: int [rows].
    """

    def __init__(self, experts: list[torch.nn.Module], expert: torch.Tensor) -> None:
        super().__init__()
        self.expert = expert
        self.tables = [dict(module.named_parameters()) for module in experts]
        self.names = {id(p): name for name, p in self.tables[0].items()}

    def __torch_function__(self, func: Function, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
        product = expert_product(x, self._stacked(weight).transpose(1, 2), self.expert)
        return product if bias is None else product + functional.embedding(self.expert, self._stacked(bias))

    def _stacked(self, of_first: torch.Tensor) -> torch.Tensor:
        name = self.names[id(of_first)]
        return torch.stack([table[name] for table in self.tables])


def _run(self: Any, rows: torch.Tensor, expert: torch.Tensor, per_expert: torch.Tensor) -> torch.Tensor:
    """Run the modules of a ``ModuleDict`` of experts on rows: [rows hidden] and int [rows] to [rows hidden].

    ``per_expert``: int [experts], how many rows of each count. The loop runs only those that have some.
    """
    experts = [self[f"expert_{k}"] for k in range(self.num_experts)]
    took_part(per_expert > 0, [list(module.parameters()) for module in experts])
    with _Stacked(experts, expert):
        return experts[0](rows)  # type: ignore[no-any-return]


def _switch(
    self: object, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """Run one expert for each token, or none where it is full: ``selected_experts`` int [tokens 1 experts]."""
    hit = selected_experts.sum(-1)
    per_expert = selected_experts.sum((0, 1))
    scaled = _run(self, hidden_states, selected_experts.argmax(-1).squeeze(1), per_expert) * (routing_weights * hit)
    return scaled.to(hidden_states.dtype)


def _nllb(
    self: Any, hidden_states: torch.Tensor, router_mask: torch.Tensor, router_probs: torch.Tensor
) -> torch.Tensor:
    """Run the experts ``router_mask``, int [tokens n], of each token, weighed by ``router_probs`` [tokens n]."""
    tokens, n = router_mask.shape
    per_expert = functional.one_hot(router_mask, num_classes=self.num_experts).sum((0, 1))
    scaled = _run(self, rows_of(hidden_states, n), router_mask.reshape(-1), per_expert) * router_probs.reshape(-1, 1)
    if self.moe_token_dropout > 0:
        scaled = self.token_dropout(scaled) if self.training else scaled * (1 - self.moe_token_dropout)
    return scaled.to(hidden_states.dtype).view(tokens, n, -1).sum(1)


def _dbrx(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    batch, n, expert = hidden_states.shape[0], top_k_index.shape[-1], top_k_index.reshape(-1)
    tokens = hidden_states.reshape(-1, self.hidden_size)
    rows = rows_of(tokens, n)
    shape = (-1, self.ffn_hidden_size, self.hidden_size)
    gate, up, down = (weight.view(shape) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    middle = self.mlp.activation_fn(expert_product(rows, gate.transpose(1, 2), expert))
    middle = middle * expert_product(rows, up.transpose(1, 2), expert)
    weighted = expert_product(middle, down, expert) * top_k_weights.reshape(-1, 1)
    return weighted.view(len(tokens), n, -1).sum(1).view(batch, -1, self.hidden_size)


def _jetmoe_gating(self: Any, hidden_states: torch.Tensor) -> tuple[Any, ...]:
    """Return the routing with rows in their order, and the rows' experts in place of their numbers."""
    logits = self.layer(hidden_states).float()
    top_k_logits, top_k_indices = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(top_k_logits, dim=1).type_as(hidden_states)
    return None, None, gates.flatten(), top_k_indices.flatten(), logits


def _jetmoe_product(self: Any, inputs: torch.Tensor, expert_size: torch.Tensor) -> torch.Tensor:
    return expert_product(inputs, self.weight.transpose(1, 2), expert_size)


def _jetmoe_mlp(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    batch, length, hidden = layer_input.shape
    tokens = layer_input.reshape(-1, hidden)
    _, _, gates, expert, _ = self.router(tokens)
    first, second = self.input_linear(rows_of(tokens, self.router.top_k), expert).chunk(2, dim=-1)
    weighted = self.output_linear(self.activation(first) * second, expert) * gates[:, None]
    return weighted.view(batch, length, self.router.top_k, -1).sum(2) + self.bias


def _jetmoe_map(self: Any, layer_input: torch.Tensor) -> tuple[Any, ...]:
    batch, length, hidden = layer_input.shape
    tokens = layer_input.reshape(-1, hidden)
    _, _, gates, expert, logits = self.router(tokens)
    features = self.input_linear(rows_of(tokens, self.top_k), expert)
    return features.view(batch, length, self.top_k, -1), logits, (None, None, gates, expert)


def _jetmoe_reduce(self: Any, layer_input: torch.Tensor, topo_info: tuple[Any, ...]) -> torch.Tensor:
    batch, length, n, hidden = layer_input.shape
    _, _, gates, expert = topo_info
    weighted = self.output_linear(layer_input.reshape(-1, hidden), expert) * gates[:, None]
    return weighted.view(batch, length, n, -1).sum(2) + self.bias


_JETMOE = "jetmoe.modeling_jetmoe"

BY_ROWS: dict[tuple[str, str, str], Function] = {
    ("switch_transformers.modeling_switch_transformers", "SwitchTransformersExperts", "forward"): _switch,
    ("nllb_moe.modeling_nllb_moe", "NllbMoeExperts", "forward"): _nllb,
    ("dbrx.modeling_dbrx", "DbrxExperts", "forward"): _dbrx,
    (_JETMOE, "JetMoeTopKGating", "forward"): _jetmoe_gating,
    (_JETMOE, "JetMoeParallelExperts", "forward"): _jetmoe_product,
    (_JETMOE, "JetMoeMoE", "forward"): _jetmoe_mlp,
    (_JETMOE, "JetMoeMoA", "map"): _jetmoe_map,
    (_JETMOE, "JetMoeMoA", "reduce"): _jetmoe_reduce,
}
"""``(module of transformers.models, class, method)`` and what is traced in its place."""

register(
    Patch("loops over experts", "how many rows hit an expert depends on data", lambda _record: _loops_by_rows())
)
