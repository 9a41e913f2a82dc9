"""Autocast around a call and inside of forward: the numbers of eager mode under the same autocast, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import CaptureError, RunError
from autopar.words.autocasting import autocast_as

BF16 = torch.bfloat16
X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))


def region(dtype: torch.dtype = BF16, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


class Scaled(torch.autograd.Function):
    """A user's own backward, with torch's decorators for autocast."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        wide = grad.float()
        return wide @ w, wide.flatten(0, 1).t() @ x.flatten(0, 1).float()


class Part(nn.Module):
    """One way to compute, under whatever autocast there is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.lin, self.w = kind, nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.part: Any = {
            "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
            "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            "norms": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(4), nn.Softmax(-1)),
            "conv": lambda: nn.Conv1d(4, 4, 3, padding=1),
        }.get(kind, nn.Identity)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, f"_{self.kind}")(x).float().square().mean()  # type: ignore[no-any-return]

    def _attention(self, x: torch.Tensor) -> Any:
        return self.part(x, x, x)[0]

    def _encoder(self, x: torch.Tensor) -> Any:
        return self.part(x)

    _norms = _conv = _encoder

    def _loss(self, x: torch.Tensor) -> Any:
        return F.cross_entropy(self.lin(x).flatten(0, 1), torch.arange(12) % 8)

    def _einsum(self, x: torch.Tensor) -> Any:
        return torch.einsum("bij,kj->bik", x, self.w)

    def _shared(self, x: torch.Tensor) -> Any:
        return self.lin(F.gelu(self.lin(x))) + self.lin(x)  # the weight is cast once, so are its gradients' sum

    def _without(self, x: torch.Tensor) -> Any:
        h = self.lin(x)
        with region(enabled=False):
            h = self.lin(h.float())
        return self.lin(h)

    def _other(self, x: torch.Tensor) -> Any:
        with region(torch.float16):
            h = F.linear(x, self.w)
        return self.lin(h)

    def _promoted(self, x: torch.Tensor) -> Any:
        h = torch.cat([self.lin(x), x], -1)[..., :8]
        return torch.stack([torch.baddbmm(h, h, h.transpose(1, 2) @ h), h.to(BF16)]).sum(0)

    def _frozen(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            aim = F.linear(x, self.w)
        return self.lin(x) + aim

    def _again(self, x: torch.Tensor) -> Any:
        return checkpoint(lambda h: self.lin(F.gelu(F.linear(h, self.w))), x, use_reentrant=False)

    def _own(self, x: torch.Tensor) -> Any:
        return Scaled.apply(self.lin(x), self.w)

    def _written(self, x: torch.Tensor) -> Any:
        h = self.lin(x)
        h += 1
        return h.relu_()


KINDS = [name[1:] for name in vars(Part) if name.startswith("_") and not name.startswith("__")]


class Inside(nn.Module):
    """The same in a region of forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.part = Part(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with region():
            return self.part(x)  # type: ignore[no-any-return]


def train(model: nn.Module, twin: nn.Module, around: bool, steps: int = 2) -> None:
    """The same losses and gradients, to the bit."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for _ in range(steps):
        losses = []
        for m in (model, twin):
            with region(enabled=around):
                losses.append(m(X))
            losses[-1].backward()
        assert torch.equal(*losses)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_around_a_call(kind: str) -> None:
    eager = Part(kind)
    with region():
        pm = autopar.parallelize(copy.deepcopy(eager), 1, X)
    train(pm, eager, True)


@pytest.mark.parametrize("kind", ["shared", "without", "einsum", "again"])
def test_in_a_region_of_forward(kind: str) -> None:
    eager = Inside(kind)
    train(autopar.parallelize(copy.deepcopy(eager), 1, X), eager, False)


def test_casts_are_operators_of_the_graph() -> None:
    graph = autopar.capture(Inside("shared"), X).graph
    casts = [node for node in graph.nodes if node.target == "aten.to.dtype" and node.module.endswith(".autocast")]
    of_weights = [node for node in casts if graph.nodes[node.refs[0].node].kind == "param"]
    assert len(of_weights) == 2  # of three uses
    assert {node.out.dtype for node in graph.nodes if node.target == "aten.linear.default"} == {"bfloat16"}


def test_each_autocast_around_the_call_has_a_program_over_the_same_parameters() -> None:
    twin = Part("shared")
    pm = autopar.parallelize(copy.deepcopy(twin), 1, X)
    parameters = list(map(id, pm.parameters()))
    for around in (True, False, True):
        train(pm, twin, around, steps=1)
    assert (
        pm._autopar.programs is not None
        and pm._autopar.programs.captures == 1
        and list(map(id, pm.parameters())) == parameters
    )
    with region():
        pm.eval()
        assert torch.equal(pm(X), twin.eval()(X))


def test_another_autocast_is_refused_where_calls_are_not_followed() -> None:
    pm = autopar.parallelize(Part("shared"), 1, X, shapes="fixed")
    pm(X)
    text = r"captured without autocast, and is called under torch.autocast\('cpu', torch.bfloat16\)"
    with region(), pytest.raises(RunError, match=text):
        pm(X)


def test_a_step_within_autocast_has_its_backward_outside() -> None:
    twin = Part("without")
    with region():
        pm = autopar.parallelize(copy.deepcopy(twin), 1, X)
        pm.train_step(X)
        loss = twin(X)
    loss.backward()
    for p, q in zip(pm.parameters(), twin.parameters(), strict=True):
        assert p.grad is q.grad or torch.equal(p.grad, q.grad)


def test_a_model_on_the_meta_device_is_refused_under_autocast() -> None:
    with torch.device("meta"):
        model = Part("shared")
    text = r"meta device, where torch's autocast[\s\S]*precision='bf16-mixed'"
    with region(), pytest.raises(CaptureError, match=text):
        autopar.capture(model, X.to("meta"))
    graph = autopar.capture(model, X.to("meta"), precision="bf16-mixed").graph
    assert graph.fingerprint == autopar.capture(Part("shared"), X, precision="bf16-mixed").graph.fingerprint
    assert any(spec.dtype == "bfloat16" for node in graph.nodes for spec in node.outs)


def test_what_is_set_is_set_back() -> None:
    with region(torch.float16):
        with autocast_as({"cuda": BF16}):
            assert torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16 and torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled()
