"""A model that runs forward alone, ``mode="inference"``: what is asked of it, and the model made ready.

Nothing wants a gradient there, so a plan has none of what training has: gradients, optimizer state, activations kept
for a backward, parameters in pieces that are gathered for every step (unless the memory limit asks for it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import AutoparError, PlanError
from autopar.planner.planning import Outcome
from autopar.plans.plan_options import INFERENCE, TRAINING

OF_TRAINING: Mapping[str, Any] = {
    "loss_fn": None, "targets": (), "gradient_dtype": None, "recompute": (), "offload": None, "microbatches": None,
}  # fmt: skip
"""Arguments that mean something in training alone, with the values that they have where they are not given."""
NO_OPTIMIZER = "adamw"


def check_mode(given: Mapping[str, Any]) -> None:
    """Refuse arguments of training for a model that runs forward alone.

    Raises:
        AutoparError: with their names and values.
    """
    if given["mode"] != INFERENCE:
        return
    said = [f"{name}={given[name]!r}" for name, default in OF_TRAINING.items() if name in given and (
        isinstance(given[name], torch.Tensor) or given[name] != default)]  # fmt: skip
    optimizer = given["optimizer"]
    said += ["optimizer=" + (f"'{optimizer}'" if isinstance(optimizer, str) else type(optimizer).__name__)] * (
        optimizer != NO_OPTIMIZER
    )
    if said:
        shown = [text if len(text) <= 60 else f"{text[:57]}..." for text in said]
        raise AutoparError(
            f"mode='inference' runs forward alone and takes no {', '.join(shown)}: leave "
            f"{'it' if len(said) == 1 else 'these'} out, or parallelize for training (mode='training')"
        )


def of_mode(outcome: Outcome, mode: str) -> Outcome:
    """Return a plan with the mode that it is for; one that was given may be for the other.

    A plan of a frozen model, which has no gradients, is one of inference.

    Raises:
        PlanError: with both modes.
    """
    plan = outcome.plan
    n_bytes = sum(stage.price.gradient_bytes + stage.price.optimizer_bytes for stage in plan.stages)
    check_mode_of_plan(plan.pins.mode or (TRAINING if n_bytes or mode == TRAINING else INFERENCE), mode)
    if mode == TRAINING or plan.pins.mode:
        return outcome
    return replace(outcome, plan=replace(plan, pins=replace(plan.pins, mode=mode)))


def check_mode_of_plan(made_for: str, mode: str) -> None:
    """Refuse a plan that was made for another mode than that in which it is to run.

    Raises:
        PlanError: with both.
    """
    if made_for != mode:
        raise PlanError(
            f"the plan was made for {made_for}, and mode is '{mode}': give mode='{made_for}', or plan again for {mode}"
        )


@contextlib.contextmanager
def ready_for(model: torch.nn.Module, mode: str) -> Iterator[None]:
    """Put a model into eval mode, and let its parameters want no gradients, where it is to run forward alone.

    What fails in this scope leaves the model as it was.
    """
    if not isinstance(mode, str) or mode != INFERENCE or not isinstance(model, torch.nn.Module):
        yield
        return
    put_back = frozen(model)
    try:
        yield
    except BaseException:
        put_back()
        raise


def frozen(model: torch.nn.Module) -> Callable[[], None]:
    """Put a model into eval mode, let its parameters want no gradients, and return what puts it back."""
    modes = [(module, module.training) for module in model.modules()]
    wanting = [param for param in model.parameters() if param.requires_grad]

    def put_back() -> None:
        for module, training in modes:
            module.training = training
        for param in wanting:
            param.requires_grad_(True)

    model.eval()
    for param in wanting:
        param.requires_grad_(False)
    return put_back
