"""Python branches on random numbers: what the program does is what eager mode does where it is given the same draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from habits import HABITS, drops
from habits.base import BATCHES, Habit, batch, made
from habits.given import Draws, Given
from habits.training import Step, differences, module_step, scalar, two_ranks
from procs.habits import left_out
from procs.in_turn import marked
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autopar
from autopar.capture import Captured, capture
from autopar.comparison.program_vs_eager import inputs_of, state_of
from autopar.rules.families.branch import BRANCH
from autopar.runtime.stages.seeds import next_seed

OURS = [n for n, kind in HABITS.items() if kind.__module__ == drops.__name__ and not kind.refused]


def eager_with(kind: type[Habit], captured: Captured) -> tuple[list[Step], int]:
    """Training steps in eager mode with the draws of the program, and how many different ways they went."""
    model = made(kind)
    steps, ways = [], set()
    for i in range(BATCHES):
        weights, held = state_of(captured, model)
        values = {n: x.detach().clone() for n, x in {**weights, **held}.items()}
        args = batch(kind, i)
        draws = Draws(captured).with_values({**values, **inputs_of(captured, args, {})}, i)
        ways.add(tuple(draws.conditions))
        with Given(draws.drawn):
            steps.append(module_step(model, args, lambda m, *a: scalar(m(*a))))
    return steps, len(ways)


@pytest.mark.parametrize("name", marked(OURS, [name for k, name in enumerate(OURS) if k % 4]))
def test_as_eager_with_the_same_draws(name: str) -> None:
    kind = HABITS[name]
    captured = capture(made(kind), batch(kind, 0))
    assert any(node.target == BRANCH for node in captured.graph.nodes)
    truth, ways = eager_with(kind, captured)
    assert ways > 1, "all batches went one way"
    mine = two_ranks(kind, captured, None)  # on one device; ranks: world/test_habits.py
    assert not differences(mine, truth)
    assert [step.gradients.keys() for step in mine] == [step.gradients.keys() for step in truth], "of None and zero"


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_optimizer_passes_over_what_was_left_out(microbatches: int) -> None:
    """On one device; on two: procs/test_habits.py."""
    try:
        assert left_out("alone", microbatches) < 1e-9
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


IDS = torch.randint(3, 100, (4, 12), generator=torch.Generator().manual_seed(0))


def opt() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.OPTConfig(
        num_hidden_layers=3, hidden_size=16, ffn_dim=32, num_attention_heads=2, vocab_size=100, use_cache=False,
        max_position_embeddings=32, word_embed_proj_dim=16, layerdrop=0.5, dropout=0.0,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config), {"input_ids": IDS, "labels": IDS}


SMALL = dict(
    vocab_size=100, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, use_cache=False,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_layerdrop=0.5, decoder_layerdrop=0.5,
    dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def bart() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BartConfig(max_position_embeddings=32, **SMALL)
    return transformers.BartForConditionalGeneration(config), {"input_ids": IDS, "labels": IDS}


def whisper() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.WhisperConfig(
        num_mel_bins=8, max_source_positions=8, max_target_positions=16, decoder_start_token_id=1, **SMALL
    )
    sound = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))
    return transformers.WhisperForConditionalGeneration(config), {"input_features": sound, "labels": IDS}


def wav2vec() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, layerdrop=0.5,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, apply_spec_augment=False, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    sound = torch.randn(2, 400, generator=torch.Generator().manual_seed(1))
    return transformers.Wav2Vec2ForCTC(config), {"input_values": sound}


@pytest.mark.parametrize("make", [opt, wav2vec, *(pytest.param(m, marks=pytest.mark.slow) for m in (bart, whisper))])
def test_layer_drop_of_transformers(make: Any) -> None:
    torch.manual_seed(0)
    model, batch = make()
    model.double().train()
    batch = {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
    captured = capture(model, (), batch)
    ways = set()
    for seed in range(3):
        weights, held = state_of(captured, model)
        weights = {n: x.detach().clone().requires_grad_() for n, x in weights.items()}
        draws = Draws(captured).with_values({**weights, **held, **inputs_of(captured, (), batch)}, seed)
        ways.add(tuple(draws.conditions))
        with Given(draws.drawn):
            outputs = pytree.tree_leaves(model(**batch))
        mine = [x for x in draws.outputs[: len(outputs)] if isinstance(x, Tensor)]
        truth = [x for x in outputs if isinstance(x, Tensor)]
        model.zero_grad()
        weighed = [sum((x * x.detach().cos()).sum() for x in side if x.requires_grad) for side in (mine, truth)]
        for total in weighed:
            total.backward()  # type: ignore[union-attr]
        for x, y in zip(mine, truth, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)
        for name, parameter in model.named_parameters():
            if name in weights and parameter.requires_grad:
                sides = [torch.zeros_like(p) if p.grad is None else p.grad for p in (weights[name], parameter)]
                torch.testing.assert_close(*sides, rtol=1e-9, atol=1e-10)
    assert len(ways) > 1


def test_the_rate_is_that_of_the_model() -> None:
    """Over many steps, with the seeds that a module gives them, layer by layer; and layers do not go together."""

    class Rate(drops.Drops):
        def body(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand(()) < 0.3:
                    continue
                x = layer(x)
            return x

    captured = capture(made(Rate), batch(Rate, 0))
    weights, held = state_of(captured, made(Rate))
    values = {**weights, **held, **inputs_of(captured, batch(Rate, 0), {})}
    run, went = Draws(captured), []
    torch.manual_seed(7)
    for _ in range(800):
        run.asked.clear()
        run.with_values(values, next_seed())
        went.append([run.asked[name] for name in sorted(run.asked)])
    skipped = torch.tensor(went, dtype=torch.float64)
    assert skipped.shape == (800, 4)
    assert (skipped.mean(0) - 0.3).abs().max() < 4 * (0.3 * 0.7 / 800) ** 0.5
    assert (torch.corrcoef(skipped.T) - torch.eye(4)).abs().max() < 0.15


@pytest.mark.parametrize("name", ["LayerDropByTorch", "KeepByTorch", "BlocksThatDropThemselves", "StatisticsOfWhatRan"])
def test_eval_takes_the_side_of_the_model(name: str) -> None:
    kind = HABITS[name]
    args = batch(kind, 0)
    try:
        pm = autopar.parallelize(made(kind), 1, args)
        model = made(kind).eval()
        pm.eval()
        assert torch.equal(scalar(pm(*args)).detach(), scalar(model(*args)).detach())
        pm.train()
        assert torch.isfinite(scalar(pm(*args)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_resumed_run_goes_on_with_its_draws() -> None:
    kind = HABITS["BlocksThatDropThemselves"]
    args = batch(kind, 0)
    try:
        pm = autopar.parallelize(made(kind), 1, args)
        losses = [scalar(pm(*args)).item() for _ in range(3)]
        state = pm.state_dict()
        ahead = [scalar(pm(*args)).item() for _ in range(4)]
        other = autopar.parallelize(made(kind), 1, args)
        other.load_state_dict(state)
        assert [scalar(other(*args)).item() for _ in range(4)] == ahead
        assert len({*losses, *ahead}) > 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_branch_that_stays_in_eval() -> None:
    """A model that asks in eval mode too, as some forget ``self.training``."""
    kind = HABITS["DropByDie"]
    args = batch(kind, 0)
    try:
        pm = autopar.parallelize(made(kind), 1, args).eval()
        assert len({scalar(pm(*args)).item() for _ in range(12)}) > 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_many_layers_take_few_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the operators of repeated blocks are traced twice at most in each of them."""
    from autopar.capture.trace import tracing

    traces = []
    plain = tracing._export
    monkeypatch.setattr(tracing, "_export", lambda *a: traces.append(a) or plain(*a))

    class Deep(drops.Drops):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(drops.Block() for _ in range(24))

        def body(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    captured = capture(made(Deep), batch(Deep, 0))
    assert len(traces) <= 9
    assert sum(node.target == "aten.rand.default" for node in captured.graph.nodes) == 24
    assert sum(bool(trace[4].skipped) for trace in traces) >= len(traces) - 1  # where all drop out, nothing is there
