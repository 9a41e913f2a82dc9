"""The answer of a command that failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from autopar.cli.schemas.registry import answer


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure of a command."""

    kind: Annotated[str, "class of the error, such as InfeasibleError; UsageError for the command line; Interrupted, "
                         "Terminated; Defect for an error of autopar itself"]  # fmt: skip
    message: Annotated[str, "the text that standard error has: what, where, both numbers, what to do"]
    failures: Annotated[list[str], "each failure of a hardware profile by itself; else empty"] = field(
        default_factory=list
    )
    exit_code: Annotated[int, "exit code of the command"]


@answer("error", "every command with --json")
@dataclass(frozen=True, kw_only=True)
class ErrorAnswer:
    """The document that a command with ``--json`` prints when it fails; standard error has the text as well.

    There is one such document for exit codes 2, 3, 130 and 143. With exit code 1, the answer is the command's own and
    says no.
    """

    error: Failure
