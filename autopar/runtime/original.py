"""The model that was parallelized, afterwards: it keeps the weights and the modules that it had.

``fully_shard`` changes a model where it is, and DDP trains the model's own parameters. A parallel module has parameters
of its own. So what scripts do with the model after ``parallelize``, out of those habits, would be wrong in silence:

* ``model.state_dict()`` after training has the weights of before: refused, because a checkpoint of them loses the run;
* ``model(batch)`` computes with these weights: a warning, once, since a model may be kept as a reference;
* ``model.load_state_dict(...)`` before training does not reach the parallel module: a warning, once;
* ``model.head = nn.Linear(...)`` is not part of the program: an error at the next call of the parallel module.

Whoever writes to the model's parameters again (``model.load_state_dict(full_state_dict(pm))``) knows that they are
another copy, and hears nothing.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from autopar.errors import RunError
from autopar.runtime.state import version_of

_watched: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[Original]]] = weakref.WeakKeyDictionary()
"""Modules of models that were parallelized, with who wants to hear of a change."""
_hooks: list[Any] = []
_quiet = 0


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """The model is called here to be captured or compared, for which its weights do not matter."""
    global _quiet
    _quiet += 1
    try:
        yield
    finally:
        _quiet -= 1


class Original:
    """A model with the parallel module that was made of it."""

    def __init__(self, model: torch.nn.Module, pm: torch.nn.Module) -> None:
        self.model, self.pm = weakref.ref(model), weakref.ref(pm)
        self.modules = {path: weakref.ref(module) for path, module in model.named_modules(remove_duplicate=False)}
        self.params = {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self.versions = [version_of(p) for p in model.parameters()]
        self.trained = {name: (weakref.ref(p), version_of(p)) for name, p in pm.named_parameters()}
        self.touched = False
        """Someone has registered a module or a parameter somewhere in the model."""
        self.said: set[str] = set()
        for module in model.modules():
            _watched.setdefault(module, []).append(weakref.ref(self))
        if not _hooks:
            _hooks.append(register_module_module_registration_hook(_registered))
            _hooks.append(register_module_parameter_registration_hook(_registered))
        model.register_forward_pre_hook(_Hook(self, "_called"))
        model.register_state_dict_pre_hook(_Hook(self, "_saved"))
        model.register_load_state_dict_pre_hook(_Hook(self, "_loaded"))

    def check(self) -> None:
        """Refuse to go on with modules that the model no longer has.

        Raises:
            RunError: it names those that were replaced or added.
        """
        model = self.model()
        if not self.touched or model is None:
            return
        changed = [
            f"{kind} '{path}' was {'replaced' if path in before else 'added'}"
            for kind, before, now in (
                ("module", self.modules, dict(model.named_modules(remove_duplicate=False))),
                ("parameter", self.params, dict(model.named_parameters(remove_duplicate=False))),
            )
            for path, value in now.items()
            if path not in before or before[path]() is not value
        ]
        if changed:
            raise RunError(
                "the model was changed after parallelize, and the program does not have that: "
                + "; ".join(changed[:4]) + (f"; and {len(changed) - 4} more" if len(changed) > 4 else "")
                + "\n  change the model before parallelize, or parallelize it again (weights: "
                "model.load_state_dict(autopar.full_state_dict(pm), strict=False))"
            )  # fmt: skip
        self.touched = False

    def _stale(self) -> bool:
        """Whether the parallel module was trained, or loaded, and the model still has the weights of before."""
        model, pm = self.model(), self.pm()
        if model is None or pm is None or [version_of(p) for p in model.parameters()] != self.versions:
            return False
        return self._is_trained(pm)

    def _is_trained(self, pm: torch.nn.Module) -> bool:
        for name, param in pm.named_parameters():
            before, version = self.trained.get(name, (lambda: None, None))
            if before() is not param or version_of(param) != version:
                return True
        return False

    def _once(self, what: str, text: str) -> None:
        if what not in self.said:
            self.said.add(what)
            warnings.warn(text, stacklevel=6)

    def _called(self, *_: Any) -> None:
        if not _quiet and "called" not in self.said and self._stale():
            self._once(
                "called",
                "the model that was parallelized is called, and has the weights of before: its parallel module was "
                "trained since. Call the parallel module (pm.eval() for evaluation), or bring the weights back: "
                "model.load_state_dict(autopar.full_state_dict(pm, all_ranks=True))",
            )

    def _saved(self, *_: Any) -> None:
        if self._stale():
            raise RunError(
                "state_dict() of the model that was parallelized would have the weights of before: its parallel module "
                "was trained since\n  save pm.state_dict() (with torch.distributed.checkpoint), or "
                "autopar.full_state_dict(pm), which has the model's names and whole tensors; to have the old weights, "
                "copy them before training, or take named_parameters()"
            )

    def _loaded(self, module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        pm = self.pm()
        if pm is None or "loaded" in self.said or self._is_trained(pm):
            return
        for name, param in module.named_parameters():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape == param.shape and not (value.is_meta or param.is_meta):
                if not torch.equal(value.detach().to(param), param.detach()):
                    self._once(
                        "loaded",
                        "load_state_dict of the model that was parallelized does not reach its parallel module, which "
                        "has parameters of its own: load before parallelize, or pm.load_state_dict(...), or "
                        "autopar.load_full_state_dict(pm, ...) where only rank 0 has the weights",
                    )
                    return


class _Hook:
    """Calls a method of an :class:`Original` for its own model: copies of the model have nothing to do with it."""

    def __init__(self, original: Original, method: str) -> None:
        self.original, self.method = original, method

    def __call__(self, module: torch.nn.Module, *args: Any) -> None:
        if module is self.original.model():
            getattr(self.original, self.method)(module, *args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return self

    def __reduce__(self) -> Any:
        return _silent, ()


def _silent() -> Any:
    """A hook that does nothing: in another process there is no parallel module."""
    return _nothing


def _nothing(*_: Any) -> None: ...


def _registered(module: torch.nn.Module, name: str, value: Any) -> None:
    for ref in _watched.get(module, ()):
        original = ref()
        if original is not None:
            original.touched = True


__all__ = ["Original", "unheard"]
