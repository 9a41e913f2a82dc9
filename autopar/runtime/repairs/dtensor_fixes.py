"""Repairs of torch's DTensor for the whole process, where it is silently wrong; made when a module is parallelized."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import RunError
from autopar.runtime.parameters.placed_alike import placed_as
from autopar.runtime.ranks.collective_log import CollectiveLog
from autopar.runtime.repairs.functions_of_all_parameters import of_a_stage, watch_norms
from autopar.runtime.repairs.mixed import mixes_on
from autopar.runtime.repairs.replacements import Repair, Replacement
from autopar.torch_private import (
    DTENSOR_HANDLERS,
    DTENSOR_REDUCED_DIMS,
    DTENSOR_STRATEGIES,
    LINEAR_REDUCTION_OP_MAP,
    TENSOR_LIST_CHECK,
    DTensorSpec,
    NormPartial,
    OpSchema,
    OpStrategy,
    data_of_tensors,
    found_inf_reduce_handler,
    generate_redistribute_costs,
)
from autopar.words.trees import PyTree

_READ = torch.ops.aten._local_scalar_dense.default
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)
_ANYS = (torch.ops.aten.any.default, torch.ops.aten.any.dim, torch.ops.aten.any.dims)
_Strategy = Callable[[OpSchema], OpStrategy]


ALONE = (
    "it is in pieces on the ranks, or still to be added up, so all ranks must read it, at the same place in the "
    "program (.item(), float(), bool(), an if): read it on every rank, outside of `if rank == 0`, and print it on one"
)
STAGE = (
    "a number of a pipeline's parameter or gradient is read: it is that of this rank's stage, and a sum over "
    "pm.parameters() is one over this rank's stages, another one on every rank. pm.clip_grad_norm_(float('inf')) gives "
    "the norm of all gradients; other sums need torch.distributed.all_reduce over one rank of each stage"
)
REDUCED = (
    "gradients of a parallel module are already reduced over its ranks; remove the {call} (and the division by the "
    "number of ranks)"
)
EQUAL = (
    "all ranks have the same parameters already: those of a parallel module come from rank 0; remove the {call}, or "
    "put other values in with load_state_dict"
)
PIECE = (
    "a collective cannot know which piece of the tensor it is to take; call it on x.full_tensor(), which all ranks "
    "have, or on x.to_local(), this rank's piece"
)
WHOLE = (
    "{call}() of a DTensor, which holds this rank's piece only; x.full_tensor().{call}() has all of it, and every rank "
    "must call full_tensor(); x.to_local().{call}() has the piece"
)
SAVED = (
    "'{name}' of a parallel module's state dict is {part}, and is saved or pickled by one rank: the file would have "
    "this rank's part alone, which no model on one device loads. {instead}; autopar.Checkpoint saves a run in pieces"
)
IN_PIECES_ON = "in pieces on {ranks} ranks"
OF_STAGE = "of one stage of a pipeline"
SAVE = "Call autopar.save(state, path) on every rank: it writes what one device would have"
GATHER = "Call autopar.full_state_dict(pm) on every rank, and save what rank 0 has then"
PIECES = (
    "a tensor in pieces on {ranks} ranks is saved or pickled by one rank: what is written is this rank's piece, which "
    "loads on this rank of as many alone. autopar.save(state, path) on every rank writes what one device would have"
)
_COLLECTIVES = {
    "allreduce_": ("all_reduce", REDUCED),
    "allreduce_coalesced_": ("all_reduce", REDUCED),
    "reduce_": ("reduce", REDUCED),
    "reduce_scatter_": ("reduce_scatter", REDUCED),
    "_reduce_scatter_base_": ("reduce_scatter", REDUCED),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", REDUCED),
    "broadcast_": ("broadcast", EQUAL),
    "allgather_": ("all_gather", PIECE),
    "_allgather_base_": ("all_gather", PIECE),
    "allgather_coalesced_": ("all_gather", PIECE),
    "allgather_into_tensor_coalesced_": ("all_gather", PIECE),
    "gather_": ("gather", PIECE),
    "scatter_": ("scatter", PIECE),
    "alltoall_": ("all_to_all", PIECE),
    "alltoall_base_": ("all_to_all", PIECE),
    "send": ("send", PIECE),
    "recv_": ("recv", PIECE),
}
"""torch's operators of collectives that take tensors: how scripts call them, and what is to be done instead."""
_meetings: dict[tuple[int, ...], tuple[Any, CollectiveLog]] = {}
"""By the ranks of a mesh, with the group of all ranks in whose store they meet."""
_ranks_of: WeakKeyDictionary[DeviceMesh, tuple[int, ...]] = WeakKeyDictionary()
_said: set[str] = set()


