"""Trees of values, as models take and return them."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any  # nested tuples, lists, dicts of values
