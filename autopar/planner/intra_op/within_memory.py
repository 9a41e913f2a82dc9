"""The cheapest plan of a problem whose fullest moment is within a limit; or an error that says what lacks.

The program knows two moments at first: when all of the forward is kept, and when the optimizer steps. Where the plan of
its relaxation is fuller at another one, that moment becomes a row of the program (:mod:`.moment_rows`), which is solved
again from where it was: a few rounds (cutting planes). What rows do not see of a plan, its own timeline does, and the
limit is lowered by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, PlanError
from autopar.planner.effort import BRIEF, EFFORT, PATIENT
from autopar.planner.intra_op.building.decoder import Decoder
from autopar.planner.intra_op.building.integer_program import ROUNDING, Beaten, Choice, Item, Problem
from autopar.planner.intra_op.memory.memory_errors import AllTooLarge, OutOfReach
from autopar.planner.intra_op.mesh_problem import MeshProblem
from autopar.planner.intra_op.solving import highs
from autopar.planner.intra_op.solving.mixture import mixture
from autopar.plans.plan import Solution, StagePlan
from autopar.plans.prices import Moment
from autopar.words.texts import show_bytes

FIRST = 2
"""Moments that the program knows from the first: the end of the forward, and the optimizer's step."""
BOUNDED = "rows of the first moments"
"""The kind of program that :attr:`WithinMemory.ends` are of."""
UNLIMITED = 1e18
"""Bytes that no device has."""


