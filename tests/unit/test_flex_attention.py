"""``flex_attention``: captured as attention of plain operators, and cut by rows, heads, queries and as a ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

from autopar.capture import capture
from autopar.capture.patterns.flex_attention import says_causal
from autopar.comparison import program_vs_eager as V
from autopar.errors import CaptureError
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

ATTENTION = "aten.scaled_dot_product_attention.default"
LENGTH = 24


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


class Packed(nn.Module):
    """Attention over rows in which several documents stand one after the other; ``doc`` [b s] numbers them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.kv, self.o = (nn.Linear(32, 32) for _ in range(3))
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.1, 0.05]))
        self.how = how

    def forward(self, x: Tensor, doc: Tensor) -> Tensor:  # [b s c], [b s] -> []
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))

        def document(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & (doc[b, q] == doc[b, k])

        def softcap_and_distance(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return torch.tanh(score / 5) * 5 + self.slopes[h] * (k - q)

        if self.how == "causal":
            more: dict[str, Any] = {"block_mask": create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")}
        else:
            mask = and_masks(causal, document) if self.how == "scores" else document
            block_mask = create_block_mask(mask, len(doc), None, LENGTH, LENGTH, device="cpu")
            more = {"block_mask": block_mask}
            if self.how == "scores":
                more["score_mod"] = softcap_and_distance
        y = flex_attention(q, k, v, enable_gqa=True, **more)
        return self.o(y.transpose(1, 2).flatten(2)).square().mean()


def prepared(how: str) -> tuple[Packed, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    lengths = torch.tensor([[5, 12, 7], [1, 20, 3]])
    doc = torch.stack([torch.repeat_interleave(torch.arange(3), row) for row in lengths])
    return Packed(how).double(), (torch.randn(2, LENGTH, 32, dtype=torch.float64), doc)


WAYS = {"causal": ("g", "q", "ring"), "documents": ("b", "g", "ring"), "scores": ("planner",)}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("ranks", [(3,), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_it_is_what_torch_gives_and_cut_it_trains_as_on_one_device(how: str, ranks: tuple[int, ...]) -> None:
    """Values beside torch's own, which has no backward on this device; gradients on several ranks beside one."""
    model, inputs = prepared(how)
    with torch.no_grad():
        expected = model(*inputs)
    captured = capture(model, inputs)
    targets = [node.target for node in captured.graph.nodes]
    assert (ATTENTION in targets) == (how != "scores")
    state = *V.state_of(captured, model), V.inputs_of(captured, inputs, {})
    reference = V.train(captured, V.one_device(captured.graph), *state)
    assert float(reference.losses[0]) == pytest.approx(float(expected), rel=1e-12)
    for n in ranks:
        for way in WAYS[how]:
            if way in ("b", "g") and n != 2:
                continue  # there are two rows, and two heads of keys
            pins = {} if way == "planner" else {"*:scaled_dot_product_attention": {"data": way}}
            plan = plan_graph(captured.graph, load_cluster("dgx-h100"), Mesh.of(data=n), Options(constraints=pins))
            compared = V.compare(f"{way} on {n}", V.train(captured, plan, *state), reference)
            assert compared.worst < 1e-9, compared


def test_gradients_are_those_of_scores_one_by_one() -> None:
    """The softmax written out for each query, with a mask from the documents: nothing of flex attention in it."""
    model, (x, doc) = prepared("documents")
    captured = capture(model, (x, doc))
    state = *V.state_of(captured, model), V.inputs_of(captured, (x, doc), {})
    reference = V.train(captured, V.one_device(captured.graph), *state, steps=1)
    q = model.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
    k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, 1) for part in model.kv(x).chunk(2, -1))
    rows = []
    for b in range(2):
        for at in range(LENGTH):
            sees = [j for j in range(at + 1) if doc[b, j] == doc[b, at]]
            weights = torch.softmax(torch.einsum("hd,hkd->hk", q[b, :, at], k[b, :, sees]) / 8**0.5, -1)
            rows.append(torch.einsum("hk,hkd->hd", weights, v[b, :, sees]).flatten())
    loss = model.o(torch.stack(rows).view(2, LENGTH, 32)).square().mean()
    loss.backward()
    assert float(reference.losses[0]) == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(reference.gradients[name], parameter.grad, atol=1e-12), name


def test_a_function_of_whole_rows_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self, mod: Any) -> None:
            super().__init__()
            self.weight, self.mod = nn.Parameter(torch.ones(8)), mod

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.weight
            return flex_attention(x, x, x, score_mod=self.mod).sum()

    table = torch.randn(2, 3)
    for mod, says in (
        (lambda score, b, h, q, k: score + table[h].sum(), "indexes a tensor of 2 dims with 1 indices"),
        (lambda score, b, h, q, k: score - score.mean(), "calls 'mean'"),
        (lambda score, b, h, q, k: score + q.T, "calls 'get'"),
    ):
        with pytest.raises(CaptureError, match=says):
            capture(Model(mod), (torch.randn(1, 2, 16, 8),))


def test_only_the_plain_comparison_is_causal() -> None:
    assert says_causal(causal)
    assert says_causal(lambda b, h, q, k: k <= q)
    assert not says_causal(lambda b, h, q, k: k >= q)
    assert not says_causal(lambda b, h, q, k: q > k)
    assert not says_causal(lambda b, h, q, k: q >= b)
    assert not says_causal(lambda b, h, q, k: q - k >= 0)
    assert not says_causal(lambda b, h, q, k: True)
