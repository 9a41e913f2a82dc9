"""What the step of an optimizer that somebody wrote looks at: found by a trial on small tensors.

A step that computes each element by itself, or norms, is right on DTensors, and runs as it is. One that multiplies or
decomposes matrices, or looks at their rows, runs on whole parameters, each on its owner
(:mod:`~autopar.runtime.parameters.whole_steps`), if a trial shows that it steps on each parameter by itself: the
numbers of each one alone, with other groups empty, must be those of all together. One that talks to other ranks by
itself shares work out among parameters that it takes for whole, and is refused.

The trial is made once for an optimizer, before its first step on parameters that several ranks store: the class's own
``step``, without hooks, on a few plain tensors of a few elements beside the optimizer's options. The optimizer, its
parameters and random numbers stay what they are. Where the trial fails, the step runs on DTensors as it is written;
:func:`whole_matrix_step` says of a class that it needs whole parameters, without a trial.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import RunError
from autopar.runtime.parameters.whole_steps import Step, has_shared, step_on_wholes
from autopar.torch_private import TorchDispatchMode

_PRODUCTS = frozenset((
    "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "matmul", "inverse", "cholesky", "cholesky_inverse", "qr", "svd",
    "_linalg_svd", "_linalg_eigh", "_linalg_solve_ex", "linalg_qr", "linalg_inv_ex", "linalg_cholesky_ex",
    "linalg_eig", "linalg_eigh", "linalg_solve_triangular", "linalg_matrix_exp", "geqrf", "linalg_lu_factor_ex",
    "linalg_ldl_factor_ex", "linalg_householder_product", "ormqr", "symeig", "lobpcg",
))  # fmt: skip
"""Operators of aten that look at rows and columns of matrices together."""
_REDUCTIONS = frozenset((
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "norm", "linalg_vector_norm", "logsumexp",
    "median", "nanmean", "nansum", "cumsum", "sort", "topk",
))  # fmt: skip
"""Operators that look at rows, if more than one number is left of a matrix."""
_OF_DTENSORS = frozenset(("DTensor", "to_local", "full_tensor", "redistribute", "placements", "_local_tensor"))
"""Names by which code that handles DTensors is known."""
_MOST_FUNCTIONS = 500
_OF_TORCH = ("defaults", "state", "param_groups")
_SIZES = (6, 4, 3, 2)
_Class = TypeVar("_Class", bound=type[torch.optim.Optimizer])
ELEMENTS, WHOLE, TALKS = "elements", "whole", "talks"
"""What a step looks at: elements and sums of them; whole parameters; what other ranks send."""
_kinds: dict[type[torch.optim.Optimizer], str] = {torch.optim.Adafactor: WHOLE}
"""Of classes of which it is known."""
_tried: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[int], str]] = weakref.WeakKeyDictionary()
"""Of optimizers that were tried, with as many parameters in each group."""


def whole_matrix_step(kind: _Class) -> _Class:
    """Say that a class of optimizers steps on whole parameters, each on one rank; may stand above it as a decorator.

    Its ``step`` is given plain tensors, of the parameters that the rank owns. It must step on each parameter by itself,
    and must not need one in every group. Without this a trial on small tensors finds it out, where that can run on
    processors.

    Raises:
        RunError: it is no class of optimizers.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise RunError(f"whole_matrix_step: {kind!r} is no subclass of torch.optim.Optimizer; give the class itself")
    _kinds[kind] = WHOLE
    return kind


def watch() -> None:
    """Look at every optimizer before its first step from now on."""
    global _watched
    if not _watched:
        _watched = True
        register_optimizer_step_pre_hook(_recognise)


_watched = False


