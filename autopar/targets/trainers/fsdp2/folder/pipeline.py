"""Stages of a pipeline, made from the model's own code.

A stage runs the model's whole ``forward``. Blocks and other modules of earlier stages are absent: they return empty
tensors of the right shape, and the stage's first block takes what has arrived instead of them. Where the next stage
begins, ``forward`` is left, and what its first block is given is sent on. So masks, positions and the like are computed
in every stage, and only what depends on parameters travels.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

Call = Callable[[nn.Module, dict[str, Any]], torch.Tensor]


class Leaving(Exception):
    """The end of a stage, with what the next one takes."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__("the next stage begins")
        self.tensors = tensors


class Recorded(TorchFunctionMode):
    """What the modules of a model return, and what stages take from each other, from one call on shapes alone.

    Attributes:
        starts: paths of the first blocks of all stages but the first.
        blocks: paths of all blocks.
        outputs: what every block, and every module with parameters outside of blocks, returned.
        carried: for every start, the positions among the tensors that its block is given of those that are sent, and
            these tensors.
        used: for every parameter, the stages that read it.
        problem: why stages cannot be made so; empty if they can.
    """

    def __init__(self, model: nn.Module, starts: list[str], blocks: list[str]) -> None:
        super().__init__()
        self.starts, self.blocks = starts, blocks
        self.outputs: dict[str, Any] = {}
        self.carried: dict[str, tuple[list[int], list[torch.Tensor]]] = {}
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.used: dict[str, set[int]] = {name: set() for name in self.names.values()}
        self.made: dict[int, tuple[Any, int]] = {}
        self.arrived: set[int] = set()
        self.stage, self.depth, self.problem = 0, 0, ""
        for path, module in model.named_modules():
            if path in blocks:
                module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
            if path in blocks or path in outside(model, blocks):
                module.register_forward_hook(self._leave(path), with_kwargs=True)

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if path in self.starts:
                self.stage = self.starts.index(path) + 1
                leaves = tensors_in((args, kwargs))
                places = [k for k, leaf in enumerate(leaves) if leaf.requires_grad]
                self.carried[path] = places, [leaves[k] for k in places]
                self.arrived = {id(leaves[k]) for k in places}
                self.made.update({id(leaf): (leaf, self.stage) for leaf in self.carried[path][1]})
            self.depth += 1

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            self.outputs.setdefault(path, output)
            self.depth -= path in self.blocks

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "size", "dim", "requires_grad_"):
            return output
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self.names:
                self.used[self.names[id(tensor)]].add(self.stage)
            elif tensor.requires_grad:
                stage = self.made.get(id(tensor), (None, self.stage))[1]
                outside = self.depth == 0 and id(tensor) in self.arrived
                if (stage < self.stage or outside) and not self.problem:
                    self.problem = (
                        f"{name} in stage {self.stage} reads a {list(tensor.shape)} of stage {stage} that its first "
                        "block is not given"
                    )
        for tensor in tensors_in(output):
            self.made[id(tensor)] = (tensor, self.stage)  # kept, so that no other one gets its id
        return output


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested arguments, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def outside(model: nn.Module, blocks: list[str]) -> list[str]:
    """Return the outermost modules with parameters that neither are in a block nor hold one."""
    found: list[str] = []
    for path, module in model.named_modules():
        holds = path == "" or any(block.startswith(f"{path}.") for block in blocks)
        within = any(path == block or path.startswith(f"{block}.") for block in [*blocks, *found])
        if not holds and not within and any(True for _ in module.parameters()):
            found.append(path)
    return found


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model without numbers."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def record(model: nn.Module, call: Call, example: dict[str, Any], starts: list[str], blocks: list[str]) -> Recorded:
    """Return what a call of the model on shapes shows.

    Args:
        model: the whole model.
        call: gives its loss for inputs by name.
        example: one rank's microbatch.
        starts: paths of the first blocks of all stages but the first.
        blocks: paths of all blocks.
    """
    copied = on_meta(model)
    recorded = Recorded(copied, starts, blocks)
    with recorded, torch.enable_grad():
        call(copied, {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in example.items()})
    return recorded


