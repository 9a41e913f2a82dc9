"""The integer program against brute force: every choice of strategies, and for each tensor every subset of steps."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pulp
import pytest

from autopar.errors import InfeasibleError
from autopar.planner.effort import BRIEF, EFFORT, PATIENT, SolverWork, requested_seconds
from autopar.planner.intra_op.building.integer_program import Item, MomentBytes, Problem, SharedBytes, Tensor
from autopar.planner.intra_op.solving import highs, relaxation


def _random_problem(rng: random.Random, limit: bool) -> Problem:
    n_items = rng.randint(2, 5)
    items = []
    for i in range(n_items):
        n = rng.randint(1, 3)
        peaks = tuple(rng.choice((0, 0, 3, 5)) for _ in range(n)) if limit and rng.random() < 0.4 else ()
        seconds, n_bytes = (tuple(rng.randint(*ends) for _ in range(n)) for ends in ((0, 20), (1, 9)))
        items.append(Item(f"op{i}", seconds, n_bytes, peaks))
    tensors = []
    for t in range(rng.randint(1, 4)):
        producer = rng.randrange(n_items - 1)
        readers = sorted({rng.randrange(producer + 1, n_items) for _ in range(rng.randint(1, 3))})
        n_states = rng.randint(2, 3)
        steps = tuple(
            (a, b, rng.randint(0, 12))
            for a in range(n_states)
            for b in range(n_states)
            if a != b and rng.random() < 0.8
        )

        def states(item: int, n_states: int = n_states) -> tuple[int, ...]:
            return tuple(rng.randrange(n_states) for _ in items[item].seconds)

        tensors.append(
            Tensor(f"t{t}", producer, states(producer), tuple((r, states(r)) for r in readers), steps)
        )
    limit_bytes = rng.randint(2 * n_items, 10 * n_items) if limit else None
    held = []
    for _ in range(rng.randint(0, 2) if limit else 0):
        users = rng.sample(range(n_items), min(n_items, rng.randint(2, 3)))
        rows = ((i, tuple(s for s in range(len(items[i].seconds)) if rng.random() < 0.6)) for i in users)
        pairs = tuple((i, r) for i, r in rows if r)
        held.extend([SharedBytes(rng.randint(1, 6), pairs)] if pairs else [])
    return Problem(tuple(items), tuple(tensors), tuple(held), limit_bytes)


def _bytes(problem: Problem, picked: Sequence[int]) -> float:
    own = sum(i.n_bytes[s] for i, s in zip(problem.items, picked, strict=True))
    peak = max((i.peak_bytes[s] for i, s in zip(problem.items, picked, strict=True) if i.peak_bytes), default=0)
    return own + peak + sum(h.n_bytes for h in problem.shared if any(picked[i] in rows for i, rows in h.users))


def _cheapest_steps(tensor: Tensor, source: int, wanted: set[int]) -> float:
    best = float("inf")
    for size in range(len(tensor.steps) + 1):
        for subset in itertools.combinations(tensor.steps, size):
            cost = sum(s[2] for s in subset)
            if cost >= best:
                continue
            reached = {source}
            while True:
                more = {b for a, b, _ in subset if a in reached} - reached
                if not more:
                    break
                reached |= more
            if wanted <= reached:
                best = cost
    return best


def _brute_force(problem: Problem) -> float:
    best = float("inf")
    memo: dict[tuple[int, int, frozenset[int]], float] = {}
    for picked in itertools.product(*(range(len(i.seconds)) for i in problem.items)):
        if problem.limit_bytes is not None and _bytes(problem, picked) > problem.limit_bytes:
            continue
        cost = sum(i.seconds[s] for i, s in zip(problem.items, picked, strict=True))
        for k, t in enumerate(problem.tensors):
            source = t.made[picked[t.producer]]
            wanted = frozenset(w[picked[c]] for c, w in t.consumers)
            key = (k, source, wanted)
            if key not in memo:
                memo[key] = _cheapest_steps(t, source, set(wanted))
            cost += memo[key]
        best = min(best, cost)
    return best


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("limit", [False, True])
def test_equals_brute_force(solver: str, limit: bool) -> None:
    rng = random.Random(7 + limit)
    feasible = 0
    for _ in range(150 if solver == "highs" else 10):
        problem = _random_problem(rng, limit)
        expected = _brute_force(problem)
        if expected == float("inf"):
            with pytest.raises(InfeasibleError):
                highs.program(problem, solver=solver).solve()
            continue
        choice = highs.program(problem, solver=solver).solve()
        assert choice.status == "optimal"
        assert choice.objective == pytest.approx(expected, abs=1e-6), problem
        feasible += 1
    assert feasible >= (50 if solver == "highs" else 3)


def test_rows_without_a_solution_are_found_by_the_fewest_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the simplex method is interrupted to ask for these, every answer is as it was."""
    rng = random.Random(8)
    problems = [_random_problem(rng, True) for _ in range(60)]

    def answers() -> list[float | None]:
        found: list[float | None] = []
        for problem in problems:
            try:
                found.append(highs.program(problem).solve().objective)
            except InfeasibleError:
                found.append(None)
        return found

    asked = []
    real = relaxation.Relaxation._has_no_room

    def has_no_room(self: relaxation.Relaxation) -> bool:
        asked.append(real(self))
        return asked[-1]

    before = answers()
    monkeypatch.setattr(relaxation, "EFFORT", replace(EFFORT, iterations_before_check=1))
    monkeypatch.setattr(relaxation.Relaxation, "_has_no_room", has_no_room)
    after = answers()
    assert before == [pytest.approx(x, abs=1e-6) if x is not None else None for x in after]
    assert True in asked and False in asked and None in before


