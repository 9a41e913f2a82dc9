"""Programs as explicit steps: forward and backward printed as Python, or compiled, and one node of autograd's graph.

The first call with other wants builds a step from the lowered program (:mod:`autopar.lower.steps`). It is a node of
autograd's graph like any operator: saved tensors are seen by hooks and checked for changes, a graph that is retained
can be gone through again, and gradients of inputs and parameters go on from it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.fx
from torch.autograd.graph import GradientEdge

from autopar.errors import RunError
from autopar.lower.program import Program, Slot
from autopar.lower.segments import current_mesh, on_mesh
from autopar.lower.steps.adjoints import Adjoints
from autopar.lower.steps.again import run_again, views_again
from autopar.lower.steps.building import StepGraph, build
from autopar.lower.steps.giving_up import bring_back
from autopar.lower.steps.handing_over import Take, Taker, hand_over
from autopar.lower.steps.in_place import add_in_place
from autopar.lower.steps.nodes import laid_out
from autopar.lower.steps.printing import Compiler, StepFunctions
from autopar.runtime.gradients.gradient_reduction import bucket_bytes
from autopar.torch_private import keeps_graph, operators_alone, reached
from autopar.words.trees import Context

LeafGradients = Iterable[tuple[torch.Tensor, torch.Tensor | None]]
"""Leaves with their gradients; None where none comes."""
Gather = Callable[..., tuple[torch.Tensor, ...]]
"""``gather(*leaves, *pieces)``: the values that a program reads of parameters; their gradients are the leaves'."""
Gathers = Sequence[tuple[tuple[str, ...], Gather]]
"""Parameters by name, and what gathers them together."""
TWICE = (
    "create_graph=True: a compiled program has no backward of its backward, so gradient penalties and other second "
    "derivatives cannot go through it; run it without compile() (pm.compile(disable=True) takes it back), on one device"
)
AGAIN = (
    "a second backward through the same forward of a compiled program, whose intermediate values are freed; pass "
    "retain_graph=True to the first one, or add the losses up and call backward once"
)


