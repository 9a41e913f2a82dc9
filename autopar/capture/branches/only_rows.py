"""Branches that do nothing but work on the rows of a mask: ``if mask.any(): out[mask] = f(x[mask])``.

Whether such a mask selects any rows does not matter: no rows count as nothing. But ``if mask.any(): count = count + 1``
does something else too, which a program must not do where there are no rows. Whether a branch does is read from its
source: all that it assigns is used in it alone, and all that it writes to are the mask's rows of a tensor. What cannot
be read so, or does more, is a branch like any other, whose way is checked at every call.

Rows may stand between running counts, too: ``end = start + n; if n == 0: continue; parts.append(f(x[start:end]));
start = end``. No rows leave ``start`` as it was, and add nothing to parts that are joined.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator, Sequence
from typing import Any

ADD_ROWS = {"index_add", "index_put", "index_copy", "scatter_add", "scatter_reduce", "masked_scatter",
            "index_fill", "masked_fill"}  # fmt: skip
"""Methods that change rows of a tensor; in place with a ``_`` behind."""
FIND_ROWS = {"where", "nonzero"}
PLACES = {"nonzero", "argwhere", "unique", "tolist"}
SHAPED = {"view", "reshape", "flatten"}
JOINS = {"cat", "concat", "concatenate", "vstack"}
NO_TENSORS = {"torch", "len", "bool", "int", "self"}
Statements = Sequence[ast.stmt]


def only_rows(frame: Any) -> bool:
    """Whether what a frame of the user's asks right now decides about a branch that only works on rows.

    Args:
        frame: the innermost one of the user's; the line that it is at has the question.
    """
    file = frame.f_code.co_filename
    return _only_rows("".join(linecache.getlines(file)), frame.f_code.co_firstlineno, frame.f_lineno)


def loop_of_rows(frame: Any) -> bool:
    """Whether each turn of the loop that a frame of the user's begins right now only works on rows that it finds."""
    file = frame.f_code.co_filename
    function = _function_at("".join(linecache.getlines(file)), frame.f_code.co_firstlineno)
    if function is None:
        return False
    for loop in _of_type(function, ast.For):
        if not loop.iter.lineno <= frame.f_lineno <= (loop.iter.end_lineno or 0) or loop.orelse:
            continue
        places = loop.iter
        found_here = isinstance(places, ast.Call) and _name_of(places.func) in PLACES
        if not (found_here or isinstance(places, ast.Name)) or not isinstance(loop.target, ast.Name):
            return False
        inside = {id(n) for statement in loop.body for n in ast.walk(statement)}
        name = loop.target.id
        used = [n for n in _of_type(function, ast.Name) if n.id == name and isinstance(n.ctx, ast.Load)]
        return all(id(n) in inside for n in used) and _Branch(function, loop.body, set(), name).only_rows()
    return False


@functools.lru_cache(maxsize=4096)
def _only_rows(source: str, first_line: int, line: int) -> bool:
    function = _function_at(source, first_line)
    if function is None:
        return False
    question = _branch_at(function, line)
    if question is None:
        return False
    test, branch = question
    asked = {n.id for n in _of_type(test, ast.Name)} - NO_TENSORS - _indices(test)
    return len(asked) == 1 and _Branch(function, branch, asked).only_rows()


def answer_with_rows(frame: Any) -> bool:
    """What such a question is answered with where there are rows: False to ``counts[e] == 0``."""
    file = frame.f_code.co_filename
    function = _function_at("".join(linecache.getlines(file)), frame.f_code.co_firstlineno)
    question = _branch_at(function, frame.f_lineno) if function is not None else None
    test = question[0] if question is not None else None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return True
    if isinstance(test.ops[0], ast.Eq) and isinstance(test.comparators[0], ast.Name):  # start == end
        return False
    if not isinstance(test.comparators[0], ast.Constant):
        return True
    number = test.comparators[0].value
    return not ((isinstance(test.ops[0], ast.Eq | ast.LtE) and number == 0)
                or (isinstance(test.ops[0], ast.Lt) and number == 1))  # fmt: skip


def _indices(test: ast.expr) -> set[str]:
    """Names that only say which element is asked for: the ``e`` of ``counts[e]``."""
    inside = [n for part in _of_type(test, ast.Subscript) for n in _of_type(part.slice, ast.Name)]
    places = {id(n) for n in inside}
    return {n.id for n in inside} - {n.id for n in _of_type(test, ast.Name) if id(n) not in places}


@functools.lru_cache(maxsize=64)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _function_at(source: str, first_line: int) -> ast.FunctionDef | None:
    tree = _tree(source)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef):
            begins = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if begins == first_line:
                return node
    return None


