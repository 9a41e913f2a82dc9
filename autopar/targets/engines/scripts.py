"""The shell script that starts a worker of an engine, its head, and options as YAML.

The YAML is written as JSON values, which YAML contains, one option a line: nothing is quoted otherwise than JSON does.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from autopar.serving.records import ServingPlan, Worker
from autopar.targets.engines.serving_engine import Deployment, Settings
from autopar.words.texts import show_bytes, show_seconds

PORT = 8000


def layout_words(worker: Worker) -> str:
    """Return a layout in words, without what is 1: ``tensor=4, attention_data=2``."""
    layout = worker.layout
    sizes = {
        "tensor": layout.tensor, "stages": layout.stages, "attention_data": layout.attention_data,
        "context": layout.context, "expert": layout.expert, "expert_tensor": layout.expert_tensor,
        "kv_replicas": layout.kv_replicas,
    }  # fmt: skip
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one device"


def head(plan: ServingPlan, title: str) -> list[str]:
    """Return what was planned as lines of text: load, workers, predicted times and memory."""
    load, served, formats = plan.load, plan.served, plan.formats
    lines = [
        f"A serving plan of autopar for {title}: {plan.model} on {plan.devices} devices of {plan.cluster}.",
        f"load: {load.input_tokens} tokens in ({load.prefix_tokens} of them in the cache), {load.output_tokens} out",
        f"formats: weights {formats.weights}, activations {formats.activations}, cache {formats.cache}",
        f"predicted for {plan.engine}: {show_seconds(served.first_token_seconds)} to the first token, "
        f"{show_seconds(served.token_seconds)} per output token, {served.requests_per_second:.3g} requests/s, "
        f"{served.tokens_per_second_per_device:.4g} tokens/s per device",
    ]
    if served.transfer_seconds:
        lines.append(f"moving a prompt's cache to its decode worker: {show_seconds(served.transfer_seconds)}")
    if served.binding:
        lines.append(f"binding: {served.binding}")
    for worker in plan.workers:
        memory = worker.memory
        lines.append(
            f"{worker.phase}: {worker.replicas} x {worker.layout.devices} devices ({layout_words(worker)}), "
            f"{worker.requests} requests in flight, {worker.tokens_per_step} tokens a step; on a device "
            f"{show_bytes(memory.total)} of {show_bytes(memory.limit)}: weights {show_bytes(memory.weights)}, cache "
            f"{show_bytes(memory.cache)}, workspace {show_bytes(memory.workspace)}"
        )
    return [" ".join(line.split()) for line in lines]


def yaml_of(settings: Settings) -> str:
    """Return options as YAML, one a line."""
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())


def flags_of(settings: Settings) -> list[str]:
    """Return options as words of a command line; true is a flag, false is left out."""
    words: list[str] = []
    for key, value in settings.items():
        if value is False:
            continue
        words.append(f"--{key}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, (dict, list)) else str(value))
    return words


def quoted(words: list[str]) -> str:
    """Return words for a script, each option with its value on a line of its own."""
    lines = [words[0]]
    for word in words[1:]:
        text = word if word.startswith('"$') else shlex.quote(word)
        lines.append(text) if word.startswith("--") or len(lines) == 1 else lines.append(f"{lines.pop()} {text}")
    return " \\\n    ".join(lines)


def script_of(deployment: Deployment, title: str, command: Callable[[Worker], str]) -> str:
    """Return ``serve.sh``: it starts one replica, of the kind that its argument names where there are two kinds.

    Args:
        deployment: what is started.
        title: the engine, for the head.
        command: returns the lines that start a worker on one machine; they may use ``$HERE`` (the folder),
            ``$MODEL``, ``$PORT``, ``$HEAD`` and ``$NODE_RANK``.
    """
    plan = deployment.plan
    lines = ["#!/bin/bash", *(f"# {line}" for line in head(plan, title)), "#"]
    for worker in plan.workers:
        kind = f" {worker.phase}" if deployment.apart else ""
        nodes = deployment.nodes(worker)
        each = f", on each of {nodes} machines with HEAD (the first one's address) and NODE_RANK" if nodes > 1 else ""
        lines.append(f"# MODEL=... PORT=... bash serve.sh{kind}: starts one of {worker.replicas}{each}")
    lines += [
        "set -euo pipefail", 'HERE="$(cd "$(dirname "$0")" && pwd)"',
        f': "${{MODEL:?the folder or the name of the checkpoint}}" "${{PORT:={PORT}}}"',
    ]  # fmt: skip
    if any(deployment.nodes(worker) > 1 for worker in plan.workers):
        lines.append(': "${NODE_RANK:=0}" "${HEAD:=127.0.0.1}"')
    if not deployment.apart:
        return "\n".join([*lines, command(plan.workers[0])]) + "\n"
    lines.append('case "${1:-}" in')
    for worker in plan.workers:
        lines.append(f"{worker.phase})\n{command(worker)}\n;;")
    return "\n".join([*lines, '*) echo "say prefill or decode" >&2; exit 2 ;;', "esac"]) + "\n"


def starts(deployment: Deployment) -> tuple[str, ...]:
    """Return the commands that start all kinds of workers."""
    kinds = [f" {worker.phase}" if deployment.apart else "" for worker in deployment.plan.workers]
    return tuple(f"MODEL=... bash serve.sh{kind}" for kind in kinds)
