"""The record of an engine that serving plans are exported to, and what no engine can serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.errors import PlanError
from autopar.serving.records import DECODE, PREFILL, ServingPlan, Worker
from hardware_profiles import Cluster
from hardware_profiles.usable_memory import driver_bytes

Settings: TypeAlias = dict[str, Any]
"""Options of an engine with their values, in the engine's own spelling: ``{"tensor-parallel-size": 8}``."""

Quantization: TypeAlias = Mapping[tuple[str, str], str]
"""An engine's word for formats of weights and activations; empty where the engine takes them from the checkpoint."""


@dataclass(frozen=True)
class Deployment:
    """A serving plan with the facts of its cluster that files of engines need.

    Attributes:
        plan: the serving plan.
        device_bytes: memory of the smallest device that it uses, as its driver reports it, which
            engines take a share of.
        per_node: devices of a machine.
    """

    plan: ServingPlan
    device_bytes: float
    per_node: int

    @property
    def apart(self) -> bool:
        """True where prefill and decode have workers of their own."""
        return len(self.plan.workers) > 1

    def nodes(self, worker: Worker) -> int:
        """Return the machines over which one worker goes."""
        return math.ceil(worker.layout.devices / self.per_node)

    def part_of_memory(self, n_bytes: float) -> float:
        """Return bytes as a part of a device's memory, rounded down to a thousandth, as options of engines want it."""
        return math.floor(1000 * n_bytes / self.device_bytes) / 1000


@dataclass(frozen=True)
class EngineFiles:
    """The files of an export to an engine.

    Attributes:
        files: their texts by name, relative to the folder.
        start: the commands that start it.
        fill_in: what a person has to fill in: the checkpoint, addresses.
        notes: what a reader should know: decisions that the engine takes by a rule of its own.
    """

    files: Mapping[str, str]
    start: tuple[str, ...]
    fill_in: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServingEngine:
    """An engine.

    Attributes:
        name: as the command line spells it: ``vllm``.
        title: its name and the version whose options these are: ``vLLM 0.33``.
        settings: returns the options of a worker.
        refuses: returns why it cannot run a worker of a plan, in one sentence with both numbers; empty if it can.
        write: writes the files that run a plan there.
    """

    name: str
    title: str
    settings: Callable[[Deployment, Worker], Settings]
    refuses: Callable[[Deployment, Worker], str]
    write: Callable[[Deployment], EngineFiles]


def deployment_of(plan: ServingPlan, cluster: Cluster) -> Deployment:
    """Return what files are written from.

    Raises:
        PlanError: the cluster has fewer devices than the plan uses.
    """
    if cluster.n_devices < plan.devices:
        raise PlanError(f"the plan uses {plan.devices} devices, and cluster {plan.cluster} has {cluster.n_devices}; "
                        "plan again for this cluster")  # fmt: skip
    used = range(plan.devices)
    smallest = min(driver_bytes(cluster.device(rank)) for rank in used)
    counts = [sum(cluster.node_of[rank] == node for rank in range(cluster.n_devices))
              for node in {cluster.node_of[rank] for rank in used}]  # fmt: skip
    return Deployment(plan, smallest, min(counts))


def export_to(engine: ServingEngine, deployment: Deployment) -> EngineFiles:
    """Return the files of a plan for an engine.

    Raises:
        PlanError: the engine cannot serve it.
    """
    for worker in deployment.plan.workers:
        if reason := refuses_any(deployment, worker) or engine.refuses(deployment, worker):
            what = f"the {worker.phase} worker" if deployment.apart else "the worker"
            raise PlanError(f"{engine.title} cannot run {what} of this plan: {reason}")
    return engine.write(deployment)


def refuses_any(deployment: Deployment, worker: Worker) -> str:
    """Return why no engine can run a worker; empty if they can."""
    plan, memory, layout = deployment.plan, worker.memory, worker.layout
    if not plan.model.startswith("hf:"):
        return f"engines serve checkpoints of Hugging Face, the plan is for '{plan.model}'; plan hf:PATH/config.json"
    if memory.total > memory.limit * (1 + 1e-9):
        return f"it has {memory.total:,.0f} bytes on a device, the limit is {memory.limit:,.0f}; plan fewer requests"
    if memory.limit > deployment.device_bytes:
        return (f"its limit is {memory.limit:,.0f} bytes, the devices of {plan.cluster} have "
                f"{deployment.device_bytes:,.0f}; plan again for this cluster")  # fmt: skip
    if (ranks := requests_of_rank(worker)) > worker.tokens_per_step:
        return (f"a rank has {ranks} requests in flight and {worker.tokens_per_step} tokens a step, which advances "
                "none of some; give as many tokens as requests")  # fmt: skip
    nodes = deployment.nodes(worker)
    if nodes > 1 and layout.devices % nodes:
        return (f"its {layout.devices} devices do not divide over {nodes} machines of {deployment.per_node}; use a "
                "layout that fills machines")  # fmt: skip
    return ""


def requests_of_rank(worker: Worker) -> int:
    """Return the requests in flight of one rank of attention data parallelism: of one scheduler of the engine."""
    return math.ceil(worker.requests / worker.layout.attention_data)


def refuses_format(plan: ServingPlan, words: Quantization, caches: Mapping[str, str]) -> str:
    """Return why formats cannot be said by an engine that has these words for them; empty if they can."""
    formats = plan.formats
    if (formats.weights, formats.activations) not in words:
        known = ", ".join(f"{weights} with {activations}" for weights, activations in words)
        return (f"weights in {formats.weights} with activations in {formats.activations} cannot be said there; it has "
                f"{known}")  # fmt: skip
    if formats.cache not in caches:
        return f"a cache in {formats.cache} cannot be said there; it has {', '.join(caches)}"
    return ""


def notes_of(deployment: Deployment, name: str, *, by_hand: bool = True) -> tuple[str, ...]:
    """Return what an engine decides by itself of this plan, and what is started by hand."""
    plan = deployment.plan
    notes = list(plan.notes)
    if plan.engine != name:
        notes.append(f"times were predicted for {plan.engine}, not for {name}; plan again with the engine's factor")
    for worker in plan.workers:
        copies, layout = worker.layout.kv_replicas, worker.layout
        if copies > 1:
            notes.append(f"{worker.phase}: heads of keys and values are on {copies} ranks each, which follows from "
                         f"tensor={layout.tensor} there and has no option")  # fmt: skip
        if layout.attention_data > 1 and worker.requests % layout.attention_data:
            notes.append(f"{worker.phase}: {worker.requests} requests over {layout.attention_data} ranks are at most "
                         f"{requests_of_rank(worker)} a rank")  # fmt: skip
        if worker.replicas > 1 and by_hand:
            notes.append(f"{worker.phase}: {worker.replicas} replicas, each started by itself on its own "
                         f"{layout.devices} devices and port, behind a router")  # fmt: skip
    return tuple(notes)


def checkpoint_of(plan: ServingPlan) -> tuple[str, ...]:
    """Return what is to be filled in: the checkpoint, with its format where the engine takes it from there."""
    weights = plan.formats.weights
    what = "" if weights == "bf16" else f", with weights in {weights}"
    return (f"MODEL: the folder or the name of the checkpoint whose config is {plan.model}{what}",)


def with_role(worker: Worker) -> str:
    """Return the name of a worker's files: ``prefill``, ``decode``, or ``config`` for both."""
    return worker.phase if worker.phase in (PREFILL, DECODE) else "config"
