"""Arguments of ``compile()`` are checked when they are given, and ``disable=True`` takes an earlier call back."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RunError
from autopar.lower.steps import building
from autopar.runtime.stages.step_program import StepProgram

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A perceptron whose second derivative is not zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def parallel(**options: Any) -> Any:
    return autopar.parallelize(Net(), 1, (X,), **options)


def steps(pm: Any) -> bool:
    return isinstance(pm._autopar.stage.run_program, StepProgram)


def penalty(model: nn.Module) -> list[Tensor | None]:
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_taken_back() -> None:
    pm = parallel(compile={"backend": "eager"})
    with pytest.raises(RunError, match=r"pm\.compile\(disable=True\) takes it back"):
        penalty(pm)
    pm.compile(disable=True)
    assert not steps(pm)
    got, expected = penalty(pm), penalty(Net())
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert sum(x is not None for x in got) == 3


def test_taken_back_for_other_shapes() -> None:
    pm = parallel(compile={"backend": "eager"})
    pm(X[:5])
    pm.compile(disable=True)
    pm(X[:5])
    assert not steps(pm)
    pm(X[:3])
    assert not steps(pm)


def test_never_compiled() -> None:
    assert not steps(parallel(compile={"disable": True}))


def test_compiled_by_the_caller_after_that() -> None:
    pm = parallel(compile={"backend": "eager"})
    pm.compile(disable=True)
    torch.compile(pm, backend="eager")(X)
    assert steps(pm)


def test_compilers_are_off() -> None:
    with torch._dynamo.config.patch(disable=True):
        assert not steps(parallel(compile=True))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"bakend": "eager"}, TypeError, "'bakend'; it takes those of torch.compile, by name: fullgraph"),
        ({"backend": "foo"}, RunError, "Invalid backend: 'foo'"),
        ({"dynamic": True}, RunError, "Leave dynamic away"),
        ({"mode": "default", "options": {"epilogue_fusion": True}}, RunError, "give one of the two"),
    ],
)  # fmt: skip
def test_refused_when_given(options: dict[str, Any], error: type[Exception], said: str) -> None:
    """The module goes on as it was."""
    pm = parallel()
    with pytest.raises(error, match=said):
        pm.compile(**options)
    assert not steps(pm)
    assert torch.equal(pm(X), Net()(X))


def test_steps_built_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are built one after the other."""
    modules = [parallel(compile={"backend": "eager"}) for _ in range(3)]
    results: list[Any] = [None] * 3
    running, most = 0, 0
    meanwhile = threading.Event()
    call = building._Builder.build

    def build(self: Any, values: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        meanwhile.wait(0.05)
        step = call(self, values)
        running -= 1
        return step

    monkeypatch.setattr(building._Builder, "build", build)

    def run(k: int) -> None:
        results[k] = modules[k](X)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert all(torch.equal(x, Net()(X)) for x in results)


def test_a_call_waits_for_that_of_another_thread() -> None:
    """A batch of another size brings another program, which the call of another thread must not run."""
    pm = parallel()
    expected = copy.deepcopy(Net())
    for rows in (8, 5):
        pm(X[:rows])
    inside, order = threading.Event(), []
    run = type(pm._autopar).forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        order.append("in")
        inside.set()
        threading.Event().wait(0.1)
        result = run(pm._autopar, *args, **kwargs)
        order.append("out")
        return result

    pm._autopar.forward = slow
    results: dict[int, Tensor] = {}

    def call(rows: int) -> None:
        results[rows] = pm(X[:rows])

    threads = [threading.Thread(target=call, args=(rows,)) for rows in (8, 5)]
    for thread in threads:
        thread.start()
        inside.wait()
    for thread in threads:
        thread.join()
    assert order == ["in", "out"] * 2
    assert all(torch.equal(x, expected(X[:rows])) for rows, x in results.items())
