"""Two drafts of one model that differ in what Python was told: what they have in common, and where their values meet.

Between one flipped question and the next the *base* runs what the *other* trace leaves out, and the other what the base
leaves out; then both run the same operators again. Operators of the same line, module and arguments are one, counted
from the end of such a stretch. Where one of them reads a value of the base's in one trace and another in the other,
the two meet: the random number chooses between them.

Which operators are taken for one decides how much is computed twice, not what is computed: an operator is given the
base's arguments where the answer is the base's, and the other's where it is the other's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autopar.capture.branches.random_answers import Question
from autopar.capture.graph.drafts import Draft
from autopar.rules.function import Callee
from autopar.words.graph import PART, WAY, Node, Ref, Spec, map_refs


class Apart(Exception):
    """Traces that cannot be one graph; the text says why."""


class Use(NamedTuple):
    """A place that reads a value: an input of a node, an output of the model, or a buffer's new value."""

    reader: int | str
    position: int


@dataclass
class Union:
    """The union of what several traces compute.

    Attributes:
        base: the trace that the others are compared with.
        nodes: the nodes of the base, then those that other traces have beside them.
        only: the question on which a node of another trace hangs, by its number.
        left_out: questions on which a node of the base hangs, by its number.
        meets: for a use of a value of the base, what is read there instead when a question is answered otherwise.
        inside: the question on which a question hangs.
        values: constants of other traces, by the number of their node.
    """

    base: Draft
    constants: Mapping[str, Any]
    nodes: list[Node] = field(default_factory=list)
    only: dict[int, Question] = field(default_factory=dict)
    left_out: dict[int, set[Question]] = field(default_factory=lambda: defaultdict(set))
    meets: dict[Use, dict[Question, Ref]] = field(default_factory=lambda: defaultdict(dict))
    inside: dict[Question, Question] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = list(self.base.nodes)
        self.asks = {ask.question: ask for ask in self.base.asks}
        self.keys = [key_of(node, self.constants) for node in self.nodes]
        self.at = {node.target: i for i, node in enumerate(self.nodes) if node.kind != "op"}
        """The number of an input, a parameter or a buffer, by its name."""
        self.updates = {self.at[name]: ref for name, ref in self.base.updates.items()}
        """New values of the base's buffers, by the numbers of these."""
        self.more: dict[Any, int] = {}
        """Numbers of what other traces read and the base does not, by :func:`key_of`."""

    def spec(self, ref: Ref) -> Spec:
        """Return the spec of a value."""
        spec = self.nodes[ref.node].outs[ref.out]
        assert spec is not None
        return spec

    def join(
        self, draft: Draft, flipped: Collection[Question], constants: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        """Take in a trace in which some questions of the base were answered otherwise; its questions are the base's.

        ``constants``: tensors that are the same where their values are, see :func:`key_of`. ``values``: of these and of
        all others that are no registered ones.
        """
        _Joining(self, draft, flipped, constants, values).run()


def is_flag(node: Node) -> bool:
    """Check that a node is a buffer in which a program notes how a call went."""
    return node.kind == "buffer" and node.target.startswith((WAY, PART))


def key_of(node: Node, constants: Mapping[str, Any]) -> Any:
    """Return what a node computes, apart from the tensors that it is given.

    ``constants``: tensors that a trace has made, which are the same where their values are. One that a forward writes
    is no such tensor: it is known by its name, as those that the model has registered.
    """
    if node.kind != "op":
        value = constants.get(node.target)
        if value is None or value.is_meta:
            return "held", node.target
        return "constant", str(value.dtype), tuple(value.shape), value.detach().cpu().flatten().tolist().__repr__()
    return node.target, node.module, node.source, node.outs, literals(node)


def literals(node: Node) -> str:
    """Return the arguments that are no tensors, as text."""

    def plain(value: object) -> Any:
        return f"<{value.name}>" if isinstance(value, Callee) else value

    args = tuple(plain(map_refs(a, lambda _: "%")) for a in node.args)
    return repr((args, sorted(map_refs(node.kwargs, lambda _: "%").items())))


def _noted_in(flag: Node) -> Any:
    """Return the meaning of a flag, apart from the operator that writes it."""
    return flag.module, flag.source, repr(sorted(flag.kwargs.items()))


class _Joining:
    """One call of :meth:`Union.join`."""

    def __init__(
        self, union: Union, draft: Draft, flipped: Collection[Question], constants: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.union, self.other, self.constants, self.values = union, draft, constants, values
        self.flips = [ask for ask in draft.asks if ask.question in flipped]
        here = [union.asks[ask.question].position for ask in self.flips]
        there = [ask.position for ask in self.flips]
        self.here, self.there = [0, *here, len(union.base.nodes)], [0, *there, len(draft.nodes)]
        self.image: dict[int, int] = {}
        self.missing: dict[int, Question] = {}
        self.at = {node.target: f for f, node in enumerate(draft.nodes) if node.kind != "op"}

    def run(self) -> None:
        self._match()
        union = self.union
        last = len(self.flips)
        for segment, begin in enumerate(self.there[:-1]):
            for f in range(begin, self.there[segment + 1]):
                b, node = self.image.get(f), self.other.nodes[f]
                if b is None:
                    self._take(f, node, segment)
                    continue
                node_here = union.nodes[b]
                if (node.needs_grad, node.hot) != (node_here.needs_grad, node_here.hot):
                    union.nodes[b] = replace(
                        node_here, needs_grad=node_here.needs_grad or node.needs_grad, hot=node_here.hot or node.hot
                    )
                for position, (mine, theirs) in enumerate(zip(node_here.refs, node.refs, strict=True)):
                    self._meet(Use(b, position), mine, self._moved(theirs), segment)
        if len(union.base.outputs) != len(self.other.outputs):
            raise Apart("the model gives more outputs on one side")
        for i, (mine, theirs) in enumerate(zip(union.base.outputs, self.other.outputs, strict=True)):
            if isinstance(mine, Ref) and isinstance(theirs, Ref):
                self._meet(Use("output", i), mine, self._moved(theirs), last)
            elif isinstance(mine, Ref) or isinstance(theirs, Ref) or mine != theirs:
                raise Apart(f"output {i} of the model is a tensor on one side only, or another value")
        theirs_by_buffer = {self.image[self.at[name]]: self._moved(ref) for name, ref in self.other.updates.items()}
        for buffer in union.updates.keys() | theirs_by_buffer.keys():  # a side that does not write it leaves it alone
            as_it_was = Ref(buffer)
            mine, theirs = union.updates.get(buffer, as_it_was), theirs_by_buffer.get(buffer, as_it_was)
            self._meet(Use("update", buffer), mine, theirs, last)

    def _match(self) -> None:
        """Find the operators of the other trace that are operators of the base."""
        union = self.union
        for segment in range(len(self.flips) + 1):
            waiting: dict[Any, list[int]] = defaultdict(list)
            for b in range(self.here[segment], self.here[segment + 1]):
                if not is_flag(union.nodes[b]):
                    waiting[union.keys[b]].append(b)
            for f in range(self.there[segment + 1] - 1, self.there[segment] - 1, -1):
                same = waiting.get(key_of(self.other.nodes[f], self.constants))
                if same and not is_flag(self.other.nodes[f]):
                    self.image[f] = same.pop()
            for b in (b for rest in waiting.values() for b in rest if union.nodes[b].kind == "op"):
                if not segment:
                    raise Apart(f"{union.nodes[b].where} is left out before a random number is asked for")
                self.missing[b] = self.flips[segment - 1].question
                union.left_out[b].add(self.missing[b])
        flags = {
            (ref.node, _noted_in(union.nodes[b])): b for b, ref in union.updates.items() if is_flag(union.nodes[b])
        }
        for name, ref in self.other.updates.items():  # flags are the same where the operators are that write them
            f = self.at[name]
            b = flags.get((self.image.get(ref.node, -1), _noted_in(self.other.nodes[f])))
            if is_flag(self.other.nodes[f]) and b is not None:
                self.image[f] = b

    def _take(self, f: int, node: Node, segment: int) -> None:
        """Add a node that the base does not have."""
        union = self.union
        if node.kind == "op" and not segment:
            raise Apart(f"{node.where} is computed before a random number is asked for, on one side only")
        if node.kind != "op" and not is_flag(node):
            key = key_of(node, self.constants)
            if key in union.more:
                self.image[f] = union.more[key]
                return
            union.more[key] = len(union.nodes)
        self.image[f] = len(union.nodes)
        if node.kind == "op":
            union.only[len(union.nodes)] = self.flips[segment - 1].question
        elif node.target in self.values:
            union.values[len(union.nodes)] = self.values[node.target]
        union.nodes.append(replace(node.moved(self._moved), again=-1))

    def _moved(self, ref: Ref) -> Ref:
        return Ref(self.image[ref.node], ref.out)

    def _meet(self, use: Use, mine: Ref, theirs: Ref, segment: int) -> None:
        """Join two values that one operator is given."""
        if mine == theirs:
            return
        union = self.union
        if union.spec(mine) != union.spec(theirs):
            raise Apart(
                f"both sides meet in tensors that differ: {union.spec(mine)} of {union.nodes[mine.node].where}, and "
                f"{union.spec(theirs)} of {union.nodes[theirs.node].where}"
            )
        hangs_on = [q for q in (self.missing.get(mine.node), union.only.get(theirs.node)) if q is not None]
        if hangs_on:
            question = max(hangs_on, key=lambda q: q.number)
        elif segment:
            question = self.flips[segment - 1].question
        else:
            raise Apart("values differ before a random number is asked for")
        union.meets[use][question] = theirs
