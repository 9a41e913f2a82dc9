"""A batch on its way into the program: every rank is called with all of it, and takes its own pieces."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture import Captured
from autopar.errors import RunError
from autopar.lower.emit import Program, Slot
from autopar.placements import State, format_state, is_cut, local_shape
from autopar.runtime.calls import describe, example_leaves, flatten_call, leaf_name, same_device, same_literal
from autopar.runtime.same_batch import Seen
from autopar.runtime.state import coordinate_of, joined, local_piece, torch_placements

Call = tuple[tuple[Any, ...], dict[str, Any]]

NOT_PLANNED = (
    "input {name} requires grad, and the example inputs of parallelize did not, so its gradient was not planned: pass "
    "an example that requires_grad_() to parallelize, or detach() this input"
)


class _Piece(torch.autograd.Function):
    """This rank's slice of the caller's tensor; the caller's gets the slices' gradients put together."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, state: State, device_mesh: DeviceMesh) -> torch.Tensor:
        ctx.state, ctx.device_mesh, ctx.shape = state, device_mesh, whole.shape
        return local_piece(whole, state, device_mesh).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return joined(grad, ctx.state, ctx.shape, ctx.device_mesh), None, None


class Batch:
    """How the batches of one captured model become inputs of its program on this rank."""

    def __init__(
        self, captured: Captured, program: Program, signature: inspect.Signature, device_mesh: DeviceMesh,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.captured, self.signature = captured, signature
        self.device_mesh, self.device, self.mesh = device_mesh, device, program.mesh
        self.slots = {slot.name: slot for slot in program.slots if slot.kind == "input"}
        leaves, spec = example_leaves(captured)
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, spec))
        self.names = [leaf_name(path) for path, _ in paths]
        self.position = {captured.graph.nodes[n].target: i for i, n in enumerate(captured.inputs) if n is not None}

    def inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seen: Seen | None = None
    ) -> dict[str, torch.Tensor]:
        """Local values of the program's inputs, by name.

        Args:
            seen: what other ranks are to compare is put there.

        Raises:
            RunError: the call is not one that was captured; the message says in what.
        """
        leaves = flatten_call(self.captured, self.signature, args, kwargs)
        found: dict[str, torch.Tensor] = {}
        captured = self.captured
        for i, (leaf, number) in enumerate(zip(leaves, captured.inputs, strict=True)):
            if number is None:
                literal = captured.literals.get(i)
                if i in captured.literals and not same_literal(literal, leaf):
                    raise RunError(
                        f"input {self.names[i]}: captured with {literal!r}, called with {describe(leaf)}; such "
                        "values are part of the program; parallelize again with the new value"
                    )
                continue
            name = captured.graph.nodes[number].target
            found[name] = self.local(name, leaf)
            if seen is not None and not isinstance(leaf, DTensor):
                whole = tuple(leaf.shape) == self.slots[name].shape
                seen.add(self.names[i], name, leaf, None if whole else self.slots[name].state)
        return found

    def local(self, input_name: str, leaf: Any) -> torch.Tensor:
        """This rank's part of one input, in the caller's autograd graph if its gradient was planned."""
        slot, name = self.slots[input_name], self.names[self.position[input_name]]
        if not isinstance(leaf, torch.Tensor):
            raise RunError(
                f"input {name}: captured as a {slot.dtype} tensor of shape {slot.shape}, called with {describe(leaf)}"
            )
        if str(leaf.dtype) != "torch." + slot.dtype:
            raise RunError(
                f"input {name}: captured with dtype {slot.dtype}, called with "
                f"{str(leaf.dtype).removeprefix('torch.')}; convert it, or parallelize again"
            )
        if leaf.requires_grad and not slot.needs_grad:
            if torch.is_grad_enabled():
                raise RunError(NOT_PLANNED.format(name=name))
            leaf = leaf.detach()
        if isinstance(leaf, DTensor):
            if tuple(leaf.shape) == slot.shape:
                return leaf.redistribute(self.device_mesh, torch_placements(slot.state)).to_local()
        if not same_device(leaf.device, self.device):
            raise RunError(f"input {name} is on {leaf.device}, the mesh is on {self.device}; move it with .to()")
        shape = tuple(leaf.shape)
        if shape == slot.shape and not isinstance(leaf, DTensor):
            if not is_cut(slot.state):
                return leaf
            if leaf.requires_grad:
                return _Piece.apply(leaf, slot.state, self.device_mesh)  # type: ignore[no-any-return]
            return local_piece(leaf, slot.state, self.device_mesh).contiguous()
        if shape == self._local_shape(slot):
            return leaf
        pinned = f" (or this rank's slice, {format_state(slot.state)})" if is_cut(slot.state) else ""
        hint = ""
        if shape and slot.shape and shape[0] != slot.shape[0] and shape[1:] == slot.shape[1:]:
            hint = "; pass the whole batch on every rank, drop a last batch that is smaller, or use train_step for more"
        raise RunError(f"input {name}: captured with shape {slot.shape}{pinned}, called with {shape}{hint}")

    def _local_shape(self, slot: Slot) -> tuple[int, ...]:
        """Shape of this rank's part of an input."""
        return local_shape(slot.shape, slot.state, self.mesh, coordinate_of(self.device_mesh))

    def microbatches(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int | None) -> list[Call]:
        """The calls of a step's microbatches: ``count``, or as many as the shapes say.

        Raises:
            RunError: the inputs do not agree on the number.
        """
        leaves = flatten_call(self.captured, self.signature, args, kwargs)
        shapes: list[tuple[int, ...] | None] = []
        factors: dict[str, int] = {}
        for i, (leaf, number) in enumerate(zip(leaves, self.captured.inputs, strict=True)):
            if number is None or not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
                shapes.append(None)
                continue
            slot = self.slots[self.captured.graph.nodes[number].target]
            want = slot.shape
            if leaf.shape[1:] != want[1:]:
                want = self._local_shape(slot)
            shapes.append(want)
            have = tuple(leaf.shape)
            if have != want and have[1:] == want[1:] and want and have[0] % want[0] == 0:
                factors[self.names[i]] = have[0] // want[0]
        found = set(factors.values())
        k = count or (found.pop() if len(found) == 1 else 1)
        if k < 1:
            raise RunError(f"microbatches is {k}; give 1 or more")
        if k == 1 and not factors:
            return [(args, kwargs)]
        wrong = {name: f for name, f in factors.items() if f != k}
        if wrong or not factors:
            sizes = ", ".join(f"{name}: {f}" for name, f in factors.items()) or "every input has the captured shape"
            raise RunError(
                f"train_step: inputs must be {count or 'the same number of'} times as long in dim 0 as a microbatch "
                f"(the captured shape); found {sizes}"
            )
        pieces = []
        for j in range(k):
            cut = [
                leaf.narrow(0, j * want[0], want[0]) if want is not None and tuple(leaf.shape) != want else leaf
                for leaf, want in zip(leaves, shapes, strict=True)
            ]
            pieces.append(pytree.tree_unflatten(cut, self.captured.in_spec))
        return [(tuple(a), dict(kw)) for a, kw in pieces]


__all__ = ["Batch"]
