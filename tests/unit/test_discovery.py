"""Rules of operators that nobody wrote one for: found again where one was written, and never wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.library import Library

import autopar.rules  # noqa: F401
from autopar.capture import capture
from autopar.comparison import program_vs_eager
from autopar.planner.plan_notes import notes_on
from autopar.rules.axis_options import Option, axis_options
from autopar.rules.discovery import found_of, remembered
from autopar.rules.discovery.finding import discover
from autopar.rules.discovery.proposal import Discovered, rule_from
from autopar.rules.operator_call import Call
from autopar.rules.proving.proof import Case, prove, strategies_of
from autopar.rules.registry import SAMPLES, T, rule_for, rules_of, sample, source_of_rule
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

MESHES = (Mesh.of(data=2), Mesh.of(data=3), Mesh.of(data=2, tensor=2))
EVERY = [(target, i) for target in sorted(SAMPLES) for i in range(len(SAMPLES[target]))]
FEW = ("aten.linear.default", "aten.conv2d.default", "aten.reshape.default", "aten.index_add.default")
SHARE_FOUND = 0.9


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _spelled(option: Option) -> tuple[tuple[str, ...], tuple[str, ...]]:
    ins, outs = (tuple("R" if p.is_replicated else p for p in side) for side in (option.ins, option.outs))
    return ins, outs


def _found_again(target: str, number: int) -> list[str] | None:
    """Options of the written rule that need no collective inside and that the discovered one has not; None where the
    written one has none."""
    case = Case(target, SAMPLES[target][number])
    lowered = {f for lowering in case.rule.lowerings for f in lowering.factors}
    written = [o for o in case.options() if o.name in case.rule.sizes and o.name not in lowered]
    if case.rule.random or not written:
        return None
    found = discover(case.call)
    rule = rule_from(case.call, found)
    offered = {_spelled(o) for o in axis_options(rule, case.grads, case.out_grads)}
    again = Case(target, SAMPLES[target][number], 5, lambda call: rule_from(call, found))
    for mesh in MESHES:
        strategies = strategies_of(again, mesh)
        for picked in random.Random(number).sample(strategies, min(8, len(strategies))):
            prove(again, picked, mesh, in_turn=True)  # with numbers, and on meshes, that it was not found with
    return [f"sample {number}: {o.name} {_spelled(o)}, found {rule}" for o in written if _spelled(o) not in offered]


@pytest.mark.parametrize("target", FEW)
def test_found_again(target: str) -> None:
    assert _found_again(target, 0) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_are_found_again() -> None:
    """Every registered operator, taken out of the registry: no wrong rule, and nine in ten as fine as was written."""
    tried: set[str] = set()
    coarser: dict[str, list[str]] = {}
    for target, number in EVERY:
        if (missing := _found_again(target, number)) is not None:
            tried.add(target)
            if missing:
                coarser.setdefault(target, []).extend(missing)
    print(f"{len(tried) - len(coarser)} of {len(tried)} are found again", *coarser.items(), sep="\n")
    assert len(tried) > 200 and len(coarser) < (1 - SHARE_FOUND) * len(tried), coarser


# --- operators that look as if they could be cut ---------------------------------------------------------------------


def _of_length(x: torch.Tensor) -> torch.Tensor:
    return x / x.shape[0]


def _by_place(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(x.shape[-1], dtype=x.dtype)


def _reversed_rows(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


def _largest_wins(x: torch.Tensor) -> torch.Tensor:
    return (x == x.max()).to(x.dtype) * x


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    return x + x.roll(1, 0)


def _by_size(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0) if x.shape[0] >= 32 else x.clone()


HOSTILE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], set[str]]] = {
    "of_length": (_of_length, {"S1"}),
    "by_place": (_by_place, {"S0"}),
    "reversed_rows": (_reversed_rows, {"S1"}),
    "largest_wins": (_largest_wins, set()),
    "noisy": (_noisy, set()),
    "neighbours": (_neighbours, {"S1"}),
}


@pytest.fixture
def hostile() -> Iterator[None]:
    library = Library("hostile", "FRAGMENT")
    for name, (fn, _) in HOSTILE.items():
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, fn, "CompositeImplicitAutograd")
    yield
    library._destroy()


def test_what_depends_on_the_size_is_tried_on_that(hostile: None) -> None:
    library = Library("hostile", "FRAGMENT")
    library.define("by_size(Tensor x) -> Tensor")
    library.impl("by_size", _by_size, "CompositeImplicitAutograd")
    case = Case("hostile.by_size.default", sample(T((64, 6))))
    assert found_of(case.call).why_whole == "has cuts on small tensors that are wrong on those of this call"
    library._destroy()


@pytest.mark.parametrize("name", HOSTILE)
def test_only_what_is_right(hostile: None, name: str) -> None:
    case = Case(f"hostile.{name}.default", sample(T((8, 6))))
    cuts = {o.ins[0] for o in axis_options(rule_for(case.call), [True], [True]) if o.ins[0].is_shard}
    assert cuts == HOSTILE[name][1]


# --- a user's own operator, from capture to numbers ------------------------------------------------------------------


@torch.library.custom_op("discovered::gated", mutates_args=())
def gated(x: torch.Tensor, gate: torch.Tensor, scale: float) -> torch.Tensor:
    return (x * torch.sigmoid(gate) * scale).clone()


@gated.register_fake
def _(x: torch.Tensor, gate: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, gate = ctx.saved_tensors
    s = torch.sigmoid(gate)
    return grad * s * ctx.scale, (grad * x * s * (1 - s) * ctx.scale), None


def _setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


gated.register_autograd(_backward, setup_context=_setup)


class Gates(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gated(self.up(x), self.gate(x), 2.0)).square().mean()


def test_a_custom_op_is_cut_and_right() -> None:
    torch.manual_seed(0)
    model, x = Gates(), torch.randn(8, 16)
    captured = capture(model, (x,))
    sources = {
        node.target: source_of_rule(node, rule)
        for node, rule in zip(captured.graph.nodes, rules_of(captured.graph), strict=True) if rule is not None
    }  # fmt: skip
    assert sources["discovered.gated.default"] == "discovered"
    assert any("found by trying it on small" in note for note in notes_on(captured.graph))
    node = next(n for n in captured.graph.nodes if n.target == "discovered.gated.default")
    rule = next(r for n, r in zip(captured.graph.nodes, rules_of(captured.graph), strict=True) if n is node)
    assert rule is not None and len(rule.cuttable) == 2
    mesh = Mesh.of(data=2, tensor=2)
    rows = program_vs_eager.verify(captured, model, (x,), {}, mesh, load_cluster("local-x4"), random_plans=3)
    assert all(max(row.loss, row.gradient, row.weight) < 1e-9 for row in rows[1:]), rows


def test_a_file_is_proved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier process wrote counts only if it is still right."""
    call = Case("aten.tanh.default", SAMPLES["aten.tanh.default"][0]).call
    found = discover(call)
    file, = remembered.folder().iterdir()
    text = json.loads(file.read_text())
    assert remembered.recall(file.stem) == found and found.factors
    text["factors"] = [{"ins": [0], "outs": [None], "additive": [], "halved": None}]  # a sum over rows
    file.write_text(json.dumps(text))
    assert discover(call) == found
    file.write_text("{")
    assert discover(call) == found


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DISCOVER", "0")
    call = Call("aten.tanh.default", (), {}, (), ())
    assert found_of(call) == Discovered(why_whole="is not tried: AUTOPAR_DISCOVER=0 turns that off")
