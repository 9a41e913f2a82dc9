"""The module that ``parallelize`` gives back: the user's own object, of a class derived from its own."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from autopar.errors import RunError
from autopar.lower.program import Program
from autopar.plans.plan import Plan
from autopar.runtime.as_module.callers_compiler import ITSELF, compiled_as_callers
from autopar.runtime.as_module.copied import copied
from autopar.runtime.as_module.methods import method_of
from autopar.runtime.as_module.model_class import with_signature
from autopar.runtime.as_module.submodules import Derived, Part, PlaceOfPart, methods_of, names_of_part
from autopar.runtime.batches.local_batch import sampler_of, sharded
from autopar.runtime.batches.row_sampler import RowSampler
from autopar.runtime.checkpoints.full_state_dict import full_state_dict, load_full_state_dict
from autopar.runtime.one_mesh.mesh_step import MeshRun
from autopar.runtime.optimizers.several import Optimizers, listed
from autopar.runtime.parameters.state import whole_of
from autopar.runtime.pipelines.pipeline import PipelineRun
from autopar.runtime.repairs.dtensor_fixes import note_state
from autopar.runtime.variants.run import EXTRA, FORWARD_ALONE, ParallelRun
from autopar.torch_private import functorch_is_active, fx_traces, is_transformed, pytree
from autopar.words.trees import PyTree

_WRAPPERS = {"join": "every rank is called with the whole batch, so no rank runs out of batches before another one"}
"""What scripts ask of a wrapped model."""


class ParallelModule(Derived):
    """What :func:`autopar.parallelize` returns: the model itself, spread over ranks, on one mesh or in stages.

    Its class is derived from the model's and has its name. Parameters are DTensors under the names that they have in
    the model; on a mesh of one device plain tensors, for which optimizers take half the time. In a pipeline each rank
    has those of its stages. Attributes, methods and submodules are the model's.
    """

    _autopar: ParallelRun

    # -- running

    @compiled_as_callers
    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return the model's output for a whole batch, which every rank passes alike.

        All outputs are plain and whole, the same on all ranks, and any of them, or a sum of them, can be called
        ``backward`` on. Large ones other than a loss are gathered when their values are first used, on every rank.
        Outputs that were pinned to shards (``placements={1: "S0"}``) are DTensors. A pipeline gives outputs in eval
        mode, without gradients: the mean loss, and of other tensors those of all microbatches one after the other (of
        scalars the mean).

        Args:
            args, kwargs: what the model is called with: tensors of global shape on this rank's device (with
                ``batch="local"`` this rank's rows: :mod:`~autopar.runtime.batches.local_batch`), or DTensors of any
                placement. Of an input whose placement was requested (``placements=``), a tensor that has the shape of
                this rank's shard is that shard.

        Returns:
            The model's output, of global shapes and in the model's dtypes.

        Raises:
            RunError: the call is not one that was captured; or ranks were called with different batches, or hold
                different copies of a parameter, which they compare in the first three calls and now and then
                (:mod:`autopar.runtime.batches.same_batch`); or a pipeline is in training mode.
        """
        if functorch_is_active():
            _check_transformed(self, (args, kwargs))
        run = self._autopar
        with run.one_at_a_time:
            if run.inference:
                run.check_without_gradients(args, kwargs)
                with torch.no_grad():
                    return run.forward(*args, **kwargs)
            return run.forward(*args, **kwargs)

    @compiled_as_callers
    def train_step(
        self, *args: PyTree, optimizer: Optimizers = None, microbatches: int | None = None,
        scaler: torch.amp.GradScaler | None = None, **kwargs: PyTree,
    ) -> torch.Tensor:  # fmt: skip
        """Run one training step on a batch of one or more microbatches.

        A microbatch has at most as many rows as were planned. Inputs that have the rows of the batch are cut; others
        go into every microbatch. Each loss counts by its microbatch's part of the rows, and divides by what the whole
        batch has where it divides by a sum over labels or masks (:mod:`~autopar.runtime.batches.totals_ahead`), so
        that the loss and the gradients are those of the whole batch at once. With ``shapes="fixed"`` inputs of exactly
        the captured shape go into every microbatch.

        In a pipeline, inputs that require grad (in the example inputs of ``parallelize``, too) get their gradients in
        this call, since it runs the backward: a leaf in ``x.grad``, on every rank and whole; of any other tensor the
        parameters that it was made with. Its graph is freed, as after ``loss.backward()``.

        Args:
            args, kwargs: the batch, of global shapes, the same on every rank.
            optimizer: if given, ``step()`` and ``zero_grad()`` of it follow, or of each in a list; else gradients are
                left in ``param.grad``.
            microbatches: how many, on one mesh; by default found from the shapes.
            scaler: multiplies the gradients (:mod:`~autopar.runtime.optimizers.grad_scaler`); with ``optimizer``,
                ``step()`` and ``update()`` of it follow, else ``unscale_``, clipping and these are the caller's.

        In a pipeline with schedule ``pipedream`` or ``pipedream-2bw`` weights are updated while microbatches are in
        flight, some of this batch in the next call (:meth:`drain`). It takes ``optimizer``, and no ``scaler``; reading
        the loss waits for all stages.

        Returns:
            The loss of the batch, a tensor of shape [] and of the loss's dtype, the same on every rank. Gradients are
            added to those that are there, as ``loss.backward()`` adds them.

        Raises:
            RunError: the model has no scalar loss, is in eval mode, or the shapes are not those of whole microbatches;
                or an input requires grad whose gradient was not planned.
        """
        if self._autopar.inference:
            raise RunError(f"train_step: {FORWARD_ALONE}")
        return self._autopar.train_step(
            args, kwargs, optimizers=listed(optimizer), microbatches=microbatches, scaler=scaler
        )

    @compiled_as_callers
    def evaluate(self, *args: PyTree, **kwargs: PyTree) -> torch.Tensor:
        """Return the mean loss of a batch without gradients, in the mode (:meth:`train`, ``eval()``) that is set.

        In training mode buffers that a forward changes are changed, as the model would.

        Args:
            args, kwargs: the batch, as for :meth:`train_step`.

        Returns:
            A tensor of shape [] and of the loss's dtype, the same on every rank.

        Raises:
            RunError: the model has no scalar loss, or the shapes are not those of whole microbatches.
        """
        with self._autopar.one_at_a_time:
            return self._autopar.evaluate(args, kwargs)

    def compile(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Compile the program with ``torch.compile(program, *args, **kwargs)``, as ``nn.Module.compile`` does.

        In a pipeline these are the programs of this rank's stages. A program becomes an explicit step, forward and
        backward, with functional collectives (:mod:`autopar.lower.steps`), and the compiler gets its operators. What
        the plan decides about memory holds: what is recomputed, gathered again or moved to the host. Reductions of
        gradients begin while the backward goes on; gathers of parameters once a step and messages between stages stay
        outside. With ``backend="eager"`` the step is Python that calls the operators one by one: the same numbers in
        less time of the host, without a compiler.
        Programs that are captured later, for other calls or values, are compiled like the first one. A
        ``torch.compile(pm)`` that is called does the same with its options, as one of a function that calls ``pm``.
        ``disable=True`` takes an earlier call back. As everywhere in torch, nothing is compiled where the environment
        says ``TORCH_COMPILE_DISABLE=1``.

        Raises:
            RunError: ``fullgraph=True``, and the compiler does not see into an operator; it says which. Or there is no
                such backend, or its program cannot be compiled in this way.
            TypeError: ``torch.compile`` has no such argument.
        """
        self._autopar.compile((args, kwargs))
        self._autopar.compiled_as = None if kwargs.get("disable") else ITSELF

    # -- what it is

    @property
    def plan(self) -> Plan:
        """The plan that this module runs."""
        return self._autopar.plan

    @property
    def program(self) -> Program:
        """The rewritten model, on one mesh; ``print(pm.program.code)``."""
        return _on_one_mesh(self, "program").stage.program

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks, on one mesh."""
        return _on_one_mesh(self, "device_mesh").device_mesh

    @property
    def module(self) -> Any:
        """Itself: it has the model's own names, as what DistributedDataParallel wraps has."""
        return self

    @property
    def compare_every(self) -> int | None:
        """Every how many calls ranks compare what they were called with and their copies of parameters; 0 for never.

        None is the default: in the first three calls, then in the tenth, hundredth, thousandth and so on. Set it to the
        same number on all ranks.
        """
        return self._autopar.compared.every

    @compare_every.setter
    def compare_every(self, calls: int | None) -> None:
        _refuse_both(self, "compare_every")
        if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or calls < 0):
            raise RunError(f"compare_every is {calls!r}; give a number of calls, 0 for never, or None for the default")
        self._autopar.compared.every = calls

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are added up over ranks; None for that of the parameters. Set it on all ranks.

        Parameters get gradients of their own dtype in any case. Sums within the program, as of operators whose terms
        are on several ranks, stay in the model's dtype. What :func:`autopar.parallelize` got as ``gradient_dtype``
        is in the plan's price; what is set here afterwards is not.
        """
        return self._autopar.gradient_dtype

    @gradient_dtype.setter
    def gradient_dtype(self, dtype: torch.dtype | None) -> None:
        _refuse_both(self, "gradient_dtype")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise RunError(f"gradient_dtype is {dtype!r}; give a floating point dtype, such as torch.float32, or None")
        self._autopar.gradient_dtype = dtype

    # -- as other modules

    def __getattr__(self, name: str) -> Any:
        """Find an attribute as the model does, or say why there is none."""
        if (instead := _WRAPPERS.get(name)) is not None and not hasattr(self._autopar.kind, name):
            raise AttributeError(f"a parallel module has no '{name}', which is DistributedDataParallel's: {instead}")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: PyTree) -> None:
        own = inspect.getattr_static(ParallelModule, name, None)
        if isinstance(own, property) and own.fset is None:
            kind = self._autopar.kind.__name__
            has = name in vars(self)
            raise RunError(
                f"{name} of a parallel module cannot be set, for it is what autopar tells of it: call yours otherwise"
                + (f"; the {kind}'s, which forward reads, is set by vars(model)['{name}']" if has else "")
            )
        super().__setattr__(name, value)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context as DistributedDataParallel has for adding up gradients; it does nothing.

        They add up without it, too: every backward reduces what it adds, and ``train_step`` reduces once for all its
        microbatches.
        """
        return contextlib.nullcontext()

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters.

        On a rank of a pipeline whose stages have none there is one without elements and without a name, because
        optimizers refuse an empty list.
        """
        params = list(super().parameters(recurse))
        yield from params or ([] if self._autopar.leads is None else [_in_stages(self, "parameters").no_parameter])

    def named_modules(self, *args: PyTree, **kwargs: PyTree) -> Iterator[tuple[str, torch.nn.Module]]:  # type: ignore[override]
        """Yield the submodules by name, as the model does.

        Raises:
            RunError: ``torch.export`` or ``torch.fx.symbolic_trace`` asks, which begin so.
        """
        if torch.compiler.is_exporting() or fx_traces():
            what = "torch.export" if torch.compiler.is_exporting() else "torch.fx.symbolic_trace"
            raise RunError(
                f"{what} of a parallel module: it computes with this rank's shards and collectives; give it a copy of "
                "the model, made before parallelize, with the weights that autopar.full_state_dict(model) gives"
            )
        return super().named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Any:
        """Call ``fn`` with each submodule, on all ranks.

        Raises:
            RunError: it is a pipeline, each rank of which has the tensors of its stages alone.
        """
        if self._autopar.leads is not None:
            raise RunError(
                "apply() of a pipeline would meet the tensors of this rank's stages alone, and random numbers would "
                "be others than on one device; apply it to the model before parallelize, or pass init= for a model on "
                "the meta device"
            )
        return super().apply(fn)

    def __prepare_scriptable__(self) -> Any:
        """Refuse ``torch.jit.script``."""
        raise RunError(
            "torch.jit.script of a parallel module: it computes with this rank's shards and collectives; script a copy "
            "of the model, on one rank, with the weights that autopar.full_state_dict(pm) gives"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: a rank has its part only, and process groups are no values."""
        raise RunError(
            "a parallel module cannot be pickled or saved as a whole: save pm.state_dict() with "
            "torch.distributed.checkpoint, or autopar.full_state_dict(pm), which has the model's names and whole "
            "tensors"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return another one, with the values that this one has now, on the same ranks; every rank copies."""
        return copied(self._autopar, memo, parallel)

    # -- its state

    def get_extra_state(self) -> torch.Tensor:
        """Return how far random operators have drawn: the state of torch's generator, uint8 [bytes]."""
        return self._autopar.seeds.state()

    def set_extra_state(self, state: Any) -> None:
        """Let random operators continue from a state (:meth:`~autopar.runtime.stages.seeds.Seeds.go_on`)."""
        if isinstance(state, torch.Tensor):  # and nothing that stands for it
            self._autopar.seeds.go_on(state)

    def state_dict(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return the model's state dict.

        Of a program with random operators it also has how far these have drawn (``_extra_state``), so that a resumed
        run draws what an uninterrupted one would. A rank that was seeded otherwise than the first one, by which all
        draw, does not have it. ``full_state_dict`` has only what the model has.
        """
        self._autopar.check_at_rest("state_dict()")
        state = super().state_dict(*args, **kwargs)
        if not self._autopar.draws() or not self._autopar.seeds.alike:
            prefix: str = kwargs.get("prefix") or (args[1] if len(args) > 1 else "")
            state.pop(prefix + EXTRA, None)
        for name, value in state.items():
            if isinstance(value, DTensor) and not isinstance(value, torch.nn.Parameter):
                note_state(value, name, self._autopar.leads is not None)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict; a whole tensor, or a DTensor in another placement, is placed as what it replaces.

        Raises:
            RunError: with ``assign``, a tensor of another dtype: the program was made for the one that there is.
        """
        self._autopar.check_at_rest("load_state_dict()")
        if not isinstance(state_dict, Mapping):
            raise RunError(f"load_state_dict: expected a dict of tensors by name, got {type(state_dict).__name__}")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        state_dict.setdefault(prefix + EXTRA, self.get_extra_state())  # of a model's own state dict
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
        """Return whole parameters and buffers by the model's names, on rank 0, as :func:`autopar.full_state_dict`.

        Args:
            all_ranks: give it to every rank.
        """
        return full_state_dict(self, all_ranks=all_ranks)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | None, *, strict: bool = True) -> None:
        """Load a state dict of the model on one device, as :func:`autopar.load_full_state_dict` does."""
        load_full_state_dict(self, state, strict=strict)

    # -- rows of ranks

    def sampler(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> RowSampler:
        """Draw the rows that this rank loads: its own with ``batch="local"``, else all, the same on every rank.

        Call ``set_epoch`` before each epoch, as of any ``DistributedSampler``, which this is: where rows do not divide
        among the ranks, the last ones are filled up with the first, unless ``drop_last``. Its position in the epoch is
        in the checkpoints of this module (:class:`autopar.Checkpoint`); go on with ``range(sampler.epoch, epochs)``.
        """
        return sampler_of(self._autopar.local_batch, self._autopar.samplers, dataset, shuffle, drop_last, seed)

    def shard(self, loader: DataLoader[Any], seed: int = 0) -> DataLoader[Any]:
        """Return a loader of whole batches as one that gives what this rank is called with.

        Its ``sampler`` is :meth:`sampler`'s.

        Raises:
            MeshError: its batches do not divide among the ranks.
            RunError: it draws rows in a way of its own.
        """
        return sharded(self._autopar.local_batch, self._autopar.samplers, loader, seed)

    # -- pipelines

    def drain(self) -> None:
        """Finish the backwards and updates that are in flight; every rank calls it.

        Only pipelines with schedule ``pipedream`` or ``pipedream-2bw`` have any between steps: there call it before
        evaluating, saving and loading, and at the end of training. The next ``train_step`` fills the pipeline anew, and
        the weights of then are those that its first microbatches are computed with. Elsewhere it does nothing.

        Raises:
            RunError: a step before has broken off.
        """
        self._autopar.drain()

    def record(self, on: bool = True) -> list[tuple[str, str, float, float]]:
        """Start to record what the next steps of a pipeline do on this rank, or stop.

        Returns:
            A list that fills with ``(action, kind, start, end)`` in seconds of ``time.perf_counter``. On an accelerator
            these are the times of the launches.
        """
        return _in_stages(self, "record").record(on)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients, in a pipeline those of all stages, so that their norm is at most ``max_norm``.

        Every rank must call it. A parameter that several stages hold counts once.

        Returns:
            The norm before, a tensor of shape [].
        """
        if self._autopar.leads is not None:
            return _in_stages(self, "clip_grad_norm_").clip_grad_norm_(max_norm, norm_type)
        return whole_of(torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type))


def parallel(run: ParallelRun) -> Any:
    """Turn the user's module into a parallel one, and return it."""
    pm = derive(run)
    run.user.free(run.device)
    return pm


def derive(run: ParallelRun) -> Any:
    """Give the user's module the class of a parallel one, and return it; ``run.user.restore()`` undoes that."""
    kind = type(run.module)
    own = {*dir(ParallelModule)} - {*dir(torch.nn.Module()), "_autopar"}
    both = sorted(own & {*dir(kind), *vars(run.module), *run.module._modules, *run.user.params, *run.user.buffers})
    both = [name for name in both if not name.startswith("_")]
    if kind.compile is not torch.nn.Module.compile or "compile" in {*vars(run.module), *run.module._modules}:
        both = sorted([*both, "compile"])
    kept = [name for name in both if name in vars(run.module) and callable(getattr(ParallelModule, name))]
    run.user.derive(
        lambda path, kind: PlaceOfPart(run, path, kind) if path else run,
        (ParallelModule, _names_of_whole),
        (Part, names_of_part),
    )
    if both and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(
            f"{kind.__name__} and the parallel module both have attributes called {', '.join(both)}: of the parallel "
            "module they are its own. The program reads the model's; its tensors and submodules of these names are in "
            "named_parameters(), named_buffers() and named_modules(); or rename them"
            + (
                f"\n  {', '.join(kept)}, which the object itself has, stay the model's: the other one is called as "
                f"autopar.ParallelModule.{kept[0]}(model, ...)"
                if kept
                else ""
            ),
            stacklevel=3,
        )
    return run.module


def _names_of_whole(kind: type) -> dict[str, Any]:
    """Return what the class has in addition to the model's: methods that run on whole values, and its signature."""
    own = [name for name in methods_of(kind) if not hasattr(ParallelModule, name)]
    return {
        **{name: method_of(name, getattr(kind, name)) for name in own},
        "forward": with_signature(ParallelModule.forward, kind),
        "__call__": torch.nn.Module.__call__,  # which the user's own may not do once more
    }


def _check_transformed(pm: ParallelModule, call: PyTree) -> None:
    """Refuse what torch.func hands over: parameters on any number of ranks, inputs on several or of compiled programs.

    Raises:
        RunError: it says what to do.
    """
    given = [tensor for tensor in pytree.tree_leaves(call) if isinstance(tensor, torch.Tensor)]
    takes_none = pm._autopar.world is not None or any(x.compile_args is not None for x in pm._autopar.stages.values())
    if any(map(is_transformed, pm.parameters())) or (takes_none and any(map(is_transformed, given))):
        raise RunError(
            "a parallel module was called within torch.func (vmap, grad, jvp, jacrev), which its program cannot be: "
            "its parameters and collectives are this rank's, and compile() fixes its operators. Call it on the whole "
            "batch and backward() or torch.autograd.grad, use torch.func in the model's forward or in loss_fn=, or "
            "with a copy of the model made before parallelize"
        )


def _on_one_mesh(pm: ParallelModule, name: str) -> MeshRun:
    if not isinstance(pm._autopar, MeshRun):
        raise RunError(f"{name} of a pipeline: each of its stages has its own; see pm.plan.stages")
    return pm._autopar


def _refuse_both(pm: ParallelModule, name: str) -> None:
    """Refuse to set an attribute that the model has, too.

    Raises:
        RunError: it says how to set the model's.
    """
    if name in vars(pm):
        raise RunError(
            f"{name} was set, which is of the parallel module and of the {pm._autopar.kind.__name__}, and forward "
            f"reads the model's: set that by vars(model)['{name}'] = ..., or rename it"
        )


def _in_stages(pm: ParallelModule, name: str) -> PipelineRun:
    if not isinstance(pm._autopar, PipelineRun):
        raise RunError(f"{name}() is of pipelines, and this module runs on one mesh")
    return pm._autopar
