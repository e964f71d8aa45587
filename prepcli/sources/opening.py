"""Opening of a located checkpoint, by the opener for its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text, did_you_mean, join_names
from prepcli.core.json_values import quote_name
from prepcli.formats.manifest import again_hints, check_files
from prepcli.formats.registry import FORMATS
from prepcli.models.parameters import VERBATIM
from prepcli.models.registry import FAMILIES
from prepcli.planning.libraries import HF_LAYOUT
from prepcli.planning.plan import DroppedTensor, SourceFile
from prepcli.planning.tensors import OPT_STATE_RULE
from prepcli.sources.dequantized import dequantize_source, without_unused_quantization
from prepcli.sources.dropped_tensors import UNINDEXED_RULE, matching_drops, unindexed_names
from prepcli.sources.foreign_trees import NATIVE_LAYOUT
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.mapped import apply_map, apply_recorded_map, recorded_map
from prepcli.sources.maps import TensorMap
from prepcli.sources.model_family import split_towers, verbatim_error
from prepcli.sources.open_folder import OpenFolder
from prepcli.sources.references import CONFIG, KeptScales, SourceHints
from prepcli.sources.side_files import check_patterns, unread_weights
from prepcli.sources.source import Source, check_headers
from prepcli.stores.files import list_folder
from prepcli.stores.paths import SMALL_NBYTES, StorePath, fetch_copies, is_remote

# A note names at most this many tensors that the index does not name.
MAX_UNINDEXED_NAMES = 5
# Entry for the training state of an output of prep on the hub.
UNREAD_STATE = DroppedTensor("training state", 0, OPT_STATE_RULE)


def open_source(
    located: LocatedCheckpoint,
    config_path: Path | None = None,
    *,
    verbatim: bool | None = False,
    copied_files: tuple[str, ...] = (),
    dequantize: bool = False,
    kept_scales: KeptScales = "none",
    training_state: bool = False,
    tensor_map: TensorMap | None = None,
    layout: str | None = None,
    drop: tuple[str, ...] = (),
) -> Source:
    """Read the headers and settings of a located checkpoint, but no weights.

    Args:
        located: Result of `locate`.
        config_path: The user's config.json, or a folder with one, if any.
        verbatim: True: use the verbatim family. None: use it if no family has the model_type. False: raise then.
        copied_files: Name patterns of further side files to copy.
        dequantize: Decode quantised weights.
        kept_scales: Outputs of another trainer's layout to read as they are stored. See `SourceHints`.
        training_state: Read the optimizer state of another framework. It is read in any case from an output of prep.
        tensor_map: Map from the tensors of the files to the tensors of a model. Default: the map in the manifest.
        layout: Layout of a tree of another library. Default: the layout with the best fit.
        drop: Patterns of tensors that may lie among those of a text part. They stay in the source.

    Raises:
        UsageError: A pattern of `copied_files` matches no side file.
        PrepError: The checkpoint is broken, a file differs from its record in the manifest, or the family is verbatim
            and excluded.
    """
    with again_hints(located.manifest):
        export_map: TensorMap | None = None
        if located.manifest is not None:
            check_recorded_files(located)
            if tensor_map is None:
                export_map = recorded_map(located.manifest)
        if layout is not None:
            _check_layout_option(located, layout)
        hints = SourceHints(
            config_path,
            located.part,
            # A map is about the names in the files.
            True if tensor_map or export_map else verbatim,
            copied_files,
            kept_scales=kept_scales,
            layout=layout,
            training_state=training_state,
            drop=drop,
        )
        source = read_source(located, hints)
        if copied_files:
            check_patterns("copy", copied_files, source.side_files, located.display_name)
        _note_reading(source, located, drop)
        if layout is not None:
            _check_layout_is_used(source, located, layout, is_requested=hints.verbatim is True)
        if training_state or source.manifest is not None:
            source = _with_training_state(source, located, is_requested=training_state)
        if source.manifest is not None:
            check_headers(source.folder, source.manifest, source.file_stamps)
        source = _with_listed_files(source, located.files)
        if export_map is None and hints.verbatim:
            source = _with_model_digests(source, located, config_path)
        row = FORMATS[located.kind]
        if row.is_hf_folder and (located.may_be_quantized or config_path is not None):
            source = without_unused_quantization(source)
        # The opener of GGUF files has already decoded the weights.
        if dequantize and not source.quantization:
            source = dequantize_source(source)
        if tensor_map is not None:
            source = apply_map(source, tensor_map)
        elif export_map is not None:
            source = apply_recorded_map(source, export_map)
        if row.has_hf_names:
            source = _split_unless_verbatim(source, verbatim, drop)
        if verbatim is False and source.family.is_verbatim:
            raise verbatim_error(located.display_name)
        return source


def _with_model_digests(
    source: Source, located: LocatedCheckpoint, config_path: Path | None
) -> Source:
    """Return a verbatim source whose tensors are checked by the digests of the model in the same files.

    The manifest may have the digests of the model's tensors, and not of the names in these files.
    """
    is_recorded = source.manifest is not None and bool(source.manifest.tensors)
    if not is_recorded or all(tensor.digests for tensor in source.tensors):
        return source
    model = open_source(located, config_path, verbatim=None, kept_scales="all")
    stored = tuple(tensor for tensor in model.all_tensors if tensor.digests)
    # A name that both views have need not be of the same bytes.
    tensors = tuple(replace(tensor, digests=(), made_from=stored) for tensor in source.tensors)
    return replace(source, tensors=tensors)


def _check_layout_option(located: LocatedCheckpoint, layout: str) -> None:
    """Raise PrepError if the layout of a checkpoint is known, and the requested one has no effect or differs."""
    if not FORMATS[located.kind].has_layouts:
        recorded = HF_LAYOUT
        why = "its tensors have the names of Hugging Face"
    elif located.manifest is not None:
        recorded = located.manifest.layout or NATIVE_LAYOUT
        why = f"its manifest records the layout {recorded}"
    else:
        return
    if layout == recorded:
        return
    option = Option("source_layout", layout)
    hint = text("remove {}", Option("source_layout"))
    names = dict.fromkeys([HF_LAYOUT, NATIVE_LAYOUT])
    for family in FAMILIES.values():
        names.update(dict.fromkeys(family.layouts))
    if layout not in names:
        why = f"the layouts are {', '.join(names)}"
        raise PrepError(text("{} is unknown", option), why, did_you_mean(layout, [*names]) or hint)
    raise PrepError(text("{} contradicts {}", option, located.display_name), why, hint)


def _check_layout_is_used(
    source: Source, located: LocatedCheckpoint, layout: str, *, is_requested: bool
) -> None:
    """Raise UsageError if tensors keep their own names, so that the requested layout has no effect.

    `is_requested` says whether the user asked for the names in the files.
    """
    is_foreign = located.manifest is None and FORMATS[located.kind].has_layouts
    if not is_foreign or not source.family.is_verbatim or layout == HF_LAYOUT:
        return
    option = Option("source_layout", layout)
    what = text("{} has no effect for {}", option, located.display_name)
    if is_requested:
        why = "its tensors are read under the names in its files"
        raise usage_error(what, why, text("remove {}", Option("source_layout")))
    why = f"no {CONFIG} describes a model with this layout"
    hint = text("{}: a folder with the model's {}", Option("config", "FOLDER"), CONFIG)
    raise usage_error(what, why, hint)


def read_source(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the headers and settings of a checkpoint with the opener of its format. Only its module is imported."""
    module, _, name = FORMATS[located.kind].opener.partition(".")
    read = getattr(import_module(f"prepcli.sources.openers.{module}"), name)
    source = read(located, hints)
    assert isinstance(source, Source)
    return source


