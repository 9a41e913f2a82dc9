"""The model's class, name and signature, as a parallel module shows them.

Libraries choose what to do by ``isinstance(model, PreTrainedModel)``, ``model.__class__.__name__``,
``type(unwrap_model(unet))`` or ``inspect.signature(model.forward)``. So an object that stands for a model has a type of
its own for each class of models, with that class's name and the signature of its ``forward``, and ``__class__`` is a
subclass of both, as of modules that ``fully_shard`` was given. The type itself does not inherit from the model's class:
the model's methods would find their way past :mod:`~autopar.runtime.as_module.methods`.
"""

from __future__ import annotations

import inspect
import types
import weakref
from typing import Any

import torch

_FACE = "_autopar_face"
_kinds: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()


class AsModel(torch.nn.Module):
    """An object that is taken for a model of another class (:func:`show_as`)."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """A subclass of the model's class and of the own one; ``type()`` is the own one alone."""
        return getattr(type(self), _FACE, type(self))


def show_as(module: AsModel, kind: type) -> None:
    """Show a module as one of another class."""
    own: type = next(cls for cls in type(module).__mro__ if _FACE not in vars(cls))
    shown = _kinds.get((own, kind))
    if shown is None:
        shown = _kinds[own, kind] = _type_for(own, kind)
    object.__dict__["__class__"].__set__(module, shown)  # AsModel's property stands before it


def _type_for(own: Any, kind: Any) -> type:
    """Return a subclass of ``own`` with the name and the signature of ``kind``."""
    label = {"__module__": own.__module__, "__qualname__": f"{own.__qualname__}[{kind.__qualname__}]"}
    # no subclass of the user's: hooks of the user's class, such as registries, are not told of it
    quiet = classmethod(lambda cls, **options: None)
    shown: Any = type(kind.__name__, (own,), {**label, "__init_subclass__": quiet, _FACE: None})
    shown.forward = with_signature(own.forward, kind)
    face = {**label, "__new__": lambda cls, *args, **kwargs: kind(*args, **kwargs)}  # as model.__class__(config) means
    try:
        setattr(shown, _FACE, types.new_class(kind.__name__, (shown, kind), {}, lambda names: names.update(face)))
    except TypeError:  # a metaclass that has no common one with type, or a class that has no subclasses
        setattr(shown, _FACE, shown)
    return shown


def with_signature(forward: Any, kind: Any) -> Any:
    """Return a copy of ``forward`` that shows the arguments of the model's own."""
    copied = types.FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    copied.__dict__.update(forward.__dict__)
    copied.__doc__, copied.__qualname__ = forward.__doc__, forward.__qualname__
    try:
        copied.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # written in C
        pass
    return copied
