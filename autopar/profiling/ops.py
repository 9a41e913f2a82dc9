"""The distinct local ops that the strategies of a model can produce, each with the inputs to run it alone."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from autopar.planner.intra_op.building.price import Pricer, key_of, pricer
from autopar.planner.intra_op.building.space import strategies
from autopar.rules.local_calls import local_call
from autopar.rules.notation import Rule
from autopar.rules.operator_call import call_of
from autopar.rules.registry import rules_of
from autopar.rules.strategy import Strategy, grads_of
from autopar.words.graph import ITEM_BYTES, Graph, Node
from autopar.words.meshes import Mesh
from autopar.words.shards import local_shape
from hardware_profiles import Cluster


@dataclass(frozen=True)
class TensorArgument:
    """One tensor that an op is measured with.

    Attributes:
        grad: a gradient flows to it.
        param: it is a parameter, so its gradient is one of weights.
        high: exclusive upper bound of integers (from 0); 1 where nothing is known of them.
    """

    shape: tuple[int, ...]
    dtype: str
    grad: bool
    param: bool
    high: int = 1

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor's values."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class LocalOp:
    """One call on one rank.

    Attributes:
        key: its name in a profile.
        fn: the callable, or the name of torch's operator (which cannot be sent to a process); args and kwargs hold
            :class:`~autopar.rules.operator_call.In` for tensors.
        kind: the kind in the cost model.
        seconds: forward and backward by formula.
        out_bytes: bytes of its results.
    """

    key: str
    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ins: tuple[TensorArgument, ...]
    kind: str
    seconds: tuple[float, float]
    out_bytes: int

    @property
    def n_bytes(self) -> int:
        """Bytes of all its tensors."""
        return self.out_bytes + sum(t.n_bytes for t in self.ins)


@dataclass(frozen=True)
class Passes:
    """Sequences of ops in model order: the first is the model on one device, the others have sharded ops.

    ``left_out`` lists what was not taken.
    """

    passes: tuple[tuple[LocalOp, ...], ...]
    left_out: tuple[str, ...]


def passes_of(graph: Graph, cluster: Cluster, meshes: Sequence[Mesh], most_ops: int, most_bytes: float) -> Passes:
    """Return all local ops of a model on one device and on ``meshes``, up to ``most_ops`` distinct ones.

    ``most_bytes`` limits the memory of a pass; repeated ops beyond are measured less often.
    """
    rules = rules_of(graph)
    one = Mesh.of(data=1)
    plain = replace(cluster, measured=None)
    keys: set[str] = set()
    passes: list[list[LocalOp]] = []
    beyond: set[str] = set()
    unpicklable: set[str] = set()
    inside: set[str] = set()
    for mesh in (one, *(m for m in meshes if any(size > 1 for _, size in m))):
        priced = pricer(plain, mesh)
        rows: list[list[LocalOp]] = []
        for node, rule in zip(graph.nodes, rules, strict=True):
            if node.kind != "op" or rule is None:
                continue
            of_node: dict[str, LocalOp] = {}
            for strategy in strategies(graph, node, rule, mesh):
                key = key_of(graph, node, rule, strategy, mesh)
                if key is None:
                    inside.add(f"{node.target} with communication inside")
                elif key not in of_node and (mesh == one or key not in keys):
                    op = _local_op(graph, node, rule, strategy, priced, key)
                    if op is not None:
                        of_node[key] = op
                    else:
                        unpicklable.add(node.target)
            rows.append(list(of_node.values()))
        for place in range(max(map(len, rows), default=0)):
            row = [of_node[place] for of_node in rows if place < len(of_node)]
            new = {op.key for op in row} - keys
            for key in list(new)[: max(0, len(keys) + len(new) - most_ops)]:
                beyond.add(key)
            row = [op for op in row if op.key not in beyond]
            keys |= {op.key for op in row}
            passes.append(row)
    passes = [list(_within(ops, most_bytes)) for ops in passes if ops]
    left_out = sorted(inside) + [f"{t}: cannot be sent to a process" for t in sorted(unpicklable)]
    if beyond:
        left_out.append(f"{len(beyond)} ops beyond the first {most_ops}")
    return Passes(tuple(map(tuple, passes)), tuple(left_out))


def _within(ops: Sequence[LocalOp], most_bytes: float) -> Iterator[LocalOp]:
    """Return every distinct op, and as many repetitions as fit."""
    seen: set[str] = set()
    left = most_bytes - sum(op.n_bytes for op in {op.key: op for op in ops}.values())
    for op in ops:
        if op.key in seen:
            if op.n_bytes > left:
                continue
            left -= op.n_bytes
        seen.add(op.key)
        yield op


def _local_op(graph: Graph, node: Node, rule: Rule, strategy: Strategy, priced: Pricer, key: str) -> LocalOp | None:
    mesh = priced.mesh
    call = local_call(call_of(node, graph.spec), rule, strategy.options, mesh)
    in_grads, _ = grads_of(graph, node)
    ins: list[TensorArgument] = []
    for position, (ref, state, grad) in enumerate(zip(node.refs, strategy.ins, in_grads, strict=True)):
        spec = graph.spec(ref)
        high = ins[0].shape[0] if position and node.target == "aten.embedding.default" else 1  # rows of the table
        is_param = graph.nodes[ref.node].kind == "param"
        ins.append(TensorArgument(local_shape(spec.shape, state, mesh), spec.dtype, grad, is_param, high))
    outs = [o for o in node.outs if o is not None]
    n_bytes = sum(priced.local_bytes(o, s) for o, s in zip(outs, strategy.outs, strict=True))
    spent = priced.compute(graph, node, rule, strategy)
    seconds = spent.forward, spent.total - spent.forward
    kwargs = {k: v for k, v in call.kwargs.items() if k != "device"}
    fn = call.fn if call.distributed else node.target
    op = LocalOp(key, fn, call.args, kwargs, tuple(ins), rule.kind, seconds, n_bytes)
    try:
        pickle.dumps(op)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return None
    return op


def values_of(tensor: TensorArgument) -> torch.Tensor:
    """Return values to measure with: floats from 0.1 to 1 (no op is slow there), integers below ``high``."""
    dtype = getattr(torch, tensor.dtype)
    if tensor.dtype == "bool":
        return torch.ones(tensor.shape, dtype=dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, tensor.high, tensor.shape, dtype=dtype)
    return (torch.rand(tensor.shape) * 0.9 + 0.1).to(dtype)
