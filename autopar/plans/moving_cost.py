"""The price of moving a model's parameters to another layout: bytes by rank and link, seconds, peak memory.

Seconds of a round are those of the busiest link and of the rank with most messages, by the link model of transfers
between two devices (:mod:`cost_models.mesh_links`, ``send_recv``): with ``T`` the largest of bytes over rate among
links, ``L`` the largest sum of message latencies of a rank, and ``p`` the sharpness of the limiting link's curve,
``(L^p + T^p)^(1/p)``. One message takes what :meth:`cost_models.costs.Costs.transfer` says. What two ranks exchange in
a round is one message: of a parameter, or of all parameters if these move at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from autopar.plans.moving import MovedPart, Sides, StoredParameter, moved_parts
from autopar.plans.transfer import box_at
from cost_models.mesh_links import mesh_axes
from cost_models.reshard_paths import Edge, reshard_path
from hardware_profiles import Cluster, Link

Key = TypeVar("Key")
ROUNDS = 2
INSIDE, BETWEEN = "inside machines", "between machines"


@dataclass(frozen=True)
class MovedTensor:
    """The bytes of one parameter that move.

    Attributes:
        n_bytes: bytes of all messages, rounds together.
        stays_bytes: bytes that ranks have already, in the new format.
    """

    name: str
    n_bytes: int
    stays_bytes: int


@dataclass(frozen=True)
class ParameterMove:
    """The price of a move.

    Attributes:
        tensors: parameters, in the order of the model.
        sent, received: bytes by rank; a rank that is not named has none.
        by_link: bytes of messages, :data:`INSIDE` and :data:`BETWEEN` machines.
        crossing_bytes: bytes that the devices of the old layout send to those of the new one, where no device has both;
            else None.
        busiest: the link that limits the move, for people.
        seconds: all parameters at once; the rounds follow each other.
        one_by_one_seconds: one parameter after the other.
        old_bytes, new_bytes: the most bytes that a rank has before, and after.
        peak_bytes: the most bytes of a rank if all parameters move at once: old and new shards, and messages that it
            sends and receives.
        one_by_one_peak_bytes: the same if parameters follow each other, and each one's old shard is freed once it has
            moved (is not, where the old ones are kept).
        n_messages: number of messages if all parameters move at once.
    """

    tensors: tuple[MovedTensor, ...]
    sent: Mapping[int, int]
    received: Mapping[int, int]
    by_link: Mapping[str, int]
    crossing_bytes: int | None
    busiest: str
    seconds: float
    one_by_one_seconds: float
    old_bytes: int
    new_bytes: int
    peak_bytes: int
    one_by_one_peak_bytes: int
    n_messages: int

    @property
    def n_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def stays_bytes(self) -> int:
        """Bytes that ranks have already, in the new format."""
        return sum(tensor.stays_bytes for tensor in self.tensors)


@dataclass
class _Routes:
    """Routes between devices of a cluster, their latency, and the rates of links."""

    cluster: Cluster
    edges: dict[tuple[int, int], list[Edge]] = field(default_factory=dict)
    latency: dict[tuple[int, ...], float] = field(default_factory=dict)
    of_pair: dict[tuple[int, int], float] = field(default_factory=dict)

    def route(self, a: int, b: int) -> list[Edge]:
        """Return the links from one device to another."""
        if (a, b) not in self.edges:
            self.edges[a, b] = reshard_path(self.cluster.graph, a, b)
        return self.edges[a, b]

    def link(self, edge: Edge) -> Link:
        """Return the link of an edge."""
        link: Link = self.cluster.graph.edges[edge]["link"]
        return link

    def message_seconds(self, a: int, b: int) -> float:
        """Return the latency of a message; routes over the same links have one."""
        if (a, b) not in self.of_pair:
            self.of_pair[a, b] = self._message_seconds(a, b)
        return self.of_pair[a, b]

    def _message_seconds(self, a: int, b: int) -> float:
        key = tuple(id(self.link(edge)) for edge in self.route(a, b)) + (self.is_between(a, b),)
        if key not in self.latency:
            self.latency[key] = mesh_axes(self.cluster, {"pair": 2}, [a, b])["pair"].terms["send_recv"][0]
        return self.latency[key]

    def rate(self, edge: Edge) -> float:
        """Return the bytes per second of an edge for messages."""
        link = self.link(edge)
        curve = self.cluster.curves[link.curve]["send_recv"]
        return link.bandwidth_bytes_per_second * curve.fraction * (1.0 - curve.ramp / 2)

    def is_between(self, a: int, b: int) -> bool:
        """Return True if a message leaves a machine."""
        return self.cluster.node_of[a] != self.cluster.node_of[b]


@dataclass
class _Load:
    """Bytes on links in one round, and the latency of a message between two ranks."""

    edges: Counter[Edge] = field(default_factory=Counter)
    messages: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, other: _Load, scale: int) -> None:
        """Add the load of one more tensor, of ``scale`` times the other's bytes."""
        for edge, n in other.edges.items():
            self.edges[edge] += n * scale
        self.messages.update(other.messages)

    def latency(self) -> float:
        """Return the largest sum of latencies of what a rank sends, or receives."""
        waits: dict[tuple[int, bool], float] = defaultdict(float)
        for (a, b), seconds in self.messages.items():
            waits[a, True] += seconds
            waits[b, False] += seconds
        return max(waits.values(), default=0.0)

    def seconds(self, routes: _Routes, scale: int = 1) -> tuple[float, str]:
        """Return the seconds of the round, and the link that limits it."""
        if not self.edges:
            return 0.0, ""
        busiest = max(self.edges, key=lambda edge: self.edges[edge] / routes.rate(edge))
        link = routes.link(busiest)
        latency, moving = self.latency(), scale * self.edges[busiest] / routes.rate(busiest)
        p = routes.cluster.curves[link.curve]["send_recv"].sharpness
        seconds = latency + moving if p == 1.0 else (latency**p + moving**p) ** (1 / p)
        return routes.cluster.software.factor * seconds, link.name


