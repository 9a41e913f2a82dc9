"""Repeated blocks are traced twice; the others are one opaque call each, which is written out afterwards.

A transformer's layers run the same Python code on tensors of the same shapes. Tracing an operator takes a millisecond,
so a deep model takes long for nothing new. While ``torch.export`` traces, the call of a module that is built like
others is looked at: its arguments, its tensors and the Python state that its code can see
(:mod:`.python_state`). The first two calls that look the same are traced, and compared operator by operator; if
they are the same up to the names of their parameters, each further call that looks the same becomes one node
``autopar::block``, whose outputs are empty tensors like those that were traced. :mod:`.written_out` puts
the operators back, with the names that tracing all of them would have given.

A block is traced as often as it is called when its code writes to Python state, draws from Python's random numbers,
takes or returns objects, makes constants, switches modes, writes to its inputs or buffers, has hooks, or reads a plain
attribute that differs (such as the number of its layer). Where a tensor leaves a traced block by another way than its
result, nothing is trusted, and the whole model is traced.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

from autopar.capture.branches.data_branches import TAKEN, would_take
from autopar.capture.branches.random_answers import ASK, asking
from autopar.capture.repeats.attribute_reads import watched
from autopar.capture.repeats.block_calls import (
    FAKE,
    PLAIN,
    BlockCall,
    Ext,
    Int,
    Op,
    Traced,
    callers,
    empty,
    flatten,
    global_state,
    is_dense,
    is_operator,
    last_node,
    look_of,
    modes,
    nodes_after,
    own_state,
    pattern,
    relative_stack,
    storage,
    tensors_of,
    written,
)  # fmt: skip
from autopar.capture.repeats.names_asked import NamesAsked, Skipped
from autopar.capture.repeats.python_state import (
    ByIdentity,
    Memo,
    Namespace,
    Shape,
    Structures,
    Unknown,
    named_state,
    plain,
    random_state,
    seen,
    shape_of,
)
from autopar.capture.trace.faster_tracing import unstacked
from autopar.torch_private import DisableTorchFunction, ModuleStackTracer, OpOverload, module_at, pytree
from autopar.words.trees import PyTree

LIBRARY = torch.library.Library("autopar", "FRAGMENT")
LIBRARY.define("block(Tensor[] tensors, str key) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
BLOCK = torch.ops.autopar.block.default
FEWEST, MOST_TRACED = 3, 6
"""Instances that make a block worth looking at; calls that are traced at most before a block is given up."""


@dataclass
class AlikeModules:
    """Equally built modules, and the calls of them that were traced."""

    instances: list[torch.nn.Module]
    varying: frozenset[tuple[str, str]] = frozenset()
    globals: list[tuple[Namespace, str]] = field(default_factory=list)
    looks_inside: bool = False
    traced: dict[object, list[Traced]] = field(default_factory=dict)
    count: int = 0
    refused: str = ""


class Nothing(Unknown):
    """A call of a block that returns its arguments."""


class Repeats:
    """The calls of modules while a model is traced.

    Attributes:
        skipped: every call that became one node, by the key in it.
        names: the requested names, from which all names follow.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.skipped: dict[str, Skipped] = {}
        self.names: NamesAsked | None = None
        self.tracer: Any = None
        self.active = False
        self.reads: set[tuple[int, str]] = set()
        self.groups: dict[int, AlikeModules] = {}
        self.outer: list[torch.nn.Module] = []
        self.trusted: list[Traced] = []
        self.doubt = ""
        self._find(model)

    # -- which modules

    def _find(self, model: torch.nn.Module) -> None:
        structure = Structures()
        alike: dict[int, list[torch.nn.Module]] = {}
        modules = list(model.modules())
        for module in modules:
            number = structure(module)
            if number is not None and _is_deep(module) and next(module.parameters(), None) is not None:
                alike.setdefault(number, []).append(module)
        inside: set[int] = set()
        for instances in alike.values():
            if len(instances) < FEWEST:
                continue
            group = AlikeModules(instances)
            try:
                self._vary(group)
            except Unknown:
                continue
            for module in instances:
                self.groups[id(module)] = group
                inside.update(id(m) for m in module.modules())
        self.outer = [m for m in modules if id(m) not in inside]
        self.all = modules

    @staticmethod
    def _vary(group: AlikeModules) -> None:
        memo: Memo = {}
        first = own_state(group.instances[0], memo)
        varying: set[tuple[str, str]] = set()
        for module in group.instances[1:]:
            state = own_state(module, memo)
            varying |= {k for k in first.keys() | state.keys() if first.get(k, ByIdentity) != state.get(k, ByIdentity)}
        group.varying = frozenset(varying)
        group.globals, group.looks_inside = named_state({type(m) for m in group.instances[0].modules()})

    # -- while tracing

    @contextlib.contextmanager
    def watching(self) -> Iterator[Repeats]:
        """Watch module calls in this scope."""
        if not self.groups:
            yield self
            return
        original = ModuleStackTracer.call_module

        def call_module(
            tracer: Any, m: Any, forward: Callable[..., PyTree], args: PyTree, kwargs: PyTree
        ) -> PyTree:
            if self.tracer is None:
                self.tracer = tracer
                self.names = tracer.graph._graph_namespace = NamesAsked(tracer.graph._graph_namespace)
            if self.active or tracer is not self.tracer:
                return original(tracer, m, forward, args, kwargs)
            module = m.get_base() if hasattr(m, "get_base") else m
            group = self.groups.get(id(module))
            if group is None or group.refused:
                return original(tracer, m, forward, args, kwargs)
            return self._call(group, module, m, lambda: original(tracer, m, forward, args, kwargs), args, kwargs)

        def outermost(
            tracer: Any, m: torch.nn.Module, forward: Callable[..., PyTree], args: PyTree, kwargs: PyTree
        ) -> PyTree:
            result = call_module(tracer, m, forward, args, kwargs)
            if tracer is self.tracer and not tracer.module_stack:
                self._check_leaks(result)
            return result

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(ModuleStackTracer, "call_module", outermost))
            for kind, name in {
                (type(module_at(m, path)), name)
                for g in self.groups.values() for m in g.instances[:1] for path, name in g.varying
            }:  # fmt: skip
                stack.enter_context(watched(kind, name, self.reads))
            yield self

    def _call(
        self, group: AlikeModules, module: torch.nn.Module, m: torch.nn.Module, run: Callable[[], PyTree],
        args: PyTree, kwargs: PyTree,
    ) -> PyTree:  # fmt: skip
        with DisableTorchFunction():  # looking at a tensor is not the model's doing, and is dear in a trace
            call = self._describe(group, module, m, args, kwargs)
            for traced in group.traced.get(call.key, ()) if call is not None else ():
                if call is None or not traced.verified:
                    continue
                if not asking().would_answer(traced.asks()) or not would_take(traced.taken()):
                    continue
                if call.fits(traced, group.varying):
                    return self._skip(traced, call)
        if call is None:
            return run()
        if group.count >= MOST_TRACED and not any(t.verified for ts in group.traced.values() for t in ts):
            group.refused = "no two calls are alike"
            return run()
        group.count += 1
        return self._trace(group, call, run)

    def _describe(
        self, group: AlikeModules, module: torch.nn.Module, m: torch.nn.Module, args: PyTree, kwargs: PyTree
    ) -> BlockCall | None:
        memo: Memo = {}
        try:
            leaves, spec = flatten((args, kwargs))
            values = tuple([None if isinstance(v, torch.Tensor) else seen(v, memo) for v in leaves])
            state_before = own_state(module, memo)
            outer = [plain(m, memo) for m in self.outer], [global_state(g, n, memo) for g, n in group.globals]
        except Unknown:
            return None
        path = str(self.tracer.path_of_module(m))
        tensors = tensors_of(leaves, module)
        if any(isinstance(n, torch.SymInt) for t in tensors for n in t.shape):  # of rows that data selects
            return None
        slots = [self.tracer.tensor_tracker.get(t) for t in tensors]
        if any(slot is None for slot in slots):
            return None
        nodes = [slot.proxy.node for slot in slots]
        looks = tuple([(shape_of(t), t.is_leaf, tuple(sorted(vars(t).keys() - FAKE))) for t in tensors])
        calls = self.tracer.num_calls.get(path, 0)
        key = (repr(spec), values, looks, pattern(map(id, tensors)), pattern(nodes), calls, modes(), callers())
        return BlockCall(path, key, (args, kwargs), tensors, nodes, values, state_before, outer, module)

    def _all_state(self, group: AlikeModules) -> object:
        memo: Memo = {}
        state = [plain(m, memo) for m in self.all]
        return state, [global_state(g, n, memo) for g, n in group.globals], random_state(), modes()

    def _trace(self, group: AlikeModules, call: BlockCall, run: Callable[[], PyTree]) -> PyTree:
        assert self.names is not None
        before = self._all_state(group)
        last, logged = last_node(self.tracer.graph), len(self.names.log)
        self.reads.clear()
        self.active = True
        try:
            result = run()
        finally:
            self.active = False
        with DisableTorchFunction():
            self._look(group, call, before, list(nodes_after(self.tracer.graph, last)), logged, result)
        return result

    def _look(
        self, group: AlikeModules, call: BlockCall, before: object, nodes: list[torch.fx.Node], logged: int,
        result: PyTree,
    ) -> None:
        """Compare a call that was traced with those before it."""
        paths = {id(m.__dict__): p for p, m in call.module.named_modules()}
        reads = frozenset((paths.get(i, "?"), n) for i, n in self.reads)
        if group.looks_inside:  # attributes may be read without their names
            reads |= group.varying
        try:
            if self._all_state(group) != before:
                raise Unknown("it writes to Python state")
            call.check_arguments()
            traced = self._pattern(call, nodes, logged, result, reads)
        except Nothing as why:
            if not any(str(n.target) in (ASK, TAKEN) for n in nodes):  # another answer may make something
                group.refused = str(why)
            return
        except Unknown as why:
            group.refused = str(why)
            return
        earlier = group.traced.setdefault(call.key, [])
        for before_it in earlier:
            if not before_it.verified and call.fits(before_it, group.varying) and traced.same(before_it):
                before_it.verified = True
                self.trusted += [before_it, traced]
                return
        earlier.append(traced)

    def _pattern(
        self, call: BlockCall, nodes: list[torch.fx.Node], logged: int, result: PyTree,
        reads: frozenset[tuple[str, str]],
    ) -> Traced:  # fmt: skip
        names = self.names
        assert names is not None
        numbers = {n: i for i, n in enumerate(nodes)}
        of_call: dict[torch.fx.Node, int] = {}
        for i, n in enumerate(call.nodes):
            of_call.setdefault(n, i)
        external: dict[int | torch.fx.Node, int] = {}

        def token(n: torch.fx.Node) -> PyTree:
            return Int(numbers[n]) if n in numbers else Ext(external.setdefault(of_call.get(n, n), len(external)))

        storages = {storage(t) for t in call.tensors}
        ops, named = [], []
        for n in nodes:
            if n.op != "call_function" or not (n.target is operator.getitem or is_operator(n.target)):
                raise Unknown(f"it uses {n.target}")
            if isinstance(n.target, OpOverload) and n.target._schema.is_mutable:
                if any(w not in numbers or storage(w.meta.get("val")) in storages for w in written(n)):
                    raise Unknown(f"{n.target} writes to what it did not make")
            args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), token)
            ops.append(Op(n.target, args, kwargs, relative_stack(n.meta.get("nn_module_stack"), call.path),
                          n.meta.get("stack_trace") or "", look_of(n.meta.get("val"))))  # fmt: skip
            if n.name not in names.given:
                raise Unknown("a name was not asked for")
            named.append(names.given[n.name] - logged)
        log = names.log[logged:]
        if any(isinstance(entry, Skipped) for entry in log) or any(i < 0 for i in named):
            raise Unknown("names")
        leaves, spec = pytree.tree_flatten(result)
        outputs, made = self._outputs(call, leaves, numbers, ops)
        memory = [(e if isinstance(e, torch.fx.Node) else call.nodes[e]).meta.get("val") for e in external]
        return Traced(
            call.path, ops, [n.meta for n in nodes], [str(c) for c in log], named, list(external), outputs,
            made, spec, call.outer, call.own, reads, nodes, memory,
        )  # fmt: skip

    def _outputs(
        self, call: BlockCall, leaves: list[object], numbers: dict[torch.fx.Node, int], ops: list[Op]
    ) -> tuple[list[tuple[str, PyTree]], dict[int, Shape]]:
        """Return the origin of each result of a traced call, and the shapes of those that it made."""
        of_tensor: dict[int, int] = {}
        for i, t in enumerate(call.tensors):
            of_tensor.setdefault(id(t), i)
        outputs: list[tuple[str, PyTree]] = []
        result_shapes: dict[int, Shape] = {}
        made_by: dict[int, int] = {}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, PLAIN):
                    raise Unknown(f"it returns a {type(leaf).__name__}")
                outputs.append(("value", (type(leaf), leaf)))
                continue
            if id(leaf) in of_tensor:
                outputs.append(("tensor", of_tensor[id(leaf)]))
                continue
            slot = self.tracer.tensor_tracker.get(leaf)
            if slot is None or slot.proxy.node not in numbers:
                raise Unknown("its result is not its own")
            number = numbers[slot.proxy.node]
            if made_by.setdefault(number, id(leaf)) != id(leaf) or not is_dense(leaf):
                raise Unknown("its result is several faces of one tensor")
            if ops[number].target is torch.ops.aten.detach.default:  # it may be dropped where nobody reads it
                raise Unknown("its result is detached")
            outputs.append(("made", number))
            result_shapes[number] = shape_of(leaf)
        if not result_shapes:
            raise Nothing("it makes nothing")
        return outputs, result_shapes

    def _skip(self, traced: Traced, call: BlockCall) -> PyTree:
        names, tracer = self.names, self.tracer
        assert names is not None
        key = str(len(self.skipped))
        self.skipped[key] = skipped = Skipped(call.path, traced)
        names.log.append(skipped)
        nodes = [e if isinstance(e, torch.fx.Node) else call.nodes[e] for e in traced.external]
        names.silent = True
        try:
            with unstacked(tracer):  # its operators have the lines of those that were traced
                proxy = tracer.create_proxy(
                    "call_function", BLOCK, ([torch.fx.Proxy(n, tracer) for n in nodes], key), {}, name="block"
                )
                with disable_proxy_modes_tracing():
                    fresh = {n: empty(shape) for n, shape in traced.made.items()}
                track_tensor_tree(list(fresh.values()), proxy, constant=None, tracer=tracer)
            skipped.results = [tracer.tensor_tracker.get(t).proxy.node.name for t in fresh.values()]
        finally:
            names.silent = False
        counts = tracer.num_calls
        for path, _ in call.module.named_modules():
            full = f"{call.path}.{path}" if path else call.path
            old = f"{traced.path}.{path}" if path else traced.path
            if old in counts:
                counts[full] = counts.get(full, 0) + 1
        asking().asked += len(traced.asks())
        leaves = [
            call.tensors[v] if what == "tensor" else fresh[v] if what == "made" else v[1] for what, v in traced.outputs
        ]
        return pytree.tree_unflatten(leaves, traced.spec)

    def _check_leaks(self, result: PyTree) -> None:
        """Set ``doubt`` if a tensor left a traced block by another way than its result."""
        slots = [self.tracer.tensor_tracker.get(t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        returned = {slot.proxy.node for slot in slots if slot is not None}
        for traced in self.trusted if self.skipped else ():
            inside = set(traced.nodes)
            for number, node in enumerate(traced.nodes):
                if number not in traced.made and (node in returned or any(user not in inside for user in node.users)):
                    self.doubt = f"{node.name} of {traced.path} is used outside"


def _is_deep(module: torch.nn.Module) -> bool:
    """Return whether a module contains several others, so that skipping it pays."""
    return next(itertools.islice(module.modules(), 3, None), None) is not None
