"""Methods of the model, called on its parallel module: ``pm.generate(...)``, ``pm.get_num_params()``.

A program is what ``forward`` computes. Any other method runs as it is written, on every rank, on the model itself (a
copy without values, if the model is gone) with the parameters and buffers that the parallel module has now, gathered
whole for the call. That is for what has no gradient: generating, counting, exporting. An optimizer that a method makes
gets the parallel module's parameters; what it freezes is frozen there; a generator goes on with what was gathered. What
the parallel module would not get is refused: gradients, writes to parameters and buffers, other modules, hooks,
functions that compute later.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RunError, first_few
from autopar.runtime.as_module.left_attributes import as_calls_left_it, refuse_unseen
from autopar.runtime.as_module.module_modes import in_modes
from autopar.runtime.as_module.original_model import unheard
from autopar.runtime.optimizers.user_optimizers import Move
from autopar.runtime.parameters.attributes import with_attributes
from autopar.torch_private import pytree


class _Calls(torch.nn.Module):
    """A model whose forward is one of its methods."""

    def __init__(self, model: torch.nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self.method)(*args, **kwargs)


_END = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _Next(torch.nn.Module):
    """A model whose forward gives what one of its generators yields next, and :data:`_END` at the end."""

    def __init__(self, model: torch.nn.Module, generator: Iterator[Any]) -> None:
        super().__init__()
        self.model, self.generator = model, generator

    def forward(self) -> Any:
        return next(self.generator, _END)


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
    with pm._autopar_all_call(shown):
        return _run_together(pm, name, shown, args, kwargs)


def _run_together(pm: Any, name: str, shown: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    programs, model = pm._autopar_programs, pm._autopar_model_ref()
    is_copy = model is None
    if model is None and programs is not None and programs.skeleton is not None:
        model = programs.skeleton.model
    if model is None:
        raise RunError(f"{shown}() cannot be called: the model is gone, and could not be copied; keep it")
    refuse_unseen(pm, getattr(model, name))
    values = _whole(pm, model)
    before = _Traces(model, values)
    with _in_mode_of(pm, model), unheard(), as_calls_left_it(pm, model):
        result = torch.func.functional_call(_Calls(model, name), _named(values), args, kwargs)
    if inspect.isgenerator(result):
        return _streamed(pm, model, shown, values, result)
    result = pytree.tree_map_only(torch.optim.Optimizer, lambda o: _moved(pm, shown, o, values), result)
    _check_result(shown, result, values)
    before.check(shown, is_copy)
    parameters = dict(pm.named_parameters(remove_duplicate=False))
    for key, value in values.items():  # freezing, or thawing
        param = parameters.get(key)
        if param is not None and param.requires_grad is not value.requires_grad:
            param.requires_grad_(value.requires_grad)
    return result


def _named(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values by the names that they have in a :class:`_Calls`."""
    return {f"model.{key}": value for key, value in values.items()}


def _streamed(
    pm: Any, model: torch.nn.Module, shown: str, values: Mapping[str, torch.Tensor], generator: Iterator[Any]
) -> Iterator[Any]:
    """What a method yields, one after the other, with the values that were gathered when it was called."""
    next_one = _Next(model, generator)
    while True:
        with _in_mode_of(pm, model), unheard(), as_calls_left_it(pm, model):
            value = torch.func.functional_call(next_one, _named(values), ())
        if value is _END:
            return
        _check_result(shown, value, values)
        yield value


def _moved(
    pm: Any, shown: str, optimizer: torch.optim.Optimizer, values: Mapping[str, torch.Tensor]
) -> torch.optim.Optimizer:
    """An optimizer that a method has made, of the parallel module's parameters."""
    move = Move(optimizer, values)
    if any(name is not None for names in move.layout for name in names):
        move.check()
        move.to(pm, pm._autopar_ranks()[0])
    return optimizer


def _check_result(shown: str, result: Any, values: Mapping[str, torch.Tensor]) -> None:
    """Refuse what would lead back to the values that were gathered.

    Raises:
        RunError: it says what.
    """
    of_the_model = {id(value) for value in values.values()}
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.nn.Module) or id(leaf) in of_the_model:
            raise RunError(
                f"{shown}() gives a part of the model itself, and what is done to that would not reach the parallel "
                "module: use pm's own parts, which have the model's names"
            )
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and _leads_to(leaf, of_the_model):
            raise RunError(
                f"{shown}() computes with parameters that were gathered for it, so gradients of what it gives would "
                "not reach the parallel module: call it under torch.no_grad(), or parallelize a module whose forward "
                "does what it does"
            )
        if (inspect.isroutine(leaf) and not inspect.isbuiltin(leaf)) or isinstance(leaf, functools.partial | Iterator):
            raise RunError(
                f"{shown}() gives a {type(leaf).__name__}, which would compute later, when the parameters that were "
                "gathered for it are gone: call the method for what that gives"
            )


