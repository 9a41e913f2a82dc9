"""Seeds of random operators: every call of a parallel module takes one from torch's generator, alike on all ranks.

So ``torch.manual_seed``, ``fork_rng`` and ``set_rng_state`` before a call govern what it draws, as they do in eager
mode, and no two calls draw alike, of one module or of two. The generator is the default one of the CPU, whatever the
model is on. Each rank takes a seed from its own, and the first rank's counts: ranks that were seeded differently draw
alike all the same. It travels on the device, so the host does not wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.rules.families.sharded_random import seed_at
from autopar.rules.families.torch_draws import TorchDraws, draws_in_order
from autopar.runtime.ranks.agree import seeded_alike
from autopar.torch_private import no_dispatch_modes
from autopar.words.graph import Graph

_LIMIT = 1 << 62
MODES = ("sharded", "torch")
"""Who draws: each rank its own part of numbers that do not depend on the mesh, or torch's generator of one device."""


def next_seed() -> int:
    """Take a seed from torch's default generator, on the CPU; modes that watch what a model computes do not see it."""
    with no_dispatch_modes():
        return int(torch.randint(_LIMIT, (), dtype=torch.int64, device="cpu"))


def seed_after(seed: int) -> int:
    """Return the seed of the first call after ``torch.manual_seed(seed)``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return next_seed()


class PlaceInBatch(NamedTuple):
    """The position of a microbatch's rows in its step's batch, as ``seed_at`` takes it."""

    first: int = 0
    block: int = 1
    stride: int = 1


def places_of(rows: Sequence[int], counts: Sequence[int], ranks: int) -> list[list[PlaceInBatch]]:
    """Return where the rows of the microbatches of each run of a step are in its batch.

    Args:
        rows, counts: rows of one microbatch, and the number of microbatches, of each run.
        ranks: how many ranks have rows of their own, one after the other in the batch.
    """
    total, before = sum(n * count for n, count in zip(rows, counts, strict=True)), 0
    places = []
    for n, count in zip(rows, counts, strict=True):
        block = max(1, n // ranks)
        places.append([PlaceInBatch(before + k * block, block, total // ranks) for k in range(count)])
        before += count * block
    return places


@dataclass
class _Step:
    """A step in microbatches: all of them draw by one seed, which the first of them takes.

    Attributes:
        rows: the number of rows of the batch.
        seed: the one of the step, or the state of torch's generator before it.
        states: for each graph, by its ``id``, the draws of the whole batch from there.
    """

    rows: int = 0
    seed: torch.Tensor | None = None
    place: PlaceInBatch | None = None
    states: dict[int, TorchDraws] = field(default_factory=dict)


class Seeds:
    """The source of a parallel module's seeds.

    Attributes:
        mode: which of :data:`MODES` it is.
        own: the seeds that this rank has taken from its own generator, where all ranks are to have taken the same and
            compare them later; None where the first rank tells the others.
        recorded: gives the seed of a call in the place of :meth:`of_call`, while a step is recorded.
    """

    mode = "sharded"

    def __init__(
        self, group: dist.ProcessGroup | None, first: int, device: torch.device, alike: bool | None = None
    ) -> None:
        """Initialize the object.

        Args:
            group: the group of all ranks that run the module together; None for one rank.
            first: the rank in it whose generator counts.
            alike: whether this rank's generator was seeded as the first rank's; None if all ranks are to find out.
        """
        self.group, self.first, self.device = group, first, device
        self.own: list[int] | None = None
        self.recorded: Callable[[PlaceInBatch | None], torch.Tensor] | None = None
        self._step: _Step | None = None
        self._alike = alike if alike is not None else group is None or seeded_alike(group)
        self._at_last_call: tuple[int, torch.Tensor] | None = None  # how it was seeded then, and the first rank
        self._given: set[bytes] = set()

    @property
    def alike(self) -> bool:
        """Whether this rank's generator is seeded as the first rank's, as of the last call."""
        if self._at_last_call is not None:
            mine, of_first = self._at_last_call
            self._alike, self._at_last_call = int(of_first.item()) == mine, None
        return self._alike

    def take(self) -> torch.Tensor:
        """Take a seed, int64 [], on the module's device; every rank calls it."""
        if self.group is None or self.own is not None:
            number = next_seed()
            if self.own is not None:
                self.own.append(number)
            return torch.full((), number, dtype=torch.int64, device=self.device)  # written there: the host goes on
        told = torch.empty(2, dtype=torch.int64, device=self.device)
        seed, seeded_as = told.unbind()
        seed.fill_(next_seed())
        mine = torch.initial_seed() % _LIMIT
        seeded_as.fill_(mine)
        dist.broadcast(told, self.first, group=self.group)
        self._at_last_call = mine, seeded_as
        return seed

    def of_call(self, graph: Graph) -> Any:
        """Return the seed of a call, int64 [], or of a microbatch (:meth:`step`), int64 [4]; every rank calls it.

        Args:
            graph: the graph of the whole model, for one microbatch.
        """
        step = self._step
        if self.recorded is not None:
            return self.recorded(step.place if step is not None else None)
        if step is None:
            return self.take()
        if step.seed is None:
            step.seed = self.take()
        return step.seed if step.place is None else seed_at(step.seed, *step.place)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Enclose a step: all calls in it draw by one seed; :meth:`of_rows` says how many rows it has."""
        before, self._step = self._step, _Step()
        try:
            yield
        finally:
            self._step = before

    def of_rows(self, rows: int) -> None:
        """Set the number of rows of the step's batch."""
        if self._step is not None:
            self._step.rows = rows

    def at(self, place: PlaceInBatch | None) -> None:
        """Set the rows of the step's next call; None: all rows of the batch."""
        if self._step is not None:
            self._step.place = place

    # -- what a checkpoint keeps

    def state(self) -> torch.Tensor:
        """Return the state of the generator, uint8 [bytes]; the first rank's on ranks that were seeded alike."""
        state = self._generator_state()
        self._given.add(_digest(state))
        return state

    def go_on(self, state: torch.Tensor) -> None:
        """Continue the draws of another run from its :meth:`state`."""
        have = self._generator_state()
        if state.dtype != have.dtype or state.shape != have.shape:
            warnings.warn(
                f"the state dict says by {state.dtype} {list(state.shape)} where random operators stand, and a state "
                f"of this module's generator is {have.dtype} {list(have.shape)}: it was saved by an earlier version of "
                "autopar, or with another random= on another device. Weights are loaded; dropout and noise go on as "
                "torch's generator stands now, so the run is not continued to the bit (torch.manual_seed seeds it)",
                stacklevel=2,
            )
            return
        if _digest(state) not in self._given and (self.alike or dist.get_rank() == self.first):
            self._set_generator(state.cpu())

    def _generator_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def _set_generator(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


class TorchSeeds(Seeds):
    """Seeds by which calls draw what torch draws in eager mode, from the generator of the module's device.

    See :mod:`autopar.rules.families.torch_draws`. The first rank's state counts. After the call the generator is in
    the state of eager mode, on ranks where it was in that of the first one.
    """

    mode = "torch"

    def of_call(self, graph: Graph) -> TorchDraws:
        """Return what torch draws in this call."""
        step = self._step or _Step()
        rows = step.rows if step.place is not None else None
        if id(graph) not in step.states:
            step.states[id(graph)] = self._draws(graph, rows, step)
        draws = step.states[id(graph)]
        if step.place is None:
            return draws
        return draws.at(seed_at(torch.zeros((), dtype=torch.int64, device=self.device), *step.place))

    def _draws(self, graph: Graph, rows: int | None, step: _Step) -> TorchDraws:
        """Return the generator's states before each draw, and advance it past all draws."""
        generator = torch.Generator(self.device)
        own: torch.Tensor | None = None
        if step.seed is None:
            own = self._generator_state()
            step.seed = self._of_first(own)
        generator.set_state(step.seed)
        states = {}
        for number, draw in draws_in_order(graph, self.device.type).items():
            site = graph.nodes[number].site
            states[site if site >= 0 else number] = generator.get_state()
            try:
                draw.of_batch(rows).make(generator)
            except ValueError as error:
                raise RunError(
                    f"random='torch' draws what torch does for the whole batch of {rows} rows, and of "
                    f"{graph.nodes[number].where} {error}: train with microbatches=1, or parallelize with "
                    "random='sharded', the default"
                ) from error
        if own is not None:
            self._alike = torch.equal(own, step.seed)
            if self._alike:
                self._set_generator(generator.get_state())
            else:  # this rank's numbers are its own, and go on
                next_seed()
        return TorchDraws(states, self.device, rows)

    def _of_first(self, own: torch.Tensor) -> torch.Tensor:
        """Return the first rank's state."""
        if self.group is None:
            return own
        state = own.to(self.device).clone()
        dist.broadcast(state, self.first, group=self.group)
        return state.cpu()

    def _generator_state(self) -> torch.Tensor:
        return torch.get_rng_state() if self.device.type == "cpu" else torch.cuda.get_rng_state(self.device)

    def _set_generator(self, state: torch.Tensor) -> None:
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, self.device)


def seeds_for(
    mode: str, group: dist.ProcessGroup | None, first: int, device: torch.device, alike: bool | None
) -> Seeds:
    """Return the source of a module's seeds for one of :data:`MODES`."""
    return (TorchSeeds if mode == "torch" else Seeds)(group, first, device, alike)


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(bytes(state.tolist()), digest_size=16).digest()
