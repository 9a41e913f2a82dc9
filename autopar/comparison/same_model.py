"""A check that all ranks captured the model: they compare with the first one, and that with eager mode."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.comparison import compare_with_eager
from autopar.errors import CaptureError
from autopar.runtime.parameters.init import is_meta
from autopar.runtime.ranks.agree import share
from autopar.runtime.ranks.agree import together as raised_together
from autopar.words.trees import PyTree


def check_same_model(captured: Captured, model: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuse ranks that have captured different models, or of which only some are on the meta device."""
    mine = f"{captured.graph.fingerprint} {'with' if is_meta(model) else 'without'} parameters on the meta device"
    first = share(group, mine, None)
    told, told_first = mine, first
    if mine.partition(" ")[2] == first.partition(" ")[2]:
        told, told_first = mine.partition(" ")[0], first.partition(" ")[0]
    problem = (
        f"this rank has captured another model than rank 0: fingerprint {told}, rank 0 has {told_first}"
        f"{_of_data(captured)}"
    )
    raised_together(group, CaptureError(problem) if mine != first else None)


def _of_data(captured: Captured) -> str:
    """Return what to do where ranks have captured different models, for a message."""
    pinned = [way for way in captured.graph.ways if "pinned" in way.kwargs]
    if not pinned:
        return "; build the same model, and give inputs of the same shapes, on every rank"
    return (
        f"; the model's code in '{pinned[0].module or '<model>'}' at {pinned[0].source} reads numbers or a mask that "
        "depend on the batch, and sizes follow from them: ranks with different rows get different programs\n  work on "
        "all rows and weight what is not selected with zero (torch.where, ignore_index=), or select before the model "
        "is called; else build the same model, and give inputs of the same shapes, on every rank"
    )


def check_capture(
    captured: Captured, model: torch.nn.Module, example: PyTree, group: dist.ProcessGroup | None
) -> None:
    """Refuse a graph that is not what the model does in eager mode; rank 0's values are those that count."""
    error: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            args, kwargs, targets = example
            given = (targets,) if isinstance(targets, torch.Tensor) else targets
            note = compare_with_eager(captured, model, args, kwargs, given).note
            if note and not is_meta(model):
                warnings.warn(f"what was captured was not compared with the model: {note}", stacklevel=3)
        except Exception as e:
            error = e
    raised_together(group, error)
