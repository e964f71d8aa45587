"""Tests of plain copies: every method copies every byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import floor
from bench.floor import COPY_METHODS, CopyMethod, main

PAGE = floor.PAGE_NBYTES


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder of files with sizes around whole pages."""
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    for name, size in {
        "empty": 0,
        "short": 7,
        "pages": 8 * PAGE,
        "deep/ragged": 9 * PAGE + 5,
    }.items():
        (folder / name).write_bytes(os.urandom(size))
    return folder


@pytest.mark.parametrize("means", COPY_METHODS, ids=str)
def test_copy_equals_source(source: Path, means: CopyMethod, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(floor, "BLOCK_NBYTES", 2 * PAGE)
    out = source.with_name("out")
    main([str(word) for word in means.command(source, out)[3:]])
    names = [path.relative_to(source) for path in source.rglob("*")]
    assert sorted(names) == sorted(path.relative_to(out) for path in out.rglob("*"))
    files = [name for name in names if (source / name).is_file()]
    assert all((source / name).read_bytes() == (out / name).read_bytes() for name in files)


def test_copy_does_not_overwrite(source: Path):
    with pytest.raises(FileExistsError):
        main([str(source), str(source)])


def test_failed_write_ends_the_copy(source: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> int:
        raise OSError("no")

    monkeypatch.setattr(floor, "BLOCK_NBYTES", PAGE)
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="no"):
        main([str(source), str(source.with_name("out"))])
