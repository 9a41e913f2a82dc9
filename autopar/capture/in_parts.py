"""One microbatch of a batch, captured: which inputs are cut, and what it needs to know of the whole batch.

A microbatch of all inputs that are as long as the batch is captured first. Where the factor b goes through its graph
from these inputs to the loss (:mod:`.batch_factor`), they are the ones with rows. Else the batch is captured as it was
given, and its graph says which inputs have rows, or that one of them means nothing to a part of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.capture.batch_factor import Scaling, followed, inputs_with_rows, is_of_model
from autopar.capture.batch_totals import with_totals
from autopar.capture.microbatches import as_whole, first_part, have_rows, leaves_of_call, rows_of
from autopar.capture.row_flows import FollowedRows, Trouble
from autopar.capture.rows_of_draws import Draws, rows_of_draws, with_rows_of_draws
from autopar.errors import CaptureError
from autopar.torch_private import pytree
from autopar.words.graph import Graph, Ref
from autopar.words.trees import PyTree

SHAPED = ("arange", "slice", "narrow", "split", "split_with_sizes", "select", "expand", "reshape", "linspace", "repeat")
"""Operators whose numbers say shapes and places."""
NEAR = 1e-9
"""Ratios of numbers that differ by less are the same."""
InputRows = Collection[str | int] | None
"""The inputs that have the rows of the batch, by the names or positions of arguments; None to find them."""


@dataclass(frozen=True)
class InParts:
    """How the inputs and the loss of a model are those of a microbatch.

    Attributes:
        whole: inputs without rows, by the names that :func:`~autopar.capture.microbatches.leaves_of_call` gives them,
            and by those of the arguments.
        operators: the operators of the graph that was followed, and their names.
        found: what was found there.
        of_several: whether it is one of several microbatches, which reads totals of its batch.
        draws: where the rows are in what random operators draw, in a graph of several rows; that of one row (a last,
            smaller microbatch) does not tell.
    """

    whole: frozenset[str]
    operators: tuple[str, ...]
    found: FollowedRows
    of_several: bool = True
    draws: Draws = ()

    def of(self, captured: Any) -> Any:
        """Return a captured microbatch with its inputs that are computed ahead of a step."""
        graph: Graph = with_rows_of_draws(captured.graph, _rows_among(captured, self.whole), self.draws)
        captured = replace(captured, graph=graph)
        if not self.of_several or graph.loss is None:
            return replace(captured, example=replace(captured.example, in_parts=self))
        found = self.found
        if _operators(graph) != self.operators:
            rows = _rows_among(captured, self.whole)
            if all(graph.nodes[n].out.shape[0] == 1 for n in rows):
                found = self._by_names(graph)
            else:
                found = followed(graph, rows, None, numbers_in(captured))
        changed, totals, place = with_totals(graph, found)
        inputs = tuple(None if number is None else place[number] for number in captured.inputs)
        return replace(
            captured, graph=changed, inputs=inputs, totals=totals, example=replace(captured.example, in_parts=self)
        )

    def _by_names(self, graph: Graph) -> FollowedRows:
        """Return the same totals and ratios in a graph of one row, in which rows cannot be followed.

        Raises:
            CaptureError: an operator is not there.
        """
        names = [operator.partition(" ")[2] for operator in self.operators]
        found = self.found

        def now(number: int) -> int:
            there = graph.index.get(names[number], -1)
            if there < 0 or f"{graph.nodes[there].target} {names[number]}" != self.operators[number]:
                raise CaptureError(
                    f"a microbatch of one row is another graph than that of several, without {names[number]}, by which "
                    "its loss is a part of that of the batch: give batches whose rows the microbatches divide"
                )
            return there

        return FollowedRows(
            frozenset(), totals={Ref(now(ref.node), ref.out): is_mean for ref, is_mean in found.totals.items()},
            ratios=[now(number) for number in found.ratios], loss=found.loss,
            scaled={(number if number < 0 else now(number), position) for number, position in found.scaled},
        )  # fmt: skip

    def settled(self, captured: Any, take: Callable[[PyTree], Any]) -> InParts:
        """Capture other numbers of rows where numbers of the graph may follow from how many rows there are.

        Args:
            captured: a microbatch, as it is.
            take: captures another call, ``(args, kwargs, targets)``.
        """
        if not self.found.open_literals:
            return self
        example = captured.example
        batch = example.args, dict(example.kwargs), example.targets
        scaling = _scaling_nearby(captured, batch, take, self.whole)
        found = followed(captured.graph, _rows_among(captured, self.whole), scaling, numbers_in(captured))
        return replace(self, operators=_operators(captured.graph), found=found)

    @property
    def statistics(self) -> tuple[Trouble, ...]:
        """The places where the loss is no sum over rows, because of what the model computes of rows."""
        return tuple(t for t in self.found.troubles if t.hot and t.kind == "statistic")


def captured_in_parts(
    take: Callable[[PyTree], Any], example: PyTree, parts: int, model: torch.nn.Module, rows: InputRows = None,
    at_once: Any = None, ranks: int = 1, without: frozenset[str] = frozenset(),
) -> Any:  # fmt: skip
    """Capture one of equal parts of a batch.

    Args:
        take: captures a call, ``(args, kwargs, targets)``.
        example: the batch, in the same form; of several ranks, one rank's part of it.
        parts: number of microbatches.
        model: by the signature of its forward keywords may stand for positions.
        rows: the inputs with rows, where the caller names them.
        at_once: the example, where it was captured.
        ranks: number of ranks that each have a part of the batch.
        without: inputs that are known to have no rows, by name.

    Raises:
        CaptureError: the rows do not divide; or an input has no meaning in a part of the batch, or in one of other
            ranks' rows, too, and the message names it.
    """
    if parts == ranks == 1:
        return take(example) if at_once is None else at_once
    signature = inspect.signature(model.forward)

    def example_of_part(whole: frozenset[str]) -> PyTree:
        return first_part(as_whole(example, ranks, whole) if ranks > 1 else example, parts, whole)

    def part(whole: frozenset[str]) -> Any:
        return take(example_of_part(whole))

    def decided(captured: Any, found: FollowedRows | None, whole: frozenset[str]) -> Any:
        rows = _rows_among(captured, whole)
        if found is None:
            found = followed(captured.graph, rows, None, numbers_in(captured))
        is_one_row = all(captured.graph.nodes[n].out.shape[0] == 1 for n in rows)
        several = at_once if is_one_row and at_once is not None else captured
        draws = rows_of_draws(several.graph, _rows_among(several, whole))
        return InParts(whole, _operators(captured.graph), found, parts > 1, draws).of(captured)

    if rows is not None:
        whole = _others(example, rows, signature)
        return decided(part(whole), None, whole)
    n = rows_of(example, without)
    without = without | _as_spelt(_of_other_lengths(example, n), signature)
    each = n * ranks // parts
    first: Any = None
    failure: CaptureError | None = None
    batch = example_of_part(without)  # refuses rows that do not divide
    try:
        first = take(batch)
    except CaptureError as error:
        failure = error
    if first is not None and each > 1:
        found = followed(first.graph, _cut_in(first, example, n, without), None, numbers_in(first))
        open_ = found.open_literals if parts > 1 else []
        if not open_ and all(is_of_model(trouble) for trouble in found.troubles):
            return decided(first, found, without)
    try:
        at_once = take(example) if at_once is None else at_once
    except CaptureError as error:
        raise failure or error from None
    found = inputs_with_rows(at_once.graph, n, numbers_in(at_once))
    of_ranks, of_parts = f"each of {ranks} ranks has {n} rows of its own", f"a microbatch has {each} of the {n} rows"
    if why := _why_not_in_parts(at_once, found, of_ranks if ranks > 1 else of_parts):
        raise CaptureError(why)
    whole = without | _as_spelt(_without_rows(at_once, found, n), signature)
    if first is None or whole != without:
        if failure is not None and whole == without:
            raise failure
        first = part(whole)
    if parts == 1:
        return decided(first, None, whole)
    found = _found_in_parts(first, at_once, found, whole, (n, each), example_of_part(whole), take)
    return decided(first, found, whole)


def _found_in_parts(
    first: Any, at_once: Any, found: FollowedRows, whole: frozenset[str], rows: tuple[int, int], batch: PyTree,
    take: Callable[[PyTree], Any],
) -> FollowedRows:  # fmt: skip
    """Follow the rows of a microbatch, whose numbers scale as a comparison with the batch or another part shows.

    ``rows`` are those of the batch and of the microbatch, which is the call ``batch``.
    """
    scaling = _scaling(at_once, first, *rows)
    if scaling is None:
        scaling = _scaling_nearby(first, batch, take, whole)
    if rows[1] > 1 or _operators(first.graph) != _operators(at_once.graph):
        return followed(first.graph, _rows_among(first, whole), scaling, numbers_in(first))
    return followed(at_once.graph, found.rows, scaling, numbers_in(at_once))


def _why_not_in_parts(captured: Any, found: FollowedRows, part: str) -> str:
    """Return why the rows cannot be taken apart, by what an input means; empty if they can."""
    given = [t for t in found.troubles if t.is_of_inputs and not t.hot]
    return _refusal(captured, given[0], part) if given else ""


def names_of(captured: Any) -> list[str]:
    """Return the name of each leaf of a captured call for messages."""
    leaves = list(range(captured.in_spec.num_leaves))
    return [name for name, _ in leaves_of_call(pytree.tree_unflatten(leaves, captured.in_spec))]


def in_parts_of(captured: Any) -> InParts | None:
    """Return how a call is one microbatch of several, or one rank's; None if it is neither."""
    of: InParts | None = captured.example.in_parts if captured.example is not None else None
    return of


