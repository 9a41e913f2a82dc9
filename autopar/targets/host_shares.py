"""What a plan stores in the memory of the host, in the words of trainers: shares of the trained parameters.

The state of the optimizer and its step are on the host for both; of ``parameters`` the device has no copy between uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.planner.layouts.pricing import PricedLayout
from autopar.plans.plan import Plan
from autopar.targets.target import ConfigError, Target
from autopar.words.graph import Graph


@dataclass(frozen=True)
class HostShares:
    """Shares of the bytes of all trained parameters, from 0 to 1.

    Attributes:
        steps: those whose state, and step, is on the host.
        parameters: those of which the device has a copy for each use only; a part of ``steps``.
    """

    steps: float = 0.0
    parameters: float = 0.0


def host_shares(plan: Plan, graph: Graph) -> HostShares:
    """Return what a plan of a graph stores on the host."""
    choices = {name: choice for stage in plan.stages for name, choice in stage.params.items()}
    return shares_on_host({name: choice.lifetime for name, choice in choices.items() if choice.on_host}, graph)


def shares_on_host(lifetimes: Mapping[str, str], graph: Graph) -> HostShares:
    """Return the shares of a graph's trained parameters that are on the host, from lifetimes of copies by name."""
    sizes = {node.target: node.out.n_bytes for _, node in graph.of_kind("param") if node.needs_grad}
    every = max(1, sum(sizes.values()))
    on_host = [name for name in sizes if name in lifetimes]
    steps = sum(sizes[name] for name in on_host)
    uses = sum(sizes[name] for name in on_host if lifetimes[name] == "use")
    return HostShares(steps / every, uses / every)


def shares_of(found: PricedLayout) -> HostShares:
    """Return what the plan of a layout stores on the host."""
    return host_shares(found.plan, found.pinned.graph)


def check_said(target: Target, found: PricedLayout) -> None:
    """Refuse a plan that stores on the host what a trainer cannot be told to.

    Raises:
        ConfigError: it does.
    """
    shares = shares_of(found)
    said = {"optimizer": shares.steps - shares.parameters, "parameters": shares.parameters}
    for what, share in said.items():
        if share > 0 and what not in target.offloads:
            can = f"it can be told {' or '.join(target.offloads)}" if target.offloads else "it can be told neither"
            raise ConfigError(
                f"{target.title} cannot be told to keep {what} on the host, where the plan keeps {share:.0%} of the "
                f"trained parameters ({can}); plan without offload={what}, or for another trainer"
            )
