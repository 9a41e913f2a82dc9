"""Files of serving plans: read as they were written, or refused by one error that names the place."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from targets.serving_plans import random_plan

from autopar.errors import PlanError
from autopar.planfile import parse
from autopar.serving.plan_file import dumps, load, loads

SEEDS = range(60)
APART = next(seed for seed in SEEDS if len(random_plan(seed).workers) == 2)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document, tables of free names left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield (*path, key)
        if key not in ("parts", "cuts", "notes"):
            yield from places(inside, (*path, key))


def changed(document: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> str:
    document = copy.deepcopy(document)
    table = document
    for key in path[:-1]:
        table = table[key]
    change(table, path[-1])
    return json.dumps(document)


def refusal_of(text: str) -> str:
    with pytest.raises(PlanError) as error:
        loads(text, where="plan.json")
    assert str(error.value).startswith("plan.json: ")
    return str(error.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_read_as_it_was_written(seed: int) -> None:
    plan = random_plan(seed)
    text = dumps(plan)
    assert loads(text) == plan
    assert dumps(loads(text)) == text


def test_every_field_is_required_and_has_its_type() -> None:
    document = json.loads(dumps(random_plan(APART)))
    found = list(places(document))
    assert len(found) > 60

    def remove(table: Any, key: Any) -> None:
        del table[key]

    def other_type(table: Any, key: Any) -> None:
        table[key] = True if not isinstance(table[key], bool) else 1

    def unknown(table: Any, key: Any) -> None:
        table[f"{key}x"] = table[key]

    for path in found:
        name = str(path[-1])
        if isinstance(path[-1], str):
            assert "missing" in refusal_of(changed(document, path, remove)) or name in ("kind", "version"), path
            assert "unknown key" in (message := refusal_of(changed(document, path, unknown)))
            assert f"did you mean '{name}'?" in message or name in ("kind", "version")
        said = refusal_of(changed(document, path, other_type))
        assert name in said or isinstance(path[-1], int), path


def test_numbers_are_finite_and_in_their_range() -> None:
    document = json.loads(dumps(random_plan(APART)))

    def of_path(path: tuple[Any, ...]) -> Any:
        value = document
        for key in path:
            value = value[key]
        return value

    numbers = [path for path in places(document) if type(of_path(path)) in (int, float)]
    assert len(numbers) > 40
    for path in numbers:
        for number in (-1, math.nan, math.inf):
            def put(table: Any, key: Any, number: float = number) -> None:
                table[key] = number

            said = refusal_of(changed(document, path, put))
            assert str(path[-1]) in said or "is no number" in said, (path, said)


@pytest.mark.parametrize(("path", "value", "says"), [
    (("engine",), "vlm", "did you mean 'vllm'?"),
    (("formats", "cache"), "int4", "known: bf16, fp8, nvfp4, mxfp4"),
    (("workers", 0, "phase"), "decode", "are for decode, decode"),
    (("workers", 0, "layout", "tensor"), 64, "expert x expert_tensor is"),
    (("devices",), 1, "the workers take"),
    (("longest",), 1, "prompt and answer are"),
    (("load", "prefix_tokens"), 9000, "the prompt has"),
    (("version",), 2, "this autopar reads 1"),
    (("kind",), "other", "no serving plan"),
    (("model",), "", "is empty"),
    (("workers",), [], "are for nothing"),
    (("served", "token_seconds"), 0, "expected more than 0"),
])  # fmt: skip
def test_values_that_do_not_go_together(path: tuple[Any, ...], value: Any, says: str) -> None:
    seed = next(s for s in SEEDS if len(random_plan(s).workers) == 2 and random_plan(s).workers[0].layout.expert > 1)
    document = json.loads(dumps(random_plan(seed)))

    def put(table: Any, key: Any) -> None:
        table[key] = value

    assert says in refusal_of(changed(document, path, put))


def test_all_failures_are_told_at_once() -> None:
    document = json.loads(dumps(random_plan(APART)))
    document["workers"][1]["layout"]["tensor"] = "4"
    del document["served"]["token_seconds"]
    said = refusal_of(json.dumps(document))
    assert "2 problems" in said
    assert 'workers[1].layout.tensor: got "4"; expected a whole number' in said
    assert "served.token_seconds: is missing" in said


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', '{"kind": 3}', '{"autopar_plan": 2}', "{" * 100,
                                  '{"kind": "autopar-serving-plan", "kind": "autopar-serving-plan"}'])  # fmt: skip
def test_what_is_no_serving_plan(text: str) -> None:
    refusal_of(text)


def test_a_plan_that_no_file_can_hold_is_not_written() -> None:
    plan = random_plan(0)
    with pytest.raises(PlanError, match="NaN is no number"):
        dumps(replace(plan, served=replace(plan.served, token_seconds=math.nan)))
    with pytest.raises(PlanError, match="the workers take"):
        dumps(replace(plan, devices=plan.devices + 1))


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(dumps(random_plan(1)))
    assert load(path) == random_plan(1)
    with pytest.raises(PlanError, match="cannot read the plan"):
        load(tmp_path / "none.json")


def test_a_plan_for_training_is_wanted() -> None:
    with pytest.raises(PlanError, match="a serving plan, and a plan for training is wanted here"):
        parse(dumps(random_plan(0)), "plan.json")
