"""The notation of sharding rules, and the strategies that follow from one rule.

A rule is an einops-like line over *factors*, index letters with a size::

    linear        "... k, n k -> ... n"
    split heads   "b s (h d) -> b s h d"

Commas separate the tensor inputs (in the order of ``Node.refs``) and the outputs. A dim is one factor, ``(h d)`` for a
composite (major first), or ``1``. ``...`` stands for the leading dims that are left over, right-aligned, as one factor
each; a dim of size 1 there is a broadcast.

From a rule follows, for one mesh axis, a list of :class:`Option`:

* for every factor that may be cut, one option: a tensor that has the factor is ``S``; an input that lacks it is ``R``
  (its gradient is pending), an *additive* input (a bias) is ``P`` instead when the factor is summed; an output that
  lacks it is ``P``;
* for every factor that may be cut into uneven *blocks* of u of its elements, one option ``<factor>*<u>``, where the
  mesh divides its blocks unevenly: the same placements, with units (``S2*64``). A factor that shares a dim with others,
  h of ``(h d)``, has ``h*1``: its pieces in that dim are multiples of d. What blocks others want depends on the graph
  (:mod:`autopar.rules.block_units`);
* ``I``: everything whole, gradients whole; ``R``: everything whole, gradients pending;
* one option for every *linear* group of inputs: those are ``P``, the other inputs ``R``, the outputs ``P``.

A factor may be cut if in every dim in which it stands it is the major one, and it is not marked *whole*. Cutting some
factors needs communication inside the op: the rule then has a :class:`Lowering` for them, a function that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Any

from autopar.errors import RuleError, closest
from autopar.rules.operator_call import Call
from autopar.rules.option_names import factor_and_block
from autopar.rules.terms import Term, bind
from autopar.words.load_shares import Load
from autopar.words.meshes import Mesh
from autopar.words.placements import Placement
from autopar.words.trees import PyTree
from hardware_profiles.model import COLLECTIVES, MOVING_KINDS

KINDS = ("matmul", "conv", "attention", "pointwise", "reduce", "copy", "none")
"""What the cost model knows of an operator."""
ADD = "add"
"""The curve of additions."""

@dataclass(frozen=True)
class Comm:
    """A collective inside a lowering, made over the axes that cut ``factor``.

    Attributes:
        factor: one that the lowering is for.
        kind: one of :data:`hardware_profiles.model.COLLECTIVES`; ``send_recv`` goes to the next rank of the axis.
        over: the factors whose local sizes, multiplied, are the number of elements of the buffer.
        item_bytes: bytes of an element.
        backward: made in the backward instead of the forward.
        in_ring: made once for every other piece of the factor, as the steps of a ring are.
        overlaps: runs beside the operator's compute of the same pass; only what is longer than that takes time.
        repeats: how often it is made, one after the other, as by each step of a loop over time.
        load: the shares of what ``factor`` cuts, if they are not all alike: the buffer is that of the rank which
            sends or gets most.
        load_of: the factor that has the load, where it is another one.
        from_pieces: the number of pieces of the factor from which on it is made.
        gathers: the buffer is what the ranks of the axis gather, as often that of a rank as there are ranks.
        chunks: in how many parts it is made, beside the operator's compute.
        when: ``first`` if nothing of the operator is computed before it, ``last`` if nothing is behind it, so that
            other operators may overlap it (:mod:`autopar.rules.lowering_helpers.overlapped_steps`); in a backward that
            of the forward's collective whose adjoint it is. Of several axes the last one's is first, the first one's
            last.
    """

    factor: str
    kind: str
    over: tuple[str, ...]
    item_bytes: int
    backward: bool = False
    in_ring: bool = False
    overlaps: bool = False
    repeats: int = 1
    load: Load = ()
    load_of: str = ""
    from_pieces: int = 2
    gathers: bool = False
    when: str = ""
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise RuleError(f"'{self.kind}' is no collective; one of {', '.join(COLLECTIVES)}")

    def times(self, pieces: int) -> int:
        """Return how often it is made on an axis that cuts the factor into ``pieces``."""
        if pieces < self.from_pieces:
            return 0
        return (pieces - 1 if self.in_ring else 1) * self.repeats * self.chunks


@dataclass(frozen=True)
class CallPart:
    """A call that is a part of a lowering.

    Attributes:
        function: gets what the part before it has given, if there is one, and then ``args`` and ``kwargs``.
    """

    function: Callable[..., Any]
    args: tuple[PyTree, ...] = ()
    kwargs: Mapping[str, PyTree] = field(default_factory=dict)


Parts = tuple[CallPart, CallPart, CallPart]


@dataclass(frozen=True)
class Lowering:
    """A replacement for the operator on one rank where ``factors`` are cut.

    Attributes:
        function: gets the operator's arguments and ``cut={factor: axis names}``. That of a random operator also gets
            ``seed`` (int64 tensor without dims), ``site`` (int), ``shape`` (the global output shape) and ``shards``
            (per output dim, the axis names that cut it), so that the draw does not depend on the mesh.
        factors: those that it can cut, one or several at a time.
        comm: the collectives that it makes.
        uneven: pieces need not be equal; if they are not, ``function`` also gets ``sizes={factor: global size}`` of
            all factors that are cut (a random operator's has ``shape``).
        on_one_axis: those of its factors that at most one axis may cut.
        most_work: by the number of pieces of each factor that is cut, what the rank that computes most does, as a
            multiple of an equal share; None if all have the same.
        in_parts: the same in three calls, of the arguments of ``function``: one that begins the first collectives, one
            that waits for them, computes and begins the last ones, and one that waits for those and gives the result.
    """

    function: Callable[..., Any]
    factors: frozenset[str] = frozenset()
    comm: tuple[Comm, ...] = ()
    uneven: bool = False
    most_work: Callable[[Mapping[str, int | Fraction]], float] | None = None
    on_one_axis: frozenset[str] = frozenset()
    in_parts: Callable[[tuple[Any, ...], Mapping[str, Any]], Parts] | None = None


Localize = Callable[[Call, Mapping[str, int]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Rule:
    """The cuts that one call allows.

    Attributes:
        sizes: global size of every factor.
        inputs, outputs: one term per tensor input and output.
        kind: for the cost model: ``matmul conv attention pointwise reduce copy none``.
        curve: what the cost model tells apart of a kind, one of :data:`hardware_profiles.MOVING_KINDS`, or ``add`` for
            an addition, whose backward hands on the gradient as it is; empty for the kind itself.
        whole: factors never cut.
        linear: groups of inputs in which the op is jointly linear.
        additive: inputs that are added to the result, such as a bias.
        flops: forward floating-point operations per element of the product of all factors.
        shape_arg: ``(position, name)`` of the argument that holds the output shape.
        localize: ``(call, cuts) -> (args, kwargs)`` for other arguments that change on local sizes, where
            ``cuts`` gives the number of pieces of each cut factor.
        lowerings: what replaces the operator where it cannot run on pieces as it is, each for its factors.
        out_as, in_as: placements for one factor's option that differ from the derived ones.
        saves: inputs that autograd keeps for the backward; ``saves_out``: outputs that it keeps.
        random: draws random numbers: a lowering replaces the operator always, on every mesh.
        even: factors whose pieces must be equal: an argument is divided by their number.
        units: numbers of elements of the blocks into which a factor may be cut, beside single elements.
        together: names of options that cut several factors at once on one axis, with these factors. Such a name is a
            factor too, of a size in ``sizes`` that its pieces divide, and stands in no term; a lowering cuts it. With
            no factors, or such that stand in no term either, it cuts what none of the rule stands for, and ``in_as``
            and ``out_as`` say all placements.
        gemm: ``(rows, features, summed, groups)``, the factors of the largest matrix product inside, of which there is
            one for each group; None if the terms of the rule say it.
        needs_some: factors of which every rank must have some: torch's kernels refuse a piece of no elements, or make
            no numbers of it. Of all others a rank may have none (6 over 4 ranks are 2, 2, 2 and 0).
        ways: of a factor's option, what may follow its name: other ways to make the same exchange, in the same
            placements (:mod:`autopar.words.exchanges`), ``/2`` of ``travel/2``.
        absent: names of options that such calls have and this one has not, and why: for whoever asks for one.
        whole_gradients: the backward need not be linear in the gradient, so no rank runs it on a term of a sum.
        in_place: it writes to a part of its first input, and moves no more than that part.
    """

    sizes: Mapping[str, int]
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    kind: str = "pointwise"
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    flops: float = 0.0
    shape_arg: tuple[int, str] | None = None
    localize: Localize | None = None
    lowerings: tuple[Lowering, ...] = ()
    out_as: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    in_as: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    saves: tuple[int, ...] = ()
    saves_out: bool = False
    random: bool = False
    whole_gradients: bool = False
    even: frozenset[str] = frozenset()
    needs_some: frozenset[str] = frozenset()
    units: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    together: Mapping[str, frozenset[str]] = field(default_factory=dict)
    gemm: tuple[str, str, str, str] | None = None
    ways: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    curve: str = ""
    in_place: bool = False

    def __post_init__(self) -> None:
        """Refuse what no operator can be: names of no factor, positions of no input."""
        named = {
            "whole": self.whole, "needs_some": self.needs_some, "in_as": self.in_as, "out_as": self.out_as,
            "together": [*self.together, *(f for factors in self.together.values() for f in factors)],
            "gemm": self.gemm or (),
            "lowerings": [f for lowering in self.lowerings for f in lowering.factors],
            "comm": [f for lowering in self.lowerings for comm in lowering.comm for f in (comm.factor, *comm.over)],
        }  # fmt: skip
        for where, factors in named.items():
            for factor in factors:
                if factor not in self.sizes:
                    raise RuleError(f"rule '{self}': {where} names '{factor}'; {closest(factor, self.sizes)}")
        positions = {*self.additive, *self.saves, *(i for group in self.linear for i in group)}
        if positions and max(positions) >= len(self.inputs):
            raise RuleError(f"rule '{self}': there is no input {max(positions)}, it has {len(self.inputs)}")
        if self.kind not in KINDS:
            raise RuleError(f"rule '{self}': '{self.kind}' is no kind of operator; one of {', '.join(KINDS)}")
        if self.curve and self.curve not in (ADD, *MOVING_KINDS):
            raise RuleError(f"rule '{self}': '{self.curve}' is no curve; one of {', '.join((ADD, *MOVING_KINDS))}")

    def lowering(self, cut: Iterable[str]) -> Lowering | None:
        """Return what replaces the operator where the factors ``cut`` are cut; None if it runs unchanged.

        Raises:
            RuleError: no lowering cuts all of them at once (see :meth:`can_lower`).
        """
        needed = self._needed(cut)
        if not needed and not (self.random and self.lowerings):
            return None
        able = [lowering for lowering in self.lowerings if needed <= lowering.factors]
        if not able:
            raise RuleError(f"rule '{self}': nothing cuts {' and '.join(sorted(needed))} at once")
        return min(able, key=lambda lowering: len(lowering.factors))

    def can_lower(self, cut: Iterable[str]) -> bool:
        """Check whether the factors ``cut`` can be cut at once."""
        if len(self.lowerings) < 2:
            return True
        needed = self._needed(cut)
        return any(needed <= lowering.factors for lowering in self.lowerings)

    def _needed(self, cut: Iterable[str]) -> set[str]:
        """Return those of the factors ``cut`` that only lowerings can cut."""
        return {f for f in cut if f in self._lowered}

    @cached_property
    def _lowered(self) -> frozenset[str]:
        """The factors that some lowering cuts."""
        return frozenset(f for lowering in self.lowerings for f in lowering.factors)

    @cached_property
    def derived(self) -> dict[object, Any]:
        """Results that others derive of the rule, by key, such as its options: a search asks thousands of times."""
        return {}

    @cached_property
    def cuttable(self) -> tuple[str, ...]:
        """Factors that an axis may cut, in order of first appearance."""
        blocked = set(self.whole)
        seen: dict[str, None] = {}
        for term in (*self.outputs, *self.inputs):
            for dim in term:
                big = [f for f in dim if self.sizes[f] > 1]
                blocked.update(big[1:])
                for f in big:
                    seen.setdefault(f)
        cut = tuple(f for f in seen if f not in blocked)
        joint = (name for name, factors in self.together.items() if factors & {*seen} <= {*cut})
        return (*cut, *(name for name in joint if self.sizes[name] > 1))

    @cached_property
    def uneven(self) -> frozenset[str]:
        """Factors whose pieces need not be equal: those that stand alone in all their dims.

        A piece of a dim ``(h d)`` that is cut along h has a multiple of d elements, which ``torch.chunk`` of the dim
        gives only where pieces are equal.
        """
        return frozenset(self.cuttable) - self.tied - self.even

    @cached_property
    def tied(self) -> frozenset[str]:
        """Factors that share a dim of some tensor with others."""
        return frozenset(
            f for term in (*self.inputs, *self.outputs) for dim in term
            if sum(self.sizes[g] > 1 for g in dim) > 1 for f in dim
        )  # fmt: skip

    @cached_property
    def in_blocks(self) -> tuple[str, ...]:
        """Factors that may be cut into uneven blocks."""
        return tuple(f for f in self.cuttable if f not in self.even and self.localize is None)

    @cached_property
    def blocks(self) -> tuple[tuple[str, int], ...]:
        """``(factor, elements of a block)`` of the options that cut factors into blocks."""
        singles = [(f, 1) for f in self.in_blocks if f in self.tied]
        return (*singles, *((f, u) for f in self.in_blocks for u in self.units.get(f, ())))

    def blocks_on(self, mesh: Mesh) -> tuple[tuple[str, int], ...]:
        """Return those of :attr:`blocks` that a mesh may divide unevenly; others need no units."""
        if not self.blocks:
            return ()
        n = mesh.n_devices
        return tuple((f, u) for f, u in self.blocks if self.sizes[f] // u % n)

    def factor_of(self, option: str) -> str | None:
        """Return the factor that an option of this name cuts; None if it cuts none."""
        factor = factor_and_block(option)[0]
        return factor if factor in self.sizes else None

    def size_at(self, factor: str, cuts: Mapping[str, int | Fraction]) -> int:
        """Return the size of a factor on one rank: of the largest piece."""
        pieces = cuts.get(factor, 1)
        for name, factors in self.together.items():
            if factor in factors:
                pieces *= cuts.get(name, 1)
        return -(-self.sizes[factor] // pieces)

    def flops_at(self, cuts: Mapping[str, int | Fraction]) -> float:
        """Return forward FLOPs on one rank: of the largest pieces, and of the rank that computes most."""
        if not self.flops:
            return 0.0
        lowering = self.lowering(cuts) if cuts else None
        most = 1.0 if lowering is None or lowering.most_work is None else lowering.most_work(cuts)
        if any(self.sizes[f] % n for f, n in cuts.items()):
            return self.flops * most * prod(-(-size // cuts.get(f, 1)) for f, size in self.sizes.items())
        return self.flops * most * prod(self.sizes.values()) / float(prod(cuts.values()))

    def __str__(self) -> str:
        def show(term: Term) -> str:
            return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" if d else "1" for d in term)

        text = ", ".join(map(show, self.inputs)) + " -> " + ", ".join(map(show, self.outputs))
        whole = sorted(self.whole)
        return text + (f"   whole: {' '.join(whole)}" if whole else "")


def line(
    text: str,
    call: Call,
    *,
    sizes: Mapping[str, int] | None = None,
    whole: str = "",
    even: str = "",
    needs_some: str = "",
    linear: Iterable[Iterable[int]] = (),
    additive: Iterable[int] = (),
    **rest: Any,
) -> Rule:
    """Make a :class:`Rule` from one line of notation and a call; ``whole`` holds names of factors."""
    factor_sizes, inputs, outputs = bind(
        text, [s.shape for s in call.ins], [o.shape for o in call.outs if o is not None], sizes
    )
    return Rule(
        sizes=factor_sizes,
        inputs=inputs,
        outputs=outputs,
        whole=frozenset(whole.split()),
        even=frozenset(even.split()),
        needs_some=frozenset(needs_some.split()),
        linear=tuple(frozenset(g) for g in linear),
        additive=frozenset(additive),
        **rest,
    )
