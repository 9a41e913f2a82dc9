"""Docstrings of functions begin with a verb in the imperative; those of properties, classes and modules with a noun."""

from __future__ import annotations

import ast

from unit.test_floors import ROOT, modules

NO_VERBS = frozenset(
    """a about after again all already also among an and another any anything are as at be because before beside between
    both but by can cannot each either enough even every everything few first fixed for from given had has have having
    here how however i if in inside instead into is it its just last less like made many may might more most much must
    my neither never next no nobody none not nothing of often on once one only or other others otherwise our out over
    own per rather said same several she should since so some somebody something still such than that the their them
    then there these they this those though through to together too two under unless until up upon was we were what
    whatever when where whether which while who whole whom whose why will with within without would you your""".split()
)
"""First words that show that a docstring does not begin with a verb."""


def begins_without_a_verb(docstring: str | None) -> bool:
    words = docstring.split(maxsplit=1) if docstring else []
    return bool(words) and (words[0].lower().rstrip(".,:;") in NO_VERBS or words[0][:2] == "``")


def is_property(node: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = []
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                if begins_without_a_verb(docstring) and not is_property(node):
                    first = (docstring or "").splitlines()[0]
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {first}")
    assert not found, f"{len(found)} docstrings:\n" + "\n".join(found)
