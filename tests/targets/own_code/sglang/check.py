"""Let SGLang's own parser read exported folders."""

import json
import sys
from pathlib import Path

import fields

KEPT = Path(__file__).parents[4] / "autopar/targets/engines/sglang/fields.json"
QUANTIZED = {"fp8": "fp8", "nvfp4": "modelopt_fp4", "mxfp4": "mxfp4"}
CACHES = {"bf16": "bf16", "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


def options_of(folder, phase):
    """Return the words behind the module's name in serve.sh, as the shell would hand them on to machine 1."""
    script = (folder / "serve.sh").read_text()
    body = script.partition(f"\n{phase})\n")[2].partition("\n;;")[0] if f"\n{phase})" in script else script
    words = body[body.index("exec python") :].replace("\\\n", " ").split()[4:]
    known = {"$MODEL": "m", "$PORT": "8123", "$NODE_RANK": "1", "$HEAD": "127.0.0.1"}
    for i, word in enumerate(words):
        for name, value in known.items():
            word = word.replace(name, value)
        words[i] = word.strip('"')
    return words


def check(folder, worker, plan):
    """Return what SGLang made of one worker."""
    args = fields.parser().parse_args(options_of(folder, worker["phase"]))
    layout, formats = worker["layout"], plan["formats"]
    data, ranks = layout["attention_data"], layout["tensor"] * layout["attention_data"] * layout["context"]
    weights = formats["weights"]
    wanted = {
        "tp_size": ranks, "pp_size": layout["stages"], "attn_dp_size": data, "attn_cp_size": layout["context"],
        "enable_prefill_cp": layout["context"] > 1, "ep_size": layout["expert"],
        "max_running_requests": -(-worker["requests"] // data) * data,
        "chunked_prefill_size": worker["tokens_per_step"] * data, "context_length": plan["longest"],
        "kv_cache_dtype": CACHES[formats["cache"]],
        "quantization": "w4afp8" if (weights, formats["activations"]) == ("int4", "fp8") else QUANTIZED.get(weights),
        "disaggregation_mode": {"both": "null"}.get(worker["phase"], worker["phase"]), "dtype": "bfloat16",
    }
    for name, value in wanted.items():
        assert getattr(args, name) == value, f"{name} is {getattr(args, name)}, planned is {value}"
    assert 0 < args.mem_fraction_static < 1
    return f"{worker['phase']}: tp {ranks}, pp {args.pp_size}, attn-dp {data}, ep {args.ep_size}"


def main():
    failed = fields.fields() != json.loads(KEPT.read_text())
    print(f"fields.json is {'not what' if failed else 'what'} SGLang has", flush=True)
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
