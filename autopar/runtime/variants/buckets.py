"""Calls that are padded up to one of a few shapes.

With ``parallelize(..., shapes="buckets", buckets=[(rows, length), ...])`` a call goes into the smallest bucket that
takes it. Its tensors get more rows, and more positions where they are as long as the call: zeros, and where the loss
takes labels the number that it ignores, so that the loss stays the mean over what was there. What a call gives is cut
back. :mod:`autopar.comparison.padding` proves, before anything is trained, that a model bears it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import CaptureError, RunError
from autopar.runtime.batches.calls import call_text
from autopar.runtime.batches.local_batch import Call
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

Size = tuple[int, int]
"""Rows and length of a call."""
Key = tuple[str, str]
"""A leaf of a call: the argument that holds it, and where in there."""
ROWS, LENGTH = "rows", "length"
Template = tuple[int | str, ...]
"""The shape of an output: numbers, and :data:`ROWS` and :data:`LENGTH` where it follows the call's."""


def size_of(leaves: Sequence[PyTree]) -> Size:
    """Return the rows and length of a call: the first dims of its first tensor that has two.

    Raises:
        CaptureError: no tensor has two dims.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
            return int(leaf.shape[0]), int(leaf.shape[1])
    raise CaptureError("shapes='buckets': no input has rows and a length (two dims), so there is nothing to pad")


@dataclass(frozen=True)
class Padding:
    """The size of a call, and that of its bucket."""

    size: Size
    bucket: Size


class Buckets:
    """The shapes of a module's calls, and how others become one of them.

    Args:
        sizes: the sizes of the buckets.
        signature: the signature of the model's forward.
        model_args: how many positional arguments it takes in a call, where targets of a loss function follow.
        dims: for every leaf that is padded, which of its dims are rows and which are as long as the call.
        fill: values for leaves that are not padded with zeros.
        templates: shapes of the model's outputs; None if they are not known, and stay as they are.
    """

    def __init__(
        self, sizes: Sequence[Size], signature: inspect.Signature, model_args: int | None,
        dims: Mapping[Key, tuple[str | None, ...]], fill: Mapping[Key, float], templates: frozenset[Template] | None,
    ) -> None:  # fmt: skip
        self.sizes = sorted(set(sizes), key=lambda size: (size[0] * size[1], size))
        self.signature, self.model_args = signature, model_args
        self.dims, self.fill, self.templates = dict(dims), dict(fill), templates

    def of(self, size: Size) -> Size:
        """Return the smallest bucket that takes a call.

        Raises:
            RunError: none does.
        """
        fitting = next((each for each in self.sizes if size[0] <= each[0] and size[1] <= each[1]), None)
        if fitting is None:
            raise RunError(
                f"a call of {size[0]} rows of length {size[1]} fits none of the buckets "
                f"({', '.join(f'{rows} x {length}' for rows, length in self.sizes)}): give a larger one to "
                "parallelize(buckets=), or pass fewer rows"
            )
        return fitting

    def padded(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> tuple[Call, Padding]:
        """Return a call as one of its bucket's shape.

        Raises:
            RunError: it fits no bucket, or a tensor has neither the rows nor the length of the call.
        """
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        size = size_of([leaf for leaf in leaves if not isinstance(leaf, DTensor)])
        padding = Padding(size, self.of(size))
        keys = keys_of(self.signature, self.model_args, args, kwargs)
        more = [self._leaf(key, leaf, padding, (args, kwargs)) for key, leaf in zip(keys, leaves, strict=True)]
        positional, by_name = pytree.tree_unflatten(more, spec)
        return (tuple(positional), dict(by_name)), padding

    def _leaf(self, key: Key, leaf: Any, padding: Padding, call: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        dims = self.dims.get(key)
        if isinstance(leaf, DTensor) or dims is None or len(dims) != leaf.dim():
            raise RunError(
                f"called with {call_text(*call)}: {'it has a DTensor' if isinstance(leaf, DTensor) else 'a tensor'} "
                f"of shape {tuple(leaf.shape)} that the example of parallelize did not have, so it is not known how it "
                "is padded to a bucket: call it as in the example, or parallelize with shapes='any'"
            )
        have, wanted = ({ROWS: size[0], LENGTH: size[1]} for size in (padding.size, padding.bucket))
        for at, dim in enumerate(dims):
            if dim is not None and leaf.shape[at] != have[dim]:
                raise RunError(
                    f"called with {call_text(*call)}: dim {at} of the tensor of shape {tuple(leaf.shape)} is the "
                    f"call's {dim}, which is {have[dim]} in the first tensor; give both the same"
                )
        pads = [0 if dim is None else wanted[dim] - have[dim] for dim in dims]
        if not any(pads):
            return leaf
        flat = [n for pad in reversed(pads) for n in (0, pad)]
        value = self.fill.get(key, 0)
        return torch.nn.functional.pad(leaf, flat, value=value)

    def cut(self, outputs: Any, padding: Padding) -> Any:
        """Return outputs of a padded call as those of the call.

        Raises:
            RunError: it is not known which of an output's dims follow the call's.
        """
        if self.templates is None or padding.size == padding.bucket:
            return outputs
        return pytree.tree_map_only(torch.Tensor, lambda value: self._cut(value, padding), outputs)

    def _cut(self, value: torch.Tensor, padding: Padding) -> torch.Tensor:
        assert self.templates is not None
        if not value.dim():
            return value
        wanted = {ROWS: padding.bucket[0], LENGTH: padding.bucket[1]}
        have = {ROWS: padding.size[0], LENGTH: padding.size[1]}
        ways = {
            tuple(have[n] if isinstance(n, str) else n for n in template)
            for template in self.templates
            if tuple(wanted[n] if isinstance(n, str) else n for n in template) == tuple(value.shape)
        }
        if len(ways) != 1:
            raise RunError(
                f"an output of shape {tuple(value.shape)} of a call that was padded from {padding.size} to "
                f"{padding.bucket} (rows, length): which of its dims are padded is not known from the example of "
                "parallelize; call it as in the example, or give a bucket of another size"
            )
        for at, length in enumerate(ways.pop()):
            value = value.narrow(at, 0, length) if value.shape[at] != length else value
        return value


def keys_of(
    signature: inspect.Signature, model_args: int | None, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> list[Key]:
    """Return the positions of a call's leaves, however the call is spelled, in the order of ``(args, kwargs)``."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    numbers, numbers_by_name = pytree.tree_unflatten(range(len(leaves)), spec)
    try:
        bound: Mapping[str, Any] = signature.bind_partial(*numbers[:model_args], **numbers_by_name).arguments
    except TypeError:  # the call itself will say what is wrong
        bound = {"args": numbers[:model_args], "kwargs": numbers_by_name}
    of_targets = {f"target {i}": target for i, target in enumerate(() if model_args is None else numbers[model_args:])}
    keys: list[Key] = [("", "")] * len(leaves)
    for name, value in {**bound, **of_targets}.items():
        for path, number in pytree.tree_flatten_with_path(value)[0]:
            keys[number] = (name, pytree.keystr(path))
    return keys


def dims_of(leaf: torch.Tensor, size: Size) -> tuple[str | None, ...]:
    """Return which dims of an example's tensor are rows, and which are as long as the example."""
    return tuple(
        ROWS if at == 0 and n == size[0] else LENGTH if n == size[1] else None for at, n in enumerate(leaf.shape)
    )
