"""Operators on images that move or weigh pixels: padding, resizing, pixels to channels, windows to columns.

Spatial dims are whole where neighbours mix; batch and channels are free.
"""

from __future__ import annotations

from math import prod

from autopar.rules.families.shape import named, whole_dims
from autopar.rules.notation import Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, prove_with, rule, sample

_FIRST = (frozenset({0}),)


@rule(
    "aten.pad.default",
    samples=[
        sample(T((4, 6, 8)), [1, 2], "constant", 0.0), sample(T((4, 6, 8)), [0, 0, 1, 0]),
        sample(T((4, 6, 8)), [-1, 1], "constant", 2.5), sample(T((4, 6, 8)), [1, 2], "reflect"),
    ],
)  # fmt: skip
def pad(call: Call) -> Rule:
    constant = call.arg(2, "mode", "constant") == "constant"
    return _padded(call, linear=not constant or not call.arg(3, "value", None), only_batches=not constant)


@rule("aten.constant_pad_nd.default", samples=[sample(T((4, 6, 8)), [1, 2]), sample(T((4, 6)), [0, 0, 1, 1], 1.5)])
def constant_pad(call: Call) -> Rule:
    return _padded(call, linear=not call.arg(2, "value", 0))


@rule(
    "aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default",
    "aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default",
    samples=[sample(T((4, 6, 8)), [1, 2])],
)  # fmt: skip
def edge_pad(call: Call) -> Rule:
    return _padded(call, linear=True, only_batches=True)


def _padded(call: Call, linear: bool, only_batches: bool = False) -> Rule:
    """Make the rule of padding: amounts count from the last dim; dims that are not padded are free.

    Args:
        only_batches: the kernel refuses tensors of no elements, but for their batch.
    """
    amounts = call.args[1]
    n = len(call.out.shape)
    sizes, dims = named(call.ins[0].shape)
    outs, whole = list(dims), set()
    for k in range(len(amounts) // 2):
        d = n - 1 - k
        if amounts[2 * k] or amounts[2 * k + 1]:
            sizes[f"o{d}"] = call.out.shape[d]
            outs[d] = (f"o{d}",)
            whole |= {f"o{d}", dims[d][0]}
    group = _FIRST if linear and call.out.is_float else ()
    return Rule(
        sizes, (tuple(dims),), (tuple(outs),), "copy", frozenset(whole), group,
        needs_some=frozenset(f for dim in dims for f in dim) if only_batches else frozenset(),
    )


@rule(
    "aten.upsample_nearest2d.vec", "aten.upsample_bilinear2d.vec", "aten.upsample_bicubic2d.vec",
    "aten.upsample_nearest1d.vec", "aten.upsample_linear1d.vec", "aten.upsample_trilinear3d.vec",
    "aten.upsample_nearest3d.vec", "aten._upsample_nearest_exact2d.vec", "aten._upsample_bilinear2d_aa.vec",
    "aten._upsample_bicubic2d_aa.vec", "aten.upsample_nearest2d.default", "aten.upsample_bilinear2d.default",
    samples=[sample(T((4, 2, 3, 3)), None, [2.0, 2.0]), sample(T((4, 2, 4, 4)), [6, 6], None)],
)  # fmt: skip
def upsample(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    outs = dims[:2]
    for d in range(2, len(dims)):
        sizes[f"o{d}"] = call.out.shape[d]
        outs = [*outs, (f"o{d}",)]
    whole = frozenset(n for d in (*dims[2:], *outs[2:]) for n in d)
    return Rule(sizes, (tuple(dims),), (tuple(outs),), "copy", whole, _FIRST)


@rule(
    "aten.pixel_shuffle.default",
    "aten.channel_shuffle.default",
    samples=[sample(T((2, 8, 4, 6)), 2), sample(T((8, 4, 2)), 2)],
)
def pixel_shuffle(call: Call) -> Rule:
    n = call.args[1]
    if call.target.startswith("aten.channel"):
        return whole_dims(call, [1])
    return line(
        "... (c p q) h w -> ... c (h p) (w q)", call, sizes={"p": n, "q": n}, kind="copy", linear=[{0}],
        needs_some="c h w",  # of nothing torch's result has another shape
    )  # fmt: skip


@rule("aten.pixel_unshuffle.default", samples=[sample(T((2, 4, 8, 4)), 2)])
def pixel_unshuffle(call: Call) -> Rule:
    n = call.args[1]
    return line(
        "... c (h p) (w q) -> ... (c p q) h w", call, sizes={"p": n, "q": n}, kind="copy", linear=[{0}],
        needs_some="c h w",  # of nothing torch's result has another shape
    )  # fmt: skip


@rule("aten.im2col.default", samples=[sample(T((2, 4, 6, 6)), [3, 3], [1, 1], [1, 1], [1, 1])])
def im2col(call: Call) -> Rule:
    """Make the rule of an image's windows as columns, as in ``nn.Unfold``."""
    return line(
        "b c h w -> b (c k) l", call, sizes={"k": prod(call.args[1])}, whole="h w k l", kind="copy", linear=[{0}],
        needs_some="b c",
    )


@rule("aten.col2im.default", samples=[sample(T((2, 8, 9)), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])])
def col2im(call: Call) -> Rule:
    return line(
        "b (c k) l -> b c h w", call, sizes={"k": prod(call.args[2])}, whole="h w k l", kind="copy", linear=[{0}],
        needs_some="b c",
    )


prove_with("aten.channel_shuffle.default", sample(T((2, 8, 4, 6)), 2))
for _dims, _target in ((1, "reflection_pad1d"), (2, "reflection_pad2d"), (3, "reflection_pad3d")):
    for _name in (_target, _target.replace("reflection", "replication")):
        prove_with(f"aten.{_name}.default", sample(T((4, 2, *(4,) * _dims)), [1, 2] * _dims))
prove_with("aten.upsample_nearest3d.vec", sample(T((4, 2, 2, 2, 2)), None, [2.0, 2.0, 2.0]))
prove_with("aten._upsample_nearest_exact2d.vec", sample(T((4, 2, 3, 3)), None, [2.0, 2.0]))
for _target in ("_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.vec"):
    prove_with(f"aten.{_target}", sample(T((4, 2, 3, 3)), None, False, [2.0, 2.0]))
prove_with("aten.upsample_nearest2d.default", sample(T((4, 2, 3, 3)), [6, 6]))
prove_with("aten.upsample_bilinear2d.default", sample(T((4, 2, 3, 3)), [6, 6], False))
for _target in ("upsample_bilinear2d.vec", "upsample_bicubic2d.vec"):
    prove_with(f"aten.{_target}", sample(T((4, 2, 3, 3)), None, False, [2.0, 2.0]))
prove_with("aten.upsample_nearest1d.vec", sample(T((4, 2, 3)), None, [2.0]))
prove_with("aten.upsample_linear1d.vec", sample(T((4, 2, 3)), None, False, [2.0]))
prove_with("aten.upsample_trilinear3d.vec", sample(T((4, 2, 2, 2, 2)), None, False, [2.0, 2.0, 2.0]))
