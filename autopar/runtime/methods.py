"""Methods of the model, called on its parallel module: ``pm.generate(...)``, ``pm.get_num_params()``.

A program is what ``forward`` computes. Any other method runs as it is written, on every rank, on the model itself (a
copy without values, if the model is gone) with the parameters and buffers that the parallel module has now, gathered
whole for the call. That is for what has no gradient: generating, counting, exporting. What a method would do that the
parallel module does not get is refused: gradients, writes to parameters and buffers, other modules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RunError, first_few
from autopar.runtime.original import unheard
from autopar.torch_private import pytree


class _Calls(torch.nn.Module):
    """A model whose forward is one of its methods."""

    def __init__(self, model: torch.nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self.method)(*args, **kwargs)


def method_of(pm: Any, name: str, kind: type) -> Callable[..., Any]:
    """The method ``name`` of the model that ``pm`` was made of, bound to the values that ``pm`` has.

    Args:
        kind: the model's class.
    """

    @functools.wraps(getattr(kind, name))
    def method(*args: Any, **kwargs: Any) -> Any:
        return _run(pm, name, f"{kind.__name__}.{name}", args, kwargs)

    return method


def _run(pm: Any, name: str, shown: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    programs, model = pm._programs, pm._model_ref()
    if model is None and programs is not None and programs.skeleton is not None:
        model = programs.skeleton.model
    if model is None:
        raise RunError(f"{shown}() cannot be called: the model is gone, and could not be copied; keep it")
    if programs is not None:
        programs.meet_all(shown)
    values = _whole(pm, model)
    versions = {key: value._version for key, value in values.items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    with _in_mode_of(pm, model), unheard():
        result = torch.func.functional_call(
            _Calls(model, name), {f"model.{key}": value for key, value in values.items()}, args, kwargs
        )
    of_the_model = {id(value) for value in values.values()}
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.nn.Module) or id(leaf) in of_the_model:
            raise RunError(
                f"{shown}() gives a part of the model itself, and what is done to that would not reach the parallel "
                "module: use pm's own parts, which have the model's names"
            )
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise RunError(
                f"{shown}() computes with parameters that were gathered for it, so gradients of what it gives would "
                "not reach the parallel module: call it under torch.no_grad(), or parallelize a module whose forward "
                "does what it does"
            )
    written = [key for key, value in values.items() if value._version != versions[key]]
    if written:
        raise RunError(
            f"{shown}() has written to {first_few(written)}, whole copies of which were gathered for it, so the "
            "parallel module does not have that: write to pm.get_parameter(...) under torch.no_grad(), or call the "
            "method before parallelize"
        )
    now = dict(model.named_modules(remove_duplicate=False))
    if now.keys() != modules.keys() or any(now[path] is not modules[path] for path in modules):
        raise RunError(
            f"{shown}() has replaced or added modules, which the program does not have: call it before parallelize"
        )
    return result


def _whole(pm: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, whole, on this rank's device; tied ones are one tensor."""
    if pm.leads is not None:
        return _of_all_stages(pm, model)
    values: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor] = {}
    named = [*pm.named_parameters(remove_duplicate=False), *pm.named_buffers(remove_duplicate=False)]
    with torch.no_grad():
        for name, tensor in named:
            if id(tensor) not in same:
                stored = tensor.detach()
                whole = stored.full_tensor() if isinstance(stored, DTensor) else stored.clone()
                same[id(tensor)] = whole.requires_grad_(tensor.requires_grad)
            values[name] = same[id(tensor)]
    return values


def _of_all_stages(pm: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of a pipeline; what stages of different ranks hold under several names is one tensor as in ``model``."""
    state = pm.full_state_dict(all_ranks=True)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    values: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        if name in state and id(tensor) not in same:
            same[id(tensor)] = state[name].to(pm._device).requires_grad_(tensor.requires_grad)
    for name, tensor in named:
        if id(tensor) in same:
            values[name] = same[id(tensor)]
    return values


@contextlib.contextmanager
def _in_mode_of(pm: Any, model: torch.nn.Module) -> Iterator[None]:
    """The model in the mode of its parallel module."""
    now = [(module, module.training) for module in model.modules()]
    modes = pm._programs.modes if pm._programs is not None else {}
    try:
        for path, module in model.named_modules():
            module.training = pm.training and modes.get(path, True)
        yield
    finally:
        for module, mode in now:
            module.training = mode


__all__ = ["method_of"]
