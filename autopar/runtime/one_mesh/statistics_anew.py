"""Running statistics of batch norms taken anew, as ``torch.optim.swa_utils.update_bn`` does, or left as they are.

It resets them, gives every batch norm the momentum ``None``, which stands for the mean over all batches, and calls the
model for each batch. The program has the momentum with which it was captured, as a number: with statistics of zero
before a call they are the batch's times that number after it, and the mean over all batches follows.

A momentum of 0 has them stay: scripts with a second forward in each step, such as SAM's, set it for that and set the
first one again. They are put back behind the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from autopar.errors import RunError
from autopar.runtime.variants.run import ParallelRun
from autopar.torch_private import preserve_version_counter
from autopar.words.trees import PyTree

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var")


def reset(part: nn.Module) -> None:
    """Set statistics as of a new module."""
    with torch.no_grad():
        for name, value in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            if (buffer := part._buffers.get(name)) is not None:
                buffer.fill_(value)


def momentum_of(part: nn.Module) -> float | None:
    """Return the momentum that was set; the program may have another one."""
    at = part.__dict__.get("_autopar")
    if at is not None and at.path in at.run.statistics_anew:
        return None
    if at is not None and at.path in at.run.statistics_staying:
        return 0
    momentum: float | None = part.__dict__["momentum"]
    return momentum


def set_momentum(part: nn.Module, value: PyTree) -> None:
    """Set a momentum: None and 0 are for calls of the program as it is, others for one that is captured with them.

    Raises:
        RunError: the program does not follow the statistics of its batches.
    """
    at, programs_own = part.__dict__.get("_autopar"), part.__dict__.get("momentum")
    if at is None or programs_own is None:  # it takes the mean over all batches: None is an attribute like others
        part.__dict__["momentum"] = value
        return
    run: ParallelRun = at.run
    run.statistics_anew.pop(at.path, None)
    run.statistics_staying.pop(at.path, None)
    if value is None and run.leads is not None:
        raise RunError(
            f"'{at.path}' of a pipeline cannot take its statistics anew, since a pipeline trains in whole steps: load "
            "autopar.full_state_dict(...) into the model in one process, and call update_bn there"
        )
    if value is None and (not isinstance(programs_own, float) or programs_own <= 0):
        raise RunError(
            f"'{at.path}' was captured with the momentum {programs_own}, so the program does not take statistics of "
            "its batches: parallelize the model with a momentum above 0, or call update_bn on a plain copy of it"
        )
    if value is None:
        run.statistics_anew[at.path] = part, programs_own
    elif value == 0 and programs_own and run.leads is None:
        run.statistics_staying[at.path] = part, programs_own
    else:
        part.__dict__["momentum"] = value


@contextlib.contextmanager
def taken_anew(run: ParallelRun) -> Iterator[None]:
    """Enclose a call in training mode, after which batch norms have the statistics that their momentum says.

    With momentum None it is the mean over all batches, with momentum 0 the statistics of before.
    """
    anew, staying = run.statistics_anew, run.statistics_staying
    if not (anew or staying) or not run.training:
        yield
        return
    before: dict[tuple[str, str], torch.Tensor] = {}
    with torch.no_grad():
        for path, (part, _) in (*anew.items(), *staying.items()):
            if not part.training:
                continue
            for name in STATISTICS:
                if (buffer := part._buffers.get(name)) is not None:
                    before[path, name] = buffer.clone()
                    if path in anew:
                        buffer.zero_()
    failed = True
    try:
        yield
        failed = False
    finally:
        with torch.no_grad():
            for (path, name), value in before.items():
                part, momentum = anew.get(path) or staying[path]
                buffer = part.get_buffer(name)
                if not failed and path in anew:
                    value = value + (buffer / momentum - value) / part.get_buffer("num_batches_tracked")
                with preserve_version_counter(buffer):  # the backward has saved it, and does not read it
                    buffer.copy_(value)
