"""A batch on its way into the program: every rank is called with all of it, and takes its own pieces.

:class:`Batch` names and checks the tensors of a call and cuts them into microbatches, alike for a plan with stages and
without; :func:`local_part` takes this rank's piece of one of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.capture.tensor_layouts import not_dense
from autopar.errors import RunError
from autopar.lower.program import Slot
from autopar.runtime.batches.calls import describe, example_leaves, flatten_call, leaf_name, leaves_of
from autopar.runtime.parameters.state import coordinate_of, joined, local_shard, torch_placements
from autopar.runtime.ranks.devices import is_host_number, same_device
from autopar.torch_private import pytree
from autopar.words.graph import Node
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import local_shape
from autopar.words.trees import Context, PyTree

Shape = tuple[int, ...]

NOT_PLANNED = (
    "input {name} requires grad, and the example inputs of parallelize did not, so its gradient was not planned: pass "
    "an example that requires_grad_() to parallelize, or detach() this input"
)


class _Piece(torch.autograd.Function):
    """This rank's slice of the caller's tensor; the caller's gets the slices' gradients put together."""

    @staticmethod
    def forward(ctx: Context, whole: torch.Tensor, state: State, device_mesh: DeviceMesh) -> torch.Tensor:
        ctx.state, ctx.device_mesh, ctx.shape = state, device_mesh, whole.shape
        return local_shard(whole, state, device_mesh).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return joined(grad, ctx.state, ctx.shape, ctx.device_mesh), None, None


def local_part(
    slot: Slot, leaf: torch.Tensor, shown: str, device_mesh: DeviceMesh, mesh: Mesh, in_shards: bool
) -> torch.Tensor:
    """Return this rank's part of one input, in the caller's autograd graph if its gradient was planned.

    Args:
        shown: what messages call the input.
        in_shards: its placement was asked for, so every rank may pass its own piece.

    Raises:
        RunError: it has neither the captured shape nor, if ``in_shards``, that of this rank's part; or it wants a
            gradient that was not planned.
    """
    if leaf.requires_grad and not slot.needs_grad:
        if torch.is_grad_enabled():
            raise RunError(NOT_PLANNED.format(name=shown))
        leaf = leaf.detach()
    shape = tuple(leaf.shape)
    if isinstance(leaf, DTensor) and shape == slot.shape:
        return leaf.redistribute(device_mesh, torch_placements(slot.state)).to_local()
    if shape == slot.shape and not isinstance(leaf, DTensor):
        if not slot.state.is_cut:
            return leaf
        if leaf.requires_grad:
            return _Piece.apply(leaf, slot.state, device_mesh)  # type: ignore[no-any-return]
        return local_shard(leaf, slot.state, device_mesh).contiguous()
    if in_shards and shape == part_shape(slot, device_mesh, mesh):
        return leaf
    pinned = f" (or this rank's slice, {slot.state.text})" if in_shards and slot.state.is_cut else ""
    hint = ""
    if in_shards:
        hint = (
            "; an input whose placement was asked for (placements=) has the shape of the example in every call: call "
            "it with that, or parallelize without placements=, which follows batches and lengths of other sizes"
        )
    elif len(shape) == len(slot.shape):
        hint = (
            "; pass the whole batch on every rank. parallelize follows batches and lengths of other sizes unless "
            "shapes='fixed' is given, or placements= of an input"
        )
    raise RunError(f"input {shown}: captured with shape {slot.shape}{pinned}, called with {shape}{hint}")


def part_shape(slot: Slot, device_mesh: DeviceMesh, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of this rank's part of an input."""
    return local_shape(slot.shape, slot.state, mesh, coordinate_of(device_mesh))


