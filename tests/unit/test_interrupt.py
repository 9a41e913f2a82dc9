"""Ctrl-C stops a capture, leaves nothing behind, and ends a command with a line; whoever waits hears how far it is."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar import progress
from autopar.capture import capture
from autopar.cli import main


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
