"""Errors that a user can cause, all under one base class.

Every message says what, where, both numbers and what to do. The command line prints them without a traceback;
everything that is not an :class:`AutoparError` is a defect of autopar itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches


class AutoparError(ValueError):
    """Base class of every error that bad input can cause."""


class ModelError(AutoparError):
    """A model that cannot be loaded."""


class CaptureError(AutoparError):
    """A model that cannot be captured as one static graph."""


class RuleError(AutoparError):
    """An operator that cannot be sharded as requested, or has no usable rule."""


class ClusterError(AutoparError):
    """A hardware profile that is unknown, malformed or cannot be read."""


class MeshError(AutoparError):
    """A mesh that does not fit the cluster, the process group or the plan."""


class PlanError(AutoparError):
    """A plan that is malformed or belongs to another model, mesh or version."""


class InfeasibleError(AutoparError):
    """A request that no plan satisfies within its constraints and the memory limit."""


class RunError(AutoparError):
    """A call of a program with inputs or state that it was not built for."""


LONGEST_WORD = 200
"""Characters of a word that are compared with others; a longer word is no mistyped name."""


def closest(word: str, words: Sequence[str] | Mapping[str, object]) -> str:
    """Return a hint for a mistyped word."""
    near = get_close_matches(word[:LONGEST_WORD], list(words), n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {first_few(list(words))}" if words else "there is none"


def first_few(words: Sequence[str], most: int = 8) -> str:
    """Return ``a, b, ...``: the beginning of a list that may be long."""
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")
