"""Tracing: ``torch.export`` along the path that the model takes in eager mode, and one message for what it raises."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from autopar.capture.branches.data_branches import changing, from_the_start
from autopar.capture.branches.random_answers import asked_afresh
from autopar.capture.branches.unknown_numbers import checked
from autopar.capture.dataclass_nodes import know_dataclasses
from autopar.capture.graph.exported_nodes import source_of
from autopar.capture.python.containers import plain_tensors
from autopar.capture.python.user_lines import user_line
from autopar.capture.repeats.repeated import Repeats
from autopar.capture.repeats.written_out import Unlike, write_out
from autopar.capture.trace.adaptive_softmax import adaptive_softmax_of_all_rows
from autopar.capture.trace.autocast import write_casts
from autopar.capture.trace.autograd_functions import whole_functions
from autopar.capture.trace.checkpointed_regions import marked_regions
from autopar.capture.trace.ctc_targets import Transcripts
from autopar.capture.trace.cumulative_norms import CumulativeNorms
from autopar.capture.trace.embedding_bags import Bags
from autopar.capture.trace.expert_loops import loops_by_rows
from autopar.capture.trace.experts_by_rows import experts_by_rows
from autopar.capture.trace.faster_tracing import quickly
from autopar.capture.trace.flex_attention import flex_attention_in_plain_operators
from autopar.capture.trace.functorch_transforms import transforms_written_out
from autopar.capture.trace.grouped_rows import GroupedRows
from autopar.capture.trace.inner_gradients import KeptInside, in_plain_operators
from autopar.capture.trace.lengths_of_rows import lengths_of_rows
from autopar.capture.trace.memoized_functions import memos_forgotten
from autopar.capture.trace.one_hot_sizes import sizes_for_one_hot
from autopar.capture.trace.packed_sequences import packed_as_padded
from autopar.capture.trace.python_questions import AnswerConstants
from autopar.capture.trace.python_random import drawn_by_torch
from autopar.capture.trace.recording import parameters_noted, recording, rows_are_asked_for
from autopar.capture.trace.recurrent_layers import LayerByLayer
from autopar.capture.trace.seeding import own_draws_refused
from autopar.capture.trace.tensor_hooks import as_in_eager
from autopar.capture.trace.trace_progress import told
from autopar.capture.trace.unread_strings import are_hidden, strings_hidden
from autopar.capture.trace.value_origins import constant_value
from autopar.capture.untraceable_modules import check_operators
from autopar.capture.without_values import with_strides
from autopar.errors import AutoparError, CaptureError
from autopar.torch_private import (
    EXPORT_BUFFER_HOOK,
    arguments_of_to,
    modules_found_by_name,
    scripted_functions_run_in_python,
    some_rows,
)
from autopar.words.autocasting import autocast_now


@contextlib.contextmanager
def _like_eager(module: torch.nn.Module) -> Iterator[None]:
    """Let libraries take their eager path: no 'we are exporting' flags, constants can be asked for their value."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.compiler, "is_exporting", lambda: False))
        stack.enter_context(mock.patch.object(torch.compiler, "is_compiling", lambda: False))
        hf = sys.modules.get("transformers.utils.import_utils")
        if hf is not None and hasattr(hf, "is_fake_tensor"):
            is_fake = hf.is_fake_tensor
            unknown = lambda x: is_fake(x) and constant_value(x) is None  # noqa: E731
            stack.enter_context(mock.patch.object(hf, "is_fake_tensor", unknown))
        constants = AnswerConstants(lambda: changing(module))
        stack.enter_context(constants)
        stack.enter_context(constants.lists())
        stack.enter_context(checked())
        stack.enter_context(drawn_by_torch())
        stack.enter_context(LayerByLayer())
        stack.enter_context(packed_as_padded(module))
        stack.enter_context(Transcripts())
        stack.enter_context(Bags())
        stack.enter_context(CumulativeNorms())
        stack.enter_context(adaptive_softmax_of_all_rows())
        grouped = stack.enter_context(GroupedRows(constants.list_of_inputs))
        stack.enter_context(grouped.hit.lists())
        stack.enter_context(flex_attention_in_plain_operators())
        stack.enter_context(transforms_written_out())
        stack.enter_context(experts_by_rows())
        stack.enter_context(loops_by_rows())
        stack.enter_context(some_rows(rows_are_asked_for))
        stack.enter_context(lengths_of_rows(module))
        stack.enter_context(sizes_for_one_hot(module))
        stack.enter_context(with_strides())
        stack.enter_context(strings_hidden(module))
        stack.enter_context(modules_found_by_name())
        stack.enter_context(scripted_functions_run_in_python())
        yield


