"""Which strings of a call nobody reads, so that calls with others need no other program."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.capture import Captured
from autopar.capture.python.attribute_outputs import Left
from autopar.capture.trace.unread_strings import arguments_of_strings, hiding, holds_hidden, keeps_hidden
from autopar.errors import AutoparError

MOST_TRIED = 4
"""Arguments whose strings differ between two calls that are tried, each by a capture."""


def changed_strings(before: Captured, now: Captured) -> list[frozenset[int]]:
    """Return the arguments whose strings differ in the second call, or may differ, as the places of their leaves.

    There are none where the calls are of different structures.
    """
    if before.in_spec != now.in_spec:
        return []
    groups = arguments_of_strings(now.in_spec, now.literals)
    return [places for places in groups if not all(_is_kept(before, now, i) for i in places)]


def _is_kept(before: Captured, now: Captured, place: int) -> bool:
    return place not in before.unread and before.literals.get(place) == now.literals[place]


def unread_strings(captured: Captured, model: torch.nn.Module, groups: list[frozenset[int]]) -> frozenset[int]:
    """Return those places of ``groups`` whose strings the model does not read: captures without them are the same."""
    unread: frozenset[int] = frozenset()
    assert captured.example is not None
    for places in groups[:MOST_TRIED]:
        attributes = [(module, dict(vars(module))) for module in model.modules()]
        example = captured.example
        with hiding(places) as trial:
            try:
                without = replace(example, decisions=replace(example.decisions, hidden=trial)).capture(model)
            except AutoparError:
                continue
            finally:
                trial.read |= keeps_hidden(model)
                for module, before in attributes:
                    vars(module).clear()
                    vars(module).update(before)
        same_outputs = without.graph.fingerprint == captured.graph.fingerprint and without.out_spec == captured.out_spec
        if not trial.read and same_outputs and _leave_alike(without.left, captured.left):
            unread |= places
    return unread


def _leave_alike(hidden: tuple[Left, ...], shown: tuple[Left, ...]) -> bool:
    """Check whether forward leaves the same in attributes without the strings as with them, and none of them."""
    return len(hidden) == len(shown) and all(
        (one.path, one.name, one.spec, len(one.plain)) == (other.path, other.name, other.spec, len(other.plain))
        and not holds_hidden(one.plain)
        for one, other in zip(hidden, shown, strict=True)
    )
