"""A command of autopar in a process of its own, and its JSON answer.

A process can be ended when it takes too long or the client goes away, two of them do not disturb each other, and
whatever a model prints cannot reach the protocol on the server's standard output.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from autopar.errors import AutoparError
from autopar.mcp_server.limits import ServerLimits
from hardware_profiles.strict import Unreadable, parse_json

AT_ONCE = 2
"""Commands that run at the same time; others wait."""
GRACE_SECONDS = 60.0
"""Until a command that was told to end is killed: a search writes its best plan by then."""
LAST_CHARACTERS = 2000
"""Characters of standard error that are kept where a command ends without an answer."""


class CommandError(AutoparError):
    """A command that failed, with what it said."""


@dataclass(eq=False)
class CommandRunner:
    """Runs commands for a server.

    Attributes:
        seconds: a command is told to end after them; a search then answers with the best plan so far.
    """

    limits: ServerLimits
    seconds: float
    _slots: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(AT_ONCE), init=False)

    @cached_property
    def names(self) -> frozenset[str]:
        """The commands that this autopar has."""
        from typer.main import get_command

        from autopar.cli import app

        return frozenset(get_command(app).commands)  # type: ignore[attr-defined]

    async def answer(self, command: str, positional: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
        """Run a command with ``--json`` and return its answer.

        Args:
            command: its name.
            positional: its arguments, which cannot be taken for options.
            options: values by option without dashes; None leaves one out, True is a flag, a list repeats it.

        Raises:
            CommandError: it failed, with its message.
        """
        words = [sys.executable, "-P", "-m", "autopar", command, "--json", *option_words(options), "--", *positional]
        async with self._slots:
            code, out, err = await self._run(words)
        try:
            document = parse_json(out)
        except Unreadable:
            raise CommandError(f"autopar {command} ended with exit code {code}: {err[-LAST_CHARACTERS:]}") from None
        if "error" in document and code > 1:
            raise CommandError(f"{document['error']['kind']}: {document['error']['message']}")
        return dict(document)

    async def _run(self, words: Sequence[str]) -> tuple[int, str, str]:
        """Run a process; return its exit code, standard output and standard error."""
        process = await anyio.open_process(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.limits.folder,
            env=environment(os.environ),
        )  # fmt: skip
        texts = {"out": b"", "err": b""}

        async def collect(name: str, stream: anyio.abc.ByteReceiveStream) -> None:
            async for chunk in stream:
                texts[name] += chunk

        async def end_in_time() -> None:
            await anyio.sleep(self.seconds)
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await anyio.sleep(GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                process.kill()

        assert process.stdout is not None and process.stderr is not None
        try:
            async with anyio.create_task_group() as ending:
                ending.start_soon(end_in_time)
                async with anyio.create_task_group() as reading:
                    reading.start_soon(collect, "out", process.stdout)
                    reading.start_soon(collect, "err", process.stderr)
                code = await process.wait()
                ending.cancel_scope.cancel()
        finally:  # the client went away
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.aclose()
        return code, texts["out"].decode(errors="replace"), texts["err"].decode(errors="replace")


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words, each with its value in one word, so that no value is taken for another option."""
    words: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        for each in values:
            if each is True:
                words.append(f"--{name}")
            elif each is not None and each is not False:
                words.append(f"--{name}={each}")
    return words


def environment(of_server: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command, whose folder is not the server's: modules are found as the server does.

    Relative folders of PYTHONPATH are made whole; empty ones, which would be the client's folder, are left out.
    """
    own = dict(of_server)
    if paths := own.get("PYTHONPATH"):
        own["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths.split(os.pathsep) if path)
    return own