class StepProgram:
    """A program that runs as a step, called with the pieces of the parameters that it gathers itself, then its slots.

    Args:
        gathers: what gathers parameters for each use.
        compiler: makes a function of a graph of operators; None to call operators one by one.
        takers: by parameter, what takes its gradient as soon as it is there.
        agreed: called with the collectives of a step before it runs for the first time.
    """

    def __init__(
        self, program: Program, gathers: Gathers, compiler: Compiler | None,
        takers: Mapping[str, Take], agreed: Callable[[Sequence[torch.fx.Node]], None],
    ) -> None:  # fmt: skip
        self.n_outputs = len(program.outputs)
        self.module, self.gathered = _with_gathers(program, gathers)
        self.compiler, self.agreed = compiler, agreed
        slots = list(enumerate(program.slots, sum(len(names) for names, _ in gathers)))
        self.takers = {k: _taker(slot, takers[slot.name]) for k, slot in slots if slot.name in takers}
        total = sum(taker.n_bytes for taker in self.takers.values())
        self.together = 0 if compiler is None else bucket_bytes(total)
        self.adjoints = Adjoints()
        self.forms: dict[Any, _OfForm] = {}

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Return the outputs of the program, then the new values of buffers."""
        with_grad = torch.is_grad_enabled()
        form = with_grad, tuple(
            (x.requires_grad, x.stride()) if isinstance(x, torch.Tensor) else type(x) for x in values
        )
        of_form = self.forms.get(form)
        if of_form is None:
            given = values if with_grad else [x.detach() if isinstance(x, torch.Tensor) else x for x in values]
            of_form = self.forms[form] = _OfForm(self, given)
        if not of_form.functions.arriving:
            with operators_alone():
                return of_form.functions.forward.run([*values])
        return _StepNode.apply(of_form, *values)  # type: ignore[no-any-return]

    def step(self, values: Sequence[Any], hands_over: bool, roots: Sequence[int] | None = None) -> StepGraph:
        """Return a step for inputs of this form, after all passes.

        Args:
            hands_over: the takers get their gradients.
            roots: the outputs at which its backward begins; None for all.
        """
        step = build(self.module, values, self.n_outputs, self.adjoints, roots)
        views_again(step)
        run_again(step, self.gathered)
        bring_back(step)
        if self.compiler is None:
            add_in_place(step)
        if hands_over:
            hand_over(step, self.takers, self.together)
        return step


def _taker(slot: Slot, take: Take) -> Taker:
    return Taker(take, prod(slot.shape) * getattr(torch, slot.dtype).itemsize)


class _OfForm:
    """The step of a program for inputs of one form."""

    def __init__(self, program: StepProgram, values: Sequence[Any]) -> None:
        self.program, self.mesh = program, current_mesh()
        self.tensors = [k for k, x in enumerate(values) if isinstance(x, torch.Tensor)]
        step = program.step(values, hands_over=True)
        self.functions = StepFunctions(step, compiler=program.compiler)
        program.agreed(self.functions.collectives)
        wants = [isinstance(x, torch.Tensor) and x.requires_grad for x in values]
        self.like = [
            node.meta["val"].detach().requires_grad_() if want else node.meta["val"]
            for node, want in zip(step.given, wants, strict=True)
        ]
        self.backwards: dict[Any, StepFunctions] = {(tuple(self.functions.arriving), True, None): self.functions}

    def on_its_mesh(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with the mesh of the forward, for collectives by the names of axes."""
        return contextlib.nullcontext() if self.mesh is None else on_mesh(self.mesh)

    def backward(
        self, roots: tuple[int, ...], hands_over: bool = True, first: frozenset[int] | None = None
    ) -> StepFunctions:  # fmt: skip
        """Return the functions whose backward begins at these outputs.

        Args:
            hands_over: takers get their gradients; they are not returned then.
            first: the inputs whose gradients come first; None for a backward that is not split.
        """
        key = roots, hands_over, first
        if key not in self.backwards:
            with self.on_its_mesh():
                step = self.program.step(self.like, hands_over, roots)
            functions = StepFunctions(step, self.functions.saved, self.program.compiler, first)
            self.program.agreed(functions.collectives)
            self.backwards[key] = functions
        return self.backwards[key]

    def edges(self, node: Any) -> dict[int, tuple[Any, int]]:
        """Return where the gradient of each tensor input goes in the graph of autograd: a node and its input."""
        return dict(zip(self.tensors, node.next_functions, strict=True))


