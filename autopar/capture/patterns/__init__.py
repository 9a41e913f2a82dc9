"""Patterns of users: a file for each that serves few families of models, unknown to the rest of capture.

Every file here registers its patches, handlers or passes when it is imported, and :func:`load` imports them all. To add
one, add a file; to do without one, delete it, and only its own tests fail.

========================== ============================================================================================
:mod:`.entered_branches`   branches that are entered where a mask selects rows: which parameters take part in a call
:mod:`.gathered_matrices`  a matrix that is gathered for each row: a product by rows
:mod:`.regions_inlined`    regions without gradients in which selected rows are worked on
:mod:`.sorted_rows`        rows in the order of their experts stay in their own
========================== ============================================================================================
"""

from __future__ import annotations

import functools
import importlib
import pkgutil


@functools.cache
def load() -> None:
    """Import every pattern, in the order of their names."""
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{name}")


__all__ = ["load"]
