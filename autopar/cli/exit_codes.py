"""Exit codes of all commands, and what a command that fails prints with ``--json``."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from autopar.cli.common import print_json

OK, NO, MENDABLE, DEFECT = 0, 1, 2, 3
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
BROKEN_PIPE = 128 + signal.SIGPIPE

EXIT_CODES = {
    OK: "done, and for fits, price, check and verify: yes",
    NO: "fits, price, check and verify: no",
    MENDABLE: "an error that you can mend, as standard error says",
    DEFECT: "a defect of autopar, with its traceback on standard error",
    INTERRUPTED: "ended by Ctrl-C before there was a plan to write",
    TERMINATED: "the same by SIGTERM",
}
"""Meaning by exit code; a search that is ended and has a plan by then writes it, and ends with 0."""

EPILOG = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + "."
"""The last lines of every help."""


def end(code: int, kind: str, message: str, failures: Sequence[str] = ()) -> NoReturn:
    """End the command with an exit code; with ``--json``, standard output gets the failure as one JSON object."""
    if wants_json(sys.argv[1:]):
        facts = {"kind": kind, "message": message, "failures": list(failures), "exit_code": int(code)}
        with contextlib.suppress(OSError):  # nobody reads standard output any more
            print_json({"error": facts}, "error")
    sys.exit(int(code))


def wants_json(words: Sequence[str]) -> bool:
    """Return True if the words of a command line have the option ``--json``."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


def end_as(stop: SystemExit) -> NoReturn:
    """End the command as typer wants it, whose own messages are on standard error already.

    typer ends with 1, which is an answer here, when input ends at a question or when nobody reads the output.
    """
    cause = stop.__context__
    if stop.code == MENDABLE and (message := getattr(cause, "format_message", None)) is not None:
        end(MENDABLE, "UsageError", message())
    if type(cause).__name__ == "Abort":
        end(MENDABLE, "UsageError", "standard input ended before every question was answered; give the options instead")
    if isinstance(cause, OSError) and cause.errno == errno.EPIPE:
        sys.exit(BROKEN_PIPE)
    raise stop
