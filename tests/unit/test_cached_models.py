"""Caches as buffers, and ``generate`` over them, in one process without ranks: the tokens of the model itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from cached_decoder import Sizes, greedy, made, prompt_of
from generating_models import (
    HOWS,
    LENGTH,
    MODELS,
    OF_DECODER,
    ROWS,
    SMALL,
    VOCABULARY,
    Generating,
    HandedCaches,
    gpt2,
    llama,
    prompts,
    t5,
    whisper,
)  # fmt: skip

from autopar.errors import CaptureError, RunError
from autopar.inference.cache_calls import bucket_of, visible
from autopar.inference.plain_models import changed_buffers, pieces_of
from autopar.inference.prepared import made_ready


def ready(of: Generating, length: int = LENGTH) -> Any:
    """Return a model over buffers, without programs, and the model as it was."""
    alone = copy.deepcopy(of.model).eval()
    of.model.eval()
    found = made_ready(of.model, of.example, None, length)
    assert found is not None
    return found.finished(found.module, found.encoder[0] if found.encoder else None), alone


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_model(name: str) -> None:
    of = MODELS[name]()
    cached, alone = ready(of)
    for how in HOWS:
        wanted = of.tokens(alone, how, 48)
        assert torch.equal(of.tokens(cached, how, 48), wanted)
        assert len({*wanted.flatten().tolist()}) > 2
    assert type(cached).__name__ == type(alone).__name__ and isinstance(cached, type(alone))
    assert cached.state_dict().keys() == alone.state_dict().keys()


@pytest.mark.parametrize("make", [gpt2, llama])
def test_attention_in_eager_mode_has_added_masks(make: Any) -> None:
    of = make(attn_implementation="eager")
    cached, alone = ready(of)
    assert torch.equal(of.tokens(cached, "greedy", 32), of.tokens(alone, "greedy", 32))


def test_fewer_rows_and_other_lengths_go_through_the_same_caches() -> None:
    of = llama()
    cached, alone = ready(of)
    for rows, length in ((3, 9), (1, 5), (2, 1), (4, 30)):
        ids = torch.randint(3, VOCABULARY, (rows, length))
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
        assert torch.equal(cached.generate(**call), alone.generate(**call))


def test_an_encoder_is_called_with_shorter_texts_and_without_a_mask() -> None:
    cached, alone = ready(t5())
    for length in (7, 12):
        ids = torch.randint(3, VOCABULARY, (2, length))
        assert torch.equal(cached.generate(ids, max_new_tokens=20), alone.generate(ids, max_new_tokens=20))


def test_what_transformers_offers_beside_is_kept() -> None:
    of = gpt2()
    cached, alone = ready(of)
    call: dict[str, Any] = {**of.call, "max_new_tokens": 24, "do_sample": False}
    call |= {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "num_return_sequences": 1, "eos_token_id": 17}
    call |= {"pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
    mine, wanted = cached.generate(**call), alone.generate(**call)
    assert torch.equal(mine.sequences, wanted.sequences)
    for a, b in zip(mine.scores, wanted.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_text_goes_on_from_its_cache_until_another_begins() -> None:
    of = llama()
    cached, alone = ready(of)
    ids = prompts(padded=False)["input_ids"]
    told: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    first = cached.generate(ids, max_new_tokens=8, **told)
    longer = torch.cat([first.sequences, ids[:, :3]], dim=1)
    further = cached.generate(longer, past_key_values=first.past_key_values, max_new_tokens=8, **told)
    assert torch.equal(further.sequences, alone.generate(longer, max_new_tokens=8, **told).sequences)
    cached.generate(ids, max_new_tokens=2, **told)
    with pytest.raises(RunError, match="another call of generate, or of forward without a cache, has begun"):
        cached.generate(further.sequences, past_key_values=further.past_key_values, max_new_tokens=2, **told)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_forward_scores_texts_and_goes_on_in_a_loop(make: Any) -> None:
    of = make()
    cached, alone = ready(of)
    ids = of.call["input_ids"]
    with torch.no_grad():
        wanted = alone(ids).logits
        torch.testing.assert_close(cached(ids).logits, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cached(ids, logits_to_keep=3).logits, wanted[:, -3:], atol=1e-4, rtol=1e-4)
        at = torch.tensor([1, 4])
        torch.testing.assert_close(cached(ids, logits_to_keep=at).logits, wanted[:, at], atol=1e-4, rtol=1e-4)
        new, past, made = ids, None, []
        for _ in range(8):
            out = cached(new, past_key_values=past)
            past, new = out.past_key_values, out.logits[:, -1:].argmax(-1)
            made.append(new)
    whole = torch.ones_like(ids)
    wanted = alone.generate(ids, attention_mask=whole, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(torch.cat([ids, *made], dim=1), wanted)


@pytest.mark.parametrize("make", [t5, whisper])
def test_forward_scores_with_an_encoder(make: Any) -> None:
    of = make()
    of.model.double()
    sounds = of.call.get("input_features")
    if sounds is not None:
        of.call["input_features"] = of.example["input_features"] = sounds.double()
    cached, alone = ready(of)
    decoded = torch.randint(3, VOCABULARY, (ROWS, 5))
    with torch.no_grad():
        wanted = alone(**of.call, decoder_input_ids=decoded).logits
        torch.testing.assert_close(cached(**of.call, decoder_input_ids=decoded).logits, wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(RunError, match="pass it, or encoder_outputs="):
        cached(decoder_input_ids=decoded)


def test_images_are_refused_before_they_are_encoded() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**SMALL, **OF_DECODER), image_token_index=VOCABULARY - 1,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config)
    texts = {name: tensor.clamp(max=VOCABULARY - 2) for name, tensor in prompts().items()}
    of = Generating(model, texts, {"input_ids": texts["input_ids"]})
    cached, alone = ready(of)
    assert torch.equal(of.tokens(cached, "greedy", 16), of.tokens(alone, "greedy", 16))
    encoded: list[object] = []
    model.get_image_features = lambda *_, **__: encoded.append(None)
    cached.get_image_features = model.get_image_features
    with pytest.raises(RunError, match=r"^pixel_values: programs that generate take tokens"):
        cached.generate(**of.call, pixel_values=torch.zeros(ROWS, 3, 8, 8), max_new_tokens=4, pad_token_id=0)
    assert not encoded


def test_tokens_that_fill_up_do_not_count_where_the_model_says_so() -> None:
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        **SMALL, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        word_embed_proj_dim=32, init_std=0.3, pad_token_id=0,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config)
    cached, alone = ready(Generating(model, prompts(), {"input_ids": prompts()["input_ids"]}))
    with torch.no_grad():
        mine, wanted = cached(**prompts()).logits, alone(**prompts()).logits
    torch.testing.assert_close(mine[:, -1], wanted[:, -1], atol=1e-4, rtol=1e-4)


def test_an_encoder_that_is_asked_for_the_embeddings() -> None:
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=128, init_std=0.3,
        pad_token_id=0, eos_token_id=None, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    of = Generating(transformers.MarianMTModel(config), prompts(padded=False), t5().example)
    cached, alone = ready(of)
    assert torch.equal(of.tokens(cached, "greedy", 24), of.tokens(alone, "greedy", 24))


def test_a_cache_forgets_tokens_at_its_end() -> None:
    cached, alone = ready(llama())
    ids = prompts(padded=False)["input_ids"]
    told: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    first = cached.generate(ids, **told)
    for keep, held in ((-5, 11), (6, 6)):
        first.past_key_values.crop(keep)
        assert first.past_key_values.get_seq_length() == held
    other = torch.cat([ids[:, :6], ids[:, :4]], dim=1)
    further = cached.generate(other, past_key_values=first.past_key_values, **told)
    assert torch.equal(further.sequences, alone.generate(other, **told).sequences)


def test_rows_advance_each_at_a_place_of_its_own() -> None:
    of = llama()
    cached, alone = ready(of)
    lengths = torch.tensor([5, 2, 7, 0])
    ids = torch.randint(3, VOCABULARY, (ROWS, 8))
    held = torch.zeros(ROWS, dtype=torch.long)
    cached.calls.step(ids[:, :8], held, lengths)
    logits = cached.calls.step(torch.full((ROWS, 1), 11), lengths, torch.ones(ROWS, dtype=torch.long))
    for row, length in enumerate(lengths.tolist()):
        alone_ids = torch.cat([ids[row, :length], torch.tensor([11])])[None]
        with torch.no_grad():
            torch.testing.assert_close(logits[row], alone(alone_ids).logits[0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"max_new_tokens": 200}, r"need 208 places, and the cache has 96.*cache_length=208"),
        ({"num_beams": 2}, "8 sequences at once .* the cache has 4"),
        ({"num_return_sequences": 2, "do_sample": True}, "8 sequences at once .* the cache has 4"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions of generate"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states of generate"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized' of generate"),
        ({"use_cache": False}, "use_cache=False, as given .* pass use_cache=True"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens of generate"),
        ({"disable_compile": False}, "disable_compile=False"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values is a DynamicCache with tensors of its own"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_fixed_cache_cannot_do_is_refused(options: dict[str, Any], said: str) -> None:
    of = gpt2()
    cached, _ = ready(of)
    with pytest.raises(RunError, match=said):
        cached.generate(**of.call, **{"max_new_tokens": 4, "pad_token_id": 0, **options})


def test_calls_that_programs_do_not_take_are_refused() -> None:
    cached, _ = ready(gpt2())
    ids = torch.zeros(4, 3, dtype=torch.long)
    with pytest.raises(RunError, match="labels: programs that generate take tokens"):
        cached(ids, labels=ids)
    with pytest.raises(RunError, match="without input_ids: pass the tokens"):
        cached(past_key_values=cached.new_cache())
    with pytest.raises(RunError, match="attention_mask has 1 entries in each row, and 3 tokens in the cache"):
        cached(ids[:, :1], attention_mask=ids[:, :1], past_key_values=cached(ids).past_key_values)
    with pytest.raises(RunError, match=r"cannot be copied: .* crop\(\) it back"):
        copy.deepcopy(cached.new_cache())
    with pytest.raises(RunError, match="inputs_embeds: programs that generate take tokens"):
        cached(inputs_embeds=torch.zeros(4, 3, 32), past_key_values=cached.new_cache())
    with pytest.raises(RunError, match=r"behind up to 95 in a cache of 96"):
        cached.calls.step(*torch.full((2, 4, 2), 95)[0:1], torch.full((4,), 95), torch.ones(4, dtype=torch.long))
    long = torch.zeros(2, 13, dtype=torch.long)
    with pytest.raises(RunError, match=r"input_ids has \[13\] in each row, and the program takes \[12\] or fewer"):
        ready(t5())[0].generate(long)
    with pytest.raises(RunError, match=r"input_features has \[8, 30\] in each row, and the program takes \[8, 40\]"):
        ready(whisper())[0].get_encoder()(torch.zeros(4, 8, 30))


def test_models_without_keys_and_values_are_refused() -> None:
    config = transformers.MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(CaptureError, match="cannot be kept in programs; generate with it on one device"):
        made_ready(transformers.MambaForCausalLM(config), torch.zeros(2, 4, dtype=torch.long), None, 32)
    sizes = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "shared_expert_intermediate_size": 16}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 4}
    mixed = transformers.Qwen3NextConfig(**{**SMALL, **OF_DECODER, **sizes})
    with pytest.raises(CaptureError, match="one token of Qwen3NextForCausalLM with a cache of keys and values failed"):
        made_ready(transformers.Qwen3NextForCausalLM(mixed), torch.zeros(2, 4, dtype=torch.long), None, 32)
    few = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    bias = transformers.BloomForCausalLM(transformers.BloomConfig(**{**few, "n_head": 4, "n_layer": 1}))
    with pytest.raises(CaptureError, match=r"BloomForCausalLM .* biases made of the mask \(ALiBi\)"):
        made_ready(bias, torch.zeros(2, 4, dtype=torch.long), None, 32)
    few = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 4, "num_layers": 2, "window_size": 8}
    local = transformers.GPTNeoConfig(**few, attention_types=[[["global", "local"], 1]], max_position_embeddings=64)
    with pytest.raises(CaptureError, match=r"GPTNeoForCausalLM keeps masks of its own .*\[1, 1, 64, 64\]"):
        made_ready(transformers.GPTNeoForCausalLM(local), torch.zeros(2, 4, dtype=torch.long), None, 32)
    chunks = llama()
    chunks.model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(CaptureError, match="has layers of chunked_attention, and masks of programs"):
        made_ready(chunks.model, chunks.example, None, 32)
    flex = gpt2()
    flex.model.config._attn_implementation = "flex_attention"
    with pytest.raises(CaptureError, match="'flex_attention', and its programs have masks that 'sdpa' and 'eager'"):
        made_ready(flex.model, flex.example, None, 32)


def test_an_encoder_that_shares_weights_needs_their_values() -> None:
    of = t5()
    with torch.device("meta"):
        model = type(of.model)(of.model.config)
    with pytest.raises(CaptureError, match="on the meta device each would get values of its own"):
        made_ready(model, of.example, None, 32)


def test_an_encoder_is_put_back() -> None:
    of = t5()
    alone = copy.deepcopy(of.model)
    found = made_ready(of.model, of.example, None, LENGTH)
    assert found is not None and found.encoder is not None
    assert not [*of.model.encoder.parameters()]
    found.encoder[0].put_back()
    assert of.model.encoder.embed_tokens.weight is of.model.shared.weight
    assert torch.equal(of.tokens(of.model.eval(), "greedy", 8), of.tokens(alone.eval(), "greedy", 8))


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(rope=True, kv_heads=1, slices=True)], ids=["index", "slices"])
def test_plain_models_with_caches_in_buffers(sizes: Sizes) -> None:
    model = made(sizes)
    alone = copy.deepcopy(model)
    found = made_ready(model, prompt_of(sizes, 10), None, None)
    assert found is not None
    cached = found.finished(found.module, None)
    for length in (10, 7, 1):
        prompt = prompt_of(sizes, length, seed=length)[0]
        assert torch.equal(cached.generate(prompt, 40)[:, length:], greedy(alone, prompt, 40))
    with pytest.raises(RunError, match="are 81, and the caches hold 1 to 80"):
        cached.generate(prompt, 80)
    with pytest.raises(RunError, match="5 prompts for caches of 4 rows"):
        cached.generate(torch.zeros(5, 3, dtype=torch.long))


def test_plain_models_that_are_handed_their_caches() -> None:
    torch.manual_seed(0)
    model = HandedCaches().double().eval()
    alone = copy.deepcopy(model)
    prompt = torch.randint(VOCABULARY, (ROWS, 6))
    found = made_ready(model, (prompt, torch.arange(6), model.caches()), None, None)
    assert found is not None
    cached = found.finished(found.module, None)
    assert torch.equal(cached.generate(prompt, 40), alone.greedy(prompt, 40))
    assert torch.equal(cached.generate(prompt[:2], 40), alone.greedy(prompt, 40)[:2])
    torch.manual_seed(1)
    drawn = cached.generate(prompt, 40, do_sample=True, temperature=1.2, top_k=5)
    torch.manual_seed(1)
    assert torch.equal(cached.generate(prompt, 40, do_sample=True, temperature=1.2, top_k=5), drawn)
    assert not torch.equal(drawn, alone.greedy(prompt, 40))
    ended = cached.generate(prompt, 40, eos_token_id=int(alone.greedy(prompt, 40)[0, 9]), pad_token_id=1)
    assert (ended[0, 10:] == 1).all()


def test_caches_that_grow_or_are_not_empty_are_refused() -> None:
    class Growing(HandedCaches):
        def forward(self, tokens: Any, positions: Any, caches: Any) -> Any:
            logits, new = super().forward(tokens, positions, caches)
            return logits, {name: torch.cat([one, one[:, :, :1]], dim=2) for name, one in new.items()}

    model, prompt = Growing().eval(), torch.zeros(ROWS, 2, dtype=torch.long)
    with pytest.raises(CaptureError, match=r"handed caches of \[4, 2, 80, 8\].* gives back \[4, 2, 81, 8\]"):
        made_ready(model, (prompt, torch.arange(2), model.caches()), None, None)
    used = made(Sizes())
    greedy(used, prompt_of(Sizes(), 4)[0], 2)
    with pytest.raises(CaptureError, match="does not begin with zeros"):
        made_ready(used, prompt_of(Sizes(), 4), None, None)


def test_a_model_without_caches_is_called_like_any_other() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
    assert made_ready(model, (torch.zeros(2, 3, dtype=torch.long),), None, None) is None
    assert made_ready(model, torch.zeros(2, 3), None, None) is None
    assert changed_buffers(model, (torch.zeros(2, 3, dtype=torch.long),)) == ((), None)


def test_lengths_of_calls() -> None:
    assert [bucket_of(n, 96) for n in (1, 2, 3, 9, 64, 65, 96)] == [1, 2, 4, 16, 64, 96, 96]
    assert bucket_of(5, 6) == 6
    with pytest.raises(RunError, match="7 more tokens do not fit into the cache, which has room for 6"):
        bucket_of(7, 6)
    assert list(pieces_of(37)) == [(0, 32), (32, 4), (36, 1)]
    mask = visible(torch.tensor([[False, False], [True, True]]))
    assert mask.tolist() == [[True, False], [True, True]]
