"""The space of choices: what every op of a graph can do on every axis of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from autopar.graph import Graph, Node
from autopar.placements import Mesh, State, fits
from autopar.rules.notation import Option, Rule, axis_options


@dataclass(frozen=True, slots=True)
class Strategy:
    """One option per axis, and the states of the op's tensors that follow."""

    options: tuple[Option, ...]
    ins: tuple[State, ...]
    outs: tuple[State, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Option name per axis, as plans store them."""
        return tuple(option.name for option in self.options)


def grads_of(graph: Graph, node: Node) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Whether gradients flow through each input and each output tensor of ``node``."""
    ins = tuple(node.needs_grad and graph.nodes[r.node].needs_grad and graph.spec(r).is_float for r in node.refs)
    outs = tuple(node.needs_grad and o.is_float for o in node.outs if o is not None)
    return ins, outs


def combine(options: Sequence[Option]) -> Strategy:
    """The strategy of one option per axis."""
    n_in, n_out = len(options[0].ins), len(options[0].outs)
    return Strategy(
        tuple(options),
        tuple(tuple(o.ins[i] for o in options) for i in range(n_in)),
        tuple(tuple(o.outs[i] for o in options) for i in range(n_out)),
    )


def node_options(graph: Graph, node: Node, rule: Rule) -> list[Option]:
    """The options of one op on one axis."""
    return axis_options(rule, *grads_of(graph, node))


def strategies(graph: Graph, node: Node, rule: Rule, mesh: Mesh) -> list[Strategy]:
    """Every strategy of one op whose pieces are equal; on an axis of size 1 the op is whole."""
    options = node_options(graph, node, rule)
    choices = [options if size > 1 else options[:1] for _, size in mesh]
    made = (_strategy(graph, node, rule, mesh, picked) for picked in product(*choices))
    return [strategy for strategy in made if strategy is not None]


def strategy_of(graph: Graph, node: Node, rule: Rule, mesh: Mesh, names: Sequence[str]) -> Strategy | None:
    """The strategy of an op whose options have these names, one per axis; None if its pieces would not be equal."""
    options = {option.name: option for option in node_options(graph, node, rule)}
    if any(name not in options for name in names):
        return None
    return _strategy(graph, node, rule, mesh, [options[name] for name in names])


def _strategy(graph: Graph, node: Node, rule: Rule, mesh: Mesh, picked: Sequence[Option]) -> Strategy | None:
    cut: dict[str, int] = {}
    for option, (_, size) in zip(picked, mesh, strict=True):
        if option.name in rule.sizes:
            cut[option.name] = cut.get(option.name, 1) * size
    if any(rule.sizes[f] % n for f, n in cut.items()):
        return None
    strategy = combine(picked)
    outs = [o for o in node.outs if o is not None]
    shapes = [*(graph.spec(r).shape for r in node.refs), *(o.shape for o in outs)]
    states = (*strategy.ins, *strategy.outs)
    return strategy if all(fits(shape, s, mesh) for shape, s in zip(shapes, states, strict=True)) else None
