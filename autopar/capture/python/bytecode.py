"""Bytecode of the user's code; no other file reads any.

Python notifies nobody who reads a global, and an attribute that is read for ``self.count += 1`` alone looks like any
other. A question for the truth of a tensor is known by its columns in the source, which Python has for instructions.
"""

from __future__ import annotations

import dis
import functools
import itertools
from types import CodeType, FrameType
from typing import NamedTuple


class Uses(NamedTuple):
    """Names that a piece of code loads, and where it loads attributes for one purpose, as offsets by name.

    Attributes:
        names: the names of globals.
        attributes: the attributes of any owner.
        counts: to add to it in place: the code keeps the owner, to store the sum there again.
        appends: to call its ``append`` or ``extend``.
    """

    names: set[str]
    attributes: set[str]
    counts: dict[str, list[int]]
    appends: dict[str, list[int]]


@functools.lru_cache(maxsize=4096)
def uses_in(code: CodeType) -> Uses:
    """Return the names that a piece of code loads."""
    uses = Uses(set(), set(), {}, {})
    before: dis.Instruction | None = None
    for step in dis.get_instructions(code):
        if step.opname in ("CACHE", "EXTENDED_ARG"):
            continue
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            uses.names.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            uses.attributes.add(step.argval)
            if before is not None and before.opname == "COPY" and step.opname == "LOAD_ATTR":
                uses.counts.setdefault(step.argval, []).append(step.offset)
            if before is not None and before.opname == "LOAD_ATTR" and step.argval in ("append", "extend"):
                uses.appends.setdefault(before.argval, []).append(before.offset)
        before = step
    return uses


def only_counts(frame: FrameType, name: str) -> bool:
    """Check that a frame reads an attribute for ``self.name += 1``, and for nothing else."""
    return frame.f_lasti in uses_in(frame.f_code).counts.get(name, ())


def only_appends(frame: FrameType, name: str) -> bool:
    """Check that a frame reads an attribute for ``self.name.append(x)``, whatever the list holds."""
    return frame.f_lasti in uses_in(frame.f_code).appends.get(name, ())


def place_in(frame: FrameType) -> tuple[int, int | None, int | None]:
    """Return the line and the columns (None where unknown) of what a frame evaluates right now.

    Where a frame decides whether it jumps, that is what it decides by: the jump itself has the place of the whole
    statement, which has as many questions as ``and`` and ``or`` put together. By columns and not by instructions:
    Python moves between instructions of one call when it has run often.
    """
    code, at = frame.f_code.co_code, frame.f_lasti // 2
    if "JUMP" in dis.opname[code[2 * at]] or dis.opname[code[2 * at]] == "TO_BOOL":
        at -= 1
        while at > 0 and dis.opname[code[2 * at]] in ("CACHE", "TO_BOOL", "COPY"):
            at -= 1
    line, _, begin, end = next(itertools.islice(frame.f_code.co_positions(), at, None), (None,) * 4)
    return line or frame.f_lineno, begin, end
