"""A run of an emitted program that counts its collectives and prices its operators from actual shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
import torch.fx
from torch.utils.flop_counter import FlopCounterMode

from autopar.certificate.activations import SavedTensors, Watched
from autopar.lower.program import Program
from autopar.planner.intra_op.building.narrow_prices import LocalProduct, product_seconds
from autopar.plans.memory_decisions import DECISIONS, MemoryDecision
from autopar.rules.attention.ring_attention import QUERIES, RING
from autopar.rules.lowering_helpers.lowering_trial import Begun, Counted
from autopar.rules.notation import Rule
from autopar.rules.operator_work import (
    attention_shape,
    curve_of,
    is_aligned,
    joined_gradients,
    moved_bytes,
    through_memory,
)  # fmt: skip
from autopar.rules.option_names import factor_and_block
from autopar.rules.registry import rules_of
from autopar.torch_private import OpOverload, TorchDispatchMode, group_names, pytree
from autopar.words.exchanges import exchange_written, exchanges_along
from autopar.words.graph import Graph
from autopar.words.load_shares import busiest, uniform
from autopar.words.placements import Step
from autopar.words.shards import local_shape
from autopar.words.trees import PyTree
from cost_models.costs import Costs, OpSeconds, OpWork
from cost_models.host_link import UNUSED, HostCopies, HostLinkUse, Moved, link_use
from cost_models.operator_cost import ALIGNMENT_BYTES
from hardware_profiles import Device
from hardware_profiles.measurements import op_key, tensor_text

Tensors = Sequence[torch.Tensor]
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


class CollectiveCount(TorchDispatchMode):
    """A record of every collective that reaches the dispatcher as ``(group name, kind, bytes)``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: OpOverload, _types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        """Note a collective."""
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


def attention_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], _dropout_p: float = 0.0, is_causal: bool = False,
    *_: object, **__: object,
) -> int:  # fmt: skip
    """Return the multiplications and additions of both products, for shapes (batch, heads, length, dim)."""
    return q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]) * (1 if is_causal else 2)


