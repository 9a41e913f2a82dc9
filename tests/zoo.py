"""Small models that every test can ask for: ``ZOO["llama"]()`` is a :class:`Case`.

Each model is in training mode, has random weights from a fixed seed, and has its scalar loss in its output. Where the
family allows it, every dim that could be cut (batch 8, sequence 16, 8 heads, hidden 64, ffn, vocabulary 64, channels)
is divisible by 8, so that meshes such as 2x2x2 and 2x4 have legal cuts; what is not divisible (3 colours, the 17
tokens of an image with a class token) is there on purpose. Dropout is 0 unless a test passes ``dropout=0.1``.

``ZOO[name](device="meta")`` gives the same case without storage, weights and inputs alike. ``ZOO[name](rows=12)`` has
batches of 12, for meshes of 3.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], dict[str, Any]]

BATCH, SEQ, HEADS, HIDDEN, FFN, VOCAB, CLASSES = 8, 16, 8, 64, 128, 64, 8


@dataclass(frozen=True)
class Case:
    """A model with two independent batches of the same shapes.

    Attributes:
        loss: what the loss is and over what it is averaged.
        batch2: ``(args, kwargs)`` with other values: what was baked in by the first batch shows on this one.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: str
    batch2: Batch

    @property
    def batch(self) -> Batch:
        return self.args, self.kwargs


def loss_of(output: Any) -> Tensor:
    """The scalar loss in a model's output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return output[0]
    return output["loss"]


def as_float64(case: Case) -> Case:
    """A copy whose parameters, buffers and inputs are float64 where they were floating point.

    Models from transformers still compute some things in float32 (the logits inside the loss, RMS norms, rotary
    angles), so theirs is not a float64 computation throughout; that of the plain torch models is.
    """

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        return tuple(map(double, args)), {name: double(value) for name, value in kwargs.items()}

    args, kwargs = batch(*case.batch)
    model = copy.deepcopy(case.model).double()
    return replace(case, model=model, args=args, kwargs=kwargs, batch2=batch(*case.batch2))


# --- registry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recipe:
    """``build()`` makes the model; ``batch(generator)`` makes ``(args, kwargs)`` on the CPU."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: str


ZOO: dict[str, Callable[..., Case]] = {}