def _ranks(device_mesh: DeviceMesh) -> tuple[int, ...]:
    if device_mesh not in _ranks_of:
        _ranks_of[device_mesh] = tuple(device_mesh.mesh.flatten().tolist())
    return _ranks_of[device_mesh]


def meet_on(device_mesh: DeviceMesh) -> None:
    """Let the ranks of a parallel module's mesh check that all of them read a number; all of them call it."""
    ranks, world = _ranks(device_mesh), dist.group.WORLD
    if len(ranks) > 1 and _meetings.get(ranks, (None,))[0] is not world:
        meeting = CollectiveLog(ranks)
        after = ranks.index(dist.get_rank()) + 1
        meeting.others = [ranks[after % len(ranks)]]  # of those who read without all, one's neighbour does not
        _meetings[ranks] = world, meeting


def note_on(device_mesh: DeviceMesh, what: str) -> None:
    """Note that this rank reads something other than a number, as all ranks of the mesh must."""
    if mesh_and_meeting := _meetings.get(_ranks(device_mesh)):
        mesh_and_meeting[1].note(what)


def meet_at(device_mesh: DeviceMesh, verb: str, what: str) -> None:
    """Wait until all ranks of the mesh come to something in which each has its part.

    Raises:
        RunError: another rank comes to something else.
    """
    if mesh_and_meeting := _meetings.get(_ranks(device_mesh)):
        mesh_and_meeting[1].meet(verb, what, "all ranks must do it: call it outside of `if rank == 0`")


