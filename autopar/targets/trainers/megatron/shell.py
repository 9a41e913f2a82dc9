"""Shell scripts as text: the words of the command that starts a program, with variables put in where they are literal.

Nothing is run. What only a run can tell (``$1``, ``$(date)``, a variable that nothing sets) stays as an
:data:`UNKNOWN` with its name, and is an error only where a field that is needed has it. Of an ``if`` whose condition
the text does not decide, neither part counts, and what it sets is unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.targets.trainers.megatron.shell_words import ENDS, Word, past, statements_of

UNKNOWN = "\x00"
"""The sign on both sides of the name of what the text does not tell."""
NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
OPENERS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done"}
PREFIXES = ("export", "declare", "local", "readonly", "typeset")
Value = str | list[str]


@dataclass
class Command:
    """A command that starts a program.

    Attributes:
        launcher: words before the program, such as those of torchrun.
        program: the program's file.
        words: its arguments.
    """

    launcher: list[str]
    program: str
    words: list[str]


@dataclass
class Script:
    """The variables and commands of a script.

    Attributes:
        values: variables; None where they are unknown.
        undecided: conditions that the text does not decide and that set something.
    """

    values: dict[str, Value | None] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)


def read_script(text: str) -> Script:
    """Return a script's variables and commands."""
    script = Script()
    for statement in _decided(script, statements_of(text)):
        _take(script, statement)
    for value in list(script.values.values()):
        if isinstance(value, str) and ".py" in value and "--" in value:
            _add_command(script, value.split())
    return script


def _take(script: Script, statement: list[Word]) -> None:
    """Set the variables of a statement, or keep its command."""
    words = [word for i, word in enumerate(statement) if i or word.text not in PREFIXES]
    while words and (found := ASSIGNMENT.match(words[0].text)):
        name, adds = found.groups()
        _assign(script, name, words[0], words[0].text[found.end() :], adds=bool(adds))
        words = words[1:]
    if words:
        _add_command(script, [part for word in words for part in split(script, word.text)])


def _assign(script: Script, name: str, word: Word, text: str, *, adds: bool) -> None:
    value: Value
    if word.items is not None:
        value = [part for item in word.items for part in split(script, item)]
    else:
        value = expand(script, text)
    if adds:
        before = script.values.get(name)
        if isinstance(value, list):
            value = [*(before if isinstance(before, list) else [before] if before else []), *value]
        else:
            value = f"{before if isinstance(before, str) else ''}{value}"
    script.values[name] = value


