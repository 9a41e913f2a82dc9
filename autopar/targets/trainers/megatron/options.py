"""The options of a Megatron command line as data, from whichever file says them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.errors import closest
from autopar.targets.target import ConfigError, Source
from autopar.targets.trainers.megatron.fields import FLAG, MANY, kinds
from autopar.targets.trainers.megatron.shell import UNKNOWN
from hardware_profiles.strict import Unreadable, parse_count


@dataclass
class MegatronOptions:
    """Options with their values.

    Attributes:
        source: the file, for messages.
        values: those of every option; none for a flag.
        names: the field of the file that says an option, where that is another name.
        unpriced: what else a reader should know, such as conditions that the text does not decide.
        read: options that were asked for.
    """

    source: Source
    values: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    unpriced: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def error(self, option: str, what: str) -> ConfigError:
        """Return the one error about an option, by the name that the file has for it."""
        return self.source.error(self.names.get(option, option), what)

    def has(self, option: str) -> bool:
        """Return whether an option is given."""
        self.read.add(option)
        return option in self.values

    def texts(self, option: str) -> list[str]:
        """Return the values of an option; none where it is not given.

        Raises:
            ConfigError: the file takes it from a variable that it does not set.
        """
        self.read.add(option)
        found = self.values.get(option, [])
        for text in found:
            if UNKNOWN in text:
                name = text.split(UNKNOWN)[1]
                raise self.error(option, f"is '{shown(text)}', and nothing in the file sets {name}; write its value")
        return found

    def text(self, option: str, default: str = "") -> str:
        """Return the value of an option."""
        found = self.texts(option)
        return found[0] if found else default

    def number(self, option: str, default: int | None = None) -> int | None:
        """Return the value of an option as a whole number of 1 or more."""
        text = self.text(option)
        if not text:
            return default
        try:
            return parse_count(text)
        except Unreadable:
            raise self.error(option, f"is '{text}'; give a whole number of 1 or more") from None


def shown(text: str) -> str:
    """Return a text for a message, with variables as a shell has them."""
    parts = text.split(UNKNOWN)
    names = (name if name.startswith("$") or not name.isidentifier() else f"${name}" for name in parts[1::2])
    return "".join(part + next(names, "") for part in parts[::2])


def options_of_words(source: Source, words: Iterable[str]) -> MegatronOptions:
    """Return the options of a command line.

    Raises:
        ConfigError: Megatron-LM has no such option, or one lacks its value.
    """
    options = MegatronOptions(source)
    taking = ""
    for word in words:
        if word.startswith("--"):
            _check_filled(options, taking)
            name, equals, value = word.partition("=")
            if name not in kinds():
                raise source.error(name, f"Megatron-LM has no such option; {closest(name, kinds())}")
            options.values[name] = [value] if equals else []
            taking = "" if equals or kinds()[name] == FLAG else name
        elif taking:
            options.values[taking].append(word)
            if kinds()[taking] != MANY:
                taking = ""
        elif word.startswith(UNKNOWN):
            options.unpriced.append(f"{shown(word)}: options that only a run of the script gives are left out")
        elif word.strip() and not _after_a_path(word):
            raise source.error(
                word,
                "stands where an option is expected; options begin with --, "
                "and a value with spaces needs quotes where its array is put in",
            )
    _check_filled(options, taking)
    return options


def _after_a_path(word: str) -> bool:
    """Return whether a word is a rest of a placeholder such as ``<path to the data>``, or of a shell."""
    return word.endswith((">", ">>")) or not word[0].isalnum() or word.isalpha()


def _check_filled(options: MegatronOptions, name: str) -> None:
    if name and not options.values[name] and kinds()[name] != MANY:
        raise options.source.error(name, "has no value; write one behind it")
