"""Programs for ``torch.compile``: one graph, forward and backward, with functional collectives.

Dynamo, which reads Python, need not trace into the operators of a program: they are put into its graph unchanged, and
AOTAutograd, which runs them on tensors without values, sees the operators of torch and the functional collectives that
they consist of, forward and backward. Hooks that free and refill memory are not used there. Tensors that are
recomputed, regathered or gathered for one use are marked, and the compiler's partitioner does it.

Ranks with unequal shards have different graphs, in which the partitioner may choose other tensors to recompute.
Collectives are among these only where they are marked. So the outputs of a segment, where the next one begins, are kept
by an operator of their own (:func:`_kept`): recomputation begins at the same place on all ranks, and its collectives
have one order.

Code that the compiler must not trace breaks the graph (:func:`breaks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType

import torch
import torch.fx
from torch.utils.checkpoint import checkpoint

from autopar.errors import PlanError
from autopar.lower import collectives
from autopar.lower.freed_tensors import backwards_of, give_up
from autopar.lower.program import Program
from autopar.lower.regather import free_until_backward
from autopar.lower.segments import make_again, with_segments
from autopar.rules.experts.expert_block import TRAVEL, rows_computed, rows_leave, rows_return, travelling_block
from autopar.rules.families.branch import branch
from autopar.rules.function import Callee
from autopar.rules.lowering_helpers.local_shard import length_of
from autopar.torch_private import pytree
from autopar.words.exchanges import is_bounded
from autopar.words.trees import PyTree

_TRAVELLING = (travelling_block, rows_leave, rows_computed, rows_return)
_BRANCH = torch.ops.autopar.branch.default
_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("kept(Tensor x) -> Tensor")


@torch.library.impl(_library, "kept", "CompositeExplicitAutograd")  # type: ignore[untyped-decorator]
def _kept(x: torch.Tensor) -> torch.Tensor:
    """Return a copy, by an operator that no compiler recomputes instead of keeping its result."""
    return x.clone()


torch.library.register_fake("autopar::kept", lambda x: torch.empty_like(x), lib=_library)
torch.library.register_autograd("autopar::kept", lambda _ctx, grad: grad, lib=_library)
Gather = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``gather(leaf, piece)``: the values that a program reads of a parameter, whose gradient is that of the leaf."""


class Recomputed(torch.nn.Module):
    """A part of a compiled program that keeps only its inputs for the backward."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> PyTree:
        """Run the part under activation checkpointing."""
        return checkpoint(self.inner, *inputs, use_reentrant=False)


class RecomputedSegment(Recomputed):
    """A recomputed part whose outputs are kept where others read them."""

    def forward(self, *inputs: torch.Tensor) -> PyTree:
        """Run the part, and keep its outputs."""
        return pytree.tree_map_only(torch.Tensor, torch.ops.autopar.kept, super().forward(*inputs))


def compilable(program: Program, gathers: Mapping[str, Gather]) -> torch.fx.GraphModule:
    """Return the program for the compiler; the ambient mesh is that of the program.

    Its first inputs are the stored shards of the parameters in ``gathers``, which are gathered for each use, in their
    order; then come the slots.
    """
    graph = torch.fx.Graph()
    pieces = [graph.placeholder(f"_piece_{k}") for k in range(len(gathers))]
    remap: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(program.module.graph, remap)
    originals = [node for node in program.module.graph.nodes if node.op == "placeholder"]
    slots = {slot.name: remap[n] for slot, n in zip(program.slots, originals, strict=True) if slot.kind == "param"}
    graph.output(output)
    root = torch.nn.Module()
    for node in list(graph.nodes):
        if node.target is length_of:  # a number, which need not be worked out in the graph
            _replace(node, length_of(*node.args))
        elif node.target is make_again:  # the outputs of a segment are made again where nothing else is asked for
            graph.erase_node(node)
        elif node.target is give_up:
            raise PlanError(
                f"the plan decides '{node.args[2]}' about what {node.args[0].name} makes, and a compiled program has "
                "no hooks for that; run it without compile(), or plan without that decision"
            )
        elif node.target is free_until_backward:
            _gathered_again(root, node)
        elif stays_outside(node.target):
            node.target = branch if node.target is _BRANCH else torch.compiler.disable(node.target, reason=node.name)
    for (name, gather), piece in zip(gathers.items(), pieces, strict=True):
        _gathered_for_use(root, slots[name], piece, gather)
    for node in reversed(graph.nodes):
        of_freed = "step" in node.meta.get("autopar", {}) or node.target is backwards_of
        if not node.users and of_freed:  # of a copy that is gathered elsewhere now
            graph.erase_node(node)
    graph.lint()
    flat = torch.fx.GraphModule(root, graph, class_name="CompilableProgram")
    module = with_segments(flat, lambda inner, *_: RecomputedSegment(inner))
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if node.op == "call_function" and _is_ours(node.target):
                torch.compiler.allow_in_graph(node.target)
    return module


def _is_ours(target: object) -> bool:
    """Return whether a function is one of autopar's that Dynamo need not trace."""
    ours = isinstance(target, FunctionType) and target.__module__.split(".")[0] == "autopar"
    return ours and not stays_outside(target)


