"""Full or broken disks, and files that change or vanish during a conversion.

Each fault ends in one error, and the same command again writes the same output.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.observer import NullProgress
from prepcli.engine import files, lanes, pipeline
from prepcli.engine.budget import Budget
from prepcli.engine.conversion_result import ConversionResult
from prepcli.engine.files import Files
from prepcli.engine.pipeline import Pipeline
from prepcli.execution import folder_converter
from prepcli.planning import work_units
from prepcli.restore import digest_checks
from tests.helpers.damage import flip_bit, tensor_byte_ranges
from tests.helpers.faults import COMMANDS, FaultSources, run_until_killed
from tests.helpers.killing import read_files
from tests.helpers.run_cli import Capture, MonkeyPatch, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("sources")


def run_failing_command(capsys: Capture, name: str, *more: str, code: int = 1) -> str:
    """Run a failing command, check the absence of its output, and return stderr."""
    capsys.readouterr()
    assert main([*COMMANDS[name], "--out", "out", "-q", *more]) == code
    assert not Path("out").exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert "a bug in prep" not in err
    assert err.count("error: ") == 1
    return err


def check_resumes(name: str, expected: dict[str, bytes], *more: str) -> None:
    assert main([*COMMANDS[name], "--out", "out", "-q", *more]) == 0
    assert read_files(Path("out")) == expected
    assert not Path("out.partial").exists()


# Reads and writes that fail


def fail_calls(monkeypatch: MonkeyPatch, call: str, first: int, number: int) -> None:
    """Make reads (`preadv`) or writes (`pwritev`) fail from call `first` on."""
    real_call, calls_left = getattr(os, call), iter(range(first))

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(calls_left, None) is None:
            raise OSError(number, os.strerror(number))
        return real_call(fd, buffers, offset)

    monkeypatch.setattr(os, call, fail)


CALL_ERRORS = {
    ("preadv", errno.EIO): "cannot read or write ",
    ("pwritev", errno.EIO): "cannot read or write ",
    ("pwritev", errno.ENOSPC): " is full",
    ("pwritev", errno.EDQUOT): " is full",
}
FAILING_CALLS = [
    (name, *call, first) for name in COMMANDS for call in CALL_ERRORS for first in (0, 7)
]


def is_fast_failing_call(case: tuple[str, str, int, int]) -> bool:
    """Return whether the default suite has the case: each error late in save-init."""
    name, _, _, first = case
    return (name, first) == ("save-init", 7)


@pytest.mark.parametrize(
    ("name", "call", "number", "first"), slow_except(FAILING_CALLS, is_fast_failing_call)
)
def test_failing_reads_and_writes_are_reported(
    sources: FaultSources, capsys, monkeypatch, name: str, call: str, number: int, first: int
):
    expected = sources.expected(COMMANDS[name])
    with monkeypatch.context() as patched:
        fail_calls(patched, call, first, number)
        err = run_failing_command(capsys, name)
    assert CALL_ERRORS[call, number] in err
    assert os.strerror(number) in err
    check_resumes(name, expected)


@pytest.mark.parametrize("name", slow_except(COMMANDS, ["save-init"]))
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_short_reads_and_writes_are_completed(
    sources: FaultSources, monkeypatch, name: str, call: str
):
    expected = sources.expected(COMMANDS[name])
    real_call = getattr(os, call)
    draw = random.Random(1)

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        size = len(buffers[0])
        length = draw.choice([size, max(1, size // 3), min(size, 4096)])
        return real_call(fd, [buffers[0][:length]], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, short)
        check_resumes(name, expected)


@pytest.mark.parametrize("name", slow_except(COMMANDS, ["save-init"]))
def test_truncated_source_is_reported(sources: FaultSources, capsys, monkeypatch, name: str):
    expected = sources.expected(COMMANDS[name])
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda fd, buffers, offset: 0)
        assert re.search(
            r"error: \S+ is cut short\n  why: [\d,]+ bytes are missing at byte [\d,]+",
            run_failing_command(capsys, name),
        )
    check_resumes(name, expected)


@pytest.mark.parametrize("name", slow_except(COMMANDS, ["save-init"]))
@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_failing_sync_is_reported(sources: FaultSources, capsys, monkeypatch, name: str, call: str):
    expected = sources.expected(COMMANDS[name])

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        assert "Input/output error" in run_failing_command(capsys, name)
    check_resumes(name, expected)


# A disk that is full


def mount_disk(folder: Path, nbytes: int) -> bool:
    """Mount a small disk in memory, if the system allows it, and return whether it did."""
    folder.mkdir()
    return os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "prep-test", folder], capture_output=True, check=False
    ).returncode  # fmt: skip


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 1 MiB."""
    if shutil.which("mount") is None or not mount_disk(tmp_path / "disk", 1 << 20):
        pytest.skip("mounting is not allowed here")
    yield tmp_path / "disk"
    subprocess.run(["umount", tmp_path / "disk"], check=True)


