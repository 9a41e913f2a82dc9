"""Branches that do nothing but work on the rows of a mask: ``if mask.any(): out[mask] = f(x[mask])``.

Whether such a mask selects any rows does not matter: no rows count as nothing. But ``if mask.any(): count = count + 1``
does something else too, which a program must not do if there are no rows. Whether a branch does is read from its
source: all that it assigns is used in it alone, and all that it writes to are the mask's rows of a tensor. What cannot
be read so, or does more, is a branch like any other, whose way is checked at every call.

The question may be written in many words: ``len(rows) == 0``, ``n = rows.numel()`` and ``if n``, ``has_rows and
self.training``, with ``else`` or ``continue``. It has to tell none from any: ``if rows.numel() > 3`` is another one.

Rows may stand between running counts, too: ``end = start + n; if n == 0: continue; parts.append(f(x[start:end]));
start = end``. No rows leave ``start`` as it was, and add nothing to parts that are joined.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from autopar.capture.branches.syntax import function_at, indices, name_of, of_type, outside_indices, read_of, receiver
from autopar.capture.python.bytecode import place_in

ADD_ROWS = {"index_add", "index_put", "index_copy", "scatter_add", "scatter_reduce", "masked_scatter",
            "index_fill", "masked_fill"}  # fmt: skip
"""Methods that change rows of a tensor; in place with a ``_`` behind."""
FIND_ROWS = {"where", "nonzero"}
PLACES = {"nonzero", "argwhere", "unique", "tolist"}
SHAPED = {"view", "reshape", "flatten"}
JOINS = {"cat", "concat", "concatenate", "vstack"}
HOW_MANY = {"len", "numel", "nelement", "size", "sum", "any", "count_nonzero", "item", "int", "bool"}
"""Functions and methods that say how many rows there are, or whether there are any."""
NO_TENSORS = {"torch", "len", "bool", "int", "self"}
Statements = Sequence[ast.stmt]


def only_rows(frame: FrameType) -> bool:
    """Check that the present question of a frame of the user's is for a branch that only works on rows.

    Args:
        frame: the innermost one of the user's; the line that it is at has the question.
    """
    question = _question_of(frame)
    return question is not None and question.only_rows()


def loop_of_rows(frame: FrameType) -> bool:
    """Check that each turn of the loop that a user's frame begins now only works on rows that it finds."""
    file = frame.f_code.co_filename
    function = function_at("".join(linecache.getlines(file)), frame.f_code.co_firstlineno)
    if function is None:
        return False
    for loop in of_type(function, ast.For):
        if not loop.iter.lineno <= frame.f_lineno <= (loop.iter.end_lineno or 0) or loop.orelse:
            continue
        places = loop.iter
        found_here = isinstance(places, ast.Call) and name_of(places.func) in PLACES
        if not (found_here or isinstance(places, ast.Name)) or not isinstance(loop.target, ast.Name):
            return False
        inside = {id(n) for statement in loop.body for n in ast.walk(statement)}
        name = loop.target.id
        used = [n for n in of_type(function, ast.Name) if n.id == name and isinstance(n.ctx, ast.Load)]
        return all(id(n) in inside for n in used) and _Branch(function, loop.body, set(), name).only_rows()
    return False


def answer_with_rows(frame: FrameType) -> bool:
    """Return the answer to the question where there are rows: False to ``counts[e] == 0``."""
    question = _question_of(frame)
    return question is None or _with_rows(question.test)


class _Question(NamedTuple):
    """One question of a branch.

    Attributes:
        function: the function in which it stands.
        test: what is asked, with the numbers that are named written out: ``rows.numel() == 0`` of ``n == 0``.
        asked: names in it.
        work: what runs where there are rows, the other side of the branch being empty.
    """

    function: ast.FunctionDef
    test: ast.expr
    asked: frozenset[str]
    work: Statements

    def only_rows(self) -> bool:
        names = _asked_in(self.test)
        return len(names) == 1 and _tells_any_from_none(self.test) and (
            _Branch(self.function, self.work, set(self.asked | names)).only_rows()
        )  # fmt: skip


