"""The check that a graph with branches computes what a trace does, once each goes as in that trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from autopar.capture.branches.joining_drafts import is_flag, key_of
from autopar.capture.branches.random_answers import Question
from autopar.capture.branches.uniting_traces import United
from autopar.capture.graph.drafts import Draft
from autopar.rules.families.branch import BRANCH
from autopar.words.graph import Node, Ref


class Numbers:
    """Equal numbers for equal expressions, of several graphs."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def of_draft(
        self, draft: Draft, constants: Mapping[str, Any], settled: Callable[[Node], int | None] = lambda _node: None
    ) -> tuple[Any, dict[Any, Any]]:
        """Return ``(outputs, updates)`` as numbers; flags are told by their new values, and not by their names.

        ``settled``: of a branch the position of the argument that it passes on.
        """
        numbers: list[tuple[int, int | None]] = []

        def number(ref: Ref) -> tuple[int, int]:
            what, out = numbers[ref.node]
            return what, ref.out if out is None else out

        for node in draft.nodes:
            passed = settled(node) if node.target == BRANCH else 0 if _is_copy(node, draft.nodes) else None
            if passed is not None:
                numbers.append(number(node.refs[passed]))
                continue
            key = key_of(node, constants), tuple(map(number, node.refs))
            numbers.append((self.known.setdefault(key, len(self.known)), None))
        outputs = [number(out) if isinstance(out, Ref) else out for out in draft.outputs]
        buffers = {node.target: number(Ref(i)) for i, node in enumerate(draft.nodes) if node.kind == "buffer"}
        flags = {node.target for node in draft.nodes if is_flag(node)}
        updates = {name: number(ref) for name, ref in draft.updates.items()}
        changed = {name: value for name, value in updates.items() if value != buffers.get(name)}
        raised = Counter(value for name, value in changed.items() if name in flags)
        return outputs, {**{name: value for name, value in changed.items() if name not in flags}, **raised}


def _is_copy(node: Node, nodes: list[Node]) -> bool:
    """Check that a node is a copy of a buffer, as a norm on one side of a branch gets it."""
    return node.target == "aten.clone.default" and nodes[node.refs[0].node].kind == "buffer"


def computes(
    united: United, constants: Mapping[str, Any], answers: Mapping[Question, bool], draft: Draft,
    theirs: Mapping[str, Any],
) -> bool:  # fmt: skip
    """Check that a graph whose branches go as in a trace computes the same as the trace.

    ``constants``, ``theirs``: tensors that are part of the graph and of the trace, by name. ``answers``: of all
    questions; of those that the trace did not come to any.
    """
    questions = united.questions

    def settled(node: Node) -> int:
        return 1 if answers[questions[node.refs[0]]] else 2

    numbers = Numbers()
    mine, updates = numbers.of_draft(united.draft, {**constants, **united.constants}, settled)
    their, changed = numbers.of_draft(draft, theirs)
    updates = {name: value for name, value in updates.items() if name not in united.statistics}
    return bool(mine == their) and updates == changed
