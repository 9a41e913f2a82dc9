"""Parts of a parallel module are chosen by class and have plain attributes, as the model's own modules; one device."""

from __future__ import annotations

import collections
import copy
import types
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import ParallelModule
from autopar.errors import RunError


class Net(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.first, self.norm, self.act = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()
        self.twice = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.again = self.twice if shared else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.twice(self.act(self.norm(self.first(self.drop(x)))))).square().mean()


X = torch.randn(6, 4)


def decays(model: nn.Module) -> tuple[list[str], list[str]]:
    """minGPT's groups: names of weights of linear layers, and of norms."""
    decay, keep = [], []
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            (decay if isinstance(module, nn.Linear) and name == "weight" else keep).append(f"{path}.{name}")
    return decay, keep


def test_loops_meet_modules_by_class() -> None:
    model = Net(shared=True)
    before, state = decays(model), list(model.state_dict())
    classes = [(path, module.__class__.__name__) for path, module in model.named_modules()]
    pm: Any = autopar.parallelize(model, 1, X)
    assert decays(pm) == before and before[0] == ["first.weight", "twice.0.weight"]
    assert isinstance(pm, ParallelModule) and isinstance(pm, Net)
    assert [(path, module.__class__.__name__) for path, module in pm.named_modules()] == classes
    assert pm.twice is pm.again and list(pm.state_dict()) == state
    assert repr(pm.first) == "Linear(in_features=4, out_features=8, bias=False)"
    copied = copy.deepcopy(pm)
    assert isinstance(copied.first, nn.Linear) and copied.first.weight is not pm.first.weight
    pm.load_state_dict(Net(shared=True).state_dict())
    pm(X).backward()


def test_plain_attributes_are_the_models() -> None:
    pm: Any = autopar.parallelize(Net(), 1, X)
    assert (pm.first.in_features, pm.first.bias, pm.norm.eps, pm.drop.p) == (4, None, 1e-5, 0.0)
    for part in pm.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    with pytest.raises(RunError, match=r"'drop\.p' is 0\.5, and was 0\.0"):
        pm(X)
    pm.drop.p = 0.0
    pm.first.note = "nobody reads it"
    assert pm.first.note and not hasattr(pm.first, "other")
    pm(X).backward()
    with pytest.raises(RunError, match=r"Linear.reset_parameters\(\) has written to first.weight"):
        pm.first.reset_parameters()
    with pytest.raises(RunError, match="forward of 'act' was replaced"):
        pm.act.forward = torch.tanh
    with pytest.raises(RunError, match="module 'act' of a parallel module was replaced by a Tanh"):
        pm.act = nn.Tanh()
    with pytest.raises(RunError, match="cannot be called alone"):
        pm.first(X)
    met: list[nn.Module] = []
    assert pm.twice.apply(met.append) is pm.twice
    assert met[-1] is pm.twice and met == [*pm.twice.children(), pm.twice]


class Lists(nn.Module):
    """torch's lists and dicts of modules and parameters, and a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
        self.heads = nn.ModuleDict({"one": nn.Linear(2, 2)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.names = ["first", "second"]

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (factor * self.scales[0] * self.heads["one"](x)).square().mean()


def test_lists_and_dicts_of_modules_are_read() -> None:
    pm: Any = autopar.parallelize(Lists(), 1, (X, 0.5))
    assert [layer.out_features for layer in pm.layers] == [4, 2] and len(pm.layers) == 2
    assert pm.layers[-1] is pm.layers[1] and [*pm.layers[:1]] == [pm.layers[0]]
    assert pm.scales[0] is pm.get_parameter("scales.0")
    assert "one" in pm.heads and list(pm.heads) == ["one"] and pm.heads["one"].weight.shape == (2, 2)
    assert bool(pm.heads["one"]) and bool(pm.layers) and pm.names == ["first", "second"]
    with pytest.raises(IndexError):
        pm.layers[2]
    with pytest.raises(RunError, match=r"input args\[1\]: captured with 0\.5, called with 0\.7 .*torch\.tensor"):
        pm(X, 0.7)
    pm = autopar.parallelize(Lists(), 1, (X, torch.tensor(0.5)))
    assert pm(X, torch.tensor(0.7)) != pm(X, torch.tensor(0.5))


class Policy(Net):
    """Keeps what happened in an episode, and a config, as scripts of reinforcement learning do."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[torch.Tensor] = []
        self.held = [torch.ones(1)]
        self.config = types.SimpleNamespace(width=4, names={"a"}, queue=collections.deque([1]))
        self.config.itself = self.config


