"""Compiled programs as explicit steps: what a training loop does to a module does the same to a compiled one.

Everything runs on one device with the backend ``eager``, which calls the operators of a step one by one, and is
compared with the same module not compiled: what is returned, gradients (also which there are), and buffers.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from procs.compiled_features import LeavesOut
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.errors import RunError
from autopar.lower.steps.adjoints import Adjoints
from autopar.lower.steps.building import build
from autopar.lower.steps.nodes import run_under_autograd
from autopar.runtime.stages.step_program import StepProgram

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Run = Callable[[Any], Any]


class Both(Function):
    """Two values at once, as parameters that are gathered together."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, b * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


def doubled_together(a: Tensor, b: Tensor) -> Any:
    return Both.apply(a, b)


def test_what_goes_through_together_has_no_gradients_where_none_comes() -> None:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    together = graph.call_function(doubled_together, (a, b))
    parts = [graph.call_function(operator.getitem, (together, k)) for k in range(2)]
    graph.output(tuple(graph.call_function(torch.ops.aten.sum.default, (x,)) for x in parts))
    module = torch.fx.GraphModule(nn.Module(), graph)
    values = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    for roots, wanted in ((None, [0, 1]), ([0], [0]), ([1], [1])):
        assert list(build(module, values, 2, Adjoints(), roots).grads) == wanted


class Net(nn.Module):
    """Three results that want gradients: a loss, another one, and what the loss is made of."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(dropout)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.drop(self.norm(self.a(x)).tanh())
        y = self.b(h)
        return y.square().mean(), h.abs().sum(), y


class Loss(nn.Module):
    """The first result of :class:`Net` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]


def both(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[Any, Any]:
    """A module compiled, and not compiled."""
    plain = autopar.parallelize(copy.deepcopy(model), 1, inputs or (X,), **options)
    pm = copy.deepcopy(plain)
    pm.compile(backend="eager")
    return pm, plain


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = list(a.values()), list(b.values())
    if isinstance(a, (tuple, list)):
        for one, other in zip(a, b, strict=True):
            same(one, other)
    elif isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)
    else:
        assert a == b


def compare(run: Run, model: nn.Module | None = None, *inputs: Tensor, **options: Any) -> None:
    """What is returned, gradients and buffers are the same."""
    found = []
    for pm in both(model or Net(), *inputs, **options):
        torch.manual_seed(3)
        found.append([run(pm), {n: p.grad for n, p in pm.named_parameters()}, dict(pm.named_buffers())])
    assert any(grad is not None for grad in found[1][1].values())
    same(*found)


def steps_of(pm: Any) -> list[StepProgram]:
    return [stage.run_program for stage in pm._autopar.stages.values()]


# --- backwards --------------------------------------------------------------------------------------------------------


def retained(pm: Any) -> Any:
    loss, *_ = pm(X)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def two_losses(pm: Any) -> Any:
    loss, other, y = pm(X)
    (loss + 2 * other + y.sum()).backward()
    return other.detach()


def two_roots(pm: Any) -> None:
    loss, other, _ = pm(X)
    torch.autograd.backward([loss, other])


def another_output(pm: Any) -> None:
    pm(X)[1].backward()


def transposed_gradient(pm: Any) -> None:
    """A gradient arrives that is neither contiguous nor has memory for each element."""
    y = pm(X)[2]
    y.backward(torch.arange(8.0, dtype=torch.float64).expand(5, 8).t())


def one_after_another(pm: Any) -> None:
    loss, other, y = pm(X)
    loss.backward(retain_graph=True)
    other.backward(retain_graph=True)
    y.sum().backward()


def two_calls_in_one_loss(pm: Any) -> None:
    (pm(X)[0] + pm(2 * X)[0]).backward()


def inputs(pm: Any) -> Any:
    x = X.clone().requires_grad_()
    loss, other, _ = pm(x)
    (loss + other).backward()
    return x.grad


def through_inputs(pm: Any) -> Any:
    scale = torch.ones(6, dtype=torch.float64, requires_grad=True)
    pm(X * scale)[0].backward()
    return scale.grad


def asked_for(pm: Any) -> Any:
    x = X.clone().requires_grad_()
    loss, other, _ = pm(x)
    of_loss = torch.autograd.grad(loss, [x, pm.a.weight], retain_graph=True)
    of_other = torch.autograd.grad(other, [x, *pm.parameters()], allow_unused=True)
    pm(X)[0].backward(inputs=[pm.b.weight])
    return of_loss, of_other


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "run",
    [
        retained, two_losses, two_roots, another_output, transposed_gradient, one_after_another, two_calls_in_one_loss,
        inputs, through_inputs, asked_for,
    ],
)  # fmt: skip
def test_backward(run: Run, again: bool) -> None:
    """Also where everything runs again in the backward."""
    compare(run, recompute=["*"] if again else [])


def test_second_backward() -> None:
    for pm in both(Net()):
        loss, other, _ = pm(X)
        loss.backward()
        for output in (loss, other):
            with pytest.raises(RuntimeError, match="retain_graph=True"):
                output.backward()


