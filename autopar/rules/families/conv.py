"""Convolutions: batch, input channels (contracted), output channels and groups may be cut; space stays whole."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from autopar.rules.local_calls import resolve
from autopar.rules.lowering_helpers.collective_helpers import bilinear, pending
from autopar.rules.lowering_helpers.local_shard import Cuts, Sizes, axes_of
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, prove_with, rule, sample
from autopar.words.trees import PyTree

_SPACE = "xyz"  # input positions; output positions are pqr, kernel positions ijk


def _conv(call: Call, n_space: int, groups_at: int, transposed: bool) -> Rule:
    # input [b (g c) x y], weight [(g o) c i j] or transposed [(g c) o i j], bias [(g o)] -> [b (g o) p q]
    x, p, k = (list(names[:n_space]) for names in (_SPACE, "pqr", "ijk"))
    groups = call.arg(groups_at, "groups", 1)
    has_bias = len(call.ins) == 3
    batch = "b " if len(call.ins[0].shape) == n_space + 2 else ""
    c, o = ("(g c)", "(g o)") if groups > 1 else ("c", "o")
    weight = f"{c} o" if transposed else f"{o} c"
    text = f"{batch}{c} {' '.join(x)}, {weight} {' '.join(k)}{', ' + o if has_bias else ''} -> {batch}{o} {' '.join(p)}"
    uncounted = call.out.shape[-n_space:] if transposed else call.ins[0].shape[-n_space:]

    def localize(call: Call, cuts: Mapping[str, int]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        return call.replaced(groups_at, "groups", groups // cuts.get("g", 1))

    def summed(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *args: PyTree, cut: Cuts, sizes: Sizes = None,
        **kwargs: PyTree,
    ) -> torch.Tensor:
        """Compute the convolution with its input channels cut; the output and the bias are pending sums."""
        y = bilinear(lambda x, w: resolve(call.target)(x, w, None, *args, **kwargs), x, weight)
        y = pending(y, axes_of(cut, "c"))
        return torch.add(y, bias.reshape(-1, *[1] * n_space))

    return line(
        text,
        call,
        sizes={"g": groups} if groups > 1 else None,
        whole=" ".join([*x, *p, *k]),
        linear=[{0, 2}, {1, 2}] if has_bias else [{0}, {1}],
        additive=[2] if has_bias else [],
        even="g",
        needs_some="c o" + (" g" if groups > 1 else ""),
        localize=localize if groups > 1 else None,
        lowerings=(Lowering(summed, frozenset("c"), uneven=True),) if has_bias else (),
        saves=(0, 1),
        kind="conv",
        flops=2.0 / prod(uncounted),
    )


@rule(*[f"aten.conv{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "padding")])
def conv(call: Call) -> Rule:
    return _conv(call, int(call.target.split("conv")[1][0]), groups_at=6, transposed=False)


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(call: Call) -> Rule:
    return _conv(call, int(call.target.split("transpose")[1][0]), groups_at=6, transposed=True)


@rule("aten.convolution.default")
def convolution(call: Call) -> Rule:
    n_space = len(call.ins[1].shape) - 2
    return _conv(call, n_space, groups_at=8, transposed=bool(call.arg(6, "transposed", False)))


_NO_BIAS = None
prove_with(
    "aten.conv1d.default",
    sample(T((2, 4, 9)), T((8, 4, 3))),
    sample(T((2, 4, 9)), T((8, 4, 3)), T((8,)), [2], [1]),
    sample(T((4, 9)), T((8, 4, 3)), T((8,))),
    sample(T((2, 8, 9)), T((8, 1, 3)), T((8,)), [1], [1], [1], 8),
)
prove_with("aten.conv1d.padding", sample(T((2, 4, 8)), T((4, 2, 3)), T((4,)), [1], "same", [2], 2))
prove_with(
    "aten.conv2d.default",
    sample(T((2, 4, 6, 6)), T((8, 4, 3, 3)), _NO_BIAS, [2, 2], [1, 1]),
    sample(T((4, 2, 4, 4)), T((2, 2, 3, 3)), T((2,))),
    sample(T((2, 4, 6, 6)), T((8, 4, 2, 2)), T((8,)), [2, 2]),
    sample(T((2, 8, 5, 5)), T((8, 2, 3, 3)), T((8,)), [1, 1], [1, 1], [1, 1], 4),
    sample(T((2, 8, 5, 5)), T((8, 1, 3, 3)), _NO_BIAS, [1, 1], [1, 1], [1, 1], 8),
    sample(T((2, 4, 7, 7)), T((8, 4, 3, 3)), T((8,)), [1, 1], [0, 0], [2, 2]),
)
prove_with("aten.conv2d.padding", sample(T((2, 4, 6, 6)), T((8, 4, 3, 3)), T((8,)), [1, 1], "same"))
prove_with("aten.conv3d.padding", sample(T((2, 2, 4, 4, 4)), T((4, 2, 2, 2, 2)), None, [1, 1, 1], "same"))
prove_with("aten.conv3d.default", sample(T((2, 2, 4, 4, 4)), T((4, 2, 2, 2, 2)), T((4,)), [2, 2, 2]))
prove_with("aten.conv_transpose1d.default", sample(T((2, 4, 6)), T((4, 8, 4)), T((8,)), [2], [1]))
prove_with(
    "aten.conv_transpose2d.input",
    sample(T((2, 4, 3, 3)), T((4, 2, 2, 2)), T((2,)), [2, 2]),
    sample(T((2, 4, 3, 3)), T((4, 2, 3, 3)), _NO_BIAS, [2, 2], [1, 1], [1, 1], 2),
)
prove_with("aten.conv_transpose3d.input", sample(T((2, 4, 2, 2, 2)), T((4, 2, 2, 2, 2)), T((2,)), [2, 2, 2]))
prove_with(
    "aten.convolution.default",
    sample(T((2, 4, 6, 6)), T((8, 4, 3, 3)), T((8,)), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    sample(T((2, 4, 3, 3)), T((4, 2, 2, 2)), T((4,)), [2, 2], [0, 0], [1, 1], True, [0, 0], 2),
)
