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
from typing import Any

from autopar.errors import InfeasibleError, PlanError
from autopar.planner.intra_op.building.decoder import Decoder
from autopar.planner.intra_op.building.integer_program import ROUGH, ROUNDING, Beaten, Choice, Item, Problem
from autopar.planner.intra_op.memory.memory_errors import AllTooLarge, OutOfReach
from autopar.planner.intra_op.mesh_problem import MeshProblem
from autopar.planner.intra_op.solving import highs
from autopar.planner.intra_op.solving.effort import BRIEF, PATIENT
from autopar.planner.intra_op.solving.mixture import mixture
from autopar.plans.plan import Solution, StagePlan
from autopar.plans.prices import Moment
from autopar.words.texts import show_bytes

ATTEMPTS = 12
"""Limits that are tried until what the solver finds fits: its bytes are not quite those of the finished plan."""
FIRST = 2
"""Moments that the program knows from the first: the end of the forward, and the optimizer's step."""
ROUNDS, MOMENTS = 6, 16
"""How often the relaxation is solved to see which moments bind, and how many become rows of the program, at most."""
REFINED, CLOSE = 2, 1e-3
"""Of these, how often a plan that fits is made better, and how near the limits may be, as a part of the memory."""
DEARER, HALVED = (1.02, 1.1, 1.3, 1.8, 3.0, 6.0), 3
"""Prices of a byte, times its worth in the relaxation, that are tried for a plan that fits; and how often the last step
between them is halved."""
LOWER = (0.92, 0.84, 0.76)
"""Parts of the limit, for blocks that differ: what the rows do not see is in the rest."""
FAR = 0.1
"""Where a plan is further than this from its bound, it is looked for in other ways, too."""
SLOW = 1
"""How often the solver may stop at its time limit."""
MIXED_GAP = 0.02
"""The gap of a mixture that is good enough where operators may run again: the search for a better one is long there."""
STEEP_PRICES = (10.0, 30.0, 100.0)
"""Like :data:`autopar.planner.intra_op.building.integer_program.PRICES`, where little memory is all that counts."""
BOUNDED = "rows of the first moments"
"""The kind of program that :attr:`WithinMemory.ends` are of."""
TIGHT = 0.9
"""Part of the limit: where what every item has at least is more, it is asked first whether there is a choice at all."""
UNLIMITED = 1e18
"""Bytes that no device has."""


