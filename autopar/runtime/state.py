"""How a rank holds parameters: stored as DTensors for the optimizer, used as plain local tensors by the program.
On a mesh of one device they are stored as plain tensors, too.

Between the two stand *hops*: the plan's steps from the stored to the used placement, neighbouring axes merged into one
collective over their common group. A :class:`Held` parameter has a *used leaf*, a plain tensor on which autograd
accumulates. If no hop changes the values, the leaf shares the stored tensor's memory: nothing is copied. Otherwise it
belongs to a :class:`Unit`, a few parameters that are gathered together, for one step or for one use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.errors import PlanError, RunError
from autopar.placements import Mesh, State, format_state, is_shard, kind, local_shape, path, shard, shard_dim
from autopar.plan import ParamChoice

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Their names changed in torch 2.13."""

UNIT_BYTES = 8 << 20
"""Small parameters are gathered together up to this size."""


_STEPS = "_autopar_steps"


def _count_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, DTensor):
                setattr(param, _STEPS, getattr(param, _STEPS, 0) + 1)


register_optimizer_step_post_hook(_count_steps)


def version_of(param: torch.Tensor) -> tuple[int, int]:
    """Another one after an in-place change of a parameter, or an optimizer's step on it.

    An optimizer that works on lists of DTensors (``foreach``) leaves no trace in the version that autograd counts.
    """
    return 0 if param.is_inference() else param._version, getattr(param, _STEPS, 0)


def torch_placements(state: State) -> tuple[TorchPlacement, ...]:
    """A state in DTensor's words; it does not tell ``I`` from ``R``."""
    made: list[TorchPlacement] = []
    for p in state:
        d = shard_dim(p)
        made.append(Shard(d) if d is not None else Partial() if p == "P" else Replicate())
    return tuple(made)


def local_piece(whole: torch.Tensor, state: State, device_mesh: DeviceMesh) -> torch.Tensor:
    """A view of this rank's slice of ``whole``."""
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(state):
        d = shard_dim(placement)
        if d is not None:
            n = whole.shape[d] // device_mesh.size(axis)
            whole = whole.narrow(d, coordinate[axis] * n, n)
    return whole


@torch.no_grad()
def joined(local: torch.Tensor, state: State, device_mesh: DeviceMesh) -> torch.Tensor:
    """The whole tensor, on every rank, from the ranks' pieces in ``state``: gathered, and pending sums added up."""
    for axis in reversed(range(len(state))):
        n, d = device_mesh.size(axis), shard_dim(state[axis])
        if n == 1 or state[axis] in ("I", "R"):
            continue
        group = device_mesh.get_group(axis)
        if d is None:
            local = local.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(local, group=group)
        else:
            local = gather(local, d, Hop("gather", "slice", group, n, 0, d))
    return local


def as_dtensor(local: torch.Tensor, state: State, shape: Sequence[int], device_mesh: DeviceMesh) -> DTensor:
    """A DTensor around a local tensor, without communication."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, device_mesh, torch_placements(state), run_check=False, shape=torch.Size(shape), stride=stride
    )


def like(held: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's share of ``whole``, placed as ``held`` is: a DTensor of its placements, or a plain tensor."""
    whole = whole.detach().to(held.device)
    if not isinstance(held, DTensor):
        return whole.contiguous()
    state = tuple(shard(p.dim) if isinstance(p, Shard) else "R" for p in held.placements)
    piece = local_piece(whole, state, held.device_mesh)
    if piece is not whole:  # a share of its own, so that the whole can go
        piece = piece.clone(memory_format=torch.contiguous_format)
    return as_dtensor(piece.contiguous(), state, whole.shape, held.device_mesh)


# --- hops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hop:
    """One change of placement on the ``n`` ranks of ``group``, of which this is number ``index``.

    ``forward`` is done to values (stored -> used), ``backward`` to gradients (used -> stored): ``none gather slice swap
    all_reduce reduce_scatter``. ``dim`` is the tensor dim; ``other`` the target dim of a swap.
    """

    forward: str
    backward: str
    group: Any
    n: int
    index: int
    dim: int = 0
    other: int = 0


