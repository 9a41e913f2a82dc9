"""A user's own forward and backward as one operator, which calls them on every rank."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from autopar.errors import RuleError, RunError
from autopar.rules.notation import Rule, line
from autopar.rules.operator_call import Call
from autopar.torch_private import DisableTorchFunction, FakeTensor, no_dispatch_modes, pytree, unset_fake_temporarily
from autopar.words.autocasting import AutocastState, autocast_as
from autopar.words.trees import Context, PyTree

PREFIX = "function."
_DRAWS = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class ReadTensor:
    """A parameter or buffer that the code reads from a module and that is not among its arguments."""

    module: torch.nn.Module
    key: str
    name: str

    @property
    def table(self) -> dict[str, Any]:
        """The dict of the module that holds it."""
        return self.module._parameters if self.key in self.module._parameters else self.module._buffers


@dataclass(frozen=True, eq=False)
class Callee:
    """The code of one ``function`` node: called with the leaves of its arguments, it gives a tuple of tensors.

    Attributes:
        name: qualified name of the Function.
        fn: ``apply`` of the Function, or whatever else is called with the user's arguments.
        identity: hash of the code, of the numbers in its closure and of the modes of the modules that it reads.
        spec: tree of ``(args, kwargs)``.
        objects: leaves that are neither tensors nor plain values, by position.
        hidden: positions of tensors that stand in a list or tuple, where autograd does not look for them.
        written: positions of tensors that the code writes to; it gets copies, and their new values follow its outputs.
        reads: parameters and buffers that follow the leaves, and that the modules have while the code runs.
        random: the code draws numbers: it does so alike on all ranks, and again when it runs again.
        opaque: the code cannot run on tensors without values (it leaves torch).
        autocast: the autocast that is on where the code is called.
        shared: arguments that are also read, by position, with the place in ``reads``: the code has them as one tensor.
        double: results are cast to float64, for a comparison in double precision.
    """

    name: str
    fn: Callable[..., Any]
    identity: str
    spec: pytree.TreeSpec
    objects: tuple[tuple[int, Any], ...] = ()
    hidden: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    reads: tuple[ReadTensor, ...] = ()
    random: bool = False
    opaque: bool = False
    autocast: AutocastState = field(default_factory=dict)
    shared: Mapping[int, int] = field(default_factory=dict)
    double: bool = False

    def __repr__(self) -> str:  # stands in fingerprints
        return f"{self.name}#{self.identity}"

    def __post_init__(self) -> None:  # torch.fx writes programs with these
        word = re.sub(r"\W+", "_", self.name.replace("<locals>", ""))
        for key, value in (("__name__", word), ("__qualname__", word), ("__module__", "function")):
            object.__setattr__(self, key, value)

    def doubled(self) -> Callee:
        """Return the same callee in double precision."""
        return replace(self, double=True)

    def __call__(self, *leaves: Any, seed: torch.Tensor | None = None, site: Any = 0) -> Any:
        """Return one tensor or a tuple; ``seed`` of the step and ``site`` of the call are for code that draws."""
        with contextlib.nullcontext() if seed is None or isinstance(seed, FakeTensor) else _drawing(seed, site, leaves):
            if any(isinstance(x, FakeTensor) for x in leaves):
                results = _OnFakes.apply(self, *leaves)
            elif self.reads:
                results = _WithReads.apply(self, *leaves)
            else:
                results = self.run(leaves)
        if self.double:
            results = tuple(x.double() if x.is_floating_point() else x for x in results)
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, leaves: Sequence[PyTree]) -> tuple[torch.Tensor, ...]:
        """Run the user's code; return its tensor outputs, then the new values of what it silently writes to."""
        values = list(leaves[: self.spec.num_leaves])
        for k, value in self.objects:
            values[k] = value
        for k in self.hidden:
            values[k] = values[k].detach()
        for k in self.written:
            values[k] = values[k].clone()
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        with autocast_as(self.autocast) if self.autocast else contextlib.nullcontext():
            outs = tensors_of(self.fn(*args, **kwargs))
        ids = {id(x) for x in outs}
        return (*outs, *(values[k].detach() for k in self.written if id(values[k]) not in ids))


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    """List the tensors among what a Function returns: one value, or a tuple of them."""
    return tuple(x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, torch.Tensor))


