"""A step's gradients on their way: from the leaves that the program reads to the parameters that are stored.

A backward adds gradients to the leaves. What is pending is reduced as soon as a leaf has all of it, or, where gradients
of several microbatches add up first, in the last one. Reduced gradients wait as sums until the step has come to its
end (:meth:`Gradients.give`): a step that breaks half-way leaves the parameters' gradients as they were.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from autopar.errors import RunError
from autopar.runtime.gradients.gradient_reduction import Reducer, bucket_bytes
from autopar.runtime.gradients.taking_part import InStep, Took
from autopar.runtime.parameters.prefetch import GatherOrder
from autopar.runtime.parameters.redistribution import dense
from autopar.runtime.parameters.state import HeldParam, give
from autopar.torch_private import autograd_engine, current_backward
from autopar.words.trees import Context


class TrainedParams:
    """Parameters that want gradients, as one node of autograd's graph that all forwards share.

    A node for each forward with an edge to every parameter would take as long as a small model's backward. What is left
    for autograd to add to the parameters waits here until the node's turn comes, after all forwards that it is part of.

    Attributes:
        token: a tensor without elements that is made from all parameters, as autograd sees it; None without any.
    """

    def __init__(self, pairs: Sequence[tuple[HeldParam, torch.nn.Parameter]]) -> None:
        self.pairs = list(pairs)
        self.waiting: list[torch.Tensor | None] = [None] * len(self.pairs)
        self.task = -1
        self.silent: list[tuple[dict[int, Any], dict[int, Any]]] = []
        self.token: torch.Tensor | None = None
        if self.pairs:
            with torch.enable_grad():
                self.token = _Parameters.apply(self, *(param for _, param in self.pairs))

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Let autograd add `grads`, one for each parameter, in the running backward."""
        task = current_backward()
        before = self.waiting if task == self.task else [None] * len(grads)  # what an interrupted one left is void
        self.task = task
        self.waiting = [
            grad if sum_ is None else sum_ if grad is None else sum_ + grad
            for grad, sum_ in zip(grads, before, strict=True)
        ]

    def take(self) -> list[torch.Tensor | None]:
        """Take the pending gradients, which are then gone."""
        grads, self.waiting = self.waiting, [None] * len(self.pairs)
        return grads if self.task == current_backward() else self.waiting

    def silence(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Keep autograd from calling hooks of `params` until the backward ends.

        They have no gradient, and eager mode would not reach them; here autograd reaches all parameters.
        """
        self.speak()
        hooks = [(h, dict(h)) for p in params for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h]
        if hooks:
            self.silent = hooks
            for called, _ in hooks:
                called.clear()
            autograd_engine.queue_callback(self.speak)

    def speak(self) -> None:
        """Call hooks again, also after a backward that broke."""
        hooks, self.silent = self.silent, []
        for called, those in hooks:
            called.update({**those, **called})


class _Parameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, trained: TrainedParams, *_: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.trained = trained
        return torch.empty(0)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Context, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        trained: TrainedParams = ctx.trained
        grads = trained.take()
        trained.silence([param for (_, param), g in zip(trained.pairs, grads, strict=True) if g is None])
        return (None, *grads)


class Gradients:
    """The gradients of one module.

    Attributes:
        clean: nothing is left of an earlier backward.
        defer: more microbatches of this step follow, so what need not be reduced yet is not.
        accumulating: earlier microbatches of this step have left gradients.
        took: what took part in the last forward; None if all parameters always do.
        in_step: what took part in the forwards whose gradients are added up.
    """

    def __init__(
        self, held_params: Mapping[str, HeldParam], schedule: GatherOrder,
        dtype: Callable[[], torch.dtype | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Initialize the object.

        Args:
            dtype: gives the dtype in which gradients are added up over ranks; None for their own.
        """
        self.held_params = list(held_params.values())
        self.schedule = schedule
        self.defer = self.accumulating = False
        reduced = [held_param for held_param in self.held_params if held_param.adjoint]
        for held_param in self.held_params:
            held_param.changed = self._changed
        self.clean = True
        self.took: Took | None = None
        self.in_step = InStep()
        self._trained: TrainedParams | None = None
        n_bytes = sum(prod(held_param.used_shape) * held_param.param.element_size() for held_param in reduced)
        self.reducer = Reducer(bucket_bytes(n_bytes), dtype)

    def listen(self, held_param: HeldParam) -> None:
        """Hear when a leaf has its gradient; call it for every new leaf."""
        if not waits_for_more(held_param):
            return

        # a tensor's hooks are out of reach for the collector of garbage: what they held would stay for ever
        gradients, held = weakref.ref(self), weakref.ref(held_param)

        def ready(leaf: torch.Tensor) -> None:
            there, of = gradients(), held()
            if there is None or of is None:
                raise RunError(
                    "the parallel module was freed before the backward of its loss, which has nowhere to put its "
                    "gradients; keep the module until then"
                )
            if leaf.grad is not None or of.casts:  # it was not handed over while the backward went on
                there._ready(of, leaf)

        wanted = held_param.leaf.requires_grad
        held_param.leaf.requires_grad_()  # a frozen parameter may be thawed later
        held_param.leaf.register_post_accumulate_grad_hook(ready)
        held_param.leaf.requires_grad_(wanted)

    def take(self, held_param: HeldParam, grad: torch.Tensor) -> None:
        """Accept a gradient from a program that hands it over while its backward goes on."""
        leaf = held_param.leaf
        leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)
        self._ready(held_param, leaf)

    def _ready(self, held_param: HeldParam, leaf: torch.Tensor) -> None:
        """Accept the whole gradient of a used leaf in this backward."""
        self.schedule.stream.check("the gradient of a parameter")
        if held_param.per_use:
            assert held_param.unit is not None
            self.schedule.done(held_param)
        if held_param.casts:
            self._ready_wide(held_param, leaf)
            return
        if (self.defer and not held_param.per_use) or not (held_param.adjoint or held_param.carrier):
            return
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if held_param.adjoint:
            self.reducer.add(held_param, grad)
        else:
            held_param.add(dense(grad).to(held_param.param.dtype))

    def _ready_wide(self, held_param: HeldParam, leaf: torch.Tensor) -> None:
        """Accept the gradient of a parameter that is cast; sums over microbatches and ranks use a wider format."""
        grad, leaf.grad = leaf.grad, None
        if grad is not None:
            grad = grad.to(self.reducer.dtype() or held_param.param.dtype)
            held_param.wide = grad if held_param.wide is None else held_param.wide.add_(grad)
        if held_param.wide is None or (
            self.defer and not (held_param.per_use and (held_param.adjoint or held_param.carrier))
        ):
            return
        grad, held_param.wide = held_param.wide, None
        if held_param.adjoint:
            self.reducer.add(held_param, grad)
        else:
            held_param.add(grad.to(held_param.param.dtype))

    @contextlib.contextmanager
    def reducing(self, *, last: bool, by_hand: bool = False) -> Iterator[None]:
        """Enclose a backward of one microbatch: gradients add up, and the last one is followed by their reduction.

        ``by_hand`` says that gradients are set without autograd's hooks.
        """
        before, self.defer, self.clean = self.defer, not last, False
        try:
            yield
            with torch.no_grad():
                for held_param in self.held_params:  # left by hand, or by earlier microbatches where this one has none
                    has_grad = held_param.leaf.grad is not None
                    if held_param.casts and (has_grad or held_param.wide is not None):
                        self._ready_wide(held_param, held_param.leaf)
                    elif (
                        (held_param.adjoint or held_param.carrier) and has_grad
                        and (last or (by_hand and held_param.per_use))
                    ):  # fmt: skip
                        self._ready(held_param, held_param.leaf)
                self.reducer.finish()
                self.schedule.end()
        finally:
            self.defer = before

    def trained(self) -> TrainedParams:
        """Return the parameters that want gradients now, as autograd is to know them."""
        if self._trained is None:
            stored = [(held_param, held_param.param) for held_param in self.held_params]
            self._trained = TrainedParams([(held_param, param) for held_param, param in stored if param.requires_grad])
        return self._trained

    def _changed(self) -> None:
        self._trained = None

    def handed(self, trained: TrainedParams, *, by_autograd: bool) -> bool:
        """Hand over the sums of the step, of the parameters that were there in the forward.

        Args:
            by_autograd: autograd is to add all of them; else only those of parameters with hooks.

        Returns:
            whether anything is left for autograd to add; ``trained`` has it.
        """
        left: list[torch.Tensor | None] | None = None
        idle = self.in_step.idle()
        for i, (held_param, param) in enumerate(trained.pairs):
            grad = held_param.taken()
            if held_param.name in idle:  # zeros, for what eager mode does not come to
                grad = None
            if by_autograd or param._backward_hooks or param._post_accumulate_grad_hooks:
                left = left or [None] * len(trained.pairs)
                if grad is not None:
                    left[i] = held_param.placed(grad)
            elif grad is not None:
                give(param, grad)
        self.clean = True
        if left is not None:
            trained.add(left)
        return left is not None

    def give(self) -> None:
        """Add the sums to the parameters' gradients; hooks of parameters get the sum, as if autograd had made it."""
        hooked: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        idle = self.in_step.idle()
        for held_param in self.held_params:
            grad = held_param.taken()
            if held_param.name in idle:
                continue
            if grad is not None and has_hooks(held_param.param):
                hooked.append(held_param.param)
                grads.append(held_param.placed(grad))
            elif grad is not None:
                give(held_param.param, grad)
        self.clean = True
        if hooked:
            torch.autograd.backward(hooked, grads)

    def forget(self) -> None:
        """Begin a step: gradients of earlier ones no longer count."""
        if self._trained is not None:
            self._trained.speak()
        self.in_step.forget()
        if self.clean:
            return
        self.clean = True
        self.reducer.drop()
        for held_param in self.held_params:
            held_param.leaf.grad = None
            held_param.drop_sum()

    def drop(self) -> None:
        """Forget a forward or backward that failed, with its pending gathers."""
        self.clean = False
        self.forget()
        self.schedule.drop()


def waits_for_more(held_param: HeldParam) -> bool:
    """Check whether a parameter's gradient is reduced, cast, sent to the host, or the end of the use of a copy."""
    adjoint = bool(held_param.adjoint)
    return adjoint or held_param.per_use or held_param.casts or held_param.carrier is not None


def has_hooks(param: torch.Tensor) -> bool:
    """Check whether a hook sees or changes a parameter's gradient before or after it is accumulated."""
    return bool(param._backward_hooks) or bool(getattr(param, "_post_accumulate_grad_hooks", None))
