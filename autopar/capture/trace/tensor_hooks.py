"""Gradients inside a forward: hooks on tensors, gradients that are taken, gradients that are kept.

A hook changes the gradient of a tensor, whoever reads it and whether they read it before or after the hook came. In the
graph it is an operator that gives its input, right behind the one that makes the tensor; all readers read that.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.hooks import RemovableHandle

from autopar.capture.trace.inner_gradients import gradients
from autopar.capture.trace.patches import PASS, Args, Function, Kwargs
from autopar.capture.trace.recording import Recording, here, now, refuse
from autopar.rules.function import Callee, identity_of, refuse_fake
from autopar.torch_private import GRADIENT_NODE, pytree
from autopar.words.trees import Context, PyTree


class _Hooked(torch.autograd.Function):
    """The identity, whose ``hook`` gets the gradient and may return another."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ctx.hook = hook
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        changed = ctx.hook(grad)
        refuse_fake(changed, f"the hook {_called(ctx.hook)}")
        return grad if changed is None else changed, None


def _called(hook: object) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def gradients_asked(func: Function, args: Args, kwargs: Kwargs) -> PyTree:
    """Handle the functions by which a forward hooks, keeps or takes gradients."""
    recording = now()
    if recording is None:
        return PASS
    if func is torch.Tensor.register_hook:
        return _hook(recording, *args, **kwargs)
    if func is torch.Tensor.retain_grad:
        recording.notes[
            f"retain_grad() {here()} has no effect: tensors inside a program are not those of the model; use "
            "register_hook to look at a gradient"
        ] = None
        return None
    if func == _PAST:
        node = func(*args)
        return None if node is None else _Past(node)
    if func == _DATA:  # torch gives a tensor that the trace does not know
        return torch.ops.autopar.data(args[0])
    if func == _ASSIGNED:
        return _assign(*args)
    return gradients(func, args, kwargs)


class _Past:
    """``grad_fn`` of a tensor, on which nothing can be hooked."""

    def __init__(self, node: object) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook") and now() is not None:
            raise refuse("a hook on grad_fn inside a forward", "hook the tensor itself with register_hook")
        return getattr(self._node, name)


_PAST = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_ASSIGNED = torch.Tensor.data.__set__  # type: ignore[attr-defined]
GRADIENTS_ASKED = (
    torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.autograd.grad, _DATA, _ASSIGNED, _PAST,
)  # fmt: skip


@contextlib.contextmanager
def gradients_as_in_eager() -> Iterator[None]:
    """Refuse what no program can do with gradients, and let inference mode turn gradients off only."""
    backward, enter = torch.autograd.backward, torch.autograd.graph.saved_tensors_hooks.__enter__
    past: Any = GRADIENT_NODE.get()
    inference = torch.inference_mode.__enter__, torch.inference_mode.__exit__

    def no_backward(*args: PyTree, **kwargs: PyTree) -> None:
        if now() is not None:
            raise refuse(
                "backward() inside a forward", "call it on what the model returns",
            )  # fmt: skip
        backward(*args, **kwargs)

    def no_saved(self: Any) -> Any:
        if now() is not None and not isinstance(self, torch.autograd.graph.save_on_cpu):
            raise refuse(
                "saved_tensors_hooks inside a forward: a program keeps other tensors than the model,",
                "use torch.utils.checkpoint, or recompute= of parallelize, to keep less for the backward",
            )
        return enter(self)

    def no_past(x: object) -> Any:
        if now() is not None:
            raise refuse("a hook on grad_fn inside a forward", "hook each tensor itself with register_hook")
        return past(x)

    def no_gradients(self: Any) -> None:  # what inference mode is beyond that makes eager mode faster, not different
        if now() is None:
            inference[0](self)
            return
        self.gradients_before = torch.is_grad_enabled()
        if self.mode:
            torch.set_grad_enabled(False)

    def gradients(self: Any, *error: Any) -> None:
        if hasattr(self, "gradients_before"):
            torch.set_grad_enabled(self.gradients_before)
            del self.gradients_before
        else:
            inference[1](self, *error)

    with (
        mock.patch.object(torch.autograd, "backward", no_backward),
        GRADIENT_NODE.replaced(no_past),
        mock.patch.object(torch.inference_mode, "__enter__", no_gradients),
        mock.patch.object(torch.inference_mode, "__exit__", gradients),
        mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", no_saved),
    ):
        yield


def _assign(x: torch.Tensor, value: torch.Tensor) -> None:
    """Compute ``x.data = value``, for a value of the same form."""
    if (x.shape, x.dtype, x.device) != (value.shape, value.dtype, value.device):
        raise refuse(
            f"an assignment to .data of a tensor of {value.dtype} and shape {tuple(value.shape)}, where there is one "
            f"of {x.dtype} and shape {tuple(x.shape)},",
            "go on with the new tensor, or assign one of the same dtype and shape",
        )
    torch.ops.autopar.assign(x, value)


def _hook(recording: Recording, x: torch.Tensor, hook: Function) -> RemovableHandle:
    handle = RemovableHandle(OrderedDict())
    if not x.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if any(x is p for m in recording.module.modules() for p in m._parameters.values()):
        raise refuse(
            "a hook on a parameter inside a forward, which would be there once more at every call",
            "register it once, on the parameters of the parallel module",
        )
    traced_tensors = [what for what in _closed_over(hook) if _is_traced(what)]
    if traced_tensors:
        shape = " ".join(map(str, traced_tensors[0].shape))
        raise refuse(
            f"the hook {_called(hook)}: it closes over a tensor of shape [{shape}] of the forward,",
            "compute with the gradient alone, or write an autograd.Function that takes the tensor as an argument",
        )
    mode = get_proxy_mode()
    assert mode is not None
    spec = pytree.tree_structure(((x, hook), {}))
    callee = Callee(
        f"hook.{_called(hook)}", _Hooked.apply, identity_of([hook]), spec, ((1, hook),)
    )  # fmt: skip
    tracker = mode.tracer.tensor_tracker
    node = tracker[x].proxy.node
    number = recording.call(callee, [x, hook], [x])
    hooked = torch.ops.autopar.hook(x, number)
    new = tracker[hooked].proxy.node
    if node.target is torch.ops.autopar.hook.default:  # hooks run in the order in which they came
        base: Any = node.args[0]
        _after(base, new)
        new.args = (base, number)
        node.args = (new, node.args[1])
        return handle
    _after(node, new)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    tracker[x] = tracker[hooked]
    return handle


def _after(node: torch.fx.Node, new: torch.fx.Node) -> None:
    """Move a node behind another; inputs of a graph stay in front."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    node.append(new)


def _closed_over(hook: object) -> list[torch.Tensor]:
    """Return the tensors that a function holds: in its closure, defaults, object, or as a partial."""
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    todo = [hook]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, torch.nn.Module):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            todo.extend(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
        for name in ("__self__", "__func__", "func", "args", "keywords", "__defaults__", "__kwdefaults__"):
            if callable(value) and (part := getattr(value, name, None)) is not None:
                todo.append(part)
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):
                todo.append(cell.cell_contents)
        if value is not hook and not callable(value) and hasattr(value, "__dict__"):
            todo.extend(vars(value).values())
    return tensors


def _is_traced(x: torch.Tensor) -> bool:
    mode = get_proxy_mode()
    return mode is not None and x in mode.tracer.tensor_tracker
