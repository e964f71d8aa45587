from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.errors import PrepError
from prepcli.formats.ocdbt import MANIFEST, Entry, Place, read_database, write_database

from .orbax_items import NOW_NS, files_of

PATHS = ["d/" + "0" * 32, "d/" + "1" * 32, "other/d/x", "é"]
KEYS = st.one_of(
    st.binary(max_size=6), st.tuples(st.integers(0, 12), st.integers(0, 300)).map(lambda i: b"layers.w/%d.%d" % i)
)
PLACES = st.builds(Place, st.sampled_from(PATHS), st.integers(0, 1 << 62), st.integers(0, 1 << 62))
ENTRIES = st.dictionaries(KEYS, st.one_of(st.binary(max_size=20), PLACES), min_size=1, max_size=40)


def base_of(folder: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()


def write_whole(folder: Path, entries: Mapping[bytes, bytes | Place], node_bytes: int = 1 << 20) -> list[Entry]:
    in_order = sorted(entries.items())
    write_database(folder, in_order, NOW_NS, node_bytes)
    return in_order


@settings(max_examples=80, deadline=None)
@given(entries=ENTRIES, node_bytes=st.sampled_from([1, 100, 400, 1 << 20]))
def test_what_is_written_is_what_tensorstore_reads(tmp_path_factory, entries, node_bytes):
    folder = tmp_path_factory.mktemp("db")
    expected = write_whole(folder, entries, node_bytes)
    assert list(read_database(folder)) == expected


@settings(max_examples=40, deadline=None)
@given(entries=ENTRIES, node_bytes=st.sampled_from([1, 400, 1 << 20]))
def test_the_manifest_is_tensorstores_own_to_the_byte(tmp_path_factory, entries, node_bytes):
    folder = tmp_path_factory.mktemp("db")
    write_whole(folder, entries, node_bytes)
    dumped = ts.ocdbt.dump(base_of(folder)).result()
    assert (folder / MANIFEST).read_bytes() == ts.ocdbt.undump_manifest(dumped)
    assert dumped["versions"][0]["commit_time"] == NOW_NS


def test_a_node_is_tensorstores_own_to_the_byte(tmp_path):
    """TensorStore writes the same keys itself, uncompressed and inline; its node must not differ from ours."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    entries = {b"params.w/%d.%d" % (i, j): b"v%d" % j for i in range(12) for j in range(11)}
    write_whole(ours, entries)
    config = {"compression": None, "max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{theirs}/", "config": config}).result()
    with ts.Transaction() as transaction:
        for key, value in entries.items():
            store.with_transaction(transaction)[key] = value
    root = ts.ocdbt.dump(base_of(theirs)).result()["versions"][-1]["root"]
    _, _, path, offset, length = root["location"].split(":")
    node = (theirs / path).read_bytes()[int(offset) : int(offset) + int(length)]
    assert [node] == [data for path, data in files_of(ours).items() if path.startswith("d/")]


@pytest.mark.parametrize("node_bytes", [1 << 20, 400])
def test_tensorstore_reads_values_by_key(tmp_path, node_bytes):
    (tmp_path / "d").mkdir()
    (tmp_path / "data").write_bytes(bytes(range(256)))
    entries = {b"k/%d" % i: Place("data", 5 * i, 3) for i in range(40)} | {b"a": b"inline"}
    write_whole(tmp_path, entries, node_bytes)
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    assert sorted(store.list().result()) == sorted(entries)
    assert store[b"a"] == b"inline"
    assert store[b"k/7"] == bytes([35, 36, 37])
    with pytest.raises(KeyError):
        store[b"k/70"]


def test_statistics_count_everything_below_the_root(tmp_path):
    entries = {b"k%03d" % i: Place("data", i, 7) for i in range(100)}
    write_whole(tmp_path, entries, node_bytes=1000)
    version = ts.ocdbt.dump(base_of(tmp_path)).result()["versions"][0]
    node_file = next((tmp_path / "d").iterdir())
    assert version["root_height"] == 1
    assert version["root"]["statistics"] == {
        "num_indirect_value_bytes": 700, "num_keys": 100, "num_tree_bytes": node_file.stat().st_size
    }  # fmt: skip


def test_equal_entries_give_equal_files_and_the_time_is_in_the_manifest_alone(tmp_path):
    entries = {b"k%03d" % i: Place("data", i, 7) for i in range(100)}
    folders = [tmp_path / name for name in ("one", "two", "later")]
    for folder, now_ns in zip(folders, (NOW_NS, NOW_NS, NOW_NS + 1)):
        folder.mkdir()
        write_database(folder, entries.items(), now_ns, 1000)
    one, two, later = map(files_of, folders)
    assert one == two
    assert {path for path in one if one[path] != later[path]} == {MANIFEST}


def test_writing_again_over_a_run_that_was_killed_leaves_nothing_else(tmp_path):
    entries = {b"k": b"value"}
    write_whole(tmp_path, entries)
    before = files_of(tmp_path)
    next((tmp_path / "d").iterdir()).write_bytes(b"half")
    (tmp_path / MANIFEST).write_bytes(b"")
    write_whole(tmp_path, entries)
    assert files_of(tmp_path) == before


def test_a_database_that_tensorstore_wrote_is_read(tmp_path):
    """Compressed nodes, several levels and several versions, none of which is ours."""
    config = {"max_inline_value_bytes": 4, "max_decoded_node_bytes": 500}
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}).result()
    expected = {b"key%03d" % i: b"v" * (i % 9) for i in range(200)}
    for key, value in expected.items():
        store.write(key, value).result()
    assert ts.ocdbt.dump(base_of(tmp_path)).result()["versions"][-1]["root_height"] > 1
    found = dict(read_database(tmp_path))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        if isinstance(value, Place):
            with (tmp_path / value.path).open("rb") as file:
                file.seek(value.offset)
                value = file.read(value.nbytes)
        assert value == expected[key]


def test_an_empty_database_has_no_entries(tmp_path):
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    store[b"k"] = b"v"
    del store[b"k"]
    assert list(read_database(tmp_path)) == []


def test_a_missing_manifest_is_named(tmp_path):
    with pytest.raises(PrepError, match=r"has no manifest\.ocdbt"):
        list(read_database(tmp_path))


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "d/../../outside", "d/\0"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path, path):
    write_whole(tmp_path, {b"k": Place(path, 0, 1)})
    with pytest.raises(PrepError, match="refers to"):
        list(read_database(tmp_path))


def test_a_missing_node_file_is_named(tmp_path):
    write_whole(tmp_path, {b"k": b"v"})
    node = next((tmp_path / "d").iterdir())
    node.unlink()
    with pytest.raises(PrepError, match=node.name):
        list(read_database(tmp_path))


def test_a_node_that_is_its_own_child_is_refused(tmp_path):
    """A database whose root claims to be one level higher than it is."""
    write_whole(tmp_path, {b"k": b"v"})
    dumped = ts.ocdbt.dump(base_of(tmp_path)).result()
    dumped["versions"][0]["root_height"] = 1
    (tmp_path / MANIFEST).write_bytes(ts.ocdbt.undump_manifest(dumped))
    with pytest.raises(PrepError) as caught:
        list(read_database(tmp_path))
    assert caught.value.why == "a node says height 0, its parent 1"


def test_a_node_that_two_parents_share_is_refused(tmp_path):
    """The second reference to a leaf is bent to the first: a few such levels would make endless keys."""
    write_whole(tmp_path, {b"a": b"", b"b": b""}, node_bytes=1)
    file = next((tmp_path / "d").iterdir())
    data = file.read_bytes()
    leaf_nbytes = struct.unpack("<Q", data[4:12])[0]
    references = b"ab" + bytes([0, 0, 0, leaf_nbytes])  # keys, file numbers, offsets
    interior = data[2 * leaf_nbytes : -4].replace(references, b"ab" + bytes([0, 0, 0, 0]))
    assert interior != data[2 * leaf_nbytes : -4]
    file.write_bytes(data[: 2 * leaf_nbytes] + interior + struct.pack("<I", google_crc32c.value(interior)))
    with pytest.raises(PrepError) as caught:
        list(read_database(tmp_path))
    assert "it refers twice to the node" in caught.value.why
