"""Steps of the ranks of a mesh have their collectives in one order, or are refused before they run.

A step is built on each rank for itself, from the same calls in the same order, on that rank's shapes. Where two ranks
came to collectives in different orders all the same, they would wait for each other for ever, or take one's numbers for
another's. So before a step runs for the first time, the ranks of its mesh tell each other, in the process group's
store, which collectives it has, of what kind and along which axes.
"""

from __future__ import annotations

import base64
import itertools
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import RunError
from autopar.runtime.ranks.ended import ended
from autopar.runtime.ranks.store_meeting import LEAST_SECONDS, LONGEST_LOOK_SECONDS, TOLD_AFTER_SECONDS, looks
from autopar.runtime.ranks.store_names import next_name
from autopar.torch_private import default_store, group_names, timeout_of_world

WHAT_TO_DO = (
    "they would wait for each other for ever, or take one's numbers for another's. Run the program without compile(), "
    "or with another backend"
)

Places = dict[int, tuple[int, ...]]
"""By rank, where it is on a mesh."""
Order = tuple[str, ...]
"""The collectives of a graph, such as ``all_reduce float32[8, 6] sum along data``."""
_ALIKE = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
"""Collectives whose results have one shape on all ranks, which tells them apart."""


def collectives_of(nodes: Iterable[torch.fx.Node], axes: Sequence[str], places: Places) -> Order:
    """List the collectives among nodes of a step, in their order, without the waits for them.

    Args:
        axes: names of the mesh's.
    """
    collectives, groups = [], group_names()
    for node in nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", "") not in ("_c10d_functional", "c10d"):
            continue
        target: Any = node.target
        name = target._schema.name.split("::")[1]
        if name == "wait_tensor":
            continue
        words = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, str)]
        value = node.meta.get("val")
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
        if isinstance(value, torch.Tensor) and name.removesuffix("_") in _ALIKE:
            dtype += str([*value.shape])
        named = [_along(groups[word], axes, places) if word in groups else word for word in words]
        collectives.append(" ".join([name, *([dtype] if dtype else []), *named]))
    return tuple(collectives)


def _along(group: dist.ProcessGroup, axes: Sequence[str], places: Places) -> str:
    """Return the axes of a mesh along which the ranks of a group differ: each rank names the group differently."""
    ranks = dist.get_process_group_ranks(group)
    if any(rank not in places for rank in ranks):
        return f"among ranks {ranks}"
    differing = [name for axis, name in enumerate(axes) if len({places[rank][axis] for rank in ranks}) > 1]
    return f"along {', '.join(differing)}"


def difference(orders: Sequence[tuple[int, Order]]) -> str:
    """Say how the collectives of some ranks differ; empty if they do not.

    Args:
        orders: ranks with theirs.
    """
    first, wanted = orders[0]
    for rank, order in orders[1:]:
        if order == wanted:
            continue
        place = next(
            (k for k, (a, b) in enumerate(zip(wanted, order, strict=False)) if a != b), min(len(wanted), len(order))
        )
        here, there = (each[place] if place < len(each) else "nothing more" for each in (wanted, order))
        return (
            f"the compiled graphs of ranks {first} and {rank} differ in the order of their collectives: at place "
            f"{place + 1}, of {len(wanted)} and {len(order)}, rank {first} has {here}, rank {rank} {there}; "
            + WHAT_TO_DO
        )
    return ""


class OneOrder:
    """The order of collectives of one compiled program on the ranks of a mesh.

    Args:
        heard: what is known of a rank that failed, for which it is in vain to wait; empty if nothing is.
    """

    def __init__(self, device_mesh: DeviceMesh, heard: Callable[[], str]) -> None:
        self.heard = heard
        self.axes = device_mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(device_mesh.ndim))
        every = itertools.product(*(range(n) for n in device_mesh.mesh.shape))
        self.places: Places = dict(zip(device_mesh.mesh.flatten().tolist(), every, strict=True))
        self.ranks = tuple(sorted(self.places))
        self.name = next_name("compiled", self.ranks)
        self.steps = 0

    def compare(self, nodes: Iterable[torch.fx.Node]) -> None:
        """Agree on the collectives of a step before it runs for the first time.

        Raises:
            RunError: ranks have other ones, or one does not come.
        """
        self.steps += 1
        self.agree(collectives_of(nodes, self.axes, self.places), str(self.steps))

    def agree(self, order: Order, name: str) -> None:
        """Hear of each rank of the mesh what it has; wait for it for half an hour, or as long as a collective would.

        Raises:
            RunError: as for :meth:`compare`.
        """
        if said := self._agreed(order, name):
            raise RunError(said)

    def _agreed(self, order: Order, key: str) -> str:
        """Say how the ranks differ; the last one that arrives does."""
        store, rank = dist.PrefixStore(f"{self.name}/{key}", default_store()), dist.get_rank()
        store.set(str(rank), base64.b85encode(zlib.compress("\n".join(order).encode())).decode())
        if store.add("count", 1) == len(self.ranks):
            texts = store.multi_get([str(each) for each in self.ranks])
            orders = [
                (each, tuple(zlib.decompress(base64.b85decode(text)).decode().split("\n")))
                for each, text in zip(self.ranks, texts, strict=True)
            ]  # fmt: skip
            said = difference(orders)
            store.set("said", said or "alike")
            return said
        began, looked, told = time.monotonic(), time.monotonic(), False
        end = began + max(LEAST_SECONDS, timeout_of_world().total_seconds())
        for _ in looks():
            if store.check(["said"]):
                said = store.get("said").decode()
                return "" if said == "alike" else said
            now = time.monotonic()
            if now - looked < LONGEST_LOOK_SECONDS:
                continue
            looked = now
            if news := self.heard():
                raise RunError(news)
            for gone, how in ended(self.ranks).items():
                if not store.check([str(gone)]):
                    raise RunError(f"rank {gone} {how}; rank {rank} waited for it to compile its program")
            missing = [each for each in self.ranks if not store.check([str(each)])] if now > end else []
            if now > began + TOLD_AFTER_SECONDS and not told:
                told = True
                missing = missing or [each for each in self.ranks if not store.check([str(each)])]
                print(
                    f"autopar: rank {rank} has compiled its program and waits for ranks {missing}, which still compile "
                    "theirs, or have not called compile()", file=sys.stderr, flush=True,
                )  # fmt: skip
            if now > end:
                raise RunError(
                    f"rank {rank} has compiled its program, and ranks {missing} have not: call compile() on all ranks"
                )
        raise AssertionError
