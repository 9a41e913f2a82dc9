"""More families of plain torch for the wide zoo: recurrent layers, graphs, state spaces, Fourier and sampled images."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_plain import CLASSES, PLAIN, ROWS, SEQ, VOCAB, WIDTH, family


def _tokens(g: torch.Generator) -> tuple[Any, ...]:
    return torch.randint(0, VOCAB, (ROWS, SEQ), generator=g), torch.randint(0, VOCAB, (ROWS, SEQ), generator=g)


class _Recurrent(nn.Module):
    """An embedding, a recurrent network of torch's own, and a projection to the vocabulary."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(VOCAB, WIDTH), kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if self.net.bidirectional else 1), VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.net(self.embed(ids))
        return F.cross_entropy(self.head(states).transpose(1, 2), labels)


@family(_tokens)
class Lstm(_Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.LSTM, num_layers=2)


@family(_tokens)
class LstmBothWays(_Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.LSTM, bidirectional=True)


@family(_tokens)
class Gru(_Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.GRU, num_layers=2)


@family(_tokens)
class Rnn(_Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.RNN, nonlinearity="relu")


@family(_tokens)
class LstmTranslator(nn.Module):
    """An encoder whose last states begin a decoder's, time first, with attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder, self.decoder = nn.LSTM(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        source, last = self.encoder(self.embed(ids).transpose(0, 1))
        target, _ = self.decoder(self.embed(labels.roll(1, 1)).transpose(0, 1), last)
        source, target = source.transpose(0, 1), target.transpose(0, 1)
        mixed = (target @ source.transpose(1, 2)).softmax(-1) @ source
        return F.cross_entropy(self.head(torch.cat([target, mixed], -1)).transpose(1, 2), labels)


def _sentences(g: torch.Generator) -> tuple[Any, ...]:
    lengths = torch.randint(1, SEQ + 1, (ROWS,), generator=g)
    lengths[0] = SEQ
    return *_tokens(g), lengths


@family(_sentences)
class PackedTagger(nn.Module):
    """Sentences of unequal lengths, packed and read both ways; each word has a label, and each sentence one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True)
        self.words, self.sentence = nn.Linear(2 * WIDTH, VOCAB), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        packed, (last, _) = self.net(packed)
        outputs, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        labels = labels.masked_fill(torch.arange(SEQ) >= lengths[:, None], -100)
        whole = F.cross_entropy(self.sentence(torch.cat([last[-2], last[-1]], dim=1)), labels[:, 0] % CLASSES)
        return F.cross_entropy(self.words(outputs).transpose(1, 2), labels) + whole


@family(_tokens)
class MambaMinimal(nn.Module):
    """A selective state space, its scan a loop over time, as in the small implementations that go round."""

    def __init__(self) -> None:
        super().__init__()
        inner, state = 2 * WIDTH, 4
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.project, self.out = nn.Linear(WIDTH, 2 * inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.select, self.delta = nn.Linear(inner, 1 + 2 * state, bias=False), nn.Linear(1, inner)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, state + 1)).repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)
        x, gate = self.project(self.norm(h)).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2))
        delta, b, c = self.select(x).split([1, 4, 4], dim=-1)
        delta = F.softplus(self.delta(delta))
        decay = torch.exp(delta[..., None] * -self.log_a.exp())
        added = delta[..., None] * b[:, :, None] * x[..., None]
        state, states = torch.zeros_like(added[:, 0]), []
        for t in range(ids.shape[1]):
            state = decay[:, t] * state + added[:, t]
            states.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
        y = (torch.stack(states, dim=1) + x * self.skip) * F.silu(gate)
        return F.cross_entropy(self.head(h + self.out(y)).transpose(1, 2), labels)


@family(_tokens)
class LongConvolution(nn.Module):
    """S4D's convolution as long as the sequence, by the fast Fourier transform, its kernel a sum of complex powers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.decay, self.angle = nn.Parameter(torch.rand(WIDTH, 4)), nn.Parameter(torch.rand(WIDTH, 4) * math.pi)
        self.c = nn.Parameter(torch.randn(WIDTH, 4, 2) * 0.1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, n = self.embed(ids).transpose(1, 2), ids.shape[1]
        a = torch.complex(-self.decay.exp(), self.angle)
        powers = torch.exp(a[..., None] * torch.arange(n))
        kernel = 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.c), powers).real
        y = torch.fft.irfft(torch.fft.rfft(x, 2 * n) * torch.fft.rfft(kernel, 2 * n), 2 * n)[..., :n]
        return F.cross_entropy(self.head(F.gelu(y).transpose(1, 2)).transpose(1, 2), labels)


# --- graphs ----------------------------------------------------------------------------------------------------------


def _edges(g: torch.Generator) -> tuple[Any, ...]:
    ends = torch.randint(0, 12, (2, 24), generator=g)
    return torch.randn(12, WIDTH, generator=g), ends, torch.randint(0, CLASSES, (12,), generator=g)


@family(_edges)
class Gcn(nn.Module):
    """Kipf and Welling's graph convolution over a list of edges, messages summed by ``scatter_add``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)])

    def forward(self, x: Tensor, ends: Tensor, label: Tensor) -> Tensor:
        loops = torch.arange(len(x))
        source, target = torch.cat([ends[0], loops]), torch.cat([ends[1], loops])
        degree = torch.zeros(len(x), dtype=x.dtype).scatter_add(0, target, torch.ones(len(target), dtype=x.dtype))
        weight = degree.rsqrt()[source] * degree.rsqrt()[target]
        for i, layer in enumerate(self.layers):
            h = layer(x if i == 0 else x.relu())
            sent = h[source] * weight[:, None]
            x = torch.zeros_like(h).scatter_add(0, target[:, None].expand_as(sent), sent)
        return F.cross_entropy(x, label)


