"""The step of a program as one graph: forward and backward, operators and collectives.

Every call of a lowered program is emitted with its :mod:`adjoint <.adjoints>`; then the calls are gone through in
reverse order, and the gradients that have arrived at each are given to its backward. Nodes have in ``meta``:

========= ==============================================================================================================
val       the result, a tensor without values
late      it is of the backward
call      the name of the call of the lowered program that it is of
segment   the number of its segment, if it is recomputed in the backward
buffer    of an input: ``changing`` for one that operators may write to though they do not say so (running means)
acts      it is to run though nobody may read its result
guard     gradients of which one must have come for it to run (a branch that goes the other way has none)
========= ==============================================================================================================

What the lowered program says about memory (its segments, what it frees until the backward) is noted in
:class:`StepGraph` for the passes; the calls that do it under autograd are left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from autopar.lower.freed_tensors import backwards_of, give_up
from autopar.lower.offloaded import settle
from autopar.lower.regather import free_until_backward
from autopar.lower.segments import current_mesh, make_again
from autopar.lower.steps.adjoints import Adjoint, Adjoints, adjoint_of, carried_over, results_read
from autopar.lower.steps.nodes import (
    BRANCHES,
    OPENED,
    chosen,
    end_forward,
    filled,
    gradients_by_autograd,
    has_known_strides,
    is_taken,
    laid_out,
    leave,
    lies_alike,
    only_if,
    run_under_autograd,
    runs_under_autograd,
    sum_of,
)
from autopar.lower.steps.recording import NotRecordable, unseen_by_the_caller
from autopar.rules.families.branch import BY_NUMBER
from autopar.rules.lowering_helpers.local_shard import length_of
from autopar.torch_private import DATA_DEPENDENT, OpOverload, pytree
from autopar.words.tracing import traced_for_a_compiler

_aten = torch.ops.aten


@dataclass(eq=False)
class StepValue:
    """A value of the lowered program: its node in the step, its form, and whether it wants a gradient.

    Attributes:
        leaves: of an :class:`.Opened`, the values that autograd differentiates by.
    """

    node: torch.fx.Node
    fake: Any
    wants: bool
    leaves: list[StepValue] = field(default_factory=list)


@dataclass
class _Call:
    """A call that was emitted.

    Attributes:
        env: from nodes of the adjoint to those of the step.
        differentiated: gives the adjoint for gradients that arrive with some strides.
        tape: of a call that ran under autograd.
        taken: of a branch on a number, the node that says which way it went, or the way itself.
    """

    name: str
    segment: int | None
    leaves: list[StepValue]
    results: list[StepValue]
    adjoint: Adjoint | None = None
    env: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    differentiated: Callable[[tuple[tuple[int, ...], ...]], Adjoint | None] | None = None
    tape: torch.fx.Node | None = None
    taken: torch.fx.Node | bool | None = None


@dataclass
class StepGraph:
    """A step before it is printed.

    Attributes:
        graph: forward and backward, in an order in which they may run.
        given: placeholders of the program's inputs.
        results: what the program gives: nodes, or values that are no tensors.
        arriving: placeholders of gradients, by number of the result.
        grads: gradients of the inputs that want one, by their number.
        freed: tensors that the plan frees until the backward though others read them: results of segments, and copies,
            each with what it is gathered from again.
        given_up: tensors that the plan gives up until the backward, each with the node that does it, in the order of
            their last readers.
        leaving: of these, the ones whose copies may be under way at the end of the forward.
        constants: tensors with values that calls made themselves, by node.
        may_lack: gradients that do not come where a branch goes the other way.
    """

    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    given: list[torch.fx.Node] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    arriving: dict[int, torch.fx.Node] = field(default_factory=dict)
    grads: dict[int, torch.fx.Node] = field(default_factory=dict)
    freed: dict[torch.fx.Node, torch.fx.Node | None] = field(default_factory=dict)
    given_up: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    leaving: list[torch.fx.Node] = field(default_factory=list)
    constants: dict[torch.fx.Node, torch.Tensor] = field(default_factory=dict)
    may_lack: set[torch.fx.Node] = field(default_factory=set)


def build(
    module: torch.fx.GraphModule, values: Sequence[Any], n_outputs: int, adjoints: Adjoints,
    roots: Collection[int] | None = None,
) -> StepGraph:  # fmt: skip
    """Return the step of a lowered program; the ambient mesh is that of the program.

    Args:
        values: its inputs, of which forms are read; tensors that require a gradient get one.
        n_outputs: how many of its results are outputs, to which gradients may come.
        adjoints: those that are known already; new ones are added.
        roots: numbers of the outputs to which gradients come; None for all that want one.
    """
    with unseen_by_the_caller(), adjoints.mode, traced_for_a_compiler():
        return _Builder(module, n_outputs, adjoints, roots).build(values)


class _Builder:
    def __init__(
        self, module: torch.fx.GraphModule, n_outputs: int, adjoints: Adjoints, roots: Collection[int] | None
    ) -> None:
        self.nodes = list(module.graph.nodes)
        self.n_outputs, self.adjoints, self.roots = n_outputs, adjoints, roots
        self.step = StepGraph()
        self.calls: list[_Call] = []
        self.values: dict[torch.fx.Node, Any] = {}
        self.given: list[Any] = []
        self.late, self.call_name, self.segment = False, "", None
        self.guard: tuple[torch.fx.Node, ...] = ()

    def build(self, values: Sequence[Any]) -> StepGraph:
        *_, end = self.nodes
        reached = results_read(end, self.n_outputs)
        each = iter(values)
        for node in self.nodes:
            self.segment = node.meta.get("segment")
            if node.op == "placeholder":
                self.values[node] = self._input(node, next(each))
            elif node.op == "call_function":
                self.values[node] = self._call(node, reached.get(node))
        self.segment = None
        results: Any = torch.fx.map_arg(end.args[0], lambda n: self.values[n])
        self._backward(results)
        self.step.results = [x.node if isinstance(x, StepValue) else x for x in results]
        return self.step

    # -- forward

    def _input(self, node: torch.fx.Node, value: Any) -> Any:
        new = self.step.graph.placeholder(node.name)
        buffer = node.meta.get("autopar", {}).get("buffer")
        new.meta.update(late=False, call=node.name, segment=None, guard=(), buffer=buffer)
        self.step.given.append(new)
        if not isinstance(value, torch.Tensor):
            new.meta["val"] = value
            return StepValue(new, value, False)
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        new.meta["val"] = fake
        given = StepValue(new, fake, value.requires_grad)
        self.given.append((len(self.step.given) - 1, given))
        return given

    def _emit(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, val: Any = None, **more: bool
    ) -> Any:
        node = self.step.graph.call_function(target, tuple(args), dict(kwargs or {}))
        node.meta.update(val=val, late=self.late, call=self.call_name, segment=self.segment, guard=self.guard, **more)
        return node

    def _call(self, node: torch.fx.Node, reached: set[int] | None) -> Any:
        target: Any = node.target
        if target is length_of:
            return length_of(*node.args)
        if target is operator.getitem:
            source, number = node.args
            return self.values[source][number]  # type: ignore[index]
        if target is backwards_of:
            return None
        both: Any = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.values[n])
        args, kwargs = both
        self.call_name = node.name
        if target in (make_again, free_until_backward):
            self.step.freed[args[0].node] = args[1].node if target is free_until_backward else None
            return None
        if target is give_up:
            whole, _, decision, *before = args
            left = self._emit(leave, (whole.node, decision, *(x.node for x in before)), acts=True)
            self.step.given_up[whole.node] = left
            return StepValue(left, None, False)
        if target is settle:
            self.step.leaving = [x.node for x in args[0]]
            self._emit(end_forward, self.step.leaving, acts=True)
            return None
        if target in BRANCHES:
            return self._branch(*args, **kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        flat = [x.fake if isinstance(x, StepValue) and isinstance(x.fake, (int, float, bool)) else x for x in flat]
        fakes = [x.fake for x in flat if isinstance(x, StepValue)]
        if runs_under_autograd(target) or not all(isinstance(x, torch.Tensor) for x in fakes):  # a generator's states
            return self._under_autograd(target, flat, spec)
        return self._differentiated(target, flat, spec, reached)

    def _differentiated(self, target: Any, flat: list[Any], spec: pytree.TreeSpec, reached: set[int] | None) -> Any:
        leaves = [x for x in flat if isinstance(x, StepValue)]
        wants = [x.wants and reached is not None for x in leaves]
        numbers = None if reached is None or -1 in reached else sorted(reached)
        forms = tuple(
            (tuple(x.fake.shape), x.fake.stride(), x.fake.dtype, str(x.fake.device), want)
            for x, want in zip(leaves, wants, strict=True)
        )
        others = tuple(None if isinstance(x, StepValue) else (type(x), repr(x)) for x in flat)
        place = None if isinstance(target, OpOverload) else current_mesh()
        key = target, place, str(spec), forms, others, numbers and tuple(numbers)

        def differentiated(strides: tuple[tuple[int, ...], ...] | None = None) -> Adjoint | None:
            def run(tensors: Sequence[torch.Tensor]) -> Any:
                each = iter(tensors)
                given = [next(each) if isinstance(x, StepValue) else x for x in flat]
                args, kwargs = pytree.tree_unflatten(given, spec)
                return target(*args, **kwargs)

            known = self.adjoints.of_call
            if (key, strides) not in known:
                try:
                    fakes = [x.fake for x in leaves]
                    is_operator = isinstance(target, OpOverload)
                    known[key, strides] = adjoint_of(run, fakes, wants, numbers, is_operator, strides)
                except (NotRecordable, *DATA_DEPENDENT):
                    known[key, strides] = None
            return known[key, strides]

        adjoint = differentiated()
        if adjoint is None:
            return self._under_autograd(target, flat, spec)
        env = dict(zip(adjoint.inputs, (x.node for x in leaves), strict=True))
        for node, value in adjoint.constants.items():
            env[node] = self.step.graph.get_attr(f"constant_{len(self.step.constants)}")
            env[node].meta.update(val=value, late=False, call=self.call_name, segment=None, guard=())
            self.step.constants[env[node]] = value
        if adjoint.composite:
            outs = self._operator(target, flat, spec, adjoint)
            env = dict(zip(adjoint.outs, outs, strict=True)) | env  # an argument that is given back stays one
        else:
            self._inline(adjoint.forward, env)
            outs = [env[x] for x in adjoint.outs]
        pairs = enumerate(zip(outs, adjoint.fakes, strict=True))
        results = [StepValue(out, fake, k in adjoint.asked) for k, (out, fake) in pairs]
        self.calls.append(_Call(self.call_name, self.segment, leaves, results, adjoint, env, differentiated))
        return _unflattened(results, adjoint.results, adjoint.spec)

    def _operator(
        self, target: Any, flat: list[Any], spec: pytree.TreeSpec, adjoint: Adjoint
    ) -> list[torch.fx.Node]:  # fmt: skip
        args, kwargs = pytree.tree_unflatten([x.node if isinstance(x, StepValue) else x for x in flat], spec)
        whole = pytree.tree_unflatten(adjoint.results, adjoint.spec)
        call = self._emit(target, args, kwargs, whole)
        if isinstance(whole, torch.Tensor):
            return [call]
        return [
            self._emit(operator.getitem, (call, k), val=x) for k, x in enumerate(whole) if isinstance(x, torch.Tensor)
        ]

    def _inline(self, nodes: Sequence[torch.fx.Node], env: dict[torch.fx.Node, torch.fx.Node]) -> None:
        for node in nodes:
            both: Any = torch.fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            args, kwargs = both
            env[node] = self._emit(node.target, args, kwargs, node.meta.get("val"))

    def _under_autograd(self, target: Any, flat: list[Any], spec: pytree.TreeSpec) -> Any:
        own = [x for x in flat if isinstance(x, StepValue) and not x.leaves and isinstance(x.fake, torch.Tensor)]
        leaves = [*(leaf for x in flat if isinstance(x, StepValue) for leaf in x.leaves), *own]
        args, kwargs = pytree.tree_unflatten([x.fake if isinstance(x, StepValue) else x for x in flat], spec)
        wants = [x.wants for x in own]
        with torch.enable_grad():
            given = pytree.tree_map_only(torch.Tensor, lambda x: x.detach(), (args, kwargs))
            each = iter(wants)
            for x in pytree.tree_leaves(given):
                if isinstance(x, torch.Tensor):
                    x.requires_grad_(next(each))
            whole = target(*given[0], **given[1])
        nodes = [x.node if isinstance(x, StepValue) else x for x in flat]
        is_flat = spec == pytree.tree_structure((tuple(flat), {}))
        both = self._emit(run_under_autograd, (target, None if is_flat else spec, wants, *nodes), acts=True)
        if target in OPENED:
            return StepValue(self._emit(operator.getitem, (both, 0), val=whole), whole, False, leaves)
        flat_results, spec_of_results = pytree.tree_flatten(whole)
        results = [
            StepValue(self._emit(operator.getitem, (both, k + 1), val=x.detach()), x.detach(), x.requires_grad)
            for k, x in enumerate(flat_results) if isinstance(x, torch.Tensor)
        ]  # fmt: skip
        tape = self._emit(operator.getitem, (both, 0))
        self.calls.append(_Call(self.call_name, self.segment, leaves, results, tape=tape))
        return _unflattened(results, flat_results, spec_of_results)

    def _branch(
        self, condition: StepValue, if_true: StepValue, if_false: StepValue, settled: int = BY_NUMBER
    ) -> StepValue:  # fmt: skip
        taken: Any = bool(settled) if settled != BY_NUMBER else self._emit(is_taken, (condition.node,))
        node = self._emit(chosen, (taken, if_true.node, if_false.node), val=if_true.fake)
        result = StepValue(node, if_true.fake, if_true.wants or if_false.wants)
        self.calls.append(_Call(self.call_name, self.segment, [if_true, if_false], [result], taken=taken))
        return result

    # -- backward

    def _backward(self, results: Sequence[Any]) -> None:
        self.late = True
        arrived: dict[StepValue, torch.fx.Node] = {}

        def add(value: StepValue, grad: torch.fx.Node) -> None:
            before = arrived.get(value)
            if before is not None:
                lacking = {before, grad} & self.step.may_lack
                known = has_known_strides(before) and has_known_strides(grad)
                val = before.meta["val"] + grad.meta["val"] if known and not lacking else value.fake
                total = self._emit(sum_of if lacking else _aten.add.Tensor, (before, grad), val=val)
                total.meta.update(sum=True, unknown=not known)
                if len(lacking) == 2:
                    self.step.may_lack.add(total)
                grad = total
            arrived[value] = grad

        for k, value in enumerate(results[: self.n_outputs]):
            if isinstance(value, StepValue) and value.wants and (self.roots is None or k in self.roots):
                grad = self.step.graph.placeholder(f"gradient_{k}")
                grad.meta.update(val=torch.empty_like(value.fake), late=True, call="", segment=None, guard=())
                self.step.arriving[k] = grad
                add(value, grad)
        for call in reversed(self.calls):
            if any(x in arrived for x in call.results):
                self.call_name = call.name
                self._backward_of(call, arrived, add)
        self.step.grads = {number: arrived[value] for number, value in self.given if value.wants and value in arrived}

    def _backward_of(
        self, call: _Call, arrived: dict[StepValue, torch.fx.Node], add: Callable[[StepValue, torch.fx.Node], None]
    ) -> None:
        there = [arrived[x] for x in call.results if x in arrived]
        lacking = tuple(there) if all(x in self.step.may_lack for x in there) else ()
        if call.taken is not None:
            self._backward_of_branch(call, arrived.pop(call.results[0]), add)
        elif call.adjoint is None:
            given = [arrived.pop(x, None) for x in call.results]
            got = self._emit(gradients_by_autograd, (call.tape, *given))
            for k, leaf in enumerate(call.leaves):
                if leaf.wants:
                    grad = self._emit(operator.getitem, (got, k), val=leaf.fake)
                    self.step.may_lack.add(grad)
                    add(leaf, grad)
        elif call.adjoint.passes_on:
            came = {node: arrived.pop(call.results[k], None) for node, k in call.adjoint.of_results()}
            for leaf, found in zip(call.leaves, call.adjoint.grads, strict=True):
                if found is not None and (grad := came[found]) is not None:
                    add(leaf, grad)
        else:
            asked = call.adjoint.asked
            self.guard = lacking
            grads = [self._arriving(call.results[number], arrived, len(asked) > 1) for number in asked]
            adjoint, env, grads = self._as_they_lie(call, grads)
            env.update(zip(adjoint.arriving, grads, strict=True))
            self._inline(adjoint.backward, env)
            self.guard = ()
            for leaf, found in zip(call.leaves, adjoint.grads, strict=True):
                if found is not None:
                    if lacking:
                        self.step.may_lack.add(env[found])
                    add(leaf, env[found])

    def _as_they_lie(
        self, call: _Call, grads: list[torch.fx.Node]
    ) -> tuple[Adjoint, dict[torch.fx.Node, torch.fx.Node], list[torch.fx.Node]]:  # fmt: skip
        """Return the adjoint for gradients as they lie in memory and its nodes; or copies, as it was recorded with.

        A backward may differ by that: a kernel that reads rows in a row gets a copy of what lies otherwise.
        """
        adjoint, env = call.adjoint, call.env
        assert adjoint is not None and call.differentiated is not None
        wanted = [node.meta["val"].stride() for node in adjoint.arriving]
        alike = [
            has_known_strides(grad) and lies_alike(grad.meta["val"], strides)
            for grad, strides in zip(grads, wanted, strict=True)
        ]
        if not all(alike) and all(map(has_known_strides, grads)):
            other = call.differentiated(tuple(grad.meta["val"].stride() for grad in grads))
            carried = None if other is None else carried_over(adjoint, other, env)
            if other is not None and carried is not None:
                return other, carried, grads
        each = zip(grads, alike, wanted, adjoint.arriving, strict=True)
        copies = [
            grad if is_alike else self._emit(laid_out, (grad, strides), val=node.meta["val"])
            for grad, is_alike, strides, node in each
        ]
        return adjoint, env, copies

    def _arriving(
        self, result: StepValue, arrived: dict[StepValue, torch.fx.Node], beside_others: bool
    ) -> torch.fx.Node:
        """Return the gradient of a result, zeros where none comes."""
        grad, fake = arrived.pop(result, None), result.fake
        if grad is None:
            options = {"dtype": fake.dtype, "device": fake.device}
            grad = self._emit(_aten.zeros.default, (list(fake.shape),), options, fake)
        elif grad in self.step.may_lack and beside_others:
            grad = self._emit(filled, (grad, list(fake.shape), fake.dtype, fake.device), val=fake)
        return grad  # type: ignore[no-any-return]

    def _backward_of_branch(
        self, call: _Call, grad: torch.fx.Node, add: Callable[[StepValue, torch.fx.Node], None]
    ) -> None:
        for leaf, side in zip(call.leaves, (True, False), strict=True):
            if not leaf.wants:
                continue
            if isinstance(call.taken, bool):
                if call.taken is side:
                    add(leaf, grad)
            else:
                of_side = self._emit(only_if, (call.taken, side, grad), val=leaf.fake)
                self.step.may_lack.add(of_side)
                add(leaf, of_side)


def _unflattened(values: Sequence[StepValue], results: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    each = iter(values)
    return pytree.tree_unflatten([next(each) if isinstance(x, torch.Tensor) else x for x in results], spec)
