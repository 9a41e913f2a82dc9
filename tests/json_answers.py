"""Every answer that a test gets with ``--json`` is one document of its schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from autopar.cli.schemas.loading import load_answer
from autopar.planfile.parsing import is_serving, parse
from autopar.serving.plan_file import loads


def held_to_its_schema(words: Sequence[str], text: str) -> Any:
    """The answer of a command, loaded by the strict loader; None without ``--json``.

    The answers without a schema are plan files, which the strict readers of plan files take.
    """
    if "--json" not in words:
        return None
    document = json.loads(text)
    if is_serving(document) and words[0] in ("plan", "show"):
        return loads(text)
    if "schema" not in document and words[0] == "plan":
        return parse(text)
    return load_answer(text)
