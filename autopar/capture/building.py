"""From the exported program to a Graph: every node in order, in one spelling, in-place writes made functional."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.capture.exported import (
    at,
    flat,
    get,
    module_of,
    really_alias,
    source_of,
    spec_of,
    storage_of,
    without_values,
)
from autopar.capture.merging import merged
from autopar.capture.own import own_operator
from autopar.capture.pruning import has_effect, without_dead
from autopar.capture.recording import BEGIN, DATA, END, FUNCTION, HOOK
from autopar.capture.schemas import Facts, argument, draws_by_itself, facts, parts_of, with_defaults
from autopar.capture.storages import Alias, CannotInvert, Geometry, Memory, Place, Step, Storage
from autopar.errors import CaptureError
from autopar.graph import Graph, Node, Ref, Spec, map_refs, refs_in
from autopar.normalize import DROPPED, FRESH, Form, normalize
from autopar.rules.notation import call_of
from autopar.rules.registry import rule_for


class Builder:
    """Walks the exported FX graph once, in order, and follows every tensor's memory (:mod:`~.storages`)."""

    def __init__(self, module: torch.nn.Module, exported: Any, prefix: str) -> None:
        self.exported, self.prefix = exported, prefix
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        self.nodes: list[Node] = []
        self.names: set[str] = set()
        self.value: dict[torch.fx.Node, Any] = {}
        self.memory = Memory(self)
        self.held: dict[int, Alias] = {}
        self.storages: list[Storage] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.region = -1
        self.at: torch.fx.Node | None = None
        self.no_grad = False

    def build(self) -> tuple[Graph, list[Any]]:
        """The graph, and for every input of the exported program its node, or None for a value that is no tensor.

        Raises:
            CaptureError: an operator cannot be planned, or a write has no functional form; the message names the line.
        """
        user, tied = self._placeholders()
        self._watch_effects()
        self._walk(self.exported.graph_module)
        outputs, loss = self._outputs()
        updates = self._updates()
        nodes, moved = merged(self.nodes)

        def move(ref: Ref) -> Ref:
            return Ref(moved.get(ref.node, ref.node), ref.out)

        outputs, updates = map_refs(outputs, move), map_refs(updates, move)
        return without_dead(Graph(tuple(nodes), outputs, loss, tied, updates), user)

    # -- placeholders

    def _placeholders(self) -> tuple[list[Any], dict[str, str]]:
        specs = {s.arg.name: s for s in self.exported.graph_signature.input_specs}
        tied: dict[str, str] = {}
        user: list[Any] = []
        memory: dict[int, Storage] = {}
        for fx in self.exported.graph.nodes:
            if fx.op != "placeholder":
                continue
            spec = specs[fx.name]
            kind = spec.kind.name
            val = fx.meta.get("val")
            if kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
                target = spec.target.removeprefix(self.prefix)
                tensor = self.parameters.get(spec.target) if kind == "PARAMETER" else self.buffers.get(spec.target)
                if tensor is None:
                    tensor = self.exported.constants.get(spec.target)
                    if tensor is None:
                        tensor = self.exported.state_dict[spec.target]
                    self.constants[target] = tensor
                if id(tensor) in self.held:
                    alias = self.held[id(tensor)]
                    assert alias.place.storage.origin is not None
                    tied[target] = alias.place.storage.origin[1]
                    self.value[fx] = alias
                    continue
                grads = kind == "PARAMETER" and bool(tensor.requires_grad)
                node = Node(target, "param" if kind == "PARAMETER" else "buffer", target, outs=(spec_of(val),),
                            needs_grad=grads, hot=kind == "PARAMETER", module=target.rpartition(".")[0])  # fmt: skip
                self.value[fx] = self.held[id(tensor)] = self._placeholder(node, val)
                storage = self.storages[-1]
                other = memory.setdefault(tensor.untyped_storage()._cdata, storage)
                if other is not storage and other.origin is not None and storage.origin is not None:
                    other.shared, storage.shared = storage.origin[1], other.origin[1]
            elif kind == "USER_INPUT":
                if isinstance(val, torch.Tensor):
                    # an input that wants a gradient is planned like what depends on parameters
                    grad = bool(val.requires_grad) and val.is_floating_point()
                    node = Node(fx.name, "input", fx.name, outs=(spec_of(val),), needs_grad=grad, hot=grad)
                    alias = self.value[fx] = self._placeholder(node, val)
                    user.append(alias.place.storage.value.node)
                else:
                    self.value[fx] = val
                    user.append(None)
            else:
                raise CaptureError(f"the model has an input of kind {kind} ({fx.name}), which cannot be planned")
        # every name of a tied parameter, also those that torch.export left out
        for name, tensor in self.parameters.items():
            known = self.held.get(id(tensor))
            short = name.removeprefix(self.prefix)
            if known is not None and known.place.storage.origin is not None:
                own = known.place.storage.origin[1]
                if own != short:
                    tied.setdefault(short, own)
        return user, tied

    def _placeholder(self, node: Node, val: torch.Tensor) -> Alias:
        ref = self._add(node)
        storage = self._fresh(ref, Geometry.of(val))
        storage.origin = (node.kind, node.target)
        return Alias(storage.first, storage.root)

    def _watch_effects(self) -> None:
        """Mark the buffers that an operator writes beside its schema."""
        for fx in self.exported.graph.nodes:
            if fx.op == "call_function" and has_effect(str(fx.target)):
                for name in ("running_mean", "running_var"):
                    node = argument(fx.target, fx.args, fx.kwargs, name)
                    alias = self.value.get(node) if isinstance(node, torch.fx.Node) else None
                    if isinstance(alias, Alias):
                        alias.place.storage.changing = True

    # -- the walk

    def _walk(self, gm: torch.fx.GraphModule, no_grad: bool = False) -> Any:
        for fx in gm.graph.nodes:
            self.at, self.no_grad = fx, no_grad
            if fx.op == "output":
                return torch.fx.node.map_arg(fx.args[0], lambda n: self.value[n])
            if fx.op == "get_attr":
                attr = get(gm, str(fx.target))
                self.value[fx] = self._constant(attr, str(fx.target)) if isinstance(attr, torch.Tensor) else attr
            elif fx.op != "placeholder":
                self._operator(fx, no_grad)
        return None

    def _constant(self, attr: torch.Tensor, path: str) -> Alias:
        if id(attr) not in self.held:
            name = f"const.{path}"
            self.constants[name] = attr
            self.held[id(attr)] = self._placeholder(Node(name, "buffer", name, outs=(spec_of(attr),)), attr)
        return self.held[id(attr)]

    def _read(self, value: Any) -> Any:
        if isinstance(value, Alias):
            return self.memory.read(value, no_grad=self.no_grad)
        if isinstance(value, (tuple, list)):
            return type(value)(self._read(v) for v in value)
        return value

    def _look(self, fx: torch.fx.Node) -> Any:
        return self._read(self.value[fx])

    def _operator(self, fx: torch.fx.Node, no_grad: bool) -> None:
        target = fx.target
        name = str(target)
        if target is operator.getitem:
            self.value[fx] = self.value[fx.args[0]][fx.args[1]]  # type: ignore[index]
        elif "wrap_with_set_grad_enabled" in name:
            body = self.value[fx.args[1]]  # type: ignore[index]
            placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
            for placeholder, arg in zip(placeholders, fx.args[2:], strict=True):
                self.value[placeholder] = self.value[arg] if isinstance(arg, torch.fx.Node) else arg
            self.value[fx] = self._walk(body, not fx.args[0])
        elif name in (BEGIN, END, FUNCTION, HOOK):
            self.value[fx] = self._own(fx, name)
        elif not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(
                f"cannot capture '{name}' in '{module_of(fx)}'" + at(fx) + "\n  higher-order operators "
                "(control flow, autocast regions) cannot be planned; write that part with plain tensor operations"
            )
        elif not any(isinstance(v, torch.Tensor) for v in flat(fx.meta.get("val"))) and not facts(target).writes:
            self.value[fx] = fx.meta.get("val")  # of an assert, or a number that depends on data
        else:
            self._sizes_are_known(fx)
            known = facts(target)
            if known.renames:
                if known.pure is None or not facts(known.pure).may_alias:
                    raise self._refused(fx, "exchanges the memory of a tensor", "make a new tensor instead")
                self.value[fx] = self._pure(fx, known.pure)
            elif known.writes:
                self.value[fx] = self._writing(fx, target, known)
            else:
                self.value[fx] = self._pure(fx, target)

    def _own(self, fx: torch.fx.Node, name: str) -> Any:
        """An operator of autopar's own in the trace."""
        refs = own_operator(self, fx, name, torch.fx.node.map_arg(fx.args, self._look), self.no_grad)
        if name == HOOK:  # the tensor stays the same; from here on its gradient passes the hook
            alias: Alias = self.value[fx.args[0]]  # type: ignore[index]
            self.memory.passes(alias, refs[0])
            return alias
        made = [self._fresh(ref, Geometry.of(val)) for ref, val in zip(refs, flat(fx.meta.get("val")), strict=False)]
        return [Alias(storage.first, storage.root) for storage in made]

    def _refused(self, fx: torch.fx.Node, what: str, instead: str) -> CaptureError:
        return CaptureError(f"'{fx.target}' in '{module_of(fx)}'{at(fx)} {what}\n  {instead}")

    def _sizes_are_known(self, fx: torch.fx.Node) -> None:
        shapes = [n for v in flat(fx.meta.get("val")) if isinstance(v, torch.Tensor) for n in v.shape]
        given = [a for a in pytree.tree_leaves((fx.args, fx.kwargs)) if not isinstance(a, torch.fx.Node)]
        read = [self.value[n] for n in fx.all_input_nodes]
        if any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in (*given, *read, *shapes)):
            raise CaptureError(
                f"'{fx.target}' in '{module_of(fx)}' has a size that depends on data" + at(fx) + "\n  use fixed "
                "sizes: a mask or torch.where instead of selecting"
            )

    # -- operators

    def _pure(self, fx: torch.fx.Node, op: torch._ops.OpOverload) -> Any:
        """An operator that writes nothing: new values, or views of what it is given."""
        name, val = str(op), fx.meta["val"]
        vals = flat(val)
        if name == "aten.as_strided.default":
            return self._strided(fx, val)
        args: tuple[Any, ...] = torch.fx.node.map_arg(fx.args, self._look)
        kwargs = dict(torch.fx.node.map_arg(fx.kwargs, self._look))
        outs = tuple(spec_of(v) if isinstance(v, torch.Tensor) else None for v in vals)
        if name == "aten.broadcast_tensors.default":
            forms = [
                normalize("aten.expand.default", (x, list(o.shape)), {}, (o,), self._spec_of)
                for x, o in zip(args[0], outs, strict=True) if o is not None
            ]  # fmt: skip
            made = [self._made(form, (o,), x) for form, o, x in zip(forms, outs, args[0], strict=True)]
            return [
                self._result(fx, op, v, refs[0], step, position=i)
                for i, (v, (refs, step)) in enumerate(zip(vals, made, strict=True))
            ]
        if name == DATA:
            form: Form | None = ("aten.detach.default", args, {})
        else:
            form = None if name in DROPPED else normalize(name, args, kwargs, outs, self._spec_of)
        if form is None and self._copies_what_changes(fx, op):
            form = ("aten.clone.default", (args[0],), {})
        if has_effect(name):
            self._check_effect(fx, op)
        refs, step = self._made(form, outs, args[0] if args else None)
        results = [
            self._result(fx, op, v, ref, step, number, number) if isinstance(v, torch.Tensor) else ref
            for number, (v, ref) in enumerate(zip(vals, refs, strict=True))
        ]
        return results if isinstance(val, (tuple, list)) else results[0]

    def _made(self, form: Any, outs: tuple[Spec | None, ...], same: Any) -> tuple[list[Ref], Step | None]:
        """The outputs of an operator in its one spelling, and the step that it is if it is a view of ``same``."""
        if form is None:
            return [same], None
        target, args, kwargs = form
        refs = self.emit(target, args, kwargs, outs, "")
        assert self.at is not None
        return refs, Step(target, tuple(args), dict(kwargs), Ref(-1), outs, self.at.name)

    def _result(
        self, fx: torch.fx.Node, op: torch._ops.OpOverload, val: torch.Tensor, ref: Ref, step: Step | None,
        number: int = 0, position: int = 0,
    ) -> Alias:  # fmt: skip
        """The traced tensor that output ``position`` is: a place in the memory of an input, or new memory. It is
        output ``number`` of ``step``."""
        source = self._viewed(fx, op, val, position, step is None)
        if source is None:
            storage = self._fresh(ref, Geometry.of(val))
            return Alias(storage.first, storage.root)
        parent: Alias = self.value[source]
        by_data = parent.history.by_data
        if step is not None and step.target == "aten.detach.default":
            return self.memory.begin(parent.place, ref, by_data=by_data or str(op) == DATA)
        if step is None or ref == self._read(parent):  # the same elements
            if self.no_grad and not really_alias(fx, op)[position][1]:
                return self.memory.begin(parent.place, ref, by_data=by_data)
            return parent
        if step.parent.node < 0:
            step.parent = self._read(parent)
        place = Place(parent.place.storage, spec_of(val), Geometry.of(val), parent.place, step, number)
        step.places[number] = place
        if self.no_grad:
            return self.memory.begin(place, ref, by_data=by_data)
        parent.history.known[place] = ref
        return Alias(parent.history, place)

    def _viewed(
        self, fx: torch.fx.Node, op: torch._ops.OpOverload, val: torch.Tensor, number: int, same: bool
    ) -> torch.fx.Node | None:
        """The input whose memory an output shares."""
        name = str(op)
        if name in FRESH:
            return None
        key = storage_of(val)
        first = fx.args[0] if fx.args else None
        if isinstance(first, (list, tuple)) and isinstance(fx.meta["val"], (list, tuple)) and number < len(first):
            inputs: list[Any] = [first[number]]
        else:
            inputs = fx.all_input_nodes
        for n in inputs:
            if isinstance(n, torch.fx.Node) and isinstance(self.value.get(n), Alias):
                if storage_of(n.meta.get("val")) == key:
                    return n
        # traced values may have lost that they share memory; then the operator itself says it, without values
        if same or facts(op).may_alias:
            return really_alias(fx, op)[number][0]
        return None

    def _strided(self, fx: torch.fx.Node, val: torch.Tensor) -> Alias:
        parent: Alias = self.value[fx.args[0]]  # type: ignore[index]
        root = parent.place.storage.root
        place = Place(root.storage, spec_of(val), Geometry.of(val), root)
        try:
            if not self.no_grad:
                alias = Alias(parent.history, place)
                self._read(alias)
                return alias
            return self.memory.begin(place, self._read(Alias(parent.history, place)))
        except CannotInvert as error:
            raise self._refused(fx, f"cannot be followed: {error}", "pick elements by index instead") from None

    def emit(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Spec | None, ...], name: str
    ) -> list[Ref]:
        """Make an operator at the traced node where the walk stands."""
        fx = self.at
        assert fx is not None
        if draws_by_itself(target, args, kwargs):
            raise self._refused(
                fx, "draws random numbers, and no rule draws them alike on all ranks",
                "make them from torch.rand, torch.randn or torch.randint, or give the operator a rule (docs/adding.md)",
            )  # fmt: skip
        refs = [*refs_in(args), *refs_in(kwargs)]
        hot = any(self.nodes[r.node].hot for r in refs)
        grads = target != "aten.detach.default" and not self.no_grad and any(map(self.needs_grad, refs))
        floats = any(o is not None and o.is_float for o in outs)
        ref = self._add(
            Node(name or fx.name, "op", target, tuple(args), dict(kwargs), outs,
                 module_of(fx).removeprefix(self.prefix), source_of(fx), grads and floats, hot)
        )  # fmt: skip
        return [Ref(ref.node, i) for i in range(len(outs))]

    def needs_grad(self, ref: Ref) -> bool:
        """Whether gradients flow through a value."""
        return self.nodes[ref.node].needs_grad and self._spec_of(ref).is_float

    def _add(self, node: Node) -> Ref:
        name = node.name
        count = 1
        while name in self.names:
            name, count = f"{node.name}_{count}", count + 1
        self.names.add(name)
        if name != node.name or (self.region >= 0 and node.kind == "op"):
            node = replace(node, name=name, again=self.region if node.kind == "op" else -1)
        self.nodes.append(node)
        return Ref(len(self.nodes) - 1)

    def _fresh(self, ref: Ref, geometry: Geometry) -> Storage:
        storage = Storage(self._spec_of(ref), geometry, ref, self.needs_grad(ref))
        self.storages.append(storage)
        return storage

    # -- writes

    def _writing(self, fx: torch.fx.Node, op: torch._ops.OpOverload, known: Facts) -> Any:
        """An operator that writes: its functional form, and its results put where the written arguments lie."""
        if known.pure is None:
            return self._in_parts(fx, op, known)
        nodes = [fx.kwargs[name] if p < 0 else fx.args[p] for p, name in known.writes]
        written: list[Alias] = [self.value[n] for n in pytree.tree_leaves(nodes)]
        args, kwargs = with_defaults(op, fx.args, fx.kwargs)
        args = torch.fx.node.map_arg(args, self._look)
        out = {name for p, name in known.writes if p < 0}
        kwargs = dict(torch.fx.node.map_arg({k: v for k, v in kwargs.items() if k not in out}, self._look))
        if out and any(a.name == "dtype" for a in known.pure._schema.arguments):
            kwargs.setdefault("dtype", getattr(torch, written[0].place.spec.dtype))
        if known.drawn and not out:
            first = written[0].place.spec
            kind = {"dtype": getattr(torch, first.dtype)}
            args = (self.emit("aten.full.default", (list(first.shape), 0), kind, (first,), "")[0], *args[1:])
        new = self._functional(known.pure, args, kwargs, written[0].place.spec)
        for alias, ref in zip(written, new, strict=True):
            self._write(fx, alias, ref)
        val = fx.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return written if val else None
        if spec_of(val) != written[0].place.spec:
            raise self._refused(fx, "changes the size of a tensor", "give it an output of the right size")
        return written[0]

    def _in_parts(self, fx: torch.fx.Node, op: torch._ops.OpOverload, known: Facts) -> Any:
        """An operator that has no form without writes: the operators that it is made of."""
        inputs = [a for a in fx.args if isinstance(a, torch.fx.Node)]
        body = None
        if not fx.kwargs and all(isinstance(self.value[n], Alias) for n in inputs):
            body = parts_of(op, [without_values(a) if isinstance(a, torch.fx.Node) else a for a in fx.args])
        if body is None:
            names = ", ".join(name for _, name in known.writes)
            raise self._refused(
                fx, f"writes its argument {names} and has no form that does not", "write it out of place"
            )
        for node in body.graph.nodes:
            node.meta.update({k: v for k, v in fx.meta.items() if k != "val"})
        for placeholder, n in zip((n for n in body.graph.nodes if n.op == "placeholder"), inputs, strict=True):
            self.value[placeholder] = self.value[n]
        made = self._walk(body, self.no_grad)
        self.at = fx
        return made

    def _functional(
        self, pure: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec
    ) -> list[Ref]:
        """The results of a functional form, with the dtypes that it gives by itself."""
        name = str(pure)
        if name in ("aten.copy.default", "aten.fill.Tensor"):
            return [args[1]]
        outs = self._specs_of(pure, args, kwargs) or (spec,)
        form = normalize(name, args, kwargs, outs, self._spec_of)
        if form is None:
            return [args[0]]
        target, args, kwargs = form
        return self.emit(target, args, kwargs, outs, "")

    def _specs_of(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Spec | None, ...]:
        """What an operator gives, asked without values; empty where it does not say."""

        def empty(ref: Ref) -> torch.Tensor:
            spec = self._spec_of(ref)
            return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

        try:
            with torch.no_grad():
                made = op(*map_refs(args, empty), **map_refs(kwargs, empty))
        except (RuntimeError, NotImplementedError, TypeError):
            return ()
        return tuple(spec_of(v) for v in flat(made))

    def _write(self, fx: torch.fx.Node, alias: Alias, ref: Ref) -> None:
        if ref == self._read(alias):
            return
        storage, spec = alias.place.storage, alias.place.spec
        kind, name = storage.origin or ("", "")
        if kind == "param":
            raise self._refused(
                fx, f"writes parameter '{name}' in forward", "keep it as a buffer, or change it outside"
            )
        if kind == "input":
            raise self._refused(fx, f"writes the model's input '{name}'", "write a clone: x = x.clone()")
        if alias.history.by_data and self._kept(storage, alias):
            raise CaptureError(
                f"cannot capture a write through .data in '{module_of(fx)}'{at(fx)}: autograd has kept the values that "
                "it changes\n  compute a new tensor instead, or write to the tensor itself under torch.no_grad()"
            )
        if storage.shared:
            raise self._refused(
                fx,
                f"writes '{name}', which has the memory of '{storage.shared}' too",
                "register one of them, or a clone",
            )
        if storage.changing:
            raise self._refused(fx, f"writes '{name}', which batch norm writes too", "let one of them write it")
        try:
            self.memory.write(alias, self._filled(ref, spec), no_grad=self.no_grad)
        except CannotInvert as error:
            raise self._refused(
                fx, f"writes through a view that cannot be followed: {error}", "write a clone"
            ) from None

    def _kept(self, storage: Storage, alias: Alias) -> bool:
        """Whether autograd may have kept values of a storage for the backward, as the rules of their operators say."""
        histories = (storage.first, storage.plain, alias.history)
        values = {ref for h in histories if h.version == storage.version for ref in h.known.values()}
        for i, node in enumerate(self.nodes):
            if node.needs_grad and node.kind == "op" and node.target != "aten.detach.default":
                kept = rule_for(call_of(node, self._spec_of))
                if any(node.refs[k] in values for k in kept.saves):
                    return True
                if kept.saves_out and any(Ref(i, k) in values for k in range(len(node.outs))):
                    return True
        return False

    def _filled(self, ref: Ref, spec: Spec) -> Ref:
        """A value cast and broadcast to what it is put into."""
        own = self._spec_of(ref)
        if own.dtype != spec.dtype:
            own = Spec(own.shape, spec.dtype)
            (ref,) = self.emit("aten.to.dtype", (ref, getattr(torch, spec.dtype)), {}, (own,), "")
        if own.shape != spec.shape:
            target = "aten.reshape.default" if len(own.shape) > len(spec.shape) else "aten.expand.default"
            (ref,) = self.emit(target, (ref, list(spec.shape)), {}, (spec,), "")
        return ref

    # -- operators that write beside their schema

    def _copies_what_changes(self, fx: torch.fx.Node, op: torch._ops.OpOverload) -> bool:
        """Whether a copy is made of a buffer that an operator of the program changes in place when it runs."""
        source = fx.args[0] if fx.args else None
        alias = self.value.get(source) if isinstance(source, torch.fx.Node) else None
        return (
            isinstance(alias, Alias) and alias.place.storage.changing
            and self._viewed(fx, op, fx.meta["val"], 0, True) is None
        )  # fmt: skip

    def _check_effect(self, fx: torch.fx.Node, op: torch._ops.OpOverload) -> None:
        """Running statistics are changed where they are kept: they must be buffers that nothing else wrote."""
        if not any(argument(op, fx.args, fx.kwargs, name) for name in ("training", "use_input_stats")):
            return
        for name in ("running_mean", "running_var"):
            node = argument(op, fx.args, fx.kwargs, name)
            if isinstance(node, torch.fx.Node):
                alias: Alias = self.value[node]
                storage = alias.place.storage
                kind, _ = storage.origin or ("", "")
                if kind != "buffer" or alias.place is not storage.root or storage.version or storage.shared:
                    raise self._refused(
                        fx,
                        f"keeps its {name} in a tensor that is no buffer of its own, or is written elsewhere",
                        "register it as a buffer that only batch norm writes",
                    )
                storage.changing = True

    # -- results

    def _updates(self) -> dict[str, Ref]:
        return {
            s.origin[1]: s.value
            for s in self.storages
            if s.version and s.origin is not None and s.origin[0] == "buffer"
        }

    def _outputs(self) -> tuple[tuple[Any, ...], int | None]:
        names = [
            s.arg for s in self.exported.graph_signature.output_specs if s.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")
        ]
        self.at = next(n for n in self.exported.graph.nodes if n.op == "output")
        self.no_grad = False
        given = list(self.at.args[0])[-len(names) :] if names else []  # type: ignore[arg-type]
        outputs = tuple(self._look(v) if isinstance(v, torch.fx.Node) else v for v in given)
        loss = None
        for i, out in enumerate(outputs):
            if isinstance(out, Ref) and self.nodes[out.node].needs_grad and self._spec_of(out).shape == ():
                loss = i
                break
        return outputs, loss

    def _spec_of(self, ref: Ref) -> Spec:
        spec = self.nodes[ref.node].outs[ref.out]
        assert spec is not None
        return spec