def test_no_backward_of_a_backward() -> None:
    pm, _ = both(Net())
    x = X.clone().requires_grad_()
    with pytest.raises(RunError, match=r"create_graph=True: a compiled program.*run it without compile\(\)"):
        torch.autograd.grad(pm(x)[0], x, create_graph=True)


def test_changes_between_forward_and_backward() -> None:
    """What the backward reads may not change, other things may."""
    for changed in (lambda pm, x: pm.b.weight, lambda pm, x: x):
        for pm in both(Net()):
            x = X.clone()
            loss, *_ = pm(x)
            with torch.no_grad():
                changed(pm, x).add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def unread(pm: Any) -> None:
        loss, *_ = pm(X)
        with torch.no_grad():
            pm.a.weight.add_(1)
        loss.backward()

    compare(unread)


# --- around a call ----------------------------------------------------------------------------------------------------


def modes(pm: Any) -> Any:
    with torch.no_grad():
        results = [*pm(X)]
    assert not any(x.requires_grad for x in results)
    pm.eval()
    with torch.inference_mode():
        results += [x.clone() for x in pm(X)]
    pm(X)[0].backward()
    pm.train()
    pm(X)[0].backward()
    return [x.detach().clone() for x in results]


def frozen(pm: Any) -> Any:
    pm.a.weight.requires_grad_(False)
    pm(X)[0].backward()
    found = [pm.a.weight.grad is None]
    for p in pm.parameters():
        p.requires_grad_(False)
    found.append(pm(X)[0].requires_grad)
    for p in pm.parameters():
        p.requires_grad_(True)
    pm(X)[0].backward()
    return found


def other_rows(pm: Any) -> None:
    for rows in (8, 5, 8, 3):
        pm(X[:rows])[0].backward()


def strided(pm: Any) -> Any:
    loss, _, y = pm(torch.randn(6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64).t())
    loss.backward()
    return y.detach(), y.stride()


def checkpointed(pm: Any) -> Any:
    x = X.clone().requires_grad_()
    checkpoint(lambda x: pm(x)[0], x, use_reentrant=True).backward()
    return x.grad


def anomaly(pm: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            pm(X)[0].backward()


def scaled(pm: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    scales = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(pm(X * factor)[0]).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p.detach() for p in pm.parameters()]


def hooks_of_parameters(pm: Any) -> Any:
    seen: list[str] = []
    pm.a.weight.register_hook(lambda grad: (seen.append("before"), 2 * grad)[1])
    pm.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    pm(X)[0].backward()
    return seen


def flops(pm: Any) -> list[int]:
    """The first call, which builds the step, counts no more than others."""
    counted = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            pm(X)[0].backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]
    return counted


@pytest.mark.parametrize(
    "run",
    [
        modes, frozen, other_rows, strided, checkpointed, anomaly, scaled, hooks_of_parameters, flops,
    ],
)  # fmt: skip
def test_around_a_call(run: Run) -> None:
    compare(run, Net(0.0 if run is scaled else 0.2))


def test_hooks_on_saved_tensors_see_what_the_step_saves() -> None:
    """Also in the first call, which builds the step: its text has none of what a hook does."""
    pm, plain = both(Net())
    found = []
    for module in (pm, plain):
        packed: list[Tensor] = []
        for keep in (lambda x: (packed.append(x), x.clone())[1], lambda x: x):  # noqa: B023
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                loss, *_ = module(X)
            loss.backward()
        with torch.autograd.graph.save_on_cpu():
            loss, *_ = module(X)
        loss.backward()
        assert packed
        found.append([p.grad for p in module.parameters()])
    same(*found)
    (program,) = steps_of(pm)
    (form,) = program.forms.values()
    assert "clone" not in form.functions.forward.text


def test_a_gradient_that_is_nan_is_told_in_anomaly_mode() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x).sqrt().sum()

    pm, _ = both(Root(), torch.ones(3))
    with pytest.warns(UserWarning), torch.autograd.detect_anomaly():
        loss = pm(torch.zeros(3))
        with pytest.raises(RuntimeError, match="returned nan values"):
            loss.backward()


def test_transforms_of_torch_func_are_refused() -> None:
    pm, plain = both(Net())
    for module in (pm, plain):
        module.eval()
    twice = torch.stack([X, X])
    assert torch.func.vmap(lambda x: plain(x)[0])(twice).shape == (2,)
    with pytest.raises(RunError, match=r"compile\(\) fixes its operators"):
        torch.func.vmap(lambda x: pm(x)[0])(twice)


@pytest.mark.filterwarnings("ignore:.*microbatch")
def test_microbatches() -> None:
    def run(pm: Any) -> Any:
        return [pm.train_step(X).detach() for _ in range(2)]

    compare(run, Loss(), microbatches=2)


def test_mixed_precision() -> None:
    def run(pm: Any) -> Any:
        loss, *_ = pm(X.float())
        loss.backward()
        return loss.detach()

    for again in ([], ["a", "b"]):
        compare(run, Net(0.1).float(), X.float(), precision="bf16-mixed", recompute=again)


# --- what models do ---------------------------------------------------------------------------------------------------