def test_what_has_the_fewest_bytes_says_whether_anything_fits() -> None:
    """It bounds every choice, a limit below it has none, and what was asked before and after is as it was."""
    rng = random.Random(13)
    refused = 0
    for _ in range(60):
        problem = _random_problem(rng, True)
        every = itertools.product(*(range(len(item.seconds)) for item in problem.items))
        program, untouched = highs.program(problem), highs.program(problem)
        found = program.fewest_bytes()
        if found is None:  # no way between some states
            assert _brute_force(replace(problem, limit_bytes=1e9)) == float("inf")
            continue
        fewest, nearest = found
        assert fewest <= min(_bytes(problem, picked) for picked in every if _has_ways(problem, picked)) + 1e-6
        program.limit(fewest - 0.1)
        with pytest.raises(InfeasibleError):
            program.least()
        program.limit(fewest + 0.1)
        program.least()
        program.limit(problem.limit_bytes)
        assert len(nearest.picked) == len(problem.items)
        try:
            least = untouched.least()
        except InfeasibleError:
            refused += 1
            assert fewest > problem.limit_bytes
        else:
            assert program.least() == pytest.approx(least, abs=1e-6)
    assert 5 <= refused <= 50


def _has_ways(problem: Problem, picked: Sequence[int]) -> bool:
    """Whether steps lead from every made state to all that are wanted."""
    return all(
        _cheapest_steps(t, t.made[picked[t.producer]], {wanted[picked[c]] for c, wanted in t.consumers}) < float("inf")
        for t in problem.tensors
    )


def test_same_problem_same_answer() -> None:
    rng = random.Random(3)
    problem = _random_problem(rng, False)
    assert highs.program(problem).solve().picked == highs.program(problem).solve().picked


def _knapsacks() -> Problem:
    """Long to prove: many moments, each of which fits a third of what there is to choose."""
    rng = random.Random(5)
    items = tuple(Item(f"op{i}", (0, rng.randint(10, 90)), (0, 0)) for i in range(50))
    moments = tuple(MomentBytes(tuple((rng.randint(1, 100), 0) for _ in items), ()) for _ in range(12))
    return Problem(items, (), (), 50 * 50 / 3, moments)


