"""Muon on matrices in pieces: each is orthogonalized by one rank of the mesh that stores it.

Momentum is computed element by element, so it stays in pieces. What the Newton-Schulz iteration begins with, in
bfloat16, is gathered by one rank per matrix, its owner (:mod:`.to_owners`), which orthogonalizes it as one device does.
Then each rank gets the pieces of the updates of what it stores. So a matrix travels once there and once back, in two
bytes an element, and its many operations are done once, not on every rank. Owners have about as much work each
(:mod:`cost_models.matrix_steps`). Matrices too many to be whole at once go in buckets: the next one is gathered, and
the last one's updates are sent, while one is computed.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.parameters.placed_alike import state_of
from autopar.runtime.parameters.state import local_of
from autopar.runtime.parameters.to_owners import Gathering, Scattering, Stored, ToOwners, ranks_of
from autopar.torch_private import MUON_RATE, ORTHOGONALIZE
from cost_models.matrix_steps import SENT_ITEM_BYTES, buckets_of, is_alone, newton_schulz_flops

_OPTIONS = frozenset((
    "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn", "has_complex",
    "foreach",
))  # fmt: skip
"""The options of Muon's functional form that are known here."""


class Spread(NamedTuple):
    """Who steps on which matrices of a mesh.

    Attributes:
        alone: the numbers of those that every rank steps on itself.
        ways: of each bucket the numbers of its matrices, and their way to the owners.
    """

    alone: tuple[int, ...]
    ways: tuple[tuple[tuple[int, ...], ToOwners], ...]


@lru_cache(maxsize=64)
def spread(device_mesh: DeviceMesh, matrices: tuple[Stored, ...], item_bytes: int = SENT_ITEM_BYTES) -> Spread:
    """Give each matrix an owner; all ranks of the mesh call it together the first time.

    Args:
        item_bytes: bytes of an element as it is sent.

    Raises:
        RunError: a rank of the mesh steps on other matrices.
    """
    same_everywhere(device_mesh, matrices)
    cut = [any(p.dim is not None and n > 1 for p, n in zip(m.state, device_mesh.shape, strict=True)) for m in matrices]
    alone = [i for i, matrix in enumerate(matrices) if is_alone(matrix.shape, cut[i])]
    sent = sorted({*range(len(matrices))} - {*alone})
    work = [newton_schulz_flops(matrices[i].shape) for i in sent]
    n_bytes = [item_bytes * prod(matrices[i].shape) for i in sent]
    ways = []
    for numbers, owners in buckets_of(work, n_bytes, device_mesh.size()):
        of_bucket = tuple(sent[k] for k in numbers)
        ways.append((of_bucket, ToOwners(device_mesh, [matrices[i] for i in of_bucket], owners)))
    return Spread(tuple(alone), tuple(ways))


