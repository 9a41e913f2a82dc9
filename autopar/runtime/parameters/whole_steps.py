"""Steps of optimizers that need whole parameters: each parameter is stepped on by one rank of its mesh, its owner.

A step that multiplies matrices (Shampoo, SOAP, a Muon that somebody wrote) means something else on a piece. So the
owner of a parameter gets it whole, with its gradient and its state, all owners at once (:mod:`.to_owners`); the
optimizer's own ``step`` runs there on plain tensors, as on one device, with what the rank owns in the places of all of
its parameters; and every rank gets its pieces of the results. Owners have about as much work each.

State of a parameter's shape is cut as the parameter is. Other tensors, such as Shampoo's moments of rows, are cut by
rows over all ranks, so that none has all of them; numbers and small tensors are on every rank. All are DTensors between
steps, so checkpoints have them.

Which optimizers that is: :mod:`autopar.runtime.repairs.step_trial`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.parameters.placed_alike import state_of
from autopar.runtime.parameters.state import as_dtensor, local_of
from autopar.runtime.parameters.to_owners import Stored, ToOwners, ranks_of
from autopar.runtime.parameters.whole_matrices import same_everywhere
from autopar.words.placements import REPLICATED, State, shard
from autopar.words.trees import PyTree
from cost_models.matrix_steps import newton_schulz_flops, owners_of

SMALL = 1024
"""Elements up to which a tensor of state that has not its parameter's shape is on every rank."""
Step = Callable[..., Any]


class Leaf(NamedTuple):
    """A tensor in an optimizer's state, without its values; its place on the mesh follows from it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    as_param: bool


class Number(NamedTuple):
    """A tensor of no dims in an optimizer's state, on the host; and whether it is kept there."""

    value: torch.Tensor
    on_host: bool


class Told(NamedTuple):
    """What a rank tells the others after its step: of each parameter that it owns its state's form, by number.

    Attributes:
        options: of each group the options that the step changed.
        dropped: the parameters whose gradient the step has dropped.
        failed: the error of the step, if it failed.
    """

    forms: dict[int, PyTree]
    options: list[dict[str, Any]]
    dropped: tuple[int, ...]
    failed: str


