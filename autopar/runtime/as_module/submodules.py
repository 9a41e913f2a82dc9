"""What stands for a model's submodules in a parallel module.

A :class:`Part` is an instance of its submodule's class, for loops that choose by class, has its plain attributes, and
holds its parameters and buffers. What would be done to a submodule alone (its mode, its dtype, a call) has no effect on
a program that was captured whole, so it is refused here.
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autopar.errors import RunError
from autopar.runtime.as_module.left_attributes import filled_by_calls, is_left, refuse_left
from autopar.runtime.as_module.own_names import PREFIX
from autopar.runtime.as_module.statistics_anew import is_batch_norm, reset, takes_momentum
from autopar.runtime.parameters.state import placed_as
from autopar.runtime.variants.values import assigned
from autopar.torch_private import pytree

_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that torch keeps in every module: a part has its own."""
REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of every module in which torch keeps what is registered, by name; None is registered, too."""
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Values that a part still knows when the model is gone, and so it does lists and other nests of them."""
_NESTS = (tuple, list, set, frozenset, collections.deque)
_BY_NAME = (torch.nn.ModuleDict, torch.nn.ParameterDict)
_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ParameterList, *_BY_NAME)
"""torch's modules that are read as lists and dicts."""

_STANDING = ("_autopar_class", "_autopar_module", "_autopar_values", "_autopar_tensors", "_autopar_keys", "training")
"""What a part knows of its submodule."""


