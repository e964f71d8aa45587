"""OCDBT databases: written like TensorStore, read from it, and invalid ones are rejected."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from functools import partial
from pathlib import Path

import google_crc32c
import pytest
import tensorstore as ts
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.formats import ocdbt
from prepcli.formats.ocdbt import OCDBT_MANIFEST, OcdbtEntry, ValueLocation, read_ocdbt_index
from tests.helpers.ocdbt_oracle import (
    dump_node,
    iter_nodes,
    node_entries,
    open_database,
    open_folder,
    read_all_entries,
    write_entries,
)
from tests.helpers.orbax_items import NOW_NS, read_files, write_ocdbt_index
from tests.helpers.slow_cases import slow_except

PATHS = ["d/" + "0" * 32, "d/" + "1" * 32, "other/d/x", "é"]
KEYS = st.one_of(
    st.binary(max_size=6),
    st.tuples(st.integers(0, 12), st.integers(0, 300)).map(lambda i: b"layers.w/%d.%d" % i),
)
PLACES = st.builds(
    ValueLocation, st.sampled_from(PATHS), st.integers(0, 1 << 62), st.integers(0, (1 << 62) - 1)
)
ENTRIES = st.dictionaries(KEYS, st.one_of(st.binary(max_size=20), PLACES), min_size=1, max_size=40)


@given(entries=ENTRIES, node_bytes=st.sampled_from([1, 100, 400, 1 << 20]))
def test_write_ocdbt_index_is_read_by_tensorstore(tmp_path_factory, entries, node_bytes):
    folder = tmp_path_factory.mktemp("db")
    expected = write_entries(folder, entries, node_bytes)
    assert read_all_entries(folder) == expected
    assert list(read_ocdbt_index(folder)) == expected


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


NODE, TOP = bytes.fromhex("0cdb20de"), bytes.fromhex("0cdb3a2a")
SOME_KEYS = st.one_of(
    st.binary(max_size=5), st.integers(0, 4000).map(lambda i: b"layers.w/%d.%d" % divmod(i, 60))
)
VALUES = st.dictionaries(SOME_KEYS, st.binary(max_size=12), min_size=1, max_size=60)
CONFIGS = st.fixed_dictionaries(
    {
        "max_inline_value_bytes": st.sampled_from([0, 5, 1024]),
        "max_decoded_node_bytes": st.sampled_from([1, 300, 2000, 100_000_000]),
        "compression": st.sampled_from([None, {"id": "zstd"}, {"id": "zstd", "level": 19}]),
        "version_tree_arity_log2": st.sampled_from([1, 2, 4]),
        "manifest_kind": st.sampled_from(["single", "numbered"]),
    }
)


def read_values(folder: Path) -> dict[bytes, bytes]:
    """Return all keys and values of a database."""
    return {
        key: value if isinstance(value, bytes) else bytes_at(folder, value)
        for key, value in read_ocdbt_index(folder)
    }


def bytes_at(folder: Path, place: ValueLocation) -> bytes:
    with (folder / place.path).open("rb") as file:
        file.seek(place.offset)
        return file.read(place.nbytes)


@pytest.mark.parametrize("count", slow_except((25, 120), (25,)))
def test_read_ocdbt_index_matches_tensorstore(tmp_path_factory, count: int):
    """Read every configuration: versions, tree heights, compression, inline and indirect values."""

    @settings(max_examples=count)
    @given(config=CONFIGS, commits=st.lists(VALUES, min_size=1, max_size=4))
    def check(config, commits):
        folder = tmp_path_factory.mktemp("db")
        store = open_database(folder, config)
        expected: dict[bytes, bytes] = {}
        for values in commits:
            with ts.Transaction() as transaction:
                for key, value in values.items():
                    store.with_transaction(transaction)[key] = value
            expected |= values
        assert list(read_ocdbt_index(folder)) == read_all_entries(folder)
        assert read_values(folder) == expected == {key: store[key] for key in store.list().result()}

    check()


def test_read_ocdbt_index_reads_newest_of_many_versions(tmp_path):
    store = open_database(tmp_path, {"version_tree_arity_log2": 1, "max_decoded_node_bytes": 200})
    expected = {b"key%03d" % i: b"v" * (i % 9) for i in range(60)}
    for key, value in expected.items():
        store[key] = value
    dumped = ts.ocdbt.dump(open_folder(tmp_path)).result()
    assert dumped["version_tree_nodes"]
    assert dumped["versions"][-1]["root_height"] > 1
    assert read_values(tmp_path) == expected


def test_read_ocdbt_index_reads_database_of_several_folders(tmp_path):
    """Merge databases like Orbax merges those of its processes: nodes are shared, with paths via their folders."""
    expected = {}
    whole = open_database(tmp_path, {"max_inline_value_bytes": 4})
    for n in range(3):
        part = open_database(
            tmp_path / f"process_{n}", {"max_inline_value_bytes": 4, "max_decoded_node_bytes": 200}
        )
        values = {b"%d/%d" % (n, i): b"value %d" % i for i in range(30)}
        for key, value in values.items():
            part[key] = value
        with ts.Transaction(atomic=True) as transaction:
            part.experimental_copy_range_to(whole.with_transaction(transaction)).result()
        expected |= values
    assert read_values(tmp_path) == expected
    locations = [
        value for _, value in read_ocdbt_index(tmp_path) if isinstance(value, ValueLocation)
    ]
    assert {location.path.split("/")[0] for location in locations} == {
        "process_0",
        "process_1",
        "process_2",
    }


@pytest.mark.parametrize("keeps_one", [False, True])
def test_read_ocdbt_index_rejects_missing_numbered_manifest(tmp_path, keeps_one):
    open_database(tmp_path, {"manifest_kind": "numbered"})[b"k"] = b"v"
    numbered = sorted(tmp_path.glob("manifest.0*"))
    if keeps_one:
        numbered[-1].write_bytes((tmp_path / OCDBT_MANIFEST).read_bytes())
        why = f"{numbered[-1].name} names no version"
    else:
        for path in numbered:
            path.unlink()
        why = "its manifest refers to numbered manifests, and none exists"
    with pytest.raises(PrepError) as caught:
        list(read_ocdbt_index(tmp_path))
    assert caught.value.why == why


def test_empty_database_has_no_entries(tmp_path):
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    store[b"k"] = b"v"
    del store[b"k"]
    assert list(read_ocdbt_index(tmp_path)) == []


def test_read_ocdbt_index_rejects_missing_manifest(tmp_path):
    with pytest.raises(PrepError, match=r"has no manifest\.ocdbt"):
        list(read_ocdbt_index(tmp_path))


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "d/../../outside", "d/\0"])
def test_path_outside_the_folder_is_rejected(tmp_path, path):
    write_entries(tmp_path, {b"k": ValueLocation(path, 0, 1)})
    with pytest.raises(PrepError, match=r"the index of .* names"):
        list(read_ocdbt_index(tmp_path))


def test_read_ocdbt_index_rejects_missing_node_file(tmp_path):
    write_entries(tmp_path, {b"k": b"v"})
    node = next((tmp_path / "d").iterdir())
    node.unlink()
    with pytest.raises(PrepError, match=node.name):
        list(read_ocdbt_index(tmp_path))


def test_node_that_is_its_own_child_is_rejected(tmp_path):
    """Write a root that claims one more level than it has."""
    write_entries(tmp_path, {b"k": b"v"})
    dumped = ts.ocdbt.dump(open_folder(tmp_path)).result()
    dumped["versions"][0]["root_height"] = 1
    (tmp_path / OCDBT_MANIFEST).write_bytes(ts.ocdbt.undump_manifest(dumped))
    with pytest.raises(PrepError) as caught:
        list(read_ocdbt_index(tmp_path))
    assert caught.value.why == "a node has height 0, its parent refers to height 1"


def test_node_with_two_parents_is_rejected(tmp_path):
    """Let two references point to one leaf: a few such levels would encode exponentially many keys."""
    write_entries(tmp_path, {b"a": b"", b"b": b""}, node_bytes=1)
    file = next((tmp_path / "d").iterdir())
    data = file.read_bytes()
    leaf_nbytes = struct.unpack("<Q", data[4:12])[0]
    references = b"ab" + bytes([0, 0, 0, leaf_nbytes])  # keys, file numbers, offsets
    interior = data[2 * leaf_nbytes : -4].replace(references, b"ab" + bytes([0, 0, 0, 0]))
    assert interior != data[2 * leaf_nbytes : -4]
    file.write_bytes(
        data[: 2 * leaf_nbytes] + interior + struct.pack("<I", google_crc32c.value(interior))
    )
    with pytest.raises(PrepError) as caught:
        list(read_ocdbt_index(tmp_path))
    assert "it refers twice to the node" in caught.value.why


def framed(magic: bytes, body: bytes, compressed: bool = False) -> bytes:
    """Return a frame with a valid checksum."""
    text = bytes([0, compressed]) + (zstandard.compress(body) if compressed else body)
    data = magic + struct.pack("<Q", len(text) + 16) + text
    return data + struct.pack("<I", google_crc32c.value(data))


def body_of(frame: bytes) -> bytes:
    assert frame[12] == 0
    return (
        frame[14:-4]
        if not frame[13]
        else zstandard.ZstdDecompressor().decompressobj().decompress(frame[14:-4])
    )


def varint(number: int) -> bytes:
    digits = [number >> shift & 127 for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])


def write_node(folder: Path, frame: bytes, height: int = 0) -> None:
    """Write a database whose root is the node in `frame`."""
    (folder / "node").write_bytes(frame)
    dumped = ts.ocdbt.dump(open_folder(made(folder))).result()
    root = dumped["versions"][0]
    root["root"]["location"], root["root_height"] = f"btreenode::node:0:{len(frame)}", height
    (folder / OCDBT_MANIFEST).write_bytes(ts.ocdbt.undump_manifest(dumped))


def made(folder: Path) -> Path:
    if not (folder / OCDBT_MANIFEST).exists():
        write_entries(folder, {b"k": b"v"})
    return folder


def leaf(count: int, *columns: bytes) -> bytes:
    """Return the body of a leaf without files that claims `count` entries."""
    return b"\0" + b"\0" + varint(count) + b"".join(columns)


def inlined(keys: int, first: bytes, value: bytes) -> bytes:
    """Return the body of a leaf of `keys` keys with the prefix `first`, and equal inline values."""
    shared = varint(len(first)) * (keys - 1)
    rests = varint(len(first) + 3) + varint(3) * (keys - 1)
    text = first + b"".join(i.to_bytes(3, "big") for i in range(keys))
    return leaf(keys, shared, rests, text, varint(len(value)) * keys, bytes(keys), value * keys)


def leaf_with_long_paths() -> bytes:
    """Return the body of a leaf with 5,000 paths that share 4,000 bytes."""
    shared = varint(4000) * 4999
    rests = varint(4000) + varint(1) * 4999
    return b"\0" + varint(5000) + shared + rests + bytes(5000) + b"p" * 9000


def test_handmade_leaf_is_valid(tmp_path):
    write_node(tmp_path, framed(NODE, inlined(5, b"key", b"value"), compressed=True))
    assert list(read_ocdbt_index(tmp_path)) == [
        (b"key" + bytes([0, 0, i]), b"value") for i in range(5)
    ]
    assert sorted(open_database(tmp_path).list().result()) == [
        b"key" + bytes([0, 0, i]) for i in range(5)
    ]


# Made by the test: collection would make 150 MB in each worker, and keep them.
@pytest.mark.parametrize(
    ("make_bomb", "why"),
    [
        (partial(leaf, 1 << 19), "a node claims 524,288 entries"),
        (partial(leaf, 1 << 40), "a node claims 1,099,511,627,776 entries"),
        (partial(leaf, 0), "a node claims 0 entries"),
        (partial(inlined, 500, b"k" * 65000, b""), "have more than 16,777,216 bytes"),
        (
            partial(inlined, 80, b"", bytes(1 << 18)),
            "it decompresses to more than 16,777,216 bytes",
        ),
        (lambda: b"\0" + varint(1 << 30), "it has the number 1,073,741,824, the limit is 262,144"),
        (leaf_with_long_paths, "a node has file paths of more than"),
    ],
)
def test_decompression_bombs_are_rejected_in_bounded_memory(tmp_path, monkeypatch, make_bomb, why):
    for name in ("MAX_INDEX_NBYTES", "MAX_TEXT_NBYTES"):
        monkeypatch.setattr(ocdbt, name, 16 << 20)
    frame = framed(NODE, make_bomb(), compressed=True)
    assert len(frame) < 40_000
    write_node(tmp_path, frame)
    tracemalloc.start()
    with pytest.raises(PrepError) as caught:
        for _ in read_ocdbt_index(tmp_path):
            pass
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert why in caught.value.why
    assert peak_nbytes < 3 * (16 << 20)


def test_limits_apply_to_all_nodes_together(tmp_path, monkeypatch):
    write_entries(tmp_path, {b"key%04d" % i: b"value" for i in range(1000)}, node_bytes=400)
    total = sum(path.stat().st_size for path in (tmp_path / "d").iterdir())
    for name, most in (
        ("MAX_INDEX_NBYTES", total // 2),
        ("MAX_ENTRIES", 900),
        ("MAX_TEXT_NBYTES", 11_000),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(ocdbt, name, most)
            with pytest.raises(PrepError, match="cannot be read"):
                list(read_ocdbt_index(tmp_path))
    assert len(list(read_ocdbt_index(tmp_path))) == 1000


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "it does not start with 0cdb20de"),
        (framed(TOP, b""), "it does not start with 0cdb20de"),
        (framed(NODE, inlined(2, b"", b""))[:-1], "its length field is 34 bytes, it has 33"),
        (framed(NODE, inlined(2, b"", b""))[:-1] + b"x", "its checksum does not match"),
        (framed(NODE, inlined(2, b"", b"") + b"x"), "1 byte follows its end"),
        (framed(NODE, inlined(2, b"", b"v")[:-1]), "it is cut short"),
        (framed(NODE, leaf(1, varint(1), b"k", varint(1), b"\2")), "a value has the unknown kind 2"),
        (framed(NODE, leaf(1, b"\xff" * 9 + b"\2")), "it has a number of more than 64 bits"),
        (framed(NODE, leaf(2, varint(2), varint(1) * 2, b"aa", bytes(4))),
         "it has a name of 3 bytes, 2 of them from one of 1"),
        (framed(NODE, leaf(2, varint(0), varint(1) * 2, b"ba", bytes(4))), "key `b'a'` follows `b'b'`"),
    ],
)  # fmt: skip
def test_invalid_node_error_names_the_reason(tmp_path, frame, why):
    write_node(tmp_path, frame)
    with pytest.raises(PrepError) as caught:
        list(read_ocdbt_index(tmp_path))
    assert caught.value.why == why


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["set", "cut", "insert", "repeat"]),
        st.integers(0, 1 << 16),
        st.binary(max_size=4),
    ),
    min_size=1,
    max_size=4,
)


def mutated(data: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    for kind, position, new in mutations:
        position %= len(data) + 1
        rest = {
            "set": data[position + len(new) :],
            "cut": data[position + len(new) + 1 :],
            "insert": data[position:],
        }
        data = (
            data[:position] + new * (kind != "cut") + rest.get(kind, data[max(0, position - 9) :])
        )
    return data


@pytest.fixture(scope="module")
def bodies(tmp_path_factory) -> list[tuple[int, bytes]]:
    """Return heights and bodies of all nodes of databases that TensorStore wrote."""
    nodes_found = []
    for config in (
        {"compression": None},
        {"max_inline_value_bytes": 3},
        {"max_decoded_node_bytes": 300},
    ):
        folder = tmp_path_factory.mktemp("db")
        store = open_database(folder, config)
        with ts.Transaction() as transaction:
            for i in range(40):
                store.with_transaction(transaction)[b"layers.w/%d" % i] = b"v" * (i % 7)
        nodes_found += [
            (node["height"], body_of(bytes_at(folder, place)))
            for _, place, node in iter_nodes(folder)
        ]
    assert {height for height, _ in nodes_found} >= {0, 1}
    return nodes_found


def tensorstore_entries(folder: Path, nbytes: int) -> list[OcdbtEntry] | None:
    """Return the entries of a leaf as TensorStore reads them, or None if it rejects the leaf."""
    try:
        return node_entries(dump_node(folder, f"btreenode::node:0:{nbytes}"))
    except Exception:  # TensorStore raises several types
        return None


@pytest.mark.parametrize("count", slow_except((60, 1500), (60,)))
def test_mutated_leaf_matches_tensorstore_or_is_rejected(tmp_path_factory, bodies, count: int):
    @settings(max_examples=count)
    @given(which=st.integers(0, 100), mutations=MUTATIONS, compressed=st.booleans())
    def check(which, mutations, compressed):
        folder = tmp_path_factory.getbasetemp() / "mutated"
        folder.mkdir(exist_ok=True)
        height, body = bodies[which % len(bodies)]
        frame = framed(NODE, mutated(body, mutations), compressed)
        write_node(folder, frame, height)
        try:
            entries = list(read_ocdbt_index(folder))
        except PrepError as error:
            outside = "is not inside" in error.why or "is not a file name" in error.why
            assert height or outside or tensorstore_entries(folder, len(frame)) is None
        else:
            assert height == 0
            # TensorStore also checks fields ignored by the reader.
            assert tensorstore_entries(folder, len(frame)) in (
                None,
                entries,
            )

    check()


@pytest.mark.parametrize("count", slow_except((40, 500), (40,)))
def test_mutated_manifest_is_read_or_rejected(tmp_path_factory, count: int):
    @settings(max_examples=count)
    @given(mutations=MUTATIONS, numbered=st.booleans())
    def check(mutations, numbered):
        folder = tmp_path_factory.getbasetemp() / f"manifest-{numbered}"
        if not folder.exists():
            open_database(folder, {"manifest_kind": "numbered" if numbered else "single"})[b"k"] = (
                b"v"
            )
            for path in folder.glob("manifest.*"):
                path.rename(folder / f"kept-{path.name}")
        kept = sorted(folder.glob("kept-*"))
        for path in kept:
            frame = path.read_bytes()
            body = mutated(body_of(frame), mutations) if path == kept[0] else body_of(frame)
            (folder / path.name.removeprefix("kept-")).write_bytes(framed(TOP, body))
        with contextlib.suppress(PrepError):
            assert list(read_ocdbt_index(folder)) in ([(b"k", b"v")], [])

    check()


@pytest.mark.parametrize("count", slow_except((40, 300), (40,)))
def test_read_ocdbt_index_rejects_random_bytes(tmp_path_factory, count: int):
    @settings(max_examples=count)
    @given(data=st.binary(max_size=200), name=st.sampled_from([OCDBT_MANIFEST, "node"]))
    def check(data, name):
        folder = tmp_path_factory.getbasetemp() / "random"
        folder.mkdir(exist_ok=True)
        write_node(folder, framed(NODE, inlined(2, b"", b"")))
        (folder / name).write_bytes(data)
        with pytest.raises(PrepError):
            list(read_ocdbt_index(folder))
        (folder / OCDBT_MANIFEST).unlink()

    check()
