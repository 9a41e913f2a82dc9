"""Writes no images."""

from typing import Any


def save_image(*args: Any, **kwargs: Any) -> None:
    """Nothing: the tensors were computed, which is what is looked at here."""
