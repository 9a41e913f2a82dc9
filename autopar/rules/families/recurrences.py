"""Recurrent layers, ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: rows of the batch, or what is hidden, may be cut.

Time stays whole, since a step needs the one before it. Rows of the batch (``b``) do not meet: torch's own operator runs
on a piece of them, all layers and times at once.

*Cells* are what is hidden of a layer, each with its gates. A rank that has some of the cells has their rows of every
gate, which lie apart in the weights: ``weight_ih`` [gates * cells, features] is cut in each of its 4 (or 3, or 1)
groups of rows. So weights are whole when the operator gets them, and each rank takes its rows; how they are stored is
the planner's choice. A step needs the state of all cells, so ranks gather it at every step, once per layer and
direction (with projections they sum what their cells add to it), and what they gather is the output of the step. There
the operator is taken apart into torch's formulas for one step: on a GPU it is slower than the fused kernels, whose
launches are what a short sequence takes. Layers are parted among the stages of a pipeline: a stack is traced layer by
layer, and so is dropout between them, as an operator of its own (:mod:`autopar.capture.trace.recurrent_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F

from autopar.errors import RuleError
from autopar.rules.lowering_helpers.collective_helpers import all_parts, part_of, total
from autopar.rules.lowering_helpers.local_shard import axes_of
from autopar.rules.lowering_helpers.lowering_trial import in_trial
from autopar.rules.notation import Comm, Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import Sample, T, prove_with, rule, sample
from autopar.words.placements import REPLICATED, Placement, shard
from autopar.words.trees import PyTree

CELLS = "cells"
"""The option that cuts what is hidden; a factor of as many elements as a layer has cells."""

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Matrix products with the input, and as many with the state, of one step."""


