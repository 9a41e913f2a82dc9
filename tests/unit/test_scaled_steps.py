"""A rank whose gradients are finite hears of one that is not, whatever dtypes they have."""

from types import SimpleNamespace

import pytest
import torch

from autopar.runtime.optimizers import grad_scaler


@pytest.mark.parametrize("overflows", [False, True])
def test_an_overflow_in_parameters_of_several_dtypes(overflows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=torch.distributed.ReduceOp)
    monkeypatch.setattr(grad_scaler, "dist", alone)
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    for param in params:
        param.grad = torch.full_like(param, 1e30)
    assert params[1].grad is not None
    if overflows:
        params[1].grad[2] = torch.inf
    grad_scaler.share_overflows(params, torch.device("cpu"), None)
    assert [bool(p.grad.isfinite().all()) for p in params if p.grad is not None] == [not overflows, not overflows, True]
