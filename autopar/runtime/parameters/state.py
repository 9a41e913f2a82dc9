"""Parameters of a rank: stored as DTensors for the optimizer, used as plain local tensors by the program.

On a mesh of one device they are stored as plain tensors, too.

Reshard steps lead from one to the other (see :mod:`autopar.runtime.parameters.redistribution`). A :class:`HeldParam`
has a *used leaf*, a plain tensor on which autograd accumulates. If no step changes the values, the leaf shares the
stored tensor's memory: nothing is copied. Otherwise it belongs to a
:class:`~autopar.runtime.parameters.gathering.Unit`, a few parameters that are gathered together, for one step or for
one use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.errors import RunError
from autopar.plans.plan import ParamChoice
from autopar.runtime.parameters.host_memory import GradientToHost, HostCarrier, carrier_of
from autopar.runtime.parameters.narrow_gathers import NarrowWire
from autopar.runtime.parameters.redistribution import Cut, ReshardStep, dense, gather, of_its_own, reshard_steps
from autopar.runtime.ranks.devices import device_of
from autopar.torch_private import DTensorSpec, TensorMeta
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import box_of, local_shape

Buffers = dict[str, tuple[torch.Tensor, State]]
"""This rank's part of each buffer and constant, and how it is placed, by name."""
_STEPS = "_autopar_steps"


def _count_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            note_write(param)


def note_write(param: torch.Tensor) -> None:
    """Change :func:`version_of` a parameter, whose local shard was written."""
    if isinstance(param, DTensor):
        setattr(param, _STEPS, getattr(param, _STEPS, 0) + 1)


register_optimizer_step_post_hook(_count_steps)


def version_of(param: torch.Tensor) -> tuple[int, int]:
    """Return a version that changes with an in-place change of a parameter, or an optimizer's step on it."""
    return 0 if param.is_inference() else param._version, getattr(param, _STEPS, 0)


def torch_placements(state: State) -> tuple[TorchPlacement, ...]:
    """Return a state as DTensor placements, which do not distinguish ``I`` from ``R``."""
    placements: list[TorchPlacement] = []
    for p in state:
        d = p.dim
        placements.append(Shard(d) if d is not None else Partial() if p.is_pending else Replicate())
    return tuple(placements)


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Return the names and sizes of the axes of a device mesh."""
    names = device_mesh.mesh_dim_names or ("",) * device_mesh.ndim
    return Mesh((name, device_mesh.size(axis)) for axis, name in enumerate(names))


def coordinate_of(device_mesh: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's coordinate on a device mesh."""
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    return tuple(coordinate)


def local_shard(whole: torch.Tensor, state: State, device_mesh: DeviceMesh) -> torch.Tensor:
    """Return a view of this rank's slice of ``whole``."""
    box = box_of(whole.shape, state, mesh_of(device_mesh), coordinate_of(device_mesh))
    for d, (start, length) in enumerate(box):
        if length != whole.shape[d]:
            whole = whole.narrow(d, start, length)
    return whole