def test_what_a_script_puts_into_lists_of_the_model_is_read() -> None:
    pm: Any = autopar.parallelize(Policy(), 1, (X,))
    for _ in range(2):
        pm.saved.append(pm(X))
    assert len(pm.saved) == 2 and pm.saved[0].requires_grad and pm.config.width == 4
    del pm.saved[:]
    copy.deepcopy(pm).config.queue.append(2)
    assert pm.saved == [] and len(pm.config.queue) == 1 and len(pm.held) == 1


def test_a_model_that_is_a_sequence_is_read_as_one() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    pm: Any = autopar.parallelize(model, 1, (X,), loss_fn=lambda out: out.square().mean())
    for module in (pm, copy.deepcopy(pm)):
        assert len(module) == 4 and module[2].__class__.__name__ == "ReLU"
        assert isinstance(module[1], nn.BatchNorm1d) and module[-1].out_features == 2 and bool(module)
        assert module[0].weight is module.get_parameter("0.weight") and [*module[1:3]] == [module[1], module[2]]
        assert torch.equal(module[1].running_mean, module.get_buffer("1.running_mean"))


def test_a_mode_of_a_part_is_refused_where_it_differs_and_calls_are_not_followed() -> None:
    pm: Any = autopar.parallelize(Net(), 1, X, shapes="fixed")
    norms = [m for m in pm.modules() if isinstance(m, nn.BatchNorm1d)]
    assert len(norms) == 1
    norms[0].train()
    for change in (norms[0].eval, pm.drop.eval):
        with pytest.raises(RunError, match=r"eval\(\) of parts .*'fixed' keeps the program"):
            change()
    assert pm.drop.training and norms[0].training
    model = Net()
    model.norm.eval()
    pm = autopar.parallelize(model, 1, X, shapes="fixed")
    pm.norm.eval()  # as it was captured
    with pytest.raises(RunError, match=r"train\(\) or eval\(\) of parts"):
        pm.norm.train()


def test_a_part_is_captured_again_with_its_new_number() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    pm: Any = autopar.parallelize(model, 1, X, on_change="recapture")
    pm(X), twin(X)
    for part in pm.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eps = twin.norm.eps = 0.5
    torch.testing.assert_close(pm(X), twin(X))


class Trainer(Net):
    """A model with a method of its own, as of Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.held = 4, [torch.zeros(1)]

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def test_the_models_methods_and_attributes() -> None:
    model = Trainer()
    pm: Any = autopar.parallelize(model, 1, X)
    assert pm.width == 4 and len(pm.held) == 1 and not hasattr(pm, "nothing")
    with pytest.raises(RunError, match=r"Trainer.training_step\(\) gives a tensor with a gradient[^$]*model.net = "):
        pm.training_step(X)
    assert pm.module is pm
    with pm.no_sync():
        pm(X).backward()
    pm(X).backward()
    copied = copy.deepcopy(pm)
    pm.eval()
    copied.eval()
    with torch.no_grad():
        assert torch.equal(copied.training_step(X), pm(X))


def test_a_recurrent_layer_is_told_where_its_weights_lie() -> None:
    """``flatten_parameters()``, which scripts call after loading, has nothing to do."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0].square().mean()

    pm = autopar.parallelize(Recurrent(), 1, torch.randn(3, 2, 4))
    pm.rnn.flatten_parameters()
    pm(torch.randn(3, 2, 4)).backward()
    assert all(p.grad is not None for p in pm.parameters())


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None: ...