@dataclass
class WithinMemory:
    """The cheapest plan of a problem whose fullest moment stays within the limit.

    The problem may count fewer bytes than the finished plan has (see :class:`.build.Builder`); then it is solved again
    with a lower limit. The gap reported is to the bound at the full limit, as the solver counts bytes.

    Attributes:
        known_seconds: of a plan that there is already: one that is slower is not worth the search.
        moments: those that are rows of the program, by number.
        bound: seconds that no choice within the limit beats, as far as the relaxation says; infinite if nothing fits.
        fewest: bytes that the relaxation has at least, and the choice nearest to that, where state leaves little room.
        ends: where the simplex method ended in earlier programs of this kind, from where it goes on; None where there
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
    ends: dict[object, Any] | None = None
    otherwise: Callable[[], StagePlan | None] = lambda: None
    fitting: StagePlan | None = None

    def plan(self) -> StagePlan:
        """The plan.

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
        seen, said = self.fitting, found.solution
        if seen is None or said is None or seen.price.seconds >= found.price.seconds:
            return found
        bound = said.objective_seconds * (1 - said.gap)
        return replace(seen, solution=against(bound, seen, self.setting.options.memory_gap))

    def _searched(self) -> StagePlan:
        """:meth:`plan`, of the last that was looked for; a faster one that fits may have been seen on the way."""
        limit, gap = self.limit, self.setting.options.memory_gap
        enough = gap if self.decoder.again is None else max(gap, MIXED_GAP)
        program = self._limited(limit)
        tried: list[StagePlan] = []
        best: StagePlan | None = None
        bound = 0.0
        fits_at, too_much, target, refined, slow = 0.0, limit, limit, 0, 0
        lowered: Counter[int] = Counter()
        fits = self.fewest is None or self.fewest[0] <= limit
        for attempt in range(ATTEMPTS if fits else 0):
            try:
                if attempt == 0:
                    bound = program.least()
                    if bound >= self.setting.options.worth_seconds:
                        raise Beaten
                if best is None and gap > 0.0:
                    best = self._mixed(program, gap, bound)
                    tried += [best] if best is not None else []
                    if best is not None and best.solution is not None:
                        if best.solution.gap <= enough or program.is_rough(gap):
                            return best
                if attempt == 0 and best is None and gap >= ROUGH:
                    roughly = self._roughly(program, gap, bound)
                    if roughly is not None:
                        return roughly
                if self._is_hopeless:
                    break
                plan = self._finish(program.solve(gap, min(self.setting.options.worth_seconds, self.known_seconds)))
            except InfeasibleError:
                break
            tried.append(plan)
            assert plan.solution is not None
            slow += plan.solution.status == "time limit"
            if slow > SLOW and best is None:
                break
            if attempt == 0:
                bound = max(bound, plan.solution.objective_seconds * (1 - plan.solution.gap))
            over = plan.price.memory_bytes - limit
            if over > 0:
                too_much = target
            else:
                fits_at = max(fits_at, target)
                if best is None or plan.price.seconds < best.price.seconds:
                    best = plan
            if best is None:
                if self._sees(program, plan):
                    continue
                if plan.fullest in self.moments:  # its row does not see all of it
                    number = self.moments[plan.fullest]
                    lowered[number] += 1  # other choices may be over by as much: twice as far each time
                    program.lower(number, over * 2 ** (lowered[number] - 1))
                    continue
                target -= over
                program.limit(target)
                continue
            if attempt == 0:
                return best
            best = replace(best, solution=against(bound, best, gap))
            assert best.solution is not None
            refined += 1
            if best.solution.gap <= max(gap, ROUNDING) or refined > REFINED or too_much - fits_at <= CLOSE * limit:
                break
            target = (fits_at + too_much) / 2
            program.limit(target)
        if best is None and self.known_seconds < float("inf"):
            raise Beaten  # what is the smallest is of no interest then
        if best is None or (best.solution is not None and best.solution.gap > FAR):
            other = self.otherwise()
            if other is not None and (best is None or other.price.seconds < best.price.seconds):
                best = replace(other, solution=against(bound, other, gap))
        if best is None and self._is_hopeless:
            return self._of_fewest_bytes(program)
        return best if best is not None else self._smallest(tried, bound)

    @property
    def _is_hopeless(self) -> bool:
        """Whether a search need not look for a plan that fits by branch and bound: not even the relaxation fits, or
        there is a plan already, and state leaves so little room that minutes of it find none, mostly."""
        options = self.setting.options
        known = options.worth_seconds < float("inf")
        return not options.explains and (self.bound == float("inf") or (known and self.fewest is not None))

    def _of_fewest_bytes(self, program: highs.HighsProgram | highs.ByCbc) -> StagePlan:
        """The plan nearest to the fewest bytes of the relaxation, where that is too large, too: rows may count a little
        that a finished plan does not have at once.

        Raises:
            OutOfReach: it does not fit either.
        """
        fewest, plan = self.fewest or program.fewest_bytes(), None
        with suppress(PlanError):  # rounded to strategies between which there is no way
            plan = self._finish(fewest[1]) if fewest is not None else None
        if plan is None or plan.price.memory_bytes > self.limit:
            raise OutOfReach(f"no plan fits {show_bytes(self.limit)} per device on {self.setting.mesh.shown()}")
        return self._known_as_small(plan, 0.0)

    def _known_as_small(self, plan: StagePlan, bound: float) -> StagePlan:
        """A plan that was found by its bytes, measured against a bound of seconds."""
        found = replace(plan, solution=Solution("smallest", "best found", plan.price.seconds, 0.0, True))
        return replace(found, solution=against(bound, found, self.setting.options.memory_gap))

    def _mixed(self, program: highs.HighsProgram | highs.ByCbc, gap: float, bound: float) -> StagePlan | None:
        """A plan whose blocks differ, at the program's present limit, measured against the bound at the full one."""
        setting = self.setting
        plan = mixture(
            setting.graph, setting.folding, program, self.decoder, self.limit, setting.realise,
            setting.decided_seconds, gap,
        )  # fmt: skip
        return replace(plan, solution=against(bound, plan, gap)) if plan is not None else None

    def _roughly(self, program: highs.HighsProgram | highs.ByCbc, gap: float, bound: float) -> StagePlan | None:
        """The fastest plan that fits and is found without branch and bound: by the price of a byte, or, where that is
        further from the bound than was asked, with blocks that differ under a limit so much lower that they fit."""
        best = self._by_price(program, gap, bound)
        if best is not None and against(bound, best, gap).gap <= gap:
            return best
        for share in LOWER:
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

    def _by_price(self, program: highs.HighsProgram | highs.ByCbc, gap: float, bound: float) -> StagePlan | None:
        """The fastest plan that fits of those that are the best at a price of a byte, from the relaxation's on.

        Bytes are those of the finished plan, and no branch and bound is needed: a tenth of a second, where the solver
        takes ten for its first solution, which then has bytes that its rows do not see.
        """
        best: StagePlan | None = None
        low, high = 1.0, None
        for factor in DEARER:
            plan = self._at_price(program, factor)
            if plan is not None and plan.price.memory_bytes <= self.limit:
                best, high = plan, factor
                break
            low = factor
        if best is None or high is None:
            return None
        for _ in range(HALVED):
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

    def _at_price(self, program: highs.HighsProgram | highs.ByCbc, factor: float) -> StagePlan | None:
        choice = program.at_price(factor)
        return self._finish(choice) if choice is not None else None

    def free(self) -> StagePlan:
        """The fastest plan, whatever memory it needs: if it fits, the limit does not bind it.

        Raises:
            Beaten: it is not worth the search.
        """
        options = self.setting.options
        return self._finish(self._program(self.problem).solve(options.memory_gap, options.worth_seconds))

    def relax(self) -> None:
        """Find :attr:`bound` alone.

        Raises:
            InfeasibleError: nothing fits.
        """
        self._limited(self.limit)

    def _limited(self, limit: float) -> highs.HighsProgram | highs.ByCbc:
        """The program with the limit, and rows of the moments that it binds.

        Raises:
            InfeasibleError: nothing fits.
        """
        rows = self.decoder.moments
        if limit == float("inf") or rows is None:
            return self._program(self.problem)
        first = rows.at_the_end_of_the_forward(), rows.stepping()
        program = self._program(replace(self.problem, limit_bytes=limit, moments=first))
        least = max(sum(map(min, moment.items)) for moment in first)
        fewest = program.fewest_bytes() if least > TIGHT * limit else None
        if fewest is not None:
            self.fewest = max(fewest[0], least), fewest[1]
            if self.fewest[0] > limit:
                return program
        program.begin_at((self.ends or {}).get(BOUNDED))
        for round_number in range(ROUNDS):
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

    def _sees(self, program: highs.HighsProgram | highs.ByCbc, plan: StagePlan) -> bool:
        """Make the fullest moment of a plan a row of the program; returns whether it was none yet."""
        moment, rows = plan.fullest, self.decoder.moments
        if moment is None or rows is None or moment in self.moments or len(self.moments) >= MOMENTS:
            return False
        self.moments[moment] = FIRST + len(self.moments)
        program.add(rows.at(moment))
        return True

    def _program(self, problem: Problem) -> highs.HighsProgram | highs.ByCbc:
        options = self.setting.options
        binds = problem.moments or self.decoder.again is not None
        return highs.program(problem, effort=options.effort(BRIEF if binds else PATIENT))

    def _finish(self, choice: Choice) -> StagePlan:
        plan = self.setting.realise(self.decoder.decided(choice.picked, self.setting.folding))
        said = Solution(choice.solver, choice.status, choice.objective, choice.gap, choice.binds)
        plan = replace(plan, solution=said)
        if plan.price.memory_bytes <= self.limit:
            if self.fitting is None or plan.price.seconds < self.fitting.price.seconds:
                self.fitting = plan
        return plan

    def _smallest(self, tried: list[StagePlan], bound: float) -> StagePlan:
        """The plan of the fewest bytes, when the limit was not met otherwise."""
        tried = [*tried, *self._smaller_and_smaller()]
        choices: list[Choice] = []
        if self.decoder.again is not None:  # what rows do not see may be less where the sum of all that stays is least
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
            choices += self._program(replace(self.problem, limit_bytes=UNLIMITED)).hull(STEEP_PRICES)
        plan = min(
            [*tried, *map(self._finish, choices)] or [self.free()],
            key=lambda p: (max(p.price.memory_bytes, self.limit), p.price.seconds),
        )
        if plan.price.memory_bytes > self.limit:
            raise AllTooLarge(plan)
        return self._known_as_small(plan, bound)

    def _smaller_and_smaller(self) -> list[StagePlan]:
        """Plans whose fullest moment is the least there is, as far as the program's rows say: where another moment of
        such a plan is fuller, that becomes a row, too."""
        rows = self.decoder.moments
        assert rows is not None
        first = rows.at_the_end_of_the_forward(), rows.stepping(), *map(rows.at, self.moments)
        program = self._program(replace(self.problem, moments=first, smallest=True))
        plans: list[StagePlan] = []
        with suppress(InfeasibleError):  # not solved in time
            for _ in range(ROUNDS):
                plans.append(self._finish(program.nearest()))
                if plans[-1].price.memory_bytes <= self.limit:
                    return plans
                if not self._sees(program, plans[-1]):
                    break
            plans.append(self._finish(program.solve(self.setting.options.memory_gap)))
        return plans


def against(bound: float, plan: StagePlan, gap: float) -> Solution:
    """What the solver said of a plan, measured against a bound of the whole search."""
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


__all__ = ["FAR", "TIGHT", "UNLIMITED", "WithinMemory", "against"]
