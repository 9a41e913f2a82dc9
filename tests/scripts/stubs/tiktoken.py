"""Stands for tiktoken: a token is a character, modulo what fits small models."""

from __future__ import annotations


class _Encoding:
    def encode(self, text: str) -> list[int]:
        return [ord(character) % 61 for character in text[:8]]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def get_encoding(name: str) -> _Encoding:
    """One for every name."""
    return _Encoding()