class _OnMesh:
    """The parameters of an optimizer that one mesh stores, for one step."""

    def __init__(self, optimizer: torch.optim.Optimizer, device_mesh: DeviceMesh, params: Sequence[DTensor]) -> None:
        self.optimizer, self.device_mesh, self.params = optimizer, device_mesh, params
        self.group, _ = ranks_of(device_mesh)
        self.tensors: list[list[DTensor]] = []
        """Of each parameter: itself, its gradient if it has one, and the tensors of its state, in order."""
        for param in params:
            given = [param] if param.grad is None else [param, _as_stored(param.grad, param)]
            self.tensors.append([*given, *_tensors(optimizer.state.get(param, {}))])
        stored = tuple(
            tuple((Stored(tuple(t.shape), state_of(t)), t.dtype) for t in tensors) for tensors in self.tensors
        )
        shapes = tuple(tuple(param.shape) for param in params)
        self.owners, self.ways = _ways(device_mesh, shapes, stored)
        me = dist.get_rank(self.group)
        self.owned = [k for k, owner in enumerate(self.owners) if owner == me]
        self.wholes: dict[int, torch.nn.Parameter] = {}

    def gather(self) -> None:
        """Bring what this rank owns here, as plain parameters, and hang their state on the optimizer."""
        coming = [
            (places, way.gather([local_of(self.tensors[k][j]).detach() for k, j in places]))
            for places, way in self.ways
        ]
        found: dict[tuple[int, int], torch.Tensor] = {}
        for places, gathering in coming:
            found |= {places[i]: whole for i, whole in gathering.wait().items()}
        for k in self.owned:
            param = self.params[k]
            whole = torch.nn.Parameter(found[k, 0], requires_grad=param.requires_grad)
            whole.grad = None if param.grad is None else found[k, 1]
            rest = iter([found[k, j] for j in range(1 + (param.grad is not None), len(self.tensors[k]))])
            if param in self.optimizer.state:
                self.optimizer.state[whole] = _filled(self.optimizer.state[param], rest)
            self.wholes[k] = whole

    def take_states(self) -> dict[int, Any]:
        """Take the state of what this rank owns off the optimizer."""
        return {k: self.optimizer.state.pop(whole) for k, whole in self.wholes.items() if whole in self.optimizer.state}

    def tell(self, states: Mapping[int, Any], options: list[dict[str, Any]], failed: str) -> list[Told]:
        """Tell each other what the step left; all ranks of the mesh call it."""
        forms = {k: _form(state, self.params[k]) for k, state in states.items()}
        dropped = tuple(k for k, whole in self.wholes.items() if whole.grad is None and self.params[k].grad is not None)
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, Told(forms, options, dropped, failed), group=self.group)
        return everyone

    def scatter(self, states: Mapping[int, Any], told: Sequence[Told]) -> None:
        """Give every rank its pieces of parameters and state; all ranks of the mesh call it."""
        forms = {k: form for each in told for k, form in each.forms.items()}
        by_dtype: dict[torch.dtype, list[tuple[int, int, Stored]]] = {}
        for k, param in enumerate(self.params):
            by_dtype.setdefault(param.dtype, []).append((k, 0, Stored(tuple(param.shape), state_of(param))))
            for j, leaf in enumerate(_leaves(forms.get(k))):
                by_dtype.setdefault(leaf.dtype, []).append((k, j + 1, Stored(leaf.shape, _placed(leaf, param))))
        mine = {k: [self.wholes[k].detach(), *_plain_tensors(states.get(k))] for k in self.owned}
        pieces: dict[tuple[int, int], tuple[torch.Tensor, Stored]] = {}
        for dtype, places in by_dtype.items():
            way = _way(
                self.device_mesh, tuple(stored for *_, stored in places), tuple(self.owners[k] for k, *_ in places)
            )
            wholes = {i: mine[places[i][0]][places[i][1]] for i in way.owned}
            example = local_of(self.params[0]).new_empty(0, dtype=dtype)
            for (k, j, stored), piece in zip(places, way.scatter(wholes, example).wait(), strict=True):
                pieces[k, j] = piece, stored
        for k, param in enumerate(self.params):
            local_of(param).copy_(pieces[k, 0][0])
            if k in forms:
                rest = iter([pieces[k, j + 1] for j in range(len(list(_leaves(forms[k]))))])
                old = _tensors(self.optimizer.state.get(param, {}))
                self.optimizer.state[param] = self._kept(forms[k], rest, iter(old))
        for k in {k for each in told for k in each.dropped}:
            self.params[k].grad = None

    def _kept(
        self, form: PyTree, rest: Iterator[tuple[torch.Tensor, Stored]], old: Iterator[DTensor]
    ) -> PyTree:  # fmt: skip
        """Return a state as it is kept between steps, in the memory of the old one where it fits."""
        if isinstance(form, Number):
            return form.value if form.on_host else form.value.to(self.device_mesh.device_type)
        if isinstance(form, Leaf):
            piece, stored = next(rest)
            before = next(old, None)
            if before is not None and before.dtype == piece.dtype and _is_stored(before, stored):
                local_of(before).copy_(piece)
                return before
            local = piece.clone(memory_format=torch.contiguous_format)
            return as_dtensor(local, stored.state, stored.shape, self.device_mesh)
        return _mapped(form, lambda value: self._kept(value, rest, old))


