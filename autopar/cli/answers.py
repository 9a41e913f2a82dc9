"""Answers of commands as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys


def print_json(value: object, schema: str | None = None) -> None:
    """Print a value as JSON on standard output; infinite numbers become null.

    ``schema`` names the answer in the table of :mod:`autopar.cli.schemas`: the document, which is an object, says so
    under its key ``schema``.
    """
    if schema is not None:
        from autopar.cli.schemas import id_of

        assert isinstance(value, dict)
        value = {"schema": id_of(schema), **value}

    def plain(v: object) -> object:
        if dataclasses.is_dataclass(v) and not isinstance(v, type):
            v = dataclasses.asdict(v)
        if isinstance(v, dict):
            return {str(k): plain(x) for k, x in v.items()}
        if isinstance(v, (list, tuple)):
            return [plain(x) for x in v]
        if isinstance(v, float) and not math.isfinite(v):
            return None
        return v

    sys.stdout.write(json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")
