"""Gradients on their way from the used to the stored placement, while the backward goes on.

Every rank runs the same program, so gradients become ready in the same order everywhere and collectives are launched
in that order without asking. A large gradient is reduced in place as soon as it is there; small ones travel in flat
buckets. What needs several collectives starts the next one when two later ones have been launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.parameters.redistribution import ReshardStep, apply, dense, of_its_own, own_part, stacked
from autopar.runtime.parameters.state import HeldParam
from autopar.runtime.ranks.collectives import reduce_scatter_flat

BUCKET_BYTES = 25 << 20
ALONE_BYTES = 1 << 20
"""Gradients from this size on are reduced alone, without a copy into a bucket."""


def bucket_bytes(total: int) -> int:
    """Return the size of a bucket: small models get several, so that the first can travel before the last is full."""
    return max(ALONE_BYTES, min(BUCKET_BYTES, total // 8))


class _Travel:
    """One tensor of gradients and what is still to be done with it."""

    def __init__(
        self, held_params: Sequence[HeldParam], value: torch.Tensor, stages: Sequence[ReshardStep], flat: bool
    ) -> None:
        self.held_params, self.value, self.stages, self.flat = held_params, value, list(stages), flat
        self.work: Any = None
        self.keep: torch.Tensor | None = None
        self.padded: ReshardStep | None = None
        self.leaves = held_params[0].carrier is not None

    def launch(self) -> None:
        """Begin the next collective; slices on the way are done at once."""
        self.wait()
        while self.stages and self.work is None:
            step = self.stages.pop(0)
            if step.backward == "all_reduce":
                self.value = self.value.contiguous()
                self.work = dist.all_reduce(self.value, group=step.group, async_op=True)
            elif step.backward == "reduce_scatter":
                parts = self.value if self.flat else stacked(self.value, step.cut.dim, step.n).contiguous()
                out = torch.empty_like(parts[0])
                self.keep, self.padded = parts, None if self.flat else step
                self.work = reduce_scatter_flat(out, parts.flatten(0, 1), group=step.group, async_op=True)
                self.value = out
            else:
                # a slice must not keep the whole gradient alive
                self.value = of_its_own(apply(step.backward, self.value, step, backward=True))

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work, self.keep = None, None
            if self.padded is not None:
                self.value, self.padded = own_part(self.value, self.padded.cut, self.padded), None

    def give(self) -> None:
        """Add the reduced gradients to what the parameters are to get."""
        while self.stages or self.work is not None:
            self.launch()
            self.wait()
        if not self.flat:
            value = self.value
            if value.shape != self.held_params[0].stored_shape or value._base is not None:
                value = value.contiguous() if not value.is_contiguous() else value
            self.held_params[0].add(_as_parameter(self.held_params[0], value))
            return
        offset = 0
        for held_param in self.held_params:
            m = prod(held_param.padded_shape)
            value = self.value[offset : offset + m].view(held_param.padded_shape)
            if held_param.padded_shape != held_param.stored_shape:
                value = own_part(value, held_param.adjoint[0].cut, held_param.adjoint[0]).contiguous()
            held_param.add(_as_parameter(held_param, value))
            offset += m


def _as_parameter(held_param: HeldParam, grad: torch.Tensor) -> torch.Tensor:
    return grad.to(held_param.param.dtype)


class Reducer:
    """Takes gradients as they become ready; in :meth:`finish` the parameters have them to come (``HeldParam.add``).

    Args:
        dtype: gives the dtype in which they are added up over ranks; None for their own.
    """

    def __init__(self, limit: int, dtype: Callable[[], torch.dtype | None] = lambda: None) -> None:
        self.limit, self.dtype = limit, dtype
        self.travels: list[_Travel] = []
        self.open: dict[Any, list[tuple[HeldParam, torch.Tensor]]] = {}
        self.filled: dict[Any, int] = {}

    def add(self, held_param: HeldParam, grad: torch.Tensor) -> None:
        """Add a gradient in the used placement; a sparse one (``nn.Embedding(sparse=True)``) is sent dense."""
        stages = held_param.adjoint
        grad = in_dtype(dense(grad), self.dtype())
        n_bytes = grad.numel() * grad.element_size()
        if n_bytes >= min(ALONE_BYTES, self.limit) or not _fits_bucket(stages):
            self._send(_Travel([held_param], grad, stages, flat=False))
            return
        ways = tuple((reshard_step.backward, id(reshard_step.group)) for reshard_step in stages)
        key = ways, grad.dtype, held_param.carrier
        self.open.setdefault(key, []).append((held_param, grad))
        self.filled[key] = self.filled.get(key, 0) + n_bytes
        if self.filled[key] >= self.limit:
            self._flush(key)

    def _flush(self, key: Any) -> None:
        entries = self.open.pop(key)
        self.filled[key] = 0
        held_params = [held_param for held_param, _ in entries]
        first = held_params[0].adjoint[0]
        if first.backward == "reduce_scatter":
            dims = [held_param.adjoint[0].cut.dim for held_param in held_params]
            rows = [stacked(g, d, first.n).reshape(first.n, -1) for d, (_, g) in zip(dims, entries, strict=True)]
            value = torch.cat(rows, 1)
        else:
            value = torch.cat([g.reshape(-1) for _, g in entries])
        self._send(_Travel(held_params, value, held_params[0].adjoint, flat=True))

    def _send(self, travel: _Travel) -> None:
        travel.launch()
        self.travels.append(travel)
        if len(self.travels) > 2 and self.travels[-3].stages:
            self.travels[-3].launch()
        for earlier in [each for each in self.travels[:-1] if each.leaves]:  # the device needs their memory
            self.travels.remove(earlier)
            earlier.give()

    def finish(self) -> None:
        """Send what is left, wait for everything, and hand over."""
        for key in list(self.open):
            self._flush(key)
        travels, self.travels = self.travels, []
        while any(t.stages for t in travels):
            for travel in travels:
                if travel.stages:
                    travel.launch()
        for travel in travels:
            travel.give()

    def drop(self) -> None:
        """Forget what an interrupted backward left behind."""
        travels, self.travels, self.open, self.filled = self.travels, [], {}, {}
        for travel in travels:
            with contextlib.suppress(RuntimeError):  # a collective that failed may be what has interrupted it
                travel.wait()


def _fits_bucket(stages: Sequence[ReshardStep]) -> bool:
    return stages[0].backward in ("all_reduce", "reduce_scatter") and all(
        reshard_step.backward == "all_reduce" for reshard_step in stages[1:]
    )


def in_dtype(grad: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Cast a gradient to the dtype in which it is reduced over ranks."""
    return grad if dtype is None or not grad.is_floating_point() else grad.to(dtype)