@dataclass(frozen=True)
class _Pattern:
    """The parts of a tensor of one shape between two layouts, counted in elements.

    ``alone`` remembers the seconds of one parameter, by bytes for each element.
    """

    number: int
    loads: tuple[_Load, ...]
    sent: Counter[int]
    received: Counter[int]
    stays: int
    by_link: Counter[str]
    old: Counter[int]
    new: Counter[int]
    alone: dict[int, float] = field(default_factory=dict)

    def seconds(self, routes: _Routes, item: int) -> float:
        """Return the seconds of one parameter by itself, with ``item`` bytes for each element."""
        if item not in self.alone:
            self.alone[item] = sum(load.seconds(routes, item)[0] for load in self.loads)
        return self.alone[item]


def _add(counter: Counter[Key], more: Mapping[Key, int], scale: int) -> None:
    for at, n in more.items():
        counter[at] += n * scale


def move(
    old: Mapping[str, StoredParameter], new: Mapping[str, StoredParameter], cluster: Cluster, *, keeps_old: bool = False
) -> ParameterMove:
    """Return the price of bringing parameters from one layout to another.

    A parameter is sent in the narrower of its two formats and cast where it is narrow, so that no message carries more
    than the target needs. Optimizer state is sent with it, in the format of the new plan.

    Args:
        old, new: parameters by name (:func:`autopar.plans.moving.stored_parameters`).
        cluster: the devices of both.
        keeps_old: whether the old shards stay after the move.
    """
    routes = _Routes(cluster)
    patterns: dict[tuple[tuple[int, ...], Sides, Sides], _Pattern] = {}
    sizes = Counter[int]()  # of the messages of each pattern, for each element
    memory = _Memory(keeps_old)
    tensors, alone = [], 0.0
    for name, before in old.items():
        after = new[name]
        key = before.spec.shape, before.sides, after.sides
        if key not in patterns:
            patterns[key] = _pattern(moved_parts(*key, cluster.node_of), key, routes, len(patterns))
        pattern = patterns[key]
        item = min(before.spec.item_bytes, after.spec.item_bytes) + after.moment_bytes
        new_item = after.spec.item_bytes + after.moment_bytes
        sizes[pattern.number] += item
        alone += pattern.seconds(routes, item)
        memory.add(pattern, before.spec.item_bytes + before.moment_bytes, new_item, item)
        tensors.append(MovedTensor(name, sum(pattern.sent.values()) * item, pattern.stays * new_item))
    total = [_Load() for _ in range(ROUNDS)]
    sent, received, by_link = Counter[int](), Counter[int](), Counter[str]()
    for pattern in patterns.values():
        size = sizes[pattern.number]
        for load, one in zip(total, pattern.loads, strict=True):
            load.add(one, size)
        _add(sent, pattern.sent, size)
        _add(received, pattern.received, size)
        _add(by_link, pattern.by_link, size)
    rounds = [load.seconds(routes) for load in total]
    apart = not memory.old.keys() & memory.new.keys()
    crossing = sum(n for device, n in sent.items() if device in memory.old) if apart else None
    return ParameterMove(
        tuple(tensors), dict(sent), dict(received), {name: by_link[name] for name in (INSIDE, BETWEEN)}, crossing,
        max(rounds)[1], sum(seconds for seconds, _ in rounds), alone, max(memory.old.values(), default=0),
        max(memory.new.values(), default=0), memory.together(sent, received), memory.one_by_one(),
        sum(len(load.messages) for load in total),
    )  # fmt: skip


