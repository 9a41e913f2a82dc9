"""The certificate of a plan: what it claims, recomputed without the solver and without the pricer.

The plan is lowered, and the emitted program is run once on fake tensors (shapes only), forward and backward. A
dispatch mode counts every collective that is really issued, with its group and its bytes, and what is recomputed runs
twice; operators are priced from the local shapes that really occur. From that follow the seconds; from the shapes of
parameters the stored bytes; from what autograd sees, the activations (:mod:`autopar.certificate.activations`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import spmd_types as spmd
import torch
import torch.fx
from torch.utils.flop_counter import FlopCounterMode

from autopar.certificate.activations import SavedTensors, Watched, watch_of
from autopar.lower.emit import lower, used_shape
from autopar.lower.program import Program
from autopar.lower.typecheck import typecheck
from autopar.plans.memory_decisions import DECISIONS
from autopar.plans.plan import StagePlan
from autopar.plans.prices import Price
from autopar.rules.attention.ring_attention import QUERIES, RING
from autopar.rules.function import PREFIX
from autopar.rules.lowerings.lowering_trial import Begun, Counted, ToOther, as_last_rank
from autopar.rules.option_names import factor_and_block
from autopar.rules.proving.many_ranks import fake_world
from autopar.rules.registry import rules_of
from autopar.torch_private import FakeTensorMode, OpOverload, TorchDispatchMode, group_names, pytree
from autopar.words.graph import ITEM_BYTES, Graph
from autopar.words.load_shares import busiest, uniform
from autopar.words.pieces import elements_moved, local_shape
from autopar.words.placements import Step
from cost_models import optimizer_state_bytes
from cost_models.costs import Axis, Costs, OpSeconds, OpWork, costs_of
from hardware_profiles import Cluster, Device
from hardware_profiles.measurements import op_key, tensor_text

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
}


@dataclass
class Report:
    """What a check found.

    Attributes:
        price: what is recounted of a plan's price: seconds and collectives from the program, parameters, gradients and
            optimizer state from the stored shapes, and what is kept, of as many microbatches as are in flight and while
            the largest segment runs again, by storage under autograd's own hooks. Not recounted is what passes.
        kept_bytes: what one microbatch keeps from its forward to its backward.
        collectives: how often each ``(axis, kind)`` is made by the forward and backward, parameters included.
        failures: claims of the plan that do not hold; empty for a certified plan.
    """

    price: Price = field(default_factory=Price)
    kept_bytes: int = 0
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures


class _Count(TorchDispatchMode):
    """Notes every collective that reaches the dispatcher as ``(group name, kind, bytes)``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")
        if "c10d" in name[0] and name[1] in COLLECTIVES:
            kind = COLLECTIVES[name[1]]
            if name[1] == "alltoall_":  # lists of pieces: what a rank sends is the second
                n_bytes = sum(t.numel() * t.element_size() for t in args[1])
            else:
                tensors = [t for t in pytree.tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
                n_bytes = max(t.numel() * t.element_size() for t in tensors)
            given = pytree.tree_leaves((args, kwargs))
            group = next((a for a in given if isinstance(a, str) and a in group_names()), "")
            if not group:
                holder = next((a for a in given if isinstance(a, torch.ScriptObject)), None)
                group = torch.distributed.ProcessGroup.unbox(holder).group_name if holder is not None else ""
            self.seen.append((group, kind, n_bytes))
        return out


def check(plan: StagePlan, graph: Graph, cluster: Cluster, *, tolerance: float = 0.01, types: bool = False) -> Report:
    """Certify a plan. The process must not be in a process group: a fake one is made.

    Args:
        graph: of the stage.
        tolerance: how far the plan's seconds may be from the recounted ones, as a share.
        types: have spmd-types check the program too.

    Raises:
        PlanError: an operator's types do not fit.
        MeshError: this process already belongs to a process group.
    """
    program = lower(graph, plan)
    report = Report()
    costs, device = costs_of(cluster), cluster.slowest(plan.devices)
    axes = costs.axes(plan.mesh.size_of, plan.devices)
    with fake_world(plan.mesh) as mesh:
        names = {str(mesh.get_group(name).group_name): name for name in plan.mesh.names}
        if types:
            typecheck(program)
        _recount(program, plan, graph, device, costs, axes, names, report)
    parameter_bytes, gradient_bytes, optimizer_bytes = _stored(plan, graph)
    report.price = replace(
        report.price, parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes, optimizer_bytes=optimizer_bytes,
        parameter_seconds=_parameters(plan, graph, axes, costs.bucket_bytes, report),
    )  # fmt: skip
    _claims(plan, report, tolerance)
    _activations(plan, graph, report)
    return report


def _recount(
    program: Program,
    plan: StagePlan,
    graph: Graph,
    device: Device,
    costs: Costs,
    axes: Mapping[str, Axis],
    names: Mapping[str, str],
    report: Report,
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), spmd.no_typecheck():
        values = []
        for slot in program.slots:
            dtype = getattr(torch, slot.dtype)
            value = torch.empty(used_shape(slot, program.mesh), dtype=dtype)
            values.append(value.requires_grad_(slot.needs_grad))
        counter = _Count()
        # the attention of this process's device is not in torch's table
        formulas = {
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
            torch.ops.autopar.expert_linear: _expert_flops,
            torch.ops.autopar.expert_linear_in_order: _expert_flops,
        }
        flops = FlopCounterMode(display=False, custom_mapping=formulas)
        watch = watch_of(program, values, graph.arriving)
        pricer = _Priced(program, graph, device, flops, costs, watch, counter)
        with counter, flops, as_last_rank(flops.get_total_flops) as pricer.counted:
            with watch.on():
                flat = pricer.run(*values)
            report.kept_bytes = sum(watch.kept().values())
            ends = [flat[graph.loss]] if graph.loss is not None else flat[: graph.sends]
            wanting = [value for value in ends if isinstance(value, torch.Tensor) and value.requires_grad]
            if wanting:
                torch.autograd.backward(wanting, [torch.ones_like(value) for value in wanting])
    moved = sum(pricer.copy_seconds)
    for group, kind, n_bytes in counter.seen:
        axis = names[group]
        report.collectives[axis, kind] += 1
        moved += axes[axis].seconds(kind, n_bytes)
    moved += _message_seconds(pricer.counted.messages, pricer.beside, axes)
    moved -= _hidden_seconds(pricer.counted.begun, pricer.windows, axes)
    for message in pricer.counted.messages:
        report.collectives[message.axis, "send_recv"] += message.times
    report.price = Price(
        plan.microbatches * sum(pricer.seconds), plan.microbatches * moved,
        activation_bytes=plan.in_flight * report.kept_bytes + pricer.again_bytes, again_bytes=pricer.again_bytes,
    )  # fmt: skip


def _message_seconds(
    messages: Sequence[ToOther], beside: Mapping[int, OpSeconds], axes: Mapping[str, Axis]
) -> float:
    """What messages add to a step: all of those that are waited for, of others what their call's compute is shorter.

    Args:
        beside: by the identity of a call, what it computes.
    """
    seconds, hidden = 0.0, dict[tuple[int, bool], float]()
    for message in messages:
        spent = message.times * axes[message.axis].seconds("send_recv", message.n_bytes)
        if message.beside is None:
            seconds += spent
        else:
            place = (id(message.beside), message.backward)
            hidden[place] = hidden.get(place, 0.0) + spent
    for (call, backward), spent in hidden.items():
        compute = beside[call].total - beside[call].forward if backward else beside[call].forward
        seconds += max(0.0, spent - compute)
    return seconds


def _hidden_seconds(
    begun: Sequence[Begun], windows: Mapping[object, list[OpSeconds]], axes: Mapping[str, Axis]
) -> float:
    """What collectives add less to a step because others compute before they are waited for: the shorter of the two,
    of all those together that were under way at the same time.

    Args:
        windows: by passage, what was computed in the forward between its beginning and its end, in one list for those
            that began together; the backward goes through it in reverse order.
    """
    waits: dict[tuple[int, bool], float] = {}
    computed = {id(window): window for window in windows.values()}
    for passage, axis, n_bytes, backward in begun:
        if passage in windows:
            place = id(windows[passage]), backward
            waits[place] = waits.get(place, 0.0) + axes[axis].seconds("all_to_all", n_bytes)
    return sum(
        min(spent, sum(op.total - op.forward if backward else op.forward for op in computed[window]))
        for (window, backward), spent in waits.items()
    )


def _attention_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], dropout_p: float = 0.0, is_causal: bool = False,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Multiplications and additions of both products, for shapes (batch, heads, length, dim)."""
    return q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]) * (1 if is_causal else 2)


def _expert_flops(rows: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """Of one matrix ``weight[e]`` [k n] for every row [k]."""
    return 2 * rows[0] * weight[1] * weight[2]


class _Priced(Watched):
    """Runs a program and prices every operator from the shapes that it really gets, flops counted by torch."""

    def __init__(
        self, program: Program, graph: Graph, device: Device, flops: FlopCounterMode, costs: Costs, watch: SavedTensors,
        collectives: _Count,
    ) -> None:  # fmt: skip
        super().__init__(program, watch)
        self.collectives = collectives
        self.costs = costs
        self.source, self.device, self.flops = graph, device, flops
        self.mesh = program.mesh
        self.seconds: list[float] = []
        self.copy_seconds: list[float] = []  # of reshards without a collective
        self.counted = Counted()
        self.beside: dict[int, OpSeconds] = {}  # by the call that messages run beside, what it computes
        self.windows: dict[object, list[OpSeconds]] = {}  # by passage under way, what is computed meanwhile
        self.now_open: list[OpSeconds] | None = None  # that of those which are under way now
        self.read_by_parts: dict[str, list[Any]] = {}  # by operator that is called in parts: what they read
        self.flops_of_parts: dict[str, float] = {}
        self.targets = {node.name: node.target for node in graph.nodes}
        self.kinds = {
            node.name: rule for node, rule in zip(graph.nodes, rules_of(graph), strict=True) if rule is not None
        }

    def run_node(self, n: torch.fx.Node) -> Any:
        meta = n.meta.get("autopar") or {}
        before, sent, begun = self._flops_so_far(), len(self.counted.messages), len(self.counted.begun)
        collectives = len(self.collectives.seen)
        if "decision" in meta:  # what leaves the device for a while, and comes back
            whole: Any = self.env[n.args[0]]  # type: ignore[index]
            n_bytes = whole.untyped_storage().nbytes()
            self.copy_seconds.append(DECISIONS[meta["decision"]].price(self.costs, self.device, n_bytes))
        result = super().run_node(n)
        if "part" in meta:
            self._part(n, self._flops_so_far() - before)
        if n.op == "call_function" and "node" in meta:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            read = self.read_by_parts.pop(meta["node"], []), args, kwargs
            ins = [t for t in pytree.tree_leaves(read) if isinstance(t, torch.Tensor)]
            outs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            flops = self._flops_so_far() - before + self.flops_of_parts.pop(meta["node"], 0.0)
            spent = self._op(n, ins, outs, flops, lambda: self._key(n, args, kwargs, outs))
            self.seconds.append(spent.forward if self.second else spent.total)
            self.beside |= {id(m.beside): spent for m in self.counted.messages[sent:] if m.beside is not None}
            if self.now_open is not None and self.counted.under_way:
                self.now_open.append(spent)
        elif n.op == "call_function" and "step" in meta:
            self.copy_seconds.append(self._copy(meta, result))
        self._under_way(self.counted.begun[begun:], len(self.collectives.seen) > collectives)
        return result

    def _part(self, n: torch.fx.Node, flops: float) -> None:
        """Remember what a part of an operator's lowering reads, and its multiplications. Of a list of tensors each part
        has some, in their places."""
        name = n.meta["autopar"]["part"]
        self.flops_of_parts[name] = self.flops_of_parts.get(name, 0.0) + flops
        args, _ = self.fetch_args_kwargs_from_env(n)
        listed = next(value for value in args if isinstance(value, (list, tuple)))
        before = self.read_by_parts.get(name)
        if before is None:
            others = [value for value in args if isinstance(value, torch.Tensor)]
            self.read_by_parts[name] = [*listed, *others]
        else:
            before[: len(listed)] = [a if b is None else b for a, b in zip(before, listed, strict=False)]

    def _under_way(self, begun: Sequence[Begun], communicated: bool) -> None:
        """Note what goes on while others compute: until it is waited for, or another collective waits behind it."""
        passages = [b.passage for b in begun if not b.backward and b.passage in self.counted.under_way]
        if passages:
            self.now_open = []
            self.windows |= dict.fromkeys(passages, self.now_open)
        elif communicated or not self.counted.under_way:
            self.now_open = None

    def _flops_so_far(self) -> float:
        """Those that torch counted, and those of steps that lowerings leave out."""
        return self.flops.get_total_flops() + self.counted.flops_left_out

    def _key(self, n: torch.fx.Node, args: Any, kwargs: Mapping[str, Any], outs: list[Any]) -> str | None:
        """By what a profile knows an operator on the tensors that it really gets; None if it communicates inside."""
        meta = n.meta["autopar"]
        rule = self.kinds[meta["node"]]
        cut = any(map(rule.factor_of, meta["options"])) and any(size > 1 for size in self.mesh.sizes)
        if not isinstance(n.target, OpOverload) and (not rule.random or cut):
            return None
        differentiable = any(t.requires_grad for t in outs)

        def text(value: Any) -> str | None:
            if not isinstance(value, torch.Tensor):
                return None
            dtype = str(value.dtype).removeprefix("torch.")
            return tensor_text(dtype, value.shape, value.requires_grad and differentiable)

        return op_key(self.targets[meta["node"]], args, kwargs, text)

    def _op(
        self, n: torch.fx.Node, ins: list[Any], outs: list[Any], flops: float, key: Callable[[], str | None]
    ) -> OpSeconds:
        """Seconds of an operator on the tensors that it really gets, with the multiplications that torch counts."""
        rule = self.kinds[n.meta["autopar"]["node"]]
        if rule.random:
            ins = ins[:-1]  # the seed
        n_bytes = sum(t.numel() * t.element_size() for t in (*ins, *outs))
        gemm, gradients = None, 0
        if rule.kind in ("matmul", "conv"):
            gradients = sum(t.requires_grad for i, t in enumerate(ins) if i not in rule.additive)
            if rule.gemm is not None:  # rows [rows summed], a matrix [summed features] for each group
                gemm = (max(1, len(ins[0]) // max(1, len(ins[1]))), ins[1].shape[2], ins[1].shape[1])
                flops *= self._part_of_rows(n, rule.gemm[3])  # those of groups elsewhere take part in no product
            elif flops:
                # 2mnk flops, m n outputs, and the second operand's elements give the three sizes
                mn = outs[0].numel()
                k = max(1, round(flops / (2 * mn)))
                groups = max(1, round(ins[1].numel() / max(1, k)))
                gemm = (max(1, mn // groups), groups, k)
        if rule.kind == "attention" and "True" in str(n.args[5:6]) + str(n.kwargs.get("is_causal")):
            cut: Any = n.kwargs.get("cut") or {}
            whole_rows = QUERIES not in cut and RING not in cut
            if whole_rows and flops > 0.75 * _attention_flops(*(x.shape for x in ins[:3])):
                flops /= 2  # computed step by step, and half of it thrown away
        if rule.kind not in ("matmul", "conv", "attention"):
            flops = 0.0
        dtype = str(outs[0].dtype).removeprefix("torch.") if outs else "float32"
        differentiable = any(t.requires_grad for t in outs)
        work = OpWork(rule.kind, flops, n_bytes, dtype, gemm, differentiable, gradients, 0, key)
        return self.costs.op(self.device, work)

    def _part_of_rows(self, n: torch.fx.Node, groups: str) -> float:
        """Of the rows of grouped products the part of the rank that has most, where a factor of groups is cut."""
        meta = n.meta["autopar"]
        options = zip(meta["options"], self.mesh, strict=True)
        pieces = prod(size for option, (_, size) in options if factor_and_block(option)[0] == groups)
        load = self.source.nodes[self.source.index[meta["node"]]].load
        return busiest(load or uniform(self.kinds[meta["node"]].sizes[groups]), pieces)[1]

    def _copy(self, meta: dict[str, Any], result: torch.Tensor) -> float:
        src, dst = meta["step"]
        step = Step.between(src, dst)
        forward, backward = step.collectives
        if forward is not None or (step.before.is_whole and step.after.is_whole):
            return 0.0
        spec = self.source.spec(meta["ref"])
        n_bytes = sum(prod(local_shape(spec.shape, s, self.mesh)) * spec.item_bytes for s in (src, dst))
        seconds = self.costs.copy(self.device, n_bytes, spec.dtype)
        return seconds * (2 if result.requires_grad and backward is None and not self.second else 1)


def _stored(plan: StagePlan, graph: Graph) -> tuple[int, int, int]:
    """Bytes of parameters, their gradients and the optimizer's state on one rank."""
    parameters = gradients = optimizer = 0
    for _, node in graph.of_kind("param"):
        n = prod(local_shape(node.out.shape, plan.params[node.target].stored, plan.mesh))
        each = graph.stored(node).item_bytes
        parameters += n * each
        if node.needs_grad:
            gradients += n * each
            optimizer += optimizer_state_bytes(plan.optimizer, n, graph.moments(node).item_bytes, 1)
    return parameters, gradients, optimizer


