"""What a layer keeps by the kernels that run it, against the formulas of Korthikanti et al. (arXiv 2205.05198).

Their layer of a GPT keeps 34 s b h + 5 a s^2 b bytes in 16 bits (table 2), of which 5 a s^2 b are attention's own: with
flash attention nothing of these is kept. A layer of Llama keeps, in units of s b h: 2 before each norm, 2 behind it,
2 + 1 + 1 for queries, keys and values of half as many heads, 2 of what attention gives, and 2 f / h each of gate, other
half and product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.certificate import check
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans.plan import StagePlan
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from hardware_profiles import Cluster, load_cluster

S, B, H, A, FFN = 128, 2, 256, 4, 1024


class GptLayer(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash, self.first, self.second = flash, nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).view(B, S, 3, A, H // A).permute(2, 0, 3, 1, 4).unbind(0)
        if self.flash:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            z = F.dropout(torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1), 0.1) @ v
        x = x + F.dropout(self.out(z.transpose(1, 2).reshape(B, S, H)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


class WrittenRmsNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class LlamaLayer(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = norm(), norm()
        self.q, self.k, self.v, self.out = (nn.Linear(H, n, bias=False) for n in (H, H // 2, H // 2, H))
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((H, FFN), (H, FFN), (FFN, H)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (part(y).view(B, S, -1, H // A).transpose(1, 2) for part in (self.q, self.k, self.v))
        z = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(z.transpose(1, 2).reshape(B, S, H))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def turned(self, x: Tensor) -> Tensor:
        half = H // A // 2
        angle = torch.arange(S, device=x.device)[:, None].expand(S, 2 * half).to(x.dtype)
        return x * angle.cos() + torch.cat((-x[..., half:], x[..., :half]), -1) * angle.sin()


class Layers(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], n: int) -> None:
        super().__init__()
        self.begin, self.layers = nn.Linear(H, H), nn.ModuleList(layer() for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


def planned(layer: Callable[[], nn.Module], n: int, cluster: Cluster, **sizes: int) -> tuple[Graph, StagePlan]:
    with torch.device("meta"):
        model = Layers(layer, n).bfloat16()
        graph = capture(model, (torch.zeros(B, S, H, dtype=torch.bfloat16),)).graph
    return graph, plan_graph(graph, cluster, Mesh.of(**(sizes or {"data": 1})), Options())


def kept_of_a_layer(layer: Callable[[], nn.Module], cluster: Cluster) -> float:
    """Bytes that one more layer keeps, by s b h."""
    two, three = (planned(layer, n, cluster)[1].kept_bytes for n in (2, 3))
    return (three - two) / (S * B * H)


def clusters() -> dict[str, Cluster]:
    own = load_cluster("dgx-h100")
    fused = replace(own, software=replace(own.software, name="fused", fused=True))
    return {"cpu": load_cluster("local"), "gpu": own, "fused": fused}


FUSED_LLAMA = 2 * (2 + 2) + 2 + 1 + 1 + 2 + 3 * 2 * FFN / H
OF_LAYERS: dict[str, tuple[Callable[[], nn.Module], dict[str, float]]] = {
    "gpt, flash": (lambda: GptLayer(True), {"cpu": 34, "gpu": 34, "fused": 34}),
    "gpt": (lambda: GptLayer(False), dict.fromkeys(("cpu", "gpu", "fused"), 34 + 5 * A * S / H)),
    "llama": (  # a norm keeps 4 bytes of the cast and 2 more of what the weight scales; SiLU's result is kept, too
        lambda: LlamaLayer(WrittenRmsNorm),
        {"cpu": FUSED_LLAMA + 2 * 4 + 2 * FFN / H, "gpu": FUSED_LLAMA + 2 * 4 + 2 * FFN / H, "fused": FUSED_LLAMA},
    ),
    "llama, torch's norm": (  # the CPU computes it in parts, which keep 8 bytes and not the 2 of the input
        lambda: LlamaLayer(lambda: nn.RMSNorm(H, eps=1e-6)),
        {"cpu": FUSED_LLAMA + 2 * 6 + 2 * FFN / H, "gpu": FUSED_LLAMA + 2 * FFN / H, "fused": FUSED_LLAMA},
    ),
}


@pytest.mark.parametrize("kernels", ["cpu", "gpu", "fused"])
@pytest.mark.parametrize("layer", OF_LAYERS)
def test_bytes_of_a_layer_are_those_of_the_formula(layer: str, kernels: str) -> None:
    make, wanted = OF_LAYERS[layer]
    assert kept_of_a_layer(make, clusters()[kernels]) == pytest.approx(wanted[kernels], abs=0.15)


def test_the_moments_of_fused_kernels_are_no_fuller_than_the_others() -> None:
    """What is not written is not there at the peak either: one layer less of it would be less than the norm's cast."""
    own, fused = (planned(lambda: LlamaLayer(WrittenRmsNorm), 3, clusters()[name])[1] for name in ("gpu", "fused"))
    less_kept = own.kept_bytes - fused.kept_bytes
    assert own.price.memory_bytes - fused.price.memory_bytes >= less_kept > 0


