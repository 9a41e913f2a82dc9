"""The registry of rules: operator name -> function that makes the :class:`Rule` of one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import RuleError
from autopar.rules.block_units import with_units
from autopar.rules.function import PREFIX, has_rule, rule_of_function
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call, call_of
from autopar.rules.terms import Term
from autopar.words.graph import Graph, Node
from autopar.words.trees import PyTree

RuleFn = Callable[[Call], Rule]


@dataclass(frozen=True)
class Sample:
    """Inputs with which a rule is proved: ``args`` are shapes ``(4, 8)`` wrapped in :class:`T`, or literals."""

    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]


@dataclass(frozen=True)
class T:
    """A random tensor of a sample.

    Normal floats, or uniform ones between ``low`` and ``high`` where given; integers from ``low`` to below ``high``.
    """

    shape: tuple[int, ...]
    dtype: str = "float64"
    high: float = 0
    grad: bool = True
    low: float = 0


RULES: dict[str, RuleFn] = {}
SAMPLES: dict[str, list[Sample]] = {}


def sample(*args: PyTree, **kwargs: PyTree) -> Sample:
    """Make a :class:`Sample`."""
    return Sample(args, kwargs)


def rule(*targets: str, samples: list[Sample] | None = None) -> Callable[[RuleFn], RuleFn]:
    """Register a rule for operators such as ``"aten.linear.default"``.

    ``samples`` prove the first of them, and may be registered for the others with :func:`prove_with`.
    """

    def register(fn: RuleFn) -> RuleFn:
        for target in targets:
            assert target not in RULES, f"two rules for {target}"
            RULES[target] = fn
        if samples:
            prove_with(targets[0], *samples)
        return fn

    return register


def prove_with(target: str, *samples: Sample) -> None:
    """Add samples that the proof of ``target``'s rule runs."""
    SAMPLES.setdefault(target, []).extend(samples)


def replicated(call: Call) -> Rule:
    """Make the rule of an operator without a rule: nothing may be cut.

    Of an operator that is not torch's own the backward is unknown too, and may be no linear function of the gradient.
    """
    sizes: dict[str, int] = {}

    def term(shape: tuple[int, ...]) -> Term:
        dims = []
        for n in shape:
            name = f"f{len(sizes)}"
            sizes[name] = n
            dims.append((name,))
        return tuple(dims)

    inputs = tuple(term(s.shape) for s in call.ins)
    outputs = tuple(term(o.shape) for o in call.outs if o is not None)
    return Rule(
        sizes, inputs, outputs, whole=frozenset(sizes), saves=tuple(range(len(inputs))), saves_out=True,
        whole_gradients=not call.target.startswith("aten."),
    )  # fmt: skip


_others: list[RuleFn] = [replicated]


def ask_for_others(fn: RuleFn) -> None:
    """Let ``fn`` make the rules of operators without a registered rule, which are replicated until then."""
    _others.append(fn)


def rule_for(call: Call) -> Rule:
    """Return the rule of one call: the registered one, else what is discovered (:mod:`autopar.rules.discovery`).

    Raises:
        RuleError: the operator's rule does not understand this call; the message names the operator.
    """
    fn = RULES.get(call.target)
    if fn is None and not call.target.startswith(PREFIX):
        return _others[-1](call)
    try:
        return rule_of_function(call, replicated) if fn is None else fn(call)
    except RuleError as error:
        raise RuleError(f"{call.target}: {error}") from error


MOST_SHARED = 50_000
"""Rules that are remembered at most."""
_shared: dict[object, Rule] = {}


def _shared_rule(key: object, call: Call) -> Rule:
    """Return the rule of a call, one object for equal calls of all graphs if a registered function makes it.

    A search asks for the rules of the same blocks thousands of times. What is discovered may change.

    Args:
        key: equal for equal calls.
    """
    fn = RULES.get(call.target)
    if fn is None:
        return rule_for(call)
    rule_made = _shared.get((fn, key))
    if rule_made is None:
        if len(_shared) >= MOST_SHARED:
            _shared.clear()
        rule_made = _shared[fn, key] = rule_for(call)
    return rule_made


def drawing(graph: Graph) -> Graph | None:
    """Return the graph if it has random operators."""
    return graph if any(rule is not None and rule.random for rule in rules_of(graph)) else None


def rules_of(graph: Graph, representative: Sequence[int] | None = None) -> list[Rule | None]:
    """Return the rule of every node, None for parameters, buffers and inputs; equal calls share one object.

    ``representative`` gives for every node an earlier one (or itself) that makes the same call.
    """
    cache: dict[Any, Rule] = {}
    result: list[Rule | None] = []
    for i, node in enumerate(graph.nodes):
        if node.kind != "op":
            result.append(None)
            continue
        same_as = i if representative is None else representative[i]
        same_as = graph.alike[i] if same_as == i else same_as
        if same_as != i:
            result.append(result[same_as])
            continue
        call = call_of(node, graph.spec)
        literals = repr(call.args), repr(sorted(call.kwargs.items()))
        key = (call.target, *literals, call.ins, call.outs, call.load, call.narrow)
        if key not in cache:
            try:
                cache[key] = _shared_rule(key, call)
            except RuleError as error:
                raise RuleError(f"{node.where}: {error}") from error
        result.append(cache[key])
    return with_units(graph, result)


def source_of_rule(node: Node, rule: Rule) -> str:
    """Return the origin of an op's rule: ``written``, ``discovered``, or ``none`` if it is replicated without one."""
    if node.target.startswith(PREFIX):
        return "written" if has_rule(node.args[0]) else "none"
    if node.target in RULES:
        return "written"
    return "discovered" if rule.cuttable or rule.linear else "none"
