"""The one error that reading a hardware profile raises."""

from __future__ import annotations

from collections.abc import Sequence

MOST_TOLD = 20
"""Failures of one file that the message has."""


class ProfileError(ValueError):
    """A hardware profile that cannot be used. Lists every failure found, not only the first one.

    `failures` holds one line per failure: the key path in the file, what stands there, what to do.
    """

    def __init__(self, where: str, failures: Sequence[str]):
        self.where = where
        self.failures = tuple(failures)
        lines = "\n".join(f"  - {failure}" for failure in self.failures[:MOST_TOLD])
        count = "1 problem" if len(self.failures) == 1 else f"{len(self.failures)} problems"
        if len(self.failures) > MOST_TOLD:
            count = f"more than {MOST_TOLD} problems"
        super().__init__(f"{where}: {count} in this hardware profile\n{lines}")


class UnknownClusterError(ProfileError):
    """A name that no cluster has: there is no profile to find failures in."""

    def __init__(self, failure: str):
        ValueError.__init__(self, failure)
        self.where, self.failures = "clusters", (failure,)
