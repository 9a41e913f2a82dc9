"""Branches on data: the way that the example takes is followed, and the program checks at every call that it still is.

``if labels.max() >= vocab_size: raise``, ``if mask.any(): ...``: Python asks for the truth of a tensor that depends on
what the model is called with. While the model is traced it has no values, so the model is run once as it is, on the
example, and what it answered at each line is what the trace is told; a question that was not heard in that run has no
answer, and is refused. Where there are no values (parameters on the meta device) the answer is False, unless the
model's own code then raises an error.

The question stays in the trace, as an operator ``autopar::taken`` with its condition, its place, and the answer. In the
graph it is a flag (:data:`~autopar.words.graph.WAY`): a buffer that becomes true when the condition has the other
value.

``lengths.tolist()`` gives numbers that are computed with as tensors. Where that cannot be traced (they are sizes),
integers that are given to the model, or follow from such alone, are answered as branches are: with those of the
example, and a check that they are still the same; so is the size of what ``repeat_interleave`` makes. Where that does
not help either, so are single integers (``grid[0].item()``) and the places that masks select (``x[mask]``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.branches.only_rows import answer_with_rows, only_rows
from autopar.capture.branches.random_answers import site_of, truth, users_frame
from autopar.capture.branches.unknown_numbers import Drawn
from autopar.errors import CaptureError
from autopar.torch_private import pytree

TAKEN = "autopar.taken.default"
NUMBER, PLACES, LIST = " number", " places", " list"
"""Behind the place where a single integer, a mask, or a list of integers was read."""
OF_ROWS = " rows"
"""Behind the place of a question whose branch does nothing but work on the rows of a mask."""
LENGTHS, LONGEST, LABELS = FAULTS = " lengths", " longest", " labels"
"""Behind the place where a packed sequence is used: what must not be so of its lengths."""
MOST_GUESSES = 16
"""Times that another side is tried in a model without values, because one raises an error."""

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("taken(Tensor condition, str site, bool answer) -> ()")
torch.library.register_fake("autopar::taken", lambda condition, site, answer: None, lib=_LIBRARY)
_LIBRARY.impl("taken", lambda condition, site, answer: None, "CompositeExplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.autopar.taken.default)


class Unanswered(CaptureError):
    """Python asks for the truth of a tensor that depends on data, and no answers were found yet."""


@dataclass
class Ways:
    """What the model answered at each place of its code that branches on data.

    Attributes:
        answers: by place (``file.py:12@8-31``), in the order in which they were given.
        guessed: places that have no answer, and what is taken for it.
        listed: integers that were read as a list, by place.
        with_rows: by place, the answer of a branch that only works on rows where there are some.
        as_listed: whether lists are answered so.
        pinned: whether single integers and masks are answered so too.
        steady: names of buffers that the example's forward left as they were.
        observed: whether the answers are those of a run on the example's values.
    """

    answers: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    guessed: dict[str, bool] = field(default_factory=dict)
    listed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    with_rows: dict[str, bool] = field(default_factory=dict)
    as_listed: bool = False
    pinned: bool = False
    steady: frozenset[str] = frozenset()
    observed: bool = False

    def answer(self, site: str, number: int) -> bool:
        """Return that to the question of this number at a place.

        Raises:
            CaptureError: the run on the example was not asked there.
        """
        given = self.answers.get(site, ())
        if not given and site.endswith(OF_ROWS):
            return self.with_rows.setdefault(site, _answer_with_rows())
        if not given and self.observed:
            raise _unheard(site)
        if not given:
            return self.guessed.setdefault(site, False)
        return given[min(number, len(given) - 1)]

    def always(self, site: str) -> bool | None:
        """The answer at a place if it is always the same; None if it is not."""
        unheard = self.guessed.get(site, self.with_rows.get(site, site.endswith(OF_ROWS)))
        given = set(self.answers.get(site, ())) or {unheard}
        return given.pop() if len(given) == 1 else None


_WAYS: ContextVar[Ways | None] = ContextVar("ways", default=None)
_ASKED: ContextVar[Counter[str]] = ContextVar("questions of data")
_LISTS: ContextVar[set[str]] = ContextVar("places of lists that were not answered")


@contextlib.contextmanager
def along(ways: Ways) -> Iterator[None]:
    """Traces inside follow these ways."""
    token = _WAYS.set(ways)
    try:
        yield
    finally:
        _WAYS.reset(token)


@contextlib.contextmanager
def from_the_start() -> Iterator[None]:
    """Around a trace: nothing was asked yet."""
    token = _ASKED.set(Counter())
    try:
        yield
    finally:
        _ASKED.reset(token)


def followed(trace: Callable[[], Any], answers: Callable[[], Ways]) -> tuple[Ways, Any]:
    """What a trace gives that goes the ways of the example, and these ways; ``trace`` is called until it succeeds.

    Args:
        answers: finds the ways, if the model branches on data.

    Raises:
        CaptureError: it cannot be traced.
    """
    ways = _WAYS.get()
    lists: set[str] = set()
    _LISTS.set(lists)
    if ways is None:
        try:
            return Ways(), trace()
        except Unanswered:
            ways = answers()
        except CaptureError:
            if not lists:
                raise
            ways = answers()
            ways.as_listed = True
    with along(ways):
        try:
            return ways, trace()
        except CaptureError as error:
            failed, attempts = error, 0
        if lists and not ways.as_listed:
            ways.as_listed = True
            try:
                return ways, trace()
            except CaptureError as error:
                failed = error
        if lists and not ways.pinned:
            ways.pinned = True
            try:
                traced = trace()
            except CaptureError as error:
                failed, ways.pinned = error, False
            else:
                _tell_of_pinned(ways)
                return ways, traced
        turned: set[str] = set()
        while True:  # the way that was guessed last may be the one that raises: `assert x.max() < n`
            guessed = dict(ways.guessed)
            for site in reversed([s for s in guessed if s not in turned]):
                if attempts == MOST_GUESSES:
                    raise failed
                attempts += 1
                ways.guessed = {**guessed, site: True}
                try:
                    return ways, trace()
                except CaptureError as error:
                    if ways.guessed.keys() > guessed.keys():  # it leads further
                        failed = error
                        turned.add(site)
                        break
            else:
                raise failed


def pinned_at(site: str) -> str:
    """Where integers or a mask were read that the program takes from the example; empty for another place."""
    return site.partition("@")[0] if site.endswith((NUMBER, PLACES, LIST)) else ""


def fault_at(site: str) -> str:
    """What must not be so of the lengths of a packed sequence there; empty for another place."""
    return next((fault.strip() for fault in FAULTS if site.endswith(fault)), "")


def _tell_of_pinned(ways: Ways) -> None:
    lines = dict.fromkeys(line for site in ways.listed if (line := pinned_at(site)))
    if lines:
        warnings.warn(
            f"numbers and masks that follow from the model's inputs, at {', '.join(lines)}, are those of this batch in "
            "the program, because sizes follow from them: a call with others is an error", stacklevel=2,
        )  # fmt: skip


def would_take(taken: Sequence[tuple[str, bool]]) -> bool:
    """Whether questions at these places would be answered so whenever they are asked."""
    ways = _WAYS.get()
    return not taken or (ways is not None and all(ways.always(site) == answer for site, answer in taken))


def take(tensor: torch.Tensor) -> bool:
    """The answer that Python is given to ``bool(tensor)``, of one element that depends on data.

    Raises:
        Unanswered: no answers are known yet.
    """
    site = place_of_question()
    ways = _WAYS.get()
    if ways is None:
        raise Unanswered(f"forward branches on the value of a tensor, at {site.partition('@')[0]}")
    asked = _ASKED.get()
    answer = ways.answer(site, asked[site])
    asked[site] += 1
    torch.ops.autopar.taken(truth(tensor, "numbers", "x"), site, answer)
    return answer


def _unheard(site: str) -> CaptureError:
    return CaptureError(
        f"forward branches, at {site.partition('@')[0]}, on a number of a list or array that it reads from a tensor "
        "(tolist(), numpy()) which follows from more than the integers that it is given: a program would branch as the "
        "example does at every step\n  read the number by itself (x[i].item()), whose branch is followed and checked "
        "at every call; or make the list before the call, and pass it"
    )


def place_of_question() -> str:
    """That of a question, with :data:`OF_ROWS` behind it where it applies."""
    return site_of() + (OF_ROWS if asked_for_rows_only() else "")


def _answer_with_rows() -> bool:
    frame = users_frame()
    return frame is None or answer_with_rows(frame)


def asked_for_rows_only() -> bool:
    """Whether the user's code asks right now for a branch that does nothing but work on the rows of a mask."""
    frame = users_frame()
    return frame is not None and only_rows(frame)


