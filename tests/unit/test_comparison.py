"""A captured graph is compared with the model itself: what differs is named, and the model stays as it was."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import ZOO

import autopar
from autopar import api, comparison
from autopar.capture import capture
from autopar.comparison import compare_with_eager
from autopar.comparison.other_batch import other_batch
from autopar.comparison.program_vs_eager import (
    Trained,
    against_eager,
    beside_rounding,
    compare,
    doubled,
    inputs_of,
    one_device,
    promoted,
    state_of,
    train,
    verify,
)
from autopar.errors import CaptureError
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x):
        noise = 0.9 + 0.2 * torch.rand_like(x) if self.training else 1.0
        return x + self.drop(F.gelu(self.norm(self.up(x)))) * noise


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(8, 8)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.second(self.first(x))), y)


class Plain(nn.Module):
    """Without random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x, y):
        return F.cross_entropy(self.second(torch.tanh(self.norm(self.first(x)))), y)


def changed(graph: Graph, target: str, args) -> Graph:
    """The graph with other arguments of an operator, as a wrong capture would have."""
    nodes = list(graph.nodes)
    i = next(i for i, n in enumerate(nodes) if n.target == target)
    nodes[i] = replace(nodes[i], args=args(nodes[i].args))
    return replace(graph, nodes=tuple(nodes))


QUICK = ("gpt2", "bert_masked", "resnet", "unet")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ZOO])
def test_the_zoo_on_a_second_batch(name):
    """Other values, padding and labels than those that it was captured with."""
    case = ZOO[name]()
    captured = capture(case.model, case.args, case.kwargs)
    for args, kwargs in (case.batch, case.batch2):
        found = compare_with_eager(captured, case.model, args, kwargs, bounded=False)
        assert not found.note and found.same and found.worst < 1e-6, found


@pytest.mark.parametrize("name", ["bert_masked", "transformer_encoder"])
def test_dropout_draws_the_same_on_both_sides(name):
    case = ZOO[name](dropout=0.2)
    captured = capture(case.model, case.args, case.kwargs)
    found = compare_with_eager(captured, case.model, *case.batch2, bounded=False)
    assert not found.note and found.worst < 1e-6


def test_a_wrong_operator_is_found_in_its_module():
    model = Plain()
    captured = capture(model, (X, Y))
    wrong = changed(captured.graph, "aten.batch_norm.default", lambda a: (*a[:7], 0.5, *a[8:]))  # another epsilon
    with pytest.raises(
        CaptureError, match=r"the first module whose output differs is 'norm' \(BatchNorm1d\)"
    ) as caught:
        compare_with_eager(replace(captured, graph=wrong), model, (X, Y), {})
    assert "the loss by" in str(caught.value) and "verify_capture=False" in str(caught.value)


def test_a_lost_gradient_is_found():
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -grad

    class Reversal(Plain):
        def forward(self, x, y):
            return F.cross_entropy(self.second(Reversed.apply(self.first(x))), y)

    captured, model = capture(Plain(), (X, Y)), Reversal()

    class Straight(Plain):
        def forward(self, x, y):
            return F.cross_entropy(self.second(self.first(x)), y)

    captured = capture(Straight(), (X, Y))  # what a trace through the backward would give
    with pytest.raises(
        CaptureError, match=r"first gradient that differs is that of first\.(weight|bias), in module 'first'"
    ):
        compare_with_eager(captured, model, (X, Y), {})


def test_a_buffer_that_is_not_updated_is_found():
    model = Plain()
    captured = capture(model, (X, Y))
    wrong = changed(captured.graph, "aten.batch_norm.default", lambda a: (*a[:6], 0.5, *a[7:]))  # another momentum
    with pytest.raises(CaptureError, match=r"they differ in buffer norm\.running_(mean|var) by"):
        compare_with_eager(replace(captured, graph=wrong), model, (X, Y), {})