class Vocabulary(nn.Module):
    """A product, and a loss over as many classes as it has features."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.head = nn.Linear(H, H), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.begin(x))
        return F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1))


CLASSES = 8192


def trained_by(**said: Any) -> Cluster:
    own = load_cluster("dgx-h100")
    return replace(own, software=replace(own.software, name="a trainer", **said))


def with_loss(cluster: Cluster, **sizes: int) -> StagePlan:
    with torch.device("meta"):
        batch = torch.zeros(B, S, H, dtype=torch.bfloat16), torch.zeros(B, S, dtype=torch.long)
        graph = capture(Vocabulary().bfloat16(), batch).graph
    return plan_graph(graph, cluster, Mesh.of(**(sizes or {"data": 1})), Options())


def test_a_loss_in_place_needs_one_number_for_each_class() -> None:
    """Torch's loss has at its fullest moment the logarithms, their gradient and that of the logits, in float32 each;
    in place it has the logarithms, and the logits' gradient in 16 bits behind it."""
    torchs, in_place = with_loss(trained_by(fused=True)), with_loss(trained_by(fused=True, loss_in_place=True))
    of_class = (torchs.price.memory_bytes - in_place.price.memory_bytes) / (B * S * CLASSES)
    assert 4 <= of_class <= 12
    assert in_place.kept_bytes <= torchs.kept_bytes
    beside = in_place.price.memory_bytes - in_place.price.stored_bytes
    assert 4 * B * S * CLASSES <= beside + in_place.price.gradient_bytes <= 7 * B * S * CLASSES + 2**21


def test_a_trainer_whose_gradients_stay_has_them_at_every_moment() -> None:
    """And where it buckets them, once more in the format in which they are used."""
    own = with_loss(trained_by())
    stay = with_loss(trained_by(keeps_gradients=True))
    assert own.price.memory_bytes < stay.price.memory_bytes <= own.price.memory_bytes + own.price.gradient_bytes
    alone = with_loss(trained_by(keeps_gradients=True, buckets_gradients=True))
    assert alone.price.memory_bytes == stay.price.memory_bytes  # nobody adds gradients up
    two = [with_loss(trained_by(keeps_gradients=True, buckets_gradients=bucket), data=2) for bucket in (False, True)]
    more = two[1].price.gathered_bytes - two[0].price.gathered_bytes
    summed = [name for name, choice in two[0].params.items() if choice.stored != choice.used]
    assert summed == [name for name, choice in two[1].params.items() if choice.stored != choice.used]
    assert (more > 0) == bool(summed)


def test_only_norms_may_be_fused() -> None:
    """SwiGLU then keeps what SiLU gives, 2 f / h more."""
    llama = OF_LAYERS["llama"][0]
    swiglu = kept_of_a_layer(llama, trained_by(fused=True, fuses_pointwise=False))
    assert swiglu == pytest.approx(FUSED_LLAMA + 2 * FFN / H, abs=0.15)


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 2, "tensor": 2}])
def test_a_plan_for_gpus_is_recounted_by_their_kernels(sizes: dict[str, int]) -> None:
    """The program with torch's RMS norm keeps to the byte what the plan says, by the stand-in for the GPU's kernel."""
    cluster = load_cluster("dgx-h100")
    graph, plan = planned(lambda: LlamaLayer(lambda: nn.RMSNorm(H, eps=1e-6)), 2, cluster, **sizes)
    assert check(plan, graph, cluster).failures == []


@pytest.mark.parametrize("kernels, statistic", [("cpu", 2), ("gpu", 4)])
def test_a_layer_norm_in_bfloat16_keeps_what_its_kernel_does(kernels: str, statistic: int) -> None:
    """Of each row mean and inverse deviation, in float32 on a GPU; beside input and result of 2 s b h each."""
    cluster = clusters()[kernels]

    def layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H))

    assert kept_of_a_layer(layer, cluster) == pytest.approx(2 + 2 + 2 * statistic / H)
    graph, plan = planned(layer, 2, cluster)
    assert check(plan, graph, cluster).failures == []
