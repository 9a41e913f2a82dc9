"""The requested names of a traced graph, so that those of skipped calls can be assigned between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.capture.repeats.block_calls import Traced
from autopar.torch_private import Namespace


@dataclass
class Skipped:
    """A call that became one node, and the names of the nodes that take its results."""

    path: str
    like: Traced
    results: list[str] = field(default_factory=list)


class NamesAsked(Namespace):
    """The names of a graph, with a log of the requested ones."""

    def __init__(self, namespace: Namespace) -> None:
        self._obj_to_name, self._used_names = namespace._obj_to_name, namespace._used_names
        self._base_count = namespace._base_count
        self.used_before, self.count_before = set(namespace._used_names), dict(namespace._base_count)
        self.log: list[str | Skipped] = []
        self.given: dict[str, int] = {}
        self.silent = False

    def create_name(self, candidate: str, obj: object | None) -> str:
        """Create a name, and note the request."""
        name = super().create_name(candidate, obj)
        if not self.silent:
            self.given[name] = len(self.log)
            self.log.append(candidate)
        return name