def test_nothing_of_the_model_changes():
    model = Model()
    model.first.up.weight.grad = torch.ones(8, 8)
    calls = []
    model.second.up.weight.register_hook(lambda g: calls.append(1))
    model.second.up.bias.register_post_accumulate_grad_hook(lambda p: calls.append(2))
    captured = capture(model, (X, Y))
    before, states = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
    numbers, attributes = np.random.get_state()[1].copy(), {n: dict(vars(m)) for n, m in model.named_modules()}
    buffers = dict(model.named_buffers())
    found = compare_with_eager(captured, model, (X, Y), {})
    assert found.worst < 1e-6 and not found.note
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(b is buffers[n] for n, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == numbers).all()
    assert attributes == {n: dict(vars(m)) for n, m in model.named_modules()}
    assert torch.equal(model.first.up.weight.grad, torch.ones(8, 8)) and model.second.up.weight.grad is None
    assert not calls
    (model(X, Y)).backward()
    assert sorted(calls) == [1, 2]  # hooks are back


def test_what_is_not_compared_says_why(monkeypatch):
    model = Plain()
    captured = capture(model, (X, Y))
    assert "no values" in compare_with_eager(captured, copy.deepcopy(model).to("meta"), (X, Y), {}).note
    assert "IndexError" in compare_with_eager(captured, model, (X, Y + 100), {}).note
    monkeypatch.setitem(comparison.FLOPS, "cpu", 1.0)
    assert "take long" in compare_with_eager(captured, model, (X, Y), {}).note
    assert not compare_with_eager(captured, model, (X, Y), {}, bounded=False).note


def test_parallelize_says_that_it_did_not_compare(recwarn):
    with pytest.warns(UserWarning, match="not compared with the model: the model itself fails on these inputs"):
        autopar.parallelize(Plain(), 1, (X, Y + 100))
    recwarn.clear()
    autopar.parallelize(Plain(), 1, (X, Y))
    autopar.parallelize(Plain(), 1, (X, Y + 100), verify_capture=False)
    assert not [w for w in recwarn if "not compared" in str(w.message)]


def test_rounding_alone_is_no_difference(monkeypatch):
    """In low precision a difference counts only if it does not vanish in double precision."""

    class Rounded(Plain):
        def forward(self, x, y):
            return F.cross_entropy(self.second(torch.tanh(self.norm(self.first(x)) * 3 / 7)), y)

    class Otherwise(Plain):
        def forward(self, x, y):
            return F.cross_entropy(self.second(torch.tanh(self.norm(self.first(x)) * (3 / 7))), y)

    model = Rounded()
    captured = capture(Otherwise(), (X, Y))
    monkeypatch.setitem(comparison.LIMITS, "float32", 2e-9)
    found = compare_with_eager(captured, model, (X, Y), {})
    assert found.same and 2e-9 < found.worst < 1e-4  # of a bias before a norm, whose gradient is rounding alone
    wrong = replace(captured, graph=changed(captured.graph, "aten.mul.Tensor", lambda a: (a[0], 0.4286)))
    with pytest.raises(CaptureError, match="the loss by"):
        compare_with_eager(wrong, model, (X, Y), {})


def test_a_loss_function_and_no_loss():
    captured = capture(nn.Linear(8, 8), (X,), loss_fn=F.mse_loss, targets=(X,))
    assert compare_with_eager(captured, nn.Linear(8, 8), (X,), {}, (X,)).worst == 0
    weighted = nn.CrossEntropyLoss(weight=torch.arange(8.0))
    assert compare_with_eager(capture(nn.Linear(8, 8), (X,), loss_fn=weighted, targets=(Y,)), nn.Linear(8, 8), (X,), {},
                              (Y,)).worst < 1e-6  # fmt: skip
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    assert compare_with_eager(capture(model, (X,)), model, (X,), {}).worst == 0
    wrong = changed(capture(model, (X,)).graph, "aten.linear.default", lambda a: a[:2])
    with pytest.raises(CaptureError, match=r"module whose output differs is '0' \(Linear\)"):
        compare_with_eager(replace(capture(model, (X,)), graph=wrong), model, (X,), {})


