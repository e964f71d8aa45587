"""A kill at random moments, and between any two changes: the output is absent or complete, and a rerun ends it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from tests.helpers.fork_server import (
    PREP,
    ForkedProcess,
    run_prep,
    run_python,
    start_prep,
    start_python,
)
from tests.helpers.killing import (
    COMMANDS,
    ONE_PROCESS,
    SEVERAL_PROCESSES,
    KillSetup,
    act_when_durable,
    check_killed,
    read_files,
    run_command,
)
from tests.helpers.object_server import FakeObjectStore, serve_objects
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import make_checkpoint
from tests.helpers.waiting import MAX_S, wait_until, wait_until_idle

Act = Literal["count", "kill", "stop"]

SCRIPT = """
import os, signal, sys, threading

act, point, *words = sys.argv[1:]
point = int(point)
changes = {"os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
changes |= {"fcntl.flock", "fcntl.lockf"}
opens_to_write = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
lock = threading.Lock()
count = 0

def pass_change():
    global count
    with lock:
        count += 1
        is_due = count == point
    if is_due and act != "count":
        os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)

def watch(event, arguments):
    is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & opens_to_write
    if event in changes or (is_write and not str(arguments[0]).startswith("/dev/")):
        pass_change()

def counted(write):
    def write_and_count(fd, *arguments):
        if fd > 2:
            pass_change()
        return write(fd, *arguments)
    return write_and_count

# Writes have no audit event.
for name in ("write", "pwrite", "pwritev", "writev"):
    setattr(os, name, counted(getattr(os, name)))
sys.addaudithook(watch)
sys.argv = ["prep", *words]
from prepcli.commands.cli.main import main

code = main()
if act == "count":
    print(count, file=sys.stderr)
sys.exit(code)
"""


def count_changes(*words: str, cwd: Path) -> int:
    """Run `prep WORDS` in a folder, and return the number of its changes to files."""
    run = run_python(SCRIPT, "count", "0", *words, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return int(run.stderr.split()[-1])


def start_until(act: Act, point: int, *words: str, cwd: Path) -> ForkedProcess:
    """Start `prep WORDS` in a folder. It is killed, or stops, right before change number `point`, from 1 on."""
    return start_python(SCRIPT, act, str(point), *words, cwd=cwd)


def kill_before(point: int, *words: str, cwd: Path) -> int:
    """Kill `prep WORDS` right before change number `point`, and return its exit code."""
    process = start_until("kill", point, *words, cwd=cwd)
    process.communicate(timeout=MAX_S)
    return process.wait()


def wait_until_stopped(process: ForkedProcess) -> bool:
    """Wait until a process stops or ends. Return whether it is stopped."""
    wait_until(lambda: process.poll() is not None or _state(process.pid) == "T")
    return process.poll() is None


def go_on(process: ForkedProcess) -> None:
    """Let a stopped process go on."""
    process.send_signal(signal.SIGCONT)


def spread_points(count: int, number: int) -> Iterator[int]:
    """Yield `number` points spread over the changes 1 to `count`, with the first and the last ones."""
    for index in range(number):
        yield 1 + round(index * (count - 1) / (number - 1))


def _state(pid: int) -> str:
    """Return the state of a process as in /proc, or an empty text if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.parametrize("ways", [ONE_PROCESS, SEVERAL_PROCESSES], ids=["alone", "together"])
@pytest.mark.parametrize("seed", range(34))
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_survive_many_kills(
    setup: KillSetup, name: str, seed: int, ways: Sequence[Sequence[Sequence[str]]]
):
    check_killed(setup, name, kills=3, seed=100 + seed, launches=ways)


@pytest.mark.waits
def test_resume_does_not_write_durable_bytes_again(setup: KillSetup):
    process = act_when_durable(setup, "save-init", "again", lambda p: p.kill())
    process.wait(timeout=MAX_S)
    if process.returncode != -signal.SIGKILL:
        pytest.fail("the run ended before its notes were seen: make the model larger")
    rerun = run_command(setup, "save-init", "again", "--json")
    assert rerun.returncode == 0
    assert "resuming again.partial" in rerun.stderr
    nbytes = json.loads(rerun.stdout)["bytes"]
    assert nbytes["resumed"] > 0
    tensors = sum(p.stat().st_size for p in (setup.folder / "model").glob("*.safetensors"))
    # At most one tensor is written again.
    assert 0 < nbytes["written"] < tensors - nbytes["resumed"] + (32 << 20)
    assert read_files(setup.folder / "again") == setup.expected_files("save-init")


@pytest.mark.waits
@pytest.mark.parametrize(
    ("number", "code"),
    slow_except([(signal.SIGTERM, 75), (signal.SIGINT, 130)], [(signal.SIGINT, 130)]),
)
def test_signal_exits_with_its_code_and_a_hint_to_resume(
    setup: KillSetup, number: signal.Signals, code: int
):
    out = f"stopped-{code}"
    process = act_when_durable(setup, "export", out, lambda p: p.send_signal(number))
    _, err = process.communicate(timeout=MAX_S)
    assert process.returncode == code
    assert b"to resume: `prep export init" in err
    assert not (setup.folder / out).exists()
    assert run_command(setup, "export", out).returncode == 0
    assert read_files(setup.folder / out) == setup.expected_files("export")


def kill_when_durable(setup: KillSetup, out: str) -> Path:
    """Kill a save-init once it has durable bytes, and return its staging folder."""
    process = act_when_durable(setup, "save-init", out, lambda p: p.kill())
    process.wait(timeout=MAX_S)
    assert process.returncode == -signal.SIGKILL
    return setup.folder / f"{out}.partial"


@pytest.mark.slow
@pytest.mark.waits
def test_resume_rewrites_a_damaged_data_file(setup: KillSetup):
    partial = kill_when_durable(setup, "spoiled")
    next((partial / "d").iterdir()).write_bytes(b"short")
    again = run_command(setup, "save-init", "spoiled")
    assert again.returncode == 0
    assert "spoiled.partial are damaged: writing them again" in again.stderr
    assert read_files(setup.folder / "spoiled") == setup.expected_files("save-init")


@pytest.mark.slow
@pytest.mark.waits
def test_killed_restart_leaves_no_false_notes(setup: KillSetup):
    partial = kill_when_durable(setup, "cleared")
    shutil.rmtree(partial / ".prep/done")  # the first step of a restart
    next((partial / "d").iterdir()).unlink()
    assert run_command(setup, "save-init", "cleared").returncode == 0
    assert read_files(setup.folder / "cleared") == setup.expected_files("save-init")


# A kill, or another process, between any two changes: the output is absent or complete, and a rerun ends it


CHANGING_COMMANDS = {
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
    return (*CHANGING_COMMANDS[name], "--out", out, "--memory", "32MiB", "--progress", "none")


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
@pytest.mark.parametrize("name", slow_except(CHANGING_COMMANDS, ["save-init"]))
def test_commands_survive_a_kill_at_some_changes(site: Site, name: str):
    check_kills(site, name, site.points(name, 6))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGING_COMMANDS)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGING_COMMANDS)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", BUCKET_COMMANDS)
def test_bucket_outputs_survive_a_kill_at_every_request(
    site: Site, store: FakeObjectStore, name: str
):
    check_bucket_kills(site, store, name, 0)
