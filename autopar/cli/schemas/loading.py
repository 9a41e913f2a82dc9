"""Strict loading of answers: a document becomes the object of its schema, or one error names all that is wrong."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from autopar.cli.schemas import ANSWERS
from autopar.cli.schemas.registry import SCHEMA, AnswerSchema, Key, OtherKeys
from autopar.errors import AutoparError, closest
from hardware_profiles.strict import Unreadable, parse_json, shortened

MOST_SHOWN = 20
"""Most failures of one document in a message."""
NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object",
         list: "a list", type(None): "null"}  # fmt: skip


class SchemaError(AutoparError):
    """A document that is no answer of autopar, or not one of the version that is read here."""


@dataclass(frozen=True)
class AnswerField:
    """A field of an answer.

    Attributes:
        name: the field of the dataclass; ``key`` is that of the document.
        kind: the type, without annotations.
        text: what it means, with its unit.
        rest: the field has the keys that no other field has.
    """

    name: str
    key: str
    kind: Any
    text: str
    required: bool
    rest: OtherKeys | None


@cache
def fields_of(form: type) -> tuple[AnswerField, ...]:
    """Return the fields of a dataclass of an answer."""
    hints = get_type_hints(form, include_extras=True)
    found = []
    for f in fields(form):
        hint = hints[f.name]
        kind, notes = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
        key = next((note.text for note in notes if isinstance(note, Key)), f.name)
        rest = next((note for note in notes if isinstance(note, OtherKeys)), None)
        text = next((note for note in notes if isinstance(note, str)), "")
        required = f.default is MISSING and f.default_factory is MISSING
        found.append(AnswerField(f.name, key, kind, text, required, rest))
    return tuple(found)


def load_answer(document: str | Mapping[str, Any]) -> Any:
    """Return an answer as the object of its schema.

    Args:
        document: the text that a command printed with ``--json``, or its parsed value.

    Raises:
        SchemaError: no JSON, no known schema, or keys, types and values that are not those of the schema.
    """
    if isinstance(document, str):
        try:
            document = parse_json(document)
        except Unreadable as error:
            raise SchemaError(f"the answer: {error}") from error
    schema = schema_of(document)
    content = {key: value for key, value in document.items() if key != SCHEMA}
    failures: list[str] = []
    loaded = _object(schema.form, content, "", failures)
    if failures:
        shown = "".join(f"\n  - {failure}" for failure in failures[:MOST_SHOWN])
        raise SchemaError(f"a document says that it is {schema.id}, and has {len(failures)} failures:{shown}")
    return loaded


def schema_of(document: object) -> AnswerSchema:
    """Return the schema that a document names."""
    if not isinstance(document, Mapping) or not isinstance(document.get(SCHEMA), str):
        raise SchemaError(
            f"a document has no key '{SCHEMA}' with a text; give what a command of autopar prints with --json"
        )
    text = document[SCHEMA]
    name, _, version = text.removeprefix("autopar.").partition("/")
    if not text.startswith("autopar.") or name not in ANSWERS:
        raise SchemaError(f"schema '{shortened(text)}' is unknown; {closest(name, ANSWERS)}")
    known = ANSWERS[name]
    if version != str(known.version):
        raise SchemaError(
            f"schema '{shortened(text)}' has version {shortened(version)}, this autopar reads {known.id}; use the "
            "autopar that wrote it"
        )
    return known


def _object(form: type, value: object, at: str, failures: list[str]) -> Any:
    """Return an object of a dataclass; what is wrong goes to ``failures``."""
    if not isinstance(value, Mapping):
        failures.append(_wrong(at, value, dict))
        return None
    of_form = fields_of(form)
    known = {f.key: f for f in of_form if f.rest is None}
    found: dict[str, Any] = {}
    other = {key: item for key, item in value.items() if key not in known}
    for key, f in known.items():
        path = f"{at}.{key}" if at else key
        if key in value:
            found[f.name] = _value(f.kind, value[key], path, failures)
        elif f.required:
            failures.append(f"{path}: missing; it is {said(f.kind)}")
    rest = next((f for f in of_form if f.rest is not None), None)
    if rest is not None:
        found[rest.name] = other
    else:
        failures += [f"{at}.{key}: unknown key; {closest(key, known)}".removeprefix(".") for key in other]
    return None if failures else form(**found)


def _value(kind: Any, value: object, at: str, failures: list[str]) -> Any:
    """Return a value as its type; what is wrong goes to ``failures``."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, value, at, failures)
    if origin in (Union, types.UnionType):
        return _union(parts, kind, value, at, failures)
    if origin is dict and isinstance(value, Mapping):
        return {key: _value(parts[1], item, f"{at}.{key}", failures) for key, item in value.items()}
    if origin is list and isinstance(value, list):
        return [_value(parts[0], item, f"{at}[{k}]", failures) for k, item in enumerate(value)]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is (origin or kind):
        return value
    failures.append(_wrong(at, value, kind))
    return None


def _union(parts: tuple[Any, ...], kind: Any, value: object, at: str, failures: list[str]) -> Any:
    """Return a value as the first type of a union that takes it."""
    if value is None and type(None) in parts:
        return None
    others = [part for part in parts if part is not type(None)]
    if len(others) == 1:
        return _value(others[0], value, at, failures)
    for part in others:
        mine: list[str] = []
        found = _value(part, value, at, mine)
        if not mine:
            return found
    failures.append(_wrong(at, value, kind))
    return None


def _wrong(at: str, value: object, kind: Any) -> str:
    return f"{at or 'the document'}: {shortened(repr(value))} is not {said(kind)}"


def said(kind: Any) -> str:
    """Return a type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return "any value"
    if origin in (Union, types.UnionType):
        return " or ".join(map(said, parts))
    if origin is list:
        return f"a list of {_plural(parts[0])}"
    if origin is dict:
        return f"an object of {_plural(parts[1])}"
    return NAMES.get(kind) or f"an object {kind.__name__}"


def _plural(kind: Any) -> str:
    plurals = {int: "whole numbers", float: "numbers", str: "texts", Any: "values"}
    if is_dataclass(kind) and isinstance(kind, type):
        return f"objects {kind.__name__}"
    return plurals.get(kind) or f"({said(kind)})"


def forms_in(form: type) -> Iterator[type]:
    """Yield a dataclass and those of its fields, each before its own, once."""
    seen: dict[type, None] = {}

    def walk(kind: Any) -> None:
        if is_dataclass(kind) and isinstance(kind, type):
            if kind not in seen:
                seen[kind] = None
                for f in fields_of(kind):
                    walk(f.kind)
        else:
            for part in get_args(kind):
                walk(part)

    walk(form)
    yield from seen