def _register(recipe: Callable[..., _Recipe]) -> Callable[..., Case]:
    name = recipe.__name__

    @functools.wraps(recipe)
    def make(device: str = "cpu", rows: int = 0, **options: Any) -> Case:
        made = recipe(**options)

        def batch(seed: int) -> Batch:
            args, kwargs = made.batch(torch.Generator().manual_seed(seed))
            for more in range(1, -(-rows // BATCH)):
                other_args, other = made.batch(torch.Generator().manual_seed(seed + 100 * more))
                args = tuple(torch.cat(pair) for pair in zip(args, other_args, strict=True))
                kwargs = {k: torch.cat([v, other[k]]) for k, v in kwargs.items()}
            some = slice(rows or None)
            return tuple(a[some].to(device) for a in args), {k: v[some].to(device) for k, v in kwargs.items()}

        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(0)
            model = made.build().train()
        args, kwargs = batch(1)
        return Case(name, model, args, kwargs, made.loss, batch2=batch(2))

    ZOO[name] = make
    return make


def _ids(g: torch.Generator, *shape: int, high: int = VOCAB) -> Tensor:
    return torch.randint(0, high, shape or (BATCH, SEQ), generator=g)


def _images(g: torch.Generator, size: int, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=g)


def _hide(g: torch.Generator, labels: Tensor, share: float) -> Tensor:
    """Set a random share of the labels to -100, which the loss ignores; each part of a batch keeps its own number."""
    return labels.masked_fill(torch.rand(labels.shape, generator=g) < share, -100)


def _lengths_mask(g: torch.Generator) -> Tensor:
    """[b s] attention mask of 1 (token) and 0 (padding at the end), with a different length in each row."""
    lengths = torch.randint(SEQ // 4, SEQ + 1, (BATCH, 1), generator=g)
    return (torch.arange(SEQ) < lengths).long()


TOKEN_LOSS = "outputs.loss: cross-entropy of the next token, mean over the labels that are not -100"
CLASS_LOSS = "cross-entropy, mean over the batch"


# --- language models from transformers -------------------------------------------------------------------------------


def _causal_batch(g: torch.Generator) -> Batch:
    ids = _ids(g)
    return (), {"input_ids": ids, "labels": ids.clone()}


@_register
def gpt2(
    dropout: float = 0.0, layers: int = 2, hidden: int = HIDDEN, heads: int = HEADS, vocabulary: int = VOCAB,
    tied: bool = True,
) -> _Recipe:  # fmt: skip
    """Tied embeddings, learned positions, a fused query-key-value projection."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=SEQ, n_embd=hidden, n_layer=layers, n_head=heads, n_inner=2 * hidden,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        use_cache=False, attn_implementation="sdpa", tie_word_embeddings=tied,
    )  # fmt: skip
    return _Recipe(lambda: GPT2LMHeadModel(config), _causal_batch, TOKEN_LOSS)


@_register
def llama(layers: int = 2, kv_heads: int = 4) -> _Recipe:
    """Grouped-query attention, rotary positions, SwiGLU, RMS norm."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, max_position_embeddings=2 * SEQ,
        bos_token_id=0, eos_token_id=0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return _Recipe(lambda: LlamaForCausalLM(config), _causal_batch, TOKEN_LOSS)


@_register
def mistral(layers: int = 2, window: int | None = 8) -> _Recipe:
    """Llama's block with a sliding window shorter than the sequence, so that attention takes an explicit mask."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=2 * SEQ,
        sliding_window=window, bos_token_id=0, eos_token_id=0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return _Recipe(lambda: MistralForCausalLM(config), _causal_batch, TOKEN_LOSS)


@_register
def opt(dropout: float = 0.0, layers: int = 2, layerdrop: float = 0.0) -> _Recipe:
    """ReLU, tied embeddings; the position table has two rows more than positions (30 + 2 here)."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, word_embed_proj_dim=HIDDEN, ffn_dim=FFN, num_hidden_layers=layers,
        num_attention_heads=HEADS, max_position_embeddings=30, dropout=dropout, attention_dropout=dropout,
        layerdrop=layerdrop, pad_token_id=1, bos_token_id=2, eos_token_id=2, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return _Recipe(lambda: OPTForCausalLM(config), _causal_batch, TOKEN_LOSS)


def _bert(dropout: float, layers: int, masked: bool) -> _Recipe:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        intermediate_size=FFN, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        max_position_embeddings=SEQ, type_vocab_size=2, attn_implementation="sdpa",
    )  # fmt: skip

    def batch(g: torch.Generator) -> Batch:
        kwargs = {"input_ids": _ids(g), "labels": _hide(g, _ids(g), 0.7)}
        if masked:
            kwargs["attention_mask"] = _lengths_mask(g)
        return (), kwargs

    loss = "outputs.loss: cross-entropy of the hidden tokens, mean over the labels that are not -100 (about 30%)"
    return _Recipe(lambda: BertForMaskedLM(config), batch, loss)


@_register
def bert(dropout: float = 0.0, layers: int = 2) -> _Recipe:
    """Bidirectional attention without a mask; most labels are ignored."""
    return _bert(dropout, layers, masked=False)


@_register
def bert_masked(dropout: float = 0.0, layers: int = 2) -> _Recipe:
    """Bert with an attention mask as an input, rows of different lengths."""
    return _bert(dropout, layers, masked=True)


@_register
def t5(dropout: float = 0.0, layers: int = 2) -> _Recipe:
    """Encoder and decoder, a learned relative bias shared by the layers, one embedding with three uses."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=FFN, num_layers=layers, num_decoder_layers=layers,
        num_heads=HEADS, relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=dropout,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip

    def batch(g: torch.Generator) -> Batch:
        return (), {"input_ids": _ids(g), "labels": _hide(g, _ids(g), 0.2)}

    return _Recipe(lambda: T5ForConditionalGeneration(config), batch, TOKEN_LOSS)


@_register
def whisper(dropout: float = 0.0, layers: int = 2) -> _Recipe:
    """Speech to text: 8 mel bins x 32 frames, two 1-d convolutions (the second halves the frames to 16), cross
    attention. The sinusoidal positions of the encoder are a parameter that is not trained."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=HIDDEN, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=FFN, decoder_ffn_dim=FFN,
        max_source_positions=SEQ, max_target_positions=SEQ, dropout=dropout, attention_dropout=dropout,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None,
        begin_suppress_tokens=None, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip

    def batch(g: torch.Generator) -> Batch:
        features = torch.randn(BATCH, 8, 2 * SEQ, generator=g)
        return (), {"input_features": features, "labels": _ids(g)}

    return _Recipe(lambda: WhisperForConditionalGeneration(config), batch, TOKEN_LOSS)


# --- vision models from transformers ---------------------------------------------------------------------------------


def _labelled_images(size: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: ((), {"pixel_values": _images(g, size), "labels": _ids(g, BATCH, high=CLASSES)})


@_register
def vit(dropout: float = 0.0, layers: int = 2) -> _Recipe:
    """Patches by convolution and a class token: 16 + 1 tokens."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS, intermediate_size=FFN,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, image_size=16, patch_size=4,
        num_channels=3, num_labels=CLASSES, attn_implementation="sdpa",
    )  # fmt: skip
    return _Recipe(lambda: ViTForImageClassification(config), _labelled_images(16), f"outputs.loss: {CLASS_LOSS}")


@_register
def resnet() -> _Recipe:
    """Convolutions with batch norm, whose statistics are over the whole batch, and residual shortcuts."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=3, embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=CLASSES
    )
    return _Recipe(lambda: ResNetForImageClassification(config), _labelled_images(32), f"outputs.loss: {CLASS_LOSS}")


# --- plain torch -----------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """``loss(model(*inputs), target)`` as one module; the target comes last."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Tensor) -> Tensor:
        return self.loss(self.model(*args[:-1]), args[-1])


@_register
def mlp(batch: int = BATCH, hidden: int = HIDDEN, layers: int = 6, dropout: float = 0.0) -> _Recipe:
    """A square multi-layer perceptron; the widths are free, so that a test can make one side dear."""

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        for i in range(layers):
            parts.append(nn.Linear(hidden, hidden))
            if i < layers - 1:
                parts.append(nn.GELU())
                if dropout:
                    parts.append(nn.Dropout(dropout))
        return WithLoss(nn.Sequential(*parts), F.mse_loss)

    def data(g: torch.Generator) -> Batch:
        return (torch.randn(batch, hidden, generator=g), torch.randn(batch, hidden, generator=g)), {}

    return _Recipe(build, data, "output: mean squared error over batch and hidden")


class Mixer(nn.Module):
    """MLP-Mixer: one MLP over the tokens, one over the channels, in turn."""

    class Block(nn.Module):
        def __init__(self, tokens: int, hidden: int, token_ffn: int, ffn: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.tokens = nn.Sequential(nn.Linear(tokens, token_ffn), nn.GELU(), nn.Linear(token_ffn, tokens))
            self.channels = nn.Sequential(nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden))

        def forward(self, x: Tensor) -> Tensor:  # [b s h] -> [b s h]
            x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norm2(x))

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, kernel_size=4, stride=4)
        self.blocks = nn.ModuleList(self.Block(SEQ, HIDDEN, 32, FFN) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [b 3 16 16] -> [b classes]
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def _image_classes(size: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: ((_images(g, size), _ids(g, BATCH, high=CLASSES)), {})


@_register
def mlp_mixer(layers: int = 2) -> _Recipe:
    """Linear layers over two different dims of the same tensor."""
    return _Recipe(lambda: WithLoss(Mixer(layers), F.cross_entropy), _image_classes(16), f"output: {CLASS_LOSS}")


class TokenEncoder(nn.Module):
    """torch's own encoder layers between an embedding and a projection to the vocabulary."""

    def __init__(self, layers: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Parameter(torch.zeros(SEQ, HIDDEN))
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, FFN, dropout, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:  # [b s] -> [b v s], as cross_entropy wants it
        return self.head(self.encoder(self.embed(ids) + self.positions)).transpose(1, 2)


@_register
def transformer_encoder(dropout: float = 0.0, layers: int = 2, norm_first: bool = False) -> _Recipe:
    """``torch.nn.TransformerEncoder``: packed projections, split by torch.nn.MultiheadAttention in its own way."""
    return _Recipe(
        lambda: WithLoss(TokenEncoder(layers, dropout, norm_first), F.cross_entropy),
        lambda g: ((_ids(g), _ids(g)), {}),
        "output: cross-entropy, mean over batch and sequence",
    )


class UNet(nn.Module):
    """Two levels down, two up, a skip at each; ``group`` or ``batch`` norm, transposed convolution or upsampling."""

    def __init__(self, norm: str, up: str) -> None:
        super().__init__()
        c1, c2, c3 = 16, 32, 64

        def double(c_in: int, c_out: int) -> nn.Sequential:
            parts: list[nn.Module] = []
            for c in (c_in, c_out):
                parts.append(nn.Conv2d(c, c_out, 3, padding=1, bias=False))
                parts.append(nn.GroupNorm(8, c_out) if norm == "group" else nn.BatchNorm2d(c_out))
                parts.append(nn.ReLU(inplace=True))
            return nn.Sequential(*parts)

        def rise(c_in: int, c_out: int) -> nn.Module:
            if up == "transposed":
                return nn.ConvTranspose2d(c_in, c_out, 2, stride=2)
            return nn.Sequential(nn.Upsample(scale_factor=2, mode=up), nn.Conv2d(c_in, c_out, 1))

        self.down1, self.down2, self.bottom = double(3, c1), double(c1, c2), double(c2, c3)
        self.pool = nn.MaxPool2d(2)
        self.rise2, self.up2 = rise(c3, c2), double(2 * c2, c2)
        self.rise1, self.up1 = rise(c2, c1), double(2 * c1, c1)
        self.head = nn.Conv2d(c1, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:  # [b 3 y x] -> [b classes y x]
        a = self.down1(x)
        b = self.down2(self.pool(a))
        y = self.bottom(self.pool(b))
        y = self.up2(torch.cat([self.rise2(y), b], dim=1))
        y = self.up1(torch.cat([self.rise1(y), a], dim=1))
        return self.head(y)


def _segmentation(g: torch.Generator) -> Batch:
    return (_images(g, 16), _ids(g, BATCH, 16, 16, high=CLASSES)), {}


PIXEL_LOSS = "output: cross-entropy, mean over batch and pixels"


@_register
def unet() -> _Recipe:
    """Skips, group norm, max pooling, transposed convolution."""
    return _Recipe(lambda: WithLoss(UNet("group", "transposed"), F.cross_entropy), _segmentation, PIXEL_LOSS)


@_register
def unet_upsample() -> _Recipe:
    """The same with batch norm and bilinear upsampling."""
    return _Recipe(lambda: WithLoss(UNet("batch", "bilinear"), F.cross_entropy), _segmentation, PIXEL_LOSS)


@_register
def alexnet(dropout: float = 0.0) -> _Recipe:
    """A small AlexNet: convolutions and overlapping pools, then wide linear layers that hold most parameters."""

    def build() -> nn.Module:
        features = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        classifier = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(128, 128), nn.ReLU(inplace=True),
            nn.Dropout(dropout), nn.Linear(128, HIDDEN), nn.ReLU(inplace=True), nn.Linear(HIDDEN, CLASSES),
        )  # fmt: skip
        return WithLoss(nn.Sequential(features, classifier), F.cross_entropy)

    return _Recipe(build, _image_classes(32), f"output: {CLASS_LOSS}")
