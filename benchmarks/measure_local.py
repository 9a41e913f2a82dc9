"""Measure this machine: one CPU thread's rates, and gloo collectives between processes on it.

    OMP_NUM_THREADS=1 python benchmarks/measure_local.py [--out hardware_profiles/measured]

Writes `numbers_local.json`: every measured time with the date and the software that it was taken with. Then
`benchmarks/distill_local.py` turns it into the device `cpu-core` and the curve `gloo`. Takes about two
minutes. Each number is the lower quartile of several repeats: other programs on the machine only ever add
time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

OUT = Path(__file__).parent.parent / "hardware_profiles" / "measured"
TIMEOUT = datetime.timedelta(seconds=60)
SIZES = [2**p for p in (10, 12, 14, 16, 18, 20, 22, 24, 26)]  # bytes, 1 KB to 64 MB
SIDES = (16, 64, 256, 1024)
GEMMS = [(m, n, k) for m in SIDES for n in SIDES for k in SIDES]
CONVS = [(1, 16, 16, 32, 3), (4, 32, 64, 32, 3), (8, 64, 64, 28, 3), (4, 64, 128, 28, 1), (2, 128, 128, 28, 3)]
ATTENTIONS = [(1, 4, 64, 32), (2, 4, 128, 32), (2, 8, 256, 64), (1, 8, 512, 64)]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


def quartile(call, budget_seconds: float = 0.15, most: int = 50) -> float:
    """The lower quartile of the times of `call`, in seconds."""
    call()
    times, begun = [], time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begun < budget_seconds and len(times) < most):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4]


def measure_compute() -> list[dict]:
    """Rows of {what, dtype, shape, seconds, flops, bytes} on one thread, without autograd."""
    torch.set_num_threads(1)
    rows = []

    def add(what: str, dtype: torch.dtype, shape: tuple[int, ...], flops: float, n_bytes: float, call) -> None:
        name = str(dtype).removeprefix("torch.")
        rows.append(
            {"what": what, "dtype": name, "shape": shape, "seconds": quartile(call), "flops": flops, "bytes": n_bytes}
        )

    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        shapes = GEMMS if dtype == torch.float32 else [(256, 256, 256), (1024, 256, 1024), (1024, 1024, 1024)]
        for m, n, k in shapes:
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            moved = (m * k + n * k + m * n) * x.element_size()
            add("matmul", dtype, (m, n, k), 2.0 * m * n * k, moved, lambda x=x, w=w: torch.nn.functional.linear(x, w))
    for batch, inputs, outputs, side, kernel in CONVS:
        x, w = torch.randn(batch, inputs, side, side), torch.randn(outputs, inputs, kernel, kernel)
        flops = 2.0 * batch * outputs * inputs * side * side * kernel * kernel
        call = lambda x=x, w=w, p=kernel // 2: torch.nn.functional.conv2d(x, w, padding=p)  # noqa: E731
        add("conv", torch.float32, (batch, inputs, outputs, side, kernel), flops, 4.0 * (x.numel() + w.numel()), call)
    for batch, heads, length, width in ATTENTIONS:
        q, k, v = (torch.randn(batch, heads, length, width) for _ in range(3))
        flops = 4.0 * batch * heads * length * length * width
        call = lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(q, k, v)  # noqa: E731
        add("attention", torch.float32, (batch, heads, length, width), flops, 16.0 * q.numel(), call)
    tiny = torch.randn(16, requires_grad=True)
    chain = lambda: sum([tiny * 2.0 for _ in range(10)], tiny).sum().backward()  # noqa: E731
    add("eager_step_of_42_ops", torch.float32, (16,), 0.0, 0.0, chain)  # 21 ops forward, as many backward
    for elements in (1, 2**10, 2**14, 2**18, 2**22, 2**24):
        x, y = torch.randn(elements), torch.randn(elements)
        add("pointwise", torch.float32, (elements,), elements, 12.0 * elements, lambda x=x, y=y: torch.add(x, y))
    return rows


def _collective(kind: str, n_bytes: int, rank: int, world: int):
    """A call of one collective with nccl-tests sizes (see cost_models/collective_cost.py), float32."""
    elements = max(n_bytes // 4 // world * world, world)
    whole, part = torch.ones(elements), torch.ones(elements // world)
    other = torch.empty(elements)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, 0)

    def ring() -> None:  # rank i to rank i+1, the last one sends nothing: a pipeline
        work = dist.isend(whole, rank + 1) if rank + 1 < world else None
        if rank > 0:
            dist.recv(other, rank - 1)
        if work is not None:
            work.wait()

    return ring


def _worker(rank: int, world: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of the same collectives
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=TIMEOUT)
    rows = []
    for kind in COLLECTIVES:
        for n_bytes in SIZES:
            try:
                call = _collective(kind, n_bytes, rank, world)
                call()
                repeats = 30 if n_bytes <= 2**18 else 10 if n_bytes <= 2**22 else 4
                times = []
                for _ in range(repeats):
                    dist.barrier()
                    start = time.perf_counter()
                    call()
                    took = torch.tensor([time.perf_counter() - start])
                    dist.all_reduce(took, dist.ReduceOp.MAX)  # a collective ends when its last rank does
                    times.append(took.item())
                seconds = sorted(times)[len(times) // 4]
                rows.append({"collective": kind, "n": world, "bytes": n_bytes, "seconds": seconds})
            except (RuntimeError, ValueError) as error:
                rows.append({"collective": kind, "n": world, "bytes": n_bytes, "error": str(error)[:200]})
                break
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure_collectives(world: int) -> list[dict]:
    """Rows of {collective, n, bytes, seconds} for `world` gloo processes on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_worker, args=(r, world, port, queue), daemon=True) for r in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 240
    while queue.empty():
        if time.monotonic() > deadline or any(p.exitcode not in (None, 0) for p in processes):
            for process in processes:
                process.terminate()
            raise RuntimeError(f"{world} gloo processes gave no result, exit codes {[p.exitcode for p in processes]}")
        time.sleep(0.1)
    rows = queue.get()
    for process in processes:
        process.join(timeout=20)
        if process.is_alive():
            process.terminate()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    document = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": model,
        "processors": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": os.getloadavg()[0],
    }
    document["compute"] = measure_compute()
    document["collectives"] = measure_collectives(2) + measure_collectives(4)
    out.mkdir(parents=True, exist_ok=True)
    body = json.dumps(document).replace('{"what"', '\n{"what"').replace('{"collective"', '\n{"collective"')
    (out / "numbers_local.json").write_text(body + "\n", encoding="utf-8")
    print(f"{len(document['compute'])} compute and {len(document['collectives'])} collective rows -> {out.name}")


if __name__ == "__main__":
    main()
