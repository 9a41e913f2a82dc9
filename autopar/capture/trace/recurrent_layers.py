"""Stacks of recurrent layers are traced layer by layer, so that the stages of a pipeline may part them.

Dropout between layers becomes an operator of its own: torch's operators for all layers at once draw its numbers by
torch's generator, which ranks would draw differently. What is computed stays the same, and so it is in eval mode, where
the dropout is off.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.trace.patches import PASS, Args, Function, Kwargs
from autopar.words.trees import PyTree

LAYERS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def layer_by_layer(func: Function, args: Args, kwargs: Kwargs) -> PyTree:
    """Take ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` of several layers apart."""
    # Of packed sequences the third argument is the state, not the list of weights.
    if len(args) == 9 and isinstance(args[2], (list, tuple)) and isinstance(args[3], bool):
        x, states, weights, has_biases, n_layers, dropout, *rest = args
        if n_layers > 1 and not kwargs:
            return _each_layer(func, x, states, weights, has_biases, n_layers, dropout, *rest)
    return PASS


def _each_layer(
    func: Function, x: torch.Tensor, states: PyTree, weights: Any, has_biases: bool, n_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Compute torch's operator, with the same parameters.

    x is [time batch features] (or [batch time features]), states [layers * directions, batch, hidden], of an LSTM two
    of them, and the weights are those of one layer after the other.
    """
    directions = 2 if bidirectional else 1
    n_weights = len(weights) // n_layers
    finals: list[tuple[torch.Tensor, ...]] = []
    for layer in range(n_layers):
        of_layer = slice(layer * directions, (layer + 1) * directions)
        given = [state[of_layer] for state in states] if func is torch.lstm else states[of_layer]
        of_one = list(weights[layer * n_weights : (layer + 1) * n_weights])
        x, *final = func(x, given, of_one, has_biases, 1, 0.0, train, bidirectional, batch_first)
        finals.append(tuple(final))
        if layer < n_layers - 1 and dropout > 0:
            if batch_first:  # drawn as torch's operator draws, whose steps come first
                x = torch.dropout(x.transpose(0, 1), dropout, train).transpose(0, 1)
            else:
                x = torch.dropout(x, dropout, train)
    return (x, *(torch.cat(of_layers) for of_layers in zip(*finals, strict=True)))
