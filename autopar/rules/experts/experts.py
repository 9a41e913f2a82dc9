"""The products of routed experts: every row is multiplied by the matrix of the expert that it is routed to.

Models write this in many ways (rows sorted by expert and a grouped product, matrices gathered row by row, a loop over
the experts); capture makes one operator of them, in which rows stay where they are. So rows are cut like any batch, the
matrices by expert, by input or by output features; on its rank each call sorts its rows by expert, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from autopar.rules.lowering_helpers.collective_helpers import pending
from autopar.rules.lowering_helpers.local_shard import Cuts, Sizes, axes_of, first
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample
from autopar.torch_private import below_autograd
from autopar.words.load_shares import busiest
from autopar.words.trees import Context

EXPERTS = "autopar.expert_linear.default"

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("expert_linear(Tensor x, Tensor weight, Tensor expert) -> Tensor")
_library.define("by_expert(Tensor expert, Tensor weight) -> (Tensor, Tensor, Tensor)")
_library.define("in_order_of_experts(Tensor rows, Tensor order) -> Tensor")
_library.define("in_order_of_rows(Tensor rows, Tensor order) -> Tensor")
_library.define("expert_linear_in_order(Tensor x, Tensor weight, Tensor ends) -> Tensor")
_library.define(
    "expert_linear_in_order_backward("
    "Tensor grad, Tensor x, Tensor weight, Tensor ends, bool[2] wanted) -> (Tensor, Tensor)"
)
_library.define(
    "expert_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor expert, bool[2] wanted) -> (Tensor, Tensor)"
)


class _Sorted:
    """Rows that stand in the order of their experts.

    Args:
        ends: int [experts], behind which row each expert's rows end; rows behind the last end have no expert.
    """

    def __init__(self, ends: torch.Tensor) -> None:
        self.ends = ends

    def product(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Multiply each row by its expert's matrix: [rows k], [experts k n] to [rows n]; zero without an expert."""
        if _grouped(rows, matrices):
            made = torch.nn.functional.grouped_mm(rows, matrices, offs=self.ends.to(torch.int32))
            there = torch.arange(len(rows), device=rows.device) < self.ends[-1]
            return torch.where(there.unsqueeze(1), made, 0)
        made = rows.new_empty(len(rows), matrices.shape[2])
        end = 0
        for expert, begin, end in self._parts():
            torch.mm(rows[begin:end], matrices[expert], out=made[begin:end])
        made[end:].zero_()
        return made

    def outer(self, rows: torch.Tensor, grads: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Compute ``rows.T @ grads`` by expert: [rows k], [rows n] to [experts k n], with the strides of ``like``."""
        if _grouped(rows, grads):
            return torch.nn.functional.grouped_mm(rows.t(), grads, offs=self.ends.to(torch.int32))
        made, parts = torch.empty_like(like), self._parts()
        for expert, begin, end in parts:
            torch.mm(rows[begin:end].t(), grads[begin:end], out=made[expert])
        for expert in set(range(len(made))) - {expert for expert, _, _ in parts}:
            made[expert].zero_()
        return made

    def _parts(self) -> list[tuple[int, int, int]]:
        """List each expert that has rows with its first row and its end."""
        ends = self.ends.tolist()
        return [(e, begin, end) for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)) if begin < end]


def _grouped(rows: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether torch has a kernel that need not know on the host where each expert's rows end.

    It reads 16 bytes at once, so widths have to be multiples of that: eight elements.
    """
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    return all(_is_aligned(x) for x in (rows, others))


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Return whether matrices [.. m n] lie in memory as the grouped product wants them, in rows or in columns."""
    along = matrix.stride()[-2:]
    apart = max(along)
    return min(along) == 1 and apart * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


def _by_expert(expert: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort rows by expert.

    Returns the order int [rows], the end of each expert's rows in that order int [experts], and the experts in that
    order int [rows]. Rows of an expert below 0, or of the number of experts and above, come last, as if of the last
    expert.

    Args:
        weight: [experts ...], which says how many there are.
    """
    n = len(weight)
    key = torch.where((expert >= 0) & (expert < n), expert, n)
    in_order, order = torch.sort(key, stable=True)
    ends = torch.searchsorted(in_order, torch.arange(n, device=expert.device), right=True)
    return order, ends, in_order.clamp(max=max(n - 1, 0))


def _put(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows)


def _forward(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    order, ends, _ = _by_expert(expert, weight)
    return _put(_Sorted(ends).product(x[order], weight), order)


def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    order, ends, _ = _by_expert(expert, weight)
    of_x, of_weight = _in_order_backward(grad[order], x[order], weight, ends, wanted)
    return _put(of_x, order) if wanted[0] else of_x, of_weight


def _in_order(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return _Sorted(ends).product(x, weight)


def _in_order_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _Sorted(ends)
    of_x = rows.product(grad, weight.transpose(1, 2)) if wanted[0] else x.new_empty(0)
    return of_x, rows.outer(x, grad, weight) if wanted[1] else weight.new_empty(0)


def _differentiable(name: str) -> Any:
    """Return the autograd kernel of a product: ``name`` computes it, ``<name>_backward`` its gradients."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Context, x: torch.Tensor, weight: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight, where)
            with below_autograd():
                return getattr(torch.ops.autopar, name)(x, weight, where)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Context, *grads: torch.Tensor) -> Any:
            wanted = list(ctx.needs_input_grad[:2])
            backward = getattr(torch.ops.autopar, f"{name}_backward")
            of_x, of_weight = backward(grads[0], *ctx.saved_tensors, wanted)
            return of_x if wanted[0] else None, of_weight if wanted[1] else None, None

    return lambda *args: Product.apply(*args)


def _permutation(forth: str, back: str) -> Any:
    """Return the autograd kernel that permutes rows by ``forth``, whose backward is ``back``."""

    class Permuted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Context, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(order)
            with below_autograd():
                return getattr(torch.ops.autopar, forth)(rows, order)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Context, *grads: torch.Tensor) -> Any:
            return getattr(torch.ops.autopar, back)(grads[0], *ctx.saved_tensors), None

    return lambda *args: Permuted.apply(*args)


def _gradients_without_values(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, where: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    of_x, of_weight = x if wanted[0] else x.new_empty(0), weight if wanted[1] else weight.new_empty(0)
    return torch.empty_like(of_x), torch.empty_like(of_weight)


_KERNELS = {
    "expert_linear": _forward, "expert_linear_backward": _backward, "expert_linear_in_order": _in_order,
    "expert_linear_in_order_backward": _in_order_backward, "by_expert": _by_expert,
    "in_order_of_experts": lambda rows, order: rows.index_select(0, order), "in_order_of_rows": _put,
}  # fmt: skip
_WITHOUT_VALUES = {
    "expert_linear": lambda x, weight, where: x.new_empty(x.shape[0], weight.shape[2]),
    "expert_linear_in_order": lambda x, weight, where: x.new_empty(x.shape[0], weight.shape[2]),
    "expert_linear_backward": _gradients_without_values,
    "expert_linear_in_order_backward": _gradients_without_values,
    "by_expert": lambda expert, weight: (
        torch.empty_like(expert), expert.new_empty(weight.shape[0]), torch.empty_like(expert)
    ),
    "in_order_of_experts": lambda rows, order: rows.new_empty(rows.shape),
    "in_order_of_rows": lambda rows, order: torch.empty_like(rows),
}
for _name, _kernel in _KERNELS.items():
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    _library.impl(_name, _WITHOUT_VALUES[_name], "Meta")
for _name in ("expert_linear", "expert_linear_in_order"):
    _library.impl(_name, _differentiable(_name), "Autograd")
_library.impl("in_order_of_experts", _permutation("in_order_of_experts", "in_order_of_rows"), "Autograd")
_library.impl("in_order_of_rows", _permutation("in_order_of_rows", "in_order_of_experts"), "Autograd")


def expert_product(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Compute row by row ``x[i] @ weight[expert[i]]``: [rows k], [experts k n] and int [rows] to [rows n]."""
    return torch.ops.autopar.expert_linear(x, weight, expert)  # type: ignore[no-any-return]


def own_experts(
    x: torch.Tensor, weight: torch.Tensor, expert: Any, *, cut: Cuts, sizes: Sizes = None, load: Any = ()
) -> torch.Tensor:
    """Compute with the experts cut: rows of other ranks' experts are zeros, and the sum is pending."""
    # x [s k], weight [e k n], expert [s] -> [s n]; local e
    local = expert - first(cut, sizes, "e", weight, 0)
    return pending(torch.ops.autopar.expert_linear(x, weight, local), axes_of(cut, "e", "k"))


def most_rows(call: Call, name: str, n_experts: int) -> Callable[[Mapping[str, int | Fraction]], float] | None:
    """Return the work of the busiest rank as a multiple of its share of the experts.

    None if the load is unknown or equal.

    Args:
        name: the name of the option that cuts experts.
    """
    if not call.load:
        return None

    def most(pieces: Mapping[str, int | Fraction]) -> float:
        each = -(-n_experts // pieces.get(name, 1))
        return busiest(call.load, -(-n_experts // int(each)))[1] * n_experts / each

    return most


@rule(
    EXPERTS,
    samples=[
        sample(T((8, 4)), T((4, 4, 6)), T((8,), "int64", 4)), sample(T((6, 8)), T((2, 8, 2)), T((6,), "int64", 2)),
    ],
)  # fmt: skip
def expert_linear(call: Call) -> Rule:
    """Make the rule of a product of each row with its expert's matrix."""
    made = line("s k, e k n, s -> s n", call, linear=[{0}, {1}], saves=(0, 1, 2), kind="matmul")
    lowering = Lowering(own_experts, frozenset("e"), uneven=True, most_work=most_rows(call, "e", made.sizes["e"]))
    return replace(made, flops=2.0 / max(made.sizes["e"], 1), lowerings=(lowering,), gemm=("s", "n", "k", "e"))