class Scale(Function):
    """Python state, an argument that is no tensor and comes first, and a gradient that is not the forward's."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return None, 2 * ctx.factor * grad


class Biased(Function):
    """A gradient in the shape of the result, which autograd sums up to that of the argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, grad


class TwoResults(Function):
    """No gradient for an argument that would take one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(y)
        return x * y, x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad * y + other, None


class Unfilled(Function):
    """Gradients that do not come are None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> Any:  # type: ignore[override]
        assert other is None
        return None if grad is None else 2 * grad


def hooked(h: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    h = h.tanh()
    h.register_hook(hook)
    return h


OWN_CODE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "state": lambda h, bias: Scale.apply(3.0, h),
    "in turn": lambda h, bias: Scale.apply(3.0, Scale.apply(2.0, h)),
    "summed up": lambda h, bias: Biased.apply(h, bias),
    "two results": lambda h, bias: sum(TwoResults.apply(h, bias)),
    "a result that is not read": lambda h, bias: TwoResults.apply(h, bias)[0],
    "gradients that are not filled in": lambda h, bias: Unfilled.apply(h)[0],
    "a hook that changes": lambda h, bias: hooked(h, lambda grad: grad.clamp(-1e-3, 1e-3)),
    "a hook that looks": lambda h, bias: hooked(h, lambda grad: None),
}


class OwnCode(nn.Module):
    """A model with Python code between its layers, which autograd differentiates when it runs."""

    def __init__(self, between: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between = OWN_CODE[between]
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x), self.b.bias)).square().mean()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("between", OWN_CODE)
def test_own_code(between: str, again: bool) -> None:
    def run(pm: Any) -> Any:
        x = X.clone().requires_grad_()
        loss = pm(x)
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    compare(run, OwnCode(between), recompute=["*"] if again else [])


def test_one_graph_of_own_code_is_refused() -> None:
    with pytest.raises(RunError, match=r"compile\(fullgraph=True\): .* the model's own Python code, Scale"):
        autopar.parallelize(OwnCode("state"), 1, (X,), compile={"backend": "eager", "fullgraph": True})


@pytest.mark.parametrize("again", [False, True])
def test_layers_that_are_left_out_have_no_gradients(again: bool) -> None:
    def run(pm: Any) -> Any:
        found = []
        for _ in range(5):
            pm.zero_grad()
            loss = pm(X)
            if loss.requires_grad:
                loss.backward()
            found.append([loss.detach(), *(p.grad for p in pm.parameters())])
        assert len({tuple(x is None for x in each) for each in found}) > 1
        return found

    compare(run, LeavesOut(), recompute=["layers.*"] if again else [])


class Words(nn.Module):
    """Tied parameters, a buffer that counts and one that is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4, 6))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids).tanh()
        self.count += 1
        self.last = h.detach()
        return cross_entropy(self.out(h), ids) * self.count


def test_tied_parameters_and_written_buffers() -> None:
    ids = torch.tensor([1, 2, 2, 9])

    def run(pm: Any) -> Any:
        loss, other = pm(ids), pm(ids)
        (loss + other).backward()
        return other.detach()

    compare(run, Words(), ids)


class Recurrent(nn.Module):
    """A cell that writes to its own memory: what was there is read by its backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(2, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(8, 3)
        for part in x.split(2, 1):
            h = self.cell(part, h)
        return h.square().sum()


@pytest.mark.parametrize("again", [False, True])
def test_memory_that_a_call_writes_to(again: bool) -> None:
    compare(lambda pm: pm(X).backward(), Recurrent(), recompute=["*"] if again else [])


class Convolutions(nn.Module):
    """No biases: their operators decline some gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(1, 4, 3, bias=False), nn.LayerNorm(4, elementwise_affine=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.unsqueeze(1))).square().mean()


class Masked(nn.Module):
    """Rows that a mask chooses are written: how many the backward reads depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.token = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[x[:, 0] > 0] = self.token
        return h.square().sum()


class Normed(nn.Module):
    """A norm to which gradients arrive across rows: its kernel takes them along rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.out = nn.Conv1d(1, 4, 1), nn.GroupNorm(2, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.conv(x.unsqueeze(1)))
        return self.out(h.transpose(1, 2)).square().mean(), h


def test_gradients_that_lie_otherwise_than_results() -> None:
    compare(lambda pm: pm(X)[0].backward(), Normed())
    weight = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    compare(lambda pm: (pm(X)[1].transpose(1, 2) * weight).sum().backward(), Normed())


@pytest.mark.parametrize("model, n_outside", [(Convolutions, 0), (Recurrent, 0), (Masked, 1)])
def test_calls_that_autograd_differentiates_when_they_run(model: type[nn.Module], n_outside: int) -> None:
    """They are few: the model's own Python, and what depends on data."""
    compare(lambda pm: pm(X).backward(), model())
    pm, _ = both(model())
    pm(X).backward()
    (program,) = steps_of(pm)
    (form,) = program.forms.values()
    assert form.functions.forward.text.count(run_under_autograd.__name__) == n_outside
