"""``verify`` makes the inputs require gradients; a forward that does not run so is verified without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.cli.common import load_and_capture
from autopar.comparison.program_vs_eager import against_eager
from autopar.errors import CaptureError

FACTORIES = '''
import torch
from torch import nn

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(32, 8)

    def forward(self, x, y):
        if y.max() >= 10:
            raise ValueError("labels")
        return self.c(self.seen(x)).square().mean()

class SetOnView(Base):
    def seen(self, x):
        h = x[:, None]
        h.requires_grad = True
        return h

class SetOnResult(Base):
    def seen(self, x):
        h = x * 2
        h.requires_grad = True
        return h

class TakenOff(Base):
    def seen(self, x):
        h = x[:, None]
        h.requires_grad_(False)
        return h

class NeverAsked(Base):
    def seen(self, x):
        return x

class Wrong(Base):
    def seen(self, x):
        return x.reshape(7, 7)

def made(cls):
    return lambda: (cls(), (torch.randn(4, 32), torch.arange(4)))

set_on_view, set_on_result, taken_off, never_asked, wrong = map(
    made, (SetOnView, SetOnResult, TakenOff, NeverAsked, Wrong))
'''


@pytest.fixture
def spec(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / "forwards.py"
    file.write_text(FACTORIES)
    return lambda name: f"{file}:{name}"


@pytest.mark.parametrize("name", ["set_on_view", "set_on_result", "taken_off"])
def test_a_forward_that_does_not_run_with_gradients_of_inputs(
    name: str, spec: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, captured = load_and_capture(spec(name), device="cpu", input_gradients=True)
    assert "gradients of the inputs are not compared" in capsys.readouterr().err
    assert not loaded.args[0].requires_grad
    (row,) = against_eager(captured, loaded.model, loaded.args, loaded.kwargs)
    assert row.worst < 1e-6


def test_gradients_of_inputs_are_compared_where_the_forward_runs_with_them(
    spec: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, _ = load_and_capture(spec("never_asked"), device="cpu", input_gradients=True)
    assert loaded.args[0].requires_grad and not capsys.readouterr().err


def test_a_forward_that_does_not_run_at_all_is_one_error(spec: Callable[[str], str]) -> None:
    with pytest.raises(CaptureError, match="running it on the example inputs failed: RuntimeError: shape"):
        load_and_capture(spec("wrong"), device="cpu", input_gradients=True)


class Checking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 4:
            raise KeyError(f"label {int(labels.max())}")
        return nn.functional.cross_entropy(self.a(x), labels)


def test_an_example_that_the_model_refuses_is_one_error_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"(?s)failed: KeyError: 'label 4'.* at .*test_inputs_without_gradients\.py"):
        capture(Checking(), (torch.randn(2, 4), torch.tensor([0, 4])))
