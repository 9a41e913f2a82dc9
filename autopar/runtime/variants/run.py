"""What a parallel module runs: its programs, with what they need on this rank. It is one attribute of the module.

Here is what is the same on one mesh and in stages: the modes of a program, and what all ranks do together.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.capture.evaluation import OtherGraphError, sides_in_eval_mode
from autopar.capture.losses import LOSS, other_losses
from autopar.capture.python.guards import refusal
from autopar.errors import RunError, first_few
from autopar.plans.plan import Plan
from autopar.runtime.batches.calls import without_inference_mode
from autopar.runtime.batches.local_batch import Call, RowsOfRanks
from autopar.runtime.batches.module_calls import ModuleCall, check_autocast
from autopar.runtime.batches.row_sampler import Samplers
from autopar.runtime.batches.same_batch import Calls
from autopar.runtime.parameters.user_module import PLACE
from autopar.runtime.ranks.collective_log import CollectiveLog
from autopar.runtime.ranks.groups import Groups
from autopar.runtime.stages.compiled import check_compiled
from autopar.runtime.stages.graph_compiler import CompileArguments, checked_arguments
from autopar.runtime.stages.stage import Stage
from autopar.runtime.variants.buckets import Buckets
from autopar.runtime.variants.module_modes import Training
from autopar.runtime.variants.program_run import Fields, ProgramRun
from autopar.torch_private import pytree
from autopar.words.meshes import Mesh
from autopar.words.trees import PyTree

Momenta = dict[str, tuple[torch.nn.Module, float]]
"""By path a batch norm, and the momentum that the program has."""
FORWARD_ALONE = (
    "the model was parallelized with mode='inference', which runs forward alone and without gradients; to train it, "
    "parallelize a model with mode='training', and load autopar.full_state_dict(model)"
)
EXTRA = "_extra_state"
"""Under which torch keeps what is no tensor of the model; checkpoints know it."""
P = ParamSpec("P")
R = TypeVar("R")


class OtherPrograms(Protocol):
    """The other programs of a run (:class:`~autopar.runtime.variants.program_cache.Programs`).

    Attributes:
        kept: those that do not run now.
        shapes: calls with other shapes are followed.
        replan: makes plans; None if the plan was given.
        meeting: where ranks tell each other their calls; None on one device.
        captures: how many were captured since ``parallelize``.
    """

    kept: list[Fields]
    shapes: bool
    replan: Callable[..., Any] | None
    meeting: CollectiveLog | None
    captures: int

    def follow(self, run: ParallelRun, call: ModuleCall) -> None:
        """Run the program of a call."""

    def meet_all(self, what: str, broken_off: Callable[[], str]) -> None:
        """Wait until all ranks come to ``what``."""

    def of_copy(self, model: torch.nn.Module) -> OtherPrograms:
        """Return those of a copy of the module."""


class ParallelRun(ProgramRun):
    """What a parallel module runs, on one mesh or in stages.

    Attributes:
        world: the process group of all ranks in which it was made; None on one device, which needs none.
        groups: autopar's own process groups, in which it runs, of one ``generation``; None if there are none.
        programs: the others; None if there are none.
        compiled_as: the options with which a ``torch.compile`` around a call compiled the programs.
        one_at_a_time: held by the thread whose forward runs: a call may bring another program.
        compared: what ranks compare of its calls.
        buckets: shapes to which calls are padded; None if they are not.
        local_batch: whose rows are where, if each rank has rows of its own.
        samplers: what draws the rows that this rank loads.
        statistics_anew, statistics_staying: batch norms whose momentum is None, and those whose momentum is 0.
    """

    path = ""
    programs: OtherPrograms | None = None
    compiled_as: Any = None
    compared: Calls
    world: dist.ProcessGroup | None = None
    groups: Groups | None = None
    generation = 0
    buckets: Buckets | None = None
    local_batch: RowsOfRanks | None = None
    meeting: CollectiveLog | None = None
    """Where ranks meet that read outputs in pieces."""
    told_of_statistics = False
    evaluates_otherwise = False
    """Eval mode is another graph than that of training, and is captured by itself."""

    def __init__(self, model: torch.nn.Module, captured: Captured, plan: Plan) -> None:
        super().__init__(model, captured, plan)
        self.one_at_a_time = threading.RLock()
        self.samplers = Samplers()
        self.statistics_anew: Momenta = {}
        self.statistics_staying: Momenta = {}
        self.is_changing_mode = self._all_are_together = False

    # -- the module

    @property
    def run(self) -> ParallelRun:
        """Itself, as of the places of submodules."""
        return self

    @property
    def training(self) -> bool:
        """The mode of the whole."""
        return self.module.training

    # -- what a run on one mesh and one in stages have of their own

    def draws(self) -> bool:
        """Return whether the program has random operators."""
        raise NotImplementedError

    def rebuilt(self, model: torch.nn.Module, values: Callable[[str], torch.Tensor]) -> ParallelRun:
        """Return a run like this one of a copy of the model, with given whole values by name; all ranks call it."""
        raise NotImplementedError

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return the whole value of a buffer that the program reads, where all ranks call it; None if it has none."""
        raise NotImplementedError

    def in_step(self) -> bool:
        """Return whether a step has begun whose microbatches must all run the same program."""
        return False

    @property
    def everyone(self) -> Any:
        """The group of all ranks that hold a part, for the tensors' device: autopar's own, where that is possible."""
        raise NotImplementedError

    def stages_on_ranks(self) -> list[tuple[Mesh, Sequence[int]]]:
        """Return the mesh of each stage, and its ranks in row-major order of it."""
        return [(stage.mesh, stage.devices) for stage in self.plan.stages]

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run a call of the module."""
        raise NotImplementedError

    def train_step(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *, optimizers: Sequence[torch.optim.Optimizer] = (),
        microbatches: int | None = None, scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run a training step; arguments as of ``ParallelModule.train_step``, the batch as a tuple and a dict."""
        raise NotImplementedError

    def evaluate(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> torch.Tensor:
        """Return the loss of a batch without gradients."""
        raise NotImplementedError

    def take_local_batch(self, without: frozenset[str]) -> None:
        """Expect every rank to be called with its own rows; inputs of the names in ``without`` have none."""
        self.local_batch = RowsOfRanks(self.stages_on_ranks(), lambda: self.everyone, without)

    def rows_of_all(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Call | None:
        """Return a call with the rows of all ranks, where each has its own and not equally many; else None."""
        programs = self.programs
        if self.local_batch is None or self.buckets is not None or programs is None or not programs.shapes:
            return None
        logs = [log for log in (self.meeting, programs.meeting) if log is not None]
        return self.local_batch.put_together(args, kwargs, logs)

    # -- all programs

    def check_values(self, call: ModuleCall) -> None:
        """Run the program of the call's shapes, with the values that the model has.

        Raises:
            RunError: it was captured with others, and they cannot or shall not be captured again.
        """
        guards = self.captured.guards
        guards.tell_of_gradient_mode()
        if self.programs is not None:
            self.programs.follow(self, call)
        else:
            check_autocast(self.captured)
            if not guards.same():
                raise RunError(refusal(guards.changes()))

    def compile(self, arguments: CompileArguments) -> None:
        """Compile the programs, that which runs now and those that are kept for other calls.

        With ``disable=True`` they run as they are lowered, and so they do where the environment turns compilers off.

        Raises:
            RunError: the whole graph is asked for, and a program is none; or an argument is not one that can be.
            TypeError: ``torch.compile`` has no such argument.
        """
        checked = checked_arguments(arguments)
        if checked is not None and self.seeds.mode == "torch":
            raise RunError(
                "programs that draw as torch does in eager mode (random='torch') are not compiled, since the host "
                "follows torch's generator through each call: parallelize with random='sharded', the default"
            )
        kept = self.programs.kept if self.programs is not None else ()
        stages: list[Stage] = [stage for fields in (self.kept_program(), *kept) for stage in fields["stages"].values()]
        for stage in stages if checked is not None else ():
            check_compiled(stage.program, arguments[1])
        for stage in stages:
            stage.compile(checked)

    # -- modes

    @contextlib.contextmanager
    def changing_modes(self) -> Iterator[None]:
        """Let the modes be changed in this scope, and prepare a program for them afterwards.

        Raises:
            RunError: there can be none; the modes are those of before.
        """
        if self.is_changing_mode:
            yield
            return
        self.is_changing_mode = True
        before = [(module, module.training) for module in self.module.modules()]
        try:
            yield
            self.is_changing_mode, self.modes.stale = False, True
            self.follow_modes()
        except BaseException:
            for module, mode in before:
                module.__dict__["training"] = mode
            raise
        finally:
            self.is_changing_mode, self.modes.stale = False, True

    def follow_modes(self) -> None:
        """Prepare a program for the modes now, or leave it to the next call.

        Raises:
            RunError: calls are not followed, or the model cannot be captured in eval mode.
        """
        training = self.modes.training
        if training == self.trained:
            return
        if self.inference:
            raise RunError(f"train() ({self.modes.shown()}): {FORWARD_ALONE}")
        if not training and self._is_told_to_evaluate(self.trained):
            self.have_evaluation()
        elif not self.follows_modes:
            if "" in training and "" not in self.trained:
                raise RunError(
                    "this program was captured in eval mode; for training mode call model.train() before parallelize, "
                    "and load this state_dict()"
                )
            raise RunError(
                f"train() or eval() of parts ({self.modes.shown()}): shapes='fixed' keeps the program, which was "
                "captured in other modes; set the modes before parallelize, or call train() or eval() of the whole"
            )

    @property
    def follows_modes(self) -> bool:
        """Whether the next call has the model captured again if its modes are others."""
        return self.programs is not None and self.programs.shapes and self.programs.replan is not None

    def runs_in(self, trained: Training) -> bool:
        """Return whether a program that was captured in modes is one of the modes now."""
        training = self.modes.training
        return training is trained or training == trained or (not training and self._is_told_to_evaluate(trained))

    def _is_told_to_evaluate(self, trained: Training) -> bool:
        return "" in trained and self.captured_training and not self.evaluates_otherwise

    def captures_in(self) -> Training:
        """Return the modes in which the model is captured now: those of training, if they do for eval mode, too."""
        at_first = self.modes.at_first
        return at_first if self.runs_in(at_first) else self.modes.training

    def have_evaluation(self) -> bool:
        """Prepare the program of eval mode next to that of training; return False if it is another graph.

        Raises:
            RunError: it is, and calls are not followed.
        """
        if self.evaluates:
            return True
        try:
            with self.user.as_written() as model:
                sides = sides_in_eval_mode(model, self.captured)
        except OtherGraphError as error:
            if not self.follows_modes:
                raise RunError(str(error)) from None
            self.evaluates_otherwise = True
            return False
        self.prepare_evaluation(sides)
        return True

    def check_without_gradients(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> None:
        """Refuse a call of a model for inference that would want gradients.

        Raises:
            RunError: an input or a parameter requires grad, and gradients are on; it says which.
        """
        if not torch.is_grad_enabled():
            return
        wanting = [
            f"input {pytree.keystr(path)}"
            for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]
            if isinstance(x, torch.Tensor) and x.requires_grad
        ] + [f"parameter '{name}'" for name, param in self.named_parameters() if param.requires_grad]
        if wanting:
            raise RunError(f"{first_few(wanting)} requires grad: {FORWARD_ALONE}; or call it under torch.no_grad()")

    def check_trains(self) -> None:
        """Refuse a training step of a module that was put into eval mode, or that gives several losses.

        Raises:
            RunError: it says what to call, or how to say which loss is meant.
        """
        several = other_losses(self.captured.graph, self.captured.out_spec)
        if several:
            raise RunError(
                f"train_step: the model gives several scalars with a gradient (outputs {', '.join(several)}), none of "
                f"which is called '{LOSS}', so it is not known which is to be trained: return the one, or their sum, "
                f"under the key '{LOSS}', or pass loss_fn= to parallelize, such as loss_fn=lambda out: out[...] + "
                "out[...]; without stages, a call and backward() of any of them do, too"
            )
        if self.captured_training and not self.training:
            raise RunError("the module is in eval mode, so a step would train without dropout; call train() first")

    # -- all ranks

    def check_world(self) -> None:
        """Refuse to compute with other ranks where the process group has been ended.

        Raises:
            RunError: it says what to do.
        """
        if self.world is not None and dist.group.WORLD is not self.world:
            again = ", and another one was made" if dist.is_initialized() else ""
            raise RunError(
                f"the process group in which this module was parallelized has been ended (destroy_process_group){again}"
                ": call, evaluate and save it before that, or parallelize the model again"
            )

    def check_at_rest(self, what: str) -> None:
        """Refuse what needs the whole model while parts of it are ahead of others, as in an asynchronous pipeline."""

    def drain(self) -> None:
        """Finish what steps have left for later: nothing but in an asynchronous pipeline."""

    def fails_everywhere(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Enclose a part of a step: what fails in it on one rank ends the step on all."""
        return self.failures.during(where) if self.failures is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def all_in_step(self, where: str) -> Iterator[None]:
        """Enclose what ranks do together in a step or a call, after all have broken off an earlier one that failed."""
        self.check_world()
        if self.failures is not None:
            self.failures.settle()
        with self.fails_everywhere(where), without_inference_mode():
            if self.groups is not None:
                self.groups.check(self.generation)
            yield

    @contextlib.contextmanager
    def all_call(self, what: str) -> Iterator[None]:
        """Enclose what all ranks do together outside of a step, such as ``full_state_dict``.

        Raises:
            RunError: only some ranks have come to it, while others go on; on all of them, also within their steps.
        """
        self.check_world()
        self.check_at_rest(f"{what}()")
        if self.failures is None or self._all_are_together:
            yield
            return
        self.failures.settle()
        self._all_are_together = True
        try:
            with self.failures.during(what):
                if self.programs is not None:
                    self.programs.meet_all(what, self.failures.heard)
                yield
        finally:
            self._all_are_together = False


def is_parallel(module: Any) -> bool:
    """Check whether an object is a module that ``parallelize`` has returned."""
    return isinstance(module, torch.nn.Module) and isinstance(vars(module).get(PLACE), ParallelRun)


def run_of(module: Any) -> ParallelRun:
    """Return the run of a parallel module.

    Raises:
        RunError: it is no parallel module.
    """
    run = module if isinstance(module, ParallelRun) else vars(module).get(PLACE)
    if not isinstance(run, ParallelRun):
        raise RunError(f"expected a module that parallelize has returned, got a {type(module).__name__}")
    return run


def on_all_ranks(does: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a function of a run, which all ranks call, as one of a parallel module.

    Where only some ranks call it, it is refused on all of them.
    """

    @functools.wraps(does)
    def together(pm: torch.nn.Module | ParallelRun, *args: P.args, **kwargs: P.kwargs) -> R:
        run = run_of(pm)
        with run.all_call(does.__name__):
            return does(run, *args, **kwargs)

    return together
