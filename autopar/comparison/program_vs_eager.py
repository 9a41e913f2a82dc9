"""Comparison of programs with one device: loss, every gradient, and the weights after two optimizer steps.

Programs run with many ranks in this process (:mod:`autopar.comparison.in_process_ranks`). Programs are compared with
the captured graph on one device, and that with the model itself in eager mode, so a difference names the stage that
made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch

from autopar.capture import Captured
from autopar.comparison import LIMITS, as_wide_as, compare_with_eager, last_digits
from autopar.comparison import LOW as LOW
from autopar.comparison import doubled as doubled
from autopar.comparison import promoted as promoted
from autopar.comparison import wide as wide
from autopar.comparison import widen as widen
from autopar.comparison.in_process_ranks import WorldStep, pipeline_step, run_step, write_first
from autopar.comparison.relative import largest_value, relative
from autopar.errors import CaptureError
from autopar.lower.emit import Program, lower
from autopar.lower.typecheck import typecheck
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.one_device import one_device as one_device
from autopar.planner.intra_op.random_plans import random_plan
from autopar.plans.plan import Plan, StagePlan, one_stage
from autopar.plans.stage_graphs import cut
from autopar.rules.proving.many_ranks import fake_world
from autopar.rules.registry import rules_of
from autopar.runtime.batches.totals_ahead import computed_ahead, totals_ahead
from autopar.runtime.stages.seeds import seed_after
from autopar.torch_private import pytree
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.trees import PyTree
from hardware_profiles import Cluster

SGD: dict[str, PyTree] = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}
"""A step that is smooth in the gradient. AdamW's is not: it divides a gradient by its own size, and makes a whole step
of the rounding in a gradient that is truly zero, such as that of a key's bias."""

OF_ONE_DEVICE = 100
"""How often as far from one device a plan may be as one device is from itself where the last digits of its weights and
results change: a plan rounds in other places, and in more of them."""

_Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """The worst relative differences of one plan, with the name of the parameter in which each was found.

    A difference is ``max|a - b| / (max|b| + 1)`` for the loss and ``max|a - b| / (max|b| + 1e-3 * largest)`` for
    gradients and weights, where ``largest`` is the largest finite value among all tensors of the kind. It is infinite
    where one side alone has a NaN (:func:`autopar.comparison.relative.relative`).
    """

    name: str
    loss: float
    gradient: float
    gradient_of: str
    weight: float
    weight_of: str
    rounding: float = 0.0
    """How far one device is from itself where weights and results of operators differ in their last digit: measured
    where a plan is further from it than rounding explains, see :func:`beside_rounding`."""
    limit: float = LIMITS["float64"]
    """Largest difference that the rounding of the precision explains; more where the difference was shown to vanish in
    float64."""

    @property
    def worst(self) -> float:
        """The largest of the differences."""
        return max(self.loss, self.gradient, self.weight)

    @property
    def shows_nothing(self) -> bool:
        """True if the model magnifies rounding so much that a difference need not be a defect."""
        return self.rounding > LIMITS["float64"]

    @property
    def fine(self) -> bool:
        """True where rounding explains the difference: of the precision, or its effect on one device."""
        return self.worst <= max(self.limit, OF_ONE_DEVICE * self.rounding if isfinite(self.rounding) else 0.0)


@dataclass
class Trained:
    """The results of steps of SGD: losses, gradients of the first step, weights and buffers after the last.

    Gradients of inputs are among the gradients, as ``input <name>``.
    """

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def state_of(captured: Captured, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return copies of the parameters and buffers that a graph names."""
    params = dict(model.named_parameters(remove_duplicate=False))
    state = {**params, **dict(model.named_buffers(remove_duplicate=False))}
    weights = {
        node.target: params[node.target].detach().clone().requires_grad_(node.needs_grad)
        for _, node in captured.graph.of_kind("param")
    }
    copies = {
        node.target: captured.constants.get(node.target, state.get(node.target)).detach().clone()  # type: ignore[union-attr]
        for _, node in captured.graph.of_kind("buffer")
    }
    return weights, copies


def inputs_of(
    captured: Captured, args: Sequence[PyTree], kwargs: Mapping[str, PyTree],
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return the graph's inputs in a batch; for a microbatch also those that are computed ahead of a step.

    ``buffers`` are the model's, by name.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    inputs = {
        captured.graph.nodes[node].target: leaf
        for node, leaf in zip(captured.inputs, leaves, strict=True)
        if node is not None
    }
    device = next((x.device for x in inputs.values()), torch.device("cpu"))
    state = {**(buffers or {}), **captured.constants}
    (ahead,) = computed_ahead([totals_ahead(captured, device)], [inputs], [1.0], state.get)
    return {**inputs, **ahead}


def wanting(example: PyTree) -> PyTree:
    """Return the example inputs; all that can require gradients do, so that gradients are compared, too."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, example
    )


def train(
    captured: Captured, plan: StagePlan, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor], steps: int = 2, seed: int = 0, *, shaken: bool = False,
) -> Trained:  # fmt: skip
    """Return two steps of SGD under a plan; the program also passes the type checker.

    With ``shaken`` the last digits of all results change, see :func:`autopar.comparison.last_digits.shaken`.
    """
    graph = captured.graph
    program = _checked_program(graph, plan, _device_of(weights, buffers, inputs), shaken)

    def step(number: int, weights_now: _Tensors, buffers_now: _Tensors) -> WorldStep:
        return run_step(graph, plan, program, weights_now, buffers_now, inputs, seed=seed_after(seed + number))

    with as_wide_as(graph):
        return _trained(captured, weights, buffers, steps, step)


def _loss_of(captured: Captured) -> int:
    loss = captured.graph.loss
    assert loss is not None, "the model has no scalar loss output; give loss_fn"
    return loss


def _device_of(*tensors: _Tensors) -> torch.device:
    """Return the device of a model's tensors; tensors that the program creates are created there."""
    return next((t.device for of in tensors for t in of.values()), torch.device("cpu"))


def _checked_program(
    graph: Graph, plan: StagePlan, device: str | torch.device = "cpu", shaken: bool = False
) -> Program:
    """Return the program of a stage; on several devices it passes the type checker."""
    program = lower(graph, plan, device)
    if plan.n_devices > 1:
        with fake_world(plan.mesh):
            typecheck(program)
    return last_digits.shaken(program) if shaken else program


def _trained(
    captured: Captured, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], steps: int,
    step: Callable[[int, _Tensors, _Tensors], WorldStep],
) -> Trained:  # fmt: skip
    """Return steps of SGD from copies of the given weights.

    ``step`` is a forward and a backward, given its number and the weights and buffers that it begins with.
    """
    weights_now = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in weights.items()}
    buffers_now = dict(buffers)
    optimizer = _optimizer(weights_now.values())
    losses, first, loss = [], {}, _loss_of(captured)
    for number in range(steps):
        write_first(captured.graph, weights_now, buffers_now)
        done = step(number, weights_now, buffers_now)
        losses.append(done.outputs[loss])
        buffers_now.update(done.buffers)
        for name, leaf in weights_now.items():
            leaf.grad = done.gradients.get(name)
        if number == 0:
            first = {**done.gradients, **{input_name(k): g for k, g in done.arriving.items()}}
        optimizer.step()
    return Trained(losses, first, {k: v.detach() for k, v in weights_now.items()}, buffers_now)


def _optimizer(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return SGD; for a frozen model, with nothing to do."""
    trained = [p for p in params if p.requires_grad]
    return torch.optim.SGD(trained or [torch.zeros(())], **SGD)


def input_name(name: str) -> str:
    """Return the name of an input's gradient among those of parameters."""
    return f"input {name}"


def train_pipeline(
    captured: Captured, plan: Plan, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
    microbatches: Sequence[Mapping[str, torch.Tensor]], steps: int = 2, *, shaken: bool = False,
) -> Trained:  # fmt: skip
    """Return two steps of SGD in the order of a plan's schedule; every stage's program passes the type checker.

    With one stage on one device this is the reference for several microbatches; ``shaken`` as for :func:`train`.
    """
    plan.validate()
    loss = _loss_of(captured)
    graphs = cut(captured.graph, plan.starts)
    plans = list(plan.stages)
    pairs = zip(graphs, plans, strict=True)
    programs = [_checked_program(stage.graph, stage_plan, shaken=shaken) for stage, stage_plan in pairs]
    n = len(microbatches)

    def step(number: int, weights_now: _Tensors, buffers_now: _Tensors) -> WorldStep:
        return pipeline_step(
            graphs, plans, programs, plan.schedule, weights_now, buffers_now, microbatches, loss,
            seeds=range(number * n, (number + 1) * n),
        )  # fmt: skip

    with as_wide_as(captured.graph):
        return _trained(captured, weights, buffers, steps, step)


def verify_pipeline(
    captured: Captured, model: torch.nn.Module, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], plan: Plan
) -> Difference:
    """Compare a plan in stages with one device, all ranks in this process, in double precision.

    The example inputs are one microbatch; the others are the same with their rows rolled, so that they differ.
    """
    against_eager(captured, model, args, kwargs)
    double = promoted(captured)
    weights, buffers = state_of(captured, model)
    weights, buffers = doubled(weights), doubled(buffers)
    first = doubled(inputs_of(captured, args, kwargs, buffers))
    batches = [{k: x.roll(i, 0) if x.ndim else x for k, x in first.items()} for i in range(plan.microbatches)]
    graphs = cut(double.graph, plan.starts)
    plan = plan.of_graphs(double.graph.fingerprint, [stage.graph.fingerprint for stage in graphs])
    reference = Plan(double.graph.fingerprint, "", (one_device(double.graph),), one_stage(plan.microbatches))
    mine = train_pipeline(double, plan, weights, buffers, batches)

    def one(weights_now: _Tensors, shaken: bool = False) -> Trained:
        return train_pipeline(double, reference, weights_now, buffers, batches, shaken=shaken)

    trained = one(weights)
    return beside_rounding(compare("plan", mine, trained), trained, one, weights)


