"""Measure what the tests notice: make random small mistakes in modules, and run the tests that reach each mistake.

    python -m tools.mutants --count 100 --seed 1 prepcli/planning trainer/training [--reach FOLDER]

Everything runs in a git worktree of HEAD in a temporary folder. The first run of a commit records which tests reach
which lines, with the whole default suite. `--reach FOLDER` keeps the records for later runs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path

from tools import reach
from tools.mutations import Mutant, find_mutants
from tools.reach import Reach

KILLED, SURVIVED, TIMEOUT, UNREACHED = OUTCOMES = ("killed", "survived", "timeout", "unreached")
COMMIT_FILE = "commit"
# Share of the time limit that the chosen tests take without a mistake. The rest is for the imports.
TEST_TIME_SHARE = 0.5


@contextmanager
def worktree() -> Iterator[Path]:
    """Check out HEAD in a temporary folder while the context is open."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", root], check=True)
        try:
            yield root
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", root], check=True)


def run_pytest(root: Path, arguments: Sequence[str], timeout_s: float | None = None) -> int | None:
    """Run pytest in a tree. Return its exit status, or None if the time limit ended it and its children."""
    search_path = os.pathsep.join([str(root), str(Path(__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": search_path}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=root,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # The process group may hold children of tests also after pytest has ended.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def record_reach(root: Path, folder: Path, tests: Sequence[str]) -> Reach:
    """Return the records of a folder. Make them first if the folder has none.

    Raises:
        SystemExit: The records are those of another commit.
    """
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    if not (folder / COMMIT_FILE).exists():
        options = ["-p", "tools.reach", reach.FOLDER_OPTION, str(folder.resolve())]
        run_pytest(root, [*options, *tests])
        (folder / COMMIT_FILE).write_text(commit)
    if (folder / COMMIT_FILE).read_text() != commit:
        sys.exit(f"{folder} has the records of another commit - remove it or name another folder")
    return Reach(folder)


def draw_mutants(root: Path, modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return random mutants of the modules, in the order of their places."""
    sources: dict[str, bytes] = {}
    for module in modules:
        paths = [root / module] if module.endswith(".py") else sorted((root / module).rglob("*.py"))
        for path in paths:
            sources[str(path.relative_to(root))] = path.read_bytes()
    mutants: list[Mutant] = []
    for path, source in sources.items():
        mutants += find_mutants(path, source)
    random.Random(seed).shuffle(mutants)
    drawn: list[Mutant] = []
    for mutant in mutants:
        if len(drawn) == count:
            break
        if mutant.changes_program(sources[mutant.path]):
            drawn.append(mutant)
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.start))


def choose_tests(records: Reach, mutant: Mutant, limit_s: float) -> list[str]:
    """Return tests that reach a mutant, within a time limit: first one case of each test function, the fastest."""
    names = records.tests_of_lines(mutant.path, mutant.lines)
    turns: Counter[str] = Counter()
    ranked: list[tuple[int, float, str]] = []
    for seconds, name in sorted((records.seconds[name], name) for name in names):
        function = name.partition("[")[0]
        ranked.append((turns[function], seconds, name))
        turns[function] += 1
    chosen: list[str] = []
    total_s = 0.0
    for _, seconds, name in sorted(ranked):
        total_s += seconds
        if chosen and total_s > limit_s:
            break
        chosen.append(name)
    return chosen


def run_mutant(root: Path, mutant: Mutant, tests: Sequence[str], timeout_s: float) -> str:
    """Run tests with a mistake in the tree, until the first failure. Return the outcome."""
    if not tests:
        return UNREACHED
    path = root / mutant.path
    source = path.read_bytes()
    arguments = root.parent / "arguments"  # the names of many tests are too long for a command
    arguments.write_text("\n".join(tests))
    path.write_bytes(mutant.apply(source))
    # Python compares a cached module with its source by size and second of change. Two mutants may agree in both.
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
    try:
        status = run_pytest(root, ["-x", "-n", "0", f"@{arguments}"], timeout_s)
    finally:
        path.write_bytes(source)
    if status is None:
        return TIMEOUT
    return KILLED if status else SURVIVED


def diff(root: Path, mutant: Mutant) -> str:
    """Return a mutant as a unified diff."""
    source = (root / mutant.path).read_bytes()
    old = source.decode().splitlines(keepends=True)
    new = mutant.apply(source).decode().splitlines(keepends=True)
    names = (f"a/{mutant.path}", f"b/{mutant.path}")
    return "".join(difflib.unified_diff(old, new, *names, n=2))


def table(modules: Sequence[str], outcomes: Sequence[tuple[Mutant, str]]) -> str:
    """Return the number of mutants of each module by outcome."""
    lines = [f"{'module':32}" + "".join(f"{outcome:>11}" for outcome in OUTCOMES)]
    for module in modules:
        counts = Counter(
            outcome
            for mutant, outcome in outcomes
            if mutant.path == module or mutant.path.startswith(f"{module.rstrip('/')}/")
        )
        lines.append(f"{module:32}" + "".join(f"{counts[outcome]:11}" for outcome in OUTCOMES))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the mutants, and print a table and the survivors."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants")
    parser.add_argument("modules", nargs="+", help="Folders or files to change.")
    parser.add_argument("--count", type=int, default=100, help="Draw this many mutants.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the draw.")
    parser.add_argument("--timeout", type=float, default=60, help="Seconds for each mutant.")
    parser.add_argument(
        "--tests", action="append", default=[], help="Record only this path of tests."
    )
    parser.add_argument("--reach", type=Path, help="Keep the records of reached lines here.")
    options = parser.parse_args(arguments)
    outcomes: list[tuple[Mutant, str]] = []
    survivors: list[str] = []
    with worktree() as root:
        records = record_reach(root, options.reach or root.parent / "reach", options.tests)
        mutants = draw_mutants(root, options.modules, options.count, options.seed)
        for number, mutant in enumerate(mutants, 1):
            tests = choose_tests(records, mutant, options.timeout * TEST_TIME_SHARE)
            outcome = run_mutant(root, mutant, tests, options.timeout)
            outcomes.append((mutant, outcome))
            if outcome in (SURVIVED, UNREACHED):
                survivors.append(
                    f"{mutant.kind}, {outcome}, {len(tests)} tests\n{diff(root, mutant)}"
                )
            place = f"{mutant.path}:{mutant.lines[-1]}"
            print(f"{number}/{len(mutants)} {outcome} {place} {mutant.kind}", flush=True)
    print("", table(options.modules, outcomes), *survivors, sep="\n")


if __name__ == "__main__":
    main()
