"""The graph of a model: its computation, with nothing about devices.

A :class:`Graph` is a list of nodes in execution order. Parameters, buffers and inputs come first. Arguments of an
operator are plain Python values in which a :class:`Ref` stands for a tensor. Multi-output operators have several
``outs``; a ``Ref`` names the output by number, so there are no tuple-unpacking nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from autopar.words.load_shares import Load
from autopar.words.narrow_products import NarrowUse
from autopar.words.precision import Precision

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


WAY = "autopar_way."
"""Prefix of branch guards: buffers ``bool [ ]`` that become true at a call in which Python would have taken another
branch than the traced one. Their nodes have its ``source``, the traced ``answer``, and ``pinned`` where the guard is
that numbers are those of the example."""

PART = "autopar_part."
"""Prefix of buffers ``bool [n]`` that say, after a call, which parameters took part in it: their nodes have
``parameters``, pairs of a name and the element that is true where it did. A parameter in none of them always takes
part; one in several, if any says so."""

RowsAt = tuple[int, int, int, int]
"""A dim that contains the rows of the batch: ``(dim, outer, rows, inner)``, of which ``outer`` changes slowest, as in
the first dim of ``[(outer rows inner) ...]``."""

NORMS = ("aten.batch_norm.default", "aten.instance_norm.default")
"""Operators that write to running statistics among their inputs, though their schema does not say so."""
RUNNING, TRAINING = 3, 5
"""Positions of their arguments: the first of two running statistics, and the flag to use the batch's."""


def has_effect(target: str) -> bool:
    """Return whether an operator writes to its inputs though its schema does not say so."""
    return target in NORMS


