"""Complex parameters and buffers, and integers of 16 bits, on real ranks: gloo and NCCL refuse to send them."""

from __future__ import annotations

from pathlib import Path

from procs.odd_dtypes import all_train

from autopar.runtime.ranks.launch import run_local


def test_what_no_backend_sends(tmp_path: Path) -> None:
    for rank in run_local(all_train, 2, str(tmp_path), timeout=200):
        for how, found in rank.items():
            assert max(found.values()) < 1e-5, (how, found)
