"""Folders of safetensors files: written by every plan, read by every plan, and by the safetensors package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from procs import checkpoints
from procs.in_turn import several

from autopar.errors import RunError
from autopar.runtime.checkpoints.safetensors_files import StoredTensor, header_of, stored_tensors
from autopar.runtime.checkpoints.safetensors_folder import _make_folder
from autopar.runtime.ranks.launch import run_local

safetensors = pytest.importorskip("safetensors.torch", reason="the package safetensors writes what is compared here")
WAYS = ("zero", "tensor meta", "pipeline")
BROKEN = {
    "missing": "missing", "unexpected": "unexpected", "shape": "shape", "no folder": "nowhere", "empty": "empty",
    "cut off": "cut", "lost file": "lost", "no header": "text",
}  # fmt: skip


def plain(seed: int) -> checkpoints.Net:
    torch.manual_seed(seed)
    net = checkpoints.Net()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    return net


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders as others write them: tied weights once, several files; and broken ones."""
    path = tmp_path_factory.mktemp("weights")
    state = {k: v.contiguous() for k, v in plain(3).state_dict().items() if k != "head.weight"}
    names = list(state)
    (path / "theirs").mkdir()
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, of_file in parts.items():
        safetensors.save_file({n: state[n] for n in of_file}, path / "theirs" / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, of_file in parts.items() for n in of_file}}
    (path / "theirs" / "model.safetensors.index.json").write_text(json.dumps(index))
    wrong: dict[str, dict[str, torch.Tensor]] = {
        "missing": {n: v for n, v in state.items() if n != "up.bias"},
        "unexpected": {**state, "extra": torch.zeros(2)}, "shape": {**state, "up.bias": torch.zeros(3)}, "cut": state,
    }  # fmt: skip
    for name, of in wrong.items():
        (path / name).mkdir()
        safetensors.save_file(of, path / name / "model.safetensors")
    whole = (path / "cut" / "model.safetensors").read_bytes()
    (path / "cut" / "model.safetensors").write_bytes(whole[:-8])
    for name in ("empty", "lost", "text"):
        (path / name).mkdir()
    (path / "lost" / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "text" / "model.safetensors").write_text("no header")
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    calls: dict[str, tuple[Any, ...]] = {
        how: (
            "both_ways", how.removesuffix(" meta"), str(folder / f"saved-{how}"), "1KB" if how != "zero" else "5GB",
            str(folder / "theirs"), how.endswith("meta"), BROKEN if how == "zero" else {},
        ) for how in WAYS
    }  # fmt: skip
    return run_local(several, 2, "weights", calls)


@pytest.mark.parametrize("how", WAYS)
def test_what_is_saved_is_read_by_others(found: list[dict[str, Any]], folder: Path, how: str) -> None:
    """Every tensor once, to the bit, in files of the size that was asked for, as the safetensors package reads them."""
    where, wanted = folder / f"saved-{how}", found[0][how][0]
    files = sorted(where.glob("*.safetensors"))
    state = {name: value for file in files for name, value in safetensors.load_file(file).items()}
    assert len(files) == 1 if how == "zero" else len(files) > 2
    assert not list(where.glob("*.part"))
    tied = {"embed.weight", "head.weight"}
    assert state.keys() | tied == wanted.keys() and state.keys() & tied
    assert all(torch.equal(value, wanted[name]) for name, value in state.items())
    assert stored_tensors(where).keys() == state.keys()


@pytest.mark.parametrize("how", WAYS)
def test_what_others_wrote_is_loaded(found: list[dict[str, Any]], how: str) -> None:
    net = plain(3)
    wanted = net.state_dict()
    for rank in found:
        _, state, loss, _ = rank[how]
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], value) for name, value in wanted.items())
        if how != "pipeline":
            assert loss == pytest.approx(float(net.eval()(*checkpoints.Data().batch())), rel=1e-12)


def test_what_does_not_fit_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["zero"][3]
        assert "1 missing: up.bias" in said["missing"]
        assert "1 unexpected: extra" in said["unexpected"]
        assert "up.bias: shape (3,)" in said["shape"] and "(16,) in the model" in said["shape"]
        assert "there is no folder" in said["no folder"] and "no safetensors file" in said["empty"]
        assert "cut off" in said["cut off"] and "model-00001-of-00002.safetensors" in said["lost file"]
        assert "its header alone would have" in said["no header"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_pieces_of_every_cut(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any box of a tensor is read, chunk by chunk, as slicing the whole gives it."""
    monkeypatch.setattr("autopar.runtime.checkpoints.safetensors_files.CHUNK_BYTES", 64)
    whole = torch.randint(0, 2, (7, 6, 5)).to(dtype)
    three = {"x": whole, "one": whole[0, 0, 0].clone(), "none": whole[:0].clone()}
    safetensors.save_file(three, tmp_path / "a.safetensors")
    tensors: dict[str, StoredTensor] = header_of(tmp_path / "a.safetensors")
    for box in ([(0, 7), (0, 6), (0, 5)], [(2, 3), (0, 6), (0, 5)], [(0, 7), (4, 2), (1, 3)], [(6, 1), (0, 0), (0, 5)]):
        target = torch.empty([n for _, n in box], dtype=dtype)
        tensors["x"].read_into(target, tuple(box))
        assert torch.equal(target, whole[tuple(slice(a, a + n) for a, n in box)])
    one = torch.empty((), dtype=dtype)
    tensors["one"].read_into(one, ())
    assert torch.equal(one, whole[0, 0, 0]) and tensors["none"].shape == (0, 6, 5)


def test_weights_do_not_go_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(RunError, match=r"could not be written to .*; give a folder"):
        _make_folder(tmp_path / "weights")