def _replace(node: torch.fx.Node, value: int) -> None:
    """Replace a node by its value."""
    for user in list(node.users):
        user.args = torch.fx.map_arg(user.args, lambda x: value if x is node else x)
        user.kwargs = torch.fx.map_arg(user.kwargs, lambda x: value if x is node else x)
    node.graph.erase_node(node)


def stays_outside(target: object) -> bool:
    """Return whether the compiler must not trace an operator.

    Such are the model's own Python, a branch on a number of which one side has no backward, and rows that travel to
    their experts, of which the host has to know how many.
    """
    return isinstance(target, Callee) or target in (_BRANCH, branch, *_TRAVELLING)


def breaks(program: Program, recorded: bool = False) -> list[str]:
    """Return the operators of a program at which a compiled one is split, by their names and kinds.

    Args:
        recorded: those that are not recorded as a CUDA graph: where rows travel within a bound, the host reads nothing.
    """
    reasons = []
    for node in program.module.graph.nodes:
        if isinstance(node.target, Callee):
            reasons.append(f"{node.name}: the model's own Python code, {node.target.name}")
        elif node.target in (rows_leave, rows_computed):
            continue  # their block is told by its last part
        elif node.target in _TRAVELLING and recorded and any(map(is_bounded, node.kwargs["cut"][TRAVEL])):  # type: ignore[index, call-overload, union-attr, arg-type]
            continue
        elif node.target in _TRAVELLING:
            reasons.append(f"{node.name}: experts to which rows travel")
        elif stays_outside(node.target):
            reasons.append(f"{node.name}: a branch on a number")
    return reasons


def _apart(
    root: torch.nn.Module, node: torch.fx.Node, inputs: tuple[torch.fx.Node, ...],
    run: Callable[..., torch.fx.Node],
) -> torch.fx.Node:  # fmt: skip
    """Call ``run(*inputs)`` in front of a node, as a part that the backward recomputes.

    ``run`` is called with a graph and its placeholders.
    """
    inner = torch.fx.Graph()
    inner.output(run(inner, *(inner.placeholder(f"x{k}") for k in range(len(inputs)))))
    name = f"again_{sum(1 for _ in root.children())}"
    root.add_module(name, Recomputed(torch.fx.GraphModule(torch.nn.Module(), inner, class_name="Again")))
    with node.graph.inserting_before(node):
        return node.graph.call_module(name, inputs)


def _gathered_again(root: torch.nn.Module, freed: torch.fx.Node) -> None:
    """Replace a copy that is freed after its last reader by one that the backward regathers."""
    copy, source, steps, _ = freed.args
    chain: PyTree = steps
    freed.graph.erase_node(freed)
    assert isinstance(copy, torch.fx.Node) and isinstance(source, torch.fx.Node)

    def run(graph: torch.fx.Graph, x: torch.fx.Node) -> torch.fx.Node:
        for gather, args in chain:
            x = graph.call_function(getattr(collectives, gather), (x, *args))
        return x

    if "segment" not in copy.meta:
        copy.replace_all_uses_with(_apart(root, copy, (source,), run))


def _gathered_for_use(root: torch.nn.Module, leaf: torch.fx.Node, piece: torch.fx.Node, gather: Gather) -> None:
    """Gather a parameter for the operators that read it; in a segment, which is recomputed, inside of it."""
    by_segment: dict[int | None, torch.fx.Node] = {}
    for reader in [n for n in leaf.graph.nodes if n in leaf.users]:
        segment = reader.meta.get("segment")
        if segment in by_segment:
            pass
        elif segment is None:
            by_segment[None] = _apart(
                root, reader, (leaf, piece), lambda graph, *x: graph.call_function(gather, x)
            )
        else:
            with leaf.graph.inserting_before(reader):
                by_segment[segment] = leaf.graph.call_function(gather, (leaf, piece))
            by_segment[segment].meta["segment"] = segment
        reader.replace_input_with(leaf, by_segment[segment])