def _question_of(frame: FrameType) -> _Question | None:
    """Return the question of a frame; None if it is of no branch, or of one whose both sides do something."""
    file = frame.f_code.co_filename
    line, column, _ = place_in(frame)
    return _question_at("".join(linecache.getlines(file)), frame.f_code.co_firstlineno, line, column)


@functools.lru_cache(maxsize=4096)
def _question_at(source: str, first_line: int, line: int, column: int | None) -> _Question | None:
    function = function_at(source, first_line)
    found = _branch_in(function.body, line, None) if function is not None else None
    if function is None or found is None:
        return None
    branch, behind = found
    operands = list(_operands(branch.test))
    if len(operands) > 1:
        at = (line, -1 if column is None else column)
        operands = [x for x in operands if (x.lineno, x.col_offset) <= at <= (x.end_lineno or 0, x.end_col_offset or 0)]
    work = _work_of(branch, behind)
    if len(operands) != 1 or not work:
        return None
    test = _without_not(operands[0])
    return _Question(function, _WrittenOut(function).visit(copy.deepcopy(test)), frozenset(_asked_in(test)), work)


def _operands(test: ast.expr) -> Iterator[ast.expr]:
    """Return the questions that ``and`` and ``or`` join in a test, with the ``not`` in front of each."""
    inside = _without_not(test)
    if isinstance(inside, ast.BoolOp):
        for value in inside.values:
            yield from _operands(value)
    else:
        yield test


def _without_not(test: ast.expr) -> ast.expr:
    """Return ``x`` of ``not x``."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    return test


def _work_of(branch: ast.If, behind: Statements | None) -> Statements:
    """Return the statements of the side of a branch that does something; none where both do.

    Which side runs where there are rows makes no difference where this only works on rows: without rows it does
    nothing.
    """
    for empty, side in ((branch.body, branch.orelse), (branch.orelse, branch.body)):
        if all(isinstance(node, ast.Pass | ast.Continue) for node in empty):
            skips = any(isinstance(node, ast.Continue) for node in empty)
            if skips and behind is None:
                return ()
            return [*side, *(behind or ())] if skips else side
    return ()


class _WrittenOut(ast.NodeTransformer):
    """Puts, in a test, how many rows there are in the place of a name that it was given: ``n`` of ``n = len(rows)``."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.function = function

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        return self.visit(node.value)  # type: ignore[no-any-return]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        bound = [n for n in of_type(self.function, ast.Name) if n.id == node.id and isinstance(n.ctx, ast.Store)]
        given = [n for n in of_type(self.function, ast.Assign | ast.AnnAssign) if n.value is not None and bound and (
                 bound[0] in (n.targets if isinstance(n, ast.Assign) else [n.target]))]  # fmt: skip
        if len(bound) == 1 and len(given) == 1 and _says_how_many(given[0].value):
            return self.visit(copy.deepcopy(given[0].value))  # type: ignore[no-any-return]
        return node


def _says_how_many(value: ast.expr) -> bool:
    """Check that an expression is a number of rows, or whether there are any, of a tensor that has a name."""
    if isinstance(value, ast.NamedExpr):
        return _says_how_many(value.value)
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
        return _says_how_many(value.operand)
    if isinstance(value, ast.Compare):
        return any(map(_says_how_many, (value.left, *value.comparators))) and _tells_any_from_none(value)
    if isinstance(value, ast.Subscript):
        return isinstance(value.value, ast.Attribute) and value.value.attr == "shape" and _is_named(value.value.value)
    if not isinstance(value, ast.Call) or value.keywords:
        return False
    of_torch = isinstance(value.func, ast.Attribute) and not _is_module(value.func.value)
    of = value.func.value if of_torch else value.args[0] if len(value.args) == 1 else None  # type: ignore[attr-defined]
    n_args = len(value.args) - (not of_torch)
    return name_of(value.func) in HOW_MANY and n_args == (name_of(value.func) == "size") and of is not None and (
        _is_named(of) or _says_how_many(of)
    )  # fmt: skip


def _is_module(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "torch"


def _is_named(value: ast.expr) -> bool:
    """Check that an expression is a name, or an element of what has one: ``rows``, ``counts[e]``."""
    return isinstance(value, ast.Name) or (isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name))


