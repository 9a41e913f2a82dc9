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
from autopar.words.trees import PyTree

Optimizers = Callable[[], Sequence[torch.optim.Optimizer]]


_NO_STAGES = (
    "the plan has several stages, which train by train_step, and the library's loop calls the model: pass "
    "parallel={'stages': 1}, or write the loop"
)


class ParallelOnFirstCall(AsModel):
    """A stand-in for a model that becomes its parallel module at the first call in training.

    Earlier calls in eval mode or without gradients run the model itself, whole, on every rank. ``optimizers`` returns
    those that may hold the model's parameters, ``options`` are those of :func:`autopar.parallelize`, whose ``mesh``
    defaults to the number of ranks, and ``around`` is the context of each call, such as autocast. Pipelines are
    refused.
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

    def forward(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Run the parallel module, or the model itself before the first call in training."""
        if not self.is_parallel and self.now.training and torch.is_grad_enabled():
            self._spread(args, kwargs)
        with self._around():
            return self.now(*args, **kwargs)

    def _spread(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
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
            move.to(dict(pm.named_parameters(remove_duplicate=False)), pm._autopar.device, pm._autopar.ranks()[0])
        self.now, self.is_parallel = pm, True

    # -- as the model

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a copy of the model as it is now, with which an average of the weights begins."""
        return copy.deepcopy(self.now, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.now.__reduce_ex__(protocol)

    def train(self, mode: bool = True) -> ParallelOnFirstCall:
        """Set the mode of the model and of the parallel module."""
        self.training = mode
        self.now.train(mode)
        return self

    def state_dict(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Return the state dict of the current module."""
        return self.now.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Load a state dict into the current module."""
        return self.now.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: PyTree, **kwargs: PyTree) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the current module's parameters by name."""
        return self.now.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: PyTree, **kwargs: PyTree) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the current module's buffers by name."""
        return self.now.named_buffers(*args, **kwargs)

    def named_modules(self, *args: PyTree, **kwargs: PyTree) -> Iterator[tuple[str, torch.nn.Module]]:  # type: ignore[override]
        """Return the current module's submodules by name."""
        return self.now.named_modules(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the current module."""
        self.now.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "now" or name.startswith("_"):
                raise
            return getattr(self.now, name)


def _without_cache(model: torch.nn.Module) -> None:
    """Disable the cache of keys and values in transformers' models, which training does not use."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


def _without_input_gradients(model: torch.nn.Module) -> None:
    """Remove transformers' hooks that make embeddings require gradients for reentrant checkpoints.

    A program has no reentrant checkpoints.
    """
    for module in model.modules():
        hooked: Any = module
        if getattr(hooked, "_require_grads_hooks", None):
            hooked.disable_input_require_grads()
