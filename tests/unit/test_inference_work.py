"""Work of a step that is found in captured models, against counts by hand."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import PlanError
from autopar.serving.attention_calls import attention_calls, seen_tokens
from autopar.serving.forward_capture import captured_forward, most_positions
from autopar.serving.model_work import ModelWork, WorkFinder
from autopar.serving.number_formats import formats_of
from autopar.serving.planning import shape_of
from autopar.serving.records import WorkerLayout
from autopar.serving.weight_cuts import weight_cuts
from autopar.serving.worker_layouts import layout_work
from cost_models.serving.work import REQUESTS
from hardware_profiles import load_cluster

transformers = pytest.importorskip("transformers")
IDS = {"input_ids": torch.zeros(2, 32, dtype=torch.int64, device="meta")}


def made(config, kind):
    with torch.device("meta"):
        return getattr(transformers, kind)(config)


MODELS = {
    "llama": lambda: made(transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, intermediate_size=640,
        vocab_size=512), "LlamaForCausalLM"),
    "gpt2": lambda: made(transformers.GPT2Config(n_embd=256, n_layer=4, n_head=8, vocab_size=512), "GPT2LMHeadModel"),
    "qwen3moe": lambda: made(transformers.Qwen3MoeConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        moe_intermediate_size=96, intermediate_size=512, num_experts=8, num_experts_per_tok=2, vocab_size=512),
        "Qwen3MoeForCausalLM"),
    "gptoss": lambda: made(transformers.GptOssConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, vocab_size=512, sliding_window=16),
        "GptOssForCausalLM"),
    "deepseek": lambda: made(transformers.DeepseekV3Config(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, intermediate_size=512,
        moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, vocab_size=512,
        q_lora_rank=96, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        first_k_dense_replace=1), "DeepseekV3ForCausalLM"),
}  # fmt: skip


class Block(nn.Module):
    """A block with attention by hand, as small GPTs have it."""

    def __init__(self, width, heads, longest):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(self.first(x)).split(width, 2)
        q, k, v = (t.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for t in parts)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf")).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """A plain GPT that returns its loss, too."""

    def __init__(self, vocabulary=512, width=256, heads=8, layers=4, longest=128):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList([Block(width, heads, longest) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x, targets):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        scores = self.head(self.norm(h))
        return F.cross_entropy(scores.view(-1, scores.size(-1)), targets.view(-1))


@cache
def finder_of(name: str, weights: str = "bf16") -> WorkFinder:
    if name == "plain":
        ids = torch.zeros(2, 32, dtype=torch.int64)
        model, args, kwargs = Gpt(), (ids, ids), {}
    else:
        model, args, kwargs = MODELS[name](), (), IDS
    forward, long = (captured_forward(model, args, kwargs, tokens) for tokens in (None, 48))
    seen = [seen_tokens(long.graph, call, long.constants) for call in attention_calls(long.graph)]
    assert all(causal for causal, _ in seen)
    found = WorkFinder(forward, [window for _, window in seen], formats_of(weights, "bf16"))
    assert forward.elements == sum(p.numel() for p in model.parameters())
    return found


@cache
def work_of(name: str, tensor: int, weights: str = "bf16") -> ModelWork:
    finder = finder_of(name, weights)
    return finder.of(weight_cuts(finder, load_cluster("dgx-h100"), tensor, shape_of(finder).kv_heads))


def products(work: ModelWork) -> dict[tuple[int, int], int]:
    return {(p.n, p.k): p.count for p in work.blocks.products}


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_llama(tensor):
    work, t = work_of("llama", tensor), tensor
    width, middle = 256, 640
    assert products(work) == {
        ((256 + 2 * 128) // t, width): 6, (width, 256 // t): 6, (2 * middle // t, width): 6, (width, middle // t): 6,
    }  # fmt: skip
    (attention,) = work.blocks.attentions
    assert (attention.heads, attention.kv_heads, attention.key_size, attention.value_size) == (8 // t, 4 // t, 32, 32)
    assert attention.window is None and attention.count == work.blocks.blocks == 6
    assert work.blocks.cache_bytes_per_token == 6 * (4 // t) * 64 * 2
    weights = 6 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 640)
    norms = 6 * 2 * 256
    assert work.blocks.weight_bytes == 2 * (weights // t + norms)
    (head,) = work.once.products
    assert (head.n, head.k, head.rows, head.weights) == (512 // t, 256, REQUESTS, "bf16")
    assert work.once.vocabulary == 512 // t
    reduced = [e for e in work.blocks.exchanges if e.kind == "all_reduce"]
    assert [(e.bytes_per_token, e.group, e.count) for e in reduced] == ([(512.0, t, 12)] if t > 1 else [])


def test_more_ranks_than_key_heads():
    """Eight ranks share four heads of keys by twos, and each query head is on one rank."""
    work = work_of("llama", 8)
    (attention,) = work.blocks.attentions
    assert (attention.heads, attention.kv_heads) == (1, 1)
    assert work.blocks.cache_bytes_per_token == 6 * 64 * 2


@pytest.mark.parametrize("name", ["gpt2", "plain"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_heads_as_many_as_keys(name, tensor):
    work, t = work_of(name, tensor), tensor
    expected = Counter({(768 // t, 256): 4, (256, 256 // t): 4})
    expected.update({(1024 // t, 256): 4, (256, 1024 // t): 4} if t != 4 else {(256, 256): 8})
    assert products(work) == expected
    (attention,) = work.blocks.attentions
    assert (attention.heads, attention.kv_heads, attention.key_size, attention.count) == (8 // t, 8 // t, 32, 4)
    assert work.blocks.cache_bytes_per_token == 4 * (8 // t) * 64 * 2
    assert [p.rows for p in work.once.products] == [REQUESTS]


@pytest.mark.parametrize("tensor", [1, 2])
def test_routed_experts(tensor):
    work, t = work_of("qwen3moe", tensor), tensor
    found = products(work)
    assert found[8, 256] == 4 if t == 1 else any(k == 256 and n <= 8 for n, k in found)  # the router
    (experts,) = work.experts
    assert (experts.total, experts.top_k, experts.shapes, experts.count) == (8, 2, ((192, 256), (256, 96)), 4)
    assert work.expert_bytes == 2 * 4 * 8 * 3 * 256 * 96
    if t > 1:
        assert [(e.kind, e.bytes_per_token, e.group, e.count) for e in work.combined] == [("all_reduce", 512.0, t, 4)]


def test_windows_and_biases():
    work = work_of("gptoss", 2)
    by_window = {a.window: a for a in work.blocks.attentions}
    assert set(by_window) == {None, 16} and {a.count for a in by_window.values()} == {3}
    assert work.blocks.window_cache_bytes == 3 * 2 * 64 * 2 * 16
    assert work.blocks.cache_bytes_per_token == 3 * 2 * 64 * 2


class Kinds(nn.Module):
    """Embeddings of tokens, of positions and of two kinds of tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(64, 8), nn.Embedding(48, 8), nn.Embedding(2, 8)

    def forward(self, ids):
        places = torch.arange(ids.shape[1])[None]
        return self.words(ids) + self.places(places) + self.kinds(torch.zeros_like(places))


