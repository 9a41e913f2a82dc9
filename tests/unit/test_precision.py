"""Precision policies on one device: masters, what computes, bytes, and the same step written out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import planfile
from autopar.certificate import check
from autopar.clusters import get_cluster
from autopar.errors import AutoparError
from autopar.graph import Graph
from autopar.planner.intra_op import params
from autopar.precision import PRESETS, Precision, parse_precision


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.of_floats, self.norm = nn.Embedding(16, 8), nn.Linear(5, 8), nn.LayerNorm(8)
        self.register_buffer("scale", torch.full((8,), 0.3))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.words(ids) + self.of_floats(x)).relu()
        loss = F.cross_entropy(self.head(h * self.scale.to(h.dtype)).float(), ids)
        return loss + 0 * self.head.weight.sum()


def batch(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, 16, (rows,), generator=generator), torch.randn(rows, 5, generator=generator)


def written_out(master: nn.Module, policy: Precision, *inputs: Any, parts: int = 1) -> torch.Tensor:
    """The loss of a step of the policy, in plain torch; gradients are left in the masters."""
    low = copy.deepcopy(master)
    for p in low.parameters():
        p.data, p.grad = p.data.to(policy.low), None
    total = torch.zeros(())
    sums: dict[str, torch.Tensor] = {}
    for piece in zip(*(x.chunk(parts) for x in inputs), strict=True):
        loss = low(*(policy.cast(x) for x in piece)) / parts
        loss.backward()
        total = total + loss.detach()
        for name, p in low.named_parameters():
            grad, p.grad = p.grad.to(policy.reduced_in), None
            sums[name] = sums[name] + grad if name in sums else grad
    for name, p in master.named_parameters():
        p.grad = sums[name].to(p.dtype)
    return total


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_step_is_the_policy_written_out(name: str) -> None:
    policy = PRESETS[name]
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    pm = autopar.parallelize(model, 1, batch(), precision=name)
    assert all(torch.equal(v, before[k]) and v.dtype == torch.float32 for k, v in model.state_dict().items())
    master = copy.deepcopy(model)
    for p in master.parameters():
        p.data = p.data.to(getattr(torch, policy.master))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pm, master)]
    for rows in (12, 12, 4):  # another shape goes on with the same masters
        loss = pm(*batch(rows))
        loss.backward()
        assert torch.equal(loss, written_out(master, policy, *batch(rows)))
        for (n, p), q in zip(pm.named_parameters(), master.parameters(), strict=True):
            assert p.dtype == q.dtype == p.grad.dtype and torch.equal(p.grad, q.grad), n
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for k, v in autopar.full_state_dict(pm).items():
        assert torch.equal(v, master.state_dict()[k]), k


def test_microbatches_add_up_in_the_format_of_the_reduction() -> None:
    model = Net()
    pm = autopar.parallelize(model, 1, batch(6), precision="bf16-mixed")
    master = copy.deepcopy(model)
    ids, x = batch(24)
    mine = pm.train_step(ids, x, microbatches=4)
    assert torch.equal(mine, written_out(master, PRESETS["bf16-mixed"], ids, x, parts=4))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(pm.parameters(), master.parameters(), strict=True))
    mean = torch.stack([p.grad.float().norm() for p in pm.parameters()]).mean()
    assert mean > 0


def test_a_model_in_bfloat16_gets_masters() -> None:
    model = Net().bfloat16()
    pm = autopar.parallelize(model, 1, (batch()[0], batch()[1].bfloat16()), precision="bf16-mixed")
    assert {p.dtype for p in pm.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "each"), [("bf16-mixed", 18), ("bf16-true", 8), ("32-true", 16), (None, 16)])
def test_bytes_of_a_parameter(name: str | None, each: int, tmp_path: Path) -> None:
    model = Net()
    plan = autopar.plan(model, "local-x2", batch(), mesh="data=2", stages=1, precision=name, params={"*": "replicate"})
    price = plan.price
    n = sum(p.numel() for p in model.parameters())
    steps = 4 * len(list(model.parameters()))  # Adam counts them
    assert (
        price.parameter_bytes + price.gradient_bytes + price.optimizer_bytes + price.gathered_bytes == each * n + steps
    )
    captured = autopar.capture(model, batch(), precision=name)
    planfile.save(tmp_path / "plan.json", plan, captured.graph)
    document = planfile.open_(tmp_path / "plan.json")
    assert document.precision == parse_precision(name)
    assert planfile.bind(document, captured.graph).pins.precision == parse_precision(name)


def test_a_plan_says_its_policy(tmp_path: Path) -> None:
    plan = autopar.plan(Net(), "local", batch(), mesh="data=1", precision="bf16-mixed")
    planfile.save(tmp_path / "plan.json", plan, autopar.capture(Net(), batch(), precision="bf16-mixed").graph)
    pm = autopar.parallelize(Net(), 1, batch(), plan=tmp_path / "plan.json")
    assert pm.program.slots[0].dtype == "bfloat16" and next(pm.parameters()).dtype == torch.float32


def test_eval_mode_computes_alike() -> None:
    pm = autopar.parallelize(Net(), 1, batch(), precision="bf16-mixed")
    with torch.no_grad():
        trained = pm(*batch())
        assert torch.equal(pm.eval()(*batch()), trained)


def gradients_sent(plan: autopar.Plan, graph: Graph) -> tuple[int, int]:
    """Bytes of the collectives of parameters in a step: on their way to the program, and of gradients back."""
    (stage,) = plan.stages
    forth = back = 0
    for _, node in graph.of_kind("param"):
        sent = params.collectives(
            node.out, True, stage.params[node.target], stage.mesh, stage.microbatches, graph.precision
        )
        forth += sum(n * times for _, kind, n, times in sent if kind == "all_gather")
        back += sum(n * times for _, kind, n, times in sent if kind != "all_gather")
    return forth, back


def test_gradients_that_are_added_up_wider_are_priced_wider() -> None:
    model, inputs = nn.Sequential(nn.Linear(64, 64)).bfloat16(), (torch.randn(8, 64).bfloat16(),)

    def planned(precision: str | None) -> tuple[autopar.Plan, Graph]:
        plan = autopar.plan(
            model, "local-x2", inputs, loss_fn=loss, mesh="data=2", stages=1, precision=precision, params={"*": "S0"},
            constraints={"0": {"data": "b"}}, microbatches=1,
        )
        graph = autopar.capture(model, inputs, loss_fn=loss, precision=precision).graph
        assert check(plan.stages[0], graph, get_cluster("local-x2")).ok
        return plan, graph

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.float().sum()

    own, wide = planned(None), planned("params=own,reduce=float32")
    (forth, back), (wide_forth, wide_back) = gradients_sent(*own), gradients_sent(*wide)
    assert forth == wide_forth > 0 and wide_back == 2 * back > 0
    assert own[0].price.seconds < wide[0].price.seconds
    bytes_of = [(p.parameter_bytes, p.gradient_bytes, p.optimizer_bytes) for p in (own[0].price, wide[0].price)]
    assert bytes_of[0] == bytes_of[1], "nothing that stays is wider"


def test_a_gradient_dtype_is_that_of_the_plan() -> None:
    model, inputs = Net().bfloat16(), (batch()[0], batch()[1].bfloat16())
    pm = autopar.parallelize(model, 1, inputs, gradient_dtype=torch.float32)
    assert pm.gradient_dtype == torch.float32
    captured = autopar.capture(model, inputs, precision="params=own,reduce=float32")
    assert pm.plan.fingerprint == captured.graph.fingerprint
    loss = pm(*inputs)
    loss.backward()
    expected = model(*inputs)
    expected.backward()
    assert torch.equal(loss, expected)
    for p, q in zip(pm.parameters(), model.parameters(), strict=True):
        assert p.dtype == q.dtype == torch.bfloat16 and torch.equal(p.grad, q.grad)
    mixed = autopar.parallelize(Net(), 1, batch(), precision="bf16-mixed", gradient_dtype=torch.bfloat16)
    assert mixed.plan.fingerprint == autopar.capture(Net(), batch(), precision="reduce=bfloat16").graph.fingerprint


def test_words() -> None:
    assert parse_precision("params=own") == Precision(params="own", reduce="float32")
    assert Precision(params="own", reduce="bfloat16").text == "params=own,reduce=bfloat16"
    assert parse_precision("reduce=bfloat16") == Precision(reduce=torch.bfloat16)
    assert Precision(reduce="bfloat16").text == "reduce=bfloat16"
    assert all(parse_precision(policy.text) == policy for policy in PRESETS.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("bf16", "give bf16-mixed, bf16-true"), ("params=int8", "params is int8"), ("width=3", "give bf16-mixed"),
        ("params=float32,master=bfloat16", "masters are float32, or like params"),
        ("moments=bfloat16", "torch's optimizers keep their state"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(given: str, said: str) -> None:
    with pytest.raises(AutoparError, match=said):
        autopar.plan(Net(), "local", batch(), precision=given)
    with pytest.raises(AutoparError, match="stochastic_rounding is not there"):
        Precision(stochastic_rounding=True)
