"""A record of the operators that some code runs on tensors without values, its backward included.

Autograd runs below Python, and what it runs in a backward goes through the same dispatch as the forward. So the record
of a call and of ``torch.autograd.grad`` of it has all operators of both. ``make_fx`` makes the same record in ten times
the time, since it also follows sizes that are symbols, decompositions and modules.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.autograd import set_detect_anomaly
from torch.autograd.graph import saved_tensors_hooks

from autopar.torch_private import OpOverload, TorchDispatchMode, no_dispatch_modes, pytree


class NotRecordable(Exception):
    """An operator that gives what a record cannot hold: on tensors without values it has results that it lacks."""


_ONE_AT_A_TIME = threading.RLock()
"""Threads take turns: what runs on tensors without values replaces functions of torch that all threads see."""
_VIEW_AS_REAL = torch.ops.aten.view_as_real.default


class OperatorRecorder(TorchDispatchMode):
    """Records the operators that run in its scope as nodes of a graph.

    ``meta["val"]`` of a node is the tensor that the operator gave.

    Attributes:
        graph: the nodes in order; a tensor that comes from outside is a placeholder, given by :meth:`given`, or
            a constant.
        constants: tensors with values that the code made itself, by the node that stands for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.constants: dict[torch.fx.Node, torch.Tensor] = {}
        self._nodes: dict[int, torch.fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # or another tensor could get the same id

    def given(self, x: torch.Tensor, name: str) -> torch.fx.Node:
        """Add a placeholder for a tensor."""
        node = self.graph.placeholder(name)
        self._note(node, x)
        return node

    def node_of(self, x: torch.Tensor) -> torch.fx.Node:
        """Return the node that gives a tensor."""
        node = self._nodes.get(id(x))
        if node is None:
            node = self.graph.get_attr(f"constant_{len(self.constants)}")
            self.constants[node] = x
            self._note(node, x)
        return node

    def _note(self, node: torch.fx.Node, x: torch.Tensor) -> None:
        node.meta["val"] = x
        self._nodes[id(x)] = node
        self._alive.append(x)

    def _note_sent(self, node: torch.fx.Node, x: torch.Tensor) -> None:
        """Note a collective of complex numbers as one of real ones: backends send no others."""
        (sent, *others), graph = node.args, self.graph
        assert isinstance(sent, torch.fx.Node)
        with graph.inserting_before(node):
            real = graph.call_function(_VIEW_AS_REAL, (sent,))
        real.meta["val"] = torch.view_as_real(sent.meta["val"])
        node.args, node.meta["val"] = (real, *others), torch.view_as_real(x)
        self._note(graph.call_function(torch.ops.aten.view_as_complex.default, (node,)), x)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it."""
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if isinstance(results, (tuple, list)) and _lacks_one(func, results, args, kwargs):
            raise NotRecordable(f"{func} gives None for a tensor where tensors have no values")
        nodes = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
        node = self.graph.call_function(func, *nodes)
        if isinstance(results, torch.Tensor) and results.is_complex() and func.namespace == "_c10d_functional":
            self._note_sent(node, results)
        elif isinstance(results, torch.Tensor):
            self._note(node, results)
        elif isinstance(results, (tuple, list)):
            node.meta["val"] = results
            for k, x in enumerate(results):
                if isinstance(x, torch.Tensor):
                    self._note(self.graph.call_function(operator.getitem, (node, k)), x)
        else:
            node.meta["val"] = results
        return results


def _lacks_one(func: OpOverload, results: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a tensor is missing that was not declined by the call's ``output_mask``."""
    declared = func._schema
    given = {**kwargs, **{each.name: x for each, x in zip(declared.arguments, args, strict=False)}}
    asked = given.get("output_mask") or [True] * len(results)
    return any(
        x is None and is_asked and isinstance(each.type, torch.TensorType)
        for x, each, is_asked in zip(results, declared.returns, asked, strict=False)
    )


@contextlib.contextmanager
def unseen_by_the_caller() -> Iterator[None]:
    """Enclose operators on tensors without values: they are not for the caller's modes, hooks and checks for NaN."""
    with _ONE_AT_A_TIME, no_dispatch_modes(), saved_tensors_hooks(lambda x: x, lambda x: x), set_detect_anomaly(False):
        yield
