"""What an export reads and writes: its layout, format, map and sizes of files, and the parts of its source.

The towers are the image and audio encoders of a multimodal model, and multi-token prediction. Decoded weights are
exported as the quantised bytes of their original model, or as their values.
"""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prepcli.commands.operations.checkpoint_options import CommonOptions, open_checkpoint
from prepcli.commands.operations.options import DEFAULT_SHARD_SIZE, ExportOptions
from prepcli.core.errors import Command, Option, PrepError, join_texts, text, usage_error
from prepcli.core.formatting import count_text, did_you_mean, format_bytes, parse_bytes
from prepcli.core.json_values import quote_name
from prepcli.core.observer import Observer
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
from prepcli.restore.digest_checks import towers_digest
from prepcli.sources.dequantized import (
    DECODED_DTYPE,
    has_codes,
    has_quantized_weights,
    with_quantized_bytes,
)
from prepcli.sources.locate import LocatedCheckpoint, locate
from prepcli.sources.mapped import read_map
from prepcli.sources.maps import TensorMap
from prepcli.sources.model_family import (
    models_title,
    text_model,
    text_part_fault,
    towers_title,
    with_towers,
)
from prepcli.sources.open_folder import Access
from prepcli.sources.opening import open_source
from prepcli.sources.recorded_sources import find_quantized_source
from prepcli.sources.references import HubRepo, parse_reference
from prepcli.sources.side_files import check_patterns, matches_any
from prepcli.sources.source import Source
from prepcli.sources.vocabulary_tensors import prediction_vocabulary

DEFAULT_SHARD_NBYTES = 5 * 10**9
# Smaller shard sizes need a unit: `5` means 5 bytes, but the user means 5 GB.
MIN_UNITLESS_NBYTES = 1 << 20
# Formats without files of a chosen size: their name in messages, and the reason.
UNSPLIT_FORMATS = {
    STREAM_FORMAT: ("streams", "an EasyLM stream is one file"),
    ORBAX_FORMAT: ("Orbax items", "their chunks determine the files"),
    TENSORSTORE_FORMAT: ("Levanter checkpoints", "their chunks determine the files"),
}
SOURCE_OPTION = Option("quantized_source", "SOURCE")
# A tower is the image or audio encoder of a multimodal model. Multi-token prediction is stored like one.
NO_TOWERS = "it has no vision or audio towers, and no multi-token prediction"
TOWERS_HINT = text(
    "{} names a copy, {} leaves the towers out",
    Option("towers", "CHECKPOINT"),
    Option("text_only", True),
)


def read_export_map(options: ExportOptions, source: Source) -> TensorMap | None:
    """Return the map of an export, if it has one."""
    path = options.get("map")
    if path is None:
        return None
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
    return read_map(Path(path))


def names_tied_head(tensor_map: TensorMap, source: Source) -> bool:
    """Return whether a map writes an LM head for a model with tied embeddings."""
    tying = source.family.tying
    is_stored = any(tensor.name == tying.head_tensor for tensor in source.tensors)
    if source.family.is_verbatim or is_stored:
        return False
    head = source.names.full_name(tying.head_tensor)
    return any(row.target.name_parts == (head,) for row in tensor_map.rows)


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
    if options["dtype"] and has_codes(source):
        command = Command("save-init", "MODEL", Option("quantized", "dequantize"))
        raise usage_error(
            text("{} would cast scales", Option("dtype", options["dtype"])),
            f"the weights of {source.display_name} are quantised, and kept",
            text("{} decodes them", command),
        )
    if shard_nbytes(options) != DEFAULT_SHARD_NBYTES and file_format(options) in UNSPLIT_FORMATS:
        name, why = UNSPLIT_FORMATS[file_format(options)]
        raise usage_error(
            text("{} is not supported for {}", Option("shard_size"), name),
            why,
            text("remove {}", Option("shard_size")),
        )
    is_safetensors = all(path.name.endswith(f".{SUFFIX}") for path in source.files)
    is_copied = layout == HF_LAYOUT and file_format(options) != DCP_FORMAT
    is_changed = options["dtype"] or options["text_only"] or options["map"] or source.manifest
    if is_copied and not is_changed and source.tensor_file_names and is_safetensors:
        raise usage_error(
            f"cannot export {source.display_name}",
            "it is a Hugging Face folder that transformers reads already",
            text("{}", Command("save-init", source.display_name)),
        )


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


