"""Resumed conversions verify all bytes of the earlier run, and remove what a kill left."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.engine import pipeline
from prepcli.engine.budget import Budget
from prepcli.engine.conversion_result import ConversionResult
from prepcli.engine.files import Files
from prepcli.engine.pipeline import Pipeline
from prepcli.execution import converter, folder_converter
from prepcli.execution.folder_output import FolderOutput
from prepcli.execution.output import decode_record, encode_record
from prepcli.planning import work_units
from tests.helpers.damage import flip_bit, largest_file, tensor_byte_ranges
from tests.helpers.faults import COMMANDS as PLAIN
from tests.helpers.faults import (
    FaultSources,
    Killed,
    change_and_restore_time,
    kill,
    make_other_values,
    replace_by_copy,
    run_until_killed,
)
from tests.helpers.fork_server import run_python
from tests.helpers.killing import read_files
from tests.helpers.run_cli import MonkeyPatch, run_ok
from tests.helpers.slow_cases import slow_except

pytestmark = pytest.mark.usefixtures("sources")
COMMANDS = {
    **PLAIN,
    "cast": [*PLAIN["save-init"], "--init", "mean", "--dtype", "bfloat16"],
    "compress": ["reshard", "init", "--mesh", "1,2,2", "--compress", "zstd"],
}


def run(name: str, *more: str) -> int:
    return main([*COMMANDS[name], "--out", "out", "--progress", "none", *more])


def data_files(partial: Path) -> list[Path]:
    folder = next(f for f in (partial / "d", partial) if f.is_dir())
    return sorted(path for path in folder.iterdir() if path.is_file())


def nonzero_positions(partial: Path) -> Iterator[tuple[Path, int]]:
    """Yield the position of every nonzero byte in the data files of a staging folder."""
    for path in data_files(partial):
        yield from ((path, position) for position, byte in enumerate(path.read_bytes()) if byte)


def flip_all_bytes(partial: Path) -> None:
    """Damage every written byte."""
    for path in data_files(partial):
        path.write_bytes(bytes(byte ^ 1 if byte else 0 for byte in path.read_bytes()))


@pytest.mark.parametrize("name", slow_except(COMMANDS, ("pad-vocab",)))
def test_resume_rewrites_flipped_bytes(sources: FaultSources, capsys, monkeypatch, name: str):
    expected = sources.expected(COMMANDS[name])
    partial = run_until_killed(monkeypatch, COMMANDS[name], syncs=5)
    shutil.copytree(partial, "before")
    draw = random.Random(7)
    for path, position in draw.sample(list(nonzero_positions(partial)), 3):
        flip_bit(path, position)
        capsys.readouterr()
        assert run(name) == 0
        assert read_files(Path("out")) == expected
        shutil.rmtree("out")
        shutil.copytree("before", partial)
    flip_all_bytes(partial)
    assert run(name) == 0
    assert "in out.partial are damaged: writing them again" in capsys.readouterr().err
    assert read_files(Path("out")) == expected


@pytest.mark.parametrize(
    "file", slow_except(["done/0", "session", "run.json", "source.json", "lock"], ["lock"])
)
def test_resume_never_trusts_a_damaged_run_file(
    sources: FaultSources, capsys, monkeypatch, file: str
):
    name = "save-init"
    expected = sources.expected(COMMANDS[name])
    partial = run_until_killed(monkeypatch, COMMANDS[name], syncs=5)
    shutil.copytree(partial, "before")
    note, draw = partial / ".prep" / file, random.Random(3)
    for position in draw.sample(range(note.stat().st_size), 3):
        flip_bit(note, position)
        capsys.readouterr()
        if run(name):
            assert "--restart" in capsys.readouterr().err
            assert run(name, "--restart") == 0
        assert read_files(Path("out")) == expected
        shutil.rmtree("out")
        shutil.copytree("before", partial)


def test_resume_clears_gaps_between_tensors(sources: FaultSources, monkeypatch):
    expected = sources.expected(COMMANDS["save-init"])
    partial = run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=5)
    for path in (partial / "d").iterdir():
        size = path.stat().st_size
        path.write_bytes(b"\xff" * size)
    assert run("save-init") == 0
    assert read_files(Path("out")) == expected


def test_resume_writes_only_the_damaged_tensors(sources: FaultSources, capsys, monkeypatch):
    total = sum(map(len, sources.expected(COMMANDS["pad-vocab"]).values()))
    with monkeypatch.context() as patched:
        patched.setattr(folder_converter, "write_last_files", kill)
        with pytest.raises(Killed):
            run("pad-vocab", "-q")
    path = max(Path("out.partial").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip_bit(path, path.stat().st_size - 9)
    capsys.readouterr()
    assert run("pad-vocab", "--json") == 0
    assert 0 < json.loads(capsys.readouterr().out)["bytes"]["written"] < total // 4


@pytest.mark.parametrize("damage", [None, flip_all_bytes], ids=["intact", "damaged"])
def test_part_of_a_large_unit_is_continued(
    sources: FaultSources, capsys, monkeypatch, damage: Callable[[Path], None] | None
):
    """The note of a part names the complete tensors of a unit, and the first bytes of the next one."""
    expected = sources.expected(COMMANDS["pad-vocab"])
    monkeypatch.setattr(work_units, "MIN_JOINED_NBYTES", 1 << 30)
    monkeypatch.setattr(folder_converter, "LARGE_UNIT_NBYTES", 1)
    # A tensor passes in several slabs.
    monkeypatch.setattr(folder_converter, "make_budget", lambda *_, **__: Budget(1 << 20, 4096, 4))
    partial = run_until_killed(monkeypatch, COMMANDS["pad-vocab"], syncs=5, folder="part")
    assert not list((partial / ".prep/done").iterdir())
    (note,) = (partial / ".prep/part").iterdir()
    assert json.loads(note.read_bytes())["prefix"]
    if damage:
        damage(partial)
    capsys.readouterr()
    assert run("pad-vocab", "--json") == 0
    out, err = capsys.readouterr()
    nbytes = json.loads(out)["bytes"]
    assert ("are damaged: writing them again" in err) == bool(damage)
    # Tensors of zeros are not damaged.
    assert (nbytes["resumed"] > nbytes["written"] // 10) == (damage is None)
    assert "resuming out.partial" in err or damage
    assert read_files(Path("out")) == expected


@pytest.mark.parametrize(("name", "num_syncs"), [("export", 0), ("cast", 1)])
def test_part_of_a_wrong_read_is_written_again(
    sources: FaultSources, capsys, monkeypatch, name: str, num_syncs: int
):
    """The first bytes of a tensor are read wrongly once, and are durable when the run ends.

    The source of `export` has digests, so that the run fails at the end of the tensor. The others are killed before.
    """
    expected = sources.expected(COMMANDS[name])
    monkeypatch.setattr(work_units, "MIN_JOINED_NBYTES", 1 << 30)
    monkeypatch.setattr(folder_converter, "LARGE_UNIT_NBYTES", 1)
    monkeypatch.setattr(folder_converter, "make_budget", lambda *_, **__: Budget(1 << 20, 4096, 4))
    read_slab = Pipeline._read_slab  # pyright: ignore[reportPrivateUsage]

    def read_wrongly(pipeline: Pipeline, task: Any) -> None:
        read_slab(pipeline, task)
        stream = pipeline.streams[task.slab.stream_number]
        if task.slab.start == stream.byte_range[0] and stream.nbytes > 16_000 and stream.reads:
            task.data[0] ^= 1

    with monkeypatch.context() as patched:
        patched.setattr(Pipeline, "_read_slab", read_wrongly)
        if num_syncs:
            run_until_killed(patched, COMMANDS[name], syncs=num_syncs, folder="part")
        else:
            patched.setattr(pipeline, "MOST_UNSYNCED_NBYTES", 10_000)
            assert run(name) == 1
            assert "is damaged" in capsys.readouterr().err
    (note,) = Path("out.partial/.prep/part").iterdir()
    assert json.loads(note.read_bytes())["prefix"]
    # Slabs of another size end at other bytes than the part.
    monkeypatch.setattr(folder_converter, "make_budget", lambda *_, **__: Budget(1 << 20, 12288, 4))
    assert run(name) == 0
    assert read_files(Path("out")) == expected


def shard() -> Path:
    return sorted(Path("model").glob("*.safetensors"))[0]


def at_first_sync(monkeypatch: MonkeyPatch, act: Callable[[], object]) -> None:
    """Call `act` right before the first bytes become durable."""
    real_sync, acts = Files.sync, iter([act])

    def sync(files: Files) -> None:
        for pending_act in acts:
            pending_act()
        real_sync(files)

    monkeypatch.setattr(Files, "sync", sync)
    monkeypatch.setattr(pipeline, "MOST_UNSYNCED_NBYTES", 10_000)


def test_source_change_with_restored_time_is_an_error(capsys, monkeypatch):
    with monkeypatch.context() as patched:
        # The changed bytes have been read before the first sync.
        at_first_sync(patched, lambda: change_and_restore_time(shard()))
        assert run("pad-vocab") == 1
    assert "changed while it was read" in capsys.readouterr().err
    assert not Path("out").exists()


def test_touched_source_is_used(sources: FaultSources, capsys, monkeypatch):
    expected = sources.expected(COMMANDS["pad-vocab"])
    with monkeypatch.context() as patched:
        at_first_sync(patched, lambda: replace_by_copy(shard()))
        assert run("pad-vocab") == 0
    assert "may have changed while it was read: comparing" in capsys.readouterr().err
    assert read_files(Path("out")) == expected


def stop(*args: object, **more: object) -> None:
    """Send a signal to stop this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def fail(*args: object, **more: object) -> None:
    """Raise the error of a file that cannot be read."""
    raise PrepError("the disk does not answer")


