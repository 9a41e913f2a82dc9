"""Of how many things a loss is the mean: by that, and not by its rows, a microbatch counts in the loss of its batch.

A mean over labels of which some are ignored, or a sum that is divided by the sum of a mask, is a sum over a count. The
loss of the batch is the sum of the microbatches' sums over the sum of their counts. The count follows from the inputs
alone, so every rank computes it for itself, ahead of the step and on the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.lower.emit import lower
from autopar.planner.intra_op.one_device import one_device
from autopar.runtime.gradients.reached import part_for
from autopar.runtime.stages.async_host_reads import ToHost
from autopar.words.graph import Graph, Node, Ref

Shares = Sequence[float] | torch.Tensor
"""By what part each microbatch's loss counts in that of its batch; a float64 tensor, [microbatches], where counts stay
on a device."""
MEAN = 1
"""The reduction of torch's losses that is a mean."""
IGNORED = -100
"""What labels are ignored where nothing is said."""
LABELLED = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss.default")
SAME_COUNT = {
    "aten.neg.default", "aten.to.dtype", "aten._to_copy.default", "aten.clone.default", "aten.view.default",
    "aten.reshape.default", "aten.squeeze.default", "aten.alias.default", "aten.nan_to_num.default",
}  # fmt: skip
"""Operators on a loss that leave it the mean of as many things."""
BOUNDED = {"aten.clamp.default", "aten.clamp_min.default", "aten.clip.default"}
LARGEST_BOUND = 1
"""A bound of a count that only keeps it from being zero."""
UNLIKE = 1e-9
"""Shares of rows and of labels that differ by less are alike."""
SHOWN = 8
"""Microbatches whose numbers a warning shows."""


