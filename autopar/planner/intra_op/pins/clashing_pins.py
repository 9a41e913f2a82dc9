"""The pins that clash, where no choice of strategies satisfies all of them: for the message only.

A smallest set of pins that leaves no plan is found as in QuickXplain (Junker 2004, AAAI): by halves, with about
``2 k log2(n / k)`` problems for ``k`` of ``n`` pins. Operators that are decided as one are pinned as one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.errors import InfeasibleError
from autopar.planner.effort import EFFORT
from autopar.planner.intra_op.building.integer_program import NoChoice
from autopar.planner.intra_op.mesh_problem import MeshProblem
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.intra_op.solving import highs
from autopar.rules.option_names import WHOLE, as_written
from autopar.words.graph import Graph
from autopar.words.labels import matches, op_labels
from autopar.words.meshes import Mesh
from hardware_profiles import Cluster

SHOWN = 8
"""Pins that it lists."""


class PinnedOption(NamedTuple):
    """One pin: of ``what`` (op, param, input, output), by the names of the nodes (or the output's position)."""

    what: str
    names: tuple[str | int, ...]


def explained(graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, error: NoChoice) -> InfeasibleError:
    """Return the error of :func:`~.mesh_plan.plan_graph` with the pins that clash, or unchanged where none do.

    The same error where the pins are not to blame.
    """
    try:
        return _Clash(MeshProblem(graph, cluster, mesh, options, None)).explained(error)
    except InfeasibleError:
        return error


class _Clash:
    def __init__(self, setting: MeshProblem) -> None:
        self.setting, self.trials = setting, 0

    def explained(self, error: NoChoice) -> InfeasibleError:
        pins = self._pins()
        if not pins or not self._has_plan(()):
            return error
        clash = smallest_clash(pins, lambda kept: not self._has_plan(kept))
        shown = "\n  ".join([self._told(pin) for pin in clash[:SHOWN]])
        more = f"\n  and {len(clash) - SHOWN} more" if len(clash) > SHOWN else ""
        return InfeasibleError(
            f"{error}: there is no way to do together what these {len(clash)} pins ask for\n  {shown}{more}\n  "
            + self._instead(pins, clash)
        )

    def _pins(self) -> list[PinnedOption]:
        """Return all pins; those of nodes that are decided as one are one."""
        graph, pins, options = self.setting.graph, self.setting.pins, self.setting.options
        grouped: dict[tuple[str, int], list[str | int]] = {}
        for i, node in enumerate(graph.nodes):
            representative = self.setting.folding.representative[i]
            if node.name in pins.ops:
                grouped.setdefault(("op", representative), []).append(node.name)
            elif node.kind == "param" and node.target in pins.params:
                grouped.setdefault(("param", representative), []).append(node.target)
        listed = [PinnedOption(what, tuple(names)) for (what, _), names in grouped.items()]
        listed += [PinnedOption("input", (name,)) for name in options.inputs or {}]
        return listed + [PinnedOption("output", (number,)) for number in options.outputs or {}]

    def _has_plan(self, kept: Sequence[PinnedOption], whole: PinnedOption | None = None) -> bool:
        """Return whether there is a plan with these pins alone; yes, when too many problems were solved already.

        ``whole``: operators of a pin that are replicated instead.
        """
        if self.trials >= EFFORT.clash_trials:
            return True
        self.trials += 1
        named = {what: {n for pin in kept if pin.what == what for n in pin.names} for what in _WHATS}
        options = self.setting.options
        trial = copy.copy(self.setting)
        trial.pins = copy.copy(self.setting.pins)
        trial.pins.ops = {name: pinned for name, pinned in trial.pins.ops.items() if name in named["op"]}
        for name in whole.names if whole is not None else ():
            trial.pins.ops[str(name)] = dict.fromkeys(self.setting.pins.ops[str(name)], WHOLE)
        trial.pins.params = {name: how for name, how in trial.pins.params.items() if name in named["param"]}
        trial.options = replace(
            options, inputs={n: s for n, s in (options.inputs or {}).items() if n in named["input"]},
            outputs={n: s for n, s in (options.outputs or {}).items() if n in named["output"]},
        )  # fmt: skip
        try:
            problem, _ = trial.problem(False)
            highs.program(problem, effort=options.effort()).solve()
        except NoChoice:
            return False
        except InfeasibleError:  # the solver ran out of time
            return whole is None
        return True

    def _told(self, pin: PinnedOption) -> str:
        name, graph, options = pin.names[0], self.setting.graph, self.setting.options
        more = f", and {len(pin.names) - 1} like it" if len(pin.names) > 1 else ""
        if pin.what == "output":
            return f"output {name}: placements asks for {(options.outputs or {})[int(name)].text}"
        if pin.what == "input":
            return f"input '{name}': placements asks for {(options.inputs or {})[str(name)].text}"
        if pin.what == "param":
            return f"parameter '{name}': params asks for '{self.setting.pins.params[str(name)]}'{more}"
        node = graph.nodes[graph.index[str(name)]]
        request = []
        for number, factor in self.setting.pins.ops[node.name].items():
            axis = self._axis(number)
            pattern = self._pattern(node.name, axis)
            request.append(f"'{as_written(factor)}' on axis '{axis}' (constraint '{pattern}')")
        return f"{node.where}: pinned to {' and '.join(request)}{more}"

    def _axis(self, number: int) -> str:
        return self.setting.pins.mesh.name(number)

    def _pattern(self, name: str, axis: str) -> str:
        """Return the pattern of constraints that pins an operator on an axis: the last one that matches."""
        graph = self.setting.graph
        node, label = graph.nodes[graph.index[name]], op_labels(graph)[name]
        patterns = (self.setting.options.constraints or {}).items()
        return [pattern for pattern, request in patterns if axis in request and matches(pattern, node, label)][-1]

    def _instead(self, pins: Sequence[PinnedOption], clash: Sequence[PinnedOption]) -> str:
        """Return the pin to change: with one operator replicated and all other pins kept there is a plan."""
        for pin in reversed(clash):
            others = [p for p in pins if p is not pin]
            if pin.what == "op" and self.trials < EFFORT.clash_trials and self._has_plan(others, whole=pin):
                labels = op_labels(self.setting.graph)
                axes = [self._axis(axis) for axis in self.setting.pins.ops[str(pin.names[0])]]
                said = {labels[str(name)]: dict.fromkeys(axes, as_written(WHOLE)) for name in pin.names[:SHOWN]}
                return f"remove one of them; or end constraints with {str(said)[1:-1]}, with which there is a plan"
        return "remove or change one of them"


_WHATS = ("op", "param", "input", "output")


def smallest_clash(
    pins: Sequence[PinnedOption], clashes: Callable[[Sequence[PinnedOption]], bool]
) -> list[PinnedOption]:
    """Return pins that clash, and without any one of which the others do not.

    ``clashes`` returns whether some pins leave no plan. Where it returns False for want of time, more pins than needed
    are returned.
    """

    def search(base: list[PinnedOption], added: bool, candidates: list[PinnedOption]) -> list[PinnedOption]:
        if added and clashes(base):
            return []
        if len(candidates) == 1:
            return candidates
        first, second = candidates[: len(candidates) // 2], candidates[len(candidates) // 2 :]
        of_second = search(base + first, True, second)
        of_first = search(base + of_second, bool(of_second), first)
        return of_first + of_second

    return search([], False, list(pins))
