"""The recorder of what ``forward`` reads and writes outside of tensors while it is traced.

The classes of the model's modules, and of the objects that hang on them, look up attributes through a recorder for as
long as a trace runs. It records attribute reads of plain values (they become
:class:`.guards.Guards`), writes (a value that was read before and is written anew is another one at
every call), and generators of random numbers outside torch, whose state shows whether they were used.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from autopar.capture.python.attribute_lookups import Lookups, behind, can_tell, stored
from autopar.capture.python.attribute_outputs import LeftBehind
from autopar.capture.python.buffer_writes import BufferWrites
from autopar.capture.python.bytecode import only_appends, only_counts
from autopar.capture.python.containers import (
    OfTheCallBefore,
    new_tensors,
    only_more,
    refill,
    restored,
    shallow_copy,
    unreadable,
)
from autopar.capture.python.frozen_values import (
    OTHER,
    Held,
    SameObject,
    frozen,
    is_plain,
    items_in,
    says_the_same,
    show,
)
from autopar.capture.python.generators import WatchedGenerators, is_generator
from autopar.capture.python.globals_read import Free, free_values
from autopar.capture.python.guards import Guards, ReadValue
from autopar.capture.python.user_lines import from_machinery, user_line
from autopar.capture.trace.recording import under_way
from autopar.capture.trace.value_origins import depends_on_data
from autopar.torch_private import DisableTorchFunction, FakeTensor, pytree
from autopar.words.trees import PyTree

_FOREIGN = ("torch", "builtins", "numpy", "enum", "types", "functools", "collections", "typing", "threading", "logging",
            "re", "weakref", "_thread", "abc", "pathlib", "inspect", "contextlib")  # fmt: skip
"""Packages whose objects are not looked into."""
_ABSENT = object()


@dataclass
class Written:
    """An attribute that a forward read, and then gave another value."""

    owner: Any
    read: ReadValue
    value: PyTree
    where: str

    def __str__(self) -> str:
        now = self.value if isinstance(self.value, tuple) else frozen(self.value)
        return f"{self.read.label}, from {show(self.read.value)} to {show(now)} at {self.where}"


class Recorder:
    """The record of a trace's reads and writes outside of tensors: ``with recorder: export(...)``.

    Args:
        root: what is traced.
        prefix: the prefix of module paths that users do not see.
        functions: the functions that are called beside modules, such as a loss function.
    """

    def __init__(self, root: torch.nn.Module, prefix: str = "", functions: tuple[Any, ...] = ()) -> None:
        self.root, self.prefix = root, prefix
        self.owned: dict[int, tuple[Any, str]] = {}
        self.first: dict[tuple[int, str], tuple[Any, ReadValue]] = {}
        self.raw: dict[tuple[int, str], Any] = {}
        self.before: dict[tuple[int, str], Any] = {}
        self.counted: dict[tuple[int, str], tuple[Any, ReadValue, Any]] = {}
        self.written: dict[tuple[int, str], Written] = {}
        self.fresh: set[tuple[int, str]] = set()
        self.tensors: set[tuple[int, str]] = set()
        self.plain: dict[tuple[int, str], tuple[Any, ReadValue, torch.Tensor]] = {}
        self.kept: dict[tuple[int, str], str] = {}
        """Tensors of a call that the next one reads, from an attribute: what it is called, and where it is set."""
        self.set_on_none: dict[tuple[int, str], tuple[Any, str]] = {}
        """Tensors of :attr:`kept` that stand in attributes which were None: their owners and names."""
        self.set_first: dict[tuple[int, str], str] = {}
        """Attributes that are given tensors before anything reads them: what they are called, and where."""
        self.buffers = BufferWrites()
        self.examined: set[tuple[int, str]] = set()
        """Attributes with lists that are read for more than to append to them."""
        self.into: dict[tuple[int, str], Any] = {}
        """Tensors of :attr:`kept` that stand in lists and dicts: what these hold when forward ends."""
        self.draws = WatchedGenerators()
        self.left = LeftBehind()
        self.before_set: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        """Attributes that forward sets to more than plain values: their owners and names, and what they held."""
        self.lookups = Lookups(self._saw, self._wrote)
        self.changed: list[Written] = []
        """What the next call would read otherwise."""
        self.filled: tuple[str, ...] = ()
        """Dicts to which the forward added tensors for its next call."""
        for path, module in root.named_modules():
            if path or not prefix:  # with a prefix the root is ours
                self.owned[id(module)] = module, (path + ".").removeprefix(prefix).removesuffix(".")
        self.of_gradient_mode: list[str] = []
        """Functions that ask whether gradients are on."""
        modules = [m for m, _ in self.owned.values()]
        self.free: list[Free] = free_values(modules, functions, self.of_gradient_mode)

    # -- around a trace

    def __enter__(self) -> Recorder:
        self.lookups.active = True
        for module, _ in list(self.owned.values()):
            self.lookups.listen(type(module))
        for value in self.free:
            if value.read.value is OTHER:
                self._adopt(value.value, value.read.path if value.read.kind == "cell" else value.read.name)
        self.buffers.begin(self.owned.values())
        self.draws.begin((v.read.label, v.value, v.state) for v in self.free if v.state is not None)
        self.begin = self.root.register_forward_pre_hook(self._forward_begins)
        self.end = self.root.register_forward_hook(self._forward_ends)
        return self

    def __exit__(self, *error: object) -> None:
        self.lookups.active = False
        self.begin.remove()
        self.end.remove()
        self._ended()
        self.buffers.restore()
        self.lookups.end()
        for owner, name, before in self.before_set.values():
            attributes = vars(owner)
            if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(attributes.get(name))):
                attributes.pop(name)  # the model's next call would compute with the trace's own tensors
                if before is not _ABSENT:
                    attributes[name] = before

    # -- records of reads and writes

    def _saw(self, owner: object, name: str, value: object) -> None:
        owner = behind(owner)
        key = id(owner), name
        if type(value) is list and key not in self.examined:
            caller = sys._getframe(2)
            if not from_machinery(caller) and not only_appends(caller, name):
                self.examined.add(key)
        if key in self.first or key in self.fresh or isinstance(value, (torch.nn.Module, OfTheCallBefore)):
            return
        if isinstance(value, torch.Tensor):
            frame = sys._getframe(2)
            if not from_machinery(frame):
                self.tensors.add(key)
                self._saw_tensor(owner, name, value, frame)
            return
        owner_and_path = self.owned.get(id(owner))
        if owner_and_path is None or owner_and_path[0] is not owner or not stored(owner, name, value):
            return
        frame = sys._getframe(2)
        if from_machinery(frame):
            return
        where = user_line(frame)
        path = owner_and_path[1]
        if is_generator(value):
            self.draws.note(value, ReadValue(path, name, None).label)
            return
        with DisableTorchFunction():  # the recorder itself looks at the tensors
            frozen_value = frozen(value)
        if key in self.counted:  # not only counted: what the next call reads is another value
            if not only_counts(frame, name):
                read, value = self.counted[key][1:]
                self.first[key], self.raw[key] = (owner, read), value
            return
        if is_plain(value) and only_counts(frame, name):
            self.counted[key] = owner, ReadValue(path, name, frozen_value, where), value
            return
        if frozen_value is OTHER:
            if not isinstance(value, types.MethodType) and self._adopt(value, f"{path}.{name}".lstrip(".")):
                self.first[key] = owner, ReadValue(path, name, SameObject(value), where)
                self.raw[key] = value
            return
        self.first[key] = owner, ReadValue(path, name, frozen_value, where)
        self.raw[key] = value
        if not is_plain(value):
            self.before[key] = shallow_copy(value)
            self._inside(value, f"{path}.{name}".lstrip("."))

    def _saw_tensor(self, owner: object, name: str, value: torch.Tensor, frame: FrameType) -> None:
        """Note a plain tensor attribute, which is part of the program."""
        owner_and_path = self.owned.get(id(owner))
        if owner_and_path is not None and owner_and_path[0] is owner and stored(owner, name, value):
            key = id(owner), name
            read = ReadValue(owner_and_path[1], name, Held(value), user_line(frame))
            self.plain.setdefault(key, (owner, read, value))

    def _inside(self, container: object, path: str) -> None:
        """Follow objects that stand in a container."""
        items = items_in(container) or []
        if isinstance(container, dict):
            for key, item in items:
                self._member(item, f"{path}[{key!r}]")
        elif isinstance(container, (list, tuple)):
            for i, item in enumerate(items):
                self._member(item, f"{path}[{i}]")

    def _member(self, item: object, path: str) -> None:
        if isinstance(item, (dict, list, tuple)):
            self._inside(item, path)
        elif not is_plain(item):
            self._adopt(item, path)

    def _adopt(self, value: object, path: str) -> bool:
        """Listen to the attributes of an object that hangs on the model; return whether it is new."""
        cls = type(value)
        if isinstance(value, torch.Tensor) or id(value) in self.owned or not can_tell(cls):
            return False
        if cls.__module__.split(".")[0] in _FOREIGN and not isinstance(value, torch.nn.Module):
            return False
        self.owned[id(value)] = value, path
        self.lookups.listen(cls)
        return True

    def _wrote(self, owner: object, name: str, value: object) -> None:
        owner = behind(owner)
        owner_and_path = self.owned.get(id(owner))
        if owner_and_path is None or owner_and_path[0] is not owner:
            return
        key = id(owner), name
        if not is_plain(value):
            self.left.note(owner, owner_and_path[1], name)
            if hasattr(owner, "__dict__"):
                self.before_set.setdefault(key, (owner, name, vars(owner).get(name, _ABSENT)))
        if isinstance(value, torch.Tensor):
            self._kept(key, owner, owner_and_path[1], name, value)
            return
        if key not in self.first and key not in self.counted:  # what is read later is the forward's own
            self.fresh.add(key)
            self.left.note(owner, owner_and_path[1], name)
            return
        frame = sys._getframe(2)
        if from_machinery(frame):
            return
        self.left.note(owner, owner_and_path[1], name, counted=key in self.counted)
        read = self.first[key][1] if key in self.first else self.counted[key][1]
        self.written[key] = Written(owner, read, value, user_line(frame))

    def _kept(self, key: tuple[int, str], owner: object, path: str, name: str, value: torch.Tensor) -> None:
        """Note a tensor that is put into an attribute: the next call reads it if this one did before."""
        frame = sys._getframe(3)
        if key not in self.first and key not in self.tensors:
            self.fresh.add(key)
            self.set_first.setdefault(key, f"{ReadValue(path, name, None).label} at {user_line(frame)}")
            return
        if not from_machinery(frame) and depends_on_data(value, self.buffers.before()):
            self.kept[key] = f"{ReadValue(path, name, None).label} at {user_line(frame)}"
            if key in self.first and self.raw[key] is None:
                self.set_on_none[key] = owner, name

    def _forward_begins(self, *_: object) -> None:
        self.buffers.forward_begins()
        _set_in_forward(True)

    def _forward_ends(self, module: torch.nn.Module, _args: PyTree, output: PyTree) -> PyTree:
        """Look, while the trace still runs, for tensors that were put into containers.

        Returns:
            The model's output, with what it leaves in attributes if that is something.
        """
        _set_in_forward(False)
        for key, before in self.before.items():
            read = self.first[key][1]
            container = self.raw[key]
            if any(map(depends_on_data, new_tensors(before, container))):
                self.kept[key] = f"{read.label} at {read.where or 'its forward'}"
                owner = self.first[key][0]
                if type(container) in (list, dict) and vars(owner).get(read.name) is container:
                    self.into[key] = shallow_copy(container)
                    self.left.note_filled(owner, read.path, read.name, before)
        for key, label in self.buffers.forward_ends(self.set_first).items():
            self.kept.setdefault(key, label)
        left = self.left.at_the_end()
        return (output, left) if left else None

    # -- after a trace

    def _ended(self) -> None:
        """Note what the trace changed; containers get back what they held, and torch's copies of them make way."""
        renewed = [
            key for key, w in self.written.items()
            if key in self.first and not isinstance(w.owner, torch.nn.Module) and isinstance(w.read.value, SameObject)
            and w.value is not self.raw[key] and says_the_same(self.raw[key], w.value)
        ]  # fmt: skip
        for key in renewed:
            del self.first[key]
        changes = [w for key, w in self.written.items() if key in self.first and frozen(w.value) != w.read.value]
        filled = []
        for key, (owner, read) in self.first.items():
            container = self.raw[key]
            if key in self.before:
                now = frozen(container)
                if now != read.value:
                    if key in self.into:
                        pass  # the next call is tried with what this one has left
                    elif only_more(read.value, now):
                        filled.append(read.label)
                    elif key not in self.written:
                        changes.append(Written(owner, read, now, read.where or "its forward"))
                    refill(container, self.before[key])
                if key not in self.written and isinstance(owner, torch.nn.Module):
                    restored(owner, read.name, container)
        for value in self.free:
            now = frozen(value.now())
            if value.read.value is not OTHER and now != value.read.value:
                changes.append(Written(None, value.read, now, f"a call of {type(self.root).__name__}"))
        self.changed = changes
        self.filled = tuple(filled)

    def apply(self) -> None:
        """Leave the attributes that a forward wrote as it left them."""
        for written in self.written.values():
            restored(written.owner, written.read.name, written.value)

    @contextlib.contextmanager
    def next_call(self) -> Iterator[None]:
        """Put something unreadable where forward left tensors for its next call, in attributes, lists and dicts."""
        try:
            for owner, name in self.set_on_none.values():
                restored(owner, name, unreadable(None))
            for key, left in self.into.items():
                in_dict = isinstance(left, dict)
                now = {k: unreadable(x) for k, x in left.items()} if in_dict else [unreadable(x) for x in left]
                refill(self.raw[key], now)
            yield
        finally:
            for key in self.into:
                refill(self.raw[key], self.before[key])
            for owner, name in self.set_on_none.values():
                restored(owner, name, None)

    def leaves_alike(self, second: Recorder) -> bool:
        """Check that the next call left the same in lists and dicts, or appended to what this one left."""
        one, other = self.left.all, second.left.all
        if [(x.path, x.name, x.spec, x.plain) for x in one] != [(x.path, x.name, x.spec, x.plain) for x in other]:
            return False
        appends = {(x.path, x.name) for x in other if x.appends}
        for key, now in second.into.items():
            read = second.first[key][1]
            before = len(second.before[key]) if (read.path, read.name) in appends else 0
            if before and key in self.examined | second.examined:  # what is done to a long one is not known
                return False
            items = list(now.values()) if isinstance(now, dict) else now[before:]
            if any(isinstance(item, OfTheCallBefore) for item in items):
                return False
        return self.into.keys() == second.into.keys()

    def forget(self, keys: Iterable[tuple[int, str]]) -> None:
        """Forget reads of attributes whose values made no difference."""
        for key in keys:
            del self.first[key], self.raw[key]

    def undo(self) -> None:
        """Give the attributes that a forward wrote the values that they had."""
        for key, written in self.written.items():
            before = self.raw[key] if key in self.raw else self.counted[key][2]
            restored(written.owner, written.read.name, before)
        for value in self.free:
            if is_plain(value.value):
                value.restore()

    def learn(self, other: Recorder) -> None:
        """Add the reads of another trace of the same model."""
        self.buffers.fills |= other.buffers.fills
        for key, (owner, read) in other.first.items():
            if key not in self.first:
                self.first[key], self.raw[key] = (owner, read), other.raw.get(key)
        for place, plain_read in other.plain.items():
            self.plain.setdefault(place, plain_read)

    def guards(self, constants: Mapping[str, torch.Tensor]) -> Guards:
        """Return the reads as guards, to be checked at each call.

        Args:
            constants: tensors that are part of the program and that it does not write, by name.
        """
        guards = Guards()
        guards.of_gradient_mode = tuple(self.of_gradient_mode)
        memory = {tensor.untyped_storage()._cdata for tensor in constants.values()}
        plain = [(o, r) for o, r, t in self.plain.values() if t.untyped_storage()._cdata in memory]
        by_owner: dict[int, tuple[Any, list[ReadValue]]] = {}
        read_first = [value for key, value in self.first.items() if key not in self.buffers.fills]
        for owner, read in (*read_first, *plain):
            by_owner.setdefault(id(owner), (owner, []))[1].append(read)
        for owner, reads in by_owner.values():
            guards.add(owner, reads)
        by_place: dict[int, tuple[Any, list[ReadValue]]] = {}
        for value in self.free:
            is_written = isinstance(value.value, torch.Tensor) and value.value.untyped_storage()._cdata not in memory
            if value.read.value is not OTHER and not is_written:
                by_place.setdefault(id(value.place), (value.place, []))[1].append(value.read)
        for place, reads in by_place.values():
            guards.add(place, reads)
        for name, tensor in constants.items():
            guards.watch(name, tensor)
        return guards


def _set_in_forward(inside: bool) -> None:
    if (now := under_way()) is not None:
        now.in_forward = inside


@contextlib.contextmanager
def undone(recorder: Recorder) -> Iterator[None]:
    """Undo an attempt's writes to the model if it fails."""
    try:
        yield
    except BaseException:
        recorder.undo()
        raise