@torch.compiler.disable
def _recognise(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Place the steps of a class whose optimizers need whole parameters, from the step on that is about to run.

    Raises:
        RunError: the step talks to other ranks by itself.
    """
    kind = type(optimizer)
    found = kind_of(optimizer) if has_shared(optimizer) else ELEMENTS
    if found == TALKS:
        raise RunError(
            f"{kind.__name__}.step() makes collectives of its own, as if each rank had all parameters whole, and here "
            "ranks have pieces: ranks would mix up different parameters. Use the form of the optimizer for one device "
            "(autopar has each matrix stepped on by one rank, and sends the result), such as torch.optim.Muon"
        )
    if found == WHOLE:
        _place(kind)


def _place(kind: type[torch.optim.Optimizer]) -> None:
    """Put :func:`.step_on_wholes` under the hooks of the class's step, which callers may hold from before."""
    hooked: Any = kind.step
    cells = dict(zip(hooked.__code__.co_freevars, hooked.__closure__ or (), strict=True))
    inner = cells.get("func")
    if inner is None:
        raise RunError(
            f"{kind.__name__}.step is not as torch.optim.Optimizer makes it, and cannot be run on whole parameters; "
            "call super().__init__() in the optimizer's __init__, and do not replace its step"
        )
    if not hasattr(inner.cell_contents, "_on_wholes"):
        inner.cell_contents = _on_wholes(inner.cell_contents)


def _on_wholes(step: Step) -> Step:
    @wraps(step)
    def on_wholes(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not has_shared(self) or kind_of(self) != WHOLE:
            return step(self, *args, **kwargs)
        return step_on_wholes(step, self, args, kwargs)

    on_wholes._on_wholes = True  # type: ignore[attr-defined]
    return on_wholes


# --- the trial -------------------------------------------------------------------------------------------------------


class _Talks(Exception):
    """The step began a collective."""


class _Watch(TorchDispatchMode):
    """Notes whether rows or columns are looked at, or products made of them; stops at a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _Talks
        result, name = func(*args, **(kwargs or {})), func._schema.name
        self.rows |= name.removeprefix("aten::") in _PRODUCTS
        if name.removeprefix("aten::") in _REDUCTIONS and isinstance(args[0], torch.Tensor) and args[0].ndim > 1:
            first = result if isinstance(result, torch.Tensor) else result[0]
            self.rows |= first.numel() > 1
        return result


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return what the step of an optimizer looks at: :data:`ELEMENTS`, :data:`WHOLE` or :data:`TALKS`."""
    known = next((_kinds[kind] for kind in type(optimizer).__mro__ if kind in _kinds), None)
    if known is not None:
        return known
    counts = [len(group["params"]) for group in optimizer.param_groups]
    tried = _tried.get(optimizer)
    if tried is None or tried[0] != counts:
        tried = _tried[optimizer] = counts, _found(optimizer)
    return tried[1]


def _found(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    if kind.step.__module__.startswith("torch.optim") or _knows_dtensors(kind):
        return ELEMENTS
    if any(_holds_tensors(value) for name, value in vars(optimizer).items() if name not in _OF_TORCH):
        return ELEMENTS  # such as one that wraps another one, whose step is looked at by itself
    step: Any = getattr(kind.step, "__wrapped__", kind.step)
    examples = _examples(optimizer)
    try:
        with torch.random.fork_rng(devices=()), torch.compiler.set_stance("force_eager"), _Watch() as watch:
            together = _stepped(step, optimizer, examples, range(len(examples)))
        if not watch.rows:
            return ELEMENTS
        _stepped(step, optimizer, examples, ())  # as on a rank that owns nothing
        for i, expected in enumerate(together):
            with torch.random.fork_rng(devices=()), torch.compiler.set_stance("force_eager"):
                alone = _stepped(step, optimizer, examples, (i,))
            if not all(torch.equal(a, b) for a, b in zip(alone[0], expected, strict=True)):
                return ELEMENTS
    except _Talks:
        return TALKS
    except Exception:  # whatever a step may raise on tensors that are not those that it is for
        return ELEMENTS
    return WHOLE


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Check whether a value holds tensors, modules or optimizers."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
        return True
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return depth > 0 and isinstance(value, (list, tuple, set)) and any(_holds_tensors(v, depth - 1) for v in value)


def _knows_dtensors(kind: type[torch.optim.Optimizer]) -> bool:
    """Check whether the code of a class, or of a function that it calls, handles DTensors, and so pieces, itself."""
    methods = [value for each in kind.__mro__ for value in vars(each).values() if each is not torch.optim.Optimizer]
    todo, seen = [inspect.unwrap(value) for value in methods if callable(value)], set[object]()
    while todo:
        function: Any = todo.pop()
        code = getattr(function, "__code__", None)
        if code is None or code in seen or len(seen) > _MOST_FUNCTIONS:
            continue
        seen.add(code)
        if not _OF_DTENSORS.isdisjoint(code.co_names):
            return True
        known = function.__globals__
        called = [known[name] for name in code.co_names if callable(known.get(name))]
        todo += [inspect.unwrap(each) for each in called if not getattr(each, "__module__", "").startswith("torch")]
    return False


def _examples(optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor, dict[str, Any]]]:
    """Return group, values and flags of two small parameters for each number of dims in each group."""
    found, random = [], torch.Generator().manual_seed(0)
    for number, group in enumerate(optimizer.param_groups):
        seen: set[object] = set()
        for param in group["params"]:
            flags = {k: v for k, v in optimizer.state.get(param, {}).items() if isinstance(v, (bool, str))}
            like = param.ndim, param.dtype, repr(flags)
            if like in seen:
                continue
            seen.add(like)
            for turned in (False, True):
                shape = (_SIZES * param.ndim)[: param.ndim]
                shape = shape[::-1] if turned else shape
                values = torch.randn(shape, generator=random, dtype=torch.float64)
                found.append((number, values.to(param.dtype), flags))
    return found


def _stepped(
    step: Callable[..., Any], optimizer: torch.optim.Optimizer,
    examples: Sequence[tuple[int, torch.Tensor, Mapping[str, Any]]], picked: Sequence[int],
) -> list[list[torch.Tensor]]:  # fmt: skip
    """Return some of the example parameters after each of three steps on them, of an optimizer like the given one."""
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups") and "hooks" not in k}
    vars(shadow).update({k: copy.deepcopy(v) if isinstance(v, (list, dict, set)) else v for k, v in own.items()})
    vars(shadow).update({k: OrderedDict() for k in vars(optimizer) if "hooks" in k})
    shadow.state = defaultdict(dict)
    params = [torch.nn.Parameter(examples[i][1].clone()) for i in picked]
    shadow.param_groups = [
        {
            **copy.deepcopy({k: v for k, v in group.items() if k not in ("params", "param_names")}),
            "params": [p for p, i in zip(params, picked, strict=True) if examples[i][0] == number],
        } for number, group in enumerate(optimizer.param_groups)
    ]  # fmt: skip
    for param, i in zip(params, picked, strict=True):
        if examples[i][2]:
            shadow.state[param] = dict(examples[i][2])
    results: list[list[torch.Tensor]] = [[] for _ in params]
    for at in range(3):
        for param, i in zip(params, picked, strict=True):
            param.grad = (examples[i][1].roll(at + 1) * (at + 1)).to(param.dtype)
        step(shadow)
        for result, param in zip(results, params, strict=True):
            result.append(param.detach().clone())
    return results
