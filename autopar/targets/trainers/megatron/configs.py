"""From Megatron's options to the words of a layout, the batch, the precision and the sizes of the model."""

from __future__ import annotations

from autopar.planner.layouts.stage_starts import described, sizes_of
from autopar.targets.target import Config
from autopar.targets.trainers.megatron.fields import effect
from autopar.targets.trainers.megatron.options import MegatronOptions
from autopar.targets.trainers.megatron.precisions import precision_of
from autopar.targets.trainers.megatron.stage_texts import stages_of_text

OVERLAPPED, PLAIN = "megatron-2023", "megatron-2023-plain"
OF_2021 = ("--checkpoint-activations", "--checkpoint-num-layers", "--activations-checkpoint-method", "--DDP-impl",
           "--distribute-checkpointed-activations", "--layernorm-epsilon", "--min-scale")  # fmt: skip
"""Options that only releases before Megatron-Core had (tags v1.0 to v2.6)."""
SIZES = {
    "hidden_size": ("--hidden-size",), "num_hidden_layers": ("--num-layers", "--encoder-num-layers"),
    "num_attention_heads": ("--num-attention-heads",), "intermediate_size": ("--ffn-hidden-size",),
    "vocab_size": ("--vocab-size",), "num_local_experts": ("--num-experts",),
    "num_experts_per_tok": ("--moe-router-topk",), "kv_lora_rank": ("--kv-lora-rank",),
    "q_lora_rank": ("--q-lora-rank",), "qk_rope_head_dim": ("--qk-pos-emb-head-dim",),
    "v_head_dim": ("--v-head-dim",), "decoder_layers": ("--decoder-num-layers",),
}  # fmt: skip
"""Sizes of the model by the names of Hugging Face configs."""
WAYS = {"p2p": "ring", "all_gather": "allgather", "allgather": "allgather", "a2a": "ulysses"}
RECOMPUTED = {
    "mlp": "mlp", "moe": "mlp", "shared_experts": "mlp.shared_experts",
    "layernorm": "input_layernorm+post_attention_layernorm",
}  # fmt: skip
"""Modules of a block that ``--recompute-modules`` names; ``core_attn`` is a kernel that keeps nothing inside."""
FSDP = {
    "no_shard": {"zero": "0"}, "optim": {"zero": "1"}, "optim_grads": {"zero": "1"}, "optim_grads_params": {"fsdp": ""},
}  # fmt: skip
"""Words of ``--data-parallel-sharding-strategy`` of Megatron-FSDP."""


def config_of(options: MegatronOptions, devices: int | None, software: str | None = None) -> Config:
    """Return what options say.

    Args:
        devices: the number of devices that the file starts ranks on; None where it does not say it.
        software: the record of the trainer's software; None for Megatron-LM's own, by its overlaps.

    Raises:
        ConfigError: an option has no value that a layout can have.
    """
    tp = options.number("--tensor-model-parallel-size", options.number("--model-parallel-size", 1)) or 1
    words = {"tp": str(tp)}
    if options.has("--sequence-parallel") and tp > 1:  # validate_args turns it off for tp=1
        words["sp"] = ""
    words |= _pipeline_words(options)
    words |= _context_words(options)
    words |= _expert_words(options, tp)
    words |= _storage_words(options)
    words |= _recompute_words(options)
    batch = _batch_words(options, words, devices)
    optimizer = _optimizer(options)
    precision = precision_of(options)
    model = _model(options)
    unpriced = [*options.unpriced, *_dispatch(options)]
    ignored: list[str] = []
    software = software or _software(options, words)
    if software not in (OVERLAPPED, PLAIN):
        options.has("--tp-comm-overlap")  # NeMo's software has it
    for name in options.values.keys() - options.read:
        off = options.values[name] and set(options.values[name]) <= {"0", "0.0", "none", "False"}
        why = "" if off else effect(name)
        shown = options.names.get(name, name)
        unpriced += [f"{shown}: {why}"] if why else []
        ignored += [] if why else [shown]
    return Config(
        {word: value for word, value in words.items() if value != "1" or word in ("mbs", "zero", "etp")}, batch,
        options.number("--seq-length", options.number("--encoder-seq-length")), devices, precision, optimizer, model,
        software if software != OVERLAPPED else None, tuple(sorted(unpriced)), tuple(sorted(ignored)),
    )  # fmt: skip


