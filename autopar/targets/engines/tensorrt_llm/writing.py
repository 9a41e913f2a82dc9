"""Options of TensorRT-LLM: what a worker's are, what it refuses of them, and the files.

Names of options and their values are those of ``fields.json``, a part of the list that TensorRT-LLM keeps of its own
options. ``tensor_parallel_size`` counts all ranks of a stage there: attention is either cut over all of them, or by
data over all of them.
"""

from __future__ import annotations

import math

from autopar.serving.records import PREFILL, Worker
from autopar.targets.engines.scripts import PORT, quoted, script_of, starts, yaml_of
from autopar.targets.engines.serving_engine import (
    Deployment,
    EngineFiles,
    Quantization,
    Settings,
    checkpoint_of,
    notes_of,
    refuses_format,
    with_role,
)

NAME, TITLE = "tensorrt-llm", "TensorRT-LLM 1.3"
QUANTIZATION: Quantization = {  # all of it is read from the checkpoint: there is no option
    ("bf16", "bf16"): "",
    ("fp8", "fp8"): "",
    ("nvfp4", "nvfp4"): "",
    ("mxfp4", "bf16"): "",
    ("mxfp4", "fp8"): "",
    ("int4", "bf16"): "",
    ("int4", "fp8"): "",
}
CACHES = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}


def settings(deployment: Deployment, worker: Worker) -> Settings:
    """Return the options of a worker; bounds on requests and tokens are those of a rank and a microbatch."""
    plan, layout, memory = deployment.plan, worker.layout, worker.memory
    beside = memory.weights + memory.workspace
    batch = math.ceil(worker.requests / (layout.attention_data * layout.stages))
    free = math.floor(1000 * (memory.limit - beside) / (deployment.device_bytes - beside)) / 1000
    options: Settings = {
        "backend": "pytorch", "tensor_parallel_size": layout.tensor * layout.attention_data,
        "pipeline_parallel_size": layout.stages, "enable_attention_dp": layout.attention_data > 1,
        "max_batch_size": batch, "max_num_tokens": worker.tokens_per_step, "max_seq_len": plan.longest,
        "enable_chunked_prefill": True,
        "kv_cache_config": {"dtype": CACHES[plan.formats.cache], "free_gpu_memory_fraction": free},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": batch},
    }  # fmt: skip
    if layout.expert * layout.expert_tensor > 1:
        options["moe_expert_parallel_size"] = layout.expert
        options["moe_tensor_parallel_size"] = layout.expert_tensor
    if deployment.apart:
        options["cache_transceiver_config"] = {"backend": "DEFAULT", "max_tokens_in_buffer": plan.longest}
    if worker.phase == PREFILL:
        options["disable_overlap_scheduler"] = True  # a prefill worker has no next step to overlap with
    return options


def refuses(deployment: Deployment, worker: Worker) -> str:
    """Return why TensorRT-LLM cannot run a worker, in one sentence; empty if it can."""
    layout = worker.layout
    if layout.context > 1:
        return (f"context={layout.context}: its context parallel ranks decode (Helix), none cuts prefills of prompts; "
                "use context=1")  # fmt: skip
    if layout.attention_data > 1 and layout.tensor > 1:
        return (f"attention_data={layout.attention_data} with tensor={layout.tensor}: enable_attention_dp makes all "
                f"{layout.attention_data * layout.tensor} ranks data parallel; use tensor=1")  # fmt: skip
    if layout.attention_data > 1 and layout.expert * layout.expert_tensor == 1:
        return (f"attention_data={layout.attention_data} with dense layers that are whole on each rank: it cuts them "
                "over all ranks; use replicas instead")  # fmt: skip
    return refuses_format(deployment.plan, QUANTIZATION, CACHES)


def command(deployment: Deployment, worker: Worker) -> str:
    """Return the lines that start a worker."""
    words = ["exec trtllm-serve", '"$MODEL"', "--config", f'"$HERE/{with_role(worker)}.yaml"', "--host", "0.0.0.0",
             "--port", '"$PORT"']  # fmt: skip
    nodes = deployment.nodes(worker)
    if nodes == 1:
        return quoted(words)
    each = worker.layout.devices // nodes
    start = f"exec srun --mpi=pmix -N {nodes} --ntasks-per-node={each} trtllm-llmapi-launch trtllm-serve"
    return quoted([start, *words[1:]])


def write(deployment: Deployment) -> EngineFiles:
    """Return the files of a plan for TensorRT-LLM: options of each kind of worker, serve.sh, and what joins them."""
    plan = deployment.plan
    files = {f"{with_role(worker)}.yaml": yaml_of(settings(deployment, worker)) for worker in plan.workers}
    files["serve.sh"] = script_of(deployment, TITLE, lambda worker: command(deployment, worker))
    notes, fill_in, start = list(notes_of(deployment, NAME)), list(checkpoint_of(plan)), list(starts(deployment))
    if any(deployment.nodes(worker) > 1 for worker in plan.workers):
        notes.append("over several machines serve.sh starts it by srun, once: HEAD and NODE_RANK are Slurm's there")
    if deployment.apart:
        files["disaggregated.yaml"] = yaml_of(_servers(deployment))
        fill_in.append("disaggregated.yaml: the addresses of the workers")
        start.append("trtllm-serve disaggregated -c disaggregated.yaml")
    return EngineFiles(files, tuple(start), tuple(fill_in), tuple(notes))


def _servers(deployment: Deployment) -> Settings:
    """Return what ``trtllm-serve disaggregated`` reads: the addresses of all workers, on one machine to begin with."""
    options: Settings = {"hostname": "0.0.0.0", "port": PORT}
    port = PORT + 1
    for worker in deployment.plan.workers:
        urls = [f"localhost:{port + k}" for k in range(worker.replicas)]
        port += worker.replicas
        role = "context_servers" if worker.phase == PREFILL else "generation_servers"
        options[role] = {"num_instances": worker.replicas, "urls": urls}
    return options
