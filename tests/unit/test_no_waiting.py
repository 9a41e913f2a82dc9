"""What makes the host wait for a device stands in a few functions, each for a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import autopar

PACKAGE = Path(autopar.__file__).parent
WAITS = frozenset({"item", "cpu", "tolist", "numpy", "nonzero", "synchronize"})
"""Methods of a tensor after which the host has what the device has."""
COPIES = frozenset({"tensor", "as_tensor", "from_numpy"})
"""Functions of torch that copy numbers from the host."""

ALLOWED = {
    "runtime/parameters/host_memory.py": {"wait"},  # for gradients, before the host steps on them
    # which gradients there will be depends on a random number: layers that are left out at random
    "runtime/gradients/reached.py": {"reached"},
    # ... or on which experts have rows; read when gradients are handed over, long after the forward
    "runtime/gradients/taking_part.py": {"names"},
    # calls that ranks compare: the first three, then ever fewer
    "runtime/batches/samples.py": {"values"},
    # what these and branches on data read
    "runtime/ranks/streams.py": {"tolist"},
    # once, when a module or its groups are made
    "runtime/stages/compiled_order.py": {"__init__"},
    "runtime/ranks/groups.py": {"*"},
    # an order of rows, on the CPU
    "runtime/batches/row_sampler.py": {"_order"},
    # Python's own generators draw on the CPU, by a seed that may be a tensor's
    "rules/families/seeded_number.py": {"number_drawn", "_seeded_number"},
    "runtime/ranks/agree.py": {"*"},
    # a branch on data that went another way: read when it has come
    "runtime/stages/async_host_reads.py": {"sent"},
    # how many rows each rank has, which is told between processors
    "runtime/batches/uneven_rows.py": {"__call__"},
    # experts where torch has no kernel that finds their rows on the device
    "rules/experts/experts.py": {"_parts"},
    # experts that take turns, which they do on the CPU alone
    "rules/experts/expert_by_expert.py": {"one_after_the_other"},
    # how many rows travel to each rank and come from it, where none is dropped: torch makes tensors of sizes that the
    # host knows, once for each block of experts and axis
    "rules/experts/expert_all_to_all.py": {"_on_host"},
    # what scripts ask of DTensors, and the ranks of a mesh
    "runtime/repairs/dtensor_fixes.py": {"*"},
    # the ranks of a mesh, which are on the CPU; and, before the first step of an optimizer, whether all step alike
    "runtime/parameters/to_owners.py": {"ranks_of"}, "runtime/parameters/whole_matrices.py": {"same_everywhere"},
    # numbers in the state of optimizers that step on whole parameters, which owners tell the other ranks
    "runtime/parameters/whole_steps.py": {"_form"},
    # state dicts and checkpoints
    "runtime/pipelines/pipeline.py": {"full_state"},
    "runtime/checkpoints/full_state_dict.py": {"*"},
    "runtime/checkpoints/generator_states.py": {"*"},
    "runtime/checkpoints/safetensors_files.py": {"*"},
    "runtime/optimizers/user_optimizers.py": {"*"},
    "runtime/stages/seeds.py": {"alike", "go_on", "_digest", "_of_first"},  # the last where torch draws, which waits
    # many ranks in one process, for verify
    "comparison/in_process_ranks.py": {"*"},
    # proofs of rules, and their ranks in one process
    "rules/proving/proof.py": {"*"}, "rules/proving/simulation.py": {"__torch_dispatch__"},
    # torch's own generator is seeded for code that is kept as it is
    "rules/function.py": {"_drawing"},
}


def waiting(path: Path) -> Iterator[tuple[str, str]]:
    """Functions and what in them waits."""

    def visit(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, ast.FunctionDef) else inside
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                of_torch = isinstance(child.func.value, ast.Name) and child.func.value.id == "torch"
                if child.func.attr in (COPIES if of_torch else WAITS):
                    yield inside, f"{child.func.attr} in line {child.lineno}"
            yield from visit(child, name)

    text = path.read_text(encoding="utf-8")
    if any(word in text for word in (*WAITS, *COPIES)):
        yield from visit(ast.parse(text), "")


def test_what_waits_is_where_it_may() -> None:
    elsewhere = []
    for folder in ("runtime", "lower", "rules"):
        for path in sorted((PACKAGE / folder).glob("**/*.py")):
            allowed = ALLOWED.get(str(path.relative_to(PACKAGE)), set())
            elsewhere += [
                f"{path.relative_to(PACKAGE)}: {function}: {what}" for function, what in waiting(path)
                if function not in allowed and "*" not in allowed
            ]  # fmt: skip
    assert not elsewhere, "\n".join(elsewhere)


def test_what_is_allowed_is_there() -> None:
    for file, functions in ALLOWED.items():
        there = {function for function, _ in waiting(PACKAGE / file)}
        assert functions - {"*"} <= there and there, (file, functions - there)