# --- code that reads modules, and code that leaves torch -------------------------------------------------------------


@contextlib.contextmanager
def swapped(reads: Sequence[ReadTensor], values: Sequence[PyTree]) -> Iterator[None]:
    """Give the modules `values` for the parameters and buffers that are read."""
    tables = [(read.table, read.key) for read in reads]
    before = [table[key] for table, key in tables]
    try:
        for (table, key), value in zip(tables, values, strict=True):
            table[key] = value
        yield
    finally:
        for (table, key), value in zip(tables, before, strict=True):
            table[key] = value


class _WithReads(torch.autograd.Function):
    """Code that reads parameters of modules, such as a reversible network whose backward calls ``backward()`` itself.

    A gradient that arrives in ``grad`` of a parameter that way becomes the gradient of an input.
    """

    @staticmethod
    def forward(ctx: Context, callee: Callee, *leaves: Any) -> Any:
        n = callee.spec.num_leaves
        inner = [
            x.detach().requires_grad_(x.requires_grad and x.is_floating_point()) if isinstance(x, torch.Tensor) else x
            for x in leaves
        ]
        with torch.enable_grad(), swapped(callee.reads, inner[n:]):
            outs = callee.run([inner[n + callee.shared[k]] if k in callee.shared else x for k, x in enumerate(inner)])
        ctx.callee, ctx.inner, ctx.outs = callee, inner, outs
        plain = tuple(x.detach() for x in outs)
        ctx.mark_non_differentiable(*(d for d, x in zip(plain, outs, strict=True) if not x.requires_grad))
        return plain

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Any:
        inner, callee = ctx.inner, ctx.callee
        pairs = [(x, g) for x, g in zip(ctx.outs, grads, strict=True) if x.requires_grad and g is not None]
        for x in inner:
            if isinstance(x, torch.Tensor):
                x.grad = None
        with torch.enable_grad(), swapped(callee.reads, inner[callee.spec.num_leaves :]):
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs], retain_graph=True)
        return (None, *(x.grad if isinstance(x, torch.Tensor) else None for x in inner))


class _OnFakes(torch.autograd.Function):
    """The shapes of what the code gives for tensors without values; its gradients are zeros."""

    @staticmethod
    def forward(ctx: Context, callee: Callee, *leaves: Any) -> Any:
        ctx.leaves = leaves
        n = callee.spec.num_leaves
        inner = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
        if callee.opaque:
            outs = on_zeros(callee.run, inner)
        else:  # without hooks of those who count, which want more of a module than that it has a shape
            with torch.enable_grad(), swapped(callee.reads, inner[n:]), _no_module_hooks():
                outs = callee.run(inner)
        fake = next(x for x in leaves if isinstance(x, FakeTensor))
        fakes = tuple(fake.new_empty(tuple(x.shape), dtype=x.dtype) for x in outs)
        ctx.mark_non_differentiable(*(m for m, x in zip(fakes, outs, strict=True) if not x.requires_grad))
        return fakes

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Any:
        return (None, *(
            torch.zeros_like(x) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in ctx.leaves
        ))  # fmt: skip


@contextlib.contextmanager
def _no_module_hooks() -> Iterator[None]:
    hooks = torch.nn.modules.module
    with (
        mock.patch.object(hooks, "_global_forward_pre_hooks", OrderedDict()),
        mock.patch.object(hooks, "_global_forward_hooks", OrderedDict()),
    ):
        yield


def on_zeros(run: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]], leaves: Sequence[PyTree]) -> PyTree:
    """Call ``run(leaves)`` with zeros on the CPU in place of tensors without values."""
    with DisableTorchFunction(), no_dispatch_modes(), unset_fake_temporarily(), torch.enable_grad():
        real = [
            torch.zeros(tuple(x.shape), dtype=x.dtype).requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor) else x
            for x in leaves
        ]  # fmt: skip
        return run(real)