def step_on_wholes(step: Step, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an optimizer's ``step(self, closure=None)`` with every parameter whole on its owner, and return its result.

    All ranks call it alike. A closure is called before.

    Raises:
        RunError: the step failed on another rank; ranks have other parameters, or left different options in a group;
            or the step calls its closure more than once.
    """
    args, kwargs = _closed(args, kwargs)
    meshes = [_OnMesh(optimizer, mesh, params) for mesh, params in _by_mesh(optimizer).items()]
    before = [(group, group["params"], _options(group)) for group in optimizer.param_groups]
    result, error, outside = None, None, torch.is_grad_enabled()
    with torch.no_grad():
        for each in meshes:
            each.gather()
        whole_of = {id(p): each.wholes.get(k) for each in meshes for k, p in enumerate(each.params)}
        try:
            for group, params, _ in before:
                placed = [whole_of.get(id(p), p) for p in params]
                group["params"] = [p for p in placed if p is not None]
            with torch.set_grad_enabled(outside):
                result = step(optimizer, *args, **kwargs)
        except Exception as failure:
            error = failure
        states = [each.take_states() for each in meshes]
        changed = [_changed(options, group) for group, _, options in before]
        for group, params, _ in before:
            group["params"] = params
        for each, mine in zip(meshes, states, strict=True):
            failed = "" if error is None else f"{type(error).__name__}: {error}"
            told = each.tell({} if error else mine, changed, failed)
            _check(optimizer, told, error)
            _agree(optimizer, told)
            each.scatter(mine, told)
    return result


def has_shared(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether several ranks store parameters of an optimizer together."""
    return any(
        isinstance(p, DTensor) and p.device_mesh.size() > 1 for group in optimizer.param_groups for p in group["params"]
    )


def _by_mesh(optimizer: torch.optim.Optimizer) -> dict[DeviceMesh, list[DTensor]]:
    found: dict[DeviceMesh, dict[int, DTensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, DTensor) and param.device_mesh.size() > 1:
                found.setdefault(param.device_mesh, {})[id(param)] = param
    return {mesh: list(params.values()) for mesh, params in found.items()}


class _Called:
    """A closure that was called already: gives its loss, once."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        with torch.enable_grad():
            self.loss = closure()
        self.times = 0

    def __call__(self) -> Any:
        self.times += 1
        if self.times > 1:
            raise RunError(
                "an optimizer's step on whole parameters called its closure a second time, and the model's parameters "
                "are not what it has changed since; use an optimizer that calls it once, or step without a closure"
            )
        return self.loss


def _closed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args and callable(args[0]):
        return (_Called(args[0]), *args[1:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _Called(kwargs["closure"])}
    return args, kwargs


def _check(optimizer: torch.optim.Optimizer, told: Sequence[Told], error: Exception | None) -> None:
    if error is not None:
        raise error
    failed = [(rank, each.failed) for rank, each in enumerate(told) if each.failed]
    if failed:
        rank, what = failed[0]
        raise RunError(f"the step of {type(optimizer).__name__} failed on member {rank} of the mesh's ranks: {what}")


def _agree(optimizer: torch.optim.Optimizer, told: Sequence[Told]) -> None:
    """Keep the options of groups that steps changed, which must be the same on all ranks."""
    for number, group in enumerate(optimizer.param_groups):
        options = [each.options[number] for each in told]
        if any(repr(each) != repr(options[0]) for each in options):
            name = next(n for each in options for n in each if len({repr(o.get(n)) for o in options}) > 1)
            raise RunError(
                f"{type(optimizer).__name__} changed '{name}' of its group {number} to "
                f"{options[0].get(name)!r} on one rank and another value on another one, as if it counted parameters: "
                "each rank steps on some of them. Keep it in the state of a parameter"
            )
        group.update(options[0])


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name != "params"}


def _changed(before: Mapping[str, str], group: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in group.items() if n != "params" and before.get(n) != repr(v)}


# --- who owns what ---------------------------------------------------------------------------------------------------

Places = list[tuple[int, int]]
_Ways = tuple[list[int], list[tuple[Places, ToOwners]]]


@lru_cache(maxsize=64)
def _ways(
    device_mesh: DeviceMesh, shapes: tuple[tuple[int, ...], ...],
    stored: tuple[tuple[tuple[Stored, torch.dtype], ...], ...],
) -> _Ways:  # fmt: skip
    """Give each parameter an owner; return that, and by dtype the tensors ``(parameter, number)`` and their way."""
    same_everywhere(device_mesh, stored)
    owners = owners_of([newton_schulz_flops(shape) for shape in shapes], device_mesh.size())
    by_dtype: dict[torch.dtype, tuple[Places, list[Stored]]] = {}
    for k, tensors in enumerate(stored):
        for j, (each, dtype) in enumerate(tensors):
            places, found = by_dtype.setdefault(dtype, ([], []))
            places.append((k, j))
            found.append(each)
    ways = [
        (places, _way(device_mesh, tuple(found), tuple(owners[k] for k, _ in places)))
        for places, found in by_dtype.values()
    ]
    return owners, ways


@lru_cache(maxsize=256)
def _way(device_mesh: DeviceMesh, tensors: tuple[Stored, ...], owners: tuple[int, ...]) -> ToOwners:
    return ToOwners(device_mesh, tensors, owners)


def _placed(leaf: Leaf, param: DTensor) -> State:
    """Return how a tensor of state is kept between steps."""
    if leaf.as_param:
        return state_of(param)
    axes = range(param.device_mesh.ndim)
    elements = torch.Size(leaf.shape).numel()
    return State(shard(0) if elements > SMALL and leaf.shape[0] > 1 else REPLICATED for _ in axes)


def _is_stored(tensor: DTensor, stored: Stored) -> bool:
    return tuple(tensor.shape) == stored.shape and state_of(tensor) == stored.state


def _as_stored(grad: torch.Tensor, param: DTensor) -> DTensor:
    """Return a gradient placed as its parameter."""
    if not isinstance(grad, DTensor):
        raise RunError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is no DTensor but a plain tensor of shape "
            f"{tuple(grad.shape)}; leave gradients where backward puts them"
        )
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad


# --- trees of state --------------------------------------------------------------------------------------------------


def _mapped(tree: PyTree, of_leaf: Callable[[PyTree], PyTree]) -> PyTree:
    """Return a container of the same kind with each of its values replaced; of other things, themselves."""
    if isinstance(tree, Mapping):
        return {key: of_leaf(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(of_leaf(value) for value in tree)
    return tree


def _values(tree: PyTree) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if type(tree) in (list, tuple):
        for value in tree:
            yield from _values(value)
    else:
        yield tree


def _tensors(state: PyTree) -> list[DTensor]:
    return [value for value in _values(state) if isinstance(value, DTensor)]


def _is_leaf(value: PyTree) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _plain_tensors(state: PyTree) -> list[torch.Tensor]:
    return [value for value in _values(state) if _is_leaf(value)]


def _leaves(form: PyTree) -> Iterator[Leaf]:
    if isinstance(form, Leaf):
        yield form
    elif isinstance(form, Mapping) or type(form) in (list, tuple):
        for value in form.values() if isinstance(form, Mapping) else form:
            yield from _leaves(value)


def _filled(state: PyTree, wholes: Iterator[torch.Tensor]) -> PyTree:
    """Return a state with whole tensors in the places of DTensors, which belongs to the owner alone."""
    if isinstance(state, DTensor):
        return next(wholes)
    if isinstance(state, torch.Tensor):
        return state.clone()
    return _mapped(state, lambda value: _filled(value, wholes))


def _form(state: PyTree, param: DTensor) -> PyTree:
    """Return a state with :class:`Leaf` in the places of tensors; numbers and what else there is, as it is."""
    if isinstance(state, torch.Tensor):
        if _is_leaf(state):
            return Leaf(tuple(state.shape), state.dtype, tuple(state.shape) == tuple(param.shape))
        return Number(state.detach().cpu(), state.device.type == "cpu")
    return _mapped(state, lambda value: _form(value, param))
