"""How long planning takes, in CPU-seconds, and how much memory: from model object to plan, and from the shell.

    python benchmarks/planning.py                  all cases, each in a process of its own
    python benchmarks/planning.py llama-8b         one case, from model object to plan
    python benchmarks/planning.py shell-llama-8b   one case as ``autopar plan`` does it, imports included, in parts

Models are on the meta device: nothing is allocated. From the model object, imports are not counted, but for what torch
imports when it captures for the first time (``first_cpu_s``; ``capture_cpu_s`` is a second capture).

Every row has ``loop_cpu_s``: what a loop of plain Python and small torch operations took in the same process. The
machine has fast and slow hours; a time divided by that of the loop can be compared across them, which is what
``*_loops`` are.
"""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

from autopar.words.meshes import Mesh

CASES = {
    # name: (model, layers, cluster, mesh, batch, sequence, memory limit)
    "llama-8b": ("llama", 32, "dgx-h100-x8", Mesh.of(data=8, tensor=8), 16, 8192, None),
    "llama-8b-32-layers-free": ("llama", 32, "dgx-h100-x8", Mesh.of(data=8, tensor=8), 16, 8192, 1e15),
    "llama-126-layers-free": ("llama", 126, "dgx-h100-x8", Mesh.of(data=8, tensor=8), 16, 8192, 1e15),
    "llama-126-layers": ("llama", 126, "dgx-h100-x8", Mesh.of(data=8, tensor=8), 16, 8192, None),
    "llama-8b-in-24-GiB": ("llama", 32, "dgx-h100-x8", Mesh.of(data=8, tensor=8), 16, 8192, 24 * 2.0**30),
    "gpt2-8": ("gpt2", 12, "dgx-h100", Mesh.of(data=8), 8, 1024, None),
    "gpt2-2x4": ("gpt2", 12, "dgx-h100", Mesh.of(data=2, tensor=4), 8, 1024, None),
    "gpt2-2x2x2": ("gpt2", 12, "dgx-h100", Mesh.of(data=2, seq=2, tensor=2), 8, 1024, None),
}


SHELL = {  # without --mesh everything is searched
    # name: (layers, hidden, ffn, heads, cluster, options of autopar plan)
    "shell-llama-8b": (32, 4096, 14336, 32, "dgx-h100-x8", ("--batch", "16", "--mesh", "data=8,tensor=8")),
    "shell-llama-8b-all": (32, 4096, 14336, 32, "dgx-h100-x8", ("--batch", "128")),
    "shell-405b-512": (126, 16384, 53248, 128, "dgx-h100-x64", ("--batch", "256")),
    "shell-405b-2048": (126, 16384, 53248, 128, "dgx-h100-x256", ("--batch", "1024")),
    "shell-405b-16384": (126, 16384, 53248, 128, "dgx-h100-x2048", ("--batch", "2048")),
}  # fmt: skip


def loop() -> float:
    """CPU-seconds of a fixed piece of work, by which hours of the machine are compared."""
    import torch

    start = time.process_time()
    total = 0
    for i in range(1_000_000):
        total += i * i % 7
    x = torch.ones(8, 8)
    for _ in range(20_000):
        x = x * 1.0
    return time.process_time() - start


def shell(case: str) -> dict[str, float | str]:
    """Plan one case as the command does, and say what its parts take. The rest is the plan and what it writes."""
    import tempfile

    begin = 0.0  # of the process: Python's own start counts

    spent: dict[str, float] = {}

    def timed(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.process_time() - start

        return run

    layers, hidden, ffn, heads, cluster, options = SHELL[case]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    from autopar.cli import app
    from autopar.garbage_collection import uncollected

    with uncollected():  # as the command imports them
        for name in ("rules", "frontends.models"):
            importlib.import_module(f"autopar.{name}")
        modules = [importlib.import_module(f"autopar.{name}") for name in ("frontends", "capture", "planner.planning")]
    frontends, capture, planning = (vars(module) for module in modules)  # autopar.capture is a function by another name
    importing = time.process_time() - begin
    registered = frontends["FRONTENDS"]
    registered["hf:"] = replace(registered["hf:"], load=timed("model", registered["hf:"].load))
    capture["capture"] = planning["capture"] = timed("capture", capture["capture"])
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/config.json"
        with open(path, "w") as file:
            json.dump(config, file)
        sys.argv = [
            "autopar", "plan", f"hf:{path}", "--seq", "8192", "--cluster", cluster, *options, "-o", f"{folder}/p.json",
        ]  # fmt: skip
        app(standalone_mode=False)
        with open(f"{folder}/p.json") as file:
            written = json.load(file)
    total = time.process_time()
    took = (loop() + loop()) / 2
    row: dict[str, float | str] = {"case": case, "import_cpu_s": round(importing, 2)}
    row |= {f"{name}_cpu_s": round(seconds, 2) for name, seconds in spent.items()}
    row["plan_cpu_s"] = round(total - importing - sum(spent.values()), 2)
    row |= {"total_cpu_s": round(total, 2), "loop_cpu_s": round(took, 3), "total_loops": round(total / took)}
    row["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    row["fingerprint"] = str(written.get("fingerprint") or written.get("graph", {}).get("fingerprint"))
    return row


def model_of(name: str, layers: int, seq: int):  # type: ignore[no-untyped-def]
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        if name == "gpt2":
            return GPT2LMHeadModel(GPT2Config(n_layer=layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
        config = LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=seq,
        )  # fmt: skip
        return LlamaForCausalLM(config).to(torch.bfloat16)


def measure(case: str) -> dict[str, float | str]:
    """Plan one case in this process."""
    warnings.simplefilter("ignore")
    import torch

    import autopar.rules  # noqa: F401
    from autopar.capture import capture
    from autopar.planner.intra_op.mesh_plan import Options, plan_graph
    from hardware_profiles import load_cluster

    kind, layers, cluster, mesh, batch, seq, limit = CASES[case]
    model = model_of(kind, layers, seq)
    with torch.device("meta"):
        ids = torch.zeros(batch, seq, dtype=torch.long)

    def timed(fn: Callable[[], object]) -> tuple[object, float]:
        start = time.process_time()
        return fn(), time.process_time() - start

    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    took = loop()
    _, first_seconds = timed(lambda: capture(model, (), inputs))
    found, capture_seconds = timed(lambda: capture(model, (), inputs))
    profile, load_seconds = timed(lambda: load_cluster(cluster))
    options = Options(memory_limit_bytes=limit)
    plan, plan_seconds = timed(lambda: plan_graph(found.graph, profile, mesh, options))  # type: ignore[attr-defined]
    took = (took + loop()) / 2
    return {
        "case": case, "nodes": len(found.graph.nodes), "first_cpu_s": round(first_seconds, 2),  # type: ignore[attr-defined]
        "capture_cpu_s": round(capture_seconds, 2),
        "plan_cpu_s": round(load_seconds + plan_seconds, 2),
        "total_cpu_s": round(capture_seconds + load_seconds + plan_seconds, 2),
        "loop_cpu_s": round(took, 3), "capture_loops": round(capture_seconds / took, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "step_ms": round(plan.price.seconds * 1e3, 1),  # type: ignore[attr-defined]
        "status": f"{plan.solution.status}, gap {plan.solution.gap:.2%}",  # type: ignore[attr-defined]
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) > 1:
        case = sys.argv[1]
        print(json.dumps(shell(case) if case in SHELL else measure(case)))
        return
    for case in (*CASES, *SHELL):
        done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True, timeout=900, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
