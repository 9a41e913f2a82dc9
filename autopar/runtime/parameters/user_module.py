"""The user's module, before and while it is parallel: one object, of a class derived from its own.

Its parameters are replaced by the stored ones, as ``fully_shard`` does it; the old ones refuse any use. Capturing the
model again, and its own methods, need it as its user wrote it: :meth:`UserModule.as_written`.
"""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.capture.without_values import copied_parameter, expanded, laid_out_as
from autopar.errors import RunError
from autopar.runtime.parameters.old_parameters import OldParameter, refuse_backward

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
"""Where modules keep hooks: those that were traced are part of the program, and do not run around it."""
PLACE = "_autopar"
"""The attribute of the module and of each submodule that leads to the run."""
_MISSING = object()
Base = tuple[type, Callable[[type], dict[str, Any]]]
"""A class from which others are derived, and what these have of their own."""
_derived: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()

_parallel: weakref.WeakSet[UserModule] = weakref.WeakSet()


@dataclass
class _Module:
    """A module of the user's, with its tables of parameters, buffers and hooks as written and as stored."""

    path: str
    module: torch.nn.Module
    kind: type[torch.nn.Module]
    written: dict[str, Any]
    stored: dict[str, Any]
    derived: type | None = None


class UserModule:
    """A user's module with its submodules.

    Attributes:
        params: the user's own parameters by all their names; without values once the module is parallel.
        buffers: likewise, as they were.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.params = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.modules = [
            _Module(
                path, module, type(module),
                {name: module.__dict__[name] for name in ("_parameters", "_buffers", *HOOKS)},
                {
                    **{
                        table: {key: None for key, value in module.__dict__[table].items() if value is None}
                        for table in ("_parameters", "_buffers")
                    },
                    **{hooks: OrderedDict() for hooks in HOOKS},
                },
            ) for path, module in model.named_modules()
        ]  # fmt: skip
        self.wanted = {name: param.requires_grad for name, param in self.params.items()}
        self.kinds = {id(param): type(param) for param in self.params.values()}
        self.names: dict[int, str] = {}
        for name, param in self.params.items():
            self.names.setdefault(id(param), name)
        self._tables = {each.module: each.stored for each in self.modules}
        self.on_meta: list[dict[str, dict[str, Any]]] = []
        """The tables of each module of a model on the meta device, as written."""
        self.hidden: dict[tuple[str, str], Any] = {}
        """By path and name attributes that calls of the program set, or do not set, with what they were."""
        self.is_written = False
        """The module is now as its user wrote it."""

    def owner_of(self, name: str) -> tuple[torch.nn.Module, str]:
        """Return the module and the key under which a parameter or buffer is registered."""
        *parents, key = name.split(".")
        owner: Any = self.model
        for parent in parents:
            owner = owner._modules[parent]
        return owner, key

    def stored_at(self, name: str) -> tuple[dict[str, Any], str]:
        """Return the tables of what is stored in the module of a parameter or buffer, and its key there."""
        owner, key = self.owner_of(name)
        return self._tables[owner], key

    def store(self) -> None:
        """Take the user's parameters, buffers and hooks out, for stored ones to be registered."""
        for each in self.modules:
            each.module.__dict__.update(each.stored)

    def restore(self) -> None:
        """Put the module's class and attributes back: the module was not parallelized. Not after :meth:`free`."""
        for each in self.modules:
            each.module.__dict__.pop(PLACE, None)
            if type(each.module) is not each.kind:
                object.__setattr__(each.module, "__class__", each.kind)
            each.module.__dict__.update(each.written)

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Let the module be made parallel in this scope; after an error it is as it was."""
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def derive(self, place: Callable[[str, type[torch.nn.Module]], object], whole: Base, part: Base) -> None:
        """Give the module and its submodules derived classes.

        Args:
            place: gives what is reached from each of them, by its path and the class that its user wrote.
            whole: what the class of the module has in addition to its own.
            part: what those of its submodules have.
        """
        for each in self.modules:
            each.derived = derived(each.kind, *(part if each.path else whole))
            for table in ("_parameters", "_buffers"):
                stored = each.stored[table]
                for key in each.written[table]:  # in the order of the user's
                    if key in stored:
                        stored[key] = stored.pop(key)
        for each in self.modules:
            object.__setattr__(each.module, "__class__", each.derived)
            each.module.__dict__[PLACE] = place(each.path, each.kind)

    def free(self, device: torch.device) -> None:
        """Free the old parameters and buffers, which refuse any use from now on; the stored ones are on ``device``."""
        _parallel.add(self)
        self._replace_meta(device)
        self._free_buffers()
        for param in {id(p): p for p in self.params.values()}.values():
            if param.requires_grad:
                refuse_backward(param, self.names[id(param)])
            self._free(param)

    def _free_buffers(self) -> None:
        """Keep no buffer of the user's that is stored whole."""
        for each in self.modules:
            for key, stored in each.stored["_buffers"].items():
                if isinstance(stored, torch.Tensor) and not isinstance(stored, DTensor):
                    self.buffers[f"{each.path}.{key}" if each.path else key] = stored
                    each.written["_buffers"][key] = stored

    def _replace_meta(self, device: torch.device) -> None:
        """Move the parameters of a model on the meta device to the stored ones' device, to be given values there."""
        new = {id(param): copied_parameter(param, device) for param in self.params.values() if param.is_meta}
        if not new:
            return
        self.on_meta = [{name: copy.copy(table) for name, table in each.written.items()} for each in self.modules]
        for name, param in self.params.items():
            if id(param) in new:
                owner, key = self.owner_of(name)
                written = next(each.written for each in self.modules if each.module is owner)
                written["_parameters"][key] = self.params[name] = new[id(param)]
                self.names.setdefault(id(new[id(param)]), self.names[id(param)])
                self.kinds[id(new[id(param)])] = torch.nn.Parameter
                OldParameter.make(param, self.names[id(param)])

    def _free(self, param: torch.nn.Parameter, device: torch.device | None = None) -> None:
        param.grad = None
        param.data = expanded(param, device)
        OldParameter.make(param, self.names[id(param)])

    @contextlib.contextmanager
    def as_written(
        self, values: Mapping[str, torch.Tensor] | None = None, requires_grad: Mapping[str, bool] | None = None, *,
        captures: bool = True,
    ) -> Iterator[torch.nn.Module]:  # fmt: skip
        """Restore the module as its user wrote it in this scope: class, own parameters, buffers and hooks.

        Args:
            values: whole values by name, on any device; parameters that have none have their shapes only.
            requires_grad: whether parameters want gradients; by default as when it was parallelized.
            captures: it is captured, so attributes that its forward sets are as when it was parallelized.

        Raises:
            RunError: it has other submodules, parameters or hooks afterwards.
        """
        if self.is_written:
            yield self.model
            return
        values = values or {}
        tables = self.on_meta if self.on_meta and captures and not values else [each.written for each in self.modules]
        places = [(each.module.__dict__.pop(PLACE), dict(each.module.__dict__)) for each in self.modules]
        for each, written in zip(self.modules, tables, strict=True):
            buffers = written["_buffers"]
            for key, stored in each.module._buffers.items() if tables is not self.on_meta else ():
                name = f"{each.path}.{key}" if each.path else key
                whole = values.get(name, None if isinstance(stored, DTensor) else stored)
                if whole is not None and key in buffers:
                    buffers[key] = whole.detach().to(buffers[key].device, copy=True)
            for param in written["_parameters"].values():
                if type(param) is OldParameter:
                    param.__class__ = self.kinds[id(param)]  # type: ignore[assignment]
            each.module.__dict__.update(written)
            object.__setattr__(each.module, "__class__", each.kind)
        devices = {id(param): param.device for param in self.params.values()}
        for name, param in self.params.items():
            if self.names[id(param)] == name:
                param.__class__ = self.kinds[id(param)]
                if name in values:
                    param.data = laid_out_as(param, values[name])
                param.requires_grad_((requires_grad or self.wanted)[name])
        before = [(dict(each.module._modules), *(dict(written[name]) for name in ("_parameters", *HOOKS)))
                  for each, written in zip(self.modules, tables, strict=True)]  # fmt: skip
        self.is_written = True
        try:
            with self._shown() if captures else contextlib.nullcontext():
                yield self.model
            self._check_unchanged(before, tables)
        finally:
            self.is_written = False
            for each, written, (place, stored), was in zip(self.modules, tables, places, before, strict=True):
                attributes = each.module.__dict__
                for table, had in zip(("_parameters", *HOOKS), was[1:], strict=True):
                    written[table].clear()
                    written[table].update(had)
                for param in written["_parameters"].values() if tables is self.on_meta else ():
                    if param is not None:
                        OldParameter.make(param, self.names[id(param)])
                attributes["_modules"].clear()
                attributes["_modules"].update(was[0])
                attributes.update({name: stored[name] for name in each.written})
                attributes[PLACE] = place
                object.__setattr__(each.module, "__class__", each.derived)
            self._free_buffers()
            for param in {id(p): p for p in self.params.values()}.values():
                self._free(param, devices[id(param)])

    @contextlib.contextmanager
    def as_captured(self) -> Iterator[None]:
        """Show hidden attributes that nobody has set since, for guards that read them."""
        owners = {each.path: each.module.__dict__ for each in self.modules} if self.hidden else {}
        shown = [(owners[path], name) for path, name in self.hidden if name not in owners[path]]
        for (path, name), value in self.hidden.items():
            owners[path].setdefault(name, value)
        try:
            yield
        finally:
            for attributes, name in shown:
                del attributes[name]

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """Show hidden attributes as they were."""
        owners = {each.path: each.module.__dict__ for each in self.modules}
        now = [(owners[path], name, owners[path].get(name, _MISSING)) for path, name in self.hidden]
        for (path, name), value in self.hidden.items():
            owners[path][name] = value
        try:
            yield
        finally:
            for attributes, name, value in now:
                attributes.pop(name, None)
                if value is not _MISSING:
                    attributes[name] = value

    def _check_unchanged(
        self, before: list[tuple[dict[str, Any], ...]], tables: list[dict[str, dict[str, Any]]]
    ) -> None:  # fmt: skip
        for each, written, (modules, *had) in zip(self.modules, tables, before, strict=True):
            if each.module._modules != modules or written["_parameters"] != had[0]:
                raise RunError(
                    f"'{each.path or each.kind.__name__}' has other submodules or parameters than before, which the "
                    "program does not have: change them before parallelize"
                )
            if any(written[name] != hooks for name, hooks in zip(HOOKS, had[1:], strict=True)):
                raise RunError(
                    f"hooks were registered on '{each.path or each.kind.__name__}' or removed, which the program does "
                    "not have: register them on its parameters, or before parallelize"
                )


