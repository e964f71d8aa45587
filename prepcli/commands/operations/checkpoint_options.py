"""Open the checkpoint of an operation, as its options say, and check the place of its output."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.operations.operation import reject_without
from prepcli.commands.operations.options import DEFAULT_MEMORY
from prepcli.core.errors import Option, OutputExistsError, text, usage_error
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.json_values import is_utf8, quote_name
from prepcli.core.observer import Observer
from prepcli.core.option_spec import PathLike, as_tuple
from prepcli.engine.budget import parse_memory
from prepcli.execution.folder_output import remove_leftover
from prepcli.execution.workers import ONE_PROCESS, ExecutionOptions, ProcessOptions
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.planning.tensors import OPT_STATE_RULE
from prepcli.restore.digest_checks import note_missing_file_digests
from prepcli.sources.detect import is_quantized
from prepcli.sources.dropped_tensors import drop_tensors
from prepcli.sources.locate import LocatedCheckpoint, locate
from prepcli.sources.model_family import text_part_fault
from prepcli.sources.open_folder import Access, make_access
from prepcli.sources.opening import UNREAD_STATE, open_source
from prepcli.sources.references import KeptScales, default_checkpoint
from prepcli.sources.source import Source, use_averaged_params
from prepcli.sources.tensor_match import MatchOptions
from prepcli.stores.addresses import ObjectStoreUrl, check_local_path, is_url, parse_url
from prepcli.stores.files import (
    check_parent_folder,
    io_error,
    read_small_file,
    stat_file,
    write_file,
)
from prepcli.stores.paths import AnyPath, StorePath
from prepcli.targets.planner import dropped_state

if TYPE_CHECKING:
    from prepcli.formats.lock_file import Lock
    from prepcli.sources.maps import TensorMap


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions(ExecutionOptions):
    """Common options of converting commands: which checkpoint is read, how, and how the output is written.

    The fields have the names and meanings of the options, with these differences.

    Attributes:
        checkpoint: None for the only checkpoint of prep in the current folder.
        out: Output folder or URL. None for a name made from the source's name.
        quantized: `keep` or `dequantize` quantised weights, or `refuse` them. `stored`: like `keep`, without a note,
            or the decoded tensors of GGUF. `decode`: like `dequantize`, also for a model without quantised weights.
        verbatim: None for a checkpoint without a family of its model type.
    """

    checkpoint: str | None
    out: Path | None
    dry_run: bool = False
    offline: bool = False
    revision: str | None = None
    step: int | str | None = None
    stream: bool = False
    config: Path | None = None
    ema: bool = False
    verbatim: bool | None = False
    copied_files: tuple[str, ...] = ()
    lock: Path | None = None
    tensor_map: Path | None = None
    source_layout: str | None = None
    quantized: str = "refuse"
    training_state: bool = False
    drop: tuple[str, ...] = ()
    strict: bool = False


def common_options(
    checkpoint: PathLike | None,
    out: PathLike | None,
    options: Mapping[str, Any],
    *,
    dry_run: bool = False,
    process_options: ProcessOptions | None = None,
) -> CommonOptions:
    """Return the common options of an operation, given all of its options. Missing ones have their defaults."""
    named = {_FIELD_NAMES.get(name, name): value for name, value in options.items()}
    values = {name: value for name, value in named.items() if name in _COMMON_FIELDS}
    for name in ("config", "lock", "tensor_map"):
        if values.get(name) is not None:
            values[name] = Path(values[name])
    for name in ("copied_files", "drop"):
        values[name] = as_tuple(values.get(name, ()))
    values["memory_nbytes"] = parse_memory(values.get("memory_nbytes", DEFAULT_MEMORY))
    values["checkpoint"] = None if checkpoint is None else str(checkpoint)
    values["out"] = None if out is None else Path(out)
    values["dry_run"] = dry_run
    values["process_options"] = process_options or ONE_PROCESS
    return CommonOptions(**values)


# Options with another name than their field of CommonOptions.
_FIELD_NAMES = {"memory": "memory_nbytes", "map": "tensor_map", "copy": "copied_files"}
_COMMON_FIELDS = frozenset(field.name for field in fields(CommonOptions))


def make_match_options(options: Mapping[str, Any]) -> MatchOptions:
    """Return the options of the tensor match, e.g. whether a stored head becomes a leaf."""
    return MatchOptions(
        options["untie"], offers_verbatim="verbatim" in options, offers_drop="drop" in options
    )


def recorded_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options as in a manifest, e.g. the file of `--config` without double slashes."""
    values = dict(options)
    for name in ("config", "map"):
        if values.get(name) is not None:
            values[name] = Path(values[name])
    # An omitted seed means 0. Manifests record neither, so that an equal request has an equal line.
    values["seed"] = values.get("seed") or None
    return values


