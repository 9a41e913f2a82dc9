"""Placements, states, meshes and options are words with names for what is in them: nobody else takes them apart."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.errors import MeshError
from autopar.rules.option_names import WHOLE, as_written, factor_and_block, listed, option_written
from autopar.words.meshes import Mesh, mesh_shapes
from autopar.words.placements import INVARIANT, PENDING, REPLICATED, Placement, State, Step, path, shard

ROOT = Path(__file__).resolve().parents[2]
THEIR_OWN = {"autopar/words/placements.py", "autopar/words/meshes.py", "autopar/rules/option_names.py"}
OTHER_WORDS = {
    "autopar/runtime/parameters/redistribution.py": "a table by kinds, which stands beside torch's",
    "autopar/profiling/document.py": "an action of a schedule, a backward of inputs",
    "autopar/comparison/in_process_ranks.py": "actions of schedules, too",
}
"""Files in which a letter of a placement is another word, or a kind that was asked for by name."""

LETTERS = re.compile(r"[SIRP]|S\d+(\*\d+)?|replicate")


def taken_apart(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """``(line, code)`` where a text is compared with a placement's, or what is named like one is cut into letters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                parts = side.elts if isinstance(side, (ast.Tuple, ast.Set, ast.List)) else [side]
                if any(isinstance(p, ast.Constant) and isinstance(p.value, str) and LETTERS.fullmatch(p.value)
                       for p in parts):  # fmt: skip
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Subscript) and re.search(r"placement$", ast.unparse(node.value)):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in ("startswith", "split", "removeprefix")
            if asks and re.search(r"\b(placement|p)$", ast.unparse(node.func.value)):
                yield node.lineno, ast.unparse(node)


MESH = re.compile(r"(^|\.|_)(mesh|meshes\[.+\])$")


