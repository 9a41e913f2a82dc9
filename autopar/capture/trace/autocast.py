"""Autocast in a trace: its regions become the casts that it makes.

``torch.autocast`` casts what operators take and marks nothing: ``torch.export`` records operators without the casts, in
regions (``wrap_with_autocast``), or with no mark at all where it is on around the whole call. A program that is cut
and priced needs the casts themselves. Torch decides them: each operator under autocast is called once on tensors
without values, and what it casts on the way becomes a node of the trace. What autocast tells an operator to compute in
by its ``dtype`` argument is written there, and an operator that is put together of others, some of which cast, is
replaced by these.

As in eager mode, a parameter is cast once in a region, and everything else where it is used: gradients of the first
are summed in the low precision, those of the others behind their casts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.graph.exported_nodes import at, flat, get, is_symbolic, module_of, name_of
from autopar.errors import CaptureError
from autopar.torch_private import FakeTensor, FakeTensorMode, OpOverload, TorchDispatchMode, has_kernel, pytree
from autopar.words.autocasting import AutocastState as State
from autopar.words.autocasting import autocast_as
from autopar.words.trees import PyTree

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
PLACE = "autocast"
"""Casts stand in a module of that name below the one whose operator wants them, where pins of operators do not hit."""
_COPY = torch.ops.aten._to_copy.default
_TO = torch.ops.aten.to.dtype


def write_casts(exported: Any, module: torch.nn.Module, around: State) -> None:
    """Put the casts of autocast into an exported program; its regions mean nothing any more then.

    ``module``: that was exported. ``around``: the autocast that was on when it was.
    """
    graph = exported.graph_module.graph
    if not around and not _has_regions(exported.graph_module):
        return
    named = dict(module.named_parameters(remove_duplicate=False))
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    leaves: dict[torch.fx.Node, int] = {}
    kinds = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(value := node.meta.get("val"), torch.Tensor):
                kinds.add(value.device.type)
            parameter = named.get(specs[node.name].target or "")
            if parameter is not None and parameter.requires_grad and parameter.dtype == torch.float32:
                leaves[node] = id(parameter)
    kind = next(iter(sorted(kinds - {"meta"})), "meta" if kinds else "cpu")
    _Writer(kind).write(exported.graph_module, around, leaves)


def _has_regions(gm: torch.fx.GraphModule) -> bool:
    """Check that a region of a trace, or one inside of others, turns autocast on."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and "wrap_with_autocast" in name_of(node.target) and node.args[2]:
            return True
        if node.op == "get_attr" and isinstance(body := get(gm, str(node.target)), torch.fx.GraphModule):
            if _has_regions(body):
                return True
    return False


@dataclass
class _Casts:
    """The change that autocast makes to one operator.

    Attributes:
        inputs: the precision to which it casts each tensor argument, or None.
        dtype: what it sets the operator's ``dtype`` argument to, or None.
        apart: it acts on the operators that this one is put together of.
    """

    inputs: list[torch.dtype | None] = field(default_factory=list)
    dtype: torch.dtype | None = None
    apart: bool = False


