"""Comparison of a program's draws by torch's generator with those of the model in eager mode, one by one.

``parallelize(..., random="torch")`` promises eager mode's numbers. They depend on the order of the draws, and on shape,
memory layout and dtype of each; a program that differs in one of these draws other numbers from there on. So the model
runs once on the example batch, and its draws are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopar.capture import Captured, WithLoss
from autopar.capture.python.restoring import generators_kept, kept
from autopar.errors import CaptureError
from autopar.rules.families.torch_draws import WholeDraw, draws_in_order
from autopar.torch_private import OpOverload, TorchDispatchMode, pytree
from autopar.words.trees import PyTree

_METHODS = {
    "rand": "uniform_", "rand_like": "uniform_", "randn": "normal_", "randn_like": "normal_", "normal": "normal_",
    "randint": "random_", "randint_like": "random_", "normal_functional": "normal_",
}  # fmt: skip
"""The in-place method that draws as another function does."""


class _Drawn(NamedTuple):
    """A draw: its method, and the tensor that it fills."""

    method: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        lies = f", strides {list(self.strides)}" if self.strides else ""
        return f"{self.dtype}[{' '.join(map(str, self.shape))}] by {self.method}{lies}"


def _seen(method: str, shape: PyTree, strides: PyTree, dtype: PyTree) -> _Drawn:
    """Return a draw, with the strides of dims of one element ignored."""
    plain = torch.empty(tuple(shape), device="meta").stride()
    pairs = zip(shape, strides, plain, strict=True)
    same = all(n == 1 or a == b for n, a, b in pairs)
    return _Drawn(method, tuple(shape), () if same else tuple(strides), str(dtype).removeprefix("torch."))


class _Recorder(TorchDispatchMode):
    """A record of draws."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[_Drawn] = []

    def __torch_dispatch__(self, func: OpOverload, _types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        """Note a draw."""
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note(func, args, kwargs or {}, made)
        return made

    def _note(self, func: OpOverload, args: PyTree, kwargs: Mapping[str, PyTree], made: PyTree) -> None:
        name, overload = str(func).removeprefix("aten.").split(".")
        filled = next(x for x in pytree.tree_leaves(made) if isinstance(x, torch.Tensor))
        shape, strides, dtype = filled.shape, filled.stride(), filled.dtype
        method = _METHODS.get(name, name if name.endswith("_") or name == "randperm" else f"{name}_")
        if name.startswith("bernoulli"):
            given = [*args[1:], *(args[:1] if overload == "default" else ())]
            weights = next((x for x in given if isinstance(x, torch.Tensor)), None)
            if weights is not None:
                method, dtype = "uniform_", torch.float64 if weights.dtype == torch.float64 else torch.float32
        elif name == "multinomial":
            replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
            if replacement and args[1] > 1:
                method, dtype = "uniform_", torch.float64
            else:
                weights = torch.empty_like(args[0], device="meta")
                method, shape, strides, dtype = "exponential_", weights.shape, weights.stride(), weights.dtype
        elif name.startswith("_scaled_dot_product") or name == "native_dropout":
            method = name
            if name != "native_dropout" and not _drops(args, kwargs):
                return
        self.drawn.append(_seen(method, shape, strides, dtype))


def _drops(args: PyTree, kwargs: Mapping[str, PyTree]) -> bool:
    """Return whether a fused attention has a probability of dropout."""
    numbers = [x for x in (*args[3:], kwargs.get("dropout_p", 0.0)) if type(x) is float]
    return any(0.0 < x < 1.0 for x in numbers[:1])


def check_draws(
    captured: Captured, model: torch.nn.Module, example: PyTree, rows: int | None, device_type: str = "cpu"
) -> None:
    """Refuse a program that would draw other numbers than the model does in eager mode.

    All ranks check the graph; the model runs on rank 0 alone.

    Args:
        captured: the capture of one microbatch.
        model: the captured one.
        example: the whole batch: inputs, keyword arguments, targets.
        rows: the rows of the batch; None if it is one microbatch.
        device_type: the type of device on which the model runs.

    Raises:
        CaptureError: they draw otherwise; it names the first draw that differs.
    """
    graph = captured.graph
    draws = draws_in_order(graph, device_type)
    if not draws or (dist.is_initialized() and dist.get_rank()):
        return
    mine: list[tuple[_Drawn, str]] = []
    for i, draw in draws.items():
        try:
            mine.append((_of(draw.of_batch(rows)), graph.nodes[i].where))
        except ValueError as error:
            raise CaptureError(
                f"random='torch' draws what torch does for the whole batch, and of {graph.nodes[i].where} {error}: "
                "plan with microbatches=1, or give random='sharded', the default"
            ) from error
    theirs = _drawn_in_eager(captured, model, example)
    for k in range(max(len(mine), len(theirs))):
        here, where = mine[k] if k < len(mine) else (None, "")
        there = theirs[k] if k < len(theirs) else None
        if here != there:
            raise CaptureError(
                f"random='torch' cannot draw what the model does in eager mode: draw {k + 1} of {len(theirs)} there is "
                f"{there or 'none'}, and of the program's {len(mine)} it is {here or 'none'}"
                + (f", in {where}" if where else "")
                + "\n  give random='sharded', the default: numbers of the same distribution, which do not depend on "
                "the mesh"
            )


def _of(draw: WholeDraw) -> _Drawn:
    strides = draw.strides or torch.empty(draw.shape, device="meta").stride()
    return _seen(draw.method, draw.shape, strides, draw.dtype)


def _drawn_in_eager(captured: Captured, model: torch.nn.Module, example: PyTree) -> list[_Drawn]:
    """Return the model's draws for the batch, without a change to it or to generators."""
    args, kwargs, targets = example
    loss_fn = captured.example.loss_fn if captured.example is not None else None
    module = WithLoss(model, loss_fn, len(args), captured.graph.precision)
    with kept(model, loss_fn), generators_kept(), torch.no_grad(), _Recorder() as recorder:
        module(*args, *targets, **kwargs)
    return recorder.drawn
