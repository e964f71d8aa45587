"""Read and write OCDBT databases with TensorStore, the reference implementation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from prepcli.formats.ocdbt import OcdbtEntry, ValueLocation
from tests.helpers.orbax_items import NOW_NS, write_ocdbt_index

CONTEXT = ts.Context()


def open_folder(folder: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()


def open_database(folder: Path, config: Mapping[str, Any] | None = None) -> ts.KvStore:
    """Open the database of a folder for reading and writing."""
    spec = {"driver": "ocdbt", "base": f"file://{folder}/", "config": config or {}}
    return ts.KvStore.open(spec, context=CONTEXT).result()


def write_entries(
    folder: Path, entries: Mapping[bytes, bytes | ValueLocation], node_bytes: int = 1 << 20
) -> list[OcdbtEntry]:
    """Write a database with prep; return its entries in order."""
    in_order = sorted(entries.items())
    write_ocdbt_index(folder, in_order, NOW_NS, node_bytes)
    return in_order


def parse_location(location: str) -> ValueLocation:
    """Parse TensorStore's location `kind:base path:path:offset:length`, with percent-encoded paths."""
    _, base, path, offset, nbytes = location.split(":")
    return ValueLocation(unquote(base) + unquote(path), int(offset), int(nbytes))


def dump_node(folder: Path, location: str) -> dict[str, Any]:
    return ts.ocdbt.dump(open_folder(folder), location).result()


def iter_nodes(folder: Path) -> Iterator[tuple[bytes, ValueLocation, dict[str, Any]]]:
    """Yield key prefix, location and content of all nodes of the newest version, in the order of keys."""
    pending = [
        (b"", ts.ocdbt.dump(open_folder(folder)).result()["versions"][-1]["root"]["location"])
    ]
    while pending:
        prefix, location = pending.pop()
        node = dump_node(folder, location)
        yield prefix, parse_location(location), node
        if node["height"]:
            children = [
                (prefix + child["subtree_common_prefix"], child["location"])
                for child in node["entries"]
            ]
            pending += reversed(children)


def node_entries(node: dict[str, Any], prefix: bytes = b"") -> list[OcdbtEntry]:
    """Return the entries of a leaf node."""
    values = (
        e["inline_value"] if "inline_value" in e else parse_location(e["indirect_value"])
        for e in node["entries"]
    )
    return [(prefix + entry["key"], value) for entry, value in zip(node["entries"], values)]


def read_all_entries(folder: Path) -> list[OcdbtEntry]:
    """Return the entries of all leaf nodes of an OCDBT database."""
    return [
        entry
        for prefix, _, node in iter_nodes(folder)
        if not node["height"]
        for entry in node_entries(node, prefix)
    ]
