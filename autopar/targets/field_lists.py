"""Lists of fields beside a trainer's modules, generated from the trainer's own code."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from hardware_profiles.strict import parse_json, read_text


@cache
def field_list(package: str, name: str = "fields.json") -> dict[str, Any]:
    """Return a JSON file of a trainer's package, such as ``autopar.targets.trainers.deepspeed``."""
    found: dict[str, Any] = parse_json(read_text(Path(str(files(package) / name))))
    return found
