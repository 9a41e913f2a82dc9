"""The places of a batch's rows in tensors: the kinds of their values and dims, and what following them found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.words.graph import Ref

PLAIN, ROWS, ALIKE, OWN = "plain", "rows", "alike", "own"
"""Kinds of a part of a dim: any values; rows of the batch; values that are the same all along it; the numbers 0, 1, 2,
..., which as indices into rows name each row itself."""
FIXED, PER_ROW, SUM, MEAN = "fixed", "per row", "sum", "mean"
"""Kinds of a tensor in a microbatch: the same as in the batch; its rows; a term of a sum; one of a mean over rows."""
Part = tuple[int, str]
Dims = tuple[tuple[Part, ...], ...]
"""For each dim, the parts of which it consists, the one that changes slowest first: sizes, and what each is."""


@dataclass(frozen=True)
class Flow:
    """The relation of a tensor to the batch.

    Attributes:
        kind: one of FIXED, PER_ROW, SUM and MEAN.
        rows_from: the inputs from which it has its rows, as bits by node number.
        inputs: all inputs that it depends on, in the same way.
        power: for FIXED and PER_ROW, with which power of the number of microbatches its values in the batch are those
            in a microbatch. A number of rows has 1, what is divided by it -1.
    """

    kind: str
    dims: Dims
    rows_from: int = 0
    inputs: int = 0
    power: int = 0


@dataclass(frozen=True)
class Trouble:
    """A place in which a microbatch's part is not what the batch has there.

    Attributes:
        kind: ``index`` (numbers of an input count rows), ``beside`` (rows beside what is no row), ``across`` (an
            operator puts rows together), ``two`` (rows stand in two dims), ``statistic`` (a sum over rows, which the
            parameters decide, is read by more than a sum).
        node: number of the operator.
        rows: inputs, by node number, whose rows it reads; ``others``: inputs that what it reads beside them follows
            from.
        hot: all that it reads of the batch depends on parameters, too.
        where: the operator in words.
    """

    kind: str
    node: int
    rows: tuple[int, ...]
    others: tuple[int, ...] = ()
    hot: bool = True
    where: str = ""

    @property
    def is_of_inputs(self) -> bool:
        """Return whether the trouble comes from what an input means, not from what the model computes of it."""
        return self.kind == "index" or (self.kind == "beside" and bool(self.others))


@dataclass
class FollowedRows:
    """A graph whose rows were followed.

    Attributes:
        rows: the inputs with rows, by node number.
        flows: the flows of every tensor.
        troubles: what stands on the way to the loss.
        totals: sums over rows that the inputs decide, and whether each is a mean over rows instead.
        ratios: losses that are divided by how many labels count in them, by node number.
        scaled: what is a sum over rows beside means: places where a tensor is read, ``(node, position)``; and the loss
            itself, ``(-1, 0)``, if it is a sum.
        open_literals: nodes with a number that may follow from the number of rows, or not.
        loss: what the loss is: MEAN, SUM, FIXED; PER_ROW if that is not known.
    """

    rows: frozenset[int]
    flows: dict[Ref, Flow] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    totals: dict[Ref, bool] = field(default_factory=dict)
    ratios: list[int] = field(default_factory=list)
    scaled: set[tuple[int, int]] = field(default_factory=set)
    open_literals: list[int] = field(default_factory=list)
    loss: str = PER_ROW

    @property
    def is_proved(self) -> bool:
        """True if microbatches of `rows` add up to the loss of the batch."""
        return not self.troubles and not self.open_literals and self.loss in (MEAN, SUM)


def same_lead(flow: Flow, shape: Sequence[int]) -> bool:
    """Return whether the first dim of a shape is as long as that of a tensor with rows in it."""
    if not shape or not flow.dims or all(label != ROWS for _, label in flow.dims[0]):
        return False
    size = 1
    for n, _ in flow.dims[0]:
        size *= n
    return size == shape[0]


def joined(a: tuple[Part, ...], b: tuple[Part, ...]) -> tuple[tuple[Part, ...], bool]:
    """Return the parts of a factor that two tensors have, and whether rows of one meet other values of the other."""
    if len(a) == 1 and len(b) > 1:
        a = tuple((n, a[0][1]) for n, _ in b)
    elif len(b) == 1 and len(a) > 1:
        b = tuple((n, b[0][1]) for n, _ in a)
    if [n for n, _ in a] != [n for n, _ in b]:
        has_rows = any(label == ROWS for _, label in (*a, *b))
        return (a if any(label == ROWS for _, label in a) else b), has_rows
    parts, clash = [], False
    for (n, x), (_, y) in zip(a, b, strict=True):
        both = {x, y}
        if both == {ROWS} or both == {ROWS, ALIKE}:
            parts.append((n, ROWS))
        elif ROWS in both:
            parts.append((n, ROWS))
            clash = True
        else:
            parts.append((n, x if x == y else PLAIN))
    return tuple(parts), clash


def divided(of_dim: tuple[Part, ...], factors: Sequence[tuple[str, int]]) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """Yield the parts of a dim that belong to each of its factors, given with their sizes."""
    left = [part for part in of_dim if part[0] > 1]
    for factor, size in factors:
        mine: list[Part] = []
        while size > 1 and left:
            n, label = left.pop(0)
            if size % n == 0:
                mine.append((n, label))
                size //= n
            elif n % size == 0:  # rows in groups stay rows: of the slower part
                mine.append((size, label))
                left.insert(0, (n // size, PLAIN if label in (ROWS, OWN) else label))
                size = 1
            else:  # neither divides the other: of both
                mine.append((size, label))
                left.insert(0, (n, label))
                size = 1
        yield factor, tuple(mine)
