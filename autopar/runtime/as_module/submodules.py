"""The submodules of a parallel module: the user's own, of classes derived from theirs.

A program was captured whole. So what would be done to a submodule alone (a call, a hook, another module in its place)
has no effect on it, and is refused; its mode, its plain attributes and its tensors are the submodule's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import RunError, first_few
from autopar.runtime.as_module.methods import freeze_alike, is_called_by_program, method_of
from autopar.runtime.one_mesh.left_attributes import refuse_left
from autopar.runtime.one_mesh.statistics_anew import BATCH_NORMS, momentum_of, reset, set_momentum
from autopar.runtime.parameters.placed_alike import placed_as
from autopar.runtime.parameters.user_module import PLACE
from autopar.runtime.variants.run import ParallelRun
from autopar.words.trees import PyTree

_CONTAINERS = (
    torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ParameterList, torch.nn.ModuleDict, torch.nn.ParameterDict,
)  # fmt: skip
"""Modules whose forward, or whose owner's, loops over what they hold."""
REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of every module in which torch keeps what is registered, by name; None is registered, too."""
AGAIN = "parallelize the model again (weights: autopar.full_state_dict(model))"


@dataclass(frozen=True)
class PlaceOfPart:
    """Where a submodule of a parallel module is: in which run, and under which path."""

    run: ParallelRun
    path: str
    kind: type[torch.nn.Module]


def place_of(module: torch.nn.Module) -> ParallelRun | PlaceOfPart | None:
    """Return the run of a parallel module, or the place of a submodule in one; None in a module that is neither."""
    return module.__dict__.get(PLACE)


class Derived(torch.nn.Module):
    """What parallel modules and their submodules share."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Tell no hook of the user's classes, such as a registry, of a class that is no new one."""

    def __getattr__(self, name: str) -> Any:
        """Find an attribute that is not there: on another rank, or left by a call that does not leave it.

        Raises:
            RunError: forward sets it, and the program does not.
            AttributeError: there is none.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            at = place_of(self)
            if at is None or name.startswith("__"):
                raise
        path, run = at.path, at.run
        full = f"{path}.{name}" if path else name
        if run.leads is not None and full in run.user.params:
            old = run.user.params[full]
            return torch.nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device="meta"), run.user.wanted[full])
        if run.leads is not None and full in run.user.buffers:
            return run.user.buffers[full].to("meta")
        refuse_left(run.captured, path, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: PyTree) -> None:
        at = place_of(self)
        if at is not None:
            run = at.run
            if name == "training":
                run.modes.stale = True
            elif name == "__class__" or isinstance(value, torch.nn.Module | torch.nn.Parameter) or (
                value is not None and any(self.__dict__[table].get(name, self) is None for table in REGISTERED)
            ):  # fmt: skip
                _refuse_replacing(self, at, name, value)
            elif name in self._modules or name in self._parameters:
                _refuse_replacing(self, at, name, value)
            elif name == "qconfig" and name not in vars(self):
                raise RunError(
                    f"{_label(at, name)} was set, with which torch.ao.quantization begins: it puts other modules in "
                    "the place of the model's, and the program would go on without them\n"
                    "  quantize a copy of the model, made before parallelize, with the weights that "
                    "autopar.full_state_dict(model) gives"
                )
            elif callable(value) and name in (methods_of(at.kind) if at is run else dir(at.kind)):
                raise RunError(
                    f"{_label(at, name)} was replaced on a parallel module: the program was captured as a whole and "
                    "would go on without it; replace it in the model, and parallelize the model again"
                )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        at = place_of(self)
        if at is not None and any(self.__dict__[table].get(name) is not None for table in REGISTERED):
            raise RunError(f"{_label(at, name)} was deleted, which the program reads: {AGAIN}")
        super().__delattr__(name)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Refuse what the program does not have."""
        at = place_of(self)
        if at is not None:
            _refuse_replacing(self, at, name, module)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Refuse what the program does not have."""
        at = place_of(self)
        if at is not None and self._parameters.get(name) is not None:
            _refuse_replacing(self, at, name, param)
        _refuse_registering(self, name, param)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Refuse what the program does not have."""
        _refuse_registering(self, name, tensor)
        super().register_buffer(name, tensor, persistent)

    def train(self, mode: bool = True) -> Any:
        """Set the mode, as the user's class does it: the next call runs a program of the modes that there are.

        Raises:
            RunError: there can be no such program; or ``mode`` is neither True nor False.
        """
        at = place_of(self)
        if not isinstance(mode, bool):
            raise RunError(f"train: the mode is {mode!r}; give True or False")
        if at is None:
            return super().train(mode)
        run = at.run
        with run.changing_modes():
            if inspect.getattr_static(at.kind, "train") is torch.nn.Module.train:
                super().train(mode)
            else:
                before = {name: param.requires_grad for name, param in run.named_parameters(remove_duplicate=False)}
                with run.user.as_written(requires_grad={**run.user.wanted, **before}, captures=False):
                    at.kind.train(self, mode)
                    after = {name: param.requires_grad for name, param in run.user.params.items()}
                freeze_alike(run, after)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        at = place_of(self)
        if at is None:
            return super()._apply(fn, recurse)
        check_conversion(fn, [*self.parameters(), *self.buffers()], at.run.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        place(self, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def _label(at: ParallelRun | PlaceOfPart, name: str) -> str:
    return f"{name} of '{at.path}'" if at.path else f"{name} of the {at.kind.__name__}"


def _refuse_replacing(module: torch.nn.Module, at: ParallelRun | PlaceOfPart, name: str, value: PyTree) -> None:
    """Refuse another module or class, or anything where the model has None, which the program would go on without.

    Raises:
        RunError: it says what to do.
    """
    had = next((module.__dict__[table][name] for table in REGISTERED if name in module.__dict__[table]), module)
    if had is value:
        return
    label = f"{at.path}.{name}" if at.path else name
    if isinstance(value, torch.nn.Parameter) and label in at.run.user.params:
        _check_other_parameter(at.run, label, value, had is module)
        return  # whether it fits is seen in the next call
    if value is None and isinstance(had, torch.nn.Parameter):
        raise RunError(
            f"parameter '{label}' of a parallel module was set to None, and the program, which was captured as a "
            f"whole, reads it; change the model before parallelize, or {AGAIN}"
        )
    is_new = had is module and name != "__class__"
    if is_new and not issubclass(at.kind, _CONTAINERS) and name != "parametrizations":
        return  # forward does not read it
    what = "added" if is_new else "set, which is None in the model" if had is None else "replaced"
    by = f" by a {type(value).__name__}" if isinstance(value, torch.nn.Module) and what == "replaced" else ""
    kind = "module " if isinstance(value, torch.nn.Module) else ""
    raise RunError(
        f"{kind}'{label}' of a parallel module was {what}{by}: the program was captured as a whole and would go on "
        f"without it; change the model before parallelize, or {AGAIN}"
    )


def _check_other_parameter(run: ParallelRun, name: str, value: torch.nn.Parameter, is_elsewhere: bool) -> None:
    """Refuse another parameter where the program would not read it.

    Raises:
        RunError: it is tied, and the program reads one value for all its names; or other ranks of a pipeline have it.
    """
    tied = [other for other, param in run.user.params.items() if other != name and param is run.user.params[name]]
    stored = run.registered()
    if (not tied and not is_elsewhere) or any(stored.get(other) is value for other in tied):
        return
    why = f"is tied to {first_few(tied)}: the program reads one value for all of these names" if tied else (
        "is in a stage of other ranks, which a new one on this rank would not reach"
    )  # fmt: skip
    raise RunError(
        f"parameter '{name}' of a parallel module was replaced by another one, and it {why}\n"
        "  copy values into the one that there is (under torch.no_grad(), or by load_state_dict without assign=True); "
        f"or change the model before parallelize, or {AGAIN}"
    )


def _refuse_registering(module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
    at = place_of(module)
    known = any(module.__dict__[table].get(name) is not None for table in REGISTERED)
    if at is None or value is None or known:
        return
    derived = any(name.startswith(f"{held}_") for held in (*module._parameters, *module._buffers))
    if derived or name in module._parameters or name in module._buffers:
        raise RunError(
            f"{_label(at, name)} was registered on a parallel module: the program was captured as a whole and would "
            "go on without it (torch.nn.utils.prune, weight_norm and parametrizations register such tensors)\n"
            "  do that to the model before parallelize (prune.remove makes pruning part of the weights), or mask "
            "the parameters of the parallel module after each step: with torch.no_grad(): p.mul_(mask)"
        )


def _refuse_hook(self: torch.nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Refuse a hook.

    Raises:
        RunError: it says where to put the hook.
    """
    raise RunError(
        "a hook on a part of a parallel module would never run: the program was captured as a whole and does not "
        "call its parts; hook the parallel module itself, or its parameters, or return the value from forward()"
    )


class Part(Derived):
    """A submodule of a parallel module. It runs only with the whole."""

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run on whole values, without gradients; every rank calls it.

        Raises:
            RunError: with gradients, since there is no program of a part.
        """
        at = place_of(self)
        if at is None or is_called_by_program(self):
            return super().__call__(*args, **kwargs)
        if torch.is_grad_enabled():
            raise RunError(
                f"'{at.path}' of a parallel module cannot be called alone with gradients: the program was captured as "
                "a whole\n  call the whole, with what is to be computed in its forward or in loss_fn= of parallelize; "
                "or parallelize the submodule; or, for values only, call it on all ranks under torch.no_grad()"
            )
        return method_of("forward", torch.nn.Module.__call__)(self, *args, **kwargs)

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a module of the user's class, with copies of the tensors that this rank stores."""
        at = place_of(self)
        assert at is not None, "a class of its own is given with the place"
        new: torch.nn.Module = torch.nn.Module.__new__(at.kind)
        memo[id(self)] = new
        attributes = {name: value for name, value in self.__dict__.items() if name != PLACE}
        new.__dict__.update(copy.deepcopy(attributes, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled."""
        raise RunError("a part of a parallel module cannot be pickled: save its state_dict()")


def names_of_part(kind: type) -> dict[str, Any]:
    """Return what the class of a submodule has in addition to its own: methods that run on whole values."""
    own = [name for name in methods_of(kind) if not hasattr(Part, name)]
    names: dict[str, Any] = {name: method_of(name, getattr(kind, name)) for name in own}
    if issubclass(kind, BATCH_NORMS):
        names.update(momentum=property(momentum_of, set_momentum), reset_running_stats=reset)
    if issubclass(kind, torch.nn.RNNBase):
        names["flatten_parameters"] = lambda self: None  # where weights lie in memory is the run's
    return names


def methods_of(kind: type) -> Iterable[str]:
    """Return the methods of a class that neither every module has nor those of torch's containers."""
    bases = (torch.nn.Module, *(container for container in _CONTAINERS if issubclass(kind, container)))
    for name in dir(kind):
        if not name.startswith("__") and not any(hasattr(base, name) for base in bases):
            value = inspect.getattr_static(kind, name)
            if inspect.isroutine(value) and not isinstance(value, staticmethod | classmethod):
                yield name


def place(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]) -> None:
    """Place the values for a module's own parameters and buffers as these are placed."""
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        name = prefix + key
        value = state_dict.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor) and value.shape == tensor.shape:
            if local_metadata.get("assign_to_params_buffers") and value.dtype != tensor.dtype:
                raise RunError(
                    f"load_state_dict: '{name}' is {value.dtype} in the state dict and {tensor.dtype} in the "
                    "program, which was made for that; load without assign=True, or parallelize a model of that "
                    "dtype"
                )
            state_dict[name] = placed_as(tensor, value)


def check_conversion(fn: Any, tensors: list[torch.Tensor], device: torch.device) -> None:
    """Refuse ``.half()``, ``.to()`` and the like where they would change a dtype or a device.

    Raises:
        RunError: with what the program was made for.
    """
    kinds = {(t.dtype, t.device) for t in tensors} or {(torch.get_default_dtype(), device)}
    for dtype, where in sorted(kinds, key=str):
        probe = torch.zeros(1, device=where, dtype=dtype)
        try:
            moved = fn(probe)
        except Exception as error:
            raise RunError(f"the program cannot be moved from {where}: {error}") from error
        if moved.device != where or moved.dtype != dtype:
            raise RunError(
                f"the program was made for {where} and its dtypes, and would need {dtype} on {where} turned into "
                f"{moved.dtype} on {moved.device}; convert the model with .to() before parallelize"
            )
