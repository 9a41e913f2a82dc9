"""Options of vLLM: what a worker's are, what vLLM refuses of them, and the files.

Names of options and their values are those of ``fields.json``, which vLLM's own parser has
(tests/targets/own_code/vllm/fields.py).
"""

from __future__ import annotations

from autopar.serving.records import DECODE, PREFILL, Worker
from autopar.targets.engines.scripts import quoted, script_of, starts, yaml_of
from autopar.targets.engines.serving_engine import (
    Deployment,
    EngineFiles,
    Quantization,
    Settings,
    checkpoint_of,
    notes_of,
    refuses_format,
    requests_of_rank,
    with_role,
)

NAME, TITLE = "vllm", "vLLM 0.33"
QUANTIZATION: Quantization = {
    ("bf16", "bf16"): "",
    ("fp8", "fp8"): "fp8",  # of a checkpoint in fp8, or of one in bf16, which is converted while it is loaded
    ("nvfp4", "nvfp4"): "modelopt_fp4",
    ("mxfp4", "bf16"): "mxfp4",
    ("int4", "bf16"): "",  # AWQ or GPTQ, which the checkpoint says
}
CACHES = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}
ROLES = {PREFILL: "kv_producer", DECODE: "kv_consumer"}
RPC_PORT, MASTER_PORT = 29550, 29501
"""The defaults of ``--data-parallel-rpc-port`` and ``--master-port``."""


def settings(deployment: Deployment, worker: Worker) -> Settings:
    """Return the options of a worker; bounds on requests and tokens are those of a data parallel rank."""
    plan, layout = deployment.plan, worker.layout
    options: Settings = {
        "dtype": "bfloat16", "tensor-parallel-size": layout.tensor, "pipeline-parallel-size": layout.stages,
        "data-parallel-size": layout.attention_data, "max-num-seqs": requests_of_rank(worker),
        "max-num-batched-tokens": worker.tokens_per_step, "max-model-len": plan.longest,
        "enable-chunked-prefill": True, "kv-cache-dtype": CACHES[plan.formats.cache],
        "gpu-memory-utilization": deployment.part_of_memory(worker.memory.limit),
    }  # fmt: skip
    if layout.context > 1:
        options["prefill-context-parallel-size"] = layout.context
    if layout.expert > 1:  # over all tensor, context and data parallel ranks; without it experts are cut by them
        options["enable-expert-parallel"] = True
    if word := QUANTIZATION[plan.formats.weights, plan.formats.activations]:
        options["quantization"] = word
    if plan.load.prefix_tokens:
        options["enable-prefix-caching"] = True
    if deployment.apart:
        options["kv-transfer-config"] = {"kv_connector": "NixlConnector", "kv_role": ROLES[worker.phase]}
    return options


def refuses(deployment: Deployment, worker: Worker) -> str:
    """Return why vLLM cannot run a worker, in one sentence; empty if it can."""
    layout, nodes = worker.layout, deployment.nodes(worker)
    if layout.expert > 1 and layout.expert_tensor > 1:
        return (f"experts over {layout.expert} ranks and cut in {layout.expert_tensor}: --enable-expert-parallel puts "
                "them over all ranks, whole; use expert_tensor=1, or expert=1")  # fmt: skip
    if worker.phase == DECODE and layout.stages > 1:  # nixl/base_worker.py
        return f"stages={layout.stages}: its NixlConnector receives no cache into stages; use stages=1 for decode"
    if layout.attention_data > 1 and nodes > 1 and layout.attention_data % nodes:
        return (f"attention_data={layout.attention_data} over {nodes} machines: --data-parallel-size-local is the same "
                "whole number on each; use a multiple of the machines")  # fmt: skip
    return refuses_format(deployment.plan, QUANTIZATION, CACHES)


def command(deployment: Deployment, worker: Worker) -> str:
    """Return the lines that start a worker."""
    nodes, layout = deployment.nodes(worker), worker.layout
    words = ["exec vllm serve", '"$MODEL"', "--config", f'"$HERE/{with_role(worker)}.yaml"', "--port", '"$PORT"']
    if nodes == 1:
        return quoted(words)
    rank = 'OTHERS=(); [ "$NODE_RANK" = 0 ] || OTHERS=(--headless'
    if layout.attention_data == 1:
        words += ["--nnodes", str(nodes), "--node-rank", '"$NODE_RANK"', "--master-addr", '"$HEAD"',
                  "--master-port", str(MASTER_PORT)]  # fmt: skip
        rank += ")"
    else:
        local = layout.attention_data // nodes
        words += ["--data-parallel-size-local", str(local), "--data-parallel-address", '"$HEAD"',
                  "--data-parallel-rpc-port", str(RPC_PORT)]  # fmt: skip
        rank += f" --data-parallel-start-rank $((NODE_RANK * {local})))"
    return f"{rank}\n{quoted(words)} \\\n    " + '"${OTHERS[@]}"'


def write(deployment: Deployment) -> EngineFiles:
    """Return the files of a plan for vLLM: a config for each kind of worker, and serve.sh."""
    files = {f"{with_role(worker)}.yaml": yaml_of(settings(deployment, worker)) for worker in deployment.plan.workers}
    files["serve.sh"] = script_of(deployment, TITLE, lambda worker: command(deployment, worker))
    notes = list(notes_of(deployment, NAME))
    if any(worker.layout.context > 1 for worker in deployment.plan.workers):
        notes.append("--prefill-context-parallel-size works with attention backends that support it (sparse latent "
                     "attention in 0.33); vLLM stops at the start where the model's does not")  # fmt: skip
    if deployment.apart:
        notes.append("a proxy sends each request to a prefill worker, then to a decode worker (vllm-router, Dynamo); "
                     "workers of one machine each need a VLLM_NIXL_SIDE_CHANNEL_PORT")  # fmt: skip
    return EngineFiles(files, starts(deployment), checkpoint_of(deployment.plan), tuple(notes))