def no_rows_in(captured: Any) -> frozenset[str]:
    """Return the inputs without rows of a microbatch, by name."""
    example = captured.example
    return frozenset() if example is None or example.in_parts is None else example.in_parts.whole


def refused_rows(captured: Any, rows: int, part: str) -> str:
    """Return why the rows of a batch, of all ranks or of one, cannot be taken apart; empty if they can be.

    An input may count rows, or may be as long as rows without having any. ``part`` is the end of the message: what they
    are to be taken apart for.
    """
    return _why_not_in_parts(captured, inputs_with_rows(captured.graph, rows, numbers_in(captured)), part)


def is_at_once(captured: Any) -> bool:
    """Check whether a program takes a batch at once: it was not captured as one of several microbatches."""
    example = captured.example
    return example is not None and (example.in_parts is None or not example.in_parts.of_several)


def decided_for_steps(captured: Any) -> tuple[str, InParts | None]:
    """Return why a batch that was captured at once cannot be one of several, and how to capture it for that.

    The first is empty if it can be, the second None if the capture serves as it is.
    """
    derived = captured.graph.derived
    if "for_steps" not in derived:
        rows = next((node.out.shape[0] for node in _leaf_nodes(captured) if node.out.shape), 0)
        found = inputs_with_rows(captured.graph, rows, numbers_in(captured))
        why = _why_not_in_parts(captured, found, "a microbatch has a part of the rows")
        whole = no_rows_in(captured) | frozenset(_without_rows(captured, found, rows))
        decided = InParts(whole, _operators(captured.graph), found)
        is_as_it_is = with_totals(captured.graph, found)[1] is None and not found.open_literals
        derived["for_steps"] = why, None if is_as_it_is else decided
    of_steps: tuple[str, InParts | None] = derived["for_steps"]
    return of_steps