def _with_listed_files(source: Source, files: OpenFolder) -> Source:
    """Return a source with descriptions of the files that a conversion leaves out, and the digests of a server."""
    unread: list[str] = []
    # The checksums of an Orbax item of prep are in a *.bin file.
    if source.root.is_dir() and not source.tree_manifest:
        read_names = {path.name for path in source.files}
        is_listed = source.root == files.path
        names = files.listed_names if is_listed else list_folder(source.root)
        unread = unread_weights(names, read_names)
    omitted = dict.fromkeys((*source.omitted, *files.omitted, *unread))
    source = replace(source, omitted=tuple(omitted))
    if not is_remote(source.files):
        return source
    stamps: list[SourceFile] = []
    for stamp, path in zip(source.file_stamps, source.files):
        if isinstance(path, StorePath):
            stamp = SourceFile(stamp.path, path.file.size, 0, path.file.digest)
        stamps.append(stamp)
    return replace(source, file_stamps=tuple(stamps))


def _note_reading(source: Source, located: LocatedCheckpoint, drop: Sequence[str]) -> None:
    """Note how the files of a source were read."""
    if source.extra_entries:
        entries = [entry for entry in source.extra_entries if entry.rule == UNINDEXED_RULE]
        refused: list[DroppedTensor] = []
        if located.access.strict:
            for entry, name in zip(entries, unindexed_names(entries), strict=True):
                if not matching_drops(name, source, drop):
                    refused.append(entry)
        names = [entry.name for entry in refused or entries]
        if names:
            verb = "is" if len(names) == 1 else "are"
            count = f"{count_text(len(names), 'tensor')} of {source.display_name}"
            listed = join_names(names, max_names=MAX_UNINDEXED_NAMES)
            if refused:
                what = f"{count} {verb} not in its index"
                option = Option("strict", True)
                hint = text("without {} they are ignored", option)
                raise PrepError(what, listed, hint)
            located.access.note(f"{count} {verb} ignored: not in its index: {listed}")
    for note in source.notes:
        located.access.note(note)
    if prefix := source.names.wrapper_prefix:
        located.access.note(
            f"the prefix {quote_name(prefix)} of all tensors of {located.display_name} is taken off"
        )


