"""A step's gradients on their way: from the leaves that the program reads to the parameters that are stored.

A backward adds gradients to the leaves. What is pending is reduced as soon as a leaf has all of it, or, where gradients
of several microbatches add up first, in the last one. Reduced gradients wait as sums until the step has come to its
end (:meth:`Gradients.give`): a step that breaks half-way leaves the parameters' gradients as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from autopar.runtime.prefetch import Schedule
from autopar.runtime.reduce import Reducer, bucket_bytes
from autopar.runtime.state import Held


class Gradients:
    """Those of one module.

    Attributes:
        defer: more microbatches of this step follow, so what need not be reduced yet is not.
        accumulating: earlier microbatches of this step have left gradients.
    """

    def __init__(self, helds: Mapping[str, Held], schedule: Schedule) -> None:
        self.helds = list(helds.values())
        self.schedule = schedule
        self.defer = self.accumulating = False
        reduced = [held for held in self.helds if held.adjoint]
        self.plain = [held for held in self.helds if not held.adjoint]
        self.reducer = Reducer(bucket_bytes(sum(prod(held.used_shape) * held.param.element_size() for held in reduced)))

    def listen(self, held: Held) -> None:
        """Hear when a leaf has its gradient; call it for every new leaf."""
        if not (held.adjoint or held.per_use):
            return

        def ready(leaf: torch.Tensor) -> None:
            self._ready(held, leaf)

        wanted = held.leaf.requires_grad
        held.leaf.requires_grad_()  # a frozen parameter may be thawed later
        held.leaf.register_post_accumulate_grad_hook(ready)
        held.leaf.requires_grad_(wanted)

    def _ready(self, held: Held, leaf: torch.Tensor) -> None:
        """A used leaf has its whole gradient of this backward."""
        if held.per_use:
            assert held.unit is not None
            self.schedule.done(held)
        if (self.defer and not held.per_use) or not held.adjoint:
            return
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        self.reducer.add(held, grad)

    @contextlib.contextmanager
    def reducing(self, *, last: bool, by_hand: bool = False) -> Iterator[None]:
        """Around a backward of one microbatch: gradients add up, and the last one is followed by their reduction.

        ``by_hand`` says that gradients are set without autograd's hooks.
        """
        before, self.defer = self.defer, not last
        try:
            yield
            with torch.no_grad():
                if by_hand:
                    for held in self.helds:
                        if held.adjoint and held.leaf.grad is not None and (last or held.per_use):
                            self._ready(held, held.leaf)
                self.reducer.finish()
                self.schedule.end()
                for held in self.plain if last else ():
                    leaf = held.leaf
                    grad = leaf.grad
                    if grad is not None:
                        leaf.grad = None
                        held.sum = grad if held.sum is None else held.sum.add_(grad)
        finally:
            self.defer = before

    def stored(self) -> list[tuple[Held, torch.nn.Parameter]]:
        """The parameters with what is stored of them now."""
        return [(held, held.owner._parameters[held.key]) for held in self.helds]  # type: ignore[misc]

    @staticmethod
    def handed(
        helds: Sequence[Held], params: Sequence[torch.nn.Parameter], *, by_autograd: bool
    ) -> list[torch.Tensor | None]:
        """Hand over the sums of the step: the gradients that autograd is to add, None for those that have been added.

        Args:
            params: what was stored in the forward.
            by_autograd: autograd is to add all of them; else only those of parameters with hooks.
        """
        found: list[torch.Tensor | None] = [None] * len(helds)
        for i, (held, param) in enumerate(zip(helds, params, strict=True)):
            grad, held.sum = held.sum, None
            if by_autograd or param._backward_hooks or param._post_accumulate_grad_hooks:
                if grad is not None:
                    found[i] = held.placed(grad)
                elif not by_autograd:
                    assert held.local is not None  # autograd calls hooks in any case, and they expect a tensor
                    found[i] = held.placed(torch.zeros_like(held.local))
            elif grad is not None:
                held.give(grad)
        return found

    def give(self) -> None:
        """Add the sums to the parameters' gradients; hooks of parameters get the sum, as if autograd had made it."""
        hooked: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        for held in self.helds:
            grad = held.taken()
            if grad is not None and has_hooks(held.param):
                hooked.append(held.param)
                grads.append(held.placed(grad))
            elif grad is not None:
                held.give(grad)
        if hooked:
            torch.autograd.backward(hooked, grads)

    def forget(self) -> None:
        """A step begins: no gradient of an earlier one counts."""
        self.reducer.drop()
        for held in self.helds:
            held.leaf.grad = None
            held.sum = None

    def drop(self) -> None:
        """A forward or backward broke: forget it, with the gathers that were under way."""
        self.forget()
        self.schedule.drop()


def has_hooks(param: torch.Tensor) -> bool:
    """Whether someone wants to see, or change, a parameter's gradient before it is accumulated, or after."""
    return bool(param._backward_hooks) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


__all__ = ["Gradients", "has_hooks"]