def checkpoint_access(common: CommonOptions, observer: Observer) -> Access:
    """Return the access to the checkpoints of a command."""
    return make_access(observer, offline=common.offline, stream=common.stream, allow_urls=True)


def _read_lock(common: CommonOptions, checkpoint: str) -> tuple[Lock | None, str | None]:
    """Return the lock of the options, if any, and the revision of the checkpoint to read."""
    if common.lock is None:
        return None, common.revision
    # Only conversions with a lock need the models of lock files, which pydantic builds at import.
    from prepcli.formats.lock_file import read_lock
    from prepcli.sources.recorded_sources import pinned_revision

    lock = read_lock(common.lock)
    return lock, pinned_revision(checkpoint, common.revision, lock)


def _apply_lock(
    source: Source, lock: Lock, common: CommonOptions, located: LocatedCheckpoint
) -> Source:
    """Return a source whose files and tensors are checked against a lock."""
    from prepcli.sources.recorded_sources import apply_lock

    commit = located.files.commit
    is_mapped = common.tensor_map is not None
    return apply_lock(source, lock, str(common.lock), commit, is_mapped=is_mapped)


def _note_unread(source: Source, observer: Observer) -> None:
    """Note what a command does not read or check of an output of prep."""
    if source.manifest is not None:
        note_missing_file_digests(source.display_name, source.manifest, observer)
    if UNREAD_STATE in source.extra_entries:
        observer.warn(f"the training state of {source.display_name} is not read: it is on the hub")


def open_checkpoint(
    common: CommonOptions,
    observer: Observer,
    is_candidate: Callable[[Path], bool] = Path.is_dir,
    *,
    allow_adapters: bool = False,
    kept_scales: KeptScales = "none",
    notes_names: bool = True,
) -> tuple[LocatedCheckpoint, Source]:
    """Locate and open the checkpoint of the options.

    Args:
        common: Options with the checkpoint, its step, revision, config and choice of parameters.
        observer: Receives notes, warnings and progress.
        is_candidate: Condition on the folder of a default checkpoint, if the options name no checkpoint.
        allow_adapters: Accept an adapter of PEFT.
        kept_scales: Outputs of another trainer's layout to read as they are stored.
        notes_names: Call `note_file_names`. A command that takes recorded drops off the source calls it later.

    Returns:
        The located checkpoint and its source. Only headers are read.

    Raises:
        PrepError: The checkpoint does not exist, or cannot be read.
    """
    checkpoint = common.checkpoint
    if checkpoint is None:
        checkpoint = f"./{default_checkpoint(Path(), is_candidate)}"
        observer.note(f"using {checkpoint} (the only prep checkpoint here)")
    is_decoded = common.quantized in ("dequantize", "decode")
    is_kept = _keeps_codes(common)
    access = replace(
        checkpoint_access(common, observer),
        allow_adapters=allow_adapters,
        allow_quantized=is_decoded or is_kept,
        allow_gguf=is_decoded or common.quantized == "stored",
        copied_files=common.copied_files,
        strict=common.strict,
    )
    lock, revision = _read_lock(common, checkpoint)
    located = locate(checkpoint, revision, step=common.step, access=access)
    if isinstance(source_folder := located.manifest_folder, Path):
        # A source may be an output of prep. A kill after its rename leaves its work folder, removed at the next use.
        remove_leftover(source_folder)
    tensor_map: TensorMap | None = None
    if common.tensor_map is not None:
        tensor_map = read_map_option(common.tensor_map, verbatim=common.verbatim)
    verbatim = common.verbatim
    may_have_codes = located.may_be_quantized and (is_kept or common.quantized == "decode")
    has_codes = may_have_codes and is_quantized(located.files.path)
    if is_kept and has_codes:
        verbatim = True
        if common.quantized == "keep":
            option = Option("quantized", "dequantize")
            observer.note(text("quantised weights are kept; {} decodes them", option))
    source = open_source(
        located,
        common.config,
        verbatim=verbatim,
        copied_files=common.copied_files,
        # With `dequantize`, dense weights are an error later.
        dequantize=common.quantized == "dequantize" or (is_decoded and has_codes),
        kept_scales=kept_scales,
        training_state=common.training_state,
        tensor_map=tensor_map,
        layout=common.source_layout,
        drop=common.drop,
    )
    if common.verbatim:
        check_verbatim(source)
    if notes_names and source.family.is_verbatim:
        note_file_names(common, source, observer)
    _note_unread(source, observer)
    if lock is not None:
        source = _apply_lock(source, lock, common, located)
    if common.drop:
        source = drop_tensors(source, common.drop)
    return located, use_averaged_params(source) if common.ema else source