@pytest.mark.parametrize("name", slow_except(COMMANDS, ["save-init"]))
def test_disk_that_fills_up_is_reported(
    sources: FaultSources, capsys, monkeypatch, disk: Path, name: str
):
    expected, real_run = sources.expected(COMMANDS[name]), Pipeline.run
    capsys.readouterr()

    def fill(*args, **options) -> ConversionResult:
        with (disk / "ballast").open("wb", buffering=0) as ballast:
            for size in (1 << 16, 1 << 12):
                try:
                    while ballast.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue
        return real_run(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Pipeline, "run", fill)
        assert main([*COMMANDS[name], "--out", str(disk / "out"), "-q"]) == 1
    err = capsys.readouterr().err
    assert (
        " is full\n  why: No space left on device\n hint: free some space, then run the same command again to resume"
        in err
    )
    (disk / "ballast").unlink()
    assert main([*COMMANDS[name], "--out", str(disk / "out"), "-q"]) == 0
    assert read_files(disk / "out") == expected


def test_small_disk_is_reported_before_any_write(capsys, disk: Path):
    make_checkpoint(Path("large"), hidden_size=128)
    assert main(["save-init", "./large", "--out", str(disk / "out"), "-q"]) == 1
    assert "not enough room for out" in capsys.readouterr().err
    assert not list(disk.iterdir())


# Files that vanish or change during a conversion


def at_first_sync(monkeypatch: MonkeyPatch, act: Callable[[], object]) -> None:
    """Call `act` right before the first bytes become durable."""
    real_sync, acts = Files.sync, iter([act])

    def sync(files: Files) -> None:
        for pending_act in acts:
            pending_act()
        real_sync(files)

    monkeypatch.setattr(Files, "sync", sync)
    monkeypatch.setattr(pipeline, "MOST_UNSYNCED_NBYTES", 10_000)


def find_data_file() -> Path:
    return next(
        path
        for path in sorted(Path("out.partial").rglob("*"))
        if path.is_file() and path.parent.name in "d"
    )


def replace_file(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))


GONE = {
    "the folder": lambda: shutil.rmtree("out.partial"),
    "the folder, under another name": lambda: Path("out.partial").rename("kept"),
    "the folder of the run": lambda: shutil.rmtree("out.partial/.prep"),
    "a data file": lambda: find_data_file().unlink(),
    "a data file, for another": lambda: replace_file(find_data_file()),
}


@pytest.mark.parametrize("gone", slow_except(GONE, ["the folder", "a data file"]))
@pytest.mark.parametrize("name", slow_except(["save-init", "reshard"], ["save-init"]))
def test_removed_output_is_reported(
    sources: FaultSources, capsys, monkeypatch, name: str, gone: str
):
    expected = sources.expected(COMMANDS[name])
    with monkeypatch.context() as patched:
        at_first_sync(patched, GONE[gone])
        run_failing_command(capsys, name)
    shutil.rmtree("kept", ignore_errors=True)
    if not Path("out.partial/.prep").exists():
        # Without `.prep`, the folder is not recognised as one of prep.
        shutil.rmtree("out.partial", ignore_errors=True)
    check_resumes(name, expected, "--restart")


def test_truncated_data_file_is_reported(sources: FaultSources, capsys, monkeypatch):
    expected, real_run = sources.expected(COMMANDS["save-init"]), Pipeline.run

    def cut(*args, **options) -> ConversionResult:
        outcome = real_run(*args, **options)
        os.truncate(find_data_file(), 100)
        return outcome

    with monkeypatch.context() as patched:
        patched.setattr(Pipeline, "run", cut)
        assert "was changed by" in run_failing_command(capsys, "save-init")
    check_resumes("save-init", expected)


def test_output_name_taken_meanwhile_is_kept(sources: FaultSources, capsys, monkeypatch):
    expected = sources.expected(COMMANDS["export"])
    with monkeypatch.context() as patched:
        at_first_sync(patched, lambda: Path("out").write_text("mine"))
        assert main([*COMMANDS["export"], "--out", "out", "-q"]) == 1
    assert "out exists" in capsys.readouterr().err
    assert Path("out").read_text() == "mine"
    Path("out").unlink()
    check_resumes("export", expected)


def rewrite_file(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def append_byte(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def change_header(path: Path) -> None:
    """Change the header, with the same size and time."""
    file_stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b'{"format":"pt"}', b'{"format":"tf"}', 1))
    os.utime(path, ns=(file_stat.st_atime_ns, file_stat.st_mtime_ns))


