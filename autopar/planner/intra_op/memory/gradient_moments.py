"""Gradients over the backward of a microbatch, followed as torch handles them.

The gradient of an output can go on as that of an input; where two arrive for one tensor, the second is added to the
first in its memory, unless somebody else has that; and a parameter takes its gradient as it is if that lies as the
parameter does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.planner.intra_op.memory.memory_walk import Value
from autopar.planner.intra_op.memory.microbatch_timeline import MADE, SLOTS, MicrobatchTimeline, Span
from autopar.planner.intra_op.memory.reshard_needs import copies_gradient, is_alias, reduction_needs, step_back_needs
from autopar.plans.plan import ParamChoice
from autopar.rules.saved_tensors import Strides, contiguous, is_contiguous, lie_alike, strides_of_copy
from autopar.rules.strategy import grads_of
from autopar.words.graph import Ref
from autopar.words.placements import State, path


class GradientMoments:
    """Gradients that live from the backward that makes them to that of the operator whose result they belong to.

    Args:
        params: how parameters are stored, by their nodes.
        accumulates: gradients of parameters are there already, of microbatches before.
    """

    def __init__(self, timeline: MicrobatchTimeline, params: Mapping[int, ParamChoice], accumulates: bool) -> None:
        self.timeline, self.walk, self.graph, self.mesh = timeline, timeline.walk, timeline.graph, timeline.mesh
        self.params, self.accumulates = params, accumulates
        self.gradients: list[list[int]] = []  # bytes, how many have it, since when, and of what: node and position
        self.of_value: dict[Value, int] = {}
        self.strides_of: dict[Value, Strides] = {}  # how the gradients of values lie

    def follow(self, outputs: Sequence[State | None]) -> None:
        """Note all gradients, from those of outputs on."""
        graph = self.graph
        begin, end = self.timeline.back(self.timeline.n - 1, 0), self.timeline.back(0, SLOTS - 1)
        for number in {*range(graph.sends), *([graph.loss] if graph.loss is not None else [])}:
            out, state = graph.outputs[number], outputs[number]
            if isinstance(out, Ref) and state is not None and graph.nodes[out.node].needs_grad:
                if graph.spec(out).is_float:
                    gradient = self._new(self.walk.local_bytes(out, state), begin, out.node)
                    self.gradients[gradient][1] += number < graph.sends  # the stage holds it, too
                    self._deposit((out, state), gradient, begin, contiguous(self.walk.shape((out, state))))
        complete_at = self._complete_at()
        for at in range(self.timeline.n - 1, -1, -1):
            what = self.walk.order[at]
            if isinstance(what, int):
                self._operator(what, self.timeline.back(at))
            else:
                self._adjoint(*what, self.timeline.back(at))
            for value in complete_at.get(at, ()):
                if value in self.of_value:
                    self._parameter(value, self.timeline.back(at, 3))
        for entry in self.gradients:  # of the model's inputs, and of what nobody asks for
            if entry[1]:
                self._lived(entry, end)

    def _complete_at(self) -> dict[int, list[Value]]:
        """Return the place of each parameter's first reader: after its backward all of the gradient is there."""
        first: dict[Value, int] = {}
        for at, what in enumerate(self.walk.order):
            if isinstance(what, int):
                node = self.graph.nodes[what]
                read = zip(node.refs, self.walk.calls.strategy(what).ins, strict=True)
                for ref, state in read:
                    if ref.node in self.params and state == self.params[ref.node].used:
                        first.setdefault((ref, state), at)
            elif what[0].node in self.params and what[1] == self.params[what[0].node].used:
                first.setdefault((what[0], what[1]), at)
        values: dict[int, list[Value]] = {}
        for value, at in first.items():
            values.setdefault(at, []).append(value)
        return values

    def _operator(self, i: int, at: int) -> None:
        graph, walk = self.graph, self.walk
        node = graph.nodes[i]
        if not node.needs_grad:
            return
        strategy = walk.calls.strategy(i)
        outs = [Ref(i, k) for k, spec in enumerate(node.outs) if spec is not None]
        values = [
            (ref, state) for ref, state, grad in zip(outs, strategy.outs, grads_of(graph, node)[1], strict=True) if grad
        ]
        arrived = [self.of_value.pop(value, None) for value in values]
        if all(gradient is None for gradient in arrived):
            return
        needs = walk.needs(i, self._arriving(values))
        read_at = {g.memory: k for k, g in enumerate(needs.gradients) if g is not None and g.source is None}
        read = list(zip(node.refs, strategy.ins, strict=True))
        inside = {k for k, position in read_at.items() if walk.is_inside(read[position])}
        mine = [
            self._new(0 if k in inside else n_bytes, at, i, read_at.get(k, MADE))
            for k, n_bytes in enumerate(needs.memories)
        ]
        if not walk.is_fused(i):
            self.timeline.beside[at] += needs.backward_bytes - needs.kept_bytes - needs.out_bytes - sum(needs.memories)
        deposits: list[tuple[Value, int, Strides]] = []
        for position, ((ref, state), gradient) in enumerate(zip(read, needs.gradients, strict=True)):
            if gradient is None:
                continue
            passed_on = arrived[gradient.source] if gradient.source is not None else mine[gradient.memory]
            memory = passed_on
            if memory is None:
                n_bytes = 0 if walk.is_inside((ref, state)) else walk.local_bytes(ref, state)
                memory = self._new(n_bytes, at, i, position)
            self.gradients[memory][1] += passed_on is not None
            deposits.append(((ref, state), memory, gradient.strides))
        for memory in (*mine, *(gradient for gradient in arrived if gradient is not None)):
            self._drop(memory, at)
        for value in values:
            self.strides_of.pop(value, None)
        for value, memory, strides in deposits:
            self._deposit(value, memory, at, strides)

    def _arriving(self, values: Sequence[Value]) -> tuple[Strides, ...]:
        """Return the strides of the gradients of an operator's outputs; nothing if they are those of copies."""
        usual = [strides_of_copy(self.walk.shape(value), self.walk.lies[value][1]) for value in values]
        arriving = [self.strides_of.get(value, strides) for value, strides in zip(values, usual, strict=True)]
        alike = all(lie_alike(self.walk.shape(v), a, b) for v, a, b in zip(values, arriving, usual, strict=True))
        return () if alike else tuple(arriving)

    def _adjoint(self, ref: Ref, src: State, dst: State, at: int) -> None:
        gradient = self.of_value.pop((ref, dst), None)
        if gradient is None:
            return
        strides = self.strides_of.pop((ref, dst), None)
        if is_alias(src, dst, self.mesh):
            self._deposit((ref, src), gradient, at, strides)
            return
        is_strided = strides is not None and not is_contiguous(self.walk.shape((ref, dst)), strides)
        stays = self.gradients[gradient][1] > 1
        self.timeline.beside[at] += step_back_needs(self.graph.spec(ref), src, dst, self.mesh, is_strided, stays)
        mine = self._new(self.walk.local_bytes(ref, src), at, ref.node)
        self._drop(gradient, at)
        shape = self.walk.shape((ref, src))
        keeps_order = strides if copies_gradient(src, dst) else None
        self._deposit((ref, src), mine, at, strides_of_copy(shape, keeps_order or contiguous(shape)))

    def _new(self, n_bytes: int, at: int, node: int, position: int = MADE) -> int:
        self.gradients.append([n_bytes, 1, at, node, position])
        return len(self.gradients) - 1

    def _lived(self, gradient: Sequence[int], last: int) -> None:
        n_bytes, _, first, node, position = gradient
        self.timeline.lives("gradient", n_bytes, first, last, node)
        self.timeline.spans.append(Span(n_bytes, first, last, node, position))

    def _drop(self, gradient: int, at: int) -> None:
        """Let go of a gradient for one of its holders."""
        entry = self.gradients[gradient]
        entry[1] -= 1
        if not entry[1]:
            self._lived(entry, at)

    def _deposit(self, value: Value, gradient: int, at: int, strides: Strides | None) -> None:
        """Add a gradient of a value that arrives; its sum with an earlier one is new memory, with that one's strides.

        Its sum with one that is there is new memory, strided as the first's copy.
        """
        there = self.of_value.get(value)
        if there is None:
            self.of_value[value] = gradient
            if strides is not None:
                self.strides_of[value] = strides
            return
        if value in self.strides_of:
            self.strides_of[value] = strides_of_copy(self.walk.shape(value), self.strides_of[value])
        self.of_value[value] = self._new(self.gradients[there][0], at + 1, value[0].node)
        self._drop(there, at + 1)
        self._drop(gradient, at + 1)

    def _parameter(self, value: Value, at: int) -> None:
        """Reduce the complete gradient of a parameter to where that is stored, where it stays.

        Under a policy it is cast to the master's format.
        """
        ref, used = value
        gradient, choice = self.of_value.pop(value), self.params[ref.node]
        spec, stored = self.graph.spec(ref), self.graph.stored(self.graph.nodes[ref.node])
        is_cast = stored.dtype != spec.dtype
        reduced_bytes = self.walk.local_bytes(ref, choice.stored)
        stored_bytes = reduced_bytes // spec.item_bytes * stored.item_bytes
        steps = [(src, dst) for axis, src, dst in path(choice.stored, used) or () if self.mesh.size(axis) > 1]
        taken = not (steps or self.accumulates or is_cast or choice.on_host) and self.gradients[gradient][1] == 1
        strides = self.strides_of.pop(value, None)
        if taken and (strides is None or is_contiguous(self.walk.shape(value), strides)):
            self.timeline.stays(self.gradients[gradient][0], self.gradients[gradient][2], ref.node)
            self.gradients[gradient][1] = 0
            return
        self._drop(gradient, at)
        needs = reduction_needs(spec, choice, self.mesh, self.accumulates)
        if choice.on_host:
            needs += stored_bytes if is_cast and not self.accumulates else 0  # what is copied out
        elif not self.accumulates:
            self.timeline.stays(stored_bytes, at, ref.node)
            needs -= 0 if is_cast and steps else reduced_bytes
        elif is_cast:
            needs += stored_bytes  # what is added to the sum
        self.timeline.beside[at] += max(0, needs)
