"""Planning: fold, build the problem, solve it, complete the plan; more memory-careful only when the limit binds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf

from autopar.clusters import check_mesh
from autopar.collection import uncollected
from autopar.errors import InfeasibleError, MeshError, PlanError, first_few
from autopar.graph import Graph, Node, Ref
from autopar.labels import matches, op_labels
from autopar.placements import Mesh, State, fits, format_state, is_cut, is_shard, kind, mesh_text, shard_dim
from autopar.plan import LIFETIMES, ParamChoice, Solution, StagePlan
from autopar.planner.intra_op import ilp
from autopar.planner.intra_op.build import Builder, Decided, Decoder
from autopar.planner.intra_op.complete import complete
from autopar.planner.intra_op.fold import Fold, fold, unfolded
from autopar.planner.intra_op.mixture import mixture
from autopar.planner.intra_op.price import pricer
from autopar.planner.intra_op.problem import ROUNDING, Choice, Item, Problem
from autopar.planner.intra_op.recompute import segments_of
from autopar.planner.intra_op.recompute_choices import Again
from autopar.planner.intra_op.regathering import gathering_everything_again, within
from autopar.planner.intra_op.space import fitting_strategy
from autopar.planner.intra_op.written import held_whole, holds_whole
from autopar.rules.notation import Rule
from autopar.rules.registry import rules_of
from autopar.rules.strategy import Strategy, options_of, strategy_named, why_not_cut
from autopar.texts import show_bytes
from autopar.wishes import MEMORY_FRACTION, TIME_LIMIT_SECONDS
from hardware_profiles import Cluster

ATTEMPTS = 8
"""Limits that are tried until what the solver finds fits: its bytes are not quite those of the finished plan."""
REFINED, CLOSE = 2, 1e-3
"""Of these, how often a plan that fits is made better, and how near the limits may be, as a part of the memory."""
LARGEST, SHOWN = 3, 20
"""Parameters, and pins that do not fit, that a message lists."""


@dataclass(frozen=True)
class Options:
    """What a user may ask of the planner.

    Attributes:
        constraints: ``{pattern: {axis: factor}}``; the pattern (``*`` matches anything) names a module path, or one op
            as ``module:op``; the factor is one of the op's rule, or ``replicate``.
        params: ``{pattern: "replicate"}`` keeps parameters whole on every rank; or a stored placement ``"S0,I"``; or
            one with a lifetime, ``"S0,I step"`` (ZeRO-1/2) or ``"S0,I use"`` (ZeRO-3).
        inputs, outputs: pinned placements by input name and output position.
        memory_limit_bytes: per device; None for nine tenths of the device's memory.
        optimizer: ``adamw``, ``sgd`` or ``sgd_momentum``: decides the bytes of optimizer state.
        microbatches: pieces that ``train_step`` cuts the batch into.
        time_limit_seconds: for one run of the solver.
        memory_gap: how far from the proven optimum a plan may be where the memory limit binds (the plan reports its
            gap); without a binding limit, plans are optimal. 0 asks for the optimum always, which can take minutes.
        worth_seconds: where memory binds, a plan that is proven to take as long is not searched to its end.
        fold: decide identical blocks once.
        in_flight: microbatches whose activations are kept at once: more than one in a stage of a pipeline.
        recompute: patterns of module paths (``layers.*``); each module that matches keeps only its inputs for the
            backward, and runs again there. So do the regions that the model itself runs under activation checkpointing.
        may_recompute: where memory binds, and neither ``recompute`` nor the model says what runs again, operators of
            any block may.
        blocks: names of the operators with which blocks begin, for whoever knows them: what runs again does so block
            by block. By default those of the repeated stretches that folding finds.
    """

    constraints: Mapping[str, Mapping[str, str]] | None = None
    params: Mapping[str, str] | None = None
    inputs: Mapping[str, State] | None = None
    outputs: Mapping[int, State] | None = None
    memory_limit_bytes: float | None = None
    optimizer: str = "adamw"
    microbatches: int = 1
    time_limit_seconds: float = TIME_LIMIT_SECONDS
    memory_gap: float = 0.01
    worth_seconds: float = inf
    fold: bool = True
    in_flight: int = 1
    recompute: Sequence[str] = ()
    may_recompute: bool = True
    blocks: Sequence[str] = ()


@uncollected()
def plan_graph(
    graph: Graph, cluster: Cluster, mesh: Mesh, options: Options | None = None, *,
    devices: Sequence[int] | None = None,
) -> StagePlan:  # fmt: skip
    """The cheapest plan of a graph on a mesh: of the cluster's first devices, or of those given, in row-major order.

    Raises:
        MeshError: the mesh does not fit the cluster.
        InfeasibleError: the pins or the memory limit leave no plan; the message names the culprits.
        Beaten: the plan is not worth the search (see ``worth_seconds``).
    """
    options = options or Options()
    setting = _Setting(graph, cluster, mesh, options, devices)
    limit = device_limit(cluster, setting.priced.devices, options.memory_limit_bytes)
    keeping = _Solving(setting, *setting.problem(limit < float("inf")), limit)
    if limit == float("inf") or not options.may_recompute or setting.again:
        return keeping.plan()
    free = keeping.free()
    if free is not None:
        return free
    failed: InfeasibleError | None = None
    best: StagePlan | None = None
    try:  # the same problem, and more to choose from
        best = _Solving(setting, *setting.problem(True, choose_again=True), limit).plan()
    except InfeasibleError as error:
        failed = error
    if best is None or (best.solution is not None and best.solution.gap > FAR):
        try:
            keeping_all = keeping.plan()
        except InfeasibleError as error:
            failed = failed or error
        else:
            best = min([keeping_all, *([best] if best is not None else [])], key=lambda p: p.price.seconds)
    if best is None:
        assert failed is not None
        raise failed
    return best


FAR = 0.1
"""Where a plan that makes things again is further than this from its bound, one that keeps all is looked at too."""
PEAK_SHARE = 0.125
"""Of what a block gathers for a use, where its bytes are weighed: the blocks of a stage share it."""


class PlansByMemory:
    """The fastest plan of a graph on a mesh, and smaller ones: of these plans, no other has less of both.

    After them come the same cuts with every copy that they gather gathered again in the backward, where that frees
    memory.

    They are the optima at rising prices of a byte, so they lie on the convex hull of seconds over bytes. With a solver
    that cannot price bytes there is only the fastest.

    Raises:
        MeshError, InfeasibleError: as for :func:`plan_graph`, but for memory.
    """

    @uncollected()
    def __init__(
        self, graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, *, devices: Sequence[int] | None = None
    ) -> None:
        self.setting = _Setting(graph, cluster, mesh, options, devices)
        problem, self.decoder = self.setting.problem(True, options.may_recompute and not self.setting.again)
        self.program = ilp.program(
            replace(problem, limit_bytes=UNLIMITED), time_limit_seconds=options.time_limit_seconds,
        )  # fmt: skip

    @uncollected()
    def fastest(self) -> StagePlan:
        """The fastest plan: for less than a third of what all of them cost to find."""
        return self._plan(self.program.hull(())[0])

    @uncollected()
    def every(self, prices: Sequence[float] = ilp.PRICES) -> list[StagePlan]:
        """All of them, the fastest first; prices as for :meth:`autopar.planner.intra_op.ilp.HighsProgram.hull`."""
        fastest, *others = self.program.hull(prices, PEAK_SHARE)
        plans, again = self._ways(fastest), [self._gathering_again(fastest)]
        for choice in others:
            try:
                plans += self._ways(choice)
                again.append(self._gathering_again(choice))
            except PlanError:  # rounded to strategies between which there is no way
                continue
        return plans + [plan for plan in again if plan.gather_again]

    def _ways(self, choice: Choice) -> list[StagePlan]:
        """The plan of a choice, and the same cuts with nothing, and with all that may, run again."""
        decided = self.decoder.decided(choice.picked, self.setting.folding)
        sets = [decided.again]
        if self.decoder.again is not None:
            every = self.decoder.again.every(self.setting.folding)
            sets = list(dict.fromkeys((frozenset(), decided.again, every)))
        return [self.setting.realise(decided._replace(again=again)) for again in sets]

    def _plan(self, choice: Choice, gather_again: Collection[str] = ()) -> StagePlan:
        decided = self.decoder.decided(choice.picked, self.setting.folding)
        return self.setting.realise(decided, gather_again)

    def _gathering_again(self, choice: Choice) -> StagePlan:
        return gathering_everything_again(self.setting.graph, self._plan(choice), lambda keys: self._plan(choice, keys))


@uncollected()
def priced_again(
    graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, plans: Sequence[StagePlan], *,
    devices: Sequence[int] | None = None,
) -> list[StagePlan] | None:  # fmt: skip
    """The plans of a graph that differs from another in sizes only, decided as those of the other; None if the sizes
    do not allow it."""
    setting = _Setting(graph, cluster, mesh, options, devices)
    priced = []
    for plan in plans:
        ops: dict[int, Strategy] = {}
        params: dict[int, ParamChoice] = {}
        for i, (node, rule) in enumerate(zip(graph.nodes, setting.rules, strict=True)):
            if node.kind == "param" and node.target in plan.params:
                params[i] = plan.params[node.target]
            elif node.kind == "op" and node.hot:
                assert rule is not None
                names = plan.ops.get(node.name)
                strategy = fitting_strategy(graph, node, rule, mesh, names) if names is not None else None
                if strategy is None:
                    return None
                ops[i] = strategy
        outputs = {k: state for k, state in enumerate(plan.outputs) if state is not None}
        try:
            priced.append(setting.realise(Decided(ops, params, outputs, dict(plan.inputs)), plan.gather_again))
        except (PlanError, MeshError):
            return None
    return priced


MIXED_GAP = 0.02
"""The gap of a mixture that is good enough where operators may run again: the search for a better one is long there."""
AGAIN_SECONDS = 10.0
"""For one run of the solver where operators may run again."""
STEEP_PRICES = (10.0, 30.0, 100.0)
"""Like :data:`autopar.planner.intra_op.ilp.PRICES`, where little memory is all that counts."""
UNLIMITED = 1e18
"""Bytes that no device has."""


class _Setting:
    """A graph on a mesh with what is asked of it: where problems come from, and what makes plans of their solutions."""

    def __init__(
        self, graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, devices: Sequence[int] | None
    ) -> None:
        check_mesh(mesh, cluster)
        self.graph, self.cluster, self.options = graph, cluster, options
        self.priced = pricer(cluster, mesh, devices)
        folding = fold(graph) if options.fold else unfolded(graph)
        self.rules = rules_of(graph, folding.representative)
        self.pins = _Pins(graph, self.rules, mesh, options)
        self.again = segments_of(graph, self.rules, options.recompute)
        # blocks that are pinned differently are different blocks
        self.folding = folding if self.pins.uniform(folding) else unfolded(graph)
        self.may_again: Again | None = None

    def problem(self, keep_memory: bool, choose_again: bool = False) -> tuple[Problem, Decoder]:
        """The problem, with strategies that only help where memory is short, and with operators that may run again, if
        that is asked."""
        pins, options = self.pins, self.options
        problem, decoder = Builder(
            self.graph, self.rules, self.folding, self.priced, options.optimizer, options.microbatches,
            pins.op if pins.ops or pins.uncut else None, pins.param if pins.params else None,
            dict(options.outputs or {}), dict(options.inputs or {}), keep_memory, bool(self.cluster.abstract),
            options.in_flight, self.again, choose_again, options.blocks,
        ).build()  # fmt: skip
        self.may_again = decoder.again
        pins.require(problem)
        return problem, decoder

    def realise(self, decided: Decided, gather_again: Collection[str] = ()) -> StagePlan:
        """The plan of what was decided, with some copies gathered again in the backward."""
        options, segments, remade = self.options, self.again, []
        if decided.again:
            assert self.may_again is not None
            segments = self.may_again.segments(self.graph, self.rules, decided.again)
            remade = self.may_again.results(self.graph, segments, self.folding)
        return complete(
            self.graph, self.rules, self.priced, decided.ops, decided.params, decided.outputs,
            inputs={**decided.inputs, **(options.inputs or {})}, optimizer=options.optimizer,
            microbatches=options.microbatches, in_flight=options.in_flight, recompute=segments,
            gather_again=gather_again, make_again=remade,
        )  # fmt: skip

    def decided_seconds(self, plan: StagePlan) -> float:
        """The seconds of a plan without the operators that follow demand, which the problem leaves out."""
        follow = 0.0
        for node, rule in zip(self.graph.nodes, self.rules, strict=True):
            if node.kind == "op" and not node.hot and rule is not None:
                strategy = strategy_named(self.graph, node, rule, plan.ops[node.name])
                follow += sum(self.priced.op(self.graph, node, rule, strategy))
        return plan.price.seconds - follow * self.options.microbatches


@dataclass
class _Solving:
    """The cheapest plan of a problem whose bytes, counted in full, stay within the limit.

    The problem may count fewer bytes than the finished plan has (see :meth:`Builder._kept`); then it is solved again
    with a lower limit. The gap reported is to the bound at the full limit, as the solver counts bytes.
    """

    setting: _Setting
    problem: Problem
    decoder: Decoder
    limit: float

    def plan(self) -> StagePlan:
        """The plan.

        Where memory binds, or nothing fits, faster cuts whose gathered copies do not all fit are tried too: they gather
        as many of them again in the backward as they must.

        Raises:
            InfeasibleError: nothing fits.
            Beaten: it is not worth the search.
        """
        failed: InfeasibleError | None = None
        best: StagePlan | None = None
        try:
            best = self._keeping()
            if best.solution is None or not best.solution.binds:
                return best
        except InfeasibleError as error:
            failed = error
        gathering = self._gathering_again()
        if gathering is not None and (best is None or gathering.price.seconds < best.price.seconds):
            return gathering
        if best is None:
            assert failed is not None
            raise failed
        return best

    def free(self) -> StagePlan | None:
        """The fastest plan, if it fits: the limit does not bind it then."""
        plan = self._finish(self._program(self.problem).solve())
        return plan if plan.price.memory_bytes <= self.limit else None

    def _gathering_again(self) -> StagePlan | None:
        """The best of two plans that gather copies again: the fastest cuts, and those that fit without their copies."""
        fastest, every = self._gathering(self._program(self.problem).solve(), self.limit)
        freed = fastest.price.memory_bytes - every.price.memory_bytes
        if freed <= 0 or self.limit == float("inf"):
            return None
        if every.price.memory_bytes <= self.limit:
            return every
        program = self._program(replace(self.problem, limit_bytes=self.limit + freed))
        try:
            _, every = self._gathering(program.solve(self.setting.options.memory_gap), self.limit)
        except InfeasibleError:
            return None
        return every if every.price.memory_bytes <= self.limit else None

    def _gathering(self, choice: Choice, limit: float) -> tuple[StagePlan, StagePlan]:
        """The plan of a choice that keeps its copies, and the one that gathers again what it must."""
        decided = self.decoder.decided(choice.picked, self.setting.folding)
        kept = self._finish(choice)
        setting = self.setting
        fitting = within(
            setting.graph, kept, setting.priced, limit, lambda keys: setting.realise(decided, keys)
        )
        assert kept.solution is not None
        bound, seconds = kept.solution.objective_seconds * (1 - kept.solution.gap), setting.decided_seconds(fitting)
        gap = max(0.0, 1 - bound / seconds) if seconds else 0.0
        said = replace(kept.solution, status="best found", objective_seconds=seconds, gap=gap, binds=True)
        return kept, replace(fitting, solution=said)

    def _keeping(self) -> StagePlan:
        """The plan that keeps every copy that it gathers."""
        limit, gap = self.limit, self.setting.options.memory_gap
        enough = gap if self.decoder.again is None else max(gap, MIXED_GAP)
        program = self._program(replace(self.problem, limit_bytes=limit if limit < float("inf") else None))
        tried: list[StagePlan] = []
        best: StagePlan | None = None
        bound = 0.0
        fits_at, too_much, target, refined = 0.0, limit, limit, 0
        for attempt in range(ATTEMPTS):
            try:
                if attempt == 0 and gap > 0.0:
                    plan = mixture(
                        self.setting.graph, self.setting.folding, program, self.decoder, limit, self.setting.realise,
                        self.setting.decided_seconds, gap,
                    )  # fmt: skip
                    tried += [plan] if plan is not None else []
                    if plan is not None and plan.solution is not None:
                        if plan.solution.gap <= enough or program.is_rough(gap):
                            return plan
                    best = plan
                plan = self._finish(program.solve(gap, self.setting.options.worth_seconds))
            except InfeasibleError:
                break
            tried.append(plan)
            assert plan.solution is not None
            if attempt == 0:
                bound = plan.solution.objective_seconds * (1 - plan.solution.gap)
            over = plan.price.memory_bytes - limit
            if over > 0:
                too_much = target
            else:
                fits_at = max(fits_at, target)
                if best is None or plan.price.seconds < best.price.seconds:
                    best = plan
            if best is None:
                target -= over
                program.limit(target)
                continue
            if attempt == 0:
                return best
            best = replace(best, solution=_against(bound, best, gap))
            assert best.solution is not None
            refined += 1
            if best.solution.gap <= max(gap, ROUNDING) or refined > REFINED or too_much - fits_at <= CLOSE * limit:
                break
            target = (fits_at + too_much) / 2
            program.limit(target)
        return best if best is not None else self._smallest(tried, bound)

    def _program(self, problem: Problem) -> ilp.HighsProgram | ilp.ByCbc:
        options = self.setting.options
        seconds = options.time_limit_seconds
        if self.decoder.again is not None:
            seconds = min(seconds, AGAIN_SECONDS)
        return ilp.program(problem, time_limit_seconds=seconds)

    def _finish(self, choice: Choice) -> StagePlan:
        plan = self.setting.realise(self.decoder.decided(choice.picked, self.setting.folding))
        said = Solution(choice.solver, choice.status, choice.objective, choice.gap, choice.binds)
        return replace(plan, solution=said)

    def _smallest(self, tried: list[StagePlan], bound: float) -> StagePlan:
        """The plan of the fewest bytes, when the limit was not met otherwise."""
        smallest = replace(
            self.problem,
            items=tuple(_by_bytes(item) for item in self.problem.items),
            held=tuple(replace(h, seconds=h.n_bytes) for h in self.problem.held),
            tensors=tuple(replace(t, steps=tuple((a, b, 0.0) for a, b, _ in t.steps)) for t in self.problem.tensors),
        )
        choices = [self._program(smallest).solve()]
        if self.decoder.again is not None:  # of all that could be cut for less, sound ones may be smaller when finished
            choices += self._program(replace(self.problem, limit_bytes=UNLIMITED)).hull(STEEP_PRICES)
        plan = min(
            [*tried, *(p for choice in choices for p in self._gathering(choice, self.limit))],
            key=lambda p: (max(p.price.memory_bytes, self.limit), p.price.seconds),
        )
        if plan.price.memory_bytes > self.limit:
            fastest = self._finish(self._program(self.problem).solve())
            raise InfeasibleError(_too_big(self.setting.graph, fastest, plan, self.limit))
        solution = Solution("smallest", "best found", plan.price.seconds, 0.0, True)
        plan = replace(plan, solution=solution)
        return replace(plan, solution=_against(bound, plan, self.setting.options.memory_gap))


def _against(bound: float, plan: StagePlan, gap: float) -> Solution:
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


def _too_big(graph: Graph, fastest: StagePlan, tight: StagePlan, limit: float) -> str:
    p = tight.price
    parts = sorted(
        [("parameters", p.parameter_bytes), ("gradients", p.gradient_bytes), ("optimizer state", p.optimizer_bytes),
         ("gathered parameters", p.gathered_bytes), ("activations", p.activation_bytes)], key=lambda e: -e[1],
    )  # fmt: skip
    biggest = sorted(graph.of_kind("param"), key=lambda e: -e[1].out.n_bytes)[:LARGEST]
    return (
        f"no plan fits {show_bytes(limit)} per device: the smallest needs {show_bytes(p.memory_bytes)}, the fastest "
        f"{show_bytes(fastest.price.memory_bytes)}\n  of the smallest: "
        + ", ".join(f"{name} {show_bytes(n)}" for name, n in parts)
        + "\n  largest parameters: "
        + ", ".join(f"{node.target} {show_bytes(node.out.n_bytes)}" for _, node in biggest)
        + f"\n  it would fit with {show_bytes(p.memory_bytes - limit)} more per device, more devices, or a smaller "
        "batch"
    )


def device_limit(cluster: Cluster, devices: Iterable[int], asked: float | None) -> float:
    """Bytes that may be filled of each of these devices: what was asked for, or nine tenths of the smallest."""
    return MEMORY_FRACTION * min(cluster.device(d).memory_bytes for d in devices) if asked is None else asked


class _Pins:
    """The user's constraints as predicates over strategies and parameter choices."""

    def __init__(self, graph: Graph, rules: Sequence[Rule | None], mesh: Mesh, options: Options) -> None:
        self.graph, self.mesh, self.options = graph, mesh, options
        self.ops: dict[str, dict[int, str]] = {}
        self.params: dict[str, str] = {}
        self.uncut = {graph.nodes[i].name: positions for i, positions in held_whole(graph).items()}
        self._ops(rules)
        self._params()
        self._places()

    def _ops(self, rules: Sequence[Rule | None]) -> None:
        axes = {name: a for a, (name, _) in enumerate(self.mesh)}
        labels = op_labels(self.graph) if self.options.constraints else {}
        for pattern, wanted in (self.options.constraints or {}).items():
            hit: set[str] = set()
            offered: dict[str, None] = {}
            seen = False
            for axis, factor in wanted.items():
                if axis not in axes:
                    raise PlanError(f"constraint '{pattern}' names axis '{axis}'; the mesh has {', '.join(axes)}")
                name = "I" if factor == "replicate" else factor
                for node, rule in zip(self.graph.nodes, rules, strict=True):
                    if node.kind != "op" or rule is None or not matches(pattern, node, labels[node.name]):
                        continue
                    seen = True
                    names = list(options_of(self.graph, node, rule))
                    offered[f"{labels[node.name]}: {' '.join('replicate' if n == 'I' else n for n in names)}"] = None
                    if name in names:
                        size = dict(self.mesh)[axis]
                        why = why_not_cut(rule, name, [size]) if name in rule.sizes else ""
                        if why:
                            raise InfeasibleError(
                                f"constraint '{pattern}': factor '{name}' of {node.where} {why}, on axis '{axis}'; use "
                                f"an axis size that divides {rule.sizes[name]}"
                            )
                        self.ops.setdefault(node.name, {})[axes[axis]] = name
                        hit.add(axis)
            if not seen:
                modules = sorted({n.module for n in self.graph.nodes if n.kind == "op" and n.module})
                raise PlanError(f"constraint '{pattern}' matches no op; modules are {first_few(modules)}")
            for axis in wanted:
                if axis not in hit:
                    lines = "\n  ".join(list(offered)[:6])
                    raise PlanError(
                        f"constraint '{pattern}': no op there has factor '{wanted[axis]}'; they offer\n  {lines}"
                    )

    def _params(self) -> None:
        for pattern, how in (self.options.params or {}).items():
            matched = [n.target for _, n in self.graph.of_kind("param") if fnmatchcase(n.target, pattern)]
            if not matched:
                names = [n.target for _, n in self.graph.of_kind("param")]
                raise PlanError(f"'{pattern}' matches no parameter; parameters are {first_few(names)}")
            placement, _ = _kept(how)
            if how != "replicate" and len(placement.split(",")) != len(self.mesh):
                raise PlanError(
                    f"'{pattern}': '{how}' is neither 'replicate' nor a placement with {len(self.mesh)} parts such as "
                    + ",".join(["S0", *["I"] * (len(self.mesh) - 1)])
                    + ", after which may stand a lifetime, 'step' or 'use'"
                )
            self.params.update(dict.fromkeys(matched, how))
        self._params_large_enough()

    def _params_large_enough(self) -> None:
        """Name all parameters that cannot be stored as they are pinned, with the sizes that are too small."""
        lines: list[str] = []
        names: list[str] = []
        for _, node in self.graph.of_kind("param"):
            if node.target not in self.params or self.params[node.target] == "replicate":
                continue
            placement, _ = _kept(self.params[node.target])
            left = list(node.out.shape)
            for p, (axis, size) in zip(placement.split(","), self.mesh, strict=True):
                d = shard_dim(p)
                if d is None:
                    continue
                if d >= len(left) or left[d] < size:
                    why = f"dim {d} has {left[d]} left for {size} ranks" if d < len(left) else f"it has no dim {d}"
                    shape = " ".join(map(str, node.out.shape))
                    lines.append(f"{node.target} [{shape}] as {placement}: on axis '{axis}' {why}")
                    names.append(node.target)
                    break
                left[d] = -(-left[d] // size)
        if lines:
            shown = "\n  ".join(lines[:SHOWN]) + (f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
            raise InfeasibleError(
                f"{len(lines)} of {len(self.params)} parameters that were pinned are too small\n  {shown}\n  use "
                "smaller axes, or except them: a later pattern of params= goes before an earlier one, so end "
                f"it with '{names[0]}': 'replicate' and so on (--keep-replicated '{names[0]}')"
            )

    def _places(self) -> None:
        for name, state in (self.options.inputs or {}).items():
            node = next((n for _, n in self.graph.of_kind("input") if n.target == name), None)
            if node is None:
                raise PlanError(
                    f"no input '{name}'; inputs are {', '.join(n.target for _, n in self.graph.of_kind('input'))}"
                )
            self._place(f"input '{name}'", node.out.shape, state, "SI" if node.needs_grad else "SR")
        for number, state in (self.options.outputs or {}).items():
            outputs = self.graph.outputs
            if not 0 <= number < len(outputs):
                raise PlanError(f"no output {number}; the model has {len(outputs)}, counted from 0")
            out = outputs[number]
            if not isinstance(out, Ref):
                raise PlanError(f"output {number} is no tensor and has no placement")
            grad = self.graph.nodes[out.node].needs_grad and self.graph.spec(out).is_float
            self._place(f"output {number}", self.graph.spec(out).shape, state, "SIRP" if grad else "SRP")

    def _place(self, what: str, shape: tuple[int, ...], state: State, kinds: str) -> None:
        if len(state) != len(self.mesh):
            raise PlanError(
                f"{what}: {format_state(state)} has {len(state)} placements, the mesh {len(self.mesh)} axes"
            )
        if any(kind(p) not in kinds for p in state) or not fits(shape, state, self.mesh):
            mesh = mesh_text(self.mesh, ", ")
            allowed = ", ".join("S<dim>" if k == "S" else k for k in kinds)
            raise PlanError(
                f"{what} of shape {shape} cannot be placed as {format_state(state)} on mesh {mesh}; use {allowed}, and "
                "shards of dims that exist and have something for every rank"
            )

    def uniform(self, folding: Fold) -> bool:
        """Whether all nodes of every fold class are pinned alike."""
        nodes = self.graph.nodes
        return not (self.ops or self.params or self.uncut) or all(
            self.uncut.get(nodes[i].name) == self.uncut.get(nodes[r].name)
            and self.ops.get(nodes[i].name) == self.ops.get(nodes[r].name)
            and self.params.get(nodes[i].target) == self.params.get(nodes[r].target)
            for i, r in enumerate(folding.representative)
        )

    def op(self, node: Node, strategy: Strategy) -> bool:
        """Whether the pins allow a strategy; without one, whether it keeps whole what other operators write to."""
        wanted = self.ops.get(node.name)
        if wanted is None:
            return holds_whole(strategy, self.uncut.get(node.name, ()))
        return all(
            strategy.options[a].name == name or self.mesh[a][1] == 1 for a, name in wanted.items()
        )

    def param(self, node: Node, choice: ParamChoice) -> bool:
        """Whether the pins allow a way to keep a parameter."""
        how = self.params.get(node.target)
        if how is None:
            return True
        if how == "replicate":
            return not is_cut(choice.stored)
        placement, lifetime = _kept(how)
        gathers = any(is_shard(a) and not is_shard(b) for a, b in zip(choice.stored, choice.used, strict=True))
        return format_state(choice.stored) == placement and (not lifetime or not gathers or choice.lifetime == lifetime)

    def require(self, problem: Problem) -> None:
        """Name the items that the pins leave without a strategy."""
        empty = [item.name for item in problem.items if not item.seconds]
        if not empty:
            return
        lines = []
        for name in empty:
            node = self.graph.nodes[self.graph.index[name]] if name in self.graph.index else None
            pinned = {self.mesh[a][0]: f for a, f in self.ops.get(name, {}).items()}
            pinned_param = self.params.get(node.target) if node else None
            where = node.where if node else name
            lines.append(f"{where}: pinned to {pinned or pinned_param or 'what its neighbours were pinned to'}")
        raise InfeasibleError(
            "the pins leave no strategy for\n  " + "\n  ".join(lines) + "\n  remove or change one of them"
        )


def _kept(how: str) -> tuple[str, str]:
    """``"S0, I use"`` as ``("S0,I", "use")``; no lifetime is ``""``."""
    words = how.split()
    lifetime = words.pop() if words and words[-1] in LIFETIMES else ""
    return "".join(words), lifetime


__all__ = [
    "Options", "PlansByMemory", "device_limit", "plan_graph", "priced_again",
]  # fmt: skip
