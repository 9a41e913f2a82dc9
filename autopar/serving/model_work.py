"""The work of a step from a captured forward and its cuts: nothing is known by a model's name.

Products, attention and experts are found by their operators, exchanges by what the cuts need. What is in blocks that
repeat is apart from what is there once, so that it can be divided among pipeline stages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TypeVar

from autopar.planner.intra_op.building.space import fitting_strategy
from autopar.plans.plan import StagePlan
from autopar.rules.experts.expert_block import BLOCK
from autopar.rules.experts.experts import EXPERTS
from autopar.rules.local_calls import cuts_of
from autopar.rules.strategy import Strategy
from autopar.serving.attention_calls import AttentionCall, attention_calls, rules_by_number
from autopar.serving.forward_capture import Forward
from autopar.serving.product_facts import (
    StoredProduct,
    expert_matrices,
    of_tokens,
    only_to_outputs,
    parameters_of,
    sizes_of,
    unmoved,
)
from autopar.serving.records import Formats
from autopar.serving.row_kernels import row_kernels
from autopar.words.graph import Node, Ref
from autopar.words.placements import State, Step, whole_state
from autopar.words.shards import local_shape
from cost_models.serving.work import (
    FORMAT_BYTES,
    REQUESTS,
    TOKENS,
    Attention,
    Experts,
    MatrixProduct,
    RowWork,
    StepExchange,
    StepWork,
)

NUMBERED = re.compile(r"^(.*?\.)?\d+(\.|$)")
"""Paths of modules in a container: of blocks."""
CHOICES = ("topk", "argmax", "sort")
"""Operators by which tokens choose their experts."""
PLAIN = "bf16"
"""Format of what a policy leaves as it is: embeddings, head, norms, biases, routers; and of rows."""
Item = TypeVar("Item", MatrixProduct, Attention, Experts, StepExchange)


@dataclass(frozen=True)
class ModelWork:
    """Work of a step on one device, all blocks on it.

    Attributes:
        blocks: the work in blocks that repeat.
        once: the work outside of them: embedding, last norm, head.
        combined: of the exchanges in blocks, those that add up what experts on different devices give.
        experts: the experts as they are without cuts; ``blocks`` has none, a layout says where they are.
        expert_bytes: bytes of one device's experts if it has all.
    """

    blocks: StepWork
    once: StepWork
    combined: tuple[StepExchange, ...] = ()
    experts: tuple[Experts, ...] = ()
    expert_bytes: float = 0.0


class WorkFinder:
    """Work of one forward under different cuts.

    Args:
        forward: the captured forward.
        windows: for each attention in order, how many tokens back it looks; None for all.
        formats: the formats of numbers.
        merges: the engine computes products of the same rows as one.
    """

    def __init__(self, forward: Forward, windows: list[int | None], formats: Formats, merges: bool = True) -> None:
        self.forward, self.graph, self.windows = forward, forward.graph, windows
        self.formats, self.merges = formats, merges
        self.rules = rules_by_number(self.graph)
        self.calls = attention_calls(self.graph)
        self.kernels = row_kernels(self.graph, forward.tokens)
        self.products = list(self._products())
        self.experts = [i for i, node in self.graph.of_kind("op") if node.target in (BLOCK, EXPERTS)]
        self.stored = self._stored_formats()

    def of(self, plan: StagePlan) -> ModelWork:
        """Return the work of one device under a plan of the forward's graph."""
        return _Local(self, plan).work()

    def after(self, call: AttentionCall) -> list[StoredProduct]:
        """Return the products that take the result of an attention, in another shape at most."""
        return [product for product in self.products if product.source == call.node]

    @cached_property
    def before_attention(self) -> frozenset[int]:
        """Operators between products and attention: engines store weights so that nothing is exchanged there."""
        found: set[int] = set()
        todo = [ref.node for call in self.calls for ref in (call.query, call.key, call.value)]
        while todo:
            i = todo.pop()
            if i not in found and i in self.graph.from_inputs and self.graph.nodes[i].kind == "op":
                found.add(i)
                rule = self.rules[i]
                if rule is None or rule.kind not in ("matmul", "conv", "attention"):
                    todo += [ref.node for ref in self.graph.nodes[i].refs]
        return frozenset(found)

    @cached_property
    def after_experts(self) -> frozenset[int]:
        """Operators between experts and the next products."""
        found = set(self.experts)
        for i, node in self.graph.of_kind("op"):
            rule = self.rules[i]
            if rule is not None and rule.kind not in ("matmul", "conv", "attention"):
                found |= {i} if any(ref.node in found for ref in node.refs) else set()
        return frozenset(found)

    def chained(self, product: StoredProduct) -> bool:
        """Return whether a product takes what is computed element by element of products of the same rows."""
        sources: set[int] = set()  # what these take: a residual is the sum of products of different rows
        todo, seen, makers = [product.source], set[int](), {p.node: p.source for p in self.products}
        while todo:
            i = todo.pop()
            if i in makers:
                sources.add(makers[i])
                continue
            rule = self.rules[i]
            if rule is None or rule.kind not in ("none", "pointwise"):
                return False  # a norm, attention, an embedding
            before = {ref.node for ref in self.graph.nodes[i].refs if ref.node in self.graph.from_inputs} - seen
            todo += before
            seen |= before
        return len(sources) == 1

    def _products(self) -> Iterator[StoredProduct]:
        graph = self.graph
        last = only_to_outputs(graph, self.rules)
        for i, node in graph.of_kind("op"):
            rule = self.rules[i]
            if rule is None or rule.kind not in ("matmul", "conv") or node.target in (BLOCK, EXPERTS):
                continue
            activations = [k for k, ref in enumerate(node.refs[:3]) if ref.node in graph.from_inputs]
            weights = [
                k for k, ref in enumerate(node.refs) if ref.node not in graph.from_inputs
                and len(graph.spec(ref).shape) > 1
            ]  # fmt: skip
            if len(activations) != 1 or not weights:
                continue
            names = tuple(parameters_of(graph, node.refs[weights[0]]))
            if not names:
                continue
            head, router = i in last, self.chooses(i)
            plain = head or router or not NUMBERED.match(names[0])
            source = unmoved(graph, self.rules, node.refs[activations[0]])
            taken = graph.spec(node.refs[activations[0]])
            rows = REQUESTS if head or not of_tokens(taken, self.forward.tokens) else TOKENS
            form = PLAIN if plain else self.formats.weights
            yield StoredProduct(i, source, activations[0], weights[0], names, form, rows)

    def chooses(self, i: int) -> bool:
        """Return whether tokens choose their experts by a product's result."""
        todo, seen = [i], set[int]()
        while todo:
            for out in range(len(self.graph.nodes[todo[-1]].outs)):
                for reader, _ in self.graph.consumers.get(Ref(todo[-1], out), ()):
                    if self.graph.nodes[reader].target.split(".")[1] in CHOICES:
                        return True
                    rule = self.rules[reader]
                    if reader not in seen and rule is not None and rule.kind in ("none", "pointwise", "reduce"):
                        seen.add(reader)
                        todo.insert(0, reader)
            todo.pop()
        return False

    def _stored_formats(self) -> dict[str, str]:
        """Return the format of each parameter that the policy changes, by name."""
        stored = {name: product.format for product in self.products for name in product.parameters}
        for i in self.experts:
            for ref in self.graph.nodes[i].refs:
                if ref.node not in self.graph.from_inputs and len(self.graph.spec(ref).shape) > 2:
                    stored |= dict.fromkeys(parameters_of(self.graph, ref), self.formats.weights)
        return {name: form for name, form in stored.items() if form != PLAIN}


