"""Branches on data: the trace follows the side that the example takes, and the program checks it at every call.

``if labels.max() >= vocab_size: raise``, ``if mask.any(): ...``: Python asks for the truth of a tensor that depends on
what the model is called with. While the model is traced it has no values, so the model is run once as it is, on the
example, and its answers at each line are given to the trace; a question that was not asked in that run has no
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

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.capture.branches.only_rows import answer_with_rows, only_rows
from autopar.capture.branches.random_answers import site_of, truth, users_frame
from autopar.capture.branches.unknown_numbers import Drawn
from autopar.capture.trace.decisions import OF_ROWS, TraceDecisions, Unanswered
from autopar.capture.trace.recording import under_way
from autopar.errors import CaptureError
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

TAKEN = "autopar.taken.default"
NUMBER, PLACES, LIST = " number", " places", " list"
"""Behind the place where a single integer, a mask, or a list of integers was read."""
LENGTHS, LONGEST, LABELS = FAULTS = " lengths", " longest", " labels"
"""Behind the place where a packed sequence is used: what must not be so of its lengths."""
LAST = 16
"""Nodes by which the place of a question is known: the last of them may be gone when the trace has ended."""

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("taken(Tensor condition, str site, bool answer) -> ()")
torch.library.register_fake("autopar::taken", lambda *_: None, lib=_LIBRARY)
_LIBRARY.impl("taken", lambda *_: None, "CompositeExplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.autopar.taken.default)


def pinned_at(site: str) -> str:
    """Return the line where integers or a mask were fixed to the example's; empty for another place."""
    return site.partition("@")[0] if site.endswith((NUMBER, PLACES, LIST)) else ""


def fault_at(site: str) -> str:
    """Return what must not hold of the lengths of a packed sequence there; empty for another place."""
    return next((fault.strip() for fault in FAULTS if site.endswith(fault)), "")


def warn_of_fixed_numbers(decisions: TraceDecisions) -> None:
    """Warn of integers and masks that the program takes from the example."""
    lines = dict.fromkeys(line for site in decisions.listed if (line := pinned_at(site)))
    if lines:
        warnings.warn(
            f"numbers and masks that follow from the model's inputs, at {', '.join(lines)}, are those of this batch in "
            "the program, because sizes follow from them: a call with others is an error", stacklevel=2,
        )  # fmt: skip


def take(tensor: torch.Tensor) -> bool:
    """Return the answer that Python is given to ``bool(tensor)``, of one element that depends on data.

    Raises:
        Unanswered: no answers are known yet.
        CaptureError: the run on the example was not asked there.
    """
    site = place_of_question()
    now = under_way()
    if now is None or now.attempt.decisions.answers is None:
        raise Unanswered(f"forward branches on the value of a tensor, at {site.partition('@')[0]}")
    answer = now.attempt.answer(site, now.questions[site], _rows_are_used)
    if answer is None:
        raise _not_asked_before(site)
    now.questions[site] += 1
    torch.ops.autopar.taken(truth(tensor, "numbers", "x"), site, answer)
    return answer


def _not_asked_before(site: str) -> CaptureError:
    return CaptureError(
        f"forward branches, at {site.partition('@')[0]}, on a number of a list or array that it reads from a tensor "
        "(tolist(), numpy()) which follows from more than the integers that it is given: a program would branch as the "
        "example does at every step\n  read the number by itself (x[i].item()), whose branch is followed and checked "
        "at every call; or make the list before the call, and pass it"
    )


def place_of_question() -> str:
    """Return the site of a question, with the suffix :data:`OF_ROWS` where it applies."""
    return site_of() + (OF_ROWS if asked_for_rows_only() else "")


def _rows_are_used() -> bool:
    frame = users_frame()
    return frame is None or answer_with_rows(frame)


def asked_for_rows_only() -> bool:
    """Check that the user's code asks right now for a branch that does nothing but work on the rows of a mask."""
    frame = users_frame()
    return frame is not None and only_rows(frame)


def rows_are_asked_for(number: str) -> bool:
    """Check that the branch that is asked for right now may be entered also if there are no rows, and note it.

    Args:
        number: torch's name of the number of rows.
    """
    record = under_way()
    if record is None or not asked_for_rows_only():
        return False
    mode = get_proxy_mode()
    newest_first = reversed(mode.tracer.graph.nodes) if mode is not None else iter(())
    record.asked_rows.setdefault(number, [str(node.name) for node in islice(newest_first, LAST)])
    return True


