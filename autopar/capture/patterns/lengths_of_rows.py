"""``len(rows)`` while a model is traced, of rows whose number depends on data.

``if len(rows) == 0: continue`` asks for what ``rows.numel() == 0`` asks for, but Python's ``len`` must know the number.
While a model is traced the files that its modules come from see another ``len``, which gives ``rows.shape[0]``.
"""

from __future__ import annotations

from collections.abc import Sized

import torch

from autopar.capture.trace.patches import Patch, builtin_replaced, register


def _length(x: Sized) -> int | torch.SymInt:
    if isinstance(x, torch.Tensor) and x.dim() and isinstance(x.shape[0], torch.SymInt):
        return x.shape[0]
    return len(x)


register(Patch("lengths of rows", "``len(rows)`` must be a number, and that of selected rows depends on data",
               lambda record: builtin_replaced(record.module, "len", _length)))  # fmt: skip
