"""Which links beside the weights are followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.errors import PrepError
from prepcli.sources.symlinks import resolve_small_file


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("key")
    return path


def test_link_that_leaves_the_folder_is_refused(tmp_path: Path, secret: Path):
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
    assert resolve_small_file(tmp_path / "vocab.txt", tmp_path) == (tmp_path / "files/vocab.txt").resolve()


def test_folder_that_is_a_link_is_resolved_first(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/vocab.txt").write_text("a")
    (tmp_path / "m").symlink_to("real")
    assert resolve_small_file(tmp_path / "m/vocab.txt", tmp_path / "m") == (tmp_path / "real/vocab.txt").resolve()


def test_folder_within_that_is_a_link_is_refused(tmp_path: Path, secret: Path):
    folder = tmp_path / "init"
    folder.mkdir()
    (folder / "hf").symlink_to("..")
    with pytest.raises(PrepError, match="is a link to"):
        resolve_small_file(folder / "hf/secret", folder)


def snapshot(cache: Path, model: str, target: str) -> Path:
    """A file of a snapshot in the hub's cache, a link to a blob."""
    home = cache / model / "snapshots" / "c0ffee"
    home.mkdir(parents=True)
    (cache / model / "blobs").mkdir()
    (cache / model / "blobs/0123").write_text("a")
    (home / "vocab.txt").symlink_to(target)
    return home / "vocab.txt"


def test_link_into_the_blobs_of_its_model_is_followed(tmp_path: Path):
    path = snapshot(tmp_path, "models--o--m", "../../blobs/0123")
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
def test_other_links_of_a_snapshot_are_refused(tmp_path: Path, secret: Path, model: str, target: str):
    snapshot(tmp_path, "models--o--other", "../../blobs/0123")
    (tmp_path / "models--o--m").mkdir(exist_ok=True)
    (tmp_path / "models--o--m/secret").write_text("key")
    path = snapshot(tmp_path, model, target)
    with pytest.raises(PrepError, match="is a link to"):
        resolve_small_file(path, path.parent)


def test_file_beside_a_config_belongs_to_its_own_folder(tmp_path: Path):
    (tmp_path / "item").mkdir()
    (tmp_path / "vocab.txt").write_text("a")
    assert resolve_small_file(tmp_path / "vocab.txt", tmp_path / "item") == (tmp_path / "vocab.txt").resolve()
