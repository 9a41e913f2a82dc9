"""Compiled programs of the ranks of a mesh have their collectives in one order, or are refused before they run.

What a program consists of is the same on all ranks, and so is the order of its collectives. A compiler may put what a
graph does not order in any order, and decides by sizes what the backward makes again; ranks whose pieces are unequal
have other sizes. Where two ranks then come to collectives in different orders, they wait for each other for ever, or
take one's numbers for another's. So the first time that a compiled graph is to run, the ranks of its mesh tell each
other, in the process group's store, which collectives it has, of what kind and along which axes.

What AOTAutograd hands to a backend is looked at: the graphs of forward and backward after their partition. Inductor
keeps the order of collectives from there on. Of a backend that does not go by AOTAutograd nothing is known, and nothing
is compared.

A graph that only this rank compiles again, because something changed for it alone, is compared with what was agreed on
before; the others, which have nothing new, do not come.
"""

from __future__ import annotations

import base64
import itertools
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import RunError
from autopar.runtime.ranks.ended import ended
from autopar.runtime.ranks.store_meeting import LEAST_SECONDS, LONGEST_LOOK_SECONDS, TOLD_AFTER_SECONDS, looks
from autopar.runtime.ranks.store_names import next_name
from autopar.torch_private import AOT_COMPILE, backend_named, default_store, group_names, timeout_of_world
from autopar.words.trees import PyTree

AGAIN_SECONDS = 60.0
"""How long a rank waits for others where it has compiled a graph again with collectives in another order than before:
if all do, they do so in the same call."""
WHAT_TO_DO = (
    "they would wait for each other for ever, or take one's numbers for another's. Run the program without compile(), "
    "or with another backend"
)

Places = dict[int, tuple[int, ...]]
"""By rank, where it is on a mesh."""
Order = tuple[str, ...]
"""The collectives of a graph, such as ``all_reduce sum float32 along data``."""


def collectives_of(graph: torch.fx.Graph, axes: Sequence[str], places: Places) -> Order:
    """List the collectives of a graph of operators, in its order, without the waits for them.

    Args:
        axes: names of the mesh's.
    """
    collectives, groups = [], group_names()
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", "") not in ("_c10d_functional", "c10d"):
            continue
        name = node.target._schema.name.split("::")[1]
        if name == "wait_tensor":
            continue
        words = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, str)]
        value = node.meta.get("val")
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
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
        self.kind = ""
        self.of_kind: dict[str, int] = {}
        self.known: dict[str, set[Order]] = {}
        self.ran: set[str] = set()

    def backend(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of ``torch.compile`` with which the graphs are compared."""
        backend, others = backend_named(options)
        return {**others, "backend": _Compared(backend, self)}

    def watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled program to note the kind of call for which a graph is compiled."""

        def called(*values: Any) -> Any:
            wanting = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and x.requires_grad]
            self.kind = f"{int(torch.is_grad_enabled())} {zlib.crc32(repr(wanting).encode())}"
            result = run(*values)
            self.ran.add(self.kind)
            return result

        return called

    def compare(self, order: Order, kind: str) -> str:
        """Agree on the collectives of what was compiled, before it runs.

        Args:
            kind: the kind of the call for which it was compiled.

        Returns:
            What the ranks call it.

        Raises:
            RunError: ranks have other ones, or one does not come any more.
        """
        agreed, again = self.known.setdefault(kind, set()), kind in self.ran
        if again and order in agreed:
            return ""
        number = self.of_kind[kind] = self.of_kind.get(kind, -1) + 1
        self.agree(order, name := f"{kind}/{number}", AGAIN_SECONDS if again else None)
        agreed.add(order)
        return name

    def agree(self, order: Order, name: str, most: float | None = None) -> None:
        """Hear of each rank of the mesh what it has.

        Args:
            most: seconds to wait for the others; by default half an hour, or as long as a collective would.

        Raises:
            RunError: as for :meth:`compare`.
        """
        if said := self._agreed(order, name, most):
            raise RunError(said)

    def _agreed(self, order: Order, key: str, most: float | None) -> str:
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
        end = began + (max(LEAST_SECONDS, timeout_of_world().total_seconds()) if most is None else most)
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
            if now > end and most is not None:
                raise RunError(
                    f"rank {rank} compiled its program again, with its collectives in another order than before, and "
                    f"ranks {missing} did not: {WHAT_TO_DO}"
                )
            if now > end:
                raise RunError(
                    f"rank {rank} has compiled its program, and ranks {missing} have not: call compile() on all ranks"
                )
        raise AssertionError


class _Compared:
    """A backend of ``torch.compile``, the graphs of which are compared before they run."""

    def __init__(self, backend: Any, order: OneOrder) -> None:
        self.inner, self.order = backend, order
        self.__name__ = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", str(backend))
        self.compiler_name = self.__name__

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        order, kind = self.order, self.order.kind
        graphs: list[Order] = []
        returned, name = False, ""

        def noting(compiler: Callable[..., Any]) -> Callable[..., Any]:
            def compile_noted(graph: torch.fx.GraphModule, *args: PyTree, **kwargs: PyTree) -> PyTree:
                collectives = collectives_of(graph.graph, order.axes, order.places)
                result = compiler(graph, *args, **kwargs)
                if returned:  # the backward is compiled when it is to run
                    if name:
                        order.agree(collectives, f"{name} backward")
                else:
                    graphs.append(collectives)
                return result

            return compile_noted

        aot_compile = AOT_COMPILE.get()

        def with_notes(*args: PyTree, **kwargs: PyTree) -> PyTree:
            compilers = ("fw_compiler", "bw_compiler", "inference_compiler")
            noted = {name: noting(kwargs[name]) for name in compilers if kwargs.get(name) is not None}
            return aot_compile(*args, **{**kwargs, **noted})

        with AOT_COMPILE.replaced(with_notes):
            run = self.inner(gm, inputs, **options)
        returned = True
        if not graphs:
            return run
        agreed = False

        def run_agreed(*args: PyTree) -> PyTree:
            nonlocal agreed, name
            if not agreed:
                name = order.compare(tuple(itertools.chain(*graphs)), kind)
                agreed = True
            return run(*args)

        return run_agreed

    def get_compiler_config(self) -> Any:
        """Return the backend's settings, for torch."""
        return self.inner.get_compiler_config() if hasattr(self.inner, "get_compiler_config") else None

    def reset(self) -> None:
        """Prepare for another compilation."""
        if hasattr(self.inner, "reset"):
            self.inner.reset()
