"""Passes: the rewrites between a traced program and the graph of a model, as one ordered list.

``trace -> PROGRAM passes -> walk -> DRAFT passes -> Graph -> GRAPH passes``. A pass is a record (:class:`Pass`); the
list is :func:`passes`: those of the core below, in order, and those that files of :mod:`autopar.capture.patterns`
:func:`register`. :func:`run` applies the passes of a phase, and checks after each that changed something that the
result is well formed (:mod:`~autopar.capture.graph.verifier`). ``autopar inspect MODEL --passes`` lists what each did.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from autopar.capture.graph.common_subexpressions import merge_common_subexpressions
from autopar.capture.graph.dead_operators import drop_dead_operators
from autopar.capture.graph.drafts import Draft, TracedProgram
from autopar.capture.graph.expert_blocks import with_expert_blocks
from autopar.capture.graph.experts_in_parallel import with_experts_at_once
from autopar.capture.graph.marked_products import with_narrow_products
from autopar.capture.graph.selected_rows import compute_all_rows, fuse_expert_loops
from autopar.capture.graph.verifier import verify
from autopar.capture.graph.writes_in_place import write_in_place
from autopar.capture.graph.written_first import write_parameters_first
from autopar.capture.patterns import load
from autopar.capture.rows_of_draws import note_rows_of_draws
from autopar.errors import CaptureError, closest
from autopar.words.graph import Graph, refs_in

PROGRAM, DRAFT, GRAPH = PHASES = "program", "draft", "graph"
"""Phases: on the exported program, on the nodes that were made of it, on the finished graph."""
Subject = TypeVar("Subject", TracedProgram, Draft, Graph)


@dataclass(frozen=True)
class Pass:
    """One rewrite.

    Attributes:
        apply: in the phase :data:`PROGRAM`, rewrites a :class:`~autopar.capture.graph.drafts.TracedProgram` in place;
            of the other phases, returns a new draft or graph, or the given one where nothing changes.
        reason: why it is there, in one sentence.
        needs: names of passes whose results it takes; they run before it.
        required: why it cannot be skipped; empty if it can.
    """

    name: str
    phase: str
    apply: Callable[[Any], Any]
    reason: str
    needs: tuple[str, ...] = ()
    required: str = ""


def _experts_at_once(program: TracedProgram) -> None:
    with_experts_at_once(program.exported)


def _expert_blocks(draft: Draft) -> Draft:
    nodes = with_expert_blocks(draft.nodes, [*refs_in(draft.outputs), *draft.updates.values()])
    return draft if all(map(operator.is_, nodes, draft.nodes)) else replace(draft, nodes=nodes)


_PASSES: list[Pass] = [
    Pass("selected_rows", PROGRAM, compute_all_rows,
         "how many rows a mask selects depends on data: all are computed, and the others masked"),
    Pass("expert_loops", PROGRAM, fuse_expert_loops,
         "a loop over experts becomes one product of each row with the matrix of its expert", ("selected_rows",)),
    Pass("experts_at_once", PROGRAM, _experts_at_once,
         "experts that are modules of one form become one batched computation, which can be cut by expert"),
    Pass("common_subexpressions", DRAFT, merge_common_subexpressions,
         "masks and positions that every layer computes are computed once"),
    Pass("written_first", DRAFT, write_parameters_first,
         "a parameter that the forward writes before it reads it is written before the program runs",
         required="a program cannot write to the parameters that it is trained by"),
    Pass("expert_blocks", DRAFT, _expert_blocks,
         "rows travel to the rank of their expert once, not once for each product"),
    Pass("dead_operators", DRAFT, drop_dead_operators, "what nobody reads is not computed",
         required="it drops what other passes replace"),
    Pass("narrow_products", GRAPH, with_narrow_products,
         "the prices of products in 8 bits need to know which products the policy makes narrow"),
    Pass("writes_in_place", GRAPH, write_in_place,
         "a cache of which a call writes one position is not copied, where nothing wants a gradient"),
    Pass("rows_of_draws", GRAPH, note_rows_of_draws,
         "a row draws the same random numbers for any number of microbatches",
         required="random operators need to know which rows they draw for"),
]  # fmt: skip


def register(new: Pass, before: str = "") -> None:
    """Add a pass: before one of its phase, else behind the last one of its phase that it needs, else at its end.

    Raises:
        ValueError: the name is taken, a pass that is named is not there, or its phase does not allow the place.
    """
    load()
    names = {p.name: k for k, p in enumerate(_PASSES)}
    missing = [name for name in (*new.needs, before) if name and name not in names]
    if new.name in names or missing:
        what = f"needs '{missing[0]}', which is not" if missing else "is"
        raise ValueError(f"pass '{new.name}' {what} there")
    phases = {p.name: PHASES.index(p.phase) for p in (*_PASSES, new)}
    mine = phases[new.name]
    same = [name for name, phase in phases.items() if phase == mine and name != new.name]
    place = names[before] if before else 1 + max(names[p] for p in ([p for p in new.needs if p in same] or same))
    late = [name for name in new.needs if phases[name] > mine or (phases[name] == mine and names[name] >= place)]
    if late or (before and before not in same):
        what = f"needs '{late[0]}', which runs later" if late else f"cannot run before '{before}', of another phase"
        raise ValueError(f"pass '{new.name}' {what}")
    _PASSES.insert(place, new)


def passes() -> tuple[Pass, ...]:
    """Return all passes in the order in which they run."""
    load()
    return tuple(_PASSES)


@dataclass
class PassRun:
    """One run of a pass.

    Attributes:
        before, after: numbers of nodes.
        dump: the program behind it, if it was asked for.
    """

    name: str
    before: int
    after: int
    changed: bool
    seconds: float
    dump: str = ""


@dataclass
class _Watch:
    dumped: Collection[str]
    runs: list[PassRun] = field(default_factory=list)


_WATCH: ContextVar[_Watch | None] = ContextVar("watch", default=None)
_SKIPPED: ContextVar[frozenset[str]] = ContextVar("skipped", default=frozenset())


@contextlib.contextmanager
def observed(dump_after: Collection[str] = ()) -> Iterator[list[PassRun]]:
    """Note every run of a pass in this scope.

    Args:
        dump_after: passes after which the program is kept as text.

    Raises:
        CaptureError: there is no pass of a name.
    """
    _check_names(dump_after)
    watch = _Watch(dump_after)
    token = _WATCH.set(watch)
    try:
        yield watch.runs
    finally:
        _WATCH.reset(token)


@contextlib.contextmanager
def skipping(names: Collection[str]) -> Iterator[None]:
    """Capture without some passes in this scope.

    Raises:
        CaptureError: there is no pass of a name, it is required, or another pass needs it.
    """
    _check_names(names)
    for p in passes():
        if p.name in names and p.required:
            raise CaptureError(f"pass '{p.name}' cannot be skipped: {p.required}")
        missing = [name for name in p.needs if name in names]
        if missing and p.name not in names:
            raise CaptureError(f"pass '{missing[0]}' cannot be skipped alone: pass '{p.name}' needs it; skip both")
    token = _SKIPPED.set(frozenset(names))
    try:
        yield
    finally:
        _SKIPPED.reset(token)


def _check_names(names: Collection[str]) -> None:
    known = [p.name for p in passes()]
    for name in names:
        if name not in known:
            raise CaptureError(f"there is no pass '{name}'; {closest(name, known)}")


def run(phase: str, subject: Subject) -> Subject:
    """Apply the passes of a phase in order, and verify the result of each that changed something.

    Raises:
        CaptureError: a pass refuses the model.
        PassError: the result of a pass is not well formed.
    """
    watch, skipped = _WATCH.get(), _SKIPPED.get()
    for p in passes():
        if p.phase != phase or p.name in skipped:
            continue
        given, before, began = subject, _nodes(subject), time.perf_counter()
        result = p.apply(given)
        seconds = time.perf_counter() - began
        subject = given if result is None else result
        changed = _nodes(given) != before if result is None else result is not given
        if changed:
            verify(p.name, subject, given)
        if watch is not None:
            dump = _text(subject) if p.name in watch.dumped else ""
            watch.runs.append(PassRun(p.name, len(before), len(_nodes(subject)), changed, seconds, dump))
    return subject


def summary(runs: Sequence[PassRun]) -> list[PassRun]:
    """Return one row for each pass that ran: the nodes of its last run, and the seconds of all."""
    rows: dict[str, PassRun] = {}
    for each in runs:
        earlier = rows.get(each.name)
        seconds = each.seconds + (earlier.seconds if earlier is not None else 0.0)
        rows[each.name] = PassRun(each.name, each.before, each.after, each.changed, seconds, each.dump)
    return list(rows.values())


def _nodes(subject: TracedProgram | Draft | Graph) -> Sequence[object]:
    return list(subject.graph.nodes) if isinstance(subject, TracedProgram) else subject.nodes


def _text(subject: TracedProgram | Draft | Graph) -> str:
    if isinstance(subject, TracedProgram):
        return str(subject.exported.graph_module.print_readable(print_output=False))
    return str(subject.graph if isinstance(subject, Draft) else subject)
