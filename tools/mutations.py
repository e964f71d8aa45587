"""Small mistakes in Python source, such as another operator, a constant off by one, or a dropped statement."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

OPERATORS: dict[type[ast.AST], tuple[str, str, str]] = {
    ast.Lt: ("comparison", "<", "<="),
    ast.LtE: ("comparison", "<=", "<"),
    ast.Gt: ("comparison", ">", ">="),
    ast.GtE: ("comparison", ">=", ">"),
    ast.Eq: ("comparison", "==", "!="),
    ast.NotEq: ("comparison", "!=", "=="),
    ast.Is: ("comparison", "is", "is not"),
    ast.IsNot: ("comparison", "is not", "is"),
    ast.In: ("comparison", "in", "not in"),
    ast.NotIn: ("comparison", "not in", "in"),
    ast.Add: ("arithmetic", "+", "-"),
    ast.Sub: ("arithmetic", "-", "+"),
    ast.And: ("and/or", "and", "or"),
    ast.Or: ("and/or", "or", "and"),
}
# Annotations and decorators run at import. No test that reaches the function sees them.
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")
COMMUTATIVE = ("min", "max")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed byte range of a file.

    Attributes:
        path: File, relative to the root of the repository.
        kind: Name of the mistake.
        lines: Lines of the statement, up to the change.
        start: Offset of the first byte that is replaced.
        end: Offset behind the last byte that is replaced.
        text: Bytes that replace them.
    """

    path: str
    kind: str
    lines: range
    start: int
    end: int
    text: bytes

    def apply(self, source: bytes) -> bytes:
        """Return the file with the mistake."""
        return source[: self.start] + self.text + source[self.end :]

    def changes_program(self, source: bytes) -> bool:
        """Return whether the changed file is valid and another program."""
        try:
            changed = ast.parse(self.apply(source))
        except SyntaxError:
            return False
        return ast.dump(changed) != ast.dump(ast.parse(source))


def find_mutants(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file, in the order of its statements.

    Some may be invalid or change only a comment: check those that you use with `changes_program`.
    """
    mutants: list[Mutant] = []
    finder = _Finder(path, source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            mutants += finder.mutants_of_statement(node)
    return mutants


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, without those of the statements inside it."""
    for name, value in ast.iter_fields(node):
        if name in SKIPPED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            # Python 3.11 records wrong positions for expressions inside f-strings.
            if not isinstance(child, ast.AST) or isinstance(child, (ast.stmt, ast.JoinedStr)):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _expressions(child)


def _can_be_dropped(statement: ast.stmt) -> bool:
    """Return whether the program can reach what follows without the statement.

    A name that is never assigned fails in every test, so only assignments to attributes and items are dropped.
    """
    if isinstance(statement, ast.Assign):
        return isinstance(statement.targets[0], (ast.Attribute, ast.Subscript))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break))


class _Finder:
    """Finder of the mutants of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def mutants_of_statement(self, statement: ast.stmt) -> Iterator[Mutant]:
        """Yield the mutants of a statement, without those of the statements inside it."""
        if _can_be_dropped(statement):
            yield self._mutant(statement, statement, "dropped statement", b"pass")
        for node in _expressions(statement):
            yield from self._mutants_of_expression(statement, node)

    def _mutants_of_expression(self, statement: ast.stmt, node: ast.expr) -> Iterator[Mutant]:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for operator, pair in zip(node.ops, pairwise(operands)):
                    yield from self._replaced_operator(statement, operator, *pair)
            case ast.BinOp():
                yield from self._replaced_operator(statement, node.op, node.left, node.right)
            case ast.BoolOp():
                for left, right in pairwise(node.values):
                    yield from self._replaced_operator(statement, node.op, left, right)
            case ast.UnaryOp(op=ast.Not()):
                operand = self._text(node.operand)
                yield self._mutant(statement, node, "removed not", b"(" + operand + b")")
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                yield self._mutant(statement, node, "off by one", str(value + 1).encode())
            case ast.Call(func=ast.Name(id=name)) if name in COMMUTATIVE:
                pass
            case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred):
                yield from self._swapped_arguments(statement, first, second)
            case _:
                pass

    def _replaced_operator(
        self, statement: ast.stmt, operator: ast.AST, left: ast.expr, right: ast.expr
    ) -> Iterator[Mutant]:
        if type(operator) not in OPERATORS:
            return
        kind, old, new = OPERATORS[type(operator)]
        gap_start = self._end(left)
        position = self._source.find(old.encode(), gap_start, self._start(right))
        if position >= 0:
            lines = range(statement.lineno, right.lineno + 1)
            yield Mutant(
                self._path, kind, lines, position, position + len(old.encode()), new.encode()
            )

    def _swapped_arguments(
        self, statement: ast.stmt, first: ast.expr, second: ast.expr
    ) -> Iterator[Mutant]:
        texts = (self._text(first), self._text(second))
        if texts[0] == texts[1] or isinstance(second, ast.Starred):
            return
        between = self._source[self._end(first) : self._start(second)]
        yield Mutant(
            self._path,
            "swapped arguments",
            range(statement.lineno, second.lineno + 1),
            self._start(first),
            self._end(second),
            texts[1] + between + texts[0],
        )

    def _mutant(
        self, statement: ast.stmt, node: ast.stmt | ast.expr, kind: str, text: bytes
    ) -> Mutant:
        lines = range(statement.lineno, node.lineno + 1)
        return Mutant(self._path, kind, lines, self._start(node), self._end(node), text)

    def _text(self, node: ast.expr) -> bytes:
        return self._source[self._start(node) : self._end(node)]

    def _start(self, node: ast.stmt | ast.expr) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.stmt | ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset
