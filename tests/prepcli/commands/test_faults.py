"""Disks that are full or broken, files that change or go while they are read and written: each ends in one message, and
the same command again makes the same output."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prepcli.cli.main import main
from prepcli.engine import pipeline
from prepcli.engine.files import Files
from tests.helpers.faults import COMMANDS, expected_output, make_sources, run_until_killed
from tests.helpers.killing import read_files
from tests.helpers.tiny_checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sources(tmp_path, monkeypatch)


def failed(capsys: pytest.CaptureFixture[str], name: str, *more: str, code: int = 1) -> str:
    """What is said by a command that fails; no output has its name then."""
    capsys.readouterr()
    assert main([*COMMANDS[name], "--out", "out", "-q", *more]) == code
    assert not Path("out").exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert "a bug in prep" not in err
    assert err.count("error: ") == 1
    return err


def check_goes_on(name: str, expected: dict[str, bytes], *more: str) -> None:
    assert main([*COMMANDS[name], "--out", "out", "-q", *more]) == 0
    assert read_files(Path("out")) == expected
    assert not Path("out.partial").exists()


# Reads and writes that fail


def failing(monkeypatch: pytest.MonkeyPatch, call: str, at: int, number: int) -> None:
    """From call `at` on, reads (`preadv`) or writes (`pwritev`) of tensors fail with an error of the system."""
    real, counted = getattr(os, call), iter(range(at))

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(counted, None) is None:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("call", "number", "what"),
    [
        ("preadv", errno.EIO, "cannot read or write "),
        ("pwritev", errno.EIO, "cannot read or write "),
        ("pwritev", errno.ENOSPC, " is full"),
        ("pwritev", errno.EDQUOT, " is full"),
    ],
)
@pytest.mark.parametrize("at", [0, 7])
def test_calls_that_fail(capsys, monkeypatch, name: str, call: str, number: int, what: str, at: int):
    expected = expected_output(name)
    with monkeypatch.context() as patched:
        failing(patched, call, at, number)
        err = failed(capsys, name)
    assert what in err
    assert os.strerror(number) in err
    check_goes_on(name, expected)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_calls_that_do_less_than_they_were_asked_to(monkeypatch, name: str, call: str):
    expected, real, draw = expected_output(name), getattr(os, call), random.Random(1)

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        size = len(buffers[0])
        return real(fd, [buffers[0][: draw.choice([size, max(1, size // 3), min(size, 4096)])]], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, short)
        check_goes_on(name, expected)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_source_that_ends_too_early(capsys, monkeypatch, name: str):
    expected = expected_output(name)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda fd, buffers, offset: 0)
        assert re.search(
            r"error: \S+ is cut short\n  why: [\d,]+ bytes are missing at byte [\d,]+", failed(capsys, name)
        )
    check_goes_on(name, expected)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_disk_that_does_not_keep_what_it_took(capsys, monkeypatch, name: str, call: str):
    expected = expected_output(name)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        assert "Input/output error" in failed(capsys, name)
    check_goes_on(name, expected)


# A disk that is full


def mounted(folder: Path, nbytes: int) -> bool:
    """Mount a small disk in memory, if the system lets us."""
    folder.mkdir()
    return os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "prep-test", folder], capture_output=True, check=False
    ).returncode  # fmt: skip


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    if shutil.which("mount") is None or not mounted(tmp_path / "disk", 1 << 20):
        pytest.skip("mounting is not allowed here")
    yield tmp_path / "disk"
    subprocess.run(["umount", tmp_path / "disk"], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_fills_up_meanwhile(capsys, monkeypatch, disk: Path, name: str):
    expected, real = expected_output(name), pipeline.run
    capsys.readouterr()

    def fill(*args, **more) -> pipeline.PipelineResult:
        with (disk / "ballast").open("wb", buffering=0) as ballast:
            for size in (1 << 16, 1 << 12):
                try:
                    while ballast.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue
        return real(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "run", fill)
        assert main([*COMMANDS[name], "--out", str(disk / "out"), "-q"]) == 1
    err = capsys.readouterr().err
    assert " is full\n  why: No space left on device\n hint: free some room and run the same command again" in err
    (disk / "ballast").unlink()
    assert main([*COMMANDS[name], "--out", str(disk / "out"), "-q"]) == 0
    assert read_files(disk / "out") == expected


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(capsys, disk: Path):
    make_checkpoint(Path("large"), hidden_size=128)
    assert main(["save-init", "./large", "--out", str(disk / "out"), "-q"]) == 1
    assert "not enough room for out" in capsys.readouterr().err
    assert not list(disk.iterdir())


def test_files_that_may_not_be_so_large(tmp_path: Path):
    words = [*COMMANDS["save-init"], "--out", "out", "-q"]
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, -1))"
    code = f"{limit}; from prepcli.cli.main import main; sys.exit(main({words}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert re.search(r"error: cannot read or write out\.partial/d/\w+\n  why: File too large", run.stderr)
    check_goes_on("save-init", expected_output("save-init"))


# Files that go or change meanwhile


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Once the first bytes are about to become durable, something happens."""
    real, acts = Files.sync, iter([act])

    def sync(files: Files) -> None:
        for each in acts:
            each()
        real(files)

    monkeypatch.setattr(Files, "sync", sync)
    monkeypatch.setattr(pipeline, "MOST_UNSYNCED_NBYTES", 10_000)


