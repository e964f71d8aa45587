"""A kill, or another process, between any two changes: the output is absent or complete, and a rerun ends it.

The changes are those of files, and the requests that change objects. The tests run commands and look at the disk and at
the store. They know nothing of how a run notes its progress.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.change_points import (
    count_changes,
    go_on,
    kill_before,
    spread_points,
    start_until,
    wait_until_stopped,
)
from tests.helpers.fork_server import PREP, ForkedProcess, run_prep, start_prep, start_python
from tests.helpers.object_server import FakeObjectStore, serve_objects
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import make_checkpoint
from tests.helpers.waiting import MAX_S, wait_until, wait_until_idle

COMMANDS = {
    "pad-vocab": ("pad-vocab", "./model", "--multiple", "8", "--init", "mean"),
    "save-init": ("save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "auto"),
    "files": ("save-init", "./model", "--mesh", "1,2,1", "--storage", "files"),
    "compress": ("reshard", "init", "--mesh", "1,2,1", "--compress", "zstd"),
    "export": ("export", "init"),
}


@dataclass(frozen=True)
class Site:
    """A folder with `model` and `init`, and the files that commands write without a disturbance."""

    folder: Path
    outputs: dict[str, dict[str, bytes]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def expected(self, name: str) -> dict[str, bytes]:
        """Return the files of the output of a command. The first call runs it."""
        if name not in self.outputs:
            out = self.folder / f"{name}-whole"
            self.counts[name] = count_changes(*words(name, out.name), cwd=self.folder)
            self.outputs[name] = read_files(out)
            shutil.rmtree(out)
        return self.outputs[name]

    def points(self, name: str, number: int = 0) -> Iterable[int]:
        """Return the changes of a command, or a number of them."""
        self.expected(name)
        count = self.counts[name]
        return spread_points(count, number) if number else range(1, count + 1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    make_checkpoint(folder / "model")
    run = run_prep("save-init", "./model", "--out", "init", "--pad-vocab", "8", cwd=folder)
    assert run.returncode == 0, run.stderr
    return Site(folder)


def words(name: str, out: str) -> tuple[str, ...]:
    return (*COMMANDS[name], "--out", out, "--memory", "32MiB", "--progress", "none")


def read_files(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def published_files(out: Path) -> dict[str, bytes]:
    """Return the files of an output without the notes of its run, which a kill after the publication leaves."""
    return {path: data for path, data in read_files(out).items() if not path.startswith(".prep/")}


def check_kills(site: Site, name: str, points: Iterable[int]) -> None:
    """Kill a command before each of these changes. Its next run writes the same output."""
    expected = site.expected(name)
    model = read_files(site.folder / "model")
    names = {path.name for path in site.folder.iterdir()}
    out = site.folder / "out"
    for point in points:
        kill_before(point, *words(name, "out"), cwd=site.folder)
        if out.exists():
            assert published_files(out) == expected, f"published before change {point}"
        rerun = run_prep(*words(name, "out"), cwd=site.folder)
        assert rerun.returncode == 0, f"{point}: {rerun.stderr}"
        assert read_files(out) == expected, f"killed before change {point}"
        shutil.rmtree(out)
        assert {path.name for path in site.folder.iterdir()} == names, f"before change {point}"
    assert read_files(site.folder / "model") == model


@pytest.mark.waits
@pytest.mark.parametrize("name", slow_except(COMMANDS, ["save-init", "export"]))
def test_commands_survive_a_kill_at_some_changes(site: Site, name: str):
    check_kills(site, name, site.points(name, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_survive_a_kill_at_every_change(site: Site, name: str):
    check_kills(site, name, site.points(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["save-init", "compress"])
def test_commands_survive_two_kills_in_a_row(site: Site, name: str):
    expected = site.expected(name)
    for point in site.points(name, 12):
        for again in site.points(name, 12):
            kill_before(point, *words(name, "out"), cwd=site.folder)
            kill_before(again, *words(name, "out"), cwd=site.folder)
            rerun = run_prep(*words(name, "out"), cwd=site.folder)
            assert rerun.returncode == 0, f"{point}, {again}: {rerun.stderr}"
            assert read_files(site.folder / "out") == expected, f"{point}, {again}"
            shutil.rmtree(site.folder / "out")


def check_second_runs(site: Site, name: str, points: Iterable[int]) -> None:
    """Start a command a second time while the first one stands before each of these changes."""
    expected = site.expected(name)
    out = site.folder / "out"
    for point in points:
        first = start_until("stop", point, *words(name, "out"), cwd=site.folder)
        is_stopped = wait_until_stopped(first)
        second = start_prep(*words(name, "out"), cwd=site.folder)
        # It ends, or waits for the first one.
        wait_until_idle(second)
        if is_stopped:
            go_on(first)
        errors: list[str] = []
        for process in (first, second):
            _, err = process.communicate(timeout=MAX_S)
            if process.wait():
                assert process.returncode == 1, f"{point}: {err.decode()}"
                errors.append(err.decode())
        assert len(errors) < 2, f"{point}: {errors}"
        assert all("out" in error and "Traceback" not in error for error in errors), errors
        assert published_files(out) == expected, f"{point}: {errors}"
        rerun = run_prep(*words(name, "out"), cwd=site.folder)
        assert rerun.returncode == 0, f"{point}: {rerun.stderr}"
        assert read_files(out) == expected
        shutil.rmtree(out)


@pytest.mark.waits
def test_second_run_at_some_changes_leaves_one_output(site: Site):
    check_second_runs(site, "save-init", site.points("save-init", 6))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_second_run_at_every_change_leaves_one_output(site: Site, name: str):
    check_second_runs(site, name, site.points(name))


BUCKET_COMMANDS = {
    "save-init": ("save-init", "./model", "--mesh", "1,2,1", "--storage", "files"),
    "export": ("export", "init"),
}
# The lock of a killed process. The next one takes it over.
LOCK = ".prep-lock"


@pytest.fixture(scope="module")
def store() -> Iterator[FakeObjectStore]:
    with serve_objects() as store:
        yield store


def start_bucket_run(site: Site, store: FakeObjectStore, name: str) -> ForkedProcess:
    variables = {**os.environ, **store.environment()}
    arguments = (*BUCKET_COMMANDS[name], "--out", "gs://bucket/out", "--progress", "none")
    return start_python(PREP, *arguments, cwd=site.folder, env=variables)


def finish_bucket_run(site: Site, store: FakeObjectStore, name: str) -> dict[str, bytes]:
    """Run a command to its end, and return its objects."""
    process = start_bucket_run(site, store, name)
    _, err = process.communicate(timeout=MAX_S)
    assert process.wait() == 0, err.decode()
    return store.objects_below("bucket/out/")


def count_requests(site: Site, store: FakeObjectStore, name: str) -> tuple[int, dict[str, bytes]]:
    """Return the number of changing requests of a command, and its objects."""
    numbers = itertools.count()
    store.before_change = lambda: next(numbers)
    objects = finish_bucket_run(site, store, name)
    store.before_change = int
    store.objects.clear()
    return next(numbers), objects


def kill_at_request(site: Site, store: FakeObjectStore, name: str, number: int) -> None:
    """Kill a command when its changing request with this number has arrived."""
    numbers = itertools.count(1)

    def kill_when_due() -> None:
        if next(numbers) == number:
            process.kill()

    store.before_change = kill_when_due
    process = start_bucket_run(site, store, name)
    process.communicate(timeout=MAX_S)
    # Requests that the process had sent are still answered.
    wait_until(lambda: not store.num_running)
    store.before_change = int


def check_bucket_kills(site: Site, store: FakeObjectStore, name: str, num_points: int) -> None:
    """Kill a command at some of its requests. Its next run writes the same objects."""
    count, expected = count_requests(site, store, name)
    points = spread_points(count, num_points) if num_points else range(1, count + 1)
    for point in points:
        kill_at_request(site, store, name, point)
        if "bucket/out/prep-manifest.json" in store.objects:
            published = store.objects_below("bucket/out/")
            assert published.items() >= expected.items(), f"published at request {point}"
        objects = finish_bucket_run(site, store, name)
        objects.pop(LOCK, None)
        assert objects == expected, f"killed at request {point}"
        store.objects.clear()


@pytest.mark.waits
@pytest.mark.parametrize("name", slow_except(BUCKET_COMMANDS, ["save-init"]))
def test_bucket_outputs_survive_a_kill_at_some_requests(
    site: Site, store: FakeObjectStore, name: str
):
    check_bucket_kills(site, store, name, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUCKET_COMMANDS)
def test_bucket_outputs_survive_a_kill_at_every_request(
    site: Site, store: FakeObjectStore, name: str
):
    check_bucket_kills(site, store, name, 0)
