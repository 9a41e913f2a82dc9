"""Train a model of Hugging Face transformers that starts on the meta device. ``python examples/train_hf.py``

Nothing of the model is allocated whole: every rank initialises its own slices, the same weights on any mesh. At the end
rank 0 has a state dict that ``from_pretrained`` understands.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=128, use_cache=False, attn_implementation="sdpa",
)  # fmt: skip
BATCH, TOKENS, STEPS = 8, 64, 20


def main() -> list[float]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 512, (BATCH, 1), generator=generator)
    ids = (start + 7 * torch.arange(TOKENS)) % 512  # every token follows from the one before
    batch = {"input_ids": ids, "labels": ids.clone()}
    pm = autopar.parallelize(model, dist.get_world_size(), batch, microbatches=2)  # a step's batch, cut in two
    optimizer = torch.optim.AdamW(pm.parameters(), lr=3e-3, foreach=True)
    losses = []
    for step in range(STEPS):
        losses.append(pm.train_step(**batch, optimizer=optimizer).item())
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f}", flush=True)
    state = autopar.full_state_dict(pm)
    if dist.get_rank() == 0:
        whole = LlamaForCausalLM(CONFIG)
        whole.load_state_dict(state)
        with torch.no_grad():
            print(f"last loss {losses[-1]:.3f}; the whole model, loaded on one device: {whole(**batch).loss:.3f}")
    return losses


if __name__ == "__main__":
    first, second = autopar.run_local(main, 2)
    assert first == second, "ranks disagree"
    assert first[-1] < first[0]
