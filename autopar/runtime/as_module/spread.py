"""What parallel modules share as ``torch.nn.Module``: the mode, dtypes and devices, and what they stand for.

A parallel module has the names of the model's parameters and buffers, not its submodules: a
:class:`~autopar.runtime.as_module.submodules.Part` stands where one was.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.capture.evaluation import OtherGraphError, Skeleton
from autopar.capture.losses import LOSS, other_losses
from autopar.errors import RunError
from autopar.runtime.as_module.kept_modes import modes_that_stay
from autopar.runtime.as_module.left_attributes import filled_by_calls, refuse_left
from autopar.runtime.as_module.methods import method_of
from autopar.runtime.as_module.modes import Modes, Training
from autopar.runtime.as_module.original import Original, unheard
from autopar.runtime.as_module.spread_state import SpreadState
from autopar.runtime.as_module.submodules import (
    Part,
    check_conversion,
    is_own,
    own_tensors,
    plain_values,
    refuse_replacing,
)
from autopar.runtime.batches.calls import without_inference_mode
from autopar.runtime.batches.same_batch import Calls
from autopar.runtime.optimizers import optimizer_steps
from autopar.runtime.parameters import dtensor_fixes
from autopar.runtime.ranks.failures import Failures
from autopar.runtime.stages.compiled import ITSELF, compile_programs
from autopar.runtime.variants.buckets import Buckets
from autopar.runtime.variants.module_calls import ModuleCall
from autopar.runtime.variants.programs import AllWell, Fields, Programs
from autopar.runtime.variants.values import assigned

_WRAPPERS = {
    "join": "every rank is called with the whole batch, so no rank runs out of batches before another one",
}
"""What scripts ask of a wrapped model."""


class SpreadModule(SpreadState):
    """A model that was captured in one mode, with given dtypes, and is placed on devices."""

    _captured: Captured
    _captured_training: bool
    _skeleton: Skeleton | None
    _device: torch.device
    _mode: bool = True
    _modes: Modes
    _trained: Training
    """The modules that train in the program that runs now, as it was captured."""
    _evaluates_otherwise: bool = False
    """Eval mode is another graph than that of training, and is captured by itself."""
    _compared: Calls
    _world: Any = None
    """The process group of all ranks in which it was made; None on one device, which needs none."""
    _failures: Failures | None = None
    """Those of its steps, on the ranks that run it together; None on one device."""
    _gradient_dtype: torch.dtype | None = None
    told_of_statistics: bool = False
    _kept_modes: str = ""
    """What to tell once of parts that :meth:`train` leaves in their modes."""
    buckets: Buckets | None = None
    layouts_change: bool = False
    layout: int = 0
    _compiled_as: Any = None
    """With which options a ``torch.compile`` around a call compiled the programs
    (:mod:`~autopar.runtime.stages.compiled`)."""
    _programs: Programs | None = None
    _original: Original | None = None
    _model_ref: Callable[[], torch.nn.Module | None]
    _model_class: type
    _model_values: dict[str, Any]
    _model_tensors: frozenset[str] = frozenset()
    _model_keys: tuple[str, ...] = ()
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
        dtensor_fixes.correct()
        optimizer_steps.correct()

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_replacing(self, name, value)
        if name in self._fields:
            object.__setattr__(self, name, value)
        elif "_model_ref" not in self.__dict__ or not assigned(self, "", name, value):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """A plain attribute of the model, as of its submodules; or a method
        (:mod:`~autopar.runtime.as_module.methods`).

        Raises:
            AttributeError: there is none, or it holds tensors or modules of the model's own.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_") or "_model_class" not in self.__dict__:
                raise
            raised = error
        kind: type = self.__dict__["_model_class"]
        filled = filled_by_calls(self, self, "", name)
        if filled is not None:
            return filled
        refuse_left(self._captured, "", name)
        if (instead := _WRAPPERS.get(name)) is not None:
            shown = type(self).__name__
            raise AttributeError(f"{shown} has no '{name}', which is DistributedDataParallel's: {instead}")
        model = self._model_ref()
        value = (self._model_values if model is None else vars(model)).get(name, raised)
        if value is not raised and not is_own(name, value, self._model_tensors):
            return value
        if inspect.isroutine(inspect.getattr_static(kind, name, None)):
            return method_of(self, name, kind)
        raise AttributeError(
            f"{type(self).__name__} has no attribute '{name}'" + (
                f": the {kind.__name__} that was parallelized has one, or a property, of its own"
                if hasattr(kind, name) or (model is not None and name in vars(model)) else ""
            )
        )  # fmt: skip

    def _shown(self) -> tuple[type, tuple[str, ...], str]:
        return self.__dict__.get("_model_class", type(self)), self._model_keys, ""

    @property
    def module(self) -> Any:
        """Itself: it has the model's own names, as what DistributedDataParallel wraps has."""
        return self

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context as DistributedDataParallel has for adding up gradients. They add up without it, too: every backward
        reduces what it adds, and ``train_step`` reduces once for all its microbatches. So it does nothing."""
        return contextlib.nullcontext()

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

    def registered(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by all their names."""
        return {**dict(self.named_parameters(remove_duplicate=False)),
                **dict(self.named_buffers(remove_duplicate=False))}  # fmt: skip

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
        self._modes.set_whole(self._mode)
        self._show_modes()

    @property
    def modes_now(self) -> Modes:
        """The modes of all modules."""
        return self._modes

    def _show_modes(self) -> None:
        for part in self.modules():
            if type(part) is Part and "_stands_for" in part.__dict__:
                object.__setattr__(part, "training", self._modes.trains(part.__dict__["_stands_for"][1]))

    def train_parts(self, part: Part, mode: bool) -> None:
        """``train(mode)`` of a part with all that is in it; the next call captures the model so.

        Raises:
            RunError: calls of this module do not have the model captured again, or it is a pipeline.
        """
        inside = [each for each in part.modules() if type(each) is Part and "_stands_for" in each.__dict__]
        paths = [each.__dict__["_stands_for"][1] for each in inside]
        if all(self._modes.trains(path) is mode for path in paths):
            return
        if self.leads is not None or not self.follows_modes:
            if part.training is mode:
                return
            why = "stages keep those modes" if self.leads is not None else "shapes='fixed' keeps the program"
            raise RunError(
                f"{'train' if mode else 'eval'}() of a part of a parallel module, '{paths[0]}': {why} in which the "
                "model was captured; set the submodule's mode before parallelize, or call train() or eval() on the "
                "parallel module"
            )
        self._modes.set_parts(paths, mode)
        self._show_modes()

    def train(self, mode: bool = True) -> Any:
        """Training mode, or eval mode: dropout off, batch norm by its running statistics, buffers unchanged.

        Parts that were in eval mode when the model was captured stay in it, and a ``train`` that the model has of its
        own is not called; where that makes a difference it is warned of, once.

        A model that was captured in eval mode, or that ``eval()`` changes in more than its operators' modes, is
        captured again by the next call, over the same parameters.

        Raises:
            RunError: it would have to be, and calls are not followed (``shapes="fixed"``); or it cannot be captured.
        """
        if not isinstance(mode, bool):
            raise RunError(f"train: the mode is {mode!r}; give True or False")
        self.training = mode
        if mode and self._kept_modes:
            said, self._kept_modes = self._kept_modes, ""
            if not (dist.is_initialized() and dist.get_rank()):
                warnings.warn(f"train(): {said}", stacklevel=2)
        return self

    @property
    def follows_modes(self) -> bool:
        """Whether the next call has the model captured again if its modes are others."""
        return self._programs is not None and self._programs.shapes and self._programs.plan_again is not None

    @property
    def evaluates(self) -> bool:
        """Whether the program that runs now has one of eval mode beside it."""
        raise NotImplementedError

    def _prepare_evaluation(self, sides: Mapping[str, int]) -> None:
        """Make it, of what the program that runs now was captured from.

        Args:
            sides: of random branches (:func:`~autopar.capture.evaluation.evaluated`).
        """
        raise NotImplementedError

    def runs_in(self, trained: Training) -> bool:
        """Whether a program that was captured in modes is one of the modes now."""
        training = self._modes.training
        return training is trained or training == trained or (not training and self._is_told_to_evaluate(trained))

    def _is_told_to_evaluate(self, trained: Training) -> bool:
        return "" in trained and self._skeleton is not None and not self._evaluates_otherwise

    def captures_in(self) -> Training:
        """The modes in which the model is captured for a call now: those of training, if they do for eval mode too."""
        at_first = self._modes.at_first
        return at_first if self.runs_in(at_first) else self._modes.training

    def _change_mode(self, mode: bool) -> None:
        """Have a program for the other mode, or leave it to the next call, or refuse it.

        Raises:
            RunError: calls are not followed, or the model cannot be captured in eval mode.
        """
        if mode and "" not in self._trained and not self.follows_modes:
            raise RunError(
                "this program was captured in eval mode; for training mode call model.train(), parallelize the model "
                "again, and load this state_dict()"
            )
        if not mode and self._is_told_to_evaluate(self._trained):
            self.have_evaluation()

    def have_evaluation(self) -> bool:
        """Have the program of eval mode beside that of training; False where it is another graph.

        Raises:
            RunError: it is, and calls are not followed.
        """
        if self.evaluates:
            return True
        assert self._skeleton is not None
        try:
            with unheard():
                sides = self._skeleton.check(self._captured)
        except OtherGraphError as error:
            if not self.follows_modes:
                raise RunError(str(error)) from None
            self._evaluates_otherwise = True
            return False
        with without_inference_mode():
            self._prepare_evaluation(sides)
        return True

    def take_modes_of(self, other: SpreadModule) -> None:
        """Be in the modes of another module of the same program."""
        self._modes, self._trained = copy.deepcopy(other._modes), other._trained
        self._mode, self._evaluates_otherwise = other._mode, other._evaluates_otherwise
        self._show_modes()
        if self._modes.training != self._trained and self.runs_in(self._trained):
            self.have_evaluation()

    def _set_mode_of(self, model: torch.nn.Module) -> None:
        """Begin in the modes of the model and of its submodules."""
        self._mode, self._kept_modes = model.training, modes_that_stay(model)
        self._modes = Modes(model)
        self._trained = self._modes.at_first
        self._model_ref, self._model_class, self._model_values = weakref.ref(model), type(model), plain_values(model)
        self._model_keys, self._model_tensors = tuple(model._modules), own_tensors(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        shown = self._paths_of_parts(modules)
        first: dict[torch.nn.Module, Part] = {}
        for path, module in modules.items():
            if path not in shown:
                continue
            home, key = self.owner_of(path)
            part = home._modules.setdefault(key, Part())
            assert isinstance(part, Part)
            before = first.setdefault(module, part)
            if self.leads is None and before is not part and _same_tensors(before, part):
                home._modules[key] = before  # the model has one module under two names
            elif "_stands_for" not in part.__dict__:
                part.stand_for(self, path, module)
        for path, part in list(self.named_modules(remove_duplicate=False)):
            if path in modules:
                for key in modules[path]._modules:  # loops meet them in the model's order
                    if key in part._modules:
                        part._modules[key] = part._modules.pop(key)

    def _paths_of_parts(self, modules: Mapping[str, torch.nn.Module]) -> set[str]:
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
            if self.leads is None or all(tensor is None for tensor in tensors):
                names = path.split(".")
                shown.update(".".join(names[: depth + 1]) for depth in range(len(names)))
        return shown - {""}

    @property
    def compare_every(self) -> int | None:
        """Every how many calls ranks compare what they were called with and their copies of parameters; 0 for never.

        None is the default: in the first three calls, then in the tenth, hundredth, thousandth and so on. Set it to the
        same number on all ranks.
        """
        return self._compared.every

    @compare_every.setter
    def compare_every(self, calls: int | None) -> None:
        if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or calls < 0):
            raise RunError(f"compare_every is {calls!r}; give a number of calls, 0 for never, or None for the default")
        self._compared.every = calls

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are added up over ranks; None for that of the parameters. Set it on all ranks.

        Parameters get gradients of their own dtype in any case. Sums within the program, as of operators whose terms
        are on several ranks, stay in the model's dtype. What :func:`autopar.parallelize` got as ``gradient_dtype``
        is in the plan's price; what is set here afterwards is not.
        """
        return self._gradient_dtype

    @gradient_dtype.setter
    def gradient_dtype(self, dtype: torch.dtype | None) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise RunError(f"gradient_dtype is {dtype!r}; give a floating point dtype, such as torch.float32, or None")
        self._gradient_dtype = dtype

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

    def check_world(self) -> None:
        """Refuse to compute with other ranks where the process group has been ended.

        Raises:
            RunError: it says what to do.
        """
        if self._world is not None and dist.group.WORLD is not self._world:
            again = ", and another one was made" if dist.is_initialized() else ""
            raise RunError(
                f"the process group in which this module was parallelized has been ended (destroy_process_group){again}"
                ": call, evaluate and save it before that, or parallelize the model again"
            )

    # -- programs of other calls and values (:mod:`autopar.runtime.variants.programs`)

    def follow(self, programs: Programs) -> None:
        """Run other programs where calls have other shapes, or values that ``forward`` reads have changed."""
        self._programs = programs

    def skeleton_for_programs(self, model: torch.nn.Module) -> Skeleton:
        """A copy of ``model`` without values, to capture when the model is gone."""
        return self._skeleton if self._skeleton is not None else Skeleton(model)

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
        self._compiled_as = ITSELF

    def _kept_program(self) -> Fields:
        """What makes up the program that runs now."""
        raise NotImplementedError

    def _resume_program(self, fields: Fields) -> None:
        """Run one that was kept."""
        raise NotImplementedError

    def _take_program(self, new: Captured, call: ModuleCall, plan_again: Any, all_well: AllWell) -> None:
        """Run another capture, which was made for a call."""
        raise NotImplementedError

    def _in_step(self) -> bool:
        """Whether a step has begun whose microbatches must all run the same program."""
        return False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        check_conversion(fn, [*self.parameters(), *self.buffers()], self._device)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Any:
        """``fn`` meets what stands for each submodule, as loops over ``modules()`` do; all ranks call it.

        Raises:
            RunError: it is a pipeline, each rank of which has other submodules, or ``fn`` does what a part cannot.
        """
        if self.leads is not None:
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

def _same_tensors(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether two parts hold the same parameters."""
    return a._parameters.keys() == b._parameters.keys() and all(b._parameters[k] is p for k, p in a._parameters.items())


__all__ = ["SpreadModule"]