@pytest.mark.parametrize(("end", "code"), [(stop, 75), (fail, 1)])
def test_durable_work_outlives_the_end_of_a_comparison(
    sources: FaultSources, capsys, monkeypatch, end: Callable[..., None], code: int
):
    """Only a source that has changed makes durable work worthless."""
    expected = sources.expected(COMMANDS["pad-vocab"])
    with monkeypatch.context() as patched:
        at_first_sync(patched, lambda: replace_by_copy(shard()))
        patched.setattr(converter, "find_outdated", end)
        assert run("pad-vocab") == code
    assert list(Path("out.partial/.prep/done").iterdir())
    capsys.readouterr()
    assert run("pad-vocab", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["written"] == 0
    assert read_files(Path("out")) == expected


def test_resume_compares_a_source_with_restored_time(capsys, monkeypatch):
    run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=5)
    change_and_restore_time(shard())
    capsys.readouterr()
    assert run("save-init") == 0
    assert "may have changed since out.partial was started: comparing" in capsys.readouterr().err
    assert main(["verify", "out", "./model", "-q"]) == 0


def test_checksums_are_of_the_source_that_was_read_last(capsys, monkeypatch):
    """A block has the rows of a vocabulary and its padding. The rows change between two runs, the padding does not."""
    with monkeypatch.context() as patched:
        patched.setattr(folder_converter, "write_last_files", kill)
        with pytest.raises(Killed):
            run("save-init", "-q")
    for path in Path("model").glob("*.safetensors"):
        file_stat = path.stat()
        for name, start, _ in tensor_byte_ranges(path):
            if name == "transformer.wte.weight":
                flip_bit(path, start)
        os.utime(path, ns=(file_stat.st_atime_ns, file_stat.st_mtime_ns))
    capsys.readouterr()
    assert run("save-init") == 0
    assert "1 of " in capsys.readouterr().err
    assert main([*COMMANDS["save-init"], "--out", "again", "-q"]) == 0
    assert read_files(Path("out")) == read_files(Path("again"))


