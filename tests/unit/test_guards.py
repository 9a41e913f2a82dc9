"""What ``forward`` reads and writes outside of tensors: guarded, or refused with the place."""

from __future__ import annotations

import copy
import functools
import gc
import math
import random
import types
import warnings
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.capture.python.guards import repeated
from autopar.comparison import compare_with_eager
from autopar.errors import CaptureError, RunError
from autopar.runtime.stages.step_program import StepProgram

TEMPERATURE = 1.0
SETTINGS = types.SimpleNamespace(scale=2.0)
GENERATOR = np.random.default_rng(0)
COUNT = 0
X = torch.arange(12.0).reshape(3, 4) / 7


class Config:
    def __init__(self) -> None:
        self.alpha, self.unread = 0.5, 1


class Part(nn.Module):
    gain = 3.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)
        self.config, self.act, self.mode, self.unread = config, F.relu, "plus", 4
        self.options = {"a": 1.0, "sizes": [1, 2]}

    @property
    def half(self) -> float:
        return self.gain / 2

    def forward(self, x):
        x = self.act(self.linear(x)) * self.config.alpha * self.options["a"] * self.half
        if self.mode == "plus":
            x = x + 1
        return self.drop(x)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = Config()
        self.first, self.second, self.temperature = Part(config), Part(config), 1.0

    def forward(self, x):
        return (self.second(self.first(x)) / self.temperature * TEMPERATURE * SETTINGS.scale).sum()


class Made(nn.Module):
    """A module with a forward and attributes of a test's own."""

    def __init__(self, forward, **attributes) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(4, 4), forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.own(self, self.linear(x)).sum()


CHANGES = {
    "number": (lambda m: (m, "temperature", 2.0), "'temperature' is 2.0, and was 1.0 when"),
    "config": (lambda m: (m.second.config, "alpha", 1.0), "'first.config.alpha' is 1.0, and was 0.5"),
    "another config": (lambda m: (m.first, "config", Config()), "'first.config' is another object, and was a Config"),
    "of the class": (lambda m: (m.first, "gain", 1.0), "'first.gain' is 1.0, and was 3.0"),
    "text": (lambda m: (m.second, "mode", "minus"), "'second.mode' is 'minus', and was 'plus'"),
    "function": (lambda m: (m.second, "act", F.gelu), "'second.act' is gelu, and was relu"),
    "dropout": (lambda m: (m.first.drop, "p", 0.5), "'first.drop.p' is 0.5, and was 0.0"),
    "another dict": (lambda m: (m.first, "options", {"a": 2.0}), "'first.options' is {'a': 2.0}, and was {'a': 1.0,"),
    "dict": (lambda m: (m.second.options, "a", 2.0), "'second.options' is {'a': 2.0, 'sizes': [1, 2]}, and was"),
    "list in a dict": (lambda m: (m.second.options["sizes"], 0, 5), "'sizes': [5, 2]}, and was"),
    "global": (lambda m: (globals(), "TEMPERATURE", 3.0), "global 'TEMPERATURE' of test_guards.py is 3.0, and was 1.0"),
    "global settings": (lambda m: (vars(SETTINGS), "scale", 1.0), "'SETTINGS' of test_guards.py is {'scale': 1.0}"),
    "type": (lambda m: (m, "temperature", torch.full((1,), 2.0)), "'temperature' is a tensor of shape (1,), and"),
}


@functools.cache
def whole():
    model = Whole()
    return model, autopar.capture(model, X)


def with_two_names():
    """A model in which one module has two names: torch.export then traces stand-ins of all modules."""
    model = Whole()
    model.other = model.first.linear
    return model, autopar.capture(model, X)


@pytest.mark.parametrize("made", [whole, with_two_names])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_is_named(name, made):
    model, captured = made()
    captured.guards.check()
    owner, key, value = CHANGES[name][0](model)
    inside = isinstance(owner, dict | list)
    before = owner[key] if inside else getattr(owner, key)
    try:
        owner.__setitem__(key, value) if inside else setattr(owner, key, value)
        with pytest.raises(RunError) as caught:
            captured.guards.check()
    finally:
        owner.__setitem__(key, before) if inside else setattr(owner, key, before)
    assert CHANGES[name][1] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3  # one change, and what to do
    captured.guards.check()