class _StepNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, of_form: _OfForm, *values: Any) -> tuple[Any, ...]:
        functions = of_form.functions
        with operators_alone():
            flat = functions.forward.run([*values])
        results, saved = list(flat[: functions.n_results]), flat[functions.n_results :]
        del flat
        taken = {id(x) for x in values}
        for k, x in enumerate(results):
            if isinstance(x, torch.Tensor):
                results[k] = x if id(x) not in taken else x.detach()
                taken.add(id(x))
        ctx.set_materialize_grads(False)
        ctx.of_form, ctx.n_values = of_form, len(values)
        checked = [isinstance(x, torch.Tensor) and k not in functions.unchecked for k, x in enumerate(saved)]
        ctx.save_for_backward(*(x for x, of_autograd in zip(saved, checked, strict=True) if of_autograd))
        ctx.others = [None if of_autograd else (x,) for x, of_autograd in zip(saved, checked, strict=True)]
        ctx.mark_non_differentiable(
            *(x for k, x in enumerate(results) if k not in functions.arriving and isinstance(x, torch.Tensor))
        )
        return tuple(results)

    @staticmethod
    @torch.compiler.disable  # where the caller compiles a function with the backward in it
    def backward(ctx: Context, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RunError(TWICE)
        of_form: _OfForm = ctx.of_form
        roots = tuple(k for k in of_form.functions.arriving if grads[k] is not None)
        found: list[torch.Tensor | None] = [None] * ctx.n_values
        strides = of_form.functions.strides
        if roots:
            given = [*_taken(ctx, keeps_graph()), *(laid_out(grads[k], strides[k]) for k in roots)]
            del grads
            edges = of_form.edges(ctx)
            nodes = [edges[k][0] for k in of_form.program.takers if of_form.like[k].requires_grad]
            functions = of_form.backward(roots, all(map(reached, nodes)))
            with of_form.on_its_mesh(), operators_alone():
                got = functions.backward.run(given)
            for slot, grad in zip(functions.slots, got, strict=True):
                found[slot] = grad
        return (None, *found)


def _taken(ctx: Context, keep: bool) -> list[Any]:
    """Return what a forward saved for its backward, and free it unless it is to be kept."""
    tensors = iter(ctx.saved_tensors)
    if ctx.others is None:
        raise RunError(AGAIN)
    values = [next(tensors) if x is None else x[0] for x in ctx.others]
    if not keep:
        ctx.others = None
        ctx.maybe_clear_saved_tensors()
    return values


# --- in halves --------------------------------------------------------------------------------------------------------


def is_step(edge: GradientEdge) -> bool:
    """Check whether a gradient enters the graph of autograd at a step."""
    return isinstance(getattr(edge.node, "of_form", None), _OfForm)


def first_half(
    roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor], wanted: Sequence[GradientEdge]
) -> tuple[tuple[torch.Tensor | None, ...], Callable[[], LeafGradients]]:  # fmt: skip
    """Run the first half of the backward of a step.

    Args:
        roots: outputs of one call of the program, to which ``grads`` arrive.
        wanted: where the gradients go that are wanted now, all from inputs of that call.

    Returns:
        these gradients, None for what none comes to, and the second half: a function that gives leaves with theirs.
        Gradients that takers take are handed to them when it runs.
    """
    nodes: set[Any] = {edge.node for edge in roots}
    (node,) = nodes
    of_form: _OfForm = node.of_form
    arriving: dict[int, torch.Tensor] = {}
    for edge, grad in zip(roots, grads, strict=True):
        at = edge.output_nr
        arriving[at] = arriving[at] + grad if at in arriving else grad
    places = {(edge.node, edge.output_nr): k for k, edge in enumerate(wanted)}
    edges = of_form.edges(node)
    first = frozenset(slot for slot, edge in edges.items() if edge in places)
    functions = of_form.backward(tuple(sorted(arriving)), first=first)
    given = [*_taken(node, keep=False), *(laid_out(arriving[k], functions.strides[k]) for k in functions.arriving)]
    del arriving, grads
    with of_form.on_its_mesh(), operators_alone():
        flat = functions.inputs.run(given)
    found: list[torch.Tensor | None] = [None] * len(wanted)
    for slot, grad in zip(functions.slots, flat[: functions.n_first], strict=False):
        if grad is not None:
            k = places[edges[slot]]
            found[k] = grad if found[k] is None else found[k] + grad
    left = list(flat[functions.n_first :])
    leaves = [edges[slot][0].variable for slot in functions.slots[functions.n_first :]]

    def second_half() -> LeafGradients:
        with of_form.on_its_mesh(), operators_alone():
            return zip(leaves, functions.weights.run(left), strict=True)

    return tuple(found), second_half


def _with_gathers(program: Program, gathers: Gathers) -> tuple[torch.fx.GraphModule, set[str]]:
    """Return the lowered program with the pieces of some parameters as its first inputs, and the names of the gathers.

    Each gather stands in front of the first reader of what it gathers.
    """
    graph = torch.fx.Graph()
    pieces = {name: graph.placeholder(f"_piece_{k}") for k, name in enumerate(n for names, _ in gathers for n in names)}
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(program.module.graph, copies))
    given = [node for node in program.module.graph.nodes if node.op == "placeholder"]
    slots = {slot.name: copies[n] for slot, n in zip(program.slots, given, strict=True) if slot.kind == "param"}
    place = {node: k for k, node in enumerate(graph.nodes)}
    gathered = set()
    for names, gather in gathers:
        leaves = [slots[name] for name in names]
        readers = [list(leaf.users) for leaf in leaves]
        if not any(readers):
            continue
        first = min((reader for each in readers for reader in each), key=place.__getitem__)
        with graph.inserting_before(first):
            together = graph.call_function(gather, (*leaves, *(pieces[name] for name in names)))
        gathered.add(together.name)
        for k, (leaf, each) in enumerate(zip(leaves, readers, strict=True)):
            with graph.inserting_before(first):
                value = graph.call_function(operator.getitem, (together, k))
            for reader in each:
                reader.replace_input_with(leaf, value)
    return torch.fx.GraphModule(torch.nn.Module(), graph, class_name="GatheringProgram"), gathered
