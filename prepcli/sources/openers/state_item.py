"""The optimizer state of Tunix: an item of its own next to the parameters, read together with them."""

from __future__ import annotations

from dataclasses import replace

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.engine.digest import digest
from prepcli.formats.orbax import (
    STATE_ITEMS,
    OrbaxItem,
    find_name_clash,
    item_metadata_file,
    read_item,
)
from prepcli.formats.orbax_chunks import ChunkTable, StoredRange
from prepcli.formats.untrusted import quote_name


def with_state_item(item: OrbaxItem) -> OrbaxItem:
    """Return an item of parameters with the arrays of the optimizer state next to it, if there is one.

    Raises:
        PrepError: The other item is invalid, or both have an array of one name.
    """
    name = STATE_ITEMS.get(item.folder.name)
    if name is None or item_metadata_file(item.folder.parent / name) is None:
        return item
    state = read_item(item.folder.parent / name, is_remote=item.is_remote)
    clash = find_name_clash(array.path for array in (*item.arrays, *state.arrays))
    if clash is not None:
        what = f"{item.folder.parent} has {quote_name(clash[0])} twice"
        raise DamagedError(what, f"it is in {item.folder.name} and in {name}", GET_AGAIN_HINT)
    chunks = tuple(_move_files(table, len(item.files)) for table in state.chunks)
    return replace(
        item,
        arrays=(*item.arrays, *state.arrays),
        chunks=(*item.chunks, *chunks),
        codec_names=(*item.codec_names, *state.codec_names),
        files=(*item.files, *state.files),
        value_types=(*item.value_types, *state.value_types),
        non_arrays=(*item.non_arrays, *state.non_arrays),
        unlisted_names=(*item.unlisted_names, *state.unlisted_names),
        metadata_digest=digest((item.metadata_digest + state.metadata_digest).encode()),
    )


def _move_files(table: ChunkTable, first_file: int) -> ChunkTable:
    """Return the chunks of an array in files with numbers from `first_file` on."""
    moved: ChunkTable = {}
    for index, value in table.items():
        if isinstance(value, StoredRange):
            moved[index] = replace(value, file=value.file + first_file)
        else:
            moved[index] = value
    return moved
