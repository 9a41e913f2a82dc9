"""Notes about what each microbatch has of its own instead of the batch's: statistics, and some random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from autopar.capture.microbatches import SHOWN, modules_with_statistics
from autopar.words.graph import Graph


def of_each_microbatch(graphs: Iterable[Graph], microbatches: int) -> str:
    """Return a note about modules whose statistics are computed per microbatch; empty if there are none."""
    modules = modules_with_statistics(graphs) if microbatches > 1 else []
    if not modules:
        return ""
    names = ", ".join(f"'{name}'" for name in modules[:SHOWN]) + (", ..." if len(modules) > SHOWN else "")
    return (
        f"batch norms ({len(modules)}: {names}) take statistics of one microbatch at a time, as with gradient "
        f"accumulation, where one device takes those of the whole batch: with {microbatches} microbatches the "
        "numbers are other ones. With microbatches=1 they are those of the whole batch on any mesh; layer or group "
        "norms have no such statistics"
    )


def drawn_for_each_microbatch(graphs: Iterable[Graph], microbatches: int) -> str:
    """Return a note about random numbers that depend on the number of microbatches; empty if none do."""
    drawn = {node.where: None for graph in graphs for node in graph.nodes if node.rows is None}
    if not drawn or microbatches == 1:
        return ""
    return (
        f"{', '.join([*drawn][:SHOWN])}{', ...' if len(drawn) > SHOWN else ''}: it does not follow from the rules of "
        "the operators around which elements belong to which row of the batch, so each microbatch draws numbers of its "
        f"own: with another number of microbatches than {microbatches} a step draws others. With microbatches=1 they "
        "are those of the whole batch"
    )


def tell_of_statistics(graphs: Sequence[Graph], microbatches: int, stacklevel: int = 3) -> bool:
    """Warn on the first rank of what each microbatch has of its own; whether there is anything."""
    texts = [of_each_microbatch(graphs, microbatches), drawn_for_each_microbatch(graphs, microbatches)]
    for text in texts if not (dist.is_initialized() and dist.get_rank()) else ():
        if text:
            warnings.warn(text, stacklevel=stacklevel)
    return any(texts)
