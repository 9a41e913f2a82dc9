"""Products: linear, matmul and its relatives, einsum.

All of them are bilinear, so each is one line of notation. The only thing to watch is a bias: when the contracted factor
is cut, the result is a pending sum and the bias has to be a term of it too (see :func:`linear_summed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.rules.lowering_helpers.collective_helpers import pending
from autopar.rules.lowering_helpers.local_shard import Cuts, Sizes, axes_of
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call, In
from autopar.rules.registry import T, prove_with, rule, sample

MATMUL: dict[str, Any] = {"kind": "matmul", "flops": 2.0}


def padded(shape: Sequence[int], names: Sequence[str]) -> str:
    """Return a term for a tensor that broadcasts to dims ``names``, right-aligned; dims of size 1 are ``1``."""
    return " ".join("1" if n == 1 else name for n, name in zip(shape, names[len(names) - len(shape) :], strict=True))


def linear_summed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, cut: Cuts, sizes: Sizes = None
) -> torch.Tensor:
    """Compute ``aten.linear`` with the input features cut: each rank's output and the bias are pending sums."""
    # x [... k], weight [n k], bias [n] -> [... n]; local k
    y = pending(torch.matmul(x, weight.t()), axes_of(cut, "k"))
    return y if bias is None else torch.add(y, bias)


@rule(
    "aten.linear.default",
    samples=[
        sample(T((4, 8)), T((12, 8))),
        sample(T((2, 4, 8)), T((12, 8)), T((12,))),
        sample(T((1, 4, 2, 8)), T((4, 8)), T((4,))),
        sample(T((4, 8)), T((8,))),
    ],
)
def linear(call: Call) -> Rule:
    if len(call.ins[1].shape) == 1:
        return line("... k, k -> ...", call, linear=[{0}, {1}], saves=(0, 1), **MATMUL)
    if len(call.ins) == 2:
        return line("... k, n k -> ... n", call, linear=[{0}, {1}], saves=(0, 1), **MATMUL)
    return line(
        "... k, n k, n -> ... n", call, linear=[{0, 2}, {1, 2}], additive=[2],
        lowerings=(Lowering(linear_summed, frozenset("k"), uneven=True),), saves=(0, 1), **MATMUL,
    )  # fmt: skip


@rule(
    "aten.matmul.default",
    samples=[
        sample(T((8,)), T((8,))),
        sample(T((4, 8)), T((8,))),
        sample(T((8,)), T((2, 8, 4))),
        sample(T((2, 4, 8)), T((8,))),
        sample(T((4, 8)), T((8, 4))),
        sample(T((2, 4, 8)), T((2, 8, 4))),
        sample(T((2, 4, 8)), T((8, 4))),
        sample(T((4, 8)), T((2, 8, 4))),
        sample(T((2, 1, 4, 8)), T((4, 8, 2))),
    ],
)
def matmul(call: Call) -> Rule:
    x, y = (len(spec.shape) for spec in call.ins)
    text = {
        (True, True): "k, k ->",
        (True, False): "k, ... k n -> ... n",
        (False, True): "... m k, k -> ... m",
        (False, False): "... m k, ... k n -> ... m n",
    }[x == 1, y == 1]
    return line(text, call, linear=[{0}, {1}], saves=(0, 1), **MATMUL)


_PRODUCTS = {
    "aten.mm.default": ("m k, k n -> m n", ((4, 8), (8, 4))),
    "aten.bmm.default": ("b m k, b k n -> b m n", ((2, 4, 8), (2, 8, 4))),
    "aten.mv.default": ("m k, k -> m", ((4, 8), (8,))),
    "aten.dot.default": ("k, k ->", ((8,), (8,))),
    "aten.vdot.default": ("k, k ->", ((8,), (8,))),
    "aten.outer.default": ("m, n -> m n", ((4,), (8,))),
    "aten.ger.default": ("m, n -> m n", ((4,), (8,))),
}


@rule(*_PRODUCTS)
def product(call: Call) -> Rule:
    return line(_PRODUCTS[call.target][0], call, linear=[{0}, {1}], saves=(0, 1), **MATMUL)


for _target, (_, _shapes) in _PRODUCTS.items():
    prove_with(_target, sample(*map(T, _shapes)))


