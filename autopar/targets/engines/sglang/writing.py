"""Options of SGLang: what a worker's are, what SGLang refuses of them, and the script.

Names of options and their values are those of ``fields.json``, which SGLang's own parser has
(tests/targets/own_code/sglang/fields.py). ``tp-size`` counts all ranks of a stage there: attention in tensor, data and
context parallel ranks, and experts in expert and tensor parallel ones, each divide it.
"""

from __future__ import annotations

from autopar.serving.records import Worker
from autopar.targets.engines.scripts import flags_of, quoted, script_of, starts
from autopar.targets.engines.serving_engine import (
    Deployment,
    EngineFiles,
    Quantization,
    Settings,
    checkpoint_of,
    notes_of,
    refuses_format,
    requests_of_rank,
)

NAME, TITLE = "sglang", "SGLang 0.5.23"
QUANTIZATION: Quantization = {
    ("bf16", "bf16"): "",
    ("fp8", "fp8"): "fp8",
    ("nvfp4", "nvfp4"): "modelopt_fp4",
    ("mxfp4", "bf16"): "mxfp4",
    ("int4", "bf16"): "",  # AWQ or GPTQ, which the checkpoint says
    ("int4", "fp8"): "w4afp8",
}
CACHES = {"bf16": "bf16", "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
DIST_PORT = 5000


def settings(deployment: Deployment, worker: Worker) -> Settings:
    """Return the options of a worker.

    Bounds on requests and tokens are those of all attention data ranks together: SGLang divides both
    (model_executor/pool_configurator.py, arg_groups/parallel_hook.py).
    """
    plan, layout = deployment.plan, worker.layout
    options: Settings = {
        "dtype": "bfloat16", "tp-size": layout.tensor * layout.attention_data * layout.context,
        "pp-size": layout.stages, "max-running-requests": requests_of_rank(worker) * layout.attention_data,
        "chunked-prefill-size": worker.tokens_per_step * layout.attention_data, "context-length": plan.longest,
        "kv-cache-dtype": CACHES[plan.formats.cache],
        "mem-fraction-static": deployment.part_of_memory(worker.memory.limit - worker.memory.workspace),
    }  # fmt: skip
    if layout.attention_data > 1:
        options["attn-dp-size"] = layout.attention_data
        if layout.tensor * layout.context == 1:  # dense layers between those of experts are whole on each rank
            options["moe-dense-tp-size"] = 1
    if layout.context > 1:
        options |= {"attn-cp-size": layout.context, "enable-prefill-cp": True, "cp-strategy": "zigzag"}
    if layout.expert > 1:
        options["ep-size"] = layout.expert
    if word := QUANTIZATION[plan.formats.weights, plan.formats.activations]:
        options["quantization"] = word
    if deployment.apart:
        options |= {"disaggregation-mode": worker.phase, "disaggregation-transfer-backend": "mooncake"}
    return options


def refuses(deployment: Deployment, worker: Worker) -> str:
    """Return why SGLang cannot run a worker, in one sentence; empty if it can."""
    layout = worker.layout
    if layout.attention_data > 1 and layout.expert * layout.expert_tensor == 1:
        return (f"attention_data={layout.attention_data} with dense layers that are whole on each rank: SGLang cuts "
                f"them over all {layout.attention_data * layout.tensor} ranks; use replicas instead")  # fmt: skip
    return refuses_format(deployment.plan, QUANTIZATION, CACHES)


def command(deployment: Deployment, worker: Worker) -> str:
    """Return the lines that start a worker."""
    words = ["exec python -m sglang.launch_server", "--model-path", '"$MODEL"', "--port", '"$PORT"',
             *flags_of(settings(deployment, worker))]  # fmt: skip
    if (nodes := deployment.nodes(worker)) > 1:
        words += ["--nnodes", str(nodes), "--node-rank", '"$NODE_RANK"', "--dist-init-addr", f'"$HEAD:{DIST_PORT}"']
    return quoted(words)


def write(deployment: Deployment) -> EngineFiles:
    """Return the files of a plan for SGLang: serve.sh, which has all options."""
    notes = list(notes_of(deployment, NAME))
    files = {"serve.sh": script_of(deployment, TITLE, lambda worker: command(deployment, worker))}
    if any(worker.phase == "both" for worker in deployment.plan.workers):
        notes.append("SGLang's steps are prefills or decodes; --enable-mixed-chunk joins both in one step, as the plan "
                     "does")  # fmt: skip
    if any(min(w.layout.attention_data, w.layout.tensor) > 1 for w in deployment.plan.workers):
        notes.append("dense layers are cut over all ranks of tp-size there, over tensor ranks in the plan: less memory "
                     "and larger collectives")  # fmt: skip
    if any(worker.layout.context > 1 for worker in deployment.plan.workers):
        notes.append("--enable-prefill-cp works for models whose attention supports it; SGLang stops at the start "
                     "where the model's does not")  # fmt: skip
    if deployment.apart:
        notes.append("a router joins the workers: python -m sglang_router.launch_router --pd-disaggregation --prefill "
                     "URL BOOTSTRAP_PORT --decode URL, with one pair of each for every replica")  # fmt: skip
    return EngineFiles(files, starts(deployment), checkpoint_of(deployment.plan), tuple(notes))
