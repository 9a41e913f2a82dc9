"""Operators that write nothing: each result is new memory, or a place in the memory of an input."""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.aliasing.schemas import argument, facts
from autopar.capture.aliasing.sharing import NEW, Shared, Sharing
from autopar.capture.aliasing.storages import Alias, CannotInvert, Geometry, Memory, Place, Storage, ViewStep
from autopar.capture.graph.dead_operators import has_effect
from autopar.capture.graph.exported_nodes import flat, name_of, spec_of, storage_of
from autopar.capture.graph.node_emitter import NodeEmitter
from autopar.capture.normalize import DROPPED, FRESH, Form, normalize
from autopar.capture.trace.recording import DATA
from autopar.torch_private import OpOverload
from autopar.words.graph import Ref, Spec
from autopar.words.trees import PyTree


class TensorViews:
    """Reader of traced tensors, and of operators that write nothing.

    Attributes:
        value: the result of a node of the traced program: an :class:`Alias` for a tensor.
        storages: all memory that was met.
    """

    def __init__(self, emitter: NodeEmitter) -> None:
        self.emitter = emitter
        self.value: dict[torch.fx.Node, Any] = {}
        self.storages: list[Storage] = []
        self.memory = Memory(emitter)
        self.sharing = Sharing()

    def read(self, value: object) -> Any:
        """Return the values of tensors now, in nested tuples and lists."""
        if isinstance(value, Alias):
            return self.memory.read(value, no_grad=self.emitter.no_grad)
        if isinstance(value, (tuple, list)):
            return type(value)(self.read(v) for v in value)
        return value

    def look(self, fx: torch.fx.Node) -> Any:
        """Return the value of a node of the traced program now."""
        return self.read(self.value[fx])

    def pure(self, fx: torch.fx.Node, op: OpOverload) -> Any:
        """Take in an operator that writes nothing: its results are new values, or views of its inputs."""
        name, val = name_of(op), fx.meta["val"]
        vals = flat(val)
        if name == "aten.as_strided.default":
            return self._strided(fx, val)
        args: tuple[PyTree, ...] = torch.fx.node.map_arg(fx.args, self.look)
        kwargs = dict(torch.fx.node.map_arg(fx.kwargs, self.look))
        outs = tuple(spec_of(v) if isinstance(v, torch.Tensor) else None for v in vals)
        if name == "aten.broadcast_tensors.default":
            forms = [
                normalize("aten.expand.default", (x, list(o.shape)), {}, (o,), self.emitter.spec_of)
                for x, o in zip(args[0], outs, strict=True) if o is not None
            ]  # fmt: skip
            as_made = [self._made(form, (o,), x) for form, o, x in zip(forms, outs, args[0], strict=True)]
            return [
                self._result(fx, op, v, refs[0], step, position=i)
                for i, (v, (refs, step)) in enumerate(zip(vals, as_made, strict=True))
            ]
        if name == DATA:
            form: Form | None = ("aten.detach.default", args, {})
        else:
            form = None if name in DROPPED else normalize(name, args, kwargs, outs, self.emitter.spec_of)
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

    def _made(self, form: Any, outs: tuple[Spec | None, ...], same: Any) -> tuple[list[Ref], ViewStep | None]:
        """Make an operator in its one spelling; return its outputs, and its view step if it is a view of ``same``."""
        if form is None:
            return [same], None
        target, args, kwargs = form
        refs = self.emitter.emit(target, args, kwargs, outs, "")
        assert self.emitter.at is not None
        return refs, ViewStep(target, tuple(args), dict(kwargs), Ref(-1), outs, self.emitter.at.name)

    def _result(
        self, fx: torch.fx.Node, op: OpOverload, val: torch.Tensor, ref: Ref, step: ViewStep | None,
        number: int = 0, position: int = 0,
    ) -> Alias:  # fmt: skip
        """Return the traced tensor that output ``position`` is: a place in the memory of an input, or new memory.

        It is output ``number`` of ``step``.
        """
        shared = self._shared(fx, op, val, position, step is None)
        if shared is NEW:
            storage = self.fresh(ref, Geometry.of(val))
            return Alias(storage.first, storage.root)
        parent: Alias = self.value[fx.all_input_nodes[shared.source]]
        by_data = parent.history.by_data
        if step is not None and step.target == "aten.detach.default":
            return self.memory.begin(parent.place, ref, by_data=by_data or str(op) == DATA)
        if step is None or ref == self.read(parent):  # the same elements
            if self.emitter.no_grad and not shared.itself:
                return self.memory.begin(parent.place, ref, by_data=by_data)
            return parent
        if step.parent.node < 0:
            step.parent = self.read(parent)
        geometry = Geometry.within(parent.place.geometry, val, shared.stride, shared.offset)
        place = Place(parent.place.storage, spec_of(val), geometry, parent.place, step, number)
        step.places[number] = place
        if self.emitter.no_grad:
            return self.memory.begin(place, ref, by_data=by_data)
        parent.history.known[place] = ref
        return Alias(parent.history, place)

    def _shared(
        self, fx: torch.fx.Node, op: OpOverload, val: torch.Tensor, number: int, same: bool
    ) -> Shared:
        """Return the memory of an output; ``same`` says that it has the values of the first input."""
        if name_of(op) in FRESH:
            return NEW
        inputs = fx.all_input_nodes
        key = storage_of(val)
        traced = next((i for i, n in enumerate(inputs) if storage_of(n.meta.get("val")) == key), -1)
        if not (same or facts(op).may_alias or traced >= 0):
            return NEW
        asked = self.sharing(fx, op)
        shared = asked[number] if asked else Shared(traced)
        in_traced_memory = shared.source >= 0 and isinstance(self.value.get(inputs[shared.source]), Alias)
        return shared if in_traced_memory else NEW

    def _strided(self, fx: torch.fx.Node, val: torch.Tensor) -> Alias:
        parent: Alias = self.value[fx.args[0]]  # type: ignore[index]
        root = parent.place.storage.root
        geometry = None
        if parent.place.geometry is not None:
            offset = argument(torch.ops.aten.as_strided.default, fx.args, fx.kwargs, "storage_offset")
            offset = parent.place.geometry.offset if offset is None else offset - root.storage.begins
            geometry = Geometry(tuple(val.size()), tuple(val.stride()), offset, val.dtype)
        place = Place(root.storage, spec_of(val), geometry, root)
        try:
            if not self.emitter.no_grad:
                alias = Alias(parent.history, place)
                self.read(alias)
                return alias
            return self.memory.begin(place, self.read(Alias(parent.history, place)))
        except CannotInvert as error:
            raise self.emitter.refused(fx, f"cannot be followed: {error}", "pick elements by index instead") from None

    def fresh(self, ref: Ref, geometry: Geometry) -> Storage:
        """Make a storage for new memory."""
        storage = Storage(self.emitter.spec_of(ref), geometry, ref, self.emitter.needs_grad(ref))
        self.storages.append(storage)
        return storage

    # -- operators that write beside their schema

    def _copies_what_changes(self, fx: torch.fx.Node, op: OpOverload) -> bool:
        """Check whether a copy is made of a buffer that an operator of the program changes in place when it runs."""
        source = fx.args[0] if fx.args else None
        alias = self.value.get(source) if isinstance(source, torch.fx.Node) else None
        return (
            isinstance(alias, Alias) and alias.place.storage.changing
            and self._shared(fx, op, fx.meta["val"], 0, True) is NEW
        )  # fmt: skip

    def _check_effect(self, fx: torch.fx.Node, op: OpOverload) -> None:
        """Check that running statistics, which change in place, are buffers that nothing else wrote."""
        if not any(argument(op, fx.args, fx.kwargs, name) for name in ("training", "use_input_stats")):
            return
        for name in ("running_mean", "running_var"):
            node = argument(op, fx.args, fx.kwargs, name)
            if isinstance(node, torch.fx.Node):
                alias: Alias = self.value[node]
                storage = alias.place.storage
                kind, _ = storage.origin or ("", "")
                if kind != "buffer" or alias.place is not storage.root or storage.version or storage.shared:
                    raise self.emitter.refused(
                        fx,
                        f"keeps its {name} in a tensor that is no buffer of its own, or is written elsewhere",
                        "register it as a buffer that only batch norm writes",
                    )
                storage.changing = True
