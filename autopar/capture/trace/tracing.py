"""Tracing: ``torch.export`` along the path that the model takes in eager mode, and one message for what it raises."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import operator
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from autopar.capture.branches.asking import ask, asked_afresh, refused
from autopar.capture.branches.drawn import Drawn
from autopar.capture.graph.exported import flat, storage_of
from autopar.capture.memory.schemas import facts
from autopar.capture.repeats.repeated import BLOCK, Repeats
from autopar.capture.repeats.written_out import Unlike, write_out
from autopar.capture.trace.functions import whole_functions
from autopar.capture.trace.hooks import as_in_eager
from autopar.capture.trace.memos import memos_forgotten
from autopar.capture.trace.progress import told
from autopar.capture.trace.quick import quickly
from autopar.capture.trace.recording import parameters_noted, recording
from autopar.capture.trace.regions import marked_regions
from autopar.capture.trace.seeding import own_draws_refused
from autopar.errors import AutoparError, CaptureError
from autopar.torch_private import (
    EXPORT_BUFFER_HOOK,
    DisableTorchFunction,
    FakeTensor,
    OpOverload,
    no_dispatch_modes,
    unset_fake_temporarily,
)


def _constant(tensor: Any, read: Callable[[torch.Tensor], Any] = lambda t: t) -> Any:
    """``read(value)`` of a traced tensor that depends on no input, parameter, buffer or random number; None for any
    other."""
    asked = _node_of(tensor)
    if asked is None:
        return None
    root = get_proxy_mode().tracer.root  # type: ignore[union-attr]

    def value(nodes: list[torch.fx.Node]) -> Any:
        values: dict[torch.fx.Node, Any] = {}
        for node in nodes:
            if node.op == "get_attr":
                values[node] = _made_of_numbers(node, root)
                continue
            a = torch.fx.node.map_arg(node.args, values.__getitem__)
            k = dict(torch.fx.node.map_arg(node.kwargs, values.__getitem__))
            if "device" in k:
                k["device"] = torch.device("cpu")
            values[node] = node.target(*a, **k)  # type: ignore[operator]
        return values[asked]

    try:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        with DisableTorchFunction(), no_dispatch_modes(), disable_proxy_modes_tracing():
            with unset_fake_temporarily():
                nodes, drawn = _made_by(asked)
                return None if drawn else read(value(nodes))
    except LookupError:
        return None


_FRESH = ("aten.lift_fresh_copy.default", "aten.lift_fresh.default")


def _made_of_numbers(node: torch.fx.Node, root: torch.nn.Module) -> torch.Tensor:
    """The value of a tensor that the forward makes of a number: ``torch.tensor(0.0)``, or ``x[mask] = 0.0``.

    Raises:
        LookupError: it is a tensor that was there before, which could be written to, or is made of an array that could.
    """
    tensor = getattr(root, str(node.target), None)
    fresh = all(str(user.target) in _FRESH for user in node.users)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.is_meta or not fresh:
        raise LookupError
    if tensor.numel() != 1:
        raise LookupError
    return tensor.detach().cpu()


def _node_of(tensor: Any) -> torch.fx.Node | None:
    """The node of the trace under way that a tensor is; None for a tensor of none."""
    proxy_mode = get_proxy_mode()
    if proxy_mode is None or not isinstance(tensor, torch.Tensor):
        return None
    slot = proxy_mode.tracer.tensor_tracker.get(tensor)
    return None if slot is None else slot.proxy.node


def _drawn(tensor: Any) -> list[str]:
    """The random operators that a traced tensor follows from, if it follows from nothing else; else nothing."""
    asked = _node_of(tensor)
    try:
        return [] if asked is None else _made_by(asked)[1]
    except LookupError:
        return []


def depends_on_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the trace that runs follows from an input, a parameter or a buffer."""
    return isinstance(tensor, FakeTensor) and _constant(tensor) is None


_OF_THE_SHAPE = frozenset(
    f"aten.{name}"
    for name in (
        "rand_like.default", "randn_like.default", "randint_like.default", "randint_like.low_dtype",
        "empty_like.default", "zeros_like.default", "ones_like.default", "full_like.default", "new_empty.default",
        "new_zeros.default", "new_ones.default", "new_full.default", "new_empty_strided.default",
    )
)  # fmt: skip
"""Operators that read no value of their first argument."""


