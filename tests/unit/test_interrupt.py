"""Ctrl-C stops a capture, leaves nothing behind, and ends a command with a line; whoever waits hears how far it is."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import progress
from autopar.capture import capture
from autopar.cli import common, main
from autopar.planner.inter_op.incumbents import Incumbents
from autopar.planner.inter_op.stage_search import INTERRUPTED


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A process that a shell has started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Stack(nn.Module):
    """Layers, in one of which the user loses patience."""

    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.stop_at = stop_at

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == self.stop_at:
                signal.raise_signal(signal.SIGINT)
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def test_ctrl_c_is_no_error_of_the_model() -> None:
    apply, backward = torch.autograd.Function.apply, torch.autograd.backward
    for stop_at in (0, 5):
        with pytest.raises(KeyboardInterrupt):
            capture(Stack(stop_at), (torch.zeros(2, 8),))
        assert torch.autograd.backward is backward
        assert torch.autograd.Function.apply == apply
        assert torch.is_grad_enabled()
    assert capture(Stack(), (torch.zeros(2, 8),)).graph.loss == 0
    Stack()(torch.ones(2, 8)).backward()


def test_progress_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", -1.0)
    found: list[str] = []
    with progress.heard(found.append):
        capture(Stack(), (torch.zeros(2, 8),))
    assert [f"layers.{i}" for i in range(6)] == [text for text in found if text]
    capture(Stack(), (torch.zeros(2, 8),))
    assert len(found) < 14, "nobody listens any more"


def test_a_command_ends_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(
        "import signal, torch\n"
        "class Slow(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        return super().forward(x).mean()\n"
        "def make():\n"
        "    return Slow(8, 8), (torch.zeros(2, 8),)\n"
    )
    argv = ["autopar", "plan", f"{tmp_path}/slow.py:make", "--cluster", "local-x2", "--mesh", "data=2"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    said = capsys.readouterr()
    assert said.err.strip() == "interrupted"
    assert not said.out


@pytest.fixture
def _sigterm_ends_by_default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "it is as it was before the command"
    signal.signal(signal.SIGTERM, before)


def _planned(folder: Path, monkeypatch: pytest.MonkeyPatch, forward: str) -> int:
    """The exit code of a search over everything for a model with this line in its forward."""
    (folder / "net.py").write_text(
        "import signal, torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        f"        {forward}\n"
        "        return super().forward(x).mean()\n"
        "def make():\n"
        "    return Net(*[torch.nn.Linear(8, 8) for _ in range(4)]), (torch.zeros(8, 8),)\n"
    )
    argv = ["autopar", "plan", f"{folder}/net.py:make", "--cluster", "local-x4", "-o", f"{folder}/plan.json"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.mark.usefixtures("_sigterm_ends_by_default")
def test_sigterm_ends_a_command_as_ctrl_c_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _planned(tmp_path, monkeypatch, "signal.raise_signal(signal.SIGTERM)") == 128 + signal.SIGTERM
    assert capsys.readouterr().err.strip() == "terminated" and not (tmp_path / "plan.json").exists()


@pytest.mark.usefixtures("_sigterm_ends_by_default")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_best_plan_so_far_is_kept(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add, ended = Incumbents.add, []

    def add_and_stop(self: Incumbents, *args: Any, **kwargs: Any) -> float:
        seconds = add(self, *args, **kwargs)
        if self.plans and not ended:
            ended.append(number)
            signal.raise_signal(number)
        return seconds

    monkeypatch.setattr(Incumbents, "add", add_and_stop)
    assert _planned(tmp_path, monkeypatch, "pass") == 0
    assert ended and any(INTERRUPTED in note for note in json.loads((tmp_path / "plan.json").read_text())["notes"])


def test_a_log_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first after seconds, then ever more seldom, and none where there is nothing to say."""
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "__stderr__", stream)
    with common.progress("planning") as say:
        for second in range(3600):
            now[0] = float(second)
            say(f"layout {second}" if second % 2 else "")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("planning, 3 s: layout 3") and 20 < len(lines) < 80
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with common.progress("planning") as say:
        say("layout")
    assert not sys.stderr.getvalue(), "whoever reads the errors of a call gets no lines"  # type: ignore[attr-defined]
