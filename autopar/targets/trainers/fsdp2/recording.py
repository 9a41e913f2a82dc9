"""What a call of a model on shapes shows: what its modules return, and what stages would take from each other."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.targets.trainers.fsdp2.folder.pipeline import tensors_in
from autopar.torch_private import FakeTensorMode

PLAIN = ("__get__", "__set__", "size", "dim", "requires_grad_", "stride", "numel", "__len__", "is_contiguous")
"""Functions that read no numbers."""


class Recorded(TorchFunctionMode):
    """What the modules of a model do in one call.

    Attributes:
        outputs: what every block, and every module with parameters outside of blocks, returned; in order.
        takes: for every start, the positions of the tensors that its block is given and that depend on parameters, and
            these tensors.
        used: for every parameter, the stages that read it.
        problem: why stages cannot be made so; empty if they can.
    """

    def __init__(self, model: nn.Module, starts: Sequence[str], blocks: Sequence[str]) -> None:
        super().__init__()
        self.starts, self.blocks = list(starts), set(blocks)
        self.outputs: dict[str, Any] = {}
        self.takes: dict[str, dict[int, torch.Tensor]] = {}
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.used: dict[str, set[int]] = {name: set() for name in self.names.values()}
        self.made: dict[int, tuple[torch.Tensor, int]] = {}
        self.arrived: set[int] = set()
        self.stage, self.depth, self.problem = 0, 0, ""
        around = outside(model, blocks)
        for path, module in model.named_modules():
            if path in self.blocks:
                module.register_forward_pre_hook(self._entering(path), with_kwargs=True)
            if path in self.blocks or path in around:
                module.register_forward_hook(self._leaving(path), with_kwargs=True)

    def _entering(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if path in self.starts:
                self.stage = self.starts.index(path) + 1
                given = dict(enumerate(tensors_in((args, kwargs))))
                self.takes[path] = {k: tensor for k, tensor in given.items() if tensor.requires_grad}
                self.arrived = {id(tensor) for tensor in self.takes[path].values()}
                self.made |= {id(tensor): (tensor, self.stage) for tensor in self.takes[path].values()}
            self.depth += 1

        return hook

    def _leaving(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            if path in self.blocks and path in self.outputs and not self.problem:
                self.problem = f"it calls {path} more than once"
            self.outputs.setdefault(path, output)
            self.depth -= path in self.blocks

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and note in which stage its results are made and its operands were."""
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in PLAIN:
            return output
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self.names:
                self.used[self.names[id(tensor)]].add(self.stage)
            elif tensor.requires_grad and not self.problem:
                stage = self.made.get(id(tensor), (tensor, self.stage))[1]
                if stage < self.stage or (self.depth == 0 and id(tensor) in self.arrived):
                    self.problem = (
                        f"{name} in stage {self.stage} reads a tensor {list(tensor.shape)} of an earlier stage, which "
                        "the stage's blocks are not given"
                    )
        for tensor in tensors_in(output):
            self.made.setdefault(id(tensor), (tensor, self.stage))  # kept, so that no other one gets its id
        return output


def outside(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the outermost modules with parameters that neither are in a block nor hold one."""
    found: list[str] = []
    for path, module in model.named_modules():
        holds = path == "" or any(block.startswith(f"{path}.") for block in blocks)
        within = any(path == block or path.startswith(f"{block}.") for block in (*blocks, *found))
        if not holds and not within and any(True for _ in module.parameters()):
            found.append(path)
    return found


@contextlib.contextmanager
def on_shapes(mode: FakeTensorMode) -> Iterator[None]:
    """Run on shapes alone in this scope; torch's log of what fails there is silenced, since it is reported."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with mode:
            yield
    finally:
        log.setLevel(before)


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of the model on the processor that has shapes and no numbers; routed experts are one product."""
    memo: dict[int, Any] = {}
    with mode:
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype), p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty_strided(b.shape, b.stride(), dtype=b.dtype)
        copied = copy.deepcopy(model, memo)
    config: Any = getattr(copied, "config", None)
    if getattr(config, "_experts_implementation", None) is not None:
        config._experts_implementation = "batched_mm"  # transformers' one whose shapes depend on no numbers
    return copied


def fake_inputs(example: dict[str, Any], mode: FakeTensorMode) -> dict[str, Any]:
    """Return inputs by name without numbers, on the processor."""
    with mode:
        return {
            name: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in example.items()
        }  # fmt: skip