def _made_by(asked: torch.fx.Node) -> tuple[list[torch.fx.Node], list[str]]:
    """The operators that a tensor's value comes from, in order: those that made it, and all that have written to its
    memory since; and the names of the random ones among them.

    Raises:
        LookupError: it depends on an input, a parameter or a buffer.
    """
    nodes = list(asked.graph.nodes)
    writers = [n for n in nodes if isinstance(n.target, OpOverload) and facts(n.target).writes]
    makers: set[torch.fx.Node] = set()
    drawn: list[str] = []
    memory: set[int | None] = set()
    todo = [asked]
    while todo:
        while todo:
            node = todo.pop()
            if node in makers:
                continue
            makers.add(node)
            if node.op == "get_attr":  # a tensor that Python code made of numbers
                continue
            if node.target is not operator.getitem:
                if not isinstance(node.target, OpOverload) or node.target is BLOCK:
                    raise LookupError
                if torch.Tag.nondeterministic_seeded in node.target.tags:
                    drawn.append(str(node.target))
            memory.update(storage_of(v) for v in flat(node.meta.get("val")) if isinstance(v, torch.Tensor))
            read = node.all_input_nodes
            todo.extend(read[1:] if str(node.target) in _OF_THE_SHAPE else read)
        for writer in writers:
            if writer not in makers and any(storage_of(n.meta.get("val")) in memory for n in writer.all_input_nodes):
                todo.append(writer)
    return [n for n in nodes if n in makers], drawn


