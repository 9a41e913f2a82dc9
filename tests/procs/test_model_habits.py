"""The habits of model code on two ranks that are processes, under forced cuts."""

from __future__ import annotations

import pytest
from habits import HABITS
from habits.ranks import outcomes
from habits.today import TODAY
from procs.in_turn import LONG

from autopar.runtime.ranks.launch import run_local

NAMES = [name for name in HABITS if name not in TODAY]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_processes(part: int) -> None:
    names = NAMES[part::4]
    ranks = run_local(outcomes, 2, names, part, timeout=LONG)
    problems = [
        f"{name}, rank {rank}: {found}"
        for rank, said in enumerate(ranks)
        for name, found in zip(names, said, strict=True)
        if found != ("refused" if HABITS[name].refused else "same")
    ]
    assert not problems, "\n".join(problems)