@torch.no_grad()
def joined(local: torch.Tensor, state: State, shape: Sequence[int], device_mesh: DeviceMesh) -> torch.Tensor:
    """Gather the whole tensor of ``shape`` on every rank from the shards in ``state``; pending sums are reduced."""
    mesh, at = mesh_of(device_mesh), coordinate_of(device_mesh)
    for axis in reversed(range(len(state))):
        n, d = device_mesh.size(axis), state[axis].dim
        if n == 1 or state[axis].is_replicated:
            continue
        group = device_mesh.get_group(axis)
        if d is None:
            local = local.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(local, group=group)
        else:
            before = local_shape(shape, State(state[:axis]), mesh.outer(axis), at[:axis])
            local = gather(local, ReshardStep("gather", "slice", group, n, 0, Cut(d, before[d])))
    return local


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a stored tensor; a plain one itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor itself, or a DTensor gathered, which all ranks of its mesh do together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_dtensor(local: torch.Tensor, state: State, shape: Sequence[int], device_mesh: DeviceMesh) -> DTensor:
    """Wrap a local tensor as a DTensor, without communication, in whatever memory it is."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    if local.device.type == device_mesh.device_type:
        return DTensor.from_local(
            local, device_mesh, torch_placements(state), run_check=False, shape=torch.Size(shape), stride=stride
        )
    return _where_it_is(local, device_mesh, torch_placements(state), torch.Size(shape), stride)


def wrapped_as(param: DTensor, local: torch.Tensor) -> DTensor:
    """Wrap a local tensor placed as a parameter, in whatever memory it is."""
    return _where_it_is(local, param.device_mesh, param.placements, param.shape, param.stride())


def _where_it_is(
    local: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[TorchPlacement], shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:  # fmt: skip
    """Make a DTensor of a local tensor; ``DTensor.from_local`` would move it to the device of the mesh."""
    meta = TensorMeta(shape=shape, stride=stride, dtype=local.dtype)
    spec = DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


# --- what may be replaced ---------------------------------------------------------------------------------------------

Form = tuple[tuple[int, ...], torch.dtype, Any]


def same_form(name: str, stored: torch.Tensor, form: Form | None) -> Form:
    """Return the shape, dtype and placement of a stored tensor, which a tensor that is put in its place must have too.

    Raises:
        RunError: it has others.
    """
    at = (stored.device_mesh, tuple(stored.placements)) if isinstance(stored, DTensor) else None
    now = tuple(stored.shape), stored.dtype, at
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


class HeldParam:
    """One parameter of the program.

    Attributes:
        owner, key: where the stored parameter is registered; it is read there before each forward.
        leaf: what the program reads and autograd accumulates on; on a mesh of one device the stored parameter itself.
        alias: the leaf shares the stored memory.
        adjoint: hops of the gradient's way back that do something, in order.
        used_shape, stored_shape: shapes of this rank's pieces; ``padded_shape``: that of the largest piece among the
            ranks that gather the parameter together.
        dtype: what the program reads; ``casts`` where the stored parameter is in another format (a master copy).
        wire: the form in which ranks gather it, if that is not the program's.
        trained: its gradient was planned; a parameter that is frozen for a while keeps that.
        sum: this rank's part of the gradient of the step that is under way, reduced; the parameter gets it at the end.
            What needs no reduction waits as the leaf's own gradient.
        carrier: copies it between host and device; None where it is stored on the device.
        arriving: for a parameter on the host, gradients that were sent there and are not in `sum` yet.
        wide: for a parameter that is cast, gradients of this step's microbatches, in the format that they are added up
            in, which are still to be reduced.
        changed: called when there is another stored parameter, or it wants a gradient or does so no more.
    """

    def __init__(
        self, name: str, owner: torch.nn.Module, key: str, choice: ParamChoice, device_mesh: DeviceMesh, mesh: Mesh,
        shape: tuple[int, ...], trained: bool = True, dtype: torch.dtype | None = None,
        wire: NarrowWire | None = None,
    ) -> None:  # fmt: skip
        self.trained, self.wire = trained, wire
        self.name, self.owner, self.key, self.choice = name, owner, key, choice
        at = coordinate_of(device_mesh)
        self.reshard_steps = reshard_steps(name, choice, shape, device_mesh, mesh)
        self.dtype = dtype or self.param.dtype
        self.casts = self.dtype != self.param.dtype
        self.carrier: HostCarrier | None = (
            carrier_of(torch.device(device_of(device_mesh))) if choice.on_host else None
        )
        self.arriving: list[GradientToHost] = []
        is_as_used = all(step.forward == "none" for step in self.reshard_steps) and not self.casts
        self.alias = is_as_used and not choice.on_host
        self.is_carried_only = is_as_used and choice.on_host
        self.adjoint = tuple(step for step in reversed(self.reshard_steps) if step.backward != "none")
        self.used_shape = local_shape(shape, choice.used, mesh, at)
        self.stored_shape = local_shape(shape, choice.stored, mesh, at)
        gathered = next((reshard_step for reshard_step in self.reshard_steps if reshard_step.forward == "gather"), None)
        self.padded_shape = self.stored_shape
        if gathered is not None:
            d = gathered.cut.dim
            self.padded_shape = (*self.stored_shape[:d], gathered.cut.largest(gathered.n), *self.stored_shape[d + 1 :])
        self.seen: torch.nn.Parameter | None = None
        self.wanted: bool | None = None
        self.address = 0
        self.local: torch.Tensor | None = None
        self.leaf: torch.Tensor = torch.empty(0)
        self.changed: Callable[[], None] = lambda: None
        self.unit: Any = None
        self.form: Form | None = None
        self.sum: torch.Tensor | None = None
        self.wide: torch.Tensor | None = None

    @property
    def param(self) -> torch.nn.Parameter:
        """The stored parameter."""
        param = self.owner._parameters[self.key]
        assert param is not None
        return param

    @property
    def per_use(self) -> bool:
        """Gathered anew for every use (ZeRO-3)."""
        return not self.alias and self.choice.lifetime == "use"

    def bind(self) -> bool:
        """Follow the stored parameter; whether the leaf is a new tensor, which nobody hears of yet."""
        param, before = self.owner._parameters.get(self.key), self.leaf
        if param is None:
            raise RunError(
                f"parameter '{self.name}' was set to None or taken out of the model, and the program reads it: put it "
                "back, or change the model before parallelize"
            )
        local = local_of(param)
        plain, wanted = local is param, param.requires_grad
        if wanted and param.grad_fn is not None:
            raise RunError(
                f"parameter '{self.name}' was written in place with gradients on ({type(param.grad_fn).__name__}), so "
                "that it is no leaf any more and its gradient would go on to what was written to it; write to "
                "parameters under torch.no_grad(), or put a new torch.nn.Parameter in its place before parallelize"
            )
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
            elif self.leaf.shape != self.used_shape or self.leaf.dtype != self.dtype:
                device = local.device if self.carrier is None else self.carrier.device
                self.leaf = torch.empty(self.used_shape, dtype=self.dtype, device=device)
                if self.per_use:
                    self.leaf.untyped_storage().resize_(0)
        if self.leaf.requires_grad is not wanted:
            self.leaf.requires_grad_(wanted)
        self.seen, self.wanted, self.address = param, wanted, local.data_ptr() if plain else 0
        self.changed()
        return self.leaf is not before

    @property
    def piece(self) -> torch.Tensor:
        """This rank's part of the stored parameter, as the program reads it; a copy on the device, if it is not there.

        Of one on the host on the current stream.
        """
        assert self.local is not None
        there = self.local if self.carrier is None else self.carrier.to_device(self.local)
        return there.to(self.dtype) if self.casts else there

    @property
    def sent(self) -> torch.Tensor:
        """This rank's part as ranks that gather it send it."""
        return self.piece if self.wire is None else self.wire.sent(self.piece)

    def received(self, sent: torch.Tensor) -> torch.Tensor:
        """Return what :attr:`sent` stands for, as the program reads it."""
        return sent if self.wire is None else self.wire.received(sent, self.dtype)

    @property
    def version(self) -> tuple[int, int]:
        """The version of the stored parameter (:func:`version_of`)."""
        return version_of(self.param)

    def add(self, grad: torch.Tensor) -> None:
        """Add a reduced gradient to the step's sum; of a parameter on the host it is sent there."""
        if self.carrier is None:
            self.add_stored(grad)
            return
        self.arriving.append(self.carrier.to_host(grad))
        while len(self.arriving) > 1:  # of a microbatch before
            self.add_stored(self.arriving.pop(0).wait())

    def add_stored(self, grad: torch.Tensor) -> None:
        """Add a gradient in the memory in which the parameter is stored to the step's sum."""
        self.sum = grad if self.sum is None else self.sum.add_(grad)

    def drop_sum(self) -> None:
        """Forget the step's sum."""
        self.sum = self.wide = None
        self.arriving = []

    def taken(self) -> torch.Tensor | None:
        """Take the step's accumulated gradient, which ends it.

        What a DTensor holds gets memory of its own: a part of a bucket would keep the bucket alive, and
        ``copy.deepcopy`` of a DTensor fails where its local tensor has an offset. It is dense, also where no other
        rank adds to it (``nn.Embedding(sparse=True)``), since a DTensor has no sparse ones.
        """
        if self.carrier is not None:
            if not self.adjoint and self.leaf.grad is not None:  # left there by hand
                left, self.leaf.grad = self.leaf.grad, None
                self.add(dense(left).to(self.param.dtype))
            self.carrier.settle()
            for arrival in self.arriving:
                self.add_stored(arrival.wait())
            self.arriving = []
        grad, self.sum = self.sum, None
        if not self.adjoint:
            leaf = self.leaf
            of_autograd = leaf.grad
            if of_autograd is not None:
                leaf.grad = None
                of_autograd = of_autograd.to(self.param.dtype)
                grad = of_autograd if grad is None else grad.add_(of_autograd)
        if grad is None or not isinstance(self.param, DTensor):
            return grad
        return of_its_own(dense(grad))

    def placed(self, grad: torch.Tensor) -> torch.Tensor:
        """Place a reduced gradient as the stored parameter is: as a DTensor of its placement, or plain."""
        return _placed(self.param, grad)


