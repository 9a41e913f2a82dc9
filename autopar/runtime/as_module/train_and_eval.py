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

    _autopar_captured: Captured
    _autopar_skeleton: Skeleton | None = None
    _autopar_mode: bool = True
    _autopar_modes: Modes
    """The modes of all modules now."""
    _autopar_trained: Training
    """The modules that train in the program that runs now, as it was captured."""
    _autopar_evaluates_otherwise: bool = False
    """Eval mode is another graph than that of training, and is captured by itself."""
    _autopar_kept_modes: str = ""
    """What to tell once of parts that :meth:`train` leaves in their modes."""
    _autopar_programs: Programs | None = None
    _autopar_leads: bool | None = None
    """Of a pipeline, whether this rank is the first of its group; None where every rank has a part of everything."""

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The mode. Setting it is the same as calling :meth:`train`."""
        return self._autopar_mode

    @training.setter
    def training(self, mode: bool) -> None:
        if "_autopar_captured_training" not in self.__dict__:  # while it is made
            return
        if mode != self._autopar_mode:
            self._autopar_change_mode(bool(mode))
        self._autopar_mode = bool(mode)
        self._autopar_modes.set_whole(self._autopar_mode)
        self._autopar_show_modes()

    def _autopar_show_modes(self) -> None:
        for part in self.modules():
            if type(part) is Part and "_autopar_stands_for" in part.__dict__:
                object.__setattr__(
                    part, "training", self._autopar_modes.trains(part.__dict__["_autopar_stands_for"][1])
                )

    def _autopar_train_parts(self, part: Part, mode: bool) -> None:
        """``train(mode)`` of a part with all that is in it; the next call captures the model so.

        Raises:
            RunError: calls of this module do not have the model captured again, or it is a pipeline.
        """
        inside = [each for each in part.modules() if type(each) is Part and "_autopar_stands_for" in each.__dict__]
        paths = [each.__dict__["_autopar_stands_for"][1] for each in inside]
        if all(self._autopar_modes.trains(path) is mode for path in paths):
            return
        if self._autopar_leads is not None or not self._autopar_follows_modes:
            if part.training is mode:
                return
            why = "stages keep those modes" if self._autopar_leads is not None else "shapes='fixed' keeps the program"
            raise RunError(
                f"{'train' if mode else 'eval'}() of a part of a parallel module, '{paths[0]}': {why} in which the "
                "model was captured; set the submodule's mode before parallelize, or call train() or eval() on the "
                "parallel module"
            )
        self._autopar_modes.set_parts(paths, mode)
        self._autopar_show_modes()

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
        if mode and self._autopar_kept_modes:
            said, self._autopar_kept_modes = self._autopar_kept_modes, ""
            if not (dist.is_initialized() and dist.get_rank()):
                warnings.warn(f"train(): {said}", stacklevel=2)
        return self

    @property
    def _autopar_follows_modes(self) -> bool:
        """Whether the next call has the model captured again if its modes are others."""
        return (
            self._autopar_programs is not None
            and self._autopar_programs.shapes
            and self._autopar_programs.replan is not None
        )

    @property
    def _autopar_evaluates(self) -> bool:
        """Whether the program that runs now has one of eval mode beside it."""
        raise NotImplementedError

    def _autopar_prepare_evaluation(self, sides: Mapping[str, int]) -> None:
        """Make it, of what the program that runs now was captured from.

        Args:
            sides: of random branches (:func:`~autopar.capture.evaluation.evaluated`).
        """
        raise NotImplementedError

    def _autopar_runs_in(self, trained: Training) -> bool:
        """Whether a program that was captured in modes is one of the modes now."""
        training = self._autopar_modes.training
        return (
            training is trained or training == trained or (not training and self._autopar_is_told_to_evaluate(trained))
        )

    def _autopar_is_told_to_evaluate(self, trained: Training) -> bool:
        return "" in trained and self._autopar_skeleton is not None and not self._autopar_evaluates_otherwise

    def _autopar_captures_in(self) -> Training:
        """The modes in which the model is captured for a call now: those of training, if they do for eval mode too."""
        at_first = self._autopar_modes.at_first
        return at_first if self._autopar_runs_in(at_first) else self._autopar_modes.training

    def _autopar_change_mode(self, mode: bool) -> None:
        """Have a program for the other mode, or leave it to the next call, or refuse it.

        Raises:
            RunError: calls are not followed, or the model cannot be captured in eval mode.
        """
        if mode and "" not in self._autopar_trained and not self._autopar_follows_modes:
            raise RunError(
                "this program was captured in eval mode; for training mode call model.train(), parallelize the model "
                "again, and load this state_dict()"
            )
        if not mode and self._autopar_is_told_to_evaluate(self._autopar_trained):
            self._autopar_have_evaluation()

    def _autopar_have_evaluation(self) -> bool:
        """Have the program of eval mode beside that of training; False where it is another graph.

        Raises:
            RunError: it is, and calls are not followed.
        """
        if self._autopar_evaluates:
            return True
        assert self._autopar_skeleton is not None
        try:
            with unheard():
                sides = self._autopar_skeleton.check(self._autopar_captured)
        except OtherGraphError as error:
            if not self._autopar_follows_modes:
                raise RunError(str(error)) from None
            self._autopar_evaluates_otherwise = True
            return False
        with without_inference_mode():
            self._autopar_prepare_evaluation(sides)
        return True

    def _autopar_take_modes_of(self, other: SpreadModes) -> None:
        """Be in the modes of another module of the same program."""
        self._autopar_modes, self._autopar_trained = copy.deepcopy(other._autopar_modes), other._autopar_trained
        self._autopar_mode, self._autopar_evaluates_otherwise = other._autopar_mode, other._autopar_evaluates_otherwise
        self._autopar_show_modes()
        if self._autopar_modes.training != self._autopar_trained and self._autopar_runs_in(self._autopar_trained):
            self._autopar_have_evaluation()


__all__ = ["SpreadModes"]
