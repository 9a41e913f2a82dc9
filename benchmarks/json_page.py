"""Makes docs/json.md anew from the schemas of autopar.cli.schemas and the exit codes.

    python benchmarks/json_page.py

tests/unit/test_json_schemas.py holds the page to them.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from autopar.cli.exit_codes import EXIT_CODES
from autopar.cli.schemas import ANSWERS
from autopar.cli.schemas.loading import fields_of, forms_in, said
from autopar.cli.schemas.registry import AnswerSchema

PAGE = Path(__file__).resolve().parents[1] / "docs" / "json.md"
HEAD = """# JSON of the commands

Every command that has `--json` prints exactly one JSON object on standard output; progress and notes go to standard
error. The object says under `schema` what it is: `autopar.fits/1` is version 1 of the answer of `autopar fits`. The
version is raised when a key is removed, renamed, or gets another type or meaning. New keys raise nothing: ignore keys
that you do not know. Numbers are in the unit that their key ends with (`_bytes`, `_seconds`); numbers that are not
finite are null. [Recipes](recipes.md) show what to do with them.

The one exception is `autopar plan --json` without `--top`, `--like` and `--for`: it prints the plan file, byte for byte
as `-o` writes it, which has a version of its own (`autopar_plan`).

In Python, `autopar.cli.schemas.loading.load_answer(text)` gives the answer as an object of its dataclass, and refuses
unknown keys, missing ones and wrong types. This page is made from these dataclasses by
`python benchmarks/json_page.py`; a test holds the page, and what every command really prints, to them.

## Exit codes

The same for all commands, with and without `--json`.

| code | meaning |
|---|---|
{codes}

With `--json` and one of the codes from 2 on, standard output has this object in place of the answer:

```json
{error}
```
"""
EXAMPLE = {
    "schema": "autopar.error/1",
    "error": {
        "kind": "PlanError", "failures": [], "exit_code": 2,
        "message": "--like tp=2,foo=1: 'foo=1' is no word of a layout; known: dp, tp, ep, etp, pp, vp, mbs, m, ...",
    },
}  # fmt: skip


def linked(kind: Any) -> str:
    """A type in words, with links to the objects in it."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if origin in (Union, types.UnionType):
        return " or ".join(map(linked, parts))
    if origin in (list, dict) and any(is_dataclass(part) for part in parts):
        return ("list of " if origin is list else "object of ") + linked(parts[-1])
    text = said(kind)
    return text.removeprefix("a ").removeprefix("an ")


def table(form: type) -> Iterator[str]:
    """The fields of a dataclass as rows."""
    yield "| key | type | meaning |"
    yield "|---|---|---|"
    for f in fields_of(form):
        if f.rest is not None:
            yield f"| all others | | {f.text}: see [{Path(f.rest.described_in).stem}]({f.rest.described_in}) |"
        else:
            key = f"`{f.key}`" if f.required else f"`{f.key}` (may be absent)"
            yield f"| {key} | {linked(f.kind)} | {f.text or f.key} |"


def text_of(form: type) -> str:
    """The docstring of a dataclass in Markdown."""
    return re.sub(r"``([^`]*)``", r"`\1`", inspect.getdoc(form) or "")


def section(schema: AnswerSchema, shown: set[type]) -> Iterator[str]:
    """An answer, and the objects in it that no answer before has."""
    commands = "; ".join(re.sub(r"(autopar [a-z]+[^,;]*)", r"`\1`", words) for words in schema.made_by)
    yield f"## {schema.name}"
    yield f"`{schema.id}`, of {commands}."
    yield text_of(schema.form)
    for form in forms_in(schema.form):
        if form in shown:
            continue
        shown.add(form)
        if form is not schema.form:
            yield f"### {form.__name__}"
            yield text_of(form)
        yield "\n".join(table(form))


def page() -> str:
    """The whole page."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    shown: set[type] = set()
    head = HEAD.replace("{codes}", codes).replace("{error}", json.dumps(EXAMPLE, indent=2))
    parts = [part for name in sorted(ANSWERS) for part in section(ANSWERS[name], shown)]
    return head + "\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
