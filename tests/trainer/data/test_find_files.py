"""Finding data files: the files of a path, their order, and the error if there are none."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.data.find_files import find_files
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import DataType


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/c.txt", "a.jsonl", "note.md", ".hidden.txt", ".git/d.txt", "x[1].txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("data_type", "paths", "names"),
    [
        ("text", [""], ["a.txt", "b.txt", "sub/c.txt", "x[1].txt"]),
        ("json", [""], ["a.jsonl"]),
        ("text", ["note.md"], ["note.md"]),
        ("text", ["b.txt", "a.txt"], ["b.txt", "a.txt"]),
        ("text", ["sub", "*.txt", "b.txt"], ["sub/c.txt", "a.txt", "b.txt", "x[1].txt"]),
        ("text", ["**/c.txt"], ["sub/c.txt"]),
        ("text", ["[ab].*"], ["a.jsonl", "a.txt", "b.txt"]),
        ("text", ["s*"], ["sub/c.txt"]),
        ("text", ["x[1].txt"], ["x[1].txt"]),
    ],
)
def test_find_files_returns_files_in_order(folder: Path, data_type: DataType, paths: list[str], names: list[str]):
    files = find_files([str(folder / path) for path in paths], data_type)
    assert [str(path.relative_to(folder)) for path in files] == names


def test_find_files_counts_linked_file_once(folder: Path):
    (folder / "again.txt").symlink_to(folder / "b.txt")
    names = [path.name for path in find_files([str(folder)], "text")]
    assert names == ["a.txt", "again.txt", "c.txt", "x[1].txt"]


@pytest.mark.parametrize(
    ("path", "data_type", "why"),
    [
        ("none", "text", "looked for a file of that name, *.txt in a folder of that name, or matches of it as a glob"),
        ("*.csv", "text", "looked for a file of that name, *.txt in a folder of that name, or matches of it as a glob"),
        ("sub", "json", "looked for *.jsonl; found c.txt"),
        ("many", "text", "looked for *.txt; found 0.md, 1.md, 2.md …"),
        ("empty", "text", "looked for *.txt; found nothing"),
    ],
)
def test_find_files_fails_without_files(folder: Path, path: str, data_type: DataType, why: str):
    (folder / "empty").mkdir()
    (folder / "many").mkdir()
    for number in range(4):
        (folder / "many" / f"{number}.md").touch()
    with pytest.raises(PrepError) as caught:
        find_files([str(folder / "a.txt"), str(folder / path)], data_type)
    assert caught.value.what == f"no data in `{folder / path}`"
    assert caught.value.why == why


def test_find_files_fails_for_unreadable_folder():
    with tempfile.TemporaryDirectory() as folder:
        for path in (Path(folder), Path(folder, "sub")):  # the first is readable, the second is not
            path.mkdir(exist_ok=True)
            path.chmod(0o755 if path == Path(folder) else 0)
        with unprivileged(), pytest.raises(PrepError, match=r"cannot read or write .*sub - Permission denied"):
            find_files([folder], "text")


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Drop the rights of root, who can read everything."""
    original_uid = os.geteuid()
    if original_uid == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(original_uid)