def data_file() -> Path:
    return next(path for path in sorted(Path("out.partial").rglob("*")) if path.is_file() and path.parent.name in "d")


def replaced(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))


GONE = {
    "the folder": lambda: shutil.rmtree("out.partial"),
    "the folder, under another name": lambda: Path("out.partial").rename("kept"),
    "the folder of the run": lambda: shutil.rmtree("out.partial/.prep"),
    "a data file": lambda: data_file().unlink(),
    "a data file, for another": lambda: replaced(data_file()),
}


@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("name", ["save-init", "reshard"])
def test_an_output_that_is_removed_while_it_is_written(capsys, monkeypatch, name: str, gone: str):
    expected = expected_output(name)
    with monkeypatch.context() as patched:
        meanwhile(patched, GONE[gone])
        failed(capsys, name)
    shutil.rmtree("kept", ignore_errors=True)
    if not Path("out.partial/.prep").exists():
        shutil.rmtree("out.partial", ignore_errors=True)  # which is not known for ours any more
    check_goes_on(name, expected, "--restart")


def test_a_data_file_that_is_cut_before_the_end(capsys, monkeypatch):
    expected, real = expected_output("save-init"), pipeline.run

    def cut(*args, **more) -> pipeline.PipelineResult:
        outcome = real(*args, **more)
        os.truncate(data_file(), 100)
        return outcome

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "run", cut)
        assert "was changed by" in failed(capsys, "save-init")
    check_goes_on("save-init", expected)


def test_the_name_is_taken_meanwhile(capsys, monkeypatch):
    expected = expected_output("export")
    with monkeypatch.context() as patched:
        meanwhile(patched, lambda: Path("out").write_text("mine"))
        assert main([*COMMANDS["export"], "--out", "out", "-q"]) == 1
    assert "out exists" in capsys.readouterr().err
    assert Path("out").read_text() == "mine"
    Path("out").unlink()
    check_goes_on("export", expected)


def touched(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def another_header(path: Path) -> None:
    """Of the same size and time."""
    found = path.stat()
    path.write_bytes(path.read_bytes().replace(b'{"format":"pt"}', b'{"format":"tf"}', 1))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def shard() -> Path:
    return sorted(Path("model").glob("*.safetensors"))[0]


@pytest.mark.parametrize("change", [touched, longer, Path.unlink])
def test_a_source_that_changes_while_it_is_read(capsys, monkeypatch, change: Callable[[Path], object]):
    with monkeypatch.context() as patched:
        meanwhile(patched, lambda: change(shard()))
        err = failed(capsys, "pad-vocab")
    assert re.search(r"error: (cannot read or write )?\S*model-00001-of-0000\d.safetensors", err)


@pytest.mark.parametrize("change", [touched, longer, another_header])
def test_a_source_that_changes_between_two_runs(capsys, monkeypatch, change: Callable[[Path], object]):
    run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=3)
    before = shard().read_bytes()
    time.sleep(0.01)
    change(shard())
    assert change is touched or shard().read_bytes() != before
    err = failed(capsys, "save-init")
    if change is longer:
        assert shard().name in err
        return
    assert "out.partial belongs to another run" in err
    assert "the source has changed since" in err
    assert "--restart" in err
    check_goes_on("save-init", expected_output("save-init"), "--restart")


# Journals that are torn


@pytest.mark.parametrize("name", COMMANDS)
def test_whatever_is_left_of_a_journal_the_output_is_the_same(monkeypatch, name: str):
    expected = expected_output(name)
    run_until_killed(monkeypatch, COMMANDS[name], syncs=3)
    shutil.copytree("out.partial", "before")
    journal = Path("before/.prep/journal.0").read_bytes()
    ends = [at for at, byte in enumerate(journal) if byte == 10]
    lengths = {
        0,
        1,
        len(journal) - 1,
        *range(0, len(journal), 149),
        *(end + step for end in ends for step in (0, 1, 2)),
    }
    for length in sorted(lengths):
        shutil.rmtree("out.partial", ignore_errors=True)
        shutil.copytree("before", "out.partial")
        Path("out.partial/.prep/journal.0").write_bytes(journal[:length])
        check_goes_on(name, expected)
        shutil.rmtree("out")


@pytest.mark.parametrize("torn", ["run.json", "division.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_notes_of_the_run_that_are_torn(capsys, monkeypatch, torn: str, text: str):
    expected = expected_output("save-init")
    run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=3)
    Path("out.partial/.prep", torn).write_text(text)
    if (torn, text) != ("division.json", "{}"):  # which says nothing and is made anew
        assert "--restart" in failed(capsys, "save-init")
    check_goes_on("save-init", expected, "--restart")


# Two on one output


def test_two_commands_on_one_output(capsys, monkeypatch):
    expected = expected_output("save-init")
    run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=3)
    before = read_files(Path("out.partial"))
    for name in ("pad-vocab", "reshard", "export"):
        err = failed(capsys, name)
        assert "out.partial belongs to another run" in err
        assert "started by `prep save-init ./model" in err
    changed = read_files(Path("out.partial"))
    assert {k: v for k, v in changed.items() if "lock" not in k} == {k: v for k, v in before.items() if "lock" not in k}
    check_goes_on("save-init", expected)