def take_list(tensor: torch.Tensor, what: str = LIST, only_if: Callable[[Any], bool] = lambda answer: True) -> Any:
    """The answer that Python is given to ``tensor.tolist()``, of integers that follow from inputs alone; None where
    there is none: the example has no values, or it was not tried yet to do without.

    Args:
        what: :data:`LIST`, or :data:`NUMBER` or :data:`PLACES` where a single integer or a mask is read.
        only_if: which answers are given; of another one there is none.
    """
    site = site_of() + what
    ways = _WAYS.get()
    if ways is None or not (ways.as_listed if what == LIST else ways.pinned):
        _LISTS.get(set()).add(site)
        return None
    given, asked = ways.listed.get(site, ()), _ASKED.get()
    if asked[site] >= len(given):
        return None
    answer = given[asked[site]]
    if not only_if(answer):
        return None
    asked[site] += 1
    same = torch.tensor(answer, dtype=tensor.dtype, device=tensor.device) == tensor
    torch.ops.autopar.taken(same.all(), site, True)
    return answer


def changing(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, and buffers that a forward writes: what a number follows from that is another one at each call."""
    ways = _WAYS.get()
    written = [b for name, b in module.named_buffers() if ways is not None and name not in ways.steady]
    return [*module.parameters(), *written]


class Read(Drawn):
    """What ``tensor.item()`` gives for a number that depends on data while a model is traced."""

    def __init__(self, tensor: torch.Tensor, asks: Callable[[torch.Tensor], bool] = take) -> None:
        super().__init__(tensor, asks)

    @staticmethod
    def refusal(what: str) -> CaptureError:
        return CaptureError(
            f"forward reads the value of a tensor that depends on its inputs or parameters, {what}, at "
            f"{site_of().partition('@')[0]}: a program would use the one of the example at every step\n  compute with "
            "the tensor itself (queue.index_copy_(1, (ptr + torch.arange(n)) % size, keys); ptr.add_(n)), compare it "
            "in an if, whose way is followed and checked at every call, or move it out of forward()"
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Of a list of such numbers numpy would make an array of objects, and ask each of them on its own."""
        raise self.refusal("in an array of numpy")


# where a model returns such a number, the program gives the tensor
pytree.register_pytree_node(Read, lambda read: ([read.tensor], None), lambda leaves, _: next(iter(leaves)))


def can_be_listed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is integers in a list, as sizes are."""
    return tensor.ndim > 0 and tensor.dtype in (torch.int64, torch.int32)


def is_integer(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one integer."""
    return tensor.numel() == 1 and tensor.dtype in (torch.int64, torch.int32)


SAME = (torch.equal, torch.Tensor.equal)
COMPARED = (*SAME, torch.allclose, torch.Tensor.allclose)
"""Functions of two tensors that give one truth."""
NUMBERS = (torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__index__)
INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def masks_in(index: Any) -> list[torch.Tensor]:
    """The masks of an index, in order."""
    parts = index if isinstance(index, tuple) else (index,)
    return [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.bool and part.dim()]


DISTINCT = (torch.unique, torch.Tensor.unique, torch.unique_consecutive, torch.Tensor.unique_consecutive)
REPEATED = (torch.repeat_interleave, torch.Tensor.repeat_interleave)


def times_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """How often ``repeat_interleave(*args, **kwargs)`` repeats each element, where tensors say it and the size of what
    is made is not given."""
    times = kwargs.get("repeats", args[1] if len(args) > 1 else args[0] if len(args) == 1 else None)
    given = kwargs.get("output_size") is not None
    return times if isinstance(times, torch.Tensor) and times.ndim == 1 and not given else None


__all__ = [
    "COMPARED", "DISTINCT", "INDEXED", "LABELS", "LENGTHS", "LIST", "LONGEST", "MOST_GUESSES", "NUMBER", "NUMBERS",
    "OF_ROWS", "PLACES", "REPEATED", "SAME", "TAKEN", "Read", "Unanswered", "Ways", "along", "asked_for_rows_only",
    "can_be_listed", "changing", "fault_at", "followed", "from_the_start", "is_integer", "masks_in", "pinned_at",
    "place_of_question", "take", "take_list", "times_of", "would_take",
]  # fmt: skip