def take_list(tensor: torch.Tensor, what: str = LIST, only_if: Callable[[Any], bool] = lambda _answer: True) -> Any:
    """Return the example's answer to ``tensor.tolist()``, of integers that follow from inputs alone.

    None if there is none: the example has no values, or the trace was not tried yet without a fixed list.

    ``what``: :data:`LIST`, or :data:`NUMBER` or :data:`PLACES` where a single integer or a mask is read. ``only_if``:
    which answers are given; of another one there is none.
    """
    site = site_of() + what
    now = under_way()
    assert now is not None
    decisions = now.attempt.decisions
    if not (decisions.fixed_lists if what == LIST else decisions.fixed_numbers):
        now.attempt.open_lists.add(site)
        return None
    given, number = now.attempt.answers.listed.get(site, ()), now.questions[site]
    if number >= len(given) or not only_if(answer := given[number]):
        return None
    now.questions[site] += 1
    same = torch.tensor(answer, dtype=tensor.dtype, device=tensor.device) == tensor
    torch.ops.autopar.taken(same.all(), site, True)
    return answer


def changing_tensors() -> list[torch.Tensor]:
    """Return the traced module's parameters and the buffers that it writes: other values at each call."""
    now = under_way()
    assert now is not None
    answers = now.attempt.decisions.answers
    written = [b for name, b in now.module.named_buffers() if answers is not None and name not in answers.steady]
    return [*now.module.parameters(), *written]


class Read(Drawn):
    """The stand-in for ``tensor.item()`` of a number that depends on data, in a trace."""

    def __init__(self, tensor: torch.Tensor, asks: Callable[[torch.Tensor], bool] = take) -> None:
        super().__init__(tensor, asks)

    @staticmethod
    def refusal(what: str) -> CaptureError:
        """Return the error for code that reads a tensor's value, as `what` says."""
        return CaptureError(
            f"forward reads the value of a tensor that depends on its inputs or parameters, {what}, at "
            f"{site_of().partition('@')[0]}: a program would use the one of the example at every step\n  compute with "
            "the tensor itself (queue.index_copy_(1, (ptr + torch.arange(n)) % size, keys); ptr.add_(n)), compare it "
            "in an if, whose way is followed and checked at every call, or move it out of forward()"
        )

    def __array__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Refuse: numpy would make an array of objects, and ask each of them on its own."""
        raise self.refusal("in an array of numpy")


# where a model returns such a number, the program gives the tensor
pytree.register_pytree_node(Read, lambda read: ([read.tensor], None), lambda leaves, _: next(iter(leaves)))


def can_be_listed(tensor: torch.Tensor) -> bool:
    """Check that a tensor has dims and integers, so that it can be read as a list of sizes."""
    return tensor.ndim > 0 and tensor.dtype in (torch.int64, torch.int32)


def is_integer(tensor: torch.Tensor) -> bool:
    """Check that a tensor is one integer."""
    return tensor.numel() == 1 and tensor.dtype in (torch.int64, torch.int32)


SAME = (torch.equal, torch.Tensor.equal)
COMPARED = (*SAME, torch.allclose, torch.Tensor.allclose)
"""Functions of two tensors that give one truth."""
NUMBERS = (torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__index__)
INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def masks_in(index: PyTree) -> list[torch.Tensor]:
    """Return the masks of an index, in order."""
    parts = index if isinstance(index, tuple) else (index,)
    return [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.bool and part.dim()]


DISTINCT = (torch.unique, torch.Tensor.unique, torch.unique_consecutive, torch.Tensor.unique_consecutive)
REPEATED = (torch.repeat_interleave, torch.Tensor.repeat_interleave)


def times_of(args: Sequence[object], kwargs: Mapping[str, PyTree]) -> torch.Tensor | None:
    """Return the tensor of repeats of a ``repeat_interleave`` whose output size is not given; else None."""
    times = kwargs.get("repeats", args[1] if len(args) > 1 else args[0] if len(args) == 1 else None)
    given = kwargs.get("output_size") is not None
    return times if isinstance(times, torch.Tensor) and times.ndim == 1 and not given else None


__all__ = [
    "COMPARED", "DISTINCT", "INDEXED", "LABELS", "LENGTHS", "LIST", "LONGEST", "NUMBER", "NUMBERS", "OF_ROWS", "PLACES",
    "REPEATED", "SAME", "TAKEN", "Read", "asked_for_rows_only", "can_be_listed", "changing_tensors", "fault_at",
    "is_integer", "masks_in", "pinned_at", "place_of_question", "rows_are_asked_for", "take", "take_list", "times_of",
    "warn_of_fixed_numbers",
]  # fmt: skip
