"""What parallel modules share as ``torch.nn.Module``: the mode, dtypes and devices, and loading a state dict.

A parallel module has the names of the model's parameters and buffers, not its submodules: :class:`Part` stands where
one was. What would be done to a submodule alone (its mode, its dtype, a call) has no effect on a program that was
captured whole, so it is refused there.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.capture.evaluation import Skeleton
from autopar.capture.losses import LOSS, other_losses
from autopar.errors import RunError
from autopar.runtime import dtensors
from autopar.runtime.original import Original
from autopar.runtime.programs import AllWell, Fields, PlanAgain, Programs
from autopar.runtime.state import like
from autopar.runtime.values import assigned

EXTRA = "_extra_state"
"""Under which torch keeps what is no tensor of the model; checkpoints know it."""


def _refuse_replacing(module: torch.nn.Module, name: str, value: Any) -> None:
    """Refuse to put another module where a part of a parallel module is.

    Raises:
        RunError: the program would go on with what was captured.
    """
    if isinstance(module.__dict__.get("_modules", {}).get(name), Part) and isinstance(value, torch.nn.Module):
        raise RunError(
            f"module '{name}' of a parallel module was replaced by a {type(value).__name__}: the program was captured "
            "as a whole and would go on without it; replace it in the model, and parallelize the model again (weights: "
            "model.load_state_dict(autopar.full_state_dict(pm), strict=False))"
        )


class Part(torch.nn.Module):
    """Holds the parameters of a submodule under its name, and runs only with the whole."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "_part_trained", True)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_replacing(self, name, value)
        whole, path = self.__dict__.get("_stands_for", (lambda: None, ""))
        pm = whole()
        if pm is None or not assigned(pm, path, name, value):
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Part:
        """The mode of the whole, or the one that the submodule was captured in.

        Raises:
            RunError: another one.
        """
        if mode != self.training:
            raise RunError(
                f"{'train' if mode else 'eval'}() of a part of a parallel module: the program was captured as a whole; "
                "set the submodule's mode before parallelize, or call train() or eval() on the parallel module"
            )
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Always an error: there is no program of a part."""
        raise RunError(
            "a part of a parallel module cannot be called alone: the program was captured as a whole; call the "
            "parallel module, or parallelize the submodule"
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        _place(self, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _no_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Always an error: parts are never called.

        Raises:
            RunError: it says where to put the hook.
        """
        raise RunError(
            "a hook on a part of a parallel module would never run: the program was captured as a whole and does not "
            "call its parts; hook the parallel module itself, or its parameters, or return the value from forward()"
        )

    register_forward_hook = register_forward_pre_hook = _no_hooks
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _no_hooks

    def _apply(self, fn: Any, recurse: bool = True) -> Part:
        tensors = [*self.parameters(), *self.buffers()]
        _check_conversion(fn, tensors, tensors[0].device if tensors else torch.device("cpu"))
        return self