def _add_command(script: Script, words: list[str]) -> None:
    """Keep a command that starts a Python program with options."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py") or re.search(r"\.py\b", word)), None)
    if at is None:
        return
    inner = words[at].split()
    words = [*words[:at], *inner, *words[at + 1 :]]
    at = next(i for i, word in enumerate(words) if ".py" in word)
    rest = words[at + 1 :]
    if any(word.startswith("--") or "=" in word for word in rest):
        script.commands.append(Command(words[:at], words[at], _without_redirections(rest)))


def _without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"\d?>>?&?\d?|<", word):
            skip = not word[-1].isdigit() or "&" not in word
        elif not re.match(r"\d?>>?\S", word):
            kept.append(word)
    return kept


# -- expansion


def split(script: Script, text: str) -> list[str]:
    """Return the words that a word of a script becomes."""
    whole = re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', text)
    if whole:
        value = script.values.get(whole[1])
        if value is None:
            return [] if whole[1] in script.values else [unknown(whole[1])]
        items = value if isinstance(value, list) else [value]
        if whole[0].startswith('"'):  # quoted: items stay as they are, but for an option with its value in one item
            return [part for item in items for part in (_parts(item) if item.startswith("--") else [item])]
        return [part for item in items for part in _parts(item)]
    expanded = expand(script, text)
    if text[:1] in "\"'" and not expanded.startswith("--"):
        return [expanded]
    return _parts(expanded) if "$" in text or expanded.startswith("--") else [expanded]


def _parts(text: str) -> list[str]:
    """Return the words of an item; quotes inside one, as in ``--split '99,1,0'``, are taken off."""
    return [part.strip("'\"") for part in text.split()] if " " in text else [text] if text else []


def unknown(name: str) -> str:
    """Return the sign for what the text does not tell."""
    return f"{UNKNOWN}{name}{UNKNOWN}"


def expand(script: Script, text: str) -> str:
    """Return a word without quotes and with variables put in."""
    found: list[str] = []
    at = 0
    while at < len(text):
        sign = text[at]
        end = past(text, at)
        if sign == "\\":
            found.append(text[at + 1 : at + 2])
        elif sign == "'":
            found.append(text[at + 1 : end - 1])
        elif sign == '"':
            found.append(_in_quotes(script, text[at + 1 : end - 1]))
        elif sign == "`":
            found.append(unknown(text[at:end]))
        elif sign == "$":
            value, end = _value(script, text, at, end)
            found.append(value)
        else:
            found.append(sign)
        at = end
    return "".join(found)


def _in_quotes(script: Script, text: str) -> str:
    """Return what stands in double quotes with variables put in; single quotes are letters there."""
    found: list[str] = []
    at = 0
    while at < len(text):
        end = past(text, at) if text[at] in "\\$`" else at + 1
        if text[at] == "\\":
            found.append(text[at + 1 : at + 2])
        elif text[at] == "`":
            found.append(unknown(text[at:end]))
        elif text[at] == "$":
            value, end = _value(script, text, at, end)
            found.append(value)
        else:
            found.append(text[at])
        at = end
    return "".join(found)


def _value(script: Script, text: str, at: int, end: int) -> tuple[str, int]:
    """Return the value of the expansion that begins at a place, and where it ends."""
    inner = text[at + 1 : end]
    if inner.startswith("(("):
        return _computed(script, inner[2:-2]), end
    if inner.startswith("("):
        return unknown(f"${inner}"), end
    if inner.startswith("{"):
        return _parameter(script, inner[1:-1]), end
    name = NAME.match(text, at + 1)
    if name:
        return _variable(script, name[0]), name.end()
    return unknown(text[at : at + 2]), at + 2


def _variable(script: Script, name: str) -> str:
    value = script.values.get(name)
    if value is None:
        return unknown(name)
    return value if isinstance(value, str) else " ".join(value)


def _parameter(script: Script, text: str) -> str:
    """Return the value of ``${text}``, with its default where nothing sets the variable."""
    found = re.fullmatch(r"([A-Za-z_]\w*|\d+)(?:(\[[@*]\])|:?([-=+?])(.*))?", text, re.DOTALL)
    if not found:
        return unknown(text)
    name, _, sign, other = found.groups()
    value = script.values.get(name)
    is_set = value is not None and value != ""
    if sign == "+":
        return expand(script, other) if is_set else ""
    if not is_set and sign in ("-", "="):
        value = expand(script, other)
        if sign == "=":
            script.values[name] = value
        return value
    return _variable(script, name) if not name.isdigit() else unknown(f"${name}")


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}  # fmt: skip


def _computed(script: Script, text: str) -> str:
    """Return the value of an arithmetic expression of whole numbers."""
    plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: _variable(script, m[1]), text)
    try:
        return str(_number(ast.parse(plain.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return unknown(f"$(({text}))")


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError("no arithmetic of whole numbers")


# -- conditions


def _decided(script: Script, statements: Iterator[list[Word]]) -> Iterator[list[Word]]:
    """Yield the statements that run, as far as the text decides; mark what the others would set as unknown."""
    stack: list[list[bool | None]] = []  # for every open block: whether it runs, and whether a part of it has run
    statements = iter(_by_keywords(statements))
    for statement in statements:
        first = statement[0].text
        if first in OPENERS:
            holds = _opened(script, statements, statement)
            stack.append([holds, holds])
        elif first in ("elif", "else") and stack:
            done = stack[-1][1]
            here = True if first == "else" else _condition(script, _until_then(statements, statement[1:]))
            runs = False if done else None if done is None else here
            stack[-1] = [runs, done or runs if done is not None else None]
        elif first in ("fi", "esac", "done") and stack:
            stack.pop()
        elif any(block[0] is False for block in stack):
            continue
        elif any(block[0] is None for block in stack):
            _forget(script, statement)
        elif first not in ENDS:
            yield statement


def _opened(script: Script, statements: Iterator[list[Word]], statement: list[Word]) -> bool | None:
    """Return whether the block that a keyword opens runs: a loop once, with its variable unknown."""
    first = statement[0].text
    if first == "if":
        return _condition(script, _until_then(statements, statement[1:]))
    if first == "for" and len(statement) > 1:
        script.values.pop(statement[1].text, None)
    return None if first == "case" else True


def _by_keywords(statements: Iterator[list[Word]]) -> Iterator[list[Word]]:
    """Yield statements that begin with a keyword in two: ``then``, ``do`` and ``else`` part what follows them."""
    for statement in statements:
        while statement and statement[0].text in ("then", "do", "else", "{", "}"):
            if statement[0].text in ("then", "else"):
                yield statement[:1]
            statement = statement[1:]
        if statement:
            yield statement


def _until_then(statements: Iterator[list[Word]], first: list[Word]) -> list[Word]:
    """Return the words of a condition, up to ``then``."""
    words = list(first)
    for statement in statements:
        if statement[0].text == "then":
            break
        words += statement
    return words


def _forget(script: Script, statement: list[Word]) -> None:
    """Note that a statement may run: what it would set is unknown, and what it would add may be missing."""
    words = [word for i, word in enumerate(statement) if i or word.text not in PREFIXES]
    found = ASSIGNMENT.match(words[0].text) if words else None
    if not found:
        return
    name, adds = found.groups()
    if adds:
        added = " ".join(words[0].items or (words[0].text[found.end() :],))
        script.undecided.append(f"{name} += {added}")
    else:
        script.values[name] = None


def _condition(script: Script, words: list[Word]) -> bool | None:
    """Return whether a condition holds; None where the text does not decide it."""
    parts: list[list[str]] = [[]]
    signs: list[str] = []
    for word in words:
        if word.text in ("&&", "||"):
            signs.append(word.text)
            parts.append([])
        elif word.text not in ENDS:
            parts[-1].append(expand(script, word.text))
    holds = [_test(part) for part in parts]
    if None in holds:
        return None
    result = holds[0]
    for sign, other in zip(signs, holds[1:], strict=True):
        result = (result and other) if sign == "&&" else (result or other)
    return result


def _test(words: list[str]) -> bool | None:
    """Return whether ``[ a = b ]`` holds."""
    if not words or words[0] not in ("[", "[["):
        return None
    inner = words[1:-1]
    if len(inner) == 2 and inner[0] in ("-n", "-z"):
        blank = not inner[1] or (inner[1].startswith(UNKNOWN) and NAME.fullmatch(inner[1].strip(UNKNOWN)) is not None)
        return blank == (inner[0] == "-z")  # a variable that nothing sets is empty
    if len(inner) != 3 or UNKNOWN in "".join(inner):
        return None
    left, sign, right = inner
    if sign in ("=", "==", "!="):
        return (left == right) == (sign != "!=")
    comparisons = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
                   "-le": operator.le}  # fmt: skip
    if sign in comparisons and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
        return bool(comparisons[sign](int(left), int(right)))
    return None