class Spec(NamedTuple):  # a tuple is hashed and compared without Python code: blocks are found by it
    """Global shape and dtype (``"float32"``) of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def n_elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """The bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def n_bytes(self) -> int:
        """The bytes of all elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        """True for floating point and complex numbers."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        return f"{self.dtype}[{' '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """Output ``out`` of node number ``node``."""

    node: int
    out: int = 0

    def __hash__(self) -> int:  # planning looks up a hundred thousand of these
        return self.node << 6 ^ self.out

    def __repr__(self) -> str:  # as a dataclass would, at a third of the time: fingerprints are made of these
        return f"Ref(node={self.node}, out={self.out})"


def refs_in(value: Any) -> Iterator[Ref]:
    """Yield every :class:`Ref` in nested tuples, lists and dicts, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from refs_in(item)


def map_refs(value: Any, fn: Callable[[Ref], Any]) -> Any:
    """Return ``value`` with every :class:`Ref` replaced by ``fn(ref)``; containers keep their type."""
    if isinstance(value, Ref):
        return fn(value)
    if isinstance(value, tuple):
        return tuple(map_refs(item, fn) for item in value)
    if isinstance(value, list):
        return [map_refs(item, fn) for item in value]
    if isinstance(value, dict):
        return {key: map_refs(item, fn) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Node:
    """A parameter, buffer, input or operator.

    Attributes:
        kind: ``param``, ``buffer``, ``input`` or ``op``.
        target: operator name such as ``aten.linear.default``; for other kinds the qualified name in the model.
        outs: one :class:`Spec` per output tensor (None for an output that is no tensor).
        module: path of the module whose code made this node, such as ``layers.0.mlp.up``.
        source: the user's source line, ``file.py:12``, where known.
        needs_grad: gradients flow through this node's outputs.
        hot: the value depends on a parameter, or on an input that wants a gradient. Only hot nodes are planned by the
            ILP; the others follow demand.
        site: for a random operator, its number among those of the model: it draws by it. For others, the number of the
            node in the model's graph, where this one is part of a stage.
        rows: for a random operator, where the rows of the batch are in what it draws; none where it draws once for all
            of them, None if that is not known.
        strides: for a random operator, the strides of the tensor that it draws in eager mode; none of a contiguous one.
        again: number of the region under activation checkpointing whose code made it; -1 for none.
        load: for routed experts, the share of rows that each has; empty if all have the same. For prices alone: a
            plan is for any load.
        narrow: how a product, or a parameter that is a weight of one, takes part in a policy's narrow products; None
            for all else.
    """

    name: str
    kind: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: tuple[Spec | None, ...] = ()
    module: str = ""
    source: str = ""
    needs_grad: bool = False
    hot: bool = False
    site: int = -1
    rows: tuple[RowsAt, ...] | None = ()
    strides: tuple[int, ...] = ()
    again: int = -1
    load: Load = ()
    narrow: NarrowUse | None = None

    @cached_property
    def refs(self) -> tuple[Ref, ...]:
        """Tensor inputs in argument order; a tensor used twice is listed twice."""
        refs: list[Ref] = []
        for value in self.args:
            if isinstance(value, Ref):
                refs.append(value)
            elif isinstance(value, (tuple, list, dict)):
                refs.extend(refs_in(value))
        return (*refs, *refs_in(self.kwargs)) if self.kwargs else tuple(refs)

    def moved(self, fn: Callable[[Ref], Ref]) -> Node:
        """Return the node with other tensor inputs."""
        node = replace(self, args=map_refs(self.args, fn), kwargs=map_refs(self.kwargs, fn))
        node.__dict__["refs"] = tuple(map(fn, self.refs))  # it need not be searched for them again
        return node

    @property
    def out(self) -> Spec:
        """The first output."""
        spec = self.outs[0]
        assert spec is not None
        return spec

    @property
    def where(self) -> str:
        """Name, module and source line, for messages."""
        return f"{self.name} ({self.target}) in '{self.module or '<model>'}'" + (
            f" at {self.source}" if self.source else ""
        )


@dataclass(frozen=True)
class Graph:
    """The computation of a model.

    Attributes:
        nodes: parameters, buffers and inputs first, then operators in execution order.
        outputs: flat outputs of the model; a :class:`Ref`, or a plain value for an output that is no tensor.
        loss: position in ``outputs`` of the scalar loss, or None.
        tied: other qualified names of a parameter, ``{alias: name in the graph}``.
        updates: buffers that the forward changes, ``{buffer name: new value}``.
        sends: how many of the first outputs are tensors for later pipeline stages.
        targets: for each of `sends`, the stages that read it.
        arriving: inputs that are tensors of earlier pipeline stages, by name, and the stage that each comes from.
        precision: the policy for which it was captured: its parameters are stored in another format than it reads.
        expert_load: what its nodes have their loads from, by patterns of modules.
        before: what a call writes to trained parameters before it reads them, such as a mask or a bound: its
            ``updates`` are their new values, which follow from parameters and buffers alone. None if it writes none.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    loss: int | None = None
    tied: dict[str, str] = field(default_factory=dict)
    updates: dict[str, Ref] = field(default_factory=dict)
    sends: int = 0
    targets: tuple[tuple[int, ...], ...] = ()
    arriving: Mapping[str, int] = field(default_factory=dict)
    precision: Precision | None = None
    expert_load: Mapping[str, Load] = field(default_factory=dict)
    before: Graph | None = None

    def spec(self, ref: Ref) -> Spec:
        """Return the spec of the tensor that ``ref`` names."""
        spec = self.nodes[ref.node].outs[ref.out]
        assert spec is not None, f"{self.nodes[ref.node].where}: output {ref.out} is no tensor"
        return spec

    def stored(self, param: Node) -> Spec:
        """Return the spec of a parameter as it is stored, which under a policy has another format than in the graph."""
        spec = param.out
        return spec if self.precision is None else spec._replace(dtype=self.precision.stored(spec.dtype))

    def moments(self, param: Node) -> Spec:
        """Return the spec of an optimizer's state of a parameter's shape."""
        spec = param.out
        return spec if self.precision is None else spec._replace(dtype=self.precision.kept(spec.dtype))

    def policy_of(self, param: Node) -> Precision | None:
        """Return the policy for one parameter: without narrow products if it is no weight of one.

        Nor with narrow gathers if others read it, too.
        """
        if self.precision is None or not self.precision.products:
            return self.precision
        if param.narrow is None:
            return self.precision.wide
        return self.precision if param.narrow.gathers else replace(self.precision, narrow_gathers=False)

    def of_kind(self, kind: str) -> list[tuple[int, Node]]:
        """Return ``(number, node)`` of every node of a kind."""
        return [(i, node) for i, node in enumerate(self.nodes) if node.kind == kind]

    @cached_property
    def ways(self) -> tuple[Node, ...]:
        """The flags of traced branches on data."""
        return tuple(node for _, node in self.of_kind("buffer") if node.name.startswith(WAY))

    @cached_property
    def parts(self) -> tuple[Node, ...]:
        """The buffers that record which parameters took part in a call."""
        return tuple(node for _, node in self.of_kind("buffer") if node.name.startswith(PART))

    @cached_property
    def written(self) -> tuple[str, ...]:
        """The model's own buffers that a call writes, without those in which a program records how the call went."""
        return tuple(name for name in self.updates if not name.startswith((WAY, PART)))

    @cached_property
    def forward_only(self) -> bool:
        """Whether nothing wants a gradient, as where a model is not trained."""
        return not any(node.needs_grad for node in self.nodes)

    @cached_property
    def statistics(self) -> frozenset[str]:
        """The running statistics: buffers that norms write in training, of which the graph has no new value."""
        return frozenset(
            self.nodes[ref.node].target
            for node in self.nodes if node.target in NORMS and node.args[TRAINING]
            for ref in node.args[RUNNING:TRAINING] if isinstance(ref, Ref) and self.nodes[ref.node].kind == "buffer"
        )  # fmt: skip

    @cached_property
    def index(self) -> dict[str, int]:
        """Node number by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def from_inputs(self) -> frozenset[int]:
        """Nodes whose value depends on an input of the model: activations, as opposed to functions of parameters."""
        activations: set[int] = set()
        for i, node in enumerate(self.nodes):
            if node.kind == "input" or not activations.isdisjoint([ref.node for ref in node.refs]):
                activations.add(i)
        return frozenset(activations)

    @cached_property
    def derived(self) -> dict[object, Any]:
        """A cache of values derived of the graph, for the many lookups of a search."""
        return {}

    @cached_property
    def consumers(self) -> dict[Ref, list[tuple[int, int]]]:
        """``{tensor: [(node, position in node.refs), ...]}`` in execution order; outputs are not listed."""
        users: dict[Ref, list[tuple[int, int]]] = {}
        for i, node in enumerate(self.nodes):
            for position, ref in enumerate(node.refs):
                users.setdefault(ref, []).append((i, position))
        return users

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For every node the number of the first with an equal call (:meth:`call_of`); only operators equal others."""
        first: dict[object, int] = {}
        return tuple([first.setdefault(self.call_of(n) if n.kind == "op" else i, i) for i, n in enumerate(self.nodes)])

    def call_of(self, node: Node) -> object:
        """Return the call of an operator, equal for two with equal names, literals, specs, gradients and load."""
        nodes, args, plain = self.nodes, [], 0
        for value in node.args:  # most arguments are tensors: no text is made of these
            if isinstance(value, Ref):
                args.append(nodes[value.node].outs[value.out])
                plain += 1
            else:
                args.append(value)
        nested = plain < len(node.refs)
        texts = [
            value if isinstance(value, Spec) else repr(map_refs(value, self.spec) if nested else value)
            for value in args
        ]
        kwargs = repr(map_refs(node.kwargs, self.spec)) if node.kwargs else ""
        grads = tuple([nodes[r.node].needs_grad for r in node.refs])
        narrow = (node.narrow,) if node.narrow is not None else ()
        return node.target, tuple(texts), kwargs, node.outs, node.hot, node.needs_grad, grads, node.load, *narrow

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides whether a plan fits: operators, arguments, shapes, names."""
        digest = hashlib.sha256()
        for node in self.nodes:
            digest.update(f"{node.name}|{node.kind}|{node.target}|{node.args}|{node.kwargs}|{node.outs}\n".encode())
            if node.kind == "input" and node.needs_grad:
                digest.update(b"and its gradient\n")
        digest.update(f"{self.outputs}|{sorted(self.tied.items())}|{sorted(self.updates.items())}".encode())
        if self.precision is not None:
            digest.update(self.precision.text.encode())
        if self.before is not None:
            digest.update(self.before.fingerprint.encode())
        return digest.hexdigest()[:16]

    def __str__(self) -> str:
        def show(value: Any) -> str:
            if isinstance(value, Ref):
                return f"%{self.nodes[value.node].name}" + (f".{value.out}" if value.out else "")
            if isinstance(value, (tuple, list)):
                return "[" + ", ".join(map(show, value)) + "]"
            return repr(value)

        lines = []
        for node in self.nodes:
            outs = ", ".join(str(o) for o in node.outs)
            if node.kind == "op":
                args = ", ".join([*map(show, node.args), *(f"{k}={show(v)}" for k, v in node.kwargs.items())])
                lines.append(f"%{node.name}: {outs} = {node.target}({args})  # {node.module} {node.source}")
            else:
                lines.append(f"%{node.name}: {outs} = {node.kind} {node.target}")
        lines.append("return " + ", ".join(map(show, self.outputs)))
        return "\n".join(lines)


def part_for(graph: Graph, outputs: Sequence[Ref]) -> Graph:
    """Return the part of a graph that computes `outputs`; random operators draw as in the whole."""
    wanted = {ref.node for ref in outputs}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in wanted:
            wanted.update(ref.node for ref in graph.nodes[i].refs)
    new = {old: k for k, old in enumerate(sorted(wanted))}

    def move(ref: Ref) -> Ref:
        return Ref(new[ref.node], ref.out)

    nodes = tuple(
        replace(graph.nodes[i].moved(move), site=i if graph.nodes[i].site < 0 else graph.nodes[i].site)
        for i in sorted(wanted)
    )
    return Graph(nodes, tuple(map(move, outputs)), precision=graph.precision)
