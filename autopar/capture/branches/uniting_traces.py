"""One graph of several traces: every operator of each, and a choice wherever their values meet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from autopar.capture.branches.joining_drafts import Apart, Union, Use
from autopar.capture.branches.random_answers import Question
from autopar.capture.graph.dead_operators import has_effect
from autopar.capture.graph.drafts import Draft
from autopar.rules.families.branch import BRANCH
from autopar.words.graph import Node, Ref, Spec, map_refs
from autopar.words.trees import PyTree


@dataclass(frozen=True)
class United:
    """A draft with branches.

    Attributes:
        questions: what decides, by the number of the node of its condition.
        statistics: buffers of batch norms whose new values the draft computes itself.
        constants: the constants that come from other traces than the base, by name.
    """

    draft: Draft
    questions: dict[Ref, Question]
    statistics: frozenset[str]
    constants: dict[str, torch.Tensor]


def unite(union: Union, prefix: str) -> United:
    """Return the graph of a union.

    ``prefix``: of module paths that users do not see.
    """
    return _Uniting(union, prefix).run()


def after_what_is_inside(union: Union) -> list[Question]:
    """Return the questions in the order of asking, each after the questions that hang on it."""
    inner: dict[Question, list[Question]] = {}
    for question, outer in union.inside.items():
        inner.setdefault(outer, []).append(question)
    in_order: list[Question] = []

    def visit(question: Question) -> None:
        for inner_question in sorted(inner.get(question, ()), key=lambda q: q.number):
            visit(inner_question)
        in_order.append(question)

    for question in union.asks:
        if question not in union.inside:
            visit(question)
    return in_order


class _Uniting:
    def __init__(self, union: Union, prefix: str) -> None:
        self.union, self.prefix = union, prefix
        self.rank = {question: i for i, question in enumerate(after_what_is_inside(union))}
        self.nodes: list[Node] = []
        self.names: set[str] = set()
        self.place: dict[int, int] = {}
        self.under_way: set[int] = set()
        self.chosen: dict[tuple[Question, Ref, Ref], Ref] = {}
        self.conditions: dict[Ref, Question] = {}
        self.statistics: dict[str, Ref] = {}
        self.detached: dict[Ref, Ref] = {}
        self.of_base: dict[Ref, dict[Question, set[Ref]]] = {}
        for use, others in union.meets.items():
            for question, otherwise in others.items():
                self.of_base.setdefault(self._read_by_base(use), {}).setdefault(question, set()).add(otherwise)

    def _read_by_base(self, use: Use) -> Ref:
        base = self.union.base
        if use.reader == "output":
            return base.outputs[use.position]  # type: ignore[no-any-return]
        if use.reader == "update":
            return self._new_value(use.position)
        return self.union.nodes[use.reader].refs[use.position]  # type: ignore[index]

    def _new_value(self, buffer: int) -> Ref:
        """Return the base's new value of a buffer: the buffer itself, where it writes nothing."""
        return self.union.updates.get(buffer, Ref(buffer))

    def run(self) -> United:
        union, base = self.union, self.union.base
        for i, node in enumerate(union.nodes):
            if node.kind != "op":
                self._place(i)
        for i in range(len(base.nodes)):
            self._place(i)
        outputs = tuple(
            self._value(Use("output", i), out) if isinstance(out, Ref) else out for i, out in enumerate(base.outputs)
        )
        changed = union.updates.keys() | {u.position for u in union.meets if u.reader == "update"}
        new = {b: self._value(Use("update", b), self._new_value(b)) for b in sorted(changed)}
        updates = {self.nodes[self.place[b]].target: value for b, value in new.items()}
        user = [None if n is None else self.place[n] for n in base.user]
        draft = Draft(self.nodes, outputs, base.loss, base.tied, updates | self.statistics, user, base.asks)
        constants = {self.nodes[self.place[i]].target: value for i, value in union.values.items()}
        return United(draft, self.conditions, frozenset(self.statistics), constants)

    def _place(self, i: int) -> Ref:
        """Put a node where all that it reads stands before it."""
        if i in self.place:
            return Ref(self.place[i])
        if i in self.under_way:
            raise Apart(f"{self.union.nodes[i].where} would have to run before what it depends on")
        self.under_way.add(i)
        node = self.union.nodes[i]
        asked_by = self.union.only.get(i)
        read = [
            self._value(Use(i, k), ref) if asked_by is None else self._before(asked_by, ref)
            for k, ref in enumerate(node.refs)
        ]
        if node.needs_grad:
            read = [self._entered(i, ref.node, value) for ref, value in zip(node.refs, read, strict=True)]
        values = iter(read)
        node = replace(
            node, args=map_refs(node.args, lambda _: next(values)), kwargs=map_refs(node.kwargs, lambda _: next(values))
        )
        if has_effect(node.target) and (asked_by is not None or i in self.union.left_out):
            node = self._beside(node, i)
        self.place[i] = self._add(node).node
        return Ref(self.place[i])

    def _moved(self, ref: Ref) -> Ref:
        return Ref(self._place(ref.node).node, ref.out)

    def _value(self, use: Use, ref: Ref) -> Ref:
        """Return the value that is read at a place of the base: its own, or what others read there."""
        value = self._moved(ref)
        others = self.union.meets.get(use, {})
        for question in sorted(others, key=self.rank.__getitem__):
            value = self._choice(question, self._before(question, others[question]), value, use.reader)
        return value

    def _before(self, question: Question, ref: Ref) -> Ref:
        """Return a value of the base at the place of a question: earlier answers may have replaced it."""
        value = self._moved(ref)
        for earlier, others in sorted(self.of_base.get(ref, {}).items(), key=lambda item: self.rank[item[0]]):
            if self.rank[earlier] < self.rank[question] and len(others) == 1:
                value = self._choice(earlier, self._before(earlier, next(iter(others))), value, -1)
        return value

    def _entered(self, i: int, source: int, value: Ref) -> Ref:
        """Return a value that enters one side of a branch: its gradient counts only where that side is taken.

        The gradient that enters the other side from behind is zero, but zero times infinity is no number.
        """
        if not self._spec(value).is_float or not self.nodes[value.node].needs_grad:
            return value
        if self.nodes[value.node].kind == "param":
            return value
        union = self.union
        for question in sorted(union.left_out.get(i, set()) - union.left_out.get(source, set())):
            value = self._choice(question, self._detached(value), value, i)
        if i in union.only and union.only[i] != union.only.get(source):
            value = self._choice(union.only[i], value, self._detached(value), i)
        return value

    def _detached(self, value: Ref) -> Ref:
        if value not in self.detached:
            node = self.nodes[value.node]
            self.detached[value] = self._add(
                Node("untaken", "op", "aten.detach.default", (value,), {}, (self._spec(value),), node.module,
                     node.source, hot=node.hot, again=node.again)
            )  # fmt: skip
        return self.detached[value]

    def _choice(self, question: Question, otherwise: Ref, value: Ref, reader: int | str) -> Ref:
        """Return ``value`` where the base's answer is right, else ``otherwise``."""
        key = question, otherwise, value
        if key not in self.chosen:
            ask = self.union.asks[question]
            condition = self._moved(ask.condition)
            self.conditions[condition] = question
            spec = self._spec(value)
            again = self.nodes[value.node].again
            there = self.union.nodes[reader].again if isinstance(reader, int) and reader >= 0 else -1
            grad = spec.is_float and any(self.nodes[r.node].needs_grad for r in (value, otherwise))
            hot = any(self.nodes[r.node].hot for r in (value, otherwise, condition))
            sides = (value, otherwise) if ask.answer else (otherwise, value)
            self.chosen[key] = self._add(
                Node("branch", "op", BRANCH, (condition, *sides), {}, (spec,), self._module(question),
                     question.line, grad, hot, again=again if again == there else -1)
            )  # fmt: skip
        return self.chosen[key]

    def _module(self, question: Question) -> str:
        return (question.module + ".").removeprefix(self.prefix).removesuffix(".")

    def _spec(self, ref: Ref) -> Spec:
        spec = self.nodes[ref.node].outs[ref.out]
        assert spec is not None
        return spec

    def _add(self, node: Node) -> Ref:
        name, count = node.name, 1
        while name in self.names:
            name, count = f"{node.name}_{count}", count + 1
        self.names.add(name)
        if name != node.name:
            node = replace(node, name=name, target=name if node.kind == "buffer" else node.target)
        self.nodes.append(node)
        return Ref(len(self.nodes) - 1)

    # -- running statistics

    def _beside(self, norm: Node, i: int) -> Node:
        """Let a norm on one side of a branch write to copies of its statistics, of which the branch chooses."""
        training, statistics = norm.args[5], [r for r in norm.args[3:5] if isinstance(r, Ref)]
        if not training or not statistics:
            return norm
        names = [self.nodes[r.node].target for r in statistics]
        if norm.target != "aten.batch_norm.default" or any(n in self.statistics for n in names):
            raise Apart(f"{norm.where} writes running statistics that more than one operator writes")
        readers = [n for n in self.union.nodes if has_effect(n.target) and n.refs and n is not self.union.nodes[i]]
        mine = {r.node for r in self.union.nodes[i].refs}
        buffers = {b for b in mine if self.union.nodes[b].kind == "buffer"}
        if any(r.node in buffers for n in readers for r in n.refs):
            raise Apart(f"{norm.where} writes running statistics that more than one operator writes")
        x, momentum = norm.args[0], float(norm.args[6])
        copies = [self._op("aten.clone.default", (r,), self._spec(r), norm) for r in statistics]
        new = self._moments(x, self._spec(statistics[0]), norm)
        for name, old, moment in zip(names, statistics, new, strict=True):
            spec = self._spec(old)
            kept = self._op("aten.mul.Tensor", (old, 1 - momentum), spec, norm)
            moved = self._op("aten.mul.Tensor", (moment, momentum), spec, norm)
            value = self._op("aten.add.Tensor", (kept, moved), spec, norm)
            for question in [*self.union.left_out.get(i, ())]:
                value = self._choice(question, self._moved(Ref(self.union.at[name])), value, -1)
            if i in self.union.only:
                value = self._choice(self.union.only[i], value, self._moved(Ref(self.union.at[name])), -1)
            self.statistics[name] = value
        return replace(norm, args=(*norm.args[:3], *copies, *norm.args[5:]))

    def _moments(self, x: Ref, spec: Spec, norm: Node) -> list[Ref]:
        """Return mean and unbiased variance of x [b c ...] over all but its channels."""
        whole = self._spec(x)
        if self.nodes[x.node].needs_grad:
            x = self._op("aten.detach.default", (x,), whole, norm)
        if whole.dtype != spec.dtype:
            whole = Spec(whole.shape, spec.dtype)
            x = self._op("aten.to.dtype", (x, getattr(torch, spec.dtype)), whole, norm)
        dims = [0, *range(2, len(whole.shape))]
        count = whole.n_elements // whole.shape[1]
        broad = Spec(tuple(1 if d in dims else n for d, n in enumerate(whole.shape)), whole.dtype)
        mean = self._op("aten.mean.dim", (x, dims, True), broad, norm)
        off = self._op("aten.sub.Tensor", (x, mean), whole, norm)
        square = self._op("aten.mul.Tensor", (off, off), whole, norm)
        biased = self._op("aten.mean.dim", (square, dims, False), spec, norm)
        shape = list(spec.shape)
        return [
            self._op("aten.reshape.default", (mean, shape), spec, norm),
            self._op("aten.mul.Tensor", (biased, count / max(count - 1, 1)), spec, norm),
        ]

    def _op(self, target: str, args: tuple[PyTree, ...], spec: Spec, like: Node) -> Ref:
        hot = any(self.nodes[r.node].hot for r in args if isinstance(r, Ref))
        return self._add(
            Node(f"{like.name}_statistics", "op", target, args, {}, (spec,), like.module, like.source, hot=hot)
        )