def derived(kind: type, base: type, names_for: Callable[[type], dict[str, Any]]) -> type:
    """Return a class of both, with the name and documentation of ``kind``.

    Args:
        kind: the user's class.
        base: a class that adds to it.
        names_for: gives what it has in addition.

    Raises:
        RunError: there can be none.
    """
    found = _derived.get((base, kind))
    if found is not None:
        return found

    def names(namespace: dict[str, Any]) -> None:
        namespace.update(
            __module__=kind.__module__, __qualname__=kind.__qualname__, __doc__=kind.__doc__,
            __new__=lambda cls, *args, **kwargs: kind(*args, **kwargs),  # as model.__class__(config) means
            **names_for(kind),
        )  # fmt: skip

    try:
        found = types.new_class(kind.__name__, (base, kind), {}, names)
    except TypeError as error:
        raise RunError(f"{kind.__name__} cannot be parallelized: its class has no subclass ({error})") from error
    _derived[base, kind] = found
    return found


def written_class(module: torch.nn.Module) -> type:
    """Return the class that the user gave a module, also where it is parallel."""
    place: Any = module.__dict__.get(PLACE)
    return type(module) if place is None else place.kind


def names_in_parallel_models() -> dict[int, str]:
    """Return, by ids of the parameters that parallel models train, their names there."""
    return {
        id(param): f"{each.path}.{key}" if each.path else key
        for user in _parallel if not user.is_written
        for each in user.modules for key, param in each.module._parameters.items()
    }  # fmt: skip