# --- draws -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _drawing(seed: torch.Tensor, site: Any, leaves: Sequence[PyTree]) -> Iterator[None]:
    """Seed torch's generators from the step's seed, the call's number and the first row; restore them afterwards."""
    of_step, *of_microbatch = seed.flatten().tolist()
    of_call = (site if isinstance(site, int) else site[0]) + 1 + (sum(of_microbatch[:1]) << 32)
    number = (of_step ^ of_call * _DRAWS) % (1 << 62)
    devices = [x.device for x in leaves if isinstance(x, torch.Tensor) and x.device.type != "cpu"]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        torch.manual_seed(number)
        with mock.patch.object(torch, "seed", lambda: number):  # a new seed of its own would be another on each rank
            yield


# --- rules -----------------------------------------------------------------------------------------------------------

_LINES: dict[Any, tuple[str, dict[str, Any]]] = {}


def function_rule(function: type[torch.autograd.Function], text: str, **options: Any) -> None:
    """Say how calls of a :class:`torch.autograd.Function` may be cut: ``function_rule(Scale, "... k, k -> ... k")``.

    The terms before the arrow are the tensor arguments in order (parameters that the code reads from modules follow
    them), those behind it the tensor outputs. A cut promises that the forward of a piece of the inputs is the piece of
    the outputs, and the backward of a piece of the gradients the piece of theirs, summed for an input without the cut
    factor: ``"... -> ..."`` for what works element by element, ``"b ... -> b ..."`` is one name more for the same with
    sizes that differ; a dim that must stay whole is named in ``whole="k"``. ``autopar verify`` tries it on numbers.

    Args:
        function: the class; the rule counts for models that are captured from now on.
        text: the line of notation.
        options: more about the rule, as for :func:`autopar.rules.notation.line`; ``whole_gradients=False`` says that
            the backward is linear in the gradient.

    Raises:
        RuleError: ``function`` is no such class, or ``text`` is no line of notation. Whether the names fit the shapes
            of a call is seen when a model that calls it is planned.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise RuleError(f"function_rule: {function!r} is no torch.autograd.Function; pass the class")
    if not isinstance(text, str) or "->" not in text:
        raise RuleError(f"function_rule: '{text}' is no rule; write it like '... k, k -> ... k'")
    _LINES[function] = (text, options)


def has_rule(callee: Callee) -> bool:
    """Check whether a user has said how calls of it may be cut."""
    return getattr(callee.fn, "__self__", None) in _LINES and not callee.random


def rule_of_function(call: Call, otherwise: Callable[[Call], Rule]) -> Rule:
    """Return the rule of a ``function`` node: the user's line, or ``otherwise``."""
    callee: Callee = call.args[0]
    if has_rule(callee):
        text, options = _LINES[callee.fn.__self__]  # type: ignore[attr-defined]
        given = {"whole_gradients": True, "saves": tuple(range(len(call.ins))), "saves_out": True, **options}
        by_line = line(text, call, **given)
        return replace(by_line, needs_some=frozenset(by_line.sizes))  # nobody promised that it runs on nothing
    rule = replace(otherwise(call), whole_gradients=True)
    return replace(rule, random=True) if callee.random else rule


# --- identity --------------------------------------------------------------------------------------------------------

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
         torch.memory_format)  # fmt: skip
"""Types of values that stand in a node as they are."""


def identity_of(functions: Sequence[Any], modules: Sequence[torch.nn.Module] = ()) -> str:
    """Hash the source of functions, the plain values that they close over, and the modes of modules."""
    digest = hashlib.sha256()
    for function in functions:
        if function is None:
            continue
        try:
            digest.update(textwrap.dedent(inspect.getsource(function)).encode())
        except (OSError, TypeError):
            code = getattr(function, "__code__", None)
            digest.update(code.co_code if code is not None else type(function).__qualname__.encode())
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, PLAIN):
                    digest.update(repr(cell.cell_contents).encode())
    for module in modules:
        digest.update("".join("t" if m.training else "e" for m in module.modules()).encode())
    return digest.hexdigest()[:8]


def refuse_fake(value: PyTree, what: str) -> None:
    """Refuse the result of a hook that kept a tensor without values from the time of capture.

    Raises:
        RunError: it did.
    """
    if isinstance(value, FakeTensor):
        raise RunError(
            f"{what} returned a tensor that was made from one of the time of capture; it closes over a tensor of the "
            "forward, which the program cannot give it: compute with the gradient alone"
        )
