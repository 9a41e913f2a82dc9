"""The exploration of random branches: answers to try, and a check of the graph that they give.

Some few traces are enough for any number of questions. The *base* is the trace in which most is computed. A trace in
which every second question is answered otherwise, and one with the others, show for each question what hangs on it and
where both sides meet, because the operators between two flipped questions are in both. The graph that follows is then
settled to each of a number of answers, and compared with a trace that was given them: all at once, and for every bit of
the questions' numbers those that have it, which distinguishes any two questions. Where it is not right, one trace is
made for each question, if they are not too many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.capture.branches.branch_equivalence import computes
from autopar.capture.branches.joining_drafts import Apart, Union, is_flag
from autopar.capture.branches.random_answers import Question
from autopar.capture.branches.uniting_traces import United, unite
from autopar.capture.graph.building import GraphBuilder
from autopar.capture.graph.drafts import Draft
from autopar.capture.trace.recording import Answer
from autopar.errors import CaptureError

MOST_ALONE = 16
"""Questions up to which each has a trace of its own where a few traces do not show what hangs on them."""


@dataclass(frozen=True)
class Trace:
    """The result of one trace."""

    builder: GraphBuilder
    draft: Draft

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The tensors that are no registered ones, by name."""
        return self.builder.constants

    def unwritten(self, written: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the constants that no trace writes: they are the same as others of the same values."""
        return {name: value for name, value in self.values.items() if name not in written}

    @property
    def gives(self) -> Any:
        """The form of the model's output."""
        return self.builder.exported.call_spec.out_spec

    @property
    def size(self) -> int:
        """The number of operators."""
        return sum(node.kind == "op" for node in self.draft.nodes)


class _SameNames:
    """Names of unregistered tensors that are the same in all traces, which meet them in different orders."""

    def __init__(self) -> None:
        self.name_of: dict[int, str] = {}
        self.alive: list[torch.Tensor] = []
        """Tensors that have names, kept alive so that no other is taken for one of them."""
        self.written: set[str] = set()
        """Names of those that a trace writes."""

    def given(self, trace: Trace) -> Trace:
        draft, constants = trace.draft, trace.builder.constants
        flags = {node.target for node in draft.nodes if is_flag(node)}
        new = {name: name if name in flags else self._name(name, value) for name, value in constants.items()}
        trace.builder.constants = {new[name]: value for name, value in constants.items()}
        nodes = [
            replace(node, name=new[node.target], target=new[node.target]) if node.kind != "op" and node.target in new
            else node for node in draft.nodes
        ]  # fmt: skip
        updates = {new.get(name, name): ref for name, ref in draft.updates.items()}
        self.written |= updates.keys() - flags
        tied = {new.get(name, name): new.get(first, first) for name, first in draft.tied.items()}
        return replace(trace, draft=replace(draft, nodes=nodes, updates=updates, tied=tied))

    def _name(self, name: str, tensor: torch.Tensor) -> str:
        if id(tensor) not in self.name_of:
            taken, free, count = set(self.name_of.values()), name, 1
            while free in taken:
                free, count = f"{name}_{count}", count + 1
            self.name_of[id(tensor)] = free
            self.alive.append(tensor)
        return self.name_of[id(tensor)]


class Explorer:
    """Traces a model with other answers.

    Args:
        builder: the builder of the first trace, which goes into the graph.
        first: what it gave, where every answer was False.
        again: makes a trace with some answers: a builder and the exported program.
        prefix: the prefix of module paths that users do not see.
    """

    def __init__(
        self, builder: GraphBuilder, first: Draft, again: Callable[[Answer], tuple[GraphBuilder, Any]], prefix: str
    ) -> None:
        self.again, self.prefix = again, prefix
        self.names = _SameNames()
        self.plain = {frozenset[str](): self.names.given(Trace(builder, first))}
        """Traces in which all questions of a place have one answer, by the places where it is True."""
        self.yes = frozenset[str]()
        """Places where the answer of the base is True."""

    def explored(self) -> tuple[GraphBuilder, Draft]:
        """Return a draft with both sides of every branch, and the builder that finishes it."""
        self.base = self._base()
        self.questions = [ask.question for ask in self.base.draft.asks]
        self.flipped: dict[frozenset[Question], Trace] = {}
        try:
            united = self._united()
        except Apart as error:
            raise CaptureError(_explained(self.base.draft, str(error), self.prefix)) from None
        self.base.builder.constants.update(united.constants)
        return self.base.builder, united.draft

    def _made(self, answer: Answer) -> Trace:
        builder, _ = self.again(answer)
        return self.names.given(Trace(builder, builder.draft()))

    def _plainly(self, yes: frozenset[str]) -> Trace:
        if yes not in self.plain:
            self.plain[yes] = self._made(lambda _number, site: site in yes)
        return self.plain[yes]

    def _base(self) -> Trace:
        """Return the trace in which most is computed: place by place the answer that makes it larger."""
        base = self._plainly(frozenset())
        tried: set[str] = set()
        while True:
            site = next((a.question.site for a in base.draft.asks if a.question.site not in tried), None)
            if site is None:
                return base
            tried.add(site)
            trial = self._plainly(self.yes | {site})
            if trial.size > base.size:
                base, self.yes = trial, self.yes | {site}

    def _trace(self, flipped: Sequence[Question], inside: Mapping[Question, Question]) -> Trace:
        """Return the trace with the answers to `flipped` changed, its questions named as those of the base.

        ``inside``: the question on which a question hangs, as far as is known.
        """
        key = frozenset(flipped)
        if key not in self.flipped:
            expected = [q for q in self.questions if not any(outer in key for outer in _around(q, inside))]
            if len(key) == len(self.questions):
                trace = self._plainly(frozenset(q.site for q in self.questions) - self.yes)
            else:
                flips = {number for number, q in enumerate(expected) if q in key}
                trace = self._made(lambda number, site: (site in self.yes) != (number in flips))
            if trace.gives != self.base.gives:
                raise Apart("the model gives an output of another form on one side")
            asks = trace.draft.asks
            if len(key) == 1:  # what hangs on it is not asked: those after it are the last of the base
                (question,) = key
                begin = len(self.questions) - (len(asks) - question.number - 1)
                expected = [*self.questions[: question.number + 1], *self.questions[max(begin, question.number + 1) :]]
            if [(q.module, q.site) for q in expected] != [(a.question.module, a.question.site) for a in asks]:
                raise Apart("a random number is asked for only on one side of another branch")
            named = [replace(ask, question=q) for ask, q in zip(asks, expected, strict=True)]
            self.flipped[key] = replace(trace, draft=replace(trace.draft, asks=named))
        return self.flipped[key]

    def _united(self) -> United:
        questions = self.questions
        halves = [half for half in (questions[::2], questions[1::2]) if half]
        ways = [halves] if len(questions) < 3 else [halves, [[q] for q in questions]]
        why = ""
        for groups in ways:
            if len(groups) > max(MOST_ALONE, 2):
                break
            try:
                return self._united_by(groups)
            except Apart as error:
                why = str(error)
                self.flipped = {key: trace for key, trace in self.flipped.items() if len(key) == 1}
        raise Apart(why)

    def _united_by(self, groups: Sequence[Sequence[Question]]) -> United:
        """Unite the traces in each of which one of `groups` is answered otherwise."""
        written = frozenset(self.names.written)
        union = Union(self.base.draft, self.base.unwritten(written))
        for group in groups:
            trace = self._trace(group, union.inside)
            asked = {ask.question for ask in trace.draft.asks}
            union.inside.update({q: group[0] for q in self.questions if q not in asked})
            if self.names.written != written:  # what this trace writes, the base may read
                return self._united_by(groups)
            union.join(trace.draft, group, trace.unwritten(written), trace.values)
        united = unite(union, self.prefix)
        for group in [*groups, self.questions, *_by_bits(self.questions)]:
            trace = self._trace(group, union.inside)
            answers = {ask.question: ask.answer != (ask.question in group) for ask in self.base.draft.asks}
            of_base, of_trace = (t.unwritten(self.names.written) for t in (self.base, trace))
            if not computes(united, of_base, answers, trace.draft, of_trace):
                raise Apart("what is computed after both sides does not follow from the two sides alone")
        return united


def _around(question: Question, inside: Mapping[Question, Question]) -> Iterator[Question]:
    """Yield the questions on which a question hangs."""
    outer = inside.get(question)
    while outer is not None:
        yield outer
        outer = inside.get(outer)


def _by_bits(questions: Sequence[Question]) -> Iterator[list[Question]]:
    """Yield, for every bit of the questions' numbers, the questions that have it."""
    for bit in range(len(questions).bit_length()):
        group = [q for i, q in enumerate(questions, 1) if i >> bit & 1]
        if group:
            yield group


def _explained(draft: Draft, why: str, prefix: str) -> str:
    places = [ask.question._replace(module=(ask.question.module + ".").removeprefix(prefix)[:-1]) for ask in draft.asks]
    where = ", ".join(list(dict.fromkeys(place.where for place in places))[:4])
    return (
        f"forward branches on a random number in Python, in {where}, and both sides cannot be kept in one program: "
        f"{why}\n  compute both and choose with torch.where(torch.rand(()) < p, x, layer(x)), or turn it off "
        "(layerdrop=0)"
    )
