"""What parallel modules share as ``torch.nn.Module``: dtypes and devices, and what they stand for.

A parallel module has the names of the model's parameters and buffers, not its submodules: a
:class:`~autopar.runtime.as_module.submodules.Part` stands where one was.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.capture.evaluation import Skeleton
from autopar.capture.losses import LOSS, other_losses
from autopar.errors import RunError
from autopar.runtime.as_module.kept_modes import modes_that_stay
from autopar.runtime.as_module.left_attributes import filled_by_calls, refuse_left
from autopar.runtime.as_module.methods import method_of
from autopar.runtime.as_module.model_class import AsModel, own_name, show_as
from autopar.runtime.as_module.module_modes import Modes
from autopar.runtime.as_module.original_model import Original
from autopar.runtime.as_module.own_names import PREFIX, is_set_from_outside, is_setting, names_of_both, tell
from autopar.runtime.as_module.submodules import (
    Part,
    check_conversion,
    is_own,
    method_was_replaced,
    own_tensors,
    plain_values,
    refuse_replacing,
    show_absent,
)
from autopar.runtime.as_module.train_and_eval import SpreadModes
from autopar.runtime.batches.same_batch import Calls
from autopar.runtime.optimizers import optimizer_steps
from autopar.runtime.parameters import dtensor_fixes
from autopar.runtime.ranks.failures import Failures
from autopar.runtime.stages.compiled import ITSELF, compile_programs
from autopar.runtime.variants.buckets import Buckets
from autopar.runtime.variants.module_calls import ModuleCall
from autopar.runtime.variants.program_cache import AllWell, Fields, Programs
from autopar.runtime.variants.values import assigned

_WRAPPERS = {
    "join": "every rank is called with the whole batch, so no rank runs out of batches before another one",
}
"""What scripts ask of a wrapped model."""


class SpreadModule(SpreadModes, AsModel):
    """A model that was captured in one mode, with given dtypes, and is placed on devices."""

    _autopar_captured_training: bool
    _autopar_device: torch.device
    _autopar_compared: Calls
    _autopar_world: Any = None
    """The process group of all ranks in which it was made; None on one device, which needs none."""
    _autopar_failures: Failures | None = None
    """Those of its steps, on the ranks that run it together; None on one device."""
    _autopar_together: bool = False
    """Whether all ranks are within something that they do together outside of a step."""
    _autopar_gradient_dtype: torch.dtype | None = None
    _autopar_told_of_statistics: bool = False
    _autopar_buckets: Buckets | None = None
    _autopar_layouts_change: bool = False
    _autopar_layout: int = 0
    _autopar_compiled_as: Any = None
    """With which options a ``torch.compile`` around a call compiled the programs
    (:mod:`~autopar.runtime.stages.compiled`)."""
    _autopar_original: Original | None = None
    _autopar_model_ref: Callable[[], torch.nn.Module | None]
    _autopar_model_class: type
    _autopar_model_values: dict[str, Any]
    _autopar_model_tensors: frozenset[str] = frozenset()
    _autopar_model_keys: tuple[str, ...] = ()
    _autopar_names_of_both: frozenset[str] = frozenset()
    """Names that the model has, too (:mod:`~autopar.runtime.as_module.own_names`)."""

    def __init__(self) -> None:
        super().__init__()
        dtensor_fixes.correct()
        optimizer_steps.correct()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the parallel module itself, or one of the model that the program was captured with.

        Raises:
            RunError: both have it, and code of the user's sets it: the model would not see it. Or it is a function in
                the place of a method of the model, which forward may call.
        """
        refuse_replacing(self, name, value)
        if name in self._autopar_names_of_both and is_setting(self, name) and is_set_from_outside(1):
            raise RunError(
                f"{name} was set on a parallel module, which has an attribute of this name itself, and so has the "
                f"{self._autopar_model_class.__name__} that was parallelized: forward would not see it; set the "
                f"model's on the model (model.{name} = ...), or rename it"
            )
        if name.startswith(PREFIX):
            object.__setattr__(self, name, value)
        elif "_autopar_model_ref" not in self.__dict__ or not assigned(self, "", name, value):
            if callable(value) and self._autopar_is_method_of_model(name):
                raise RunError(method_was_replaced(f"{name} of the {self._autopar_model_class.__name__}"))
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """A plain attribute of the model, as of its submodules; a property, which computes with what is here; or a
        method (:mod:`~autopar.runtime.as_module.methods`).

        Raises:
            AttributeError: there is none, or it holds tensors or modules of the model's own.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith(("__", PREFIX)) or "_autopar_model_class" not in self.__dict__:
                raise
            raised = error
        kind: type = self.__dict__["_autopar_model_class"]
        filled = filled_by_calls(self, self, "", name)
        if filled is not None:
            return filled
        refuse_left(self._autopar_captured, "", name)
        if (instead := _WRAPPERS.get(name)) is not None:
            shown = own_name(self)
            raise AttributeError(f"{shown} has no '{name}', which is DistributedDataParallel's: {instead}")
        model = self._autopar_model_ref()
        value = (self._autopar_model_values if model is None else vars(model)).get(name, raised)
        if value is not raised and not is_own(name, value, self._autopar_model_tensors):
            return value
        of_class = inspect.getattr_static(kind, name, raised)
        if inspect.isroutine(of_class):
            return method_of(self, name, kind)
        if isinstance(of_class, property) and of_class.fget is not None:  # such as device and dtype, of what is here
            return of_class.fget(self)
        if of_class is not raised and not hasattr(of_class, "__get__") and not is_own(name, of_class, frozenset()):
            return of_class  # what else has a __get__ may compute from the model's weights
        raise AttributeError(
            f"{own_name(self)} has no attribute '{name}'" + (
                f": the {kind.__name__} that was parallelized has one, or a property, of its own"
                if hasattr(kind, name) or (model is not None and name in vars(model)) else ""
            )
        )  # fmt: skip

    def _autopar_is_method_of_model(self, name: str) -> bool:
        """Whether the model's class has a method that a parallel module has not, nor any module."""
        kind = self.__dict__.get("_autopar_model_class")
        return callable(getattr(kind, name, None)) and not hasattr(type(self), name)

    def _autopar_shown(self) -> tuple[type, tuple[str, ...], str]:
        return self.__dict__.get("_autopar_model_class", type(self)), self._autopar_model_keys, ""

    @property
    def module(self) -> Any:
        """Itself: it has the model's own names, as what DistributedDataParallel wraps has."""
        return self

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context as DistributedDataParallel has for adding up gradients. They add up without it, too: every backward
        reduces what it adds, and ``train_step`` reduces once for all its microbatches. So it does nothing."""
        return contextlib.nullcontext()

    def _autopar_owner_of(self, name: str) -> tuple[torch.nn.Module, str]:
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

    def _autopar_registered(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by all their names."""
        return {**dict(self.named_parameters(remove_duplicate=False)),
                **dict(self.named_buffers(remove_duplicate=False))}  # fmt: skip

    def _autopar_set_mode_of(self, model: torch.nn.Module) -> None:
        """Begin in the modes of the model and of its submodules."""
        skeleton = self._autopar_skeleton
        copied = skeleton.model if skeleton is not None else None
        self._autopar_mode, self._autopar_kept_modes = model.training, modes_that_stay(model, copied)
        self._autopar_modes = Modes(model)
        self._autopar_trained = self._autopar_modes.at_first
        self._autopar_model_ref, self._autopar_model_class, self._autopar_model_values = (
            weakref.ref(model),
            type(model),
            plain_values(model),
        )
        self._autopar_model_keys, self._autopar_model_tensors = tuple(model._modules), own_tensors(model)
        if isinstance(model, SpreadModule):  # a parallel module is copied
            show_as(self, model._autopar_model_class)
        else:
            show_as(self, type(model))
            self._autopar_names_of_both = names_of_both(self, model)
            tell(self._autopar_names_of_both, model)
        modules = dict(model.named_modules(remove_duplicate=False))
        shown = self._autopar_paths_of_parts(modules)
        first: dict[torch.nn.Module, Part] = {}
        for path, module in modules.items():
            if path not in shown:
                continue
            home, key = self._autopar_owner_of(path)
            part = home._modules.setdefault(key, Part())
            assert isinstance(part, Part)
            before = first.setdefault(module, part)
            if self._autopar_leads is None and before is not part and _same_tensors(before, part):
                home._modules[key] = before  # the model has one module under two names
            elif "_autopar_stands_for" not in part.__dict__:
                part._autopar_stand_for(self, path, module)
        for path, part in list(self.named_modules(remove_duplicate=False)):
            if path in modules:
                show_absent(part, modules[path])
                for key in modules[path]._modules:  # loops meet them in the model's order
                    if key in part._modules:
                        part._modules[key] = part._modules.pop(key)

    def _autopar_paths_of_parts(self, modules: Mapping[str, torch.nn.Module]) -> set[str]:
        """Where the model has modules that this rank shows, the model itself left out.

        Of a pipeline, a rank shows the modules whose tensors it holds, and those without tensors, which are on every
        rank alike. A part is reached through the parts above it, so whatever encloses one is shown too, even if its own
        tensors are on other ranks: a block with a buffer and a dropout.

        Args:
            modules: the model's, by path; one that it has under several names, under each of them.
        """
        shown = {path for path, _ in self.named_modules(remove_duplicate=False)}
        for path, module in modules.items():
            tensors = [*module._parameters.values(), *module._buffers.values()]
            if self._autopar_leads is None or all(tensor is None for tensor in tensors):
                names = path.split(".")
                shown.update(".".join(names[: depth + 1]) for depth in range(len(names)))
        return shown - {""}

    @property
    def compare_every(self) -> int | None:
        """Every how many calls ranks compare what they were called with and their copies of parameters; 0 for never.

        None is the default: in the first three calls, then in the tenth, hundredth, thousandth and so on. Set it to the
        same number on all ranks.
        """
        return self._autopar_compared.every

    @compare_every.setter
    def compare_every(self, calls: int | None) -> None:
        if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or calls < 0):
            raise RunError(f"compare_every is {calls!r}; give a number of calls, 0 for never, or None for the default")
        self._autopar_compared.every = calls

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are added up over ranks; None for that of the parameters. Set it on all ranks.

        Parameters get gradients of their own dtype in any case. Sums within the program, as of operators whose terms
        are on several ranks, stay in the model's dtype. What :func:`autopar.parallelize` got as ``gradient_dtype``
        is in the plan's price; what is set here afterwards is not.
        """
        return self._autopar_gradient_dtype

    @gradient_dtype.setter
    def gradient_dtype(self, dtype: torch.dtype | None) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise RunError(f"gradient_dtype is {dtype!r}; give a floating point dtype, such as torch.float32, or None")
        self._autopar_gradient_dtype = dtype

    def _autopar_check_trains(self) -> None:
        """Refuse a training step of a module that was put into eval mode, or that gives several losses.

        Raises:
            RunError: it says what to call, or how to say which loss is meant.
        """
        several = other_losses(self._autopar_captured.graph, self._autopar_captured.out_spec)
        if several:
            raise RunError(
                f"train_step: the model gives several scalars with a gradient (outputs {', '.join(several)}), none of "
                f"which is called '{LOSS}', so it is not known which is to be trained: return the one, or their sum, "
                f"under the key '{LOSS}', or pass loss_fn= to parallelize, such as loss_fn=lambda out: out[...] + "
                "out[...]; without stages, a call and backward() of any of them do, too"
            )
        if self._autopar_captured_training and not self.training:
            raise RunError("the module is in eval mode, so a step would train without dropout; call train() first")

    def _autopar_check_world(self) -> None:
        """Refuse to compute with other ranks where the process group has been ended.

        Raises:
            RunError: it says what to do.
        """
        if self._autopar_world is not None and dist.group.WORLD is not self._autopar_world:
            again = ", and another one was made" if dist.is_initialized() else ""
            raise RunError(
                f"the process group in which this module was parallelized has been ended (destroy_process_group){again}"
                ": call, evaluate and save it before that, or parallelize the model again"
            )

    @contextlib.contextmanager
    def _autopar_all_call(self, what: str) -> Iterator[None]:
        """Around what all ranks do together outside of a step, such as ``full_state_dict``.

        Raises:
            RunError: only some ranks have come to it, while others go on; on all of them, also within their steps.
        """
        self._autopar_check_world()
        if self._autopar_failures is None or self._autopar_together:
            yield
            return
        self._autopar_failures.settle()
        self._autopar_together = True
        try:
            with self._autopar_failures.during(what):
                if self._autopar_programs is not None:
                    self._autopar_programs.meet_all(what, self._autopar_failures.heard)
                yield
        finally:
            self._autopar_together = False

    # -- programs of other calls and values (:mod:`autopar.runtime.variants.program_cache`)

    def _autopar_follow(self, programs: Programs) -> None:
        """Run other programs where calls have other shapes, or values that ``forward`` reads have changed."""
        self._autopar_programs = programs

    def _autopar_skeleton_for_programs(self, model: torch.nn.Module) -> Skeleton:
        """A copy of ``model`` without values, to capture when the model is gone."""
        return self._autopar_skeleton if self._autopar_skeleton is not None else Skeleton(model)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the program with ``torch.compile(program, *args, **kwargs)``, as ``nn.Module.compile`` does; in a
        pipeline those of this rank's stages.

        A program is one graph, forward and backward, with functional collectives (:mod:`autopar.lower.compilable`).
        Gathers of parameters once a step, reductions of their gradients and messages between stages stay outside.
        Programs that are captured later, for other calls or values, are compiled like the first one. A
        ``torch.compile(pm)`` that is called does the same with its options, as one of a function that calls ``pm``.

        Raises:
            RunError: ``fullgraph=True``, and the compiler does not see into an operator; it says which.
        """
        compile_programs(self, args, kwargs)
        self._autopar_compiled_as = ITSELF

    def _autopar_kept_program(self) -> Fields:
        """What makes up the program that runs now."""
        raise NotImplementedError

    def _autopar_resume_program(self, fields: Fields) -> None:
        """Run one that was kept."""
        raise NotImplementedError

    def _autopar_take_program(self, new: Captured, call: ModuleCall, replan: Any, all_well: AllWell) -> None:
        """Run another capture, which was made for a call."""
        raise NotImplementedError

    def _autopar_in_step(self) -> bool:
        """Whether a step has begun whose microbatches must all run the same program."""
        return False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        check_conversion(fn, [*self.parameters(), *self.buffers()], self._autopar_device)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Any:
        """``fn`` meets what stands for each submodule, as loops over ``modules()`` do; all ranks call it.

        Raises:
            RunError: it is a pipeline, each rank of which has other submodules, or ``fn`` does what a part cannot.
        """
        if self._autopar_leads is not None:
            raise RunError(
                "apply() of a pipeline would meet the submodules of this rank's stages alone, and random numbers would "
                "be others than on one device; apply it to the model before parallelize, or pass init= for a model on "
                "the meta device"
            )
        return super().apply(fn)

    def __prepare_scriptable__(self) -> Any:
        """What ``torch.jit.script`` asks first.

        Raises:
            RunError: always; it says what to script.
        """
        raise RunError(
            "torch.jit.script of a parallel module: it computes with this rank's pieces and collectives; script the "
            "model itself, on one rank, with the weights that autopar.full_state_dict(pm) gives"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Always an error: a rank has its part only, and process groups are no values.

        Raises:
            RunError: it says what to save.
        """
        raise RunError(
            "a parallel module cannot be pickled or saved as a whole: save pm.state_dict() with "
            "torch.distributed.checkpoint, or autopar.full_state_dict(pm), which has the model's names and whole "
            "tensors"
        )


_Does = TypeVar("_Does", bound=Callable[..., Any])


def on_all_ranks(does: _Does) -> _Does:
    """A function whose first argument is a parallel module, which all ranks call; where only some do, it is refused on
    all of them."""

    @functools.wraps(does)
    def together(pm: Any, *args: Any, **kwargs: Any) -> Any:
        with pm._autopar_all_call(does.__name__):
            return does(pm, *args, **kwargs)

    return cast(_Does, together)


def _same_tensors(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether two parts hold the same parameters."""
    return a._parameters.keys() == b._parameters.keys() and all(b._parameters[k] is p for k, p in a._parameters.items())


__all__ = ["SpreadModule", "on_all_ranks"]
