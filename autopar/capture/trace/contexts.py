"""The one ordered table of what is exchanged while a model is traced.

``torch.export`` traces the path that the model takes in eager mode. Each entry of :data:`PATCHES` and
:data:`HANDLERS` says in one sentence why it is needed. Patches are entered from the first to the last, those of
:mod:`autopar.capture.patterns` behind the core's; handlers are asked from the first to the last.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
from collections.abc import Iterator
from unittest import mock

import torch

from autopar.capture import patterns
from autopar.capture.branches.data_branches import rows_are_asked_for
from autopar.capture.branches.unknown_numbers import checked
from autopar.capture.dataclass_nodes import know_dataclasses
from autopar.capture.python.containers import plain_tensors
from autopar.capture.python.user_lines import user_line
from autopar.capture.trace import patches
from autopar.capture.trace.autograd_functions import whole_functions
from autopar.capture.trace.checkpointed_regions import marked_regions
from autopar.capture.trace.experts_by_rows import experts_by_rows
from autopar.capture.trace.faster_tracing import quickly
from autopar.capture.trace.functorch_transforms import transforms_written_out
from autopar.capture.trace.inner_gradients import PLAIN_FORMS, in_plain_operators
from autopar.capture.trace.memoized_functions import memos_forgotten
from autopar.capture.trace.patches import Dispatcher, Handle, Handler, Patch, Phase, in_order
from autopar.capture.trace.python_questions import Questions, lists_of_inputs
from autopar.capture.trace.python_random import drawn_by_torch
from autopar.capture.trace.recording import Recording, parameters_noted
from autopar.capture.trace.recurrent_layers import LAYERS, layer_by_layer
from autopar.capture.trace.seeding import own_generators_refused, own_seeds_refused
from autopar.capture.trace.tensor_hooks import GRADIENTS_ASKED, gradients_as_in_eager, gradients_asked
from autopar.capture.trace.trace_progress import progress_reported
from autopar.capture.trace.unread_strings import strings_hidden
from autopar.capture.trace.value_origins import constant_value
from autopar.capture.without_values import with_strides
from autopar.errors import CaptureError
from autopar.torch_private import (
    EXPORT_BUFFER_HOOK,
    arguments_of_to,
    modules_found_by_name,
    scripted_functions_run_in_python,
    some_rows,
)
from autopar.words.trees import PyTree


@contextlib.contextmanager
def entered(phase: Phase, record: Recording | None = None) -> Iterator[None]:
    """Enter the patches of a phase; of a trace, whose recording is given, also its handlers."""
    patterns.load()
    with contextlib.ExitStack() as stack:
        for patch in (*PATCHES, *patches.PATCHES.values()):
            if phase & patch.phases:
                stack.enter_context(patch.enter(record))
        if record is not None:
            stack.enter_context(Dispatcher(handlers(), record))
            for context in record.contexts:
                stack.enter_context(context)
        yield


@functools.cache
def handlers() -> tuple[Handler, ...]:
    """Return all handlers, in the order in which they are asked."""
    patterns.load()
    return (*GRADIENTS_AND_SEEDS, *in_order([*patches.HANDLERS.values()]), *HANDLERS)


@contextlib.contextmanager
def _library_asks_values() -> Iterator[None]:
    hf = sys.modules.get("transformers.utils.import_utils")
    if hf is None or not hasattr(hf, "is_fake_tensor"):
        yield
        return
    is_fake = hf.is_fake_tensor
    with mock.patch.object(hf, "is_fake_tensor", lambda x: is_fake(x) and constant_value(x) is None):
        yield


@contextlib.contextmanager
def _modules_stay() -> Iterator[None]:
    """Let ``module.to(...)`` in a forward do nothing."""

    def to(self: torch.nn.Module, *args: PyTree, **kwargs: PyTree) -> torch.nn.Module:
        _, dtype, *_ = arguments_of_to(*args, **kwargs)
        changed = [
            (name, t) for name, t in (*self.named_parameters(), *self.named_buffers())
            if dtype is not None and t.is_floating_point() and t.dtype != dtype
        ]  # fmt: skip
        if changed:
            name, tensor = changed[0]
            raise CaptureError(
                f"forward calls {type(self).__name__}.to({dtype}), at {user_line(sys._getframe(1))}, and its '{name}' "
                f"is {tensor.dtype}: a program cannot exchange parameters in a step\n  call it once before, or cast "
                "the values that are computed"
            )
        return self

    with mock.patch.object(torch.nn.Module, "to", to):
        yield


@contextlib.contextmanager
def _plain_tensors_kept(module: torch.nn.Module) -> Iterator[None]:
    values_before = {id(t): (t, t._version, t.detach().clone()) for t in plain_tensors(module) if not t.is_inference()}
    try:
        yield
    finally:
        with torch.no_grad():
            for value, version, kept in values_before.values():
                if value._version != version:
                    value.copy_(kept)


@contextlib.contextmanager
def _outputs_seen(record: Recording) -> Iterator[None]:
    def seen(_module: torch.nn.Module, _args: object, output: PyTree) -> None:
        for check in record.outputs_checked:
            check(output)
        know_dataclasses(output)

    handle = record.module.register_forward_hook(seen)
    try:
        yield
    finally:
        handle.remove()


class _NoHook:
    def remove(self) -> None:
        """Do nothing: no hook was registered."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    printed = io.StringIO()
    failed = True
    try:
        with contextlib.redirect_stderr(printed):
            yield
        failed = False
    finally:
        logging.disable(before)
        if not failed and printed.getvalue():  # of the model itself
            sys.stderr.write(printed.getvalue())


