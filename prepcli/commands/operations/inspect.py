"""Read the headers of a checkpoint: its tensors, their statistics, their shards, or the difference to another one."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NotRequired, TypedDict, Unpack

from prepcli.commands.operations.inspection_options import InspectOptions, SortKey, ViewOptions
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.results import Inspection, TensorSummary
from prepcli.core.errors import Command, Option, PrepError, Text, join_texts, text, usage_error
from prepcli.core.formatting import suggest
from prepcli.core.observer import Observer, SilentObserver
from prepcli.core.option_spec import PathLike
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import MIN_MEMORY_NBYTES, collector_paused
from prepcli.formats.manifest import again_hint
from prepcli.formats.registry import FORMATS, Kind
from prepcli.inspection.contents import (
    AdapterSummary,
    CheckpointContents,
    read_contents,
    read_mapped_contents,
)
from prepcli.inspection.logical_leaves import (
    LogicalLeaf,
    count_parameters,
    find_leaf,
    logical_leaves,
    nbytes_below,
    partition_rules,
)
from prepcli.inspection.tensor_stats import TensorStats, compute_stats, stored_nbytes
from prepcli.models.mesh import Mesh, parse_mesh
from prepcli.models.parameters import VERBATIM
from prepcli.models.partition import Spec
from prepcli.models.rules import merge_rules
from prepcli.planning.manifest_fields import VocabularyRecord
from prepcli.planning.tensors import OPT_STATE
from prepcli.restore.digest_checks import check_tensors
from prepcli.sources.dequantized import DECODED_DTYPE
from prepcli.sources.detect import is_quantized, model_quantization
from prepcli.sources.locate import LocatedCheckpoint, check_stream, locate
from prepcli.sources.mapped import read_map
from prepcli.sources.open_folder import make_access
from prepcli.sources.opening import open_source
from prepcli.sources.source import (
    Source,
    SourceTensor,
    label_tensors,
    match_source_tensors,
    stored_rows,
)
from prepcli.sources.tensor_match import (
    DEFAULT_MATCH_OPTIONS,
    VOCAB_SIZE_KEY,
    Vocabulary,
    read_vocabulary,
)
from prepcli.stores.byte_ranges import MAX_IN_FLIGHT, map_in_daemon_threads
from prepcli.stores.paths import is_remote, without_read_ahead
from prepcli.targets.orbax_item import item_leaf_spec


def check_values(
    located: LocatedCheckpoint, names: Collection[str] | None, observer: Observer
) -> None:
    """Compare an output of prep with its recorded digests, before statistics of its values are shown."""
    if located.manifest is None:
        return
    # Quantised weights have digests as they are stored, and scaled values as they are scaled.
    verbatim = is_quantized(located.files.path) or None
    source = open_source(located, verbatim=verbatim, kept_scales="all")
    tensors = source.all_tensors if names is None else _named_tensors(source, names)
    check_tensors(
        source,
        tensors,
        observer.progress(),
        again_hint(located.manifest),
        # `inspect` has no option for memory.
        memory_nbytes=MIN_MEMORY_NBYTES,
    )


def _named_tensors(source: Source, names: Collection[str]) -> Sequence[SourceTensor]:
    """Return the tensors of some leaves or tensors, by name. All tensors if they have other names."""
    uses = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS).uses
    labels = label_tensors(source, uses)
    tensors: list[SourceTensor] = []
    found: set[str] = set()
    for tensor in source.all_tensors:
        label = labels[tensor.name]
        shown = {label.tensor, *label.leaf.split(", ")} & {*names}
        if shown:
            tensors.append(tensor)
            found |= shown
    # The leaves of another library have names of their own.
    return tensors if found == {*names} else source.all_tensors


def compute_statistics(
    contents: CheckpointContents, entries: Sequence[SourceTensor], observer: Observer
) -> list[TensorStats | None]:
    """Read the data of tensors, and compute the statistics of each."""
    progress = observer.progress()
    progress.begin("inspect", sum(map(stored_nbytes, entries)))
    has_server = is_remote(contents.byte_sources)
    # One thread at a time reports progress.
    progress_lock = threading.Lock()

    def advance(nbytes: int) -> None:
        with progress_lock:
            progress.advance(nbytes)

    try:
        with open_blobs(without_read_ahead(contents.byte_sources)) as files:

            def compute(entry: SourceTensor) -> TensorStats | None:
                return compute_stats(entry, files, advance, is_remote=has_server)

            if not has_server:
                return [compute(entry) for entry in entries]
            # A store limits the rate of each connection.
            return map_in_daemon_threads(compute, entries, num_threads=2 * MAX_IN_FLIGHT)
    finally:
        progress.end()


ShapeAndDtype = tuple[tuple[int, ...], str]


class QuantizationSummary(TypedDict):
    """Method of quantised weights, their numbers, and their dtype when decoded."""

    method: object
    weights: int
    values: int
    dtype: str


class SourceSummary(TypedDict):
    """Facts of a checkpoint, the fields of `source` in the JSON object. Unknown facts are None."""

    name: str
    revision: str | None
    files: int
    bytes: int
    format: Kind
    family: str | None
    tensors: int
    chunks: int
    values: int
    parameters: int | None
    step: int | None
    optimizer_bytes: int
    vocab: VocabularyRecord | None
    dtypes: Mapping[str, int]
    layout: str | None
    mesh: str | None
    scan: bool | None
    scan_axis: int | None
    others: Sequence[str]
    adapter: NotRequired[AdapterSummary]
    quantization: NotRequired[QuantizationSummary]


@dataclass(frozen=True, slots=True)
class InspectedCheckpoint:
    """A checkpoint after reading its headers or index.

    Attributes:
        located: Where the checkpoint was found.
        contents: Its tensors and metadata.
        summary: Fields of `source` in the JSON object.
    """

    located: LocatedCheckpoint
    contents: CheckpointContents
    summary: SourceSummary


@dataclass(frozen=True, slots=True)
class SelectedTensors:
    """Tensors of a checkpoint, in the order of a table.

    Attributes:
        checkpoint: The checkpoint.
        entries: The selected tensors.
        statistics: Statistics of each tensor. None if they were not computed. An entry is None if its dtype is smaller
            than a byte.
        is_selection: Whether a pattern selected the tensors.
    """

    checkpoint: InspectedCheckpoint
    entries: Sequence[SourceTensor]
    statistics: Sequence[TensorStats | None] | None
    is_selection: bool


@dataclass(frozen=True, slots=True)
class LeafShards:
    """A leaf of a checkpoint, split by a mesh."""

    checkpoint: InspectedCheckpoint
    leaf: LogicalLeaf
    spec: Spec
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class ShapeComparison:
    """Comparison of the names, shapes and dtypes of two checkpoints.

    Attributes:
        checkpoint: The first checkpoint.
        against: The second checkpoint.
        num_compared: Number of compared names.
        differences: Name of each different tensor, and its shape and dtype in both checkpoints. None if it is missing.
    """

    checkpoint: InspectedCheckpoint
    against: InspectedCheckpoint
    num_compared: int
    differences: Sequence[tuple[str, ShapeAndDtype | None, ShapeAndDtype | None]]


@public
def inspect(checkpoint: PathLike, **options: Unpack[InspectOptions]) -> Inspection:
    """List the tensors of a checkpoint. Reads headers and indices only.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        **options: See `InspectOptions`.

    Returns:
        Name, shape, dtype and size of every tensor, and the number of parameters.

    Raises:
        UsageError: An argument is invalid.
        DamagedError: A header, an index or other metadata is damaged.
        PrepError: The checkpoint cannot be read.
    """
    located, contents = _read_checkpoint(str(checkpoint), SilentObserver(), options)
    tensors: list[TensorSummary] = []
    for entry in contents.entries:
        tensors.append(TensorSummary(entry.name, entry.shape, entry.dtype, entry.nbytes))
    return Inspection(
        name=contents.display_name,
        format=located.kind,
        tensors=tuple(tensors),
        parameters=count_parameters(contents),
    )


def check_view(pattern: str | None, view: ViewOptions) -> None:
    """Raise UsageError for more than one view, and for an option without effect on the view."""
    shards = Option("shards")
    page = Option("html")
    views: list[Option] = []
    for name in ("tree", "stats", "shards", "diff"):
        if view[name] not in (None, False):
            views.append(Option(name, view[name]))
    # Option without effect, and why
    unused: tuple[Option, Text | str] | None = None
    if view["quantized"] != "keep" and view["diff"] is not None:
        why = text("{} compares the tensors as they are stored", Option("diff"))
        unused = (Option("quantized", view["quantized"]), why)
    if view["html"] is not None:
        for option in views:
            if option.name in ("tree", "shards"):
                what = text("{} has no effect with {}", Option(option.name), page)
                why = "the page has the tree and the shards of all leaves"
                raise usage_error(what, why, text("remove {}", Option(option.name)))
    elif len(views) > 1:
        names = join_texts(" and ", [text("{}", option) for option in views])
        raise usage_error(
            text("{} are different views", names),
            "inspect shows one at a time",
            text("pass only one of them, such as {}", views[0]),
        )
    elif view["mesh"] is not None and view["shards"] is None:
        raise usage_error(
            text("{} requires {} or {}", Option("mesh"), shards, page),
            "it sets the mesh that splits the leaves",
            text("{}", Option("shards", "LEAF")),
        )
    elif view["sort"] != "file" and (view["shards"] is not None or view["diff"] is not None):
        unused = (Option("sort", view["sort"]), "it sorts tables and trees")
    if unused is not None:
        option, why = unused
        what = text("{} has no effect", option)
        raise usage_error(what, why, text("remove {}", Option(option.name)))
    if pattern is not None and view["shards"] is not None and view["html"] is None:
        raise usage_error(
            f"unexpected argument `{pattern}`",
            text("{} already names the leaf", shards),
            f"remove `{pattern}`",
        )


def select_tensors(
    checkpoint: str,
    observer: Observer,
    options: InspectOptions,
    *,
    pattern: str | None = None,
    sort: SortKey = "file",
    stats: bool = False,
    dequantize: bool = False,
) -> SelectedTensors:
    """Select tensors of a checkpoint by name. Only `stats` reads data.

    Raises:
        PrepError: No name matches, or the checkpoint cannot be read.
    """
    inspected = inspect_checkpoint(checkpoint, observer, options, dequantize=dequantize)
    contents = inspected.contents
    if options.get("stream"):
        check_stream(inspected.located)
    names = _match_names([entry.name for entry in contents.entries], pattern, contents.display_name)
    entries = [entry for entry in contents.entries if entry.name in names]
    if sort == "name":
        entries.sort(key=lambda entry: entry.name)
    elif sort == "size":
        # The largest first
        entries.sort(key=lambda entry: -entry.nbytes)
    statistics = None
    if stats:
        is_whole = dequantize or len(entries) == len(contents.entries)
        check_values(inspected.located, None if is_whole else names, observer)
        statistics = compute_statistics(contents, entries, observer)
    return SelectedTensors(inspected, entries, statistics, is_selection=pattern is not None)


def shard_leaf(
    checkpoint: str,
    observer: Observer,
    options: InspectOptions,
    *,
    leaf_name: str,
    mesh_text: str | None,
    dequantize: bool = False,
) -> LeafShards:
    """Split a leaf of a checkpoint by a mesh. No data is read."""
    inspected = inspect_checkpoint(checkpoint, observer, options, dequantize=dequantize)
    contents = inspected.contents
    if options.get("stream"):
        check_stream(inspected.located)
    if mesh_text is None:
        mesh_text = contents.manifest.mesh
    if mesh_text is None:
        what = text("{} requires a mesh", Option("shards"))
        why = f"{contents.display_name} has no mesh in its manifest"
        raise usage_error(what, why, text("for example {}", Option("mesh", "1,2,4")))
    mesh = parse_mesh(mesh_text)
    names_command = Command("inspect", contents.display_name, Option("tree", True))
    if contents.kind != "orbax":
        # The tree of other formats has the names of tensors, which a conversion maps to leaves.
        dry_run = Option("dry_run", True)
        names_command = Command("save-init", contents.display_name, dry_run, "-v")
    leaf = find_leaf(
        logical_leaves(contents),
        leaf_name,
        contents.display_name,
        names_command=names_command,
    )
    (spec,) = shard_leaves(contents, [leaf], mesh)
    return LeafShards(inspected, leaf, spec, mesh)


def shard_leaves(
    contents: CheckpointContents, leaves: Iterable[LogicalLeaf], mesh: Mesh
) -> list[Spec]:
    """Return the sharding of leaves on a mesh by the rules of their checkpoint."""
    rules = merge_rules(partition_rules(contents))
    specs: list[Spec] = []
    for leaf in leaves:
        spec = item_leaf_spec(
            leaf.name,
            leaf.path,
            leaf.dims,
            leaf.shape,
            mesh=mesh,
            rules=rules,
            checkpoint=contents.display_name,
        )
        specs.append(spec)
    return specs


def compare_shapes(
    checkpoint: str,
    against: str,
    observer: Observer,
    options: InspectOptions,
    *,
    pattern: str | None = None,
) -> ShapeComparison:
    """Compare the names, shapes and dtypes of two checkpoints. No data is read.

    The tensors are in the order of the first checkpoint. Further tensors of the second checkpoint follow.

    Raises:
        PrepError: No name matches, or a checkpoint cannot be read.
    """
    a = inspect_checkpoint(checkpoint, observer, options)
    against_options: InspectOptions = {
        "offline": options.get("offline", False),
        "stream": options.get("stream", False),
    }
    b = inspect_checkpoint(against, observer, against_options)
    if options.get("stream"):
        check_stream(a.located, b.located)
    # Names of different formats differ, so they are converted to Hugging Face names.
    as_hf_tensors = a.contents.kind != b.contents.kind
    a_shapes = _shapes_by_name(a.contents, as_hf_tensors=as_hf_tensors)
    b_shapes = _shapes_by_name(b.contents, as_hf_tensors=as_hf_tensors)
    display_names = f"{a.contents.display_name} and {b.contents.display_name}"
    matches = _match_names({*a_shapes, *b_shapes}, pattern, display_names)
    differences: list[tuple[str, ShapeAndDtype | None, ShapeAndDtype | None]] = []
    for name in dict.fromkeys([*a_shapes, *b_shapes]):
        a_shape = a_shapes.get(name)
        b_shape = b_shapes.get(name)
        if name in matches and a_shape != b_shape:
            differences.append((name, a_shape, b_shape))
    return ShapeComparison(a, b, num_compared=len(matches), differences=differences)


def shape_text(shape_and_dtype: ShapeAndDtype | None) -> str:
    """Return a shape and a dtype as text, such as `[2, 3] float32`. Empty for a missing tensor."""
    if shape_and_dtype is None:
        return ""
    shape, dtype = shape_and_dtype
    return f"{list(shape)} {dtype}"


def inspect_checkpoint(
    checkpoint: str, observer: Observer, options: InspectOptions, *, dequantize: bool = False
) -> InspectedCheckpoint:
    """Read the headers or the index of a checkpoint, and summarize it."""
    located, contents = _read_checkpoint(checkpoint, observer, options, dequantize=dequantize)
    return InspectedCheckpoint(located, contents, _summarize_source(contents, located, observer))


def _read_checkpoint(
    checkpoint: str, observer: Observer, options: InspectOptions, *, dequantize: bool = False
) -> tuple[LocatedCheckpoint, CheckpointContents]:
    """Locate a checkpoint, and read its headers or index.

    Raises:
        UsageError: The options have a lock. An inspection would not enforce it.
    """
    lock = Option("lock")
    if options.get("lock") is not None:
        why = "an inspection reads no tensors to compare with it"
        hint = text("compare with {}", Command("verify", checkpoint, Option("lock", "FILE")))
        raise usage_error(text("{} has no effect", lock), why, hint)
    access = make_access(
        observer,
        offline=options.get("offline", False),
        stream=options.get("stream", False),
        allow_urls=True,
    )
    # The report names ignored settings of quantisation.
    access = replace(access, allow_adapters=True, allow_quantized=True, allow_gguf=True, note=str)
    located = locate(checkpoint, options.get("revision"), step=options.get("step"), access=access)
    config = options.get("config")
    config_path = None if config is None else Path(config)
    tensor_map = options.get("map")
    layout = options.get("source_layout")
    if located.kind != "gguf" and (tensor_map is not None or layout is not None):
        rows = None if tensor_map is None else read_map(Path(tensor_map))
        return located, read_mapped_contents(located, config_path, rows, layout)
    with collector_paused():
        contents = read_contents(located, config_path, dequantize=dequantize)
    return located, contents


def _match_names(names: Collection[str], pattern: str | None, checkpoint: str) -> set[str]:
    """Return the names with a match of the pattern. Raise PrepError with a suggestion if there are none."""
    matches = {name for name in names if pattern is None or fnmatchcase(name, pattern)}
    if pattern is None or matches:
        return matches
    # `q_proj` matches only a tensor with this whole name. The user most likely meant `*q_proj*`.
    substring_pattern = f"*{pattern.strip('*')}*"
    suggestion = (
        substring_pattern
        if any(fnmatchcase(name, substring_pattern) for name in names)
        else suggest(pattern, names)
    )
    raise PrepError(
        f"no tensor of {checkpoint} matches `{pattern}`",
        "",
        f"did you mean `{suggestion}`?" if suggestion else "a pattern of names, such as `*.q.*`",
    )


def _summarize_source(
    contents: CheckpointContents, located: LocatedCheckpoint, observer: Observer
) -> SourceSummary:
    """Return the fields of `source` in the JSON object, in their order."""
    manifest = contents.manifest
    vocabulary = _read_vocabulary_or_warn(contents, observer)
    vocab: VocabularyRecord | None = None
    if vocabulary is not None:
        vocab = {"true": vocabulary.true_size, "padded": vocabulary.stored_size}
    family = None if contents.family is None else contents.family.name
    if contents.is_verbatim:
        family = VERBATIM
    dtypes: dict[str, int] = {}
    for entry in contents.entries:
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + entry.nbytes
    is_stacked, stack_axis = _stacked_layers(contents)
    fields: SourceSummary = {
        "name": contents.display_name,
        "revision": located.files.commit,
        "files": len(contents.files),
        "bytes": sum(path.stat().st_size for path in contents.files),
        "format": located.kind,
        "family": family,
        "tensors": len(contents.entries),
        "chunks": contents.num_chunks,
        "values": sum(math.prod(entry.shape) for entry in contents.entries),
        "parameters": count_parameters(contents),
        "step": manifest.step,
        "optimizer_bytes": nbytes_below(contents, OPT_STATE),
        "vocab": vocab,
        "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1])),
        "layout": manifest.layout,
        "mesh": manifest.mesh,
        "scan": is_stacked,
        "scan_axis": stack_axis,
        "others": contents.non_arrays,
    }
    if contents.adapter:
        fields["adapter"] = contents.adapter
    if contents.decoders:
        fields["quantization"] = {
            "method": model_quantization(contents.config, contents.folder).get("quant_method"),
            "weights": len(contents.decoders),
            "values": sum(math.prod(decoder.shape) for decoder in contents.decoders),
            "dtype": DECODED_DTYPE,
        }
    return fields


def _stacked_layers(contents: CheckpointContents) -> tuple[bool | None, int | None]:
    """Return whether the leaves stack the layers, and their axis."""
    manifest = contents.manifest
    if manifest.is_for_trainer and contents.family is not None:
        # The layout determines the axis. The manifest does not repeat it.
        layout = contents.family.layouts.get(manifest.layout or "")
        if layout is not None:
            return layout.stack_axis is not None, layout.stack_axis
    return manifest.get("scan"), manifest.get("scan_axis")


def _read_vocabulary_or_warn(contents: CheckpointContents, observer: Observer) -> Vocabulary | None:
    """Read the vocabulary from the config.

    Warn about an invalid config. It does not affect the tensors.
    """
    if contents.config.get(VOCAB_SIZE_KEY) is None:
        return None
    try:
        return read_vocabulary(contents.config, 0)
    except PrepError as error:
        observer.warn(f"{error.what}: {error.why}")
        return None


def _shapes_by_name(
    contents: CheckpointContents, *, as_hf_tensors: bool
) -> dict[str, ShapeAndDtype]:
    """Return each tensor's shape and dtype. Leaves of an Orbax checkpoint can be shown as Hugging Face tensors."""
    if not as_hf_tensors or not FORMATS[contents.kind].has_layouts:
        return {entry.name: (entry.shape, entry.dtype) for entry in contents.entries}
    located = replace(locate(str(contents.folder)), display_name=contents.display_name)
    source = open_source(located, verbatim=None)
    return {
        source.file_name(tensor): (tensor.shape, tensor.dtype)
        for tensor in (*source.tensors, *source.tower_tensors)
    }
