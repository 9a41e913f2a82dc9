"""The error of reading a hardware profile."""

from __future__ import annotations

from collections.abc import Sequence

MOST_TOLD = 20
"""Most failures of one file in a message."""


class ProfileError(ValueError):
    """An unusable hardware profile, with every failure found.

    `failures` holds one line per failure: the key path in the file, the value there, what to do.
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
    """An unknown name of a cluster: there is no profile to find failures in."""

    def __init__(self, failure: str):
        ValueError.__init__(self, failure)
        self.where, self.failures = "clusters", (failure,)
