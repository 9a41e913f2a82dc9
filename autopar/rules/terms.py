"""Lines of the notation, read and matched with shapes: what the dims of the tensors of a call are called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

from autopar.errors import RuleError

Dim = tuple[str, ...]
Term = tuple[Dim, ...]

BATCH_NAMES = ("b", "s", "t", "u", "w", "x", "y", "z", *(f"{n}2" for n in "bstuwxyz"))

_TOKEN = re.compile(r"\s*(->|\.\.\.|[A-Za-z_][A-Za-z_0-9]*|[(),1])")


def parse_terms(text: str) -> tuple[list[list[Dim]], list[list[Dim]]]:  # noqa: C901  (a parser)
    """Parse ``"a b, (c d) -> a c"`` into dims of inputs and outputs; ``...`` is the dim ``("...",)``.

    Raises:
        RuleError: it is no line of notation; the message points at the place.
    """

    def wrong(problem: str, at: int) -> RuleError:
        return RuleError(f"rule '{text}': {problem}\n    {text}\n    {' ' * at}^")

    sides: list[list[list[Dim]]] = [[[]]]
    group: list[str] | None = None
    opened = at = 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            start = at + len(text[at:]) - len(text[at:].lstrip())
            raise wrong(f"'{text[start]}' is nothing of the notation (names, '1', '...', '( )', ',', '->')", start)
        token, start, at = match[1], match.start(1), match.end()
        term = sides[-1][-1]
        if group is not None:
            if token == ")":
                if not group:
                    raise wrong("'()' holds no factor; a dim of size 1 is '1'", opened)
                term.append(tuple(group))
                group = None
            elif token[0].isalpha() or token[0] == "_":
                group.append(token)
            else:
                raise wrong(f"'{token}' inside of parentheses, which hold names of factors", start)
        elif token == "(":
            group, opened = [], start
        elif token == ")":
            raise wrong("')' without '('", start)
        elif token == ",":
            sides[-1].append([])
        elif token == "->":
            if len(sides) == 2:
                raise wrong("a second '->'", start)
            sides.append([[]])
        elif token == "..." and ("...",) in term:
            raise wrong("'...' stands twice in one term", start)
        else:
            term.append(() if token == "1" else (token,))
    if group is not None:
        raise wrong("'(' is not closed", opened)
    if len(sides) != 2:
        raise wrong("'->' is missing", end)
    left, right = sides
    return left if any(left) or len(left) > 1 else [], right


def bind(
    text: str,
    ins: Sequence[Sequence[int]],
    outs: Sequence[Sequence[int]],
    sizes: Mapping[str, int] | None = None,
) -> tuple[dict[str, int], tuple[Term, ...], tuple[Term, ...]]:
    """Match a line of notation with shapes.

    ``sizes`` gives the factors that shapes alone do not determine (inside composites).

    Raises:
        RuleError: the shapes contradict the line.
    """
    left, right = parse_terms(text)
    used = {f for t in (*left, *right) for d in t for f in d}
    names = [n for n in BATCH_NAMES if n not in used]
    factor_sizes: dict[str, int] = dict(sizes or {})
    shapes = [tuple(s) for s in (*ins, *outs)]
    terms = [*left, *right]
    if len(terms) != len(shapes):
        raise RuleError(f"rule '{text}' describes {len(terms)} tensors, the call has {len(shapes)}")
    extra = max((len(s) - len(t) + 1 for t, s in zip(terms, shapes, strict=True) if ("...",) in t), default=0)
    full: list[list[Dim]] = []
    for t, shape in zip(terms, shapes, strict=True):
        dims: list[Dim] = []
        for d in t:
            if d == ("...",):
                n = len(shape) - len(t) + 1
                at = len(dims)
                dims.extend(() if shape[at + i] == 1 else (names[extra - n + i],) for i in range(n))
            else:
                dims.append(d)
        if len(dims) != len(shape):
            raise RuleError(f"rule '{text}': a term with {len(dims)} dims meets a tensor of shape {shape}")
        full.append(dims)
    pending = [(d, n) for dims, shape in zip(full, shapes, strict=True) for d, n in zip(dims, shape, strict=True)]
    progress = True
    while progress:
        progress = False
        for d, n in pending:
            unknown = [f for f in d if f not in factor_sizes]
            if len(unknown) == 1:
                rest = prod(factor_sizes[f] for f in d if f in factor_sizes)
                if rest == 0 or n % rest:
                    raise RuleError(f"rule '{text}': dim of size {n} is no multiple of {rest}")
                factor_sizes[unknown[0]] = n // rest
                progress = True
    for d, n in pending:
        if any(f not in factor_sizes for f in d):
            raise RuleError(f"rule '{text}': sizes of {d} do not follow from the shapes")
        if prod(factor_sizes[f] for f in d) != n:
            raise RuleError(f"rule '{text}': {d} has sizes {[factor_sizes[f] for f in d]}, the tensor has {n}")
    result = tuple(tuple(d) for d in full)
    return factor_sizes, result[: len(ins)], result[len(ins) :]
