"""A program's draws for eager mode: both then go the same ways at branches on random numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture import Captured
from autopar.lower.emit import lower
from autopar.planner.intra_op.one_device import one_device
from autopar.rules.families.branch import BRANCH


def plain_name(target: Any) -> str:
    name = str(target).removeprefix("aten.").partition(".")[0].removesuffix("_")
    return "randint" if name == "random" else name


class Draws(torch.fx.Interpreter):
    """Runs a program and keeps what its random operators draw, by operator and shape."""

    def __init__(self, captured: Captured) -> None:
        program = lower(captured.graph, one_device(captured.graph))
        super().__init__(program.module)
        self.graph_of, self.program = captured.graph, program
        self.drawn: dict[Any, list[Tensor]] = defaultdict(list)
        self.asked: dict[str, bool] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and "site" in n.kwargs and isinstance(value, Tensor):
            node = self.graph_of.nodes[self.graph_of.index[n.meta["autopar"]["node"]]]
            self.drawn[plain_name(node.target), tuple(value.shape)].append(value.detach().clone())
        if n.op == "call_function" and str(n.target) == BRANCH:
            condition: Any = n.args[0]
            self.asked[condition.name] = bool(self.env[condition])
        return value

    @property
    def conditions(self) -> list[bool]:
        return list(self.asked.values())

    def with_values(self, values: dict[str, Tensor], seed: int | Tensor) -> Draws:
        """Run it on values by name, which may require gradients."""
        given = {**values, "seed": torch.as_tensor(seed)}
        self.outputs = self.run(*(given[s.name] for s in self.program.slots))
        return self


class Given(TorchDispatchMode):
    """Random operators give what they are told."""

    def __init__(self, drawn: dict[Any, list[Tensor]]) -> None:
        super().__init__()
        self.left = {key: list(values) for key, values in drawn.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(made, Tensor):
            return made  # attention may draw, and does not here
        value = self.left[plain_name(func), tuple(made.shape)].pop(0)
        return made.copy_(value) if func._schema.is_mutable else value.to(made.dtype)


__all__ = ["Draws", "Given"]
