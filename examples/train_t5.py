"""T5, encoder and decoder, in four pipeline stages on two ranks. ``python examples/train_t5.py``

The encoder's output goes to every stage of the decoder; one embedding serves the encoder, the decoder and the head,
wherever these are, and stays one parameter. The schedule is ZB-V: the first and the last stage are on the same rank.
The model learns to turn sequences around; its losses are those of one device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import T5Config, T5ForConditionalGeneration

import autopar
from cost_models.schedules import grid

CONFIG = T5Config(
    vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_decoder_layers=3, num_heads=4, dropout_rate=0.0,
    decoder_start_token_id=0, use_cache=False, tie_word_embeddings=True,
)  # fmt: skip
TOKENS, BATCH, MICROBATCHES, STEPS = 16, 16, 4, 8


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)  # the same batches on every rank
    ids = torch.randint(2, 10, (STEPS, BATCH, TOKENS), generator=generator)
    return [{"input_ids": x, "labels": x.flip(1)} for x in ids]


def main() -> list[float]:
    torch.manual_seed(0)
    data = batches()
    model = autopar.parallelize(
        T5ForConditionalGeneration(CONFIG), dist.get_world_size(), data[0],
        stages=2, schedule="zb-v", microbatches=MICROBATCHES,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [model.train_step(**batch, optimizer=optimizer).item() for batch in data]
    if dist.get_rank() == 0:
        for number, stage in enumerate(model.plan.stages):
            print(f"stage {number} begins at {stage.first}, on rank {stage.devices[0]}")
        print(grid(model.plan.schedule))
        print("losses", " ".join(f"{x:.4f}" for x in losses), flush=True)
    return losses


def alone() -> list[float]:
    """The same training on one device."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    first, second = autopar.run_local(main, 2)
    assert first == second, "ranks disagree"
    worst = max(abs(a - b) for a, b in zip(first, alone(), strict=True))
    print(f"largest difference of a loss to one device: {worst:.1e}")
    assert worst < 1e-4
    assert first[-1] < first[0]
