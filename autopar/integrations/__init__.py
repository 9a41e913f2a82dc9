"""Training loops of other libraries over a parallel module.

:mod:`.accelerator`  ``Accelerator``, in place of accelerate's
:mod:`.trainer`      ``Trainer``, in place of transformers'
:mod:`.first_call`   a model that is parallelized when it is first called in training
:mod:`.one_process`  these libraries' view of several ranks as one process

>>> from autopar.integrations import Trainer             # in place of: from transformers import Trainer
>>> from autopar.integrations import Accelerator         # in place of: from accelerate import Accelerator

Both see one process: every rank gets the same whole batches from the unchanged loaders, and the plan decides which rows
and shards each computes. Batch sizes are those of the whole batch, whatever they are called; losses, metrics, gradient
accumulation and clipping are computed as on one device. The first rank writes files and logs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.integrations.accelerator import Accelerator
    from autopar.integrations.trainer import Trainer

_WHERE = {"Accelerator": "autopar.integrations.accelerator", "Trainer": "autopar.integrations.trainer"}


def __getattr__(name: str) -> Any:
    """Import a class on first use: neither library is needed for the other."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'autopar.integrations' has no attribute '{name}'")


__all__ = ["Accelerator", "Trainer"]
