"""Errors that a user can cause, all under one base class.

Every message says what, where, the numbers on both sides and what to do. The command line prints them without a
traceback; everything that is not an :class:`AutoparError` is a defect of autopar itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any


class AutoparError(ValueError):
    """Base of every error that bad input can cause."""


class ModelError(AutoparError):
    """The model that was named cannot be loaded."""


class CaptureError(AutoparError):
    """The model cannot be captured as one static graph."""


class RuleError(AutoparError):
    """An operator cannot be cut the way that was asked for, or has no usable rule."""


class ClusterError(AutoparError):
    """A hardware profile that was named is unknown, malformed or cannot be read."""


class MeshError(AutoparError):
    """A mesh does not fit the cluster, the process group or the plan."""


class PlanError(AutoparError):
    """A plan file is malformed or belongs to another model, mesh or version."""


class InfeasibleError(AutoparError):
    """No plan satisfies the pins and the memory limit."""


class RunError(AutoparError):
    """A program was called with inputs or state that it was not built for."""


LONGEST_WORD = 200
"""Characters of a word that are compared with others: what is longer is no mistyped name."""


def closest(word: str, words: Sequence[str] | Mapping[str, Any]) -> str:
    """A hint for a mistyped word."""
    near = get_close_matches(word[:LONGEST_WORD], list(words), n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {first_few(list(words))}" if words else "there is none"


def first_few(words: Sequence[str], most: int = 8) -> str:
    """``a, b, ...``: what a message shows of a list that may be long."""
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")