class Absent(nn.Module):
    """A module of another stage: it returns empty tensors."""

    def __init__(self, module: nn.Module, output: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.__dict__.update({k: v for k, v in vars(module).items() if not k.startswith("_") and k != "forward"})
        self.output, self.dtype_of_floats = output, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module would, without numbers and at no cost in memory."""
        device = next((t.device for t in tensors_in((args, kwargs))), torch.device("cpu"))

        def empty(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            dtype = self.dtype_of_floats if leaf.is_floating_point() and self.dtype_of_floats else leaf.dtype
            return torch.zeros((), dtype=dtype, device=device).expand(leaf.shape)

        return tree_map(empty, self.output)


class NextStage(Absent):
    """The first block of the next stage: it ends this one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Leave the model's forward with the tensors that are sent."""
        leaves = tensors_in((args, kwargs))
        raise Leaving(tuple(leaves[k] for k in self.places))


class Stage(nn.Module):
    """One stage of a model.

    Attributes:
        whole: the model, in which modules of other stages are absent.
        number: of the stage.
        tied: parameters that other stages have, too, by name.
    """

    def __init__(
        self, model: nn.Module, call: Call, recorded: Recorded, number: int, constants: dict[str, Any],
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        starts, blocks = recorded.starts, recorded.blocks
        memo = {id(t): t for t in [*model.parameters(), *model.buffers()]}
        tied = [name for name, stages in recorded.used.items() if number in stages and len(stages) > 1]
        own = {name: p for name, p in model.named_parameters() if name in tied and number > min(recorded.used[name])}
        memo |= {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in own.values()}
        self.whole = copy.deepcopy(model, memo)
        self.call, self.number, self.constants = call, number, constants
        self.start = starts[number - 1] if number else ""
        self.places = recorded.carried[self.start][0] if number else []
        self.is_last = number == len(starts)
        names = {id(p): name for name, p in model.named_parameters()}
        order = [path for path in recorded.outputs if path in blocks]
        bounds = [0, *(order.index(start) for start in starts), len(order)]
        mine = order[bounds[number] : bounds[number + 1]]
        for path in [p for p in recorded.outputs if p not in mine]:
            module = model.get_submodule(path)
            if path not in blocks and any(number in recorded.used[names[id(p)]] for p in module.parameters()):
                continue
            kind = NextStage if not self.is_last and path == starts[number] else Absent
            absent = kind(module, recorded.outputs[path], dtype)
            if kind is NextStage:
                absent.places = recorded.carried[path][0]
            self.whole.set_submodule(path, absent)
        by_id = {id(p): name for name, p in self.whole.named_parameters(remove_duplicate=False)}
        self.tied = {name: self.whole.get_parameter(by_id[id(memo[id(dict(model.named_parameters())[name])])])
                     for name in tied}  # fmt: skip
        self.mine = mine
        self.swapped: dict[int, tuple[Any, Any]] = {}

    def take_arrivals(self) -> None:
        """Let the stage's blocks take what has arrived; called when all other hooks are there."""
        this = weakref.ref(self)
        for path in self.mine if self.number else ():

            def hook(_module: nn.Module, args: Any, kwargs: Any, path: str = path) -> Any:
                stage = this()
                assert stage is not None
                if path == stage.start:
                    leaves = tensors_in((args, kwargs))
                    stage.swapped = {id(leaves[k]): (leaves[k], new) for k, new in zip(stage.places, stage.arrived)}
                swap = lambda x: stage.swapped[id(x)][1] if id(x) in stage.swapped else x  # noqa: E731
                return tree_map(swap, args), tree_map(swap, kwargs)

            self.whole.get_submodule(path).register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def forward(self, *arrived: torch.Tensor, **inputs: Any) -> Any:
        """Run the stage: the model's inputs by name, and what has arrived from the stage before."""
        self.arrived = arrived
        try:
            loss = self.call(self.whole, {**self.constants, **inputs})
        except Leaving as leaving:
            return leaving.tensors if len(leaving.tensors) > 1 else leaving.tensors[0]
        finally:
            self.swapped, self.arrived = {}, ()
        return loss.reshape(1)


def stages_of(
    model: nn.Module, call: Call, example: dict[str, Any], mesh: DeviceMesh, table: dict[str, Any],
    blocks: list[str], inputs: list[str], dtype: torch.dtype | None,
) -> list[Stage]:  # fmt: skip
    """Return the stages of this rank: every one of as many as the pipeline has ranks.

    Args:
        model: the whole model.
        call: gives its loss for inputs by name.
        example: one rank's microbatch.
        mesh: the ranks of the pipeline.
        table: PIPELINE of parallelize.py.
        blocks: paths of all blocks.
        inputs: names of the inputs that have rows; the others are the same for all microbatches.
        dtype: the format in which blocks compute; None for that of the parameters.
    """
    recorded = record(model, call, example, table["starts"], blocks)
    if recorded.problem:
        raise SystemExit(f"the model cannot be cut there: {recorded.problem}")
    constants = {name: value for name, value in example.items() if name not in inputs}
    numbers = range(mesh.get_local_rank(), len(table["starts"]) + 1, mesh.size())
    return [Stage(model, call, recorded, number, constants, dtype) for number in numbers]


class Schedule:
    """The stages of a rank and the order in which they run microbatches."""

    def __init__(
        self, stages: list[Stage], mesh: DeviceMesh, device: torch.device, count: int, table: dict[str, Any]
    ) -> None:
        """Make the schedule.

        Args:
            stages: of this rank.
            mesh: of all ranks, with a dim ``pipeline``.
            device: of this rank.
            count: microbatches of a step.
            table: PIPELINE of parallelize.py.
        """
        self.stages, self.count, self.device = stages, count, device
        total, group = len(table["starts"]) + 1, mesh.get_group("pipeline")
        for stage in stages:
            stage.take_arrivals()
        parts = [pipelining.PipelineStage(s, s.number, total, device, group=group) for s in stages]
        kind = getattr(pipelining, table["schedule"])
        single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
        self.schedule = kind(parts[0] if single else parts, count, loss_fn=self._share, scale_grads=False)
        self.groups = {name: tie_group(mesh, owners) for name, owners in sorted(table["tied"].items())}

    def _share(self, loss: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        """Return the share of a microbatch's loss in that of the step."""
        return loss.sum() / self.count

    def step(self, parts: list[dict[str, Any]]) -> torch.Tensor:
        """Run a step's microbatches, and return the sum of their shares of the loss; zero without the last stage."""
        constants = self.stages[0].constants
        inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name not in constants}
        losses: list[torch.Tensor] = []
        target = torch.zeros(self.count, device=self.device)
        first = (next(iter(inputs.values())),) if self.stages[0].number == 0 else ()
        self.schedule.step(*first, target=target, losses=losses, **inputs)
        for name, group in self.groups.items():
            self._add_up(name, group)
        return torch.stack(losses).sum().detach() if losses else torch.zeros(())

    def _add_up(self, name: str, group: dist.ProcessGroup | None) -> None:
        """Add up the gradients of one parameter that several stages have a copy of."""
        copies = [stage.tied[name] for stage in self.stages if name in stage.tied]
        if not copies:
            return
        local = [getattr(p.grad, "_local_tensor", p.grad) for p in copies]
        total = torch.stack(local).sum(0)
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(total, group=group)
        for grad in local:
            grad.copy_(total)


def tie_group(mesh: DeviceMesh, owners: list[int]) -> dist.ProcessGroup | None:
    """Return the group of this rank with the ranks that have a copy of a parameter, by their pipeline ranks."""
    groups = mesh.mesh[owners].reshape(len(owners), -1).T.tolist()
    found = [dist.new_group(group) for group in groups]
    mine = [group for group, ranks in zip(found, groups, strict=True) if dist.get_rank() in ranks]
    return mine[0] if mine else None