@dataclass
class WithinMemory:
    """The cheapest plan of a problem whose fullest moment stays within the limit.

    The problem may count fewer bytes than the finished plan has (see :class:`.build.Builder`); then it is solved again
    with a lower limit. The gap reported is to the bound at the full limit, as the solver counts bytes.

    Attributes:
        known_seconds: seconds of a plan that is known already: one that is slower is not worth the search.
        moments: the moments that are rows of the program, by number.
        bound: seconds that no choice within the limit beats, as far as the relaxation says; infinite if nothing fits.
        fewest: bytes that the relaxation has at least, and the choice nearest to that, where state leaves little room.
        ends: where the simplex method ended in earlier programs of this kind, from where it goes on; None if there
            are none, and will be none.
        fitting: the fastest plan within the limit of all that were finished, whatever for.
        otherwise: gives a plan that fits and was found in another way, if there is one: asked before the smallest plan
            is looked for, which takes longer.
    """

    setting: MeshProblem
    problem: Problem
    decoder: Decoder
    limit: float
    known_seconds: float = float("inf")
    moments: dict[Moment, int] = field(default_factory=dict)
    bound: float = float("inf")
    fewest: tuple[float, Choice] | None = None
    ends: dict[object, object] | None = None
    otherwise: Callable[[], StagePlan | None] = lambda: None
    fitting: StagePlan | None = None

    def plan(self) -> StagePlan:
        """Return the fastest feasible plan of all that the search finished.

        Raises:
            AllTooLarge: nothing fits.
            OutOfReach: nothing fits, and no explanation is wanted.
            Beaten: it is not worth the search, or nothing fits and there is a plan already.
        """
        try:
            found = self._searched()
        except InfeasibleError:
            if self.fitting is None:
                raise
            return replace(self.fitting, solution=against(0.0, self.fitting, self.setting.options.memory_gap))
        seen, solution = self.fitting, found.solution
        if seen is None or solution is None or seen.price.seconds >= found.price.seconds:
            return found
        bound = solution.objective_seconds * (1 - solution.gap)
        return replace(seen, solution=against(bound, seen, self.setting.options.memory_gap))

    def _searched(self) -> StagePlan:
        """Search at the limit without branch and bound, then with it under lower and lower limits, then otherwise."""
        program = self._limited(self.limit)
        search = _Search(program, _Room(program, self.limit))
        if self.fewest is None or self.fewest[0] <= self.limit:
            with suppress(InfeasibleError):  # nothing has as few bytes as the present limit leaves
                done = self._found_quickly(search)
                if done or (not self._is_hopeless and self._found_by_branching(search)):
                    assert search.best is not None
                    return search.best
        return self._otherwise(search)

    def _found_quickly(self, search: _Search) -> bool:
        """Bound the seconds and look for a mixture, then for a rough plan; return whether the search may end there."""
        program, gap, worth = search.program, self.setting.options.memory_gap, self.setting.options.worth_seconds
        search.bound = program.least()
        if search.bound >= worth:
            raise Beaten(search.bound)
        if self._found_mixed(search):
            return True
        if search.best is None and gap >= EFFORT.rough_gap:
            search.best = self._roughly(program, gap, search.bound)
            return search.best is not None
        return False

    def _found_mixed(self, search: _Search) -> bool:
        """Look for a mixture at the program's present limit; return whether it is good enough."""
        program, gap = search.program, self.setting.options.memory_gap
        search.best = self._mixed(program, gap, search.bound) if gap > 0.0 else None
        if search.best is None or search.best.solution is None:
            return False
        search.tried.append(search.best)
        enough = gap if self.decoder.recomputable is None else max(gap, EFFORT.mixed_gap)
        return search.best.solution.gap <= enough or program.is_rough(gap)

    def _found_by_branching(self, search: _Search) -> bool:
        """Solve under lower and lower limits until a finished plan fits; return whether the first one did."""
        options, slow, refined = self.setting.options, 0, 0
        gap = options.memory_gap
        for attempt in range(EFFORT.limit_attempts):
            if attempt and search.best is None and self._found_mixed(search):
                return True
            plan = self._finish(search.program.solve(gap, min(options.worth_seconds, self.known_seconds)))
            assert plan.solution is not None
            search.tried.append(plan)
            slow += plan.solution.status == "time limit"
            if slow > EFFORT.slow_runs and search.best is None:
                return False
            if attempt == 0:
                search.bound = max(search.bound, plan.solution.objective_seconds * (1 - plan.solution.gap))
            over = plan.price.memory_bytes - self.limit
            search.room.note(over <= 0)
            if over <= 0 and (search.best is None or plan.price.seconds < search.best.price.seconds):
                search.best = plan
            if search.best is None:
                if not self._sees(search.program, plan):
                    row = self.moments.get(plan.fullest) if plan.fullest is not None else None
                    search.room.leave(row, over)
                continue
            if attempt == 0:
                return True
            solution = against(search.bound, search.best, gap)
            search.best = replace(search.best, solution=solution)
            refined += 1
            if solution.gap <= max(gap, ROUNDING) or refined > EFFORT.refinements or not search.room.take_back():
                return False
        return False

    def _otherwise(self, search: _Search) -> StagePlan:
        """Return a plan of :attr:`otherwise` where that is faster, or the smallest one where none fits yet."""
        best, bound, gap = search.best, search.bound, self.setting.options.memory_gap
        if best is None and self.known_seconds < float("inf"):
            raise Beaten  # the smallest plan is of no interest then
        if best is None or (best.solution is not None and best.solution.gap > EFFORT.far_gap):
            other = self.otherwise()
            if other is not None and (best is None or other.price.seconds < best.price.seconds):
                best = replace(other, solution=against(bound, other, gap))
        if best is None and self._is_hopeless:
            return self._of_fewest_bytes(search.program)
        return best if best is not None else self._smallest(search.tried, bound)

    @property
    def _is_hopeless(self) -> bool:
        """A search for which branch and bound is not worth its time.

        Not even the relaxation fits, or there is a plan already and state leaves so little room that minutes of search
        mostly find none.
        """
        options = self.setting.options
        known = options.worth_seconds < float("inf")
        return not options.explains and (self.bound == float("inf") or (known and self.fewest is not None))

    def _of_fewest_bytes(self, program: highs.Program) -> StagePlan:
        """Return the plan nearest to the fewest bytes of the relaxation, or raise :class:`OutOfReach`."""
        fewest, plan = self.fewest or program.fewest_bytes(), None
        with suppress(PlanError):  # rounded to strategies between which there is no way
            plan = self._finish(fewest[1]) if fewest is not None else None
        if plan is None or plan.price.memory_bytes > self.limit:
            raise OutOfReach(f"no plan fits {show_bytes(self.limit)} per device on {self.setting.mesh.shown()}")
        return self._known_as_small(plan, 0.0)

    def _known_as_small(self, plan: StagePlan, bound: float) -> StagePlan:
        """Return a plan that was found by its bytes, measured against a bound of seconds."""
        found = replace(plan, solution=Solution("smallest", "best found", plan.price.seconds, 0.0, True))
        return replace(found, solution=against(bound, found, self.setting.options.memory_gap))

    def _mixed(self, program: highs.Program, gap: float, bound: float) -> StagePlan | None:
        """Return a plan whose blocks differ, at the program's limit, measured against the bound at the full one."""
        setting = self.setting
        plan = mixture(
            setting.graph, setting.folding, program, self.decoder, self.limit, setting.realise,
            setting.decided_seconds, gap,
        )  # fmt: skip
        return replace(plan, solution=against(bound, plan, gap)) if plan is not None else None

    def _roughly(self, program: highs.Program, gap: float, bound: float) -> StagePlan | None:
        """Return the fastest feasible plan that is found without branch and bound.

        It comes from the price of a byte or, where that is further from the bound than the gap, from mixing blocks
        under a limit so much lower that they fit.
        """
        best = self._by_price(program, gap, bound)
        if best is not None and against(bound, best, gap).gap <= gap:
            return best
        for share in EFFORT.lowered_limits:
            if self.fewest is not None and self.fewest[0] > share * self.limit:
                break  # nothing has so little, and that takes the simplex method long to find
            program.limit(share * self.limit)
            with suppress(InfeasibleError):  # not even the relaxation has so little
                mixed = self._mixed(program, gap, bound)
                if mixed is not None:
                    best = mixed if best is None else min(best, mixed, key=lambda p: p.price.seconds)
                    break
        program.limit(self.limit)
        return best

    def _by_price(self, program: highs.Program, gap: float, bound: float) -> StagePlan | None:
        """Return the fastest plan that fits of the best choices at rising prices of a byte, from the relaxation's on.

        Bytes are those of the finished plan, and no branch and bound is needed: a tenth of a second, where the solver
        takes ten for its first solution, which then has bytes that its rows do not see.
        """
        best: StagePlan | None = None
        low, high = 1.0, None
        for factor in EFFORT.feasible_price_steps:
            plan = self._at_price(program, factor)
            if plan is not None and plan.price.memory_bytes <= self.limit:
                best, high = plan, factor
                break
            low = factor
        if best is None or high is None:
            return None
        for _ in range(EFFORT.price_halvings):
            if against(bound, best, gap).gap <= gap:
                break
            middle = (low + high) / 2
            plan = self._at_price(program, middle)
            if plan is None or plan.price.memory_bytes > self.limit:
                low = middle
            else:
                high = middle
                best = min(best, plan, key=lambda p: p.price.seconds)
        return replace(best, solution=against(bound, best, gap))

    def _at_price(self, program: highs.Program, factor: float) -> StagePlan | None:
        choice = program.at_price(factor)
        return self._finish(choice) if choice is not None else None

    def free(self) -> StagePlan:
        """Return the fastest plan, whatever memory it needs: if it fits, the limit does not bind it."""
        options = self.setting.options
        return self._finish(self._program(self.problem).solve(options.memory_gap, options.worth_seconds))

    def relax(self) -> None:
        """Find :attr:`bound` alone."""
        self._limited(self.limit)

    def smallest(self) -> StagePlan:
        """Return the plan of the fewest bytes that is found without a search for few seconds, if it fits or not.

        Raises:
            InfeasibleError: none is found in time.
        """
        self._limited(self.limit)
        try:
            return self._smallest([], 0.0)
        except AllTooLarge as error:
            return error.smallest

    def _limited(self, limit: float) -> highs.Program:
        """Return the program with the limit, and rows of the moments that it binds."""
        rows = self.decoder.moments
        if limit == float("inf") or rows is None:
            return self._program(self.problem)
        first = rows.first()
        program = self._program(replace(self.problem, limit_bytes=limit, moments=first))
        least = max(sum(map(min, moment.items)) for moment in first)
        fewest = program.fewest_bytes() if least > EFFORT.tight_share * limit else None
        if fewest is not None:
            self.fewest = max(fewest[0], least), fewest[1]
            if self.fewest[0] > limit:
                return program
        program.begin_at((self.ends or {}).get(BOUNDED))
        for round_number in range(EFFORT.moment_rounds):
            try:
                choice = program.nearest()
                if round_number == 0 and self.ends is not None:
                    self.ends[BOUNDED] = program.end
                self.bound = choice.bound
                plan = self._finish(choice)
            except (InfeasibleError, PlanError):
                break
            if plan.price.memory_bytes <= limit or not self._sees(program, plan):
                break
        return program

    def _sees(self, program: highs.Program, plan: StagePlan) -> bool:
        """Make the fullest moment of a plan a row of the program, and return whether it was none yet."""
        moment, rows = plan.fullest, self.decoder.moments
        if moment is None or rows is None or moment in self.moments or len(self.moments) >= EFFORT.moment_rows:
            return False
        self.moments[moment] = FIRST + len(self.moments)
        program.add(rows.at(moment))
        return True

    def _program(self, problem: Problem) -> highs.Program:
        options = self.setting.options
        binds = problem.moments or self.decoder.recomputable is not None
        return highs.program(problem, effort=options.effort(BRIEF if binds else PATIENT))

    def _finish(self, choice: Choice) -> StagePlan:
        plan = self.setting.realise(self.decoder.decided(choice.picked))
        said = Solution(choice.solver, choice.status, choice.objective, choice.gap, choice.binds)
        plan = replace(plan, solution=said)
        if plan.price.memory_bytes <= self.limit:
            if self.fitting is None or plan.price.seconds < self.fitting.price.seconds:
                self.fitting = plan
        return plan

    def _smallest(self, tried: list[StagePlan], bound: float) -> StagePlan:
        """Return the plan of the fewest bytes, when the limit was not met otherwise."""
        tried = [*tried, *self._smaller_and_smaller()]
        choices: list[Choice] = []
        if self.decoder.recomputable is not None:  # what rows do not see may be less where all bytes together are least
            sums = replace(
                self.problem,
                items=tuple(_by_bytes(item) for item in self.problem.items),
                shared=tuple(replace(h, seconds=h.n_bytes) for h in self.problem.shared),
                overlaps=(),
                tensors=tuple(
                    replace(t, steps=tuple((a, b, 0.0) for a, b, _ in t.steps)) for t in self.problem.tensors
                ),
            )
            with suppress(InfeasibleError):  # not solved in time
                choices.append(self._program(sums).solve())
            choices += self._program(replace(self.problem, limit_bytes=UNLIMITED)).hull(EFFORT.steep_byte_prices)
        plan = min(
            [*tried, *map(self._finish, choices)] or [self.free()],
            key=lambda p: (max(p.price.memory_bytes, self.limit), p.price.seconds),
        )
        if plan.price.memory_bytes > self.limit:
            raise AllTooLarge(plan)
        return self._known_as_small(plan, bound)

    def _smaller_and_smaller(self) -> list[StagePlan]:
        """Return plans of the least fullest moment by the rows, with new rows where another moment is fuller."""
        rows = self.decoder.moments
        assert rows is not None
        first = *rows.first(), *map(rows.at, self.moments)
        program = self._program(replace(self.problem, moments=first, smallest=True))
        plans: list[StagePlan] = []
        with suppress(InfeasibleError):  # not solved in time
            for _ in range(EFFORT.moment_rounds):
                plans.append(self._finish(program.nearest()))
                if plans[-1].price.memory_bytes <= self.limit:
                    return plans
                if not self._sees(program, plans[-1]):
                    break
            plans.append(self._finish(program.solve(self.setting.options.memory_gap)))
        return plans


