"""Paths of the files of an output, checked in its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.algebra.grids import ChunkGrid
from prepcli.commands.operations.conversion import check_output_paths
from prepcli.core.errors import PrepError, UsageError
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import OutputFile, OutputLeaf, Plan, SmallFile
from prepcli.stores.addresses import ObjectStoreUrl, parse_out_url


def make_plan(*paths: str, small: tuple[str, ...] = (), item: str = "") -> Plan:
    files = tuple(OutputFile(path, 1) for path in paths)
    return Plan("test", "", "", (), (), files, tuple(map(SmallFile, small)), item=item)


def make_tree(*names: str, small: tuple[str, ...] = ()) -> Plan:
    """Return a plan of arrays in folders of their own."""
    leaves = tuple(OutputLeaf((name,), "float32", ChunkGrid((1,), (1,)), ()) for name in names)
    return Plan(
        *("test", "", "", (), (), ()),
        small_files=tuple(map(SmallFile, small)),
        leaves=leaves,
        settings=Manifest(storage="files"),
    )


@pytest.mark.parametrize(
    "path", ["", "..", "../x", "a/../x", "/x", "a//b", "a/", "a\0b", "m" * 256]
)
@pytest.mark.parametrize("item", ["", "state"])
def test_path_that_leaves_the_output_is_refused(path: str, item: str):
    check_output_paths(make_plan("a/b", "a/c", small=("c", "d/e"), item=item))
    for plan in (make_plan(path, item=item), make_plan(small=(path,), item=item)):
        with pytest.raises(PrepError, match="cannot be a file of the output"):
            check_output_paths(plan)


@pytest.mark.parametrize("pair", [("a", "a"), ("a", "a/b"), ("a/b/c", "a/b"), ("x", MANIFEST_FILE)])
def test_two_files_of_one_path_are_refused(pair: tuple[str, str]):
    for plan in (make_plan(*pair, "x"), make_plan(pair[0], "z", small=("x", pair[1]))):
        with pytest.raises(PrepError, match=r"two files of the output|the folder of another"):
            check_output_paths(plan)


def test_similar_names_are_two_files():
    check_output_paths(make_plan("a", "a.b", "a0/b", "a-/b", "b/a", small=("ab", "A", "a.c")))


@pytest.mark.parametrize("name", ["..", ".", "a/b", "\0", "m" * 256, ""])
def test_leaf_without_a_folder_name_is_refused(name: str):
    check_output_paths(make_tree("params.w", "m" * 255))
    with pytest.raises(UsageError, match=r"cannot store .* each array is a folder of its name"):
        check_output_paths(make_tree("params.w", name))


@pytest.mark.parametrize("name", [".prep", "commit_success.txt", "_METADATA", MANIFEST_FILE, "hf"])
def test_leaf_in_place_of_a_file_is_refused(name: str):
    with pytest.raises(PrepError, match='storage="ocdbt"'):
        check_output_paths(make_tree("params.w", name, small=("hf/config.json",)))


def test_parse_out_url_accepts_a_path():
    assert parse_out_url(Path("gs://bucket/a/b")) == ObjectStoreUrl("gs", "bucket", "a/b")
    assert parse_out_url(Path("s3://bucket/a/")) == ObjectStoreUrl("s3", "bucket", "a")
    assert [
        parse_out_url(path) for path in (None, Path("a/b"), Path("/a/b"), Path("a:b"), Path("../a"))
    ] == [None] * 5
    with pytest.raises(PrepError) as caught:
        parse_out_url(Path("abfs://bucket/a"))
    assert caught.value.code == 2


@pytest.mark.parametrize("text", ["gs://", "s3://"])
def test_url_without_a_bucket_is_no_local_folder(text: str):
    """As `gs://$BUCKET` of an unset variable."""
    with pytest.raises(PrepError, match="is an invalid URL") as caught:
        parse_out_url(Path(text))
    assert caught.value.what.startswith(f"`{text}`")
