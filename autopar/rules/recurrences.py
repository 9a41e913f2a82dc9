"""Recurrent layers, ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: rows of the batch may be cut, all layers and times at once.

Time stays whole, since a step needs the one before it. So does what is hidden: a step needs all of the state that the
one before it made, and ranks that had a part each would have to meet at every step. Dropout between layers is traced as
an operator of its own (:mod:`autopar.capture.trace.recurrent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autopar.errors import RuleError
from autopar.rules.notation import Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import Sample, T, prove_with, rule, sample

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Matrix products with the input, and as many with the state, of one step."""


@rule(*[f"aten.{kind}.input" for kind in GATES])
def recurrent(call: Call) -> Rule:
    """``(input, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)``."""
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
    return replace(made, flops=2.0 * n_rows * n_steps * matrices / prod(made.sizes.values()))


def _samples(kind: str) -> list[Sample]:
    """Two layers of both directions, time first; one layer, batch first, without biases."""
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
    """An LSTM whose states are projected from 4 cells to 2 numbers."""
    given: Sequence[T] = [T((16, 5)), T((16, 2)), T((16,)), T((16,)), T((2, 4))]
    return sample(T((3, 4, 5)), [T((1, 4, 2)), T((1, 4, 4))], [*given], True, 1, 0.0, True, False, False)


for _kind in GATES:
    prove_with(f"aten.{_kind}.input", *_samples(_kind))
prove_with("aten.lstm.input", _projecting())

__all__ = ["GATES", "recurrent"]
