"""Tests of the rules for symbolic links to small files."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.sources.symlinks import resolve_small_file


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("key")
    return path


def test_link_out_of_the_folder_is_rejected(tmp_path: Path, secret: Path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "vocab.txt").symlink_to("../secret")
    with pytest.raises(PrepError, match=r"vocab\.txt is a link to \.\./secret") as caught:
        resolve_small_file(folder / "vocab.txt", folder)
    assert f"it leaves {folder}" in caught.value.why
    assert "replace the link by the file" in caught.value.hint


def test_link_within_the_folder_is_followed(tmp_path: Path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/vocab.txt").write_text("a")
    (tmp_path / "vocab.txt").symlink_to("files/vocab.txt")
    assert (
        resolve_small_file(tmp_path / "vocab.txt", tmp_path)
        == (tmp_path / "files/vocab.txt").resolve()
    )


def test_linked_checkpoint_folder_is_resolved(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/vocab.txt").write_text("a")
    (tmp_path / "m").symlink_to("real")
    assert (
        resolve_small_file(tmp_path / "m/vocab.txt", tmp_path / "m")
        == (tmp_path / "real/vocab.txt").resolve()
    )


def test_linked_subfolder_is_rejected(tmp_path: Path, secret: Path):
    folder = tmp_path / "init"
    folder.mkdir()
    (folder / "hf").symlink_to("..")
    with pytest.raises(PrepError, match="is a link to"):
        resolve_small_file(folder / "hf/secret", folder)


def make_snapshot_link(cache: Path, model: str, target: str) -> Path:
    """Create a file in a snapshot of the Hugging Face cache as a link to `target`."""
    folder = cache / model / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (cache / model / "blobs").mkdir()
    (cache / model / "blobs/0123").write_text("a")
    (folder / "vocab.txt").symlink_to(target)
    return folder / "vocab.txt"


def test_link_into_the_blobs_of_the_model_is_followed(tmp_path: Path):
    path = make_snapshot_link(tmp_path, "models--o--m", "../../blobs/0123")
    assert resolve_small_file(path, path.parent).read_text() == "a"


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("models--o--m", "../../../secret"),
        ("models--o--m", "../../secret"),
        ("models--o--m", "../../../models--o--other/blobs/0123"),
        ("mine", "../../blobs/0123"),
    ],
)
def test_other_links_of_a_snapshot_are_rejected(
    tmp_path: Path, secret: Path, model: str, target: str
):
    make_snapshot_link(tmp_path, "models--o--other", "../../blobs/0123")
    (tmp_path / "models--o--m").mkdir(exist_ok=True)
    (tmp_path / "models--o--m/secret").write_text("key")
    path = make_snapshot_link(tmp_path, model, target)
    with pytest.raises(PrepError, match="is a link to"):
        resolve_small_file(path, path.parent)


def test_file_outside_the_root_resolves_in_its_own_folder(tmp_path: Path):
    (tmp_path / "item").mkdir()
    (tmp_path / "vocab.txt").write_text("a")
    assert (
        resolve_small_file(tmp_path / "vocab.txt", tmp_path / "item")
        == (tmp_path / "vocab.txt").resolve()
    )
