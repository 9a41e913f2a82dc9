"""The table of all answers: the name of each, its version and the commands that print it.

A field says in its annotation what it means: ``seconds: Annotated[float, "seconds of a step"]``. Only what such a text
cannot say is a marker: a JSON key that is no Python name (:class:`Key`), and the keys of another format
(:class:`OtherKeys`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SCHEMA = "schema"
"""The key under which every document names its schema."""


@dataclass(frozen=True)
class AnswerSchema:
    """The schema of a document.

    Attributes:
        name: what the document is, such as ``fits``.
        version: raised when a key is removed, renamed or gets another type or meaning; a new key raises nothing.
        made_by: the commands that print it.
        form: the dataclass of the document without its key ``schema``.
    """

    name: str
    version: int
    made_by: tuple[str, ...]
    form: type

    @property
    def id(self) -> str:
        """The value of the document's key ``schema``."""
        return f"autopar.{self.name}/{self.version}"


@dataclass(frozen=True)
class Key:
    """A JSON key that differs from the name of its field."""

    text: str


@dataclass(frozen=True)
class OtherKeys:
    """A field that holds all keys of the document that no other field has, of another format.

    ``described_in`` names the page of that format.
    """

    described_in: str


ANSWERS: dict[str, AnswerSchema] = {}
"""All schemas by name."""


def answer(name: str, *made_by: str, version: int = 1) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as the schema of a document; ``made_by`` are the commands that print it."""

    def register(form: type[T]) -> type[T]:
        assert name not in ANSWERS, f"two answers are called {name}"
        ANSWERS[name] = AnswerSchema(name, version, made_by, form)
        return form

    return register


def id_of(name: str) -> str:
    """Return the value of the key ``schema`` of an answer."""
    return ANSWERS[name].id
