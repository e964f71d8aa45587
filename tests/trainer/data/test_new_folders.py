"""Folders have their name only when complete, with any number of processes and after any death."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from trainer.data.store_files import ABANDONED_AFTER_S, discard_folder, new_folder, remove_abandoned

NAME = "0" * 32


def write(folder: Path, content: str = "x") -> None:
    with new_folder(folder) as temporary:
        (temporary / "file").write_text(content)


def test_new_folder_appears_at_the_end(tmp_path: Path):
    folder = tmp_path / "parent" / NAME
    with new_folder(folder) as temporary:
        (temporary / "file").write_text("x")
        assert not folder.exists()
    assert [path.name for path in folder.parent.iterdir()] == [NAME]
    assert (folder / "file").read_text() == "x"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_block_leaves_nothing(tmp_path: Path, error: type[BaseException]):
    def fails() -> None:
        with new_folder(tmp_path / NAME) as temporary:
            (temporary / "file").write_text("x")
            raise error

    with pytest.raises(error):
        fails()
    assert [*tmp_path.iterdir()] == []


def test_first_process_to_finish_gives_the_name(tmp_path: Path):
    folder = tmp_path / NAME
    with new_folder(folder) as temporary:
        (temporary / "file").write_text("second")
        write(folder, "first")
    assert (folder / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_process_writes_on_after_another_has_finished(tmp_path: Path):
    """The first process removes the temporary folders of all others."""
    with new_folder(tmp_path / NAME) as temporary:
        write(tmp_path / NAME, "first")
        (temporary / "file").write_text("second")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_process_finds_its_temporary_folder_half_removed(tmp_path: Path):
    folder = tmp_path / NAME
    with new_folder(folder) as temporary:
        write(folder, "first")
        # The other process removes one file after another, and then the folder.
        temporary.mkdir()
        (temporary / "file").read_text()
    assert (folder / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_temporary_folder_of_a_killed_process_is_removed(tmp_path: Path):
    with new_folder(tmp_path / NAME) as temporary:
        shutil.copytree(temporary, tmp_path / f"{NAME}.0123456789ab.partial")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_discarded_folder_is_gone(tmp_path: Path):
    write(tmp_path / NAME)
    discard_folder(tmp_path / NAME)
    discard_folder(tmp_path / NAME)
    assert [*tmp_path.iterdir()] == []


def test_only_abandoned_stores_are_removed(tmp_path: Path):
    old = time.time() - ABANDONED_AFTER_S - 60
    names = ["1" * 32, f"{'2' * 32}.host-1-2.partial", f"shards-{'3' * 32}"]
    kept = ["4" * 32, "model-init.partial", "5" * 31, "mine"]
    for name in (*names, *kept):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (old, old))
    # A store with a shard, and one whose shard is being written
    for name, part in (("7" * 32, "00000"), ("8" * 32, "00000.0123456789ab.partial")):
        (tmp_path / name / part).mkdir(parents=True)
        kept.append(name)
    written = tmp_path / ("8" * 32) / "00000.0123456789ab.partial" / "tokens.bin"
    written.write_bytes(b"x")
    for folder in (tmp_path / ("7" * 32) / "00000", tmp_path / ("7" * 32), tmp_path / ("8" * 32)):
        os.utime(folder, (old, old))
    (tmp_path / ("6" * 32)).mkdir()
    remove_abandoned(tmp_path, lambda folder: folder.name == "4" * 32)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "6" * 32}
