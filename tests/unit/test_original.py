"""What ``parallelize`` returns is the model itself: whoever holds it sees it train; old parameters refuse any use."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import autopar
from autopar.errors import RunError

X = torch.arange(12.0).reshape(3, 4) / 7


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def made(**options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    return model, autopar.parallelize(model, 1, X, loss_fn=lambda out: out.square().mean(), **options)


def trained(pm: Any) -> Any:
    pm.train_step(X, optimizer=torch.optim.AdamW(pm.parameters()))
    return pm


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_it_is_the_model() -> None:
    class_before = Net
    model = Net()
    parts = dict(model.named_modules())
    names = [name for name, _ in model.named_parameters()]
    pm = autopar.parallelize(model, 1, X, loss_fn=lambda out: out.square().mean())
    assert pm is model and isinstance(pm, class_before) and isinstance(pm, autopar.ParallelModule)
    assert (type(pm).__name__, type(pm).__qualname__, type(pm).__module__) == ("Net", "Net", __name__)
    assert dict(pm.named_modules()) == parts and [name for name, _ in pm.named_parameters()] == names
    assert type(pm[0]).__name__ == "Linear" and repr(pm) == repr(Net())
    assert [key for key in vars(pm) if key.startswith("_autopar")] == ["_autopar"]


def test_who_holds_the_model_sees_it_train() -> None:
    torch.manual_seed(0)
    model = Net()
    average = AveragedModel(model)
    pm = autopar.parallelize(model, 1, X, loss_fn=lambda out: out.square().mean())
    before = copy.deepcopy(average.module.state_dict())
    trained(pm)
    average.update_parameters(model)
    for name, value in average.module.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])  # the first update copies
        assert not torch.equal(value, before[name])


USES: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "step": lambda p: torch.optim.SGD([p], lr=0.1).step(),
    "fused": lambda p: torch.optim.AdamW([p], fused=True).step(),
    "zero_grad": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(),
    "arithmetic": lambda p: p * 2,
    "norm": lambda p: torch._foreach_norm([p]),
    "data": lambda p: p.data,
    "grad": lambda p: p.grad,
    "write": lambda p: nn.init.zeros_(p),
    "freeze": lambda p: p.requires_grad_(False),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("use", USES)
def test_old_parameters_refuse_any_use(use: str) -> None:
    model = Net()
    old = model[0].weight
    pm = autopar.parallelize(model, 1, X)
    with pytest.raises(RunError, match=r"'0\.weight' of before parallelize is used(.|\n)*optimizer=optimizer"):
        USES[use](old)
    assert old.shape == (8, 4) and old.numel() == 32 and "Parameter" in repr(type(old)) and old is not pm[0].weight
    assert {old: 1}[old] == 1


def test_their_memory_is_freed() -> None:
    model = Net()
    seen = weakref.ref(model[0].weight.untyped_storage())
    pm = autopar.parallelize(model, 1, X)
    gc.collect()
    assert seen() is None and pm[0].weight.untyped_storage().nbytes() == 128


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "module": (lambda model: setattr(model, "2", nn.Linear(8, 4)), "module '2' .* was replaced by a Linear"),
    "added": (lambda model: model.append(nn.ReLU()), "module '3' .* was added"),
    "class": (lambda model: setattr(model[0], "__class__", nn.Bilinear), "__class__' .* was replaced"),
    "parametrized": (lambda m: nn.utils.parametrizations.weight_norm(m[0]), "weight of '0' was deleted"),
    "forward": (lambda model: setattr(model[0], "forward", torch.tanh), "forward of '0' was replaced"),
    "hook": (lambda model: model[0].register_forward_hook(print), "would never run"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_program_would_go_on_without_is_refused(name: str) -> None:
    _, pm = made()
    change, text = CHANGES[name]
    before = pm(X)
    with pytest.raises(RunError, match=text):
        change(pm)
    torch.testing.assert_close(pm(X), before, rtol=0, atol=0)
    pm.note = pm[0].note = "forward does not read it"


def test_it_is_frozen_and_saved_as_models_are() -> None:
    _, pm = made()
    eager = Net()
    eager.load_state_dict(autopar.full_state_dict(pm))
    for each in (pm, eager):
        each[0].requires_grad_(False)
    first = pm[0].weight.detach().clone()
    trained(pm)
    assert torch.equal(pm[0].weight, first) and not torch.equal(pm[2].weight.detach(), eager[2].weight.detach())
    with pytest.raises(RunError, match="cannot be pickled"):
        torch.save(pm, io.BytesIO())
    eager.load_state_dict(pm.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(pm(X), eager(X).square().mean())
        torch.testing.assert_close(pm[0](X), eager[0](X))  # a part, on whole values
    with pytest.raises(RunError, match="cannot be called alone with gradients"):
        pm[2](X)


def test_a_refused_model_is_as_it_was() -> None:
    model = Net()
    params = dict(model.named_parameters())
    with pytest.raises(autopar.InfeasibleError):
        autopar.parallelize(model, 1, X, memory_limit="64B")
    assert type(model) is Net and dict(model.named_parameters()) == params and model(X).shape == (3, 4)


class Registered(type):
    """Refuses a second class of one name, as registries of models do."""

    names: ClassVar[set[str]] = set()

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if name in cls.names:
            raise TypeError(f"{name} is registered twice")
        cls.names.add(name)
        return super().__new__(cls, name, bases, namespace)


class Listed(Net, metaclass=Registered):
    pass


@pytest.mark.parametrize("of_class", [False, True])
def test_after_an_error_at_the_end_a_model_is_as_it_was(of_class: bool) -> None:
    model = Listed() if of_class else Net()
    model.register_buffer("scale", torch.ones(()))
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    optimizer = torch.optim.Adam(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    eager, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    grads = [param.grad.clone() for param in params.values() if param.grad is not None]
    said = "registered twice" if of_class else "Invalid backend"
    with pytest.raises(Exception, match=said):
        autopar.parallelize(model, 1, X, optimizer=optimizer, compile={"backend": "nope"})
    assert type(model) is type(eager) and type(model[0]) is nn.Linear and "_autopar" not in vars(model)
    assert all(param is params[name] for name, param in model.named_parameters())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params.values(), strict=True))
    torch.testing.assert_close(optimizer.state_dict(), state)
    torch.testing.assert_close([p.grad for p in model.parameters()], grads)
    other = torch.optim.Adam(eager.parameters())
    other.load_state_dict(state)
    for each, steps in ((model, optimizer), (eager, other)):
        each.zero_grad()
        each(X).sum().backward()
        steps.step()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_it_is_parallelized_once() -> None:
    model, _ = made()
    with pytest.raises(autopar.CaptureError, match="is a parallel module already"):
        autopar.parallelize(model, 1, X)


def test_gradients_of_before_are_dropped_with_a_warning() -> None:
    model = Net()
    model(X).sum().backward()
    with pytest.warns(UserWarning, match="0.weight, 0.bias, .* have gradients, which are dropped"):
        autopar.parallelize(model, 1, X)
    assert all(param.grad is None for param in model.parameters())


def test_a_backward_of_a_call_before_is_refused() -> None:
    model = Net()
    before = model(X).sum()
    autopar.parallelize(model, 1, X)
    with pytest.raises(RunError, match=r"of what was computed before parallelize, with parameter '2.bias'"):
        before.backward()
    model(X).sum().backward()
    model(X[:2]).sum().backward()  # captured again
    assert model[0].weight.grad is not None
