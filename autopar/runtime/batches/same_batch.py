"""A check that all ranks were called with the same batch, and have the same parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError, RunError
from autopar.runtime.batches.samples import LOCAL_BATCH, Arriving, Copy, Outline, Sample, Seen, Values
from autopar.runtime.repairs.dtensor_fixes import note_on
from autopar.words.graph import Graph

ROUNDING = 1e-2
"""How far these may be apart, as a share of the sample's mean size."""

AT_ONCE = 3
"""Calls after which an accelerator's host does not wait for what is compared."""

Taken = TypeVar("Taken")
Reader = Callable[[str], tuple[int, str]]


def is_checked(call: int, every: int | None = None) -> bool:
    """Check whether call number ``call`` (from 1) is compared between ranks.

    Args:
        every: how often; None for ever fewer calls, 0 for none.
    """
    if every is not None:
        return every > 0 and call % every == 0
    return call in (2, 3) or str(call).rstrip("0") == "1"


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return bool(a != b)
    size = max(a[-1], b[-1])
    return any(abs(p - q) > ROUNDING * size for p, q in zip(a[:-1], b[:-1], strict=True))


def exchange(
    group: dist.ProcessGroup | None, seen: Seen, device: torch.device, error: AutoparError | None
) -> list[tuple[Outline, Values]]:
    """Exchange what all ranks of ``group`` were called with; a collective call.

    Args:
        error: what is wrong with this rank's call, which others would wait for in vain.

    Raises:
        RunError: another rank's call is wrong. AutoparError: ``error``.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    mine = None if error is not None else (seen.form, seen.arriving(device).values()[0])
    dist.all_gather_object(everyone, (mine, None if error is None else str(error)), group=group)
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise RunError(f"on rank {rank}: {text}")
    return [values for values, _ in everyone]


def compare(everyone: Sequence[Values], reader: Reader) -> None:
    """Raise if ranks were called differently, or hold other copies; given what each has, in their order.

    Args:
        reader: gives for a parameter's name the number of the operator that reads it first, and where that stands.

    Raises:
        RunError: it says which ranks, and what to do.
    """
    for i in range(len(everyone[0][0])):
        same: dict[Any, tuple[int, Any, Any]] = {}
        for rank, (samples, _) in enumerate(everyone):
            shown, name, shape, among, sample = samples[i]
            first, first_shape, first_sample = same.setdefault(among, (rank, shape, sample))
            if among[:1] == (LOCAL_BATCH,) and (shape != first_shape or _differ(sample, first_sample)):
                raise RunError(
                    f"input {shown} has other values on rank {rank} than on rank {first} (shape {shape}), and these "
                    "two have the same rows of the batch: each group of ranks of a pipeline needs all rows, so ranks "
                    f"at the same place of their groups (here number {among[1]}) are called alike. Draw rows with "
                    "pm.sampler(dataset) or pm.shard(loader), which give each rank its own"
                )
            if shape != first_shape or _differ(sample, first_sample):
                raise RunError(
                    f"input {shown} has other values on rank {rank} than on rank {first} (shape {shape}): every rank "
                    "is called with the whole batch and takes its own slice, so rows that only one rank has would be "
                    "lost. Either pass the same batch on every rank (no DistributedSampler, one seed for shuffling "
                    "and for layers in front), or parallelize with batch='local' and pass each rank's own rows (of "
                    "tensors with one entry for each row of the batch: others are the same on all ranks even so); a "
                    f"single input may be pinned to pieces: placements={{'{name}': 'S0'}} on a mesh of one axis"
                )
    _tell_of_equal_pieces([samples for samples, _ in everyone])
    _compare_parameters([copies for _, copies in everyone], reader)


def _tell_of_equal_pieces(everyone: Sequence[Sequence[Sample]]) -> None:
    """Warn where all ranks passed equal shards: each may be a whole batch as long as a shard of the captured one."""
    in_shards = [
        samples for samples in zip(*everyone, strict=True)
        if all(among and among[:1] != (LOCAL_BATCH,) for *_, among, _ in samples) and len({s[3] for s in samples}) > 1
    ]  # fmt: skip
    if not in_shards or any(s[2] != same[0][2] or s[4] != same[0][4] for same in in_shards for s in same):
        return
    shown, name, shape, *_ = in_shards[0][0]
    warnings.warn(
        f"input {shown} of shape {shape} has the same values on all {len(everyone)} ranks. It is taken for each rank's "
        f"own shard, because placements= shards '{name}' and a shard has this shape. If it is a whole (shorter) batch, "
        f"call parallelize without placements= for '{name}', or with an example of this size.",
        stacklevel=8,
    )


def _compare_parameters(everyone: list[dict[Copy, tuple[int, Any]]], reader: Reader) -> None:
    """Raise if ranks hold other values of the same piece of a parameter; given what each has, in their order.

    The one is named that the program reads first: what comes after it may differ because of it.
    """
    first_with: dict[Copy, tuple[int, int, Any]] = {}
    differ: list[tuple[tuple[int, str], Copy, int, int, bool]] = []
    for rank, copies in enumerate(everyone):
        for copy, (bits, near) in copies.items():
            first, first_bits, first_near = first_with.setdefault(copy, (rank, bits, near))
            exact = near is None or first_near is None
            if bits != first_bits and (exact or _differ(near, first_near)):
                differ.append((reader(copy[0]), copy, rank, first, exact))
    if not differ:
        return
    (_, where), copy, rank, first, exact = min(differ, key=lambda each: (not each[-1], each[0], each[2]))
    text = (
        f"parameter '{copy[0]}'{f' (read by {where})' if where else ''} has other values on rank {rank} than on rank "
        f"{first}, and both hold the same piece of it: copies of a parameter begin equal and get equal gradients, so "
        "each rank has written its own values into the parameter or its gradient, such as random numbers after "
        "torch.manual_seed(1337 + rank). Seed all ranks alike where you write to parameters or gradients, or "
        "initialize the model before parallelize; to make the copies equal again, load rank 0's: "
        "autopar.load_full_state_dict(pm, autopar.full_state_dict(pm) or None)"
    )
    if exact:
        raise RunError(text)
    warnings.warn(
        f"{text}. On an accelerator operators that add in no fixed order can do that, too: autopar inspect lists them, "
        "and torch.use_deterministic_algorithms(True) avoids them",
        stacklevel=8,
    )


def first_readers(graphs: Iterable[Graph]) -> Reader:
    """Return a function from a parameter's name to the operator that reads it first, and its source line."""
    readers: dict[str, tuple[int, str]] = {}
    tied: dict[str, str] = {}
    number = 0
    for graph in graphs:
        tied.update(graph.tied)
        for node in graph.nodes:
            number += 1
            for ref in node.refs:
                if graph.nodes[ref.node].kind == "param":
                    readers.setdefault(graph.nodes[ref.node].target, (number, node.where))
    return lambda name: readers.get(tied.get(name, name), (number, ""))


class Calls:
    """The calls of one module, some of which the ranks compare.

    Args:
        group: the process group of the module's ranks.
        device_mesh: the mesh on which inputs may be slices; None if every rank passes everything.
        alone: there is one rank.
        stages: the meshes on which this rank holds parameters.
        reader: for messages; see :func:`first_readers`.

    Attributes:
        every: how often calls are compared; None for ever fewer, 0 for none.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None, alone: bool,
        stages: Iterable[DeviceMesh] = (), reader: Reader = lambda name: (0, ""),
    ) -> None:  # fmt: skip
        self.group, self.device_mesh, self.alone, self.reader = group, device_mesh, alone, reader
        self.stages = list({id(mesh): mesh for mesh in stages}.values())
        self.device = torch.device(next((mesh.device_type for mesh in self.stages), "cpu"))
        self.count = 0
        self.every: int | None = None
        self.forms: list[Outline] | None = None
        self.arriving: Arriving | None = None
        self.soon = False

    def next_one(self) -> None:
        """Compare the next call, whatever its number: the ranks run another program from then on."""
        self.soon, self.forms = self.every != 0, None

    def inputs(self, take: Callable[[Seen | None], Taken], parameters: Iterable[tuple[str, torch.Tensor]]) -> Taken:
        """Return what ``take`` makes of the next call; where that is compared, it samples the inputs.

        Args:
            parameters: this rank's, by name; read where the call is compared.

        Raises:
            RunError: ranks were called differently or hold other parameters, or another rank's call is wrong.
            AutoparError: this one's is.
        """
        self.count += 1
        if not self.alone and (self.count <= 4 or self.count % 10 in (0, 1)):  # scripts log in every so many steps
            for mesh in self.stages:
                note_on(mesh, f"call {self.count} of a module")
        if self.arriving is not None:  # of the call before, on all ranks
            arrived, self.arriving = self.arriving.values(), None
            everyone = [values for values in arrived if values is not None]
            if len(everyone) == len(arrived):
                compare(everyone, self.reader)
            else:  # on all ranks alike
                self.forms = None
        if self.alone or not (self.soon or is_checked(self.count, self.every)):
            return take(None)
        self.soon = False
        at_once = self.count <= AT_ONCE or self.device.type == "cpu" or self.forms is None
        seen, error = Seen(self.device_mesh), None
        taken: Taken | None = None
        try:
            taken = take(seen)
            seen.add_parameters(parameters, first=self.count == 1)
        except AutoparError as e:
            if not at_once:
                raise
            error = e
        if at_once:
            there = exchange(self.group, seen, self.device, error)
            self.forms = [form for form, _ in there]
            compare([values for _, values in there], self.reader)
        else:
            self.arriving = seen.arriving(self.device, self.group, self.forms)
        assert taken is not None
        return taken


__all__ = ["Calls", "Seen", "compare", "first_readers", "is_checked"]