@dataclass(frozen=True)
class Count:
    """Gives the count of a microbatch.

    Attributes:
        inputs: names and shapes of those from which it follows.
        of_all: whether the whole loss is the mean of so many things; otherwise only one of its terms is, so no number
            for each microbatch gives the loss of the batch, unless that is in proportion to the rows.
        told: whether it was said of the program that its microbatches do not give the loss of the batch.
    """

    inputs: Mapping[str, tuple[int, ...]]
    program: Callable[..., Any]
    ignored: int | None
    of_all: bool = True
    told: list[bool] = field(default_factory=list, compare=False)
    on_their_way: ToHost = field(default_factory=ToHost, compare=False)

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A float64 tensor of shape [], from the whole inputs of a microbatch by name."""
        (value,) = self.program(*(inputs[name].detach() for name in self.inputs))
        return (value if self.ignored is None else (value != self.ignored).sum()).to(torch.float64).reshape(())


@torch.no_grad()
def shares_by_count(of: Sequence[Count], counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """By what part each microbatch of a step counts in the loss of the batch; None where rows decide it.

    A loss of terms that are means over different things counts by rows, and a warning says where that is another number
    than the loss of the batch: on accelerators one of the next steps says it, as the host does not wait.

    Args:
        of: how the microbatches of each program count.
        counts: of how many things each microbatch's loss is the mean, float64 [microbatches].
        rows: the part of each in the rows of the batch, alike.
    """
    total = counts.sum()
    of_terms = next((each for each in of if not each.of_all), None)
    if of_terms is None:
        return torch.where(total == 0, rows, counts / total)  # nothing counts: each loss says itself what it is then
    if not of_terms.told:
        unlike = ((counts - rows * total).abs() > UNLIKE * total).any()
        for is_unlike, *numbers in of_terms.on_their_way.sent(
            torch.cat([unlike.to(counts.dtype)[None], counts[:SHOWN], rows[:SHOWN]])
        ):
            if is_unlike and not of_terms.told:
                of_terms.told.append(True)
                _tell(numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])
    return None


def _tell(counts: Sequence[float], rows: Sequence[float]) -> None:
    """Warn that a step does not train by the loss of the whole batch."""
    if dist.is_initialized() and dist.get_rank():
        return
    counted, of_rows = (", ".join(f"{n:.3g}" for n in numbers) for numbers in (counts, rows))
    warnings.warn(
        "the loss adds up means over different things, and its microbatches count by their rows: in this step by "
        f"{of_rows}, while {counted} labels count in them. Such a step does not train by the loss of the whole batch, "
        "and where a microbatch has no label by no number at all; microbatches=1 trains by it, and so does a loss that "
        "is one sum over one count",
        stacklevel=3,
    )


class _Mean(NamedTuple):
    """A term of a loss: a mean over as many things as a tensor's value says, or as it has labels that count.

    Attributes:
        of: the tensor; None for a mean over rows, or where it is not known over what.
        ignored: of labels, those that do not count; None where ``of`` is the count itself.
    """

    of: Ref | None
    ignored: int | None = None


def count_of(graph: Graph, device: torch.device) -> Count | None:
    """How the count of a loss follows from the inputs; None where it is in proportion to the rows, or is not known.

    Where terms of a loss are means over different things, rows count; the count is that of a term over labels then.
    """
    if graph.loss is None or not isinstance(loss := graph.outputs[graph.loss], Ref):
        return None
    with_inputs = graph.from_inputs
    terms = set(_terms(graph, loss, with_inputs))
    of_labels = [each for each in terms if each.of is not None]
    if not of_labels:
        return None
    mean = min(of_labels, key=lambda each: each.of.node if each.of is not None else 0)
    if mean.of is None or graph.nodes[mean.of.node].hot or mean.of.node not in with_inputs:
        return None  # labels that forward makes are as many in each microbatch
    part = part_for(graph, [mean.of])
    program = lower(part, one_device(part), device)
    if any(slot.kind != "input" for slot in program.slots):
        return None
    return Count({slot.name: slot.shape for slot in program.slots}, program.module, mean.ignored, len(terms) == 1)


def _terms(graph: Graph, ref: Ref, with_inputs: Set[int]) -> Iterator[_Mean]:
    """The means of which a loss is the sum; what does not depend on the batch, such as a penalty, is none."""
    node = graph.nodes[ref.node]
    if ref.node not in with_inputs:
        return
    first: Any = node.args[0] if node.args else None
    second: Any = node.args[1] if len(node.args) > 1 else None
    if node.target in SAME_COUNT and isinstance(first, Ref):
        yield from _terms(graph, first, with_inputs)
    elif node.target in ("aten.add.Tensor", "aten.sub.Tensor") and isinstance(first, Ref):
        yield from _terms(graph, first, with_inputs)
        if isinstance(second, Ref):
            yield from _terms(graph, second, with_inputs)
    elif node.target in ("aten.mul.Tensor", "aten.div.Tensor") and isinstance(first, Ref):
        if not isinstance(second, Ref) or second.node not in with_inputs:
            yield from _terms(graph, first, with_inputs)
        elif node.target == "aten.mul.Tensor" and first.node not in with_inputs:
            yield from _terms(graph, second, with_inputs)
        else:
            is_count = node.target == "aten.div.Tensor" and not graph.spec(second).shape and _is_sum(graph, first)
            yield _Mean(_without_bound(graph, second, with_inputs) if is_count else None)
    elif node.target in LABELLED:
        yield _labels(graph, node)
    else:
        yield _Mean(None)


def _without_bound(graph: Graph, ref: Ref, with_inputs: Set[int]) -> Ref:
    """The count itself, where a loss is divided by ``count.clamp(min=1)``.

    A microbatch in which nothing counts then adds nothing; by the bounded number it would count as one thing, and so
    take from what the others count.
    """
    node = graph.nodes[ref.node]
    first: Any = node.args[0] if node.args else None
    if node.target == "aten.maximum.default":
        inner = [arg for arg in node.args if isinstance(arg, Ref) and arg.node in with_inputs]
        return _without_bound(graph, inner[0], with_inputs) if len(inner) == 1 else ref
    if node.target in BOUNDED:
        least, most = _argument(node, 1, "min", None), _argument(node, 2, "max", None)
        only_not_zero = isinstance(least, int | float) and least <= LARGEST_BOUND and most is None
        return _without_bound(graph, first, with_inputs) if only_not_zero else ref
    return _without_bound(graph, first, with_inputs) if node.target in SAME_COUNT and isinstance(first, Ref) else ref


def _is_sum(graph: Graph, ref: Ref) -> bool:
    """Whether a number is a sum over the batch."""
    node = graph.nodes[ref.node]
    if node.target in LABELLED:
        return _argument(node, 3, "reduction", MEAN) == MEAN + 1
    if node.target in SAME_COUNT and isinstance(node.args[0], Ref):
        return _is_sum(graph, node.args[0])
    return node.target.startswith("aten.sum.")


def _labels(graph: Graph, node: Node) -> _Mean:
    target, weight = node.args[1], _argument(node, 2, "weight", None)
    whole_numbers = isinstance(target, Ref) and not graph.spec(target).is_float
    if not whole_numbers or weight is not None or _argument(node, 3, "reduction", MEAN) != MEAN:
        return _Mean(None)
    return _Mean(target, int(_argument(node, 4, "ignore_index", IGNORED)))


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


__all__ = ["Count", "Shares", "count_of", "shares_by_count"]
