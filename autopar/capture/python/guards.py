"""Guards: Python values that a program was traced with, compared at each call.

A graph is captured once. Numbers, flags and names that ``forward`` read from modules, from objects that hang on them
(a config, a dict), from globals and closures are part of it from then on. Here they are kept with the places where they
were read. A check compares them in a few microseconds; it holds no module alive, and a value whose owner is gone can
change no more.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.python.frozen_values import OTHER, Held, SameObject, frozen, is_of_builtins, leaves_out, show
from autopar.errors import RunError, first_few
from autopar.words.trees import PyTree


@dataclass(frozen=True)
class ReadValue:
    """A value that tracing read.

    Attributes:
        path: the owner's path, as the user would write it: ``layers.0``, ``layers.0.config``, or the file of a global.
        name: the attribute, or the global; of a free variable ``cell_contents``, and its name is in the path.
        value: what it was; of a container :func:`frozen`.
        where: ``file.py:12`` of the first read, where known.
        kind: ``attribute``, ``global`` or ``cell``.
    """

    path: str
    name: str
    value: PyTree
    where: str = ""
    kind: str = "attribute"

    @property
    def label(self) -> str:
        """``'layers.0.scale'`` for messages."""
        if self.kind == "cell":
            return self.path
        if self.kind == "global":
            return f"global '{self.name}' of {self.path}"
        return f"'{self.path}.{self.name}'" if self.path else f"'{self.name}'"


@dataclass(frozen=True)
class Change:
    """A value that is not what it was when the model was captured."""

    read: ReadValue
    now: str

    def __str__(self) -> str:
        at = f" (read at {self.read.where})" if self.read.where else ""
        return f"{self.read.label} is {self.now}, and was {show(self.read.value)} when the model was captured{at}"


class _Missing:
    def __repr__(self) -> str:
        return "gone"


_MISSING = _Missing()


class _Alike:
    """Owners of which the same names are compared: one call fetches the values of all of them."""

    def __init__(self, names: tuple[str, ...], lookup: Any) -> None:
        self.get = lookup(*names)
        self.owners: list[Any] = []
        self.values: list[PyTree] = []

    def same(self) -> bool:
        return list(map(self.get, self.owners)) == self.values

    def bury(self) -> None:
        """Leave out owners that are no more."""
        alive = []
        for owner, value in zip(self.owners, self.values, strict=True):
            with contextlib.suppress(ReferenceError):
                owner.__class__  # noqa: B018  (of a dead proxy this raises)
                alive.append((owner, value))
        self.owners, self.values = [o for o, _ in alive], [v for _, v in alive]


class _Own:
    """Values in an object's own dict, for a class that looks up attributes in Python, which takes long."""

    def __init__(self, ref: Callable[[], Any], names: list[str], values: list[PyTree]) -> None:
        self.ref, self.values = ref, values[0] if len(values) == 1 else tuple(values)
        self.get = operator.itemgetter(*names)
        self.read = _Alike(tuple(names), operator.attrgetter)
        self.read.owners.append(weakref.proxy(ref()))
        self.read.values.append(self.values)

    def same(self) -> bool:
        owner = self.ref()
        if owner is None:
            return True
        try:
            return bool(self.get(object.__getattribute__(owner, "__dict__")) == self.values) or self.read.same()
        except KeyError:
            return self.read.same()

    @staticmethod
    def holds(owner: object, name: str, value: object) -> bool:
        """Check that an attribute is an entry of the object's own dict, and is looked up in Python."""
        kind = type(owner)
        if not isinstance(getattr(kind, "__getattribute__", None), types.FunctionType):
            return False
        descriptors = [type(vars(base)[name]) for base in kind.__mro__ if name in vars(base)]
        if any(hasattr(d, "__set__") for d in descriptors) or not kind.__weakrefoffset__:  # a property, say
            return False
        entries = object.__getattribute__(owner, "__dict__")
        return name in entries and entries[name] is value


