"""Products in eight bits on one device: the numbers of plain torch, what is refused, and what users do beside them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from procs import narrow_products as narrow
from procs.narrow_products import GPT, WIDTH, Written, batch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.certificate import check
from autopar.comparison import graph_vs_eager
from autopar.errors import AutoparError, CaptureError, PlanError
from autopar.rules.families.narrow_linear import narrow_linear
from autopar.rules.lowering_helpers.narrow_numbers import largest, narrowed, narrowed_and_turned, product, scale_of
from autopar.words.narrow_products import NARROW_LINEAR
from autopar.words.precision import Precision, parse_choice, parse_precision
from cost_models import optimizer_state_bytes
from hardware_profiles import load_cluster

FP8 = "products=fp8,modules=blocks.*"


def parallel(precision: Any = FP8, **options: Any) -> Any:
    return autopar.parallelize(GPT(), 1, (batch(),), precision=precision, **options)


def trained(pm: Any, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(pm.parameters(), lr=3e-3)
    return [float(pm.train_step(batch(step), optimizer=optimizer)) for step in range(steps)]


# --- numbers


def test_scales_are_the_least_powers_of_two_that_suffice() -> None:
    most = torch.tensor([448.0, 448.1, 1.0, 57344.0, 3e38, 0.0, torch.inf])
    scales = scale_of(most, torch.float8_e4m3fn)
    assert scales.log2().tolist() == [0, 1, -8, 7, 120, -100, torch.inf]
    assert scale_of(most, torch.float8_e5m2)[3] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_cast_is_what_plain_torch_casts(dtype: torch.dtype, by_row: bool) -> None:
    x = (torch.randn(24, 32, dtype=torch.float64) * 10.0 ** torch.randint(-4, 3, (24, 1))).to(dtype)
    scale = scale_of(largest(x, -1 if by_row else None), torch.float8_e4m3fn)
    mine, turned = narrowed_and_turned(x, scale, torch.float8_e4m3fn)
    theirs = narrow.cast(x, torch.float8_e4m3fn, by_row)
    assert torch.equal((mine.double() * scale.double()).to(dtype), theirs)
    assert torch.equal(turned.t().float(), mine.float())


def test_a_cast_of_what_was_cast_changes_nothing() -> None:
    """So a weight may be sent narrow and cast again where it is multiplied."""
    for seed in range(20):
        torch.manual_seed(seed)
        x = (torch.randn(16, 16) * 2.0**seed).bfloat16()
        once = narrow.cast(x, torch.float8_e4m3fn, False)
        assert torch.equal(narrow.cast(once, torch.float8_e4m3fn, False), once)


@pytest.mark.parametrize("sizes", [(16, 32, 48), (5, 7, 3)])
def test_a_product_is_that_of_what_the_numbers_stand_for(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b = torch.randn(m, k), torch.randn(n, k)
    for dim in (None, -1):
        of_a, of_b = (scale_of(largest(x, dim), torch.float8_e4m3fn) for x in (a, b))
        qa, qb = narrowed(a, of_a, torch.float8_e4m3fn), narrowed(b, of_b, torch.float8_e4m3fn)
        exact = (qa.double() * of_a.double()) @ (qb.double() * of_b.double()).t()
        assert torch.allclose(product(qa, of_a, qb, of_b, torch.float64), exact, rtol=1e-14)
        assert torch.allclose(product(qa, of_a, qb, of_b, torch.float32).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8", "fp8-row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_is_the_one_written_out_in_plain_torch(name: str, dtype: torch.dtype, transposed: bool) -> None:
    torch.manual_seed(0)
    x, w, bias = torch.randn(3, 5, 32), torch.randn(48, 32), torch.randn(48)
    grad, found = torch.randn(3, 5, 48).to(dtype), []
    for is_mine in (True, False):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w, bias)]
        if is_mine:
            weight = leaves[1].t() if transposed else leaves[1]
            y = narrow_linear(leaves[0], weight, leaves[2], name, transposed)
        else:
            y = Written.apply(leaves[0], leaves[1], name == "fp8-row") + leaves[2]
        y.backward(grad)
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == dtype and torch.allclose(mine.float(), theirs.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8", "fp8-row"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_visible(name: str, bad: float) -> None:
    """A cast that saturates would hide it from a gradient scaler."""
    x, w = torch.randn(4, 32), torch.randn(16, 32)
    x[1, 3] = bad
    y = narrow_linear(x, w, None, name)
    assert not torch.isfinite(y[1]).any() and bool(torch.isfinite(y[2]).all()) is (name == "fp8-row")


# --- which products


def test_patterns_say_which_products() -> None:
    def narrow_in(modules: str) -> set[str]:
        graph = autopar.capture(GPT(), (batch(),), precision=f"products=fp8,modules={modules}").graph
        return {node.module for _, node in graph.of_kind("op") if node.target == NARROW_LINEAR}

    assert narrow_in("*.up|*.down") == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down")}
    assert narrow_in("!blocks.0.*") == {f"blocks.1.{name}" for name in ("qkv", "out", "up", "down")} | {"head"}


def test_policies_with_patterns_are_words() -> None:
    policy = parse_precision("products=fp8-row,modules=layers.*.mlp.*|!*.gate,params=float16")
    assert policy == Precision(params="float16", products="fp8-row", modules=("layers.*.mlp.*", "!*.gate"))
    assert policy is not None and parse_precision(policy.text) == policy and policy.wide == Precision(params="float16")


def test_patterns_that_name_no_product_are_an_error_and_a_model_without_any_is_told() -> None:
    with pytest.raises(CaptureError, match=r"in modules of nothing.\*, with features that are multiples of 16"):
        parallel("products=fp8,modules=nothing.*")
    with pytest.warns(UserWarning, match=r"no product of the model would be in fp8.*all is as under bf16-mixed"):
        pm = parallel("fp8-mixed")
    assert trained(pm, 2) == trained(parallel("bf16-mixed"), 2)


def test_products_of_experts_are_refused_with_the_patterns_that_leave_them_wide() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, moe_intermediate_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        use_cache=False,
    )  # fmt: skip
    model, ids = Qwen3MoeForCausalLM(config), batch()
    example = {"input_ids": ids, "labels": ids}
    with pytest.raises(CaptureError, match="products of experts in 'model") as raised:
        autopar.parallelize(model, 1, example, precision="products=fp8,modules=model.layers.*")
    said = str(raised.value).partition("precision='")[2].rpartition("'")[0]
    pm = autopar.parallelize(model, 1, example, precision=said)
    assert torch.isfinite(pm.train_step(input_ids=ids, labels=ids))


# --- beside it


def test_gpt_trains_as_written_out() -> None:
    for name in ("exact", "mixed", "exact rows"):
        policy = parse_precision(narrow.BY_NAME[name])
        assert policy is not None
        mine, alone = trained(parallel(policy), 12), narrow.curve_on_one_device(policy, 12, 1)
        limit = 1e-12 if "exact" in name else 5e-3  # in bfloat16 norms and sums round otherwise
        assert max(abs(a - b) / b for a, b in zip(mine, alone, strict=True)) < limit


def test_a_gradient_scaler_skips_a_step_that_overflows() -> None:
    pm = parallel(f"params=float16,{FP8}")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=3e-3)
    for scale, skips in ((2.0**10, False), (2.0**40, True)):
        scaler, before = torch.amp.GradScaler("cpu", init_scale=scale), [p.detach().clone() for p in pm.parameters()]
        pm.train_step(batch(), optimizer=optimizer, scaler=scaler)
        assert all(map(torch.equal, before, pm.parameters())) is skips
        assert scaler.get_scale() == scale * (0.5 if skips else 1)


def test_autocast_around_eval_mode_other_shapes_and_inference() -> None:
    pm = parallel()
    loss = pm(batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(pm(batch()), loss)
    pm.eval()
    with torch.no_grad():
        assert torch.equal(pm(batch()), loss) and torch.isfinite(pm(batch()[:3]))
    assert torch.equal(parallel(mode="inference")(batch()), loss)


def test_a_state_goes_on_under_another_policy() -> None:
    pm = parallel()
    trained(pm)
    state = autopar.full_state_dict(pm)
    assert {value.dtype for value in state.values()} == {torch.float32}
    wide = parallel("bf16-mixed")
    autopar.load_full_state_dict(wide, state)
    assert abs(float(pm(batch(9)).detach()) / float(wide(batch(9)).detach()) - 1) < 1e-2


def test_recomputed_and_compiled_programs_have_the_same_numbers() -> None:
    plain = trained(parallel())
    assert trained(parallel(recompute=["blocks.*"])) == plain
    pm = parallel()
    pm.compile(backend="aot_eager")
    assert trained(pm) == plain


def test_the_capture_is_compared_with_the_model_as_it_is_written() -> None:
    """Eager mode multiplies wide numbers; the comparison does, too, and is as sharp as without narrow products."""
    captured = autopar.capture(GPT(), (batch(),), precision=f"params=float32,{FP8}")
    found = graph_vs_eager.compare_with_eager(captured, GPT(), (batch(),), {})
    assert not found.note and found.worst < 1e-5
    other = GPT()
    with torch.no_grad():
        other.blocks[0].up.weight.mul_(1.5)
    other.blocks[0].up.forward = lambda x: F.linear(x, other.blocks[0].up.weight / 2, other.blocks[0].up.bias)  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="not what the model does in eager mode"):
        graph_vs_eager.compare_with_eager(captured, other, (batch(),), {})


@pytest.mark.parametrize("name", ["fp8", "fp8-row", "fp8,narrow_gathers=true"])
@pytest.mark.parametrize("layout", ["zero", "both"])
def test_seconds_and_bytes_are_those_of_the_program(name: str, layout: str) -> None:
    policy = f"params=float32,products={name},modules=blocks.*"
    captured = autopar.capture(GPT(), (batch(),), precision=policy)
    options = copy.deepcopy(narrow.LAYOUTS[layout])
    for cluster in ("local-x4", "dgx-h100"):
        plan = autopar.plan(GPT(), cluster, (batch(),), captured=captured, stages=1, microbatches=1, **options)
        report = check(plan.stages[0], captured.graph, load_cluster(cluster), types=True)
        assert report.ok, report.failures


# --- a choice among policies


def test_the_fastest_that_fits_is_taken() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8192, 8192) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.float().square().mean()

    with torch.device("meta"):
        model, x = Wide(), torch.zeros(16384, 8192)
    wanted: dict[str, Any] = {"mesh": {"data": 1}, "microbatches": 1, "stages": 1, "recompute": "none"}
    chosen = {
        cluster: autopar.plan(model, cluster, (x,), precision="auto", **wanted) for cluster in ("dgx-h100", "dgx-a100")
    }
    assert {name: str(plan.pins.precision) for name, plan in chosen.items()} == {
        "dgx-h100": "fp8-mixed", "dgx-a100": "bf16-mixed",
    }  # fmt: skip
    alone = autopar.plan(model, "dgx-h100", (x,), precision="fp8-mixed", **wanted)
    assert chosen["dgx-h100"].seconds == alone.seconds
    assert "of those that were allowed: bf16-mixed" in chosen["dgx-h100"].notes[0]
    assert "fp8-mixed has no plan (products in fp8 need cores" in chosen["dgx-a100"].notes[0]
    with pytest.raises(PlanError, match="no plan under any of the policies"):
        autopar.plan(model, "dgx-a100", (x,), precision=["fp8-mixed", "nvfp4-mixed"], **wanted)


def test_parallelize_takes_a_choice() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm = parallel(["bf16-mixed", FP8])
    assert str(pm.plan.pins.precision) == "bf16-mixed" and FP8 in pm.plan.notes[0]  # processors have no such cores
    assert torch.isfinite(pm.train_step(batch()))


def test_words_of_choices() -> None:
    assert [str(p) for p in parse_choice("auto")] == ["bf16-mixed", "fp8-mixed"]
    assert [str(p) for p in parse_choice("bf16-true or fp8-row-mixed")] == ["bf16-true", "fp8-row-mixed"]
    assert parse_choice("bf16-mixed") == () == parse_choice(None)
    for value in ([], [None], ["fp9"]):
        with pytest.raises(AutoparError):
            parse_choice(value)
    with pytest.raises(AutoparError, match="a choice, which plan and parallelize make; give one policy here"):
        autopar.capture(GPT(), (batch(),), precision="auto")


def test_states_of_eight_bits_are_counted() -> None:
    """Those of torchao's AdamW8bit, as they were measured."""
    counted = [optimizer_state_bytes("adamw8bit", n, 4) for n in (512 * 64, 100 * 50, 63)]
    assert counted == [68612, 40004, 508]
    wide, eight = (autopar.plan(GPT(), "local-x2", (batch(),), mesh={"data": 2}, microbatches=1, stages=1, optimizer=o)
                   for o in ("adamw", "adamw8bit"))  # fmt: skip
    assert eight.price.optimizer_bytes < 0.5 * wide.price.optimizer_bytes
    assert WIDTH * 4 * WIDTH % 256 == 0
