"""A forward of the program as one node of the caller's autograd graph.

The program has an autograd graph of its own, from detached inputs and the used leaves to its outputs. The caller's
graph has one node in its place, with the caller's inputs before it, and the stored parameters, as one node that all
forwards share. When the gradients of all outputs that were used have come there, it runs the program's backward and
reduces: inputs that want gradients get theirs, and stored parameters get the reduced ones. So autograd knows the
parameters: ``autograd.grad`` of them, ``backward(inputs=...)`` and hooks do what they always do. In an ordinary
backward a parameter without hooks is given its gradient by hand, in a tenth of the time that it takes autograd to add
two DTensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import RunError
from autopar.runtime.gradients.step_gradients import Gradients
from autopar.runtime.gradients.taking_part import Took
from autopar.runtime.parameters.state import HeldParam, whole_of
from autopar.torch_private import autograd_engine, functorch_is_active, keeps_graph, reached
from autopar.words.trees import Context

_ENGINE: Any = autograd_engine
Run = Callable[[Mapping[str, torch.Tensor]], tuple[Any, ...]]
Around = Callable[[], contextlib.AbstractContextManager[None]]

TWICE = (
    "create_graph=True: the program of a parallel module has no backward of its backward, so gradient penalties and "
    "other second derivatives cannot go through it; compute them on the model before parallelize, or train it without"
)
AGAIN = (
    "a second backward through the same forward of a parallel module, whose intermediate values are freed; pass "
    "retain_graph=True to the first one, or add the losses up and call backward once"
)
CHANGED = (
    "parameter '{name}' was changed after the forward whose backward runs now (by an optimizer's step, say), and its "
    "gathered values are gone; call backward before the step, or the forward again after it"
)


class _Call:
    """One forward: its outputs with their graph, and what its backward is to fill."""

    def __init__(self, gradients: Gradients, run: Run, inputs: Mapping[str, torch.Tensor], around: Around) -> None:
        self.gradients, self.run, self.around = gradients, run, around
        self.wanting = [name for name, x in inputs.items() if x.requires_grad]
        self.trained = gradients.trained()
        self.hands = not gradients.defer  # in a microbatch that is not the last one parameters get nothing
        self.inputs = inputs
        self.leaves: list[torch.Tensor] = []
        self.roots: list[torch.Tensor | None] | None = None
        self.took: Took | None = None
        self.gathered: list[tuple[HeldParam, Any]] = []  # autograd itself knows when what is not gathered has changed

    def forward(self) -> tuple[Any, ...]:
        inner = {name: x.detach().requires_grad_(x.requires_grad) for name, x in self.inputs.items()}
        self.leaves = [inner[name] for name in self.wanting]
        self.inputs = {}
        with torch.enable_grad():
            outputs = self.run(inner)
        self.took = self.gradients.took
        self.roots = [x if isinstance(x, torch.Tensor) and x.requires_grad else None for x in outputs]
        if self.hands and self.gradients.schedule.units:
            held_params = [held_param for held_param, _ in self.trained.pairs]
            self.gathered = [(held_param, held_param.version) for held_param in held_params if not held_param.alias]
        return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in outputs)

    def backward(
        self, grads: Sequence[torch.Tensor | None], keep: bool, wanted: Sequence[HeldParam] | None
    ) -> tuple[list[torch.Tensor | None], bool]:
        """Return gradients of the inputs that want one, and whether autograd is to add gradients of stored parameters.

        Args:
            wanted: the parameters that gradients are asked of; None for an ordinary backward.
        """
        gradients, roots = self.gradients, self.roots
        if roots is None:
            raise RunError(AGAIN)
        for held_param, version in self.gathered:
            if held_param.version != version:
                raise RunError(CHANGED.format(name=held_param.name))
        if not gradients.accumulating:
            gradients.forget()
        gradients.in_step.add(self.took)
        given = [(root, g) for root, g in zip(roots, grads, strict=True) if root is not None and g is not None]
        used, arriving = [root for root, _ in given], [whole_of(g) for _, g in given]
        last = not gradients.defer
        inputs = None if wanted is None else [*self.leaves, *(held_param.leaf for held_param in wanted)]
        for leaf in self.leaves:
            leaf.grad = None
        try:
            with self.around():
                with gradients.reducing(last=last):
                    if given and (inputs is None or inputs):
                        _ENGINE.run_backward(  # torch.autograd.backward would check shapes again
                            tuple(used), tuple(arriving), keep, False, tuple(inputs or ()), allow_unreachable=True,
                            accumulate_grad=True,
                        )  # fmt: skip
                left = self.hands and gradients.handed(self.trained, by_autograd=wanted is not None)
        except BaseException:
            gradients.drop()
            raise
        if not keep:
            self.roots = None
        arrived = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return arrived, left


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, call: _Call, probe: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        outputs = call.forward()
        assert call.roots is not None
        ctx.mark_non_differentiable(
            *(x for x, root in zip(outputs, call.roots, strict=True) if root is None and isinstance(x, torch.Tensor))
        )
        return outputs

    @staticmethod
    @torch.compiler.disable  # where the caller compiles a function with the backward in it
    def backward(ctx: Context, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RunError(TWICE)
        call: _Call = ctx.call
        (probe, _), *before = ctx.next_functions
        wanted: list[HeldParam] | None = None
        if not reached(probe):  # autograd.grad, or backward(inputs=...)
            wanted = []
            for params, _ in before[len(call.wanting) :]:  # none, or the one node of all parameters
                come_to = [reached(node) for node, _ in params.next_functions]
                trained = [held_param for held_param, _ in call.trained.pairs]
                wanted = [held_param for held_param, comes in zip(trained, come_to, strict=True) if comes]
        keep = keeps_graph()
        inputs, left = call.backward(grads, keep, wanted)
        return (None, None, *inputs, *(torch.empty(0) if left else None for _ in before[len(call.wanting) :]))


_apply: Any = super(torch.autograd.Function, _Crossing).apply
"""Without what torch does for its function transforms: a look at every parameter in Python."""


def crossed(
    gradients: Gradients, probe: torch.Tensor, inputs: Mapping[str, torch.Tensor], run: Run,
    around: Around = contextlib.nullcontext,
) -> tuple[Any, ...]:  # fmt: skip
    """Call ``run(inputs)`` in the caller's autograd graph.

    Args:
        probe: an empty leaf that wants a gradient; only an ordinary backward comes to it.
        inputs: local inputs by name; ``run`` gets detached ones.
        run: gives a flat tuple of local outputs.
        around: a context in which a backward runs.
    """
    call = _Call(gradients, run, inputs, around)
    token = call.trained.token
    if not torch.is_grad_enabled() or not (call.wanting or token is not None):
        return run({name: x.detach() for name, x in inputs.items()})
    before = [inputs[name] for name in call.wanting] + ([token] if token is not None and call.hands else [])
    if functorch_is_active():  # it says what it cannot do
        return _Crossing.apply(call, probe, *before)  # type: ignore[no-any-return]
    return _apply(call, probe, *before)  # type: ignore[no-any-return]
