from __future__ import annotations

import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.formats.ocdbt import OCDBT_MANIFEST, ValueLocation, read_ocdbt_index
from tests.helpers.ocdbt_oracle import open_folder, read_all_entries, write_entries
from tests.helpers.orbax_items import NOW_NS, read_files, write_ocdbt_index

PATHS = ["d/" + "0" * 32, "d/" + "1" * 32, "other/d/x", "é"]
KEYS = st.one_of(
    st.binary(max_size=6),
    st.tuples(st.integers(0, 12), st.integers(0, 300)).map(lambda i: b"layers.w/%d.%d" % i),
)
PLACES = st.builds(
    ValueLocation, st.sampled_from(PATHS), st.integers(0, 1 << 62), st.integers(0, (1 << 62) - 1)
)
ENTRIES = st.dictionaries(KEYS, st.one_of(st.binary(max_size=20), PLACES), min_size=1, max_size=40)


@settings(max_examples=80, deadline=None)
@given(entries=ENTRIES, node_bytes=st.sampled_from([1, 100, 400, 1 << 20]))
def test_write_ocdbt_index_is_read_by_tensorstore(tmp_path_factory, entries, node_bytes):
    folder = tmp_path_factory.mktemp("db")
    expected = write_entries(folder, entries, node_bytes)
    assert read_all_entries(folder) == expected
    assert list(read_ocdbt_index(folder)) == expected


@settings(max_examples=40, deadline=None)
@given(entries=ENTRIES, node_bytes=st.sampled_from([1, 400, 1 << 20]))
def test_manifest_bytes_match_tensorstore(tmp_path_factory, entries, node_bytes):
    folder = tmp_path_factory.mktemp("db")
    write_entries(folder, entries, node_bytes)
    dumped = ts.ocdbt.dump(open_folder(folder)).result()
    assert (folder / OCDBT_MANIFEST).read_bytes() == ts.ocdbt.undump_manifest(dumped)
    assert dumped["versions"][0]["commit_time"] == NOW_NS


def test_node_bytes_match_tensorstore(tmp_path):
    """Compare with the node that TensorStore writes for the same keys, uncompressed and inline."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    entries = {b"params.w/%d.%d" % (i, j): b"v%d" % j for i in range(12) for j in range(11)}
    write_entries(ours, entries)
    config = {
        "compression": None,
        "max_inline_value_bytes": 1024,
        "max_decoded_node_bytes": 100_000_000,
    }
    store = ts.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{theirs}/", "config": config}
    ).result()
    with ts.Transaction() as transaction:
        for key, value in entries.items():
            store.with_transaction(transaction)[key] = value
    root = ts.ocdbt.dump(open_folder(theirs)).result()["versions"][-1]["root"]
    _, _, path, offset, length = root["location"].split(":")
    node = (theirs / path).read_bytes()[int(offset) : int(offset) + int(length)]
    assert [node] == [data for path, data in read_files(ours).items() if path.startswith("d/")]


@pytest.mark.parametrize("node_bytes", [1 << 20, 400])
def test_tensorstore_reads_values_by_key(tmp_path, node_bytes):
    (tmp_path / "d").mkdir()
    (tmp_path / "data").write_bytes(bytes(range(256)))
    entries = {b"k/%d" % i: ValueLocation("data", 5 * i, 3) for i in range(40)} | {b"a": b"inline"}
    write_entries(tmp_path, entries, node_bytes)
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    assert sorted(store.list().result()) == sorted(entries)
    assert store[b"a"] == b"inline"
    assert store[b"k/7"] == bytes([35, 36, 37])
    with pytest.raises(KeyError):
        store[b"k/70"]


def test_root_statistics_count_the_whole_tree(tmp_path):
    entries = {b"k%03d" % i: ValueLocation("data", i, 7) for i in range(100)}
    write_entries(tmp_path, entries, node_bytes=1000)
    version = ts.ocdbt.dump(open_folder(tmp_path)).result()["versions"][0]
    node_file = next((tmp_path / "d").iterdir())
    assert version["root_height"] == 1
    assert version["root"]["statistics"] == {
        "num_indirect_value_bytes": 700, "num_keys": 100, "num_tree_bytes": node_file.stat().st_size
    }  # fmt: skip


def test_equal_entries_give_equal_files_except_the_time(tmp_path):
    entries = {b"k%03d" % i: ValueLocation("data", i, 7) for i in range(100)}
    folders = [tmp_path / name for name in ("one", "two", "later")]
    for folder, now_ns in zip(folders, (NOW_NS, NOW_NS, NOW_NS + 1)):
        folder.mkdir()
        write_ocdbt_index(folder, entries.items(), now_ns, 1000)
    one, two, later = map(read_files, folders)
    assert one == two
    assert {path for path in one if one[path] != later[path]} == {OCDBT_MANIFEST}


def test_rewrite_after_a_killed_write_gives_equal_files(tmp_path):
    entries = {b"k": b"value"}
    write_entries(tmp_path, entries)
    before = read_files(tmp_path)
    next((tmp_path / "d").iterdir()).write_bytes(b"half")
    (tmp_path / OCDBT_MANIFEST).write_bytes(b"")
    write_entries(tmp_path, entries)
    assert read_files(tmp_path) == before
