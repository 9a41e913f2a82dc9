"""Records of a plan for serving: what is asked, what is answered. No torch: exporters and commands read these."""

from __future__ import annotations

from dataclasses import dataclass, field

BOTH, PREFILL, DECODE = "both", "prefill", "decode"
"""Phases of a worker: continuous batching of prefills and decodes, or one of the two (disaggregated)."""

DEFAULT_ENGINE = "vllm"
"""Engine whose steps are priced where none is named."""


@dataclass(frozen=True)
class ServingLoad:
    """Requests that a deployment serves.

    Attributes:
        input_tokens: tokens of a prompt (``--isl``), with the prefix.
        output_tokens: tokens of an answer (``--osl``).
        prefix_tokens: tokens of the prompt that are in the cache already (``--prefix``).
        first_token_seconds: limit on the mean time to the first token (``--ttft``); None for none.
        token_seconds: limit on the mean time per output token after the first (``--tpot``); None for none.
        requests_per_second: requests that arrive (``--rate``); None for as many as can be served.
    """

    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    requests_per_second: float | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens of a prompt that are not in the cache."""
        return self.input_tokens - self.prefix_tokens

    @property
    def longest(self) -> int:
        """Tokens of a whole sequence, prompt and answer."""
        return self.input_tokens + self.output_tokens

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a decoding request, in the mean over its answer."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class Formats:
    """Formats of numbers: ``bf16``, ``fp8``, ``nvfp4``, ``mxfp4``, ``int4`` (weights alone)."""

    weights: str = "bf16"
    activations: str = "bf16"
    cache: str = "bf16"


@dataclass(frozen=True)
class WorkerLayout:
    """Layout of a model on one worker, which has ``tensor * attention_data * context * stages`` devices.

    Attributes:
        tensor: tensor parallel ranks of attention and dense layers.
        stages: pipeline stages.
        attention_data: ranks that attend to requests of their own (DeepSeek's way), each with a cache of its own.
        context: ranks over which a prompt is cut in prefill.
        expert: expert parallel ranks.
        expert_tensor: tensor parallel ranks of an expert; ``expert * expert_tensor == tensor * attention_data *
            context`` for models with experts, both 1 for others.
        kv_replicas: ranks that hold a copy of each key and value head, where there are fewer heads than ranks.
    """

    tensor: int = 1
    stages: int = 1
    attention_data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    kv_replicas: int = 1

    @property
    def words(self) -> str:
        """The sizes above one in the words of ``--like``: ``tp=4,pp=2,ep=8``."""
        parts = [
            ("tp", self.tensor), ("pp", self.stages), ("dp", self.attention_data), ("cp", self.context),
            ("ep", self.expert), ("etp", self.expert_tensor),
        ]  # fmt: skip
        return ",".join(f"{name}={size}" for name, size in parts if size > 1) or "tp=1"

    @property
    def devices(self) -> int:
        """Devices of one worker."""
        return self.tensor * self.attention_data * self.context * self.stages


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes on the fullest device of a worker, and the limit."""

    weights: float
    cache: float
    workspace: float
    limit: float

    @property
    def total(self) -> float:
        """All bytes."""
        return self.weights + self.cache + self.workspace


@dataclass(frozen=True)
class Worker:
    """Workers of one kind.

    Attributes:
        phase: ``both``, ``prefill`` or ``decode``.
        replicas: how many of them there are.
        requests: requests in flight in one worker.
        tokens_per_step: most new tokens of a step (chunked prefill).
    """

    phase: str
    layout: WorkerLayout
    replicas: int
    requests: int
    tokens_per_step: int
    memory: WorkerMemory


@dataclass(frozen=True)
class Served:
    """Predicted times of a deployment under its load.

    Attributes:
        first_token_seconds: mean time to the first token, with queueing.
        token_seconds: mean time per output token after the first.
        tokens_per_second_per_device: output tokens.
        tokens_per_second_per_user: ``1 / token_seconds``.
        requests_per_second: requests that the whole cluster serves.
        cost_per_million_tokens: of output tokens, in the currency of ``device_hour_cost``; None where no cost is given.
        binding: which limit binds, in a line: ``time per output token: 29.4 of 30 ms``.
        parts: seconds of a decode step by part: ``products``, ``attention``, ``experts``, ``exchanges``, ``launches``.
        transfer_seconds: seconds of moving a prompt's cache from a prefill worker to a decode worker; 0 if one.
    """

    first_token_seconds: float
    token_seconds: float
    tokens_per_second_per_device: float
    tokens_per_second_per_user: float
    requests_per_second: float
    cost_per_million_tokens: float | None = None
    binding: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    transfer_seconds: float = 0.0


@dataclass(frozen=True)
class ServingPlan:
    """A deployment of a model for serving, with its price.

    Attributes:
        model: spec of the model, as given: ``hf:llama/config.json``.
        cluster: name of the cluster.
        engine: engine for which it is priced: ``autopar``, ``vllm``, ``sglang``, ``tensorrt-llm``.
        workers: one kind, or prefill and decode workers.
        devices: devices of the cluster that are used.
        longest: tokens of the longest sequence, prompt and answer.
        cuts: the cut of each operator of a block by the integer program, by name: for the page and ``show``.
    """

    model: str
    cluster: str
    engine: str
    load: ServingLoad
    formats: Formats
    workers: tuple[Worker, ...]
    served: Served
    devices: int
    longest: int
    cuts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
