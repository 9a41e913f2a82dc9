"""Storages and versions: what a traced tensor reads after others have written to its memory.

A graph has values that never change; a traced program has memory that is written through any of the tensors that share
it. Between the two stand

* a :class:`Storage`: one piece of memory, with the value of its *root*, the first tensor that had it, and a version;
* a :class:`Place` in it: the root, or a view of another place. Every traced tensor is some place;
* a :class:`History`: what autograd knows of it. Differentiable views share the history of their base; ``detach`` and
  views under ``no_grad`` begin one without gradient. All histories of a storage have the same values.

Reading a place that was written since replays the chain of views on the root's value. Writing a place makes a new root
value by the inverses of the views (:mod:`.inverses`) and a new version. A write that one history makes
changes the others' values and not their gradients: they read the new value with their own history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from autopar.capture.aliasing.inverses import Form, flattened, picked, placed, put_back, written
from autopar.rules.families.value_without_history import WITH_VALUE
from autopar.words.graph import Ref, Spec, map_refs
from autopar.words.trees import PyTree


class CannotInvert(Exception):
    """A write through views of which no value of the base follows; the text says why."""


class Geometry(NamedTuple):
    """Where the elements of a traced tensor lie in its storage, from where the root begins."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(val: torch.Tensor) -> Geometry:
        """Return the geometry of a root."""
        return Geometry(tuple(val.size()), tuple(val.stride()), 0, val.dtype)

    @staticmethod
    def within(outer: Geometry | None, val: torch.Tensor, stride: tuple[int, ...], offset: int) -> Geometry | None:
        """Return the geometry of a view in ``outer``; None if it reads the memory as another dtype."""
        if outer is None or outer.dtype != val.dtype or len(stride) != val.dim():
            return None
        return Geometry(tuple(val.size()), stride, outer.offset + offset, val.dtype)

    @property
    def overlaps(self) -> bool:
        """True where two elements may be one in memory."""
        reach = 0
        for n, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda d: d[1]):
            if n > 1 and stride <= reach:
                return True
            reach += (n - 1) * stride if n > 1 else 0
        return False


@dataclass(eq=False)
class ViewStep:
    """A view operator in its one spelling: ``target(*args, **kwargs)``, where ``parent`` stands for what is viewed."""

    target: str
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    parent: Ref
    outs: tuple[Spec | None, ...]
    name: str
    places: dict[int, Place] = field(default_factory=dict)

    def form(self, base: Ref) -> Form:
        """Return the view's target and arguments, with `base` as what is viewed."""
        return self.target, map_refs(self.args, lambda r: base if r == self.parent else r)


@dataclass(eq=False)
class Place:
    """Place of a tensor in a storage: the root, or output ``number`` of a view of ``parent``.

    Where ``step`` is None, it is the elements that ``as_strided`` picks of the root.
    """

    storage: Storage
    spec: Spec
    geometry: Geometry | None
    parent: Place | None = None
    step: ViewStep | None = None
    number: int = 0


@dataclass(eq=False)
class History:
    """The autograd history of a storage: ``root`` is the root's value with this gradient, None if there is none.

    ``known`` has the values of places at ``version``. ``by_data`` says that it came by ``x.data``: autograd does not
    notice what is written there, not even where it has kept the values.
    """

    storage: Storage
    root: Ref | None = None
    version: int = -1
    known: dict[Place, Ref] = field(default_factory=dict)
    by_data: bool = False


class Storage:
    """One piece of memory; ``value`` is that of the root, last written by anyone.

    ``origin`` is ``(kind, name)`` of the parameter, buffer or input that it belongs to; ``shared`` names another one
    that has the same memory; ``begins`` is where its root begins in memory that was there before; ``changing`` says
    that an operator writes it beside its schema.
    """

    def __init__(self, spec: Spec, geometry: Geometry | None, value: Ref, needs_grad: bool) -> None:
        self.root = Place(self, spec, geometry)
        self.value = value
        self.version = 0
        self.origin: tuple[str, str] | None = None
        self.shared = ""
        self.changing = False
        self.begins = 0
        self.first = History(self, value if needs_grad else None, 0, {self.root: value})
        self.plain = History(self)  # what is read and written under no_grad


@dataclass(frozen=True, slots=True)
class Alias:
    """A traced tensor."""

    history: History
    place: Place


class _Graph(Protocol):
    """What reading and writing make operators with."""

    def emit(
        self, target: str, args: tuple[object, ...], kwargs: dict[str, PyTree], outs: tuple[Spec | None, ...], name: str
    ) -> list[Ref]: ...

    def needs_grad(self, ref: Ref) -> bool: ...


