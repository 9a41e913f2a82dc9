"""Constants of the search: every number by which it trades the quality of a plan for planning time.

Nothing here changes what a plan means or costs; tolerances, units and formats are where they are used. Each field has
what it does and why, and the measurement that chose it if there is one; ``git log -S`` finds the commit of each.
Seconds are CPU-seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class SolverWork:
    """The work after which a run of the solver ends without a proof, the same on every machine, however busy.

    Seconds of the clock would give the same problem one plan on an idle machine and another on a loaded one. They count
    only where a user asked for them.

    Attributes:
        iterations: how many the simplex method may take to solve a relaxation.
        work: what branch and bound may take: steps (HiGHS asks at each whether to go on) times thousands of matrix
            entries, of which each takes 2 to 10 ms; so a larger program gets fewer steps.
        cpu_seconds: the limit of CBC, which counts neither.
        clock_seconds: the limit that a user asked for; nothing else counts then.
    """

    iterations: int
    work: float
    cpu_seconds: float
    clock_seconds: float = inf

    def steps_of(self, n_entries: int) -> int:
        """Return the steps of branch and bound for a program of ``n_entries`` matrix entries."""
        return max(LEAST_STEPS, round(min(self.work * 1000 / max(n_entries, 1), MOST_STEPS)))


LEAST_STEPS, MOST_STEPS = 6, 1_000_000
"""Limits of :meth:`SolverWork.steps_of`, however large or small a program is."""
PATIENT = SolverWork(iterations=3_000_000, work=20_000, cpu_seconds=120.0)
"""About two minutes, for runs without which nothing is known."""
BRIEF = SolverWork(iterations=3_000_000, work=800, cpu_seconds=5.0)
"""About five seconds of branch and bound, where memory binds: there are many runs, and the last percent takes most."""


def requested_seconds(seconds: float) -> SolverWork:
    """Return the limit of a user who gave seconds of the clock."""
    return SolverWork(2**31 - 1, inf, seconds, seconds)


@dataclass(frozen=True)
class Effort:
    """The constants of the search, in the order in which a plan passes them."""

    # The integer program of one mesh

    long_chain: int = 48
    """Rows that a chain of operators may have in any case: rows are the variables of the program."""
    chain_growth: float = 1.5
    """Factor by which a longer chain may grow when it takes in one more operator."""
    exact_readers: int = 6
    """Readers' states up to which the cheapest reshard tree is exact: its time grows with 3 to the power of them."""
    rough_gap: float = 0.05
    """A gap with which a search that compares hundreds of plans takes the whole choice next to the relaxation."""
    byte_prices: tuple[float, ...] = (0.3, 0.8, 3.0, 10.0)
    """Prices of all bytes of the fastest choice, in multiples of its seconds, at which smaller choices are found."""
    rare_byte_prices: tuple[float, ...] = (2.0,)
    """The same for blocks that hardly count, and on meshes of more than ``first_axes`` axes (each price takes 5x
    there)."""
    hull_gap: float = 0.01
    """Gap of the fastest choice of a block, where branch and bound is needed to find it."""
    peak_share: float = 0.125
    """Share of what a block gathers for a use that has a price: the blocks of a stage share that memory."""

    # One run of the solver

    presolve_columns: int = 60_000
    """Columns from which presolve pays: 117,000 take 11 s without it and 1 s with it; at 17,000 it takes longer."""
    presolve_columns_of_bytes: int = 10_000
    """The same where bytes are minimised, with ten times the steps: 50,000 columns take 0.24 s with it, 1.36 s
    without."""
    iterations_before_check: int = 10_000
    """Simplex iterations, at least, after which the program is checked for whether its limit can be met at all."""
    columns_an_iteration: int = 4
    """Columns for each of which one more such iteration is allowed."""
    weighings: int = 4
    """Times that moments are weighed anew to prove that together they have too many bytes."""
    rounded_items: int = 16
    """Items that are fixed one after the other, at most, to get from the relaxation to a whole choice."""
    price_steps: tuple[float, ...] = (1.05, 1.2, 1.6, 3.0)
    """Multiples of the relaxation's price of a byte that are tried where the choice next to it does not fit."""
    price_nudge: float = 1e-3
    """Part by which the price of a byte is moved to see the solutions on both sides of it."""

    # The loop within memory (intra_op/within_memory.py)

    limit_attempts: int = 12
    """Lowered limits that are tried: the solver's bytes are not quite those of the finished plan."""
    moment_rounds: int = 6
    """Times that the relaxation is solved to find the moments that bind."""
    moment_rows: int = 16
    """Moments that become rows of the program, at most."""
    refinements: int = 2
    """Times that a plan which fits is improved by taking back half of what the limit was lowered by."""
    refined_share: float = 1e-3
    """Part of the limit below which such a step is too small to try."""
    feasible_price_steps: tuple[float, ...] = (1.02, 1.1, 1.3, 1.8, 3.0, 6.0)
    """Multiples of the relaxation's price of a byte that are tried for a finished plan that fits (0.1 s each)."""
    price_halvings: int = 3
    """Times that the last step between two of these prices is halved."""
    lowered_limits: tuple[float, ...] = (0.92, 0.84, 0.76)
    """Parts of the limit under which blocks that differ are mixed: the rest is for what the rows do not see."""
    far_gap: float = 0.1
    """Gap from which a plan is looked for in other ways too."""
    slow_runs: int = 1
    """Runs that may end at the solver's limit before the search for a first plan is given up."""
    mixed_gap: float = 0.02
    """Gap of a mixture that is good enough where operators may be recomputed: a better one takes long there."""
    steep_byte_prices: tuple[float, ...] = (10.0, 30.0, 100.0)
    """Like ``byte_prices``, for the smallest plan."""
    tight_share: float = 0.9
    """Part of the limit: where every choice needs more than this, the fewest bytes are found first."""
    clash_trials: int = 40
    """Problems that are solved to name the pins that clash."""

    # Blocks, and what each can cost

    few_devices: int = 16
    """Devices up to which more layouts are planned exactly: exact plans of few stages cost little."""
    pieces: int = 16
    """Pieces into which a model without repeats is cut, at most."""
    flops_a_byte: float = 100.0
    """Flops in the time of a byte by which pieces are weighed: known accelerators are within a few times that."""
    moved_cut: float = 0.4
    """Part of a piece by which a cut may be moved to where fewer bytes cross."""
    first_axes: int = 2
    """Axes of a group's mesh in the first look; meshes of more take five times as long, and win by little where they
    win."""
    rare_block: int = 32
    """A kind of block is rare if at most one in so many blocks is of it, on many devices."""
    weighed_in_flight: int = 4
    """Microbatches in flight for which the bytes of a block's plans are weighed."""

    # Estimates of cuts

    pace_precision: float = 0.01
    """Relative precision of the pace at which stages are filled."""
    far_mesh: float = 1.3
    """A mesh is looked at further if its lower bound is within this factor of the best estimate."""
    near_mesh: float = 1.05
    """The same where numbers of microbatches compete."""
    filled_meshes: int = 64
    """Meshes, or pairs of them for two device types, that are filled at most."""
    loose_bound: float = 0.97
    """Bounds of blocks are this much too high at most: alone, they pay for tensors that neighbours might take as they
    are."""
    simulated_cuts: int = 16
    """Cuts of a number of microbatches that are simulated with the times of their estimates."""
    estimate_too_long: float = 1.1
    """Factor by which estimates are too long at most, nearly always."""
    steady_microbatches: int = 2
    """Microbatches a group after which each more costs about the same."""
    room_shares: tuple[float, ...] = (1.0, 0.85, 0.7)
    """Shares of the memory that estimates may fill: the next one where nothing that was estimated fits."""
    worse_in_a_row: int = 2
    """Numbers of microbatches, or next best layouts, that are worse in a row before a search ends."""
    devices_a_microbatch: int = 128
    """Devices for each row of a microbatch where the search starts: 16 stages of tensor parallelism over 8."""

    # Exact plans

    candidates: int = 3
    """Cuts of a number of microbatches that are planned exactly and simulated, at most."""
    exact_numbers: int = 4
    """Numbers of microbatches of which the best few cuts are planned exactly; of the best two, all that are near."""
    worth_a_look: float = 2.0
    """On few devices, factor of the best estimate within which every number of groups and schedule is planned
    exactly."""
    one_group_near: float = 1.1
    """On many devices, factor of the best estimate within which one group is planned exactly: a second or two."""
    deeper_gain: float = 0.99
    """Factor that meshes of more axes must promise: where memory binds, programs of their stages take minutes."""
    failed_plans: int = 12
    """On many devices, promising layouts that do not fit after all before the search ends."""
    close_estimate: float = 0.005
    """On many devices, how much worse than the best an estimate may be, until errors of estimates are known."""
    few_programs: int = 24
    """On many devices, programs in all up to which exact plans cost little next to the estimates."""
    few_programs_gain: float = 0.95
    """Until then, how much too long estimates may be (4.3% for ``zb-h1`` of Llama-3-8B on 64 devices)."""
    equal_shares_slack: float = 1.02
    """Factor by which the fastest layout with equal shares of memory may be slower, before it is refined."""
    trust_margin: float = 0.9
    """On few devices, part of the worst error of an estimate so far that the next may have."""
    close_trust_margin: float = 0.98
    """The same once ``known_errors`` errors are known."""
    known_errors: int = 8
    """Errors of estimates after which they are trusted more."""
    replans: int = 4
    """Times that the slowest stages are planned again, cuts moved, or a group's memory shared anew."""
    lone_stage: float = 1.1
    """On few devices, factor of the best step so far at which a stage alone ends the plan of its cut."""
    unrefined: float = 1.03
    """On many devices, factor of the best at which a cut is given up before it is refined: that hardly saves more."""
    first_gap: float = 0.06
    """Gap that is good enough for stages where memory binds; on few devices, until the best is known."""
    free_gap: float = 1e-3
    """A plan this near to the fastest one, whatever memory that needs, serves wherever it fits."""
    memory_parts: int = 16
    """Parts of a group's memory for every two of its stages: so that many stages get the same limit, and one plan."""
    memory_step: int = 2**26
    """Bytes of which what a stage gets in addition to its part is a multiple, for the same reason."""
    many_more_in_flight: int = 4
    """Times as many microbatches in flight, at another moment than the fullest, that a stage is planned for
    instead."""
    more_memory: float = 1.25
    """Factor by which a stage that did not fit its part is taken to need more: four steps double it."""
    exact_order_actions: int = 48
    """Actions up to which an order of actions is searched exactly."""
    exact_order_states: int = 2000
    """States that such a search may visit."""

    # The choice of a plan

    faster_by: float = 1e-6
    """Part by which a mesh must be faster than an earlier one to be taken."""
    simpler_by: float = 0.001
    """Part by which a plan without microbatches may be slower and is still preferred."""


EFFORT = Effort()
"""The effort of every search."""