def _parameters(
    plan: StagePlan, graph: Graph, axes: Mapping[str, Axis], bucket_bytes: float, report: Report
) -> float:  # fmt: skip
    """Seconds of the collectives between stored and used placements, which the report is told of: how often each is
    made in a step follows from its lifetime."""
    seconds = 0.0
    for _, node in graph.of_kind("param"):
        choice, state = plan.params[node.target], plan.params[node.target].stored
        for a in range(len(plan.mesh) - 1, -1, -1):
            name, size = plan.mesh[a]
            if state[a] == choice.used[a] or size == 1:
                continue
            step = Step(a, state, state.changed(a, choice.used[a]))
            forward, backward = step.collectives
            state = step.dst
            moved = elements_moved(node.out.shape, step.src, step.dst, plan.mesh)
            policy = graph.precision
            back = ITEM_BYTES[policy.summed(node.out.dtype)] if policy is not None else node.out.item_bytes
            often = plan.microbatches if choice.lifetime == "use" else 1
            forth = often * (2 if choice.lifetime == "use" and node.needs_grad else 1)
            for kind, times, each in ((forward, forth, node.out.item_bytes),
                                      (backward if node.needs_grad else None, often, back)):  # fmt: skip
                if kind is not None:
                    n_bytes = moved * each
                    whole = max(n_bytes, bucket_bytes)
                    seconds += times * axes[name].seconds(kind, whole) * n_bytes / whole
                    report.collectives[name, f"parameter {kind}"] += times
    return seconds


