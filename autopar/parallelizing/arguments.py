"""The arguments of :func:`~autopar.api.capture`, ``plan`` and ``parallelize``: of the right types, and alike on ranks.

What is wrong is said here, by the name of the argument, before anything is done with it: the code behind may then rely
on types. What an argument *means* (a pattern that matches nothing, a mesh that does not fit) is checked where it is
used.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.capture.module_hooks import check_hooks
from autopar.capture.tensor_layouts import check_not_packed
from autopar.capture.untraceable_modules import check_modules
from autopar.errors import AutoparError, CaptureError, MeshError
from autopar.parallelizing.forward_only import check_mode
from autopar.plans.clusters import is_axes
from autopar.plans.plan import Plan
from autopar.plans.plan_options import MODES as PLAN_MODES
from autopar.plans.plan_options import OPTIMIZERS, PLAN_OPTIONS, is_integer, is_number, is_table, optional
from autopar.runtime.as_module.parallel_module import ParallelModule
from autopar.runtime.as_module.submodules import place_of
from autopar.runtime.optimizers.user_optimizers import Move, name_of
from autopar.runtime.parameters.old_parameters import OldParameter
from autopar.runtime.parameters.user_module import names_in_parallel_models, written_class
from autopar.runtime.ranks.agree import together
from autopar.runtime.ranks.devices import check_one_device
from autopar.runtime.stages.seeds import MODES
from autopar.torch_private import pytree
from autopar.words.graph import Ref
from autopar.words.texts import mesh_of
from autopar.words.trees import PyTree
from hardware_profiles import Cluster

_Check = tuple[Callable[[Any], bool], str]

EXAMPLE = ("example_inputs", "example_kwargs", "targets")
_SUMS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""In which gradients may be added up over ranks."""

_OPTIONS_OF_COMPILE = {*inspect.signature(torch.compile).parameters} - {"model"}

_CHECKS: dict[str, _Check] = {
    "example_kwargs": (optional(lambda v: is_table(v) and all(isinstance(k, str) for k in v)),
                       "a dict of keyword arguments"),
    "loss_fn": (optional(callable), "a function of the model's output and the targets"),
    "targets": (lambda v: isinstance(v, (torch.Tensor, tuple, list)),
                "a tuple of what loss_fn takes after the output, or one tensor"),
    "captured": (optional(lambda v: isinstance(v, Captured)), "what capture() gave"),
    "cluster": (optional(lambda v: isinstance(v, (str, Path, Cluster))), "a cluster's name, or the path of a profile"),
    "profile": (optional(lambda v: isinstance(v, (str, Path))), "the path of what autopar profile wrote"),
    "plan": (optional(lambda v: isinstance(v, (Plan, str, Path))), "a plan, or the path of a plan file"),
    "hooks": (lambda v: isinstance(v, str) and v in ("refuse", "trace"),
              "'refuse', or 'trace' for forward hooks that compute with tensors only"),
    "init": (optional(callable), "a function that sets the parameters and buffers of the module that it is given"),
    "verify_capture": (lambda v: isinstance(v, bool), "True or False"),
    "batch": (lambda v: isinstance(v, str) and v in ("global", "local"), "'global' or 'local'"),
    "input_rows": (optional(lambda v: isinstance(v, (list, tuple, set, frozenset)) and all(
                       isinstance(name, str) or (is_integer(name) and name >= 0) for name in v) and len(v) > 0),
                   "a list of names or positions of arguments of forward, such as ['input_ids', 'labels']"),
    "shapes": (lambda v: isinstance(v, str) and v in ("any", "fixed", "buckets"), "'any', 'fixed' or 'buckets'"),
    "buckets": (lambda v: isinstance(v, (list, tuple)) and all(
                    isinstance(size, (list, tuple)) and len(size) == 2 and all(is_integer(n) and n > 0 for n in size)
                    for size in v), "pairs (rows, length), such as [(8, 512), (1, 4096)]"),
    "random": (lambda v: isinstance(v, str) and v in MODES, "'sharded' or 'torch'"),
    "mode": (lambda v: isinstance(v, str) and v in PLAN_MODES, "'training' or 'inference'"),
    "cache_length": (optional(lambda v: is_integer(v) and v > 0), "a number of tokens, 1 or more"),
    "on_change": (lambda v: isinstance(v, str) and v in ("error", "recapture"), "'error' or 'recapture'"),
    "timeout": (lambda v: is_number(v) and 0 < v < math.inf, "seconds, more than 0"),
    "gradient_dtype": (optional(lambda v: isinstance(v, torch.dtype) and v in _SUMS),
                       "torch.bfloat16, torch.float16, torch.float32 or torch.float64"),
    "compile": (lambda v: isinstance(v, bool) or (is_table(v) and {*v} <= _OPTIONS_OF_COMPILE),
                f"True, False or a dict of torch.compile's arguments ({', '.join(sorted(_OPTIONS_OF_COMPILE))})"),
    **{option.name: (option.right, option.wanted) for option in PLAN_OPTIONS},
}  # fmt: skip