def meshes_taken_apart(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """``(line, code)`` where a mesh is taken apart by the places of what is in it: a half of an axis, a part of the
    axes, sizes by name. An axis may be taken whole: ``name, size = mesh[axis]``."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    whole = {id(node.value) for node in assigned if isinstance(node.targets[0], ast.Tuple)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and id(node) not in whole and MESH.search(ast.unparse(node.value)):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and len(node.args) == 1:
            if MESH.search(ast.unparse(node.args[0])):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, (ast.comprehension, ast.For)) and isinstance(node.target, ast.Tuple):
            half = any(isinstance(part, ast.Name) and part.id == "_" for part in node.target.elts)
            if half and MESH.search(ast.unparse(node.iter)):
                yield node.target.lineno, ast.unparse(node.iter)


def test_nobody_takes_a_mesh_apart() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {code}"
        for file in sorted((ROOT / "autopar").rglob("*.py"))
        if file.relative_to(ROOT).as_posix() not in THEIR_OWN and "mesh" in (text := file.read_text(encoding="utf-8"))
        for line, code in meshes_taken_apart(ast.parse(text))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("code", [
    "plan.mesh[axis][1]", "mesh[0]", "mesh[1:]", "dict(stage.mesh)", "[size for _, size in mesh]",
    "{axis for axis, _ in self.mesh}", "candidate.meshes[0][0]", "for _, size in mesh: pass",
])  # fmt: skip
def test_the_search_finds_what_takes_a_mesh_apart(code: str) -> None:
    assert list(meshes_taken_apart(ast.parse(code)))


def test_nobody_takes_a_placement_apart() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {code}"
        for file in sorted((ROOT / "autopar").rglob("*.py"))
        if file.relative_to(ROOT).as_posix() not in THEIR_OWN | OTHER_WORDS.keys()
        for line, code in taken_apart(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("code", [
    "x == 'P'", "p in ('I', 'R')", "'P' in state", "placement[0]", "int(placement[1:])", "p.startswith('S')",
    "{a, b} == {'I', 'R'}", "how != 'replicate'", "placement.split(',')",
])  # fmt: skip
def test_the_search_finds_what_takes_one_apart(code: str) -> None:
    assert list(taken_apart(ast.parse(code)))


def test_a_placement_says_what_it_is() -> None:
    cut = Placement("S2*64")
    assert (cut.kind, cut.dim, cut.unit) == ("S", 2, 64)
    assert cut.is_shard and not cut.is_pending and not cut.is_replicated
    assert cut is shard(2, 64) and shard(3) is Placement("S3") and shard(3).unit == 1
    assert INVARIANT.dim is None and INVARIANT.is_replicated and REPLICATED.is_replicated and PENDING.is_pending
    assert [p.adjoint for p in (INVARIANT, REPLICATED, PENDING, cut)] == [INVARIANT, PENDING, INVARIANT, cut]
    assert pickle.loads(pickle.dumps(cut)) is cut and copy.deepcopy(cut) is cut, "there is one of each"
    with pytest.raises(AttributeError, match="immutable"):
        cut.dim = 1  # type: ignore[misc]


@pytest.mark.parametrize("text", ["", "X", "S", "S01", "S64", "S-1", "S1*0", "S1*1", "S1*", "s0", "SI", "R ", "S0,I"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(MeshError, match="is no placement"):
        Placement(text)


def test_a_state_says_what_it_is() -> None:
    state = State.of("S0", "R", "P")
    assert state.text == "S0,R,P" and state == ("S0", "R", "P") and state.is_cut and state.in_shards
    assert State.parse(" S0, R,P", Mesh.of(a=2, b=2, c=2), "here") == state
    assert state.started(True).text == "S0,R,I" and state.adjoint.text == "S0,P,I"
    assert State.of("S1*4").has_units and not state.has_units and not State.of("I", "R").in_shards
    assert pickle.loads(pickle.dumps(state)) == state and isinstance(copy.deepcopy(state), State)
    with pytest.raises(MeshError, match="here: 'S0,R' has 2 placements, the mesh has 1 axes"):
        State.parse("S0,R", Mesh.of(a=2), "here")


def test_a_mesh_says_what_it_is() -> None:
    mesh = Mesh.of(data=2, tensor=3)
    assert mesh == (("data", 2), ("tensor", 3)) and mesh.names == ("data", "tensor") and mesh.sizes == (2, 3)
    assert mesh.name(1) == "tensor" and mesh.size(1) == 3 and mesh.size_of["tensor"] == 3 and mesh.n_devices == 6
    assert mesh.text == "data=2,tensor=3" and Mesh.parse(mesh.text) == mesh and mesh.shown() == "data=2 x tensor=3"
    assert [mesh.coordinate(rank) for rank in (0, 2, 3, 5)] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert all(mesh.rank(mesh.coordinate(rank)) == rank for rank in range(6)), "row-major, and back"
    assert mesh.groups([1]) == [(0, 1, 2), (3, 4, 5)] and mesh.groups([0]) == [(0, 3), (1, 4), (2, 5)]
    assert mesh.groups([0, 1]) == [tuple(range(6))] and mesh.groups([]) == [(rank,) for rank in range(6)]
    assert mesh.inner(1) == Mesh.of(tensor=3) and mesh.outer(1) == Mesh.of(data=2)
    assert mesh.merged() == [Mesh.of(data=6)]
    assert mesh.refines(Mesh.of(data=6)) and not mesh.refines(Mesh.of(data=3, tensor=2))
    assert mesh_shapes(4) == [Mesh.of(data=4), Mesh.of(data=2, tensor=2)] and mesh_shapes(1) == [Mesh.of(data=1)]
    assert mesh_shapes(4, 2, ["tensor"]) == [Mesh.of(data=2, tensor=2), Mesh.of(tensor=4)][::-1]
    assert mesh_shapes(8, 2, ["context", "tensor"]) == [
        Mesh.of(data=8), Mesh.of(tensor=2, context=4), Mesh.of(tensor=4, context=2)
    ]  # a shape of one axis cannot have two names
    assert mesh_shapes(2, 2, ["mine"]) == mesh_shapes(2) and mesh_shapes(1, 2, ["tensor"]) == mesh_shapes(1)
    assert isinstance(pickle.loads(pickle.dumps(mesh)), Mesh) and isinstance(copy.deepcopy(mesh), Mesh)


def test_a_step_is_of_one_axis() -> None:
    steps = path(State.of("S0", "S0"), State.of("R", "I"))
    assert steps is not None and [step.axis for step in steps] == [1, 0], "innermost first"
    first, second = steps
    assert (first.before, first.after, first.collectives) == ("S0", "I", ("all_gather", None))
    assert second == Step.between(State.of("S0", "I"), State.of("R", "I"))
    assert second.collectives == ("all_gather", "reduce_scatter")


def test_names_of_options() -> None:
    assert as_written(WHOLE) == "replicate" and option_written("replicate") == WHOLE and as_written("h") == "h"
    assert factor_and_block("h*2") == ("h", 2) and factor_and_block("h") == ("h", 0)
    assert listed([WHOLE, "b", "h*2"]) == "replicate, b, h*2"
