"""Every program is checked by an outsider: the type checker of ``spmd_types``.

It follows per-axis types (replicate, invariant, varying, partial) through each operation and refuses what would give
wrong gradients. The program runs once under a fake process group, with the types of the plan asserted on its inputs
and on what every op makes.
"""

from __future__ import annotations

import spmd_types as spmd
import spmd_types.checker
import torch
import torch.fx

from autopar.errors import PlanError
from autopar.lower.emit import used_shape
from autopar.lower.program import Program
from autopar.rules.function import Callee
from autopar.torch_private import FakeTensorMode
from autopar.words.placements import INVARIANT, PENDING, REPLICATED, State
from autopar.words.trees import PyTree

_TYPES = {REPLICATED: spmd.R, INVARIANT: spmd.I, PENDING: spmd.P}  # of all others V, our shards


def typecheck(program: Program) -> int:
    """Check a program; returns the number of operations that were checked.

    Needs an ambient fake (or real) process group and ``spmd_types.set_current_mesh``.

    Raises:
        PlanError: the checker found an op whose types do not fit; the message names it.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):  # types depend on shapes alone, and values could be out of range
        values = []
        for slot in program.slots:
            dtype = getattr(torch, slot.dtype)
            value = torch.zeros(used_shape(slot, program.mesh), dtype=dtype, device=program.device)
            if slot.needs_grad:
                value.requires_grad_()
            spmd.assert_type(value, _type(slot.state, program))
            values.append(value)
        checker = _Checked(program)
        with spmd_types.checker.typecheck():
            checker.run(*values)
    return checker.checked


def _type(state: State, program: Program) -> dict[str, PyTree]:
    return {name: _TYPES.get(p, spmd.V) for p, (name, size) in zip(state, program.mesh, strict=True) if size > 1}


class _Checked(torch.fx.Interpreter):
    """A run of a program with types: inputs take the state that each operator needs, outputs are asserted."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.program, self.checked = program, 0

    def run_node(self, n: torch.fx.Node) -> PyTree:
        """Run a node and check its types."""
        meta = n.meta.get("autopar")
        if n.op != "call_function" or meta is None:
            return super().run_node(n)
        try:
            if "node" not in meta:
                return self._checked_outs(super().run_node(n), meta["outs"]) if "step" in meta else super().run_node(n)
            if isinstance(n.target, Callee):  # a user's own code, for which its rule answers
                with spmd.no_typecheck():
                    return self._checked_outs(super().run_node(n), meta["outs"])
            try:
                result = self._run(n, meta, linear=False)
            except spmd.SpmdTypeError:
                if not self._pending(meta):
                    raise
                result = self._run(n, meta, linear=True)
            return self._checked_outs(result, meta["outs"])
        except (spmd.SpmdTypeError, ValueError, RuntimeError) as error:
            if isinstance(error, PlanError):
                raise
            text = str(error).split("While executing")[0].rstrip()
            raise PlanError(f"type check failed at {n.format_node()}: {text}") from error

    def _run(self, n: torch.fx.Node, meta: dict[str, PyTree], linear: bool) -> PyTree:
        """Run one op with its inputs retyped to what it wants.

        The checker does not know every op that is linear in some of its inputs, or that adds pieces to a pending sum
        (``index_add``). With ``linear``, the axes on which the plan lets pending sums in are given to it as varying:
        there the claim rests on the rule's proof on numbers, while all other axes are checked as ever.
        """
        axes = self._pending(meta) if linear else []
        wanted = iter(meta["ins"])
        saved: dict[torch.fx.Node, PyTree] = {}
        for arg in _tensor_args(n):
            state = next(wanted, None)
            if state is None or not isinstance(self.env[arg], torch.Tensor):
                continue
            value = saved.setdefault(arg, self.env[arg])
            self.env[arg] = _as_varying(self._retype(value, state), axes)
        result = super().run_node(n)
        self.env.update(saved)
        return result

    def _pending(self, meta: dict[str, PyTree]) -> list[str]:
        """Return the axes on which an operator takes pending sums."""
        return [
            axis
            for a, (axis, size) in enumerate(self.program.mesh)
            if size > 1 and any(state is not None and state[a].is_pending for state in meta["ins"])
        ]

    def _checked_outs(self, result: PyTree, states: list[State]) -> PyTree:
        self.checked += 1
        parts = result if isinstance(result, (tuple, list)) else [result]
        wanted = iter(states)
        outs = [self._made(p, next(wanted)) if isinstance(p, torch.Tensor) else p for p in parts]
        return type(result)(outs) if isinstance(result, (tuple, list)) else outs[0]

    def _axes(self, state: State) -> list[tuple[str, PyTree]]:
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
        if not spmd.get_local_type(value):  # made from nothing: a factory
            spmd.assert_type(value, _type(state, self.program))
            return value
        for axis, want in self._axes(state):
            have = spmd.get_axis_local_type(value, axis)
            if have is spmd.R and want is spmd.V:  # every rank makes its own part of an expanded dim
                value = spmd.reinterpret(value, axis, src=spmd.R, dst=spmd.V, expert_mode=True)
            elif have is spmd.V and want is spmd.P:
                value = spmd.reinterpret(value, axis, src=spmd.V, dst=spmd.P)
            elif not value.requires_grad and {have, want} <= {spmd.R, spmd.I}:
                value = spmd.convert(value, axis, src=have, dst=want, expert_mode=True) if have is not want else value
            elif have is not want:
                raise PlanError(f"axis '{axis}': made {have}, planned {want}")
        return value


def _as_varying(value: torch.Tensor, axes: list[str]) -> torch.Tensor:
    """Return the same values, typed as varying on ``axes``."""
    if not axes:
        return value
    local_type = spmd.get_local_type(value)
    with spmd.no_typecheck():
        alias = value.view_as(value)
    spmd.assert_type(alias, dict(local_type))
    names = spmd.current_mesh_all_names() or {}
    for axis in axes:
        spmd.mutate_type(alias, names[axis], src=spmd.get_axis_local_type(alias, axis), dst=spmd.V)
    return alias


def _tensor_args(n: torch.fx.Node) -> list[torch.fx.Node]:
    args: list[torch.fx.Node] = []

    def note(arg: torch.fx.Node) -> torch.fx.Node:
        args.append(arg)
        return arg

    torch.fx.node.map_arg((n.args, n.kwargs), note)
    return args
