"""The batch's factor b, followed through a graph: which tensors lie along the rows of the batch, and what the loss is.

Each operator's rule says of what factors its dims consist and which of them may be cut without communication. An input
with rows has b in its first dim; from there b goes where the rules take it. What is computed of a microbatch is then a
part of what is computed of the batch as long as

* b meets b: an operator reads rows beside rows, or beside what is the same for all of them;
* b is a factor that the operator may be cut along, without statistics over rows, an order among them, or indices that
  count them;
* it ends in sums and means over rows, which the loss takes linearly.

Where that does not hold there is a :class:`Trouble`, with its node and the inputs that it comes from. Sums over rows
of what the inputs alone decide (how many labels count, the weights of their classes) are known ahead of a step for the
whole batch (:mod:`.batch_totals`), so the loss may be any function of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autopar.capture.row_flows import (
    ALIKE,
    FIXED,
    MEAN,
    OWN,
    PER_ROW,
    PLAIN,
    ROWS,
    SUM,
    Flow,
    FollowedRows,
    Part,
    Trouble,
    divided,
    joined,
    same_lead,
)
from autopar.rules.notation import Rule
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph, Node, Ref

REDUCTION_MEAN = 1
MOST_TRIED = 24
"""Sets of inputs that are tried at most to find those with rows."""
IGNORED = -100
"""Label that a loss ignores by default."""
LABELLED = (
    "aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default",
)  # fmt: skip
SAME_NUMBERS = (
    "aten.reshape.default", "aten.expand.default", "aten.permute.default", "aten.to.dtype", "aten._to_copy.default",
    "aten.detach.default", "aten.clone.default", "aten.alias.default", "aten.squeeze.default",
)  # fmt: skip
"""Operators that move numbers without changing them."""
MAKE_ALIKE = ("aten.full.default", "aten.expand.default", "aten.repeat.default")
"""Operators along whose new dims all values are alike."""
INDEXED = "aten.index.Tensor"
SUMS = ("add", "sub", "rsub")
"""Operators on numbers of a loss that are affine in all of what they read."""
MEANS = (
    "mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "poisson_nll_loss", *(target.split(".")[1] for target in LABELLED),
)  # fmt: skip
"""Operators that may take a mean over all that they read."""
PICKING = ("index", "gather", "index_select", "embedding", "masked_fill", "where")
KEEP_POWERS = (
    *SUMS, *PICKING, "sum", "mean", "neg", "abs", "relu", "slice", "select", "cat", "split", "chunk", "unbind",
)  # fmt: skip
"""Operators that keep a factor of all values that they read."""

Scaling = Mapping[int, int | None]
"""For nodes with a number that is another in a part of the batch, the power of the number of microbatches by which it
is; None if it is no power."""
Numbers = Mapping[str, float]
"""Values of tensors with one element, by the names of their buffers."""
def followed(
    graph: Graph, rows: Collection[int], scaling: Scaling | None = None, numbers: Numbers | None = None
) -> FollowedRows:
    """Follow the rows of the inputs in `rows` through a graph.

    Args:
        graph: the graph of one batch.
        rows: inputs with rows, by node number.
        scaling: how the numbers of nodes follow from how many rows there are; None if that is not known.
        numbers: tensors with one element that the model's code makes, by the names of their buffers.
    """
    return _Following(graph, frozenset(rows), scaling, numbers or {}).run()


def may_have_rows(graph: Graph, rows: int) -> tuple[int, ...]:
    """Return the inputs whose first dim is as long as the batch."""
    return tuple(
        i for i, node in graph.of_kind("input")
        if node.outs and node.outs[0] is not None and node.outs[0].shape[:1] == (rows,)
    )  # fmt: skip


def inputs_with_rows(graph: Graph, rows: int, numbers: Numbers | None = None) -> FollowedRows:
    """Find the inputs that have the rows of the batch, among those that are as long.

    All of them have, unless rows do not fit then: such an input is left out where the others do without it.
    """
    first = followed(graph, may_have_rows(graph, rows), None, numbers)
    if all(is_of_model(trouble) for trouble in first.troubles):
        return first
    norms = {trouble.node for trouble in first.troubles if trouble.kind == "across" and trouble.hot}
    todo, seen = [first], {first.rows}
    for _ in range(MOST_TRIED):
        if not todo:
            break
        this = todo.pop(0)
        wrong = [t for t in this.troubles if t.kind != "across" or t.node not in norms]
        if not wrong and this.loss != FIXED:
            return this
        for number in dict.fromkeys((*wrong[0].rows, *wrong[0].others) if wrong else ()):
            fewer = this.rows - {number}
            if number in this.rows and fewer and fewer not in seen:
                seen.add(fewer)
                todo.append(followed(graph, fewer, None, numbers))
    return first


def is_of_model(trouble: Trouble) -> bool:
    """Check whether the model itself puts rows together, such as a norm over the batch: other rows would not help."""
    return trouble.hot and trouble.kind in ("across", "statistic")


class _Following:
    """One pass over a graph, in execution order."""

    def __init__(self, graph: Graph, rows: frozenset[int], scaling: Scaling | None, numbers: Numbers) -> None:
        self.graph, self.scaling, self.numbers = graph, scaling, numbers
        self.n_rows = next((graph.nodes[i].out.shape[0] for i in rows), 1)
        self.found = FollowedRows(rows)
        self.flows = self.found.flows
        loss = None if graph.loss is None else graph.outputs[graph.loss]
        self.loss = loss if isinstance(loss, Ref) else None
        self.wanted = _ancestors(graph, self.loss)
        self.drawn: set[int] = set()
        """Nodes that follow from random numbers, which nobody knows ahead of a step."""

    def run(self) -> FollowedRows:
        graph = self.graph
        for i, (node, rule) in enumerate(zip(graph.nodes, rules_of(graph), strict=True)):
            if node.kind != "op":
                for out, spec in enumerate(node.outs):
                    if spec is not None:
                        label = ROWS if i in self.found.rows else PLAIN
                        dims = tuple(((n, label if d == 0 else PLAIN),) for d, n in enumerate(spec.shape))
                        bit = 1 << i if node.kind == "input" else 0
                        is_row = i in self.found.rows
                        power = self._power_of(i, self.numbers[node.target]) if node.target in self.numbers else 0
                        self.flows[Ref(i, out)] = Flow(
                            PER_ROW if is_row else FIXED, dims, bit if is_row else 0, bit, power or 0
                        )  # fmt: skip
            elif rule is not None:
                if rule.random or any(ref.node in self.drawn for ref in node.refs):
                    self.drawn.add(i)
                self._operator(i, node, rule)
        if self.loss is not None:
            self.found.loss = self.flows[self.loss].kind
            if self.found.loss == SUM:
                self.found.scaled.add((-1, 0))
        return self.found

    def _trouble(self, kind: str, i: int, rows: int, others: int = 0, hot: bool = True) -> None:
        if i in self.wanted:
            where = self.graph.nodes[i].where
            self.found.troubles.append(Trouble(kind, i, _numbers(rows), _numbers(others), hot, where))

    def _operator(self, i: int, node: Node, rule: Rule) -> None:
        refs = node.refs
        flows = [self.flows[ref] for ref in refs]
        inputs = rows_from = 0
        for flow in flows:
            inputs |= flow.inputs
            rows_from |= flow.rows_from
        of_rows = [p for p, flow in enumerate(flows) if flow.kind == PER_ROW]
        summed = [p for p, flow in enumerate(flows) if flow.kind in (SUM, MEAN)]
        labels = self._labels(i, node, rule, flows)
        power = self._power(i, node, flows, rows_from)
        if not of_rows:
            kind = self._of_sums(i, node, rule, flows, summed, power) if summed else FIXED
            self._give(i, node, rule, labels, kind, rows_from, inputs, 0 if summed else power)
            return
        if summed:  # what is one number of the batch, for each of its rows
            self._trouble("statistic", i, rows_from)
        along = [f for f, parts in labels.items() if any(label == ROWS for _, label in parts)]
        hot = all(self.graph.nodes[refs[p].node].hot for p in of_rows)
        if len(along) > 1:
            self._trouble("two", i, rows_from, hot=hot)
        lost = not along or len(along) > 1
        for f in along:
            if self._puts_together(rule, f):
                lost = True
                self._not_along(i, flows, refs, rows_from)
        kind = self._reduced(i, node, rule, flows, along)
        self._give(i, node, rule, labels, kind, rows_from, inputs, power, lost, [flows[p] for p in of_rows])

    def _labels(self, i: int, node: Node, rule: Rule, flows: Sequence[Flow]) -> dict[str, tuple[Part, ...]]:
        """Return the parts that each factor of a call is made of."""
        labels: dict[str, tuple[Part, ...]] = {}
        of: dict[str, list[Flow]] = {}
        moved, own = node.target in SAME_NUMBERS, self._local_batch(node, rule, flows)
        for flow, term in zip(flows, rule.inputs, strict=False):
            for parts, dim in zip(flow.dims, term, strict=False):
                for f, some in divided(parts, [(f, rule.sizes.get(f, 1)) for f in dim]):
                    if not moved:
                        numbers = ROWS if own is not None and f == own[0] else PLAIN
                        some = tuple((n, numbers if label == OWN else label) for n, label in some)
                    if f not in labels:
                        labels[f], of[f] = some, [flow]
                        continue
                    labels[f], clash = joined(labels[f], some)
                    of[f].append(flow)
                    if clash:
                        fixed = others = rows = 0
                        for each in of[f]:
                            rows |= each.rows_from
                            if each.kind == FIXED:
                                others |= each.inputs
                                fixed += 1
                        hot = not fixed
                        self._trouble("beside", i, rows, others, hot)
        if own is not None:
            labels[own[1]] = tuple((n, PLAIN) for n, _ in labels[own[1]])
        return labels

    @staticmethod
    def _local_batch(node: Node, rule: Rule, flows: Sequence[Flow]) -> tuple[str, str] | None:
        """Return the factors of the numbers and of the rows of ``x[arange(rows), i]``, or None of others."""
        if node.target != INDEXED:
            return None
        at = [d for d, index in enumerate(node.args[1]) if index is not None]
        for position, d in enumerate(at, start=1):
            if [label for _, label in flows[0].dims[d]] != [ROWS] or not rule.inputs[0][d]:
                continue
            source = rule.inputs[0][d][0]
            for dim, parts in zip(rule.inputs[position], flows[position].dims, strict=False):
                if [label for _, label in parts] == [OWN] and rule.sizes.get(dim[0]) == rule.sizes[source]:
                    return dim[0], source
        return None

    def _puts_together(self, rule: Rule, factor: str) -> bool:
        """Check whether an operator cannot be cut along a factor without communication."""
        if factor in rule.whole:
            return rule.sizes.get(factor, 1) > 1
        lowering = rule.lowering([factor]) if rule.lowerings else None
        has_it = any(factor in dim for term in rule.outputs for dim in term)
        return lowering is not None and has_it and any(comm.factor == factor for comm in lowering.comm)

    def _not_along(self, i: int, flows: Sequence[Flow], refs: Sequence[Ref], rows_from: int) -> None:
        """Note an operator that does not take rows one by one, by an index of the caller's or by computation."""
        given = others = 0
        hot = True
        for position, (flow, ref) in enumerate(zip(flows, refs, strict=True)):
            if not self.graph.nodes[ref.node].hot and flow.inputs:
                hot = False
                is_data = position == 0 and len(refs) > 1  # what is picked from, or added to
                if not is_data and not self.graph.spec(ref).is_float:
                    given |= flow.inputs
                if flow.kind == FIXED:
                    others |= flow.inputs
        self._trouble("index" if given else "across", i, rows_from, given or others, hot)

    def _power(self, i: int, node: Node, flows: Sequence[Flow], rows_from: int) -> int:
        """Return the power of the number of microbatches by which a result scales."""
        name = _name(node)
        powers = [flow.power for flow in flows]
        if name in ("mul", "div", "full", "scalar_tensor"):
            literal = self._literal(i, node, name)
            if literal is None:
                self._trouble("statistic", i, rows_from)
                return 0
            sign = -1 if name == "div" else 1
            return literal + sum(powers[:1]) + sign * sum(powers[1:])
        if self.scaling is not None and self.scaling.get(i, 0) != 0:
            self._trouble("statistic", i, rows_from)
        if not any(powers):
            return 0
        same = {flow.power for flow in flows if flow.kind in (FIXED, PER_ROW)}
        keeps = name in KEEP_POWERS or node.target in SAME_NUMBERS
        if not keeps or (len(same) > 1 and name not in PICKING) or (name in SUMS and len(node.args) > len(flows)):
            self._trouble("statistic", i, rows_from)
            return 0
        return powers[0]

    def _literal(self, i: int, node: Node, name: str) -> int | None:
        """Return the power of the number that a node has; None if it follows from the rows in another way."""
        numbers = [x for x in node.args[1:] if isinstance(x, (int, float)) and not isinstance(x, bool)]
        if not numbers:
            return 0
        power = self._power_of(i, numbers[0])
        return power if power is None or name != "div" else -power

    def _power_of(self, i: int, number: float) -> int | None:
        """Return the power of a node's number; if it is not known, note the node if the number may have one."""
        if self.scaling is not None:
            return self.scaling.get(i, 0)
        number = abs(number)
        may = self.n_rows > 1 and any(n >= 1 and n % self.n_rows == 0 for n in (number, 1 / number if number else 0))
        if may and i in self.wanted:
            self.found.open_literals.append(i)
        return 0

    def _reduced(self, i: int, node: Node, rule: Rule, flows: Sequence[Flow], along: Sequence[str]) -> str:
        """Return the kind of the result of an operator that sums over rows, or takes their mean."""
        if node.target in LABELLED:
            if _argument(node, 3, "reduction", REDUCTION_MEAN) != REDUCTION_MEAN:
                return SUM
            target = node.args[1]
            if isinstance(target, Ref) and not self.graph.spec(target).is_float:
                weight = _argument(node, 2, "weight", None)
                if not self.flows[target].inputs:
                    return MEAN  # labels that forward makes are as many in each microbatch
                read = [ref.node for ref in (target, weight) if isinstance(ref, Ref)]
                if not any(self.graph.nodes[n].hot or n in self.drawn for n in read):
                    self.found.ratios.append(i)
                    return MEAN
                self._trouble("statistic", i, flows[0].rows_from)
            return MEAN
        if not any(f in lowering.factors for lowering in rule.lowerings for f in along):
            return SUM  # the pieces of a cut would be terms of a sum
        if _name(node) not in MEANS and not any(f in dim for term in rule.outputs for dim in term for f in along):
            self._trouble("statistic", i, _union(flows, range(len(flows))))
        return MEAN

    def _of_sums(
        self, i: int, node: Node, rule: Rule, flows: Sequence[Flow], summed: Sequence[int], power: int
    ) -> str:  # fmt: skip
        """Return the kind of the result of an operator on sums and means over rows alone."""
        kinds = {flows[p].kind for p in summed}
        group = next((group for group in rule.linear if group >= set(summed)), None)
        name = _name(node)
        if group is None and not (len(summed) == 1 and self._is_linear(node, name, summed[0])):
            self._trouble("statistic", i, _union(flows, summed))
            return MEAN
        affine = name in SUMS and (len(flows) > len(summed) or len(node.args) > len(flows))
        if len(kinds) > 1 or (affine and kinds == {SUM}):
            for p in summed:
                if flows[p].kind == SUM:
                    self.found.scaled.add((i, p))
            return MEAN
        return self._scaled_kind(i, kinds.pop(), power, _union(flows, summed))

    def _scaled_kind(self, i: int, kind: str, power: int, rows_from: int) -> str:
        """Return the kind of a sum over rows divided by their number, which is a mean, or the reverse."""
        if power == 0:
            return kind
        if (kind, power) in ((SUM, -1), (MEAN, 1)):
            return MEAN if kind == SUM else SUM
        self._trouble("statistic", i, rows_from)
        return kind

    @staticmethod
    def _is_linear(node: Node, name: str, position: int) -> bool:
        """Check whether an operator is linear, or affine, in one number of a loss, by what it is."""
        if name in ("mul", "div"):
            return position == 0 or name == "mul"
        return name in ("neg", "nan_to_num", *SUMS) or node.target in SAME_NUMBERS

    def _give(
        self, i: int, node: Node, rule: Rule, labels: Mapping[str, tuple[Part, ...]], kind: str, rows_from: int,
        inputs: int, power: int = 0, lost: bool = False, read: Sequence[Flow] = (),
    ) -> None:  # fmt: skip
        """Note the flows of an operator's outputs; where rows were lost, guess them by shapes."""
        new = ALIKE if rule.random or node.target in MAKE_ALIKE else PLAIN
        if node.target == "aten.arange.start_step" and node.args[0] == 0 and (len(node.args) < 3 or node.args[2] == 1):
            new = OWN
        terms = iter(rule.outputs)
        for out, spec in enumerate(node.outs):
            if spec is None:
                continue
            term = next(terms, ())
            dims = tuple(
                tuple(part for f in dim for part in self._kept(rule, f, labels, rule.sizes.get(f, 1), new))
                for dim in term
            )
            has_rows = any(label == ROWS for parts in dims for _, label in parts)
            this = kind
            if has_rows:
                this = PER_ROW
            elif lost:
                guess = next((flow.dims for flow in read if same_lead(flow, spec.shape)), None)
                if guess is not None:
                    dims = (guess[0], *(((n, PLAIN),) for n in spec.shape[1:]))
                    this = PER_ROW
                else:
                    dims = tuple(((n, PLAIN),) for n in spec.shape)
                    this = MEAN if node.hot else FIXED
            ref = Ref(i, out)
            if this in (SUM, MEAN):
                this, power = self._scaled_kind(i, this, power, rows_from), 0
            if this in (SUM, MEAN) and not node.hot and i not in self.drawn:
                if i in self.wanted and i not in self.found.ratios:
                    self.found.totals[ref] = this == MEAN
                self.flows[ref] = Flow(FIXED, dims, 0, inputs)
            else:
                self.flows[ref] = Flow(this, dims, rows_from if this != FIXED else 0, inputs, power)

    @staticmethod
    def _kept(
        rule: Rule, factor: str, labels: Mapping[str, tuple[Part, ...]], size: int, new: str
    ) -> tuple[Part, ...]:
        parts = labels.get(factor)
        if parts is None:
            return ((size, new),) if size > 1 else ()
        if factor in rule.whole:
            return tuple((n, PLAIN if label in (ALIKE, OWN) else label) for n, label in parts)
        return parts


def _ancestors(graph: Graph, ref: Ref | None) -> frozenset[int]:
    """Return the nodes that a tensor follows from."""
    if ref is None:
        return frozenset()
    wanted = {ref.node}
    for i in range(ref.node, -1, -1):
        if i in wanted:
            wanted.update(each.node for each in graph.nodes[i].refs)
    return frozenset(wanted)


def _union(flows: Sequence[Flow], positions: Sequence[int]) -> int:
    bits = 0
    for p in positions:
        bits |= flows[p].rows_from
    return bits


def _numbers(bits: int) -> tuple[int, ...]:
    return tuple(i for i in range(bits.bit_length()) if bits >> i & 1)


def _name(node: Node) -> str:
    """Return ``div`` for ``aten.div.Tensor``."""
    return node.target.split(".")[1] if "." in node.target else node.target


def _argument(node: Node, position: int, name: str, default: object) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