class _Writer:
    """The writer of casts into the graphs of one trace.

    Args:
        kind: the type of the device that the model is on.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.asked: dict[Any, _Casts] = {}

    def write(self, gm: torch.fx.GraphModule, state: State, leaves: Mapping[torch.fx.Node, int]) -> None:
        """Write the casts of one graph and of the regions in it; ``leaves`` are its parameters, by identity."""
        kept: dict[tuple[int, torch.dtype], torch.fx.Node] = {}
        for node in list(gm.graph.nodes):
            if node.op != "call_function":
                continue
            name = name_of(node.target)
            inside = state
            if "wrap_with_autocast" in name:
                kind, dtype, enabled = node.args[:3]
                inside = {k: v for k, v in state.items() if k != kind} | ({kind: dtype} if enabled else {})
            elif "wrap_with_set_grad_enabled" not in name:
                if self.kind in state or (self.kind == "meta" and state):
                    self._operator(gm, node, state, leaves, kept)
                continue
            position = next(i for i, arg in enumerate(node.args) if self._body(gm, arg) is not None)
            body = self._body(gm, node.args[position])
            assert body is not None
            placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
            passed = zip(placeholders, node.args[position + 1 :], strict=True)
            self.write(body, inside, {p: leaves[arg] for p, arg in passed if arg in leaves})

    def _body(self, gm: torch.fx.GraphModule, arg: object) -> torch.fx.GraphModule | None:
        if not isinstance(arg, torch.fx.Node) or arg.op != "get_attr":
            return None
        body = get(gm, str(arg.target))
        return body if isinstance(body, torch.fx.GraphModule) else None

    def _operator(
        self, gm: torch.fx.GraphModule, node: torch.fx.Node, state: State, leaves: Mapping[torch.fx.Node, int],
        kept: dict[tuple[int, torch.dtype], torch.fx.Node],
    ) -> None:  # fmt: skip
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace != "aten" or target in (_TO, _COPY):
            return
        values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _value(gm, n))
        tensors = [n for n in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(n, torch.fx.Node)]
        if not any(isinstance(v := _value(gm, n), torch.Tensor) and v.is_floating_point() for n in tensors):
            return
        casts = self._casts(node, values, state)
        if casts.apart:
            self._write_apart(gm, node, values, state)
            return
        if casts.dtype is not None:
            names = [a.name for a in target._schema.arguments]
            position = names.index("dtype")
            node.args = node.args[:position]
            node.kwargs = {**node.kwargs, "dtype": casts.dtype}
        wanted = iter(casts.inputs)

        def cast(arg: torch.fx.Node) -> torch.fx.Node:
            dtype = next(wanted) if isinstance(_value(gm, arg), torch.Tensor) else None
            if dtype is None:
                return arg
            leaf = leaves.get(arg)
            if leaf is not None and (leaf, dtype) in kept:
                return kept[leaf, dtype]
            with gm.graph.inserting_before(node):
                new = gm.graph.create_node("call_function", _TO, (arg, dtype), {}, name=f"{node.name}_cast")
            value = _value(gm, arg)
            copied = torch.empty_strided(tuple(value.shape), tuple(value.stride()), dtype=dtype, device="meta")
            new.meta = {**_place(node, PLACE), "val": copied.requires_grad_(value.requires_grad)}
            if leaf is not None and dtype == state[self.kind]:
                kept[leaf, dtype] = new
            return new

        node.args, node.kwargs = torch.fx.node.map_arg((node.args, node.kwargs), cast)

    def _casts(self, node: torch.fx.Node, values: PyTree, state: State) -> _Casts:
        leaves, spec = pytree.tree_flatten(values)
        key = (
            node.target, str(spec), tuple(sorted(state.items(), key=str)),
            tuple([(v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else repr(v) for v in leaves]),
        )  # fmt: skip
        if key not in self.asked:
            if is_symbolic((values, [v.shape for v in leaves if isinstance(v, torch.Tensor)])):
                self.asked[key] = _Casts()  # it is refused for that
            else:
                self.asked[key] = self._ask(node, leaves, spec, state)
        return self.asked[key]

    def _ask(self, node: torch.fx.Node, leaves: Sequence[object], spec: pytree.TreeSpec, state: State) -> _Casts:
        """Return the change that autocast makes to a call, by making the call on tensors without values."""
        target = node.target
        assert isinstance(target, OpOverload)
        if self.kind == "meta":
            raise CaptureError(
                f"'{target}' in '{module_of(node)}' is under torch.autocast{at(node)}, and the model is on the meta "
                "device, where torch's autocast casts nothing, so that forward reads other dtypes than it will have "
                "where it runs\n  give precision='bf16-mixed' in place of autocast, or make the model on a device "
                "(torch.device('cpu'))"
            )
        fakes = _on(self.kind, leaves)
        tensors = [x for x in fakes if isinstance(x, torch.Tensor)]
        seen, given = _called(target, fakes, spec, state)
        inputs: list[torch.dtype | None] = [None] * len(tensors)
        registered = has_kernel(target.name(), _KEYS[self.kind])
        if registered:
            for op, args, kwargs in seen:
                if op is _COPY:
                    of = next((i for i, x in enumerate(tensors) if x is args[0] and inputs[i] is None), None)
                    if of is not None and kwargs.get("dtype") not in (None, args[0].dtype):
                        inputs[of] = kwargs["dtype"]
        wanted = iter(inputs)
        cast = [
            x.to(dtype) if isinstance(x, torch.Tensor) and (dtype := next(wanted)) is not None else x for x in fakes
        ]
        plainly, without = _called(target, cast, spec, {})
        if not registered:
            same = [_signature(call) for call in seen] == [_signature(call) for call in plainly]
            return _Casts(inputs) if same else _Casts(apart=True)
        if _dtypes(without) == _dtypes(given):
            return _Casts(inputs)
        if any(a.name == "dtype" for a in target._schema.arguments):
            return _Casts([None] * len(tensors), dtype=_dtypes(given)[0])
        raise CaptureError(
            f"'{target}' in '{module_of(node)}' computes another precision under torch.autocast than any cast of what "
            f"it takes gives{at(node)}\n  cast there yourself, with torch.autocast('{self.kind}', enabled=False) "
            "around it"
        )

    def _write_apart(
        self, gm: torch.fx.GraphModule, node: torch.fx.Node, values: PyTree, state: State
    ) -> None:
        """Put the operators in a call's place that it is put together of, and their casts."""
        target: Any = node.target
        flat_values, spec = pytree.tree_flatten(values)
        fakes = _on(self.kind, flat_values)
        nodes = [n for n in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(n, torch.fx.Node)]
        positions = [i for i, x in enumerate(fakes) if isinstance(x, torch.Tensor)]

        def composed(*tensors: torch.Tensor) -> Any:
            filled = list(fakes)
            for position, tensor in zip(positions, tensors, strict=True):
                filled[position] = tensor
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return target(*args, **kwargs)

        tensors = [fakes[i] for i in positions]
        with _mode_of(tensors), autocast_as(state):
            body: Any = make_fx(composed, _allow_non_fake_inputs=True)(*tensors)
        of_tensors = [n for n in nodes if isinstance(_value(gm, n), torch.Tensor)]
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        passed = dict(zip(placeholders, of_tensors, strict=True))
        inlined: dict[torch.fx.Node, Any] = dict(passed)
        with gm.graph.inserting_before(node):
            for inner in body.graph.nodes:
                if inner.op == "output":
                    result = torch.fx.node.map_arg(inner.args[0], lambda n: inlined[n])
                elif inner.op == "get_attr":
                    raise CaptureError(
                        f"'{target}' in '{module_of(node)}' makes constants under torch.autocast{at(node)}\n  write it "
                        "with operators that do not, or with autocast off around it"
                    )
                elif inner.op == "call_function":
                    new = gm.graph.node_copy(inner, lambda n: inlined[n])
                    value = pytree.tree_map_only(torch.Tensor, _on_meta, inner.meta.get("val"))
                    new.meta = {**_place(node, PLACE if inner.target is _COPY else ""), "val": value}
                    inlined[inner] = new
        if isinstance(result, torch.fx.Node):
            node.replace_all_uses_with(result)
        else:
            for user in list(node.users):  # getitem of several results
                user.replace_all_uses_with(result[user.args[1]])
                gm.graph.erase_node(user)
        gm.graph.erase_node(node)