def _model(options: MegatronOptions) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, choices in SIZES.items():
        number = next((n for n in (options.number(option) for option in choices) if n is not None), None)
        if number is not None:
            found[name] = number
    groups = "--num-query-groups"
    grouped = options.has("--group-query-attention") or groups in options.names  # a field says it by itself
    if options.has(groups) and grouped:
        found["num_key_value_heads"] = options.number(groups) or 1
    size = options.number("--moe-ffn-hidden-size")
    if size is not None:
        found["moe_intermediate_size"] = size
    options.has("--moe-shared-expert-intermediate-size")
    options.has("--qk-head-dim")
    return found


def _pipeline_words(options: MegatronOptions) -> dict[str, str]:
    """Return ``pp``, ``vp``, and note a division of layers that words of a layout cannot say."""
    pp = options.number("--pipeline-model-parallel-size", 1) or 1
    layers = options.number("--num-layers", options.number("--encoder-num-layers"))
    text = options.text("--pipeline-model-parallel-layout")
    vp = options.number("--num-virtual-stages-per-pipeline-rank", 1) or 1
    each = options.number("--num-layers-per-virtual-pipeline-stage")
    extra = sum(options.has(f"--account-for-{end}-in-pipeline-split") for end in ("embedding", "loss"))
    ends = [options.number("--decoder-first-pipeline-num-layers"), options.number("--decoder-last-pipeline-num-layers")]
    for name in ("--no-overlap-p2p-communication", "--microbatch-group-size-per-virtual-pipeline-stage"):
        options.has(name)
    if text:
        sizes = stages_of_text(options, text, pp)
        vp = len(sizes) // pp
        _note_sizes(options, "--pipeline-model-parallel-layout", sizes)
    elif each:
        if layers is None or (layers + extra) % (pp * each):
            raise options.error(
                "--num-layers-per-virtual-pipeline-stage",
                f"{layers or 'an unknown number of'} layers do not divide into stages of {each} on pp={pp}; "
                "use --num-virtual-stages-per-pipeline-rank",
            )
        vp = (layers + extra) // (pp * each)
    elif any(ends) and layers:
        middle = pp - sum(end is not None for end in ends)
        rest = layers - sum(end or 0 for end in ends)
        if middle < 0 or (middle and rest % middle) or (not middle and rest):
            raise options.error(
                "--decoder-first-pipeline-num-layers", f"{rest} layers do not divide over the other {middle} groups; "
                "use a number that leaves a multiple",
            )  # fmt: skip
        sizes = [*([ends[0]] if ends[0] else []), *([rest // middle] * middle if middle else []),
                 *([ends[1]] if ends[1] else [])]  # fmt: skip
        _note_sizes(options, "--decoder-last-pipeline-num-layers", sizes)
    elif layers and (layers + extra) % pp:
        raise options.error(
            "--pipeline-model-parallel-size",
            f"{layers + extra} layers do not divide over pp={pp}; use a divisor or --pipeline-model-parallel-layout",
        )
    words = {"pp": str(pp)}
    if vp > 1:
        if pp == 1:
            raise options.error("--num-virtual-stages-per-pipeline-rank", f"{vp} stages need pp of 2 or more, it is 1")
        words["vp"] = str(vp)
    return words


def _note_sizes(options: MegatronOptions, name: str, sizes: list[int]) -> None:
    even = sizes_of(sum(sizes), len(sizes))
    if sizes != even:
        was = described(sizes).partition(": ")[2] or f"{len(sizes)} x {sizes[0]}"
        now = described(even).partition(": ")[2] or f"{len(even)} x {even[0]}"
        options.unpriced.append(f"{options.names.get(name, name)}: layers of the stages are {was}; the price has {now}")


def _context_words(options: MegatronOptions) -> dict[str, str]:
    cp = options.number("--context-parallel-size", 1) or 1
    kinds = set(options.texts("--cp-comm-type") or ["p2p"])
    options.has("--hierarchical-context-parallel-sizes")
    if cp == 1:
        return {}
    if len(kinds) > 1 or not kinds <= WAYS.keys():
        options.unpriced.append(f"--cp-comm-type: {', '.join(sorted(kinds))} is priced as p2p")
        kinds = {"p2p"}
    return {"cp": f"{cp}:{WAYS[kinds.pop()]}"}


def _expert_words(options: MegatronOptions, tp: int) -> dict[str, str]:
    ep = options.number("--expert-model-parallel-size", 1) or 1
    etp = options.number("--expert-tensor-parallel-size", tp) or tp
    experts = options.number("--num-experts")
    if ep == 1 and etp == tp:
        return {}
    if ep > 1 and experts and experts % ep:
        raise options.error("--expert-model-parallel-size", f"{ep} does not divide the {experts} experts")
    if etp not in (1, tp):
        raise options.error("--expert-tensor-parallel-size", f"is {etp}; the price knows 1 and tp={tp}")
    if etp == 1 and etp != tp:
        if ep == 1 and not experts:
            return {}
        if ep % tp:
            raise options.error(
                "--expert-model-parallel-size", f"is {ep}, with --expert-tensor-parallel-size 1 and tp={tp} the price "
                f"knows multiples of {tp}; use one of these, or --expert-tensor-parallel-size {tp}",
            )  # fmt: skip
        return {"ep": str(ep), "etp": "1"}
    if ep > 1 and options.number("--context-parallel-size", 1) != 1:
        options.unpriced.append(
            "--expert-model-parallel-size: experts are shared among the ranks of cp first; the price has those of dp"
        )
    return {"ep": str(ep)}


def _storage_words(options: MegatronOptions) -> dict[str, str]:
    for name in ("--overlap-grad-reduce", "--overlap-param-gather", "--no-gradient-accumulation-fusion"):
        options.has(name)
    if options.has("--use-torch-fsdp2"):
        for name in ("--pipeline-model-parallel-size", "--expert-model-parallel-size"):
            if (size := options.number(name, 1) or 1) > 1:  # validate_args of Megatron refuses them, too
                raise options.error(name, f"is {size}, --use-torch-fsdp2 works with 1 alone; leave one of them out")
        if options.has("--use-distributed-optimizer"):
            raise options.error("--use-distributed-optimizer", "does not work with --use-torch-fsdp2, which keeps "
                                "shards itself; leave one of them out")  # fmt: skip
        return {"fsdp": ""}
    strategy = options.text("--data-parallel-sharding-strategy", "optim_grads_params")
    if options.has("--use-megatron-fsdp") or options.has("--use-custom-fsdp"):
        options.has("--use-distributed-optimizer")
        if strategy not in FSDP:
            raise options.error("--data-parallel-sharding-strategy", f"is '{strategy}'; use {', '.join(FSDP)}")
        if strategy == "optim_grads":
            options.unpriced.append("--data-parallel-sharding-strategy: gradients are in shards; the price has zero=1")
        return dict(FSDP[strategy])
    return {"zero": "1"} if options.has("--use-distributed-optimizer") else {}


def _recompute_words(options: MegatronOptions) -> dict[str, str]:
    granularity = options.text("--recompute-granularity")
    method = options.text("--recompute-method", options.text("--activations-checkpoint-method"))
    number = options.number("--recompute-num-layers", options.number("--activations-checkpoint-num-layers", 1)) or 1
    modules = options.texts("--recompute-modules") or ["core_attn"]
    if options.has("--recompute-activations"):
        granularity = "selective"
    if options.has("--checkpoint-activations") or (method and not granularity):
        granularity, method = "full", method or "uniform"
    if not granularity:
        return {}
    if granularity == "selective":
        return _selective(options, modules)
    if granularity != "full":
        raise options.error("--recompute-granularity", f"is '{granularity}'; use full or selective")
    if method == "block":
        return {"recompute": "full" if number >= _most_layers(options) else f"full:{number}"}
    if method != "uniform":
        raise options.error("--recompute-method", f"is '{method or 'not given'}'; with full use uniform or block")
    if number > 1:
        options.unpriced.append(
            f"--recompute-num-layers: {number} layers run again together and keep one input; the price keeps each one's"
        )
    return {"recompute": "full"}


def _most_layers(options: MegatronOptions) -> float:
    """Return how many layers the largest stage has, as far as the file says it."""
    layers = options.number("--num-layers", options.number("--encoder-num-layers"))
    pp = options.number("--pipeline-model-parallel-size", 1) or 1
    vp = options.number("--num-virtual-stages-per-pipeline-rank", 1) or 1
    if layers is None or options.has("--pipeline-model-parallel-layout"):
        return float("inf")
    each = options.number("--num-layers-per-virtual-pipeline-stage")
    return each or max(sizes_of(layers, pp * vp))


def _selective(options: MegatronOptions, modules: list[str]) -> dict[str, str]:
    learned = options.text("--position-embedding-type", "learned_absolute") == "learned_absolute"
    found: list[str] = []
    for name in modules:
        if name == "layernorm" and learned and not options.has("--use-rotary-position-embeddings"):
            found.append("ln_1+ln_2")
        elif name == "mla_up_proj":
            found.append("self_attn.kv_b_proj" if not options.has("--q-lora-rank") else
                         "self_attn.q_b_proj+self_attn.kv_b_proj")  # fmt: skip
        elif name == "shared_experts" and options.has("--moe-shared-expert-gate"):  # Qwen2-MoE, which has one
            found.append("mlp.shared_expert")
        elif name in RECOMPUTED:
            found.append(RECOMPUTED[name])
        elif name != "core_attn":
            options.unpriced.append(f"--recompute-modules: {name} runs again in the backward; the price keeps it")
    parts = list(dict.fromkeys(part for text in found for part in text.split("+")))
    return {"recompute": f"selective:{'+'.join(parts)}"} if parts else {}


def _batch_words(options: MegatronOptions, words: dict[str, str], devices: int | None) -> int | None:
    """Add the microbatch to the words; return the batch of a step."""
    rows = options.number("--micro-batch-size", options.number("--batch-size"))
    if rows is None:
        raise options.error("--micro-batch-size", "is not given, and Megatron-LM has no default; write one")
    batch = options.number("--global-batch-size")
    words["mbs"] = str(rows)
    cp = options.number("--context-parallel-size", 1) or 1
    each = int(words["tp"]) * int(words["pp"]) * cp
    if devices is None:
        return batch
    if devices % each:
        raise options.error(
            "--tensor-model-parallel-size", f"tp={words['tp']} x pp={words['pp']} x cp={cp} is {each}, which does not "
            f"divide the {devices} devices that the file starts; change one of the sizes",
        )  # fmt: skip
    dp = devices // each
    if batch is None:
        return rows * dp
    if batch % (rows * dp):
        raise options.error(
            "--global-batch-size", f"{batch} is no multiple of micro batch {rows} x dp={dp}; use one of {rows * dp}"
        )
    return batch


def _optimizer(options: MegatronOptions) -> str:
    name = options.text("--optimizer", "adam")
    momentum = options.text("--sgd-momentum", "0.9")
    if name in ("adam", "adamw"):
        return "adamw"
    if name == "sgd":
        return "sgd" if not float(momentum) else "sgd_momentum"
    options.unpriced.append(f"--optimizer: {name} is priced as adamw, which stores two moments of every parameter")
    return "adamw"


def _dispatch(options: MegatronOptions) -> list[str]:
    if not options.number("--num-experts"):
        return []
    kind = options.text("--moe-token-dispatcher-type", "allgather")
    return [] if kind == "alltoall" else [f"--moe-token-dispatcher-type: {kind}; the price takes an all-to-all"]


def _software(options: MegatronOptions, words: dict[str, str]) -> str:
    """Return the record of the software: with gradients and parameters overlapped, or as the defaults are."""
    if any(option in options.values for option in OF_2021):
        return "megatron-2021"
    reduces, gathers = options.has("--overlap-grad-reduce"), options.has("--overlap-param-gather")
    if words.get("zero") == "1" and reduces != gathers:
        options.unpriced.append(
            "--overlap-param-gather: one of the two overlaps of data parallelism is on; the price has both"
        )
    return OVERLAPPED if reduces else PLAIN
