"""The decisions of a trace: what was settled before it begins, and the one loop that adds to them.

A trace may fail for want of a decision: a branch needs an answer, a size must be that of the example, an operator has
to be written in plainer ones, or a block must not be skipped. :func:`settled` traces, diagnoses the failure, adds a
decision, and traces again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from autopar.errors import CaptureError

MOST_GUESSES = 16
"""Times that another side of a branch is tried in a model without values, because one raises an error."""
OF_ROWS = " rows"
"""Suffix of the site of a question whose branch does nothing but work on the rows of a mask."""

T = TypeVar("T")


@dataclass(frozen=True)
class Answers:
    """Answers that the model gave, on the values of the example, at each place of its code that branches on data.

    Attributes:
        given: the answers by site (``file.py:12@8-31``), in the order in which they were given.
        listed: integers that were read as a list, by site.
        steady: names of buffers that the example's forward did not write.
        observed: the model ran on the example's values; False if there are none.
    """

    given: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    listed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    steady: frozenset[str] = frozenset()
    observed: bool = False


@dataclass(frozen=True)
class TraceDecisions:
    """Everything that is settled before a trace begins.

    Attributes:
        answers: to branches on data; None as long as no branch asked.
        guesses: sides of branches that have no answer, by site.
        with_rows: the same for branches that only work on the rows of a mask.
        fixed_lists: lists of integers that sizes follow from are those of the example, checked at every call.
        fixed_numbers: so are single integers and masks.
        plain_operators: operators that keep values for their backward are written in ones that do not.
        whole_model: repeated blocks are all traced.
        hidden: strings of the call in whose place something else stands
            (:mod:`autopar.capture.trace.unread_strings`).
    """

    answers: Answers | None = None
    guesses: Mapping[str, bool] = field(default_factory=dict)
    with_rows: Mapping[str, bool] = field(default_factory=dict)
    fixed_lists: bool = False
    fixed_numbers: bool = False
    plain_operators: bool = False
    whole_model: bool = False
    hidden: Any = None

    @property
    def listed(self) -> Mapping[str, Sequence[Any]]:
        """Integers of the example that were read as a list, by site."""
        return self.answers.listed if self.answers is not None else {}


class Undecided(Exception):
    """A trace that ends because a decision is missing, which its cause names.

    Args:
        decision: fields of :class:`TraceDecisions` with their values.
    """

    def __init__(self, **decision: Any) -> None:
        super().__init__(str(decision))
        self.decision = decision


class Unanswered(CaptureError):
    """A branch on data that was met before any answers were found."""


@dataclass
class Attempt:
    """The traces that are made under the same decisions, and what they were missing.

    Attributes:
        decisions: the decisions under which the traces are made.
        guesses, with_rows: what the decisions have, and what the traces had to add.
        open_lists: sites of lists, integers and masks that sizes may follow from and that were not fixed.
    """

    decisions: TraceDecisions
    open_lists: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.guesses, self.with_rows = dict(self.decisions.guesses), dict(self.decisions.with_rows)

    @property
    def answers(self) -> Answers:
        """The answers to branches on data, of which there may be none."""
        return self.decisions.answers or Answers()

    def answer(self, site: str, number: int, rows_are_used: Callable[[], bool]) -> bool | None:
        """Return the answer to a question of this number at a site; None if the example was not asked there."""
        given = self.answers.given.get(site, ())
        if given:
            return given[min(number, len(given) - 1)]
        if site.endswith(OF_ROWS):
            return self.with_rows.setdefault(site, rows_are_used())
        return None if self.answers.observed else self.guesses.setdefault(site, False)

    def would_take(self, taken: Sequence[tuple[str, bool]]) -> bool:
        """Check that questions at the sites in `taken` would have the answers there whenever they are asked."""
        return not taken or (self.decisions.answers is not None and all(self._always(s) == a for s, a in taken))

    def _always(self, site: str) -> bool | None:
        assumed = self.guesses.get(site, self.with_rows.get(site, site.endswith(OF_ROWS)))
        given = set(self.answers.given.get(site, ())) or {assumed}
        return given.pop() if len(given) == 1 else None

    def settled(self) -> TraceDecisions:
        """Return the decisions by which another call of the model is traced in the same way."""
        return replace(
            self.decisions, answers=self.answers, guesses=self.guesses, with_rows=self.with_rows, whole_model=False,
            hidden=None,
        )  # fmt: skip


def settled(
    trace: Callable[[Attempt], T], first: TraceDecisions, observe: Callable[[], Answers]
) -> tuple[TraceDecisions, T]:
    """Trace until it succeeds, each time with one more decision; return the decisions and the last trace.

    ``trace``: makes all traces of a call. ``observe``: runs the model on its example and returns its answers, if it
    branches on data.

    Raises:
        CaptureError: it fails, and there is nothing left to decide.
    """
    further = _further(first, observe)
    decisions = next(further)
    open_lists: set[str] = set()
    while True:
        attempt = Attempt(decisions, open_lists)
        try:
            return attempt.settled(), trace(attempt)
        except Undecided as missing:
            decisions = replace(decisions, **missing.decision)
        except CaptureError as error:
            decisions = further.send((error, attempt))


def _further(
    first: TraceDecisions, observe: Callable[[], Answers]
) -> Generator[TraceDecisions, tuple[CaptureError, Attempt]]:
    """Yield the decisions to trace by; each failure is sent in, and raised where nothing is left to decide."""
    error, attempt = yield first
    now = replace(attempt.decisions, whole_model=first.whole_model)
    if now.answers is None:
        if not isinstance(error, Unanswered) and not attempt.open_lists:
            raise error
        fixed = not isinstance(error, Unanswered)
        now = replace(now, answers=observe(), fixed_lists=fixed)
        error, attempt = yield now
    if attempt.open_lists and not now.fixed_lists:
        now = replace(now, fixed_lists=True, guesses=attempt.guesses, with_rows=attempt.with_rows)
        error, attempt = yield now
    if attempt.open_lists and not now.fixed_numbers:
        now = replace(now, fixed_numbers=True, guesses=attempt.guesses, with_rows=attempt.with_rows)
        error, attempt = yield now
    now = replace(now, fixed_numbers=first.fixed_numbers)
    failed, turned, tried = error, set[str](), 0
    while True:  # the side that was guessed last may be the one that raises: `assert x.max() < n`
        guesses = dict(attempt.guesses)
        for site in reversed([s for s in guesses if s not in turned]):
            if tried == MOST_GUESSES:
                raise failed
            tried += 1
            error, attempt = yield replace(now, guesses={**guesses, site: True}, with_rows=attempt.with_rows)
            if attempt.guesses.keys() > guesses.keys():  # it leads further
                failed = error
                turned.add(site)
                break
        else:
            raise failed