def test_a_namespace_that_holds_more_than_plain_values() -> None:
    """A configuration with a function in it."""
    config = types.SimpleNamespace(width=4, size=lambda: 3, kept=[])
    model = Made(lambda self, x: x * self.config.width + self.config.size(), config=config)
    captured = autopar.capture(model, X)
    assert compare_with_eager(captured, model, (X + 1,), {}).same
    assert config.width == 4 and not config.kept


def test_only_what_is_read_is_guarded():
    model, captured = whole()
    model.first.unread = model.first.config.unread = 17
    model.new = 3
    captured.guards.check()
    read = captured.guards.read("first.config", "alpha")
    assert read is not None and read.where.startswith("test_guards.py:")
    assert "half" not in {r.name for r in captured.guards}  # computed from what is guarded
    assert "training" not in {r.name for r in captured.guards}  # train() and eval() see to it


def test_a_model_that_is_gone_changes_no_more():
    model = Whole()
    captured = autopar.capture(model, X)
    config = model.first.config
    del model
    gc.collect()
    captured.guards.check()
    assert captured.guards.owner("first") is None
    config.alpha = 7.0  # still held here
    with pytest.raises(RunError, match="alpha"):
        captured.guards.check()


def test_capture_leaves_classes_and_containers_as_they_were():
    model, _ = whole()
    for cls in (Whole, Part, Config, nn.Linear, nn.Dropout):
        assert "__getattribute__" not in vars(cls) and "__setattr__" not in vars(cls)
    options = model.first.options
    autopar.capture(model, X)
    assert model.first.options is options


def test_closures_of_a_loss_function():
    weight = 2.0

    def loss(out, y):
        return ((out - y) ** 2).mean() * weight

    captured = autopar.capture(nn.Linear(4, 4), X, loss_fn=loss, targets=X)
    captured.guards.check()
    weight = 3.0
    with pytest.raises(RunError, match=r"variable 'weight' of .*loss is 3.0, and was 2.0"):
        captured.guards.check()


def test_blocks_that_another_stands_for_are_guarded():
    model, _ = whole()
    modules = dict(model.named_modules())
    one = autopar.capture(nn.ModuleDict({"block": Part(Config())})["block"], X, loss_fn=torch.sum).guards
    repeated(one, "", ["second"], modules)
    assert one.read("second.drop", "p") is not None
    model.second.mode = "minus"
    with pytest.raises(RunError, match=r"'second.mode' is 'minus'"):
        one.check()
    model.second.mode = "plus"


# --- what forward writes ---------------------------------------------------------------------------------------------


def count(self, x):
    self.step += 1
    return x * min(1.0, self.step / 10)


def count_in_a_dict(self, x):
    self.seen["n"] += 1
    return x


def append(self, x):
    self.lengths.append(len(x))
    return x


def count_globally(self, x):
    global COUNT
    COUNT += 1
    return x * COUNT


def first_call(self, x):
    if not self.ready:
        self.ready = True
        return x * 2
    return x


CHANGING = {
    "counter": (count, {"step": 0}, r"'step', from 1 to 2 at test_guards.py:\d+"),
    "counter in a dict": (count_in_a_dict, {"seen": {"n": 0}}, r"'seen', from {'n': 0} to {'n': 1} at test_guards.py"),
    "list": (append, {"lengths": []}, r"'lengths', from \[\] to \[3\] at test_guards.py"),
    "global": (count_globally, {}, "global 'COUNT' of test_guards.py, from 1 to 2"),
    "first call": (first_call, {"ready": False}, "first call of forward.*\n.*'ready', from False to True"),
}


@pytest.mark.parametrize("two_names", [False, True])
@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_at_every_call_is_refused(name, two_names):
    forward, attributes, message = CHANGING[name]
    model = Made(forward, **attributes)
    if two_names:
        model.other = model.linear
    with pytest.raises(CaptureError, match=message):
        autopar.capture(model, X)
    for key, value in attributes.items():
        assert getattr(model, key) in (value, type(value)())  # as it was
    assert COUNT == 0


