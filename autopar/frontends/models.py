"""Models by name: ``path.py:factory``, or ``hf:path/to/config.json``.

A factory takes no argument and returns a model and its example inputs: a tuple of args, a dict of kwargs, or both::

    def make():
        return Model(), (x, target)
        return Model(), {"input_ids": ids, "labels": ids}
        return Model(), (x,), {"mask": mask}

Specs with a prefix are read by its frontend (:mod:`autopar.frontends`): a Hugging Face config becomes the model that
its ``architectures`` names, on the meta device, with example inputs of the given batch and sequence length.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import autopar.frontends.hugging_face  # noqa: F401  (registers its prefix)
from autopar.errors import ModelError
from autopar.frontends import FRONTENDS, Loaded, cause_in, forms
from autopar.frontends import runs_code as runs_code
from autopar.frontends import split_spec as split_spec
from hardware_profiles.strict import MOST_COUNTED, is_there


def load_model(
    spec: str, batch: int | None = None, seq: int | None = None, *, folder: Path | None = None, device: str = "meta"
) -> Loaded:
    """Load the model that ``spec`` names, with its example inputs.

    ``batch`` and ``seq`` are for a Hugging Face config, and so is ``device``, of which ``meta`` allocates nothing.
    Relative paths start in ``folder``, by default the current one. A model that cannot be loaded raises a ModelError.
    """
    prefix, path, factory = split_spec(spec)
    file = (folder or Path()) / path
    if not is_there(file):
        what = "does not exist"
        with contextlib.suppress(OSError, ValueError):  # a name that is too long, or holds a NUL
            what = "is a folder" if file.is_dir() else what
        raise ModelError(f"model '{spec}': {path} {what}; give {forms()}")
    if prefix:
        for name, value in (("--batch", batch), ("--seq", seq)):
            if value is not None and not 1 <= value <= MOST_COUNTED:
                raise ModelError(f"model '{spec}': {name} is {value}; give a number from 1 to {MOST_COUNTED:,}")
        return FRONTENDS[prefix].load(spec, file, batch, seq, device)
    for name, value in (("--batch", batch), ("--seq", seq)):
        if value is not None:
            raise ModelError(
                f"model '{spec}': {name} is for hf: models; the factory '{factory}' makes its own example inputs"
            )
    return _from_factory(spec, file, factory)


# --- a factory in a file ---------------------------------------------------------------------------------------------


def _from_factory(spec: str, file: Path, factory: str) -> Loaded:
    module = _import(spec, file)
    make = getattr(module, factory, None)
    if not callable(make):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        near = get_close_matches(factory, names, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"it defines {', '.join(names) or 'no function'}"
        raise ModelError(f"model '{spec}': {file.name} has no function '{factory}'; {hint}")
    if _needs_arguments(make):
        raise ModelError(
            f"model '{spec}': '{factory}' takes arguments {inspect.signature(make)}; a factory takes none: give them "
            "defaults, or wrap it in a function without arguments"
        )
    try:
        returned = make()
    except (Exception, SystemExit) as error:  # sys.exit in a model file must not end autopar
        raise ModelError(f"model '{spec}': '{factory}' raised {cause_in(error, file)}; correct it there") from error
    return _checked(spec, factory, returned)


def _import(spec: str, file: Path) -> ModuleType:
    name = f"autopar_model_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(name, file)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    folder = str(file.resolve().parent)
    added = folder not in sys.path
    if added:
        sys.path.insert(0, folder)  # as if the file were run as a script
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ModelError(
            f"model '{spec}': importing {file.name} raised {cause_in(error, file)}; correct it there"
        ) from error
    finally:
        if added:
            sys.path.remove(folder)
    return module


def _needs_arguments(make: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _checked(spec: str, factory: str, returned: object) -> Loaded:
    def wrong(what: str) -> ModelError:
        return ModelError(
            f"model '{spec}': '{factory}' returned {what}; return a model and its example inputs: (model, (x, y)), "
            '(model, {"input_ids": ids}) or (model, args, kwargs)'
        )

    if isinstance(returned, torch.nn.Module):
        raise wrong("a model without example inputs")
    if not isinstance(returned, (tuple, list)):
        raise wrong(_a(returned))
    if len(returned) not in (2, 3):
        raise wrong(f"{len(returned)} values")
    model, *inputs = returned
    if not isinstance(model, torch.nn.Module):
        raise wrong(f"{_a(model)} where the model should be")
    if len(inputs) == 1 and isinstance(inputs[0], tuple) and len(inputs[0]) == 2:
        first, second = inputs[0]
        if isinstance(first, tuple) and isinstance(second, dict):
            inputs = [first, second]
    args: Any = ()
    kwargs: Any = {}
    if len(inputs) == 2:
        args, kwargs = inputs
    elif isinstance(inputs[0], Mapping):
        kwargs = inputs[0]
    else:
        args = (inputs[0],) if isinstance(inputs[0], torch.Tensor) else inputs[0]
    if not isinstance(args, (tuple, list)):
        raise wrong(f"{_a(args)} where the example inputs should be")
    if not isinstance(kwargs, Mapping) or not all(isinstance(k, str) for k in kwargs):
        raise wrong(f"{_a(kwargs)} where the keyword inputs should be")
    return Loaded(model, tuple(args), dict(kwargs), spec)


def _a(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else ("an " if name[0] in "aeiouAEIOU" else "a ") + name
