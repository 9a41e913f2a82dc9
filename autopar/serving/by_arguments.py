"""Plans for serving by the arguments of :func:`autopar.plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import ClusterError, PlanError, closest
from autopar.parallelizing.call_examples import example_of
from autopar.plans.clusters import get_cluster, reference
from autopar.plans.plan_options import MODES, TRAINING
from autopar.serving.records import ServingLoad, ServingPlan

ARGUMENTS = {
    "input_tokens": int, "output_tokens": int, "prefix_tokens": int, "first_token_seconds": float,
    "token_seconds": float, "requests_per_second": float, "engine": str, "cache_precision": str, "devices": int,
    "cost_per_hour": float,
}  # fmt: skip
"""Arguments for serving, and their types."""
SHARED = ("model", "cluster", "inputs", "example_kwargs", "targets", "precision", "like", "max_axes")
"""Arguments of training plans that mean something here, or are always given."""
EMPTY: tuple[object, ...] = (None, (), "adamw")


def serving_plan(given: Mapping[str, Any], mode: str, serving: Mapping[str, Any]) -> ServingPlan:
    """Return the plan of :func:`~.planning.plan_serving`.

    Args:
        given: the arguments of :func:`autopar.plan`, by name.
        mode: ``inference``.
        serving: its further arguments.

    Raises:
        PlanError: an argument is not known, is missing, has another type or is for training alone.
    """
    if mode not in MODES:
        raise PlanError(f"mode is {mode!r}; give 'training' or 'inference'")
    for name, value in serving.items():
        if name not in ARGUMENTS:
            raise PlanError(f"plan has no argument {name}; {closest(name, {**ARGUMENTS, **given})}")
        if mode == TRAINING:
            raise PlanError(f"{name} is for serving; add mode='inference', or leave it out")
        kind = ARGUMENTS[name]
        right = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if value is not None and not right:
            raise PlanError(f"{name} is {value!r}; give {KINDS[kind]}")
    said = [name for name, value in given.items() if name not in SHARED and not _is_empty(value)]
    if said:
        raise PlanError(f"{said[0]} is for training plans and means nothing with mode='inference'; leave it out")
    missing = [name for name in ("input_tokens", "output_tokens") if serving.get(name) is None]
    if missing:
        raise PlanError(f"plan(..., mode='inference') needs {missing[0]}")
    if given["cluster"] is None:
        raise ClusterError("plan needs a cluster")
    return _planned(given, {name: value for name, value in serving.items() if value is not None})


KINDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text"}


def _is_empty(value: object) -> bool:
    return any(value is empty or (type(value) is type(empty) and value == empty) for empty in EMPTY)


def _planned(given: Mapping[str, Any], serving: Mapping[str, Any]) -> ServingPlan:
    from autopar.serving.planning import plan_serving  # scripts that train have no use for it

    lengths = ServingLoad.__dataclass_fields__
    load = ServingLoad(**{name: value for name, value in serving.items() if name in lengths})
    others = {name: value for name, value in serving.items() if name not in lengths}
    args, kwargs, _ = example_of(given["model"], given["inputs"], given["example_kwargs"], given["targets"])
    words = [given["like"]] if given["like"] is not None else []
    answer = plan_serving(
        given["model"], get_cluster(given["cluster"]), (args, kwargs), load, like=words,
        precision=given["precision"] or "bf16", cluster_name=reference(given["cluster"]), **others,
    )  # fmt: skip
    if not answer.like:
        return answer.plan
    like = answer.like[0]
    return replace(answer.plan, workers=like.workers, served=like.served, devices=like.devices)
