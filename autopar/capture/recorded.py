"""A trace with what the model's Python code read on the way, and a refusal where the next call would be another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.branches.random_branches import Explorer
from autopar.capture.graph.building import GraphBuilder
from autopar.capture.python.generators import draw_place, same_state
from autopar.capture.python.guards import Guards, repeated
from autopar.capture.python.python_reads import Recorder, Written, undone
from autopar.capture.trace.decisions import Attempt
from autopar.capture.trace.recording import Answer
from autopar.capture.trace.tracing import export
from autopar.errors import AutoparError, CaptureError
from autopar.words.trees import PyTree

Built = tuple[GraphBuilder, Any]


class _Calls:
    """Traces of a module's calls under the same decisions, each with a recorder of its own."""

    def __init__(
        self, module: torch.nn.Module, args: PyTree, kwargs: PyTree, prefix: str, functions: tuple[Any, ...],
        attempt: Attempt,
    ) -> None:  # fmt: skip
        self.module, self.args, self.kwargs, self.prefix = module, args, kwargs, prefix
        self.functions, self.attempt = functions, attempt

    def once(self, answer: Answer | None = None) -> tuple[Recorder, Any]:
        """Trace a call whose questions about random numbers have some answer."""
        recorder = Recorder(self.module, self.prefix, self.functions)
        with undone(recorder):
            with recorder:
                exported = self._export(answer)
            exported.left = recorder.left.all
            for owner, name in recorder.set_on_none.values():
                setattr(owner, name, None)
            if recorder.buffers.only_set:
                raise _set_error(recorder.buffers.only_set)
            if recorder.kept.keys() != recorder.set_on_none.keys() | recorder.into.keys():
                raise _kept_error(list(recorder.kept.values()))
            drawn = recorder.draws.drew()
            if drawn:
                before = recorder.draws.states()
                place = draw_place(lambda: self._export(answer), recorder.draws.states)
                again = not all(map(same_state, before, recorder.draws.states()))
                recorder.draws.set_back()
                _refuse_draws(drawn, place, again)
        return recorder, exported

    def _export(self, answer: Answer | None) -> Any:
        return export(self.module, self.args, self.kwargs, self.attempt, answer)

    def whole(self, recorder: Recorder, exported: Any) -> Built:
        """Return the graph of a trace; where Python asked for random numbers, that of all its branches."""

        def again(answer: Answer) -> Built:
            trial, exported = self.once(answer)
            trial.undo()
            recorder.learn(trial)
            return GraphBuilder(self.module, exported, self.prefix), exported

        return build(GraphBuilder(self.module, exported, self.prefix), again)

    def check_kept(self, recorder: Recorder, exported: Any, fingerprint: str) -> None:
        """Refuse tensors of one call that change the next one: ``if self.cache is None: self.cache = ...``."""
        lines = list(recorder.kept.values())
        with recorder.next_call():
            try:
                second, exported_again = self.once()
                _, again = self.whole(second, exported_again)
            except AutoparError as error:
                raise _kept_error(lines) from error
        same = second.kept.keys() == recorder.into.keys() and again[0].fingerprint == fingerprint
        if not same or not recorder.leaves_alike(second):
            raise _kept_error(lines)
        exported.left = tuple(
            replace(first, appends=then.appends) for first, then in zip(exported.left, second.left.all, strict=True)
        )
        recorder.forget(recorder.kept)

    def after_changes(self, recorder: Recorder, fingerprint: str) -> tuple[Recorder, Any, GraphBuilder, Any]:
        """Trace the second call, after one that changes what it reads: a flag that is set is fine, a counter is not."""
        changed = recorder.changed
        recorder.apply()
        with undone(recorder):
            second, exported = self.once()
            if second.changed:
                second.undo()
                _refuse_changes(second.changed)
            builder, again = self.whole(second, exported)
            if again[0].fingerprint != fingerprint:
                _refuse_first_call(changed)
        return second, exported, builder, again