def _tells_any_from_none(test: ast.expr) -> bool:
    """Check that a question tells none from any, and nothing else: ``n > 0``, and not ``n > 3``."""
    if any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add | ast.Sub | ast.Mult) for n in outside_indices(test)):
        return False
    if not isinstance(test, ast.Compare):
        return True
    if len(test.ops) != 1:
        return False
    number, op = _compared_with(test)
    if number is None:
        return op in (ast.Eq, ast.NotEq)  # start == end
    return (op, number) in NONE_FROM_ANY


def _with_rows(test: ast.expr) -> bool:
    """Return the answer to a question where there are rows."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not _with_rows(test.operand)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return True
    number, op = _compared_with(test)
    if number is None:
        return op is not ast.Eq
    return NONE_FROM_ANY.get((op, number), True)


def _compared_with(test: ast.Compare) -> tuple[Any, type[ast.cmpop]]:
    """Return the number that something is compared with, if any, and how, with the number on the right."""
    left, right, op = test.left, test.comparators[0], type(test.ops[0])
    if isinstance(right, ast.Constant):
        return right.value, op
    if isinstance(left, ast.Constant):
        return left.value, SWAPPED.get(op, op)
    return None, op


NONE_FROM_ANY = {
    (ast.Eq, 0): False, (ast.NotEq, 0): True, (ast.Gt, 0): True, (ast.LtE, 0): False, (ast.GtE, 1): True,
    (ast.Lt, 1): False,
}  # fmt: skip
"""Comparisons of a number of rows that tell none from any, and their answers where there are some."""
SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.GtE: ast.LtE, ast.LtE: ast.GtE
}  # fmt: skip


def _asked_in(test: ast.expr) -> set[str]:
    """Return names of what a question is about."""
    return {n.id for n in of_type(test, ast.Name)} - NO_TENSORS - indices(test)


def _branch_in(statements: Statements, line: int, rest: Statements | None) -> tuple[ast.If, Statements | None] | None:
    """Return the branch whose test is at a line, and the rest of the innermost loop's turn behind it (None outside)."""
    for k, node in enumerate(statements):
        if not node.lineno <= line <= (node.end_lineno or 0):
            continue
        behind = None if rest is None else [*statements[k + 1 :], *rest]
        if isinstance(node, ast.If) and node.test.lineno <= line <= (node.test.end_lineno or 0):
            return node, behind
        of_loop = isinstance(node, ast.For | ast.While)
        for name in ("body", "orelse", "finalbody"):
            inside = getattr(node, name, None)
            if isinstance(inside, list) and (branch := _branch_in(inside, line, [] if of_loop else behind)):
                return branch
    return None


