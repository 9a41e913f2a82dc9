"""Pooling: batch and channels may be cut; space stays whole."""

from __future__ import annotations

from autopar.rules.notation import Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, prove_with, rule, sample

_LINEAR = {f"aten.{kind}_pool{n}d.default" for kind in ("avg", "adaptive_avg") for n in (1, 2, 3)} | {
    f"aten._adaptive_avg_pool{n}d.default" for n in (2, 3)
}
_MAX = {f"aten.max_pool{n}d.default" for n in (1, 2, 3)}
_MAX_WITH_INDICES = {f"aten.max_pool{n}d_with_indices.default" for n in (2, 3)} | {
    "aten.max_pool1d_with_indices.default",
    *(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)),
}


@rule(*sorted(_LINEAR | _MAX | _MAX_WITH_INDICES))
def pool(call: Call) -> Rule:
    n_space = int(call.target.split("pool")[1][0])
    lead = ["b", "c"][2 - (len(call.ins[0].shape) - n_space) :]
    x, p = ([*lead, *names[:n_space]] for names in ("xyz", "pqr"))
    n_outs = sum(o is not None for o in call.outs)
    is_linear = call.target in _LINEAR
    return line(
        " ".join(x) + " -> " + ", ".join([" ".join(p)] * n_outs),
        call,
        whole=" ".join([*x[len(lead) :], *p[len(lead) :]]),
        linear=[{0}] if is_linear else [],
        needs_some="c" if "c" in lead else "",
        kind="reduce",
        saves=() if is_linear else (0,),
        saves_out=not is_linear,
    )


prove_with("aten.avg_pool1d.default", sample(T((2, 4, 8)), [2], [2]))
prove_with("aten.avg_pool2d.default", sample(T((4, 2, 4, 4)), [2, 2]))
prove_with("aten.avg_pool2d.default", sample(T((2, 4, 6, 6)), [3, 3], [2, 2], [1, 1]), sample(T((4, 6, 6)), [2, 2]))
prove_with("aten.avg_pool3d.default", sample(T((2, 2, 4, 4, 4)), [2, 2, 2]))
prove_with("aten.adaptive_avg_pool1d.default", sample(T((2, 4, 6)), [1]))
prove_with("aten.adaptive_avg_pool2d.default", sample(T((2, 4, 6, 6)), [1, 1]), sample(T((2, 4, 6, 6)), [3, 2]))
prove_with("aten.adaptive_avg_pool3d.default", sample(T((2, 2, 4, 4, 4)), [2, 2, 2]))
prove_with("aten.max_pool1d.default", sample(T((2, 4, 8)), [2], [2]))
prove_with("aten.max_pool2d.default", sample(T((4, 2, 4, 4)), [2, 2]), sample(T((2, 4, 6, 6)), [3, 3], [2, 2], [1, 1]))
prove_with("aten.max_pool3d.default", sample(T((2, 2, 4, 4, 4)), [2, 2, 2]))
prove_with("aten.max_pool2d_with_indices.default", sample(T((2, 4, 6, 6)), [2, 2]))
prove_with("aten.adaptive_max_pool2d.default", sample(T((2, 4, 6, 6)), [2, 2]))
prove_with("aten.max_pool3d_with_indices.default", sample(T((2, 2, 4, 4, 4)), [2, 2, 2]))
prove_with("aten.adaptive_max_pool1d.default", sample(T((2, 4, 6)), [2]))
prove_with("aten.adaptive_max_pool3d.default", sample(T((2, 2, 4, 4, 4)), [2, 2, 2]))
prove_with("aten._adaptive_avg_pool2d.default", sample(T((2, 4, 6, 6)), [2, 2]))
prove_with("aten._adaptive_avg_pool3d.default", sample(T((2, 2, 4, 4, 4)), [2, 2, 2]))

prove_with("aten.max_pool1d_with_indices.default", sample(T((4, 2, 8)), [2], [2]))
