"""Imports go to the same floor or a lower one."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {
    "hardware_profiles": 0, "cost_models": 1, "autopar.collection": 2, "autopar.errors": 2,
    "autopar.clusters": 2, "autopar.labels": 2, "autopar.placements": 2, "autopar.graph": 2,
    "autopar.transfer": 2, "autopar.plan": 2, "autopar.device_groups": 2, "autopar.texts": 2, "autopar.wishes": 2,
    "autopar.torch_private": 2, "autopar.asked": 2, "autopar.rules": 3, "autopar.regather": 3,
    "autopar.capture": 4, "autopar.normalize": 4, "autopar.staging": 4, "autopar.planner": 5,
    "autopar.planning": 6, "autopar.lower": 6, "autopar.runtime": 7, "autopar.certificate": 8, "autopar.comparison": 8,
    "autopar.verify": 8, "autopar.arguments": 8, "autopar.planfile": 8, "autopar.models": 8, "autopar.report": 8,
    "autopar.profiling": 8, "autopar.other_batch": 8, "autopar.recapture": 9, "autopar.api": 9, "autopar.spreading": 9,
    "autopar.cli": 9, "autopar.__main__": 9,
}  # fmt: skip


def floor_of(module: str) -> tuple[str, int] | None:
    found = [m for m in FLOORS if module == m or module.startswith(m + ".")]
    return (best := max(found, key=len), FLOORS[best]) if found else None


def test_imports_go_down() -> None:
    wrong = []
    folders = ("autopar", "cost_models", "hardware_profiles")
    for path in sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        own = floor_of(name)
        if own is None:
            assert name == "autopar", f"{name} stands on no floor"
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                targets = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Import):
                targets = [a.name for a in node.names]
            else:
                continue
            for target in targets:
                other = floor_of(target)
                if other is not None and other[1] > own[1]:
                    wrong.append(f"{name} (floor {own[1]}) imports {target} (floor {other[1]})")
    assert not wrong, "\n".join(sorted(set(wrong)))
