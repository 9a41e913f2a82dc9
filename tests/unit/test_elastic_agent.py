"""Which devices an agent starts ranks on, after what it and the ranks say."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from autopar import elastic
from autopar.elastic import ElasticAgent
from autopar.errors import InfeasibleError, MeshError, RunError
from autopar.runtime.ranks import agent_messages, pulse


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ElasticAgent:
    made = object.__new__(ElasticAgent)
    made.devices, made.lost, made.used, made.refused, made.visible = 4, set(), [0, 1, 2, 3], set(), None
    made.folder, made._remaining_restarts, made._really_waiting = tmp_path, 9, lambda: 0
    monkeypatch.setenv(agent_messages.FOLDER, str(tmp_path))
    return made


def fails(agent: ElasticAgent, killed: set[int], codes: dict[int, int], machines: int = 1, number: int = 0) -> None:
    """Some ranks have ended with exit codes, ``killed`` of them before the agent has ended any."""
    workers = [SimpleNamespace(global_rank=r, local_rank=r, world_size=len(agent.used)) for r in range(len(agent.used))]
    group: Any = SimpleNamespace(workers=workers, group_rank=number, group_world_size=machines)
    failures: Any = {r: SimpleNamespace(exitcode=code, timestamp=r) for r, code in codes.items()}
    agent._after_failure(group, RunResult(WorkerState.FAILED, failures=failures), killed)


@pytest.mark.parametrize(
    ("killed", "codes", "used"),
    [
        ({1}, {1: -9, 0: -15, 2: -15}, [0, 2, 3]),
        ({0, 3}, {0: -9, 3: -6}, [1, 2]),
        (set(), {2: 1}, [0, 1, 2, 3]),  # an error of the script's is tried again on the same ones
        (set(), {1: 1, 0: -15}, [0, 1, 2, 3]),
        (set(), {2: -9, 3: -15}, [0, 1, 3]),  # killed just before the agent looked
        ({0, 1, 2, 3}, {0: -9, 1: -9, 2: -9, 3: -9}, [0, 1, 2, 3]),
    ],
)
def test_devices_after_a_failure(agent: ElasticAgent, killed: set[int], codes: dict[int, int], used: list[int]) -> None:
    fails(agent, killed, codes)
    assert agent.used == used


def test_numbers_without_a_plan_are_left_out(agent: ElasticAgent) -> None:
    for left in ([0, 1, 2], [0, 1]):
        agent_messages.tell_agent(agent_messages.REFUSED, "InfeasibleError: no room")
        fails(agent, set(), {0: 1})
        assert agent.used == left and agent._remaining_restarts == 10 + 3 - len(left)
    (agent.folder / agent_messages.REFUSED).unlink()
    fails(agent, {0}, {0: -9})
    assert agent.used == [1, 2]  # of the three that are left, two have a plan
    for _ in range(2):
        agent_messages.tell_agent(agent_messages.REFUSED, "InfeasibleError: no room")
        fails(agent, set(), {0: 1})
    assert agent._remaining_restarts == 0  # none has


def test_only_the_last_machine_gives_a_device_up(agent: ElasticAgent) -> None:
    agent_messages.tell_agent(agent_messages.REFUSED, "MeshError: 12 rows")
    fails(agent, set(), {0: 1}, machines=2, number=0)
    assert agent.used == [0, 1, 2, 3]
    fails(agent, set(), {0: 1}, machines=2, number=1)
    assert agent.used == [0, 1, 2]


def test_devices_and_machines_come_back_at_a_checkpoint(agent: ElasticAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(agent, {1, 2}, {1: -9, 2: -9})
    agent._really_waiting = lambda: 1
    assert agent._waiting() == 0  # no step is to be lost
    elastic.saved(20)
    monkeypatch.setattr(agent, "_works", lambda device: device == 2)
    assert agent._waiting() == 1 and agent.used == [0, 2, 3] and agent.lost == {1}
    monkeypatch.setattr(agent, "_works", lambda device: False)
    agent._really_waiting = lambda: 0
    assert agent._waiting() == 0 and agent.used == [0, 2, 3]
    agent._really_waiting = lambda: 2
    assert agent._waiting() == 2


@pytest.mark.parametrize("gone", [0, 2, 5])
def test_a_machine_that_goes_while_all_meet(agent: ElasticAgent, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []

    def meet(self: Any, group: Any) -> None:
        met.append(1)
        if len(met) <= gone:
            raise dist.DistStoreError("wait timeout after 60000ms")

    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", meet)
    group: Any = None
    with pytest.raises(dist.DistError) if gone == 5 else contextlib.nullcontext():
        agent._rendezvous(group)
    assert len(met) == min(gone + 1, 5)


@pytest.mark.parametrize("error", [InfeasibleError("no room"), MeshError("12 rows"), RunError("a batch"), ValueError()])
def test_what_ends_a_script_is_told(agent: ElasticAgent, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_messages, "_hooked", [])
    monkeypatch.setattr("sys.excepthook", lambda *args: None)
    agent_messages.tell_of_refusal()
    agent_messages._hooked[0](type(error), error, None)
    told = agent_messages.heard(agent.folder, agent_messages.REFUSED)
    assert (told is not None) == isinstance(error, InfeasibleError | MeshError)


@pytest.mark.parametrize(("text", "seconds"), [("", 60.0), ("2.5", 2.5), ("inf", float("inf"))])
def test_how_long_a_rank_may_be_silent(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pulse.VARIABLE, text)
    assert pulse.silence_seconds() == seconds


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan"])
def test_what_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pulse.VARIABLE, text)
    with pytest.raises(RunError, match=f"AUTOPAR_SILENCE_SECONDS is '{text}'; give seconds above 0"):
        pulse.silence_seconds()