def expert_flops(rows: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    """Return the flops of one matrix ``weight[e]`` [k n] for every row [k]."""
    return 2 * rows[0] * weight[1] * weight[2]


class CountedCopies:
    """Copies to the memory of the host that run beside the operators of a program, as they are called.

    Attributes:
        host: copies of the device; None if it has no host.
    """

    def __init__(self, host: HostCopies | None) -> None:
        self.host = host
        self.place: dict[str, int] = {}
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.moved: list[Moved] = []
        self.ahead = 0

    def computes(self, op: str, spent: OpSeconds, second: bool) -> None:
        """Note what an operator computes; ``second``: once more, in the backward."""
        if second:
            self.backward[self.place[op]] += spent.forward
            return
        self.place[op] = len(self.forward)
        self.forward.append(spent.forward)
        self.backward.append(spent.total - spent.forward)

    def leaves(self, record: MemoryDecision, n_bytes: int, asking: Sequence[str]) -> None:
        """Note what leaves now; the backward of the last of the ``asking`` operators is the first to ask for it."""
        assert self.host is not None and record.copies is not None
        self.ahead = record.ahead
        asked = max(self.place[op] for op in asking)
        self.moved.append(Moved(*record.copies(self.host, n_bytes), len(self.forward) - 1, asked))

    def use(self) -> HostLinkUse:
        """Return what the copies of a microbatch do on the link, and how long it waits for them."""
        if self.host is None or not self.moved:
            return UNUSED
        return link_use(self.host, self.moved, self.forward, self.backward, self.ahead)


class PricedRun(Watched):
    """A run that prices every operator from its actual shapes, with flops counted by torch."""

    def __init__(
        self, program: Program, graph: Graph, device: Device, flops: FlopCounterMode, costs: Costs, watch: SavedTensors,
        collectives: CollectiveCount, host: HostCopies | None = None,
    ) -> None:  # fmt: skip
        super().__init__(program, watch)
        self.copies = CountedCopies(host)
        self.collectives = collectives
        self.costs = costs
        self.source, self.device, self.flops = graph, device, flops
        self.mesh = program.mesh
        self.seconds: list[float] = []
        self.hot: list[OpSeconds] = []  # of operators that depend on parameters, where they run first
        self.copy_seconds: list[float] = []  # of reshards without a collective
        self.counted = Counted()
        self.beside: dict[int, OpSeconds] = {}  # by the call that messages run beside, what it computes
        self.windows: dict[object, list[OpSeconds]] = {}  # by passage under way, what is computed meanwhile
        self.now_open: list[OpSeconds] | None = None  # that of those which are under way now
        self.computed: dict[object, OpSeconds] = {}  # by exchange in chunks, what is computed between its two ways
        self.trips_of: dict[str, list[object]] = {}  # by operator that is called in parts: its exchanges
        self.read_by_parts: dict[str, list[PyTree]] = {}  # by operator that is called in parts: what they read
        self.flops_of_parts: dict[str, float] = {}
        self.targets = {node.name: node.target for node in graph.nodes}
        self.kinds = {
            node.name: rule for node, rule in zip(graph.nodes, rules_of(graph), strict=True) if rule is not None
        }

    def run_node(self, n: torch.fx.Node) -> PyTree:
        """Run a node, and price it."""
        meta = n.meta.get("autopar") or {}
        before, sent, begun = self._flops_so_far(), len(self.counted.messages), len(self.counted.begun)
        collectives = len(self.collectives.seen)
        if "decision" in meta:
            self._leaves(n, DECISIONS[meta["decision"]])
        result = super().run_node(n)
        trips = [b.trip for b in self.counted.begun[begun:] if b.chunks > 1]
        if "part" in meta:
            self.trips_of.setdefault(meta["part"], []).extend(trips)
            self._part(n, self._flops_so_far() - before)
        if n.op == "call_function" and "node" in meta:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            read = self.read_by_parts.pop(meta["node"], []), args, kwargs
            ins = [t for t in pytree.tree_leaves(read) if isinstance(t, torch.Tensor)]
            outs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            flops = self._flops_so_far() - before + self.flops_of_parts.pop(meta["node"], 0.0)
            spent = self._op(n, ins, outs, flops, lambda: self._key(n, args, kwargs, outs))
            self.computed |= dict.fromkeys([*trips, *self.trips_of.pop(meta["node"], [])], spent)
            self.seconds.append(spent.forward if self.second else spent.total)
            self.copies.computes(meta["node"], spent, self.second)
            if not self.second and self.source.nodes[self.source.index[meta["node"]]].hot:
                self.hot.append(spent)
            self.beside |= {id(m.beside): spent for m in self.counted.messages[sent:] if m.beside is not None}
            if self.now_open is not None and self.counted.under_way:
                self.now_open.append(spent)
        elif n.op == "call_function" and "step" in meta:
            self.copy_seconds.append(self._copy(meta, result))
        self._under_way(self.counted.begun[begun:], len(self.collectives.seen) > collectives)
        return result

    def _leaves(self, n: torch.fx.Node, record: MemoryDecision) -> None:
        """Price what leaves the device for a while, and comes back."""
        whole: PyTree = self.env[n.args[0]]  # type: ignore[index]
        n_bytes = whole.untyped_storage().nbytes()
        if record.copies is None:
            self.copy_seconds.append(record.price(self.costs, self.device, n_bytes))
            return
        backwards: PyTree = n.args[1]
        asking = [taken.args[0].meta["autopar"]["node"] for taken in backwards if self.env[taken].nodes]
        self.copies.leaves(record, n_bytes, asking)

    def _part(self, n: torch.fx.Node, flops: float) -> None:
        """Note the inputs and flops of a part of an operator's lowering.

        Of a list of tensors each part has some, in their places.
        """
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
        """Note what others compute until a collective is waited for, or another one waits behind it."""
        passages = [b.passage for b in begun if not b.backward and b.passage in self.counted.under_way]
        if passages:
            self.now_open = []
            self.windows |= dict.fromkeys(passages, self.now_open)
        elif communicated or not self.counted.under_way:
            self.now_open = None

    def _flops_so_far(self) -> float:
        """Return the flops that torch counted, and those of steps that lowerings leave out."""
        return self.flops.get_total_flops() + self.counted.flops_left_out

    def _key(self, n: torch.fx.Node, args: PyTree, kwargs: Mapping[str, PyTree], outs: Tensors) -> str | None:
        """Return a profile's key for an operator on its actual tensors; None if it communicates inside."""
        meta = n.meta["autopar"]
        rule = self.kinds[meta["node"]]
        cut = any(map(rule.factor_of, meta["options"])) and any(size > 1 for size in self.mesh.sizes)
        if not isinstance(n.target, OpOverload) and (not rule.random or cut):
            return None
        differentiable = any(t.requires_grad for t in outs)

        def text(value: object) -> str | None:
            if not isinstance(value, torch.Tensor):
                return None
            dtype = str(value.dtype).removeprefix("torch.")
            return tensor_text(dtype, value.shape, value.requires_grad and differentiable)

        return op_key(self.targets[meta["node"]], args, kwargs, text)

    def _op(
        self, n: torch.fx.Node, ins: Tensors, outs: Tensors, flops: float, key: Callable[[], str | None]
    ) -> OpSeconds:
        """Return the seconds of an operator on its actual tensors, with the flops that torch counts."""
        rule = self.kinds[n.meta["autopar"]["node"]]
        if rule.random:
            ins = ins[:-1]  # the seed
        gemm, gradients = None, 0
        if rule.kind in ("matmul", "conv"):
            gradients = sum(t.requires_grad for i, t in enumerate(ins) if i not in rule.additive)
            if rule.gemm is not None:  # rows [rows summed], a matrix [summed features] for each group
                gemm = (max(1, len(ins[0]) // max(1, len(ins[1]))), ins[1].shape[2], ins[1].shape[1])
                flops *= self._part_of_rows(n, rule.gemm[3])  # those of groups elsewhere take part in no product
                flops /= self._sent_of_each(n, rule, len(ins[0]))  # nor do rows that are missing to a bound
            elif flops:
                # 2mnk flops, m n outputs, and the second operand's elements give the three sizes
                mn = outs[0].numel()
                k = max(1, round(flops / (2 * mn)))
                features = max(1, round(ins[1].numel() / max(1, k)))
                if "transpose" in self.targets[n.meta["autopar"]["node"]]:
                    features = ins[1].shape[1]
                elif rule.kind == "conv":  # of one group
                    features //= max(1, ins[0].shape[1 - ins[1].dim()] // ins[1].shape[1])
                gemm = (max(1, mn // features), features, k)
        if rule.kind == "attention":
            if "True" in str(n.args[5:6]) + str(n.kwargs.get("is_causal")):
                cut: PyTree = n.kwargs.get("cut") or {}
                whole_rows = QUERIES not in cut and RING not in cut
                q, k, v = (x.shape for x in ins[:3])
                if whole_rows and flops > 0.75 * attention_flops(q, k, v):
                    flops /= 2  # computed step by step, and half of it thrown away
            gemm = attention_shape(flops, ins[0].shape, outs[0].shape)
        if rule.kind not in ("matmul", "conv", "attention"):
            flops = 0.0
        work = self._work(n, rule, ins, outs, flops, gemm, gradients, key)
        use = self.source.nodes[self.source.index[n.meta["autopar"]["node"]]].narrow
        if use is not None:
            local = LocalProduct([t.numel() for t in ins], outs[0].numel(), (0, 0), ins[0].element_size())
            return product_seconds(self.costs, self.device, work, use, local, self.costs.fuses)
        spent = self.costs.op(self.device, work)
        joined = [ins[i] for i in joined_gradients(rule, n.meta["autopar"]["options"]) if ins[i].requires_grad]
        if not joined or not any(t.requires_grad for t in outs):
            return spent
        n_bytes = 2 * sum(t.numel() * t.element_size() for t in joined)
        copied = self.costs.copy(self.device, n_bytes, str(joined[0].dtype).removeprefix("torch."))
        return spent._replace(total=spent.total + copied, weights=spent.weights + copied)

    def _work(
        self, n: torch.fx.Node, rule: Rule, ins: Tensors, outs: Tensors, flops: float,
        gemm: tuple[int, int, int] | None, gradients: int, key: Callable[[], str | None],
    ) -> OpWork:  # fmt: skip
        """Return the work of an operator on its actual tensors."""
        read, written = ([t.numel() * t.element_size() for t in tensors] for tensors in (ins, outs))
        dtype = str(outs[0].dtype).removeprefix("torch.") if outs else "float32"
        differentiable = any(t.requires_grad for t in outs)
        node = self.source.nodes[self.source.index[n.meta["autopar"]["node"]]]
        counted = (True,) * (len(read) + len(written))
        if self.costs.fuses and len(through_memory(self.source, node)) == len(counted):
            counted = through_memory(self.source, node)
        grads = [differentiable and t.requires_grad for t in ins]
        n_bytes, backward_bytes = moved_bytes(rule, read, written, grads, counted)
        inner = [t.shape[-1] for t in (*ins[:2], *outs[:1]) if t.dim()]
        aligned = is_aligned(rule, dtype, {}) and not (
            rule.kind == "matmul" and dtype in ("bfloat16", "float16")
            and any(size % (ALIGNMENT_BYTES // 2) for size in inner if size > 1)
        )  # fmt: skip
        scores_bytes = 0.0
        if rule.kind == "attention" and any(grads[3:]):
            scores_bytes = 4.0 * prod(ins[0].shape[:-1]) * ins[1].shape[-2]
        return OpWork(
            rule.kind, flops, n_bytes, dtype, gemm, differentiable, gradients, 0, key, curve_of(rule), backward_bytes,
            ins[0].shape[-1] if ins and ins[0].dim() else 0, aligned, not all(counted[: len(read)]), scores_bytes,
        )  # fmt: skip

    def _part_of_rows(self, n: torch.fx.Node, groups: str) -> float:
        """Return the share of grouped rows of the busiest rank, where a factor of groups is cut."""
        meta = n.meta["autopar"]
        options = zip(meta["options"], self.mesh, strict=True)
        pieces = prod(size for option, (_, size) in options if factor_and_block(option)[0] == groups)
        load = self.source.nodes[self.source.index[meta["node"]]].load
        return busiest(load or uniform(self.kinds[meta["node"]].sizes[groups]), pieces)[1]

    def _sent_of_each(self, n: torch.fx.Node, rule: Rule, rows: int) -> float:
        """Return how many rows are sent for each that there is: more than one where a bound says their number."""
        options = zip(n.meta["autopar"]["options"], self.mesh, strict=True)
        cut = [axis + exchange_written(o) for o, (axis, size) in options if size > 1 and rule.factor_of(o) in rule.ways]
        exchanges = exchanges_along(cut)
        if not exchanges or not exchanges[-1].bound:
            return 1.0
        ranks = prod(self.mesh.size_of[axis] for axis in exchanges[-1].axes)
        return exchanges[-1].rows_to_each(rows, ranks) * ranks * exchanges[-1].chunks / max(1, rows)

    def _copy(self, meta: dict[str, PyTree], result: torch.Tensor) -> float:
        src, dst = meta["step"]
        step = Step.between(src, dst)
        forward, backward = step.collectives
        if forward is not None or (step.before.is_replicated and step.after.is_replicated):
            return 0.0
        spec = self.source.spec(meta["ref"])
        n_bytes = sum(prod(local_shape(spec.shape, s, self.mesh)) * spec.item_bytes for s in (src, dst))
        seconds = self.costs.copy(self.device, n_bytes, spec.dtype)
        return seconds * (2 if result.requires_grad and backward is None and not self.second else 1)