def _number(op: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """Read the number that a DTensor of one element holds, on every rank.

    Raises:
        RunError: another rank does not read it.
    """
    number: DTensor = args[0]
    if of_a_stage(number) and "stage" not in _said:
        _said.add("stage")
        warnings.warn(STAGE, stacklevel=3)
    mesh_and_meeting = _meetings.get(_ranks(number.device_mesh))
    if mesh_and_meeting and not all(isinstance(p, Replicate) for p in number.placements):
        mesh_and_meeting[1].meet("reads", "a number of a parameter or gradient", ALONE)
    with torch.no_grad():
        return op(args[0].detach().full_tensor())


def _unscaled(op: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
    """Unscale gradients by placement, so that what each kind of placement found is reduced as it needs."""
    kinds: dict[Any, list[DTensor]] = {}
    for grad in args[0]:
        kinds.setdefault((grad.device_mesh, tuple(type(p) for p in grad.placements)), []).append(grad)
    for grads in kinds.values():
        found_inf_reduce_handler(op, (grads, *args[1:]), kwargs)


def _refused(op: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """Refuse a collective of torch.distributed that was called with a DTensor.

    Raises:
        RunError: always.
    """
    raise _refusal(*_COLLECTIVES[op._schema.name.removeprefix("c10d::")])


def _refusal(call: str, instead: str) -> RunError:
    return RunError(f"torch.distributed.{call} of a DTensor: {instead.format(call=call)}")


def _lists_looked_into(check: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Wrap torch's check of a collective's list of tensors, to refuse a list with a DTensor.

    Raises:
        RunError: there is one.
    """

    def looked_into(tensors: Any, argument: str) -> None:
        if isinstance(tensors, list) and any(isinstance(tensor, DTensor) for tensor in tensors):
            call = sys._getframe(1).f_code.co_name
            raise _refusal(call, dict(_COLLECTIVES.values()).get(call, PIECE))
        check(tensors, argument)

    return looked_into


def _all_dims(infer: Callable[[Any, int], list[int] | None]) -> Callable[[Any, int], list[int] | None]:
    """Return the dims that a reduction is over, None for all: an empty list of dims means all."""
    return lambda dims, ndim: infer(None if isinstance(dims, list | tuple) and not dims else dims, ndim)


def _of_no_dims(strategy: _Strategy) -> _Strategy:
    """Return how ``any`` is sharded: over no dims it is, unlike others, no reduction, and runs on the whole."""

    def of(schema: OpSchema) -> OpStrategy:
        if len(schema.args_schema) > 1 and schema.args_schema[1] in ([], ()):
            raise NotImplementedError("any() over no dims")
        return strategy(schema)

    return of


def _formatted(tensor: DTensor, spec: str) -> str:
    """Format ``f"{tensor:.4f}"`` as for a plain tensor: a number in that format."""
    return format(tensor.item(), spec) if tensor.ndim == 0 and spec else object.__format__(tensor, spec)


def _listed(tensor: DTensor) -> Any:
    """Compute ``tensor.tolist()``, which reads a number.

    Raises:
        RunError: it is more than a number.
    """
    if tensor.ndim == 0:
        return tensor.item()
    raise RunError(WHOLE.format(call="tolist"))


def _as_numpy(tensor: DTensor, *, force: bool = False) -> Any:
    """Refuse ``tensor.numpy()``.

    Raises:
        RunError: always.
    """
    raise RunError(WHOLE.format(call="numpy"))


def _address(tensor: DTensor) -> int:
    """Return ``tensor.data_ptr()``: the address of this rank's shard; of an empty one a number that no other has.

    torch itself recognizes wrapper tensors by an address of zero; its ``deepcopy`` does.
    """
    if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
        return 0
    return tensor._local_tensor.data_ptr() or id(tensor._local_tensor)


def note_state(tensor: DTensor, name: str, of_stage: bool) -> None:
    """Mark a tensor of a parallel module's state dict, for when it is pickled.

    Args:
        of_stage: other ranks have other names.
    """
    tensor._autopar_state = name, of_stage  # type: ignore[attr-defined]


def _pickled(tensor: DTensor, protocol: Any) -> Any:
    """Return what stands for a tensor in a file: the plain tensor, if this rank has it whole.

    Raises:
        RunError: this rank has a part of the module's state only.
    """
    mesh = tensor.device_mesh
    if not mixes_on(mesh) or sys._getframe(1).f_globals.get("__name__") == "copy":
        return torch.Tensor.__reduce_ex__(tensor, protocol)
    of_parameter = "a parameter" if isinstance(tensor, torch.nn.Parameter) else ""
    name, of_stage = tensor.__dict__.get("_autopar_state", (of_parameter, False))
    if of_stage:
        raise RunError(SAVED.format(name=name, part=OF_STAGE, instead=GATHER))
    if not all(isinstance(p, Replicate) or mesh.size(i) == 1 for i, p in enumerate(tensor.placements)):
        if name:
            part = IN_PIECES_ON.format(ranks=mesh.size())
            raise RunError(SAVED.format(name=name, part=part, instead=SAVE))
        if "pieces" not in _said:
            _said.add("pieces")
            warnings.warn(PIECES.format(ranks=mesh.size()), stacklevel=3)
        return torch.Tensor.__reduce_ex__(tensor, protocol)
    plain = tensor.to_local().detach()
    return (plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()).__reduce_ex__(protocol)


def _set_data(tensor: DTensor, value: torch.Tensor) -> None:
    """Set ``tensor.data = value``; on the meshes of parallel modules the value is placed as the tensor is.

    Raises:
        RunError: the value is a plain tensor, of which a rank cannot know whether it is whole or its piece.
    """
    if mixes_on(tensor.device_mesh) and value.shape == tensor.shape:
        placed = placed_as(tensor, value)
        assert isinstance(placed, DTensor)
        value = placed
    if not isinstance(value, DTensor):
        raise RunError(
            f"p.data = value: the parameter is a DTensor of shape {tuple(tensor.shape)}, and the value a plain tensor "
            f"of shape {tuple(value.shape)}, so this rank's piece of it is not known; copy a whole one with "
            "torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements), or use load_state_dict"
        )
    data_of_tensors.__set__(tensor, value)
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec


def _of_whole_norms(strategy: _Strategy) -> _Strategy:
    """Return how sums are sharded: sums of norms only where the norms are combined."""

    def of(schema: OpSchema) -> OpStrategy:
        choices = strategy(schema)
        for choice in choices.strategies:
            for spec in choice.input_specs or ():
                if any(isinstance(p, NormPartial) for p in spec.placements):
                    before = schema.args_schema[0]
                    assert isinstance(before, OpStrategy)
                    choice.input_specs = [_without_norms(spec)]
                    choice.output_specs = _without_norms(choice.output_spec)
                    choice.redistribute_cost = [generate_redistribute_costs(before, choice.input_specs[0])]
                    break
        return choices

    return of


def _without_norms(spec: DTensorSpec) -> DTensorSpec:
    placements = tuple(Replicate() if isinstance(p, NormPartial) else p for p in spec.placements)
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def _of_collectives() -> list[Replacement]:
    handlers = DTENSOR_HANDLERS.get()
    collectives = [getattr(torch.ops.c10d, name, None) for name in _COLLECTIVES]
    return [Replacement(handlers, c.default, lambda _: _refused) for c in collectives if c is not None]


def _in_strategies(wrapped: Mapping[Any, Callable[[_Strategy], _Strategy]]) -> list[Replacement]:
    """Change how DTensor shards operators, of those that this version of torch has."""
    strategies: dict[Any, Any] = DTENSOR_STRATEGIES.get()
    return [Replacement(strategies, op, wrap) for op, wrap in wrapped.items() if op in strategies]


def _of_anys() -> list[Replacement]:
    as_maximum = [Replacement(LINEAR_REDUCTION_OP_MAP, op, lambda _: "max") for op in _ANYS]
    return [*as_maximum, *_in_strategies({_ANYS[-1]: _of_no_dims})]


def _handler(op: Any, handler: Callable[..., Any]) -> Callable[[], list[Replacement]]:
    return lambda: [Replacement(DTENSOR_HANDLERS.get(), op, lambda _: handler)]


def _method(name: str, method: Any) -> Callable[[], list[Replacement]]:
    return lambda: [Replacement(DTensor, name, lambda _: method)]


REPAIRS = (
    Repair("numbers are read whole", _handler(_READ, _number)),
    Repair("overflows of a gradient scaler", _handler(_UNSCALE, _unscaled)),
    Repair("collectives", _of_collectives),
    Repair("collectives of lists", lambda: [Replacement(TENSOR_LIST_CHECK, None, _lists_looked_into)]),
    Repair("sums of norms", lambda: _in_strategies(dict.fromkeys(_SUMS, _of_whole_norms)), until=(2, 14)),
    Repair("any", _of_anys, until=(2, 14)),
    Repair("reductions over no dims", lambda: [Replacement(DTENSOR_REDUCED_DIMS, None, _all_dims)]),
    Repair("formats", _method("__format__", _formatted)),
    Repair("tolist", _method("tolist", _listed)),
    Repair("numpy", _method("numpy", _as_numpy)),
    Repair("addresses", _method("data_ptr", _address)),
    Repair("files", _method("__reduce_ex__", _pickled)),
    Repair("assignments to data", _method("data", property(data_of_tensors.__get__, _set_data))),
)
"""All of them, in the order of this module's docstring."""


def correct() -> None:
    """Repair numbers, overflows and assignments of DTensors from now on; a second call changes nothing."""
    watch_norms()
    for repair in REPAIRS:
        repair.apply()