def note_file_names(common: CommonOptions, source: Source, observer: Observer) -> None:
    """Print a note if a multimodal model is read under the names in its files, although nothing asks for it."""
    if common.verbatim is not None or source.manifest is not None:
        return
    why = text_part_fault(source, common.drop)
    if why and not (_keeps_codes(common) and is_quantized(source.root)):
        observer.note(f"{source.display_name} is read under the names in its files: {why}")


def _keeps_codes(common: CommonOptions) -> bool:
    """Return whether quantised weights are read as they are stored.

    A checkpoint keeps its codes and scales only under the names in its files (the verbatim family).
    """
    return common.quantized in ("keep", "stored") and common.verbatim is not False


def check_config_option(*sources: Source) -> None:
    """Raise UsageError for `--config` if all sources already have a config in their manifest."""
    if all(source.tree_manifest for source in sources):
        names = " and ".join(source.display_name for source in sources)
        why = f"{MANIFEST_FILE} already has the config of the model"
        config = Option("config")
        what = text("{} has no effect for {}", config, names)
        raise usage_error(what, why, text("remove {}", config))


def check_allow_overflow(allow_overflow: bool, dtype: str | None) -> None:
    """Raise UsageError for the option `allow_overflow` without a cast."""
    if dtype is None:
        why = "without a cast no value overflows"
        reject_without(Option("allow_overflow"), allow_overflow, Option("dtype"), why)


def check_verbatim(source: Source) -> None:
    """Raise UsageError for `--verbatim` if the source was converted with the names of its family."""
    if not source.family.is_verbatim:
        option = Option("verbatim", True)
        why = f"{source.display_name} was already converted with the tensor names of family {source.family.name}"
        hint = text("remove {}, or convert the original model", option)
        raise usage_error(text("{} has no effect", option), why, hint)


def read_map_option(path: Path, *, verbatim: bool | None) -> TensorMap:
    """Return the map in a file. Raise UsageError if `verbatim` is set, too."""
    if verbatim:
        what = text("{} and {} exclude each other", Option("map"), Option("verbatim", True))
        raise usage_error(what, "a map replaces the names of the file", "remove one of them")
    # Most conversions have no map, and no need of its parser.
    from prepcli.sources.mapped import read_map

    return read_map(path)


def source_line(source: Source) -> str:
    """Describe a source in one line: `EleutherAI/gpt-neo-1.3B  gpt_neo  316 tensors  4.90 GiB float32`."""
    # Decoded weights count as they are written.
    tensors = [tensor.cast(None) for tensor in (*source.tensors, *source.tower_tensors)]
    largest_nbytes = max((t.nbytes for t in tensors), default=0)
    # The scales of norms often stay float32 in a bfloat16 model. Their few bytes do not describe it: the
    # named dtypes have a tensor of at least 1/8 of the largest one.
    dtypes = sorted({t.dtype for t in tensors if t.nbytes * 8 >= largest_nbytes})
    size = format_bytes(sum(t.nbytes for t in tensors))
    family = source.family.name
    if source.wrapper is not None and source.is_multimodal:
        # The text part of a multimodal model, e.g. `llama in llava`
        family += f" in {source.wrapper.config.get('model_type')!s:.60}"
    parts = [
        source.display_name,
        family,
        count_text(len(tensors), "tensor"),
        f"{size} {', '.join(dtypes)}",
    ]
    if source.quantization:
        stored = (*source.tensors, *source.tower_tensors)
        num_decoded = sum(bool(tensor.default_dtype) for tensor in stored)
        method = source.quantization.get("quant_method")
        parts.append(f"{num_decoded} decoded from {method}")
    state = dropped_state(source)
    if nbytes := sum(part.nbytes for part in state if part.rule == OPT_STATE_RULE):
        parts.append(f"optimizer state {format_bytes(nbytes)}")
    if len(source.files) > 1:
        parts.append(count_text(len(source.files), "file"))
    return "  ".join(parts)


