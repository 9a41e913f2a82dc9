"""A slice of ``make zoo``: the same trial and the same page, of a few families whose operators once had no rule.

The whole of it is ``benchmarks/families.py``; its results are docs/zoo.md.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
from family_trial import LIMIT, trial
from procs.in_turn import marked
from zoo_derivatives import DERIVATIVES
from zoo_wide import EVERY

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import families


@pytest.mark.parametrize("name", marked(
    ("lstm", "gru", "deep_speech", "dlrm_with_bags", "fourier_operator"), ("gru", "deep_speech")
))
def test_family_is_captured_cut_and_equal_to_one_device(name: str) -> None:
    steps = {result["step"]: result for result in trial(EVERY[name](), stages=False)}
    assert [*steps] == ["captured", "same", "planned", "equal"]
    assert all(result["ok"] for result in steps.values()), steps
    assert steps["equal"]["worst"] <= LIMIT
    assert steps["planned"]["cut"] >= 0.95, steps["planned"]["not_cut"]
    assert steps["planned"]["rank"] < 0.3
    assert steps["planned"]["collectives"]


@pytest.mark.parametrize("name", [
    name if name == "hamiltonian_net" else pytest.param(
        name, marks=pytest.mark.slow) for name in DERIVATIVES
])  # fmt: skip
def test_gradients_inside_a_forward(name: str) -> None:
    """``torch.autograd.grad`` in a forward is operators of the graph, which are cut and differentiated once more."""
    steps = {result["step"]: result for result in trial(EVERY[name]())}
    assert [*steps] == ["captured", "same", "planned", "equal", "staged"]
    assert all(result["ok"] for result in steps.values()), steps
    assert steps["planned"]["cut"] >= 0.95, steps["planned"]["not_cut"]


def test_families_that_die_or_take_too_long_end_alone() -> None:
    said: list[str] = []

    def kills_itself() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def never_ends() -> None:
        while True:
            pass

    def is_wrong() -> None:
        raise ValueError("no such configuration")

    died = families.attempt("kills_itself", kills_itself, 30, say=said.append)
    assert died == {"family": "kills_itself", "steps": {}, "ended": "died of SIGKILL", "at": families.commit()}
    slow = families.attempt("never_ends", never_ends, 1, say=said.append)
    assert slow["ended"] == "more than 1 CPU s"
    left = families.attempt("leaves", lambda: os._exit(3), 30, say=said.append)
    assert left["ended"] == "its process ended with 3"
    wrong = families.attempt("is_wrong", is_wrong, 30, say=said.append)
    assert "no such configuration" in wrong["steps"]["built"]["why"]
    assert len(said) == 4


def test_page_counts_what_failed(tmp_path: Path) -> None:
    good = {
        "captured": {"ok": True, "ops": 7, "guarded": [], "discovered": ["aten.fft_fft.default"], "whole": {},
                     "seconds": 1.0},
        "same": {"ok": True, "worst": 0.0, "why": "", "seconds": 1.0},
        "planned": {"ok": True, "cut": 0.99, "rank": 0.26, "not_cut": {}, "collectives": {"all_reduce": 2},
                    "seconds": 1.0},
        "equal": {"ok": True, "worst": 1e-15, "why": "", "seconds": 1.0},
    }  # fmt: skip
    low = {**good, "planned": {**good["planned"], "cut": 0.5, "not_cut": {"aten.lstm.input": 0.5}}}
    refused = {"captured": {"ok": False, "why": "cannot | capture\n at /some/place/model.py:3", "seconds": 0.1}}
    records = [
        {"family": "good", "steps": good, "ended": "", "at": "37e4b0e"}, {"family": "low", "steps": low, "ended": ""},
        {"family": "refused", "steps": refused, "ended": ""},
        {"family": "slow", "steps": {}, "ended": "more than 120 CPU s"},
    ]  # fmt: skip
    page = families.table(records, ["good", "low", "refused", "slow", "later"])
    assert "| captured | 2 of 4 | 50.0% |" in page
    assert "| planned on 2x2, and equal to one device | 2 of 4 | 50.0% |" in page
    assert "| at least 95% of the FLOPs cut | 1 of 4 | 25.0% |" in page
    assert "| low | FLOPs cut | not cut: aten.lstm.input 50% |" in page
    assert "| refused | captured | cannot / capture at model.py:3 |" in page
    assert "| slow | captured | more than 120 CPU s |" in page
    assert "| good | 7 | yes | yes | yes |  | 99.0% | 26.0% | 2 all-reduce | 4.0 | fft_fft | 37e4b0e |" in page
    assert "1 families: later." in page
    assert families.read(tmp_path / "none.jsonl") == {}
    kept = families.kept_rows(page)  # rows of families that are not run again stay as they are
    again = families.table([kept["good"], kept["refused"], *records[1:2]])
    rows = [line for line in page.splitlines() if line.startswith(("| good |", "| low |", "| refused |"))]
    assert [line for line in again.splitlines() if line in rows] == rows
