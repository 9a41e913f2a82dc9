"""The parameters that a model had before ``parallelize``, which refuse any use: they are not those that train."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from autopar.errors import RunError
from autopar.torch_private import DisableTorchFunctionSubclass, pytree
from autopar.words.trees import PyTree

_OF_FORM = frozenset({
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_meta", "names", "is_cuda", "is_cpu",
    "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "output_nr", "_version",
})  # fmt: skip
"""Attributes that tell a tensor's form."""
_TELL_FORM = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous", "is_floating_point",
    "is_complex", "is_inference", "is_signed", "is_shared", "is_same_size", "get_device", "__len__", "__hash__",
    "__repr__", "__format__", "has_names", "__reduce_ex__",
})  # fmt: skip
"""Functions that do."""
_NAME = "_autopar_name"


def refuse_backward(param: torch.nn.Parameter, name: str) -> None:
    """Let a backward of what was computed with a parameter raise an error once that is an old one."""
    held = weakref.ref(param)

    def refuse(_: Any) -> None:
        if type(held()) is OldParameter:
            raise RunError(
                f"backward() of what was computed before parallelize, with parameter {name!r}: parallelize has "
                "replaced it by another one, which this gradient would not reach; call the model again, and "
                "backward() of that"
            )

    torch.autograd.graph.get_gradient_edge(param).node.register_prehook(refuse)  # of the graphs that hold it


class OldParameter(torch.nn.Parameter):
    """A parameter that a parallel module has replaced by another one. It has a shape, and no values."""

    @property
    def name_in_model(self) -> str:
        """Its name in the model that was parallelized."""
        name: str = self.__dict__[_NAME]
        return name

    @staticmethod
    def make(param: torch.nn.Parameter, name: str) -> None:
        """Turn a parameter into one."""
        param.__dict__[_NAME] = name
        param.__class__ = OldParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _TELL_FORM or (name == "__get__" and attribute in _OF_FORM):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        label = next((a.__dict__.get(_NAME) for a in pytree.tree_leaves(args) if type(a) is OldParameter), None)
        what = attribute if name in ("__get__", "__set__") else name
        raise RunError(
            f"parameter{f' {label!r}' if label else ''} of before parallelize is used ({what}), which has replaced it "
            "by another one, a DTensor where there are several ranks: this one has no values, and does not train\n"
            "  make optimizers, averages and lists of parameters after parallelize, from the parameters of the model; "
            "or hand an optimizer to it: parallelize(model, ..., optimizer=optimizer)"
        )