@dataclass
class _Search:
    """The state of one search: its program, seconds that no plan beats, the plans so far, and the best that fits."""

    program: highs.Program
    room: _Room
    bound: float = 0.0
    best: StagePlan | None = None
    tried: list[StagePlan] = field(default_factory=list)


class _Room:
    """The bytes of the limit that are left, per moment, for memory that the rows of a program do not see.

    The next choice may have more that its row does not see than the last one, so what turned out to be too little is
    raised steeply; and where a plan fits then, half of the last step is taken back, since it may be smaller than it
    need be.
    """

    def __init__(self, program: highs.Program, limit: float) -> None:
        self.program, self.limit = program, limit
        self.left: dict[int | None, float] = {None: 0.0}
        """Bytes that are left now, by number of the moment's row; those of None, of every row."""
        self.too_little: dict[int | None, float] = {}
        """The most of which it is known that it is too little."""
        self.enough: dict[int | None, float] = {}
        """Limits with which a plan did fit last; empty until one does."""
        self.times: Counter[int | None] = Counter()
        self.latest: int | None = None
        """The one that was changed last."""

    def leave(self, number: int | None, over: float) -> None:
        """Leave more because a plan was ``over`` bytes too large at a moment; more steeply each time."""
        self.times[number] += number is not None
        self.latest = number
        self._set(number, self.left.get(number, 0.0) + over * 2 ** max(0, self.times[number] - 1))

    def note(self, fits: bool) -> None:
        """Remember whether the bytes left were enough."""
        if fits:
            self.enough = dict(self.left)
        else:
            self.too_little[self.latest] = self.left.get(self.latest, 0.0)

    def take_back(self) -> bool:
        """Leave half-way between too little and enough; return whether the two are far enough apart to try."""
        number = self.latest
        low = self.too_little.get(number, 0.0)
        high = self.enough.get(number, low)
        if high - low <= EFFORT.refined_share * self.limit:
            return False
        self._set(number, (low + high) / 2)
        return True

    def _set(self, number: int | None, n_bytes: float) -> None:
        before = self.left.get(number, 0.0)
        self.left[number] = n_bytes
        if number is None:
            self.program.limit(self.limit - n_bytes)
        else:
            self.program.lower(number, n_bytes - before)


def against(bound: float, plan: StagePlan, gap: float) -> Solution:
    """Return the solution of a plan, measured against a bound of the whole search."""
    said = plan.solution
    assert said is not None
    off = max(0.0, 1 - bound / said.objective_seconds) if said.objective_seconds else 0.0
    status = "optimal" if off <= ROUNDING else "within gap" if off <= gap else "best found"
    return replace(said, gap=off, status=said.status if off > gap and said.status == "time limit" else status)


def _by_bytes(item: Item) -> Item:
    peaks = item.peak_bytes or (0.0,) * len(item.n_bytes)
    return Item(
        item.name, tuple(n + p for n, p in zip(item.n_bytes, peaks, strict=True)), item.n_bytes, item.peak_bytes
    )
