"""A model that is parallelized when it is first called in training: that call is the example of a batch.

Training loops of libraries make the optimizer and load checkpoints before there is a batch. Until the first call in
training everything is done to the model itself; then its parameters, and the state of the optimizers that hold them, go
to the parallel module.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.api import parallelize
from autopar.errors import AutoparError
from autopar.integrations.one_process import world_size
from autopar.runtime.as_module.model_class import AsModel, show_as
from autopar.runtime.optimizers.user_optimizers import Move

Optimizers = Callable[[], Sequence[torch.optim.Optimizer]]


_NO_STAGES = (
    "the plan has several stages, which train by train_step, and the library's loop calls the model: pass "
    "parallel={'stages': 1}, or write the loop"
)


class ParallelOnFirstCall(AsModel):
    """Stands for a model, with its names, and from its first call in training on for its parallel module.

    Calls in eval mode or without gradients that come earlier run the model itself, whole, on every rank.

    Args:
        model: with its values.
        optimizers: gives those that may hold the model's parameters.
        options: of :func:`autopar.parallelize`; ``mesh`` is the number of ranks unless it is given.
        around: what each call runs under, such as autocast.

    Raises:
        AutoparError: the options ask for a pipeline.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Optimizers = lambda: (),
        options: Mapping[str, Any] | None = None,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self._optimizers, self._options, self._around = optimizers, dict(options or {}), around
        if isinstance(stages := self._options.get("stages"), int) and stages > 1:
            raise AutoparError(_NO_STAGES)
        self.now = model
        show_as(self, type(model))
        self.is_parallel = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_parallel and self.now.training and torch.is_grad_enabled():
            self._spread(args, kwargs)
        with self._around():
            return self.now(*args, **kwargs)

    def _spread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model, options = self.now, dict(self._options)
        mesh = options.pop("mesh", world_size())
        mine = {id(param) for param in model.parameters()}
        holding = [
            optimizer
            for optimizer in self._optimizers()
            if any(id(param) in mine for group in optimizer.param_groups for param in group["params"])
        ]
        moves = [Move(optimizer, model) for optimizer in holding]
        for move in moves:
            move.check()
        _without_cache(model)
        _without_input_gradients(model)
        inputs = (args, {"example_kwargs": kwargs}) if args else (kwargs, {})
        if holding:
            options["optimizer"] = holding[0]
        pm = parallelize(model, mesh, inputs[0], **inputs[1], **options)
        if pm._autopar.leads is not None:
            raise AutoparError(_NO_STAGES)
        for move in moves[1:]:
            move.to(pm._autopar, pm._autopar.ranks()[0])
        self.now, self.is_parallel = pm, True

    # -- as the model

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy, such as an average of the weights begins with, is one of the model as it is now."""
        return copy.deepcopy(self.now, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.now.__reduce_ex__(protocol)

    def train(self, mode: bool = True) -> ParallelOnFirstCall:
        self.training = mode
        self.now.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.now.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.now.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.now.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.now.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:  # type: ignore[override]
        return self.now.named_modules(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.now.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "now" or name.startswith("_"):
                raise
            return getattr(self.now, name)


def _without_cache(model: torch.nn.Module) -> None:
    """Have models of transformers not return keys and values for later tokens, which training has no use for."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


def _without_input_gradients(model: torch.nn.Module) -> None:
    """Take away the hooks with which transformers has embeddings want gradients where activations are checkpointed:
    reentrant checkpoints need that, and a program has none."""
    for module in model.modules():
        hooked: Any = module
        if getattr(hooked, "_require_grads_hooks", None):
            hooked.disable_input_require_grads()


__all__ = ["ParallelOnFirstCall"]
