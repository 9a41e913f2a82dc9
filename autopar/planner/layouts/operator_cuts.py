"""Cuts of each operator by the words of a layout: one option for every axis of a mesh.

``data`` (and ``shard``, the part of it whose ranks share parameters) cuts the rows of the batch, ``context`` the
sequence. ``tensor`` cuts what Megatron-LM cuts (Shoeybi et al. 2019, arXiv:1909.08053, section 3): classes of features
that products with parameters make (their columns), that operators without communication go along, and that other
products with parameters sum over (their rows), or that a loss takes in shards; and the rows of the table of an
embedding. All else is replicated there or, with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2), sharded by sequence. ``expert`` cuts the rows of the batch, which are sent to routed experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import InfeasibleError, PlanError, first_few
from autopar.planner.layouts.dim_classes import DimClasses, Element, dim_of
from autopar.planner.layouts.stage_starts import block_of
from autopar.rules.experts.expert_block import BLOCK, FFN, TRAVEL
from autopar.rules.notation import Rule
from autopar.rules.option_names import GRADIENTS_PENDING, WHOLE
from autopar.rules.strategy import Strategy, can_be_cut, combine, options_of, why_not_cut
from autopar.words.graph import Graph, Node, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import INVARIANT, REPLICATED, Placement
from cost_models.joined_axes import JOINED

DATA, SHARD, CONTEXT, TENSOR, EXPERT = "data", "shard", "context", "tensor", "expert"
RING, ALLGATHER, ULYSSES = "ring", "allgather", "ulysses"
WAYS = (RING, ALLGATHER, ULYSSES)
"""Ways of an attention whose sequence is cut: keys and values travel round a ring, are gathered, or heads are exchanged
for places of the sequence (all-to-all)."""
PRODUCTS = ("matmul", "conv")
MOVES = ("none", "copy")
"""Kinds of operators that move numbers without changing them."""
PADDED_TO = 128
"""Megatron-LM pads a vocabulary to a multiple of this and of the ranks (``--make-vocab-size-divisible-by``): smaller
tables are kept whole."""
MOST_UNCUT = 0.1
"""The part of the work of the blocks' products with parameters that tensor parallelism may leave to every rank
(routers, the low-rank projections of latent attention); more is refused."""


@dataclass(eq=False)
class OperatorCuts:
    """Options of all operators of a microbatch's graph.

    Attributes:
        classes: the classes of its dims.
        text: the layout, for messages.
        sequence_parallel: norms and the residual are cut by sequence on the axis ``tensor``.
        way: the way to cut attention on the axis ``context``.
        experts_travel: rows travel to routed experts over ``tensor``, too, where else every rank has a piece of the
            features of each.
        joined: the ranks of ``expert`` and ``tensor`` are neighbours, and rows travel over both in one exchange.
    """

    classes: DimClasses
    text: str
    sequence_parallel: bool = False
    way: str = RING
    experts_travel: bool = False
    joined: bool = False
    refused: dict[Element, str] = field(default_factory=dict, init=False)
    """Why classes of features are not cut over ``tensor``."""

    @property
    def graph(self) -> Graph:
        """The graph whose operators are cut."""
        return self.classes.graph

    @property
    def rules(self) -> Sequence[Rule | None]:
        """The rule of each operator."""
        return self.classes.rules

    # -- what an operator is

    @cached_property
    def _products(self) -> dict[int, tuple[frozenset[str], frozenset[str]]]:
        """Factors of the features that products with parameters make, and of those that they sum over."""
        found = {}
        for i, node in self.graph.of_kind("op"):
            rule = self.rules[i]
            if rule is None or rule.kind not in PRODUCTS or not node.hot:
                continue
            acts, params = self._sides(node, rule)
            out = _factors(rule.outputs[:1])
            if acts and params:
                found[i] = frozenset(params & out - acts), frozenset(params & acts - out)
        return found

    def _sides(self, node: Node, rule: Rule) -> tuple[set[str], set[str]]:
        """Return the factors of tensors that follow from inputs, and of those that follow from parameters alone."""
        sides: tuple[set[str], set[str]] = set(), set()
        for ref, term in zip(node.refs, rule.inputs, strict=False):
            sides[ref.node not in self.graph.from_inputs].update(_factors([term]))
        return sides

    def _factor(self, i: int, among: frozenset[Element], size: int) -> str | None:
        """Return the factor of an operator in one of some classes that an axis may cut without communication."""
        rule = self.rules[i]
        assert rule is not None
        for term in (*rule.outputs, *rule.inputs):
            for dim in term:
                for f in dim:
                    may = f in rule.cuttable and not why_not_cut(rule, f, [(size, 0)])
                    if may and self.classes.root((i, f)) in among:
                        return f
        return None

    # -- one axis each

    def of_axis(self, axis: str, size: int) -> dict[int, str]:
        """Return the option of every operator that depends on a parameter, by node, on one axis."""
        cuts = {
            DATA: self._rows, SHARD: self._rows, EXPERT: self._rows_to_experts, CONTEXT: self._places,
            TENSOR: self._features,
        }  # fmt: skip
        return self._completed(cuts[axis](size))

    def _hot(self) -> list[int]:
        return [i for i, node in self.graph.of_kind("op") if node.hot]

    def _rows(self, size: int) -> dict[int, str]:
        cut = {}
        for i in self._hot():
            f = self._factor(i, self.classes.batch, size)
            if f is not None:
                cut[i] = f
        if size > 1:
            because = "are not made of the rows of the batch alone"
            self._check_all(cut, f"dp={size} would have every rank compute", because)
        return cut

    @cached_property
    def _experts(self) -> dict[int, Rule]:
        """The operators that are routed experts."""
        return {i: self._rule(i) for i, node in self.graph.of_kind("op") if node.target == BLOCK}

    def _rows_to_experts(self, size: int) -> dict[int, str]:
        if not self._experts:
            raise PlanError(f"{self.text}: ep needs routed experts, the model has none; leave ep out")
        return {**self._rows(size), **self._travelling(size, "ep")}

    def _travelling(self, size: int, word: str) -> dict[int, str]:
        """Return routed experts that are sharded, to which rows are sent."""
        for i, rule in self._experts.items():
            if TRAVEL not in rule.cuttable or rule.sizes[TRAVEL] % size:
                raise PlanError(
                    f"{self.text}: {rule.sizes[TRAVEL]} experts of {self.graph.nodes[i].where} do not divide over "
                    f"{word}={size}; use a divisor"
                )
        return dict.fromkeys(self._experts, TRAVEL)

    def _experts_in_pieces(self, size: int) -> dict[int, str]:
        """Return the options of routed experts over ``tensor``: rows are sent, or features are sharded."""
        if self.experts_travel:
            travelling = self._travelling(size, "tp")
            return {i: name + JOINED for i, name in travelling.items()} if self.joined else travelling
        for i, rule in self._experts.items():
            if FFN not in rule.cuttable or rule.sizes[FFN] % size:
                n = rule.sizes.get(FFN, 1)
                raise PlanError(
                    f"{self.text}: the {n} features of each expert of {self.graph.nodes[i].where} do not divide over "
                    f"tp={size}; write etp=1, with ep a multiple of tp"
                )
        return dict.fromkeys(self._experts, FFN)

    def _places(self, size: int) -> dict[int, str]:
        cut = {}
        for i in self._hot():
            rule = self.rules[i]
            assert rule is not None
            f = self._of_attention(i, rule, size) if rule.kind == "attention" else None
            f = f or self._factor(i, self.sequences, size)
            if f is not None:
                cut[i] = f
        if not cut:
            raise PlanError(f"{self.text}: cp={size} cuts sequences, and the model has none; leave cp out")
        self._check_all(
            cut, f"cp={size} would have every rank compute", "take rows and places of a sequence as one dim, which is "
            "cut by rows alone: use dp=1 with mbs=1, or a model that keeps both dims",
        )  # fmt: skip
        return cut

    def _check_all(self, cut: Mapping[int, str], would: str, because: str) -> None:
        """Refuse an axis along which much of the work of products with parameters is not cut."""
        work = {i: self._rule(i).flops_at({}) for i in self._products}
        left = sorted((i for i in work if i not in cut), key=lambda i: -work[i])
        share = sum(work[i] for i in left) / (sum(work.values()) or 1.0)
        if share > MOST_UNCUT:
            which = first_few([self.graph.nodes[i].where for i in left], 2)
            raise PlanError(f"{self.text}: {would} {share:.0%} of the matrix products: {which}; these {because}")

    def _of_attention(self, i: int, rule: Rule, size: int) -> str | None:
        """Return the option of an attention over ``context``."""
        node, wanted = self.graph.nodes[i], self.way
        if wanted == RING and RING in rule.absent:
            wanted = ALLGATHER  # queries that meet other keys: those are few, and gathered
        if wanted == RING and RING in rule.cuttable:
            return RING
        if wanted == ULYSSES:
            term = rule.outputs[0]
            heads = next((f for f in term[-3] if rule.sizes[f] > 1), None) if len(term) > 2 else None
            if heads is not None and heads in rule.cuttable and not why_not_cut(rule, heads, [(size, 0)]):
                return heads
            n = rule.sizes[heads] if heads is not None else 1
            raise PlanError(
                f"{self.text}: cp={size}:{ULYSSES} exchanges heads, of which {node.where} has {n}; use a cp that "
                f"divides them, or cp={size}:{RING}"
            )
        if wanted == RING:
            raise PlanError(
                f"{self.text}: cp={size}:{RING}: {node.where} cannot be cut so; write cp={size}:{ALLGATHER}"
            )
        return None

    # -- features

    def _features(self, size: int) -> dict[int, str]:
        cut: dict[int, str] = {**self._tables(size), **self._experts_in_pieces(size)}
        for root, factors in self._by_first_product():
            why = self._why_not(root, factors, cut, size)
            if why:
                self.refused[root] = why
            else:
                cut |= {i: f for i, f in factors if self.graph.nodes[i].hot}
        self._check_cut(cut, size)
        if self.sequence_parallel:
            for i in self._hot():
                if i not in cut and i in self.graph.from_inputs:
                    f = self._factor(i, self.sequences, size)
                    if f is not None and not self._lowered(i, f):
                        cut[i] = f
        return cut

    def _lowered(self, i: int, factor: str) -> bool:
        rule = self.rules[i]
        return rule is not None and any(factor in lowering.factors for lowering in rule.lowerings) and not rule.random

    def _tables(self, size: int) -> dict[int, str]:
        """Return embeddings of inputs, whose table is cut by rows: each rank looks up what it has."""
        tables = {}
        for i in self._hot():
            node, rule = self.graph.nodes[i], self.rules[i]
            if not node.target.startswith("aten.embedding.") or rule is None or len(node.refs) != 2:
                continue
            table, index = node.refs
            if index.node in self.graph.from_inputs and table.node not in self.graph.from_inputs:
                if rule.sizes.get("v", 0) >= PADDED_TO * size and "v" in rule.cuttable:
                    tables[i] = "v"
        return tables

    def _by_first_product(self) -> list[tuple[Element, list[Element]]]:
        """Return classes with features that a product makes, in the order of the first one."""
        roots = dict.fromkeys(self.classes.root((i, f)) for i, (made, _) in self._products.items() for f in made)
        return [(root, self.classes.factors_of[root]) for root in roots]

    def _why_not(self, root: Element, factors: Sequence[Element], cut: Mapping[int, str], size: int) -> str:
        """Return why a class of features cannot be cut as Megatron-LM cuts them; nothing if it can."""
        if root in self.classes.batch or root in self.classes.given:
            return "it is a dim of the model's inputs"
        made = ends = 0
        seen: dict[int, str] = {}
        for i, f in factors:
            node, rule = self.graph.nodes[i], self.rules[i]
            if not node.hot or rule is None:
                continue
            if seen.setdefault(i, f) != f:
                return f"{node.where} has two dims of it"
            if i in cut:
                return f"{node.where} is cut by '{cut[i]}'"
            columns, rows = self._products.get(i, ((), ()))
            made += f in columns
            ends += f in rows
            if f not in rule.cuttable:
                return f"{node.where} takes all of them ({rule})"
            why = why_not_cut(rule, f, [(size, 0)])
            if why:
                return f"{node.where}: '{f}' {why}"
            if f in columns or f in rows:
                continue
            if self._ends_loss(i, f):
                ends += 1
                continue
            if self._lowered(i, f) or f not in _factors(rule.outputs):
                return f"{node.where} takes all of them ({rule})"
            if i in self.graph.from_inputs and f not in self._sides(node, rule)[0] and rule.kind not in MOVES:
                return f"{node.where} makes them"
        return "" if made and ends else "no product sums over them"

    def _ends_loss(self, i: int, factor: str) -> bool:
        """Return whether a loss takes a factor in shards and gives a replicated result."""
        rule = self.rules[i]
        return rule is not None and factor not in _factors(rule.outputs) and (
            rule.out_as.get(factor) == (INVARIANT,) * len(rule.outputs)
        )  # fmt: skip

    def _check_cut(self, cut: Mapping[int, str], size: int) -> None:
        """Refuse where much of the work of the model's blocks would be done by every rank."""
        inside = {i for i in self._products if block_of(self.graph.nodes[i].module)} or set(self._products)
        work = {i: self._rule(i).flops_at({}) for i in inside}
        left = {
            i: n for i, n in work.items()
            if i not in self._experts and cut.get(i) not in {f for part in self._products[i] for f in part}
        }  # fmt: skip
        total = sum(work.values())
        if not total or sum(left.values()) <= MOST_UNCUT * total:
            return
        most = sorted(left, key=lambda i: -left[i])
        reasons = []
        for i in most:
            made, _ = self._products[i]
            why = next((w for f in made if (w := self.refused.get(self.classes.root((i, f))))), "it makes no features")
            reasons.append(f"{self.graph.nodes[i].where}: {why}")
        raise PlanError(
            f"{self.text}: tp={size} would leave {sum(left.values()) / total:.0%} of the matrix products of the blocks "
            f"to every rank (at most {MOST_UNCUT:.0%} are):\n  " + "\n  ".join(list(dict.fromkeys(reasons))[:4])
            + "\n  write a tp that divides heads and features, or a model whose products make what is cut alike (q, k "
            "and v one Linear each)"
        )

    # -- sequences

    @cached_property
    def sequences(self) -> frozenset[Element]:
        """The classes of the dims next to features of the residual, apart from the batch's."""
        classes, graph = self.classes, self.graph
        residual = {
            classes.root((i, f)) for i, (made, summed) in self._products.items() for f in (*made, *summed)
        } - classes.batch  # fmt: skip
        found: set[Element] = set()
        for i in self._hot():
            if i not in graph.from_inputs:
                continue
            for k, spec in enumerate(graph.nodes[i].outs):
                dims = [classes.root(dim_of(Ref(i, k), d)) for d in range(len(spec.shape))] if spec is not None else []
                if dims and dims[-1] in residual:
                    found.update(d for d, n in zip(dims[:-1], spec.shape, strict=False) if n > 1)  # type: ignore[union-attr]
        return frozenset(found - residual - classes.batch)

    # -- what is not cut

    def _completed(self, cut: dict[int, str]) -> dict[int, str]:
        """Return the options of all operators on an axis.

        Sums stay pending where numbers are only moved, and gradients where all readers leave them pending; functions of
        parameters make what their readers want.
        """
        graph, hot = self.graph, self._hot()
        options = {i: options_of(graph, graph.nodes[i], self._rule(i)) for i in hot}
        names: dict[int, str] = {}
        made: dict[Ref, Placement] = {}
        for i in hot:
            if i not in graph.from_inputs and i not in cut:
                continue
            names[i] = cut[i] if i in cut and cut[i] in options[i] else self._with_sums(i, made)
            tensors = [k for k, spec in enumerate(graph.nodes[i].outs) if spec is not None]
            made.update({Ref(i, k): p for k, p in zip(tensors, options[i][names[i]].outs, strict=False)})
        wanted: dict[Ref, set[Placement]] = {out: {INVARIANT} for out in graph.outputs if isinstance(out, Ref)}
        for i in reversed(hot):
            node, rule = graph.nodes[i], self._rule(i)
            goals = set().union(*(wanted.get(Ref(i, k), set()) for k in range(len(node.outs))))
            if i not in names:
                names[i] = next((o.name for o in options[i].values() if goals == set(o.outs) and not any(
                    p.is_pending for p in (*o.ins, *o.outs))), WHOLE)  # fmt: skip
            elif names[i] == WHOLE and goals == {REPLICATED} and rule.kind in MOVES and len(node.refs) == 1:
                names[i] = GRADIENTS_PENDING if GRADIENTS_PENDING in options[i] else WHOLE
            for ref, placement in zip(node.refs, options[i][names[i]].ins, strict=False):
                wanted.setdefault(ref, set()).add(placement)
        return names

    def _rule(self, i: int) -> Rule:
        rule = self.rules[i]
        assert rule is not None
        return rule

    def _with_sums(self, i: int, made: Mapping[Ref, Placement]) -> str:
        """Return the option of an operator that is not cut, which may let pending sums through.

        It does if it is their only reader, linear in just these, and gives no more bytes; or if it gives a single
        number.
        """
        node, rule = self.graph.nodes[i], self._rule(i)
        pending = {p for p, ref in enumerate(node.refs) if ref in made and made[ref].is_pending}
        alone = all(len(self.graph.consumers[node.refs[p]]) == 1 for p in pending)
        fewest = min((self.graph.spec(node.refs[p]).n_bytes for p in pending), default=0)
        if pending and ((alone and node.out.n_bytes <= fewest) or not node.out.shape):
            for number, group in enumerate(rule.linear):
                same = pending == group if node.out.shape else pending <= group
                if same and f"P{number}" in options_of(self.graph, node, rule):
                    return f"P{number}"
        return WHOLE


def strategy_of(graph: Graph, node: Node, rule: Rule, names: Sequence[str], mesh: Mesh, text: str) -> Strategy:
    """Return the strategy of an operator on a mesh from its options, one for each axis."""
    offered = options_of(graph, node, rule)
    options = [offered.get(name, offered[WHOLE]) for name in names]
    if not can_be_cut(rule, options, mesh):
        cuts = ", ".join(f"'{n}' over {axis}={size}" for n, (axis, size) in zip(names, mesh, strict=True) if size > 1)
        sizes = ", ".join(f"{f}={n}" for f, n in rule.sizes.items())
        raise InfeasibleError(f"{text}: {node.where} cannot be cut by {cuts}; its factors are {first_few([sizes])}")
    return combine(options)


def _factors(terms: Sequence[Sequence[Sequence[str]]]) -> set[str]:
    return {f for term in terms for dim in term for f in dim}
