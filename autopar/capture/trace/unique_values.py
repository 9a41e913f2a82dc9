"""``torch.unique`` and ``torch.unique_consecutive`` if it is known how many distinct values there are.

Their size depends on values. Where it is known, the values stand where one differs from the one before, and the places
are found anew in each run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.capture.branches.data_branches import DISTINCT
from autopar.words.trees import PyTree

_SORTED = (torch.unique, torch.Tensor.unique)


def distinct(
    func: object, args: Sequence[object], kwargs: Mapping[str, PyTree], size: Callable[[torch.Tensor], int | None]
) -> Any:
    """Compute a call of ``unique`` or ``unique_consecutive``; None for others, and if `size` knows no number."""
    if func not in DISTINCT or not args or not isinstance(args[0], torch.Tensor):
        return None
    names = (*(("sorted",) if func in _SORTED else ()), "return_inverse", "return_counts", "dim")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    if given.keys() - set(names) or given.get("dim") is not None or not given.get("sorted", True):
        return None
    x, order = args[0].reshape(-1), None
    if not len(x) or x.is_floating_point():  # NaN differs from itself
        return None
    if func in _SORTED:
        x, order = x.sort(stable=True)
    first = torch.cat([torch.ones_like(x[:1], dtype=torch.bool), x[1:] != x[:-1]])
    n = size(first)
    if n is None:
        return None
    places = torch.nonzero_static(first, size=n).squeeze(1)
    made = [x[places]]
    if given.get("return_inverse"):
        of_each = first.cumsum(0) - 1
        inverse = of_each if order is None else torch.zeros_like(of_each).scatter(0, order, of_each)
        made.append(inverse.reshape(args[0].shape))
    if given.get("return_counts"):
        made.append(torch.cat([places[1:], torch.full_like(places[:1], len(x))]) - places)
    return tuple(made) if len(made) > 1 else made[0]
