"""Ring attention on two gloo ranks against half of the whole attention on one, and the messages alone.

Both ranks compute the whole attention of one device at the same time, so that a shared machine slows down both sides
alike; half of that, and what the ring's messages take when nothing else is done, is what a perfect ring would take.
Ratios are of medians over steps in turn: below 1 is faster, as messages travel beside what is computed.
``python benchmarks/ring_two_ranks.py [--tokens 4096] [--whole-sequence] [--runs 9]``
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention as attention

from autopar.rules.attention import attention_halves, ring_attention
from autopar.rules.lowering_helpers.collective_helpers import permuted
from autopar.runtime.ranks.launch import run_local

HEADS, WIDTH = 8, 64
NOT_COUNTED = 2
"""First steps, in which memory is touched for the first time and connections are made."""


def measured(tokens: int, causal: bool, runs: int) -> dict[str, list[float]]:
    """Seconds of each step on this rank, forward and backward, by what is computed."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("seq",))
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, tokens, WIDTH) for _ in "qkv"]
    mine = slice(rank * tokens // 2, (rank + 1) * tokens // 2)
    kept = [x.clone().requires_grad_() for x in whole]
    pieces = [x[:, :, mine].clone().requires_grad_() for x in whole]
    grad = torch.randn_like(whole[0])
    sent: list[tuple[torch.Tensor, Any]] = []

    def one_device() -> None:
        attention(*kept, is_causal=causal).backward(grad)

    def ring() -> None:
        with spmd.set_current_mesh(mesh):
            of_ring = ring_attention.attention_across(*pieces, is_causal=causal, cut={"ring": ("seq",)})
            of_ring.backward(grad[:, :, mine])

    def messages() -> None:
        for message, to in sent:
            permuted(message, "seq", mesh.get_group("seq"), to)()

    record_messages(sent, ring)
    steps: dict[str, Callable[[], None]] = {"one device": one_device, "ring": ring, "messages": messages}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for run in range(runs + NOT_COUNTED):
        for name in sorted(steps, reverse=bool(run % 2)):
            for x in kept + pieces:
                x.grad = None
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            dist.barrier()
            if run >= NOT_COUNTED:
                seconds[name].append(time.perf_counter() - begin)
                seconds.setdefault(f"{name}, CPU", []).append(time.process_time() - cpu)
    return seconds


def record_messages(sent: list[tuple[torch.Tensor, Any]], step: Callable[[], None]) -> None:
    """Run a step and note each of its messages, and who receives it."""

    def noted(x: torch.Tensor, axis: str, group: Any, to: Any, *more: Any, **named: Any) -> Callable[[], torch.Tensor]:
        sent.append((x.clone(), list(to)))
        return permuted(x, axis, group, to, *more, **named)

    senders = (ring_attention, attention_halves)
    try:
        for module in senders:
            module.permuted = noted
        step()
    finally:
        for module in senders:
            module.permuted = permuted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--whole-sequence", action="store_true", help="each query sees all keys; else causal")
    parser.add_argument("--runs", type=int, default=9)
    given = parser.parse_args()
    of_rank = run_local(measured, 2, given.tokens, not given.whole_sequence, given.runs)[0]
    medians = {name: statistics.median(all_of) for name, all_of in of_rank.items()}
    perfect = medians["one device"] / 2 + medians["messages"]
    print(json.dumps({"tokens": given.tokens, "causal": not given.whole_sequence, "seconds": medians,
                      "ring over half of one device and messages": medians["ring"] / perfect}))  # fmt: skip


if __name__ == "__main__":
    main()
