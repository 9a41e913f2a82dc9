"""Strings of a batch: nobody's may change without another capture, and those that are read choose their way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar import parallelize


class Model(nn.Module):
    """Reads a batch's strings by a function of the batch and of itself, which gives a factor."""

    def __init__(self, factor: Callable[[Any, dict[str, Any]], float]) -> None:
        super().__init__()
        self.layer, self.factor, self.last = nn.Linear(4, 4), factor, ""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.layer(batch["x"]).square().mean() * self.factor(self, batch)


def batch(text: str, task: str = "sst2") -> dict[str, Any]:
    return {"x": torch.randn(4, 4), "text": [text, "the same"], "task": task}


def captures_of(factor: Callable[[Any, dict[str, Any]], float], batches: list[dict[str, Any]]) -> int:
    """How often a module was captured again while it was called with these, with the numbers of eager mode."""
    torch.manual_seed(0)
    model = Model(factor)
    module = parallelize(copy.deepcopy(model), 1, (batch("first"),))
    for each in batches:
        torch.testing.assert_close(module(each), model(each))
    return int(module._autopar.programs.captures)


def nobody(model: Any, given: dict[str, Any]) -> float:
    moved = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    return float(isinstance(moved["text"][0], str)) + len(moved["text"])


def by_task(model: Any, given: dict[str, Any]) -> float:
    return 3.0 if given["task"] == "cola" else 1.0


TEXTS = [batch(f"text {i}") for i in range(4)]


@pytest.mark.parametrize("factor", [nobody, by_task])
def test_strings_that_nobody_reads_are_captured_once_more(factor: Callable[[Any, dict[str, Any]], float]) -> None:
    assert captures_of(factor, TEXTS) == 1


def test_a_task_that_is_read_takes_its_way_while_texts_change() -> None:
    tasks = ["sst2", "cola", "sst2", "cola", "cola", "sst2"]
    assert captures_of(by_task, [batch(f"text {i}", task) for i, task in enumerate(tasks)]) == 2


def contains(model: Any, given: dict[str, Any]) -> float:
    return 2.0 if "3" in given["text"][0] else 1.0


def is_contained(model: Any, given: dict[str, Any]) -> float:
    return 2.0 if given["text"][0] in "a text 3 more" else 1.0


def is_a_key(model: Any, given: dict[str, Any]) -> float:
    return {"text 3": 2.0}.get(given["text"][0], 1.0)


def is_listed(model: Any, given: dict[str, Any]) -> float:
    return 2.0 if "text 3" in given["text"] else 1.0


def is_asked_for_its_type(model: Any, given: dict[str, Any]) -> float:
    return 2.0 if type(given["text"][0]) is str and given["text"][0] == "text 3" else 1.0


def is_joined(model: Any, given: dict[str, Any]) -> float:
    return 2.0 if "".join(given["text"]).startswith("text 3") else 1.0


def is_read_in_a_try(model: Any, given: dict[str, Any]) -> float:
    try:
        return 2.0 if given["text"][0].endswith("3") else 1.0
    except Exception:
        return 1.0


def is_kept(model: Any, given: dict[str, Any]) -> float:
    model.last = given["text"][0]
    return 1.0


def is_true(model: Any, given: dict[str, Any]) -> float:
    return 1.0 if given["text"][0] else 2.0


@pytest.mark.parametrize(
    "factor",
    [contains, is_contained, is_a_key, is_listed, is_asked_for_its_type, is_joined, is_read_in_a_try, is_true, is_kept],
)
def test_strings_that_are_read_for_nothing_are_heard_when_they_matter(factor: Callable[..., float]) -> None:
    assert captures_of(factor, [batch("text 1"), batch("text 3"), batch("")]) == 3
