"""Small data in the formats that the scripts read, made in the folder where a script runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np


def nothing(folder: Path) -> None:
    """The stubs make it."""


def tokens(folder: Path) -> None:
    """nanoGPT's: 16-bit numbers of tokens, without a vocabulary beside them."""
    place = folder / "data" / "noise"
    place.mkdir(parents=True)
    drawn = np.random.default_rng(0)
    for name, count in (("train.bin", 4000), ("val.bin", 1000)):
        (drawn.integers(0, 64, count) ** 2 % 61).astype(np.uint16).tofile(place / name)


def shards(folder: Path) -> None:
    """llama2.c's: 16-bit numbers of tokens in two files, the first to validate with."""
    place = folder / "data" / "tok64"
    place.mkdir(parents=True)
    drawn = np.random.default_rng(0)
    for number, count in enumerate((400, 2000)):
        (drawn.integers(0, 64, count) ** 2 % 61).astype(np.uint16).tofile(place / f"data{number:02}.bin")


def shards_of_numpy(folder: Path) -> None:
    """build-nanogpt's: 16-bit numbers of tokens in two files to learn from and one to validate with."""
    place = folder / "edu_fineweb10B"
    place.mkdir()
    drawn = np.random.default_rng(0)
    for name in ("train_0", "train_1", "val_0"):
        np.save(place / f"{name}.npy", (drawn.integers(0, 64, 700) ** 2 % 61).astype(np.uint16))


def text(folder: Path) -> None:
    """A text of sentences."""
    drawn = random.Random(0)
    sentence = "O God, O God! how weary, stale, flat and unprofitable seem to me all the uses of this world!\n"
    (folder / "input.txt").write_text("".join(sentence[drawn.randrange(8) :] for _ in range(40)), encoding="utf-8")
    (folder / "out" / "chargpt").mkdir(parents=True)


def results(folder: Path) -> None:
    """Where a script puts pictures."""
    (folder / "results").mkdir(exist_ok=True)


def names(folder: Path) -> None:
    """270 names to learn from, so that the last of the batches of 100 is smaller, and 30 to test with."""
    drawn = random.Random(0)
    syllables = [a + b for a in "bdlmn" for b in "aeiou"]
    lines = ("".join(drawn.choices(syllables, k=drawn.randrange(1, 5))) for _ in range(300))
    (folder / "names.txt").write_text("\n".join(lines), encoding="utf-8")


def waves(folder: Path) -> None:
    """Nine sines of 24 steps."""
    import torch

    start = np.random.default_rng(0).integers(-8, 8, (9, 1))
    torch.save(np.sin((np.arange(24) + start) / 4), folder / "traindata.pt")


def pictures(folder: Path) -> None:
    """Names of pictures; what is in them follows from the name (``stubs/PIL``)."""
    for part, count in (("train", 10), ("test", 5)):
        place = folder / "dataset" / "BSDS300" / "images" / part
        place.mkdir(parents=True)
        for i in range(count):
            (place / f"{i}.png").touch()


def words(folder: Path) -> None:
    """Three texts of words."""
    place = folder / "data" / "words"
    place.mkdir(parents=True)
    drawn = random.Random(0)
    for name, count in (("train", 60), ("valid", 25), ("test", 25)):
        lines = (" ".join(f"w{drawn.randrange(8) + i % 5}" for i in range(9)) for _ in range(count))
        (place / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")


def _tokenizer(place: Path, words: int) -> None:
    """A tokenizer of transformers for the words ``w0``, ``w1``, ..., ``</s>`` and what it does not know."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, **{f"w{i}": 2 + i for i in range(words)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", model_max_length=64
    ).save_pretrained(place)


def language_model(folder: Path) -> None:
    """Two texts of words and a tokenizer for them."""
    _tokenizer(folder / "tokenizer", 40)
    drawn = random.Random(0)
    for name, count in (("train", 60), ("valid", 25)):
        lines = (" ".join(f"w{(drawn.randrange(8) * i) % 40}" for i in range(9)) for _ in range(count))
        (folder / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")


def instructions(folder: Path) -> None:
    """A small Llama with a tokenizer, in the folder ``base``, and instructions with answers of several lengths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=42, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=1, bos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    _tokenizer(folder / "base", 40)
    drawn = random.Random(0)
    rows = (
        {key: " ".join(f"w{drawn.randrange(20) * k}" for _ in range(drawn.randrange(2, 9)))
         for k, key in ((1, "instruction"), (2, "output"))}
        for _ in range(107)
    )  # fmt: skip
    (folder / "rows").mkdir()
    (folder / "rows" / "train.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