class Guards:
    """Values that tracing read outside of tensors; empty for a model that reads none."""

    def __init__(self) -> None:
        self.reads: list[ReadValue] = []
        self.filled: tuple[str, ...] = ()
        """Dicts to which the forward added tensors: caches that later calls read."""
        self.of_gradient_mode: tuple[str, ...] = ()
        """Functions that ask whether gradients are on; a trace answers yes. Told of once, and then empty."""
        self._by_path: dict[str, Callable[[], Any]] = {}
        self._entries: list[tuple[Callable[[], Any], list[ReadValue]]] = []
        self._alike: dict[tuple[str, ...], _Alike] = {}
        self._own: list[_Own] = []
        self._partly: list[tuple[Callable[[], Any], ReadValue]] = []  # containers of which only a part is compared
        self._watched: list[tuple[Callable[[], Any], int, str]] = []

    def __reduce__(self) -> Any:
        return Guards, ()  # in another process there is nothing that could change

    def __len__(self) -> int:
        return len(self.reads)

    def __iter__(self) -> Iterator[ReadValue]:
        return iter(self.reads)

    def add(self, owner: object, reads: list[ReadValue]) -> None:
        """Guard values of one owner: an object for its attributes, a dict for globals, a cell for what it holds."""
        if not reads:
            return
        self.reads.extend(reads)
        kind = reads[0].kind
        weak: Any
        ref: Callable[[], Any]
        try:
            ref, weak = weakref.ref(owner), weakref.proxy(owner)
        except TypeError:
            weak = owner

            def ref(owner: object = owner) -> Any:
                return owner

        if kind == "attribute":
            self._by_path[reads[0].path] = ref
        self._entries.append((ref, reads))
        names: list[str] = []
        values: list[PyTree] = []
        in_dict: tuple[list[str], list[Any]] = [], []
        for read in sorted(reads, key=lambda r: r.name):
            now = _fetch(owner, read)
            if _holds_other(read.value) or frozen(now) != read.value or leaves_out(now) or not is_of_builtins(now):
                self._partly.append((ref, read))
            else:
                to = in_dict if kind == "attribute" and _Own.holds(owner, read.name, now) else (names, values)
                to[0].append(read.name)
                to[1].append(copy.deepcopy(now) if isinstance(read.value, tuple) else read.value)
        if in_dict[0]:
            self._own.append(_Own(ref, *in_dict))
        if names:
            lookup = operator.itemgetter if kind == "global" else operator.attrgetter
            key = ("global" if kind == "global" else "", *names)
            alike = self._alike.setdefault(key, _Alike(tuple(names), lookup))
            alike.owners.append(weak)
            alike.values.append(values[0] if len(values) == 1 else tuple(values))

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Guard the values of a tensor that is part of the program: a write to it raises its version."""
        if not tensor.is_inference():
            self._watched.append((weakref.ref(tensor), tensor._version, name))

    def owner(self, path: str) -> Any:
        """Return the object at a path, if it is alive."""
        ref = self._by_path.get(path)
        return ref() if ref is not None else None

    def read(self, path: str, name: str) -> ReadValue | None:
        """Return the guarded attribute of a module, if it is one."""
        return next((r for r in self.reads if (r.path, r.name, r.kind) == (path, name, "attribute")), None)

    def same(self) -> bool:
        """Check that all values are unchanged."""
        return self._equal() or not self.changes()

    def _equal(self) -> bool:
        """Check that all compare as equal, but for tables that tracing or a call fills by classes of tensors."""
        try:
            for alike in self._alike.values():
                try:
                    if not alike.same():
                        return False
                except ReferenceError:
                    alike.bury()
                    if not alike.same():
                        return False
            if not all(of_object.same() for of_object in self._own):
                return False
            for ref, read in self._partly:
                owner = ref()
                if owner is None:
                    continue
                if isinstance(read.value, SameObject):
                    if read.value.ref() is not _fetch(owner, read):
                        return False
                elif _now(owner, read) != read.value:
                    return False
            if any(map(_is_written, self._watched)):
                return False
        except (AttributeError, KeyError, ValueError, RuntimeError):  # it is gone, or a tensor now
            return False
        return True

    def changes(self) -> list[Change]:
        """Return the values that have changed."""
        changes: list[Change] = []
        for ref, reads in self._entries:
            owner = ref()
            for read in reads if owner is not None else ():
                now = _now(owner, read)
                if now is not read.value and now != read.value:
                    text = "another object" if isinstance(now, SameObject) else show(now)
                    both = isinstance(now, Held) and isinstance(read.value, Held)
                    changes.append(Change(read, f"another: {text}" if both else text))
        for entry in filter(_is_written, self._watched):
            tensor = Held(entry[0]())
            changes.append(
                Change(
                    ReadValue("", entry[2], tensor),
                    f"{tensor} that was written to since: it is no buffer, so the program keeps its first value",
                )
            )
        return changes

    def tell_of_gradient_mode(self) -> None:
        """Warn, once, where gradients are off and the model's code asks for that."""
        if self.of_gradient_mode and not torch.is_grad_enabled():
            warnings.warn(
                f"{first_few(self.of_gradient_mode)} asks torch.is_grad_enabled(), which was True when the model was "
                "captured: this call runs without gradients, and computes what one with gradients does. If it should "
                "be another computation, choose it by self.training (pm.eval()) or by an attribute of the model",
                stacklevel=3,
            )
            self.of_gradient_mode = ()

    def check(self) -> None:
        """Refuse to run a program that computes with values that are no longer so."""
        if not self.same():
            raise RunError(refusal(self.changes()))