def shard() -> Path:
    return sorted(Path("model").glob("*.safetensors"))[0]


@pytest.mark.parametrize(
    "change", slow_except([rewrite_file, append_byte, Path.unlink], [rewrite_file, Path.unlink])
)
def test_source_change_while_reading_is_an_error(
    capsys, monkeypatch, change: Callable[[Path], object]
):
    with monkeypatch.context() as patched:
        at_first_sync(patched, lambda: change(shard()))
        err = run_failing_command(capsys, "pad-vocab")
    assert re.search(r"error: (cannot read or write )?\S*model-00001-of-0000\d.safetensors", err)


@pytest.mark.parametrize(
    "change", slow_except([rewrite_file, append_byte, change_header], [rewrite_file])
)
def test_source_change_between_runs_is_an_error(
    capsys, monkeypatch, change: Callable[[Path], object]
):
    run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=3)
    before = shard().read_bytes()
    time.sleep(0.01)
    change(shard())
    assert change is rewrite_file or shard().read_bytes() != before
    err = run_failing_command(capsys, "save-init")
    if change is append_byte:
        assert shard().name in err
        return
    assert "out.partial belongs to another run" in err
    assert "the source has changed since" in err
    assert "--restart" in err
    run_ok(*COMMANDS["save-init"], "--out", "whole")
    check_resumes("save-init", read_files(Path("whole")), "--restart")


# Notes that are torn


@pytest.mark.parametrize("name", slow_except(COMMANDS, ["save-init"]))
def test_torn_note_yields_the_same_output(sources: FaultSources, monkeypatch, name: str):
    expected = sources.expected(COMMANDS[name])
    run_until_killed(monkeypatch, COMMANDS[name], syncs=3)
    shutil.copytree("out.partial", "before")
    note = min(Path("before/.prep/done").iterdir())
    content = note.read_bytes()
    for length in (0, 1, *range(149, len(content), 149), len(content) - 1):
        shutil.rmtree("out.partial", ignore_errors=True)
        shutil.copytree("before", "out.partial")
        Path("out.partial/.prep/done", note.name).write_bytes(content[:length])
        check_resumes(name, expected)
        shutil.rmtree("out")


@pytest.mark.parametrize("torn", ["run.json", "source.json"])
@pytest.mark.parametrize("text", slow_except(["", "{", "[]", "{}"], ["{}"]))
def test_torn_run_files_require_restart(
    sources: FaultSources, capsys, monkeypatch, torn: str, text: str
):
    expected = sources.expected(COMMANDS["save-init"])
    run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=3)
    Path("out.partial/.prep", torn).write_text(text)
    if (torn, text) != ("source.json", "{}"):  # a remote source has no state
        assert "--restart" in run_failing_command(capsys, "save-init")
    check_resumes("save-init", expected, "--restart")


# Two on one output


def test_other_commands_on_a_partial_output_are_rejected(
    sources: FaultSources, capsys, monkeypatch
):
    expected = sources.expected(COMMANDS["save-init"])
    run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=3)
    before = read_files(Path("out.partial"))
    for name in ("pad-vocab", "reshard", "export"):
        err = run_failing_command(capsys, name)
        assert "out.partial belongs to another run" in err
        assert "started by `prep save-init ./model" in err
    changed = read_files(Path("out.partial"))
    assert {k: v for k, v in changed.items() if "lock" not in k} == {
        k: v for k, v in before.items() if "lock" not in k
    }
    check_resumes("save-init", expected)


# Lanes: several pipelines of one process write the bytes of one

CAST = ("save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "8", "--dtype", "bfloat16")
NUM_LANES = 3


@pytest.fixture
def lane_counts(sources: FaultSources, monkeypatch: MonkeyPatch) -> list[int]:
    """Give each run three lanes, and return the number of lanes of each run."""
    for command in (*COMMANDS.values(), CAST):
        sources.expected(command)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(NUM_LANES)))
    monkeypatch.setattr(lanes, "MIN_LANE_NBYTES", 1)
    counts: list[int] = []
    real = folder_converter.run_pipelines

    def run_pipelines(pipelines: Sequence[Pipeline]) -> None:
        counts.append(len(pipelines))
        real(pipelines)

    for module in (folder_converter, digest_checks):
        monkeypatch.setattr(module, "run_pipelines", run_pipelines)
    return counts