def test_parallelize_refuses_a_wrong_capture(monkeypatch):
    model = Plain()
    captured = capture(model, (X, Y))
    wrong = changed(captured.graph, "aten.batch_norm.default", lambda a: (*a[:7], 0.5, *a[8:]))
    monkeypatch.setattr(api, "capture", lambda *a, **k: replace(captured, graph=wrong))
    try:
        with pytest.raises(CaptureError, match="differs is 'norm'"):
            autopar.parallelize(copy.deepcopy(model), 1, (X, Y))
        autopar.parallelize(model, 1, (X, Y), verify_capture=False)
    finally:
        torch.distributed.destroy_process_group()


def test_another_batch():
    ids, mask, labels = (
        torch.arange(24).reshape(4, 6),
        torch.ones(4, 6, dtype=torch.long),
        torch.arange(24).reshape(4, 6),
    )
    batch = (X,), {"input_ids": ids, "attention_mask": mask, "labels": labels, "scale": 2.0, "flags": mask.bool()}
    (x,), kwargs = other_batch(batch)
    assert x.shape == X.shape and not torch.equal(x, X) and abs(x.mean() - X.mean()) < 1
    assert sorted(kwargs["input_ids"].flatten().tolist()) == list(range(24)) and not torch.equal(
        kwargs["input_ids"], ids
    )
    lengths = kwargs["attention_mask"].sum(1)
    assert 1 <= lengths.min() < 6 and kwargs["attention_mask"].dtype == mask.dtype
    assert (kwargs["attention_mask"].diff(dim=1) <= 0).all()  # padding is at the end
    assert kwargs["flags"].dtype == torch.bool and kwargs["scale"] == 2.0
    assert (kwargs["labels"] == -100).any() and (other_batch(batch, ignored=False)[1]["labels"] >= 0).all()


def test_what_the_first_batch_baked_in_shows_on_another():
    """The mask of the example is all ones, and this capture has lost it."""

    class Masked(nn.Module):
        def __init__(self, use: bool) -> None:
            super().__init__()
            self.linear, self.use = nn.Linear(6, 6), use

        def forward(self, x, mask):
            return (self.linear(x) * mask if self.use else self.linear(x)).square().mean()

    batch = (torch.randn(4, 6), torch.ones(4, 6, dtype=torch.long)), {}
    model = Masked(True)
    lost = capture(Masked(False), *batch)
    assert compare_with_eager(lost, model, *batch).same
    with pytest.raises(CaptureError, match="the loss by"):
        compare_with_eager(lost, model, *other_batch(batch))


def test_a_nan_or_another_imaginary_part_of_one_side_is_not_hidden_by_what_agrees():
    def trained(first: torch.Tensor, loss: float = 1.0) -> Trained:
        gradients = {"first": first, "second": torch.ones(3)}
        return Trained([torch.tensor(loss), torch.tensor(1.0)], gradients, gradients, {})

    good, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert compare("plan", trained(good), trained(good)).worst == 0.0
    for mine, reference in ((trained(nan), trained(good)), (trained(good), trained(nan))):
        difference = compare("plan", mine, reference)
        assert difference.worst == difference.gradient == difference.weight == float("inf")
        assert difference.gradient_of == difference.weight_of == "first"
    assert compare("plan", trained(good, float("nan")), trained(good)).worst == float("inf")
    assert compare("plan", trained(good + 0.5j), trained(good + 0j)).gradient > 0.4


