"""How much memory a forward keeps for its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.capture import Captured
from autopar.lower.emit import lower
from autopar.plans.plan import StagePlan


class Made(TorchDispatchMode):
    """Remembers the memory of every tensor that an operator makes, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                weak = StorageWeakRef(x.untyped_storage())
                self.found[weak.cdata] = weak, x.untyped_storage().nbytes()
        return out

    @property
    def live_bytes(self) -> int:
        return sum(n for weak, n in self.found.values() if not weak.expired())


def kept_bytes(captured: Captured, plan: StagePlan, values: dict[str, torch.Tensor]) -> int:
    """Bytes made by a forward that live until its backward, inputs and parameters apart."""
    program = lower(captured.graph, plan)
    inputs = [values[slot.name] if slot.kind != "seed" else torch.tensor(0) for slot in program.slots]
    with Made() as made:
        assert captured.graph.loss is not None
        loss = program.runnable(*inputs)[captured.graph.loss]
        assert loss.requires_grad
        return made.live_bytes
