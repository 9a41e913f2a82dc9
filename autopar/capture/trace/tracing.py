"""Tracing: ``torch.export`` along the path that the model takes in eager mode, and one message for what it raises."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sysconfig
import warnings
from typing import Any, NamedTuple

import torch

from autopar.capture.graph.exported_nodes import source_of
from autopar.capture.repeats.repeated import Repeats
from autopar.capture.repeats.written_out import Unlike, write_out
from autopar.capture.trace.autocast import write_casts
from autopar.capture.trace.contexts import entered
from autopar.capture.trace.decisions import Attempt, Undecided
from autopar.capture.trace.patches import Phase
from autopar.capture.trace.recording import Answer, Recording, recording
from autopar.capture.untraceable_modules import check_operators
from autopar.errors import AutoparError, CaptureError
from autopar.words.autocasting import autocast_now
from autopar.words.trees import PyTree


def export(
    module: torch.nn.Module, args: PyTree, kwargs: PyTree, attempt: Attempt, answer: Answer | None = None
) -> torch.export.ExportedProgram:
    """Trace a call, and return the exported program.

    Its ``recording`` has the meaning of autopar's own operators in it; its ``left`` says what is behind the model's own
    outputs: nothing, unless a recorder watched.

    ``answer``: to questions about random numbers; False without it.

    Raises:
        Undecided: it has to be traced with another decision.
        CaptureError: it cannot be traced.
    """
    record = Recording(module, attempt) if answer is None else Recording(module, attempt, answer)
    whole = attempt.decisions.whole_model or attempt.decisions.hidden is not None  # what is skipped might read them
    repeats = None if whole else Repeats(module, record)
    try:
        exported: Any = _export(module, args, kwargs, record, repeats)
        if repeats is not None and repeats.skipped and not repeats.doubt:
            write_out(exported, repeats)
    except Unlike:
        raise Undecided(whole_model=True) from None
    except AutoparError as error:
        if repeats is None or not repeats.skipped:
            raise
        raise Undecided(whole_model=True) from error  # perhaps only because of what was skipped
    if repeats is not None and repeats.doubt:
        raise Undecided(whole_model=True)
    check_operators(len(exported.graph.nodes))
    write_casts(exported, module, autocast_now())
    record.tell()
    exported.recording, exported.left = record, ()
    return exported  # type: ignore[no-any-return]


def _export(
    module: torch.nn.Module, args: PyTree, kwargs: PyTree, record: Recording, repeats: Repeats | None
) -> torch.export.ExportedProgram:
    with recording(record), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with contextlib.nullcontext() if repeats is None else repeats.watching(), entered(Phase.TRACE, record):
                return torch.export.export(module, args, kwargs, strict=False)
        except Undecided:
            raise
        except AutoparError as error:  # it says what and where
            raise type(error)(str(error)) from None
        except Exception as error:
            raise CaptureError(_explain(error, module)) from error


_STDLIB = sysconfig.get_path("stdlib")
_LAYERS = "/torch/nn/modules/"
_NOT_THE_USERS = ("<frozen", "<eval_with_key")
"""Code without a file that is Python's own, or made by torch.fx."""


def _instead_of_reading(line: str) -> str:
    """Return the advice about a line of the model that reads the values of a tensor."""
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
    """The place in the user's code where an error was raised; all empty if that is not known.

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
    """Return one message for an error of torch.export: the fault, where in the user's code, the remedy."""
    where, line, in_torch = _place_of(error)
    kind = type(error).__name__
    text = str(error).strip().splitlines()
    first = next((t.strip() for t in text if t.strip()), kind)
    message = str(error).lower()
    of_a_size = isinstance(error, AssertionError) and ("sym_" in message or "fx.proxy.proxy" in message)
    if "DataDependent" in kind or "data-dependent" in message or "data dependent" in message or of_a_size:
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
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    what = f"running it on the example inputs failed: {type(error).__name__}: {message}"
    return CaptureError(_message(module, what, _place_of(error).where, "check that model(*example_inputs) runs"))


def _message(module: torch.nn.Module, what: str, where: str, do: str) -> str:
    called = getattr(module, "_called", type(module).__name__)  # of a model with its loss: its own name
    return f"cannot capture {called}: {what}" + (f"\n  at {where}" if where else "") + f"\n  {do}"