def _claims(plan: StagePlan, report: Report, tolerance: float) -> None:
    counted, said = report.price, plan.price
    for what in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        mine, theirs = getattr(counted, what), getattr(said, what)
        if mine != theirs:
            report.failures.append(f"{what}: the plan says {theirs}, its stored shapes give {mine}")
    if abs(counted.seconds - said.seconds) > tolerance * max(counted.seconds, said.seconds):
        parts = ", ".join(
            f"{what} {getattr(said, f'{what}_seconds'):.4g} and {getattr(counted, f'{what}_seconds'):.4g}"
            for what in ("compute", "activation", "parameter")
        )
        report.failures.append(
            f"seconds: the plan says {said.seconds:.6g}, the emitted program {counted.seconds:.6g} ({parts})"
        )


def _activations(plan: StagePlan, graph: Graph, report: Report) -> None:
    """What autograd keeps, to the byte. Of a user's own function nobody knows it but the rule that the user gives."""
    if any(node.target.startswith(PREFIX) for node in graph.nodes):
        return
    for what, mine, theirs in (
        ("of a microbatch", report.kept_bytes, plan.kept_bytes),
        ("while a segment runs again", report.price.again_bytes, plan.price.again_bytes),
    ):
        if mine != theirs:
            report.failures.append(
                f"activation bytes {what}: the plan says {theirs}, autograd holds {mine} in the emitted program"
            )
