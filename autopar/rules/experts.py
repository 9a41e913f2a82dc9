"""The products of routed experts: every row is multiplied by the matrix of the expert that it is routed to.

Models write this in many ways (rows sorted by expert and a grouped product, matrices gathered row by row, a loop over
the experts); capture makes one operator of them, in which rows stay where they are. So rows are cut like any batch, the
matrices by expert, by input or by output features; on its rank each call sorts its rows by expert, once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.rules.distributed import axes_of, first, pending
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample
from autopar.torch_private import below_autograd

EXPERTS = "autopar.expert_linear.default"

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("expert_linear(Tensor x, Tensor weight, Tensor expert) -> Tensor")
_library.define(
    "expert_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor expert, bool[2] wanted) -> (Tensor, Tensor)"
)


class _Sorted:
    """Rows by the expert that they are routed to.

    Args:
        expert: int [rows]; rows of an expert below 0, or of ``n`` and above, are left out.
    """

    def __init__(self, expert: torch.Tensor, n: int) -> None:
        key = torch.where((expert >= 0) & (expert < n), expert, n)
        in_order, self.order = torch.sort(key, stable=True)
        self.ends = torch.searchsorted(in_order, torch.arange(n, device=expert.device), right=True)
        self.n, self.device = n, expert.device

    def product(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """``rows[i] @ matrices[expert[i]]``: [rows k], [experts k n] to [rows n]; zero for rows that are left out."""
        ordered = rows[self.order]
        if _grouped(rows):
            made = torch.nn.functional.grouped_mm(ordered, matrices, offs=self.ends.to(torch.int32))
            there = torch.arange(len(ordered), device=self.device) < self.ends[-1]
            made = torch.where(there.unsqueeze(1), made, 0)
        else:
            made = ordered.new_zeros(len(ordered), matrices.shape[2])
            for expert, begin, end in self._parts():
                torch.mm(ordered[begin:end], matrices[expert], out=made[begin:end])
        return torch.empty_like(made).index_copy_(0, self.order, made)

    def outer(self, rows: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        """For each expert ``rows.T @ grads`` of its rows: [rows k] and [rows n] to [experts k n]."""
        ordered, gradients = rows[self.order], grads[self.order]
        if _grouped(rows):
            return torch.nn.functional.grouped_mm(ordered.t(), gradients, offs=self.ends.to(torch.int32))
        made = rows.new_zeros(self.n, rows.shape[1], grads.shape[1])
        for expert, begin, end in self._parts():
            torch.mm(ordered[begin:end].t(), gradients[begin:end], out=made[expert])
        return made

    def _parts(self) -> list[tuple[int, int, int]]:
        """Each expert that has rows, from which one on, and to which."""
        ends = self.ends.tolist()
        return [(e, begin, end) for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)) if begin < end]


def _grouped(rows: torch.Tensor) -> bool:
    """Whether torch has a kernel that need not know on the host where each expert's rows end."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _forward(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    return _Sorted(expert, len(weight)).product(x, weight)


def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _Sorted(expert, len(weight))
    of_x = rows.product(grad, weight.transpose(1, 2)) if wanted[0] else x.new_empty(0)
    return of_x, rows.outer(x, grad) if wanted[1] else weight.new_empty(0)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, expert)
        with below_autograd():
            return torch.ops.autopar.expert_linear(x, weight, expert)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        wanted = list(ctx.needs_input_grad[:2])
        of_x, of_weight = torch.ops.autopar.expert_linear_backward(grad, *ctx.saved_tensors, wanted)
        return of_x if wanted[0] else None, of_weight if wanted[1] else None, None


_library.impl("expert_linear", _forward, "CPU")
_library.impl("expert_linear", _forward, "CUDA")
_library.impl("expert_linear", lambda x, weight, expert: x.new_empty(x.shape[0], weight.shape[2]), "Meta")
_library.impl("expert_linear", lambda *args: _Differentiable.apply(*args), "Autograd")
_library.impl("expert_linear_backward", _backward, "CPU")
_library.impl("expert_linear_backward", _backward, "CUDA")
_library.impl(
    "expert_linear_backward",
    lambda grad, x, weight, expert, wanted: (
        torch.empty_like(x if wanted[0] else x.new_empty(0)), torch.empty_like(weight if wanted[1] else x.new_empty(0))
    ),
    "Meta",
)  # fmt: skip


def expert_product(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Row by row ``x[i] @ weight[expert[i]]``: [rows k], [experts k n] and int [rows] to [rows n]."""
    return torch.ops.autopar.expert_linear(x, weight, expert)  # type: ignore[no-any-return]


def own_experts(x: Any, weight: Any, expert: Any, *, cut: Any, sizes: Any = None) -> torch.Tensor:
    """With the experts cut: rows of another rank's experts are zeros, and the sum is pending."""
    # x [s k], weight [e k n], expert [s] -> [s n]; local e
    local = expert - first(cut, sizes, "e", weight, 0)
    return pending(torch.ops.autopar.expert_linear(x, weight, local), axes_of(cut, "e", "k"))


@rule(
    EXPERTS,
    samples=[
        sample(T((8, 4)), T((4, 4, 6)), T((8,), "int64", 4)), sample(T((6, 8)), T((2, 8, 2)), T((6,), "int64", 2)),
    ],
)  # fmt: skip
def expert_linear(call: Call) -> Rule:
    made = line("s k, e k n, s -> s n", call, linear=[{0}, {1}], saves=(0, 1, 2), kind="matmul")
    lowering = Lowering(own_experts, frozenset("e"), uneven=True)
    return replace(made, flops=2.0 / max(made.sizes["e"], 1), lowerings=(lowering,), gemm=("s", "n", "k", "e"))


__all__ = ["EXPERTS", "expert_linear", "expert_product"]
