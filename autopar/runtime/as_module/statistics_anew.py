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
from typing import Any

import torch
from torch import nn

from autopar.errors import RunError
from autopar.torch_private import preserve_version_counter

Anew = dict[str, tuple[nn.Module, float]]
"""By path what stands for a batch norm, and the momentum that the program has."""
ANEW, STAYING = "_autopar_statistics_anew", "_autopar_statistics_staying"
"""Where a parallel module keeps those whose momentum is None, and those whose momentum is 0."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var")


def reset(part: nn.Module) -> None:
    """Statistics as of a new module, in what stands for a batch norm."""
    with torch.no_grad():
        for name, value in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            if (buffer := part._buffers.get(name)) is not None:
                buffer.fill_(value)


def takes_momentum(pm: Any, part: Any, path: str, value: Any) -> bool:
    """Whether a momentum that is given to what stands for a batch norm is None or 0, or the one that it had before, and
    is not what the program has anyway.

    Raises:
        RunError: the program does not follow the statistics of its batches.
    """
    captured_with = pm._autopar_captured.guards.read(path, "momentum")
    if captured_with is not None and captured_with.value is None:
        return False  # the program takes the mean over all batches itself: None is an attribute like others
    staying: Anew = pm.__dict__.setdefault(STAYING, {})
    anew: Anew = pm.__dict__.setdefault(ANEW, {})
    if path in staying and value != 0:
        _, momentum = staying.pop(path)
        del part.__dict__["momentum"]
        if value == momentum:
            return True
    elif path not in staying and path not in anew and value == 0 and part.momentum and pm._autopar_leads is None:
        staying[path] = part, part.momentum
        part.__dict__["momentum"] = value
    if path in staying:
        return True
    if value is None and pm._autopar_leads is not None:
        raise RunError(
            f"'{path}' of a pipeline cannot take its statistics anew, since a pipeline trains in whole steps: load "
            "autopar.full_state_dict(...) into the model in one process, and call update_bn there"
        )
    if value is None and path not in anew:
        if not isinstance(part.momentum, float) or part.momentum <= 0:
            raise RunError(
                f"'{path}' was captured with the momentum {part.momentum}, so the program does not take statistics of "
                "its batches: parallelize the model with a momentum above 0, or call update_bn on a plain copy of it"
            )
        anew[path] = part, part.momentum
    elif value is not None and path in anew:
        _, momentum = anew.pop(path)
        return bool(value == momentum)
    return value is None


def copy_momenta(pm: Any, new: Any) -> None:
    """Have a copy of a parallel module take statistics as ``pm`` does now."""
    for kept in (ANEW, STAYING):
        had: Anew = pm.__dict__.get(kept, {})
        new.__dict__[kept] = {path: (new.get_submodule(path), momentum) for path, (_, momentum) in had.items()}
    for part, _ in new.__dict__[STAYING].values():
        part.__dict__["momentum"] = 0


def is_batch_norm(kind: type | None) -> bool:
    """Whether what stands for such a module can take its statistics anew."""
    return kind is not None and issubclass(kind, BATCH_NORMS)


@contextlib.contextmanager
def taken_anew(pm: Any) -> Iterator[None]:
    """Around a call in training mode: the batch norms with momentum None have the mean over all batches after it, those
    with momentum 0 the statistics of before."""
    anew, staying = (pm.__dict__.get(kept, {}) for kept in (ANEW, STAYING))
    if not (anew or staying) or not pm.training:
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
                if not failed and path in anew:
                    of_batch = part._buffers[name] / momentum
                    value = value + (of_batch - value) / part._buffers["num_batches_tracked"]
                with preserve_version_counter(part._buffers[name]):  # the backward has saved it, and does not read it
                    part._buffers[name].copy_(value)


__all__ = ["copy_momenta", "is_batch_norm", "reset", "taken_anew", "takes_momentum"]
