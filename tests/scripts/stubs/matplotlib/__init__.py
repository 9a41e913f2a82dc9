"""Stands for matplotlib where it is not installed: draws nothing."""


def use(backend: str) -> None:
    """Nothing."""
