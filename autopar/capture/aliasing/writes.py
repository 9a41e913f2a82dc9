"""Operators that write: their functional form, and its result put where the written tensor lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.aliasing.schemas import Facts, parts_of, results_of, with_defaults
from autopar.capture.aliasing.storages import Alias, CannotInvert, Storage
from autopar.capture.aliasing.views import TensorViews
from autopar.capture.graph.drafts import Refusal
from autopar.capture.graph.exported_nodes import at, module_of, spec_of, without_values
from autopar.capture.normalize import normalize
from autopar.errors import CaptureError
from autopar.rules.operator_call import call_of
from autopar.rules.registry import rule_for
from autopar.torch_private import OpOverload, pytree
from autopar.words.graph import Ref, Spec, refs_in
from autopar.words.trees import PyTree


class TensorWrites:
    """Reader of operators that write.

    Attributes:
        walk: walks over the operators that a composite operator is made of, and returns its results.
        changed_by_data: writes through ``.data`` to values that autograd has kept: the operators that need them in
            their backward, and the error if there is one.
        refusals: for each trained parameter that is written, makes the error of its last write.
    """

    def __init__(self, views: TensorViews, walk: Callable[[torch.fx.GraphModule, bool], object]) -> None:
        self.views, self.emitter, self.walk = views, views.emitter, walk
        self.changed_by_data: list[tuple[set[int], CaptureError]] = []
        self.refusals: dict[str, Refusal] = {}

    def write(self, fx: torch.fx.Node, op: OpOverload, schema: Facts) -> Any:
        """Take in an operator that writes: its functional form, whose results replace the written arguments."""
        if schema.pure is None:
            return self._in_parts(fx, op, schema)
        nodes = [fx.kwargs[name] if p < 0 else fx.args[p] for p, name in schema.writes]
        written: list[Alias] = [self.views.value[n] for n in pytree.tree_leaves(nodes)]
        args, kwargs = with_defaults(op, fx.args, fx.kwargs)
        args = torch.fx.node.map_arg(args, self.views.look)
        out = {name for p, name in schema.writes if p < 0}
        kwargs = dict(torch.fx.node.map_arg({k: v for k, v in kwargs.items() if k not in out}, self.views.look))
        if out and any(a.name == "dtype" for a in schema.pure._schema.arguments):
            kwargs.setdefault("dtype", getattr(torch, written[0].place.spec.dtype))
        if schema.drawn and not out:
            first = written[0].place.spec
            kind = {"dtype": getattr(torch, first.dtype)}
            args = (self.emitter.emit("aten.full.default", (list(first.shape), 0), kind, (first,), "")[0], *args[1:])
        new = self._functional(schema.pure, args, kwargs, written[0].place.spec)
        for alias, ref in zip(written, new, strict=True):
            self._write(fx, alias, ref)
        val = fx.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return written if val else None
        if spec_of(val) != written[0].place.spec:
            raise self.emitter.refused(fx, "changes the size of a tensor", "give it an output of the right size")
        return written[0]

    def _in_parts(self, fx: torch.fx.Node, op: OpOverload, schema: Facts) -> Any:
        """Take in an operator without functional form, by the operators that it is made of."""
        inputs = [a for a in fx.args if isinstance(a, torch.fx.Node)]
        body = None
        if not fx.kwargs and all(isinstance(self.views.value[n], Alias) for n in inputs):
            body = parts_of(op, [without_values(a) if isinstance(a, torch.fx.Node) else a for a in fx.args])
        if body is None:
            names = ", ".join(name for _, name in schema.writes)
            raise self.emitter.refused(
                fx, f"writes its argument {names} and has no form that does not", "write it out of place"
            )
        for node in body.graph.nodes:
            node.meta.update({k: v for k, v in fx.meta.items() if k != "val"})
        for placeholder, n in zip((n for n in body.graph.nodes if n.op == "placeholder"), inputs, strict=True):
            self.views.value[placeholder] = self.views.value[n]
        result = self.walk(body, self.emitter.no_grad)
        self.emitter.at = fx
        return result

    def _functional(
        self, pure: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], spec: Spec
    ) -> list[Ref]:
        """Return the results of a functional form, with the dtypes that it gives by itself."""
        name = str(pure)
        if name in ("aten.copy.default", "aten.fill.Tensor"):
            return [args[1]]
        outs = results_of(pure, args, kwargs, self.emitter.spec_of) or (spec,)
        form = normalize(name, args, kwargs, outs, self.emitter.spec_of)
        if form is None:
            return [args[0]]
        target, args, kwargs = form
        return self.emitter.emit(target, args, kwargs, outs, "")

    def _write(self, fx: torch.fx.Node, alias: Alias, ref: Ref) -> None:
        if ref == self.views.read(alias):
            return
        storage, spec = alias.place.storage, alias.place.spec
        kind, name = storage.origin or ("", "")
        if kind == "param":
            self._becomes_state(fx, storage, name)
        if kind == "input":
            raise self.emitter.refused(fx, f"writes to its input '{name}' in place", "write a clone: x = x.clone()")
        if alias.history.by_data and (keepers := self._keepers(storage, alias)):
            error = CaptureError(
                f"cannot capture a write through .data in '{module_of(fx)}'{at(fx)}: autograd has kept the values that "
                "it changes\n  compute a new tensor instead, or write to the tensor itself under torch.no_grad()"
            )
            self.changed_by_data.append((keepers, error))
        if storage.shared:
            raise self.emitter.refused(
                fx,
                f"writes '{name}', which has the memory of '{storage.shared}' too",
                "register one of them, or a clone",
            )
        if storage.changing:
            raise self.emitter.refused(fx, f"writes '{name}', which batch norm writes too", "let one of them write it")
        try:
            # autograd sees no write to a leaf, also where all of forward runs without gradients
            no_grad = self.emitter.no_grad or name in self.refusals
            self.views.memory.write(alias, self._filled(ref, spec), no_grad=no_grad)
        except CannotInvert as error:
            raise self.emitter.refused(
                fx, f"writes through a view that cannot be followed: {error}", "write a clone"
            ) from None

    def _becomes_state(self, fx: torch.fx.Node, storage: Storage, name: str) -> None:
        """Make a frozen parameter that the forward writes state that a call renews, as buffers are.

        It stays registered as a parameter. Of a trained one, the new value has to be known before the call
        (:mod:`autopar.capture.graph.written_first`).
        """
        number = next(i for i, node in enumerate(self.emitter.nodes) if node.kind == "param" and node.target == name)
        if self.emitter.nodes[number].needs_grad:
            self.refusals[name] = lambda why, do: self.emitter.refused(
                fx, f"writes parameter '{name}' in forward, which is trained, {why}", do
            )
            return
        self.emitter.nodes[number] = replace(self.emitter.nodes[number], kind="buffer")
        storage.origin = ("buffer", name)

    def assigned(self, fx: torch.fx.Node) -> None:
        """Take in ``x.data = value``: ``x`` has the memory of ``value`` from here on, others keep its former one.

        Raises:
            CaptureError: ``x`` is no parameter or buffer, or the memory is that of another one, or of an input.
        """
        x, value = (self.views.value[n] for n in fx.args)  # type: ignore[index]
        before = x.place.storage
        kind, name = before.origin or ("", "")
        if value.place is before.root:  # ``x.data *= y`` writes, and assigns what it has written
            return
        refused, do = "", "go on with the new tensor"
        if kind not in ("param", "buffer") or x.place is not before.root or before.shared:
            refused = "the tensor is no parameter or buffer of its own"
        elif (origin := value.place.storage.origin) is not None:
            refused, do = f"'{name}' would have the memory of '{origin[1]}'", "copy the values: x.data = y.clone()"
        if refused:
            raise CaptureError(
                f"cannot capture an assignment to .data in '{module_of(fx) or '<model>'}'{at(fx)}: {refused}\n  {do}"
            )
        if kind == "param":
            self._becomes_state(fx, before, name)
        ref = self.views.memory.read(value, no_grad=True)
        is_root = value.place.parent is None
        storage = value.place.storage if is_root else self.views.fresh(ref, before.root.geometry)
        storage.version += 1
        if name in self.refusals:  # it is trained: its gradient goes on as if nothing had been assigned
            moved = self.views.memory.begin(storage.root, ref, history=self.views.memory.read(x))
            before.origin, storage.origin = None, (kind, name)
        else:
            moved = self.views.memory.begin(storage.root, ref)
            before.origin, storage.origin = None, ("buffer", name)
        for node in [node for node, alias in self.views.value.items() if alias is x]:
            self.views.value[node] = moved

    def check_changed_by_data(self, outputs: object) -> None:
        """Refuse writes through ``.data`` to values that a backward needs.

        Where no gradient reaches the operators that need them, such as the distances from which a codebook takes the
        nearest, the values may change.

        Raises:
            CaptureError: a gradient reaches them.
        """
        todo, reached = list(refs_in(outputs)), set[int]()
        while todo and self.changed_by_data:
            number = todo.pop().node
            if number not in reached and self.emitter.nodes[number].needs_grad:
                reached.add(number)
                todo.extend(self.emitter.nodes[number].refs)
        for keepers, error in self.changed_by_data:
            if reached & keepers:
                raise error

    def _keepers(self, storage: Storage, alias: Alias) -> set[int]:
        """Return the operators of which autograd may have kept values of a storage for the backward, by their rules."""
        histories = (storage.first, storage.plain, alias.history)
        values = {ref for h in histories if h.version == storage.version for ref in h.known.values()}
        keepers = set()
        for i, node in enumerate(self.emitter.nodes):
            if node.needs_grad and node.kind == "op" and node.target != "aten.detach.default":
                kept = rule_for(call_of(node, self.emitter.spec_of))
                of_inputs = any(node.refs[k] in values for k in kept.saves)
                if of_inputs or (kept.saves_out and any(Ref(i, k) in values for k in range(len(node.outs)))):
                    keepers.add(i)
        return keepers

    def _filled(self, ref: Ref, spec: Spec) -> Ref:
        """Return a value, cast and broadcast to the tensor that it is written to."""
        value_spec = self.emitter.spec_of(ref)
        if value_spec.dtype != spec.dtype:
            value_spec = Spec(value_spec.shape, spec.dtype)
            (ref,) = self.emitter.emit("aten.to.dtype", (ref, getattr(torch, spec.dtype)), {}, (value_spec,), "")
        if value_spec.shape != spec.shape:
            target = "aten.reshape.default" if len(value_spec.shape) > len(spec.shape) else "aten.expand.default"
            (ref,) = self.emitter.emit(target, (ref, list(spec.shape)), {}, (spec,), "")
        return ref
