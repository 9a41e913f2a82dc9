"""Run ``train.py`` of an exported folder, in full float64, and count its collectives.

``python run_folder.py FOLDER COUNTS.json [--float64] -- arguments of train.py``, or under torchrun. An ``import
autopar`` fails in it, also where autopar is installed.

The counts are those of one step, the last one: ``{"kind group": [calls, bytes]}`` of every rank, where a group is
``first rank + stride x size``, and bytes are those of the whole tensor: what a gather gives, what a reduction takes.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class InFloat64(TorchFunctionMode):
    """What a model's code asks for in float32, such as its norms and losses, in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {name: torch.float64 if a is torch.float32 else a for name, a in kwargs.items()}
        return func(*args, **kwargs)


KINDS = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather", "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all", "broadcast_": "broadcast",
    "scatter_": "scatter", "send": "send", "recv_": "recv",
}  # fmt: skip


class Counted(TorchDispatchMode):
    """Collectives by kind and group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name in KINDS:
            group, size = group_of(args)
            kind = KINDS[name]
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            count = max(t.numel() * t.element_size() for t in tensors)
            if namespace == "_c10d_functional" and kind == "all_gather":
                count *= size
            self.calls[f"{kind} {group}"] += 1
            self.bytes[f"{kind} {group}"] += count
        return result


def group_of(args: Any) -> tuple[str, int]:
    """Return the ranks of a call's group as ``first+stride x size``, and their number."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(arg)
            except (RuntimeError, TypeError):
                continue
            break
    else:
        name = next(arg for arg in reversed(args) if isinstance(arg, str))
        group = dist.distributed_c10d._resolve_process_group(name)
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    return f"{ranks[0]}+{stride}x{len(ranks)}", len(ranks)


def main() -> None:
    """Run the folder, and write the counts of its last step."""
    sys.modules["autopar"] = None  # type: ignore[assignment]  # whoever imports it gets an ImportError
    folder, counts = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    rest = sys.argv[sys.argv.index("--") + 1 :]
    in_float64 = "--float64" in sys.argv[: sys.argv.index("--")]
    sys.argv = [str(folder / "train.py"), *rest]
    sys.path.insert(0, str(folder))
    import parallelize

    step = parallelize.ParallelTraining.forward_backward

    def counted(self: Any, batch: Any) -> Any:
        with Counted() as found:
            loss = step(self, batch)
        every: list[Any] = [None]
        if dist.is_initialized():
            every *= dist.get_world_size()
            dist.all_gather_object(every, {name: [found.calls[name], found.bytes[name]] for name in found.calls})
        if self.rank == 0:
            counts.write_text(json.dumps(every))
        return loss

    parallelize.ParallelTraining.forward_backward = counted
    if in_float64:
        with InFloat64():
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
    else:
        runpy.run_path(str(folder / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
