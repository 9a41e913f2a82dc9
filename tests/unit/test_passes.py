"""Passes of capture: one list that can be read, watched, switched off and added to; what a pass breaks is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from autopar.capture import capture
from autopar.capture import passes as module  # type: ignore[attr-defined]
from autopar.capture.graph.drafts import Draft, TracedProgram
from autopar.capture.graph.verifier import PassError
from autopar.capture.passes import DRAFT, GRAPH, PROGRAM, Pass, observed, passes, register, skipping, summary
from autopar.cli import app
from autopar.errors import CaptureError
from autopar.words.graph import Graph, Ref, Spec


class Experts(nn.Module):
    """Each row goes to the expert that a router picks."""

    def __init__(self, hidden: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts)
        self.up = nn.ModuleList(nn.Linear(hidden, 16) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(16, hidden) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, picked = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            (rows,) = torch.where(picked == e)
            out = out.index_add(0, rows, down(up(x[rows]).relu()) * weight[rows, None])
        return out.pow(2).mean()


class Masked(nn.Module):
    """One mask, written down in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = torch.where(mask[:, None] > 0, self.first(x), x)
        return torch.where(mask[:, None] > 0, self.second(x), x).sum()


@pytest.fixture
def own_passes() -> Iterator[None]:
    """Passes that a test registers are gone after it."""
    before = list(module._PASSES)
    yield
    module._PASSES[:] = before


def captured(model: nn.Module | None = None) -> Graph:
    return capture(model or nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(16, 8),)).graph


def targets(graph: Graph) -> list[str]:
    return [node.target for node in graph.nodes if node.kind == "op"]


# --- the list


def test_every_pass_has_a_name_of_its_own_and_runs_behind_what_it_needs() -> None:
    names = [p.name for p in passes()]
    assert len(set(names)) == len(names)
    phases = [(PROGRAM, DRAFT, GRAPH).index(p.phase) for p in passes()]
    assert phases == sorted(phases)
    for k, p in enumerate(passes()):
        assert p.reason and set(p.needs) <= set(names[:k])


def test_runs_are_watched() -> None:
    with observed(["expert_loops"]) as runs:
        captured(Experts())
    rows = {run.name: run for run in summary(runs)}
    assert list(rows) == [p.name for p in passes()]
    assert {name for name, run in rows.items() if run.changed} >= {"selected_rows", "expert_loops", "expert_blocks"}
    assert rows["dead_operators"].after < rows["dead_operators"].before
    assert "expert_linear" in rows["expert_loops"].dump and not rows["selected_rows"].dump


# --- switched off


def test_a_pass_that_is_skipped_does_not_run() -> None:
    x = torch.randn(16, 8), torch.ones(16)
    both = targets(capture(Masked(), x).graph).count("aten.gt.Scalar")
    with skipping(["common_subexpressions"]):
        assert targets(capture(Masked(), x).graph).count("aten.gt.Scalar") == 2 == both + 1
    with skipping(["expert_blocks"]):
        assert targets(captured(Experts())).count("autopar.expert_linear.default") == 2
    with skipping(["expert_loops"]):
        assert targets(captured(Experts())).count("aten.linear.default") == 9


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["dead_operators"], "pass 'dead_operators' cannot be skipped: it drops what other passes replace"),
        (["selected_rows"], "pass 'selected_rows' cannot be skipped alone: pass 'parameters_taking_part' needs it"),
        (["expert_block"], "there is no pass 'expert_block'; did you mean 'expert_blocks'?"),
    ],
)
def test_a_pass_that_others_need_is_not_skipped(names: list[str], said: str) -> None:
    with pytest.raises(CaptureError, match=said.replace("?", r"\?")), skipping(names):
        pass


# --- added


def test_a_pass_of_a_users_own_is_one_record(own_passes: None) -> None:
    def halves(graph: Graph) -> Graph:
        nodes = [
            dataclasses.replace(n, target="aten.gelu.default") if n.target == "aten.relu.default" else n
            for n in graph.nodes
        ]
        return dataclasses.replace(graph, nodes=tuple(nodes))

    register(Pass("smooth", GRAPH, halves, "a smooth activation in place of relu"))
    with observed() as runs:
        assert "aten.gelu.default" in targets(captured())
    assert [run.name for run in runs if run.changed][-1] == "smooth"
    with skipping(["smooth"]):
        assert "aten.relu.default" in targets(captured())


def test_a_pass_stands_behind_what_it_needs(own_passes: None) -> None:
    register(Pass("pattern", PROGRAM, lambda program: None, "nothing", needs=("selected_rows",)))
    names = [p.name for p in passes()]
    assert names.index("pattern") == names.index("selected_rows") + 1
    with pytest.raises(ValueError, match="'pattern' is there"):
        register(Pass("pattern", PROGRAM, lambda program: None, "nothing"))
    register(Pass("behind", PROGRAM, lambda program: None, "nothing", needs=("gathered_matrices",)))
    with pytest.raises(ValueError, match="needs 'expert_blocks', which runs later"):
        register(Pass("early", PROGRAM, lambda program: None, "nothing", needs=("expert_blocks",)))
    with pytest.raises(ValueError, match="cannot run before 'expert_blocks', of another phase"):
        register(Pass("misplaced", PROGRAM, lambda program: None, "nothing"), before="expert_blocks")
    with pytest.raises(ValueError, match="needs 'nobody', which is not there"):
        register(Pass("other", PROGRAM, lambda program: None, "nothing", needs=("nobody",)))