def check_recorded_names(names: Iterable[str]) -> None:
    """Raise UsageError for a name that no manifest, lock or map can record: they are UTF-8."""
    for name in names:
        if not is_utf8(name):
            what = f"{quote_name(name)} is not UTF-8"
            raise usage_error(what, "outputs record it as UTF-8", "rename it")


# --- The place of an output


UNWRITTEN_SOURCES = "sources are never written to"


def check_output_location(out: Path | ObjectStoreUrl, source: Source) -> None:
    """Raise UsageError if writing the output would change or delete the source or the user's own folders."""
    if isinstance(out, ObjectStoreUrl):
        _check_objects(out, source)
        return
    target = out.resolve()
    # A conversion writes to NAME.partial and renames it at the end, so neither name may be the source.
    partial = target.parent / f"{target.name}.partial"
    root_folder = source.root
    if isinstance(root_folder, StorePath):
        return
    source_files: list[AnyPath] = []
    if not root_folder.is_file():
        source_files = [*source.files, *(file.path for file in source.side_files)]
    # Links may point to other folders, so each file is resolved.
    file_folders = (path.resolve().parent for path in source_files)
    weight_folders = {root_folder.resolve(), *(path.resolve().parent for path in source.files)}
    other_name = text("{}", Option("out", "NAME"))
    for root in dict.fromkeys((root_folder.resolve(), *file_folders)):
        if root in (target, partial):
            raise usage_error(f"the output {out} is the source", UNWRITTEN_SOURCES, other_name)
        # An output inside a folder of settings is allowed.
        if root in target.parents and root in weight_folders:
            hint = text("{}", Option("out", f"../{out.name}"))
            raise usage_error(f"the output {out} is inside the source", UNWRITTEN_SOURCES, hint)
        if target in root.parents:
            raise usage_error(
                f"the source is inside the output {out}", "it would be deleted", other_name
            )
    for folder in (Path.cwd(), Path(os.path.expanduser("~")).resolve()):
        if target == folder or target in folder.parents:
            what = f"the output {out} would replace the current folder or your home folder"
            why = f"{folder} is inside it, and outputs replace whole folders"
            raise usage_error(what, why, other_name)


def _check_objects(url: ObjectStoreUrl, source: Source) -> None:
    """Raise UsageError if the output would replace objects of the source, or of the folder around it."""
    if not is_url(source.display_name):
        return
    source_url = parse_url(source.display_name)
    if (source_url.scheme, source_url.bucket) != (url.scheme, url.bucket):
        return
    out_parts = url.path.split("/") if url.path else []
    source_parts = source_url.path.split("/") if source_url.path else []
    num_common = min(len(out_parts), len(source_parts))
    if out_parts[:num_common] == source_parts[:num_common]:
        what = f"the output {url} and the source {source_url} overlap"
        raise usage_error(what, UNWRITTEN_SOURCES, text("{}", Option("out", "URL")))


# --- The single file of a result


def check_result_path(path: Path) -> None:
    """Check that a result can be written, before the work for it begins.

    Raises:
        PrepError: The path is a URL, something other than a regular file has the name, or its folder does not exist.
    """
    check_local_path(path)
    check_parent_folder(path)
    if path.exists():
        stat_file(path)


def write_result(
    path: Path,
    data: bytes,
    overwrite: bool,
    *,
    why: str = "its content differs",
    hint: str = "{} replaces it",
) -> bool:
    """Write the file of a result, and return whether an equal file exists already.

    Raises:
        OutputExistsError: The file has other content, and `overwrite` is False.
        PrepError: The file cannot be read or written.
    """
    if path.exists():
        # A larger file differs, so its content is not read.
        has_equal_size = stat_file(path).st_size == len(data)
        if has_equal_size and read_small_file(path, max_nbytes=len(data)) == data:
            return True
        if not overwrite:
            what = f"{path} already exists"
            raise OutputExistsError(what, why, text(hint, Option("overwrite", True)))
    try:
        write_file(path, data)
    except OSError as error:
        raise io_error(path, error) from error
    return False
