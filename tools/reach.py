"""Lines that each test reaches: a plugin of pytest that records them, and a reader of its records.

    python -m pytest -p tools.reach --reach-folder FOLDER

A test reaches the lines that run in its own process. Lines that only a child process runs belong to no test.
JAX traces a function once per process and shape, so the traced lines belong to the first test that calls it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

FOLDER_OPTION = "--reach-folder"
LINES_FILE = "lines"
TESTS_FILE = "tests.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the folder of the records."""
    parser.addoption(FOLDER_OPTION, type=Path, help="Record the lines that each test reaches.")


def pytest_configure(config: pytest.Config) -> None:
    """Start to record in this process: the only one, the controller, or a worker of pytest-xdist."""
    folder: Path | None = config.getoption(FOLDER_OPTION)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(_Recorder(folder, is_worker=hasattr(config, "workerinput")))


class _Recorder:
    """Plugin that names the running test to the coverage measurement, and keeps the times of passed tests."""

    def __init__(self, folder: Path, *, is_worker: bool) -> None:
        self._folder = folder
        self._is_worker = is_worker
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._coverage = _open_coverage(folder, data_suffix=True)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        result = yield
        self._coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._failed.add(report.nodeid)
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        if not self._is_worker:
            passed = {name: s for name, s in self._seconds.items() if name not in self._failed}
            (self._folder / TESTS_FILE).write_text(json.dumps(passed, indent=1))


def _open_coverage(folder: Path, *, data_suffix: bool) -> Coverage:
    """Return a measurement of the files below the current folder, with relative paths."""
    coverage = Coverage(
        data_file=str(folder / LINES_FILE),
        data_suffix=data_suffix,
        config_file=False,
        source=["."],
        omit=["tests/*"],
    )
    coverage.set_option("run:relative_files", True)
    return coverage


class Reach:
    """Records of a folder: the tests that reach a line, and the time of each test.

    Tests that failed or were skipped are left out.
    """

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = json.loads((folder / TESTS_FILE).read_text())
        if any(folder.glob(f"{LINES_FILE}.*")):
            # `combine` merges the files of all processes, and removes them.
            coverage = _open_coverage(folder, data_suffix=False)
            coverage.combine([str(folder)])
            coverage.save()
        data = CoverageData(basename=str(folder / LINES_FILE))
        data.read()
        self._contexts_of_file = cache(data.contexts_by_lineno)

    def tests_of_lines(self, path: str, lines: range) -> set[str]:
        """Return the tests that reach one of the lines, or any line of the file if no test does.

        The latter are candidates for lines that run at import or in a child process.
        """
        contexts = self._contexts_of_file(path)
        tests: set[str] = set()
        for line in lines:
            tests |= self.seconds.keys() & set(contexts.get(line, ()))
        if not tests:
            for names in contexts.values():
                tests |= self.seconds.keys() & set(names)
        return tests