# --- the verifier


def first(graph: torch.fx.Graph) -> torch.fx.Node:
    return next(node for node in graph.nodes if node.op == "call_function")


def without_value(program: TracedProgram) -> None:
    graph = program.graph
    with graph.inserting_after(first(graph)):
        graph.call_function(torch.ops.aten.relu.default, (first(graph),))


def reads_a_later_node(program: TracedProgram) -> None:
    node = first(program.graph)
    with program.graph.inserting_before(node):
        new = program.graph.call_function(torch.ops.aten.relu.default, (node,))
    new.meta = dict(node.meta)


def forgets_who_selects(program: TracedProgram) -> None:
    for node in program.graph.nodes:
        node.meta.pop("unbacked_bindings", None)
    without = first(program.graph)
    with program.graph.inserting_after(without):
        program.graph.call_function(torch.ops.aten.relu.default, (without,)).meta = dict(without.meta)


def changed_last(draft: Draft, **changes: Any) -> Draft:
    node = draft.nodes[-1]
    return dataclasses.replace(draft, nodes=[*draft.nodes[:-1], dataclasses.replace(node, **changes)])


def cut_off(draft: Draft) -> Draft:
    nodes = [dataclasses.replace(n, needs_grad=False) if n.kind == "param" else n for n in draft.nodes]
    return dataclasses.replace(draft, nodes=nodes)


BROKEN: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no value": (PROGRAM, without_value, "has no traced value"),
    "later node": (PROGRAM, reads_a_later_node, "which is not before it"),
    "free size": (PROGRAM, forgets_who_selects, "whose rows nothing selects"),
    "later reference": (DRAFT, lambda d: changed_last(d, args=(Ref(len(d.nodes)),)), "no tensor before it"),
    "result that is not there": (DRAFT, lambda d: changed_last(d, args=(Ref(0, 1),)), "no tensor before it"),
    "name twice": (DRAFT, lambda d: changed_last(d, name=d.nodes[0].name), "two nodes have one name"),
    "shape": (DRAFT, lambda d: changed_last(d, outs=(Spec((3,), "float32"),)), "is noted as float32"),
    "dtype": (DRAFT, lambda d: changed_last(d, outs=(Spec((16, 8), "float64"),)), "is noted as float64"),
    "gradient from nothing": (DRAFT, cut_off, "has a gradient, and nothing that it reads has one"),
    "cold": (DRAFT, lambda d: changed_last(d, hot=False), "is marked as if it did not"),
    "output": (GRAPH, lambda g: dataclasses.replace(g, outputs=(Ref(99),)), "an output is Ref"),
    "loss": (GRAPH, lambda g: dataclasses.replace(g, loss=0, outputs=(2,)), "is the loss and has no gradient"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_a_pass_breaks_is_named(own_passes: None, fault: str) -> None:
    phase, breaks, said = BROKEN[fault]
    others = [p.name for p in passes() if p.phase == PROGRAM]
    register(Pass("broken", phase, breaks, "a defect"))

    class Selecting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x[:, 0] > 0] * 2

    with pytest.raises(PassError, match=f"pass 'broken' gave a program that is not well formed: .*{said}"):
        with skipping(others if fault == "free size" else ()):
            captured(Selecting() if fault == "free size" else None)


def test_an_operator_of_autopar_is_checked_by_its_rule(own_passes: None) -> None:
    def wrong(draft: Draft) -> Draft:
        nodes = [
            dataclasses.replace(n, outs=(Spec((1, 8), n.out.dtype),)) if n.target == "autopar.expert_block.default"
            else n for n in draft.nodes
        ]  # fmt: skip
        return dataclasses.replace(draft, nodes=nodes)

    register(Pass("broken", DRAFT, wrong, "a defect", needs=("expert_blocks",)))
    with pytest.raises(PassError, match=r"expert_block.* is noted as float32"):
        captured(Experts())


# --- the command

MODEL = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), (torch.randn(16, 8),)
"""


def test_the_command_lists_dumps_and_skips(tmp_path: Any) -> None:
    (tmp_path / "small.py").write_text(MODEL)
    spec = f"{tmp_path / 'small.py'}:make"
    listed = CliRunner().invoke(app, ["inspect", spec, "--passes"])
    assert listed.exit_code == 0 and all(p.name in listed.output for p in passes())
    options = ["--dump-after", "dead_operators", "--skip-pass", "expert_blocks"]
    dumped = CliRunner().invoke(app, ["inspect", spec, *options])
    assert "aten.linear.default(%input" in dumped.output
    refused = CliRunner().invoke(app, ["inspect", spec, "--skip-pass", "dead_operators"])
    assert refused.exit_code and "cannot be skipped" in str(refused.exception)


OWN = """
from autopar.capture import passes
passes.register(passes.Pass("own", passes.DRAFT, lambda draft: draft, "nothing", needs=("common_subexpressions",)))
"""


def test_the_command_knows_the_passes_that_a_models_file_registers(own_passes: None, tmp_path: Any) -> None:
    (tmp_path / "with_own.py").write_text(OWN + MODEL)
    for option, said in (("--passes", "own"), ("--dump-after=own", "aten.linear"), ("--skip-pass=own", "aten.linear")):
        module._PASSES[:] = [p for p in module._PASSES if p.name != "own"]
        shown = CliRunner().invoke(app, ["inspect", f"{tmp_path / 'with_own.py'}:make", option])
        assert shown.exit_code == 0 and said in shown.output, option
