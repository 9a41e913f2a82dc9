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
from autopar.errors import AutoparError, RunError
from autopar.planner.intra_op.building import parameter_sharding
from autopar.plans.clusters import get_cluster
from autopar.runtime.parameters.rounded_steps import stochastically_rounded
from autopar.words.graph import Graph
from autopar.words.precision import PRESETS, Precision, parse_precision

BF16 = "master=bfloat16,reduce=bfloat16"


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


@pytest.mark.parametrize("name", [name for name, policy in PRESETS.items() if not policy.products])
def test_a_step_is_the_policy_written_out(name: str) -> None:
    policy = PRESETS[name]
    master = Net()
    pm = autopar.parallelize(copy.deepcopy(master), 1, batch(), precision=name)
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


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16-true"])
def test_a_norm_with_running_statistics_computes_in_their_format(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    x = torch.randn(6, 2, 8)
    plain = copy.deepcopy(model).bfloat16()
    pm = autopar.parallelize(model, 1, x, precision=name)
    plain[1] = nn.BatchNorm1d(4)  # weight 1 and bias 0, which 16 bits have, too
    mine, theirs = pm(x), plain(x.bfloat16())
    mine.sum().backward()
    theirs.sum().backward()
    assert mine.dtype == torch.bfloat16 and torch.equal(mine, theirs)
    for (key, p), q in zip(pm.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.to(p.dtype)), key
    buffers = dict(pm.named_buffers())
    assert all(torch.equal(buffers[f"1.{key}"], value) for key, value in plain[1].named_buffers())


def test_microbatches_add_up_in_the_format_of_the_reduction() -> None:
    master = Net()
    pm = autopar.parallelize(copy.deepcopy(master), 1, batch(6), precision="bf16-mixed")
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


@pytest.mark.parametrize(("name", "each"), [("bf16-mixed", 18), ("bf16-true", 8), ("32-true", 16), (None, 16),
                                              ("moments=bfloat16", 14), (f"{BF16},moments=bfloat16", 8),
                                              (f"{BF16},moments=float32", 12)])  # fmt: skip
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
        sent = parameter_sharding.collectives(
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
    pm = autopar.parallelize(copy.deepcopy(model), 1, inputs, gradient_dtype=torch.float32)
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
    rounded = Precision(moments="bfloat16", stochastic_rounding=True)
    assert rounded.text == "moments=bfloat16,stochastic_rounding=true"
    assert all(parse_precision(policy.text) == policy for policy in (*PRESETS.values(), rounded))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("bf16", "give bf16-mixed, bf16-true"), ("params=int8", "params is int8"), ("width=3", "give bf16-mixed"),
        ("params=float32,master=bfloat16", "masters are float32, or like params"),
        ("moments=float16", "give moments='float32', 'bfloat16'"),
        ("stochastic_rounding=true", "give moments='bfloat16', or leave it out"),
        ("params=own,moments=bfloat16", "so moments=bfloat16 is not possible"),
        ("stochastic_rounding=perhaps", "give bf16-mixed"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(given: str, said: str) -> None:
    with pytest.raises(AutoparError, match=said):
        autopar.plan(Net(), "local", batch(), precision=given)
    with pytest.raises(AutoparError, match="give True or False"):
        Precision(moments="bfloat16", stochastic_rounding=2)  # type: ignore[arg-type]


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, foreach=True),
    "Adam fused": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.5),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_moments_in_bfloat16_are_those_of_float32_rounded_after_each_step(name: str) -> None:
    master = Net()
    pm = autopar.parallelize(copy.deepcopy(master), 1, batch(), precision="moments=bfloat16")
    mine, theirs = (OPTIMIZERS[name](m.parameters()) for m in (pm, master))
    for _ in range(3):
        pm(*batch()).backward()
        written_out(master, PRESETS["bf16-mixed"], *batch())
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(pm.parameters(), master.parameters(), strict=True):
            assert torch.equal(p, q) and p.dtype == torch.float32
            for key, value in theirs.state[q].items():
                if isinstance(value, torch.Tensor) and value.shape == q.shape:
                    rounded = value.bfloat16()
                    value.copy_(rounded)
                    assert mine.state[p][key].dtype == torch.bfloat16 and torch.equal(mine.state[p][key], rounded)


def test_a_state_that_is_loaded_has_its_moments_in_their_format_and_goes_on_alike() -> None:
    policy = Precision(master="bfloat16", moments="bfloat16", reduce="bfloat16", stochastic_rounding=True)
    results = []
    for again in (False, True):
        pm = autopar.parallelize(Net(), 1, batch(), precision=policy)
        optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-4)
        for step in range(4):
            if again and step == 2:
                state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(pm.state_dict())
                pm = autopar.parallelize(Net(), 1, batch(), precision=policy)
                pm.load_state_dict(weights)
                optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-4)
                optimizer.load_state_dict(state)
            pm(*batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {v.dtype for s in optimizer.state.values() for v in s.values() if v.ndim} == {torch.bfloat16}
        results.append(torch.cat([p.detach().flatten() for p in pm.parameters()]))
    assert torch.equal(*results)


def test_stochastic_rounding_is_right_in_the_mean_and_keeps_what_is_exact() -> None:
    x = torch.tensor([1.0 + 2.0**-9, -3.0 - 2.0**-8, 0.0, 2.0**-130, torch.inf, -torch.inf, torch.nan])
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31 - 1, (20000, 1), dtype=torch.int32, generator=generator)
    rounded = stochastically_rounded(x.expand(20000, -1), random.expand(-1, len(x)))
    assert torch.equal(rounded[:, 4:5].float(), x[4:5].expand(20000, 1)) and rounded[:, 6].isnan().all()
    assert set(rounded[:, 0].tolist()) == {1.0, 1.0078125} and set(rounded[:, 1].tolist()) == {-3.0, -3.015625}
    assert torch.allclose(rounded[:, :4].double().mean(0), x[:4].double(), rtol=1e-3)
    exact = torch.randn(100).bfloat16()
    assert torch.equal(stochastically_rounded(exact.float(), random[:100, 0]), exact)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]), "what Muon keeps for"),
        (lambda params: type("Mine", (torch.optim.Optimizer,), {"step": lambda self: None})(params, {}), "Mine keeps"),
        (lambda params: torch.optim.AdamW(params, capturable=True), "capturable=False"),
    ],
)  # fmt: skip
def test_optimizers_that_cannot_keep_a_policy_are_refused(make: Any, said: str) -> None:
    pm = autopar.parallelize(Net(), 1, batch(), precision=Precision(moments="bfloat16", stochastic_rounding=True))
    optimizer = make(list(pm.parameters()))
    pm(*batch()).backward()
    with pytest.raises(RunError, match=said):
        optimizer.step()