_KINDS = {
    ("S", "R"): ("gather", "reduce_scatter"), ("S", "I"): ("gather", "slice"), ("I", "R"): ("none", "all_reduce"),
    ("I", "S"): ("slice", "gather"), ("R", "S"): ("slice", "none"), ("S", "S"): ("swap", "swap"),
    ("R", "I"): ("none", "none"), ("R", "R"): ("none", "none"),
}  # fmt: skip


def hops(name: str, choice: ParamChoice, device_mesh: DeviceMesh, mesh: Mesh) -> tuple[Hop, ...]:
    """The hops from stored to used.

    Raises:
        PlanError: there is no such path.
    """
    steps = path(choice.stored, choice.used)
    legal = steps is not None and all((kind(a[i]), kind(b[i])) in _KINDS for i, a, b in steps)
    if steps is None or not legal:
        raise PlanError(
            f"parameter '{name}': stored as {format_state(choice.stored)} it cannot be used as "
            f"{format_state(choice.used)}; store it so that only whole axes are gathered, such as the used placement"
        )
    merged: list[tuple[str, str, list[int]]] = []
    for axis, src, dst in steps:
        if mesh[axis][1] == 1:
            continue
        a, b = src[axis], dst[axis]
        last = merged[-1] if merged else None
        if last is not None and last[:2] == (a, b) and not is_shard(b):
            last[2].insert(0, axis)
        else:
            merged.append((a, b, [axis]))
    found = []
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    for a, b, axes in merged:
        forward, backward = _KINDS[kind(a), kind(b)]
        if forward == backward == "none":
            continue
        index = 0
        for axis in axes:
            index = index * mesh[axis][1] + coordinate[axis]
        n = prod(mesh[axis][1] for axis in axes)
        dims = [d for d in (shard_dim(a), shard_dim(b)) if d is not None] or [0]
        found.append(Hop(forward, backward, group_of(device_mesh, mesh, axes), n, index, dims[0], dims[-1]))
    return tuple(found)


def group_of(device_mesh: DeviceMesh, mesh: Mesh, axes: Sequence[int]) -> Any:
    """The process group over several axes; every rank must ask for the same ones in the same order."""
    names = tuple(mesh[axis][0] for axis in axes)
    if len(names) == 1:
        return device_mesh.get_group(names[0])
    if len(names) == len(mesh) and device_mesh.size() == dist.get_world_size():
        ranks = device_mesh.mesh.flatten().tolist()
        if ranks == list(range(len(ranks))):
            return dist.group.WORLD
    return device_mesh[names]._flatten("_".join(names)).get_group()


def gather(x: torch.Tensor, dim: int, hop: Hop) -> torch.Tensor:
    """Concatenate the ranks' pieces along ``dim``."""
    out = x.new_empty(hop.n, *x.shape)
    all_gather_flat(out.flatten(0, 1), x.contiguous(), group=hop.group)
    return unstack(out, dim)