class _Local:
    """Work under one plan."""

    def __init__(self, finder: WorkFinder, plan: StagePlan) -> None:
        self.finder, self.plan, self.graph = finder, plan, finder.graph
        self.forward, self.tokens, self.mesh = finder.forward, finder.forward.tokens, plan.mesh
        self.strategies: dict[int, Strategy] = {}
        for i, node in self.graph.of_kind("op"):
            rule = finder.rules[i]
            if rule is not None and node.name in plan.ops:
                strategy = fitting_strategy(self.graph, node, rule, plan.mesh, plan.ops[node.name])
                if strategy is not None:
                    self.strategies[i] = strategy

    def work(self) -> ModelWork:
        """Return all of it."""
        experts = list(self._experts())
        exchanges = list(self._exchanges())
        expert_names = {name for i in self.finder.experts for ref in self.graph.nodes[i].refs
                        for name in parameters_of(self.graph, ref)}  # fmt: skip
        attentions = list(self._attentions())
        full, windowed = self._cache_bytes(attentions)
        products = self._products()
        parts = []
        for inside in (True, False):
            parts.append(StepWork(
                tuple(p for where, p in products if where is inside),
                _counted(a for path, a in attentions if _in_block(path) is inside), (), self._rows(inside),
                _counted(e for path, e, _ in exchanges if _in_block(path) is inside),
                weight_bytes=self._weight_bytes(inside, expert_names),
            ))  # fmt: skip
        blocks = replace(
            parts[0], blocks=sum(a.count for _, a in attentions), cache_bytes_per_token=full,
            window_cache_bytes=windowed,
        )  # fmt: skip
        return ModelWork(
            blocks, replace(parts[1], vocabulary=self._vocabulary(), exchanges=parts[1].exchanges + self._scores()),
            _counted(e for _, e, combines in exchanges if combines), _counted(e for _, e in experts),
            sum(self._bytes_of(name, None) for name in expert_names),
        )  # fmt: skip

    # -- sizes

    def _state(self, ref: Ref) -> State:
        """Return the placement that a tensor is made in."""
        node = self.graph.nodes[ref.node]
        if node.kind == "param":
            return self.plan.params[node.target].used
        strategy = self.strategies.get(ref.node)
        if strategy is None:
            return whole_state(self.mesh)
        tensors = [k for k, spec in enumerate(node.outs) if spec is not None]
        return strategy.outs[tensors.index(ref.out)]

    def _elements(self, ref: Ref) -> int:
        return prod(local_shape(self.graph.spec(ref).shape, self._state(ref), self.mesh))

    def _times(self, path: str) -> int:
        return self.forward.times_of(path)

    # -- parts

    def _products(self) -> list[tuple[bool, MatrixProduct]]:
        """Return products with ``True`` for those in blocks; those of the same rows are one where the engine merges."""
        together: dict[tuple[bool, object], MatrixProduct] = {}
        counts: Counter[tuple[bool, MatrixProduct]] = Counter()
        for product in self.finder.products:
            node, rule = self.graph.nodes[product.node], self.finder.rules[product.node]
            strategy = self.strategies[product.node]
            assert rule is not None
            m, n, k = sizes_of(rule, product, cuts_of(rule, strategy.options, self.mesh)[0])
            times = max(1, round(m / self.tokens)) if product.rows == TOKENS else 1
            activations = self.finder.formats.activations if product.format != PLAIN else PLAIN
            made = MatrixProduct(n, k, product.format, activations, times * self._times(node.module), product.rows)
            alone = not self.finder.merges or self.finder.chooses(product.node)
            key = product.node if alone else (product.source, k, made.weights, made.rows, made.count)
            before = together.get((_in_block(node.module), key))
            together[_in_block(node.module), key] = made if before is None else replace(made, n=before.n + n)
        for (inside, _), made in together.items():
            counts[inside, replace(made, count=1)] += made.count
        return [(inside, replace(made, count=count)) for (inside, made), count in counts.items()]

    def _attentions(self) -> Iterator[tuple[str, Attention]]:
        for call, window in zip(self.finder.calls, self.finder.windows, strict=True):
            node = self.graph.nodes[call.node]
            key_size, value_size = (self.graph.spec(ref).shape[-1] for ref in (call.query, call.value))
            heads = prod(self.graph.spec(call.query).shape[:-2])
            kept = [self.graph.spec(ref).n_elements // self.tokens for ref in call.kept]
            expanded = (key_size, value_size) if call.latent else None
            if call.latent:
                kv_heads, value_size = 1, max(kept)
                key_size = sum(kept) - value_size
            else:
                whole = round(sum(kept) / (key_size + value_size))
                kv_heads = max(1, whole // self.mesh.n_devices)
            heads //= self.mesh.n_devices
            yield node.module, Attention(
                heads, kv_heads, key_size, value_size, window, self.finder.formats.cache, True,
                self._times(node.module), expanded,
            )  # fmt: skip

    def _experts(self) -> Iterator[tuple[str, Experts]]:
        for i in self.finder.experts:
            node = self.graph.nodes[i]
            matrices = expert_matrices(self.graph, i)
            rows = self.graph.spec(node.refs[0]).shape[0]
            total = matrices[0][0]
            form = self.finder.formats.weights
            yield node.module, Experts(
                total, total, max(1, round(rows / self.tokens)), tuple((n, k) for _, k, n in matrices), form,
                self.finder.formats.activations, 1, self._times(node.module),
            )  # fmt: skip

    def _rows(self, inside: bool) -> RowWork:
        n_bytes, kernels = 0.0, 0
        for kernel in self.finder.kernels:
            if _in_block(kernel.path) is inside:
                times = self._times(kernel.path)
                n_bytes += times * sum(self._row_bytes(ref) for ref in kernel.moved)
                kernels += times
        return RowWork(n_bytes / self.tokens, kernels)

    def _row_bytes(self, ref: Ref) -> float:
        return self._elements(ref) * min(FORMAT_BYTES[PLAIN], self.graph.spec(ref).item_bytes)

    def _exchanges(self) -> Iterator[tuple[str, StepExchange, bool]]:
        """Yield the module of each exchange, itself, and whether it adds up results of experts."""
        last = only_to_outputs(self.graph, self.finder.rules)
        for key, steps in self.plan.reshard_paths.items():
            name, _, out = key.partition("#")
            ref = Ref(self.graph.index[name], int(out or 0))
            node, spec = self.graph.nodes[ref.node], self.graph.spec(ref)
            if node.kind == "param" or (self.finder.merges and ref.node in self.finder.before_attention):
                continue
            of_each = of_tokens(spec, self.tokens)
            rows = REQUESTS if ref.node in last or not of_each else TOKENS
            item_bytes = min(FORMAT_BYTES[PLAIN], spec.item_bytes)
            kinds: dict[str, list[int]] = {}
            for src, dst in steps:
                step = Step.between(src, dst)
                kind = step.collectives[0]
                if kind is not None:
                    kinds.setdefault(kind, []).append(step.axis)
            combines = self._combines(ref)
            whole = spec.n_elements * item_bytes / (self.tokens if of_each else 1)
            if combines:  # engines add up what the experts of a token give before they exchange it
                whole = spec.shape[-1] * item_bytes
            times = self._times(node.module)
            if combines:
                yield node.module, StepExchange("all_reduce", whole, self.mesh.n_devices, 1, times, rows), True
                continue
            if ref.node in self.finder.after_experts:
                continue  # the rest of the way of their sum, which engines exchange once
            for kind, axes in kinds.items():
                group = prod(self.mesh.size(axis) for axis in axes)
                stride = self.mesh.inner(max(axes)).n_devices // self.mesh.size(max(axes))
                yield node.module, StepExchange(kind, whole, group, stride, times, rows), False

    def _combines(self, ref: Ref) -> bool:
        """Return whether a pending sum has results of experts in it."""
        todo, seen = [ref], {ref}
        while todo:
            at = todo.pop()
            if at.node in self.finder.experts:
                return True
            for before in self.graph.nodes[at.node].refs:
                if before not in seen and any(p.is_pending for p in self._state(before)):
                    seen.add(before)
                    todo.append(before)
        return False

    # -- bytes

    def _bytes_of(self, name: str, state: State | None) -> float:
        """Return the bytes of all parameters that one stands for, on one device; None for without cuts."""
        node = self._parameter(name)
        shape = node.out.shape if state is None else local_shape(node.out.shape, state, self.mesh)
        return prod(shape) * FORMAT_BYTES[self.finder.stored.get(name, PLAIN)] * self._times(name)

    def _parameter(self, name: str) -> Node:
        return next(node for _, node in self.graph.of_kind("param") if node.target == name)

    def _weight_bytes(self, inside: bool, others: set[str]) -> float:
        return sum(
            self._bytes_of(node.target, self.plan.params[node.target].stored)
            for _, node in self.graph.of_kind("param")
            if node.target not in others and _in_block(node.target) is inside
        )

    def _cache_bytes(self, attentions: Iterable[tuple[str, Attention]]) -> tuple[float, float]:
        """Return bytes of a token in layers without a window, and of a request in those with one."""
        full = windowed = 0.0
        for _, a in attentions:
            each = a.count * a.kv_heads * (a.key_size + a.value_size) * FORMAT_BYTES[a.cache]
            if a.window is None:
                full += each
            else:
                windowed += each * a.window
        return full, windowed

    def _scores(self) -> tuple[StepExchange, ...]:
        """Return how the scores of the next token come together, of which ranks have parts of the vocabulary."""
        local = self._vocabulary()
        if not local:
            return ()
        head = [p.node for p in self.finder.products if p.rows == REQUESTS][-1]
        whole = self.graph.nodes[head].out.shape[-1]
        moved = {key.partition("#")[0] for key in self.plan.reshard_paths}
        if local == whole or self.graph.nodes[head].name in moved:  # whole already, or exchanged as the cuts say
            return ()
        group = -(-whole // local)
        return (StepExchange("all_gather", whole * FORMAT_BYTES[PLAIN], group, 1, 1, REQUESTS),)

    def _vocabulary(self) -> int:
        """Return the local entries of the scores of a token."""
        heads = [p for p in self.finder.products if p.rows == REQUESTS]
        if not heads:
            return 0
        node = self.graph.nodes[heads[-1].node]
        return local_shape(node.out.shape, self.strategies[heads[-1].node].outs[0], self.mesh)[-1]


def _in_block(path: str) -> bool:
    return NUMBERED.match(path) is not None


def _counted(items: Iterable[Item]) -> tuple[Item, ...]:
    """Return items with equal ones as one."""
    counts: Counter[Item] = Counter()
    for item in items:
        counts[replace(item, count=1)] += item.count
    return tuple([replace(item, count=count) for item, count in counts.items()])