def _leads_to(tensor: torch.Tensor, leaves: Collection[int]) -> bool:
    """Whether a gradient of a tensor would come to one of these leaves; that of what a call has left does not."""
    if tensor.grad_fn is None:
        return id(tensor) in leaves
    to_do, seen = [tensor.grad_fn], set[Any]()
    while to_do:
        node = to_do.pop()
        if node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        to_do += [behind for behind, _ in node.next_functions if behind is not None]
    return False


class _Traces:
    """What a method may leave behind on the model, which the parallel module would not have."""

    def __init__(self, model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
        self.model, self.values = model, values
        self.versions = {key: value._version for key, value in values.items()}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.hooks = self._hooks()
        self.attributes = {path: _plain_of(module) for path, module in self.modules.items()}

    def _hooks(self) -> int:
        of_tensors = sum(len(value._backward_hooks or ()) for value in self.values.values())
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        of_modules = (len(module.__dict__.get(kind, ())) for module in self.modules.values() for kind in kinds)
        return of_tensors + sum(of_modules)

    def check(self, shown: str, is_copy: bool) -> None:
        """Refuse what was left.

        Args:
            is_copy: the model is gone, and the method ran on a copy: attributes that it has set are lost, too.

        Raises:
            RunError: with the names.
        """
        written = [key for key, value in self.values.items() if value._version != self.versions[key]]
        if written:
            raise RunError(
                f"{shown}() has written to {first_few(written)}, whole copies of which were gathered for it, so the "
                "parallel module does not have that: write to pm.get_parameter(...) under torch.no_grad(), or call the "
                "method before parallelize"
            )
        now = dict(self.model.named_modules(remove_duplicate=False))
        if now.keys() != self.modules.keys() or any(now[path] is not self.modules[path] for path in now):
            raise RunError(
                f"{shown}() has replaced or added modules, which the program does not have: call it before parallelize"
            )
        if self._hooks() != self.hooks:
            raise RunError(
                f"{shown}() has registered or removed hooks, which the parallel module does not have: register them "
                "on pm's parameters, or call the method before parallelize"
            )
        changed = [
            f"{path}.{name}" if path else name
            for path, module in self.modules.items()
            for name, value in _plain_of(module).items()
            if is_copy and not _same(self.attributes[path].get(name, _END), value)
        ]
        if changed:
            raise RunError(
                f"{shown}() has set {first_few(changed)} on a copy of the model, which is gone itself, so that is "
                "lost: keep the model beside the parallel module (a change of what forward reads is then seen)"
            )


def _plain_of(module: torch.nn.Module) -> dict[str, Any]:
    """A module's own attributes, not those of torch or of a library's inside."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}


def _same(before: Any, after: Any) -> bool:
    return before is after or (type(before) is type(after) and isinstance(after, _PLAIN) and before == after)


def _whole(pm: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, whole, on this rank's device; tied ones are one tensor."""
    if pm._autopar_leads is not None:
        return _of_all_stages(pm, model)
    values: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor] = {}
    named = [*pm.named_parameters(remove_duplicate=False), *pm.named_buffers(remove_duplicate=False)]
    with torch.no_grad():
        for name, tensor in named:
            if id(tensor) not in same:
                stored = tensor.detach()
                whole = stored.full_tensor() if isinstance(stored, DTensor) else stored.clone()
                same[id(tensor)] = _standing_for(tensor, whole)
            values[name] = same[id(tensor)]
    return values


def _standing_for(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The whole value as what ``tensor`` is in its module: a parameter with its attributes, or a buffer."""
    if not isinstance(tensor, torch.nn.Parameter):
        return whole
    return with_attributes(torch.nn.Parameter(whole, tensor.requires_grad), tensor)


def _of_all_stages(pm: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of a pipeline; what stages of different ranks hold under several names is one tensor as in ``model``."""
    state = pm.full_state_dict(all_ranks=True)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    values: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        if name in state and id(tensor) not in same:
            whole = state[name].to(pm._autopar_device)
            same[id(tensor)] = _standing_for(tensor, whole)
    for name, tensor in named:
        if id(tensor) in same:
            values[name] = same[id(tensor)]
    return values


@contextlib.contextmanager
def _in_mode_of(pm: Any, model: torch.nn.Module) -> Iterator[None]:
    """The model in the mode of its parallel module."""
    with in_modes(model, pm._autopar_modes.training):
        yield


__all__ = ["method_of"]
