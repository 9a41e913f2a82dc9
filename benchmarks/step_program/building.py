"""The program of a step: the forward of a lowered program and its backward, as one graph of plain operators.

Every call of the program is emitted with its :mod:`adjoint <adjoints>`; then the calls are gone through in reverse
order, and the gradients that arrive at each are given to its backward. Between stored and used placement a parameter
goes through the same collectives as tensors do, so gathers and reductions are nodes like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from adjoints import BRANCH, VIEWS, Adjoint, adjoint_of, is_opaque, opaque_backward, run_opaque

from autopar.lower.collectives import state_step
from autopar.lower.emit import used_shape
from autopar.lower.freed_tensors import backwards_of, give_up
from autopar.lower.program import Program, Slot
from autopar.lower.regather import free_until_backward
from autopar.lower.segments import make_again
from autopar.plans.plan import StagePlan
from autopar.rules.families.branch import branch
from autopar.rules.lowering_helpers.local_shard import length_of
from autopar.torch_private import FakeTensorMode, pytree
from autopar.words.placements import path
from autopar.words.shards import local_shape

aten = torch.ops.aten
DIRECTIVES = (make_again, free_until_backward, give_up, backwards_of)


@dataclass(eq=False)
class Value:
    """A tensor of the lowered program: its node in the step, its shape, and whether a gradient comes to it."""

    node: torch.fx.Node
    fake: torch.Tensor
    wants: bool


@dataclass
class Call:
    """A call of the lowered program that was emitted."""

    name: str
    adjoint: Adjoint
    leaves: list[Value]
    outs: list[Value]
    asked: list[bool]
    env: dict[torch.fx.Node, torch.fx.Node]
    tape: torch.fx.Node | None = None
    branches: bool = False


@dataclass
class Step:
    """The program of a step.

    Attributes:
        graph: forward and backward; ``meta["late"]`` tells the backward, ``meta["of"]`` the call that a node is of.
        slots: one for each placeholder; parameters come in their stored placement.
        results: the outputs of the lowered program, then new buffers.
        roots: numbers of the results to which gradients come, and the placeholders of these.
        grads: the gradients of slots that want one, by number.
    """

    graph: torch.fx.Graph
    slots: Sequence[Slot]
    placeholders: list[torch.fx.Node] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    roots: dict[int, torch.fx.Node] = field(default_factory=dict)
    grads: dict[int, torch.fx.Node] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)
    distinct: int = 0
    calls: list[Call] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)


class Cast:
    """A parameter in the format of the program, brought to its used placement; gradients go back in its own format."""

    def __init__(self, dtype: torch.dtype, steps: Sequence[tuple[Callable[..., Any], tuple[Any, ...], str]]) -> None:
        self.dtype, self.steps = dtype, steps

    def __hash__(self) -> int:
        return hash((self.dtype, str(self.steps)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cast) and (self.dtype, str(self.steps)) == (other.dtype, str(other.steps))

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        """Return it in its used placement."""
        for fn, args, _ in self.steps:
            x = fn(x, *args)
        return x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _CastNode.apply(x, self)  # type: ignore[no-any-return]


class _CastNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cast: Cast) -> Any:
        ctx.cast, ctx.like = cast, x
        return cast.moved(x.to(cast.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.to(ctx.like.dtype)
        if not ctx.cast.steps:
            return grad, None
        x = torch.empty_like(ctx.like).requires_grad_()
        with torch.enable_grad():
            moved = ctx.cast.moved(x)
        return torch.autograd.grad(moved, x, grad)[0], None


class Builder:
    """Builds the step of a program.

    Args:
        roots: numbers of the outputs to which gradients come.
        wants: numbers of the slots that want a gradient.
        plan: says how parameters are stored; without it they are given as they are used.
    """

    def __init__(
        self, program: Program, roots: Collection[int], wants: Collection[int], plan: StagePlan | None = None,
        masters: Mapping[str, torch.dtype] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.roots, self.plan = program, sorted(roots), plan
        self.masters = masters or {}
        self.wants = set(wants)
        self.graph = torch.fx.Graph()
        self.step = Step(self.graph, program.slots)
        self.known: dict[Any, Adjoint] = {}
        self.calls: list[Call] = []
        self.values: dict[torch.fx.Node, Any] = {}
        self.late = False
        self.of = ""
        self.guard: tuple[torch.fx.Node, ...] = ()  # what is emitted runs only if one of these has come
        self.may_lack: set[torch.fx.Node] = set()  # gradients that do not come where a branch goes the other way

    def build(self) -> Step:
        """Return the step; the ambient mesh is that of the program."""
        nodes = list(self.program.module.graph.nodes)
        (end,) = [n for n in nodes if n.op == "output"]
        reached = self._reached(end)
        with FakeTensorMode(allow_non_fake_inputs=True) as self.fake:
            placeholders = [n for n in nodes if n.op == "placeholder"]
            for k, (node, slot) in enumerate(zip(placeholders, self.program.slots, strict=True)):
                self._given(k, node, slot)
            for node in nodes:
                if node.op == "call_function":
                    self.values[node] = self._call(node, reached)
            results = torch.fx.map_arg(end.args[0], lambda n: self.values[n])
            self._backward(results)
        self.step.results = [x.node if isinstance(x, Value) else x for x in results]
        self.step.distinct, self.step.calls = len(self.known), self.calls
        return self.step

    # -- emitting

    def _emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, val: Any = None) -> Any:
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta.update(val=val, late=self.late, of=self.of, guard=self.guard)
        return node

    def _given(self, k: int, node: torch.fx.Node, slot: Slot) -> None:
        new = self.graph.placeholder(node.name)
        mesh, dtype = self.program.mesh, getattr(torch, slot.dtype)
        shape, choice = used_shape(slot, mesh), None
        if slot.kind == "param" and self.plan is not None:
            choice = self.plan.params[slot.name]
            shape = local_shape(slot.shape, choice.stored, mesh)
        master = self.masters.get(slot.name, dtype) if slot.kind == "param" else dtype
        fake = torch.empty(shape, dtype=master, device=self.program.device)
        new.meta.update(val=fake, late=False, of=slot.name)
        self.step.placeholders.append(new)
        given = Value(new, fake, k in self.wants)
        self.values[node] = given
        if slot.kind == "param":
            self.step.weights.append(k)
        given.node.meta["slot"] = k
        setattr(self, f"_slot{k}", given)
        steps = []
        if choice is not None and choice.stored != choice.used:
            for axis, a, b in path(choice.stored, choice.used) or ():
                if mesh.size(axis) > 1:
                    steps.append((*state_step(slot.shape, a, b, mesh), b.text))
        if master is not dtype:
            given = self._called(f"{slot.name}:cast", Cast(dtype, steps), (given,), {}, [True])
        else:
            for fn, args, text in steps:
                given = self._called(f"{slot.name}:{text}", fn, (given, *args), {}, [True])
        self.values[node] = given

    def _reached(self, end: torch.fx.Node) -> dict[torch.fx.Node, set[int]]:
        """Return the results of every call that lead to a root, by call."""
        reached: dict[torch.fx.Node, set[int]] = {}
        todo: list[tuple[torch.fx.Node, int]] = []
        for k in self.roots:
            if isinstance(end.args[0][k], torch.fx.Node):
                todo.append((end.args[0][k], -1))
        while todo:
            node, k = todo.pop()
            if node.target is operator.getitem:
                todo.append((node.args[0], node.args[1]))
                continue
            if k in reached.setdefault(node, set()):
                continue
            first = not reached[node]
            reached[node].add(k)
            if first:
                todo.extend((n, -1) for n in node.all_input_nodes)
        return reached

    def _call(self, node: torch.fx.Node, reached: dict[torch.fx.Node, set[int]]) -> Any:
        if node.target is length_of:
            return length_of(*node.args)
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]
        if node.target in DIRECTIVES:
            return None
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        numbers = reached.get(node, set())
        return self._called(node.name, node.target, args, dict(kwargs), numbers)

    def _called(self, name: str, target: Any, args: Any, kwargs: Any, numbers: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        leaves = [x for x in flat if isinstance(x, Value)]
        wants = [x.wants for x in leaves]

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            each = iter(tensors)
            a, k = pytree.tree_unflatten([next(each) if isinstance(x, Value) else x for x in flat], spec)
            return target(*a, **k)

        asked = None if not numbers or -1 in numbers or numbers == [True] else sorted(numbers)
        key = (
            target if not is_opaque(target) else id(target), str(spec), asked and tuple(asked), bool(numbers),
            tuple((tuple(x.fake.shape), x.fake.stride(), x.fake.dtype, x.wants) if isinstance(x, Value) else repr(x)
                  for x in flat),
        )  # fmt: skip
        self.of = name
        adjoint = self.known.get(key)
        if adjoint is None:
            comes = None if asked is None else [k in asked for k in range(64)]
            adjoint = self._derived(run, leaves, wants if numbers else [False] * len(wants), comes, target)
            self.known[key] = adjoint
        outs, env, tape = self._forward(adjoint, target, flat, spec, leaves)
        values = [
            Value(out, meta, d and bool(numbers) and (asked is None or k in asked))
            for k, (out, meta, d) in enumerate(zip(outs, self._metas(adjoint), adjoint.differentiable, strict=True))
        ]
        if adjoint.opaque:
            self.step.opaque.append(name)
        self.calls.append(
            Call(name, adjoint, leaves, values, [v.wants for v in values], env, tape, target in (BRANCH, branch))
        )
        each = iter(values)
        whole = [next(each) if isinstance(x, torch.Tensor) else x for x in adjoint.metas]
        return pytree.tree_unflatten(whole, adjoint.spec)

    def _derived(self, run: Any, leaves: list[Value], wants: list[bool], comes: Any, target: Any) -> Adjoint:
        fakes = [x.fake for x in leaves]
        if comes is not None:
            n = len([x for x in pytree.tree_leaves(run(fakes)) if isinstance(x, torch.Tensor)])
            comes = comes[:n]
        return adjoint_of(run, fakes, wants, comes, target)

    @staticmethod
    def _metas(adjoint: Adjoint) -> list[torch.Tensor]:
        return [x for x in adjoint.metas if isinstance(x, torch.Tensor)]

    def _forward(
        self, adjoint: Adjoint, target: Any, flat: list[Any], spec: Any, leaves: list[Value]
    ) -> tuple[list[torch.fx.Node], dict[torch.fx.Node, torch.fx.Node], torch.fx.Node | None]:
        nodes = [x.node if isinstance(x, Value) else x for x in flat]
        metas = self._metas(adjoint)
        if adjoint.opaque:
            both = self._emit(run_opaque, (target, spec, [x.wants for x in leaves], *nodes))
            tape = self._emit(operator.getitem, (both, 0))
            outs, k = [], 0
            for k, x in enumerate(adjoint.metas):
                if isinstance(x, torch.Tensor):
                    outs.append(self._emit(operator.getitem, (both, k + 1), val=x))
            return outs, {}, tape
        env = dict(zip(adjoint.inputs, (x.node for x in leaves), strict=True))
        if adjoint.composite:
            args, kwargs = pytree.tree_unflatten(nodes, spec)
            call = self._emit(target, args, kwargs, val=metas[0])
            outs = [call]
            if (
                len(adjoint.metas) > 1
                or not isinstance(adjoint.spec, type(pytree.tree_structure(0)))
                or not adjoint.spec.is_leaf()
            ):
                outs = [self._emit(operator.getitem, (call, k), val=x) for k, x in enumerate(adjoint.metas)
                        if isinstance(x, torch.Tensor)]  # fmt: skip
            env.update(zip(adjoint.outs, outs, strict=True))
            env.update(zip(adjoint.inputs, (x.node for x in leaves), strict=True))
            return outs, env, None
        self._inline(adjoint.forward, env)
        return [env[x] for x in adjoint.outs], env, None

    def _inline(self, nodes: Sequence[torch.fx.Node], env: dict[torch.fx.Node, torch.fx.Node]) -> None:
        for node in nodes:
            if node.op == "get_attr":
                raise NotImplementedError(f"a constant tensor inside of {self.of}")
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = self._emit(node.target, args, kwargs, val=node.meta.get("val"))

    # -- backward

    def _backward(self, results: Sequence[Any]) -> None:
        self.late = True
        grads: dict[Value, torch.fx.Node] = {}

        def add(value: Value, grad: torch.fx.Node) -> None:
            before = grads.get(value)
            if before is not None:
                may_lack = {before, grad} & self.may_lack
                total = self._emit(sum_of if may_lack else aten.add.Tensor, (before, grad), val=value.fake)
                total.meta["sum"] = True
                if len(may_lack) == 2:
                    self.may_lack.add(total)
                grad = total
            grads[value] = grad

        for k in self.roots:
            value = results[k]
            if isinstance(value, Value) and value.wants:
                given = self.graph.placeholder(f"gradient_{k}")
                given.meta.update(val=value.fake, late=True, of="")
                self.step.roots[k] = given
                add(value, given)
        for call in reversed(self.calls):
            self._back(call, grads, add)
        used: set[torch.fx.Node] = set()
        for k in sorted(self.wants):
            value = getattr(self, f"_slot{k}")
            if value in grads:
                grad = grads[value]
                alike = grad.op == "placeholder" or grad in used or grad.target in VIEWS
                if grad in self.may_lack:
                    self.guard = (grad,)
                used.add(grad)
                self.of = self.program.slots[k].name
                if alike:
                    grad = self._emit(
                        aten.clone.default, (grad,), {"memory_format": torch.contiguous_format}, val=value.fake
                    )
                self.guard = ()
                self.step.grads[k] = grad

    def _back(self, call: Call, grads: dict[Value, torch.fx.Node], add: Callable[..., None]) -> None:
        asked = [x for x in call.outs if x.wants]
        if not any(x in grads for x in asked):
            return
        self.of = call.name
        adjoint = call.adjoint
        there = [grads[x] for x in asked if x in grads]
        lacking = tuple(there) if all(x in self.may_lack for x in there) else ()
        if adjoint.opaque:
            given = [grads.pop(x, None) for x in call.outs]
            got = self._emit(opaque_backward, (call.tape, *given))
            for k, leaf in enumerate(call.leaves):
                if leaf.wants:
                    grad = self._emit(operator.getitem, (got, k), val=leaf.fake)
                    if lacking or call.branches:
                        self.may_lack.add(grad)
                    add(leaf, grad)
            return
        self.guard = lacking
        arriving = []
        for x in asked:
            grad = grads.pop(x, None)
            if grad is None:
                grad = self._emit(aten.zeros_like.default, (x.node,), val=x.fake)
            elif grad in self.may_lack and len(asked) > 1:
                grad = self._emit(filled, (grad, x.node), val=x.fake)
            arriving.append(grad)
        call.env.update(zip(adjoint.arriving, arriving, strict=True))
        self._inline(adjoint.backward, call.env)
        self.guard = ()
        for leaf, grad in zip(call.leaves, adjoint.grads, strict=True):
            if grad is not None and leaf.wants:
                if lacking:
                    self.may_lack.add(call.env[grad])
                add(leaf, call.env[grad])


def sum_of(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Add two gradients of which one may not have come."""
    return b if a is None else a if b is None else a + b


def filled(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a gradient, or zeros where none came."""
    return torch.zeros_like(like) if grad is None else grad


def parts(nodes: Sequence[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """Yield the nodes that compute."""
    yield from (n for n in nodes if n.op == "call_function")