@rule(*[f"aten.{kind}.input" for kind in GATES])
def recurrent(call: Call) -> Rule:
    """Make the rule of a recurrent layer.

    Its arguments: ``(input, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)``.
    """
    gates = GATES[call.target.split(".")[1]]
    has_biases, n_layers = bool(call.arg(3, "has_biases")), int(call.arg(4, "num_layers"))
    n_states = 2 if gates == 4 else 1
    x, weights = call.ins[0], call.ins[1 + n_states :]
    if call.arg(5, "dropout", 0.0) and call.arg(6, "train", False) and n_layers > 1:
        raise RuleError("draws its own dropout between layers, which every rank would draw differently")
    batch_first = bool(call.arg(8, "batch_first", False))
    directions = 2 if call.arg(7, "bidirectional", False) else 1
    in_layer = len(weights) // (n_layers * directions)
    projected = in_layer > (4 if has_biases else 2)  # to states that are shorter than the cells of an LSTM
    state = "p" if projected else "h"

    def weight(number: int) -> str:
        layer, position = divmod(number, in_layer)
        if position == 0:  # of the input: the model's own, or both directions of the layer before
            return "g k" if layer < directions else "g o"
        if position == 1:
            return f"g {state}"
        return "p h" if projected and position == in_layer - 1 else "g"

    rows = "b s" if batch_first else "s b"
    of_states = [f"l b {state}", "l b h"][:n_states]
    inputs = [f"{rows} k", *of_states, *(weight(i) for i in range(len(weights)))]
    text = f"{', '.join(inputs)} -> {', '.join([f'{rows} o', *of_states])}"
    matrices = sum(prod(w.shape) for w in weights if len(w.shape) == 2)
    n_rows, n_steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    made = line(
        text, call, whole=" ".join(sorted({*text} & set("sklhgop"))), needs_some="b", kind="matmul",
        gemm=("b", "g", state, "s"), saves=tuple(range(len(call.ins))), saves_out=True,
    )  # fmt: skip
    sizes = {**made.sizes, CELLS: weights[0].shape[0] // gates}
    whole_states = [REPLICATED] * (len(call.ins) - n_states - 1)
    ins = [REPLICATED, *of_cells(n_states), *whole_states]
    if projected:
        for i in range(in_layer - 1, len(weights), in_layer):
            ins[1 + n_states + i] = shard(1)  # weight_hr [projected, cells]
    kinds = ("all_reduce", "all_reduce") if projected else ("all_gather", "reduce_scatter")
    comm = tuple(
        Comm(CELLS, kind, ("b", state), call.out.item_bytes, bool(backward), repeats=n_steps * n_layers * directions)
        for backward, kind in enumerate(kinds)
    )
    return replace(
        made, flops=2.0 * n_rows * n_steps * matrices / prod(sizes.values()), sizes=sizes,
        together={CELLS: frozenset()}, even=frozenset({CELLS}), in_as={CELLS: tuple(ins)},
        out_as={CELLS: (REPLICATED, *of_cells(n_states))},
        lowerings=(Lowering(ACROSS[call.target.split(".")[1]], frozenset({CELLS}), comm),),
    )  # fmt: skip


def of_cells(n_states: int) -> list[Placement]:
    """Return the states' placements where cells are cut: hidden states replicated, cell states sharded."""
    return [REPLICATED, shard(2)][:n_states]


# --- on some of the cells --------------------------------------------------------------------------------------------

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(of the input, of the state, kept)``, all gates of some cells [rows, gates * cells] and what the cells kept of the
step before [rows, cells], to what they keep of this one."""


def _gru(of_input: torch.Tensor, of_state: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    x_reset, x_update, x_new = of_input.chunk(3, -1)
    h_reset, h_update, h_new = of_state.chunk(3, -1)
    update = torch.sigmoid(x_update + h_update)
    new = torch.tanh(x_new + torch.sigmoid(x_reset + h_reset) * h_new)
    return new + update * (kept - new)


def _lstm(of_input: torch.Tensor, of_state: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new cell state of an LSTM and the hidden state computed from it."""
    ins, forget, new, shown = (of_input + of_state).chunk(4, -1)
    kept = torch.sigmoid(forget) * kept + torch.sigmoid(ins) * torch.tanh(new)
    return kept, torch.sigmoid(shown) * torch.tanh(kept)


STEPS: Mapping[str, Step] = {
    "gru": _gru,
    "rnn_tanh": lambda of_input, of_state, kept: torch.tanh(of_input + of_state),
    "rnn_relu": lambda of_input, of_state, kept: torch.relu(of_input + of_state),
}


def _rows_of_cells(weight: torch.Tensor, gates: int, axes: Sequence[str]) -> torch.Tensor:
    """Select the rows of this rank's cells in every gate: [gates * cells, ...] to [gates * local cells, ...]."""
    return part_of(weight.unflatten(0, (gates, -1)), 1, axes).flatten(0, 1)


def _one_way(
    kind: str, x: torch.Tensor, state: torch.Tensor, cells: torch.Tensor | None, weights: Sequence[torch.Tensor],
    has_biases: bool, axes: Sequence[str], backwards: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Run one layer in one direction.

    Args:
        x: [time rows features].
        state: [rows hidden], whole; ``cells``: of an LSTM [rows local cells].

    Returns:
        All steps' states [time rows hidden], the last one, and an LSTM's last cells.
    """
    gates = GATES[kind]
    w_ih, w_hh, *behind = weights
    biases = [_rows_of_cells(b, gates, axes) for b in behind[:2]] if has_biases else [None, None]
    projection = behind[2 * has_biases] if len(behind) > 2 * has_biases else None
    of_input = F.linear(x, _rows_of_cells(w_ih, gates, axes), biases[0])
    w_hh = _rows_of_cells(w_hh, gates, axes)
    times = list(of_input.unbind(0))
    if in_trial():  # the same memory in all, with as many operators as one step has
        n_steps, times = len(times), [of_input.flatten(0, 1)]
        state, cells = state.repeat(n_steps, 1), None if cells is None else cells.repeat(n_steps, 1)
    kept = part_of(state, -1, axes) if cells is None else cells
    shown_by_step: list[torch.Tensor] = []
    for of_step in reversed(times) if backwards else times:
        of_state = F.linear(state, w_hh, biases[1])
        if kind == "lstm":
            kept, shown = _lstm(of_step, of_state, kept)
        else:
            kept = shown = STEPS[kind](of_step, of_state, kept)
        if projection is None:
            state = all_parts(shown, -1, axes)
        else:
            state = total(F.linear(shown, projection), axes, spmd.R)
        shown_by_step.append(state)
    if in_trial():
        states = state.unflatten(0, (n_steps, -1))
        return states, states[-1], None if cells is None else kept.unflatten(0, (n_steps, -1))[-1]
    states = torch.stack(shown_by_step[::-1] if backwards else shown_by_step)
    return states, state, None if cells is None else kept


def _across(
    kind: str, x: torch.Tensor, states: Any, weights: Sequence[torch.Tensor], has_biases: bool, n_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool, *, cut: Mapping[str, Sequence[str]],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    axes, directions = axes_of(cut, CELLS), 2 if bidirectional else 1
    in_layer = len(weights) // (n_layers * directions)
    firsts, cells = states if kind == "lstm" else (states, None)
    x = x.transpose(0, 1) if batch_first else x
    lasts: list[torch.Tensor] = []
    last_cells: list[torch.Tensor] = []
    for layer in range(n_layers):
        ways = []
        for way in range(directions):
            number = layer * directions + way
            of_way = weights[number * in_layer : (number + 1) * in_layer]
            kept = None if cells is None else cells[number]
            shown, last, kept = _one_way(kind, x, firsts[number], kept, of_way, has_biases, axes, bool(way))
            ways.append(shown)
            lasts.append(last)
            last_cells += [] if kept is None else [kept]
        x = torch.cat(ways, -1)
    x = x.transpose(0, 1) if batch_first else x
    return (x, torch.stack(lasts), *([torch.stack(last_cells)] if last_cells else []))


def lstm_across(*args: PyTree, cut: Mapping[str, Sequence[str]]) -> tuple[torch.Tensor, ...]:
    """Compute ``aten.lstm.input`` on this rank's cells."""
    return _across("lstm", *args, cut=cut)


def gru_across(*args: PyTree, cut: Mapping[str, Sequence[str]]) -> tuple[torch.Tensor, ...]:
    """Compute ``aten.gru.input`` on this rank's cells."""
    return _across("gru", *args, cut=cut)


def rnn_tanh_across(*args: PyTree, cut: Mapping[str, Sequence[str]]) -> tuple[torch.Tensor, ...]:
    """Compute ``aten.rnn_tanh.input`` on this rank's cells."""
    return _across("rnn_tanh", *args, cut=cut)


def rnn_relu_across(*args: PyTree, cut: Mapping[str, Sequence[str]]) -> tuple[torch.Tensor, ...]:
    """Compute ``aten.rnn_relu.input`` on this rank's cells."""
    return _across("rnn_relu", *args, cut=cut)


ACROSS: Mapping[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "lstm": lstm_across, "gru": gru_across, "rnn_tanh": rnn_tanh_across, "rnn_relu": rnn_relu_across,
}  # fmt: skip


def _samples(kind: str) -> list[Sample]:
    """Make samples: two bidirectional layers, time first; one layer, batch first, without biases."""
    gates = GATES[kind]

    def weights(n_in: int, hidden: int, layers: int, directions: int, biases: bool) -> list[T]:
        tensors = []
        for layer in range(layers):
            for _ in range(directions):
                width = n_in if layer == 0 else hidden * directions
                tensors += [T((gates * hidden, width)), T((gates * hidden, hidden))]
                tensors += [T((gates * hidden,)), T((gates * hidden,))] if biases else []
        return tensors

    def states(*shape: int) -> T | list[T]:
        return [T(shape), T(shape)] if kind == "lstm" else T(shape)

    return [
        sample(T((3, 4, 5)), states(4, 4, 2), weights(5, 2, 2, 2, True), True, 2, 0.0, True, True, False),
        sample(T((4, 3, 5)), states(1, 4, 2), weights(5, 2, 1, 1, False), False, 1, 0.0, True, False, True),
    ]


def _projecting() -> Sample:
    """Make the sample of an LSTM that projects its states from 4 cells to 2 numbers."""
    given: Sequence[T] = [T((16, 5)), T((16, 2)), T((16,)), T((16,)), T((2, 4))]
    return sample(T((3, 4, 5)), [T((1, 4, 2)), T((1, 4, 4))], [*given], True, 1, 0.0, True, False, False)


for _kind in GATES:
    prove_with(f"aten.{_kind}.input", *_samples(_kind))
prove_with("aten.lstm.input", _projecting())