class Memory:
    """Reads and writes places; operators that are needed for it are made by ``graph``."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph

    def read(self, alias: Alias, *, no_grad: bool = False) -> Ref:
        """Return the value of a tensor now; with ``no_grad`` one without gradient."""
        history, place = alias.history, alias.place
        if not no_grad:
            return self._value(history, place)
        plain = place.storage.plain
        self._sync(plain)
        if place not in plain.known and history.version == place.storage.version and place in history.known:
            plain.known[place] = self._detached(history.known[place], place.spec)
        return self._value(plain, place)

    def begin(self, place: Place, ref: Ref, *, by_data: bool = False, history: Ref | None = None) -> Alias:
        """Return a tensor with a new history at ``place``: without gradient, or with that of ``history``."""
        root = None
        if history is not None:
            (ref,) = self.graph.emit(WITH_VALUE, (self._detached(ref, place.spec), history), {}, (place.spec,), "")
            root = ref
        return Alias(History(place.storage, root, place.storage.version, {place: ref}, by_data), place)

    def passes(self, alias: Alias, ref: Ref) -> None:
        """Pass a tensor's gradient through ``ref``, which has its value, from here on."""
        history = alias.history
        self._sync(history)
        if alias.place.parent is None:
            history.root, history.known = ref, {}
        history.known[alias.place] = ref

    def _sync(self, history: History) -> None:
        storage = history.storage
        if history.version == storage.version:
            return
        history.version = storage.version
        history.known = {}
        if history.root is not None:
            value = self._detached(storage.value, storage.root.spec)
            (history.root,) = self.graph.emit(WITH_VALUE, (value, history.root), {}, (storage.root.spec,), "")

    def _value(self, history: History, place: Place) -> Ref:
        self._sync(history)
        value_at = history.known
        ref = value_at.get(place)
        if ref is not None:
            return ref
        if place.parent is None:
            ref = history.root
            if ref is None:
                ref = self._detached(place.storage.value, place.spec)
        else:
            base = self._value(history, place.parent)
            step = place.step
            if step is None:
                ref = self._picked(place, base)
            else:
                target, args = step.form(base)
                results = self.graph.emit(target, args, step.kwargs, step.outs, step.name)
                for number, output in step.places.items():
                    value_at[output] = results[number]
                ref = results[place.number]
        value_at[place] = ref
        return ref

    def _detached(self, ref: Ref, spec: Spec) -> Ref:
        if not self.graph.needs_grad(ref):
            return ref
        return self.graph.emit("aten.detach.default", (ref,), {}, (spec,), "")[0]

    # -- writes

    def write(self, alias: Alias, new: Ref, *, no_grad: bool = False) -> None:
        """Put a value of the same shape and dtype where a tensor lies. With ``no_grad`` no history sees it.

        Raises:
            CannotInvert: the tensor's views have no inverse.
        """
        place, storage = alias.place, alias.place.storage
        history = storage.plain if no_grad else alias.history
        new_values = {place: new}
        at = place
        while (parent := at.parent) is not None:
            base = self._base(alias, parent, no_grad)
            inverse = None
            if at.step is not None:
                target, args = at.step.form(base)
                inverse = written(self.graph.emit, target, args, at.number, new, parent.spec)
            if inverse is None:  # by strides, from the root
                base = self._base(alias, storage.root, no_grad)
                new, at = self._placed(place, base, new_values[place]), storage.root
                new_values = {place: new_values[place], at: new}
                break
            new, at = inverse, parent
            new_values[at] = new
        storage.value = new
        storage.version += 1
        history.root = new if self.graph.needs_grad(new) else None
        history.version, history.known = storage.version, new_values

    def _base(self, alias: Alias, place: Place, no_grad: bool) -> Ref:
        return self.read(Alias(alias.history, place), no_grad=no_grad)

    def _strides(self, place: Place) -> tuple[Geometry, Geometry]:
        """Return the geometry of a place, and of the root."""
        geometry, root = place.geometry, place.storage.root.geometry
        if geometry is None or root is None or geometry.dtype != root.dtype:
            raise CannotInvert("its views change how the memory is read")
        return geometry, root

    def _picked(self, place: Place, base: Ref) -> Ref:
        geometry, root = self._strides(place)
        flat = flattened(self.graph.emit, base, root.size, root.stride, place.storage.root.spec)
        if flat is None:
            raise CannotInvert("it reads memory by strides that the traced tensors do not determine")
        return picked(self.graph.emit, flat, geometry.size, geometry.stride, geometry.offset, place.spec)

    def _placed(self, place: Place, base: Ref, new: Ref) -> Ref:
        geometry, root = self._strides(place)
        if geometry.overlaps:
            raise CannotInvert("several of its elements are one in memory")
        spec = place.storage.root.spec
        flat = flattened(self.graph.emit, base, root.size, root.stride, spec)
        if flat is None:
            raise CannotInvert("its views have no inverse")
        flat = placed(self.graph.emit, flat, geometry.size, geometry.stride, geometry.offset, new, spec)
        return put_back(self.graph.emit, flat, root.size, root.stride, spec)
