"""The modes of a parallel module and of its parts: which train, and in which program calls run then."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from autopar.capture import Captured
from autopar.capture.evaluation import OtherGraphError, Skeleton
from autopar.errors import RunError
from autopar.runtime.as_module.module_modes import Modes, Training
from autopar.runtime.as_module.original_model import unheard
from autopar.runtime.as_module.parallel_state_dict import SpreadState
from autopar.runtime.as_module.submodules import Part
from autopar.runtime.batches.calls import without_inference_mode
from autopar.runtime.variants.program_cache import Programs


class SpreadModes(SpreadState):
    """A module that was captured in one mode of the whole and of each part."""

    _captured: Captured
    _skeleton: Skeleton | None
    _mode: bool = True
    _modes: Modes
    _trained: Training
    """The modules that train in the program that runs now, as it was captured."""
    _evaluates_otherwise: bool = False
    """Eval mode is another graph than that of training, and is captured by itself."""
    _kept_modes: str = ""
    """What to tell once of parts that :meth:`train` leaves in their modes."""
    _programs: Programs | None = None
    leads: bool | None = None
    """Of a pipeline, whether this rank is the first of its group; None where every rank has a part of everything."""

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

    def take_modes_of(self, other: SpreadModes) -> None:
        """Be in the modes of another module of the same program."""
        self._modes, self._trained = copy.deepcopy(other._modes), other._trained
        self._mode, self._evaluates_otherwise = other._mode, other._evaluates_otherwise
        self._show_modes()
        if self._modes.training != self._trained and self.runs_in(self._trained):
            self.have_evaluation()


__all__ = ["SpreadModes"]