def check(**given: Any) -> None:
    """Refuse arguments of the wrong types.

    Raises:
        AutoparError: with the argument's name, what it holds and what is wanted.
    """
    for name, value in given.items():
        if name not in _CHECKS:
            continue
        right, wanted = _CHECKS[name]
        if not right(value):
            raise (MeshError if name == "mesh" else AutoparError)(f"{name} is {shown(value)}; give {wanted}")


def is_right(name: str, value: PyTree) -> bool:
    """Check whether an argument has the right type."""
    return _CHECKS[name][0](value)


def check_ranks(mesh: Any) -> None:
    """Refuse a mesh for :func:`~autopar.api.parallelize` that is no mesh.

    Raises:
        MeshError: with what it is.
    """
    if isinstance(mesh, (DeviceMesh, Path, Cluster)) or is_integer(mesh):
        return
    if not is_right("mesh", mesh):
        raise MeshError(
            f"mesh is {shown(mesh)}; give a DeviceMesh, axes and their sizes such as 'data=2,tensor=4', the name of a "
            "cluster, or a number of ranks"
        )
    if not isinstance(mesh, str) or is_axes(mesh):
        mesh_of(mesh)


def check_model(model: Any) -> None:
    """Refuse what is no module, is spread over ranks already, or was compiled or scripted.

    Raises:
        CaptureError: with the path of the module inside that is.
    """
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"expected a torch.nn.Module, got {type(model).__name__}; pass the model object itself")
    for path, module in model.named_modules():
        where = f"its module '{path}'" if path else "the model"
        kind = written_class(module).__name__
        if isinstance(module, ParallelModule) and not path:
            raise CaptureError(
                f"the model is a parallel module already: parallelize has changed this {kind} in place, so call and "
                "train it as it is; for another plan parallelize a new model, and load autopar.full_state_dict(model)"
            )
        if isinstance(module, ParallelModule):
            raise CaptureError(
                f"{where} is a parallel module already, a {kind} that parallelize was given; parallelize the whole "
                "model once, before any part of it"
            )
        if (at := place_of(module)) is not None:
            raise CaptureError(
                f"{where} is part of a model that is parallelized already, '{at.path}' of a "
                f"{at.run.kind.__name__}: train it there, or parallelize a new module, with its values of "
                "autopar.full_state_dict(model)"
            )
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise CaptureError(f"{where} is a DistributedDataParallel; pass the model inside it, .module")
    elsewhere = names_in_parallel_models()
    for name, param in model.named_parameters():
        there = param.name_in_model if type(param) is OldParameter else elsewhere.get(id(param))
        if there is not None:
            raise CaptureError(
                f"parameter '{name}' is also in a model that was parallelized ('{there}' there), which trains it: put "
                "both into one module, and parallelize that one"
            )
    check_modules(model)
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise CaptureError(
                f"parameter '{name}' is a DTensor on {param.device_mesh}: the model is spread already (by fully_shard "
                "or parallelize_module); pass it as it was before"
            )


def check_loss(captured: Captured) -> None:
    """Refuse a loss function that returned no loss.

    Raises:
        CaptureError: with what it returned.
    """
    graph = captured.graph
    if graph.loss is not None:
        return
    trains = any(node.needs_grad for _, node in graph.of_kind("param"))
    specs = [graph.nodes[o.node].outs[o.out] if isinstance(o, Ref) else None for o in graph.outputs]
    returned = [
        f"a {spec.dtype} tensor of shape {spec.shape}" if spec else "a number" if isinstance(o, Ref) else shown(o)
        for o, spec in zip(graph.outputs, specs, strict=True)
    ]
    scalars = [spec for spec in specs if spec is not None and spec.shape == ()]
    if scalars and not trains:
        return
    why = ", through which no gradient flows back to the parameters" if scalars else ""
    raise CaptureError(
        f"loss_fn returned {', '.join(returned) or 'nothing'}{why}; it must return a tensor of no dims (such as a "
        "mean) that is computed from the model's output by torch, without .item(), float() or detach()"
    )