def _leaf_nodes(captured: Any) -> list[Any]:
    return [captured.graph.nodes[n] for n in captured.inputs if n is not None]


def _operators(graph: Graph) -> tuple[str, ...]:
    return tuple(f"{node.target} {node.name}" for node in graph.nodes)


def _cut_in(captured: Any, example: PyTree, rows: int, without: Collection[str]) -> set[int]:
    """Return the inputs of a microbatch that were cut."""
    args, kwargs, targets = example
    cut = have_rows(((*args, *targets), kwargs), rows, without)
    return {n for n, is_cut in zip(captured.inputs, cut, strict=True) if n is not None and is_cut}


def _rows_among(captured: Any, whole: Collection[str]) -> set[int]:
    """Return the inputs with rows, by node number: as long as the first one that is not left out."""
    nodes = captured.graph.nodes
    numbers = [
        n for name, n in zip(names_of(captured), captured.inputs, strict=True)
        if n is not None and name not in whole and nodes[n].out.shape
    ]  # fmt: skip
    rows = nodes[numbers[0]].out.shape[0] if numbers else 0
    return {n for n in numbers if nodes[n].out.shape[0] == rows}


def _without_rows(captured: Any, found: FollowedRows, rows: int) -> set[str]:
    """Return the inputs that are as long as the batch and have no rows, by name."""
    nodes = captured.graph.nodes
    return {
        name for name, n in zip(names_of(captured), captured.inputs, strict=True)
        if n is not None and nodes[n].out.shape[:1] == (rows,) and n not in found.rows
    }  # fmt: skip