# --- Side files, towers, and quantised bytes


def without_files(source: Source, patterns: Sequence[str]) -> tuple[Source, list[str]]:
    """Return a source without the side files that match a pattern, and their names.

    Raises:
        UsageError: A pattern matches no side file.
    """
    check_patterns("exclude", patterns, source.side_files, source.display_name)
    kept = tuple(file for file in source.side_files if not matches_any(file.name, patterns))
    excluded = [file.name for file in source.side_files if file not in kept]
    return replace(source, side_files=kept), excluded


def select_parts(
    options: ExportOptions, source: Source, access: Access, *, check_digest: bool
) -> Source:
    """Return the source of an export, with the requested parts of a model with towers.

    Raises:
        PrepError: An option does not fit the source, or the towers differ from the ones at the start of the run.
    """
    recorded = source.tree_manifest.towers
    has_towers = source.wrapper is not None or recorded is not None
    towers = options["towers"]
    if options["text_only"]:
        if not has_towers:
            why = text_part_fault(source) or NO_TOWERS
            raise no_effect_error(Option("text_only", True), source, why)
        if towers is not None:
            why = text("{} leaves them out", Option("text_only", True))
            raise no_effect_error(Option("towers", str(towers)), source, why)
        return text_model(source)
    if not has_towers or source.tower_tensors:
        if towers is not None:
            why = "it has its own towers" if has_towers else NO_TOWERS
            raise no_effect_error(Option("towers", str(towers)), source, why)
        return source
    if towers is None and source.wrapper is not None:
        # The model was saved without its towers.
        return source
    recorded = recorded or {}
    path = recorded.get("path") if towers is None else str(towers)
    if not isinstance(path, str):
        what = f"the manifest of {source.display_name} does not name the model with the towers"
        raise PrepError(what, "its `towers` entry has no `path`", TOWERS_HINT)
    what = f"the towers of {source.display_name} cannot be read"
    try:
        other = open_source(locate(path, access=access))
    except PrepError as error:
        raise PrepError(what, f"{error.what}: {error.why}", TOWERS_HINT) from error
    if other.wrapper is None:
        raise PrepError(what, f"{path} has no towers", TOWERS_HINT)
    if check_digest:
        _check_digest(source, other, recorded)
    _check_tokens(source, other)
    return with_towers(source, other)


def no_effect_error(option: Option, source: Source, why: str) -> PrepError:
    """Return the error for an option without effect on the export of a source."""
    what = text("{} has no effect for {}", option, source.display_name)
    return usage_error(what, why, text("remove {}", Option(option.name)))


def _check_tokens(source: Source, other: Source) -> None:
    """Raise PrepError if multi-token prediction has no rows for tokens that were added to a training step."""
    size = source.vocabulary().true_size
    other_size = other.vocabulary().true_size
    if other_size >= size or not any(prediction_vocabulary(other)):
        return
    what = f"the multi-token prediction of {other.display_name} has no rows for new tokens"
    why = f"{other.display_name} has {other_size:,} tokens, {source.display_name} has {size:,}"
    hint = text(
        "{} adds them, then name its output with {}. {} leaves multi-token prediction out",
        Command("add-tokens", other.display_name),
        Option("towers", "CHECKPOINT"),
        Option("text_only", True),
    )
    raise PrepError(what, why, hint)


def _check_digest(source: Source, other: Source, recorded: Any) -> None:
    """Raise PrepError if the towers differ from the record of a training step."""
    # A model that was saved without towers has no record of them.
    if "digest" not in recorded:
        return
    digest = towers_digest(other)
    if recorded.get("digest") == digest:
        return
    what = f"{other.display_name} has other towers than the model of {source.display_name} at its start"
    why = f"their first rows have the digest {digest}, the step records {recorded.get('digest')}"
    hint = text(
        "name the model at the start of the run with {}, or pass {}",
        Option("towers", "CHECKPOINT"),
        Option("text_only", True),
    )
    raise PrepError(what, why, hint)


