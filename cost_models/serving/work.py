"""The work of a step of an engine on one device, per token and per request: what a price of serving is made of.

A step of an engine advances some requests: *prefills* (many new tokens of a request at once) and *decodes* (one new
token of each request). All sizes here are local: of the device that does most, under a layout of the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS, REQUESTS = "tokens", "requests"
"""Rows of a product: all new tokens of a step, or the last one of each request (the head over the vocabulary)."""
FORMAT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125, "int4": 0.53125}
"""Bytes of a stored number with its part of a scale: one byte for 16 in NVFP4, for 32 in MXFP4; two for 64 in int4."""


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product ``[rows, k] x [k, n]`` with a stored weight.

    Attributes:
        n, k: local sizes.
        weights: format of the stored weight: ``bf16``, ``fp8``, ``nvfp4``, ``mxfp4``, ``int4``.
        activations: format in which the product is computed: ``bf16``, ``fp8``, ``nvfp4``.
        count: how often a step has it.
        rows: ``TOKENS`` or ``REQUESTS``.
    """

    n: int
    k: int
    weights: str
    activations: str
    count: int = 1
    rows: str = TOKENS


@dataclass(frozen=True)
class Attention:
    """Attention of new tokens to all earlier ones in the cache.

    Attributes:
        heads, kv_heads: local numbers.
        key_size, value_size: elements of a head's key and value in the cache; for latent attention (DeepSeek), those
            of the compressed cache, with ``kv_heads`` 1.
        window: tokens that are looked back to; None for all.
        cache: format of the cache: ``bf16`` or ``fp8``.
        cached: False where keys and values are no cache that grows (attention to an encoder's output).
        count: how often a step has it.
        expanded: for latent attention, elements of a head's key and value as prefills compute with them; None for
            other attention. Decodes compute with the cache: scores of all its elements, sums of the ``value_size`` of
            them that values are made of.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    cache: str
    cached: bool = True
    count: int = 1
    expanded: tuple[int, int] | None = None

    @property
    def decode_width(self) -> int:
        """Multiply-adds of a query's head with one earlier token in a decode."""
        return self.key_size + self.value_size * (1 if self.expanded is None else 2)

    @property
    def prefill_width(self) -> int:
        """Multiply-adds of a query's head with one earlier token in a prefill."""
        return self.key_size + self.value_size if self.expanded is None else sum(self.expanded)


@dataclass(frozen=True)
class Experts:
    """A layer of routed experts.

    Attributes:
        local: experts on the device.
        total: experts of the layer.
        top_k: experts of a token.
        shapes: local ``(n, k)`` of the products of one expert.
        weights, activations: formats, as of :class:`MatrixProduct`.
        spread: ranks over whose tokens the experts are shared (expert parallel): tokens of all of them come here.
        count: how often a step has it.
    """

    local: int
    total: int
    top_k: int
    shapes: tuple[tuple[int, int], ...]
    weights: str
    activations: str
    spread: int = 1
    count: int = 1


@dataclass(frozen=True)
class RowWork:
    """Operators that read and write rows: norms, activations, rotary embeddings, residuals, casts.

    Attributes:
        bytes_per_token: bytes read and written for each new token, in all of a step.
        kernels: kernels that a step starts for them, before an engine fuses any.
    """

    bytes_per_token: float
    kernels: int


@dataclass(frozen=True)
class StepExchange:
    """A collective, or a message between stages.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``send``.
        bytes_per_token: bytes of the whole tensor of one token (of nccl-tests' ``size_bytes``).
        group: devices that take part.
        stride: distance of neighbours in the group, in ranks: tells which links it crosses.
        count: how often a step has it.
        rows: ``TOKENS`` or ``REQUESTS``.
    """

    kind: str
    bytes_per_token: float
    group: int
    stride: int = 1
    count: int = 1
    rows: str = TOKENS


@dataclass(frozen=True)
class StepWork:
    """All work of a step on the busiest device of one pipeline stage.

    Attributes:
        blocks: repeated blocks (layers) in it.
        weight_bytes: stored weights on the device.
        cache_bytes_per_token: cache of a token of a request, on the device; of layers without a window.
        window_cache_bytes: cache of a request of layers with a window, at most, on the device.
        vocabulary: local entries of the logits of a request, which sampling reads; 0 where the stage has none.
        stages: pipeline stages of the worker; all are taken to be alike.
    """

    products: tuple[MatrixProduct, ...] = ()
    attentions: tuple[Attention, ...] = ()
    experts: tuple[Experts, ...] = ()
    rows: RowWork = RowWork(0.0, 0)
    exchanges: tuple[StepExchange, ...] = ()
    blocks: int = 0
    weight_bytes: float = 0.0
    cache_bytes_per_token: float = 0.0
    window_cache_bytes: float = 0.0
    vocabulary: int = 0
    stages: int = 1


@dataclass(frozen=True)
class Prefill:
    """New tokens of one request, behind ``past`` tokens that are in the cache."""

    new: int
    past: int = 0


@dataclass(frozen=True)
class StepBatch:
    """Requests that one step of a worker's rank advances.

    Attributes:
        prefills: requests that are being prefilled.
        decodes: requests that get one token each.
        context: mean tokens in the cache of a decoding request.
    """

    prefills: tuple[Prefill, ...] = ()
    decodes: int = 0
    context: float = 0.0

    @property
    def new_tokens(self) -> int:
        """All new tokens of the step."""
        return sum(p.new for p in self.prefills) + self.decodes

    @property
    def requests(self) -> int:
        """All requests that get a token: an engine computes logits of these alone."""
        return len(self.prefills) + self.decodes