def plain_values(module: torch.nn.Module) -> dict[str, Any]:
    """A module's attributes that hold numbers, names and nests of them, and nothing that would keep the model alive."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH and _is_plain(value, set())}


def _is_plain(value: Any, seen: set[int]) -> bool:
    """Whether a value consists of numbers and names: nests of them, and objects such as configs."""
    if isinstance(value, _SIMPLE):
        return True
    if id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, dict):
        return all(_is_plain(inner, seen) for pair in value.items() for inner in pair)
    if isinstance(value, _NESTS):
        return all(_is_plain(inner, seen) for inner in value)
    if callable(value) or isinstance(value, torch.Tensor | torch.nn.Module | types.ModuleType):
        return False
    return hasattr(value, "__dict__") and _is_plain(vars(value), seen)


def own_tensors(module: torch.nn.Module) -> frozenset[str]:
    """A module's attributes beside parameters, buffers and modules that hold such or plain tensors.

    What others hold later was put there by a script, such as the outputs of a step in a list.
    """
    return frozenset(name for name, value in vars(module).items() if _holds(value, torch.Tensor, torch.nn.Module))


def _holds(value: Any, *kinds: type) -> bool:
    return any(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(value))


def is_own(name: str, value: Any, of_model: frozenset[str]) -> bool:
    """Whether an attribute is one that a program does not share with its model: tensors, parameters, modules.

    Args:
        of_model: what :func:`own_tensors` gave when the program was made.
    """
    return _holds(value, *((torch.Tensor,) if name in of_model else ()), torch.nn.Parameter, torch.nn.Module)


def refuse_replacing(module: torch.nn.Module, name: str, value: Any) -> None:
    """Refuse to put another module where a part of a parallel module is, or anything where the model has None.

    Raises:
        RunError: the program would go on with what was captured.
    """
    tables = [module.__dict__.get(table, {}) for table in REGISTERED]
    if value is not None and any(table.get(name, module) is None for table in tables):
        raise RunError(
            f"'{name}' of a parallel module was set, which is None in the model: the program was captured as a whole "
            "and would go on without it; set it in the model, and parallelize the model again (weights: "
            "model.load_state_dict(autopar.full_state_dict(pm), strict=False))"
        )
    if isinstance(module.__dict__.get("_modules", {}).get(name), Part) and isinstance(value, torch.nn.Module):
        raise RunError(
            f"module '{name}' of a parallel module was replaced by a {type(value).__name__}: the program was captured "
            "as a whole and would go on without it; replace it in the model, and parallelize the model again (weights: "
            "model.load_state_dict(autopar.full_state_dict(pm), strict=False))"
        )


def method_was_replaced(label: str) -> str:
    """What to say of another function in the place of a method."""
    return (
        f"{label} was replaced on a parallel module: the program was captured as a whole and would go on without it; "
        "replace it in the model, and parallelize the model again"
    )


def show_absent(shown: torch.nn.Module, module: torch.nn.Module) -> None:
    """Have what shows a module know what is registered there as None: a bias that it has not, a head, a mask."""
    for table in REGISTERED:
        absent = [key for key, registered in getattr(module, table).items() if registered is None]
        getattr(shown, table).update(dict.fromkeys(absent))


class Elements(torch.nn.Module):
    """Is read as a list or dict of modules or parameters where it stands for one of torch's."""

    def _autopar_shown(self) -> tuple[type, tuple[str, ...], str]:
        """The class of the module that it stands for, the names of what that module holds, and its path."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        return bool(self._autopar_shown()[1]) if issubclass(self._autopar_shown()[0], _CONTAINERS) else True

    def __len__(self) -> int:
        return len(self._autopar_keys_for("len"))

    def __iter__(self) -> Iterator[Any]:
        keys = self._autopar_keys_for("iter")
        return iter(keys if issubclass(self._autopar_shown()[0], _BY_NAME) else [self[key] for key in range(len(keys))])

    def __getitem__(self, key: Any) -> Any:
        """What a list or dict of modules or parameters holds there; of a slice a list.

        Raises:
            RunError: another rank of the pipeline has it.
        """
        keys = self._autopar_keys_for("[]")
        if isinstance(key, slice):
            return [self[i] for i in range(len(keys))[key]]
        name = keys[key] if isinstance(key, int) else key
        if name in keys and name not in self._modules and name not in self._parameters:
            path = self._autopar_shown()[2]
            raise RunError(
                f"'{f'{path}.{name}' if path else name}' is not on this rank, which has other stages of the "
                "pipeline; named_modules() and named_parameters() give what it has"
            )
        return getattr(self, name)

    def _autopar_keys_for(self, use: str) -> tuple[str, ...]:
        """What a list or dict of the model's holds, on all ranks.

        Raises:
            TypeError: it stands for neither.
        """
        kind, keys, path = self._autopar_shown()
        if not issubclass(kind, _CONTAINERS):
            standing = f"'{path}', which stands for a {kind.__name__} in" if path else f"a {kind.__name__} that is"
            raise TypeError(
                f"{use} of {standing} a parallel module: of lists and dicts of torch.nn alone are the elements known; "
                "named_modules() and named_parameters() give all that there is"
            )
        return keys


class Part(Elements):
    """Has a submodule's class, plain attributes, parameters and buffers, and runs only with the whole."""

    def _autopar_stand_for(self, whole: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
        """Be what shows ``module``, which the model has at ``path``, in ``whole``."""
        if type(module) is Part:  # of a parallel module that is copied
            put_there = [key for key in module.__dict__ if key not in self.__dict__ and not key.startswith(PREFIX)]
            self.__dict__.update({key: module.__dict__[key] for key in (*_STANDING, *put_there)})
            self.__dict__["_autopar_stands_for"] = weakref.ref(whole), path
            return
        self.__dict__.update(
            _autopar_stands_for=(weakref.ref(whole), path), _autopar_class=type(module), training=module.training,
            _autopar_module=weakref.ref(module), _autopar_values=plain_values(module),
            _autopar_tensors=own_tensors(module), _autopar_keys=tuple(module._modules or module._parameters),
        )  # fmt: skip

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The submodule's class, so that ``isinstance`` works as on the model; ``type()`` is :class:`Part`."""
        return self.__dict__.get("_autopar_class", Part)

    def __getattr__(self, name: str) -> Any:
        """A plain attribute of the submodule; of its methods what refuses to be called.

        Raises:
            AttributeError: there is none, or it is a tensor or a module, which the model has and the program does not.
        """
        for table in (self.__dict__.get(kind, {}) for kind in REGISTERED):
            if name in table:
                return table[name]
        kind, path = self.__dict__.get("_autopar_class"), self.__dict__.get("_autopar_stands_for", (None, ""))[1]
        if kind is None or name.startswith("__"):
            raise AttributeError(f"a part of a parallel module has no attribute '{name}'")
        whole = self.__dict__["_autopar_stands_for"][0]()
        if whole is not None and "_autopar_captured" in whole.__dict__:
            filled = filled_by_calls(whole, self, path, name)
            if filled is not None:
                return filled
            refuse_left(whole._autopar_captured, path, name)
        module = self.__dict__["_autopar_module"]()
        values = self.__dict__["_autopar_values"] if module is None else vars(module)
        missing = object()
        value = values[name] if name in values else inspect.getattr_static(kind, name, missing)
        if name not in values and value is not missing:
            if value is torch.nn.RNNBase.flatten_parameters:
                return _nothing
            if name == "reset_running_stats" and is_batch_norm(kind):
                return functools.partial(reset, self)
            if isinstance(value, staticmethod | classmethod) or inspect.isroutine(value):
                return functools.partial(_refuse_method, path, kind.__name__, name)
            if isinstance(value, property) and value.fget is not None:  # computes with what is here
                return value.fget(self)
            value = missing if hasattr(value, "__get__") else value  # it may compute from the model's weights
        if value is missing or is_own(name, value, self.__dict__["_autopar_tensors"]):
            raise AttributeError(
                f"'{path}' of a parallel module, which stands for a {kind.__name__}, has no attribute '{name}': it has "
                "the parameters and buffers that this rank holds, and plain attributes of the module as long as the "
                "model is kept; tensors and modules beside these are the model's own"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a plain attribute where the program is captured from: on the submodule.

        Raises:
            RunError: the program would go on without it.
        """
        refuse_replacing(self, name, value)
        whole, path = self.__dict__.get("_autopar_stands_for", (lambda: None, ""))
        pm = whole()
        if name == "training" and pm is not None:
            self.train(value)
        elif pm is None or name in _OF_TORCH or is_left(pm._autopar_captured, path, name):
            super().__setattr__(name, value)
        elif name == "momentum" and is_batch_norm(self.__dict__.get("_autopar_class")) and takes_momentum(
            pm, self, path, value
        ):  # fmt: skip
            return
        elif not assigned(pm, path, name, value):
            kind, module = self.__dict__["_autopar_class"], self.__dict__["_autopar_module"]()
            registered = name in self._parameters or name in self._buffers or name in self._modules
            if registered or isinstance(value, torch.Tensor | torch.nn.Module):
                super().__setattr__(name, value)
            elif callable(value) and hasattr(kind, name):
                raise RunError(method_was_replaced(f"{name} of '{path}'"))
            elif module is None:
                super().__setattr__(name, value)  # forward does not read it
            else:
                setattr(module, name, value)

    def _autopar_shown(self) -> tuple[type, tuple[str, ...], str]:
        return (
            self.__dict__.get("_autopar_class", Part), self.__dict__.get("_autopar_keys", ()),
            self.__dict__.get("_autopar_stands_for", (None, ""))[1],
        )  # fmt: skip

    def extra_repr(self) -> str:
        """As of the submodule, while there is one."""
        module = self.__dict__.get("_autopar_module", lambda: None)()
        return "" if module is None else str(module.extra_repr())

    def get_extra_state(self) -> Any:
        """Of a submodule that has some beside its tensors: the model's own.

        Raises:
            RunError: the model is gone.
        """
        return self._autopar_kept_module("its extra state cannot be saved").get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Give it to the model.

        Raises:
            RunError: the model is gone.
        """
        self._autopar_kept_module("its extra state cannot be loaded").set_extra_state(state)

    def _autopar_kept_module(self, otherwise: str) -> torch.nn.Module:
        module: torch.nn.Module | None = self.__dict__["_autopar_module"]()
        if module is None:
            path, kind = self.__dict__["_autopar_stands_for"][1], self.__dict__["_autopar_class"].__name__
            raise RunError(f"'{path}' stands for a {kind} of a model that is gone, so {otherwise}: keep the model")
        return module

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Of those that the submodule has; others are refused.

        Raises:
            RunError: it is another one, such as that of pruning and of parametrizations.
        """
        if param is not None:
            self._autopar_known_to_program(name)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Of those that the submodule has; others are refused.

        Raises:
            RunError: it is another one.
        """
        if tensor is not None:
            self._autopar_known_to_program(name)
        super().register_buffer(name, tensor, persistent)

    def _autopar_known_to_program(self, name: str) -> None:
        module = self.__dict__.get("_autopar_module", lambda: None)()
        whole, path = self.__dict__.get("_autopar_stands_for", (lambda: None, ""))
        # of a model that is gone, a name made from one of its tensors', such as weight_orig, is none of the program's
        held = {**self._parameters, **self._buffers}
        is_derived = any(name.startswith(f"{tensor_name}_") for tensor_name in held)
        theirs = held if module is None else {**module._parameters, **module._buffers}
        is_absent = name in theirs and theirs[name] is None
        is_known = not is_derived and not is_absent if module is None else theirs.get(name) is not None
        if whole() is not None and not is_known and held.get(name) is None:
            raise RunError(
                f"'{path}.{name}' was registered on a parallel module: the program was captured as a whole and would "
                "go on without it (torch.nn.utils.prune, weight_norm and parametrizations register such tensors)\n"
                "  do that to the model before parallelize (prune.remove makes pruning part of the weights), or mask "
                "the parameters of the parallel module after each step: with torch.no_grad(): p.mul_(mask)"
            )

    def train(self, mode: bool = True) -> Part:
        """The mode of the part and of all in it: the next call of the whole has the model captured so.

        Raises:
            RunError: its calls do not have it captured again, or it is a pipeline.
        """
        whole: Any = self.__dict__.get("_autopar_stands_for", (lambda: None, ""))[0]()
        if whole is not None:
            whole._autopar_train_parts(self, bool(mode))
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Always an error: there is no program of a part."""
        raise RunError(
            "a part of a parallel module cannot be called alone: the program was captured as a whole; call the "
            "parallel module, or parallelize the submodule"
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        place(self, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _autopar_no_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Always an error: parts are never called.

        Raises:
            RunError: it says where to put the hook.
        """
        raise RunError(
            "a hook on a part of a parallel module would never run: the program was captured as a whole and does not "
            "call its parts; hook the parallel module itself, or its parameters, or return the value from forward()"
        )

    register_forward_hook = register_forward_pre_hook = _autopar_no_hooks
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _autopar_no_hooks

    def _apply(self, fn: Any, recurse: bool = True) -> Part:
        tensors = [*self.parameters(), *self.buffers()]
        check_conversion(fn, tensors, tensors[0].device if tensors else torch.device("cpu"))
        return self


def _nothing() -> None:
    """``flatten_parameters()``: where a recurrent layer's weights lie in memory is not the model's to say any more."""


def _refuse_method(path: str, kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
    raise RunError(
        f"{name}() of '{path}', which stands for a {kind} in a parallel module: the program was captured as a whole, "
        f"and the method would work on the model's own tensors; call it on the model before parallelize"
    )


def place(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]) -> None:
    """Have the values for a module's own parameters and buffers placed as these are."""
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


__all__ = [
    "Elements", "Part", "check_conversion", "is_own", "method_was_replaced", "own_tensors", "place", "plain_values",
    "refuse_replacing", "show_absent",
]  # fmt: skip
