"""The two sides of a comparison: a run of the model on a batch, and one of its graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.fx

from autopar.capture import Captured, WithLoss
from autopar.capture.python.restoring import Draws, generators_kept, kept, same_draws
from autopar.capture.trace.contexts import entered
from autopar.capture.trace.patches import Phase
from autopar.capture.trace.python_random import drawn_by_torch
from autopar.comparison.relative import Ran, is_tensor
from autopar.lower.emit import lower
from autopar.lower.program import Program
from autopar.planner.intra_op.one_device import one_device
from autopar.rules.local_calls import resolve
from autopar.rules.whole_tensors import updates_of
from autopar.runtime.batches.totals_ahead import computed_ahead, totals_ahead
from autopar.runtime.parameters.redistribution import dense
from autopar.torch_private import pytree
from autopar.words.autocasting import without_autocast
from autopar.words.graph import Graph, Node, Ref
from autopar.words.trees import PyTree


def attention_on(cuda: bool) -> contextlib.AbstractContextManager[None]:
    """Let the model itself run: torch has a backward of flex attention, and varlen_attn at all, on CUDA alone."""
    return contextlib.nullcontext() if cuda else entered(Phase.COMPARE)


class Sides:
    """The two sides of a comparison."""

    def __init__(
        self, captured: Captured, model: torch.nn.Module, args: PyTree, kwargs: PyTree, targets: PyTree
    ) -> None:
        self.captured, self.model = captured, model
        self.args, self.kwargs, self.targets = tuple(args), dict(kwargs), tuple(targets)
        self.loss_fn = captured.example.loss_fn if captured.example is not None else None
        self.named = named_tensors(model, self.loss_fn)
        self.device = next((p.device for p in self.named.values()), torch.device("cpu"))
        self.program = _program(captured.graph, self.device)
        self.leaves = [*pytree.tree_leaves(((*self.args, *self.targets), self.kwargs))]
        self.draws: dict[str, Draws] = {}

    # -- the model

    @property
    def drop_other_elements(self) -> bool:
        """True if both have run and dropped elements of other shapes, so no two draws are equal.

        So it is where a loop over experts draws for the rows of each, and the graph for all rows.
        """
        theirs, mine = self.draws["eager"], self.draws["graph"]
        return theirs.dropouts != mine.dropouts and theirs.others == mine.others

    def eager(self, nothing_dropped: bool = False) -> Ran:
        """Run the model, without a change to it."""
        with kept(self.model, self.loss_fn), same_draws(nothing_dropped) as self.draws["eager"], torch.enable_grad():
            if self.captured.guards.filled:  # the first call fills caches, and later ones read them
                before = {name: value.detach().clone() for name, value in self._renewed().items()}
                with torch.no_grad():
                    self._call(self.leaves)
                    for name, value in self._renewed().items():
                        if name in before:
                            value.copy_(before[name])
            inputs = [x.detach().clone().requires_grad_(x.requires_grad) if is_tensor(x) else x for x in self.leaves]
            graph = self.captured.graph
            outputs = [  # a number that the model reads from a tensor is that tensor in the graph
                torch.as_tensor(x, dtype=getattr(torch, graph.spec(out).dtype))
                if isinstance(out, Ref) and isinstance(x, (int, float)) else x
                for x, out in zip(self._outputs(inputs), graph.outputs, strict=True)
            ]  # fmt: skip
            gradients = self._gradients(outputs, self.named, dict(zip(self._input_names(), inputs, strict=True)))
            now = self._now()
            names = [*(node.target for _, node in self.captured.graph.of_kind("buffer")), *_written_first(graph)]
            buffers = {name: now[name].detach().clone() for name in names if name in now}
        return Ran([x.detach() if is_tensor(x) else x for x in outputs], gradients, buffers)

    def _call(self, leaves: Sequence[PyTree]) -> PyTree:
        args, kwargs = pytree.tree_unflatten(list(leaves), self.captured.in_spec)
        n = len(self.args)
        on_cuda = any(is_tensor(x) and x.is_cuda for x in (*self.named.values(), *leaves))
        with attention_on(on_cuda), drawn_by_torch():
            return WithLoss(self.model, self.loss_fn, n, self.captured.graph.precision)(*args, **kwargs)

    def _outputs(self, leaves: Sequence[PyTree]) -> list[PyTree]:
        """Return the results of a call, attributes included, in the order of the graph's outputs."""
        outputs = pytree.tree_leaves(self._call(leaves))
        modules = dict(self.model.named_modules())
        for left in self.captured.left:
            if left.spec is not None:
                outputs += pytree.tree_leaves(getattr(modules[left.path], left.name))
        return outputs

    def _now(self) -> dict[str, torch.Tensor]:
        return named_tensors(self.model, self.loss_fn)

    def _renewed(self) -> dict[str, torch.Tensor]:
        """Return what a call may change: buffers, and frozen parameters that the forward writes."""
        written = {*self.captured.graph.written, *_written_first(self.captured.graph)}
        return {n: t for n, t in self._now().items() if not isinstance(t, torch.nn.Parameter) or n in written}

    def _input_names(self) -> list[str]:
        nodes = self.captured.graph.nodes
        return [f"input '{nodes[n].target}'" if n is not None else "" for n in self.captured.inputs]

    # -- the graph

    def graph(
        self, by: Callable[[torch.fx.GraphModule], torch.fx.Interpreter] | None = None, nothing_dropped: bool = False
    ) -> Ran:
        """Run the captured graph; ``by`` creates an interpreter that runs it operator by operator."""
        graph, values, named, buffers_before = self.captured.graph, [], {}, {}
        inputs = {}
        for number, leaf in zip(self.captured.inputs, self.leaves, strict=True):
            if number is not None:
                inputs[graph.nodes[number].target] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        first = updates_of(graph.before, self._value_of) if graph.before is not None else {}
        ahead = totals_ahead(self.captured, self.device)
        (of_batch,) = computed_ahead([ahead], [inputs], [1.0], {**self.named, **self.captured.constants}.get)
        for slot in self.program.slots:
            if slot.kind == "input":
                of_call = of_batch.get(slot.name)
                values.append(inputs[slot.name] if of_call is None else of_call.to(getattr(torch, slot.dtype)))
            elif slot.kind == "seed":
                values.append(torch.zeros((), dtype=torch.int64))
            else:
                value = first.get(slot.name)
                if value is None:
                    value = self._value_of(graph.nodes[graph.index[slot.name]])
                if slot.kind == "param":
                    value = named[slot.name] = value.detach().requires_grad_(slot.needs_grad)
                else:  # some operators write to it
                    value = buffers_before[slot.name] = value.detach().clone()
                values.append(value)
        drawing = same_draws(nothing_dropped)
        with drawing as self.draws["graph"], torch.enable_grad(), generators_kept(), without_autocast():
            flat = self.program.runnable(*values) if by is None else by(self.program.module).run(*values)
            count = len(self.program.outputs)
            names = {f"input '{k}'": x for k, x in inputs.items()}
            gradients = self._gradients(flat[:count], named, names)
        new = {n: x.detach() for n, x in zip(self.program.updates, flat[count:], strict=True)}
        buffers = buffers_before | new | {n: x.detach() for n, x in first.items()}
        return Ran([x.detach() if is_tensor(x) else x for x in flat[:count]], gradients, buffers)

    def _value_of(self, node: Node) -> torch.Tensor:
        """Return the value of a parameter or buffer."""
        value = self.captured.constants.get(node.target, self.named.get(node.target))
        assert value is not None, node.target
        return value

    # -- both

    def _gradients(
        self, outputs: Sequence[PyTree], params: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return gradients of the loss, or of a fixed weighting of all outputs if there is none."""
        graph = self.captured.graph
        names = [node.target for _, node in graph.of_kind("param") if node.needs_grad]
        wanted = {n: params[n] for n in names if n in params}
        # those that the caller wants: a forward may ask an input for gradients of its own, which it takes inside
        asked = {n for n, x in zip(self._input_names(), self.leaves, strict=True) if is_tensor(x) and x.requires_grad}
        wanted |= {n: x for n, x in inputs.items() if n in asked}
        if graph.loss is not None:
            ends = [outputs[graph.loss]]
        else:
            ends = [(o * _weights(o)).sum() for o in outputs if is_tensor(o) and o.is_floating_point()]
        roots: list[torch.Tensor] = [r for r in ends if r.requires_grad]
        if not roots or not wanted:
            return {}
        before = {n: x.grad for n, x in wanted.items()}
        try:  # not autograd.grad: a backward of the model's own may call backward inside
            for x in wanted.values():
                x.grad = None
            with without_autocast():
                sum(roots[1:], roots[0]).backward()
            return {n: dense(x.grad.detach()) for n, x in wanted.items() if x.grad is not None}
        finally:
            for n, x in wanted.items():
                x.grad = before[n]


def named_tensors(model: torch.nn.Module, loss_fn: Callable[..., object] | None) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by the names that a graph has for them."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    if isinstance(loss_fn, torch.nn.Module):
        for name, tensor in (*loss_fn.named_parameters(), *loss_fn.named_buffers()):
            named.setdefault(f"loss_fn.{name}", tensor)
    return named


def _written_first(graph: Graph) -> list[str]:
    """Return the trained parameters that a call writes."""
    return [] if graph.before is None else [*graph.before.updates]


def _program(graph: Graph, device: torch.device) -> Program:
    """Return the program of one device, in which random operators are torch's own."""
    program = lower(graph, one_device(graph), device)
    for fx in program.module.graph.nodes:
        if fx.op == "call_function" and "seed" in fx.kwargs and "shards" in fx.kwargs:
            node = graph.nodes[graph.index[fx.meta["autopar"]["node"]]]
            eager_kwargs = {k: v for k, v in fx.kwargs.items() if k not in ("cut", "seed", "site", "shape", "shards")}
            if not node.refs and "size" not in eager_kwargs:
                eager_kwargs["device"] = device
            fx.target, fx.kwargs = resolve(node.target), eager_kwargs
    program.module.recompile()
    return program


class KeepingTensors(torch.fx.Interpreter):
    """A run of a program that keeps every tensor."""

    def __init__(self, module: torch.fx.GraphModule, into: list[torch.Tensor]) -> None:
        super().__init__(module)
        self.into = into

    def run_node(self, n: torch.fx.Node) -> PyTree:
        """Run a node, and keep its result."""
        value = super().run_node(n)
        self.into.extend(x.detach() for x in pytree.tree_leaves(value) if is_tensor(x))
        return value


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Return fixed weights of an output's elements, so that none counts like another."""
    at = torch.arange(x.numel(), device=x.device, dtype=torch.float32)
    return (1 + 0.5 * torch.sin(at)).to(x.dtype).reshape(x.shape)
