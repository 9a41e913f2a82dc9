"""Units: into blocks of how many elements the operators of a graph may be cut, since others want such pieces.

A view from ``(h d)`` to heads h of width d that is cut along h has pieces of multiples of d elements. Where they are
not equal, ``torch.chunk`` would make other ones, so the linear layer in front has to be cut into blocks of d features
too. Blocks are found from such dims by following factors through operators, and dims from one operator to the next,
until there are no new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autopar.rules.notation import Rule
from autopar.rules.terms import Term
from autopar.words.graph import Graph

MOST_UNITS = 2
"""Different blocks that one factor may be cut into: each is one option more for the planner to weigh."""

def with_units(graph: Graph, rules: Sequence[Rule | None]) -> list[Rule | None]:
    """Return the rules with the blocks into which their factors may be cut (``Rule.units``).

    Args:
        rules: the rules of every node; equal calls share one object, and so they do in the result.
    """
    units: dict[tuple[int, str], set[int]] = {}
    links = _links(graph, rules)
    by_rule = {id(rule): rule for rule in rules if rule is not None}
    waiting = [
        (key, factor) for key, rule in by_rule.items()
        if key in links and rule.tied for factor in rule.in_blocks if factor in rule.tied
    ]  # fmt: skip
    while waiting:
        key, factor = waiting.pop()
        rule = by_rule[key]
        for term, d, block in _blocks(rule, factor, units.get((key, factor), set())):
            for there, of_theirs in links[key].get(term, ()):
                theirs = by_rule[there]
                blocks = _factor_cut(theirs, _term(theirs, of_theirs), d, block)
                if blocks is None:
                    continue
                name, unit = blocks
                sizes = units.setdefault((there, name), set())
                if unit not in sizes and len(sizes) < MOST_UNITS:
                    sizes.add(unit)
                    waiting.append((there, name))
    if not units:
        return list(rules)
    by_factor: dict[int, dict[str, tuple[int, ...]]] = {}
    for (key, name), sizes in units.items():
        by_factor.setdefault(key, {})[name] = tuple(sorted(sizes))
    changed = {key: _with_units(by_rule[key], of_rule) for key, of_rule in by_factor.items()}
    return [rule if rule is None else changed.get(id(rule), rule) for rule in rules]


def _with_units(rule: Rule, units: dict[str, tuple[int, ...]]) -> Rule:
    """Return the rule with units; equal units share one object, as equal calls do."""
    key = "units", tuple(sorted(units.items()))
    changed: Rule | None = rule.derived.get(key)
    if changed is None:
        changed = rule.derived[key] = replace(rule, units=units)
    return changed


def _term(rule: Rule, number: int) -> Term:
    """Return a term of a rule by its number, inputs first."""
    return (*rule.inputs, *rule.outputs)[number]


def _links(graph: Graph, rules: Sequence[Rule | None]) -> dict[int, dict[int, set[tuple[int, int]]]]:
    """Map each rule and term to the rules and terms about the same tensor."""
    links: dict[int, dict[int, set[tuple[int, int]]]] = {}
    for i, node in enumerate(graph.nodes):
        reader = rules[i]
        if reader is None:
            continue
        for k, ref in enumerate(node.refs):
            maker = rules[ref.node]
            if maker is None:
                continue
            at = len(maker.inputs) + sum(o is not None for o in graph.nodes[ref.node].outs[: ref.out])
            links.setdefault(id(maker), {}).setdefault(at, set()).add((id(reader), k))
            links.setdefault(id(reader), {}).setdefault(k, set()).add((id(maker), at))
    return links


def _blocks(rule: Rule, factor: str, units: set[int]) -> list[tuple[int, int, int]]:
    """List ``(term, dim, elements of a block)`` of the dims that a cut of a factor into uneven blocks would cut."""
    result = []
    for number, term in enumerate((*rule.inputs, *rule.outputs)):
        for d, dim in enumerate(term):
            if factor in dim:
                rest = prod(rule.sizes[f] for f in dim[dim.index(factor) + 1 :])
                of_axis = (*units, *((1,) if factor in rule.tied else ()))
                result += [(number, d, unit * rest) for unit in of_axis if unit * rest > 1]
    return result


def _factor_cut(rule: Rule, term: Term, d: int, block: int) -> tuple[str, int] | None:
    """Return the factor and block size that a cut of a dim into blocks cuts; None if impossible or not needed."""
    dim = [f for f in term[d] if rule.sizes[f] > 1]
    if not dim or dim[0] not in rule.in_blocks:
        return None
    unit, left = divmod(block, prod(rule.sizes[f] for f in dim[1:]))
    if left or unit < 2 or rule.sizes[dim[0]] % unit or rule.sizes[dim[0]] == unit:
        return None
    return dim[0], unit
