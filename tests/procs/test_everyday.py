"""Everyday habits of scripts on two real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from procs.in_turn import several

from autopar.runtime.ranks.launch import run_local


def test_a_checkpoint_is_that_of_one_device(tmp_path: Path) -> None:
    calls = {"saved": ("saved", str(tmp_path)), "alone": ("saved_by_one_rank", str(tmp_path))}
    first, second = run_local(several, 2, "everyday", calls, timeout=120)
    assert first["saved"] < 1e-12 and second["saved"] < 1e-12
    assert first["alone"].startswith("RunError: rank 0 saves a state of ")
    assert "all ranks must do it" in first["alone"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "open.pt"]


MESHES: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "axes": ("tensor=2", {}, ("tensor",)),
    "a table": ({"data": 2}, {}, ("data",)),
    "a pipeline": ("pipe=2,data=1", {"microbatches": 2}, ("data",)),
    "the mesh of each of two groups": ("tensor=1", {"stages": 2}, ("tensor",)),
    "of each of as many groups as there are": ("tensor=1", {"stages": "auto"}, ("tensor",)),
}


@pytest.fixture(scope="module")
def in_words() -> list[dict[str, Any]]:
    calls = {what: ("in_words", axes, options) for what, (axes, options, _) in MESHES.items()}
    return run_local(several, 2, "everyday", calls, timeout=120)


@pytest.mark.parametrize("what", MESHES)
def test_a_mesh_in_words(in_words: list[dict[str, Any]], what: str) -> None:
    for rank in in_words:
        difference, names, refused = rank[what]
        assert difference < 1e-12 and names == MESHES[what][2]
        assert refused.startswith("MeshError: the mesh data=2 x tensor=2 is of 4 ranks, 2 are running")
