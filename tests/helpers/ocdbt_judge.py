"""OCDBT databases as TensorStore reads them, the judge of what prep writes and reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from prepcli.formats.ocdbt import Entry, Place, write_database
from tests.helpers.orbax_items import NOW_NS

CONTEXT = ts.Context()


def base_of(folder: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()


def opened(folder: Path, config: Mapping[str, Any] | None = None) -> ts.KvStore:
    """The database of a folder, to be read and written."""
    spec = {"driver": "ocdbt", "base": f"file://{folder}/", "config": config or {}}
    return ts.KvStore.open(spec, context=CONTEXT).result()


def write_whole(folder: Path, entries: Mapping[bytes, bytes | Place], node_bytes: int = 1 << 20) -> list[Entry]:
    """A database that prep writes."""
    in_order = sorted(entries.items())
    write_database(folder, in_order, NOW_NS, node_bytes)
    return in_order


def place_of(location: str) -> Place:
    """A location as TensorStore spells it: `kind:base path:path:offset:length`, both paths percent-encoded."""
    _, base, path, offset, nbytes = location.split(":")
    return Place(unquote(base) + unquote(path), int(offset), int(nbytes))


def node_at(folder: Path, location: str) -> dict[str, Any]:
    return ts.ocdbt.dump(base_of(folder), location).result()


def nodes(folder: Path) -> Iterator[tuple[bytes, Place, dict[str, Any]]]:
    """All nodes of the newest version in the order of their keys, with what goes before these, and where each lies."""
    waiting = [(b"", ts.ocdbt.dump(base_of(folder)).result()["versions"][-1]["root"]["location"])]
    while waiting:
        prefix, location = waiting.pop()
        node = node_at(folder, location)
        yield prefix, place_of(location), node
        if node["height"]:
            below = [(prefix + each["subtree_common_prefix"], each["location"]) for each in node["entries"]]
            waiting += reversed(below)


def entries_of(node: dict[str, Any], prefix: bytes = b"") -> list[Entry]:
    """The entries of a leaf."""
    values = (e["inline_value"] if "inline_value" in e else place_of(e["indirect_value"]) for e in node["entries"])
    return [(prefix + entry["key"], value) for entry, value in zip(node["entries"], values)]


def all_entries(folder: Path) -> list[Entry]:
    return [entry for prefix, _, node in nodes(folder) if not node["height"] for entry in entries_of(node, prefix)]
