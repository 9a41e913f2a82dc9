"""The model that was parallelized, afterwards: it keeps the weights and the modules that it had.

``fully_shard`` changes a model where it is, and DDP trains the model's own parameters. A parallel module has parameters
of its own. So what scripts do with the model after ``parallelize``, out of those habits, would be wrong in silence:

* ``model.state_dict()`` after training has the weights of before: refused, because a checkpoint of them loses the run;
* ``model(batch)`` computes with these weights, and an average that was made of the model (``EMA(model)``) stays at
  them: a warning, once, since a model may be kept as a reference;
* ``model.load_state_dict(...)`` before training does not reach the parallel module: a warning, once;
* ``model.head = nn.Linear(...)`` is not part of the program: an error at the next call of the parallel module;
* ``model.backbone.requires_grad_(False)`` freezes nothing: an error at one of the next calls;
* ``model.ema.weight.data.mul_(0.9)``, ``nn.init.zeros_(model.head.weight)`` write to what is not read: a warning, once;
* ``model.eval()`` leaves the parallel module in training mode: a warning, once.

Whoever loads the model's parameters again after training (``model.load_state_dict(full_state_dict(pm))``) knows that
they are another copy, and hears nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from autopar.errors import RunError
from autopar.runtime.as_module.old_parameters import OldParameters
from autopar.runtime.as_module.replaced_parameters import hear, hear_no_more
from autopar.runtime.batches.same_batch import is_checked
from autopar.runtime.parameters.state import count_steps, version_of
from autopar.torch_private import DisableTorchFunctionSubclass

Method = TypeVar("Method", bound=Callable[..., Any])
_watched: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[Original]]] = weakref.WeakKeyDictionary()
"""Modules of models that were parallelized, with who wants to hear of a change."""
_hooks: list[Any] = []
_hearing: set[weakref.ref[Original]] = set()
"""Those that hear when the values of their models' parameters are read."""
_one_after_the_other = threading.RLock()
"""Threads that are ranks of one process begin and end to be quiet in turn."""
_quiet = 0
OFTEN = 64
"""Every so many calls of a parallel module it is seen whether the model's parameters were frozen or written to."""


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """The model is called here to be captured or compared, for which its weights do not matter."""
    global _quiet
    with _one_after_the_other:
        _quiet += 1
        if _quiet == 1:
            for original in _those_that_hear():
                hear_no_more(original.old.named())
    try:
        yield
    finally:
        with _one_after_the_other:
            _quiet -= 1
            if not _quiet:
                for original in _those_that_hear():
                    original.hear()