@contextlib.contextmanager
def _modules_stay() -> Iterator[None]:
    """``module.to(...)`` in a forward has nothing to do where all is as it should be.

    Raises:
        CaptureError: it would change the dtype of parameters, which would be others at the next call.
    """

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
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


def export(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """The exported program; its ``recording`` says what autopar's own operators in it stand for, its ``left`` what
    stands behind the model's own outputs: nothing, unless a recorder watched."""
    try:
        exported = _with_repeats(module, args, kwargs) or _export(module, args, kwargs, None)
    except KeptInside:
        with in_plain_operators():
            exported = _with_repeats(module, args, kwargs) or _export(module, args, kwargs, None)
    check_operators(len(exported.graph.nodes))
    write_casts(exported, module, autocast_now())
    exported.recording.tell()
    exported.left = ()
    return exported


def _with_repeats(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """The program with its repeated blocks traced twice; None where the whole model must be traced."""
    if are_hidden():  # blocks that are not traced might read them
        return None
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
    with recording() as record, asked_afresh(), from_the_start():
        with warnings.catch_warnings(), contextlib.nullcontext() if repeats is None else repeats.watching():
            warnings.simplefilter("ignore")
            try:
                with (
                    told(), _like_eager(module), whole_functions(module), marked_regions(), as_in_eager(module),
                    own_draws_refused(), memos_forgotten(module),
                    _quiet(), quickly(), _modules_stay(), _plain_tensors_kept(module), parameters_noted(record),
                    # the recorder copies what forward puts in a buffer's place: export does it for the root module
                    # alone, and takes a wrong one where an empty buffer stands before it
                    EXPORT_BUFFER_HOOK.replaced(lambda *_: _NoHook()),
                    _dataclasses_known(module),
                ):  # fmt: skip
                    exported = torch.export.export(module, args, kwargs, strict=False)
            except KeptInside:
                raise
            except AutoparError as error:  # it says what and where
                raise type(error)(str(error)) from None
            except Exception as error:
                raise CaptureError(_explain(error, module)) from error
    exported.recording = record  # type: ignore[attr-defined]
    return exported


@contextlib.contextmanager
def _plain_tensors_kept(module: torch.nn.Module) -> Iterator[None]:
    """Tensors that a model has as plain attributes, or in lists and dicts there, keep their values: what a forward
    writes to one without reading data (``self.calls.add_(1)``) it writes, while it is traced, to the tensor itself."""
    values_before = {id(t): (t, t._version, t.detach().clone()) for t in plain_tensors(module) if not t.is_inference()}
    try:
        yield
    finally:
        with torch.no_grad():
            for value, version, kept in values_before.values():
                if value._version != version:
                    value.copy_(kept)


@contextlib.contextmanager
def _dataclasses_known(module: torch.nn.Module) -> Iterator[None]:
    """What the model returns is taken apart where it is a dataclass; which one shows when it returns."""
    handle = module.register_forward_hook(lambda _module, _args, output: know_dataclasses(output))
    try:
        yield
    finally:
        handle.remove()


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
_NOT_THE_USERS = ("<frozen", "<eval_with_key")
"""Code without a file that is Python's own, or made by torch.fx."""


def _instead_of_reading(line: str) -> str:
    """What to do about a line of the model that reads the values of a tensor."""
    if re.search(r"\b(int|float)\(|\.(item|tolist)\(", line):
        return (
            "a number that is read from a tensor, such as a pointer into a queue, changes between calls: compute with "
            "the tensor itself (queue.index_copy_(1, (ptr + torch.arange(n)) % size, keys); ptr.add_(n)), or move it "
            "out of forward()"
        )
    return "compute the branch with torch.where, or from sizes or configuration, or move it out of forward()"


_NOT_IN_OUTPUTS = re.compile(r"Found <class '(?:[\w.<>]*\.)?(\w+)'> in output, which is not a known type")
"""What torch.export says of outputs that it does not know."""


class _Place(NamedTuple):
    """Where in the user's code an error was raised; all empty where that is not known.

    Attributes:
        where: ``file.py:12``.
        line: the text of that line.
        in_torch: the layer of torch below it that raised, in brackets.
    """

    where: str = ""
    line: str = ""
    in_torch: str = ""


def _place_of(error: Exception) -> _Place:
    where, line, in_torch = "", "", ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        of_node = trace.tb_frame.f_locals.get("node") if file.endswith("/fx/passes/runtime_assert.py") else None
        if isinstance(of_node, torch.fx.Node) and not where:  # of sizes, which are looked at when the model has run
            where = source_of(of_node)
        if _LAYERS in file and not file.endswith("/module.py"):
            layer = os.path.basename(file).removesuffix(".py")
            in_torch = f" (in torch/nn/modules/{layer}.py:{trace.tb_lineno}, {trace.tb_frame.f_code.co_name})"
        in_stdlib = file.startswith(_STDLIB) and "site-packages" not in file
        from_no_file = file.startswith("<") and not file.startswith(_NOT_THE_USERS)  # by exec, or in a notebook
        if from_no_file and (not where or trace.tb_frame.f_code.co_name == "forward"):
            where = f"line {trace.tb_lineno} of {trace.tb_frame.f_code.co_name}() in {file}, code made while running"
            line, in_torch = linecache.getline(file, trace.tb_lineno).strip(), ""
        if not in_stdlib and "/torch/" not in file and not file.startswith("<") and "/autopar/" not in file:
            where = f"{file}:{trace.tb_lineno}"
            line = linecache.getline(file, trace.tb_lineno).strip()
            in_torch = ""  # below a line of the user's there is no layer of torch yet
        trace = trace.tb_next
    return _Place(where, line, in_torch)


def _explain(error: Exception, module: torch.nn.Module) -> str:
    """One message for what torch.export raised: what, where in the user's code, what to do."""
    where, line, in_torch = _place_of(error)
    kind = type(error).__name__
    text = str(error).strip().splitlines()
    first = next((t.strip() for t in text if t.strip()), kind)
    said = str(error).lower()
    of_a_size = isinstance(error, AssertionError) and ("sym_" in said or "fx.proxy.proxy" in said)  # in torch's checks
    if "DataDependent" in kind or "data-dependent" in said or "data dependent" in said or of_a_size:
        what = "its Python code branches on the value of a tensor, or a shape depends on one"
        do = _instead_of_reading(line)
        where += in_torch
    elif (isinstance(error, TypeError) and "forward" in str(error)) or (
        "argument" in first and isinstance(error, TypeError)
    ):
        what = f"the example inputs do not match its forward(): {first}"
        do = "pass the inputs that you would call the model with"
    elif (returned := _NOT_IN_OUTPUTS.search(str(error))) is not None:
        what = f"it returns a {returned[1]}, which is no tensor, number, tuple, list, dict or dataclass"
        do = "have forward() return tensors"
        if returned[1].endswith("Cache"):
            do = "training has no use for it: set model.config.use_cache = False before this"
    elif "fake tensor in the exported program" in str(error):
        what = "forward keeps a tensor that it computes in something that outlives the call (a dict, a list, a global)"
        do = (
            "keep it in a buffer (register_buffer in __init__, and copy_ in forward), or compute it anew; of a cache "
            "that is always the same, call the model once before, so that it is there"
        )
    elif "FakeTensor(" in str(error):
        what = f"its Python code looks something up by the value of a tensor ({kind}), which a program computes anew"
        do = (
            "pass what it is looked up by as a plain number or string of the call, or compute all that could be looked "
            "up and choose by the tensor: torch.stack([head(x) for head in heads])[i]"
        )
    elif ".numpy() is not supported for tensor subclasses" in str(error):
        what = "it makes a numpy array of a tensor, whose values a program computes anew at every call"
        do = "have forward() return the tensor, and call .numpy() on what it returns"
    elif "functorch tensor" in str(error):
        what = "it calls a transform of torch.func (jacrev, vjp, ...), which torch.export cannot trace"
        do = "take gradients with torch.autograd.grad(..., create_graph=True), or with torch.func.grad and torch.vmap"
    elif isinstance(error, (RuntimeError, ValueError, IndexError)) and "Dynamo" not in kind:
        what = f"running it on the example inputs failed: {first}"
        do = "check that model(*example_inputs) runs, and that no operation leaves torch"
    else:
        what = f"{kind}: {first}"
        do = "replace the construct that torch.export cannot trace"
    return _message(module, what, where, do)


def run_failed(error: Exception, module: torch.nn.Module) -> CaptureError:
    """Return the error to raise where the model itself fails on the example."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    what = f"running it on the example inputs failed: {type(error).__name__}: {said}"
    return CaptureError(_message(module, what, _place_of(error).where, "check that model(*example_inputs) runs"))


def _message(module: torch.nn.Module, what: str, where: str, do: str) -> str:
    called = getattr(module, "_called", type(module).__name__)  # of a model with its loss: its own name
    return f"cannot capture {called}: {what}" + (f"\n  at {where}" if where else "") + f"\n  {do}"


__all__ = ["export", "run_failed"]