def compare(name: str, mine: Trained, reference: Trained) -> Difference:
    """Return the worst differences of two trainings."""
    loss = max(relative(a, b, 1e3) for a, b in zip(mine.losses, reference.losses, strict=True))
    missing = set(reference.gradients) ^ set(mine.gradients)
    if missing:
        return Difference(name, loss, float("inf"), f"only one has {sorted(missing)[0]}", float("inf"), "")
    gradient, gradient_of = _worst(mine.gradients, reference.gradients)
    weight, weight_of = _worst({**mine.weights, **mine.buffers}, {**reference.weights, **reference.buffers})
    return Difference(name, loss, gradient, gradient_of, weight, weight_of)


def beside_rounding(
    difference: Difference, reference: Trained, one: Callable[[_Tensors, bool], Trained], weights: _Tensors
) -> Difference:
    """Return a difference in double precision, with the effect of rounding on one device where it is above the limit.

    A model can magnify rounding without bound: behind a norm whose inputs vary much less than its ``eps``, gradients
    are larger by ``1 / sqrt(eps)``, and a stack of such norms turns the last digit into the first. No order of
    computation is right there, and a difference tells nothing of the plan. ``one`` trains on one device from given
    weights, as ``reference`` was from ``weights``; its second argument is ``shaken`` of :func:`train`.
    """
    if difference.worst <= LIMITS["float64"]:
        return difference
    moved = compare("", one(last_digits.moved(weights), True), reference)
    return replace(difference, rounding=moved.worst)


def _worst(mine: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest difference and where it is; infinite where only one side has a NaN, or shapes differ."""
    largest = largest_value(v for v in reference.values() if v.is_floating_point() or v.is_complex())
    worst, of = 0.0, ""
    for name, b in reference.items():
        error = relative(mine[name], b, largest)
        if error > worst:
            worst, of = error, name
    return worst, of


def against_eager(
    captured: Captured, model: torch.nn.Module, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> list[Difference]:
    """Return the difference of the captured graph from the model; none where the model cannot run on these inputs.

    Raises:
        CaptureError: they differ; it names the first module whose output does.
    """
    count = len(captured.example.targets) if captured.example is not None else 0
    inputs, targets = tuple(args)[: len(args) - count], tuple(args)[len(args) - count :]
    comparison = compare_with_eager(captured, model, inputs, kwargs, targets, bounded=False)
    if comparison.note:
        return []
    name = "one device / eager"
    return [
        Difference(
            name, comparison.loss, comparison.gradient, comparison.gradient_of, comparison.buffer, comparison.buffer_of,
            limit=comparison.limit,
        )
    ]


def verify(  # noqa: PLR0913  (a comparison has two sides and their options)
    captured: Captured,
    model: torch.nn.Module,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    mesh: Mesh,
    cluster: Cluster,
    *,
    plan: Plan | None = None,
    random_plans: int = 0,
    seed: int = 0,
    float64: bool = True,
    progress: Callable[[str], None] | None = None,
) -> list[Difference]:
    """Compare plans with one device, many ranks in this process.

    The first row is the captured graph on one device against the model in eager mode, in the model's own precision and
    with the same random numbers: loss, gradients, and buffers in the place of weights. Then the optimal plan (or
    ``plan``), then ``random_plans`` random ones, against the graph on one device.

    ``float64`` compares in double precision, so that a row above 1e-9 is a defect and not rounding; ``progress`` is
    called with the name of each row before it is computed.

    Raises:
        CaptureError: the graph is not what the model does; it names the first module that differs.
        AutoparError: the model cannot be planned; the process is already in a process group.
    """
    if captured.graph.loss is None:
        raise CaptureError("the model returns no scalar loss, so there is no gradient to compare; give loss_fn")
    say = progress or (lambda _: None)
    priced = pricer(cluster, mesh)
    weights, buffers = state_of(captured, model)
    inputs = inputs_of(captured, args, kwargs, buffers)
    rows = []
    say("one device against eager")
    single = one_device(captured.graph)
    rows.extend(against_eager(captured, model, args, kwargs))
    if float64:
        captured = promoted(captured)
        weights, buffers, inputs = doubled(weights), doubled(buffers), doubled(inputs)
        single = one_device(captured.graph)
    graph = captured.graph
    reference = train(captured, single, weights, buffers, inputs)

    def beside(name: str, mine: Trained) -> Difference:
        difference = compare(name, mine, reference)
        if not float64:
            return difference
        return beside_rounding(
            difference, reference,
            lambda moved, shaken: train(captured, single, moved, buffers, inputs, shaken=shaken), weights,
        )  # fmt: skip

    stage = plan_graph(graph, cluster, mesh) if plan is None else plan.of_graph(graph.fingerprint).only()
    say("plan")
    rows.append(beside("plan", train(captured, stage, weights, buffers, inputs)))
    rules = rules_of(graph)
    for i in range(random_plans):
        say(f"random plan {seed + i}")
        drawn = random_plan(graph, rules, priced, seed + i, recompute=segments_of(graph, rules, ()))
        rows.append(beside(f"random {seed + i}", train(captured, drawn, weights, buffers, inputs)))
    return rows