def _value(gm: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    """Return the value of a node of a trace, without data."""
    return get(gm, str(node.target)) if node.op == "get_attr" else node.meta.get("val")


def _place(node: torch.fx.Node, below: str) -> dict[str, Any]:
    """Return the part of a node's meta that says where in the user's code it is, in a submodule named ``below``."""
    place: dict[str, Any] = {k: node.meta[k] for k in ("stack_trace", "nn_module_stack") if k in node.meta}
    if below:
        stack = place.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        place["nn_module_stack"] = {**stack, below: (f"{path}.{below}" if path else below, torch.nn.Module)}
    return place


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values of the same sizes and strides; it wants a gradient if ``value`` does."""
    copied = torch.empty_strided(tuple(value.shape), tuple(value.stride()), dtype=value.dtype, device="meta")
    return copied.requires_grad_(value.requires_grad and value.is_floating_point())


def _on(kind: str, leaves: Sequence[object]) -> list[Any]:
    """Return tensors without values on a device of that kind, of the same sizes, strides and precisions."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [
            torch.empty_strided(tuple(x.shape), tuple(x.stride()), dtype=x.dtype, device=kind)
            if isinstance(x, torch.Tensor) else x
            for x in leaves
        ]  # fmt: skip


def _mode_of(tensors: Sequence[object]) -> Any:
    fake = next((x for x in tensors if isinstance(x, FakeTensor)), None)
    return fake.fake_mode if fake is not None else contextlib.nullcontext()


class _Seen(TorchDispatchMode):
    """The operators that a call comes to, with what they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Mapping[str, Any]]] = []

    def __torch_dispatch__(self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _called(target: OpOverload, fakes: Sequence[object], spec: pytree.TreeSpec, state: State) -> tuple[list[Any], Any]:
    """Return the operators that a call comes to under an autocast, and its result."""
    args, kwargs = pytree.tree_unflatten(list(fakes), spec)
    with _mode_of(fakes), autocast_as(state), _Seen() as seen, torch.no_grad():
        result = target(*args, **kwargs)
    return seen.calls, result


def _signature(call: tuple[Any, tuple[Any, ...], Mapping[str, Any]]) -> Any:
    op, args, kwargs = call
    dtypes = [x.dtype for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
    return op, dtypes, kwargs.get("dtype")


def _dtypes(result: PyTree) -> list[torch.dtype]:
    return [x.dtype for x in flat(result) if isinstance(x, torch.Tensor)]
