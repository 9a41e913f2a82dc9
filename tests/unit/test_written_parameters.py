"""Frozen parameters that a forward writes, as momentum encoders are: state that a call renews; and ``p.data = ...``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.comparison import compare_with_eager
from autopar.comparison.in_process_ranks import run_step
from autopar.comparison.program_vs_eager import inputs_of, one_device, state_of
from autopar.errors import CaptureError
from autopar.lower.emit import lower
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.words.meshes import Mesh
from autopar.words.precision import Precision
from hardware_profiles import load_cluster

Forward = Callable[["Twins", Tensor], Tensor]
WAYS: dict[str, Forward] = {}
REFUSED: dict[str, tuple[Forward, str]] = {}


class Twins(nn.Module):
    """``q`` is trained, ``k`` is frozen and follows it."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.k.requires_grad_(False)
        self.register_buffer("mean", torch.randn(8))
        self.body = forward
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def way(fn: Forward) -> Forward:
    WAYS[fn.__name__] = fn
    return fn


def refused(match: str) -> Callable[[Forward], Forward]:
    def register(fn: Forward) -> Forward:
        REFUSED[fn.__name__] = fn, match
        return fn

    return register


def contrast(m: Twins, x: Tensor) -> Tensor:
    """What a momentum encoder is for."""
    with torch.no_grad():
        k = F.normalize(m.k(x), dim=1)
    return F.cross_entropy(F.normalize(m.q(x), dim=1) @ k.t(), torch.arange(len(x)))


@way
def moco(m: Twins, x: Tensor) -> Tensor:
    with torch.no_grad():
        for q, k in zip(m.q.parameters(), m.k.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1
    return contrast(m, x)


@way
def in_place(m: Twins, x: Tensor) -> Tensor:
    with torch.no_grad():
        for q, k in zip(m.q.parameters(), m.k.parameters(), strict=True):
            k.lerp_(q, 0.1)
    return contrast(m, x)


@way
def in_place_of_data(m: Twins, x: Tensor) -> Tensor:
    for q, k in zip(m.q.parameters(), m.k.parameters(), strict=True):
        k.data.mul_(0.9).add_(q.data, alpha=0.1)
    return contrast(m, x)


@way
def read_between_two_writes(m: Twins, x: Tensor) -> Tensor:
    first = m.k(x)
    m.k.weight.data = m.k.weight.data * 0.5
    second = m.k(x)
    with torch.no_grad():
        m.k.weight.mul_(2).add_(m.q.weight)
    return (m.q(x) * (first + second + m.k(x))).sum()


@way
def the_old_memory_stays(m: Twins, x: Tensor) -> Tensor:
    old, flat = m.k.weight.data, m.k.weight.view(-1)
    m.k.weight.data = old * 0.5 + m.q.weight.data
    return (m.q(x) * (m.k.weight - old).sum() * flat[:8]).sum() + m.k(x).sum()


@way
def the_new_memory_is_written_later(m: Twins, x: Tensor) -> Tensor:
    new = m.k.weight.data * 0.5
    m.k.weight.data = new
    new.add_(1)
    return (m.q(x) * m.k(x)).sum()


@way
def a_buffer_is_assigned(m: Twins, x: Tensor) -> Tensor:
    m.mean.data = m.mean * 0.9 + x.mean(0).detach()
    return (m.q(x) * m.mean).sum()


@way
def by_data_in_one_statement(m: Twins, x: Tensor) -> Tensor:
    m.k.weight.data *= 0.9
    m.k.weight.data += m.q.weight.data * 0.1
    return (m.q(x) * m.k(x)).sum()


@refused("parameter 'q.weight' in forward, which is trained, by values of the batch")
def one_that_is_trained(m: Twins, x: Tensor) -> Tensor:
    m.q.weight.data = m.q.weight.data * x.mean()
    return m.q(x).sum()


@refused("'k.weight' would have the memory of 'q.weight'")
def one_memory_for_two(m: Twins, x: Tensor) -> Tensor:
    m.k.weight.data = m.q.weight.data
    return (m.q(x) * m.k(x)).sum()


@refused("'k.bias' would have the memory of 'mean'")
def one_memory_for_two_that_are_written(m: Twins, x: Tensor) -> Tensor:
    new = m.q.bias.data * 2
    m.mean.data = new
    m.k.bias.data = new
    return (m.q(x) * m.k(x)).sum()


@refused(r"a tensor of torch.float32 and shape \(3, 8\), where there is one of torch.float64 and shape \(8, 8\)")
def another_shape(m: Twins, x: Tensor) -> Tensor:
    m.k.weight.data = torch.zeros(3, 8)
    return m.q(x).sum() + m.k(x).sum()


def rows(seed: int) -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", WAYS)
def test_equals_eager_over_two_batches(name: str) -> None:
    captured = capture(Twins(WAYS[name]), (rows(0),))
    cluster = load_cluster("local-x4")
    for plan in (one_device(captured.graph), plan_graph(captured.graph, cluster, Mesh.of(data=2, tensor=2))):
        model = Twins(WAYS[name])
        weights, state = state_of(captured, model)
        program = lower(captured.graph, plan)
        for seed in (1, 2):
            done = run_step(captured.graph, plan, program, weights, state, inputs_of(captured, (rows(seed),), {}))
            state.update(done.buffers)
            model.zero_grad()
            loss = model(rows(seed))
            loss.backward()
            assert captured.graph.loss is not None
            torch.testing.assert_close(done.outputs[captured.graph.loss], loss.detach(), rtol=1e-9, atol=1e-9)
            for key, param in model.q.named_parameters():
                torch.testing.assert_close(done.gradients[f"q.{key}"], param.grad, rtol=1e-9, atol=1e-9)
            for key in state:
                torch.testing.assert_close(state[key], model.state_dict()[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", WAYS)
def test_the_comparison_leaves_the_model_as_it_was(name: str) -> None:
    model = Twins(WAYS[name])
    before, memory = copy.deepcopy(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    captured = capture(model, (rows(0),))
    difference = compare_with_eager(captured, model, (rows(1),), {})
    assert not difference.note
    assert difference.worst < 1e-9
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == memory


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    forward, match = REFUSED[name]
    with pytest.raises(CaptureError, match=match):
        capture(Twins(forward), (rows(0),))


def test_in_less_precision_it_is_refused() -> None:
    model = Twins(moco).float()
    with pytest.raises(CaptureError, match=r"'k\.weight', which is kept in float32 and computed in bfloat16"):
        capture(model, (rows(0).float(),), precision=Precision())
