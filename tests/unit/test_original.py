"""What is done with the model itself after ``parallelize``: seen, or said."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import RunError
from autopar.runtime.parameters import one_rank_functions

X = torch.arange(12.0).reshape(3, 4) / 7


def made(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, autopar.parallelize(model, 1, X, loss_fn=lambda out: out.square().mean(), **options)


def trained(pm):
    pm.train_step(X, optimizer=torch.optim.AdamW(pm.parameters()))
    return pm


@pytest.fixture(autouse=True)
def alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=r"torch\..*")
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_state_dict_of_old_weights_is_refused():
    model, pm = made()
    before = copy.deepcopy(model.state_dict())  # nothing was trained, so these are the weights
    trained(pm)
    with pytest.raises(RunError, match=r"weights of before(.|\n)*full_state_dict\(pm\)"):
        model.state_dict()
    with pytest.raises(RunError, match="weights of before"):
        nn.ModuleDict({"inside": model}).state_dict()
    model.load_state_dict(autopar.full_state_dict(pm))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, pm.get_parameter(name).detach())
        assert not torch.equal(value, before[name])
    del pm
    gc.collect()
    model.state_dict()


def test_a_call_with_old_weights_warns_once():
    model, pm = made()
    model(X)
    trained(pm)
    with pytest.warns(UserWarning, match="has the weights of before: its parallel module was trained"):
        model(X)
    model(X)
    copied = copy.deepcopy(model)
    copied(X)
    copied.state_dict()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False).state_dict()


def test_weights_that_are_loaded_into_the_model_warn_once():
    model, pm = made()
    model.load_state_dict(autopar.full_state_dict(pm))  # the same
    other = {name: value + 1 for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="does not reach its parallel module"):
        model.load_state_dict(other)
    model.load_state_dict(other)
    trained(pm)
    model.load_state_dict(autopar.full_state_dict(pm))


CHANGES = {
    "module": (lambda model: setattr(model, "2", nn.Linear(8, 4)), "module '2' was replaced"),
    "added": (lambda model: model.append(nn.ReLU()), "module '3' was added"),
    "parameter": (lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(8, 4))), "parameter '0.weight' was repla"),
    "parametrized": (lambda m: nn.utils.parametrizations.weight_norm(m[0]), r"module '0.parametrizations' was added"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_changed_afterwards_is_refused_at_the_next_call(name):
    model, pm = made()
    change, text = CHANGES[name]
    change(model)
    for _ in range(2):
        with pytest.raises(RunError, match=text):
            pm(X)
    again = autopar.parallelize(model, 1, X, loss_fn=lambda out: out.square().mean())
    torch.testing.assert_close(again(X), model(X).square().mean())


def test_a_change_that_is_undone_is_none():
    model, pm = made()
    head = model[2]
    model[2] = nn.Linear(8, 4)
    model[2] = head
    pm(X)


def test_capturing_again_says_nothing_of_old_weights():
    model, pm = made(on_change="recapture")
    model.scale = 1.0
    trained(pm)
    pm(X)


def test_the_model_can_go():
    model, pm = made()
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
    trained(pm)


def test_parameters_that_are_frozen_in_the_model_are_refused():
    model, pm = made()
    pm(X)
    model[0].weight.requires_grad_(False)
    for _ in range(2):
        with pytest.raises(RunError, match=r"parameter '0.weight' of the model was frozen(.|\n)*pm.get_parameter"):
            pm(X)
    pm.get_parameter("0.weight").requires_grad_(False)
    trained(pm)
    model.requires_grad_(False)  # kept for reference
    with pytest.warns(UserWarning, match="3 parameters .* frozen after parallelize"):
        for _ in range(20):
            pm(X)


def test_freezing_is_seen_in_the_middle_of_training():
    model, pm = made()
    for _ in range(40):
        pm(X)
    model[2].requires_grad_(False)
    with pytest.raises(RunError, match=r"2 parameters .'2.weight', '2.bias'. of the model were frozen"):
        for _ in range(64):
            pm(X)


WRITES = {
    "in place": lambda model: nn.init.ones_(model[0].weight),
    "past autograd": lambda model: model[0].weight.data.mul_(0.5),
    "another tensor": lambda model: setattr(model[0].weight, "data", torch.ones(8, 4)),
    "another dtype": lambda model: model[0].half(),
}


@pytest.mark.parametrize("name", WRITES)
def test_parameters_that_are_written_to_in_the_model_warn_once(name):
    model, pm = made()
    pm(X)
    WRITES[name](model)
    with pytest.warns(UserWarning, match="'0.weight'.* written to since, which does not reach the parallel module"):
        pm(X)
    WRITES[name](model)
    pm(X)


def test_a_model_that_was_moved_away_or_loaded_is_none_that_was_written_to():
    model, pm = made()
    trained(pm)
    model.load_state_dict(autopar.full_state_dict(pm))
    pm(X)
    model.to("meta")
    pm(X)


def test_the_mode_of_the_model_is_its_own():
    model, pm = made()
    model.eval()
    with pytest.warns(UserWarning, match=r"eval\(\) of the model .* call pm.eval\(\)"):
        pm(X)
    model.train()
    pm(X)
    pm.eval()
    model.eval()
    pm(X)


def test_clipping_the_gradients_of_the_model_itself_warns():
    model, pm = made()
    pm(X).backward()
    with mock.patch.object(one_rank_functions, "_said", set()):
        with pytest.warns(UserWarning, match="none of which has a gradient"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_norm_(pm.parameters(), 1.0)


def by_averaged_model(model):
    from torch.optim.swa_utils import AveragedModel

    average = AveragedModel(model)
    return lambda pm: average.update_parameters(model)


def by_stored_parameters(model):
    params = list(model.parameters())
    shadow = [p.detach().clone() for p in params]
    return lambda pm: torch._foreach_lerp_(shadow, [p.detach() for p in params], 0.5)


def by_data_of_an_attribute(model):
    shadow = copy.deepcopy(model)
    return lambda pm: shadow[0].weight.data.mul_(0.5).add_(model[0].weight.data, alpha=0.5)


def by_a_copy(model):
    return lambda pm: copy.deepcopy(model)


def by_a_penalty(model):
    return lambda pm: sum(p.norm() for p in model.parameters())


READS = [by_averaged_model, by_stored_parameters, by_data_of_an_attribute, by_a_copy, by_a_penalty]


@pytest.mark.parametrize("made_before", READS)
@pytest.mark.parametrize("fused", [False, True])  # which leaves no trace in the version of a plain tensor
def test_an_average_of_the_model_from_before_warns_once(made_before, fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    update = made_before(model)
    pm = autopar.parallelize(model, 1, X, loss_fn=lambda out: out.square().mean())
    optimizer = torch.optim.AdamW(pm.parameters(), fused=fused)
    update(pm)  # nothing was trained
    pm.train_step(X, optimizer=optimizer)
    with pytest.warns(UserWarning, match=r"'0.weight' of the model that was parallelized is read(.|\n)*EMA\(pm\)"):
        update(pm)
    pm.train_step(X, optimizer=optimizer)
    update(pm)


def test_what_tells_nothing_of_values_is_no_read():
    model, pm = made()
    trained(pm)
    assert sum(p.numel() for p in model.parameters()) == 76
    assert {p.dtype for p in model.parameters()} == {torch.float32} and model[0].weight.shape == (8, 4)
    model.zero_grad()
    repr(model)
    pm(torch.cat([X, X]))  # captured again


def test_weights_that_were_brought_back_are_read_and_exported():
    model, pm = made()
    trained(pm)
    model.load_state_dict(autopar.full_state_dict(pm))
    trained(pm)
    assert all(type(p) is nn.Parameter for p in (*model.parameters(), *copy.deepcopy(model).parameters()))
    torch.export.export(model, (X,))


def test_parameters_are_like_others_when_the_parallel_module_is_gone():
    model, pm = made()
    trained(pm)
    del pm
    gc.collect()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    model[0].weight.norm()