def punch_hole(path: Path) -> None:
    """Truncate a file, and extend it to its old size."""
    size = path.stat().st_size
    os.truncate(path, 4096)
    os.truncate(path, size)


@pytest.mark.parametrize("spoil", [punch_hole, lambda path: os.truncate(path, 4096)])
def test_output_truncated_while_written_is_an_error(
    sources: FaultSources, capsys, monkeypatch, spoil: Callable[[Path], object]
):
    expected, real_run = sources.expected(COMMANDS["save-init"]), Pipeline.run

    def cut(*args, **options) -> ConversionResult:
        outcome = real_run(*args, **options)
        spoil(largest_file(Path("out.partial/d")))
        return outcome

    with monkeypatch.context() as patched:
        patched.setattr(Pipeline, "run", cut)
        assert run("save-init") == 1
    assert "was changed by" in capsys.readouterr().err
    assert run("save-init") == 0
    assert read_files(Path("out")) == expected


def test_output_change_while_publishing_is_an_error(sources: FaultSources, capsys, monkeypatch):
    expected = sources.expected(COMMANDS["save-init"])
    check_data_files = folder_converter.check_data_files

    def change(*args, **options) -> object:
        result = check_data_files(*args, **options)
        flip_bit(largest_file(Path("out.partial/d")), 10)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(folder_converter, "check_data_files", change)
        assert run("save-init") == 1
    assert "was changed by" in capsys.readouterr().err
    assert run("save-init") == 0
    assert read_files(Path("out")) == expected


