"""Rules of operators that nobody wrote a rule for, found by trying the operator on small tensors.

:mod:`.safe_calls` calls operators without harm to this process; :mod:`.small` makes a call small; :mod:`.cuts` finds
cuts in two that give the whole operator's outputs; :mod:`.finding` makes factors of them and proves the rule;
:mod:`.proposal` is what was found, and the rule of a call that follows from it; :mod:`.remembered` keeps it in files;
:mod:`.own_flops` counts what an operator computes.

Importing this package has :func:`autopar.rules.registry.rule_for` ask it. ``AUTOPAR_DISCOVER=0`` turns that off.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from autopar.rules import registry
from autopar.rules.discovery.finding import discover
from autopar.rules.discovery.own_flops import flops_of
from autopar.rules.discovery.proposal import Discovered, rule_from
from autopar.rules.function import PREFIX
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call, call_of
from autopar.words.graph import Graph, Node

_found: dict[Any, Discovered] = {}


def found_of(call: Call) -> Discovered:
    """Return what discovery finds of a call; each call is tried once in a process."""
    if os.environ.get("AUTOPAR_DISCOVER") == "0":
        return Discovered(why_whole="is not tried: AUTOPAR_DISCOVER=0 turns that off")
    key = (call.target, repr(call.args), repr(sorted(call.kwargs.items())), call.ins, call.outs)
    if key not in _found:
        _found[key] = discover(call)
    return _found[key]


def why_not_found(node: Node, graph: Graph) -> str:
    """Say why an op of a graph has no rule, to follow its name; empty for an op that is never tried."""
    return "" if node.target.startswith(PREFIX) else found_of(call_of(node, graph.spec)).why_whole


def discovered_rule(call: Call) -> Rule:
    """Return the rule of an operator that has none; everything is replicated where nothing is found."""
    rule = rule_from(call, found_of(call))
    return replace(rule, flops=flops_of(call, rule))


registry.ask_for_others(discovered_rule)

__all__ = ["discovered_rule", "found_of", "why_not_found"]
