"""A strict reader of one table of a config: unknown fields are errors, and every known field is accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import closest
from autopar.targets.strict_yaml import parse_yaml
from autopar.targets.target import ConfigError, Source
from hardware_profiles.strict import Unreadable, parse_json, read_text, shortened

AUTO = "auto"
"""The value that Hugging Face's Trainer and accelerate replace by one of their own arguments."""
TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0", "none")


@dataclass
class Section:
    """One table of a config.

    Attributes:
        source: the file, for messages.
        values: the table.
        path: the table's name in the file, such as ``zero_optimization``; empty for the file itself.
        read: names of fields that the reader has asked for.
    """

    source: Source
    values: Mapping[str, Any]
    path: str = ""
    read: set[str] = field(default_factory=set)

    def check_known(self, known: Iterable[str], title: str) -> None:
        """Refuse fields that the trainer has not.

        Raises:
            ConfigError: a field is unknown, with the nearest known one.
        """
        names = list(known)
        for name in self.values:
            if name not in names:
                raise self.error(str(name), f"is no field of {title}; {closest(str(name), names)}")

    def named(self, name: str) -> str:
        """Return a field's name in the file."""
        return f"{self.path}.{name}" if self.path else name

    def error(self, name: str, what: str) -> ConfigError:
        """Return the error about a field."""
        return self.source.error(self.named(name), what)

    def get(self, name: str) -> Any:
        """Return a field as it is; None where it is missing or null."""
        self.read.add(name)
        return self.values.get(name)

    def is_auto(self, name: str) -> bool:
        """Return whether a field is left to the Trainer's arguments."""
        return self.get(name) == AUTO

    def whole(self, *names: str, least: int = 1) -> int | None:
        """Return the first of these fields that is given as a whole number; None where none is, or it is ``auto``.

        Raises:
            ConfigError: it is no whole number, or less than `least`.
        """
        for name in names:
            value = self.get(name)
            if value is None or value == AUTO:
                continue
            number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
            if isinstance(number, float) and number.is_integer():
                number = int(number)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise self.error(name, f"is {shortened(repr(value))}; give a whole number of {least} or more")
            return number
        return None

    def flag(self, name: str) -> bool | None:
        """Return a field that is true or false, in the spellings of the trainers; None where it is missing.

        Raises:
            ConfigError: it is neither.
        """
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in (*TRUE, *FALSE):
            return text in TRUE
        if text == AUTO:
            return None
        raise self.error(name, f"is {shortened(repr(value))}; give true or false")

    def word(self, name: str, known: Iterable[str]) -> str | None:
        """Return a field that is one of a few words, in lower case; None where it is missing.

        Raises:
            ConfigError: it is another one.
        """
        value = self.get(name)
        if value is None:
            return None
        words = list(known)
        text = str(value).strip().lower()
        if text not in words:
            raise self.error(name, f"is {shortened(repr(value))}; {closest(text, words)}")
        return text

    def section(self, name: str, known: Iterable[str] | None, title: str) -> Section:
        """Return a table within this one, empty where it is missing; without `known`, its fields are not checked.

        Raises:
            ConfigError: it is no table, or has a field that the trainer has not.
        """
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(name, f"is {shortened(repr(value))}; give a table of fields")
        inner = Section(self.source, value, self.named(name))
        if known is not None:
            inner.check_known(known, f"{inner.path} of {title}")
        return inner

    def rest(self, harmless: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the given fields that were not read: those among `harmless`, and the others."""
        fine = set(harmless)
        names = [name for name in self.values if name not in self.read]
        return (
            [self.named(name) for name in names if name in fine],
            [self.named(name) for name in names if name not in fine],
        )


def table_of(source: Source) -> Mapping[str, Any]:
    """Return the table of a JSON or YAML file.

    Raises:
        ConfigError: it is not readable as one, or has a repeated key.
    """
    try:
        value = parse_json(source.text) if source.path.suffix == ".json" else parse_yaml(source.text)
    except Unreadable as error:
        raise ConfigError(f"{source.path.name}: {error}") from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{source.path.name}: is no table of fields; give the trainer's own config file")
    return value


def beside(source: Source, name: str) -> Source | None:
    """Return a file in the folder of another one; None where there is none or it is not readable."""
    path = source.path.parent / name
    try:
        return Source(path, read_text(path)) if path.is_file() else None
    except (Unreadable, OSError):
        return None
