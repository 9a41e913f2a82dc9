"""Meshes, bytes, seconds and texts as people write and read them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from autopar.errors import AutoparError, MeshError
from autopar.words.meshes import Mesh
from hardware_profiles.strict import LARGEST_WHOLE, shortened


def mesh_of(given: Any) -> Mesh | None:
    """Return a mesh from ``{"data": 2}``, ``"data=2,tensor=4"`` or pairs; None is None.

    Raises:
        MeshError: it is none of these.
    """
    if given is None:
        return None
    if isinstance(given, str):
        return Mesh.parse(given)
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (tuple, list)) or not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in pairs):
        raise MeshError(f"mesh is {given!r}; give axes and their sizes, such as 'data=2,tensor=4' or {{'data': 8}}")
    return Mesh((str(name), int(size)) for name, size in pairs)


def parse_bytes(given: float | str | None) -> float | None:
    """Return bytes from a number or from text such as ``40GiB``, ``16 GB``, ``40g``; None is None.

    Raises:
        AutoparError: the text is no size.
    """
    if given is None or isinstance(given, (int, float)):
        return given
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", given.lower())
    if not match:
        raise AutoparError(f"memory limit '{given}' is no size; write bytes, or such as '40GiB' or '16GB'")
    base = 1024 if match[3] else 1000
    n_bytes = float(match[1]) * base ** ("kmgt".index(match[2]) + 1 if match[2] else 0)
    if n_bytes > LARGEST_WHOLE:
        most = f"{LARGEST_WHOLE:,} bytes, the most that can be"
        raise AutoparError(f"memory limit '{shortened(given)}' is more than {most}; write a smaller one")
    return n_bytes


def printable(text: str) -> str:
    """Return the text with characters escaped that are neither printable nor the end of a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def show_bytes(n: float) -> str:
    """Return bytes as text, such as ``1.50 GiB``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"


def show_seconds(s: float) -> str:
    """Return seconds as text, such as ``1.50 ms``."""
    if not math.isfinite(s):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(s) >= size:
            return f"{s / size:.3g} {unit}"
    return f"{s / 1e-6:.3g} us" if s else "0"