@pytest.fixture(params=slow_except(["disk", "memory"], ["memory"]))
def place(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> None:
    """Treat all files as files on a disk, or as files of a file system in memory."""
    monkeypatch.setattr(files, "is_in_memory", lambda fd: request.param == "memory")


@pytest.mark.parametrize(
    "command",
    [*slow_except(COMMANDS.values(), [COMMANDS["export"]]), CAST],
    ids=[*COMMANDS, "cast"],
)
@pytest.mark.usefixtures("place")
def test_lanes_write_the_bytes_of_one_pipeline(
    sources: FaultSources, lane_counts: list[int], command: Sequence[str]
):
    run_ok(*command, "--out", "out")
    assert lane_counts == [NUM_LANES]
    assert read_files(Path("out")) == sources.expected(command)


@pytest.mark.usefixtures("place")
def test_killed_lanes_are_resumed(
    sources: FaultSources, lane_counts: list[int], capsys: Capture, monkeypatch: MonkeyPatch
):
    command = COMMANDS["export"]
    partial = run_until_killed(monkeypatch, command, syncs=6)
    flip_written_bytes(partial)
    assert main([*command, "--out", "out", "--progress", "none"]) == 0
    assert "resuming out.partial" in capsys.readouterr().err
    assert read_files(Path("out")) == sources.expected(command)
    assert lane_counts == [NUM_LANES, NUM_LANES]


@pytest.mark.usefixtures("lane_counts")
def test_units_of_lanes_have_notes_of_their_parts(sources: FaultSources, monkeypatch: MonkeyPatch):
    """Three units are in progress. A kill loses the parts of each that have no note."""
    monkeypatch.setattr(work_units, "MIN_JOINED_NBYTES", 50_000)
    monkeypatch.setattr(folder_converter, "LARGE_UNIT_NBYTES", 50_000 * NUM_LANES)
    monkeypatch.setattr(folder_converter, "make_budget", lambda *_, **__: Budget(1 << 20, 4096, 4))
    partial = run_until_killed(monkeypatch, COMMANDS["export"], syncs=6, folder="part")
    run_ok(*COMMANDS["export"], "--out", "out")
    assert read_files(Path("out")) == sources.expected(COMMANDS["export"])
    assert not partial.exists()


def flip_written_bytes(partial: Path) -> None:
    """Flip a bit in the middle of each data file of a staging folder."""
    folder = next(each for each in (partial / "d", partial) if each.is_dir())
    for path in folder.iterdir():
        if path.is_file() and path.stat().st_size > 1:
            flip_bit(path, path.stat().st_size // 2)


@pytest.mark.parametrize("call", slow_except(["preadv", "pwritev"], ["pwritev"]))
@pytest.mark.usefixtures("place")
def test_error_of_one_lane_ends_the_others(
    sources: FaultSources,
    lane_counts: list[int],
    capsys: Capture,
    monkeypatch: MonkeyPatch,
    call: str,
):
    with monkeypatch.context() as patched:
        fail_calls(patched, call, 9, errno.EIO)
        assert "Input/output error" in run_failing_command(capsys, "export")
    run_ok(*COMMANDS["export"], "--out", "out")
    assert read_files(Path("out")) == sources.expected(COMMANDS["export"])
    assert lane_counts == [NUM_LANES, NUM_LANES]


class SlowCounter(NullProgress):
    """A Progress that loses counts if two threads advance it at the same time."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.task = ""
        self.threads: set[int] = set()

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        self.task = task
        self.counts[task] = done_bytes - total_bytes

    def advance(self, written_bytes: int) -> None:
        count = self.counts[self.task]
        time.sleep(0.001)
        self.counts[self.task] = count + written_bytes
        self.threads.add(threading.get_ident())


@pytest.mark.usefixtures("lane_counts")
def test_progress_counts_the_bytes_of_all_lanes():
    progress = SlowCounter()
    prep.export("init", "out", progress=progress)
    assert progress.counts["export"] == 0
    assert len(progress.threads) > 1


def test_lanes_verify_each_tensor(lane_counts: list[int], capsys: Capture):
    run_ok("pad-vocab", "model", "--multiple", "8", "--out", "padded")
    run_ok("verify", "padded")
    assert lane_counts == [NUM_LANES, NUM_LANES]
    path = next(Path("padded").glob("*.safetensors"))
    for name, start, stop in [*tensor_byte_ranges(path)][::9]:
        flip_bit(path, (start + stop) // 2)
        capsys.readouterr()
        assert main(["verify", "padded"]) == 1
        assert f"({name}) rows" in capsys.readouterr().err
        flip_bit(path, (start + stop) // 2)


def test_compressed_source_has_one_lane(lane_counts: list[int]):
    """The cache of its decoded chunks needs all memory. The read stage is the calling thread, which signals end."""
    run_ok("save-init", "./model", "--pad-vocab", "8", "--compress", "zstd", "--out", "packed")
    run_ok("verify", "packed")
    run_ok("reshard", "packed", "--mesh", "1,1,2", "--out", "out")
    assert lane_counts == [1, 1, 1]
