"""Compression in the units of a folder: equal bytes after kills, faults and damage, and no second copy on the disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.engine.budget import MAX_BUFFERS
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import Files
from prepcli.engine.pipeline import PipelineUnit
from prepcli.execution import folder_converter, packed_folder_converter
from prepcli.execution.folder_converter import FolderConverter
from prepcli.execution.folder_output import FolderOutput
from prepcli.execution.output import UnitNote
from prepcli.execution.packed_folder_converter import PackedFolderConverter, RawFiles
from prepcli.planning.slabs import PAGE
from tests.helpers.faults import FaultSources, Killed, kill, make_sources, run_until_killed
from tests.helpers.killing import read_files
from tests.helpers.slow_cases import slow_except

COMMAND = ["reshard", "init", "--mesh", "1,2,2", "--compress", "zstd"]
FILES = ["save-init", "./model", "--mesh", "1,2,2", "--storage", "zarr3-files", "--pad-vocab", "8"]
PACKED_FILES = [*FILES, "--compress", "zstd"]
COMMANDS = [COMMAND, PACKED_FILES]


@pytest.fixture(scope="module")
def shared_sources(tmp_path_factory: pytest.TempPathFactory) -> FaultSources:
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def sources(
    shared_sources: FaultSources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FaultSources:
    shared_sources.copy_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    return shared_sources


def run(command: list[str], *more: str) -> int:
    return main([*command, "--out", "out", "-q", *more])


def output_files(folder: Path) -> list[Path]:
    """Return the compressed data files of an unfinished output."""
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and ".prep" not in path.parts
    )


def test_each_chunk_file_is_one_frame(sources: FaultSources):
    raw, packed = sources.expected(FILES), sources.expected(PACKED_FILES)
    names = [name for name in packed if "/c/" in name]
    assert len(names) > 30
    for name in names:
        assert zstandard.frame_content_size(packed[name]) == len(raw[name])
        assert zstandard.ZstdDecompressor().decompress(packed[name]) == raw[name]


@pytest.mark.parametrize("command", slow_except(COMMANDS, COMMANDS[1:]))
@pytest.mark.parametrize("syncs", slow_except([2, 3, 6, 10], [3]))
def test_killed_run_keeps_its_noted_units(
    sources: FaultSources,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    syncs: int,
):
    expected = sources.expected(command)
    partial = run_until_killed(monkeypatch, command, syncs=syncs)
    assert len(list((partial / ".prep/raw").iterdir())) <= 3
    capsys.readouterr()
    assert run(command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["resumed"] > 0
    assert read_files(Path("out")) == expected


def truncate_file(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("command", slow_except(COMMANDS, COMMANDS[1:]))
@pytest.mark.parametrize("damage", [truncate_file, flip_byte, Path.unlink])
def test_damaged_units_are_written_again(
    sources: FaultSources,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    damage: Callable[[Path], object],
):
    expected = sources.expected(command)
    partial = run_until_killed(monkeypatch, command, syncs=5)
    for path in output_files(partial)[::2]:
        damage(path)
    assert run(command) == 0
    assert read_files(Path("out")) == expected


@pytest.mark.parametrize("damage", [None, flip_byte, truncate_file, Path.unlink])
def test_part_of_a_large_unit_is_continued(
    sources: FaultSources,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object] | None,
):
    expected = sources.expected(COMMAND)
    monkeypatch.setattr(folder_converter, "LARGE_UNIT_NBYTES", 0)
    monkeypatch.setattr("prepcli.engine.budget.MAX_SLAB_NBYTES", 4096)
    partial = run_until_killed(monkeypatch, COMMAND, syncs=3, folder="part")
    if damage:
        for path in (partial / ".prep/raw").iterdir():
            damage(path)
    assert run(COMMAND) == 0
    assert read_files(Path("out")) == expected


def test_part_is_deleted_before_its_raw_file(
    sources: FaultSources, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(folder_converter, "LARGE_UNIT_NBYTES", 0)
    monkeypatch.setattr("prepcli.engine.budget.MAX_SLAB_NBYTES", 4096)
    monkeypatch.setattr("prepcli.engine.pipeline.MOST_UNSYNCED_NBYTES", 10_000)
    real_remove = RawFiles.remove_file
    removed: list[int] = []

    def remove_file(self: RawFiles, file: int) -> None:
        assert not Path(f"out.partial/.prep/part/{file}").exists()
        removed.append(file)
        real_remove(self, file)

    monkeypatch.setattr(RawFiles, "remove_file", remove_file)
    assert run(COMMAND) == 0
    assert len(removed) > 3


def test_raw_files_are_few_at_any_time(sources: FaultSources, monkeypatch: pytest.MonkeyPatch):
    expected = sources.expected(COMMAND)
    monkeypatch.setattr("prepcli.engine.pipeline.MOST_UNSYNCED_NBYTES", 10_000)
    real_open = RawFiles.open_file
    counts: list[int] = []

    def open_file(self: RawFiles, file: int, **options: bool) -> None:
        real_open(self, file, **options)
        counts.append(len(list(Path("out.partial/.prep/raw").iterdir())))

    monkeypatch.setattr(RawFiles, "open_file", open_file)
    assert run(COMMAND) == 0
    assert len(counts) > 6
    assert max(counts) <= 4
    assert read_files(Path("out")) == expected


@pytest.mark.parametrize("call", slow_except([0, 2, 5], [2]))
def test_full_disk_ends_and_resumes(
    sources: FaultSources,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    call: int,
):
    expected = sources.expected(COMMAND)
    real_allocate, calls = packed_folder_converter.allocate, iter(range(call))

    def allocate(fd: int, nbytes: int) -> None:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_allocate(fd, nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(packed_folder_converter, "allocate", allocate)
        assert run(COMMAND) == 1
    assert "the disk that holds out is full" in capsys.readouterr().err
    assert run(COMMAND) == 0
    assert read_files(Path("out")) == expected


@pytest.mark.parametrize("command", slow_except([COMMAND, FILES], [COMMAND]))
def test_claims_are_few_while_a_sync_is_slow(
    sources: FaultSources, monkeypatch: pytest.MonkeyPatch, command: list[str]
):
    expected = sources.expected(command)
    monkeypatch.setattr("prepcli.planning.work_units.MIN_JOINED_NBYTES", 1)
    monkeypatch.setattr("prepcli.engine.pipeline.MAX_UNSYNCED_UNITS", 2)
    real_sync, real_claim, counts = Files.sync, FolderConverter.claim, list[int]()

    def sync(self: Files) -> None:
        time.sleep(0.1)
        real_sync(self)

    def claim(self: FolderConverter, number: int) -> bool:
        counts.append(len(self._claims))
        return real_claim(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "sync", sync)
        patched.setattr(FolderConverter, "claim", claim)
        assert run(command) == 0
    # Two in each of two points, and those of the slabs in the buffers
    assert max(counts) <= 2 * 2 + MAX_BUFFERS + 2 < len(counts)
    if command == FILES:
        assert read_files(Path("out")) == expected


@pytest.mark.parametrize("constant", ["", "SYNC_INTERVAL_S", "MAX_SYNCED_FILES"])
def test_files_of_a_failed_sync_have_no_note(
    sources: FaultSources,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    constant: str,
):
    """A sync may fail at the end of a point, after an interval, or while a unit is compressed."""
    expected = sources.expected(COMMAND)
    real_sync, failed = packed_folder_converter.sync_paths, set[Path]()
    noted: set[str] = set()
    real_note = PackedFolderConverter.note_unit

    def sync_paths(paths: list[Path]) -> None:
        # The system reports a failed write only once.
        if paths and len(noted) > 1 and not failed:
            failed.update(paths)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(paths[0]))
        real_sync(paths)

    def note_unit(self: PackedFolderConverter, number: int, note: UnitNote) -> None:
        for file, lengths in note.lengths.items():
            noted.update(path.name for path, _ in self._stored_files(file, lengths))
        real_note(self, number, note)

    with monkeypatch.context() as patched:
        patched.setattr("prepcli.engine.pipeline.MOST_UNSYNCED_NBYTES", 10_000)
        patched.setattr(packed_folder_converter, "sync_paths", sync_paths)
        patched.setattr(PackedFolderConverter, "note_unit", note_unit)
        if constant:
            patched.setattr(packed_folder_converter, constant, 0.0 if "INTERVAL" in constant else 1)
        assert run(COMMAND) == 1
    assert "cannot read or write" in capsys.readouterr().err
    assert failed
    assert not noted & {path.name for path in failed}
    assert run(COMMAND) == 0
    assert read_files(Path("out")) == expected


def test_interrupted_run_does_not_wait_for_a_slow_unit(
    sources: FaultSources, monkeypatch: pytest.MonkeyPatch
):
    expected = sources.expected(COMMAND)
    monkeypatch.setattr(packed_folder_converter, "STOP_S", 0.0)
    real_read, calls = RawFiles.read_at, []

    def read_at(self: RawFiles, file: int, offset: int, into) -> None:
        calls.append(file)
        real_read(self, file, offset, into)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RawFiles, "read_at", read_at)
        patched.setattr(RawFiles, "write", stop)
        assert run(COMMAND) == 130
    assert not calls
    assert run(COMMAND) == 0
    assert read_files(Path("out")) == expected


def test_source_is_read_once_in_little_memory(
    sources: FaultSources, capsys: pytest.CaptureFixture[str]
):
    assert run(COMMAND, "--memory", "32MiB", "--json") == 0
    nbytes = json.loads(capsys.readouterr().out)["bytes"]
    assert nbytes["read"] == nbytes["written"] > 0


def test_disk_needs_room_for_the_output_and_a_raw_unit(
    sources: FaultSources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sizes: list[int] = []
    real_init = RawFiles.__init__

    def init(self: RawFiles, paths: list[Path], raw_sizes: list[int]) -> None:
        sizes[:] = raw_sizes
        real_init(self, paths, raw_sizes)

    monkeypatch.setattr(RawFiles, "__init__", init)
    monkeypatch.setattr(packed_folder_converter, "MOST_UNSYNCED_NBYTES", 0)
    assert run(COMMAND) == 0
    shutil.rmtree("out")
    needed = sum(sizes) + max(sizes)
    assert needed < 1.5 * sum(sizes)
    for free, code in ((needed - 1, 1), (needed, 0)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        assert run(COMMAND) == code
    assert "not enough room for out" in capsys.readouterr().err


def test_output_changed_before_the_publication_is_an_error(
    sources: FaultSources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    expected = sources.expected(COMMAND)

    def truncate(self: PackedFolderConverter, digests: Mapping[int, StreamDigest]) -> None:
        truncate_file(output_files(Path("out.partial"))[0])
        real_check(self, digests)

    real_check = PackedFolderConverter.check_data
    with monkeypatch.context() as patched:
        patched.setattr(PackedFolderConverter, "check_data", truncate)
        assert run(COMMAND) == 1
    assert "was changed by another program" in capsys.readouterr().err
    assert run(COMMAND) == 0
    assert read_files(Path("out")) == expected


def test_note_without_the_lengths_of_its_unit_is_ignored(
    sources: FaultSources, monkeypatch: pytest.MonkeyPatch
):
    expected = sources.expected(COMMAND)
    with monkeypatch.context() as patched:
        patched.setattr(FolderOutput, "publish", kill)
        with pytest.raises(Killed):
            run(COMMAND)
    done = Path("out.partial/.prep/done")
    for number, change in enumerate(({}, {10**6: [1]}, {1: [1]})):
        note = UnitNote.decode((done / str(number)).read_bytes(), plan_digest())
        assert note is not None
        (done / str(number)).write_bytes(replace(note, lengths=change).encode(plan_digest()))
    assert run(COMMAND) == 0
    assert read_files(Path("out")) == expected


def plan_digest() -> str:
    """Return the digest of the plan of the unfinished output."""
    return json.loads(Path("out.partial/prep-manifest.json").read_text())["plan"]


def test_part_of_another_source_is_written_again(
    sources: FaultSources, monkeypatch: pytest.MonkeyPatch
):
    expected = sources.expected(COMMAND)
    monkeypatch.setattr(folder_converter, "LARGE_UNIT_NBYTES", 0)
    monkeypatch.setattr("prepcli.engine.budget.MAX_SLAB_NBYTES", 4096)
    run_until_killed(monkeypatch, COMMAND, syncs=3, folder="part")
    real_prepare, parts = FolderConverter.prepare_unit, list[int]()

    def prepare_unit(self: FolderConverter, number: int) -> PipelineUnit:
        part = self.read_note("part", number)
        # As a process of this session leaves it that has found its source changed, and has deleted its notes
        if part and not parts:
            note = replace(part, source="other")
            self.output.write(f"part/{number}", note.encode(self.request.plan_digest))
            raw = self.files[number]
            raw.write_bytes(bytes(raw.stat().st_size))
            parts.append(number)
        return real_prepare(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(FolderConverter, "prepare_unit", prepare_unit)
        assert run(COMMAND) == 0
    assert parts
    assert read_files(Path("out")) == expected


def test_raw_file_of_a_partly_written_unit_must_exist(tmp_path: Path):
    files = RawFiles([tmp_path / "raw/0"], [PAGE])
    for content in (None, b"cut"):
        if content is not None:
            (tmp_path / "raw").mkdir()
            (tmp_path / "raw/0").write_bytes(content)
        with pytest.raises(PrepError, match="changed by another program"):
            files.open_file(0, must_exist=True)
    files.close()
    files.open_file(0)
    files.close_file(0)
    files.open_file(0, must_exist=True)
    files.close()


def test_full_disk_keeps_the_units_before(
    sources: FaultSources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    expected = sources.expected(COMMAND)
    real_write = PackedFolderConverter._write_file  # pyright: ignore[reportPrivateUsage]
    seen: list[int] = []

    def write(self: PackedFolderConverter, file: int, *args: Any) -> list[int]:
        seen.append(file)
        if len(seen) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(self, file, *args)

    monkeypatch.setattr(PackedFolderConverter, "_write_file", write)
    assert run(COMMAND) == 1
    assert "full" in capsys.readouterr().err
    assert len(list(Path("out.partial/.prep/done").iterdir())) == 2
    monkeypatch.setattr(PackedFolderConverter, "_write_file", real_write)
    assert run(COMMAND) == 0
    assert read_files(Path("out")) == expected