def _pattern(
    parts: Sequence[MovedPart], key: tuple[tuple[int, ...], Sides, Sides], routes: _Routes, number: int
) -> _Pattern:
    loads = tuple(_Load() for _ in range(ROUNDS))
    sent, received, by_link = Counter[int](), Counter[int](), Counter[str]()
    stays = 0
    pairs = Counter[tuple[int, int, int]]()
    for part in parts:
        if part.source == part.target:
            stays += part.n_elements
        else:
            pairs[part.round, part.source, part.target] += part.n_elements
    for (number_of_round, a, b), n in pairs.items():
        load = loads[number_of_round]
        for edge in routes.route(a, b):
            load.edges[edge] += n
        load.messages[a, b] = routes.message_seconds(a, b)
        sent[a] += n
        received[b] += n
        by_link[BETWEEN if routes.is_between(a, b) else INSIDE] += n
    shape, old, new = key
    return _Pattern(number, loads, sent, received, stays, by_link, _held(shape, old), _held(shape, new))


def _held(shape: Sequence[int], sides: Sides) -> Counter[int]:
    """Return the elements that every rank holds; equal shards of several stages are one."""
    boxes = {(device, box_at(shape, side, at)) for side in sides for at, device in enumerate(side.devices)}
    held = Counter[int]()
    for device, box in boxes:
        part = MovedPart(device, device, box)
        held[device] += part.n_elements
    return held


@dataclass
class _Memory:
    """Bytes of ranks, parameter by parameter."""

    keeps_old: bool
    old: Counter[int] = field(default_factory=Counter)
    new: Counter[int] = field(default_factory=Counter)
    steps: list[tuple[_Pattern, int, int, int]] = field(default_factory=list)

    def add(self, pattern: _Pattern, old_item: int, new_item: int, sent_item: int) -> None:
        """Add a parameter, with its bytes for each element in the old layout, the new one, and messages."""
        self.steps.append((pattern, old_item, new_item, sent_item))
        for device, n in pattern.old.items():
            self.old[device] += n * old_item
        for device, n in pattern.new.items():
            self.new[device] += n * new_item

    def together(self, sent: Mapping[int, int], received: Mapping[int, int]) -> int:
        """Return the most bytes of a rank if all parameters move at once."""
        ranks = self.old.keys() | self.new.keys()
        of: Callable[[int], int] = partial(_sum_at, (self.old, self.new, sent, received))
        return max(map(of, ranks), default=0)

    def one_by_one(self) -> int:
        """Return the most bytes of a rank if parameters follow each other."""
        now, peak = Counter(self.old), max(self.old.values(), default=0)
        for pattern, old_item, new_item, sent_item in self.steps:
            for device, n in pattern.new.items():
                now[device] += n * new_item
            for device in pattern.new.keys() | pattern.old.keys():
                passing = (pattern.sent[device] + pattern.received[device]) * sent_item
                peak = max(peak, now[device] + passing)
            if not self.keeps_old:
                for device, n in pattern.old.items():
                    now[device] -= n * old_item
        return peak


def _sum_at(tables: Sequence[Mapping[int, int]], at: int) -> int:
    return sum(table.get(at, 0) for table in tables)