def refusal(changes: list[Change]) -> str:
    """Return the message about changed values."""
    more = f"\n  and {len(changes) - 8} more" if len(changes) > 8 else ""
    return (
        "the program was captured with other values than the model has now:"
        + "".join(f"\n  {change}" for change in changes[:8]) + more
        + "\n  set them back, or call parallelize again; with on_change='recapture' it captures again by itself"
    )  # fmt: skip


def _is_written(watched: tuple[Callable[[], Any], int, str]) -> bool:
    tensor = watched[0]()
    return tensor is not None and tensor._version != watched[1]


def _now(owner: object, read: ReadValue) -> Any:
    """Return the present value of a read, to be compared with the former one."""
    value = _fetch(owner, read)
    return SameObject(value) if isinstance(read.value, SameObject) else frozen(value)


def _holds_other(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_holds_other, value))
    return value is OTHER or isinstance(value, (SameObject, Held))


def _fetch(owner: Any, read: ReadValue) -> Any:
    try:
        if read.kind == "global":
            return owner[read.name]
        own = getattr(owner, "__dict__", {})  # a parallel module may show another value than forward reads
        return own[read.name] if read.name in own else getattr(owner, read.name)
    except (AttributeError, KeyError, ValueError):
        return _MISSING


def _below(path: str, root: str) -> bool:
    return not root or path == root or path.startswith(root + ".")


def _moved(path: str, base: str, target: str) -> str:
    """Return the path below ``base`` moved below ``target``."""
    return f"{target}.{path[len(base) :].lstrip('.')}".strip(".")


def repeated(guards: Guards, one: str, others: Iterable[str], modules: Mapping[str, torch.nn.Module]) -> None:
    """Guard in the modules at paths ``others`` the reads of the one at path ``one``, whose trace stands for all."""
    reads = [
        read
        for read in guards.reads
        if read.kind == "attribute" and _below(read.path, one) and not isinstance(read.value, SameObject)
    ]
    for twin in others:
        by_path: dict[str, list[ReadValue]] = {}
        for read in reads:
            path = _moved(read.path, one, twin)
            if path in modules:  # objects that hang on modules are mostly shared, and then guarded already
                value = _now(modules[path], read) if _holds_other(read.value) else read.value
                by_path.setdefault(path, []).append(ReadValue(path, read.name, value, read.where))
        for path, reads_there in by_path.items():
            guards.add(modules[path], reads_there)