def test_cbc_says_where_its_time_ran_out_and_its_bound_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _knapsacks()
    best = highs.program(problem, solver="cbc").solve()
    assert best.status == "optimal" and best.bound == best.objective
    solve = pulp.LpProblem.solve

    def out_of_time(model: pulp.LpProblem, solver: pulp.LpSolver) -> None:
        solve(model, solver)
        if solver.mip:  # PuLP calls the status optimal all the same
            model.sol_status = pulp.LpSolutionIntegerFeasible

    monkeypatch.setattr(pulp.LpProblem, "solve", out_of_time)
    stopped = highs.program(problem, solver="cbc").solve(0.01)
    assert stopped.status == "time limit"
    assert 0 < stopped.bound < best.objective


class _Slow(int):
    """A number of steps on a loaded machine: everything waits at each of them."""

    def __lt__(self, taken: int) -> bool:
        time.sleep(0.005)
        return int(self) < taken


def test_where_the_solver_stops_does_not_depend_on_how_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, effort, steps_of = _knapsacks(), SolverWork(1000, 40, 1.0), SolverWork.steps_of
    idle = highs.program(problem, effort=effort).solve()
    assert idle.status == "time limit"
    begun = time.perf_counter()
    monkeypatch.setattr(SolverWork, "steps_of", lambda self, n_entries: _Slow(steps_of(self, n_entries)))
    busy = highs.program(problem, effort=effort).solve()
    assert time.perf_counter() - begun > 40 * 0.005
    assert busy == idle
    more = highs.program(problem, effort=SolverWork(1000, 100, 1.0)).solve()
    assert (more.objective, -more.bound) < (idle.objective, -idle.bound), "more work gets further"


def test_the_clock_counts_only_where_seconds_are_asked_for() -> None:
    problem = _knapsacks()
    for effort in (PATIENT, BRIEF):
        program = highs.program(problem, effort=effort)
        program.solve(0.5)
        assert isinstance(program, highs.HighsProgram)
        assert program.engine.getOptionValue("time_limit")[1] == float("inf")
    with suppress(InfeasibleError):  # a busy machine ends it before there is any choice
        assert highs.program(problem, effort=requested_seconds(0.02)).solve().status == "time limit"


def test_memory_by_prices_is_within_its_gap_of_brute_force() -> None:
    rng = random.Random(11)
    checked = 0
    for _ in range(150):
        problem = _random_problem(rng, True)
        expected = _brute_force(problem)
        if expected == float("inf"):
            with pytest.raises(InfeasibleError):
                highs.program(problem).solve(0.01)
            continue
        choice = highs.program(problem).solve(0.01)
        n_bytes = _bytes(problem, choice.picked)
        assert problem.limit_bytes is not None and n_bytes <= problem.limit_bytes
        assert choice.bound <= expected + 1e-6
        assert expected - 1e-6 <= choice.objective <= expected * 1.01 + 1e-6
        checked += 1
    assert checked > 50


def test_large_programs_of_a_rough_search_fit_and_know_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presolved, and whole next to the relaxation: within the limit, no better than the best, the bound no worse."""
    monkeypatch.setattr(relaxation, "EFFORT", replace(EFFORT, presolve_columns=0))
    rng, rough, searched = random.Random(8), 0, []
    real = highs.HighsProgram.best
    monkeypatch.setattr(highs.HighsProgram, "best", lambda *a, **k: searched.append(1) or real(*a, **k))
    for _ in range(150):
        problem = _random_problem(rng, True)
        expected = _brute_force(problem)
        if expected == float("inf"):
            with pytest.raises(InfeasibleError):
                highs.program(problem).solve(gap=EFFORT.rough_gap)
            continue
        choice = highs.program(problem).solve(gap=EFFORT.rough_gap)
        assert _bytes(problem, choice.picked) <= problem.limit_bytes
        assert choice.bound <= expected + 1e-6 <= choice.objective + 2e-6
        rough += choice.objective > expected * (1 + EFFORT.rough_gap)
    assert rough and len(searched) < 75, "branch and bound is rare, and so is what it would have found"
