"""Mistakes that `tools.mutations` makes in Python source."""

from __future__ import annotations

import pytest

from tools.mutations import Mutant, find_mutants


def results(source: str) -> set[tuple[str, str]]:
    """Return kind and changed source of the mutants that change the program."""
    data = source.encode()
    return {
        (mutant.kind, mutant.apply(data).decode())
        for mutant in find_mutants("m.py", data)
        if mutant.changes_program(data)
    }


@pytest.mark.parametrize(
    ("kind", "source", "changed"),
    [
        ("comparison", "x = a < b", "x = a <= b"),
        ("comparison", "x = a is not b", "x = a is b"),
        ("comparison", "x = (a) in (b)", "x = (a) not in (b)"),
        ("arithmetic", "x = a - b", "x = a + b"),
        ("arithmetic", "x = a + b", "x = a - b"),
        ("and/or", "x = a and b", "x = a or b"),
        ("removed not", "x = not a", "x = (a)"),
        ("off by one", "x = 7", "x = 8"),
        ("swapped arguments", "x = f(a, b, c)", "x = f(b, a, c)"),
        ("dropped statement", "a.x = b", "pass"),
        ("dropped statement", "a[b] = c", "pass"),
        ("dropped statement", "raise a", "pass"),
    ],
)
def test_mutant_changes_one_place(kind: str, source: str, changed: str):
    assert results(source) == {(kind, changed)}


def test_mutants_of_chains_change_one_operator_each():
    assert results("x = a < b <= c") == {
        ("comparison", "x = a <= b <= c"),
        ("comparison", "x = a < b < c"),
    }


def test_mutants_after_non_ascii_text_are_placed_by_bytes():
    assert results("x = 'é' < 'ü'") == {("comparison", "x = 'é' <= 'ü'")}


@pytest.mark.parametrize(
    "source",
    [
        "x = y",
        "x: f(1, 2)",
        "def f(a: f(1, 2)) -> f(1, 2): ...",
        "x = f'{a + b}'",
        "x = True",
        "x = min(a, b)",
    ],
)
def test_source_has_no_mutants(source: str):
    assert results(source) == set()


def test_mutant_of_a_comment_changes_no_program():
    source = b"x = (a  # - none\n     - b)"
    (mutant,) = find_mutants("m.py", source)
    assert b"# + none" in mutant.apply(source)
    assert not mutant.changes_program(source)


def test_invalid_mutant_changes_no_program():
    source = b"x = 1"
    assert not Mutant("m.py", "off by one", range(1, 2), 4, 5, b"(").changes_program(source)


def test_lines_end_at_the_change():
    source = b"if (a\n    and b\n    and c\n):\n    pass"
    lines = [mutant.lines for mutant in find_mutants("m.py", source)]
    assert lines == [range(1, 3), range(1, 4)]
