"""Families of plain torch for the wide zoo: what people write without a library of models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import Batch, Case, as_float64

ROWS, WIDTH, SEQ, VOCAB, CLASSES = 4, 16, 8, 24, 5

PLAIN: dict[str, Callable[[], Case]] = {}


def family(feed: Callable[[torch.Generator], tuple[Any, ...]]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a module whose forward gives its loss, under its name in small letters."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        name = "".join("_" + c.lower() if c.isupper() else c for c in kind.__name__).lstrip("_")

        def case() -> Case:
            torch.manual_seed(0)
            model = kind().train()
            batches: list[Batch] = [(feed(torch.Generator().manual_seed(seed)), {}) for seed in (1, 2)]
            return as_float64(Case(name, model, *batches[0], "output", batches[1]))

        PLAIN[name] = case
        return kind

    return register


def _rows(g: torch.Generator) -> tuple[Any, ...]:
    return torch.randn(ROWS, WIDTH, generator=g), torch.randint(0, CLASSES, (ROWS,), generator=g)


def _tokens(g: torch.Generator) -> tuple[Any, ...]:
    """Tokens with padding of 0, and the same number of labels with -100 there."""
    lengths = torch.randint(3, SEQ + 1, (ROWS, 1), generator=g)
    there = torch.arange(SEQ) < lengths
    ids = torch.randint(1, VOCAB, (ROWS, SEQ), generator=g)
    return ids.where(there, 0), torch.randint(0, VOCAB, (ROWS, SEQ), generator=g).where(there, -100)


def _pictures(g: torch.Generator) -> tuple[Any, ...]:
    return (torch.rand(ROWS, 3, 16, 16, generator=g),)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


@family(_rows)
class CouplingNet(nn.Module):
    """A reversible network by additive couplings, without a function of its own: RevNet in its plain form."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.f = nn.ModuleList(_mlp(half, 12, half) for _ in range(3))
        self.g = nn.ModuleList(_mlp(half, 12, half) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        for f, g in zip(self.f, self.g):
            a = a + f(b)
            b = b + g(a)
        return F.cross_entropy(self.head(torch.cat([a, b], dim=1)), label)


@family(_rows)
class RealNvp(nn.Module):
    """A normalizing flow: affine couplings, alternating masks, a log-determinant that is added up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(_mlp(WIDTH, 24, 2 * WIDTH) for _ in range(4))
        self.register_buffer("mask", (torch.arange(WIDTH) % 2).float())

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        det = x.new_zeros(len(x))
        for i, net in enumerate(self.nets):
            mask = self.mask if i % 2 else 1 - self.mask
            scale, shift = net(x * mask).chunk(2, dim=1)
            scale = torch.tanh(scale) * (1 - mask)
            x = x * scale.exp() + shift * (1 - mask)
            det += scale.sum(1)
        return (0.5 * x.square().sum(1) - det + label * 0).mean()


def _clicks(g: torch.Generator) -> tuple[Any, ...]:
    return (
        torch.randn(ROWS, 6, generator=g), torch.randint(0, VOCAB, (ROWS, 3), generator=g),
        torch.randint(0, 2, (ROWS,), generator=g),
    )  # fmt: skip


@family(_clicks)
class Dlrm(nn.Module):
    """Recommendation: three tables, the products of all pairs, read from a triangle by indices."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCAB, 8) for _ in range(3))
        self.bottom, self.top = _mlp(6, 12, 8), _mlp(8 + 6, 12, 1)
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        features = [self.bottom(dense), *(table(sparse[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(features, dim=1)
        products = (stacked @ stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        score = self.top(torch.cat([features[0], products], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicked.to(score.dtype))


@family(_tokens)
class LstmByHand(nn.Module):
    """Gates by chunk, a loop over time, states written into a preallocated tensor, padding that keeps the state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH, padding_idx=0), nn.Linear(WIDTH, VOCAB)
        self.input, self.hidden = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.input(self.embed(ids))
        h, c = (x.new_zeros(len(ids), WIDTH) for _ in "hc")
        states = torch.empty(len(ids), SEQ, WIDTH, dtype=x.dtype, device=x.device)
        for t in range(SEQ):
            i, f, o, g = (x[:, t] + self.hidden(h)).chunk(4, dim=-1)
            there = (ids[:, t] != 0)[:, None]
            c = torch.where(there, f.sigmoid() * c + i.sigmoid() * g.tanh(), c)
            h = torch.where(there, o.sigmoid() * c.tanh(), h)
            states[:, t] = h
        return F.cross_entropy(self.head(states).transpose(1, 2), labels)


def _graph(g: torch.Generator) -> tuple[Any, ...]:
    edges = (torch.rand(ROWS, SEQ, SEQ, generator=g) < 0.3).float()
    return torch.randn(ROWS, SEQ, WIDTH, generator=g), edges, torch.randint(0, CLASSES, (ROWS, SEQ), generator=g)


@family(_graph)
class DenseGcn(nn.Module):
    """Graph convolution over a dense adjacency, whose diagonal is filled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)])

    def forward(self, x: Tensor, edges: Tensor, label: Tensor) -> Tensor:
        a = torch.maximum(edges, edges.transpose(1, 2)).clone()
        a.diagonal(dim1=1, dim2=2).fill_(1)
        degree = a.sum(-1).rsqrt()
        a = a * degree[:, :, None] * degree[:, None, :]
        for i, layer in enumerate(self.layers):
            x = a @ layer(x if i == 0 else x.relu())
        return F.cross_entropy(x.transpose(1, 2), label)


def _edges(g: torch.Generator) -> tuple[Any, ...]:
    ends = torch.randint(0, 12, (2, 20), generator=g)
    return torch.randn(12, WIDTH, generator=g), ends, torch.randint(0, CLASSES, (12,), generator=g)


@family(_edges)
class MessagePassing(nn.Module):
    """The same over a list of edges: gathered, and summed with ``index_add_``."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, ends: Tensor, label: Tensor) -> Tensor:
        for _ in range(2):
            sent = self.message(torch.cat([x[ends[0]], x[ends[1]]], dim=1)).relu()
            total = torch.zeros_like(x).index_add_(0, ends[1], sent)
            count = torch.zeros(len(x), dtype=x.dtype).index_add_(0, ends[1], torch.ones_like(sent[:, 0]))
            x = self.update(total / count.clamp_(min=1)[:, None], x)
        return F.cross_entropy(self.head(x), label)


def _pictures_and_noise(g: torch.Generator) -> tuple[Any, ...]:
    return torch.rand(ROWS, 3, 16, 16, generator=g), torch.randn(ROWS, 8, generator=g)


@family(_pictures_and_noise)
class VariationalAutoencoder(nn.Module):
    """Its noise is an input; the two terms of its loss are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(True), nn.Conv2d(8, 16, 4, 2, 1), nn.ReLU(True))
        self.moments, self.start = nn.Linear(256, 16), nn.Linear(8, 256)
        self.up = nn.Sequential(
            nn.ReLU(True), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(True), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, logvar = self.moments(self.down(x).flatten(1)).chunk(2, dim=1)
        z = mean + noise * torch.exp(0.5 * logvar)
        made = self.up(self.start(z).view(-1, 16, 4, 4))
        bits = F.binary_cross_entropy_with_logits(made, x, reduction="sum")
        return (bits - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())) / len(x)


@family(_pictures_and_noise)
class GanGenerator(nn.Module):
    """A generator trained against a critic whose weights are frozen; the critic has batch norm and in-place ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 64), nn.Unflatten(1, (4, 4, 4)), nn.BatchNorm2d(4), nn.ReLU(True), nn.Upsample(scale_factor=2),
            nn.Conv2d(4, 8, 3, padding=1), nn.LeakyReLU(0.2, True), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 8)
        ).requires_grad_(False)

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        features = F.l1_loss(self.critic[0](made), self.critic[0](real).detach())
        return F.softplus(-self.critic(made)).mean() + features


@family(_pictures_and_noise)
class GanCritic(nn.Module):
    """A critic with spectral norm, trained on pictures that a generator makes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.generator = nn.Sequential(nn.Linear(8, 3 * 256), nn.Unflatten(1, (3, 16, 16)), nn.Tanh())
        self.critic = nn.Sequential(
            norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2, True), norm(nn.Conv2d(8, 1, 8)), nn.Flatten(0)
        )

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        with torch.no_grad():
            made = self.generator(noise)
        scores = self.critic(torch.cat([real, made.detach()]))
        return F.relu(1 - scores[: len(real)]).mean() + F.relu(1 + scores[len(real) :]).mean()


def _diffusion(g: torch.Generator) -> tuple[Any, ...]:
    return (
        torch.randn(ROWS, 3, 8, 8, generator=g), torch.randn(ROWS, 3, 8, 8, generator=g),
        torch.randint(0, 50, (ROWS,), generator=g), torch.randint(0, CLASSES, (ROWS,), generator=g),
    )  # fmt: skip


@family(_diffusion)
class Dit(nn.Module):
    """A diffusion transformer: patches, adaptive norms whose gates start at zero, a cosine schedule in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.label = nn.Conv2d(3, WIDTH, 2, 2), nn.Embedding(CLASSES, WIDTH)
        self.time = _mlp(WIDTH, WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH),
                           _mlp(WIDTH, 32, WIDTH)]) for _ in range(2)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 12)
        self.register_buffer("alpha", torch.cos(torch.linspace(0, 1.5, 50)) ** 2)

    def forward(self, image: Tensor, noise: Tensor, t: Tensor, label: Tensor) -> Tensor:
        a = self.alpha[t].view(-1, 1, 1, 1)
        x = self.patches(a.sqrt() * image + (1 - a).sqrt() * noise).flatten(2).transpose(1, 2)
        angle = t[:, None] * torch.exp(-torch.arange(WIDTH // 2, dtype=x.dtype))
        c = F.silu(self.time(torch.cat([angle.sin(), angle.cos()], -1)) + self.label(label))
        for modulate, qkv, out, mlp in self.blocks:
            shift1, scale1, gate1, shift2, scale2, gate2 = modulate(c)[:, None].chunk(6, dim=-1)
            h = qkv(self.norm(x) * (1 + scale1) + shift1).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
            x = x + gate1 * out(F.scaled_dot_product_attention(*h.unbind(0)).transpose(1, 2).flatten(2))
            x = x + gate2 * mlp(self.norm(x) * (1 + scale2) + shift2)
        made = self.head(self.norm(x)).view(-1, 4, 4, 2, 2, 3).permute(0, 5, 1, 3, 2, 4).reshape(noise.shape)
        return F.mse_loss(made, noise)


@family(_tokens)
class SlidingWindow(nn.Module):
    """Longformer's attention in chunks: overlapping views by strides, and corners that are masked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        window, length = 2, ids.shape[1]
        h = self.embed(ids)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        q = q / WIDTH**0.5

        def around(x: Tensor) -> Tensor:  # [b s h] -> [b s 2w+1 h]
            x = F.pad(x, (0, 0, window, window)).contiguous()
            size, stride = x.size(), x.stride()
            shape = (size[0], length, 2 * window + 1, size[2])
            return x.as_strided(shape, (stride[0], stride[1], stride[1], stride[2]))

        scores = torch.einsum("bsh,bswh->bsw", q, around(k))
        there = around((ids != 0)[..., None].to(h.dtype)).squeeze(-1)
        scores.masked_fill_(there == 0, -1e9)
        for i in range(window):
            scores[:, i, : window - i] = -1e9
            scores[:, length - 1 - i, window + 1 + i :] = -1e9
        mixed = torch.einsum("bsw,bswh->bsh", scores.softmax(-1), around(v))
        return F.cross_entropy(self.head(h + mixed).transpose(1, 2), labels)


@family(_tokens)
class WaveNet(nn.Module):
    """Dilated causal convolutions with gates; the skips are added up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Conv1d(WIDTH, VOCAB, 1)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i) for i in range(3))
        self.mixes = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        skips = torch.zeros_like(x)
        for layer, mix in zip(self.layers, self.mixes):
            gate, value = layer(F.pad(x, (layer.dilation[0], 0))).split(WIDTH, dim=1)
            out = mix(gate.sigmoid() * value.tanh())
            skips.add_(out)
            x = x + out
        return F.cross_entropy(self.head(F.relu(skips)), labels)


@family(_tokens)
class NextToken(nn.Module):
    """nanoGPT: a fused projection that is split, a causal mask in a buffer, tied weights, scaled residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attn, self.proj, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), _mlp(WIDTH, 32, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("bias", torch.tril(torch.ones(SEQ, SEQ)).view(1, 1, SEQ, SEQ))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows, length = ids.shape
        x = self.wte(ids) + self.wpe(torch.arange(length))
        q, k, v = self.attn(self.norms[0](x)).split(WIDTH, dim=2)
        q, k, v = (t.view(rows, length, 2, WIDTH // 2).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / 8**0.5)
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(rows, length, WIDTH)
        x = x + self.proj(mixed)
        x = x + self.mlp(self.norms[1](x))
        logits = self.head(self.norms[2](x))
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), ignore_index=-100)


@family(_pictures)
class MaskedAutoencoder(nn.Module):
    """Tokens are masked by a fixed pattern in a buffer, and put back by a gather with the mask token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.out = nn.Linear(48, WIDTH), nn.Linear(WIDTH, 48)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
        self.register_buffer("order", order)
        self.register_buffer("back", order.argsort())

    def forward(self, image: Tensor) -> Tensor:
        rows = len(image)
        tokens = image.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(rows, 16, 48)
        seen = self.encoder(self.patches(tokens)[:, self.order[:6]])
        full = torch.cat([seen, self.mask_token.expand(rows, 10, -1)], dim=1)
        full = full.gather(1, self.back[None, :, None].expand(rows, -1, WIDTH))
        hidden = torch.ones(16, dtype=image.dtype)
        hidden[self.order[:6]] = 0
        return ((self.out(full) - tokens).square().mean(-1) * hidden).sum() / (rows * hidden.sum())
