"""Ranks that agree: a process group, one plan, and errors that are raised everywhere or nowhere."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar import errors
from autopar.errors import AutoparError, MeshError, RunError
from autopar.runtime.ranks.collectives import as_sent
from autopar.runtime.ranks.devices import choose_device
from autopar.runtime.ranks.failures import is_of_another_rank
from autopar.runtime.ranks.groups import groups_on
from autopar.runtime.ranks.presence import after_loss
from autopar.runtime.ranks.store_meeting import from_first, said_by
from hardware_profiles.strict import parse_json

TIMEOUT_SECONDS = 1800.0


def ensure_process_group(timeout_seconds: float = TIMEOUT_SECONDS, model: torch.nn.Module | None = None) -> None:
    """Use the process group that exists, else the one that torchrun describes, else a group of this process alone.

    Args:
        model: whose parameters may say which GPU is this rank's.

    Raises:
        MeshError: as for :func:`~autopar.runtime.ranks.devices.choose_device`.
    """
    choose_device(model)
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timeout)
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def mesh_group(mesh: DeviceMesh) -> Any:
    """Return the process group of all ranks of a mesh.

    Raises:
        MeshError: this process is not in the mesh.
    """
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} is not in the mesh {mesh}; call parallelize only on its ranks")
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    if mesh.ndim == 1:
        return mesh.get_group()
    return groups_on(mesh).along(mesh, range(mesh.ndim))


def share(group: dist.ProcessGroup | None, value: str | None, error: BaseException | None) -> str:
    """Return the first rank's ``value`` on every rank of ``group``, or raise its ``error`` on every rank.

    The first rank may take any time: the others wait in the store, not in a collective.
    """
    if dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        assert value is not None
        return value
    told = {"value": value} if error is None else {"error": [type(error).__name__, str(error)]}
    answer = parse_json(from_first(group, json.dumps(told)))
    if "error" in answer:
        if error is not None:
            raise error
        kind, text = answer["error"]
        raise _class_of(kind)(f"on rank 0: {text}" if _class_of(kind) is AutoparError else text)
    return str(answer["value"])


def together(group: dist.ProcessGroup | None, error: BaseException | None) -> None:
    """Raise on every rank of ``group`` if any rank has an error: its own, or that of the lowest rank with one."""
    if dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    ranks = tuple(dist.get_process_group_ranks(group))
    if error is not None and is_of_another_rank(error) and (news := after_loss(ranks)):
        raise RunError(f"{news}\n  rank {dist.get_rank()} waited for it: {error}") from error
    said = said_by(ranks, None if error is None else json.dumps([type(error).__name__, str(error)]))
    if error is not None:
        raise error
    for rank, text in said.items():
        kind, message = parse_json(text)
        raise _class_of(kind)(f"on rank {ranks.index(rank)}: {message}")


@contextlib.contextmanager
def everywhere(
    group: dist.ProcessGroup | None, told: Callable[[Exception], Exception] = lambda error: error
) -> Iterator[None]:
    """Raise an error of one rank of ``group`` on all of them at the end of this context, which every rank reaches.

    Args:
        told: what is raised for an error of this rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as e:
        error = told(e)
    together(group, error)


class Stopped(RunError):
    """Another rank failed; :func:`together` has its error."""


class Meeting:
    """A check between ranks that do the same steps, so that none waits for one that has failed.

    They report to each other before each step, and once at the end (:meth:`close`).
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
        self.group, self.open = group, True
        self.device = device or torch.device("cpu")

    def tell(self, failed: bool = False) -> None:
        """Hear whether all is well.

        Raises:
            Stopped: another rank failed.
        """
        any_failed = torch.tensor([int(failed)], device=self.device)
        dist.all_reduce(any_failed, op=dist.ReduceOp.MAX, group=self.group)
        if any_failed.item():
            self.open = False
            if not failed:
                raise Stopped("another rank failed while it took its share of the model")

    def close(self, failed: bool) -> None:
        """Tell the others that this rank comes no more; call it on every rank.

        Raises:
            Stopped: another rank failed.
        """
        if self.open:
            self.tell(failed)
            self.open = False


class SentValues(Meeting):
    """Tensors by name, on every rank, each from the rank that has it or makes it.

    Ranks ask for the same names in the same order, and meet before each.
    """

    def __init__(
        self, named: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        """Initialize the object.

        Args:
            named: shapes and dtypes by name, the same on all ranks.
            device: the device on which values travel and arrive: the mesh's, for which the group has a backend.
        """
        super().__init__(group, device)
        self.named = named
        self.room: torch.Tensor | None = None

    def source(self, name: str) -> int:
        """Return the rank that has a value."""
        raise NotImplementedError

    def take(self, name: str) -> torch.Tensor:
        """Return the whole value; called on its source."""
        raise NotImplementedError

    def __call__(self, name: str) -> torch.Tensor:
        """Return the whole value of a parameter or buffer, for reading until the next one is requested.

        All arrive in one place, so a rank needs room for the largest of them and no more.

        Raises:
            Stopped: another rank failed.
        """
        like, source = self.named[name], self.source(name)
        if dist.get_rank() == source:
            whole = self.take(name).detach().to(self.device).contiguous()
            if whole.shape != like.shape or whole.dtype != like.dtype:
                raise RunError(
                    f"the initial value of '{name}' is {whole.dtype} of shape {tuple(whole.shape)}, the model has "
                    f"{like.dtype} of shape {tuple(like.shape)} there"
                )
        else:
            whole = self._place(like)
        self.tell()
        dist.broadcast(as_sent(whole), src=source, group=self.group)
        return whole

    def _place(self, like: torch.Tensor) -> torch.Tensor:
        """Return the place where a value of that shape and dtype arrives."""
        if self.room is None:
            most = max(x.numel() * x.element_size() for x in self.named.values())
            self.room = torch.empty(most, dtype=torch.uint8, device=self.device)
        return self.room[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


class FirstRankValues(SentValues):
    """The first rank's tensors by name, on every rank: models that were built without a common seed differ."""

    def __init__(
        self, named: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, first: int, device: torch.device
    ) -> None:
        super().__init__(named, group, device)
        self.first = first

    def source(self, name: str) -> int:
        """Return the first rank."""
        return self.first

    def take(self, name: str) -> torch.Tensor:
        """Return this rank's own value."""
        return self.named[name]


def seeded_alike(group: dist.ProcessGroup | None) -> bool:
    """Check that torch's generator has the same seed on this rank as on the first; a collective call."""
    return int(share(group, str(torch.initial_seed()), None)) == torch.initial_seed()


def same_error(group: dist.ProcessGroup | None, problem: str | None, kind: type[AutoparError]) -> None:
    """Call :func:`together` with a message."""
    together(group, kind(problem) if problem else None)


def _class_of(name: str) -> type[AutoparError]:
    kind = getattr(errors, name, AutoparError)
    return kind if isinstance(kind, type) and issubclass(kind, AutoparError) else AutoparError