def _placed(param: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    return DTensor(grad, param._spec, requires_grad=False) if isinstance(param, DTensor) else grad  # type: ignore[call-arg]


def give(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Add a reduced gradient, this rank's part of it, to the gradient of a stored parameter."""
    have = param.grad
    if have is None:
        param.grad = _placed(param, grad)
        return
    if isinstance(have, DTensor) and isinstance(param, DTensor) and have.placements != param.placements:
        param.grad = have = have.redistribute(param.device_mesh, param.placements)  # of a penalty, say
    local_of(have).add_(grad)


class Followed:
    """A buffer of the program, or a frozen parameter that it updates, read where it is registered.

    Someone may put another tensor there.
    """

    def __init__(self, name: str, owner: torch.nn.Module, key: str) -> None:
        self.name, self.owner, self.key = name, owner, key
        self.is_param = key in owner._parameters
        self.shown = f"{'parameter' if self.is_param else 'buffer'} '{name}'"
        self.seen = self._registered()
        assert self.seen is not None
        self.address = self.local.data_ptr()
        self.form = same_form(self.shown, self.seen, None)

    def _registered(self) -> torch.Tensor | None:
        return (self.owner._parameters if self.is_param else self.owner._buffers).get(self.key)

    def replaced(self) -> bool:
        """Check whether there is another tensor than at the last call, or ``.data`` gave a parameter other memory.

        Raises:
            RunError: it has another shape, dtype or placement, or is no tensor; or a parameter wants a gradient now.
        """
        now = self._registered()
        if now is self.seen and not self.is_param:
            return False
        if not isinstance(now, torch.Tensor):
            raise RunError(f"{self.shown} is {now!r} now; the program reads a tensor of shape {self.form[0]}")
        if self.is_param:
            if now.requires_grad:
                raise RunError(
                    f"{self.shown} requires grad now, and forward writes it: it was frozen when the model was "
                    "captured, so nothing would train it; parallelize the model as it is to be trained"
                )
            address = local_of(now).data_ptr()
            if now is self.seen and address == self.address:
                return False
            self.address = address
        same_form(self.shown, now, self.form)
        self.seen = now
        return True

    @property
    def param(self) -> torch.Tensor:
        """The registered tensor."""
        assert self.seen is not None
        return self.seen

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, as the program reads it."""
        return local_of(self.param)
