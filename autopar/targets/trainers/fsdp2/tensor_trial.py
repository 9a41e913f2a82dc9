"""Whether a model's own code runs on shards as a plan says: on shapes alone, next to a call on whole tensors.

A ``view`` with the whole number of heads fails on shards, or worse, cuts another dim: every reshape must cut the dim
that the same reshape of whole tensors makes from the cut one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.targets.target import Export
from autopar.targets.trainers.fsdp2.folder.pipeline import tensors_in
from autopar.targets.trainers.fsdp2.inputs import caller, loss_position, microbatch_of_rank
from autopar.targets.trainers.fsdp2.recording import PLAIN, fake_copy, fake_inputs, on_shapes
from autopar.torch_private import FakeTensorMode

Shape = tuple[int, ...]
RESHAPES = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")


@dataclass
class GivenArguments:
    """What modules were given in a call: positional and named arguments, by path."""

    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def count(self, path: str) -> int:
        """Return the number of positional arguments."""
        return len(self.given[path][0])

    def argument(self, around: str, inside: Sequence[str]) -> int | str | None:
        """Return which argument of a module is the first one of all of several modules; None if there is none."""
        if around not in self.given or any(path not in self.given or not self.given[path][0] for path in inside):
            return None
        wanted = self.given[inside[0]][0][0]
        if any(self.given[path][0][0] is not wanted for path in inside):
            return None
        args, kwargs = self.given[around]
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return next((key for key, value in named if value is wanted), None)

    def residual(self, block: str) -> int | str | None:
        """Return which argument of a block depends on parameters: the first one."""
        args, kwargs = self.given.get(block, ((), {}))
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return next((k for k, v in named if isinstance(v, torch.Tensor) and v.requires_grad), None)


def calls_of(export: Export, paths: Sequence[str]) -> GivenArguments:
    """Return what modules are given in a call on shapes."""
    mode, calls = FakeTensorMode(), GivenArguments()
    model = fake_copy(export.loaded.model, mode)

    def noting(path: str) -> Callable[..., None]:
        def note(_module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.given.setdefault(path, (args, kwargs))

        return note

    for path in dict.fromkeys(paths):
        if path:
            model.get_submodule(path).register_forward_pre_hook(noting(path), with_kwargs=True)
    inputs = fake_inputs(microbatch_of_rank(export), mode)
    with on_shapes(mode):
        caller(loss_position(export))(model, inputs)
    return calls


class FunctionTrace(TorchFunctionMode):
    """The functions that a call of a model runs, with the shapes that they take and give, and in which module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ran: list[tuple[str, list[Shape], list[Shape], str]] = []
        self.paused, self.module = False, ""
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._entering(path))

    def _entering(self, path: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            self.module = path

        return note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note it."""
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if not self.paused and name not in PLAIN:
            shapes = [[tuple(t.shape) for t in tensors_in(tree)] for tree in ((args, kwargs), output)]
            self.ran.append((name, shapes[0], shapes[1], self.module))
        return output


def problem_of(export: Export, styles: dict[str, dict[str, Any]]) -> str:
    """Return why the model's own code does not run on shards as the plan says; empty if it does."""
    ways = export.layout.sizes["tp"]
    traces = []
    for cut in (False, True):
        mode = FakeTensorMode()
        model = fake_copy(export.loaded.model, mode)
        inputs = fake_inputs(microbatch_of_rank(export), mode)
        traced = FunctionTrace(model)
        if cut:
            for path, style in styles.items():
                with on_shapes(mode):
                    localize(model.get_submodule(path), style, ways, traced)
        try:
            with on_shapes(mode), traced:
                caller(loss_position(export))(model, inputs)
        except Exception as error:
            why = (str(error).strip().splitlines() or [""])[0]
            return f"on shards, '{traced.module}' raises {type(error).__name__}: {why}"
        traces.append(traced.ran)
    return difference(traces[0], traces[1], ways)


def localize(module: Any, style: dict[str, Any], ways: int, traced: FunctionTrace) -> None:
    """Give a module the shapes that it has, takes and gives on one of several ranks."""
    kind = style["style"]
    if kind == "inputs":

        def changed(key: int | str, value: Any) -> Any:
            before, after = style["change"].get(key, ("whole", "whole"))
            return resized(value, before, after, ways)

        def change(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            traced.paused = True
            args = [changed(k, a) for k, a in enumerate(args)]
            kwargs = {k: changed(k, a) for k, a in kwargs.items()}
            traced.paused = False
            return tuple(args), kwargs

        module.register_forward_pre_hook(change, with_kwargs=True)
        return
    if kind == "sequence" or not style.get("local", True):
        if kind == "columns":
            module.register_forward_pre_hook(lambda _m, args: quietly(traced, args, style["input"], ways))
        return
    is_linear = isinstance(module, nn.Linear)
    if is_linear or kind == "columns":
        dim = 0 if (kind == "columns") == is_linear else 1
        module.weight = nn.Parameter(part(module.weight, dim, ways))
        if is_linear and module.bias is not None and kind == "columns":
            module.bias = nn.Parameter(part(module.bias, 0, ways))
    if kind == "columns":
        module.register_forward_pre_hook(lambda _m, args: quietly(traced, args, style["input"], ways))
    else:
        module.register_forward_hook(lambda _m, _args, out: quietly(traced, (out,), style["output"], ways, True)[0])


def quietly(traced: FunctionTrace, args: tuple[Any, ...], layout: str, ways: int, cut: bool = False) -> tuple[Any, ...]:
    """Return arguments of which the first is gathered from a layout, or cut into it, without noting it."""
    traced.paused = True
    before, after = ("whole", layout) if cut else (layout, "whole")
    first = resized(args[0], before, after, ways)
    traced.paused = False
    return (first, *args[1:])


def resized(value: Any, before: str, after: str, ways: int) -> Any:
    """Return a tensor in the shape that it has on a rank after its layout has changed."""
    if before != after and before != "whole":
        return torch.cat([value] * ways, int(before.removeprefix("shard ")))
    if before != after:
        return part(value, int(after.removeprefix("shard ")), ways)
    return value


def part(tensor: torch.Tensor, dim: int, ways: int) -> torch.Tensor:
    """Return one rank's part of a tensor."""
    return tensor.narrow(dim, 0, tensor.shape[dim] // ways)


def difference(
    whole: Sequence[tuple[str, list[Shape], list[Shape], str]],
    local: Sequence[tuple[str, list[Shape], list[Shape], str]], ways: int,
) -> str:  # fmt: skip
    """Return where a call on shards does something else than one on whole tensors; empty for nowhere."""
    if [name for name, *_ in whole] != [name for name, *_ in local]:
        return "on shards, the model's code calls other functions than on whole tensors"
    for (name, ins, outs, module), (_, local_ins, local_outs, _) in zip(whole, local, strict=True):
        for a, b in zip(outs, local_outs, strict=True):
            different = [d for d, (x, y) in enumerate(zip(a, b)) if x != y]
            if len(a) != len(b) or len(different) > 1 or any(a[d] != b[d] * ways for d in different):
                return f"in '{module}', {name} gives {list(a)} of whole tensors and {list(b)} of shards"
        if name in RESHAPES and ins and outs and len(ins) == len(local_ins):
            before, after = cut_dim(ins[0], local_ins[0]), cut_dim(outs[0], local_outs[0])
            outer = [prod(s[:d]) if d is not None else None for s, d in ((ins[0], before), (outs[0], after))]
            if outer[0] != outer[1]:
                return (
                    f"in '{module}', {name} to {list(outs[0])} gives {list(local_outs[0])} of shards of dim {before}: "
                    "its numbers are those of the whole tensor"
                )
    return ""


def cut_dim(whole: Shape, local: Shape) -> int | None:
    """Return the dim in which a shard is smaller; None if in none."""
    return next((d for d, (a, b) in enumerate(zip(whole, local)) if a != b), None)
