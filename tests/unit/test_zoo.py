"""Every model of the zoo trains, and plain ``torch.export`` captures it without changing a bit of the loss."""

import copy
import dataclasses
import warnings

import pytest
import torch
from zoo import ZOO, Case, as_float64, loss_of


def loss_and_gradients(module, args, kwargs, names):
    loss = loss_of(module(*args, **kwargs))
    parameters = dict(module.named_parameters())
    return loss, dict(zip(names, torch.autograd.grad(loss, [parameters[n] for n in names])))


def with_own_model(case: Case) -> Case:
    """The case with a copy of its model, so that the two compared models do not share running statistics."""
    return dataclasses.replace(case, model=copy.deepcopy(case.model))


def export(case: Case) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(case.model, case.args, case.kwargs, strict=False)


@pytest.mark.parametrize("name", ZOO)
def test_trains_and_is_captured_exactly(name):
    case = ZOO[name]()
    names = [n for n, p in case.model.named_parameters() if p.requires_grad]
    captured = export(with_own_model(case)).module()
    for args, kwargs in (case.batch, case.batch2):
        loss, gradients = loss_and_gradients(case.model, args, kwargs, names)
        assert loss.shape == () and torch.isfinite(loss)
        assert all(torch.isfinite(g).all() for g in gradients.values())
        assert any(g.abs().max() > 0 for g in gradients.values())
        captured_loss, captured_gradients = loss_and_gradients(captured, args, kwargs, names)
        assert torch.equal(loss, captured_loss)
        torch.testing.assert_close(captured_gradients, gradients, rtol=1e-5, atol=1e-7)  # a mask rounds differently


@pytest.mark.parametrize("name", ZOO)
def test_is_the_same_every_time(name):
    first, second = ZOO[name](), ZOO[name]()
    for a, b in zip(first.model.state_dict().values(), second.model.state_dict().values()):
        assert torch.equal(a, b)
    leaves = [[*case.args, *case.kwargs.values()] for case in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*leaves))
    other = [*first.batch2[0], *first.batch2[1].values()]
    assert not all(torch.equal(a, b) for a, b in zip(leaves[0], other))
    assert [x.shape for x in leaves[0]] == [x.shape for x in other]


@pytest.mark.parametrize("name", ZOO)
def test_meta_case_has_the_same_shapes(name):
    case, meta = ZOO[name](), ZOO[name](device="meta")
    assert all(p.is_meta for p in meta.model.parameters())
    assert all(x.is_meta for x in [*meta.args, *meta.kwargs.values()])
    shapes = {n: (p.shape, p.dtype) for n, p in case.model.named_parameters()}
    assert shapes == {n: (p.shape, p.dtype) for n, p in meta.model.named_parameters()}


def test_float64_case_computes_in_float64():
    case = as_float64(ZOO["mlp"]())
    assert loss_of(case.model(*case.args)).dtype == torch.float64


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_dropout_variant_draws(name):
    case = ZOO[name](dropout=0.1)
    assert loss_of(case.model(*case.args, **case.kwargs)) != loss_of(case.model(*case.args, **case.kwargs))