def test_a_table_of_two_kinds_is_none_of_positions():
    assert most_positions(captured_forward(Kinds(), (torch.zeros(2, 32, dtype=torch.int64),), {})) == 48


def test_scores_of_parts_of_the_vocabulary_come_together():
    for tensor in (1, 2):
        once = work_of("llama", tensor).once
        gathered = [e for e in once.exchanges if e.rows == REQUESTS]
        whole = 512
        assert bool(gathered) == (once.vocabulary < whole)
        for each in gathered:
            assert (each.kind, each.bytes_per_token, each.group) == ("all_gather", whole * 2, tensor)
    assert gathered


def test_latent_attention():
    work = work_of("deepseek", 2)
    (attention,) = work.blocks.attentions
    assert (attention.heads, attention.kv_heads) == (4, 1)
    assert attention.key_size + attention.value_size == 64 + 16
    assert attention.expanded == (16 + 32, 32)
    assert work.blocks.cache_bytes_per_token == 6 * 80 * 2
    (experts,) = work.experts
    assert experts.count == 5  # the first block is dense


def test_formats_change_weights_of_blocks_alone():
    plain, narrow = work_of("qwen3moe", 1), work_of("qwen3moe", 1, "fp8")
    assert narrow.expert_bytes == plain.expert_bytes / 2
    assert narrow.once.weight_bytes == plain.once.weight_bytes
    assert {p.weights for p in narrow.blocks.products} == {"fp8", "bf16"}  # bf16: the router


def test_experts_by_all():
    work = {t: work_of("qwen3moe", t) for t in (1, 2)}
    layout = WorkerLayout(tensor=2, attention_data=2, expert=4)
    step = layout_work(work, layout)
    (experts,) = step.experts
    assert (experts.local, experts.spread) == (2, 2)
    kinds = {e.kind for e in step.exchanges if e.group == 2 and e.stride == 2}
    assert kinds == {"all_gather", "reduce_scatter"}
    halved = layout_work(work, WorkerLayout(tensor=2, expert=1, expert_tensor=2)).experts[0]
    assert (halved.local, halved.shapes) == (8, ((96, 256), (256, 48)))


def test_stages_share_blocks():
    work = {1: work_of("llama", 1)}
    two = layout_work(work, WorkerLayout(stages=2))
    assert two.stages == 2 and two.blocks == 3
    assert [p.count for p in two.products if p.rows != REQUESTS] == [3, 3, 3, 3]
    assert two.cache_bytes_per_token == work[1].blocks.cache_bytes_per_token / 2


def test_without_blocks_alike_the_work_is_the_same():
    """Tracing all blocks gives the work of tracing two of each kind."""
    from unittest import mock

    with mock.patch("autopar.serving.skipped_blocks.TRACED", 100):
        whole = captured_forward(MODELS["llama"](), (), IDS)
    assert not whole.times
    few = finder_of("llama").forward
    assert len(whole.graph.nodes) > 2 * len(few.graph.nodes) and whole.elements == few.elements
    finder = WorkFinder(whole, [None] * 6, formats_of("bf16", "bf16"))
    assert finder.of(weight_cuts(finder, load_cluster("dgx-h100"), 2, 4)) == work_of("llama", 2)


def test_a_block_that_reads_its_number_is_traced():
    class Numbered(Block):
        def __init__(self, number):
            super().__init__(256, 8, 128)
            self.number = number

        def forward(self, x):
            return super().forward(x * (1.0 if self.number % 2 else 2.0))

    model = Gpt()
    model.blocks = nn.ModuleList([Numbered(k) for k in range(4)])
    ids = torch.zeros(2, 32, dtype=torch.int64)
    assert not captured_forward(model, (ids, ids), {}).times


def test_the_model_is_left_as_it_was():
    model = Gpt().train()
    ids = torch.zeros(2, 32, dtype=torch.int64)
    captured_forward(model, (ids, ids), {})
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert len(list(model.blocks[3].parameters())) == 12


def test_no_prompt():
    with pytest.raises(PlanError, match="have no prompt"):
        captured_forward(nn.Linear(4, 4), (torch.zeros(2, 4),), {})