class SpreadModule(torch.nn.Module):
    """A model that was captured in one mode, with given dtypes, and is placed on devices."""

    _captured: Captured
    _captured_training: bool
    _skeleton: Skeleton | None
    _device: torch.device
    _mode: bool = True
    _programs: Programs | None = None
    _original: Original | None = None
    _model_ref: Callable[[], torch.nn.Module | None]
    leads: bool | None = None
    """Of a pipeline, whether this rank is the first of its group; None where every rank has a part of everything."""

    _fields: frozenset[str] = frozenset()
    """Attributes of the parallel module itself: names of the model's own modules and parameters stay free."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        bases = [base for base in cls.__mro__ if issubclass(base, SpreadModule)]
        cls._fields = frozenset(name for base in bases for name in inspect.get_annotations(base))

    def __init__(self) -> None:
        super().__init__()
        dtensors.correct()

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_replacing(self, name, value)
        if name in self._fields:
            object.__setattr__(self, name, value)
        elif "_model_ref" not in self.__dict__ or not assigned(self, "", name, value):
            super().__setattr__(name, value)

    def owner_of(self, name: str) -> tuple[torch.nn.Module, str]:
        """The module and the key under which a parameter or buffer is registered; parts on the way are made."""
        *parents, key = name.split(".")
        owner: torch.nn.Module = self
        for parent in parents:
            if parent not in owner._modules:
                owner._modules[parent] = Part()
            child = owner._modules[parent]
            assert child is not None
            owner = child
        return owner, key

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The mode. Setting it is the same as calling :meth:`train`."""
        return self._mode

    @training.setter
    def training(self, mode: bool) -> None:
        if "_captured_training" not in self.__dict__:  # while it is made
            return
        if mode != self._mode:
            self._change_mode(bool(mode))
        self._mode = bool(mode)
        for part in self.modules():
            if isinstance(part, Part):
                object.__setattr__(part, "training", bool(mode) and part.__dict__["_part_trained"])

    def train(self, mode: bool = True) -> Any:
        """Training mode, or eval mode: dropout off, batch norm by its running statistics, buffers unchanged.

        Raises:
            RunError: the model was captured in eval mode, or ``eval()`` changes more of it.
        """
        if not isinstance(mode, bool):
            raise RunError(f"train: the mode is {mode!r}; give True or False")
        self.training = mode
        return self

    def _change_mode(self, mode: bool) -> None:
        """Have a program for the other mode, or refuse it."""
        raise NotImplementedError

    def _set_mode_of(self, model: torch.nn.Module) -> None:
        """Begin in the modes of the model and of its submodules."""
        self._mode = model.training
        self._model_ref = weakref.ref(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, part in self.named_modules():
            if isinstance(part, Part):
                object.__setattr__(part, "_stands_for", (weakref.ref(self), path))
            if isinstance(part, Part) and path in modules:
                object.__setattr__(part, "_part_trained", modules[path].training or not model.training)
                object.__setattr__(part, "training", modules[path].training)

    def check_trains(self) -> None:
        """Refuse a training step of a module that was put into eval mode, or that gives several losses.

        Raises:
            RunError: it says what to call, or how to say which loss is meant.
        """
        several = other_losses(self._captured.graph, self._captured.out_spec)
        if several:
            raise RunError(
                f"train_step: the model gives several scalars with a gradient (outputs {', '.join(several)}), none of "
                f"which is called '{LOSS}', so it is not known which is to be trained: return the one, or their sum, "
                f"under the key '{LOSS}', or pass loss_fn= to parallelize, such as loss_fn=lambda out: out[...] + "
                "out[...]; without stages, a call and backward() of any of them do, too"
            )
        if self._captured_training and not self.training:
            raise RunError("the module is in eval mode, so a step would train without dropout; call train() first")

    # -- programs of other values (:mod:`autopar.runtime.programs`)

    def follow_values(self, programs: Programs) -> None:
        """Run another program where values that ``forward`` reads have changed."""
        self._programs = programs

    def _kept_program(self) -> Fields:
        """What makes up the program that runs now."""
        raise NotImplementedError

    def _resume_program(self, fields: Fields) -> None:
        """Run one that was kept."""
        raise NotImplementedError

    def _take_program(self, new: Captured, plan_again: PlanAgain | None, all_well: AllWell) -> None:
        """Run another capture of the same call."""
        raise NotImplementedError

    def _in_step(self) -> bool:
        """Whether a step has begun whose microbatches must all run the same program."""
        return False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        _check_conversion(fn, [*self.parameters(), *self.buffers()], self._device)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Any:
        """Always an error: ``fn`` would not meet the model's submodules.

        Raises:
            RunError: it says what to do instead.
        """
        raise RunError(
            "apply() of a parallel module would not meet the model's own submodules, only names of their parameters; "
            "apply it to the model before parallelize, or pass init= for a model on the meta device"
        )

    # -- state dicts

    def _position(self) -> tuple[int, int]:
        """The seed of random operators, and how many forwards have drawn from it."""
        raise NotImplementedError

    def _set_position(self, seed: int, calls: int) -> None:
        """Go on from there."""
        raise NotImplementedError

    def _draws(self) -> bool:
        """Whether the program has random operators."""
        raise NotImplementedError

    def _ranks(self) -> tuple[Any, int]:
        """The process group of all ranks that hold a part, and the first of them."""
        raise NotImplementedError

    def get_extra_state(self) -> torch.Tensor:
        """Where dropout stands: the seed and the number of forwards, int64 [2]."""
        return torch.tensor(self._position(), dtype=torch.int64)

    def set_extra_state(self, state: Any) -> None:
        """Have dropout go on from there."""
        if isinstance(state, torch.Tensor) and state.numel() == 2:  # and nothing that stands for it
            seed, calls = state.flatten().tolist()
            self._set_position(int(seed), int(calls))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model; of a program with random operators also where these stand (``_extra_state``), so that a
        resumed run draws what an uninterrupted one would. ``full_state_dict`` has only what the model has.
        """
        found = super().state_dict(*args, **kwargs)
        if not self._draws():
            found.pop(kwargs.get("prefix", args[1] if len(args) > 1 else "") + EXTRA, None)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; a whole tensor, or a DTensor in another placement, is placed as what it replaces.

        Raises:
            RunError: with ``assign``, a tensor of another dtype: the program was made for the one that there is.
        """
        if not isinstance(state_dict, Mapping):
            raise RunError(f"load_state_dict: expected a dict of tensors by name, got {type(state_dict).__name__}")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        state_dict.setdefault(prefix + EXTRA, self.get_extra_state())  # of a model's own state dict
        _place(self, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def _place(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]) -> None:
    """Have the values for a module's own parameters and buffers placed as these are."""
    for key, held in [*module._parameters.items(), *module._buffers.items()]:
        name = prefix + key
        value = state_dict.get(name)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and value.shape == held.shape:
            if local_metadata.get("assign_to_params_buffers") and value.dtype != held.dtype:
                raise RunError(
                    f"load_state_dict: '{name}' is {value.dtype} in the state dict and {held.dtype} in the "
                    "program, which was made for that; load without assign=True, or parallelize a model of that "
                    "dtype"
                )
            state_dict[name] = _placed(value, held)


def _placed(value: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return like(held, value) if isinstance(held, DTensor) else value
    if not isinstance(held, DTensor):
        return value.full_tensor()
    if value.device_mesh == held.device_mesh and value.placements != held.placements:
        return value.redistribute(held.device_mesh, held.placements)
    return value


def _check_conversion(fn: Any, tensors: list[torch.Tensor], device: torch.device) -> None:
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


def check_mode(mode: bool, trained: bool, skeleton: Skeleton | None, captured: Captured, ready: bool) -> dict[str, int]:
    """Refuse a mode that a module has no program for; which sides of random branches eval mode takes.

    Args:
        trained: the model was captured in training mode.
        ready: its eval mode was checked before.
    """
    if mode and not trained:
        raise RunError(
            "this program was captured in eval mode; for training mode call model.train(), parallelize the model "
            "again, and load this state_dict()"
        )
    if not mode and trained and not ready:
        assert skeleton is not None
        return skeleton.check(captured)
    return {}


__all__ = ["EXTRA", "Part", "SpreadModule", "check_mode"]
