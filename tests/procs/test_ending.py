"""A rank alone behind the training loop, while another one's process has ended: an error that says so."""

from __future__ import annotations

import pytest
from procs.ending import answers


@pytest.mark.parametrize("in_order", [True, False])
def test_a_rank_that_goes_on_alone_hears_who_has_ended(in_order: bool) -> None:
    said = answers(in_order, 60.0)
    assert set(said) == {"eval", "method", "save", "checkpoint"}
    for what, text in said.items():
        assert "rank 1" in text and "has ended" in text, (what, text)
