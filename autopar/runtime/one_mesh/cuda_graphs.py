"""A training step as a CUDA graph: its kernels and collectives are recorded once and launched at once from then on.

``step = autopar.GraphedStep(pm, *batch)``, then ``loss = step(*batch)`` in the place of ``pm.train_step(*batch)``. A
replay runs no Python, so whatever may be another in the next step has to be in memory that stays where it is: the batch
and the seed of random operators are copied there before each replay, gradients are left there. The optimizer's step,
clipping and the learning rate stay outside, as they are.

Refused are programs in which the host reads from the device, or runs the model's own Python, and pipelines, whose ranks
wait for messages between kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autopar.errors import RunError
from autopar.lower.host_copies import BUFFERS
from autopar.lower.steps.nodes import calls_outside
from autopar.plans.memory_decisions import OFFLOAD
from autopar.rules.families.sharded_random import seed_at
from autopar.runtime.batches.module_calls import ModuleCall
from autopar.runtime.gradients.step_gradients import has_hooks
from autopar.runtime.one_mesh.mesh_step import MeshRun
from autopar.runtime.stages.compiled import records_graphs
from autopar.runtime.stages.seeds import PlaceInBatch
from autopar.runtime.variants.run import FORWARD_ALONE, ParallelRun, run_of
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

WARM_STEPS = 3
"""Steps before the recording, in which kernels are chosen and compiled, and communicators made."""


class StepRecorder(Protocol):
    """Recorder of what a function launches, which can launch it again."""

    def record(self, run: Callable[[], Any], warm: int) -> Any:
        """Call `run` ``warm`` times, record one more call, and return its result."""

    def replay(self) -> None:
        """Launch all recorded kernels again, on the same memory."""


class CudaRecorder:
    """A CUDA graph. Its memory is a pool of its own, in which tensors of one replay are those of the next."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.graph = device, torch.cuda.CUDAGraph()

    def record(self, run: Callable[[], Any], warm: int) -> Any:
        """Record on a stream of its own, as recordings must be; it and the caller's wait for each other."""
        stream, callers = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(callers)
        with torch.cuda.stream(stream):
            for _ in range(warm):
                run()
        callers.wait_stream(stream)
        # The recording waits for the device first. NCCL's watchdog asks for events in a thread of its own, which would
        # end one that is not thread_local.
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            return run()

    def replay(self) -> None:
        """Run the recorded step."""
        self.graph.replay()


