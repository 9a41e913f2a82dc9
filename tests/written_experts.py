"""Layers of routed experts as people write them in plain torch, with a routing that leaves one expert without rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, EXPERTS, OF_EACH, ROWS = 8, 4, 2, 16


class Layer(nn.Module):
    """What the layers below share: a router that never picks the first expert and mostly the last, and experts both as
    modules and as stacked matrices."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.GELU(), nn.Dropout(dropout), nn.RMSNorm(16),
                nn.Linear(16, HIDDEN), nn.Dropout(dropout),
            ) for _ in range(EXPERTS)
        )  # fmt: skip
        self.up, self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 16)), nn.Parameter(torch.randn(EXPERTS, 16))
        self.down, self.scale = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 16)), nn.Parameter(torch.randn(EXPERTS))

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.gate(x) + torch.tensor([-100.0, 0, 0, 3], dtype=x.dtype)
        weights, picked = logits.softmax(-1).topk(OF_EACH, -1)
        return logits, weights, picked

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(x + self.mixed(x.reshape(-1, HIDDEN)).view_as(x), y)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Norms(Layer):
    """Experts with norms and a scale of their own."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, which = (picked == e).nonzero(as_tuple=True)
            if rows.shape[0] == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, which].unsqueeze(-1) * self.scale[e])
        return out


class StackedMatrices(Layer):
    """``w[e]`` of a parameter that all experts share, and ``len(rows)``."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            rows, which = torch.where(picked == e)
            if len(rows) == 0:
                continue
            middle = F.gelu(x[rows] @ self.up[e] + self.up_bias[e])
            out[rows] += weights[rows, which, None] * torch.einsum("tf,df->td", middle, self.down[e])
        return out


class TransposedMatrices(Layer):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up.unbind(), self.down, strict=True)):
            rows, which = torch.where(picked == e)
            middle = F.silu(torch.addmm(self.up_bias[e], x[rows], up))
            out.index_add_(0, rows, torch.matmul(middle, down.transpose(-2, -1)) * weights[rows, which, None])
        return out


