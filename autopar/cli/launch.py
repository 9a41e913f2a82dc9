"""``autopar launch``: what starts the ranks of a plan on the machines of its cluster."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import Json, PlanPath, UsageError, open_plan, print_json, print_lines, within
from autopar.cli.output_files import Force, OutputFile, OutputKind
from autopar.errors import PlanError

if TYPE_CHECKING:
    from autopar.launching.job import Launch
    from autopar.planfile import Document

SCRIPT = OutputKind("a launch script", re.compile(r"#!/bin/bash\n.*numbered machine by machine\n", re.DOTALL).match)
MOST_DEVICES = 65_536


def launch(
    path: PlanPath,
    script: Annotated[
        str | None,
        typer.Option(
            "--script",
            help="What every rank runs: 'train.py --lr 1e-3', '-m package'. Default: autopar run, with the plan.",
        ),
    ] = None,
    torchrun: Annotated[
        str | None,
        typer.Option("--torchrun", metavar="FILE", help="Write a script that runs on every machine; - prints it."),
    ] = None,
    slurm: Annotated[
        str | None, typer.Option("--slurm", metavar="FILE", help="Write a batch script for sbatch; - prints it.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", help="Option of sbatch, such as partition=gpu or time=04:00:00. Can be repeated."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", help="Variable of every rank: NCCL_SOCKET_IFNAME=eth0. Can be repeated."),
    ] = None,
    per_host: Annotated[
        int | None,
        typer.Option("--per-host", help="Devices of a host, where the cluster's machines are several hosts each.",
                     callback=within(1, MOST_DEVICES)),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show what starts a plan's ranks on the machines of its cluster; write it as a script for torchrun or Slurm.

    Ranks are numbered machine by machine, in the order of the cluster's devices. The script for torchrun is started on
    every machine with the machine's number and the host name of machine 0; that for Slurm asks for the machines.
    Paths in --script are those of the folder in which the scripts are started.

    Examples: autopar launch plan.json --slurm job.sh --sbatch partition=gpu

    autopar launch plan.json --torchrun start.sh --script 'train.py --steps 100'
    """
    from autopar.launching import scripts

    if slurm == torchrun == "-":
        raise UsageError(
            "--torchrun and --slurm are both -, and standard output takes one script; give one of them a file"
        )
    files = {
        option: OutputFile(Path(given), SCRIPT, option, force)
        for option, given in (("--torchrun", torchrun), ("--slurm", slurm))
        if given not in (None, "-")
    }
    for file in files.values():
        file.check()
    document = open_plan(path)
    job = job_of(document, path, script, variables(env or []), per_host)
    texts = {
        "--torchrun": scripts.torchrun(job, "start.sh" if torchrun in (None, "-") else Path(str(torchrun)).name),
        "--slurm": scripts.slurm(job, path.stem, sbatch or []),
    }
    for option, file in files.items():
        file.write(texts[option])
    if as_json:
        print_json(_facts(job, {option: str(file.path) for option, file in files.items()}), "launch")
        return
    printed = next((option for option, given in (("--torchrun", torchrun), ("--slurm", slurm)) if given == "-"), None)
    if printed is not None:
        typer.echo(texts[printed], nl=False)
        return
    print_lines(*scripts.described(job), *_shown(job, files))