def _looking(method: Method) -> Method:
    """A method that looks at a model's parameters itself, which is no read by a script."""

    @functools.wraps(method)
    def looks(*args: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return method(*args)

    return looks  # type: ignore[return-value]


class Original:
    """A model with the parallel module that was made of it."""

    def __init__(self, model: torch.nn.Module, pm: torch.nn.Module) -> None:
        me = weakref.ref(self)
        self.model, self.pm = weakref.ref(model), weakref.ref(pm, lambda _: _hear_no_more(me()))
        self.modules = {path: weakref.ref(module) for path, module in model.named_modules(remove_duplicate=False)}
        self.params = {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self.versions = [version_of(p) for p in model.parameters()]
        for param in pm.parameters():
            count_steps(param)
        self.trained = {name: (weakref.ref(p), version_of(p)) for name, p in pm.named_parameters()}
        self.old = OldParameters(model.named_parameters())
        self.calls, self.mode = 0, model.training
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
        model.register_load_state_dict_post_hook(_Hook(self, "_was_loaded"))
        with _one_after_the_other:
            _hearing.add(me)
            if not _quiet:
                self.hear()

    def hear(self) -> None:
        """Hear when the values of the model's parameters are read."""
        me = weakref.ref(self)

        def read(name: str) -> None:
            original = me()
            if original is not None:
                original._read(name)

        hear(self.old.named(), read)

    @_looking
    def at_call(self, pm: torch.nn.Module) -> None:
        """Look at the model before a call of its parallel module.

        Raises:
            RunError: modules or parameters were replaced, or parameters frozen.
        """
        model = self.model()
        if model is None or _quiet:
            return
        if self.touched:
            self.check()
        if model.training is not self.mode:
            self._check_mode(model.training, pm)
        self.calls = calls = self.calls + 1
        thoroughly = is_checked(calls) and (calls <= 3 or not self.old.on_devices)
        often = (
            calls % OFTEN == 0 and getattr(pm, "_autopar_leads", None) is None
        )  # stages look when they compare batches
        if thoroughly or (often and not self.old.same()):
            self.check_parameters(pm, thoroughly)

    def check_parameters(self, pm: torch.nn.Module, thoroughly: bool) -> None:
        """Look at the parameters.

        Args:
            thoroughly: find writes past autograd, too.

        Raises:
            RunError: some were frozen or thawed, and those of the parallel module were not.
        """
        if frozen := self.old.frozen():
            now = dict(pm.named_parameters())
            names = [name for name, wanted in frozen.items() if name in now and now[name].requires_grad is not wanted]
            if names:
                what = "thawed" if frozen[names[0]] else "frozen"
                text = (
                    f"{_listed(names)} of the model {'was' if len(names) == 1 else 'were'} {what} after parallelize, "
                    "and the parallel module has parameters of its own, which were not: do it there too, or instead "
                    f"(pm.get_parameter('{names[0]}').requires_grad_({frozen[names[0]]})), or before parallelize"
                )
                if any(p.requires_grad for p in self.old.alive()):
                    raise RunError(text)
                self._once("frozen", text + "; if all of the model is kept for reference, all is well")
        if written := self.old.written(thoroughly):
            self._once(
                "written",
                f"{_listed(written)} of the model that was parallelized {'was' if len(written) == 1 else 'were'} "
                "written to since, which does not reach the parallel module: it has parameters of its own. Write to "
                f"these (pm.get_parameter('{written[0]}'), under torch.no_grad()), or write to the model before "
                "parallelize; if the model is kept for something else, such as averaged weights, all is well",
            )

    def _check_mode(self, training: bool, pm: torch.nn.Module) -> None:
        """Say that the model's mode is its own; where the modes agree again, it may be said of the next change."""
        self.mode = training
        if pm.training is not training:
            call = "train()" if training else "eval()"
            self._once(
                "mode",
                f"{call} of the model that was parallelized does not reach its parallel module, which is in "
                f"{'training' if pm.training else 'eval'} mode: call pm.{call}, too (if the model is kept for "
                "reference, all is well)",
            )

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

    def _read(self, name: str) -> None:
        if not _quiet and "called" not in self.said and self._stale():
            self._once(
                "called",
                f"parameter '{name}' of the model that was parallelized is read, and has the value of before: its "
                "parallel module was trained since. An average of the weights (EMA), or a list of parameters, that was "
                "made from the model stays at these: make it from the parallel module, EMA(pm) or pm.parameters(), or "
                "update it with pm. To bring the weights back: model.load_state_dict(autopar.full_state_dict(pm, "
                "all_ranks=True))",
            )

    @_looking
    def _saved(self, *_: Any) -> None:
        if self._stale():
            raise RunError(
                "state_dict() of the model that was parallelized would have the weights of before: its parallel module "
                "was trained since\n  save pm.state_dict() (with torch.distributed.checkpoint), or "
                "autopar.full_state_dict(pm), which has the model's names and whole tensors; to have the old weights, "
                "copy them before training, or take named_parameters()"
            )

    @_looking
    def _was_loaded(self, *_: Any) -> None:
        pm = self.pm()
        if pm is not None and self._is_trained(pm):  # who brings the weights back knows that they are a copy
            _hear_no_more(self)
        self.old.remember()

    @_looking
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


def _those_that_hear() -> list[Original]:
    live = []
    for ref in list(_hearing):
        if (original := ref()) is None:
            _hearing.discard(ref)
        else:
            live.append(original)
    return live


def _hear_no_more(original: Original | None) -> None:
    if original is not None:
        _hearing.discard(weakref.ref(original))
        hear_no_more(original.old.named())


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return f"parameter {shown}" if len(names) == 1 else f"{len(names)} parameters ({shown})"


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
