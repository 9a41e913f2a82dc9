"""The load of routed experts, measured on a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.fx

from autopar.capture import Captured
from autopar.comparison.sides import Sides
from autopar.errors import PlanError
from autopar.plans.request import PlanRequest
from autopar.rules.experts.expert_load import ROUTED, experts_of
from autopar.torch_private import pytree
from autopar.words.graph import Graph
from autopar.words.load_shares import Load
from autopar.words.trees import PyTree


def with_measured_load(
    request: PlanRequest, captured: Captured, model: torch.nn.Module, example: PyTree
) -> PlanRequest:
    """Return the request with the measured load of each operator of routed experts, where it is to be measured.

    ``example`` is the captured batch with its values: ``(args, kwargs)``, or ``(args, kwargs, targets)``.
    """
    if not request.measure_load:
        return request
    args, kwargs, *targets = example
    loads = measured_load(captured, model, args, kwargs, targets[0] if targets else ())
    return replace(request, pins=replace(request.pins, expert_load=loads), measure_load=False)


def measured_load(
    captured: Captured, model: torch.nn.Module, args: PyTree, kwargs: Mapping[str, PyTree], targets: PyTree = ()
) -> dict[str, Load]:
    """Return the share of rows that each routed expert gets of a batch, by operator.

    The graph runs forward once; rows without an expert count for none, and operators without routed rows are absent.
    """
    routed = {node.name for node in captured.graph.nodes if node.target in ROUTED}
    if not routed:
        raise PlanError("expert_load='measured': the model has no routed experts; leave expert_load out")
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named |= {f"input {k}": x for k, x in enumerate(pytree.tree_leaves((args, kwargs, targets)))}
    missing = next((name for name, x in named.items() if getattr(x, "is_meta", False)), None)
    if missing is not None:
        raise PlanError(
            f"expert_load='measured' runs the model, and '{missing}' is on the meta device, without values; give a "
            "model and a batch with values, or shares of rows as numbers"
        )
    policy = captured.graph.precision
    with torch.no_grad(), policy.of_model(model) if policy is not None else contextlib.nullcontext():
        loads: dict[str, Load] = {}
        _Forward(captured, model, args, kwargs, targets).graph(lambda module: _Routed(module, captured.graph, loads))
    return loads


class _Forward(Sides):
    """An interpreter of the graph's forward."""

    def _gradients(self, *_: object) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {}


class _Routed(torch.fx.Interpreter):
    """An interpreter of a one-device program that notes each expert's share of rows in ``into``, by operator."""

    def __init__(self, module: torch.fx.GraphModule, graph: Graph, into: dict[str, Load]) -> None:
        super().__init__(module)
        self.source, self.into = graph, into

    def run_node(self, n: torch.fx.Node) -> object:
        """Run a node, and note the rows of its experts."""
        name = (n.meta.get("autopar") or {}).get("node")
        node = self.source.nodes[self.source.index[name]] if name is not None else None
        if node is not None and n.op == "call_function" and node.target in ROUTED:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            expert = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)][-1]
            n_experts = experts_of(self.source, node)
            rows = expert[(expert >= 0) & (expert < n_experts)].bincount(minlength=n_experts).tolist()
            if total := sum(rows):
                self.into[node.name] = tuple(n / total for n in rows)
        return super().run_node(n)