def test_a_flag_that_changes_nothing_settles():
    def warn_once(self, x):
        if not self.warned:
            self.warned = True
        self.last_rows = x.shape[0]
        return x

    model = Made(warn_once, warned=False)
    captured = autopar.capture(model, X)
    assert model.warned is True
    captured.guards.check()


def test_a_cache_of_tensors_is_left_empty():
    def cached(self, x):
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.ones(len(x), 1)
        return x * self.masks[len(x)]

    model = Made(cached, masks={})
    captured = autopar.capture(model, X)
    assert model.masks == {} and captured.guards.filled == ("'masks'",)
    captured.guards.check()


BACKENDS: dict[type, object] = {}


class Backend:
    def __init__(self) -> None:
        self.framework = torch  # a module, which cannot be copied


def test_a_table_by_classes_of_tensors_that_tracing_fills_is_no_change():
    """einops keeps such a one: the first call of all finds it empty, tracing brings tensors of classes of its own."""

    def looked_up(self, x):
        if type(x) not in BACKENDS:
            BACKENDS[type(x)] = Backend()
        return x * len(BACKENDS[type(x)].framework.ones(2).shape)

    for called_before in (False, True):
        BACKENDS.clear()
        model = Made(looked_up)
        if called_before:
            model(X)
        captured = autopar.capture(model, X)
        model(X)
        model(X)
        captured.guards.check()


def test_a_change_of_a_table_by_names_is_one_still():
    def looked_up(self, x):
        return x * len(BACKENDS)

    BACKENDS.clear()
    captured = autopar.capture(Made(looked_up), X)
    BACKENDS[int] = Backend()
    with pytest.raises(RunError, match="BACKENDS"):
        captured.guards.check()
    BACKENDS.clear()


def register(self, x, value):
    self.register_buffer("mask", value, persistent=False)


def put(self, x, value):
    self._buffers["mask"] = value


class InPart(nn.Module):
    """A part whose buffer is empty until its forward fills it."""

    def __init__(self, fill, value) -> None:
        super().__init__()
        self.register_buffer("mask", None)
        self.fill, self.value = fill, value

    def forward(self, x):
        before = self.mask
        if before is None or not before.is_contiguous():
            self.fill(self, x, self.value(x))
        return x * 2 if before is None else x + before


@pytest.mark.parametrize("fill", (register, put))
def test_an_empty_buffer_that_forward_fills(fill):
    model = nn.Sequential(nn.Linear(4, 4), InPart(fill, lambda x: x.detach()))
    with pytest.raises(CaptureError, match=r"keeps a tensor of one call(.|\n)*'1.mask', which forward registers"):
        autopar.capture(model, X)
    assert model[1].mask is None
    model = nn.Sequential(nn.Linear(4, 4), InPart(fill, lambda x: torch.ones(4)))
    autopar.capture(model, X, loss_fn=torch.sum)
    assert model[1].mask is None  # and not what the trace computed


