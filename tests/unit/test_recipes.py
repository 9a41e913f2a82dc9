"""docs/recipes.md: every command of it runs, one after the other, and every key that it says to read is there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import command
from unit.test_mcp_server import CONFIG

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (\d+)\. .*?\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))


def commands(recipe: str) -> list[list[str]]:
    """The words of every command of a recipe, without ``autopar``."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", recipe, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    assert all(line.startswith("autopar ") for line in lines)
    return [shlex.split(line)[1:] for line in lines]


def keys(recipe: str) -> list[str]:
    """The keys to read: between the words ``read`` and ``Next:``, in code, if they are written as keys."""
    text = re.sub(r"^```sh\n.*?^```$", "", recipe, flags=re.MULTILINE | re.DOTALL)
    said = re.search(r"\b[Rr]ead `(.*?)Next:", text, re.DOTALL)
    assert said is not None, recipe
    words = re.findall(r"`([a-z_]+(?:(?:\.[a-z_]+)|(?:\[0\]))*)`", "`" + said[1])
    return [word for word in words if word not in NO_KEYS]


NO_KEYS = {"memory", "explain", "plan", "export", "activations", "optimizer"}
"""Words in code between them that are commands, or values."""
MAY_BE_NULL = {"refused.largest", "alternatives[0]", "error_band", "saved_seconds"}
"""Keys of another case than the one that the recipe's command is."""


def found(answers: list[Any], path: str) -> bool:
    """True if an answer has a key."""
    return any(_has(answer, re.findall(r"[a-z_]+|\[0\]", path)) for answer in answers)


def _has(value: Any, steps: list[str]) -> bool:
    for step in steps:
        if step == "[0]":
            if not isinstance(value, list) or not value:
                return False
            value = value[0]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            return False
    return True


def test_there_are_ten() -> None:
    assert list(RECIPES) == [str(n) for n in range(1, 11)]
    assert PAGE.startswith("---\nname: autopar\ndescription: ")


@pytest.mark.slow
def test_every_recipe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    for number, recipe in RECIPES.items():
        answers = []
        for words in commands(recipe):
            code, out, err = command(*words)
            assert code == 0, f"recipe {number}: autopar {shlex.join(words)}\n{err}"
            if "--json" in words:
                answers.append(json.loads(out))
        missing = [key for key in keys(recipe) if key not in MAY_BE_NULL and not found(answers, key)]
        assert not missing, f"recipe {number} says to read {missing}, the answers have {[list(a) for a in answers]}"
        assert keys(recipe), number


def test_keys_that_are_not_there_are_found_out() -> None:
    answer = {"a": [{"b": None}], "c": {}}
    assert found([{}, answer], "a[0].b") and found([answer], "c")
    assert not found([answer], "a[0].c") and not found([answer], "b") and not found([{"a": []}], "a[0]")


def test_every_command_of_the_page_is_of_today() -> None:
    """Options that do not exist are found without running the recipes: ``--help`` is asked in place of running."""
    for recipe in RECIPES.values():
        for words in commands(recipe):
            name = words[:2] if words[:2] == ["clusters", "new"] else words[:1]
            code, out, err = command(*name, "--help")
            assert code == 0, err
            for option in (word for word in words if word.startswith("-")):
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", out), (words, option)
