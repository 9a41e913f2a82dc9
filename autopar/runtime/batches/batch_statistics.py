"""Statistics of a batch, of which every microbatch has its own.

A batch norm in training normalizes by the mean and variance of what it is called with. In microbatches that is a part
of the batch, as with gradient accumulation; no weights of the microbatches give what the whole batch would, and running
statistics move once for each. Who trains so hears of it, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch.distributed as dist

from autopar.capture.microbatches import SHOWN, modules_with_statistics
from autopar.words.graph import Graph


def of_each_microbatch(graphs: Iterable[Graph], microbatches: int) -> str:
    """That modules take statistics of each microbatch, where they do; else nothing."""
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


def tell_of_statistics(graphs: Iterable[Graph], microbatches: int, stacklevel: int = 3) -> bool:
    """Warn on the first rank that modules take statistics of each microbatch; whether there are such modules."""
    said = of_each_microbatch(graphs, microbatches)
    if said and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(said, stacklevel=stacklevel)
    return bool(said)


__all__ = ["of_each_microbatch", "tell_of_statistics"]
