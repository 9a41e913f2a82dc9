"""A model's parameters and buffers, placed on a mesh and registered under their names in what runs it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.allocations import elsewhere
from autopar.errors import RunError
from autopar.plans.plan import DEVICE, HOST, ParamChoice, StagePlan
from autopar.runtime.parameters import rounded_steps
from autopar.runtime.parameters.attributes import with_attributes
from autopar.runtime.parameters.host_memory import check_reaches, is_on_host, note, pinned
from autopar.runtime.parameters.state import Buffers, as_dtensor, local_of, local_shard, torch_placements
from autopar.runtime.parameters.user_module import UserModule
from autopar.runtime.ranks.devices import device_of
from autopar.runtime.repairs.dtensor_fixes import meet_on
from autopar.runtime.repairs.mixed import mix_on
from autopar.words.graph import Graph
from autopar.words.placements import State, whole_state


class Placing:
    """The placement and registration of one graph's parameters and buffers.

    Args:
        user: the module in which they are registered.
        model: the model that has them.
        constants: tensors that the model's code makes, by name.
        values: gives the whole value of a parameter or buffer by name; by default the model's own. Only this rank's
            slice is kept.
        shared: for a stage of a pipeline: parameters of this rank's other stages, which are used again where names
            agree and added to. With it, only what the graph reads is registered, and ``unread``.
        unread: by name the first name of parameters and buffers that no stage reads, for the stage that keeps them.
    """

    def __init__(
        self, user: UserModule, model: torch.nn.Module, graph: Graph, constants: Mapping[str, torch.Tensor],
        plan: StagePlan, device_mesh: DeviceMesh, values: Callable[[str], torch.Tensor] | None = None,
        shared: dict[str, torch.nn.Parameter] | None = None, unread: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.user, self.model, self.graph, self.constants = user, model, graph, constants
        self.plan, self.device_mesh, self.values, self.shared = plan, device_mesh, values, shared
        mix_on(device_mesh)
        meet_on(device_mesh)
        self.params = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.nodes = {node.target: node for node in graph.nodes if node.kind in ("param", "buffer")}
        self.unread = unread or {}
        self.pieces: dict[str, torch.Tensor] = {}

    def wants(self, name: str) -> bool:
        """Check that a value of this name is registered here, and was not registered under another name before."""
        return name in self.nodes or self.unread.get(name) == name

    def arrives(self, name: str, whole: torch.Tensor) -> None:
        """Keep this rank's part of a value that is wanted, so that the whole one can go before the next comes."""
        if self.wants(name):
            param = self.params.get(name)
            state = self._stored(name, param) if param is not None else self._kept(name)
            self.pieces[name] = self._cut(whole.detach(), state, name)

    def _stored(self, source: str, param: torch.nn.Parameter) -> State:
        """Return the placement of a parameter."""
        planned = self.plan.params.get(source)
        return planned.stored if planned is not None else whole_state(self.plan.mesh, param.requires_grad)

    def _kept(self, source: str) -> State:
        """Return the placement of a buffer."""
        return self.plan.buffers.get(source, whole_state(self.plan.mesh))

    def parameters(self) -> None:
        """Place and register the model's parameters.

        Raises:
            RunError: one has no value, or two stages of this rank store it in two ways.
        """
        if any(choice.on_host for choice in self.plan.params.values()):
            check_reaches(self.device_mesh)
        placed: dict[str, torch.nn.Parameter] = {} if self.shared is None else self.shared
        mine: set[str] = set()
        for name, param in self.params.items():
            source = self.graph.tied.get(name, name)
            if source not in self.nodes:  # not read by the model's forward
                if self.shared is not None and name not in self.unread:
                    continue
                source = next(n for n, p in self.params.items() if p is param)
            if source not in placed:
                node = self.nodes.get(source)
                state = self._stored(source, param)
                shape = node.out.shape if node is not None else tuple(param.shape)
                on_host = self._is_on_host(source)
                stored = self._local(source, state)
                if self.graph.precision is not None:
                    stored = stored.to(getattr(torch, self.graph.precision.stored(name_of_dtype(stored.dtype))))
                if on_host:
                    stored = pinned(stored, torch.device(device_of(self.device_mesh)))
                if self.shared is not None or self.device_mesh.size() > 1:  # on one device nothing is placed
                    stored = as_dtensor(stored, state, shape, self.device_mesh)
                placed[source] = with_attributes(torch.nn.Parameter(stored, requires_grad=param.requires_grad), param)
                if on_host:
                    note(placed[source], torch.device(device_of(self.device_mesh)))
                if self.graph.precision is not None:
                    rounded_steps.keep(placed[source], source, self.graph.precision)
            elif self.shared is not None and source not in mine:
                _same_storage(source, placed[source], self.plan.params[source], self.device_mesh)
            mine.add(source)
            tables, key = self.user.stored_at(name)
            tables["_parameters"][key] = placed[source]

    def registered_buffers(self) -> Buffers:
        """Place and register the buffers; this rank's part of each, and of the constants of the model's code.

        A buffer that another stage of this rank has registered is used again; the plan places it alike there.
        """
        placed: Buffers = {}
        shown: dict[str, torch.Tensor] = {}
        read = [n.target for n in self.graph.nodes if n.kind == "buffer" and n.target not in self.buffers]
        for name in read:
            if name in self.params:  # registered as a parameter, and renewed as a buffer is
                tables, key = self.user.stored_at(name)
                stored = tables["_parameters"][key]
                placed[name] = local_of(stored), self._kept(name)
        constants = [name for name in read if name not in self.params]
        for name in [*self.buffers, *constants]:
            source = self.graph.tied.get(name, name)
            if self.shared is not None and source not in self.nodes and name not in self.unread:
                continue
            state = self._kept(source)
            if source not in placed:
                before = self._registered(name) if name in self.buffers else None
                if before is not None and _placed_as(before, state, self.device_mesh):
                    shown[source] = before
                    placed[source] = local_of(before), state
                else:
                    local = self._local(source, state)
                    placed[source] = local, state
                    cut = state.is_cut
                    shape = self.nodes[source].out.shape if cut else ()
                    shown[source] = as_dtensor(local, state, shape, self.device_mesh) if cut else local
            if name in self.buffers:
                tables, key = self.user.stored_at(name)
                tables["_buffers"][key] = shown[source]
        return placed

    def _registered(self, name: str) -> torch.Tensor | None:
        tables, key = self.user.stored_at(name)
        before: torch.Tensor | None = tables["_buffers"].get(key)
        return before

    def _local(self, name: str, state: State) -> torch.Tensor:
        """Return this rank's part of a value."""
        if name in self.pieces:
            return self.pieces.pop(name)
        if name in self.constants and name not in self.buffers and name not in self.params:
            value = self.constants[name]
        elif self.values is not None:
            value = self.values(name)
        else:
            value = (self.params if name in self.params else self.buffers)[name]
        return self._cut(value.detach(), state, name)

    def _cut(self, value: torch.Tensor, state: State, name: str) -> torch.Tensor:
        """Copy this rank's part of a whole value, on this rank's device."""
        if value.device.type == "meta":
            raise RunError(f"'{name}' is on the meta device; pass init= to give it a value")
        piece = local_shard(value, state, self.device_mesh)
        if self._is_on_host(name):
            with elsewhere():
                return piece.to("cpu", copy=True).contiguous()
        return piece.to(torch.device(device_of(self.device_mesh)), copy=True).contiguous()

    def _is_on_host(self, name: str) -> bool:
        """Check whether a parameter is stored in the memory of the host."""
        planned = self.plan.params.get(name)
        return planned is not None and planned.on_host


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return ``float32``, as graphs spell it."""
    return str(dtype).removeprefix("torch.")


def _placed_as(tensor: torch.Tensor, state: State, device_mesh: DeviceMesh) -> bool:
    if not isinstance(tensor, DTensor):
        return not state.is_cut
    return tensor.device_mesh == device_mesh and tuple(tensor.placements) == tuple(torch_placements(state))


def _same_storage(name: str, stored: torch.nn.Parameter, choice: ParamChoice, mesh: DeviceMesh) -> None:
    """Check that two stages of one rank that share a parameter store it alike."""
    state = choice.stored
    if is_on_host(stored) != choice.on_host:
        raise RunError(
            f"parameter '{name}' is used by two stages on the same devices and stored on the host by one of them only; "
            f"pin it for both: params={{'{name}': '{state.text} {HOST if choice.on_host else DEVICE}'}}"
        )
    have = (stored.device_mesh, tuple(stored.placements)) if isinstance(stored, DTensor) else None
    if have != (mesh, tuple(torch_placements(state))):
        raise RunError(
            f"parameter '{name}' is used by two stages on the same devices and stored in two ways ({have} and "
            f"{state.text}); pin how it is stored"
        )