class _Branch:
    """Statements that run where there are rows.

    Args:
        function: the function that they stand in.
        asked: names of the mask, or of the rows, in the question.
        turn: the name of what a loop runs through, if its turns are asked about: a mask compares something with it.
    """

    def __init__(self, function: ast.FunctionDef, branch: Statements, asked: set[str], turn: str = "") -> None:
        self.function, self.branch, self.asked = function, branch, asked
        self.turns = {turn} - {""}
        """Names of the number of the turn."""
        self.of_rows = set(asked)
        for node in of_type(function, ast.Assign):  # the rows of the mask, and the mask of the rows
            if any(call.attr in FIND_ROWS for call in of_type(node.value, ast.Attribute)):
                names = {n.id for n in of_type(node, ast.Name)} - NO_TENSORS
                if names & asked and not any(isinstance(n, ast.Subscript) for n in ast.walk(node.value)):
                    self.of_rows |= names
            target, shaped = node.targets[0], _shaped(node.value)
            if shaped and isinstance(target, ast.Name) and {target.id, shaped} & asked:
                self.of_rows |= {target.id, shaped}
        self.ends = {node.targets[0].id: start for node in of_type(function, ast.Assign)
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
        finds = any(call.attr in FIND_ROWS for call in of_type(node.value, ast.Attribute))
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
                elif not (self._adds_rows(node.value, "") and receiver(node.value) == part.id):
                    self.assigned.add(part.id)
                    if finds or self._names_rows(node.value) or self._compares_turn(node.value):
                        self.of_rows.add(part.id)
                    if read_of(node.value) in self.turns:
                        self.turns.add(part.id)
        return True

    def _compares_turn(self, value: ast.expr) -> bool:
        """Check that an expression is a mask of the loop's own number: ``(picked == e).any(-1)``."""
        compared = [n for n in of_type(value, ast.Compare) if isinstance(n.ops[0], ast.Eq)]
        sides = [[n.left, *n.comparators] for n in compared]
        return any(isinstance(x, ast.Name) and x.id in self.turns for side in sides for x in side)

    def _starts(self, value: ast.expr) -> str:
        """Return the name of ``start`` in ``start + n``, of the number that is asked for; empty for any other."""
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
            return ""
        names = [x.id for x in (value.left, value.right) if isinstance(x, ast.Name)]
        return next((a for a, b in (names, names[::-1]) if b in self.asked), "") if len(names) == 2 else ""

    def _moves_on(self, node: ast.stmt) -> bool:
        """Check that a statement is ``start = end`` or ``start += n``, which change nothing without rows."""
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
        """Check that an expression is ``parts.append(rows)``, of a list that the function only joins."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "append":
            return False
        name, inside = receiver(value), value.args
        if not name or len(inside) != 1 or not self._names_rows(inside[0]) or not self._changes_nothing_else(inside[0]):
            return False
        calls = [call for call in of_type(self.function, ast.Call) if name_of(call.func) in JOINS]
        joined = {id(arg) for call in calls for arg in call.args} | _asked_for_any(self.function)
        appended = {id(call.func.value) for call in of_type(self.function, ast.Call)
                    if isinstance(call.func, ast.Attribute) and call.func.attr == "append"}  # fmt: skip
        reads = [n for n in of_type(self.function, ast.Name) if n.id == name and isinstance(n.ctx, ast.Load)]
        return all(id(n) in joined or id(n) in appended for n in reads)

    def _adds_rows(self, value: ast.expr, ending: str) -> bool:
        """Check that an expression is a call that changes the mask's rows of a tensor."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return False
        named = any(self._names_rows(x) for x in (*value.args, *(k.value for k in value.keywords)))
        adds = value.func.attr.endswith(ending) and value.func.attr.removesuffix("_") in ADD_ROWS
        inside = (*value.args, *(k.value for k in value.keywords))
        return adds and named and all(map(self._changes_nothing_else, inside))

    def _changes_nothing_else(self, value: ast.expr) -> bool:
        """Check that all that an expression changes in place is made of the rows."""
        if any(isinstance(n, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for n in ast.walk(value)):
            return False
        for call in of_type(value, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name.endswith("_") and not name.endswith("__") and not self._names_rows(call.func):
                return False
        return True

    def _names_rows(self, node: ast.AST) -> bool:
        return any(n.id in self.of_rows or n.id in self.ends for n in of_type(node, ast.Name))

    def _read_elsewhere(self) -> bool:
        """Check that something outside of the branch reads a name that it assigns."""
        inside = {id(n) for statement in self.branch for n in ast.walk(statement)}
        return any(
            n.id in self.assigned and isinstance(n.ctx, ast.Load) and id(n) not in inside
            for n in of_type(self.function, ast.Name)
        )


def _shaped(value: ast.expr) -> str:
    """Return the name of the tensor that an expression reshapes: ``mask.view(-1)``; empty for any other."""
    func = value.func if isinstance(value, ast.Call) else None
    return receiver(value) if isinstance(func, ast.Attribute) and func.attr in SHAPED else ""


def _asked_for_any(function: ast.FunctionDef) -> set[int]:
    """Return the names that a function asks for any elements, by identity: ``if len(x)``, ``if len(x) > 0``."""
    found: set[int] = set()
    for branch in of_type(function, ast.If | ast.IfExp):
        test = branch.test.operand if isinstance(branch.test, ast.UnaryOp) else branch.test
        if isinstance(test, ast.Compare):
            with_zero = all(isinstance(n, ast.Constant) and n.value == 0 for n in test.comparators)
            test = test.left if with_zero else test
        if isinstance(test, ast.Call) and name_of(test.func) == "len":
            found |= {id(arg) for arg in test.args}
    return found
