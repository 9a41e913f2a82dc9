"""Let vLLM's own parser and its configs' validators read exported folders."""

import json
import re
import sys
from pathlib import Path

import fields
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.engine.arg_utils import AsyncEngineArgs

KEPT = Path(__file__).parents[4] / "autopar/targets/engines/vllm/fields.json"
QUANTIZED = {"fp8": "fp8", "nvfp4": "modelopt_fp4", "mxfp4": "mxfp4"}
PARSER, _ = fields.parsers()
CACHES = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}


def options_of(folder, phase):
    """Return the words behind ``vllm serve`` in serve.sh, as the shell would hand them on to machine 1."""
    script = (folder / "serve.sh").read_text()
    body = script.partition(f"\n{phase})\n")[2].partition("\n;;")[0] if f"\n{phase})" in script else script
    others = re.search(r"OTHERS=\(--headless *(.*)\)$", body, re.M)
    words = body[body.index("exec vllm serve") :].replace("\\\n", " ").split()[3:]
    if others:
        local = re.search(r"NODE_RANK \* (\d+)", others[1])
        words[words.index('"${OTHERS[@]}"') :] = ["--headless", *(
            ["--data-parallel-start-rank", local[1]] if local else [])]
    known = {"$MODEL": "m", "$HERE": str(folder), "$PORT": "8123", "$NODE_RANK": "1", "$HEAD": "127.0.0.1"}
    for i, word in enumerate(words):
        for name, value in known.items():
            word = word.replace(name, value)
        words[i] = word.strip('"')
    return words


def check(folder, worker, plan):
    """Return what vLLM made of one worker."""
    args = PARSER.parse_args(["serve", *options_of(folder, worker["phase"])])
    assert args.model_tag == "m" and args.port == 8123
    engine = AsyncEngineArgs.from_cli_args(args)
    layout, formats, load = worker["layout"], plan["formats"], plan["load"]
    data = layout["attention_data"]
    wanted = {
        "tensor_parallel_size": layout["tensor"], "pipeline_parallel_size": layout["stages"],
        "data_parallel_size": data, "prefill_context_parallel_size": layout["context"],
        "enable_expert_parallel": layout["expert"] > 1, "max_num_seqs": -(-worker["requests"] // data),
        "max_num_batched_tokens": worker["tokens_per_step"], "max_model_len": plan["longest"],
        "enable_chunked_prefill": True, "dtype": "bfloat16", "kv_cache_dtype": CACHES[formats["cache"]],
        "quantization": QUANTIZED.get(formats["weights"]),
        "enable_prefix_caching": True if load["prefix_tokens"] else AsyncEngineArgs.enable_prefix_caching,
    }
    for name, value in wanted.items():
        assert getattr(engine, name) == value, f"{name} is {getattr(engine, name)}, planned is {value}"
    assert 0 < engine.gpu_memory_utilization <= 1
    ParallelConfig(
        tensor_parallel_size=engine.tensor_parallel_size, pipeline_parallel_size=engine.pipeline_parallel_size,
        prefill_context_parallel_size=engine.prefill_context_parallel_size,
        data_parallel_size=engine.data_parallel_size, enable_expert_parallel=engine.enable_expert_parallel,
        distributed_executor_backend="mp",
    )
    role = {"prefill": "kv_producer", "decode": "kv_consumer"}.get(worker["phase"])
    transfer = engine.kv_transfer_config
    transfer = KVTransferConfig(**transfer) if isinstance(transfer, dict) else transfer
    assert (transfer.kv_role if transfer else None) == role, f"kv_role is {transfer}, planned is {role}"
    return (f"{worker['phase']}: tp {engine.tensor_parallel_size}, pp {engine.pipeline_parallel_size}, dp {data}, "
            f"pcp {layout['context']}, ep {engine.enable_expert_parallel}, {engine.max_num_seqs} requests")


def main():
    failed = fields.fields() != json.loads(KEPT.read_text())
    print(f"fields.json is {'not what' if failed else 'what'} vLLM has", flush=True)
    for folder in map(Path, sys.argv[1:]):
        plan = json.loads((folder / "case.json").read_text())
        for worker in plan["workers"]:
            try:
                print(f"{folder.name}: {check(folder.resolve(), worker, plan)}", flush=True)
            except (Exception, SystemExit) as error:
                failed = True
                print(f"{folder.name}: REFUSED {type(error).__name__}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
