"""Batch norms with ``momentum=None``, whose statistics are the mean over all batches so far.

Torch reads the number of batches as a float, for the momentum of this call. In a trace that number stays a tensor:
torch's own code goes on with a momentum that is no number, and what it calls with it takes the statistics of the batch
beside the norm, and moves the running ones by their part of the way.
"""

from __future__ import annotations

import math
from types import FrameType
from typing import Any

import torch
from torch.nn import functional

from autopar.capture.branches.unknown_numbers import Drawn
from autopar.capture.trace.patches import PASS, Args, Function, Handler, Kwargs, calling_frame, register
from autopar.torch_private import FakeTensor
from autopar.words.trees import PyTree


class CumulativeNorms:
    """Handler that takes batch norms apart whose momentum follows from a tensor."""

    def __init__(self) -> None:
        self._n_batches: torch.Tensor | None = None

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        """Handle a call of torch."""
        if func is functional.batch_norm:
            return self._norm(*args, **kwargs)
        if isinstance(args[0], FakeTensor) and _in_a_norm(args[0], calling_frame()):
            self._n_batches = args[0]
            return math.nan
        return PASS

    def _norm(
        self, input: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor,
        weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
        training: bool = False, momentum: Any = 0.1, eps: float = 1e-5,
    ) -> torch.Tensor:  # fmt: skip
        """Compute ``torch.nn.functional.batch_norm``, with the same parameters."""
        part_of_the_way = None
        if isinstance(momentum, Drawn):  # of SyncBatchNorm, which asks for an item
            part_of_the_way = momentum.tensor
        elif self._n_batches is not None and math.isnan(momentum):
            part_of_the_way = self._n_batches.double().reciprocal()
        if part_of_the_way is None or running_mean is None or not training:
            return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        y = functional.batch_norm(input, None, None, weight, bias, True, eps=eps)
        with torch.no_grad():
            all_but_channels = [0, *range(2, input.ndim)]
            statistics = torch.var_mean(input.to(running_mean.dtype), all_but_channels, correction=1)
            for running, of_batch in zip((running_var, running_mean), statistics, strict=True):
                running.lerp_(of_batch, part_of_the_way.to(running.dtype))
        return y


def _in_a_norm(tensor: torch.Tensor, frame: FrameType) -> bool:
    """Check that the frame is that of a batch norm that reads its number of batches."""
    norm = frame.f_locals.get("self") if frame.f_code is torch.nn.BatchNorm1d.forward.__code__ else None
    return norm is not None and norm.num_batches_tracked is tensor


register(Handler("cumulative norms", "torch reads the number of batches as a float, for the momentum of this call",
                 lambda _record: CumulativeNorms(), (torch.Tensor.__float__, functional.batch_norm)))  # fmt: skip
