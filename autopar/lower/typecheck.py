"""Every program is checked by an outsider: the type checker of ``spmd_types``.

It follows per-axis types (replicate, invariant, varying, partial) through each operation and refuses what would give
wrong gradients. The program runs once under a fake process group, with the types of the plan asserted on its inputs
and on what every op makes.
"""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import spmd_types.checker
import torch
import torch.fx

from autopar.errors import PlanError
from autopar.lower.emit import Program, used_shape
from autopar.placements import State

_TYPES = {"R": spmd.R, "I": spmd.I, "P": spmd.P, "S": spmd.V}


def typecheck(program: Program) -> int:
    """Check a program; returns the number of operations that were checked.

    Needs an ambient fake (or real) process group and ``spmd_types.set_current_mesh``.

    Raises:
        PlanError: the checker found an op whose types do not fit; the message names it.
    """
    values = []
    for slot in program.slots:
        dtype = getattr(torch, slot.dtype)
        value = torch.zeros(used_shape(slot, program.mesh), dtype=dtype)
        if slot.kind == "param" and dtype.is_floating_point:
            value.requires_grad_()
        spmd.assert_type(value, _type(slot.state, program))
        values.append(value)
    checker = _Checked(program)
    with spmd_types.checker.typecheck():
        checker.run(*values)
    return checker.checked


def _type(state: State, program: Program) -> dict[str, Any]:
    return {name: _TYPES[p[0]] for p, (name, size) in zip(state, program.mesh, strict=True) if size > 1}


class _Checked(torch.fx.Interpreter):
    """Runs a program node by node with types: inputs take the state that the op wants, outputs are asserted."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.program, self.checked = program, 0

    def run_node(self, n: torch.fx.Node) -> Any:
        meta = n.meta.get("autopar")
        if n.op != "call_function" or meta is None:
            return super().run_node(n)
        try:
            if "ins" in meta and "step" not in meta:
                wanted = iter(meta["ins"])
                saved: dict[torch.fx.Node, Any] = {}
                for arg in _tensor_args(n):
                    state = next(wanted)
                    value = self.env[arg]
                    saved.setdefault(arg, value)
                    self.env[arg] = self._retype(value, state)
                result = super().run_node(n)
                self.env.update(saved)
            else:
                result = super().run_node(n)
            if "node" in meta or "step" in meta:
                parts = result if isinstance(result, (tuple, list)) else [result]
                tensors = [p for p in parts if isinstance(p, torch.Tensor)]
                typed = iter([self._made(t, s) for t, s in zip(tensors, meta["outs"], strict=True)])
                made = [next(typed) if isinstance(p, torch.Tensor) else p for p in parts]
                result = type(result)(made) if isinstance(result, (tuple, list)) else made[0]
                self.checked += 1
        except (spmd.SpmdTypeError, ValueError, RuntimeError) as error:
            raise PlanError(f"type check failed at {n.format_node()}: {error}") from error
        return result

    def _axes(self, state: State) -> list[tuple[str, Any]]:
        return list(_type(state, self.program).items())

    def _retype(self, value: torch.Tensor, state: State) -> torch.Tensor:
        for axis, want in self._axes(state):
            have = spmd.get_axis_local_type(value, axis)
            if have is want:
                continue
            if not value.requires_grad and {have, want} <= {spmd.R, spmd.I}:
                value = spmd.convert(value, axis, src=have, dst=want, expert_mode=True)
        return value

    def _made(self, value: torch.Tensor, state: State) -> torch.Tensor:
        for axis, want in self._axes(state):
            have = spmd.get_axis_local_type(value, axis)
            if have is spmd.V and want is spmd.P:
                value = spmd.reinterpret(value, axis, src=spmd.V, dst=spmd.P)
            elif not value.requires_grad and {have, want} <= {spmd.R, spmd.I}:
                value = spmd.convert(value, axis, src=have, dst=want, expert_mode=True) if have is not want else value
            elif have is not want:
                raise PlanError(f"axis '{axis}': made {have}, planned {want}")
        return value


def _tensor_args(n: torch.fx.Node) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.node.map_arg((n.args, n.kwargs), lambda a: found.append(a) or a)
    return found
