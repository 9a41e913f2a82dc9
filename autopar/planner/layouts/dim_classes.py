"""Classes of dims: which dims of a model's tensors, and which factors of its operators, are the same thing.

An operator's rule says of which factors the dims of its tensors consist. Dims that share a factor belong together, and
so do the same dim of one tensor where it is made and where it is read. So a graph falls into classes: the rows of the
batch, the places of a sequence, the features that a residual carries, those between two matrix products, the heads of
an attention, the vocabulary. Only the major factor of a dim counts, since that alone may be cut. Parameters do not
connect their readers: two products with one weight are two products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.rules.notation import Rule
from autopar.words.graph import Graph, Ref

Element = tuple[int, str]
"""A factor of an operator, ``(node, factor)``; or a dim of a tensor, ``(node, ":<output>:<dim>")``."""


def dim_of(ref: Ref, d: int) -> Element:
    """Return the element that stands for dim ``d`` of a tensor."""
    return ref.node, f":{ref.out}:{d}"


@dataclass(eq=False)
class DimClasses:
    """Classes of the factors of operators and the dims of tensors of a graph.

    Attributes:
        graph: the graph of a microbatch.
        rules: its operators' rules.
        rows: inputs that have the rows of the batch in their first dim, by node number.
    """

    graph: Graph
    rules: Sequence[Rule | None]
    rows: frozenset[int]
    _parent: dict[Element, Element] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for i, node in self.graph.of_kind("op"):
            rule = self.rules[i]
            if rule is None:
                continue
            for ref, term in zip(node.refs, rule.inputs, strict=False):
                if self.graph.nodes[ref.node].kind != "param":
                    self._connect(i, rule, ref, term)
            outs = [k for k, spec in enumerate(node.outs) if spec is not None]
            for k, term in zip(outs, rule.outputs, strict=False):
                self._connect(i, rule, Ref(i, k), term)

    def _connect(self, i: int, rule: Rule, ref: Ref, term: Sequence[Sequence[str]]) -> None:
        for d, dim in enumerate(term):
            major = next((f for f in dim if rule.sizes[f] > 1), None)
            if major is not None:
                self._unite((i, major), dim_of(ref, d))

    def _unite(self, one: Element, other: Element) -> None:
        self._parent[self.root(one)] = self.root(other)

    def root(self, element: Element) -> Element:
        """Return the element that stands for the class of another one."""
        parent = self._parent
        top = element
        while parent.get(top, top) != top:
            top = parent[top]
        while parent.get(element, element) != top:
            parent[element], element = top, parent[element]
        return top

    @cached_property
    def batch(self) -> frozenset[Element]:
        """The classes of the rows of the batch."""
        return frozenset(self.root(dim_of(Ref(i), 0)) for i in self.rows)

    @cached_property
    def factors_of(self) -> dict[Element, list[Element]]:
        """The factors of operators in each class, in execution order, by the class."""
        found: dict[Element, list[Element]] = {}
        for i, _ in self.graph.of_kind("op"):
            rule = self.rules[i]
            for f in self._factors(rule):
                found.setdefault(self.root((i, f)), []).append((i, f))
        return found

    @staticmethod
    def _factors(rule: Rule | None) -> Iterator[str]:
        """Yield the factors of a rule that are in its terms and have more than one element."""
        if rule is not None:
            terms = (*rule.inputs, *rule.outputs)
            yield from dict.fromkeys(f for term in terms for dim in term for f in dim if rule.sizes[f] > 1)

    @cached_property
    def given(self) -> frozenset[Element]:
        """The classes that dims of the model's inputs are in."""
        return frozenset(
            self.root(dim_of(Ref(i), d))
            for i, node in self.graph.of_kind("input") for d in range(len(node.out.shape))
        )  # fmt: skip