def test_compressed_chunks_are_read_back(sources: FaultSources, monkeypatch):
    expected = sources.expected(COMMANDS["compress"])
    with monkeypatch.context() as patched:
        patched.setattr(FolderOutput, "put", kill)
        with pytest.raises(Killed):
            run("compress")
    for path in Path("out.partial/d").iterdir():
        flip_bit(path, path.stat().st_size // 2)
    assert run("compress") == 0
    assert read_files(Path("out")) == expected


def test_undisturbed_run_reads_the_source_once(sources: FaultSources, monkeypatch: MonkeyPatch):
    expected = sources.expected(COMMANDS["save-init"])
    monkeypatch.setattr(converter, "find_outdated", kill)
    assert run("save-init") == 0
    assert read_files(Path("out")) == expected


def swap(model: str, kept_as: str) -> None:
    """Put another source in the place of `model`."""
    Path("model").rename(kept_as)
    Path(model).rename("model")


def test_source_that_was_swapped_for_a_time_is_compared(
    sources: FaultSources, monkeypatch: MonkeyPatch
):
    """The notes of the second run are of other values, with the sizes, times and headers of the first source."""
    expected = sources.expected(COMMANDS["save-init"])
    make_other_values(Path("model"), Path("other"))
    run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=2)
    swap("other", kept_as="first")
    run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=4)
    swap("first", kept_as="other")
    assert run("save-init") == 0
    assert read_files(Path("out")) == expected


def test_notes_with_unknown_numbers_count_as_none(sources: FaultSources, monkeypatch: MonkeyPatch):
    expected = sources.expected(COMMANDS["save-init"])
    work = run_until_killed(monkeypatch, COMMANDS["save-init"], syncs=5) / ".prep"
    for note in (work / "done").iterdir():
        note.write_bytes(
            encode_record({**decode_record(note.read_bytes()), "digests": {"1000000": "00"}})
        )
    (work / "part").mkdir(exist_ok=True)
    shutil.copy(next((work / "done").iterdir()), work / "part/1000000")
    assert run("save-init") == 0
    assert read_files(Path("out")) == expected


# A kill right after an output got its name: the next command removes the work folder inside it


KILLED = """\
import os, signal, sys
from prepcli.commands.cli.main import main
from prepcli.execution import folder_converter, folder_output
{function} = lambda *_, **options: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main())
"""
EXPORT = ("export", "init", "--out", "out")


def export_until(function: str) -> None:
    """Export, and kill the process when it calls a function."""
    process = run_python(KILLED.format(function=function), *EXPORT, cwd=".")
    assert process.returncode == -signal.SIGKILL


def test_next_command_removes_work_folder_of_killed_run():
    export_until("folder_output.remove_work_folder")
    assert Path("out/.prep").is_dir()
    run_ok(*EXPORT)
    assert not Path("out/.prep").exists()
    run_ok("verify", "out")


def test_work_folder_of_unpublished_output_is_kept():
    export_until("folder_output.FolderOutput.publish")
    assert Path("out.partial/prep-manifest.json").is_file()
    run_ok("verify", "out.partial")
    assert Path("out.partial/.prep").is_dir()
    run_ok(*EXPORT)
