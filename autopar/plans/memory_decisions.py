"""Decisions about memory between a forward and its backward, one record each.

``keep`` is what happens to memory that nobody decides about. A plan has the others
(:attr:`autopar.plans.plan.StagePlan.memory`, decision by decision), and plan files, ledgers and reports use the same
names. They are made for different things:

============ ========================================================================================================
segments     runs of operators, ``(first, last)``: they keep their inputs only and are recomputed
results      tensors that a segment makes for others, which are recomputed with the rest of it
copies       gathered tensors: the copies are freed, and regathered from their shards
tensors      results of operators: their memory is given up after the last reader and filled before the backward reads
============ ========================================================================================================

Segments, results and copies are recomputed by the program itself, so their price is that of its operators and
collectives. A decision about ``tensors`` has its own cost and the function that fills the memory; it is all that
somebody who adds one has to write (docs/adding.md), and planner, plan files, programs, certificates and reports take it
from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.words.graph import Graph, Ref
from cost_models.costs import Costs
from cost_models.host_link import HostCopies
from hardware_profiles import Device

Memory = Mapping[str, tuple[Any, ...]]
"""What a plan decides about memory: by decision, segments ``(first operator, last operator)``, or tensors by
:func:`autopar.plans.plan.reshard_key`. What nobody decides about is kept."""

OFFLOAD = "offload"
"""The decision that moves results of operators to the memory of the host (:mod:`autopar.lower.offloaded`)."""
SEGMENTS, RESULTS, COPIES, TENSORS = "segments", "results", "copies", "tensors"


def every_tensor(_graph: Graph, _ref: Ref) -> bool:
    """Return True: :attr:`MemoryDecision.may` of a decision that is good for all."""
    return True


@dataclass(frozen=True)
class MemoryDecision:
    """One decision about memory.

    Attributes:
        name: in plans, plan files and the ledger.
        said: what becomes of the memory, for reports: ``run again in the backward``.
        of: what it is made for: :data:`SEGMENTS`, :data:`RESULTS`, :data:`COPIES` or :data:`TENSORS`; empty for
            ``keep``.
        seconds: what a microbatch waits for a tensor with some bytes on one rank to leave and to come back, forward
            and backward together; what runs beside compute is not waited for. Of :data:`TENSORS` only, as what follows.
        freed: makes of a tensor what gives it up and fills it: an :class:`autopar.lower.freed_tensors.Freed`.
        copies: seconds of the copies of a tensor with some bytes to the memory of the host and back, each alone, in the
            place of ``seconds``: they run beside compute, which waits for what it does not hide
            (:mod:`cost_models.host_link`). Made only where the option ``offload`` allows it.
        ahead: copies that may be under way at once in each direction, of a decision with ``copies``.
        may: says for which tensors of a graph it may be made, of those that may be given up at all
            (:func:`autopar.plans.regather.may_wait`).
    """

    name: str
    said: str
    of: str = TENSORS
    seconds: Callable[[Costs, Device, int], float] | None = None
    freed: Callable[[Any], Any] | None = None
    may: Callable[[Graph, Ref], bool] = every_tensor
    copies: Callable[[HostCopies, int], tuple[float, float]] | None = None
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.of == TENSORS and ((self.seconds is None) == (self.copies is None) or self.freed is None):
            raise ValueError(
                f"memory decision '{self.name}': give seconds= (time for a tensor to leave the device and come back) "
                "or copies= (of copies beside compute), and freed= (what frees its memory and refills it)"
            )

    def price(self, costs: Costs, device: Device, n_bytes: int) -> float:
        """Return :attr:`seconds`; 0 if operators and collectives of the program, or copies beside it, are the price."""
        return self.seconds(costs, device, n_bytes) if self.seconds is not None else 0.0


DECISIONS: dict[str, MemoryDecision] = {}
"""All decisions, by name."""


def decision(record: MemoryDecision) -> MemoryDecision:
    """Register a decision.

    Raises:
        ValueError: there is one of that name.
    """
    if record.name in DECISIONS:
        raise ValueError(f"there is a memory decision '{record.name}' already; choose another name")
    DECISIONS[record.name] = record
    return record


KEEP = decision(MemoryDecision("keep", "kept from forward to backward", ""))
RECOMPUTE = decision(MemoryDecision("recompute", "run again in the backward", SEGMENTS))
RECOMPUTE_RESULT = decision(MemoryDecision("make again", "made again with their segment", RESULTS))
REGATHER = decision(MemoryDecision("gather again", "gathered again in the backward", COPIES))


def about_tensors() -> list[MemoryDecision]:
    """Return the decisions that are made for results of operators."""
    return [record for record in DECISIONS.values() if record.of == TENSORS]


def memory(**decided: Sequence[Any]) -> Memory:
    """Return decisions by name with ``_`` for a space: ``memory(recompute=segments, gather_again=keys)``."""
    return in_order({name.replace("_", " "): entries for name, entries in decided.items()})


def in_order(decided: Mapping[str, Sequence[Any]]) -> Memory:
    """Return decisions in the order of their registration, without those that are made for nothing.

    Raises:
        PlanError: one is not registered.
    """
    for name in decided:
        if name not in DECISIONS:
            raise PlanError(
                f"'{name}' is no decision about memory that is known here ({', '.join(DECISIONS)}); import the module "
                "that registers it first"
            )
    return {name: tuple(decided[name]) for name in DECISIONS if decided.get(name)}
