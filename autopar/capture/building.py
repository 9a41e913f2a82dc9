"""From the exported program to a Graph: every node in order, in one spelling, in-place writes made functional."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.capture.exported import at, flat, get, is_inplace, is_random, module_of, source_of, spec_of
from autopar.capture.own import DETACHED, own_operator, refuse_write_to_data
from autopar.capture.pruning import without_dead
from autopar.errors import CaptureError
from autopar.graph import Graph, Node, Ref, Spec, map_refs, refs_in
from autopar.normalize import DROPPED, FUNCTIONAL, normalize

_VIEW_WRITES = frozenset(
    {"aten.slice.Tensor", "aten.select.int", "aten.view.default", "aten.transpose.int", "aten.permute.default"}
)


def _gives_one(target: str) -> bool:
    """Operators that always give one tensor, also where they stand for one that gave several."""
    return target in ("aten.expand.default", "aten.detach.default")


class Builder:
    """Walks the exported FX graph once, in order, rewriting as it goes."""

    def __init__(self, module: torch.nn.Module, exported: Any, prefix: str) -> None:
        self.exported, self.prefix = exported, prefix
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        self.nodes: list[Node] = []
        self.names: set[str] = set()
        self.value: dict[torch.fx.Node, Any] = {}
        self.base: dict[Ref, tuple[str, Ref, tuple[Any, ...]]] = {}
        self.now: dict[Ref, Ref] = {}
        self.cse: dict[Any, int] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.detached: dict[Ref, Ref] = {}
        self.region = -1

    # -- placeholders

    def build(self) -> tuple[Graph, list[Any]]:
        signature = self.exported.graph_signature
        specs = {s.arg.name: s for s in signature.input_specs}
        by_storage: dict[Any, int] = {}
        tied: dict[str, str] = {}
        user: list[Any] = []
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
                key = id(tensor)
                if key in by_storage:
                    tied[target] = self.nodes[by_storage[key]].target
                    self.value[fx] = Ref(by_storage[key])
                    continue
                grads = kind == "PARAMETER" and bool(tensor.requires_grad)
                self.value[fx] = self._add(
                    Node(target, "param" if kind == "PARAMETER" else "buffer", target, outs=(spec_of(val),),
                         needs_grad=grads, hot=kind == "PARAMETER", module=target.rpartition(".")[0])
                )  # fmt: skip
                by_storage[key] = self.value[fx].node
            elif kind == "USER_INPUT":
                if isinstance(val, torch.Tensor):
                    name = fx.name
                    grad = bool(val.requires_grad) and val.is_floating_point()
                    # an input that wants a gradient is planned like what depends on parameters
                    self.value[fx] = self._add(
                        Node(name, "input", name, outs=(spec_of(val),), needs_grad=grad, hot=grad)
                    )
                    user.append(self.value[fx].node)
                else:
                    self.value[fx] = val
                    user.append(None)
            else:
                raise CaptureError(f"the model has an input of kind {kind} ({fx.name}), which cannot be planned")
        # every name of a tied parameter, also those that torch.export left out
        for name, tensor in self.parameters.items():
            node = by_storage.get(id(tensor))
            short = name.removeprefix(self.prefix)
            if node is not None and self.nodes[node].target != short:
                tied.setdefault(short, self.nodes[node].target)
        self._walk(self.exported.graph_module)
        outputs, loss = self._outputs()
        graph = Graph(tuple(self.nodes), outputs, loss, tied, self._updates())
        return without_dead(graph, user)

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

    # -- operators

    def _walk(self, gm: torch.fx.GraphModule, no_grad: bool = False) -> Any:
        for fx in gm.graph.nodes:
            if fx.op == "placeholder":
                continue
            if fx.op == "output":
                return torch.fx.node.map_arg(fx.args[0], self._look)
            if fx.op == "get_attr":
                attr = get(gm, str(fx.target))
                if isinstance(attr, torch.Tensor):
                    name = f"const.{fx.target}"
                    self.constants[name] = attr
                    self.value[fx] = self._add(Node(name, "buffer", name, outs=(spec_of(attr),)))
                else:
                    self.value[fx] = attr
                continue
            self._operator(fx, gm, no_grad)
        return None

    def _look(self, fx: torch.fx.Node) -> Any:
        return self._current(self.value[fx])

    def _current(self, value: Any) -> Any:
        while isinstance(value, Ref) and value in self.now:
            value = self.now[value]
        return value

    def _operator(self, fx: torch.fx.Node, gm: torch.fx.GraphModule, no_grad: bool) -> None:
        target = fx.target
        if target is operator.getitem:
            container = self.value[fx.args[0]]  # type: ignore[index]
            item = container[fx.args[1]]  # type: ignore[index]
            self.value[fx] = item
            return
        name = str(target)
        if name in DETACHED:  # after detach_() the tensor is another, and only that is read
            name = "aten.detach.default"
        if "wrap_with_set_grad_enabled" in name:
            self._region(fx, bool(fx.args[0]))
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(
                f"cannot capture '{name}' in '{module_of(fx)}'" + at(fx) + "\n  higher-order operators "
                "(control flow, autocast regions) cannot be planned; write that part with plain tensor operations"
            )
        args = torch.fx.node.map_arg(fx.args, self._look)
        kwargs = dict(torch.fx.node.map_arg(fx.kwargs, self._look))
        if no_grad:
            args, kwargs = (map_refs(v, self._without_grad(fx)) for v in (args, kwargs))
        if name.startswith("autopar.") and name not in DETACHED:
            self.value[fx] = own_operator(self, fx, name, args, no_grad)
            return
        if name in DROPPED:
            self.value[fx] = args[0] if args and not name.startswith("aten._assert") else None
            return
        if name == "aten.broadcast_tensors.default":
            self.value[fx] = [
                self._emit_form(
                    fx,
                    normalize("aten.expand.default", (v, list(o.shape)), {}, (spec_of(o),), self._spec_of),
                    v,
                    o,
                    no_grad,
                )
                for v, o in zip(list(args[0]), fx.meta["val"], strict=True)  # type: ignore[arg-type]
            ]
            return
        shapes = [n for v in flat(fx.meta.get("val")) if isinstance(v, torch.Tensor) for n in v.shape]
        if any(
            isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool))
            for v in (*pytree.tree_leaves((args, kwargs)), *shapes)
        ):
            raise CaptureError(
                f"'{name}' in '{module_of(fx)}' has a size that depends on data" + at(fx) + "\n  use fixed sizes: "
                "a mask or torch.where instead of selecting"
            )
        self.value[fx] = self._emit(fx, name, args, kwargs, fx.meta.get("val"), no_grad)

    def _emit(self, fx: torch.fx.Node, name: str, args: Any, kwargs: Any, val: Any, no_grad: bool) -> Any:
        mutated: Ref | None = None
        refuse_write_to_data(fx)
        if is_inplace(fx.target) and name in FUNCTIONAL:
            mutated = self._look(fx.args[0])  # type: ignore[arg-type]
            name = FUNCTIONAL[name]
        elif is_inplace(fx.target) and name != "aten.detach.default":
            raise CaptureError(f"in-place '{name}' in '{module_of(fx)}'" + at(fx) + "\n  write it out of place")
        outs = tuple(spec_of(v) if isinstance(v, torch.Tensor) else None for v in flat(val))
        form = normalize(name, args, kwargs, outs, self._spec_of)
        if form is None:  # nothing happens: the result is the first argument
            result: Any = args[0]
        else:
            target, args, kwargs = form
            result = self._op(fx, target, args, kwargs, outs, no_grad)
        if mutated is not None:
            self._write_back(fx, mutated, result)
        elif isinstance(result, Ref) and isinstance(fx.args[0] if fx.args else None, torch.fx.Node):
            if name in _VIEW_WRITES and isinstance(args[0], Ref):
                self.base[result] = (name, args[0], tuple(args[1:]))
        return result

    def _emit_form(self, fx: torch.fx.Node, form: Any, same: Any, val: Any, no_grad: bool) -> Any:
        if form is None:
            return same
        target, args, kwargs = form
        return self._op(fx, target, args, kwargs, (spec_of(val),), no_grad)

    def _op(self, fx: torch.fx.Node, target: str, args: Any, kwargs: Any, outs: Any, no_grad: bool) -> Any:
        refs = [*refs_in(args), *refs_in(kwargs)]
        hot = any(self.nodes[r.node].hot for r in refs)
        grads = (
            not no_grad
            and target != "aten.detach.default"
            and any(self.nodes[r.node].needs_grad and self._spec_of(r).is_float for r in refs)
        )
        floats = any(o is not None and o.is_float for o in outs)
        key = None
        if not hot and not is_random(target):
            key = (target, repr(args), repr(sorted(kwargs.items())), outs)
            if key in self.cse:
                number = self.cse[key]
                return Ref(number) if len(outs) == 1 else [Ref(number, i) for i in range(len(outs))]
        ref = self._add(
            Node(fx.name, "op", target, tuple(args), dict(kwargs), outs, module_of(fx).removeprefix(self.prefix),
                 source_of(fx), grads and floats, hot)
        )  # fmt: skip
        if key is not None:
            self.cse[key] = ref.node
        if len(outs) == 1 and (_gives_one(target) or not isinstance(fx.meta.get("val"), (tuple, list))):
            return ref
        return [Ref(ref.node, i) for i in range(len(outs))]

    def _region(self, fx: torch.fx.Node, enabled: bool) -> None:
        body = self.value[fx.args[1]]  # type: ignore[index]
        inputs = [self._look(a) if isinstance(a, torch.fx.Node) else a for a in fx.args[2:]]
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for placeholder, v in zip(placeholders, inputs, strict=True):
            self.value[placeholder] = v
        self.value[fx] = self._walk(body, not enabled)

    def _without_grad(self, fx: torch.fx.Node) -> Callable[[Ref], Ref]:
        """What an operator without gradients reads: what is only passed on in such a region keeps its own."""

        def detached(ref: Ref) -> Ref:
            if not self.nodes[ref.node].needs_grad or not self._spec_of(ref).is_float:
                return ref
            if ref not in self.detached:
                self.detached[ref] = self._op(fx, "aten.detach.default", (ref,), {}, (self._spec_of(ref),), True)
            return self.detached[ref]

        return detached

    # -- writes

    def _write_back(self, fx: torch.fx.Node, old: Any, new: Any) -> None:
        """Make ``new`` the current value of ``old``, and of every tensor that ``old`` is a view of."""
        if not isinstance(old, Ref) or not isinstance(new, Ref):
            return
        self.now[old] = new
        if old not in self.base:
            return
        op, base, rest = self.base[old]
        spec = self._spec_of(base)
        base = self._current(base)
        if op == "aten.slice.Tensor":
            dim = rest[0] if rest else 0
            full: tuple[Any, ...] = (base, new, dim, *rest[1:])
            updated = self._op(fx, "aten.slice_scatter.default", full, {}, (spec,), False)
        elif op == "aten.select.int":
            updated = self._op(fx, "aten.select_scatter.default", (base, new, *rest), {}, (spec,), False)
        else:
            raise CaptureError(
                f"in-place write through '{op}' in '{module_of(fx)}'" + at(fx) + "\n  write it out of place"
            )
        original = self.base[old][1]
        self._write_back(fx, original, updated)

    def _updates(self) -> dict[str, Ref]:
        return {
            self.nodes[old.node].target: self._current(old) for old in self.now if self.nodes[old.node].kind == "buffer"
        }

    def _outputs(self) -> tuple[tuple[Any, ...], int | None]:
        names = [
            s.arg for s in self.exported.graph_signature.output_specs if s.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")
        ]
        fx_out = next(n for n in self.exported.graph.nodes if n.op == "output")
        flat = list(fx_out.args[0])[-len(names) :] if names else []
        outputs = tuple(self._look(v) if isinstance(v, torch.fx.Node) else v for v in flat)
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
