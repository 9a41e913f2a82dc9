"""``varlen_attn``, documents packed into one row: captured as plain operators, cut by heads and as a ring."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from autopar.capture import capture
from autopar.capture.microbatches import attention_between_rows, taken_of_batch
from autopar.capture.patterns.varlen_attention import varlen_attention_in_plain_operators
from autopar.comparison import program_vs_eager as V
from autopar.comparison.parts_of_loss import difference_by_parts
from autopar.errors import CaptureError
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.plan_notes import notes_on
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

LENGTH, HEADS, SHARED, WIDTH = 24, 4, 2, 8
ENDS = torch.tensor([0, 5, 17, 22], dtype=torch.int32)
"""Three documents, and two places behind them."""
OTHER_ENDS = torch.tensor([0, 9, 17, 24], dtype=torch.int32)


class Packed(nn.Module):
    """Attention over one row of documents ``[t c]``; ``ends`` says where they end."""

    def __init__(self, window: tuple[int, int], asks: bool = False) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.window, self.asks = window, asks

    def projected(self, x: Tensor) -> list[Tensor]:
        k, v = self.kv(x).unflatten(-1, (2, SHARED, WIDTH)).unbind(1)
        return [self.q(x).unflatten(-1, (HEADS, WIDTH)), k, v]

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:  # [t c], [n + 1] -> []
        q, k, v = self.projected(x)
        longest: Any = ends.diff().max().item() if self.asks else LENGTH
        y = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=self.window, enable_gqa=True)
        assert isinstance(y, Tensor)
        return self.o(y.flatten(1)).square().mean()


def by_documents(model: Packed, x: Tensor, ends: Tensor) -> Tensor:
    """Each document by itself; what stands behind the last one sees nothing."""
    q, k, v = model.projected(x)
    results = []
    for first, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        places = torch.arange(end - first)
        behind = places - places.unsqueeze(1)
        left, right = model.window
        sees = (behind >= (-left if left >= 0 else -LENGTH)) & (behind <= (right if right >= 0 else LENGTH))
        own = [part[first:end].transpose(0, 1) for part in (q, k, v)]
        results.append(F.scaled_dot_product_attention(*own, sees, enable_gqa=True).transpose(0, 1))
    results.append(q.new_zeros(len(x) - int(ends[-1]), HEADS, WIDTH))
    return model.o(torch.cat(results).flatten(1)).square().mean()  # type: ignore[no-any-return]


def prepared(window: tuple[int, int], asks: bool = False) -> tuple[Packed, Tensor]:
    torch.manual_seed(0)
    return Packed(window, asks).double(), torch.randn(LENGTH, 32, dtype=torch.float64)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0), (2, 1)])
def test_it_is_attention_of_each_document_and_cut_it_trains_as_on_one_device(window: tuple[int, int]) -> None:
    """Also with documents that the capture did not see."""
    model, x = prepared(window)
    captured = capture(model, (x, ENDS))
    for ends in (ENDS, OTHER_ENDS):
        state = *V.state_of(captured, model), V.inputs_of(captured, (x, ends), {})
        reference = V.train(captured, V.one_device(captured.graph), *state)
        model.zero_grad()
        loss = by_documents(model, x, ends)
        loss.backward()
        first = V.train(captured, V.one_device(captured.graph), *state, steps=1)
        assert float(first.losses[0]) == pytest.approx(loss.item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(first.gradients[name], parameter.grad, atol=1e-12), name
        for way, n in (("g", 2), ("ring", 3)):
            pins = {"*:scaled_dot_product_attention": {"data": way}}
            plan = plan_graph(captured.graph, load_cluster("dgx-h100"), Mesh.of(data=n), Options(constraints=pins))
            compared = V.compare(f"{way} on {n}", V.train(captured, plan, *state), reference)
            assert compared.worst < 1e-9, compared


def test_fewer_queries_than_keys_are_the_last_of_their_document() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, HEADS, WIDTH, dtype=torch.float64), torch.randn(12, HEADS, WIDTH, dtype=torch.float64)
    of_q, of_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    with varlen_attention_in_plain_operators():
        out, log_sums = varlen_attn(
            q, k, k, of_q, of_k, 3, 7, window_size=(-1, 0), return_aux=AuxRequest(lse=True)
        )  # fmt: skip
    for document in range(2):
        queries, keys = (slice(*ends[document : document + 2].tolist()) for ends in (of_q, of_k))
        n, m = queries.stop - queries.start, keys.stop - keys.start
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys]) / WIDTH**0.5
        sees = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        scores = scores.masked_fill(~sees, -torch.inf)
        assert torch.allclose(out[queries], torch.einsum("hqk,khd->qhd", scores.softmax(-1), k[keys]), atol=1e-12)
        assert torch.allclose(log_sums[:, queries], scores.logsumexp(-1), atol=1e-12)


def test_the_longest_document_may_be_asked_for() -> None:
    """Nobody reads it, so other documents with another longest one are the same program."""
    model, x = prepared((-1, 0), asks=True)
    warnings.simplefilter("error")  # as of numbers that are those of this batch
    captured = capture(model, (x, ENDS))
    state = *V.state_of(captured, model), V.inputs_of(captured, (x, OTHER_ENDS), {})
    reference = V.train(captured, V.one_device(captured.graph), *state, steps=1)
    assert float(reference.losses[0]) == pytest.approx(by_documents(model, x, OTHER_ENDS).item(), rel=1e-12)


def test_tokens_of_one_row_are_no_batch_for_microbatches() -> None:
    """Half of them with all ends of documents is another row; a number that is asked for is warned of."""
    model, x = prepared((-1, 0))
    captured = capture(model, (x, ENDS))
    assert "is between the rows of the batch" in taken_of_batch(captured.graph)
    half = capture(model, (x[: LENGTH // 2], ENDS))
    assert "as the mean of 2 microbatches" in difference_by_parts(half, model, ((x, ENDS), {}, ()), 2)


def test_a_cache_of_keys_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, ends: Tensor) -> Any:
            return varlen_attn(x, x, x, ends, ends, LENGTH, LENGTH, seqused_k=ends[1:])

    with pytest.raises(CaptureError, match="reads a cache of keys"):
        capture(Model(), (torch.randn(LENGTH, HEADS, WIDTH), ENDS))


@pytest.mark.parametrize("between", [False, True])
def test_where_queries_come_from_says_whether_rows_meet(between: bool) -> None:
    """Not how many they are: a sequence may be as long as the batch has rows, and rows may be parts of queries."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            # x [rows s 8], as many rows as s, or all tokens of three rows as one sequence
            h = self.project(x).flatten(0, 1)[None] if between else self.project(x)
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in h.chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v).square().mean()

    graph = capture(Model(), (torch.randn(4, 4, 8),)).graph
    assert bool(attention_between_rows(graph)) == between

    class OneRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.project = nn.Parameter(torch.randn(4, 8)), nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:  # queries of the model, as many as the batch has rows
            k, v = self.project(x).chunk(2, -1)
            return F.scaled_dot_product_attention(self.queries.expand(len(x), 4, 8), k, v).square().mean()

    assert not attention_between_rows(capture(OneRow(), (torch.randn(4, 4, 8),)).graph)


@pytest.mark.parametrize(("rows_first", "length"), [(True, 32), (True, 8), (False, 4)])
def test_rows_that_go_together_with_heads_are_followed(rows_first: bool, length: int) -> None:
    """torch's attention works on [s, rows * heads, n], and puts rows and places into one dim on the way."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=rows_first, dropout=0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    graph = capture(Model(), (torch.randn(8, length, 16),)).graph
    assert attention_between_rows(graph) == ([] if rows_first else ["layer.self_attn"])


def test_masks_are_booleans_and_told_of_where_they_are_large() -> None:
    """No tensor of queries by keys but of booleans is made, and a plan says what they take where that is much."""
    n = 2**14
    model = Packed((5, 0)).to("meta")
    with torch.device("meta"):
        example = torch.empty(n, 32), torch.empty(4, dtype=torch.int32)
    graph = capture(model, example).graph
    squares = {out.dtype for node in graph.nodes for out in node.outs if out is not None and out.n_elements == n * n}
    assert squares == {"bool"}
    (note,) = notes_on(graph)
    assert f"the largest [{n}, {n}], take 256" in note
    assert not notes_on(capture(prepared((-1, 0))[0], (torch.randn(LENGTH, 32), ENDS)).graph)
