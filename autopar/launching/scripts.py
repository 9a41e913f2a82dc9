"""Jobs as bash scripts for torchrun and Slurm, and in words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from autopar.errors import ClusterError
from autopar.launching.job import PORT, Launch, Machines
from autopar.words.texts import printable

CORES_OF_A_RANK = 8
"""Cores for which Slurm is asked per rank where a job uses a part of a machine: for the rank and its data loader."""
_VARIABLES = {name: f'"${name}"' for name in ("node", "per_node", "host", "port")}


def described(launch: Launch) -> list[str]:
    """Return the job in words: machines with their ranks, in order, and notes."""
    machines = f"{launch.nodes} machines" if launch.nodes > 1 else "1 machine"
    lines = [f"{launch.ranks} ranks on {machines}, numbered machine by machine"]
    node = rank = 0
    for each in launch.machines:
        last, end = node + each.count - 1, rank + each.count * each.ranks - 1
        name = f"machine {node}" if each.count == 1 else f"machines {node} to {last}"
        devices = f"{each.ranks} of {each.size}" if each.ranks < each.size else str(each.ranks)
        numbers = f" (numbers {','.join(map(str, each.visible))})" if each.visible else ""
        on_each = " on each" if each.count > 1 else ""
        lines.append(f"  {name}: {devices} x {each.device}{numbers}{on_each}, ranks {rank} to {end}")
        node, rank = last + 1, end + 1
    return [*lines, *(f"  note: {note}" for note in launch.notes)]


def torchrun(launch: Launch, name: str = "start.sh") -> str:
    """Return a bash script that starts the ranks of one machine; it is run on every machine.

    Its arguments are the number of the machine and the host name of machine 0, none where there is one machine. The
    variable ``MASTER_PORT`` changes the port of the rendezvous. ``name`` is the file's, for its comments.
    """
    lines = ["#!/bin/bash", *_comments(launch)]
    if launch.nodes == 1:
        lines += [_comment(f"Start it on the machine: bash {name}"), "set -euo pipefail", "node=0", "host=127.0.0.1"]
    else:
        usage = f"usage: {name} NODE HOST, the number of this machine (0 to {launch.nodes - 1}), the name of machine 0"
        lines += [
            _comment(f"Start it on every machine; on the second one: bash {name} 1 NAME_OF_MACHINE_0"),
            "set -euo pipefail",
            f"usage={shlex.quote(usage)}",
            'node=${1:?"$usage"} host=${2:?"$usage"}',
            f'[[ "$node" =~ ^[0-9]{{1,6}}$ ]] && (( 10#$node < {launch.nodes} )) || {{ echo "$usage" >&2; exit 2; }}',
        ]
    lines += [f"port=${{MASTER_PORT:-{PORT}}}", *_exports(launch), *_on_node(launch)]
    return "\n".join([*lines, f"exec {launch.command(**_VARIABLES)}"]) + "\n"


def slurm(launch: Launch, job_name: str = "autopar", options: Sequence[str] = ()) -> str:
    """Return a batch script of Slurm: one task on each machine, which starts the ranks there.

    Machines of several kinds, or with unequal numbers of ranks, are components of a heterogeneous job, in the order of
    ranks (https://slurm.schedmd.com/heterogeneous_jobs.html). A task finds the number of its machine by name, since
    variables such as ``SLURM_NODEID`` count within a component.

    Args:
        job_name: letters that Slurm does not take are replaced.
        options: more options of ``sbatch``, such as ``partition=gpu``; ``1:partition=old`` is of component 1 alone.

    Raises:
        ClusterError: an option cannot be one, or is of a component that the job does not have.
    """
    n_components = len(launch.machines)
    asked = [_option(text, n_components) for text in options]
    lines = ["#!/bin/bash", f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9_.-]+', '-', job_name) or 'autopar'}"]
    for number, each in enumerate(launch.machines):
        lines += ["#SBATCH hetjob"] * (number > 0)
        lines += [f"#SBATCH {word}" for word in _requested(launch, each)]
        lines += [f"#SBATCH --{text}" for component, text in asked if component in (None, number)]
    groups = [""] if n_components == 1 else [f"_HET_GROUP_{number}" for number in range(n_components)]
    listed = "; ".join(f'scontrol show hostnames "$SLURM_JOB_NODELIST{group}"' for group in groups)
    wrong = f"the job has ${{#hosts[@]}} machines, and was written for {launch.nodes}"
    if n_components > 1:
        lines.append(
            "# Components are machines in the order of ranks: select each one's kind by --sbatch 1:partition=NAME"
        )
    lines += [
        *_comments(launch),
        "set -euo pipefail",
        f"mapfile -t hosts < <({listed})",
        f'(( ${{#hosts[@]}} == {launch.nodes} )) || {{ echo "{wrong}" >&2; exit 2; }}',
        'export ordered="${hosts[*]}" host="${hosts[0]}" port=$((20000 + SLURM_JOB_ID % 12000))',
        *_exports(launch),
        "start() {  # on every machine",
        "    local node=0 each per_node",
        '    for each in $ordered; do [[ "$each" == "$SLURMD_NODENAME" ]] && break; node=$((node + 1)); done',
        f'    (( node < {launch.nodes} )) || {{ echo "machine $SLURMD_NODENAME is not of this job" >&2; exit 2; }}',
        *(f"    {line}" for line in _on_node(launch)),
        f"    exec {launch.command(**_VARIABLES)}",
        "}",
        "export -f start",
    ]
    components = "" if n_components == 1 else f"--het-group=0-{n_components - 1} "
    step = "--export=ALL --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1"
    return "\n".join([*lines, f"srun {components}{step} bash -c start"]) + "\n"


def _requested(launch: Launch, each: Machines) -> Iterator[str]:
    """Yield the options of ``sbatch`` that ask for the machines of one component."""
    yield f"--nodes={each.count}"
    yield "--ntasks-per-node=1"
    if not launch.on_gpu:
        yield f"--cpus-per-task={each.ranks}"
        return
    devices = each.size if each.visible else each.ranks
    yield f"--gpus-per-node={devices}"
    if devices == each.size:
        yield "--exclusive"
        yield "--mem=0"
    else:
        yield f"--cpus-per-task={each.ranks * CORES_OF_A_RANK}"


def _option(text: str, n_components: int) -> tuple[int | None, str]:
    """Return the component (None: all) and the text of an option of ``sbatch``."""
    match = re.fullmatch(r"(?:(\d{1,4}):)?-{0,2}([a-z][a-z-]*(?:=[^\s\"'\\`$]+)?)", text)
    if match is None:
        raise ClusterError(f"'{text}' is no option of sbatch; write partition=gpu, account=NAME or time=04:00:00")
    if match[1] and int(match[1]) >= n_components:
        raise ClusterError(
            f"'{text}' is for component {match[1]}, and the job has {n_components}, which count from 0; give another "
            "number, or none for all components"
        )
    return int(match[1]) if match[1] else None, match[2]


def _comments(launch: Launch) -> list[str]:
    return [_comment(line) for line in described(launch)]


def _comment(text: str) -> str:
    """Return a comment of one line: names from a cluster file may hold anything, and must not become commands."""
    return f"# {' '.join(printable(text).splitlines())}"


def _exports(launch: Launch) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()]


def _on_node(launch: Launch) -> list[str]:
    """Return the lines that set what differs between machines: the number of ranks, and the devices that they see."""
    settings = [settings_of(each) for each in launch.machines]
    if all(each == settings[0] for each in settings):
        return settings[0]
    lines, end = [], 0
    for number, (each, set_there) in enumerate(zip(launch.machines, settings, strict=True)):
        end += each.count
        lines.append(f"{'el' * (number > 0)}if (( node < {end} )); then {'; '.join(set_there)}")
    return [*lines, "fi"]


def settings_of(each: Machines) -> list[str]:
    """Return the commands of the shell that set what is particular to machines."""
    visible = [f"export CUDA_VISIBLE_DEVICES={','.join(map(str, each.visible))}"] if each.visible else []
    return [f"per_node={each.ranks}", *visible]
