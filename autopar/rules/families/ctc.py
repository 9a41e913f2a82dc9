"""The loss of transcripts, CTC: one number for each row, whatever the lengths are.

Torch's operator gives a tensor whose size depends on the lengths, so no program without values can hold it, and models
hand it the transcripts of all rows one behind the other. Here targets stay in rows: what of each is a target comes as a
mask, and rows are cut like any batch. The kernels are torch's own, of the forward and of the backward, which computes
the forward again rather than keep a table of a size that nobody knows.

Source: Graves et al., Connectionist Temporal Classification, ICML 2006.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.notation import Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample
from autopar.torch_private import below_autograd
from autopar.words.trees import Context, PyTree

_ARGUMENTS = (
    "Tensor scores, Tensor targets, Tensor? there, Tensor n_steps, Tensor n_targets, int blank, bool zero_infinity"
)
_library = torch.library.Library("autopar", "FRAGMENT")
_library.define(f"ctc({_ARGUMENTS}) -> Tensor")
_library.define(f"ctc_backward(Tensor grad, {_ARGUMENTS}) -> Tensor")


def _flat(targets: torch.Tensor, there: torch.Tensor | None, n_targets: torch.Tensor) -> torch.Tensor:
    """Return the targets in the form that torch's operator takes."""
    if there is None:
        return targets
    if not torch.equal(there.sum(1), n_targets.to(there.device)):
        raise ValueError("ctc_loss: target_lengths are not how many of each row's targets the mask selects")
    return targets[there]


def _of_torch(
    scores: torch.Tensor, targets: torch.Tensor, there: torch.Tensor | None, n_steps: torch.Tensor,
    n_targets: torch.Tensor, blank: int, zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.ops.aten._ctc_loss.Tensor(  # type: ignore[no-any-return]
        scores, _flat(targets, there, n_targets), n_steps, n_targets, blank, zero_infinity
    )


def _rows(*args: PyTree) -> torch.Tensor:
    return _of_torch(*args)[0]


def _rows_backward(
    grad: torch.Tensor, scores: torch.Tensor, targets: torch.Tensor, there: torch.Tensor | None, n_steps: torch.Tensor,
    n_targets: torch.Tensor, blank: int, zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    losses, table = _of_torch(scores, targets, there, n_steps, n_targets, blank, zero_infinity)
    return torch.ops.aten._ctc_loss_backward.Tensor(  # type: ignore[no-any-return]
        grad.contiguous(), scores, _flat(targets, there, n_targets), n_steps, n_targets, losses, table, blank,
        zero_infinity,
    )  # fmt: skip


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, scores: torch.Tensor, targets: torch.Tensor, there: torch.Tensor | None, n_steps: torch.Tensor,
        n_targets: torch.Tensor, blank: int, zero_infinity: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(scores, targets, there, n_steps, n_targets)
        ctx.how = blank, zero_infinity
        with below_autograd():
            return torch.ops.autopar.ctc(scores, targets, there, n_steps, n_targets, blank, zero_infinity)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        of_scores = torch.ops.autopar.ctc_backward(grads[0], *ctx.saved_tensors, *ctx.how)
        return of_scores, None, None, None, None, None, None


for _name, _kernel in {"ctc": _rows, "ctc_backward": _rows_backward}.items():
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
_library.impl("ctc", lambda scores, *_: scores.new_empty(scores.shape[1]), "Meta")
_library.impl("ctc_backward", lambda grad, scores, *_: torch.empty_like(scores), "Meta")
_library.impl("ctc", lambda *args: _Ctc.apply(*args), "Autograd")


def ctc_of_rows(
    scores: torch.Tensor, targets: torch.Tensor, there: torch.Tensor | None, n_steps: torch.Tensor,
    n_targets: torch.Tensor, blank: int, zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute the CTC loss of each row.

    Args:
        scores: log-probabilities [steps rows classes].
        targets: classes [rows most], or those of all rows one behind the other [sum of n_targets].
        there: bool [rows most], which of a row's ``targets`` are targets; None if they are the first ones.
        n_steps, n_targets: the numbers of each row, int [rows].
        blank: the class that stands for none.
        zero_infinity: gradients of rows that cannot be aligned are zero.

    Raises:
        ValueError: ``n_targets`` are not as many as are there.
    """
    return torch.ops.autopar.ctc(scores, targets, there, n_steps, n_targets, blank, zero_infinity)  # type: ignore[no-any-return]


_ROWS = (
    T((6, 4, 5)), T((4, 2), "int64", 5, low=1), T((4, 2), "bool", low=1, high=2), T((4,), "int64", 7, low=5),
    T((4,), "int64", 3, low=2),
)  # fmt: skip


@rule(
    "autopar.ctc.default",
    samples=[
        sample(*_ROWS, 0, True),
        sample(_ROWS[0], _ROWS[1], None, T((4,), "int64", 7, low=5), T((4,), "int64", 3), 0, False),
    ],
)
def ctc(call: Call) -> Rule:
    in_rows = len(call.ins[1].shape) == 2
    targets = ["b u"] * (len(call.ins) - 3) if in_rows else ["u"]
    text = f"{', '.join(['t b v', *targets, 'b', 'b'])} -> b"
    return line(
        text, call, whole="t v u" + ("" if in_rows else " b"), needs_some="b", saves=tuple(range(len(call.ins))),
        flops=6.0 / call.ins[0].shape[2],
    )  # fmt: skip
