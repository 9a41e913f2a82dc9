"""``vmap``, ``grad`` and ``jvp`` of ``torch.func`` in a forward, written out as operators on whole tensors.

An exported program cannot be traced through the tensors that a transform hands to its function. So the function is
traced by itself, with the transform around it, which makes operators with one more dim, or with a backward, of it; and
these are called where the transform stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from autopar.capture.trace.patches import Function
from autopar.torch_private import (
    JVP_CALL,
    functorch_apis,
    functorch_is_active,
    functorch_transforms,
    places_in_masks,
    pytree,
)
from autopar.words.trees import PyTree


@contextlib.contextmanager
def transforms_written_out() -> Iterator[None]:
    """Turn calls of ``vmap``, ``grad`` and ``jvp`` into operators of the trace."""
    mapped, grad = functorch_apis.vmap_impl, functorch_transforms.grad_impl
    grad_and_value, forward = functorch_transforms.grad_and_value_impl, JVP_CALL.get()

    def written_out_map(
        func: Function, in_dims: PyTree, out_dims: PyTree, randomness: str, chunk_size: int | None, *args: PyTree,
        **kwargs: PyTree,
    ) -> PyTree:
        def call(args: PyTree, kwargs: PyTree) -> PyTree:
            return mapped(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)

        return _written_out(call, args, kwargs)

    def written_out_grad(func: Function, argnums: PyTree, has_aux: bool, args: PyTree, kwargs: PyTree) -> PyTree:
        return _written_out(lambda args, kwargs: grad(func, argnums, has_aux, args, kwargs), args, kwargs)

    def written_out_both(func: Function, argnums: PyTree, has_aux: bool, args: PyTree, kwargs: PyTree) -> PyTree:
        return _written_out(lambda args, kwargs: grad_and_value(func, argnums, has_aux, args, kwargs), args, kwargs)

    def written_out_forward(func: object, primals: object, tangents: object, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return _written_out(lambda given, _: forward(func, *given, *args, **kwargs), (primals, tangents), {})

    with contextlib.ExitStack() as stack:
        put = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        put(functorch_apis, "vmap_impl", written_out_map)
        put(functorch_transforms, "grad_impl", written_out_grad)
        put(functorch_transforms, "grad_and_value_impl", written_out_both)
        stack.enter_context(JVP_CALL.replaced(written_out_forward))
        put(places_in_masks, "mod_index", lambda x, indices: torch.ops.aten.index(x, indices))
        yield


def _written_out(call: Function, args: PyTree, kwargs: PyTree) -> PyTree:
    """Run ``call(args, kwargs)`` by the operators that it makes; inside of another transform, as it is."""
    if functorch_is_active():
        return call(args, kwargs)
    given, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> PyTree:
        leaves = list(given)
        for i, tensor in zip(places, tensors, strict=True):
            leaves[i] = tensor
        return call(*pytree.tree_unflatten(leaves, spec))

    tensors = [given[i] for i in places]
    with disable_proxy_modes_tracing():
        program = make_fx(of_tensors)(*tensors)
    return torch.fx.Interpreter(program).run(*tensors)
