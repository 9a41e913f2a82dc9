"""A user's own backward stays one: ``autograd.Function`` is a single node of the graph, with its code in it.

Tracing would go through the forward of a Function, and autograd would then make a backward of its own from what was
found there. Instead every call is tried out first, forward and backward, on tensors without values and outside the
trace. That shows all that the node needs to know: its outputs and which of them have gradients, what it writes to, what
it reads besides its arguments, whether it draws random numbers. Then the call is recorded as one operator.

Where no gradient flows into a call its backward never runs, and its forward is traced like any other code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from autopar.capture.trace import checkpointed_regions
from autopar.capture.trace.recording import now, refuse
from autopar.rules.function import PLAIN, Callee, ReadTensor, identity_of, on_zeros, swapped, tensors_of
from autopar.torch_private import (
    BackwardHookFunction,
    DisableTorchFunction,
    OpOverload,
    SingleLevelFunction,
    TorchDispatchMode,
    functorch_is_active,
    pytree,
)
from autopar.words.autocasting import autocast_now
from autopar.words.trees import PyTree

AS_REGION: list[Callable[[Any, Sequence[Any], Mapping[str, Any]], Callable[[], Any] | None]] = []
"""Functions that return a call of an ``autograd.Function`` as a region of the trace, if it is one; of patterns."""


@contextlib.contextmanager
def whole_functions(model: torch.nn.Module) -> Iterator[None]:
    """Record calls of Functions as they are, also through an ``apply`` that was taken off its class before."""

    def apply(cls: object, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if now() is None or functorch_is_active():
            return _plainly(cls, args, kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return checkpointed_regions.reentrant(*args)
        if cls is BackwardHookFunction:
            raise refuse(
                "the backward hooks of a module", "remove them, or hook a tensor of its forward with register_hook"
            )
        return _call(cls, args, kwargs, model)

    with mock.patch.object(SingleLevelFunction, "apply", classmethod(apply), create=True):
        yield


def _plainly(cls: Any, args: PyTree, kwargs: PyTree) -> PyTree:
    """Make the call as torch does."""
    return super(SingleLevelFunction, cls).apply(*args, **kwargs)


@dataclass
class _Trial:
    """The effects of a call that was tried out.

    Attributes:
        result: what it returned.
        own: the leaves of its arguments in the trial.
        without: positions of tensors to which its backward gives no gradient.
        written: positions of tensors that it changed.
        read: tensors of the trace that it used besides its arguments.
        changed: some of these were changed.
        random, random_backward: the forward, the backward drew numbers.
        opaque: it could not run without values.
    """

    result: PyTree = None
    own: list[Any] = field(default_factory=list)
    without: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    read: list[torch.Tensor] = field(default_factory=list)
    changed: bool = False
    random: bool = False
    random_backward: bool = False
    opaque: bool = False


class Watch(TorchDispatchMode):
    """Mode that notes the tensors of the trace that are used, and draws of random numbers."""

    def __init__(self, tracked: Any) -> None:
        super().__init__()
        self.tracked = tracked
        self.read: dict[int, tuple[torch.Tensor, int]] = {}
        self.random = False

    def __torch_dispatch__(self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and id(x) not in self.read and x in self.tracked:
                self.read[id(x)] = x, x._version
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _apart(leaves: Sequence[object]) -> list[Any]:
    """Return the same tensors, where gradients go nowhere else."""
    return [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]


def _copies(leaves: Sequence[object]) -> list[Any]:
    """Return copies of the tensors, which may be written to."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]


def _try(
    run: Callable[[Sequence[Any]], Any], leaves: Sequence[object], name: str,
    around: Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]] = lambda _own: contextlib.nullcontext(),
) -> _Trial:  # fmt: skip
    """Run a call and its backward on tensors without values, ``around`` what it is run on."""
    mode = get_proxy_mode()
    assert mode is not None
    watch = Watch(mode.tracer.tensor_tracker)
    random = torch.get_rng_state()
    trial = _Trial()
    try:
        with DisableTorchFunction(), disable_proxy_modes_tracing(), torch.enable_grad():
            starts = _apart(leaves)
            trial.own = _copies(starts)
        with (
            DisableTorchFunction(), disable_proxy_modes_tracing(), watch, torch.enable_grad(), around(trial.own),
        ):  # fmt: skip
            trial.result = run(trial.own)
            trial.written = _written(trial.own)
            trial.random, watch.random = watch.random, False
            roots = [x for x in tensors_of(trial.result) if x.requires_grad]
            with contextlib.suppress(Exception):  # what is wrong with a backward shows when it runs
                torch.autograd.backward(roots, [torch.zeros_like(x) for x in roots])
                tensors = [(k, x) for k, x in enumerate(starts) if isinstance(x, torch.Tensor)]
                trial.without = tuple(k for k, x in tensors if x.requires_grad and x.grad is None)
            trial.random_backward = watch.random
    except Exception as error:
        if trial.result is not None:
            raise
        if watch.read:
            raise refuse(
                f"the autograd.Function {name}: its forward cannot run on tensors without values ({_first(error)}), "
                "and it uses tensors that are not among its arguments,",
                "compute branches in it from shapes or with torch.where, or pass it all that it uses",
            ) from error
        trial = _Trial(opaque=True)

        def on_copies(zeros: Sequence[object]) -> Any:
            trial.own = _copies(_apart(zeros))
            trial.result = run(trial.own)
            return ()

        try:
            on_zeros(on_copies, leaves)
        except Exception as second:
            raise refuse(
                f"the autograd.Function {name}: its forward cannot run on tensors without values "
                f"({_first(error)}), nor on zeros ({_first(second)}),",
                "make its forward work on any values of these shapes",
            ) from error
        trial.written = _written(trial.own)
    finally:
        torch.set_rng_state(random)
    trial.read = [x for x, _ in watch.read.values()]
    trial.changed = any(x._version != version for x, version in watch.read.values())
    return trial


