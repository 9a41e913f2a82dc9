"""Options of a user for the plan of one mesh, and the memory of its devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from autopar.planner.effort import PATIENT, SolverWork, requested_seconds
from autopar.plans.offload_options import NOTHING, Offload
from autopar.plans.prices import ONE_VERSION, KeptVersions
from autopar.words.placements import State
from hardware_profiles import Cluster, budget_of


@dataclass(frozen=True)
class Options:
    """Options of a user for the plan of one mesh.

    Attributes:
        constraints: ``{pattern: {axis: factor}}``; the pattern (``*`` matches anything) names a module path, or one op
            as ``module:op``; the factor is one of the op's rule, or ``replicate``.
        params: ``{pattern: "replicate"}`` keeps parameters replicated; or a stored placement ``"S0,I"``; or
            one with a lifetime, ``"S0,I step"`` (ZeRO-1/2) or ``"S0,I use"`` (ZeRO-3).
        inputs, outputs: pinned placements by input name and output position.
        memory_limit_bytes: the limit of a device; None for what a plan may fill of the device.
        optimizer: ``adamw``, ``adamw8bit``, ``sgd`` or ``sgd_momentum``: decides the bytes of optimizer state.
        microbatches: pieces that ``train_step`` cuts the batch into.
        time_limit_seconds: the limit of one run of the solver, by the clock; None counts its work, as :meth:`effort`
            says.
        memory_gap: how far from the proven optimum a plan may be where the memory limit binds (the plan reports its
            gap); without a binding limit, plans are optimal. 0 requires the optimum always, which can take minutes.
        worth_seconds: if memory binds, a plan that is proven to take this long is not searched to its end.
        fold: decide identical blocks once.
        in_flight: microbatches whose activations are kept at once: more than one in a stage of a pipeline.
        versions: versions of weights that are kept at one time, in an asynchronous pipeline.
        recompute: patterns of module paths (``layers.*``); each module that matches keeps only its inputs for the
            backward, and is recomputed there. So are regions that the model runs under activation checkpointing.
        may_recompute: if memory binds, and neither ``recompute`` nor the model says what is recomputed, operators of
            any block may.
        offload: what may be moved to the memory of the host.
        explains: if nothing fits, look for the smallest plan, to say what that needs. It takes several runs of the
            solver, which a search over many meshes spends on the one of which it tells.
        blocks: names of the operators with which blocks begin, where known: recomputation is block
            by block. By default those of the repeated stretches that folding finds.
        buffers: placements of buffers that are stored already, by name, in a graph without gradients.
    """

    constraints: Mapping[str, Mapping[str, str]] | None = None
    params: Mapping[str, str] | None = None
    inputs: Mapping[str, State] | None = None
    outputs: Mapping[int, State] | None = None
    memory_limit_bytes: float | None = None
    optimizer: str = "adamw"
    microbatches: int = 1
    time_limit_seconds: float | None = None
    memory_gap: float = 0.01
    worth_seconds: float = inf
    fold: bool = True
    in_flight: int = 1
    versions: KeptVersions = ONE_VERSION
    recompute: Sequence[str] = ()
    may_recompute: bool = True
    offload: Offload = NOTHING
    explains: bool = True
    blocks: Sequence[str] = ()
    buffers: Mapping[str, State] | None = None

    @property
    def named_axes(self) -> frozenset[str]:
        """Names of the mesh axes that constraints are about."""
        return frozenset(axis for wanted in (self.constraints or {}).values() for axis in wanted)

    def effort(self, enough: SolverWork = PATIENT) -> SolverWork:
        """Return the work of one run of the solver: the seconds of the user, else what is enough."""
        return enough if self.time_limit_seconds is None else requested_seconds(self.time_limit_seconds)


def device_limit(cluster: Cluster, devices: Iterable[int], request: float | None) -> float:
    """Return the bytes that the peak of a step may take: the user's, or what the smallest of the devices may fill."""
    if request is not None:
        return request
    of_kinds = {device.name: device for device in map(cluster.device, devices)}
    return min(budget_of(cluster, device).limit_bytes for device in of_kinds.values())
