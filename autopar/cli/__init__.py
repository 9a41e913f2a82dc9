"""The command ``autopar``: one file per group of commands, tables by :mod:`autopar.report`.

================= =====================================================================================================
:mod:`.plan_inference` ``plan --mode inference``
:mod:`.plan`      ``plan``; :mod:`.layouts`: its search over everything, ``--top`` and ``--like``; :mod:`.plan_for`:
                  ``--for``, within what another trainer can express; :mod:`.plan_search`: under one precision policy
                  or several
:mod:`.fits`      ``fits``, whether a layout fits the memory
:mod:`.price`     ``price``, the config of another trainer; :mod:`.export`: ``export``, a plan for another trainer
:mod:`.check`     ``check``, the certificate; :mod:`.verify`: ``verify``, the numbers of one device
:mod:`.show`      ``show`` and ``diff``; :mod:`.stages`: plans in stages as tables
:mod:`.serving_plans`  plans for serving, which ``show`` and ``export`` take too
:mod:`.report`    ``report``, a plan as one HTML page; :mod:`.report_layouts`: the layouts beside it
:mod:`.memory`    ``memory``, what fills the devices of a plan
:mod:`.explain`   ``explain``; :mod:`.explain_cut`: of the cut at which a stage begins
:mod:`.inspect`   ``inspect``, what was captured
:mod:`.run`       ``run``; :mod:`.simulate`: ``simulate``; :mod:`.launch`: ``launch``, scripts for torchrun and Slurm
:mod:`.profiling` ``profile``; :mod:`.hardware`: ``devices`` and ``clusters``; :mod:`.new_cluster`: ``clusters new``
:mod:`.reshard`   ``reshard``, weights from one plan's layout to another's
:mod:`.common`    what commands share; :mod:`.terminal`: consoles that no text can steer; :mod:`.output_files`: files
                  that commands write; :mod:`.stopping`: commands that are ended from outside, or by a model's code;
                  :mod:`.exit_codes`: how commands end; :mod:`.answers` and :mod:`.schemas`: what they print
                  with ``--json``
================= =====================================================================================================
"""

from __future__ import annotations

import gc
import io
import sys
import traceback
from typing import Annotated

import typer

from autopar import __version__
from autopar.cli import (
    check,
    explain,
    export,
    fits,
    hardware,
    inspect,
    launch,
    memory,
    plan,
    price,
    profiling,
    report,
    reshard,
    run,
    show,
    simulate,
    verify,
)
from autopar.cli.common import err, print_error
from autopar.cli.exit_codes import DEFECT, EPILOG, INTERRUPTED, MENDABLE, TERMINATED, end, end_as
from autopar.cli.stopping import terminated_as_interrupted, to_its_end
from autopar.errors import AutoparError
from hardware_profiles.errors import ProfileError

app = typer.Typer(
    name="autopar",
    help="Plan the parallelization of a PyTorch model over accelerators; inspect, check and run plans.\n\n"
    "A MODEL is PATH.py:factory, where factory() returns a model and its example inputs, or hf:PATH/config.json. "
    "Start with: autopar plan gpt.py:make --cluster dgx-h100 -o plan.json, then: autopar show plan.json --trust",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


def _version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"autopar {__version__}")
        raise typer.Exit


@app.callback()
def _every(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for name, command in (
    ("plan", plan.plan), ("fits", fits.fits), ("price", price.price), ("export", export.export),
    ("check", check.check), ("show", show.show), ("explain", explain.explain),
    ("report", report.report), ("memory", memory.memory), ("diff", show.diff),
    ("inspect", inspect.inspect), ("verify", verify.verify), ("run", run.run), ("simulate", simulate.simulate),
    ("devices", hardware.devices), ("profile", profiling.profile), ("launch", launch.launch),
    ("reshard", reshard.reshard),
):  # fmt: skip
    app.command(name, epilog=EPILOG)(to_its_end(command))
app.add_typer(hardware.clusters_app)


def main() -> None:
    """Run a command of the command line; errors that a user can cause are one paragraph and exit code 2.

    SIGTERM ends a command as Ctrl-C does: a search returns the best plan that it found so far. The exit codes are those
    of :mod:`.exit_codes`.
    """
    try:
        with terminated_as_interrupted() as was_terminated:
            app()
    except (AutoparError, ProfileError) as error:
        print_error(error)
        end(MENDABLE, type(error).__name__, str(error), getattr(error, "failures", ()))
    except (KeyboardInterrupt, SystemExit) as stop:  # typer converts KeyboardInterrupt to SystemExit
        if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
            end_as(stop)
        word = "terminated" if was_terminated() else "interrupted"
        err().print(word)
        end(TERMINATED if was_terminated() else INTERRUPTED, word.capitalize(), f"the command was {word}")
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"
        err().print("error: this is a defect of autopar; please report it with the lines above", soft_wrap=True)
        end(DEFECT, "Defect", said)


def start() -> None:
    """Run :func:`main` as the entry point of the shell.

    The cyclic garbage collector took a third of the processor time of a small plan, so it is off for commands that end
    by themselves, and the final collection at exit is skipped. Long-running commands may make more garbage than fits in
    memory.
    """
    if sys.argv[1:2] not in (["profile"], ["run"], ["verify"]):
        gc.disable()
    for stream in (sys.stdout, sys.stderr):  # other encodings of a terminal or file get escapes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    finally:
        gc.freeze()
