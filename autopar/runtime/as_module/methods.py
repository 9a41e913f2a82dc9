"""Methods of the model, called on its parallel module: ``pm.generate(...)``, ``pm.get_num_params()``.

A program is what ``forward`` computes. Any other method runs as it is written, on every rank, on the model as its user
wrote it, with the parameters and buffers of now, whole. That is for what has no gradient: generating, counting,
exporting. An optimizer that a method makes gets the parallel module's parameters; what it freezes is frozen there; a
generator goes on with what was gathered. What would be lost is refused: gradients, writes to parameters and buffers,
other modules, hooks, functions that compute later.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from autopar.errors import RunError, first_few
from autopar.runtime.one_mesh.left_attributes import refusing_what_is_left
from autopar.runtime.optimizers.user_optimizers import Move
from autopar.runtime.variants.run import ParallelRun
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

_END = object()


def method_of(name: str, written: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method ``name`` of a parallel module, or of a submodule, of whose class ``written`` is."""

    @functools.wraps(written)
    def method(self: torch.nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        at = self.__dict__.get("_autopar")
        if at is None or (at.path and is_called_by_program(self)):
            return written(self, *args, **kwargs)
        run: ParallelRun = at.run
        shown = f"{at.kind.__name__}.{name}"
        with run.all_call(shown):
            values = run.whole_values()
            result = _once(run, shown, values, lambda: written(self, *args, **kwargs))
        return _streamed(run, shown, values, result) if inspect.isgenerator(result) else result

    return method


def is_called_by_program(part: torch.nn.Module) -> bool:
    """Return whether a submodule has no tensors, or those that a program has given it for a user's autograd.Function.

    Such a Function calls modules itself (:func:`autopar.rules.function.swapped`). In a pipeline other ranks may have
    a submodule's tensors.
    """
    tensors = [x for m in part.modules() for table in (m._parameters, m._buffers) for x in table.values()]
    held = [x for m in part.modules() for x in m._parameters.values() if x is not None]
    if any(x is not None for x in tensors):
        return any(not isinstance(x, torch.nn.Parameter) for x in held)
    at: Any = part.__dict__["_autopar"]
    return not any(name.startswith(f"{at.path}.") for name in (*at.run.user.params, *at.run.user.buffers))


def _once(run: ParallelRun, shown: str, values: Mapping[str, torch.Tensor], call: Callable[[], Any]) -> Any:
    """Run a method, or a generator on to what it yields, and refuse what would be lost."""
    stored = dict(run.named_parameters(remove_duplicate=False))
    now = {name: param.requires_grad for name, param in stored.items()}
    with run.user.as_written(values, {**run.user.wanted, **now}, captures=False) as model, refusing_what_is_left(run):
        held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        versions = {name: tensor._version for name, tensor in held.items()}
        hooks = {name: len(tensor._backward_hooks or ()) for name, tensor in held.items()}
        result = call()
        leaves = pytree.tree_leaves(result)
        if not inspect.isgenerator(result):
            _check_leaves(shown, leaves, {id(tensor) for tensor in held.values()})
        written = [name for name, tensor in held.items() if tensor._version != versions[name]]
        if written:
            raise RunError(
                f"{shown}() has written to {first_few(written)}, whole copies of which were gathered for it, so the "
                "parallel module does not have that: write to pm.get_parameter(...) under torch.no_grad(), or call the "
                "method before parallelize"
            )
        lost = [
            name for name, tensor in held.items()
            if tensor.grad is not None or len(tensor._backward_hooks or ()) != hooks[name]
        ]  # fmt: skip
        if lost:
            raise RunError(
                f"{shown}() has left gradients or hooks on {first_few(lost)}, whole copies of which were gathered for "
                "it, so the parallel module does not have them: call the model and backward() outside of the method, "
                "or parallelize the inner network alone (model.net = autopar.parallelize(model.net, ...)); and "
                "register hooks on the model's parameters"
            )
        after = {name: param.requires_grad for name, param in run.user.params.items()}
        moves = [Move(leaf, run.user.params) for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)]
        moves = [move for move in moves if any(name is not None for names in move.layout for name in names)]
        for move in moves:
            move.check()
        old = {id(param): stored.get(name) for name, param in reversed(run.user.params.items())}
        result = pytree.tree_map(lambda leaf: old.get(id(leaf), leaf), result) if leaves else result
    for move in moves:
        move.to(dict(run.named_parameters(remove_duplicate=False)), run.device, run.ranks()[0])
    freeze_alike(run, after)
    return result


def _streamed(
    run: ParallelRun, shown: str, values: Mapping[str, torch.Tensor], generator: Iterator[Any]
) -> Iterator[Any]:  # fmt: skip
    """Yield what a method yields, with the values that were gathered when it was called."""
    while (value := _once(run, shown, values, lambda: next(generator, _END))) is not _END:
        yield value


def _check_leaves(shown: str, leaves: Collection[Any], of_the_model: Collection[int]) -> None:
    """Refuse what would lead back to the values that were gathered.

    Raises:
        RunError: it says what.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and _leads_to(leaf, of_the_model):
            raise RunError(
                f"{shown}() gives a tensor with a gradient, which would not reach the parameters: the program is what "
                "forward computes, and any other method runs as it is written, on whole copies of them\n"
                "  call the model and compute the loss outside, or pass loss_fn= to parallelize; or parallelize the "
                "inner network and keep the module with this method around it: model.net = "
                "autopar.parallelize(model.net, ...); for values only, call it under torch.no_grad()"
            )
        if (inspect.isroutine(leaf) and not inspect.isbuiltin(leaf)) or isinstance(leaf, functools.partial | Iterator):
            raise RunError(
                f"{shown}() gives a {type(leaf).__name__}, which would compute later, when the parameters that were "
                "gathered for it are gone: call the method for what that gives"
            )


def _leads_to(tensor: torch.Tensor, leaves: Collection[int]) -> bool:
    """Return whether a gradient of a tensor would come to one of `leaves`."""
    to_do, seen = [tensor.grad_fn], set[Any]()
    while to_do:
        node = to_do.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        to_do += [behind for behind, _ in node.next_functions]
    return False


def freeze_alike(run: ParallelRun, requires_grad: Mapping[str, bool]) -> None:
    """Freeze or thaw stored parameters as the user's own code has done it to the old ones."""
    for name, param in run.named_parameters(remove_duplicate=False):
        if param.requires_grad is not requires_grad[name]:
            param.requires_grad_(requires_grad[name])
