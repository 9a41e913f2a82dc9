"""Exports of tiny models of transformers, for the tests of the trainers that read such configs."""

import importlib.util
import json
import tempfile
from functools import cache
from pathlib import Path

from autopar.capture import capture
from autopar.frontends.models import load_model
from autopar.planner.layouts.layout_words import parse_layout
from autopar.planner.layouts.pricing import PricedLayouts
from autopar.plans.clusters import get_cluster
from autopar.targets import target_named
from autopar.targets.model_facts import facts_of
from autopar.targets.target import Export, Source
from autopar.words.precision import parse_precision

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {"llama": LLAMA, "mixtral": MIXTRAL}
ROWS, PLACES = 16, 32


@cache
def captured_of(model, precision):
    if ":" in model:  # the spec of a file
        loaded = load_model(model)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(MODELS[model]))
            loaded = load_model(f"hf:{file}", ROWS, PLACES)
    policy = parse_precision(precision)
    captured = capture(loaded.model, loaded.args, loaded.kwargs, precision=policy)
    layouts = PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs))
    return loaded, captured, layouts, facts_of(loaded.model, captured), policy


def export_of(target, words, devices=4, model="llama", precision="bf16-mixed", optimizer="adamw"):
    """Return the export of a layout on one machine."""
    loaded, captured, layouts, facts, policy = captured_of(model, precision)
    name = f"local-x{devices} as {target_named(target).software}"
    priced = layouts.price(name, words)
    return Export(priced, loaded, captured, facts, get_cluster(name), name, ROWS, PLACES, policy, optimizer)


OWN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x).relu()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def make():
    return Model(), (torch.arange(128.0).reshape(16, 8), torch.zeros(16, 8))
"""


def own_file(folder):
    """Write a file with a factory; return its spec."""
    (folder / "own.py").write_text(OWN)
    return f"{folder / 'own.py'}:make"


def script(folder):
    """Import the train.py of a folder."""
    spec = importlib.util.spec_from_file_location("exported_train", folder / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder, export, target):
    """Write an export into a folder; return what was written."""
    files = target_named(target).write(export)
    for name, text in files.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return files


def read(path, target):
    """Return what a trainer reads in a file."""
    source = Source(path, path.read_text())
    found = target_named(target)
    assert found.reads(source)
    return found.read(source)


def read_text(folder, name, text, target):
    """Return what a trainer reads in a text."""
    (folder / name).write_text(text if isinstance(text, str) else json.dumps(text))
    return target_named(target).read(Source(folder / name, (folder / name).read_text()))


def said(layout, rows):
    """Return what a layout says, whatever its words are."""
    return (
        dict(layout.sizes), layout.experts, layout.experts_travel, layout.shards, layout.microbatches_of(rows),
        layout.recompute, 1 if layout.zero == 2 else layout.zero, layout.keeps, layout.groups,
        layout.way if layout.sizes["cp"] > 1 else "",
    )  # fmt: skip


def assert_same(config, export):
    """Check that a config says the layout, the batch and the formats of an export."""
    words = ",".join(word + (f"={value}" if value else "") for word, value in config.words.items())
    assert said(parse_layout(words), config.batch) == said(export.layout, ROWS), words
    assert (config.batch, config.sequence, config.optimizer) == (ROWS, PLACES, export.optimizer)
    assert parse_precision(config.precision) == export.precision
    assert not config.unpriced
