"""Sharding rules: importing this package registers one rule per operator, family by family."""

from __future__ import annotations

import importlib

FAMILIES = (
    "pointwise", "shape", "image", "reduce", "factory", "index", "contraction", "conv", "pool", "attention", "norm",
    "loss", "embed", "random", "draws", "history", "branch",
)  # fmt: skip

for _family in FAMILIES:
    importlib.import_module(f"autopar.rules.{_family}")
