"""Errors of plans that do not fit a device's memory, and what such an error says: what is needed, and what would do."""

from __future__ import annotations

from autopar.errors import InfeasibleError
from autopar.planner.intra_op.pins.host_storage import why_never_there
from autopar.planner.intra_op.pins.options import Options
from autopar.plans.offload_options import ACTIVATIONS, AUTO, WHAT
from autopar.plans.plan import StagePlan
from autopar.words.graph import Graph
from autopar.words.texts import show_bytes
from cost_models.host_link import has_host
from hardware_profiles import Device

LARGEST = 3
"""Parameters that a message lists."""


class AllTooLarge(InfeasibleError):
    """All choices are above the limit; ``smallest`` is the plan that comes nearest of those that were seen."""

    def __init__(self, smallest: StagePlan, text: str = "") -> None:
        super().__init__(text or f"the smallest plan needs {show_bytes(smallest.price.memory_bytes)}")
        self.smallest = smallest


class OutOfReach(InfeasibleError):
    """An error without explanation: neither the relaxation fits, nor the plan nearest to its fewest bytes."""


def host_hint(options: Options, device: Device, forward_only: bool = False) -> str:
    """Return the end of a message that nothing fits: what else may wait in the memory of the host, if there is one."""
    offload = options.offload
    if forward_only or not has_host(device):
        return ""
    left = [name for name in WHAT if getattr(offload, name) is None]
    if why_never_there(options.optimizer, [options.versions]):
        left = [name for name in left if name == ACTIVATIONS]
    if not left or offload.is_auto:
        return ""
    wish = AUTO if len(left) == len(WHAT) else ",".join([*([offload.text] if offload else []), *left])
    return f"\n  or let some of it wait in the memory of the host: offload='{wish}'"


def too_big(graph: Graph, fastest: StagePlan, tight: StagePlan, limit: float, hint: str = "") -> str:
    """Return the message that nothing fits, with what would, and a ``hint`` on what else to try."""
    p = tight.price
    parts = sorted(
        [("parameters", p.parameter_bytes), ("gradients", p.gradient_bytes), ("optimizer state", p.optimizer_bytes),
         ("buffers", p.buffer_bytes), ("gathered parameters", p.gathered_bytes),
         ("weight versions", p.version_bytes), ("activations", p.activation_bytes),
         ("working memory", max(0, p.working_bytes))], key=lambda e: -e[1],
    )  # fmt: skip
    biggest = sorted(graph.of_kind("param"), key=lambda e: -e[1].out.n_bytes)[:LARGEST]
    return (
        f"no plan fits {show_bytes(limit)} per device: the smallest needs {show_bytes(p.memory_bytes)}, the fastest "
        f"{show_bytes(fastest.price.memory_bytes)}\n  of the smallest: "
        + ", ".join(f"{name} {show_bytes(n)}" for name, n in parts if n)
        + (f", of which {show_bytes(-p.working_bytes)} are not there at once" if p.working_bytes < 0 else "")
        + "\n  largest parameters: "
        + ", ".join(f"{node.target} {show_bytes(node.out.n_bytes)}" for _, node in biggest)
        + f"\n  it would fit with {show_bytes(p.memory_bytes - limit)} more per device, more devices, or a smaller "
        f"batch{hint}"
    )
