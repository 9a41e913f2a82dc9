"""Which parameters may or must be stored in the memory of the host: pins, and the option ``offload``.

A share of less than all is made up of whole classes of parameters, those of repeated blocks together, so that blocks
stay alike. Seconds on the host's link and of its step are the same for each byte, and so is the memory that is gained:
any set of as many bytes is as good as any other, but for parameters that are read first, whose copies nothing hides.
They come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.planner.intra_op.building.fold import fold
from autopar.planner.intra_op.building.parameter_sharding import first_read
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.intra_op.pins.small_parameters import memory_of, stored_and_lifetime
from autopar.plans.offload_options import Offload
from autopar.plans.plan import DEVICE, HOST, ParamChoice
from autopar.plans.prices import ONE_VERSION, KeptVersions
from autopar.words.graph import Graph, Node
from cost_models.optimizer_bytes import MUON

STEP, USE = "step", "use"


class HostStorage:
    """The memories in which the option and the pins let parameters be stored.

    Args:
        pinned: how parameters are pinned, by name.
    """

    def __init__(self, graph: Graph, offload: Offload, pinned: Mapping[str, str]) -> None:
        self.offload, self.pinned = offload, pinned
        self.steps_there = _share(graph, offload.optimizer)
        self.only_there = _share(graph, offload.parameters, frozen=True)

    @property
    def is_asked(self) -> bool:
        """Return whether anything may be stored on the host."""
        return self.offload.of_parameters or any(memory_of(how) == HOST for how in self.pinned.values())

    def choices(self, node: Node, choice: ParamChoice) -> list[ParamChoice]:
        """Return a choice for the device in the memories, and with the lifetimes of copies there, that are allowed."""
        how, name = self.pinned.get(node.target, ""), node.target
        memory, lifetime = memory_of(how), stored_and_lifetime(how)[1]
        if memory == DEVICE:
            return [choice]
        must = memory == HOST or name in self.steps_there or name in self.only_there
        result = [] if must else [choice]
        if memory == HOST:
            lifetimes = [lifetime] if lifetime else [STEP, USE]
        else:
            steps = node.needs_grad and self.offload.optimizer is not None and name not in self.only_there
            lifetimes = [lifetime or STEP] * steps + [USE] * (self.offload.parameters is not None)
            lifetimes = list(dict.fromkeys(lifetimes))
        gathers = any(a.is_shard and not b.is_shard for a, b in zip(choice.stored, choice.used, strict=True))
        for each in lifetimes:  # of what is gathered, both lifetimes are offered already
            if not gathers or choice.lifetime == each:
                result.append(replace(choice, lifetime=each, on_host=True))
        return result


def why_never_there(optimizer: str, versions: Sequence[KeptVersions] = ()) -> str:
    """Return why parameters and the state of an optimizer stay on the device; empty if they need not.

    ``versions``: those of the weights that the stages keep.
    """
    most = max(versions, default=ONE_VERSION)
    if most != ONE_VERSION:
        return f"a pipeline that keeps {most.number} versions of its weights keeps them on the device"
    if optimizer == MUON:
        return "muon multiplies whole matrices in its step, which a host does tens of times slower than a device"
    return ""


def what_can_move(options: Options) -> Options:
    """Return options in which ``offload="auto"`` is what can be moved: not what :func:`why_never_there` names."""
    if options.offload.is_auto and why_never_there(options.optimizer, [options.versions]):
        return replace(options, offload=options.offload.of_activations)
    return options


def note_on_left_out(offload: Offload, optimizer: str, versions: Sequence[KeptVersions]) -> str:
    """Return a note on what ``offload="auto"`` leaves on the device; empty if that is nothing."""
    why = why_never_there(optimizer, versions) if offload.is_auto else ""
    return f"offload: activations alone may wait on the host: {why}" if why else ""


def on_host_in_layout(graph: Graph, offload: Offload) -> dict[str, str]:
    """Return the lifetimes of parameters that a layout stores on the host, by name; what is left open is all of it."""
    trained = {node.target for _, node in graph.of_kind("param") if node.needs_grad}
    found = {}
    if offload.optimizer is not None:
        found = dict.fromkeys(_share(graph, offload.optimizer) if offload.optimizer else trained, STEP)
    if offload.parameters is not None:
        every = {node.target for _, node in graph.of_kind("param")}
        found |= dict.fromkeys(_share(graph, offload.parameters, frozen=True) or every, USE)
    return found


def _share(graph: Graph, share: float | None, frozen: bool = False) -> frozenset[str]:
    """Return the trained parameters, with ``frozen`` others too, that make up a share of the bytes of all, at least."""
    if not share:
        return frozenset()
    representative, waits = fold(graph).representative, first_read(graph, 0.0)
    classes: dict[int, list[int]] = {}
    for i, node in graph.of_kind("param"):
        if node.needs_grad or frozen:
            classes.setdefault(representative[i], []).append(i)
    sizes = {r: sum(graph.nodes[i].out.n_bytes for i in nodes) for r, nodes in classes.items()}
    order = sorted(classes, key=lambda r: (any(i in waits for i in classes[r]), -sizes[r], r))
    wanted, taken, left = share * sum(sizes.values()), list[int](), list[int]()
    for r in order:
        (taken if sum(sizes[k] for k in taken) + sizes[r] <= wanted else left).append(r)
    while left and sum(sizes[k] for k in taken) < wanted * (1 - 1e-9):
        short = wanted - sum(sizes[k] for k in taken)
        enough = [r for r in left if sizes[r] >= short]
        taken.append(min(enough, key=sizes.__getitem__) if enough else left[0])
        left.remove(taken[-1])
    return frozenset(graph.nodes[i].target for r in taken for i in classes[r])