class _AnswerConstants(TorchFunctionMode):
    """Answers ``bool(t)``, ``t.item()``, ``int(t)`` for tensors that do not depend on data.

    Of random numbers ``bool(t)`` is a question with two answers (:mod:`autopar.capture.branches`), and ``t.item()`` a
    number that is not known yet.
    """

    ASKED = (
        torch.Tensor.__bool__,
        torch.Tensor.item,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.tolist,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ASKED and args:
            constant = _constant(args[0], lambda t: func(t, *args[1:]))
            if constant is not None:
                return constant
            drawn = _drawn(args[0])
            if drawn:
                return self._random(func, args[0], drawn[0])
        return func(*args, **(kwargs or {}))

    def _random(self, func: Any, tensor: torch.Tensor, drawn: str) -> Any:
        if func is torch.Tensor.__bool__:
            return ask(tensor)
        if func is torch.Tensor.item and tensor.numel() == 1:
            return Drawn(tensor)
        if func is torch.Tensor.tolist:
            return _listed(tensor)
        raise refused("as a number that must be known", drawn)


def _listed(tensor: torch.Tensor) -> Any:
    return [_listed(x) for x in tensor.unbind()] if tensor.dim() else Drawn(tensor)


@contextlib.contextmanager
def _like_eager() -> Iterator[None]:
    """Let libraries take their eager path: no 'we are exporting' flags, constants can be asked for their value."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.compiler, "is_exporting", lambda: False))
        stack.enter_context(mock.patch.object(torch.compiler, "is_compiling", lambda: False))
        hf = sys.modules.get("transformers.utils.import_utils")
        if hf is not None and hasattr(hf, "is_fake_tensor"):
            is_fake = hf.is_fake_tensor
            stack.enter_context(mock.patch.object(hf, "is_fake_tensor", lambda x: is_fake(x) and _constant(x) is None))
        stack.enter_context(_AnswerConstants())
        yield


def export(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """The exported program; its ``recording`` says what autopar's own operators in it stand for."""
    exported = _with_repeats(module, args, kwargs) or _export(module, args, kwargs, None)
    exported.recording.tell()
    return exported


def _with_repeats(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """The program with its repeated blocks traced twice; None where the whole model must be traced."""
    repeats = Repeats(module)
    try:
        exported = _export(module, args, kwargs, repeats)
        if repeats.doubt:
            return None
        if repeats.skipped:
            write_out(exported, repeats)
        return exported
    except Unlike:
        return None
    except AutoparError:
        if not repeats.skipped:
            raise
        return None  # perhaps only because of what was skipped


def _export(module: torch.nn.Module, args: Any, kwargs: Any, repeats: Repeats | None) -> Any:
    with recording() as record, asked_afresh():
        with warnings.catch_warnings(), contextlib.nullcontext() if repeats is None else repeats.watching():
            warnings.simplefilter("ignore")
            try:
                with (
                    told(), _like_eager(), whole_functions(module), marked_regions(), as_in_eager(module),
                    own_draws_refused(), memos_forgotten(module),
                    _quiet(), quickly(), _plain_tensors_kept(module), parameters_noted(record),
                    # the recorder copies what forward puts in a buffer's place: export does it for the root module
                    # alone, and takes a wrong one where an empty buffer stands before it
                    EXPORT_BUFFER_HOOK.replaced(lambda *_: _NoHook()),
                ):  # fmt: skip
                    exported = torch.export.export(module, args, kwargs, strict=False)
            except AutoparError as error:  # it says what and where
                raise type(error)(str(error)) from None
            except Exception as error:
                raise CaptureError(_explain(error, module)) from error
    exported.recording = record  # type: ignore[attr-defined]
    return exported


@contextlib.contextmanager
def _plain_tensors_kept(module: torch.nn.Module) -> Iterator[None]:
    """Tensors of one element that a model has as plain attributes keep their values: the tracer follows such values,
    and what the model writes to them while it is traced it writes to the tensors themselves."""
    values_before = {
        id(value): (value, value._version, value.detach().clone())
        for m in module.modules()
        for value in vars(m).values()
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for value, version, kept in values_before.values():
                if value._version != version:
                    value.copy_(kept)


class _NoHook:
    def remove(self) -> None:
        """There is nothing to take away."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs and prints about a failed export: the error says it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    said = io.StringIO()
    failed = True
    try:
        with contextlib.redirect_stderr(said):
            yield
        failed = False
    finally:
        logging.disable(before)
        if not failed and said.getvalue():  # of the model itself
            sys.stderr.write(said.getvalue())


_STDLIB = sysconfig.get_path("stdlib")
_LAYERS = "/torch/nn/modules/"
_DISTRIBUTIONS = "/torch/distributions/"


def _instead_of_reading(line: str, layer: str) -> str:
    """What to do about a line of the model that reads the values of a tensor, or calls a layer of torch that does."""
    if layer == "transformer":
        return (
            "torch's transformer compares the mask that it is given with a causal one: call it with is_causal=False "
            "(tgt_is_causal=False of a decoder), or True for a mask that is causal"
        )
    if layer == "batchnorm":
        return (
            "BatchNorm with momentum=None computes with its number of batches in Python, which a program cannot: give "
            "it a momentum, such as momentum=0.1"
        )
    if layer == _DISTRIBUTIONS:
        return (
            "torch.distributions checks the values that it is given: make the distribution with validate_args=False, "
            "or call torch.distributions.Distribution.set_default_validate_args(False) first"
        )
    if re.search(r"torch\.(equal|allclose)\(", line):
        return (
            "torch.equal and torch.allclose give a bool of Python: write `(a == b).all()`, of which both sides of the "
            "branch are kept where it follows from random numbers alone; or torch.where, or move it out of forward()"
        )
    if re.search(r"\b(int|float)\(|\.(item|tolist)\(", line):
        return (
            "a number that is read from a tensor, such as a pointer into a queue, changes between calls: compute with "
            "the tensor itself (queue.index_copy_(1, (ptr + torch.arange(n)) % size, keys); ptr.add_(n)), or move it "
            "out of forward()"
        )
    return "compute the branch with torch.where, or from sizes or configuration, or move it out of forward()"


def _explain(error: Exception, module: torch.nn.Module) -> str:
    """One message for what torch.export raised: what, where in the user's code, what to do."""
    where, line, layer, in_torch = "", "", "", ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _LAYERS in file and not file.endswith("/module.py"):
            layer = os.path.basename(file).removesuffix(".py")
            in_torch = f" (in torch/nn/modules/{layer}.py:{trace.tb_lineno}, {trace.tb_frame.f_code.co_name})"
        elif _DISTRIBUTIONS in file:
            layer = _DISTRIBUTIONS
        in_stdlib = file.startswith(_STDLIB) and "site-packages" not in file
        if not in_stdlib and "/torch/" not in file and not file.startswith("<") and "/autopar/" not in file:
            where = f"{file}:{trace.tb_lineno}"
            line = linecache.getline(file, trace.tb_lineno).strip()
            layer = in_torch = ""  # below a line of the user's there is no layer of torch yet
        trace = trace.tb_next
    kind = type(error).__name__
    text = str(error).strip().splitlines()
    first = next((t.strip() for t in text if t.strip()), kind)
    if "DataDependent" in kind or "data-dependent" in str(error).lower() or "data dependent" in str(error).lower():
        what = "its Python code branches on the value of a tensor, or a shape depends on one"
        do = _instead_of_reading(line, layer)
        where += in_torch
    elif (isinstance(error, TypeError) and "forward" in str(error)) or (
        "argument" in first and isinstance(error, TypeError)
    ):
        what = f"the example inputs do not match its forward(): {first}"
        do = "pass the inputs that you would call the model with"
    elif isinstance(error, (RuntimeError, ValueError, IndexError)) and "Dynamo" not in kind:
        what = f"running it on the example inputs failed: {first}"
        do = "check that model(*example_inputs) runs, and that no operation leaves torch"
    else:
        what = f"{kind}: {first}"
        do = "replace the construct that torch.export cannot trace"
    called = getattr(module, "_called", type(module).__name__)  # of a model with its loss: its own name
    return f"cannot capture {called}: {what}" + (f"\n  at {where}" if where else "") + f"\n  {do}"