def job_of(
    document: Document, path: Path, script: str | None, environment: dict[str, str], per_host: int | None
) -> Launch:
    """Return the job of a plan file on the devices that it is for.

    Raises:
        PlanError: it is for another trainer and ``script`` does not say what to run, or for other devices than the
            first ones of its cluster.
    """
    from autopar.launching.job import launch_of, machines_named
    from autopar.planfile.parsing import cluster_named
    from autopar.plans.device_groups import check_within

    target = str((document.raw.get("pins") or {}).get("target", ""))
    if script is None and target:
        raise PlanError(
            f"{path} is a plan for {target}, which autopar run does not execute: write its files with autopar export "
            f"{path} --to {target}, and give what a rank runs: --script 'FILE ARGUMENTS'"
        )
    words = ["-m", "autopar", "run", str(path)] if script is None else _words(script)
    stages = zip(document.raw["stages"], document.meshes, strict=True)
    used = {device for stage, mesh in stages for device in stage.get("devices") or range(mesh.n_devices)}
    if used != set(range(len(used))):
        missing = min(set(range(max(used))) - used)
        raise PlanError(
            f"{path} has {len(used)} devices, up to number {max(used)}, and none with number {missing}; rank i is "
            "device i, so number the devices from 0 without gaps and choose them in the cluster's name: NAME@0-3,8-11"
        )
    cluster, chosen = machines_named(str(document.raw["cluster"]), lambda name: cluster_named(name, document.folder))
    check_within([tuple(used)], len(chosen), f"devices are in cluster '{document.raw['cluster']}'")
    on_host = any(choice.get("on_host") for stage in document.raw["stages"] for choice in stage["params"].values())
    return launch_of(
        cluster, words, environment, devices=chosen[: len(used)], per_host=per_host, steps_on_host=on_host
    )  # fmt: skip


def _words(script: str) -> list[str]:
    """Return the words of ``--script``, split as a shell does."""
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise UsageError(f"--script is {script!r}: {error}; quote it as for a shell") from None
    if not words:
        raise UsageError("--script is empty; give what every rank runs, such as 'train.py --lr 1e-3'")
    return words


def variables(given: list[str]) -> dict[str, str]:
    """Return environment variables from ``NAME=VALUE``.

    Raises:
        UsageError: a text has another form.
    """
    pairs = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not value.isprintable():
            raise UsageError(f"--env is '{text}'; write NAME=VALUE, such as NCCL_SOCKET_IFNAME=eth0")
        pairs[name] = value
    return pairs


def _shown(job: Launch, files: dict[str, OutputFile]) -> list[str]:
    """Return lines with the commands, or with what to do with the files that were written."""
    from autopar.launching.job import PORT
    from autopar.launching.scripts import settings_of

    lines = []
    if "--torchrun" in files:
        path = shlex.quote(str(files["--torchrun"].path))
        where = f"bash {path}" if job.nodes == 1 else f"on every machine: bash {path} NODE NAME_OF_MACHINE_0"
        lines.append(f"written to {files['--torchrun'].path}; start it {where}")
    if "--slurm" in files:
        lines.append(
            f"written to {files['--slurm'].path}; start it with: sbatch {shlex.quote(str(files['--slurm'].path))}"
        )
    if lines:
        return lines
    exports = [f"  export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    alone = job.nodes == 1
    where = {"node": "0", "host": "127.0.0.1"} if alone else {"node": "$node", "host": "$host"}
    lines = ["start it on the machine:", *exports]
    if not alone:
        lines[0] = "start it on every machine, with the machine's number in $node and the name of machine 0 in $host:"
    node = 0
    for each in job.machines:
        last = f"s {node} to {node + each.count - 1}" if each.count > 1 else f" {node}"
        lines += [f"  # machine{last}"] * (len(job.machines) > 1)
        lines += [f"  {line}" for line in settings_of(each)[1:]]
        lines.append("  " + job.command(**where, per_node=str(each.ranks), port=str(PORT)))
        node += each.count
    return [*lines, "scripts that do this: --torchrun FILE, --slurm FILE"]


def _facts(job: Launch, files: dict[str, str]) -> dict[str, object]:
    """Return the job as values for JSON; ``$host`` stands for the name of machine 0 in commands."""
    from autopar.launching.job import PORT

    return {
        "nodes": job.nodes, "ranks": job.ranks, "machines": list(job.machines), "environment": dict(job.environment),
        "argv": list(job.argv),
        "commands": [
            job.command(node=str(node), per_node=str(n), host="$host", port=str(PORT))
            for node, n in enumerate(job.per_node)
        ],
        "notes": list(job.notes), "written": files,
    }  # fmt: skip
