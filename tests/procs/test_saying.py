"""``parallelize`` says once, on the first rank, what it has decided, in five lines."""

from __future__ import annotations

from procs.saying import said_by_parallelize

from autopar.runtime.ranks.launch import run_local


def test_five_lines_on_the_first_rank() -> None:
    (sharded, piped, quiet), others = run_local(said_by_parallelize, 2)
    assert others == ["", "", ""]
    assert quiet == ""
    first, mesh, operators, parameters, whole = sharded.splitlines()
    assert first.startswith("autopar: 2 devices of local-x2, predicted ") and " a step, at most " in first
    assert mesh == "  mesh data=2; 1 stage, 1 microbatch"
    assert operators.startswith("  operators: data=2 shards the batch")
    assert parameters == "  parameters: 4 of 5 are sharded, 99% of all elements"
    assert whole == "  replicated parameters: scale (too small to shard)"
    assert len(piped.splitlines()) == 5
    assert "; 2 stages, 2 microbatches" in piped and "2 are on the one device of their stage" in piped