def _with_training_state(
    source: Source, located: LocatedCheckpoint, *, is_requested: bool
) -> Source:
    """Return the source with its training state, if it is requested or prep wrote it.

    Raises:
        UsageError: prep reads no training state of this format, or none from the hub.
    """
    is_written = source.manifest is not None and "training_state" in source.manifest
    # The state may have been read together with the parameters, e.g. from an Orbax item.
    has_state = source.tree_manifest.is_tree or source.training_record is not None
    if has_state or not (is_requested or is_written):
        return source
    if located.files.commit is not None and not is_requested:
        # Of a checkpoint on the hub, only the files of the model are read.
        return replace(source, extra_entries=(*source.extra_entries, UNREAD_STATE))
    option = Option("training_state", True)
    if located.files.commit is not None:
        what = text("{} is not supported for {}", option, located.display_name)
        raise usage_error(what, "only the files of its model are read", "copy it to this machine")
    if FORMATS[located.kind].is_hf_folder:
        from prepcli.sources.torch_state import read_trainer_checkpoint

        return read_trainer_checkpoint(source)
    if located.kind == "dcp":
        from prepcli.sources.torch_state import read_dcp_state

        return read_dcp_state(source)
    what = text("{} is not supported for {}", option, located.display_name)
    why = "its format has no training state that prep reads"
    raise usage_error(what, why, text("remove {}", option))


def _split_unless_verbatim(source: Source, verbatim: bool | None, drop: Sequence[str]) -> Source:
    """Return a source with the towers beside its parameters, unless its names are kept."""
    if not source.family.is_verbatim:
        return split_towers(source, drop)
    was_verbatim = source.manifest is not None and source.manifest.family == VERBATIM
    # A map without a family keeps its names, too.
    if verbatim or source.tensor_map or (verbatim is None and was_verbatim):
        return source
    return split_towers(source, drop)


def check_recorded_files(located: LocatedCheckpoint) -> None:
    """Check the recorded files of an output of prep, as far as they were fetched."""
    manifest = located.manifest
    files = located.files
    if manifest is None:
        return
    folder = located.manifest_folder
    records = manifest.files
    selected = {*records}
    # The rest of a model on the hub was not downloaded. What is absent here is not missing there.
    if files.commit is not None:
        selected = {name for name in selected if (folder / name).exists()}
    # The digest of a larger file on a server is compared with its bytes while these are read.
    if files.is_remote:
        selected = {name for name in selected if records[name]["bytes"] <= SMALL_NBYTES}
        # Files of tensors have a digest of their header, which is compared when the header is read.
        fetch_copies(folder / name for name in selected if "xxh3" in records[name])
        hint = "upload {} again: {} works on local outputs only"
        check_files(
            folder, manifest, selected, hint=lambda name: text(hint, name, Option("accept"))
        )
    else:
        check_files(folder, manifest, selected)
