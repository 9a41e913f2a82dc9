"""Buffers of a model that its forward replaces or registers while it is traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar.capture.python.guards import ReadValue
from autopar.capture.trace.value_origins import depends_on_data

Tables = list[tuple[torch.nn.Module, str, dict[str, torch.Tensor | None]]]
"""Modules and their paths, with their buffers: register_buffer sets none of their attributes."""


class BufferWrites:
    """Notes of the buffers of modules.

    Attributes:
        held: as they are before the trace.
        traced: the same with the trace's own tensors, when forward begins.
        fills: buffers that were None, and that forward fills with what no data is in: the model's own call fills them,
            too, which is no change of the program.
        only_set: buffers that were registered as None, that nothing reads, and that are given tensors of data: what
            they are called, and where.
    """

    def __init__(self) -> None:
        self.held: Tables = []
        self.traced: Tables = []
        self.fills: set[tuple[int, str]] = set()
        self.only_set: list[str] = []

    def begin(self, owners: Iterable[tuple[Any, str]]) -> None:
        """Note the buffers of all modules among some objects, before a trace."""
        self.held = [(m, path, dict(m._buffers)) for m, path in owners if isinstance(m, torch.nn.Module)]

    def forward_begins(self) -> None:
        """Note the trace's own buffers."""
        self.traced = [(m, path, dict(m._buffers)) for m, path, _ in self.held]

    def before(self) -> list[torch.Tensor | None]:
        """Return the trace's buffers at the beginning of forward."""
        return [buffer for _, _, buffers in self.traced for buffer in buffers.values()]

    def forward_ends(self, set_first: Mapping[tuple[int, str], str]) -> dict[tuple[int, str], str]:
        """Copy another tensor in a buffer's place into the buffer.

        Args:
            set_first: attributes that were given tensors before anything read them: what they are called, and where.

        Returns:
            The buffers that hold data of this call for the next one, and what they are called.
        """
        kept: dict[tuple[int, str], str] = {}
        buffers_before = self.before()
        assigned: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]] = []
        for module, path, buffers in self.traced:
            for name, value in module._buffers.items():
                before, key = buffers.get(name), (id(module), name)
                if before is value or not isinstance(value, torch.Tensor):
                    continue
                if before is not None and (before.shape, before.dtype) == (value.shape, value.dtype):
                    # two buffers may change places
                    shared = value._is_view() or any(value is b for b in buffers_before)
                    assigned.append((module, name, before, value.detach().clone() if shared else value))
                elif before is None and not depends_on_data(value, buffers_before):
                    self.fills.add(key)
                elif before is None and name in buffers and key in set_first:
                    self.only_set.append(set_first[key])
                else:
                    kept[key] = f"{ReadValue(path, name, None).label}, which forward registers as a buffer"
        with torch.no_grad():
            for module, name, before, value in assigned:  # another tensor in a buffer's place: it takes its values
                module._buffers[name] = before.copy_(value)
        return kept

    def restore(self) -> None:
        """Take the trace's own tensors, which are of no use to anybody, out of buffers that held none."""
        for module, _, buffers in self.held:
            for name in [name for name in module._buffers if buffers.get(name) is None]:
                if name in buffers:
                    module._buffers[name] = None
                else:
                    del module._buffers[name]
