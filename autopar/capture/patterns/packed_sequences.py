"""Packed sequences (``pack_padded_sequence``) are traced as the padded batch that they came from.

How many rows torch packs depends on the lengths, and it sorts the batch by them. In a trace the packed rows are all of
the padded batch [rows * steps, features] in its own order, so that rows stay rows of the batch, and may be cut as such:

- what stands behind a row's length never reaches what stands before it: a direction that reads backwards is given each
  row reversed within its length, and the last state is the one at the length. The cell of an LSTM, which is no output,
  is held behind the length: one more feature, 1 there, closes its input gate and opens its forget gate;
- ``pad_packed_sequence`` puts the padding where it belongs. Without ``total_length`` it has as many steps as the
  longest row, so the longest row must fill the batch, which is checked at every call;
- a function of each packed row (an embedding, a linear layer, dropout) stays one, and a cross entropy over packed rows
  leaves out the others. What else reads packed rows is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import rnn

from autopar.capture.branches.data_branches import LABELS, LENGTHS, LONGEST
from autopar.capture.branches.random_answers import site_of
from autopar.capture.trace.patches import PASS, Args, Function, Handler, Kwargs, calling_frame, register
from autopar.capture.trace.recording import Recording, refuse
from autopar.capture.trace.recurrent_layers import LAYERS
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

OF_EACH_ROW = frozenset({
    functional.embedding, functional.linear, functional.dropout, functional.relu, functional.gelu, functional.silu,
    functional.leaky_relu, functional.elu, functional.layer_norm, torch.dropout, torch.relu, torch.tanh, torch.sigmoid,
    torch.Tensor.relu, torch.Tensor.tanh, torch.Tensor.sigmoid, torch.Tensor.float, torch.Tensor.double,
    torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.to, torch.Tensor.contiguous, torch.Tensor.detach,
    torch.Tensor.clone,
})  # fmt: skip
"""Operators that make something packed of packed rows, row by row."""
LOSSES = frozenset({functional.cross_entropy, functional.nll_loss})
ASKING = frozenset({"dim", "ndim", "is_floating_point", "is_complex", "dtype", "device", "requires_grad", "is_cuda",
                    "layout", "is_sparse", "is_nested"})  # fmt: skip
"""What may be asked of a packed tensor: nothing that depends on the number of its rows."""
CLOSED = (-1e4, 1e4, 0.0, 0.0)
"""Added to an LSTM's gates (input, forget, cell, output), shuts the first and opens the second to the last bit in every
dtype."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """A packed batch of ``n`` rows of ``steps`` steps, of which those before ``lengths`` count."""

    n: int
    steps: int
    lengths: torch.Tensor

    def counted(self, device: torch.device) -> torch.Tensor:
        """Return a mask [n steps], True before a row's length."""
        return torch.arange(self.steps, device=device) < self.lengths.to(device)[:, None]

    def unpacked(self, data: torch.Tensor) -> torch.Tensor:
        return data.unflatten(0, (self.n, self.steps))

    def backwards(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [n steps features], each row from its last step that counts to its first; the padding stays."""
        step = torch.arange(self.steps, device=x.device)
        other = torch.where(self.counted(x.device), self.lengths.to(x.device)[:, None] - 1 - step, step)
        return x.gather(1, other[:, :, None].expand(-1, -1, x.shape[2]))

    def last(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [n steps features] at the last step of each row that counts."""
        step = (self.lengths.to(x.device) - 1)[:, None, None]
        return x.gather(1, step.expand(-1, 1, x.shape[2])).squeeze(1)


class _All(int):
    """The padded batch's own number of steps; tells `_pad` that the model passed no `total_length`."""


class PackedAsPadded:
    """Handler that takes packed sequences for the padded batch that they came from."""

    def __init__(self) -> None:
        self._data: dict[int, tuple[torch.Tensor, _Rows]] = {}
        self._counts: dict[int, tuple[torch.Tensor, _Rows]] = {}
        self._order: dict[int, torch.Tensor] = {}

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        """Handle a call of torch."""
        name = getattr(func, "__name__", "")
        if name == "_pack_padded_sequence":
            return self._pack(*args)
        if name == "sort" and calling_frame().f_code is rnn.pack_padded_sequence.__code__:
            order = torch.arange(len(args[0]), device=args[0].device)
            self._order[id(order)] = order
            return args[0], order
        if not self._data and not self._order:
            return PASS
        if name == "_pad_packed_sequence":
            return self._pad(*args)
        if func in LAYERS and id(args[1]) in self._counts:
            return self._layers(func, *args)
        if _among(self._order, args):
            return self._in_order(func, name, args, kwargs)
        if _among(self._counts, args):
            return self._of_counts(func, name, args, kwargs)
        if _among(self._data, (*args, *kwargs.values())):
            return self._of_data(func, name, args, kwargs)
        return PASS

    def refuse_in(self, returned: PyTree) -> None:
        """Refuse packed rows that leave the model: there are more of them than torch's."""
        if _among(self._data, pytree.tree_leaves(returned)):
            raise refuse(
                "packed rows (the data of a PackedSequence) that the model returns, whose number depends on the "
                "lengths,", "return what pad_packed_sequence makes of them, or compute the loss of them in the model",
            )  # fmt: skip

    def _packed(self, data: torch.Tensor, rows: _Rows) -> torch.Tensor:
        self._data[id(data)] = (data, rows)
        return data

    def _pack(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``torch._VF._pack_padded_sequence``: the packed rows, and how many there are at each step."""
        x = x if batch_first else x.transpose(0, 1)
        n, steps = x.shape[:2]
        if lengths.ndim != 1 or len(lengths) != n:
            raise refuse(
                f"pack_padded_sequence of {n} rows with lengths of shape {[*lengths.shape]}",
                f"give one length for each of the {n} rows",
            )
        _never(((lengths < 1) | (lengths > steps)).any(), LENGTHS)
        rows = _Rows(n, steps, lengths.clamp(1, steps))
        counted = rows.counted(x.device).reshape(n, steps, *[1] * (x.ndim - 2))
        data = torch.where(counted, x, torch.zeros((), dtype=x.dtype, device=x.device)).flatten(0, 1)
        counts = torch.empty(steps, dtype=torch.int64)
        self._counts[id(counts)] = (counts, rows)
        return self._packed(data, rows), counts

    def _pad(
        self, data: torch.Tensor, counts: torch.Tensor, batch_first: bool, value: float, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``torch._VF._pad_packed_sequence``."""
        rows = self._counts[id(counts)][1]
        if isinstance(steps, _All):
            _never(rows.lengths.max() < rows.steps, LONGEST)
        x = rows.unpacked(data)
        counted = rows.counted(x.device).reshape(rows.n, rows.steps, *[1] * (x.ndim - 2))
        padded = torch.where(counted, x, torch.full((), value, dtype=x.dtype, device=x.device))
        if steps > rows.steps:
            padded = torch.cat([padded, padded.new_full((rows.n, steps - rows.steps, *x.shape[2:]), value)], dim=1)
        # as torch's lies, so that a view of time and batch is one
        return padded if batch_first else padded.transpose(0, 1).contiguous(), rows.lengths

    def _layers(
        self, func: Function, data: torch.Tensor, counts: torch.Tensor, states: PyTree, weights: Any, has_biases: bool,
        n_layers: int, dropout: float, train: bool, bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Compute torch's operator for packed sequences, with the same parameters."""
        rows = self._counts[id(counts)][1]
        x, n_directions = rows.unpacked(data), 2 if bidirectional else 1
        n_weights = len(weights) // (n_layers * n_directions)
        finals = []
        for layer in range(n_layers):
            outputs = []
            for direction in range(n_directions):
                i = layer * n_directions + direction
                given = [s[i : i + 1] for s in states] if func is torch.lstm else states[i : i + 1]
                of_one = list(weights[i * n_weights : (i + 1) * n_weights])
                read = rows.backwards(x) if direction else x
                output, *final = _one_way(func, read, given, of_one, has_biases, train, rows)
                outputs.append(rows.backwards(output) if direction else output)
                finals.append(final)
            x = torch.cat(outputs, dim=2) if bidirectional else outputs[0]
            if layer < n_layers - 1 and dropout > 0:
                x = torch.dropout(x, dropout, train)
        return self._packed(x.flatten(0, 1), rows), *(torch.stack(kind) for kind in zip(*finals, strict=True))

    def _in_order(self, func: Function, name: str, args: PyTree, kwargs: PyTree) -> PyTree:
        """Handle the order of a batch that is not sorted: it selects all, and is its own inverse."""
        if name in ("to", "cpu", "cuda", "empty_like", "scatter_") and id(args[0]) in self._order:
            return args[0]
        if name == "index_select" and id(args[2]) in self._order:
            return args[0]
        return func(*args, **kwargs)

    def _of_counts(self, func: Function, name: str, args: PyTree, kwargs: PyTree) -> PyTree:
        rows = self._counts[id(args[0])][1] if id(args[0]) in self._counts else None
        if rows is not None and _asked(func, name) in ASKING:
            return func(*args, **kwargs)
        if rows is not None and name == "__getitem__" and args[1] == 0:
            return rows.n
        if rows is not None and name == "size" and calling_frame().f_code is rnn.pad_packed_sequence.__code__:
            return _All(rows.steps)
        raise self._not_packed(name)

    def _of_data(self, func: Function, name: str, args: PyTree, kwargs: Mapping[str, PyTree]) -> PyTree:
        first = self._data.get(id(args[0])) if args else None
        if first is not None and not _among(self._data, (*args[1:], *kwargs.values())):
            if func in OF_EACH_ROW:
                return self._packed(func(*args, **kwargs), first[1])
            of_features = name == "size" and args[1:] in ((-1,), (1,))
            if of_features or _asked(func, name) in ASKING:
                return func(*args, **kwargs)
        if func in LOSSES:
            asked = inspect.signature(func).bind(*args, **kwargs)
            asked.apply_defaults()
            scores, labels = (self._data.get(id(asked.arguments[k])) for k in ("input", "target"))
            classes = labels is not None and not labels[0].is_floating_point()
            if scores is not None and labels is not None and classes and asked.arguments["reduction"] != "none":
                return self._loss(func, asked, scores, labels)
        raise self._not_packed(name)

    def _loss(
        self, func: Function, asked: inspect.BoundArguments, scores: tuple[torch.Tensor, _Rows],
        labels: tuple[torch.Tensor, _Rows],
    ) -> torch.Tensor:  # fmt: skip
        """Compute a loss over packed rows, which leaves out the others."""
        rows, others = scores[1], labels[1]
        if (rows.n, rows.steps) != (others.n, others.steps):
            raise refuse(
                f"a loss of {rows.n} packed rows of up to {rows.steps} steps and labels of {others.n} of up to "
                f"{others.steps}", "pack both by the same lengths",
            )  # fmt: skip
        if rows.lengths is not others.lengths:
            _never((rows.lengths != others.lengths).any(), LABELS)
        counted = rows.counted(labels[0].device).flatten()
        left_out = torch.full((), asked.arguments["ignore_index"], dtype=labels[0].dtype, device=labels[0].device)
        asked.arguments["target"] = torch.where(counted, labels[0], left_out)
        return func(*asked.args, **asked.kwargs)

    def _not_packed(self, name: str) -> Exception:
        return refuse(
            f"'{name}' of a packed sequence (pack_padded_sequence), the number of whose rows depends on the lengths,",
            "call it on the padded batch that pad_packed_sequence(..., total_length=...) makes, and leave the padding "
            "out of the loss; recurrent layers, embeddings, linear layers, dropout and a cross entropy may read packed "
            "sequences as they are",
        )


def _one_way(
    func: Function, x: torch.Tensor, states: PyTree, weights: list[torch.Tensor], has_biases: bool, train: bool,
    rows: _Rows,
) -> tuple[torch.Tensor, ...]:
    """Run one layer in one direction over x [n steps features]; the states [n hidden] are those at the lengths."""
    if func is torch.lstm:
        hidden = weights[0].shape[0] // 4
        behind = (~rows.counted(x.device)).to(x.dtype)[:, :, None]
        gates = torch.cat([x.new_full((hidden, 1), bias) for bias in CLOSED])
        x, weights = torch.cat([x, behind], dim=2), [torch.cat([weights[0], gates], dim=1), *weights[1:]]
    output, *final = func(x, states, weights, has_biases, 1, 0.0, train, False, True)
    return output, rows.last(output), *(cell.squeeze(0) for cell in final[1:])


def _never(condition: torch.Tensor, what: str) -> None:
    """Check at every call that this does not hold: torch would do something else then."""
    torch.ops.autopar.taken(condition, site_of() + what, False)


def _among(known: Mapping[int, Any], values: Iterable[object]) -> bool:
    """Check that any of `values`, or any in a list among them, is in `known` by its identity."""
    for value in values:
        if id(value) in known or (isinstance(value, (tuple, list)) and _among(known, value)):
            return True
    return False


def _asked(func: Any, name: str) -> str:
    """Return the name of a function, or of the property that it gives."""
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def _handler(record: Recording) -> PackedAsPadded:
    handler = PackedAsPadded()
    record.outputs_checked.append(handler.refuse_in)
    return handler


register(Handler("packed sequences", "the number of packed rows depends on the lengths", _handler))