def can_step(step: Callable[..., Any], lists: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Check whether :func:`step_on_owners` does what Muon's functional form ``step`` does with these arguments.

    Without Nesterov's momentum torch's iteration begins in the momentum itself where that is bfloat16, and changes it.
    """
    if len(lists) != 3 or not options_are_known(step) or options.get("has_complex") or options.get("foreach"):
        return False
    if not all(isinstance(param, DTensor) and param.ndim == 2 for param in lists[0]):
        return False
    if not options.get("nesterov") and any(buffer.dtype == torch.bfloat16 for buffer in lists[2]):
        return False
    return all(
        isinstance(value, DTensor) and value.shape == param.shape and value.device_mesh == param.device_mesh
        and value.placements == param.placements
        for values in lists[1:] for param, value in zip(lists[0], values, strict=True)
    )  # fmt: skip


@cache
def options_are_known(step: Callable[..., Any]) -> bool:
    """Check that Muon's functional form has the options that are known here, and no other."""
    found = inspect.signature(step).parameters.values()
    return {p.name for p in found if p.kind is p.KEYWORD_ONLY} == _OPTIONS


class _Muon(NamedTuple):
    """A step of Muon on matrices of one mesh, in pieces (:func:`torch.optim._muon.muon`)."""

    params: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    options: Mapping[str, Any]

    def begun(self, i: int) -> torch.Tensor:
        """Update the momentum of a matrix; return this rank's piece of what is to be orthogonalized, in bfloat16."""
        grad, buffer, momentum = local_of(self.grads[i]), local_of(self.buffers[i]), self.options["momentum"]
        buffer.lerp_(grad, 1 - momentum)
        return (grad.lerp(buffer, momentum) if self.options["nesterov"] else buffer).bfloat16()

    def orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        """Orthogonalize a whole matrix, which is overwritten."""
        o = self.options
        result: torch.Tensor = ORTHOGONALIZE.get()(matrix, o["ns_coefficients"], o["ns_steps"], o["eps"])
        return result

    def finish(self, i: int, update: torch.Tensor) -> None:
        """Apply this rank's piece of an update."""
        lr, param = self.options["lr"], local_of(self.params[i])
        lr = lr.squeeze() if isinstance(lr, torch.Tensor) and lr.ndim else lr
        rate = MUON_RATE.get()(lr, self.options["adjust_lr_fn"], self.params[i].shape)
        param.mul_(1 - lr * self.options["weight_decay"])
        param.add_(update, alpha=-rate)


@torch.no_grad()
def step_on_owners(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor],
    options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Do a step of Muon on DTensors [m, n], each with gradient and momentum of its placements.

    All ranks of their meshes call it alike; ``options`` are those of Muon's functional form.

    Raises:
        RunError: a rank of a mesh steps on other matrices.
    """
    muon = _Muon(params, grads, buffers, options)
    of_mesh: dict[DeviceMesh, list[int]] = {}
    for i, param in enumerate(params):
        assert isinstance(param, DTensor)
        of_mesh.setdefault(param.device_mesh, []).append(i)
    for device_mesh, numbers in of_mesh.items():
        stored = tuple(Stored(tuple(params[i].shape), state_of(params[i])) for i in numbers)  # type: ignore[arg-type]
        alone, ways = spread(device_mesh, stored)
        coming = _gathered(muon, ways[0], numbers) if ways else None
        for k in alone:
            begun = muon.begun(numbers[k])
            in_momentum = begun.data_ptr() == local_of(buffers[numbers[k]]).data_ptr()
            muon.finish(numbers[k], muon.orthogonal(begun.clone() if in_momentum else begun))
        leaving: tuple[tuple[int, ...], Scattering] | None = None
        for at, (of_bucket, way) in enumerate(ways):
            assert coming is not None
            matrices = coming.wait()
            coming = _gathered(muon, ways[at + 1], numbers) if at + 1 < len(ways) else None
            updates = {k: muon.orthogonal(matrices.pop(k)) for k in list(matrices)}
            if leaving is not None:
                _finish(muon, numbers, *leaving)
            example = local_of(params[numbers[of_bucket[0]]]).new_empty(0, dtype=torch.bfloat16)
            leaving = of_bucket, way.scatter(updates, example)
        if leaving is not None:
            _finish(muon, numbers, *leaving)


def _gathered(muon: _Muon, bucket: tuple[tuple[int, ...], ToOwners], numbers: Sequence[int]) -> Gathering:
    of_bucket, way = bucket
    return way.gather([muon.begun(numbers[k]) for k in of_bucket])


def _finish(muon: _Muon, numbers: Sequence[int], of_bucket: Sequence[int], scattering: Scattering) -> None:
    for k, piece in zip(of_bucket, scattering.wait(), strict=True):
        muon.finish(numbers[k], piece)


def same_everywhere(device_mesh: DeviceMesh, matrices: Sequence[tuple[Any, ...]]) -> None:
    """Check that all ranks of a mesh step on the same matrices, lest one waits for what nobody sends.

    Raises:
        RunError: one does not.
    """
    group, _ = ranks_of(device_mesh)
    digest = hashlib.blake2b(repr([tuple(each) for each in matrices]).encode(), digest_size=7).digest()
    mine = torch.tensor([len(matrices), int.from_bytes(digest, "little")], device=device_mesh.device_type)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    found = torch.stack(everyone).tolist()
    if any(each != found[0] for each in found):
        counts = sorted({count for count, _ in found})
        what = f"{counts[0]} matrices on one rank, {counts[-1]} on another" if len(counts) > 1 else "other matrices"
        raise RunError(
            f"a step on whole matrices: ranks of one mesh step on {what}; give the optimizer the same parameters in "
            "the same order on every rank, and gradients to the same ones (zero_grad, or p.grad = None, on all ranks)"
        )
