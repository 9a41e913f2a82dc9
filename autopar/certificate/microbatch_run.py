"""One microbatch of an emitted program: run once on fake tensors, forward and backward, and its seconds counted.

A dispatch mode counts every collective that is issued, with its group and its bytes; recomputed segments run twice;
operators are priced from their actual local shapes. Of what is communicated beside computation, the longer counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import spmd_types as spmd
import torch
import torch.fx
from torch.utils.flop_counter import FlopCounterMode

from autopar.certificate.activations import watch_of
from autopar.certificate.priced_run import CollectiveCount, PricedRun, attention_flops, expert_flops
from autopar.lower.emit import used_shape
from autopar.lower.program import Program
from autopar.plans.plan import StagePlan
from autopar.plans.prices import Price
from autopar.rules.lowering_helpers.lowering_trial import Begun, ToOther, as_last_rank
from autopar.torch_private import FakeTensorMode
from autopar.words.graph import Graph
from cost_models.chunked_exchange import ChunkedExchange
from cost_models.costs import Axis, OpSeconds, costs_of
from cost_models.host_link import HostLinkUse, copies_of
from cost_models.parameter_overlap import TENSOR, Computing, tensor_exposed
from hardware_profiles import Cluster


class MicrobatchRun(NamedTuple):
    """A microbatch on one rank.

    Attributes:
        price: seconds of all microbatches of a step, and bytes of activations.
        kept_bytes: activations that autograd keeps from the forward to the backward.
        collectives: the number of each ``(axis, kind)`` in forward and backward.
        computing: computation of operators that depend on parameters.
        link: what activations do on the link to the host.
    """

    price: Price
    kept_bytes: int
    collectives: Counter[tuple[str, str]]
    computing: Computing
    link: HostLinkUse


def run_of_microbatch(
    program: Program, plan: StagePlan, graph: Graph, cluster: Cluster, axes: Mapping[str, Axis],
    names: Mapping[str, str],
) -> MicrobatchRun:  # fmt: skip
    """Run a program on fake tensors, and return what it does.

    Args:
        axes: costs of collectives along axes and along several of them joined.
        names: axes by the names of their process groups.
    """
    costs, device = costs_of(cluster), cluster.slowest(plan.devices)
    with FakeTensorMode(allow_non_fake_inputs=True), spmd.no_typecheck():
        values = []
        for slot in program.slots:
            dtype = getattr(torch, slot.dtype)
            value = torch.empty(used_shape(slot, program.mesh), dtype=dtype)
            values.append(value.requires_grad_(slot.needs_grad))
        counter = CollectiveCount()
        # the attention of this process's device is not in torch's table
        formulas = {
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
            torch.ops.autopar.expert_linear: expert_flops,
            torch.ops.autopar.expert_linear_in_order: expert_flops,
        }
        flops = FlopCounterMode(display=False, custom_mapping=formulas)
        watch = watch_of(program, values, graph.arriving)
        pricer = PricedRun(program, graph, device, flops, costs, watch, counter, copies_of(cluster, device))
        with counter, flops, as_last_rank(flops.get_total_flops) as pricer.counted:
            with watch.on():
                flat = pricer.run(*values)
            kept_bytes = sum(watch.kept().values())
            ends = [flat[graph.loss]] if graph.loss is not None else flat[: graph.sends]
            wanting = [value for value in ends if isinstance(value, torch.Tensor) and value.requires_grad]
            if wanting:
                torch.autograd.backward(wanting, [torch.ones_like(value) for value in wanting])
    link, collectives, tensor = pricer.copies.use(), Counter[tuple[str, str]](), tensor_exposed(cluster)
    moved = sum(pricer.copy_seconds) + sum(link.waits)
    for group, kind, n_bytes in counter.seen:
        axis = names[group]
        collectives[axis, kind] += 1
        moved += axes[axis].seconds(kind, n_bytes) * (tensor if kind in TENSOR else 1.0)
    moved += _message_seconds(pricer.counted.messages, pricer.beside, axes)
    moved -= _hidden_seconds(pricer.counted.begun, pricer.windows, axes)
    moved -= _hidden_in_chunks(pricer, axes)
    for message in pricer.counted.messages:
        collectives[message.axis, "send_recv"] += message.times
    price = Price(
        plan.microbatches * sum(pricer.seconds), plan.microbatches * moved,
        activation_bytes=plan.in_flight * kept_bytes + pricer.again_bytes, again_bytes=pricer.again_bytes,
    )  # fmt: skip
    computing = Computing(sum(op.forward for op in pricer.hot), sum(op.total - op.forward for op in pricer.hot))
    return MicrobatchRun(price, kept_bytes, collectives, computing, link)


def _message_seconds(
    messages: Sequence[ToOther], beside: Mapping[int, OpSeconds], axes: Mapping[str, Axis]
) -> float:
    """Return the seconds of messages in a step: all that are waited for; of others what exceeds their call's compute.

    ``beside`` has that compute by the identity of a call.
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
    """Return the seconds of collectives that overlap computation: the shorter of both, of all that overlap together.

    ``windows`` has by passage what was computed in the forward between its beginning and its end, in one list for those
    that began together; the backward goes through it in reverse order.
    """
    waits: dict[tuple[int, bool], float] = {}
    computed = {id(window): window for window in windows.values()}
    for passage, axis, n_bytes, backward, _, chunks, _ in begun:
        if passage in windows and chunks == 1:
            place = id(windows[passage]), backward
            waits[place] = waits.get(place, 0.0) + axes[axis].seconds("all_to_all", n_bytes)
    return sum(
        min(spent, sum(op.total - op.forward if backward else op.forward for op in computed[window]))
        for (window, backward), spent in waits.items()
    )


def _hidden_in_chunks(pricer: PricedRun, axes: Mapping[str, Axis]) -> float:
    """Return the seconds of exchanges in chunks that overlap the products between their two ways, and others beside."""
    ways: dict[object, tuple[ChunkedExchange, ChunkedExchange]] = {}
    beside: dict[tuple[object, bool], list[OpSeconds]] = {}
    for begun in pricer.counted.begun:
        if begun.chunks > 1:
            both = list(ways.get(begun.trip, (ChunkedExchange(chunks=begun.chunks),) * 2))
            name, spent = "back" if begun.home else "there", axes[begun.axis].seconds("all_to_all", begun.n_bytes)
            both[begun.backward] = both[begun.backward]._replace(**{name: getattr(both[begun.backward], name) + spent})
            ways[begun.trip] = both[0], both[1]
            beside.setdefault((begun.trip, begun.home), pricer.windows.get(begun.passage, []))
    seconds = 0.0
    for trip, (forward, backward) in ways.items():
        own = pricer.computed[trip]
        others = [beside.get((trip, home), []) for home in (False, True)]
        there, back = (sum(op.forward for op in window) for window in others)
        seconds += forward.there + forward.back + own.forward + there + back
        seconds -= forward.forward(own.forward, there, back)
        if backward.there or backward.back:
            products = own.total - own.forward
            there, back = (sum(op.total - op.forward for op in window) for window in others)
            seconds += backward.there + backward.back + products + there + back
            seconds -= backward.backward(products, there, back)
    return seconds
