"""The worked examples of docs/adding.md run as they stand there, and each is at most three files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import autopar.frontends.models
import autopar.rules  # noqa: F401  (what registers by being imported must have, before an example does)
from autopar import frontends, targets
from autopar.cli.schemas import ANSWERS
from autopar.plans import memory_decisions
from autopar.rules import registry
from cost_models import costs
from cost_models.schedules import schedule_kinds

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "adding.md").read_text(encoding="utf-8")
FILE = re.compile(r"# file: (\S+)\n")
MOST_FILES = 3


def pages() -> dict[str, list[tuple[str, str]]]:
    """By heading, the ``(language, text)`` of its blocks in order."""
    found = {}
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        heading, _, body = section.partition("\n")
        found[heading] = re.findall(r"^```(\w*)\n(.*?)^```", body, flags=re.M | re.S)
    return found


EXAMPLES = {heading: blocks for heading, blocks in pages().items() if any(FILE.match(text) for _, text in blocks)}


REGISTRIES = (
    registry.RULES, registry.SAMPLES, schedule_kinds.SCHEDULES, frontends.FRONTENDS, costs._CHOOSERS,
    memory_decisions.DECISIONS, targets.TARGETS, ANSWERS, sys.modules,
)  # fmt: skip
"""Where examples register what they add."""


@pytest.fixture
def afterwards_gone() -> Iterator[None]:
    """What an example registers is gone after it."""
    before = [known.copy() for known in REGISTRIES]
    yield
    for known, was in zip(REGISTRIES[:-1], before):
        known.clear()
        known.extend(was) if isinstance(known, list) else known.update(was)
    for name in set(sys.modules) - set(before[-1]):
        if hasattr(sys.modules[name], "of_a_page"):
            del sys.modules[name]
    costs.costs_of.cache_clear()


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_example_runs(
    heading: str, afterwards_gone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    used: dict[str, object] = {"__name__": "page"}
    files = set()
    for language, text in EXAMPLES[heading]:
        named = FILE.match(text)
        if named:
            files.add(named[1])
        if not language:
            assert capsys.readouterr().out == text
        elif language == "toml":
            assert named is not None
            (tmp_path / named[1]).write_text(text)
        elif named:
            name = named[1].removesuffix(".py").replace("/", ".")
            module = sys.modules[name] = ModuleType(name)
            module.of_a_page = True  # type: ignore[attr-defined]
            exec(compile(text, named[1], "exec"), module.__dict__)
            used.update({key: value for key, value in vars(module).items() if not key.startswith("__")})
        else:
            exec(compile(text, f"docs/adding.md: {heading}", "exec"), used)
    assert 1 <= len(files) <= MOST_FILES


def test_every_extension_point_has_a_page() -> None:
    assert set(EXAMPLES) == {
        "An operator", "A lowering", "A schedule", "A device, a link, a cluster", "A cost source", "A memory decision",
        "A frontend", "A trainer",
    }  # fmt: skip
