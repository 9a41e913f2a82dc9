"""``nn.AdaptiveLogSoftmaxWithLoss``, traced with all rows in all clusters.

Torch's own forward runs a cluster of rare classes on the rows whose class is in it, and leaves it out where there is
none: how many rows these are depends on values. With all rows it is the same mean, for as much work as ``log_prob``
does. A cluster that no class of the batch is in takes no part in a call
(:mod:`autopar.capture.trace.unused_parameters`).
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from autopar.capture.trace.patches import Patch, register
from autopar.capture.trace.unused_parameters import took_part

_ORIGINAL = nn.AdaptiveLogSoftmaxWithLoss.forward


def _of_all_rows(self: nn.AdaptiveLogSoftmaxWithLoss, input_: torch.Tensor, target_: torch.Tensor) -> object:
    """Compute torch's forward: log-probabilities of the targets [rows], and the loss."""
    if (input_.dim(), target_.dim()) not in ((2, 1), (1, 0)) or input_.shape[:-1] != target_.shape:
        return _ORIGINAL(self, input_, target_)  # it says what is wrong
    rows, target = (input_, target_) if target_.dim() else (input_.unsqueeze(0), target_.unsqueeze(0))
    # of a class that there is not, -1, which gather refuses as eager mode refuses the class
    in_head = torch.where((target >= 0) & (target < self.shortlist_size), target, -1)
    output = rows.new_zeros(target.shape)
    taken = []
    for i, (low, high) in enumerate(zip(self.cutoffs, self.cutoffs[1:], strict=False)):
        mask = (target >= low) & (target < high)
        logprob = functional.log_softmax(self.tail[i](rows), dim=1)
        of_target = logprob.gather(1, torch.where(mask, target - low, 0).unsqueeze(1)).squeeze(1)
        output = output + torch.where(mask, of_target, 0)
        in_head = torch.where(mask, self.shortlist_size + i, in_head)
        taken.append(mask.any())
    if taken:
        took_part(torch.stack(taken), [[*tail.parameters()] for tail in self.tail])
    output = output + functional.log_softmax(self.head(rows), dim=1).gather(1, in_head.unsqueeze(1)).squeeze(1)
    loss = (-output).mean()
    kind = _ORIGINAL.__globals__["_ASMoutput"]
    return kind(output if target_.dim() else output.squeeze(0), loss)


register(Patch("adaptive softmax", "the rows of a cluster of rare classes depend on values",
               lambda _record: mock.patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", _of_all_rows)))  # fmt: skip
