"""``train_step(..., scaler=scaler)``: a step whose loss a ``GradScaler`` scales, for gradients in float16.

``train_step`` runs the backward itself, so it is given the scaler, where a loop of one's own calls
``scaler.scale(loss).backward()``. The scale is a tensor that multiplies what the backward begins with; the loss that
the step returns is without it.

An infinite gradient has all ranks skip the optimizer's step. On one mesh torch's own reduction of what was found is
made right for gradients in pieces (:mod:`~autopar.runtime.repairs.dtensor_fixes`). Ranks of a pipeline hold different
parameters, and torch knows nothing of the other stages: there a rank whose gradients are finite, while another's are
not, writes one that is not into its own. So the skipping, the new scale and a clipping in between follow as on one
device, without a number being read on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError


def scale_of(scaler: torch.amp.GradScaler | None, device: torch.device) -> torch.Tensor | None:
    """Return the factor of the backward's first gradient, float32 []; None without scaling.

    Raises:
        RunError: ``scaler`` is no ``GradScaler``.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise RunError(f"scaler is {scaler!r}; give a torch.amp.GradScaler, or None")
    return scaler.scale(torch.ones((), device=device)) if scaler.is_enabled() else None


def step(optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None) -> None:
    """Step the optimizers, through the scaler if there is one, which then updates its scale."""
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()


@torch.no_grad()
def share_overflows(params: Iterable[torch.nn.Parameter], device: torch.device, group: dist.ProcessGroup) -> None:
    """Let every rank of a group have a gradient that is not finite where one of them has.

    Args:
        params: the parameters of this rank.

    Raises:
        RunError: none of them has a gradient, in which another rank's overflow could be seen.
    """
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        raise RunError(
            "train_step(..., scaler=): no parameter of this rank's stages has a gradient, so its scaler would not hear "
            "of an infinite one of another stage; cut the stages otherwise (cuts=), or train in bfloat16 without one"
        )
    pieces = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    pieces = [piece for piece in pieces if piece.numel()]
    overflow = torch.zeros((), device=device)
    if pieces:
        largest = [torch.linalg.vector_norm(piece, torch.inf) for piece in pieces]  # each in its own dtype
        overflow = (~torch.stack([norm.isfinite().to(device) for norm in largest])).any().float()
    dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)
    if pieces:
        first = pieces[0].view(-1)[:1] if pieces[0].is_contiguous() else pieces[0][(slice(0, 1),) * pieces[0].dim()]
        first.add_(torch.where(overflow > 0, torch.inf, 0.0).to(first.device, first.dtype))
