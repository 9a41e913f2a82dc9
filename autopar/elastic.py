"""A job that continues when ranks die: ``python -m autopar.elastic --nproc-per-node 4 train.py``, as with torchrun.

The agent is torchrun's own, with all of its options. It watches the ranks of its machine, and restarts all of them when
one fails; agents of several machines meet in torchrun's rendezvous. autopar adds:

* A device whose rank was killed is left out: the job continues with the others (4 -> 3), for which ``parallelize``
  makes a new plan. If the model has no plan for that number of ranks, the next smaller number is tried.
* A device that was left out, or a machine that joins (again), is used from the next checkpoint on, so that no step is
  lost for it.

The script only has to start from its last checkpoint (:class:`autopar.Checkpoint`), and to call :func:`saved` if it
saves in another way. docs/guides/checkpoints.md has the pattern.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from autopar.runtime.ranks.agent_messages import FOLDER, REFUSED, SAVED, heard, tell_agent
from autopar.torch_private import AGENT_OF_TORCHRUN

RESTARTS = 100
"""Default of ``--max-restarts``."""
JOIN_SECONDS = 7 * 24 * 3600
"""Default of ``--rdzv-conf join_timeout=``: seconds that a machine waits to join."""
MEETINGS = 5
"""Attempts of machines to meet, if one leaves meanwhile."""
TRY_SECONDS = 120.0
"""Time-out of a small computation that tests a left-out device."""
_TRY = "import torch; print(torch.ones(2, device=torch.accelerator.current_accelerator()).sum().item())"


def saved(step: int) -> None:
    """Announce a complete checkpoint from which the script could restart; every rank calls it.

    Devices that have come back are used from here on. :class:`autopar.Checkpoint` calls it by itself.

    Args:
        step: the number of finished steps.
    """
    tell_agent(SAVED, str(step))


class ElasticAgent(LocalElasticAgent):
    """torchrun's agent of one machine, which continues with the remaining devices.

    Attributes:
        devices: initial number of devices of the machine.
        lost: numbers of devices that are left out.
        used: device of each rank here, in the order of local ranks.
        refused: counts of devices of this machine for which the script had no plan.
        folder: messages of the ranks of this attempt.
    """

    def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(spec, *args, **kwargs)
        self.devices = int(spec.local_world_size)
        self.lost: set[int] = set()
        self.used = list(range(self.devices))
        self.refused: set[int] = set()
        self.visible = _visible_devices(self.devices)
        self.root = Path(tempfile.mkdtemp(prefix="autopar-elastic-"))
        self.folder, self.attempt = self.root, 0
        self._really_waiting = spec.rdzv_handler.num_nodes_waiting
        spec.rdzv_handler.num_nodes_waiting = self._waiting

    # -- what torchrun's agent calls

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.attempt += 1
        self.folder = self.root / f"attempt-{self.attempt}"
        self.folder.mkdir()
        os.environ[FOLDER] = str(self.folder)
        if self.visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.visible[device] for device in self.used)
        workers: dict[int, Any] = super()._start_workers(worker_group)
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        killed = self._killed()
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self._after_failure(worker_group, result, killed)
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other machines, again if one of them leaves meanwhile, which torchrun's agent does not handle."""
        for left in reversed(range(MEETINGS)):
            try:
                super()._rendezvous(worker_group)
                return
            except dist.DistError as error:
                if not left:
                    raise
                _say(f"a machine has gone while all met ({str(error).splitlines()[0][:200]}); meets the others again")

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        worker_group.spec.local_world_size = len(self.used)
        super()._restart_workers(worker_group)

    def run(self, *args: Any) -> RunResult:
        """Run the job to its end."""
        try:
            result: RunResult = super().run(*args)
            return result
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    # -- failures

    def _killed(self) -> set[int]:
        """Return the local ranks that a signal ended; after a failure end stopped ranks, which cannot react, too."""
        context: Any = self._pcontext
        processes = {rank: handler.proc for rank, handler in getattr(context, "subprocess_handlers", {}).items()}
        ended = {rank: process.poll() for rank, process in processes.items()}
        killed = {rank for rank, code in ended.items() if code is not None and code < 0}
        if any(code not in (None, 0) for code in ended.values()):
            for rank, process in processes.items():
                if ended[rank] is None and _is_stopped(process.pid):
                    process.send_signal(signal.SIGKILL)
                    killed.add(rank)
        return killed

    def _after_failure(self, group: WorkerGroup, result: RunResult, killed: set[int]) -> None:
        """Choose the devices of the next attempt."""
        if (why := heard(self.folder, REFUSED)) is not None and not killed:
            self._after_refusal(group, why)
            return
        own = {worker.global_rank: worker.local_rank for worker in group.workers}
        if not killed and all(failure.exitcode < 0 for failure in result.failures.values()):
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            killed = {own[rank] for rank, failure in result.failures.items() if failure is first}
        gone = {self.used[rank] for rank in killed}
        self.lost |= gone
        if len(self.lost) == self.devices:  # none is left to go on with
            self.lost = {device for device in self.lost if not self._works(device)}
            gone = gone & self.lost
            _say(f"no device is left; tries those that work, {self.devices - len(self.lost)} of {self.devices}")
        self._choose()
        if gone:
            _say(f"{_named(gone)} left out, whose rank was killed; goes on with {len(self.used)} of {self.devices}")

    def _after_refusal(self, group: WorkerGroup, why: str) -> None:
        """Try one rank fewer, because the script has no plan for this number of ranks."""
        if group.group_rank != (group.group_world_size or 1) - 1:
            return  # the last machine gives one up
        self.refused.add(len(self.used))
        if not self._choose():
            _say(f"there is no plan for any number of ranks up to {self.devices}; the last error: {why}")
            self._remaining_restarts = 0
            return
        if group.group_world_size == 1:
            self._remaining_restarts += 1  # nothing has failed
        _say(f"no plan for {group.workers[0].world_size} ranks ({why.splitlines()[0]}); tries {len(self.used)} here")

    def _choose(self) -> bool:
        """Take as many devices as exist and the script has not refused; return False if that is none."""
        there = [device for device in range(self.devices) if device not in self.lost]
        number = next((n for n in range(len(there), 0, -1) if n not in self.refused), 0)
        if number:
            self.used = there[:number]
        return number > 0

    # -- devices that come back

    def _waiting(self) -> int:
        """Return the number of machines or devices to restart for: none before a checkpoint."""
        step = heard(self.folder, SAVED)
        if step is None:
            return 0
        if self.lost and (back := {device for device in self.lost if self._works(device)}):
            self.lost -= back
            before = len(self.used)
            self._choose()
            if len(self.used) > before:
                _say(f"{_named(back)} used again, from the checkpoint of step {step} on: {len(self.used)} of "
                     f"{self.devices}")  # fmt: skip
                return 1
        return int(self._really_waiting())

    def _works(self, device: int) -> bool:
        if self.visible is None:
            return True
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self.visible[device]}
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run([sys.executable, "-c", _TRY], env=environment, timeout=TRY_SECONDS, check=True,
                           capture_output=True)  # fmt: skip
            return True
        return False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m autopar.elastic``: torchrun with this agent; ``arguments`` default to the command line."""
    parser = torchrun.get_args_parser()
    parser.prog = "python -m autopar.elastic"
    parser.set_defaults(max_restarts=RESTARTS)
    options = parser.parse_args(arguments)
    if options.rdzv_backend == "static":
        if options.nnodes in ("1", "1:1") and not options.rdzv_endpoint:
            options.standalone = True
        else:
            options.rdzv_backend = "c10d"
    if "join_timeout" not in options.rdzv_conf:
        options.rdzv_conf = ",".join(filter(None, [options.rdzv_conf, f"join_timeout={JOIN_SECONDS}"]))
    with AGENT_OF_TORCHRUN.replaced(ElasticAgent):
        torchrun.run(options)


def _visible_devices(number: int) -> list[str] | None:
    """Return CUDA's names of this machine's devices; None if ranks have none of their own."""
    import torch

    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = given or [str(index) for index in range(torch.cuda.device_count())]
    return names[:number] if len(names) >= number else None


def _is_stopped(pid: int) -> bool:
    """Return True if a process was stopped, as by SIGSTOP."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0] == "T"
    return False


def _named(devices: set[int]) -> str:
    several = len(devices) > 1
    return f"device{'s' * several} {', '.join(map(str, sorted(devices)))} {'are' if several else 'is'}"


def _say(text: str) -> None:
    print(f"autopar.elastic: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
