"""The words and statements of a shell script, with quotes and expansions as they stand there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ENDS = ("\n", ";", "&", "|", "&&", "||")


@dataclass(frozen=True)
class Word:
    """A word of a script: its text with quotes as they are; ``items``: those of an array, for an assignment of one."""

    text: str
    items: tuple[str, ...] | None = None


def statements_of(text: str) -> Iterator[list[Word]]:
    """Yield statements, each a list of words; operators that end one are a statement of their own."""
    statement: list[Word] = []
    for word in _words(text.replace("\\\n", " ")):
        if word.text in ENDS:
            if statement:
                yield statement
            if word.text not in ("\n", ";"):
                yield [word]
            statement = []
        else:
            statement.append(word)
    if statement:
        yield statement


def _words(text: str) -> Iterator[Word]:
    at, n = 0, len(text)
    while at < n:
        sign = text[at]
        if sign == "#":
            at = _line_end(text, at)
        elif sign in "\n;&|":
            double = text[at : at + 2] in ("&&", "||")
            yield Word(text[at : at + 1 + double])
            at += 1 + double
        elif sign in " \t\r()":
            at += 1
        else:
            end = _word_end(text, at)
            word = text[at:end]
            if word.endswith("=") and text[end : end + 1] == "(":
                items, end = _array(text, end + 1)
                yield Word(word, tuple(items))
            else:
                yield Word(word)
            at = max(end, at + 1)


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _array(text: str, at: int) -> tuple[list[str], int]:
    """Return the items of an array and where it ends."""
    items: list[str] = []
    while at < len(text) and text[at] != ")":
        if text[at] == "#":
            at = _line_end(text, at)
        elif text[at] in " \t\r\n\\":
            at += 1
        else:
            end = max(_word_end(text, at), at + 1)
            items.append(text[at:end])
            at = end
    return items, at + 1


def _word_end(text: str, at: int) -> int:
    """Return where the word that begins at a place ends."""
    while at < len(text):
        sign = text[at]
        if sign in " \t\r\n;|()" or (sign == "&" and text[at - 1] != ">"):
            return at
        at = past(text, at)
    return at


def past(text: str, at: int) -> int:
    """Return the place behind a character, a quoted part or an expansion."""
    sign = text[at]
    if sign == "\\":
        return at + 2
    if sign == "'":
        return _closed(text, at + 1, "'")
    if sign == "`":
        return _closed(text, at + 1, "`")
    if sign == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at = past(text, at) if text[at] in "\\$`" else at + 1
        return at + 1
    if sign == "$" and text[at + 1 : at + 2] in ("(", "{"):
        opener = text[at + 1]
        closer = ")" if opener == "(" else "}"
        depth, at = 1, at + 2
        while at < len(text) and depth:
            depth += (text[at] == opener) - (text[at] == closer)
            at += 1
        return at
    return at + 1


def _closed(text: str, at: int, sign: str) -> int:
    end = text.find(sign, at)
    return len(text) if end < 0 else end + 1
