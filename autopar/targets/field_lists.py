"""Lists of fields beside a trainer's modules, generated from the trainer's own code."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def field_list(package: str, name: str = "fields.json") -> dict[str, Any]:
    """Return a JSON file of a trainer's package, such as ``autopar.targets.trainers.deepspeed``."""
    found: dict[str, Any] = json.loads((files(package) / name).read_text(encoding="utf-8"))
    return found
