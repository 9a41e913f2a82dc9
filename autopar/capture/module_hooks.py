"""Hooks of the model that is captured: what they do beside computing with tensors would be lost.

Forward hooks run once, while the model is traced. Their tensor operations become part of the program; a counter, a list
of activations, a print does not run again. Backward hooks and hooks of parameters never run. So they are refused, but
for those of ``torch.nn.utils`` (weight norm, spectral norm, pruning), which compute with tensors only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.modules import module as torch_module

from autopar.errors import CaptureError

FORWARD = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
BACKWARD = {"_backward_pre_hooks": "backward pre-hook", "_backward_hooks": "backward hook"}
GLOBAL = ("forward_pre", "forward", "backward_pre", "backward")


def check_hooks(model: torch.nn.Module, traced: bool = False) -> None:
    """Refuse hooks that would be lost; with ``traced``, forward hooks are wanted as they are traced.

    Raises:
        CaptureError: there are some; the message has all of them.
    """
    modules = [f"{kind} {name} of module '{path}'" for path, kind, name in _of_modules(model, traced)]
    modules += [f"{kind.replace('_', ' ')} hook {name} of all modules" for kind, name in _of_all(traced)]
    params = [
        f"{_name(hook)} of parameter '{path}'"
        for path, param in model.named_parameters()
        for hook in [
            *(param._backward_hooks or {}).values(),
            *(getattr(param, "_post_accumulate_grad_hooks", None) or {}).values(),
        ]
    ]
    if modules:
        raise CaptureError(
            "hooks of modules would be lost, because the program that runs instead of the model does not call modules:"
            + "".join(f"\n  {text}" for text in modules)
            + "\n  remove them before parallelize (what a forward hook computes belongs into forward()); forward hooks "
            "that only compute with tensors can be traced into the program: parallelize(..., hooks='trace')"
        )
    if params:
        raise CaptureError(
            "hooks of parameters' gradients would be lost, because parallelize makes new parameters:"
            + "".join(f"\n  {text}" for text in params)
            + "\n  register them after parallelize on its parameters: there they get the reduced gradients"
        )


def _of_modules(model: torch.nn.Module, traced: bool) -> Iterator[tuple[str, str, str]]:
    for path, part in model.named_modules():
        for attribute, kind in ({} if traced else FORWARD).items():
            for hook in getattr(part, attribute).values():
                if not _is_harmless(hook):
                    yield path, kind, _name(hook)
        for attribute, kind in BACKWARD.items():
            for hook in getattr(part, attribute).values():
                yield path, kind, _name(hook)


def _of_all(traced: bool) -> Iterator[tuple[str, str]]:
    for kind in GLOBAL:
        if traced and kind.startswith("forward"):
            continue
        for hook in getattr(torch_module, f"_global_{kind}_hooks").values():
            yield kind, _name(hook)


def _is_harmless(hook: object) -> bool:
    """Check whether a hook is one of ``torch.nn.utils`` (an object or its method), or of an earlier ``parallelize``."""
    owner = getattr(hook, "__self__", hook)
    where = getattr(owner, "__module__", None) or type(owner).__module__
    return str(where).startswith(("torch.nn.utils.", "autopar."))


def _name(hook: object) -> str:
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    code = getattr(hook, "__code__", None)
    return f"{name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})" if code is not None else name