PATCHES = (
    Patch("progress", "whoever waits for a capture is notified of the traced module", lambda _: progress_reported()),
    Patch("no export flag", "libraries take their eager path where torch does not say that it exports",
          lambda _: mock.patch.object(torch.compiler, "is_exporting", lambda: False)),
    Patch("no compile flag", "so they do where torch does not say that it compiles",
          lambda _: mock.patch.object(torch.compiler, "is_compiling", lambda: False)),
    Patch("constants of libraries", "transformers asks constants for their values", lambda _: _library_asks_values()),
    Patch("lists of inputs", "``tolist()`` of a tensor without values never comes to a function mode",
          lambda _: lists_of_inputs()),
    Patch("checks", "``torch._check`` asks numbers that are not known yet", lambda _: checked()),
    Patch("numbers of Python", "a program would keep the numbers that ``random`` and numpy gave its trace",
          lambda _: drawn_by_torch(), Phase.TRACE | Phase.OBSERVE),
    Patch("transforms of functorch", "torch.export cannot trace through the tensors of a transform",
          lambda _: transforms_written_out()),
    Patch("experts of transformers", "their loops and sorted rows have sizes of data", lambda _: experts_by_rows()),
    Patch("some rows", "``if rows.numel() == 0`` asks for a size that depends on data",
          lambda _: some_rows(rows_are_asked_for)),
    Patch("strides", "parameters on meta have the strides of the model that they stand for", lambda _: with_strides()),
    Patch("hidden strings", "a trial without strings shows whether the model reads them", strings_hidden),
    Patch("modules by name", "torch's own search for a module fails at some names", lambda _: modules_found_by_name()),
    Patch("scripted functions", "compiled code keeps from a trace which results need a gradient",
          lambda _: scripted_functions_run_in_python()),
    Patch("autograd.Function", "a user's own backward stays one operator",
          lambda record: whole_functions(record.module)),
    Patch("checkpointed regions", "plans recompute the regions that the model does", lambda _: marked_regions()),
    Patch("gradients", "no program can call backward, or hook a grad_fn", lambda _: gradients_as_in_eager()),
    Patch("seeds", "a program has a seed of its own", lambda _: own_seeds_refused()),
    Patch("memoized functions", "what they remember of a trace is no tensor for anybody else",
          lambda record: memos_forgotten(record.module)),
    Patch("quiet", "torch logs and prints what the error says as well", lambda _: _quiet()),
    Patch("speed", "torch.export describes far more than anybody reads", lambda _: quickly()),
    Patch("modules stay", "a program cannot exchange parameters in a step", lambda _: _modules_stay()),
    Patch("plain tensors", "what a forward writes to one, a trace writes to the tensor itself",
          lambda record: _plain_tensors_kept(record.module)),
    Patch("parameters", "torch forgets parameters in a list or a global", parameters_noted),
    Patch(
        "buffers", "export copies back what is put in a buffer's place, of the root module alone and the wrong one "
        "behind an empty buffer; the recorder does it",
        lambda _: EXPORT_BUFFER_HOOK.replaced(lambda *_: _NoHook()),
    ),
    Patch("outputs", "dataclasses show when the model returns them; some things no program returns", _outputs_seen),
)  # fmt: skip
"""The core's patches, in the order in which they are entered: ``tolist`` of "lists of inputs" is the inner one, which
patterns may wrap."""


def _if_plain(record: Recording) -> Handle | None:
    return in_plain_operators if record.attempt.decisions.plain_operators else None


_QUESTIONS = Questions()
GRADIENTS_AND_SEEDS = (
    Handler("generators", "a program would not go on where a generator is", lambda _: own_generators_refused),
    Handler("gradients", "hooks become operators, and inner gradients too", lambda _: gradients_asked, GRADIENTS_ASKED),
)
"""Handlers that are asked before those of patterns."""
HANDLERS = (
    Handler("recurrent layers", "stages may part a stack of layers, and its dropout draws as other operators do",
          lambda _: layer_by_layer, LAYERS),
    Handler("questions", "Python asks for values of tensors", lambda _: _QUESTIONS, _QUESTIONS.functions),
    Handler("plain operators", "autograd differentiates only values that are in the trace", _if_plain, PLAIN_FORMS,
          nested=True),
)  # fmt: skip
"""Handlers that are asked behind those of patterns."""