def unstack(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[n, ..., k, ...] -> [..., n * k, ...]"""
    return x.movedim(0, dim).flatten(dim, dim + 1)


def stacked(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """[..., n * k, ...] -> [n, ..., k, ...], a view"""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def apply(kind: str, x: torch.Tensor, hop: Hop, backward: bool = False) -> torch.Tensor:
    """Do one hop and wait for it."""
    dim, other = (hop.other, hop.dim) if backward else (hop.dim, hop.other)
    if kind == "gather":
        return gather(x, hop.dim, hop)
    if kind == "slice":
        k = x.shape[hop.dim] // hop.n
        return x.narrow(hop.dim, hop.index * k, k)
    if kind == "all_reduce":
        x = x.contiguous()
        dist.all_reduce(x, group=hop.group)
        return x
    if kind == "reduce_scatter":
        parts = stacked(x, hop.dim, hop.n).contiguous()
        out = torch.empty_like(parts[0])
        reduce_scatter_flat(out, parts.flatten(0, 1), group=hop.group)
        return out
    if kind == "swap":
        parts = stacked(x, other, hop.n).contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=hop.group)
        return unstack(out, dim)
    return x


# --- what may be replaced ---------------------------------------------------------------------------------------------

Form = tuple[tuple[int, ...], torch.dtype, Any]


def same_form(name: str, held: torch.Tensor, form: Form | None) -> Form:
    """Shape, dtype and placement of a stored tensor, which a tensor that is put in its place must have too.

    Raises:
        RunError: it has others.
    """
    at = (held.device_mesh, tuple(held.placements)) if isinstance(held, DTensor) else None
    now = tuple(held.shape), held.dtype, at
    if form is not None and now != form:
        show = [
            f"{str(dtype).removeprefix('torch.')} of shape {shape}, "
            + ("a plain tensor" if at is None else f"a DTensor placed {', '.join(map(str, at[1]))}")
            for shape, dtype, at in (now, form)
        ]
        raise RunError(
            f"{name} was replaced by another one that does not fit: {show[0]}; the program reads {show[1]}. Copy new "
            "values into the one that there is, or use load_state_dict, which places them"
        )
    return now


# --- parameters ------------------------------------------------------------------------------------------------------


class Held:
    """One parameter of the program.

    Attributes:
        owner, key: where the stored parameter is registered; it is read there before each forward.
        leaf: what the program reads and autograd accumulates on; on a mesh of one device the stored parameter itself.
        alias: the leaf shares the stored memory.
        adjoint: hops of the gradient's way back that do something, in order.
        trained: its gradient was planned; a parameter that is frozen for a while keeps that.
        sum: this rank's part of the gradient of the step that is under way, reduced; the parameter gets it at the end.
            What needs no reduction waits as the leaf's own gradient.
        changed: called when there is another stored parameter, or it wants a gradient or does so no more.
    """

    def __init__(
        self, name: str, owner: torch.nn.Module, key: str, choice: ParamChoice, device_mesh: DeviceMesh, mesh: Mesh,
        shape: tuple[int, ...], trained: bool = True,
    ) -> None:  # fmt: skip
        self.trained = trained
        self.name, self.owner, self.key, self.choice = name, owner, key, choice
        self.hops = hops(name, choice, device_mesh, mesh)
        self.alias = all(hop.forward == "none" for hop in self.hops)
        self.adjoint = tuple(hop for hop in reversed(self.hops) if hop.backward != "none")
        self.used_shape = local_shape(shape, choice.used, mesh)
        self.stored_shape = local_shape(shape, choice.stored, mesh)
        self.seen: torch.nn.Parameter | None = None
        self.wanted: bool | None = None
        self.address = 0
        self.local: torch.Tensor | None = None
        self.leaf: torch.Tensor = torch.empty(0)
        self.changed: Callable[[], None] = lambda: None
        self.unit: Unit | None = None
        self.form: Form | None = None
        self.sum: torch.Tensor | None = None

    @property
    def param(self) -> torch.nn.Parameter:
        """The stored parameter."""
        found = self.owner._parameters[self.key]
        assert found is not None
        return found

    @property
    def per_use(self) -> bool:
        """Gathered anew for every use (ZeRO-3)."""
        return not self.alias and self.choice.lifetime == "use"

    def bind(self) -> bool:
        """Follow the stored parameter; whether the leaf is a new tensor, which nobody hears of yet."""
        param, before = self.owner._parameters[self.key], self.leaf
        assert param is not None
        local = param._local_tensor if isinstance(param, DTensor) else param
        plain, wanted = local is param, param.requires_grad
        new = local is not self.local or (plain and local.data_ptr() != self.address)
        if not new and param is self.seen and wanted is self.wanted:
            return False
        if wanted and self.wanted is False and not self.trained:
            raise RunError(
                f"parameter '{self.name}' requires grad now and was frozen when the model was captured, so its "
                "gradient was not planned; parallelize the model with it trained, and freeze it afterwards"
            )
        if new:
            self.form = same_form(f"parameter '{self.name}'", param, self.form)
            self.local = local
            if self.alias:
                self.leaf = local if plain else local.detach()
            elif self.leaf.shape != self.used_shape or self.leaf.dtype != local.dtype:
                self.leaf = local.new_empty(self.used_shape)
                if self.per_use:
                    self.leaf.untyped_storage().resize_(0)
        if self.leaf.requires_grad is not wanted:
            self.leaf.requires_grad_(wanted)
        self.seen, self.wanted, self.address = param, wanted, local.data_ptr() if plain else 0
        self.changed()
        return self.leaf is not before

    @property
    def version(self) -> tuple[int, int]:
        """Of the stored parameter, as :func:`version_of` has it."""
        return version_of(self.param)

    def add(self, grad: torch.Tensor) -> None:
        """Add a reduced gradient to the step's sum."""
        self.sum = grad if self.sum is None else self.sum.add_(grad)

    def taken(self) -> torch.Tensor | None:
        """The step's sum, which is over with that."""
        grad, self.sum = self.sum, None
        if not self.adjoint:
            leaf = self.leaf
            own = leaf.grad
            if own is not None:
                leaf.grad = None
                grad = own if grad is None else grad.add_(own)
        return grad

    def placed(self, grad: torch.Tensor) -> torch.Tensor:
        """A reduced gradient as the stored parameter is: a DTensor of its placement, or plain."""
        param = self.param
        if isinstance(param, DTensor):
            return DTensor(grad, param._spec, requires_grad=False)  # type: ignore[call-arg]
        return grad



def give(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Add a reduced gradient, this rank's part of it, to the gradient of a stored parameter."""
    have = param.grad
    if have is None:
        if isinstance(param, DTensor):
            grad = DTensor(grad, param._spec, requires_grad=False)  # type: ignore[call-arg]
        param.grad = grad
    else:
        (have._local_tensor if isinstance(have, DTensor) else have).add_(grad)


class Followed:
    """A buffer of the program, which is read where it is registered: someone may put another tensor there."""

    def __init__(self, name: str, owner: torch.nn.Module, key: str) -> None:
        self.name, self.owner, self.key = name, owner, key
        self.seen = owner._buffers[key]
        assert self.seen is not None
        self.form = same_form(f"buffer '{name}'", self.seen, None)

    def replaced(self) -> bool:
        """Whether there is another tensor than at the last call.

        Raises:
            RunError: it has another shape, dtype or placement, or is no tensor.
        """
        now = self.owner._buffers.get(self.key)
        if now is self.seen:
            return False
        if not isinstance(now, torch.Tensor):
            raise RunError(f"buffer '{self.name}' is {now!r} now; the program reads a tensor of shape {self.form[0]}")
        same_form(f"buffer '{self.name}'", now, self.form)
        self.seen = now
        return True

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, as the program reads it."""
        assert self.seen is not None
        return self.seen._local_tensor if isinstance(self.seen, DTensor) else self.seen


class Unit:
    """Parameters that are gathered together, in one collective where each needs just one over the same ranks."""

    def __init__(self, helds: Sequence[Held]) -> None:
        self.helds = list(helds)
        self.per_use = helds[0].per_use
        self.together = coalesces(helds[0]) and all(same_gather(helds[0], h) for h in helds)
        self.direct = self.together and len(helds) == 1 and helds[0].hops[0].dim == 0
        self.work: Any = None
        self.flat: torch.Tensor | None = None
        self.ready = False
        self.waiting = 0
        for held in self.helds:
            held.unit = self

    def expire(self) -> None:
        """What was gathered may no longer equal what is stored (in-place updates of a DTensor leave no trace)."""
        if self.ready or self.work is not None:
            self.finish_work()
            self.ready = False

    @torch.no_grad()
    def start(self) -> None:
        """Begin to gather, unless that is done or under way."""
        if self.ready or self.work is not None:
            return
        if self.per_use:
            for held in self.helds:
                n = prod(held.used_shape) * held.leaf.element_size()
                held.leaf.untyped_storage().resize_(n)
        if not self.together:
            return
        hop = next(h for h in self.helds[0].hops if h.forward == "gather")
        if self.direct:
            # .data has a version counter of its own: a backend may write, and count, at any time until it is waited for
            out, piece = self.helds[0].leaf.data, self.helds[0].local
            assert piece is not None
            self.work = all_gather_flat(out, piece.contiguous(), group=hop.group, async_op=True)
            return
        pieces = torch.cat([h.local.reshape(-1) for h in self.helds])  # type: ignore[union-attr]
        self.flat = pieces.new_empty(hop.n, pieces.numel())
        self.work = all_gather_flat(self.flat.view(-1), pieces, group=hop.group, async_op=True)

    @torch.no_grad()
    def fetch(self) -> None:
        """Have the gathered values in the leaves."""
        if self.ready:
            return
        self.start()
        if not self.together:
            for held in self.helds:
                x = held.local
                assert x is not None
                for hop in held.hops:
                    x = apply(hop.forward, x, hop)
                with torch.autograd._unsafe_preserve_version_counter(held.leaf):
                    held.leaf.copy_(x)
            self.ready = True
            return
        flat = self.flat
        self.finish_work()
        if flat is not None:
            offset = 0
            for held in self.helds:
                hop = next(h for h in held.hops if h.forward == "gather")
                m = prod(held.stored_shape)
                part = flat[:, offset : offset + m].view(hop.n, *held.stored_shape)
                offset += m
                with torch.autograd._unsafe_preserve_version_counter(held.leaf):
                    stacked(held.leaf, hop.dim, hop.n).copy_(part)
        self.ready = True

    def finish_work(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work, self.flat = None, None

    def drop(self) -> None:
        """Wait for a gather under way, and forget it with what it gathered."""
        with contextlib.suppress(RuntimeError):  # it may have failed
            self.finish_work()
        self.work, self.flat, self.ready = None, None, False
        self._empty()

    def free(self) -> None:
        """Give the gathered memory back (lifetime ``use`` only)."""
        if self.per_use and (self.ready or self.work is not None):
            self.finish_work()
            self.ready = False
            self._empty()

    def _empty(self) -> None:
        """Without memory for values that are gathered for one use."""
        for held in self.helds if self.per_use else ():
            held.leaf.untyped_storage().resize_(0)


def coalesces(held: Held) -> bool:
    """One gather and nothing else that changes values."""
    kinds = [hop.forward for hop in held.hops if hop.forward != "none"]
    return kinds == ["gather"]


def same_gather(a: Held, b: Held) -> bool:
    """Whether two parameters may share a gather."""
    if not (coalesces(a) and coalesces(b)) or a.choice.lifetime != b.choice.lifetime:
        return False
    ga, gb = (next(h for h in held.hops if h.forward == "gather") for held in (a, b))
    dtypes = [held.param.dtype for held in (a, b)]
    return ga.group is gb.group and dtypes[0] == dtypes[1]


def make_units(helds: Sequence[Held], limit: int = UNIT_BYTES) -> list[Unit]:
    """Units of the gathered parameters, given in order of first use."""
    units: list[Unit] = []
    run: list[Held] = []
    n_bytes = 0
    for held in helds:
        n = prod(held.used_shape) * held.param.element_size()
        if run and not (same_gather(run[0], held) and n_bytes + n <= limit):
            units.append(Unit(run))
            run, n_bytes = [], 0
        run.append(held)
        n_bytes += n
    if run:
        units.append(Unit(run))
    return units