def _summed(product: Any) -> Any:
    def added(
        bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1, cut: Cuts,
        sizes: Sizes = None,
    ) -> torch.Tensor:
        terms = pending(product(x, y), axes_of(cut, "k"))
        terms = terms if alpha == 1 else torch.mul(terms, alpha)
        return torch.add(terms, bias if beta == 1 else torch.mul(bias, beta))

    added.__doc__ = f"``beta * bias + alpha * {product.__name__}(x, y)`` with the contracted factor cut."
    return added


addmm_summed, baddbmm_summed, addmv_summed = _summed(torch.mm), _summed(torch.bmm), _summed(torch.mv)

_ADDED = {
    "aten.addmm.default": ("m k, k n -> m n", addmm_summed),
    "aten.baddbmm.default": ("b m k, b k n -> b m n", baddbmm_summed),
    "aten.addmv.default": ("m k, k -> m", addmv_summed),
}


@rule(
    *_ADDED,
    samples=[
        sample(T((4,)), T((4, 8)), T((8, 4))),
        sample(T((4, 4)), T((4, 8)), T((8, 4)), beta=2, alpha=0.5),
        sample(T((1, 4)), T((4, 8)), T((8, 4))),
        sample(T((4, 1)), T((4, 8)), T((8, 4))),
        sample(T(()), T((4, 8)), T((8, 4))),
    ],
)
def added(call: Call) -> Rule:
    text, summed = _ADDED[call.target]
    names = text.split("->")[1].split()
    return line(
        f"{padded(call.ins[0].shape, names)}, {text}", call, linear=[{0, 1}, {0, 2}], additive=[0],
        lowerings=(Lowering(summed, frozenset("k"), uneven=True),), saves=(1, 2), **MATMUL,
    )  # fmt: skip


prove_with(
    "aten.baddbmm.default",
    sample(T((2, 4, 4)), T((2, 4, 8)), T((2, 8, 4)), beta=1, alpha=0.125),
    sample(T((2, 1, 4)), T((2, 4, 8)), T((2, 8, 4))),
    sample(T((4,)), T((2, 4, 8)), T((2, 8, 4))),
)
prove_with("aten.addmv.default", sample(T((4,)), T((4, 8)), T((8,)), alpha=3))


@rule(
    "aten.einsum.default",
    samples=[
        sample("ij,jk->ik", [T((4, 8)), T((8, 2))]),
        sample("bhqd, bhkd -> bhqk", [T((2, 2, 4, 8)), T((2, 2, 4, 8))]),
        sample("...ij,...jk->...ik", [T((2, 4, 8)), T((8, 2))]),
        sample("i...->...", [T((4, 2))]),
        sample("bi,bj", [T((2, 4)), T((2, 8))]),
        sample("ii->i", [T((4, 4))]),
        sample("bn,anm,bm->ba", [T((2, 4)), T((8, 4, 2)), T((2, 2))]),
        sample("ij,jk->ik", [T((4, 1)), T((8, 2))]),
    ],
)
def einsum(call: Call) -> Rule:
    equation = call.args[0].replace(" ", "")
    if not all(isinstance(x, In) for x in call.args[1]):
        raise RuleError(f"einsum '{equation}' with an operand that is no tensor")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    letters = [c for c in left if c.isalpha()]
    if not arrow:
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    # a letter that stands twice in one operand takes a diagonal: no equal slices of it make a slice of the result
    whole = {c for operand in operands for c in operand if c.isalpha() and operand.count(c) > 1}

    def term(operand: str, shape: Sequence[int]) -> str:
        tokens = operand.replace("...", ".")
        n_dots = len(shape) - len(tokens) + 1
        words, at = [], 0
        for token in tokens:
            words.append("..." if token == "." else "1" if shape[at] == 1 else token)
            at += n_dots if token == "." else 1
        return " ".join(words)

    text = ", ".join(term(o, s.shape) for o, s in zip(operands, call.ins, strict=True))
    n = len(operands)
    return line(
        f"{text} -> {term(right, call.out.shape)}", call, whole=" ".join(sorted(whole)), linear=[{i} for i in range(n)],
        saves=tuple(range(n)) if n > 1 else (), kind="matmul" if n > 1 else "reduce", flops=2.0 if n > 1 else 1.0,
    )  # fmt: skip
