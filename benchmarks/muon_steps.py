"""A step of Muon on gloo ranks of one thread each: matrices spread over owners, against one whole one after the other.

A GPT of 12 layers is parallelized with its parameters in shards; both ways step on the same parameters with the same
gradients, in turns, so that what else the machine does hits both. Seconds are medians, of the wall and of processors;
bytes are those that a rank receives from others in a step.
``python benchmarks/muon_steps.py [--ranks 4] [--width 256] [--layers 12] [--runs 7] [--state "S0 use"]``
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.parameters import whole_matrices
from autopar.torch_private import TorchDispatchMode


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(512, width), nn.Linear(width, 512, bias=False)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.table(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


class Received(TorchDispatchMode):
    """Bytes that this rank receives from others by gathers and exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes, self.collectives = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        n = dist.get_world_size()
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.collectives, self.n_bytes = self.collectives + 1, self.n_bytes + result.nbytes * (n - 1) / n
        elif func is torch.ops.c10d.alltoall_base_.default:
            self.collectives, self.n_bytes = self.collectives + 1, self.n_bytes + args[0].nbytes
        return result


def measured(width: int, layers: int, runs: int, state: str) -> dict[str, Any]:
    """Seconds and bytes of both ways, on one rank."""
    torch.manual_seed(0)
    model, x = Gpt(width, layers), torch.randint(0, 512, (dist.get_world_size(), 16))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    stored = {f"layers.*.{name}.weight": state for name in ("qkv", "out", "up", "down")}
    pm = autopar.parallelize(model, mesh, (x,), constraints={"*": {"data": "b"}}, params=stored, verify_capture=False)
    matrices = [p for name, p in pm.named_parameters() if p.ndim == 2 and name.startswith("layers")]
    optimizer = torch.optim.Muon(matrices, lr=0.01)
    pm(x).backward()
    ways = {"owners": whole_matrices.can_step, "one after the other": lambda *_: False}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Any] = {"matrices": len(matrices), "elements": sum(p.numel() for p in matrices)}
    for run in range(runs + 1):
        for name, way in ways.items():
            with mock.patch.object(whole_matrices, "can_step", way):
                if not run:
                    optimizer.step()
                    with Received() as received:
                        optimizer.step()
                    found[name] = {"received_bytes": received.n_bytes, "collectives": received.collectives}
                    continue
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                optimizer.step()
                busy[name].append(time.process_time() - cpu)
                dist.barrier()
                wall[name].append(time.perf_counter() - start)
    for name in ways:
        found[name] |= {"wall_seconds": statistics.median(wall[name]), "cpu_seconds": statistics.median(busy[name])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--state", default="S0 use", help="how matrices are stored")
    given = parser.parse_args()
    how = given.width, given.layers, given.runs, given.state
    on_ranks = autopar.run_local(measured, given.ranks, *how, timeout=1500)
    first = on_ranks[0]
    for name in ("owners", "one after the other"):
        every = [on_rank[name] for on_rank in on_ranks]
        first[name] |= {key: max(each[key] for each in every) for key in ("received_bytes", "wall_seconds")}
        first[name]["cpu_seconds"] = sum(each["cpu_seconds"] for each in every)
    first["ratio"] = {
        key: first["owners"][key] / first["one after the other"][key]
        for key in ("wall_seconds", "cpu_seconds", "received_bytes")
    }
    print(json.dumps(first, indent=2))


if __name__ == "__main__":
    main()
