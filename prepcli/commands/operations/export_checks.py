"""Checks of the layout, the format and the size of files of an export. They need no values of tensors."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from prepcli.commands.operations.export_layouts import check_storage, file_format
from prepcli.commands.operations.options import DEFAULT_SHARD_SIZE, ExportOptions
from prepcli.core.errors import Command, Option, join_texts, text, usage_error
from prepcli.core.formatting import format_bytes, parse_bytes
from prepcli.core.suggest import did_you_mean
from prepcli.formats.safetensors import SUFFIX
from prepcli.models.registry import FAMILIES
from prepcli.planning.libraries import (
    DCP_FORMAT,
    HF_LAYOUT,
    LIBRARIES,
    LIBRARIES_BY_LAYOUT,
    ORBAX_FORMAT,
    STREAM_FORMAT,
    TENSORSTORE_FORMAT,
)
from prepcli.sources.multimodal import models_title, towers_title
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
