"""Stages of a pipeline, made from the model's own code.

A stage runs the model's whole ``forward``. Blocks and other modules of other stages are absent: they return empty
tensors of the right shape, and the stage's first block takes what has arrived instead of them. Where the next stage
begins, ``forward`` is left, and what its first block is given is sent on. So masks, positions and the like are computed
in every stage, and only what depends on parameters travels.

The table PIPELINE of parallelize.py has, beside the schedule:

* ``rows``: rows of a microbatch on a rank, for which its shapes are;
* ``starts``: the first block of every stage but the first;
* ``takes``: for each of these, which of the tensors that it is given travel, by position, and their shapes;
* ``returns``: the shapes that blocks return, and modules outside of blocks;
* ``outside``: the stages that have each module outside of blocks;
* ``tied``: the stages that have a copy of a parameter of several stages; the copies' gradients are added up.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Call = Callable[[nn.Module, dict[str, Any]], torch.Tensor]
TENSOR = re.compile(r"([a-z]+\d*)\[([\d, ]*)\]")


class Leaving(Exception):
    """The end of a stage, with what the next one takes."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__("the next stage begins")
        self.tensors = tensors


class Absent(nn.Module):
    """A module of another stage: it returns empty tensors.

    Attributes:
        output: what the module returns, with texts such as ``float32[4, 32]`` for tensors.
        floats: the format of floating point tensors.
        leaves_with: for the first block of the next stage, the positions of the tensors to leave with; else None.
    """

    def __init__(self, module: nn.Module, output: Any, floats: torch.dtype, leaves_with: list[int] | None) -> None:
        super().__init__()
        self.output, self.floats, self.leaves_with = output, floats, leaves_with
        memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in module.parameters()}
        memo |= {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
        self.__dict__["without_numbers"] = copy.deepcopy(module, memo)  # no child: it has no parameters to train

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that the module has, such as its kind of attention or the format of its weight."""
        if name == "without_numbers" or "without_numbers" not in self.__dict__:
            return super().__getattr__(name)
        return getattr(self.__dict__["without_numbers"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module would, without numbers; or leave the model's forward with the tensors that are sent.

        Raises:
            Leaving: the next stage begins here.
        """
        given = tensors_in((args, kwargs))
        if self.leaves_with is not None:
            raise Leaving(tuple(given[k] for k in self.leaves_with))
        device = next((t.device for t in given), torch.device("cpu"))
        return mapped(lambda leaf: empty(leaf, self.floats, device), self.output)


def empty(leaf: Any, floats: torch.dtype, device: torch.device | str) -> Any:
    """Return a tensor of zeros that takes no memory for ``float32[4, 32]``, and any other value as it is."""
    found = TENSOR.fullmatch(leaf) if isinstance(leaf, str) else None
    if found is None:
        return leaf
    dtype = floats if found[1].startswith(("float", "bfloat")) else getattr(torch, found[1])
    return torch.zeros((), dtype=dtype, device=device).expand([int(n) for n in found[2].split(",") if n.strip()])


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested tuples, lists and dicts with every other value in them changed."""
    if type(tree) in (tuple, list):
        return type(tree)(mapped(change, item) for item in tree)
    if type(tree) is dict:
        return {key: mapped(change, item) for key, item in tree.items()}
    return change(tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested arguments, in order."""
    found: list[torch.Tensor] = []
    mapped(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, tree)
    return found


def returned(table: dict[str, Any], path: str) -> Any:
    """Return what the module at a path returns: the entry whose pattern fits part by part, as ``layers.*``."""
    parts = path.split(".")
    for pattern, output in table["returns"].items():
        names = pattern.split(".")
        if len(names) == len(parts) and all(map(fnmatchcase, parts, names)):
            return output
    raise KeyError(f"PIPELINE['returns'] has no module {path}")


class StageOfModel(nn.Module):
    """One stage of a model.

    Attributes:
        whole: the model, in which modules of other stages are absent.
        number: of the stage.
        tied: the paths in this stage of parameters that other stages have, too, by their names.
        constants: the inputs without rows.
    """

    def __init__(
        self, model: nn.Module, call: Call, number: int, table: dict[str, Any], blocks: list[str],
        constants: dict[str, Any], floats: torch.dtype,
    ) -> None:  # fmt: skip
        """Make a stage.

        Args:
            model: the whole model.
            call: gives its loss for inputs by name.
            number: of the stage.
            table: PIPELINE.
            blocks: paths of all blocks, in the order in which the model calls them.
            constants: the inputs without rows.
            floats: the format in which blocks compute.
        """
        super().__init__()
        self.call, self.number, self.constants, starts = call, number, constants, table["starts"]
        tied = {name: model.get_parameter(name) for name, stages in table["tied"].items() if number in stages}
        memo: dict[int, Any] = {id(t): t for t in [*model.parameters(), *model.buffers()]}
        for name, p in tied.items():
            if number > min(table["tied"][name]):  # a copy of its own: the other stage may be on this rank, too
                memo[id(p)] = nn.Parameter(p.detach().clone(), p.requires_grad)
        copies = {id(memo[id(p)]): name for name, p in tied.items()}
        self.whole = copy.deepcopy(model, memo)
        bounds = [0, *(blocks.index(start) for start in starts), len(blocks)]
        self.blocks = blocks[bounds[number] : bounds[number + 1]]
        self.takes = table["takes"][starts[number - 1]] if number else {}
        following = starts[number] if number < len(starts) else ""
        absent = [path for path in blocks if path not in self.blocks]
        absent += [path for path, stages in table["outside"].items() if number not in stages]
        for path in absent:
            leaves_with = list(table["takes"][path]) if path == following else None
            module = model.get_submodule(path)
            self.whole.set_submodule(path, Absent(module, returned(table, path), floats, leaves_with))
        named = self.whole.named_parameters(remove_duplicate=False)
        self.tied = {copies[id(p)]: path for path, p in named if id(p) in copies}
        self.swapped: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take_arrivals(self) -> None:
        """Let the stage's blocks take what has arrived. Called last, so that the hooks of others see that, too."""
        this = weakref.ref(self)

        def hook_of(path: str) -> Callable[..., Any]:
            def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
                stage = this()
                assert stage is not None
                swapped = stage.swapped
                if path == stage.blocks[0]:
                    given = [tensors_in((args, kwargs))[k] for k in stage.takes]
                    swapped.update({id(old): (old, new) for old, new in zip(given, stage.arrived, strict=True)})
                return mapped(lambda x: swapped[id(x)][1] if id(x) in swapped else x, (args, kwargs))

            return hook

        for path in self.blocks if self.number else ():
            self.whole.get_submodule(path).register_forward_pre_hook(hook_of(path), prepend=True, with_kwargs=True)

    def forward(self, *arrived: torch.Tensor, **inputs: Any) -> Any:
        """Run the stage on the model's inputs by name and what has arrived from the stage before."""
        self.arrived = arrived
        try:
            loss = self.call(self.whole, {**self.constants, **inputs})
        except Leaving as leaving:
            return leaving.tensors if len(leaving.tensors) > 1 else leaving.tensors[0]
        finally:
            self.swapped.clear()
            self.arrived = ()
        return loss.reshape(1)


class StageSchedule:
    """The stages of a rank, and the order in which they run microbatches."""

    def __init__(
        self, stages: list[StageOfModel], mesh: DeviceMesh, device: torch.device, count: int, table: dict[str, Any]
    ) -> None:
        """Make the schedule.

        Args:
            stages: of this rank.
            mesh: of all ranks, with a dim ``pipeline``.
            device: of this rank.
            count: microbatches of a step.
            table: PIPELINE.
        """
        self.stages, self.count, self.device = stages, count, device
        total, group = len(table["starts"]) + 1, mesh.get_group("pipeline")
        for stage in stages:
            stage.take_arrivals()
        parts = [pipelining.PipelineStage(s, s.number, total, device, group=group) for s in stages]
        kind = getattr(pipelining, table["schedule"])
        single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
        self.schedule = kind(parts[0] if single else parts, count, loss_fn=self._share, scale_grads=False)
        self.groups = {}
        for name, owners in sorted(table["tied"].items()):
            self.groups[name] = tie_group(mesh, sorted({number % mesh.size(0) for number in owners}))

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
        """Add up the gradients of the copies of one parameter."""
        grads = [s.whole.get_parameter(s.tied[name]).grad for s in self.stages if name in s.tied]
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]
        total = torch.stack(local).sum(0)
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(total, group=group)
        for grad in local:
            grad.copy_(total)


def tie_group(mesh: DeviceMesh, owners: list[int]) -> dist.ProcessGroup | None:
    """Return the group of this rank with the ranks that have a copy of a parameter, by their pipeline ranks."""
    grid = mesh.mesh
    groups = grid[owners].reshape(len(owners), -1).T.tolist()
    found = [dist.new_group(group) for group in groups]
    mine = [group for group, ranks in zip(found, groups, strict=True) if dist.get_rank() in ranks]
    return mine[0] if mine else None
