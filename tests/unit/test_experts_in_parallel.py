"""Experts that are modules beside each other, with tensors of one size: computed at once, and cut by expert."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from cut_experts import cut_equally
from torch import nn

import autopar
from autopar.capture import capture
from autopar.comparison import compare_with_eager

HIDDEN, EXPERTS = 8, 4


class Beside(nn.Module):
    """Experts of two products with norms, and what decides which of them a token has."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.slots = nn.Linear(HIDDEN, EXPERTS), nn.Parameter(torch.randn(HIDDEN, EXPERTS, 3))
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.GELU(), nn.Dropout(dropout), nn.RMSNorm(16),
                nn.Linear(16, HIDDEN, bias=False),
            ) for _ in range(EXPERTS)
        )  # fmt: skip
        self.scale = nn.Parameter(torch.randn(EXPERTS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(x + self.mixed(x), y)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class SoftSlots(Beside):
    """Each expert takes sums of tokens (a soft mixture)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.einsum("bnd,des->bnes", x, self.slots)
        slots = torch.einsum("bnd,bnes->besd", x, logits.softmax(1))
        done = torch.stack([expert(slots[:, e]) for e, expert in enumerate(self.experts)], 1)
        return torch.einsum("besd,bnes->bnd", done, logits.flatten(2).softmax(-1).view_as(logits))


class Chunks(Beside):
    """Places of a capacity in chunks, as they come from an all-to-all (fairseq, DeepSpeed)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, HIDDEN)
        hits = F.one_hot(self.gate(tokens).argmax(-1), EXPERTS)
        places = F.one_hot(((hits.cumsum(0) - 1) * hits).sum(-1).clamp(max=9), 10)
        combine = (hits.unsqueeze(2) * places.unsqueeze(1)).to(x.dtype)
        sent = torch.einsum("sec,sm->ecm", combine, tokens).reshape(1, EXPERTS, -1, HIDDEN)
        done = [expert(chunk) for chunk, expert in zip(sent.chunk(EXPERTS, dim=1), self.experts, strict=True)]
        return torch.einsum("sec,ecm->sm", combine, torch.cat(done, dim=1).view(EXPERTS, -1, HIDDEN)).view_as(x)


class AllOfThem(Beside):
    """All experts have all tokens, and their results are weighted and summed up."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        return sum(gates[..., e : e + 1] * expert(x) for e, expert in enumerate(self.experts))  # type: ignore[return-value]


FORMS = {cls.__name__: cls for cls in (SoftSlots, Chunks, AllOfThem)}


def products(captured: autopar.Captured) -> list[str]:
    graph = captured.graph
    return [n.name for n in graph.nodes if n.target == "aten.einsum.default" and str(n.args[0]).endswith("->emn")]


@pytest.mark.parametrize("name", FORMS)
def test_run_at_once(name: str) -> None:
    model = FORMS[name]().double()
    x, y = (torch.randn(4, 6, HIDDEN, dtype=torch.float64) for _ in range(2))
    captured = autopar.capture(model, (x, y))
    of_experts = products(captured)
    assert len(of_experts) == 2
    pins = {product: {"expert": "e"} for product in of_experts}
    cut_equally(model, (x, y), "expert=2", pins, captured=captured, certified=True)


class ReadElsewhere(AllOfThem):
    """What one expert computes on its way is read by others."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        up = [expert[:2](x) for expert in self.experts]  # type: ignore[index]
        done = [expert[2:](middle) for expert, middle in zip(self.experts, up, strict=True)]  # type: ignore[index]
        return torch.stack(done).sum(0) + up[1].mean()


class WrittenMeanwhile(AllOfThem):
    """What some experts read is written to before they run."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.repeat(1, 1, 1).unsqueeze(0).repeat(EXPERTS, 1, 1, 1)
        done = []
        for e, expert in enumerate(self.experts):
            done.append(expert(parts[e].clone()))
            parts += 1
        return torch.stack(done).sum(0)


class OtherOrder(AllOfThem):
    """Parts that are not in the order of the experts, and one expert that has another activation."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.repeat(1, 1, EXPERTS).chunk(EXPERTS, -1)
        done = [expert(parts[(e + 1) % EXPERTS]) * self.scale[e] for e, expert in enumerate(self.experts)]
        return torch.stack(done).sum(0)


@pytest.mark.parametrize("cls", [ReadElsewhere, WrittenMeanwhile, OtherOrder])
def test_others_stay_as_they_are(cls: type[Beside]) -> None:
    model = cls().double()
    x, y = (torch.randn(4, 6, HIDDEN, dtype=torch.float64) for _ in range(2))
    pm = autopar.parallelize(copy.deepcopy(model), 1, (x, y))
    for inputs in (x, 2 * x.flip(0)):
        assert torch.allclose(pm(inputs, y), model(inputs, y), rtol=1e-12), cls


def test_experts_that_draw_stay_as_they_are() -> None:
    x, y = (torch.randn(4, 6, HIDDEN, dtype=torch.float64) for _ in range(2))
    assert not products(autopar.capture(SoftSlots(dropout=0.5).double(), (x, y)))


class PartlyTurned(nn.Module):
    """Two halves of features of which one is turned, as rotary positions of a part of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.up(x), self.gate(x)
        some = up[..., :4]
        turned = some * gate[..., 4:] + torch.cat([-some[..., 2:], some[..., :2]], -1) * gate[..., :4]
        return self.down(torch.cat([turned, up[..., 4:]], -1)).square().mean() + self.up(gate).mean()


def test_a_piece_beside_what_is_none_is_no_expert() -> None:
    x = torch.randn(3, 5, HIDDEN)
    graph = capture(PartlyTurned(), (x,)).graph
    assert sum(node.target == "aten.linear.default" for node in graph.nodes) == 4


class SharingOneWeight(nn.Module):
    """Experts of two weights, which are one for the first expert alone."""

    def __init__(self, routed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routed, self.gate = routed, nn.Linear(HIDDEN, 3)
        self.w = nn.ParameterList([torch.randn(HIDDEN, HIDDEN) for _ in range(3)])
        self.v = nn.ParameterList([self.w[0], *(torch.randn(HIDDEN, HIDDEN) for _ in range(2))])

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w[e]).relu() + F.linear(x, self.v[e])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not self.routed:
            return F.mse_loss(torch.stack([self.expert(e, x) for e in range(3)]).sum(0), y)
        top, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for e in range(3):
            rows = torch.where(top == e)[0]
            out.index_add_(0, rows, self.expert(e, x[rows]))
        return F.mse_loss(out, y)


@pytest.mark.parametrize("routed", [False, True])
def test_two_weights_that_are_one_for_the_first_expert_are_stacked_apart(routed: bool) -> None:
    x, y = (torch.randn(6, HIDDEN, dtype=torch.float64) for _ in range(2))
    model = SharingOneWeight(routed).double()
    captured = capture(model, (x, y))
    assert sum(node.target == "aten.stack.default" for node in captured.graph.nodes) == 2
    assert compare_with_eager(captured, model, (x, y), {}).worst < 1e-12
