"""The exact plans that a search over stages made so far, and the estimates that may still beat them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf

from autopar.errors import InfeasibleError
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.candidates import Candidate
from autopar.planner.inter_op.exact.exact_stages import Exact
from autopar.planner.inter_op.per_microbatch_count import OneNumber
from autopar.planner.intra_op.building.integer_program import Beaten
from autopar.progress import note_best, tell
from autopar.words.texts import show_seconds


@dataclass
class Incumbents:
    """Exact plans, and the seconds that the next must beat.

    Attributes:
        n_devices: the number of devices of all groups.
        beaten: seconds of a step that is known from elsewhere.
        top: the number of different layouts that are of interest; 1 while the best one is looked for.
        plans: in the order in which they were made.
        errors: seconds of exact plans over their estimates.
        failed: how many looked promising, and did not fit.
        programs: about how many programs the exact plans of stages took, on more than ``EFFORT.few_devices`` devices.
        interrupted: Ctrl-C ended the search.
        slower: what was given up because the best plan so far was faster, and what was not begun for that.
        unfit: what did not fit, or cannot be.
    """

    n_devices: int
    beaten: float = inf
    top: int = 1
    plans: list[Exact] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    failed: int = 0
    programs: int = 0
    interrupted: bool = False
    slower: list[tuple[OneNumber, Candidate]] = field(default_factory=list)
    unfit: set[tuple[int, Candidate]] = field(default_factory=set)

    @property
    def few(self) -> bool:
        """Devices so few that more layouts are planned exactly."""
        return self.n_devices <= EFFORT.few_devices

    @property
    def fastest(self) -> Exact:
        """The best plan so far."""
        return min(self.plans, key=lambda plan: plan.seconds)

    @property
    def to_beat(self) -> float:
        """Seconds of the slowest among the best plans of `top` different layouts: slower ones are of no interest."""
        best_of: dict[str, float] = {}
        for plan in self.plans:
            best_of[plan.what] = min(best_of.get(plan.what, inf), plan.seconds)
        last = sorted(best_of.values())[self.top - 1] if len(best_of) >= self.top else inf
        return min(last, self.beaten)

    @contextmanager
    def interruptible(self, estimates: Sequence[object] = ()) -> Iterator[None]:
        """Let Ctrl-C end this part of the search, if there is a plan or an estimate by then."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.plans and not estimates:
                raise
            self.interrupted = True

    def add(self, search: OneNumber, candidate: Candidate, slack: float = 1.0) -> float:
        """Plan a candidate exactly; the seconds of its step, for ever if it does not fit, cannot be or is beaten.

        ``slack``: by this factor it may take longer than what it has to beat until its slowest stages were refined.
        """
        tell(lambda: search.what(candidate), often=False)
        try:
            plan = search.exact(candidate, slack * self.to_beat)
        except Beaten as beaten:
            self.slower.append((search, replace(candidate, seconds=max(candidate.seconds, beaten.seconds))))
            return inf
        except InfeasibleError:
            search.unfit = search.unfit or candidate
            self.failed += 1
            plan = None
        if plan is None:
            self.unfit.add((id(search), candidate))
            return inf
        self.plans.append(plan)
        note_best(f"{show_seconds(self.fastest.seconds)} a step, {self.fastest.what}")
        return plan.seconds

    def next_best(self, top: int, promising: Sequence[tuple[OneNumber, Candidate]]) -> None:
        """Plan the best estimates that were not planned, until there are ``top`` different layouts.

        It ends when two in a row are no faster than the last of them, after at most `top` more. The search itself
        looks for one plan alone: to prove of hundreds of layouts that they are not among five took three times as long
        as to find the best.
        """
        self.top, self.failed, more, worse = top, 0, 0, 0
        unplanned = [
            (search, candidate) for search, candidate in dict.fromkeys((*self.slower, *promising))
            if (id(search), candidate) not in self.unfit and search.what(candidate) not in self._different
        ]  # fmt: skip
        unplanned.sort(key=lambda way: way[1].seconds)
        near, far = unplanned[: 2 * top], unplanned[2 * top :]
        if not self.few:  # what takes few programs first: those of many take minutes where memory binds
            near.sort(key=lambda way: (way[0].n_programs(way[1]), way[1].seconds))
        for search, candidate in (*near, *far):
            enough = len(self._different) >= top
            if self.interrupted or self.failed >= EFFORT.failed_plans:
                return
            if enough and (more >= top or worse >= EFFORT.worse_in_a_row):
                return
            if search.what(candidate) not in self._different and candidate.seconds < self.to_beat:
                last, more = self.to_beat, more + 1
                worse = 0 if self.add(search, candidate) < last else worse + 1

    def share_equally(self, searches: Sequence[OneNumber]) -> None:
        """Plan the fastest layout once more with the memory of a group shared equally among its stages.

        What each needs is only estimated, and what an estimate gives to one the others lack: 405B on 16,384 devices
        takes 6.386 s a step so for 6.416.
        """
        fastest = self.fastest
        search = next((search for search in searches if search is fastest.search), None)
        candidate = fastest.candidate
        if search is not None and len(candidate.n_bytes) > candidate.groups:  # groups of several stages
            self.add(search, replace(candidate, n_bytes=(), once_bytes=()), EFFORT.equal_shares_slack)

    def look_closer(self, searches: Sequence[OneNumber]) -> None:
        """Plan something that did not fit once more, down to its smallest plan.

        It is of the most microbatches, which need the least. It fits after all, or the error has by how much it does
        not.
        """
        for search in reversed(searches):
            if search.unfit is not None:
                try:
                    plan = search.exact(search.unfit, explains=True)
                except InfeasibleError as error:
                    search.infeasible = error
                else:
                    self.plans += [plan] if plan is not None else []
                return

    def plan_exactly(self, promising: Sequence[tuple[OneNumber, Candidate]]) -> None:
        """Plan exactly what may beat the best so far, the best estimates first.

        At least ``top`` different layouts are planned, if there are; after Ctrl-C only the first that fits.
        """
        self.failed = 0
        for search, candidate in promising:
            if self.interrupted and self.plans:
                return
            enough = self._has_enough(candidate)
            if enough and self.programs >= EFFORT.few_programs:
                return
            if (enough or self._is_far(candidate)) and not self._is_cheap(search, candidate):
                continue
            if not self._is_of_interest(search, candidate):
                continue
            seconds = self.add(search, candidate)
            if not self.few and candidate.groups > 1:
                self.programs += search.n_programs(candidate)
            if seconds < inf and candidate.seconds and candidate.groups > 1:
                self.errors.append(seconds / candidate.seconds)

    def _has_enough(self, candidate: Candidate) -> bool:
        """Return whether, on many devices, enough was tried to skip a candidate and those after it."""
        if self.few or candidate.groups == 1 or len(self._different) < self.top:
            return False
        piped = sum(plan.candidate.groups > 1 for plan in self.plans)
        return piped >= EFFORT.candidates or self.failed >= EFFORT.failed_plans

    def _is_far(self, candidate: Candidate) -> bool:
        """Return whether, on many devices, a candidate looks worse than the best, by the errors of estimates so far."""
        if self.few or candidate.groups == 1 or len(self._different) < self.top:
            return False
        hopeful = min([1.0, *self.errors]) if self.errors else 1 - EFFORT.close_estimate
        return self.fastest.seconds < hopeful * candidate.seconds

    def _is_cheap(self, search: OneNumber, candidate: Candidate) -> bool:
        """Return whether, on many devices, another layout that does not look too bad takes few programs."""
        if self.few or candidate.groups == 1 or self.failed >= EFFORT.failed_plans:
            return False
        if self.fastest.seconds < EFFORT.few_programs_gain * candidate.seconds:
            return False
        if search.what(candidate) in self._different:
            return False
        return self.programs + search.n_programs(candidate) <= EFFORT.few_programs

    def _is_of_interest(self, search: OneNumber, candidate: Candidate) -> bool:
        """Return whether a candidate may beat the best so far, by the errors of estimates, or is another layout."""
        many = not self.few
        if many and self.top > 1 and search.what(candidate) in self._different:
            return False
        if many or len(self._different) < self.top:
            return True
        return candidate.seconds * self._trust <= self.fastest.seconds

    @property
    def _different(self) -> set[str]:
        """The layouts so far, in words."""
        return {plan.what for plan in self.plans}

    @property
    def _trust(self) -> float:
        """The part of an estimate that a step takes at least."""
        if len(self.errors) < EFFORT.candidates:
            return 0.0
        known = len(self.errors) >= EFFORT.known_errors
        return (EFFORT.close_trust_margin if known else EFFORT.trust_margin) * min(1.0, *self.errors)