def _branch_at(function: ast.FunctionDef, line: int) -> tuple[ast.expr, Statements] | None:
    """The question at a line, and what runs where there are rows; None if it is of another form."""
    return _branch_in(function.body, line, None)


def _branch_in(statements: Statements, line: int, rest: Statements | None) -> tuple[ast.expr, Statements] | None:
    """The same for a question that stands somewhere in these statements.

    Args:
        rest: what of a turn of the innermost loop follows behind them, which a ``continue`` passes over, too; None
            outside of loops.
    """
    for k, node in enumerate(statements):
        if not node.lineno <= line <= (node.end_lineno or 0):
            continue
        behind = None if rest is None else [*statements[k + 1 :], *rest]
        if isinstance(node, ast.If) and node.test.lineno <= line <= (node.test.end_lineno or 0):
            if node.orelse:
                return None
            if len(node.body) == 1 and isinstance(node.body[0], ast.Continue):
                return (node.test, behind) if behind is not None else None
            return node.test, node.body
        of_loop = isinstance(node, ast.For | ast.While)
        for name in ("body", "orelse", "finalbody"):
            inside = getattr(node, name, None)
            if isinstance(inside, list) and (branch := _branch_in(inside, line, [] if of_loop else behind)):
                return branch
    return None


class _Branch:
    """Statements that run where there are rows.

    Args:
        function: that they stand in.
        asked: names of the mask, or of the rows, in the question.
        turn: the name of what a loop runs through, if its turns are asked about: a mask compares something with it.
    """

    def __init__(self, function: ast.FunctionDef, branch: Statements, asked: set[str], turn: str = "") -> None:
        self.function, self.branch, self.asked = function, branch, asked
        self.turns = {turn} - {""}
        """Names of the number of the turn."""
        self.of_rows = set(asked)
        for node in _of_type(function, ast.Assign):  # the rows of the mask, and the mask of the rows
            if any(call.attr in FIND_ROWS for call in _of_type(node.value, ast.Attribute)):
                names = {n.id for n in _of_type(node, ast.Name)} - NO_TENSORS
                if names & asked and not any(isinstance(n, ast.Subscript) for n in ast.walk(node.value)):
                    self.of_rows |= names
            target, shaped = node.targets[0], _shaped(node.value)
            if shaped and isinstance(target, ast.Name) and {target.id, shaped} & asked:
                self.of_rows |= {target.id, shaped}
        self.ends = {node.targets[0].id: start for node in _of_type(function, ast.Assign)
                     if isinstance(node.targets[0], ast.Name) and (start := self._starts(node.value))}  # fmt: skip
        """Names of the ends of the rows, and of where they start."""
        self.assigned: set[str] = set()

    def only_rows(self) -> bool:
        return bool(self.branch) and all(map(self._is_of_rows, self.branch)) and not self._read_elsewhere()

    def _is_of_rows(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Pass):
            return True
        if isinstance(node, ast.Expr):
            return self._adds_rows(node.value, "_") or self._appends_rows(node.value)
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) or node.value is None:
            return False
        if not self._changes_nothing_else(node.value):
            return False
        if self._moves_on(node):
            return True
        finds = any(call.attr in FIND_ROWS for call in _of_type(node.value, ast.Attribute))
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(part, ast.Subscript) and self._names_rows(part.slice):
                    continue
                if not isinstance(part, ast.Name):
                    return False
                if isinstance(node, ast.AugAssign):
                    if part.id not in self.assigned:
                        return False
                elif not (self._adds_rows(node.value, "") and _receiver(node.value) == part.id):
                    self.assigned.add(part.id)
                    if finds or self._names_rows(node.value) or self._compares_turn(node.value):
                        self.of_rows.add(part.id)
                    if _read_of(node.value) in self.turns:
                        self.turns.add(part.id)
        return True

    def _compares_turn(self, value: ast.expr) -> bool:
        """Whether an expression is a mask of where something is the number of the turn: ``(picked == e).any(-1)``."""
        compared = [n for n in _of_type(value, ast.Compare) if isinstance(n.ops[0], ast.Eq)]
        sides = [[n.left, *n.comparators] for n in compared]
        return any(isinstance(x, ast.Name) and x.id in self.turns for side in sides for x in side)

    def _starts(self, value: ast.expr) -> str:
        """The name of ``start`` in ``start + n``, of the number that is asked for; empty for any other expression."""
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
            return ""
        names = [x.id for x in (value.left, value.right) if isinstance(x, ast.Name)]
        return next((a for a, b in (names, names[::-1]) if b in self.asked), "") if len(names) == 2 else ""

    def _moves_on(self, node: ast.stmt) -> bool:
        """Whether a statement is ``start = end`` or ``start += n``, which change nothing where there are no rows."""
        if isinstance(node, ast.AugAssign):
            value, target = node.value, node.target
            return isinstance(node.op, ast.Add) and isinstance(target, ast.Name) and (
                isinstance(value, ast.Name) and value.id in self.asked
            )  # fmt: skip
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            return False
        start = self.ends.get(node.value.id) if isinstance(node.value, ast.Name) else self._starts(node.value)
        return start == node.targets[0].id

    def _appends_rows(self, value: ast.expr) -> bool:
        """Whether an expression is ``parts.append(rows)``, of a list that the function only joins."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "append":
            return False
        name, inside = _receiver(value), value.args
        if not name or len(inside) != 1 or not self._names_rows(inside[0]) or not self._changes_nothing_else(inside[0]):
            return False
        calls = [call for call in _of_type(self.function, ast.Call) if _name_of(call.func) in JOINS]
        joined = {id(arg) for call in calls for arg in call.args} | _asked_for_any(self.function)
        appended = {id(call.func.value) for call in _of_type(self.function, ast.Call)
                    if isinstance(call.func, ast.Attribute) and call.func.attr == "append"}  # fmt: skip
        reads = [n for n in _of_type(self.function, ast.Name) if n.id == name and isinstance(n.ctx, ast.Load)]
        return all(id(n) in joined or id(n) in appended for n in reads)

    def _adds_rows(self, value: ast.expr, ending: str) -> bool:
        """Whether an expression is a call that changes the mask's rows of a tensor."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return False
        named = any(self._names_rows(x) for x in (*value.args, *(k.value for k in value.keywords)))
        adds = value.func.attr.endswith(ending) and value.func.attr.removesuffix("_") in ADD_ROWS
        inside = (*value.args, *(k.value for k in value.keywords))
        return adds and named and all(map(self._changes_nothing_else, inside))

    def _changes_nothing_else(self, value: ast.expr) -> bool:
        """Whether all that an expression changes in place is made of the rows."""
        if any(isinstance(n, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for n in ast.walk(value)):
            return False
        for call in _of_type(value, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name.endswith("_") and not name.endswith("__") and not self._names_rows(call.func):
                return False
        return True

    def _names_rows(self, node: ast.AST) -> bool:
        return any(n.id in self.of_rows or n.id in self.ends for n in _of_type(node, ast.Name))

    def _read_elsewhere(self) -> bool:
        """Whether something outside of the branch reads a name that it assigns."""
        inside = {id(n) for statement in self.branch for n in ast.walk(statement)}
        return any(
            n.id in self.assigned and isinstance(n.ctx, ast.Load) and id(n) not in inside
            for n in _of_type(self.function, ast.Name)
        )


def _shaped(value: ast.expr) -> str:
    """The name of the tensor that an expression gives another shape: ``mask.view(-1)``; empty for any other."""
    func = value.func if isinstance(value, ast.Call) else None
    return _receiver(value) if isinstance(func, ast.Attribute) and func.attr in SHAPED else ""


def _asked_for_any(function: ast.FunctionDef) -> set[int]:
    """Where a function asks of a list whether it has any elements, by the identity of its name there: ``if len(x)``,
    ``if len(x) > 0``."""
    found: set[int] = set()
    for branch in _of_type(function, ast.If | ast.IfExp):
        test = branch.test.operand if isinstance(branch.test, ast.UnaryOp) else branch.test
        if isinstance(test, ast.Compare):
            with_zero = all(isinstance(n, ast.Constant) and n.value == 0 for n in test.comparators)
            test = test.left if with_zero else test
        if isinstance(test, ast.Call) and _name_of(test.func) == "len":
            found |= {id(arg) for arg in test.args}
    return found


def _name_of(function: ast.expr) -> str:
    """That under which a function is called, without the module that it is taken from."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _read_of(value: ast.expr) -> str:
    """The name of the tensor whose number an expression reads: ``e.item()``; empty for any other."""
    return _receiver(value) if isinstance(value, ast.Call) and _name_of(value.func) == "item" else ""


def _receiver(value: ast.expr) -> str:
    """The name of what a method is called of; empty if it has none."""
    func = value.func if isinstance(value, ast.Call) else None
    return func.value.id if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ""


def _of_type(node: ast.AST, kind: Any) -> Iterator[Any]:
    return (n for n in ast.walk(node) if isinstance(n, kind))


__all__ = ["answer_with_rows", "loop_of_rows", "only_rows"]