def test_an_extra_state_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"^0 of the model has an extra state .* which is not in state_dict"):
        autopar.parallelize(nn.Sequential(WithExtraState(4, 4)), 1, torch.randn(2, 4))


class Bare(nn.Module):
    """Registers what it has not: a mask, a bias, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        for module in (self, self.inner):
            module.register_buffer("mask", None)
            module.register_module("head", None)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) if self.mask is None else self.inner(x) * self.mask
        return y.square().mean() if self.bias is None else (y + self.bias).square().mean()


def test_what_is_registered_as_none_is_none() -> None:
    model = Bare()
    pm: Any = autopar.parallelize(model, 1, X, on_change="recapture")
    copied = copy.deepcopy(pm)
    for each in (pm, copied):
        for owner in (each, each.inner):
            assert owner.mask is owner.head is owner.bias is None and "mask" in dir(owner)
            with pytest.raises(RunError, match="mask' of a parallel module was set, which is None in the model"):
                owner.mask = torch.ones(4)
            with pytest.raises(RunError, match="head' of a parallel module was set"):
                owner.head = nn.Linear(4, 4)
            owner.head = owner.bias = None
        with pytest.raises(RunError, match=r"bias of 'inner' was registered on a parallel module"):
            each.inner.register_parameter("bias", nn.Parameter(torch.ones(4)))
        assert list(each.state_dict()) == ["inner.weight"] and list(dict(each.named_modules())) == ["", "inner"]
        each.load_state_dict(Bare().state_dict())
        assert float(each(X)) > 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def test_another_parameter_that_the_program_would_not_read_is_refused() -> None:
    tokens = torch.arange(6)
    model: Any = Tied()
    autopar.parallelize(model, 1, tokens)
    before = model(tokens)
    model.head.weight = model.embed.weight  # tied again
    for owner, said in ((model.head, "head.weight.*tied to embed.weight"), (model.embed, "embed.weight.*tied to head")):
        with pytest.raises(RunError, match=f"parameter '{said}"):
            owner.weight = nn.Parameter(torch.zeros(6, 4))
        with pytest.raises(RunError, match=f"parameter '{said}"):
            owner.register_parameter("weight", nn.Parameter(torch.zeros(6, 4)))
    assert model.head.weight is model.embed.weight and torch.equal(model(tokens), before)
    with pytest.raises(RuntimeError, match="without assign=True"):
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    bias = model.head.bias.detach().clone()
    model.head.bias = nn.Parameter(bias + 1)  # the program reads it
    torch.testing.assert_close(model(tokens), before + 1)


def test_a_parameter_set_to_none_is_refused() -> None:
    model: Any = Tied()
    autopar.parallelize(model, 1, torch.arange(6))
    for sets in (lambda: setattr(model.head, "bias", None), lambda: model.head.register_parameter("bias", None)):
        with pytest.raises(RunError, match=r"parameter 'head.bias' of a parallel module was set to None"):
            sets()
    model.head._parameters["bias"] = None
    with pytest.raises(RunError, match=r"parameter 'head.bias' was set to None or taken out of the model"):
        model(torch.arange(6))


def test_what_records_or_transforms_the_model_is_refused() -> None:
    pm: Any = autopar.parallelize(Net(), 1, X)
    with pytest.raises(RunError, match=r"torch.export of a parallel module: .* copy"):
        torch.export.export(pm, (X,))
    with pytest.raises(RunError, match=r"torch.fx.symbolic_trace of a parallel module: .* copy"):
        torch.fx.symbolic_trace(pm)
    given = {name: param.detach() for name, param in pm.named_parameters()}
    with pytest.raises(RunError, match=r"called within torch.func \(vmap, grad, jvp, jacrev\).* copy"):
        torch.func.grad(lambda params: torch.func.functional_call(pm, params, (X,)))(given)
    with pytest.raises(RunError, match="qconfig of the Net was set, with which torch"):
        torch.ao.quantization.quantize_dynamic(pm, {nn.Linear})
    pm(X).backward()