@family(_edges)
class Gat(nn.Module):
    """Graph attention: a softmax over each node's edges by ``scatter_reduce`` and ``index_add``, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, CLASSES)
        self.left, self.right = nn.Parameter(torch.randn(2, WIDTH) * 0.3), nn.Parameter(torch.randn(2, WIDTH) * 0.3)

    def forward(self, x: Tensor, ends: Tensor, label: Tensor) -> Tensor:
        source, target = ends
        h = self.project(x).view(-1, 2, WIDTH)
        scores = F.leaky_relu((h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target], 0.2)
        largest = torch.full((len(x), 2), -1e9, dtype=x.dtype)
        largest = largest.scatter_reduce(0, target[:, None].expand_as(scores), scores.detach(), "amax")
        weight = torch.exp(scores - largest[target])
        total = torch.zeros(len(x), 2, dtype=x.dtype).index_add(0, target, weight)
        weight = weight / (total[target] + 1e-9)
        mixed = torch.zeros_like(h).index_add(0, target, weight[..., None] * h[source])
        return F.cross_entropy(self.head(F.elu(mixed.flatten(1))), label)


# --- recommendation, sampling, Fourier, speech ------------------------------------------------------------------------


def _bags(g: torch.Generator) -> tuple[Any, ...]:
    return (
        torch.randn(ROWS, 6, generator=g), torch.randint(0, VOCAB, (ROWS, 3, 5), generator=g),
        torch.randint(0, 2, (ROWS,), generator=g),
    )  # fmt: skip


@family(_bags)
class DlrmWithBags(nn.Module):
    """Recommendation with ``nn.EmbeddingBag``: several categories of one field are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCAB, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))
        self.top = nn.Sequential(nn.Linear(24 + 8, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        bags = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        score = self.top(torch.cat([self.bottom(dense), *bags], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicked.to(score.dtype))


def _pictures(g: torch.Generator) -> tuple[Any, ...]:
    return torch.rand(ROWS, 3, 16, 16, generator=g), torch.randint(0, CLASSES, (ROWS,), generator=g)


@family(_pictures)
class SpatialTransformer(nn.Module):
    """An affine map found by a small network, by which the picture is sampled before it is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(
            nn.Conv2d(3, 8, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 6)
        )
        self.see = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, CLASSES))

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        theta = self.find(image).view(-1, 2, 3) + torch.eye(2, 3, dtype=image.dtype)
        grid = F.affine_grid(theta, list(image.shape), align_corners=False)
        return F.cross_entropy(self.see(F.grid_sample(image, grid, align_corners=False)), label)


@family(_pictures)
class FourierOperator(nn.Module):
    """A Fourier neural operator: low frequencies are mixed by complex weights, and written into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.mix, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, CLASSES)
        self.weight = nn.Parameter(torch.randn(8, 8, 4, 4, 2) * 0.1)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.lift(image)
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        weight = torch.view_as_complex(self.weight)
        out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :4, :4], weight)
        x = F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.mix(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


def _speech(g: torch.Generator) -> tuple[Any, ...]:
    targets = torch.randint(1, CLASSES, (ROWS, 4), generator=g)
    return torch.randn(ROWS, 8, 32, generator=g), targets, torch.randint(2, 5, (ROWS,), generator=g)


@family(_speech)
class DeepSpeech(nn.Module):
    """A convolution over time, an LSTM both ways, and the CTC loss of transcripts of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.net = nn.Conv1d(8, WIDTH, 5, 2, 2), nn.LSTM(WIDTH, 8, bidirectional=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, sound: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.net(self.conv(sound).relu().permute(2, 0, 1))
        scores = self.head(states).log_softmax(-1)
        steps = torch.full((len(sound),), len(scores), dtype=torch.long)
        return F.ctc_loss(scores, targets, steps, lengths, zero_infinity=True)


@family(_tokens)
class Seq2Seq(nn.Module):
    """``nn.Transformer`` with a causal mask, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.net = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        out = self.net(self.embed(ids), self.embed(labels.roll(1, 1)), tgt_mask=mask.to(self.embed.weight.dtype))
        return F.cross_entropy(self.head(out).transpose(1, 2), labels)


__all__ = ["PLAIN"]