def _as_spelt(names: Collection[str], signature: inspect.Signature) -> frozenset[str]:
    """Return names of inputs, and what they are called where a call gives them by keyword, or by position, instead."""
    parameters = [
        name for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip
    pairs = [(f"args[{i}]", f"'{name}'") for i, name in enumerate(parameters)]
    spelt = set(names)
    for name in names:
        for position, keyword in pairs:
            for this, other in ((position, keyword), (keyword, position)):
                if name == this or name.startswith(f"{this}[") or name.startswith(f"{this}."):
                    spelt.add(other + name[len(this) :])
    return frozenset(spelt)


def _others(example: object, rows: Collection[str | int], signature: inspect.Signature) -> frozenset[str]:
    """Return all inputs but those with rows.

    Raises:
        CaptureError: a name or position of no input.
    """
    said = _as_spelt([f"args[{r}]" if isinstance(r, int) else f"'{r}'" for r in rows], signature)
    tensors = [name for name, leaf in leaves_of_call(example) if isinstance(leaf, torch.Tensor)]

    def is_of(name: str, top: str) -> bool:
        return name == top or name.startswith((f"{top}[", f"{top}."))

    for r in rows:
        tops = _as_spelt([f"args[{r}]" if isinstance(r, int) else f"'{r}'"], signature)
        if not any(is_of(name, top) for name in tensors for top in tops):
            raise CaptureError(
                f"input_rows names {r!r}, which is no tensor of the example: these are {', '.join(tensors)}"
            )
    return _as_spelt([name for name in tensors if not any(is_of(name, top) for top in said)], signature)


def _of_other_lengths(example: object, rows: int) -> list[str]:
    """Return the tensors that are neither as long as the batch nor have a first dim of one, by name.

    They have no rows, though a microbatch, or the batch of all ranks, may be as long.
    """
    return [
        name for name, leaf in leaves_of_call(example)
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] not in (1, rows)
    ]  # fmt: skip


def _scaling_nearby(
    captured: object, batch: object, take: Callable[[PyTree], Any], whole: Collection[str]
) -> Scaling | None:
    """Return :func:`_scaling` of a microbatch, by one of twice as many rows, or else of fewer.

    ``batch`` is the call that was captured, ``take`` captures another. None if both are other graphs.
    """
    rows = rows_of(batch, whole)
    parts = next((k for k in range(2, rows + 1) if rows % k == 0), 1)
    for other, times in ((as_whole(batch, 2, whole), 2.0), (first_part(batch, parts, whole), 1 / parts)):
        try:
            scaling = _scaling(take(other), captured, times, 1) if times != 1 else None
        except CaptureError:  # of a model that takes no such batch
            continue
        if scaling is not None:
            return scaling
    return None


def _scaling(whole: Any, part: Any, rows: float, of_part: float) -> Scaling | None:
    """Return how the numbers of nodes that differ in a part of the batch follow from the number of rows.

    None if the graphs differ in more.
    """
    if _operators(whole.graph) != _operators(part.graph) or rows == of_part:
        return None
    powers: dict[int, int | None] = {}
    of_whole, of_part_too = numbers_in(whole), numbers_in(part)
    times = rows / of_part
    for i, (a, b) in enumerate(zip(whole.graph.nodes, part.graph.nodes, strict=True)):
        pairs: list[tuple[Any, Any]] = []
        if a.target in of_whole and b.target in of_part_too:
            pairs = [(of_whole[a.target], of_part_too[b.target])]
        elif a.kind == "op" and (a.target.split(".")[1:2] or [""])[0] not in SHAPED:
            pairs = list(zip(a.args, b.args, strict=True))
        for x, y in pairs:
            if isinstance(x, (int, float)) and isinstance(y, (int, float)) and x != y:
                ratio = x / y if y else 0.0
                powers[i] = 1 if abs(ratio / times - 1) < NEAR else -1 if abs(ratio * times - 1) < NEAR else None
    return powers


def numbers_in(captured: Any) -> dict[str, float]:
    """Return the numbers that the model's code makes into tensors, by name."""
    return {
        name: float(value) for name, value in captured.constants.items()
        if value.numel() == 1 and not value.is_complex() and not value.is_meta
    }  # fmt: skip


def _refusal(captured: Any, trouble: Trouble, part: str) -> str:
    """Return why an input can neither be cut nor be given to every part as it is."""
    graph = captured.graph
    names = dict(zip(captured.inputs, names_of(captured), strict=True))

    def shown(numbers: Collection[int]) -> str:
        return " and ".join(f"{names[n]} ('{graph.nodes[n].target}')" if n in names else "an input" for n in numbers)

    where = trouble.where
    culprits = trouble.others or trouble.rows
    if trouble.kind == "index":
        rows = [n for n in trouble.rows if n not in culprits]
        of = f" of {shown(rows)}" if rows else ""
        why = f"input {shown(culprits)} counts rows{of} at {where}: these are places among the example's rows"
    else:
        why = (
            f"what follows from input {shown(culprits)} has all rows of the batch at {where}, beside those of "
            f"{shown(trouble.rows)}, though the input itself has no rows that could be cut"
        )
    return (
        f"{why}, and {part}\n  microbatches=1 with batch='global' takes the whole batch at once on every rank; or give "
        "the model what counts within each row, with one entry for each row of the batch (a mask, document numbers, "
        "positions)"
    )
