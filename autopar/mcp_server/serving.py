"""The command line of the server."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar import __version__
from autopar.cli.common import UsageError, print_error, within
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from autopar.mcp_server.tools import Tool

INSTRUCTIONS = (
    "Plans and prices the parallel training of PyTorch models without hardware: which tensor, pipeline, data and "
    "expert parallelism is fastest on a cluster, whether a layout fits the memory, and why. Numbers are predictions. "
    "Start with fits for a layout that somebody has, with plan for the best one. Every answer with a key schema is "
    "described in autopar's docs/json.md."
)


def serve(
    folder: Annotated[
        Path, typer.Option("--folder", help="Files are read and written below this folder; relative paths start here.")
    ],
    trust: Annotated[
        list[Path] | None,
        typer.Option("--trust", help="Import models from Python files below this folder, which runs their code. "
                     "Repeatable. Without it, models are hf: configs."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option("--seconds", help="Time-out of a command; a search then answers with its best plan so far.",
                     callback=within(1, 86_400)),
    ] = 600.0,
) -> None:  # fmt: skip
    """Serve the tools plan, fits, explain, price, export and clusters over standard input and output.

    A client of the Model Context Protocol starts it. It needs the extra: pip install 'autopar[mcp]'.

    Example: autopar-mcp --folder ~/plans
    """
    server_of(folder, trust or [], seconds).run("stdio")


def server_of(folder: Path, trusted: list[Path], seconds: float) -> MCPServer[Any]:
    """Return the server of a folder."""
    if importlib.util.find_spec("mcp") is None:
        raise UsageError("the server needs the package mcp; install it with the extra: pip install 'autopar[mcp]'")
    from mcp.server.mcpserver import MCPServer

    from autopar.mcp_server.commands import CommandRunner
    from autopar.mcp_server.limits import limits_of
    from autopar.mcp_server.tools import AgentTools

    runner = CommandRunner(limits_of(folder, trusted), seconds)
    server: MCPServer[Any] = MCPServer(
        "autopar", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING"
    )
    for name, tool in AgentTools(runner).offered().items():
        server.add_tool(_with_said_errors(tool), name=name)
    return server


def _with_said_errors(tool: Tool) -> Tool:
    """Wrap a tool so that an agent reads the errors that it can mend; other ones stay in the server's log."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(tool)
    async def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return await tool(*args, **kwargs)
        except AutoparError as error:
            raise ToolError(str(error)) from error

    return run


def main() -> None:
    """Run the server until its client goes away; what is wrong with its options is one paragraph and exit code 2."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(serve)
    try:
        app()
    except AutoparError as error:
        print_error(error)
        sys.exit(2)
