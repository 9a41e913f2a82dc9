"""Questions about the syntax of a user's code: which function, which names, which calls."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Any


@functools.lru_cache(maxsize=64)
def tree_of(source: str) -> ast.Module | None:
    """Return the syntax tree of a text; None if it is no Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def function_at(source: str, first_line: int) -> ast.FunctionDef | None:
    """Return the function whose first line, decorators included, is a line of a text; None if none begins there."""
    tree = tree_of(source)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef):
            begins = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if begins == first_line:
                return node
    return None


def outside_indices(test: ast.expr) -> Iterator[ast.AST]:
    """Return the nodes of an expression that are in no subscript."""
    inside = {id(n) for part in of_type(test, ast.Subscript) for n in ast.walk(part.slice)}
    return (n for n in ast.walk(test) if id(n) not in inside)


def indices(test: ast.expr) -> set[str]:
    """Return names that only say which element is asked for: the ``e`` of ``counts[e]``."""
    inside = [n for part in of_type(test, ast.Subscript) for n in of_type(part.slice, ast.Name)]
    places = {id(n) for n in inside}
    return {n.id for n in inside} - {n.id for n in of_type(test, ast.Name) if id(n) not in places}


def name_of(function: ast.expr) -> str:
    """Return the name under which a function is called, without its module."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def read_of(value: ast.expr) -> str:
    """Return the name of the tensor whose number an expression reads: ``e.item()``; empty for any other."""
    return receiver(value) if isinstance(value, ast.Call) and name_of(value.func) == "item" else ""


def receiver(value: ast.expr) -> str:
    """Return the name of the object of a method call; empty if it has none."""
    func = value.func if isinstance(value, ast.Call) else None
    return func.value.id if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ""


def of_type(node: ast.AST, kind: Any) -> Iterator[Any]:
    """Return the nodes of a type in a tree, the root included."""
    return (n for n in ast.walk(node) if isinstance(n, kind))