def _written(leaves: Sequence[object]) -> tuple[int, ...]:
    return tuple(k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x._version)


def _first(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _call(cls: Any, args: PyTree, kwargs: PyTree, model: torch.nn.Module) -> PyTree:
    """Record one call, and give what it would give."""
    name = cls.__qualname__
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = {id(x) for x in (*args, *kwargs.values())}
    tensors = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    hidden = tuple(k for k in tensors if id(leaves[k]) not in given)

    def run(values: Sequence[PyTree]) -> PyTree:
        a, kw = pytree.tree_unflatten([v.detach() if k in hidden else v for k, v in enumerate(values)], spec)
        return _plainly(cls, a, kw)

    flows = torch.is_grad_enabled() and any(leaves[k].requires_grad for k in tensors if k not in hidden)
    if flows and (region := next(filter(None, (find(cls, args, kwargs) for find in AS_REGION)), None)) is not None:
        return region()
    trial = _try(run, leaves, name)
    if not flows and not trial.opaque:
        return _plainly(cls, args, kwargs)
    reads = _reads(trial.read, model, name)
    shared = {k: j for j, x in enumerate(trial.read) for k in tensors if leaves[k] is x and k not in hidden}
    if shared:  # then its backward may ask for the gradient of the argument, and mean what the module has
        in_module = [reads[j] for j in shared.values()]
        once_more = _try(run, leaves, name, lambda own: swapped(in_module, [own[k] for k in shared]))
        trial = replace(once_more, read=trial.read, changed=trial.changed)
    if trial.changed:
        raise refuse(
            f"the autograd.Function {name}: it changes a tensor that is not among its arguments,",
            "pass that tensor to apply(), and name it in ctx.mark_dirty() or return its new value",
        )
    if trial.random_backward:
        raise refuse(
            f"the autograd.Function {name}: its backward draws random numbers, which ranks would draw differently,",
            "draw them in its forward and keep them in ctx.save_for_backward(); where it computes its forward again, "
            "use torch.utils.checkpoint",
        )
    objects = tuple((k, x) for k, x in enumerate(leaves) if not isinstance(x, (torch.Tensor, *PLAIN)))
    modules = [x for _, x in objects if isinstance(x, torch.nn.Module)] + [r.module for r in reads]
    code = [getattr(cls, f, None) for f in ("forward", "backward", "setup_context")]
    callee = Callee(
        name, cls.apply, identity_of(code, modules), spec, objects, hidden, trial.written, tuple(reads),
        trial.random, trial.opaque, autocast_now(), shared=shared,
    )  # fmt: skip
    return _record(callee, leaves, trial.read, trial, name)


def _reads(read: Sequence[torch.Tensor], model: torch.nn.Module, name: str) -> list[ReadTensor]:
    """Find the modules that keep the tensors that the code read."""
    reads: dict[int, ReadTensor] = {}
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                if value is not None:
                    reads.setdefault(id(value), ReadTensor(module, key, f"{path}.{key}" if path else key))
    for x in read:
        if id(x) not in reads:
            shape = " ".join(map(str, x.shape))
            raise refuse(
                f"the autograd.Function {name}: it uses a tensor of shape [{shape}] that was made in the forward and "
                "is not among its arguments,",
                "pass that tensor to apply()",
            )
    return [reads[id(x)] for x in read]


def _record(callee: Callee, leaves: list[PyTree], read: list[torch.Tensor], trial: _Trial, name: str) -> PyTree:
    recording = now()
    assert recording is not None
    position_of = {id(x): k for k, x in enumerate(trial.own) if isinstance(x, torch.Tensor)}
    outs = tensors_of(trial.result)
    returned = {position_of[id(x)] for x in outs if id(x) in position_of}
    silent = [k for k in trial.written if k not in returned]  # as under no_grad: its gradient goes on as it was
    if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(trial.result) if id(x) not in {id(o) for o in outs}):
        raise refuse(
            f"the autograd.Function {name}: it returns tensors inside a container, which have no gradient,",
            "return them as a flat tuple",
        )
    results = [*outs, *(trial.own[k] for k in silent)]
    if not results:
        raise refuse(f"the autograd.Function {name}: it returns no tensor,", "return what it computes")
    number = recording.call(callee, leaves, results)
    apart = {*callee.hidden, *trial.without}
    tensors = [(k, x) for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    values = torch.ops.autopar.function([*(x.detach() if k in apart else x for k, x in tensors), *read], number)
    for k, value in zip(silent, values[len(outs) :], strict=True):
        with torch.no_grad():
            leaves[k].copy_(value)
    traced_outs = iter(zip(outs, values, strict=False))

    def give(x: object) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        tried, value = next(traced_outs)
        if id(tried) in position_of:
            return leaves[position_of[id(tried)]].copy_(value)
        return value if tried.requires_grad else value.detach()

    if isinstance(trial.result, (tuple, list)):
        return tuple(give(x) for x in trial.result)
    return give(trial.result)
