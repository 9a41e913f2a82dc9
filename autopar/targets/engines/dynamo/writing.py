"""A deployment of Dynamo: its frontend, and workers of vLLM, SGLang or TensorRT-LLM with those engines' options.

Keys of the deployment and flags of the workers are those of ``fields.json``, from Dynamo's own sources. Dynamo starts
all replicas, routes requests and moves caches from prefill to decode workers.
"""

from __future__ import annotations

import json
from typing import Any

from autopar.serving.records import BOTH, Worker
from autopar.targets.engines import sglang, tensorrt_llm, vllm
from autopar.targets.engines.scripts import flags_of, head
from autopar.targets.engines.serving_engine import (
    Deployment,
    EngineFiles,
    ServingEngine,
    Settings,
    checkpoint_of,
    notes_of,
)

NAME, TITLE = "dynamo", "Dynamo 1.6"
BACKENDS: dict[str, tuple[ServingEngine, str]] = {
    "autopar": (vllm.ENGINE, "vllm"),
    "vllm": (vllm.ENGINE, "vllm"),
    "sglang": (sglang.ENGINE, "sglang"),
    "tensorrt-llm": (tensorrt_llm.ENGINE, "trtllm"),
}
"""The engine of a plan, and Dynamo's name for it."""


def engine_of(deployment: Deployment) -> tuple[ServingEngine, str]:
    """Return the engine of the workers, and Dynamo's name for it."""
    return BACKENDS[deployment.plan.engine]


def settings(deployment: Deployment, worker: Worker) -> Settings:
    """Return the options of a worker: its engine's, and which phase it is for where SGLang's own do not say it."""
    engine, backend = engine_of(deployment)
    own = engine.settings(deployment, worker)
    options: Settings = {"override-engine-args": own} if backend == "trtllm" else own
    if deployment.apart:
        options["disaggregation-mode"] = worker.phase
    return options


def refuses(deployment: Deployment, worker: Worker) -> str:
    """Return why a worker cannot run; what its engine refuses."""
    engine, _ = engine_of(deployment)
    why = engine.refuses(deployment, worker)
    if not why and deployment.nodes(worker) > 1 and worker.layout.attention_data > 1 and engine.name == "vllm":
        return (f"attention_data={worker.layout.attention_data} over {deployment.nodes(worker)} machines: ranks of "
                "each machine are options that differ between its pods; use one machine or export to vllm")  # fmt: skip
    return why and f"{engine.title}: {why}"


def component(deployment: Deployment, worker: Worker) -> dict[str, Any]:
    """Return the entry of one kind of worker in the deployment."""
    _, backend = engine_of(deployment)
    nodes = deployment.nodes(worker)
    model = "--model-path" if backend == "sglang" else "--model"
    container = {
        "name": "main", "image": "$IMAGE", "command": ["python3", "-m", f"dynamo.{backend}"],
        "args": [model, "$MODEL", *flags_of(settings(deployment, worker))],
        "resources": {"limits": {"nvidia.com/gpu": str(worker.layout.devices // nodes)}},
    }  # fmt: skip
    return {
        "name": "worker" if worker.phase == BOTH else worker.phase,
        "type": "worker" if worker.phase == BOTH else worker.phase,
        "replicas": worker.replicas,
        **({"multinode": {"nodeCount": nodes}} if nodes > 1 else {}),
        "podTemplate": {"spec": {"containers": [container]}},
    }


def deployment_yaml(deployment: Deployment) -> str:
    """Return the deployment as JSON, which is YAML; ``$IMAGE`` and ``$MODEL`` are filled in when it is applied."""
    frontend = {
        "name": "frontend", "type": "frontend", "replicas": 1,
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": "$IMAGE"}]}},
    }  # fmt: skip
    workers = [component(deployment, worker) for worker in deployment.plan.workers]
    document = {
        "apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "metadata": {"name": "autopar"},
        "spec": {"backendFramework": engine_of(deployment)[1], "components": [frontend, *workers]},
    }  # fmt: skip
    return "".join(f"# {line}\n" for line in head(deployment.plan, TITLE)) + json.dumps(document, indent=2) + "\n"


def write(deployment: Deployment) -> EngineFiles:
    """Return the files of a plan for Dynamo: the deployment, and serve.sh, which applies it."""
    engine, backend = engine_of(deployment)
    script = [
        "#!/bin/bash", *(f"# {line}" for line in head(deployment.plan, TITLE)),
        "#", "# MODEL=... IMAGE=... bash serve.sh: applies the deployment", "set -euo pipefail",
        'HERE="$(cd "$(dirname "$0")" && pwd)"',
        'export MODEL="${MODEL:?the name of the checkpoint}"',
        f'export IMAGE="${{IMAGE:?the image of Dynamo\'s runtime of {engine.title.split()[0]}}}"',
        "envsubst '$MODEL $IMAGE' < \"$HERE/deployment.yaml\" | kubectl apply -f -",
    ]  # fmt: skip
    files = {"deployment.yaml": deployment_yaml(deployment), "serve.sh": "\n".join(script) + "\n"}
    notes = list(notes_of(deployment, engine.name, by_hand=False))
    if engine.name != "vllm" or deployment.plan.engine == "vllm":
        notes.append(f"workers run {engine.title}, whose options are those of export --to {engine.name}")
    else:
        notes.append(f"the plan is for autopar's own runtime, which Dynamo does not run; workers run {engine.title}")
    fill_in = (*checkpoint_of(deployment.plan), f"IMAGE: the image of Dynamo's runtime for {backend}")
    return EngineFiles(files, ("MODEL=... IMAGE=... bash serve.sh",), fill_in, tuple(notes))
