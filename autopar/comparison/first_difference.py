"""The first module of a model where graph and eager mode differ, and what to do about it."""

from __future__ import annotations

import torch

from autopar.comparison.relative import Comparison, is_tensor, largest_value, off, relative
from autopar.comparison.sides import KeepingTensors, Sides
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

TWICE = (
    "all outputs and gradients are the same: the batch norm is in a region under activation checkpointing, which eager "
    "mode runs once more in the backward, so that it counts every batch twice; the program counts each once\n"
    "  leave out the checkpoint, and pass recompute= to parallelize for the same saving; or verify_capture=False, to "
    "go on with statistics that count once"
)


def explained(sides: Sides, difference: Comparison) -> str:
    """Return the error for a difference that rounding does not explain; both sides run again to find its place."""
    compared = (
        ("the loss", difference.loss),
        (f"the gradient of {difference.gradient_of}", difference.gradient),
        (f"buffer {difference.buffer_of}", difference.buffer),
    )
    what = [f"{name} by {apart:.1e}" for name, apart in compared if apart > difference.limit]
    return (
        f"the captured graph of {type(sides.model).__name__} is not what the model does in eager mode: on the same "
        f"inputs they differ in {', '.join(what)} (relative; rounding explains {difference.limit:.0e})\n  "
        + (
            TWICE
            if _counts_twice(sides, difference)
            else f"{_first(sides, difference)}\n  write that part in another way, and please report it; "
            "verify_capture=False goes on without a check"
        )
    )


def _counts_twice(sides: Sides, difference: Comparison) -> bool:
    """Return whether only statistics of a batch norm differ that eager mode runs again in the backward."""
    again = any(n.again >= 0 and "batch_norm" in str(n.target) for n in sides.captured.graph.nodes)
    statistics = difference.buffer_of.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    return again and statistics and max(difference.loss, difference.gradient) <= difference.limit


def _first(sides: Sides, difference: Comparison) -> str:
    values: list[torch.Tensor] = []
    sides.graph(lambda module: KeepingTensors(module, values))
    module_outputs: list[tuple[str, str, list[torch.Tensor]]] = []
    hooks = []

    def note(path: str, kind: str) -> PyTree:
        def hook(_module: torch.nn.Module, _args: PyTree, output: PyTree) -> None:
            tensors = [x.detach().clone() for x in pytree.tree_leaves(output) if is_tensor(x)]
            module_outputs.append((path, kind, tensors))

        return hook

    for path, module in sides.model.named_modules():
        hooks.append(module.register_forward_hook(note(path, type(module).__name__)))
    try:
        sides.eager()
    finally:
        for hook in hooks:
            hook.remove()
    by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for value in values:
        by_shape.setdefault(tuple(value.shape), []).append(value)
    for path, kind, tensors in module_outputs:
        for x in tensors:
            if not any(relative(v, x) <= difference.limit for v in by_shape.get(tuple(x.shape), ())):
                return f"the first module whose output differs is '{path or '<model>'}' ({kind})"
    if difference.loss > difference.limit:
        return "the output of every module is the same; what is computed after them differs"
    return _first_gradient(sides, difference)


def _first_gradient(sides: Sides, difference: Comparison) -> str:
    mine, theirs = sides.graph().gradients, sides.eager().gradients
    users = sides.captured.graph.consumers
    order = {}
    for i, node in enumerate(sides.captured.graph.nodes):
        if node.kind == "param":
            order[node.target] = max((u for (ref, us) in users.items() if ref.node == i for u, _ in us), default=0)
    largest = largest_value(theirs.values())
    wrong = [n for n in theirs | mine if off(mine.get(n), theirs.get(n), largest) > difference.limit]
    if not wrong:
        return "all outputs and gradients are the same; buffers differ"
    last = max(wrong, key=lambda n: order.get(n, -1))
    module = last.rpartition(".")[0] if last in order else ""
    return (
        f"all outputs are the same; going backward, the first gradient that differs is that of {last}, in module "
        f"'{module or '<model>'}': a custom backward, a hook or a detached tensor after it is not in the graph"
    )