class Magnifying(nn.Module):
    """Makes the first digit of the last."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(8, 1), factor

    def forward(self, x):
        return (self.factor * self.inner(x)).sin().mean()


def test_a_difference_says_how_far_rounding_moves_one_device():
    graphs = []
    for factor in (1e12, 1.0):
        torch.manual_seed(0)
        model = Magnifying(factor)
        captured = capture(model, (X,))
        rows = verify(captured, model, (X,), {}, Mesh.of(data=2), load_cluster("local-x2"), random_plans=4)
        graphs.append((captured, model, max(rows, key=lambda row: row.worst)))
    (_, _, shaken), (captured, model, firm) = graphs
    assert shaken.worst > 1e-9 and shaken.rounding > 1e-3 and shaken.shows_nothing
    assert firm.worst < 1e-12 and not firm.rounding and not firm.shows_nothing
    # a defect is not taken for rounding: one device stays where it is
    double = promoted(captured)
    weights, inputs = doubled(state_of(captured, model)[0]), doubled(inputs_of(captured, (X,), {}))

    def one(weights_now, shaken=False):
        return train(double, one_device(double.graph), weights_now, {}, inputs, shaken=shaken)

    reference = one(weights)
    off = one({name: (weight.detach() + 1e-3).requires_grad_() for name, weight in weights.items()})
    wrong = beside_rounding(compare("off", off, reference), reference, one, weights)
    assert wrong.worst > 1e-9 and 0.0 < wrong.rounding < 1e-12 and not wrong.shows_nothing and not wrong.fine


class Tiny(nn.Module):
    """A norm of what varies in its last digits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, eps=1e-30)

    def forward(self, x):
        return (self.norm(self.inner(x) * 1e-9 + 1) * x).square().mean()


class NoGradient(nn.Module):
    """A mean of what a norm gives is the same whatever the weights are: all gradients are rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False)

    def forward(self, x):
        return self.norm(self.inner(x)).mean()


MAGNIFYING = {"sines": lambda: Magnifying(1e8), "less": lambda: Magnifying(1e6), "a norm": Tiny,
              "no gradient": NoGradient}  # fmt: skip


@pytest.mark.parametrize("name", MAGNIFYING)
def test_rounding_that_is_one_devices_own_is_no_defect(name):
    torch.manual_seed(0)
    model = MAGNIFYING[name]()
    rows = verify(capture(model, (X,)), model, (X,), {}, Mesh.of(data=2), load_cluster("local-x2"), random_plans=5)
    assert all(row.fine for row in rows) and any(row.worst > row.limit for row in rows)
    for rounding in (float("inf"), float("nan")):
        assert not replace(rows[-1], loss=float("inf"), rounding=rounding).fine


def test_the_row_of_eager_mode_is_judged_in_double_precision(monkeypatch):
    class Rounded(Plain):
        def forward(self, x, y):
            return F.cross_entropy(self.second(torch.tanh(self.norm(self.first(x)) * 3 / 7)), y)

    class Otherwise(Plain):
        def forward(self, x, y):
            return F.cross_entropy(self.second(torch.tanh(self.norm(self.first(x)) * (3 / 7))), y)

    monkeypatch.setitem(comparison.LIMITS, "float32", 2e-9)
    (row,) = against_eager(capture(Otherwise(), (X, Y)), Rounded(), (X, Y), {})
    assert row.worst > 2e-9 and row.fine


class Remembering(nn.Module):
    """Keeps the scales that its calls make, by width, and counts calls in a buffer that its loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(4, 4), {}
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.scales:
            self.scales[x.shape[1]] = torch.arange(4.0)
        self.calls.mul_(2)
        return (self.linear(x) * self.scales[x.shape[1]] * self.calls).square().mean()


def test_buffers_begin_anew_behind_a_call_that_fills_caches() -> None:
    model, x = Remembering(), torch.ones(2, 4)
    captured = capture(model, (x,))
    assert captured.guards.filled
    assert not compare_with_eager(captured, model, (x,), {}).note
    assert float(model.calls) == 1.0


def test_containers_that_cannot_be_changed_are_left_alone() -> None:
    class Fixed(dict[str, Any]):
        """As the configuration of a model of diffusers."""

        def _refused(self, *_: Any, **__: Any) -> None:
            raise TypeError("this dict cannot be changed")

        clear = update = _refused  # type: ignore[assignment]

    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.linear = Fixed(activation=nn.ReLU()), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.config["activation"](self.linear(x)).sum()

    model = Configured()
    assert compare_with_eager(capture(model, (X,)), model, (X + 1,), {}).same
