"""The layout, the format, the map and the size of files of an export, and their checks. They need no values."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from prepcli.commands.operations.options import DEFAULT_SHARD_SIZE, ExportOptions
from prepcli.core.errors import Command, Option, join_texts, text, usage_error
from prepcli.core.formatting import did_you_mean, format_bytes, parse_bytes
from prepcli.engine.digest import record_digest
from prepcli.formats.safetensors import SUFFIX
from prepcli.models.registry import FAMILIES
from prepcli.planning.item_storage import LEVANTER, OCDBT, ORBAX_STORAGES, ItemStorage
from prepcli.planning.libraries import (
    DCP_FORMAT,
    HF_LAYOUT,
    LIBRARIES,
    LIBRARIES_BY_LAYOUT,
    ORBAX_FORMAT,
    STREAM_FORMAT,
    TENSORSTORE_FORMAT,
    find_library,
)
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.mapped import CONTENT_KEY, read_map
from prepcli.sources.maps import TensorMap
from prepcli.sources.model_family import models_title, towers_title
from prepcli.sources.source import Source

DEFAULT_SHARD_NBYTES = 5 * 10**9
# Smaller shard sizes need a unit: `5` means 5 bytes, but the user means 5 GB.
MIN_UNITLESS_NBYTES = 1 << 20
# Formats without files of a chosen size: their name in messages, and the reason.
UNSPLIT_FORMATS = {
    STREAM_FORMAT: ("streams", "an EasyLM stream is one file"),
    ORBAX_FORMAT: ("Orbax items", "their chunks determine the files"),
    TENSORSTORE_FORMAT: ("Levanter checkpoints", "their chunks determine the files"),
}


@dataclass(frozen=True, slots=True)
class WrittenMap:
    """The map of an export.

    Attributes:
        tensor_map: The map, or None for the names of the layout.
        record: Its entry in the manifest. With its content, the output is read without a file.
    """

    tensor_map: TensorMap | None = None
    record: Manifest = field(default_factory=Manifest)

    def names_tied_head(self, source: Source) -> bool:
        """Return whether the map writes an LM head for a model with tied embeddings."""
        if self.tensor_map is None or source.family.is_verbatim:
            return False
        tying = source.family.tying
        if any(tensor.name == tying.head_tensor for tensor in source.tensors):
            return False
        head = source.names.full_name(tying.head_tensor)
        return any(row.target.name_parts == (head,) for row in self.tensor_map.rows)


def read_export_map(options: ExportOptions, source: Source) -> WrittenMap:
    """Return the map of an export.

    Raises:
        UsageError: The map is for safetensors files of a text model, and the export is not.
        PrepError: The file cannot be read.
    """
    path = options.get("map")
    if path is None:
        return WrittenMap()
    option = Option("map")
    other = ""
    if options["layout"] != HF_LAYOUT:
        other = f"the layout {options['layout']}"
    elif options["format"] not in (None, SUFFIX):
        other = f"the format {options['format']}"
    elif source.wrapper is not None:
        other = models_title(source)
    if other:
        why = f"a map names tensors of {SUFFIX} files"
        raise usage_error(
            text("{} is not supported for {}", option, other), why, text("remove {}", option)
        )
    tensor_map = read_map(Path(path))
    record = {
        "name": tensor_map.name,
        "xxh3": record_digest(tensor_map.content.encode()),
        CONTENT_KEY: tensor_map.content,
    }
    return WrittenMap(tensor_map, Manifest(map=record))


def file_format(options: ExportOptions) -> str:
    """Return the format of the files: the requested one, or the default of a known layout."""
    return find_library(options["layout"], options["format"]).file_format


def written_storage(options: ExportOptions) -> ItemStorage:
    """Return the storage of the arrays of an item."""
    if file_format(options) == TENSORSTORE_FORMAT:
        return LEVANTER
    return ORBAX_STORAGES[options["storage"]]


def check_storage(options: ExportOptions) -> None:
    """Raise UsageError if a storage is requested for a layout without an Orbax item."""
    layout = options["layout"]
    is_default = ORBAX_STORAGES[options["storage"]] == OCDBT
    if is_default or find_library(layout).file_format == ORBAX_FORMAT:
        return
    layouts = [
        name for name in LIBRARIES_BY_LAYOUT if find_library(name).file_format == ORBAX_FORMAT
    ]
    option = Option("storage", options["storage"])
    raise usage_error(
        text("{} is not supported with {}", option, Option("layout", layout)),
        f"it is about Orbax items, the layouts {', '.join(layouts)}",
        text("remove {}, or use {} for prep's own tree", option, Command("save-init")),
    )


def parse_shard_size(size: str) -> int:
    """Parse the option `shard_size`. Raise UsageError for 0, and for less than 1 MiB without a unit."""
    nbytes = parse_bytes(size, "shard_size")
    number = size.strip()
    option = Option("shard_size", size)
    if nbytes == 0:
        raise usage_error(
            text("invalid {}", option),
            "a file has at least one byte",
            text("{}", Option("shard_size", DEFAULT_SHARD_SIZE)),
        )
    if number.replace(".", "").isdecimal() and nbytes < MIN_UNITLESS_NBYTES:
        why = f"a number without a unit is in bytes: {format_bytes(nbytes)}"
        hint = text("{}", Option("shard_size", f"{number}GB"))
        raise usage_error(text("{} has no unit", option), why, hint)
    return nbytes


def shard_nbytes(options: ExportOptions) -> int:
    """Return the maximum size of a file."""
    size = options["shard_size"]
    return parse_shard_size(size) if isinstance(size, str) else size


def check_request(options: ExportOptions, source: Source) -> None:
    """Raise UsageError for a conflict of layout, format and size, and for an export without any change."""
    layout = options["layout"]
    if layout not in LIBRARIES_BY_LAYOUT:
        layouts = list(LIBRARIES_BY_LAYOUT)
        raise usage_error(
            text("{} is unknown", Option("layout", layout)),
            f"the layouts are {', '.join(layouts)}",
            did_you_mean(layout, layouts),
        )
    check_storage(options)
    _check_format(layout, options["format"])
    _check_layout_of_model(layout, source)
    _check_shard_size(options)
    _check_is_changed(options, source)


def _check_format(layout: str, requested_format: str | None) -> None:
    """Raise UsageError for a format without support in the layout."""
    formats = [library.file_format for library in LIBRARIES_BY_LAYOUT[layout]]
    if requested_format is None or requested_format in formats:
        return
    requested = text("{} {}", Option("layout", layout), Option("format", requested_format))
    hint = text("remove {}", Option("format"))
    for library in LIBRARIES:
        if requested_format == library.file_format:
            other = text("use {}", Option("layout", library.layouts[0]))
            hint = join_texts(", or ", [hint, other])
            break
    raise usage_error(
        text("{} is not supported", requested),
        f"the layout {layout} has the format {' or '.join(formats)}",
        hint,
    )


def _check_layout_of_model(layout: str, source: Source) -> None:
    """Raise UsageError for a layout without names for the tensors of the model."""
    # A source with towers has a family without the layouts of its parameters.
    family = FAMILIES.get(source.family.name, source.family)
    supported = (HF_LAYOUT, *family.layouts)
    if layout not in supported:
        raise usage_error(
            f"layout {layout} is not supported for {family.name}",
            f"supported: {', '.join(supported)}",
            text("{}", Option("layout", HF_LAYOUT)),
        )
    if layout != HF_LAYOUT and source.wrapper is not None:
        raise usage_error(
            f"layout {layout} is not supported for {models_title(source)}",
            f"it has no names for the {towers_title(source)} of {source.display_name}",
            text("{} leaves them out", Option("text_only", True)),
        )


def _check_shard_size(options: ExportOptions) -> None:
    """Raise UsageError for a size of files in a format of one file."""
    if shard_nbytes(options) == DEFAULT_SHARD_NBYTES:
        return
    if file_format(options) in UNSPLIT_FORMATS:
        name, why = UNSPLIT_FORMATS[file_format(options)]
        raise usage_error(
            text("{} is not supported for {}", Option("shard_size"), name),
            why,
            text("remove {}", Option("shard_size")),
        )


def _check_is_changed(options: ExportOptions, source: Source) -> None:
    """Raise UsageError if the output would be a copy of a Hugging Face folder."""
    if options["layout"] != HF_LAYOUT or file_format(options) == DCP_FORMAT:
        return
    if options["dtype"] or options["text_only"] or options["map"] or source.manifest:
        return
    if source.tensor_file_names and _is_all_safetensors(source):
        raise usage_error(
            f"cannot export {source.display_name}",
            "it is a Hugging Face folder that transformers reads already",
            text("{}", Command("save-init", source.display_name)),
        )


def _is_all_safetensors(source: Source) -> bool:
    return all(path.name.endswith(f".{SUFFIX}") for path in source.files)
