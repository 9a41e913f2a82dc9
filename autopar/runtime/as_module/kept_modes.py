"""What ``train()`` of a parallel module does not do though the model's own would: parts stay in the modes in which they
were captured."""

from __future__ import annotations

import torch

SHOWN = 4
"""Parts that a message names."""


def modes_that_stay(model: torch.nn.Module, copied: torch.nn.Module | None = None) -> str:
    """What to tell a caller of ``train()``; empty where the program is in the modes that the model would have then.

    A model with a ``train`` of its own, which some of its modules have followed into eval mode, is taken for one on
    which it has been called.

    Args:
        copied: a copy of the model, on which a ``train`` of its own can be tried.
    """
    if not model.training:
        return ""
    modules = dict(model.named_modules())
    in_eval_mode = [path for path, module in modules.items() if not module.training]
    with_own = [path for path, module in modules.items() if _has_own_train(module)]
    if with_own and not in_eval_mode and (copied is None or copied is model or _changes(copied)):
        names = ", ".join(f"{type(modules[path]).__name__}.train()" for path in with_own[:SHOWN])
        return (
            f"{names} of the model is not called, and all of its parts train: the program has the modes that the model "
            "had when it was captured. Call model.train() before parallelize, and what it sets stays so"
        )
    if in_eval_mode and not with_own:
        names = ", ".join(f"'{path}'" for path in in_eval_mode[:SHOWN])
        more = f" and {len(in_eval_mode) - SHOWN} more" if len(in_eval_mode) > SHOWN else ""
        return (
            f"{names}{more} stay in eval mode, in which they were captured; train() of the model would have set them "
            "to training. If that is meant, call model.train() before parallelize"
        )
    return ""


def _changes(copied: torch.nn.Module) -> bool:
    """Whether ``train()`` of a copied model leaves parts in eval mode or freezes some, which that of torch does not."""
    modes = [(module, module.training) for module in copied.modules()]
    trained = [(param, param.requires_grad) for param in copied.parameters()]
    try:
        copied.train()
        return not all(m.training for m in copied.modules()) or any(p.requires_grad is not was for p, was in trained)
    except Exception:  # it may do anything
        return True
    finally:
        for module, mode in modes:
            module.training = mode
        for param, was in trained:
            param.requires_grad_(was)


def _has_own_train(module: torch.nn.Module) -> bool:
    elsewhere = not type(module).__module__.startswith(("torch.", "autopar."))  # a copy of a parallel module is a model
    by_class = type(module).train is not torch.nn.Module.train and elsewhere
    return by_class or "train" in vars(module)


__all__ = ["modes_that_stay"]
