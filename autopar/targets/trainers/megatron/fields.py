"""The options of Megatron-LM, and what of them changes time or memory.

``fields.json`` is generated from the parser of megatron-core (tests/targets/own_code/megatron/check.py --fields), and
``make test-targets`` compares them. Its ``older`` are options of earlier releases, of the post-training scripts and of
the multimodal examples, from the tags v1.0 to core_v0.19.0 of Megatron-LM's repository.
"""

from __future__ import annotations

from functools import cache

from autopar.targets.field_lists import field_list

FLAG, ONE, MANY = "flag", "one", "many"
IGNORED_GROUPS = (
    "options", "regularization", "profiling", "RNG and initialization", "learning rate and weight decay",
    "checkpointing", "validation", "data and dataloader", "tokenizer", "autoresume", "logging", "straggler",
    "workload inspector", "inference", "one logger", "In-process restart", "ft_package", "rerun engine", "msc",
    "fault injector", "biencoder", "vision",
)  # fmt: skip
"""Groups of options that change neither the time of a step nor its memory, but for those read or named below."""
IGNORED = frozenset(
    """
    --distributed-backend --distributed-timeout-minutes --local-rank --local_rank --lazy-mpu-init
    --pipeline-model-parallel-comm-backend --high-priority-stream-groups --nccl-communicator-config-path
    --distributed-timeout-seconds-after-init --flight-recorder-dump-path --flight-recorder-trace-buffer-size
    --no-flight-recorder-dump-on-timeout --disable-gloo-process-groups --disable-jit-fuser --fake-process-group
    --tp-comm-bootstrap-backend --tp-comm-overlap-cfg --deterministic-mode --use-cpu-initialization
    --no-initialization --init-method-std --embedding-init-method-std --init-model-with-meta-device
    --attention-backend --use-flash-attn --flash-attention-version --transformer-impl --use-mcore-models
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-persist-layer-norm --norm-epsilon --apply-layernorm-1p --layernorm-epsilon --rotary-interleaved
    --rotary-base --rotary-percent --rotary-scaling-factor --rope-type --rope-scaling-factor --use-rope-scaling
    --rotary-seq-len-interpolation-factor --position-embedding-type --use-rotary-position-embeddings
    --no-position-embedding --mscale --mscale-all-dim --apply-query-key-layer-scaling --no-query-key-layer-scaling
    --attention-softmax-in-fp32 --openai-gelu --onnx-safe --bert-no-binary-head --max-position-embeddings
    --train-iters --train-samples --exit-interval --exit-duration-in-mins --exit-signal-handler --exit-signal
    --manual-gc --manual-gc-interval --no-manual-gc-eval --iterations-to-skip --empty-unused-memory-level
    --no-check-for-nan-in-loss-and-grad --check-for-large-grads --check-for-nan-in-loss-and-grad --dataloader-type
    --check-weight-hash-across-dp-replicas-interval --result-rejected-tracker-filename --train-sync-interval
    --calculate-per-token-loss --loss-scale --initial-loss-scale --min-loss-scale --min-scale --loss-scale-window
    --hysteresis --ddp-average-in-collective --no-gradient-reduce-div-fusion --no-align-grad-reduce
    --no-align-param-gather --ddp-pad-buckets-for-high-nccl-busbw --fp8-margin --fp8-interval --fp8-amax-history-len
    --fp8-amax-compute-algo --moe-router-load-balancing-type --moe-aux-loss-coeff --moe-z-loss-coeff
    --moe-input-jitter-eps --moe-router-pre-softmax --moe-router-topk-scaling-factor --moe-router-score-function
    --moe-router-dtype --moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-router-num-groups
    --moe-router-group-topk --moe-per-layer-logging --moe-permute-fusion --moe-router-fusion --moe-grouped-gemm
    --moe-router-force-load-balancing --moe-layer-freq --moe-shared-expert-gate --enable-experimental
    --mtp-loss-scaling-factor --cross-entropy-loss-fusion --cross-entropy-fusion-impl --use-te-activation-func
    --te-rng-tracker --high-priority-a2a-comm-stream --data-impl --mmap-warmup --override-lr-scheduler
    --use-checkpoint-lr-scheduler --scaled-upper-triang-masked-softmax-fusion --no-scaled-masked-softmax-fusion
    --attention-dropout --hidden-dropout --pin-cpu-grads --qk-layernorm --qk-l2-norm
    --swiglu --squared-relu --quick-geglu --normalization --add-qkv-bias
    --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention --kv-channels
    --multi-latent-attention --make-vocab-size-divisible-by --decrease-batch-size-if-needed --config-logger-dir
    --softmax-type --glu-linear-offset --activation-func-clamp-value --apply-residual-connection-post-layernorm
    --disable-bf16-reduced-precision-matmul --log-max-attention-logit --dsa-indexer-loss-coeff --attention-output-gate
    --no-async-tensor-model-parallel-allreduce --DDP-impl --no-log-learnig-rate-to-tensorboard --ckpt-format
    --log-batch-size-to-tensorboard --legacy-tokenizer --enable-one-logger --one-logger-entity --s3-cache-path
    --tiktoken-special-tokens --export-force-local-attention --enable-gpt-oss --no-delay-grad-reduce
    --cuda-graph-warmup-steps --tokenizer-hf-use-fast --tokenizer-hf-include-special-tokens --sft
    --sft-tokenizer-prompt-format --use-contiguous-buffers-in-ddp --no-contiguous-buffers-in-local-ddp
""".split()
)
"""Options of other groups that change neither, or that describe the model, which is given by itself."""
UNPRICED = {
    "--optimizer-cpu-offload": "the optimizer's state is moved to the host; the price keeps it on the device",
    "--cpu-offloading-num-layers": "activations are moved to the host; the price keeps them on the device",
    "--fine-grained-activation-offloading": "activations are moved to the host; the price keeps them on the device",
    "--overlap-moe-expert-parallel-comm": "rows travel to experts beside computation; the price waits for them",
    "--delay-wgrad-compute": "weight gradients are computed beside transfers; the price computes them in order",
    "--moe-shared-expert-overlap": "shared experts are computed beside transfers; the price computes them in order",
    "--tp-comm-overlap": "collectives of tensor parallelism are hidden in parts; the price of Megatron waits for them",
    "--enable-cuda-graph": "CUDA graphs save launches, which the price counts",
    "--external-cuda-graph": "CUDA graphs save launches, which the price counts",
    "--cuda-graph-impl": "CUDA graphs save launches, which the price counts",
    "--cuda-graph-modules": "CUDA graphs save launches, which the price counts",
    "--cuda-graph-scope": "CUDA graphs save launches, which the price counts",
    "--mtp-num-layers": "layers that predict further tokens count only if the given model has them",
    "--moe-expert-capacity-factor": "rows beyond the capacity of an expert are dropped; the price drops none",
    "--moe-pad-expert-input-to-capacity": "experts are padded to their capacity; the price pads none",
    "--moe-token-drop-policy": "rows are dropped; the price drops none",
    "--moe-layer-recompute": "the experts of a layer run again in the backward; the price keeps what they computed",
    "--distribute-saved-activations": "kept inputs of layers are in shards over tp; the price has them whole",
    "--rampup-batch-size": "the batch grows during training; the price is that of its final size",
    "--step-batch-size-schedule": "the batch grows during training; the price is that of its final size",
    "--window-size": "attention looks at a window of places, as far as the given model does",
    "--num-distributed-optimizer-instances": "the optimizer's state is in shards among some ranks alone, with replicas",
    "--perform-rl-step": "rollouts take time beside the step; the price is that of the step alone",
    "--freeze-all-layers": "frozen layers have no gradients; the price has those of the given model",
    "--fp32-residual-connection": "the residual is kept in float32; the price has it in the format of parameters",
    "--first-last-layers-bf16": "the first and last layers multiply in bfloat16; the price has all layers alike",
    "--moe-token-dispatcher-type": "rows travel in another way than an all-to-all",
    "--moe-flex-dispatcher-backend": "rows travel by kernels of their own; the price takes an all-to-all",
    "--moe-enable-deepep": "rows travel by kernels of their own; the price takes an all-to-all",
    "--use-nccl-ub": "registered buffers make collectives of data parallelism faster than the price takes",
    "--reuse-grad-buf-for-mxfp8-param-ag": "parameters are gathered into the gradients' buffer; the price has both",
    "--tensor-parallel-num-weight-shards": "weights are in further shards, gathered for use; the price has them whole",
    "--defer-embedding-wgrad-compute": "the embedding's weight gradients are computed when the pipeline drains",
    "--wgrad-deferral-limit": "the embedding's weight gradients are computed when the pipeline drains",
    "--fsdp-double-buffer": "gathered parameters have two buffers of a fixed size; the price has those in use",
    "--fsdp-manual-registration": "registered buffers make collectives faster than the price takes",
}
"""Options that the price does not know, and in which direction it is off."""
UNKNOWN_EFFECT = "the price does not know it"


def tables() -> dict[str, dict[str, str]]:
    """Return ``options``, each as ``kind/group/dest``, and ``older``, each as its kind."""
    return field_list(__package__)


@cache
def kinds() -> dict[str, str]:
    """Return how many values every option takes: ``flag``, ``one`` or ``many``."""
    options = {name: about.partition("/")[0] for name, about in tables()["options"].items()}
    return {**tables()["older"], **options}


@cache
def options_by_dest() -> dict[str, list[str]]:
    """Return the options of every name in a yaml, such as ``tensor_model_parallel_size``."""
    found: dict[str, list[str]] = {}
    for name, about in tables()["options"].items():
        found.setdefault(about.rpartition("/")[2], []).append(name)
    return found


def effect(option: str) -> str:
    """Return why an option that is not read makes the price another one; empty where it changes nothing."""
    if option in UNPRICED:
        return UNPRICED[option]
    about = tables()["options"].get(option, "")
    if option in IGNORED or (about and about.split("/")[1] in IGNORED_GROUPS):
        return ""
    return UNKNOWN_EFFECT