def test_what_follows_from_buffers_may_be_kept() -> None:
    """Rotary angles, which the first call computes of a buffer of frequencies; not of one that a call writes."""

    class Rotary(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.layer, self.writes = nn.Linear(4, 4), writes
            self.register_buffer("frequencies", 10.0 ** -torch.arange(4))
            self.register_buffer("angles", None, persistent=False)

        def forward(self, x):
            if self.writes:
                self.frequencies.mul_(0.9)
            if self.angles is None or len(self.angles) < len(x):
                self.register_buffer("angles", torch.outer(torch.arange(len(x)), self.frequencies), persistent=False)
            return (self.layer(x) * self.angles[: len(x)].cos()).square().mean()

    model = Rotary(writes=False)
    assert compare_with_eager(autopar.capture(model, X), model, (torch.randn_like(X),), {}).same
    with pytest.raises(CaptureError, match=r"keeps a tensor of one call(.|\n)*'angles', which forward registers"):
        autopar.capture(Rotary(writes=True), X)


# --- random numbers outside torch ------------------------------------------------------------------------------------

DRAWS = {
    "normal": (lambda self, x: x * random.gauss(0, 1), {}, "from random at"),
    "choice": (lambda self, x: x * random.choice([1, 4]), {}, "from random at"),
    "numpy": (lambda self, x: x * float(np.random.rand(1)[0]), {}, "from numpy.random at"),
    "own numpy": (lambda self, x: x * float(self.draw.random()), {"draw": np.random.default_rng(0)}, "from 'draw' at"),
    "own random": (lambda self, x: x * self.draw.random(), {"draw": random.Random(0)}, "from 'draw' at"),
    "global": (lambda self, x: x * float(GENERATOR.random()), {}, "from global 'GENERATOR' of test_guards.py at"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_outside_torch_are_refused(name):
    forward, attributes, message = DRAWS[name]
    before = random.getstate(), GENERATOR.bit_generator.state
    with pytest.raises(CaptureError, match=f"draws a random number outside torch, {message} test_guards.py:\\d+"):
        autopar.capture(Made(forward, **attributes), X)
    assert (random.getstate(), GENERATOR.bit_generator.state) == before


DRAWN_BY_TORCH = {
    "a factor": lambda self, x: x * random.random(),
    "a branch": lambda self, x: x if random.uniform(0, 2) < 1 else x.tanh(),
    "imported": lambda self, x: x * uniform(1, 2),
    "an integer": lambda self, x: x * random.randint(1, 4),
    "numpy": lambda self, x: x * np.random.rand() + np.random.uniform(1, 2),
    "numpy's integer": lambda self, x: x * np.random.randint(1, 4),
}


@pytest.mark.parametrize("name", DRAWN_BY_TORCH)
def test_numbers_outside_torch_are_drawn_by_torch(name) -> None:
    before = random.getstate(), random.random, uniform
    model = Made(DRAWN_BY_TORCH[name])
    with pytest.warns(UserWarning, match=r"draws from random or numpy.random at test_guards.py:\d+"):
        captured = autopar.capture(model, X)
    nodes = [node.target for node in captured.graph.nodes if node.kind == "op"]
    assert any(target.startswith("aten.rand") for target in nodes)
    assert compare_with_eager(captured, model, (X + 1,), {}).same
    assert before == (random.getstate(), random.random, uniform)


def test_random_numbers_of_code_without_lines_are_refused():
    place = {"random": random, "nn": torch.nn}
    exec("class Model(nn.Module):\n    def forward(self, x): return x * random.random()", place)
    with pytest.raises(CaptureError, match=r"outside torch, from random .*code whose lines are not known"):
        autopar.capture(place["Model"](), X)


@pytest.mark.parametrize("ask", [lambda r: float(r) < 0.5, lambda r: math.floor((r * 2).item()) < 1])
def test_the_digits_of_a_random_number_are_refused_with_the_way_to_write_it(ask):
    def layer_drop(self, x):
        return x if ask(torch.rand([])) else x.tanh()

    with pytest.raises(CaptureError, match=r"value of a random number .*in Python, at test_guards.py:\d+"):
        autopar.capture(Made(layer_drop), X)

    def chosen(self, x):
        return torch.where(torch.rand(()) < 0.5, x, x.tanh())

    autopar.capture(Made(chosen), X)


# --- on a parallel module --------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.temperature, self.gate = Part(Config()), 1.0, False

    def forward(self, x):
        out = self.part(x) / self.temperature
        return (out.tanh() if self.gate else out).square().mean()


@pytest.fixture
def alone():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def same_as(pm, model):
    mine, theirs = pm(X), model(X)
    mine.backward()
    theirs.backward()
    torch.testing.assert_close(mine, theirs)
    for name, p in pm.named_parameters():
        torch.testing.assert_close(p.grad, model.get_parameter(name).grad)
    pm.zero_grad()
    model.zero_grad()


def test_a_change_is_an_error_of_the_next_call(alone):
    model = Scaled()
    eager = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, X)
    same_as(pm, eager)
    model.part.drop.p = 0.5
    with pytest.raises(RunError, match=r"'part\.drop\.p' is 0\.5, and was 0\.0"):
        pm(X)
    model.part.drop.p = 0.0
    pm.temperature = 2.0  # goes to the model
    assert model.temperature == 2.0
    with pytest.raises(RunError, match=r"'temperature' is 2.0, and was 1.0"):
        pm.train_step(X)
    pm.temperature = 1.0
    pm.part.mode = "minus"
    with pytest.raises(RunError, match=r"'part\.mode' is 'minus'"):
        pm(X)
    pm.part.mode = "plus"
    pm.notes = 3  # nobody reads it
    same_as(pm, eager)


def test_a_schedule_is_captured_again(alone):
    original, model = Scaled(), Scaled()
    model.load_state_dict(original.state_dict())
    pm = autopar.parallelize(original, 1, X, on_change="recapture")
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    for step in range(4):
        pm.temperature = model.temperature = 1.0 / (step + 1)
        model.load_state_dict(autopar.full_state_dict(pm))
        same_as(pm, model)
        pm(X).backward()
        optimizer.step()
        optimizer.zero_grad()
    pm.eval()
    model.eval()
    torch.testing.assert_close(pm(X), model(X))
    pm.train()
    model.train()
    pm.gate = model.gate = True  # another operator, so another plan
    same_as(pm, model)
    weights = [*pm.parameters()]
    pm.compile(backend="eager")
    for gate in (False, True, False):
        pm.gate = model.gate = gate
        same_as(pm, model)
        assert isinstance(pm._autopar.stage.run_program, StepProgram)
    assert all(a is b for a, b in zip(weights, pm.parameters(), strict=True))


def test_a_number_by_which_an_operator_can_be_cut_otherwise_is_planned_again():
    from autopar.runtime.variants.recaptured import differs

    def softmax(module, x):
        return torch.softmax(x, module.dim) ** 2

    model = Made(softmax, dim=0)
    first = autopar.capture(model, X)
    model.dim = 1
    assert "can be cut in other ways" in differs(first, autopar.capture(model, X))
    model.dim = 0
    assert differs(first, autopar.capture(model, X)) == ""


class LookedUp:
    """Finds attributes in Python, as the configs of transformers do."""

    gain = 2.0

    def __init__(self) -> None:
        self.gain, self.sizes, self.other = 2.0, [1.0, 2.0], 1.0

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)

    @property
    def half(self) -> float:
        return self.other / 2


def test_attributes_that_python_looks_up_are_compared():
    def forward(module, x):
        config = module.config
        return x * config.gain * config.sizes[1] * config.half

    model = Made(forward, config=LookedUp())
    guards, config = autopar.capture(model, X).guards, model.config
    guards.check()
    for name in ("gain", "other"):
        before = getattr(config, name)
        setattr(config, name, 5.0)
        with pytest.raises(RunError, match=rf"'config\.{name}' is"):
            guards.check()
        setattr(config, name, before)
        guards.check()
    config.sizes[1] = 7.0
    with pytest.raises(RunError, match=r"'config\.sizes' is"):
        guards.check()
    config.sizes[1] = 2.0
    del config.gain  # the class has the same
    guards.check()
    config.__dict__ = {"gain": 4.0, "sizes": [1.0, 2.0], "other": 1.0}
    with pytest.raises(RunError, match=r"'config\.gain' is 4\.0"):
        guards.check()
    del config, model
    gc.collect()
    guards.check()


class Renamed:
    """Finds an attribute under another name, as the configs of transformers do (``attribute_map``)."""

    def __init__(self):
        self.low = 3.0

    def __getattribute__(self, name):
        return object.__getattribute__(self, "low" if name == "lowest" else name)


def test_attributes_that_have_another_name_are_guarded():
    model = Made(lambda module, x: x * module.config.lowest, config=Renamed())
    guards = autopar.capture(model, X).guards
    guards.check()
    model.config.low = 9.0
    with pytest.raises(RunError, match=r"'config\.lowest' is 9\.0, and was 3\.0"):
        guards.check()


def test_a_branch_on_a_tensor_of_numbers_is_answered():
    def masked(module, x):
        mask = torch.ones(x.shape[0])
        mask[mask == 2] = 5.0  # written out with a tensor that C++ makes of the number
        if torch.where(mask > 1, torch.tensor(0.0), mask).sum() > 2:
            return x.tanh()
        return x

    model = Made(masked)
    captured = autopar.capture(model, X)
    assert any(node.target == "aten.tanh.default" for node in captured.graph.nodes)


def test_a_tensor_that_the_model_keeps_and_branches_on_is_watched():
    model = Made(lambda module, x: x.tanh() if module.switch[0] > 0 else x, switch=[torch.tensor(1.0)])
    captured = autopar.capture(model, X)
    assert [way.kwargs["answer"] for way in captured.graph.ways] == [True]
    model.switch[0].fill_(-1.0)
    with pytest.raises(RunError, match="was written to since"):
        captured.guards.check()


class _KeepsInNewDict(nn.Module):
    """A cache that the first call makes, of a tensor that follows from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = {}
        if x.shape[1] not in self.cache:
            self.cache[x.shape[1]] = torch.linspace(0, 1, x.shape[1]) * x.mean()
        return (x * self.cache[x.shape[1]]).square().mean()


def test_a_tensor_in_a_dict_that_the_call_makes() -> None:
    with pytest.raises(CaptureError, match=r"keeps a tensor that it computes in something that outlives the call"):
        autopar.capture(_KeepsInNewDict(), (torch.randn(4, 4),))


class _State:
    """Of a library: what it knows, and the classes of tensors that it has met."""

    def __init__(self, before: Any = None) -> None:
        self.names = dict(before.names) if before else {"torch": print}
        self.met = dict(before.met) if before else {}
        self.scale = before.scale if before else 1.0


class _Registry:
    """Replaces its state by a copy whenever it is asked, as einx does."""

    def __init__(self) -> None:
        self.state = _State()

    def backend(self, x: torch.Tensor, more: float) -> float:
        state = _State(self.state)
        state.met[(type(x), float)] = state.names["torch"]
        state.scale += more
        self.state = state
        return state.scale


REGISTRY = _Registry()


class _AsksALibrary(nn.Module):
    def __init__(self, more: float) -> None:
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.ones(4)), more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight * REGISTRY.backend(x, self.more)).sum()


def test_a_library_that_renews_its_state_is_no_change() -> None:
    x = torch.randn(2, 4)
    pm = autopar.parallelize(_AsksALibrary(0.0), 1, (x,))
    for _ in range(2):
        torch.testing.assert_close(pm(x), x.sum())
    with pytest.raises(CaptureError, match=r"changes what it reads, at every call:\n  'REGISTRY.state'"):
        autopar.parallelize(_AsksALibrary(1.0), 1, (x,))


class AsksForGradients(nn.Module):
    """Is another model where gradients are off, and where its parameter lies in memory in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64).t())
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t() if self.weight.is_contiguous() else self.weight
        return (x @ weight * self.scale * (2 if torch.is_grad_enabled() else 1)).mean()


def test_a_model_that_asks_whether_gradients_are_on_is_told_of():
    pm: Any = autopar.parallelize(AsksForGradients(), 1, (torch.ones(4, 4, dtype=torch.float64),))
    with torch.no_grad(), pytest.warns(UserWarning, match=r"AsksForGradients.forward \(test_guards.py:\d+\) asks"):
        pm(torch.ones(4, 4, dtype=torch.float64))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        pm(torch.ones(4, 4, dtype=torch.float64))


def test_parameters_of_a_model_that_is_gone_lie_as_they_did():
    model = AsksForGradients()
    weight = model.weight.detach().clone()
    pm: Any = autopar.parallelize(model, 1, (torch.ones(4, 4, dtype=torch.float64),))
    del model
    gc.collect()
    x = torch.randn(3, 4, dtype=torch.float64)  # captured anew
    assert float(pm(x)) == pytest.approx(float((x @ weight * 2).mean()), rel=1e-12)