def check_optimizer(optimizer: Any) -> str:
    """Return the name of an optimizer for the planner.

    Raises:
        AutoparError: it is neither a name nor an optimizer.
    """
    if not isinstance(optimizer, (str, torch.optim.Optimizer)):
        what = " (a class; make one of the model's parameters)" if isinstance(optimizer, type) else ""
        raise AutoparError(
            f"optimizer is {shown(optimizer)}{what}; give {', '.join(OPTIMIZERS)}, or a torch.optim.Optimizer"
        )
    name = name_of(optimizer)
    if name not in OPTIMIZERS:
        raise AutoparError(f"optimizer '{name}' is unknown; use {', '.join(OPTIMIZERS)}")
    return name


def shown(value: PyTree) -> str:
    """Return a value in a message, not longer than a line."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, torch.nn.Module):
        return f"a {type(value).__name__}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"a {type(value).__name__}, {text[:60]}..."


# --- alike on all ranks ----------------------------------------------------------------------------------------------


def check_call(group: Any, given: Mapping[str, Any]) -> Move | None:
    """Check the arguments of :func:`~autopar.api.parallelize` on all ranks; every rank of ``group`` calls it.

    Returns:
        The optimizer that is to be moved, if one is given.

    Raises:
        AutoparError: on all ranks, where an argument is wrong on one of them or differs between two.
    """
    move: Move | None = None
    error: BaseException | None = None
    try:
        check_model(given["model"])
        check_ranks(given["mesh"])
        check(**{name: value for name, value in given.items() if name != "mesh"})
        if (given["shapes"] == "buckets") != bool(given["buckets"]):
            raise AutoparError(
                f"shapes is {given['shapes']!r} and buckets has {len(given['buckets'])} shapes; give "
                "shapes='buckets' with buckets=[(rows, length), ...], or neither"
            )
        if given["random"] == "torch" and (given["buckets"] or given["compile"] is not False):
            what = "buckets=, which pads calls to other shapes" if given["buckets"] else "compile="
            raise AutoparError(
                f"random='torch' draws what torch draws in eager mode, which goes with no {what}; leave that out, or "
                "give random='sharded', the default"
            )
        for module in (given["model"], given["loss_fn"]):
            if isinstance(module, torch.nn.Module):
                check_hooks(module, traced=given["hooks"] == "trace")
        check_mode(given)
        example = {name: given[name] for name in EXAMPLE}
        check_not_packed(example)
        check_one_device(given["model"], example)
        check_optimizer(given["optimizer"])
        if isinstance(given["optimizer"], torch.optim.Optimizer):
            move = Move(given["optimizer"], given["model"])
            move.check()
    except Exception as e:
        error = e
    agree(group, error, {**given, "optimizer": move or given["optimizer"]})
    return move


def agree(group: Any, error: BaseException | None, given: Mapping[str, Any]) -> None:
    """Compare the arguments of a call on all ranks of ``group``; each calls it, with its own error if it has one.

    Tensors count by type and shape, functions by name: what they compute is compared as a graph, later.

    Raises:
        AutoparError: the error of this rank or of the lowest rank with one, or the first argument that differs, with
            both values; on all ranks.
    """
    if dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    together(group, error)
    mine = {name: _described(value) for name, value in given.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for name in given:
        values = [theirs.get(name) for theirs in everyone]
        for rank, value in enumerate(values):
            if value != values[0]:
                what_to_do = "every rank calls parallelize with the same arguments"
                if given.get("batch") == "local" and name in EXAMPLE:
                    what_to_do = (
                        "with batch='local' calls may have other rows on every rank, and as many as each has, but the "
                        "example has equally many on all: cut it to as many as the rank with the fewest has (x[:n])"
                    )
                raise AutoparError(
                    f"{name} differs between ranks: it is {values[0]} on rank 0 and {value} on rank {rank}; "
                    f"{what_to_do}"
                )


def _described(value: PyTree) -> str:
    """Return a text that is the same where the argument is; a long one by its beginning and a hash."""
    text = re.sub(r" at 0x[0-9a-f]+", "", _text(value))
    if len(text) <= 300:
        return text
    return f"{text[:150]}... (hash {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _text(value: PyTree) -> str:
    if isinstance(value, DeviceMesh):
        return f"a DeviceMesh of {value.device_type} {value.mesh.tolist()} with axes {value.mesh_dim_names}"
    if isinstance(value, Move):
        return str(value)
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__} in {'training' if value.training else 'eval'} mode"
    if callable(value) and not isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    if isinstance(value, (torch.Tensor, list, tuple, dict)):
        return repr(pytree.tree_map(lambda leaf: _Text(_leaf(leaf)), value))
    return repr(value)


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}[{' '.join(map(str, leaf.shape))}]"
    return _text(leaf) if callable(leaf) else repr(leaf)


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


__all__ = ["OPTIMIZERS", "agree", "check", "check_call", "check_model", "check_optimizer", "is_right"]
