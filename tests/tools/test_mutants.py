"""`python -m tools.mutants` in a small repository: a mutant for each outcome."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tools import mutants

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