def traced(
    module: torch.nn.Module, args: PyTree, kwargs: PyTree, prefix: str, loss_fn: Callable[..., Any] | None,
    attempt: Attempt,
) -> tuple[Guards, Any, GraphBuilder, Any]:  # fmt: skip
    """Trace a call of ``module``; return ``(guards, exported program, builder, what it built)``.

    Raises:
        Undecided: it has to be traced with another decision.
        CaptureError: it cannot be traced, changes what it reads at every call, or draws random numbers outside torch.
    """
    calls = _Calls(module, args, kwargs, prefix, (loss_fn,) if loss_fn is not None else (), attempt)
    recorder, exported = calls.once()
    builder, built = calls.whole(recorder, exported)
    if recorder.kept:
        calls.check_kept(recorder, exported, built[0].fingerprint)
    if recorder.changed:
        recorder, exported, builder, built = calls.after_changes(recorder, built[0].fingerprint)
    guards = recorder.guards(builder.unwritten)
    guards.filled = recorder.filled
    modules = {path.removeprefix(prefix): m for path, m in module.named_modules()}
    for one, others in getattr(exported, "alike", {}).items():
        repeated(guards, one.removeprefix(prefix), [path.removeprefix(prefix) for path in others], modules)
    return guards, exported, builder, built


def build(
    builder: GraphBuilder, again: Callable[[Any], tuple[GraphBuilder, Any]] | None = None
) -> tuple[GraphBuilder, Any]:
    """Build the graph; return it and its builder. An error names the place in the model.

    ``again``: makes a trace with other answers to questions for random numbers.
    """
    try:
        draft = builder.draft()
        if draft.asks and again is not None:
            builder, draft = Explorer(builder, draft, again, builder.prefix).explored()
        return builder, builder.finished(draft)
    except AutoparError:
        raise
    except Exception as error:
        where = ""
        trace = error.__traceback__
        while trace is not None:
            for value in trace.tb_frame.f_locals.values():
                if isinstance(value, torch.fx.Node) and value.op == "call_function":
                    where = _at(value)
            trace = trace.tb_next
        raise CaptureError(
            f"cannot capture{where}: {type(error).__name__}: {error}\n  this use of the operator is not known to "
            "capture; write that line in another way"
        ) from error


def _at(fx: torch.fx.Node) -> str:
    from autopar.capture.graph.exported_nodes import at, module_of

    return f" {fx.target} in '{module_of(fx)}'{at(fx)}"


def _refuse_draws(drawn: Sequence[str], place: str, again: bool) -> None:
    """Refuse what a trace drew, at a line of the user's or, of unknown place, if another trace drew ``again``."""
    if not place and not again:
        return  # something else in this process drew
    at = f" at {place}" if place else " (at every call, in code whose lines are not known)"
    raise CaptureError(
        f"forward draws a random number outside torch, from {' and '.join(drawn)}{at}: the program would use the same "
        "one at every step\n  draw with torch (torch.rand, torch.bernoulli) and compute with it (torch.where), or draw "
        "before the call and pass a tensor"
    )


def _listed(what: Sequence[object]) -> str:
    """Return the first entries of what is refused, a line each."""
    return "".join(f"\n  {item}" for item in what[:8])


def _refuse_changes(changed: Sequence[Written]) -> None:
    lines = _listed(changed)
    raise CaptureError(
        f"forward changes what it reads, at every call:{lines}\n  a program is captured once and would keep the first "
        "value: count in a buffer (register_buffer, and a tensor operation on it), or set the value outside of forward"
    )


def _kept_error(kept: Sequence[str]) -> CaptureError:
    if any("._flat_weights'" in item for item in kept):  # of nn.RNNBase, as AWD-LSTM's weight drop sets them
        return CaptureError(
            f"forward sets a weight of a recurrent layer, which the layer keeps for the next call:{_listed(kept)}\n"
            "  leave the weight registered as a parameter, and call the layer with another one: "
            "torch.func.functional_call(self.rnn, {'weight_hh_l0': w}, (x,))"
        )
    return CaptureError(
        f"forward keeps a tensor of one call in an attribute, which the next call reads:{_listed(kept)}\n  a program "
        "would not carry it over: keep it in a buffer (register_buffer in __init__, and copy_ in forward), or return "
        "it and pass it in again; of a cache that is always the same, call the model once before, so that it is there; "
        "losses for who calls forward can be read from a list or dict that each call fills anew: self.losses = {...}"
    )


def _set_error(only_set: Sequence[str]) -> CaptureError:
    return CaptureError(
        f"forward sets a buffer that is registered as None to a tensor of its data, at every call:{_listed(only_set)}\n"
        "  a program writes to buffers and makes none: register it with its size (register_buffer(name, "
        "torch.zeros(...)), and copy_ in forward); or have it be no buffer (self.name = None in __init__, in place of "
        "register_buffer), or return it, if it is for who calls forward"
    )


def _refuse_first_call(changed: Sequence[Written]) -> None:
    lines = _listed(changed)
    raise CaptureError(
        f"the first call of forward computes something else than later ones, as it changes what it reads:{lines}\n"
        "  call the model once on real data, so that it is as it will be, and capture it then"
    )
