"""Fragments of HTML and SVG, escaped by :class:`markupsafe.Markup`: a model may be named ``<script>``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

FEW = 3
"""Columns up to which a table fits a phone as it is."""


def joined(pieces: Iterable[object], between: str = "") -> Markup:
    """Join fragments; those that are no markup yet are escaped."""
    return Markup(between).join(escape(piece) for piece in pieces)


def filled(template: str, *values: object, **named: object) -> Markup:
    """Fill a template of this package with values, each of them escaped unless it is markup itself."""
    return Markup(template).format(*values, **named)


def percent(share: float) -> str:
    """Return a length for CSS and SVG, ``12.34%``, with no more digits than a screen can show."""
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def table(
    heads: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Iterable[int] = (), label: str = ""
) -> Markup:
    """Return a scrollable table; ``numbers`` are right-aligned columns, ``label`` describes it to screen readers."""
    right = frozenset(numbers)

    def row(cells: Sequence[object], tag: str) -> Markup:
        scope = ' scope="col"' if tag == "th" else ""
        named = tag == "td" and len(heads) > FEW  # on a phone, a row is a list of heads and cells
        return joined(
            filled(
                f"<{tag}{scope}{{}}{{}}>{{}}</{tag}>", Markup(' class="n"') if k in right else "",
                filled(' data-head="{}"', heads[k]) if named and heads[k] else "", cell,
            ) for k, cell in enumerate(cells)
        )  # fmt: skip

    body = joined(filled("<tr>{}</tr>\n", row(cells, "td")) for cells in rows)
    return filled(
        '<div class="wide" tabindex="0" role="region" aria-label="{}"><table class="{}"><thead><tr>{}</tr></thead>'
        "<tbody>{}</tbody></table></div>",
        label, "few" if len(heads) <= FEW else "many", row(heads, "th"), body,
    )  # fmt: skip


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return a legend of ``(CSS class of the colour, words)``."""
    items = joined(filled('<li><i class="{}"></i>{}</li>', kind, words) for kind, words in entries)
    return filled('<ul class="legend">{}</ul>', items)


def bar(parts: Sequence[tuple[str, float, str]], whole: float) -> Markup:
    """Return a bar of parts ``(CSS class of the colour, size, words)``; ``whole`` is the size of the full width."""
    pieces = joined(
        filled('<i class="{}" style="width:{}" title="{}"></i>', kind, percent(size / whole), words)
        for kind, size, words in parts if whole > 0 and size > 0
    )  # fmt: skip
    words = "; ".join(words for _, size, words in parts if size > 0)
    return filled('<div class="bar" role="img" aria-label="{}">{}</div>', words, pieces)
