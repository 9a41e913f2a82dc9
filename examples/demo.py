"""What ``make demo`` runs: a real model, from capture to a trained and verified run on two ranks of this machine.

1. capture a small GPT-2 of Hugging Face transformers, as it is;
2. plan it for two local processes: the integer program says how every op is cut;
3. look at the plan and at the program that follows from it;
4. train some steps on two ranks, and compare loss, gradients and weights with one device.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

BATCH, TOKENS, STEPS, RANKS = 8, 64, 6, 2


def model_and_batches() -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=2048, n_positions=TOKENS, n_embd=256, n_layer=4, n_head=8, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    counting = 3 * torch.arange(TOKENS)  # sequences that count in threes: something to learn
    batches = [(torch.randint(0, 2048, (BATCH, 1)) + counting) % 2048 for _ in range(STEPS)]
    return GPT2LMHeadModel(config).train(), [{"input_ids": ids, "labels": ids.clone()} for ids in batches]


def train(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> tuple[list[float], list[float]]:
    """``(losses, seconds)`` of one optimizer step for each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def rank() -> dict[str, Any]:
    """What every rank does: the three lines that change in a training script are the middle ones."""
    model, batches = model_and_batches()
    pm = autopar.parallelize(model, dist.get_world_size(), batches[0])
    pm(**batches[0]).loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in pm.named_parameters()}
    pm.zero_grad()
    losses, seconds = train(pm, batches)
    return {
        "losses": losses, "seconds": seconds, "gradients": gradients,
        "weights": autopar.full_state_dict(pm), "code": pm.program.code, "mesh": pm.plan.mesh,
    }  # fmt: skip


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in b)


def main() -> None:
    torch.set_num_threads(1)
    model, batches = model_and_batches()
    start = time.perf_counter()
    captured = autopar.capture(model, batches[0])
    print(f"1. captured {len(captured.graph.nodes)} nodes in {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    plan = autopar.plan(model, f"local-x{RANKS}", batches[0], stages=1, microbatches=1, captured=captured)
    solution = plan.solution
    assert solution is not None
    shape = " x ".join(f"{axis}={n}" for axis, n in plan.mesh)
    print(
        f"2. planned for mesh {shape} in {time.perf_counter() - start:.1f} s: {solution.status}, gap {solution.gap:.1%}"
    )
    show(plan, captured.graph)
    print(f"4. training {STEPS} steps on {RANKS} ranks ...")
    found = autopar.run_local(rank, RANKS)[0]
    lines = [line.strip().split(";")[0] for line in found["code"].splitlines() if " = " in line]
    print(f"   the program of one rank has {len(lines)} lines; some of them:")
    print("\n".join(f"     {line}" for line in (*lines[:4], "...", *lines[-8:]) if len(line) < 160))
    model(**batches[0]).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    losses, seconds = train(model, batches)
    differences = {
        "loss": max(abs(a - b) for a, b in zip(found["losses"], losses, strict=True)),
        "gradients": worst(found["gradients"], gradients),
        "weights": worst(found["weights"], model.state_dict()),
    }
    print("   losses      ", "  ".join(f"{loss:.4f}" for loss in found["losses"]))
    print("   one device  ", "  ".join(f"{loss:.4f}" for loss in losses))
    print("   largest difference: ", ", ".join(f"{what} {value:.1e}" for what, value in differences.items()))
    print(
        f"   step: predicted {plan.price.seconds * 1e3:.0f} ms, measured {min(found['seconds']) * 1e3:.0f} ms on "
        f"{RANKS} ranks, {min(seconds) * 1e3:.0f} ms on one device"
    )
    assert differences["loss"] < 1e-4 and differences["gradients"] < 1e-4, differences
    assert differences["weights"] < 1e-3, differences
    print("the same numbers as one device.")


def show(plan: autopar.Plan, graph: Any) -> None:
    """The plan in a few lines; ``autopar show`` prints all of it."""
    price = plan.price
    mib = 2.0**20
    print("3. the plan, one block of the model:")
    block = [node for node in graph.nodes if node.kind == "op" and node.module.startswith("transformer.h.1")]
    for node in block:
        cut = ", ".join(f"{axis}: {f}" for (axis, _), f in zip(plan.mesh, plan.ops[node.name], strict=True))
        print(f"     {node.module:32} {node.target.split('.')[1]:30} {cut}")
    kinds = sorted({(c.stored, c.used, c.lifetime) for c in plan.params.values()})
    print("   parameters:", "; ".join(f"stored {','.join(s)} used {','.join(u)} per {life}" for s, u, life in kinds))
    print(
        f"   predicted: compute {price.compute_seconds * 1e3:.1f} ms, activations' collectives "
        f"{price.activation_seconds * 1e3:.1f} ms, parameters' {price.parameter_seconds * 1e3:.1f} ms; "
        f"{price.memory_bytes / mib:.0f} MiB per rank"
    )


if __name__ == "__main__":
    main()
