"""The model's methods on its parallel module, and what only one rank does, on two real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from procs import model_methods
from procs.in_turn import marked, selected, several

from autopar.errors import RunError
from autopar.runtime.ranks.launch import run_local

CALLS: dict[str, tuple[Any, ...]] = {
    **{f"{how} {keeps}": ("called", how, keeps) for how in ("tensor", "zero", "pipeline") for keeps in (True, False)},
    **{f"trained {how}": ("trained", how) for how in ("tensor", "zero", "pipeline")},
    **{f"parts {how}": ("parts_called_alone", how) for how in ("zero", "pipeline")},
    "refused True": ("refused", True), "refused False": ("refused", False),
}  # fmt: skip
SLOW = {"tensor True", "zero True", "pipeline False", "trained tensor"}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_local(several, 2, "model_methods", selected(request, CALLS, SLOW))


@pytest.mark.parametrize("how", marked([key for key, (name, *_) in CALLS.items() if name == "called"], SLOW))
def test_methods_run_with_the_values_that_the_module_has(found: list[dict[str, Any]], how: str) -> None:
    for rank in found:
        count, words, width, count_alone, words_alone, width_alone, loss, loss_alone = rank[how]
        assert (count, width) == (count_alone, width_alone) == (160, 8)
        assert torch.equal(words, words_alone) and words.shape == (4, 10)
        assert abs(loss / loss_alone - 1) < 1e-12


@pytest.mark.parametrize("how", marked([key for key, (name, *_) in CALLS.items() if name == "trained"], SLOW))
def test_what_methods_make_is_of_the_parallel_module(found: list[dict[str, Any]], how: str) -> None:
    assert all(rank[how] < 1e-9 for rank in found)


@pytest.mark.parametrize("how", ["zero", "pipeline"])
def test_a_part_gives_values_on_every_rank_and_refuses_gradients(found: list[dict[str, Any]], how: str) -> None:
    for worst, texts in (rank[f"parts {how}"] for rank in found):
        assert worst < 1e-12
        for path, text in zip(("embed", "head"), texts, strict=True):
            assert f"'{path}' of a parallel module cannot be called alone with gradients" in text and "loss_fn=" in text


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_method_would_lose_is_refused(found: list[dict[str, Any]], keeps: bool) -> None:
    for rank in found:
        loss, shrink, embeddings, widen, later, silence, anneal = rank[f"refused {keeps}"]
        assert "Speaker.loss_twice() gives a tensor with a gradient, which would not reach the parameters" in loss
        assert "Speaker.shrink() has written to embed.weight" in shrink
        assert embeddings == anneal == "no error"
        assert "'Speaker' has other submodules or parameters than before" in widen
        assert "Speaker.later() gives a function, which would compute later" in later
        assert "Speaker.silence() has left gradients or hooks on embed.weight" in silence


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("method", r"rank 0 calls Speaker.generate\(\) behind call 1, rank 1 is at call 2 without a change: .* every"),
        ("eval", "rank 0 is at call 2 in eval mode, rank 1 is at call 2 without a change: .*evaluate on all ranks"),
        ("no_grad", "rank 0 is at call 2 in training without gradients, rank 1 is at call 2 without a change: "),
    ],
)
def test_what_one_rank_does_alone_is_an_error(what: str, text: str) -> None:
    with pytest.raises(RunError, match=text):
        run_local(model_methods.on_one_rank, 2, what)
