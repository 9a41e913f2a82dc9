"""Draws nothing."""

from typing import Any


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Anything:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def figure(*args: Any, **kwargs: Any) -> Any:
    """Whatever is called on it gives it again."""
    return _Anything()


show = title = xlabel = ylabel = xticks = yticks = plot = savefig = close = _nothing