class Batch:
    """The calls of one captured model: their tensors by name, checked and cut into microbatches.

    Attributes:
        shown: what messages call each input, as in ``args[0]``.
    """

    def __init__(
        self, captured: Captured, signature: inspect.Signature, device: torch.device,
        pieces: Mapping[str, Shape] | None = None,
    ) -> None:  # fmt: skip
        """Initialize the object.

        Args:
            pieces: shapes of this rank's pieces of the inputs that may be passed so, by name.
        """
        self.captured, self.signature, self.device = captured, signature, device
        self.pieces = pieces or {}
        self._flat: tuple[tuple[Any, ...], Mapping[str, Any], list[Any]] | None = None
        leaves, spec = example_leaves(captured)
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, spec))
        self.names = [leaf_name(path) for path, _ in paths]
        self.nodes = {node.target: node for _, node in captured.graph.of_kind("input")}
        self.shown = {
            captured.graph.nodes[number].target: self.names[i]
            for i, number in enumerate(captured.inputs) if number is not None
        }  # fmt: skip

    def fits(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], in_parts: bool = False) -> bool:
        """Check whether this is a call of the program.

        The structure, shapes, dtypes and plain values must be the captured ones, and no unplanned gradients be
        wanted. Floating point numbers are not compared: whoever changes one is told to pass a tensor
        (:meth:`tensors`), because they mostly change in every call.

        Args:
            in_parts: so is a batch of several microbatches, all inputs of which have as many as long a first dim.
        """
        captured = self.captured
        leaves = leaves_of(captured, self.signature, args, kwargs)
        if leaves is None:
            return False
        self._flat = args, kwargs, leaves
        factors = set()
        for i, (leaf, number) in enumerate(zip(leaves, captured.inputs, strict=True)):
            if number is None:
                literal = captured.literals.get(i)
                both_floats = type(leaf) is float and type(literal) is float
                if i in captured.literals and not both_floats and not captured.is_of(i, leaf):
                    return False
                continue
            node = captured.graph.nodes[number]
            if not isinstance(leaf, torch.Tensor) or str(leaf.dtype) != "torch." + node.out.dtype:
                return False
            if leaf.requires_grad and not node.needs_grad and torch.is_grad_enabled():
                return False
            want, have, piece = node.out.shape, tuple(leaf.shape), self.pieces.get(node.target)
            if have in (want, piece):
                continue
            one = want if piece is None or have[1:] == want[1:] else piece
            if not (in_parts and one and have and have[1:] == one[1:] and have[0] and have[0] % one[0] == 0):
                return False
            factors.add(have[0] // one[0])
        return len(factors) < 2

    def check_other(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], parts: int) -> None:
        """Refuse a call with other shapes for which another program would be wrong.

        Args:
            parts: microbatches of a step of the program, where one of them is run.

        Raises:
            RunError: a tensor is on another device, or has another dtype; or it is the batch of a step.
        """
        for path, leaf in pytree.tree_flatten_with_path((args, dict(kwargs)))[0]:
            if isinstance(leaf, torch.Tensor):
                self._check_device(leaf_name(path), leaf)
        leaves = leaves_of(self.captured, self.signature, args, kwargs)
        for i, (leaf, number) in enumerate(zip(leaves or (), self.captured.inputs, strict=leaves is not None)):
            if number is not None and isinstance(leaf, torch.Tensor):
                self._checked(self.names[i], self.captured.graph.nodes[number], leaf)
        if parts > 1 and self.fits(args, kwargs, in_parts=True):
            self.check_one(self.tensors(args, kwargs), parts)

    def tensors(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> dict[str, torch.Tensor]:
        """Return the tensors of a call, by the names of the inputs; their shapes are not checked.

        Raises:
            RunError: the call is not one that was captured; the message says in what.
        """
        captured = self.captured
        leaves = self._leaves(args, kwargs)
        tensors: dict[str, torch.Tensor] = {}
        for i, (leaf, number) in enumerate(zip(leaves, captured.inputs, strict=True)):
            if number is None:
                literal = captured.literals.get(i)
                if i in captured.literals and not captured.is_of(i, leaf):
                    raise RunError(
                        f"input {self.names[i]}: captured with {literal!r}, called with {describe(leaf)}; such "
                        "values are part of the program; parallelize again with the new value"
                        + (", or pass a tensor each time, torch.tensor(...)" if isinstance(literal, float) else "")
                    )
                continue
            node = captured.graph.nodes[number]
            tensors[node.target] = self._checked(self.names[i], node, leaf)
        return tensors

    def _leaves(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> list[Any]:
        """Return the leaves of a call, which :meth:`fits` has mostly ordered just now; they are kept no longer."""
        flat, self._flat = self._flat, None
        if flat is not None and flat[0] is args and flat[1] is kwargs:
            return flat[2]
        return flatten_call(self.captured, self.signature, args, kwargs)

    def call(
        self, tensors: Mapping[str, torch.Tensor], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Return a call of one microbatch with `tensors`; everything else is as in the call of the batch."""
        leaves = flatten_call(self.captured, self.signature, args, kwargs)
        named = [None if n is None else self.captured.graph.nodes[n].target for n in self.captured.inputs]
        cut = [leaf if name is None else tensors[name] for name, leaf in zip(named, leaves, strict=True)]
        positional, by_name = pytree.tree_unflatten(cut, self.captured.in_spec)
        return tuple(positional), dict(by_name)

    def _checked(self, shown: str, node: Node, leaf: Any) -> torch.Tensor:
        spec = node.out
        if not isinstance(leaf, torch.Tensor):
            raise RunError(
                f"input {shown}: captured as a {spec.dtype} tensor of shape {spec.shape}, called with {describe(leaf)}"
            )
        if said := not_dense(leaf):
            raise RunError(f"input {shown} is {said}")
        if str(leaf.dtype) != "torch." + spec.dtype:
            raise RunError(
                f"input {shown}: captured with dtype {spec.dtype}, called with "
                f"{str(leaf.dtype).removeprefix('torch.')}; convert it, or parallelize again"
            )
        self._check_device(shown, leaf)
        return leaf.to(self.device, non_blocking=True) if is_host_number(leaf) else leaf

    def _check_device(self, shown: str, leaf: torch.Tensor) -> None:
        if not isinstance(leaf, DTensor) and not same_device(leaf.device, self.device) and not is_host_number(leaf):
            raise RunError(f"input {shown} is on {leaf.device}, the mesh is on {self.device}; move it with .to()")

    def check_planned(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse an input whose gradient is wanted and was not planned.

        Raises:
            RunError: with the input's name.
        """
        for name, leaf in tensors.items():
            if leaf.requires_grad and not self.nodes[name].needs_grad:
                raise RunError(NOT_PLANNED.format(name=self.shown[name]))

    def check_one(self, tensors: Mapping[str, torch.Tensor], parts: int) -> None:
        """Refuse the batch of a step of `parts` microbatches if the program is for one of them.

        Raises:
            RunError: with both numbers of rows, and the calls that take them.
        """
        for name, leaf in tensors.items():
            want = self.nodes[name].out.shape
            if parts > 1 and not isinstance(leaf, DTensor) and want and leaf.shape == (parts * want[0], *want[1:]):
                raise RunError(
                    f"input {self.shown[name]} has {leaf.shape[0]} rows, the batch of a step, and the plan cuts it "
                    f"into {parts} microbatches of {want[0]}: call train_step(*batch), or this with each of them; with "
                    "microbatches=1 parallelize plans for the whole batch at once"
                )

    def microbatches(
        self, tensors: Mapping[str, torch.Tensor], count: int | None, part: Callable[[str], Shape]
    ) -> list[dict[str, torch.Tensor]]:
        """Split the tensors of a step into ``count`` microbatches, or as many as the shapes say.

        A tensor with the shape of one microbatch goes into all of them.

        Args:
            part: shape of this rank's part of an input, which may be given instead of the whole.

        Raises:
            RunError: the inputs do not agree on the number.
        """
        shapes: dict[str, Shape] = {}
        factors: dict[str, int] = {}
        for name, leaf in tensors.items():
            if isinstance(leaf, DTensor):
                continue
            want = self.nodes[name].out.shape
            if leaf.shape[1:] != want[1:]:
                want = part(name)
            have, shapes[name] = tuple(leaf.shape), want
            if have != want and have[1:] == want[1:] and want and have[0] % want[0] == 0:
                factors[name] = have[0] // want[0]
        numbers = set(factors.values())
        k = count or (numbers.pop() if len(numbers) == 1 else 1)
        if k < 1:
            raise RunError(f"microbatches is {k}; give 1 or more")
        if k == 1 and not factors:
            return [dict(tensors)]
        if any(f != k for f in factors.values()) or not factors:
            sizes = ", ".join(f"{self.shown[name]}: {f}" for name, f in factors.items())
            raise RunError(
                f"train_step: inputs must be {count or 'the same number of'} times as long in dim 0 as a microbatch "
                f"(the captured shape); found {sizes or 'every input has the captured shape'}"
            )
        return [
            {
                name: leaf.narrow(0, j * shapes[name][0], shapes[name][0]) if name in factors else leaf
                for name, leaf in tensors.items()
            }
            for j in range(k)
        ]

    def exactly(self, tensors: Mapping[str, torch.Tensor], k: int) -> list[dict[str, torch.Tensor]]:
        """Split tensors into exactly ``k`` microbatches; one with the shape of a microbatch goes into all of them.

        Raises:
            RunError: an input is neither ``k`` times as long in dim 0 as a microbatch nor as long as one.
        """
        pieces: list[dict[str, torch.Tensor]] = [{} for _ in range(k)]
        for name, leaf in tensors.items():
            want, have = self.nodes[name].out.shape, tuple(leaf.shape)
            if have != want and not (want and have[1:] == want[1:] and have[0] == k * want[0]):
                raise RunError(
                    f"input {self.shown[name]}: captured with shape {want} a microbatch, called with {have}; give {k} "
                    f"x {want[0] if want else 1} rows, or one tensor of the captured shape for all microbatches"
                )
            for piece, rows in zip(pieces, [leaf] * k if have == want else leaf.split(want[0]), strict=True):
                piece[name] = rows
        return pieces