class GraphedStep:
    """One step of a module on one mesh: forward and backward of a batch of fixed shapes, with all collectives.

    It is recorded when it is made, by every rank; buffers, gradients and torch's generator are then what they were
    before. Every rank replays it alike.
    """

    def __init__(
        self, pm: torch.nn.Module, *args: PyTree, recorder: StepRecorder | None = None, **kwargs: PyTree
    ) -> None:
        """Initialize the object.

        Args:
            pm: in training mode, on GPUs.
            args, kwargs: a batch, as ``pm.train_step`` takes it.
            recorder: another one than CUDA's.

        Raises:
            RunError: the step cannot be recorded; it says why.
        """
        self.pm, self.run = pm, recordable(run_of(pm), ModuleCall(args, kwargs), recorder)
        self.stage = self.run.stage
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.inputs = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        self.params: list[torch.nn.Parameter] = list(pm.parameters())
        self.seeds: list[torch.Tensor] = []
        self.drawn = 0
        self.recorder = recorder or CudaRecorder(self.stage.device)
        self.loss, self.gradients = self._record()
        self.addresses = self._addresses()

    def _record(self) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        calls = self.run.calls
        compared, before = self.run.compared, [param.grad for param in self.params]
        every, compared.every, compared.soon = compared.every, 0, False
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.pm.buffers()]
        args, kwargs = pytree.tree_unflatten(self.inputs, self.spec)

        def run() -> torch.Tensor:
            for param in self.params:
                param.grad = None
            self.drawn = 0
            loss: torch.Tensor = self.run.train_step(args, kwargs)
            return loss

        self.run.seeds.recorded = self._seed
        try:
            with BUFFERS.noted() as self.host_buffers:  # replays copy to them and from them
                loss = self.recorder.record(run, WARM_STEPS)
            gradients = [param.grad for param in self.params]
        finally:
            self.run.seeds.recorded, compared.every = None, every
            self.run.calls = calls
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for param, grad in zip(self.params, before, strict=True):
                param.grad = grad
        return loss, gradients

    def _seed(self, place: PlaceInBatch | None) -> torch.Tensor:
        """Return the tensor from which the program of one forward reads its seed, in every replay.

        It is made before the recording, which would write to it.

        Args:
            place: the place of the rows of a microbatch.
        """
        if self.drawn == len(self.seeds):
            zero = torch.zeros((), dtype=torch.int64, device=self.stage.device)
            self.seeds.append(zero if place is None else seed_at(zero, *place))
        self.drawn += 1
        return self.seeds[self.drawn - 1]

    def _addresses(self) -> list[tuple[Any, ...]]:
        """List the addresses of stored tensors, which the recording reads and writes."""
        stored = [*self.pm.parameters(), *self.pm.buffers()]
        locals_ = [getattr(x, "_local_tensor", x) for x in stored]
        return [(x.data_ptr(), x.shape, whole.requires_grad) for x, whole in zip(locals_, stored, strict=True)]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> torch.Tensor:
        """Run forward and backward of another batch of the same shapes.

        Returns:
            the loss, as ``pm.train_step`` does. Gradients are added to those that are there.

        Raises:
            RunError: the batch has other shapes or numbers, or the module is not what it was when the step was
                recorded.
        """
        self._check(args, kwargs)
        with torch.no_grad():
            for there, now in zip(self.inputs, pytree.tree_leaves((args, kwargs)), strict=True):
                if isinstance(there, torch.Tensor):
                    there.copy_(now, non_blocking=True)
            if self.seeds:
                of_step = self.run.seeds.take()
                for seed in self.seeds:
                    seed.reshape(-1)[:1].copy_(of_step)
            kept = [self._kept(param, grad) for param, grad in zip(self.params, self.gradients, strict=True)]
            self.recorder.replay()
            self.run.calls += max(1, len(self.seeds))
            for param, grad, before in zip(self.params, self.gradients, kept, strict=True):
                if before is None:
                    param.grad = grad
                elif grad is not None:
                    param.grad = before.add_(grad)
            return self.loss.clone()

    @staticmethod
    def _kept(param: torch.nn.Parameter, recorded: torch.Tensor | None) -> torch.Tensor | None:
        """Return the existing gradient; that of the last replay as a copy, since this one overwrites it."""
        before = param.grad
        return before.clone() if before is not None and before is recorded else before

    def _check(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec or not all(map(_alike, self.inputs, leaves)):
            raise RunError(
                f"a recorded step was called with {_shown(leaves)} and was recorded with {_shown(self.inputs)}; call "
                "pm.train_step for other batches, or record a step for each"
            )
        self.run.check_values(ModuleCall(args, kwargs))
        if self.run.stage is not self.stage or not self.pm.training or self._addresses() != self.addresses:
            raise RunError(
                "the module is not what it was when the step was recorded: it runs another program, is in eval mode, "
                "or a parameter or buffer was replaced, moved or frozen; record the step again"
            )


def recordable(run: ParallelRun, call: ModuleCall, recorder: StepRecorder | None) -> MeshRun:
    """Return a run whose step a replay gets right, with the program of a call.

    Raises:
        RunError: it says why.
    """
    if not isinstance(run, MeshRun):
        raise RunError(
            "a step of a pipeline is not recorded as a CUDA graph: its ranks wait for messages between kernels. Record "
            "a module on one mesh, or compile the stages with pm.compile()"
        )
    if run.inference:
        raise RunError(f"train_step: {FORWARD_ALONE}")
    stage = run.stage
    if stage.plan.memory.get(OFFLOAD) and stage.compile_args is None:
        raise RunError(
            "a step whose plan moves results to the memory of the host (offload) is not recorded as a CUDA graph as it "
            "is: their copies begin and end in hooks of the backward. Call pm.compile() first, or "
            "pm.compile(backend='eager') for a step without a compiler: there they are operators like others"
        )
    if run.seeds.mode == "torch" and stage.draws:
        raise RunError(
            "a step that draws as torch does in eager mode (random='torch') is not recorded, since the host follows "
            "torch's generator through each call: parallelize with random='sharded', the default"
        )
    if recorder is None and stage.device.type != "cuda":
        raise RunError(f"a step is recorded as a CUDA graph on GPUs; this module is on {stage.device}")
    run.check_values(call)
    stage = run.stage
    reasons = calls_outside(stage.program, recorded=True)
    if stage.ways.flags:
        reasons.append("a branch on data, which the host checks in every call")
    if stage.parts.elements:
        reasons.append("experts without gradients where they have no rows, which the host looks at in every step")
    if stage.compile_args is not None and records_graphs(stage.compile_args):
        reasons.append('compile(mode="reduce-overhead"), which records CUDA graphs itself')
    hooked = [name for name, param in run.named_parameters() if has_hooks(param)]
    if hooked:
        reasons.append(f"hooks of parameters ({', '.join(hooked[:3])})")
    there = [held.name for held in stage.held_params.values() if held.carrier is not None]
    if there:
        reasons.append(f"parameters in the memory of the host ({', '.join(there[:3])}), where the optimizer steps")
    if reasons:
        raise RunError(
            f"the step cannot be recorded as a CUDA graph, for a replay runs no Python: {'; '.join(reasons[:3])}. Call "
            "pm.train_step"
        )
    return run


def _alike(recorded: Any, now: Any) -> bool:
    if isinstance(recorded, torch.Tensor):
        alike = isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (recorded.shape, recorded.dtype)
        return alike and type(now) is type(recorded)
    return bool(recorded is now or recorded == now)


def _shown(leaves: Sequence[PyTree]) -> str:
    return ", ".join(
        f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
        for x in leaves
    )