def take_quantized_bytes(
    options: ExportOptions,
    source: Source,
    located: LocatedCheckpoint,
    common: CommonOptions,
    observer: Observer,
) -> Source:
    """Return a source with the quantised bytes of its original model in place of decoded weights.

    The original is the model of the option `quantized_source`, else the one that the manifest names. If the latter
    cannot be used, a note says why, and the source is returned unchanged: its export has the decoded values.

    Raises:
        PrepError: The model of the option cannot be used, or the option has no effect.
    """
    path = options["quantized_source"]
    option = Option("quantized_source", path)
    if not source.quantized or options["quantized"] == "dequantize":
        if path is not None:
            why = f"{source.display_name} has no decoded weights"
            if source.quantized:
                why = text("{} writes the values", Option("quantized", "dequantize"))
            raise usage_error(text("{} has no effect", option), why, text("remove {}", option))
        return source
    true_vocab = options["true_vocab"]
    # An option that changes the weights, so that their quantised bytes do not fit
    conflict: Option | None = None
    unchanged = {"layout": "hf", "dtype": None, "keep_padding": False, "text_only": False}
    for name, default in unchanged.items():
        if conflict is None and options[name] != default:
            conflict = Option(name, options[name])
    if path is not None:
        if conflict is not None:
            raise usage_error(
                text("{} is not supported for quantised weights", conflict),
                text("{} takes the weights unchanged", option),
                text("remove {}", option),
            )
        # The recorded values are compared while they are read, so any copy of the model may be named.
        original = _open_original(str(path), common, observer)
        return with_quantized_bytes(source, original, true_vocab=true_vocab)
    if conflict is not None:
        reason = text("{} is not supported for quantised weights", conflict)
    else:
        try:
            original = _open_recorded_original(source, located, common, observer)
            return with_quantized_bytes(source, original, true_vocab=true_vocab)
        except PrepError as error:
            why = f": {error.why}" if error.why else ""
            reason = text("{}{}. {} names the quantised model", error.what, why, SOURCE_OPTION)
    count = count_text(len(source.quantized), "decoded weight")
    manifest = source.tree_manifest
    # The dtype of the decoded weights is the same for all.
    record = manifest.tensors.get(next(iter(manifest.quantized))) or {}
    dtype = options["dtype"] or record.get("dtype", DECODED_DTYPE)
    observer.note(text("{} in {}, without the quantised bytes: {}", count, dtype, reason))
    return source


def _open_recorded_original(
    source: Source, located: LocatedCheckpoint, common: CommonOptions, observer: Observer
) -> Source:
    """Open the quantised model of the manifest. A model of the hub is not downloaded."""
    name, manifest = find_quantized_source(source.tree_manifest, located.files.path)
    reference = parse_reference(name)
    if isinstance(reference, HubRepo):
        # Most checkpoints are on a disk, and need no client of the hub.
        from prepcli.sources.remote_folders import cached_model

        name = str(cached_model(reference, manifest.origin.get("commit")))
    original = _open_original(name, common, observer)
    present = [(stamp.path, stamp.size, stamp.digest) for stamp in original.file_stamps]
    for stamp in manifest.source_files:
        if (stamp.get("path"), stamp.get("size"), stamp.get("digest")) not in present:
            path = quote_name(str(stamp.get("path")))
            raise PrepError(
                f"{original.display_name} has changed",
                f"it has no {path} with the recorded size and header",
                text("{} names the quantised model", SOURCE_OPTION),
            )
    return original


def _open_original(name: str, common: CommonOptions, observer: Observer) -> Source:
    """Open a quantised model with the names of its files."""
    original = replace(
        common,
        checkpoint=name,
        step=None,
        revision=None,
        config=None,
        ema=False,
        # Quantised weights have the names of their files anyway. An init has its own names.
        verbatim=None,
        copied_files=(),
        # The option `lock` is for the exported checkpoint. Its records also have the digests of the decoded values, so
        # the original is checked by them.
        lock=None,
        quantized="stored",
    )
    _, source = open_checkpoint(original, observer)
    if not has_quantized_weights(source):
        raise usage_error(
            f"{name} has no quantised bytes",
            "its weights are not quantised",
            text("{}: the quantised model that the checkpoint was made from", SOURCE_OPTION),
        )
    return source
