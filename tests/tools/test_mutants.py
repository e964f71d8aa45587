"""`python -m tools.mutants` in a small repository, and the mistakes that it makes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tools import mutants
from tools.mutations import Mutant, find_mutants

MODULE = """
def clamp(x):
    if x < 0:
        return 0
    return x
"""
LOOP = """
def countdown(n):
    while n:
        n -= 1
    return n
"""
UNREACHED = """
def add(a, b):
    return a + b
"""
TESTS = """
from package.loop import countdown
from package.module import clamp


def test_clamp():
    assert clamp(-5) == 0
    assert clamp(5) == 5


def test_countdown():
    assert countdown(3) == 0


def test_that_fails():
    assert clamp(-5) == 1
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with a package, tests that pass and a test that fails. Enter it."""
    root = tmp_path / "repository"
    (root / "package").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "package" / "__init__.py").touch()
    for name, source in (("module", MODULE), ("loop", LOOP), ("unreached", UNREACHED)):
        (root / "package" / f"{name}.py").write_text(source)
    (root / "tests" / "test_module.py").write_text(TESTS)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "Start")):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.chdir(root)
    return root


@pytest.mark.slow
def test_table_and_diffs_show_surviving_mutants(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = sorted(repository.rglob("*"))
    mutants.main(["package/module.py", "package/unreached.py", "--reach", str(tmp_path / "reach")])
    out = capsys.readouterr().out
    assert "1/4 survived package/module.py:3 comparison" in out
    assert "2/4 survived package/module.py:3 off by one" in out
    assert "3/4 killed package/module.py:4 off by one" in out
    assert "4/4 unreached package/unreached.py:3 arithmetic" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["module", "killed", "survived", "timeout", "unreached"] in lines
    assert ["package/module.py", "1", "2", "0", "0"] in lines
    assert ["package/unreached.py", "0", "0", "0", "1"] in lines
    assert "\n-    if x < 0:\n+    if x <= 0:\n" in out
    assert "\n-    return a + b\n+    return a - b\n" in out
    assert [path for path in sorted(repository.rglob("*")) if ".git" not in path.parts] == [
        path for path in before if ".git" not in path.parts
    ]
    worktrees = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True)
    assert worktrees.stdout.count("\n") == 1


def test_records_name_the_passed_tests_of_a_line(repository: Path, tmp_path: Path):
    records = mutants.record_reach(repository, tmp_path / "reach", [])
    assert records.seconds.keys() == {
        "tests/test_module.py::test_clamp",
        "tests/test_module.py::test_countdown",
    }
    assert records.tests_of_lines("package/loop.py", range(4, 5)) == {
        "tests/test_module.py::test_countdown"
    }
    assert records.tests_of_lines("package/unreached.py", range(3, 4)) == set()


def test_records_of_another_commit_are_refused(repository: Path, tmp_path: Path):
    folder = tmp_path / "reach"
    folder.mkdir()
    (folder / mutants.COMMIT_FILE).write_text("another")
    with pytest.raises(SystemExit, match="records of another commit"):
        mutants.record_reach(repository, folder, [])


@pytest.mark.slow
def test_endless_loop_ends_at_the_timeout(repository: Path):
    (mutant,) = [
        mutant
        for mutant in mutants.draw_mutants(repository, ["package/loop.py"], 10, seed=0)
        if mutant.kind == "dropped statement"
    ]
    outcome = mutants.run_mutant(repository, mutant, ["tests/test_module.py"], timeout_s=3)
    assert outcome == mutants.TIMEOUT
    assert (repository / "package" / "loop.py").read_text() == LOOP


def test_draw_depends_on_the_seed_only(repository: Path):
    draws = [mutants.draw_mutants(repository, ["package"], 2, seed) for seed in (1, 1, 2, 3)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2] or draws[0] != draws[3]


def test_cases_of_all_functions_come_before_further_cases():
    class Records:
        seconds: ClassVar = {"a[0]": 1.0, "a[1]": 2.0, "b": 5.0, "c": 100.0}

        def tests_of_lines(self, _path: str, _lines: range) -> set[str]:
            return {*self.seconds}

    records: Any = Records()
    mutant = mutants.Mutant("m.py", "off by one", range(1, 2), 0, 1, b"2")
    assert mutants.choose_tests(records, mutant, limit_s=10) == ["a[0]", "b"]
    assert mutants.choose_tests(records, mutant, limit_s=200) == ["a[0]", "b", "c", "a[1]"]


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
