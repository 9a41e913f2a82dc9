"""Training software on a cluster: its effect on a step's time and memory, one record for each trainer.

``load_cluster("dgx-h100 as megatron-2023")`` is the cluster as that trainer uses it; without ``as`` it is autopar's own
runtime. The records are in ``data/software.toml``, with the source of each number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from .errors import ProfileError
from .reader import ProfileErrors, Table, closest, read_document

OWN = "autopar"
"""The software of a cluster of which nothing is said."""
AS = " as "
_FILE = Path(__file__).parent / "data" / "software.toml"


@dataclass(frozen=True)
class Software:
    """One trainer's execution of a plan.

    Attributes:
        factor: seconds of a measured step over those of the device's own rates; fitted once for a trainer.
        fused: pointwise operators, norms and losses that follow each other run as one kernel that reads and writes
            memory once.
        fuses_pointwise: chains without a norm or softmax too, such as the activation of SwiGLU and its product.
        loss_in_place: a cross-entropy keeps one float32 number for each class, in the memory of the logits, and
            writes their gradient there; else it is torch's, operator by operator.
        regathers: what sequence parallelism gathers for products is gathered again in the backward; else it is kept.
        keeps_gradients: gradients of parameters are summed up in buffers that are there all the time; else the first
            backward of a step makes them.
        buckets_gradients: beside them, buckets for the reductions hold all gradients that ranks add up, in the format
            in which autograd gives them (torch's DistributedDataParallel).
        hides_reductions: the fraction of a backward beside which reductions of gradients may run; 0 if they follow
            it.
        hides_gathers: the fraction of a pass beside which gathers of parameters may run.
        hides_tensor: the fraction of collectives of tensor parallelism that runs beside products.
        hides_transfers: whether transfers between stages run beside computing.
        launch_seconds: seconds of the host for an operator; None for the device's.
        reserved_bytes: bytes of device memory for the context and communication buffers, on every rank.
        fragmentation: the fraction of a step's memory that the allocator holds beside what lives.
        sources: where the numbers come from, by name.
    """

    name: str
    description: str = ""
    factor: float = 1.0
    fused: bool = False
    fuses_pointwise: bool = True
    loss_in_place: bool = False
    regathers: bool = True
    keeps_gradients: bool = False
    buckets_gradients: bool = False
    hides_reductions: float = 1.0
    hides_gathers: float = 1.0
    hides_tensor: float = 0.0
    hides_transfers: bool = True
    launch_seconds: float | None = None
    reserved_bytes: float = 0.0
    fragmentation: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)


@functools.cache
def software() -> dict[str, Software]:
    """Return all records by name, from data/software.toml."""
    failures = ProfileErrors("data/software.toml")
    root = Table(read_document(_FILE), "", failures)
    records = {name: _read(name, root.table(name)) for name in root.data}
    failures.raise_if_any()
    return records


def _read(name: str, table: Table) -> Software:
    values: dict[str, object] = {}
    for each in fields(Software):
        if each.name == "name" or not table.has(each.name):
            continue
        if isinstance(each.default, bool):
            values[each.name] = table.flag(each.name, False)
        elif each.name == "description":
            values[each.name] = table.text(each.name)
        elif each.name == "sources":
            values[each.name] = table.texts(each.name, {})
        else:
            values[each.name] = table.number(each.name)
    table.close()
    return Software(name, **values)  # type: ignore[arg-type]


def software_named(name: str) -> Software:
    """Return one record, or raise a ProfileError with the known names."""
    if name not in software():
        raise ProfileError("software", [f"unknown software '{name}': {closest(name, software())}"])
    return software()[name]


def split_software(name: str) -> tuple[str, str | None]:
    """Split ``dgx-h100 as megatron-2023`` into ``("dgx-h100", "megatron-2023")``."""
    cluster, said, trainer = name.rpartition(AS)
    return (cluster, trainer) if said else (name, None)
