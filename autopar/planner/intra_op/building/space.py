"""The space of choices: what every op of a graph can do on every axis of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from autopar.rules.axis_options import Option
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy, blocks_named, can_be_cut, combine, ends_gradients, grads_of, options_of
from autopar.words.exchanges import exchange_written
from autopar.words.graph import Graph, Node
from autopar.words.meshes import Mesh
from autopar.words.shards import fits


def strategies(graph: Graph, node: Node, rule: Rule, mesh: Mesh) -> list[Strategy]:
    """Return every strategy of one op, of those that differ in their exchanges one (:func:`in_all_ways`).

    On an axis of size 1 the op is whole.
    """
    key = mesh, grads_of(graph, node), ends_gradients(graph, node)
    latest: tuple[object, list[Strategy]] = rule.derived.get("strategies", (None, []))
    if latest[0] != key:  # one mesh is looked at after the other, and those of all of them would take much memory
        latest = rule.derived["strategies"] = key, _every(graph, node, rule, mesh)
    return list(latest[1])


def _every(graph: Graph, node: Node, rule: Rule, mesh: Mesh) -> list[Strategy]:
    options = [o for o in options_of(graph, node, rule, rule.blocks_on(mesh)).values() if not exchange_written(o.name)]
    choices = [options if size > 1 else options[:1] for size in mesh.sizes]
    every = (_strategy(graph, node, rule, mesh, picked) for picked in product(*choices))
    return [strategy for strategy in every if strategy is not None]


def in_all_ways(graph: Graph, node: Node, rule: Rule, mesh: Mesh, strategy: Strategy) -> list[Strategy]:
    """Return a strategy and those that are like it but for how they make their exchanges."""
    if not any(name in rule.ways for name in strategy.names):
        return [strategy]
    options = options_of(graph, node, rule, rule.blocks_on(mesh))
    choices = [[o, *(options[o.name + way] for way in rule.ways.get(o.name, ()))] for o in strategy.options]
    every = (_strategy(graph, node, rule, mesh, picked) for picked in product(*choices))
    return [like_it for like_it in every if like_it is not None]


def fitting_strategy(
    graph: Graph, node: Node, rule: Rule, mesh: Mesh, names: Sequence[str]
) -> Strategy | None:
    """Return the strategy of an op whose options are called `names`, one per axis; None if it cannot be cut so."""
    options = options_of(graph, node, rule, blocks_named(rule, names))
    if any(name not in options for name in names):
        return None
    return _strategy(graph, node, rule, mesh, [options[name] for name in names])


def _strategy(graph: Graph, node: Node, rule: Rule, mesh: Mesh, picked: Sequence[Option]) -> Strategy | None:
    if not can_be_cut(rule, picked, mesh):
        return None
    strategy = combine(picked)
    outs = [o for o in node.outs if o is not None]
    shapes = [*(graph.spec(r).shape for r in node.refs), *(o.shape for o in outs)]
    states = (*strategy.ins, *strategy.outs)
    return strategy if all(fits(shape, s, mesh) for shape, s in zip(shapes, states, strict=True)) else None