class AnyOfSeveral(Layer):
    """A mask of the tokens that have an expert among theirs, and dense weights (as in makeMoE)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        logits, _, picked = self.routed(x)
        dense = torch.full_like(logits, float("-inf")).scatter(-1, picked, logits.gather(-1, picked)).softmax(-1)
        x = x.view(2, -1, HIDDEN)
        out, picked, tokens = torch.zeros_like(x), picked.view(2, -1, OF_EACH), x.view(-1, HIDDEN)
        for e, expert in enumerate(self.experts):
            mask = (picked == e).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                weighted = expert(tokens[flat_mask]) * dense[flat_mask, e].unsqueeze(1)
                out[mask] += weighted.squeeze(1)
        return out.view(-1, HIDDEN)


class MasksTwice(Layer):
    """A row for each expert of a token; the mask is written down twice (as in DeepSeekMoE)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        flat, rows = picked.view(-1), x.repeat_interleave(OF_EACH, dim=0)
        out = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            out[flat == e] = expert(rows[flat == e])
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Counts(Layer):
    """Whether an expert has rows is asked of counts that are read as a list (as in DeepSeek-V3's own code)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        counts = torch.bincount(picked.flatten(), minlength=EXPERTS).tolist()
        for e in range(EXPERTS):
            if counts[e] == 0:
                continue
            rows, which = torch.where(picked == e)
            out[rows] += self.experts[e](x[rows]) * weights[rows, which, None]
        return out


class Parts(Layer):
    """Rows in the order of their experts, split by counts, and put back in their own."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        flat = picked.flatten()
        order = flat.argsort(stable=True)
        parts = x[order // OF_EACH].split(flat.bincount(minlength=EXPERTS).tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = torch.empty_like(done)
        back[order] = done
        return (back.view(-1, OF_EACH, HIDDEN) * weights.unsqueeze(-1)).sum(1)


class PartsOfStacked(Layer):
    """The same with a histogram, all rows by their number, and a sum at the places of tokens (as in torchtitan)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        counts = torch.histc(picked.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
        order = torch.argsort(picked.view(-1), stable=True)
        index = (order // OF_EACH).reshape(-1, 1).expand(-1, HIDDEN)
        rows, sizes = torch.gather(x, 0, index), counts.int().tolist()
        done = []
        for e, part in enumerate(torch.split(rows[: sum(sizes)], sizes, dim=0)):
            done.append(torch.matmul(F.silu(torch.matmul(part, self.up[e])), self.down[e].transpose(-2, -1)))
        out = torch.cat(done, dim=0) * weights.view(-1)[order].reshape(-1, 1)
        return torch.zeros_like(x).scatter_add(0, index, out)


class RunningSlices(Layer):
    """Rows in the order of their experts, sliced by running counts of numpy (as in the code that came with
    DeepSeek-V3)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        marks = picked.new_zeros((picked.shape[0], EXPERTS))
        marks.scatter_(1, picked, 1)
        counts = marks.sum(dim=0).cpu().numpy()
        order = picked.view(-1).argsort()
        rows = x[order // picked.shape[1]]
        parts, start = [], 0
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            parts.append(self.experts[e](rows[start:end]))
            start = end
        done = torch.cat(parts, dim=0) if len(parts) else rows.new_empty(0)
        back = torch.empty_like(done)
        back[order] = done
        return (back.view(*picked.shape, -1) * weights.unsqueeze(-1)).sum(1)


class WrittenSlices(Layer):
    """The same, of numbers that are read one by one, written to slices of another tensor."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        order = picked.view(-1).argsort()
        rows = x[order // OF_EACH]
        done, start = torch.zeros_like(rows), 0
        for e, count in enumerate(picked.view(-1).bincount(minlength=EXPERTS)):
            n = count.item()
            done[start : start + n] = self.experts[e](rows[start : start + n])
            start += n
        back = torch.empty_like(done)
        back[order] = done
        return (back.view(-1, OF_EACH, HIDDEN) * weights.unsqueeze(-1)).sum(1)


class HitExperts(Layer):
    """A loop over those experts that have rows (as in Qwen3-MoE)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        mask = F.one_hot(picked, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            expert = self.experts[e]
            which, rows = torch.where(mask[e].squeeze(0))
            out.index_add_(0, rows, expert(x[None, rows].reshape(-1, HIDDEN)) * weights[rows, which, None])
        return out


class HitNumbers(Layer):
    """The same of numbers without a dim, found without a gradient (as in later versions of Qwen3-MoE)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(picked, num_classes=EXPERTS).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            which, rows = torch.where(mask[e])
            out.index_add_(0, rows, self.experts[e](x[rows]) * weights[rows, which, None])
        return out


class DistinctExperts(Layer):
    """A loop over the numbers that occur."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        for e in picked.unique():
            rows, which = (picked == e).nonzero(as_tuple=True)
            out[rows] += self.experts[e](x[rows]) * weights[rows, which, None]
        return out


class DistinctNumbers(Layer):
    """The same of a list."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        for e in torch.unique(picked).tolist():
            rows, which = torch.where(picked == e)
            out.index_add_(0, rows, self.experts[e](x[rows]) * weights[rows, which, None])
        return out


class Grouped(Layer):
    """Products by the ends of groups (``F.grouped_mm``, of which torch has no float64)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        order = torch.argsort(picked.view(-1), stable=True)
        ends = F.one_hot(picked.view(-1), EXPERTS).sum(0).cumsum(0).to(torch.int32)
        rows = x[order // OF_EACH]
        middle = F.silu(F.grouped_mm(rows, self.up, offs=ends))
        out = F.grouped_mm(middle, self.down.transpose(1, 2), offs=ends) * weights.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // OF_EACH, out)


class GatheredMatrices(Layer):
    """A matrix for each token and expert (as in gpt-fast)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        middle = F.silu(torch.einsum("ti,taio -> tao", x, self.up[picked])) * 2
        return torch.einsum("tai,ta -> ti", torch.einsum("tao, taio -> tai", middle, self.down[picked]), weights)


class GatheredForOne(Layer):
    """The same by batched products of the expert that each token has alone (as in Switch)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        logits, _, _ = self.routed(x)
        weights, picked = logits.softmax(-1).max(-1)
        middle = torch.relu(torch.bmm(x.unsqueeze(1), self.up[picked]))
        return torch.matmul(middle, self.down[picked].transpose(-2, -1)).squeeze(1) * weights.unsqueeze(-1)


class ScatteredSums(Layer):
    """Rows are added by an index for each of their elements, to a new tensor in every turn."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, which = torch.where(picked == e)
            done = expert(x[rows]) * weights[rows, which, None]
            out = out.scatter_add(0, rows.unsqueeze(-1).expand_as(done), done)
        return out


class AddedAtOnce(Layer):
    """The results of all experts, one behind the other, are added up by the places of all their rows."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, picked = self.routed(x)
        places, done = [], []
        for e, expert in enumerate(self.experts):
            rows, which = torch.where(picked == e)
            places.append(rows)
            done.append(expert(x[rows]) * weights[rows, which, None])
        index = torch.cat(places)
        return torch.zeros_like(x).scatter_add_(0, index[:, None].expand(-1, HIDDEN), torch.cat(done))


class MaskedScatter(Layer):
    """One expert for each token, put in the places of a mask of elements."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        logits, _, _ = self.routed(x)
        best, picked = logits.softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = picked == e
            if mask.any():
                out = out.masked_scatter(mask[:, None], expert(x[mask]))
        return out * best[:, None]


class Gates(Layer):
    """Weights for all experts, zeros but for those of a top-k: the rows of an expert are those of its column."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        logits, weights, picked = self.routed(x)
        gates = torch.zeros_like(logits).scatter_(1, picked, weights)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (gates[:, e] > 0).nonzero().squeeze(-1)
            out = out.index_add(0, rows, gates[rows, e, None] * expert(x[rows]))
        return out


class SortedGates(Layer):
    """The places of gates that are not zero, sorted by expert (as by the dispatcher of the first sparse experts)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        logits, weights, picked = self.routed(x)
        gates = torch.zeros_like(logits).scatter(1, picked, weights)
        found, order = torch.nonzero(gates).sort(0)
        _, columns = found.split(1, dim=1)
        rows = torch.nonzero(gates)[order[:, 1], 0]
        parts = torch.split(x[rows], (gates > 0).sum(0).tolist(), dim=0)
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], 0)
        weighted = done.mul(torch.gather(gates[rows], 1, columns))
        return torch.zeros(x.shape, dtype=x.dtype, requires_grad=True).index_add(0, rows, weighted)


class SharedExpert(TransposedMatrices):
    """An expert of all tokens beside the routed ones (as in DeepSeek-V3)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.features = nn.Linear(HIDDEN, 16), nn.Linear(HIDDEN, 16, bias=False)
        self.out = nn.Linear(16, HIDDEN, bias=False)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return super().mixed(x) + self.shared(x)

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.silu(self.gates(x)) * self.features(x))


class SharedExpertFirst(SharedExpert):
    """The same, written in the other order, with a gate (as in Qwen2-MoE)."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.gates(x).mean(-1, keepdim=True).sigmoid() * self.shared(x)
        return shared + TransposedMatrices.mixed(self, x)


class SomeExperts(nn.Module):
    """A layer with any number of experts, behind a product so that rows have gradients; the first has no rows."""

    def __init__(self, experts: int, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.gate = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, experts, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(experts, *shape)) for shape in ((HIDDEN, 16), (16, HIDDEN)))
        self.bias = nn.Parameter(torch.randn(experts, 16)) if bias else None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tokens = self.before(x).view(-1, HIDDEN)
        experts = len(self.up)
        skewed = torch.where(torch.arange(experts) > 0, torch.arange(experts).to(x.dtype), -100)
        weights, picked = (self.gate(tokens) + skewed).softmax(-1).topk(OF_EACH, -1)
        out = torch.zeros_like(tokens)
        for e in range(experts):
            rows, which = torch.where(picked == e)
            middle = tokens[rows] @ self.up[e]
            middle = F.silu(middle if self.bias is None else middle + self.bias[e])
            out.index_add_(0, rows, middle @ self.down[e] * weights[rows, which, None])
        return F.mse_loss(x + out.view_as(x), y)


LAYERS: dict[str, Callable[[], Layer]] = {
    cls.__name__: cls for cls in (
        Norms, StackedMatrices, TransposedMatrices, AnyOfSeveral, MasksTwice, Counts, Parts, PartsOfStacked,
        RunningSlices, HitExperts, HitNumbers, DistinctExperts, DistinctNumbers, Grouped, GatheredMatrices,
        GatheredForOne, ScatteredSums, AddedAtOnce, MaskedScatter, Gates, SortedGates, SharedExpert,
        SharedExpertFirst,
    )
}  # fmt: skip
