"""`prep inspect`: show a checkpoint as a table, a tree, statistics, a shard map, or a diff to another checkpoint."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from prepcli.commands.inspect_report import (
    ShapeAndDtype,
    count_line,
    difference_line,
    header_lines,
    shape_fields,
)
from prepcli.console.formatting import count_text, format_bytes
from prepcli.console.observer import LEAVES
from prepcli.console.tables import wrap_line
from prepcli.console.ui import Cell, Report, Ui, format_table
from prepcli.engine.blobs import open_blobs
from prepcli.errors import PrepError, usage_error
from prepcli.inspection.contents import (
    CheckpointContents,
    TensorEntry,
    count_parameters,
    nbytes_below,
    read_contents,
)
from prepcli.inspection.logical_leaves import find_leaf, logical_leaves
from prepcli.inspection.name_tree import build_tree, count_nodes, tree_fields, tree_rows
from prepcli.inspection.shard_map import MAX_DRAWN_DEVICES, draw_shard_map, summarize_sharding
from prepcli.inspection.tensor_stats import TensorStats, compute_stats, stored_nbytes
from prepcli.planning.state_names import OPT_STATE
from prepcli.planning.vocabulary import VOCAB_SIZE_KEY, Vocabulary, read_vocabulary
from prepcli.sources.folders import make_access
from prepcli.sources.locate import LocatedCheckpoint, check_stream, locate
from prepcli.sources.opening import open_source
from trainer.models.mesh import parse_mesh
from trainer.models.partition import device_boxes, leaf_spec, num_replicas, shard_shape
from trainer.models.rule_text import merge_rules
from trainer.models.suggest import suggest

SortKey = Literal["name", "size", "file"]

MAX_ROWS = 2000  # of a table; a malicious header may list millions of tensors
# Columns that a narrow terminal leaves out, the first one first. The size follows from the shape and the dtype.
OPTIONAL_COLUMNS = ("offset", "chunks", "file", "chunk", "size")


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """Request of `prep inspect`.

    At most one of the views `tree`, `stats`, `shards` and `diff` is set.
    """

    checkpoint: str
    pattern: str | None = None  # shell pattern of tensor names
    sort: SortKey = "file"
    tree: bool = False
    stats: bool = False
    shards: str | None = None  # name of a leaf
    mesh: str | None = None  # of `shards`; None: the checkpoint's mesh
    diff: str | None = None  # another checkpoint
    offline: bool = False
    revision: str | None = None
    stream: bool = False  # read from the hub without a local copy
    config: Path | None = None  # of `checkpoint`, if it has none


def inspect(request: InspectRequest, ui: Ui) -> Report:
    """Show one view of a checkpoint; only `stats` reads its data.

    Args:
        request: Checkpoint and view.
        ui: Receives notes, warnings and progress; its verbosity sets the number of rows.

    Returns:
        Report with the view as text and as fields. The report of `diff` has an error if there are differences.

    Raises:
        PrepError: The options conflict, no name matches, or the checkpoint cannot be read.
    """
    _check_request(request)
    located, contents = read_checkpoint(
        request, request.checkpoint, request.revision, ui, config=request.config
    )
    source = {"source": _source_fields(contents, located, ui)}
    if request.diff is None:
        check_stream(request.stream, located)
    if request.shards is not None:
        return _shards_report(request, contents, source)
    if request.diff is not None:
        diff_located, diff_contents = read_checkpoint(request, request.diff, None, ui)
        check_stream(request.stream, located, diff_located)
        return _diff_report(
            request,
            contents,
            diff_contents,
            source | {"against": _source_fields(diff_contents, diff_located, ui)},
            ui,
        )
    names = _match_names(
        [entry.name for entry in contents.entries], request.pattern, contents.display_name
    )
    entries = _sort_entries(
        [entry for entry in contents.entries if entry.name in names], request.sort
    )
    text, fields = _render_view(request, contents, entries, ui)
    count = [count_line(contents, entries)] if request.pattern else []
    head = [wrap_line(line, ui.columns) for line in header_lines(contents, source["source"])]
    return Report("\n".join([*head, "", text, *count]), source | fields)


def _check_request(request: InspectRequest) -> None:
    """Raise UsageError for options that conflict or have no effect."""
    views = {
        "--tree": request.tree,
        "--stats": request.stats,
        "--shards": request.shards,
        "--diff": request.diff,
    }
    views_set = [flag for flag, value in views.items() if value not in (None, False)]
    if len(views_set) > 1:
        raise usage_error(
            f"{' and '.join(views_set)} are different views",
            "inspect shows one at a time",
            f"`{views_set[0]}` alone",
        )
    if request.mesh is not None and request.shards is None:
        raise usage_error(
            "`--mesh` requires `--shards`",
            "it sets the mesh that splits the leaf",
            "`--shards LEAF`",
        )
    if request.sort != "file" and (request.shards is not None or request.diff is not None):
        raise usage_error(
            f"`--sort {request.sort}` has no effect", "it sorts tables and trees", "remove `--sort`"
        )
    if request.pattern is not None and request.shards is not None:
        raise usage_error(
            f"unexpected argument `{request.pattern}`", "`--shards` already names the leaf"
        )


def read_checkpoint(
    request: InspectRequest,
    checkpoint: str,
    revision: str | None,
    ui: Ui,
    *,
    config: Path | None = None,
) -> tuple[LocatedCheckpoint, CheckpointContents]:
    """Locate a checkpoint, and read its headers or index."""
    access = make_access(ui, offline=request.offline, stream=request.stream, allow_urls=True)
    access = replace(access, allow_adapters=True)
    located = locate(checkpoint, revision, access=access)
    return located, read_contents(located, config)


def _match_names(names: Collection[str], pattern: str | None, checkpoint: str) -> set[str]:
    """Return the names that match the pattern. Raise a PrepError with a suggestion if none does."""
    matches = {name for name in names if pattern is None or fnmatchcase(name, pattern)}
    if pattern is None or matches:
        return matches
    substring_pattern = f"*{pattern.strip('*')}*"
    suggestion = (
        substring_pattern
        if any(fnmatchcase(name, substring_pattern) for name in names)
        else suggest(pattern, names)
    )
    raise PrepError(
        f"no tensor of {checkpoint} matches `{pattern}`",
        "",
        f"did you mean `{suggestion}`?" if suggestion else "",
    )


def _sort_entries(entries: list[TensorEntry], sort: SortKey) -> list[TensorEntry]:
    """Sort by name, by size (largest first), or keep the stored order."""
    if sort == "name":
        return sorted(entries, key=lambda entry: entry.name)
    return sorted(entries, key=lambda entry: -entry.nbytes) if sort == "size" else entries


# Summary of the checkpoint


def _source_fields(
    contents: CheckpointContents, located: LocatedCheckpoint, ui: Ui
) -> dict[str, Any]:
    manifest = contents.manifest
    vocabulary = _read_vocabulary_or_warn(contents, ui)
    dtypes: dict[str, int] = {}
    for entry in contents.entries:
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + entry.nbytes
    return {
        "name": contents.display_name,
        "revision": located.local_files.commit,
        "files": len(contents.files),
        "bytes": sum(path.stat().st_size for path in contents.files),
        "format": contents.kind,
        "family": contents.family.name if contents.family else None,
        "tensors": len(contents.entries),
        "chunks": contents.num_chunks,
        "values": sum(math.prod(entry.shape) for entry in contents.entries),
        "parameters": count_parameters(contents),
        "step": manifest.step,
        "optimizer_bytes": nbytes_below(contents, OPT_STATE),
        "vocab": {"true": vocabulary.true_size, "padded": vocabulary.stored_size}
        if vocabulary
        else None,
        "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1])),
        **{key: manifest.fields.get(key) for key in ("layout", "mesh", "scan", "scan_axis")},
        "others": contents.non_arrays,
        **({"adapter": contents.adapter} if contents.adapter else {}),
    }


def _read_vocabulary_or_warn(contents: CheckpointContents, ui: Ui) -> Vocabulary | None:
    """Read the vocabulary from the config.

    Warn about an invalid config, which does not affect the tensors.
    """
    if contents.config.get(VOCAB_SIZE_KEY) is None:
        return None
    try:
        return read_vocabulary(contents.config, 0)
    except PrepError as error:
        ui.warn(f"{error.what}: {error.why}")
        return None


# Table, statistics and tree


def _render_view(
    request: InspectRequest, contents: CheckpointContents, entries: list[TensorEntry], ui: Ui
) -> tuple[str, dict[str, Any]]:
    """Render the table, tree or statistics. Return the text and the fields of the report."""
    tensor_fields = [_entry_fields(contents, entry) for entry in entries] if ui.as_json else []
    max_rows = len(entries) if ui.level >= LEAVES else MAX_ROWS
    if request.tree:
        nodes = build_tree(entries)
        rows = list(itertools.islice(tree_rows(nodes), max_rows))
        text = format_table(
            rows,
            ("name", "shape", "dtype", "size"),
            {"size"},
            ui.columns,
            optional=OPTIONAL_COLUMNS,
        )
        fields = {
            "tensors": tensor_fields,
            "tree": [tree_fields(node) for node in nodes] if ui.as_json else [],
        }
        return _append_omitted_line(text, count_nodes(nodes) - len(rows)), fields
    num_omitted = len(entries) - max_rows
    if request.stats:
        statistics = _compute_stats(contents, entries, ui)
        for fields, entry_stats in zip(tensor_fields, statistics):
            fields["stats"] = _stats_fields(entry_stats)
        text = _stats_table(entries[:max_rows], statistics, ui.columns)
    else:
        text = _entry_table(contents, entries[:max_rows], ui.columns)
    return _append_omitted_line(text, num_omitted), {"tensors": tensor_fields}


def _append_omitted_line(text: str, num_omitted: int) -> str:
    """Append a line with the number of omitted rows, if there are any."""
    if num_omitted <= 0:
        return text
    return f"{text}\nand {num_omitted:,} more rows; `-v` shows all, PATTERN selects some"


def _first_chunk_place(contents: CheckpointContents, entry: TensorEntry) -> tuple[str, int] | None:
    """Return file name and offset of an entry's first chunk, or None if it is inline or not stored."""
    stored = entry.first_chunk
    if stored is None:
        return None
    # An encoded chunk is in a data file of the item, while `byte_sources` have the decoded arrays.
    files = contents.byte_sources if entry.encoded_first_chunk is None else contents.files
    file = files[stored.file]
    if isinstance(file, Path) and contents.folder.is_dir():
        return str(file.relative_to(contents.folder)), stored.offset
    return file.name, stored.offset


def _entry_fields(contents: CheckpointContents, entry: TensorEntry) -> dict[str, Any]:
    """Return an entry's JSON fields. File and offset are of its first chunk."""
    file_name, offset = _first_chunk_place(contents, entry) or (None, None)
    fields: dict[str, Any] = {
        "name": entry.name,
        "shape": entry.shape,
        "dtype": entry.dtype,
        "bytes": entry.nbytes,
    }
    fields |= {"file": file_name, "offset": offset}
    return fields | (
        {"chunk": entry.chunk_shape, "chunks": len(entry.chunks)}
        if contents.kind == "orbax"
        else {}
    )


def _entry_table(
    contents: CheckpointContents, entries: Sequence[TensorEntry], columns: int | None
) -> str:
    location_columns = ("chunk", "chunks") if contents.kind == "orbax" else ("file", "offset")
    rows: list[list[Cell]] = []
    for entry in entries:
        location: list[Cell] = [str(list(entry.chunk_shape)), len(entry.chunks)]
        if contents.kind != "orbax":
            location = [*(_first_chunk_place(contents, entry) or ("", ""))]
        rows.append(
            [entry.name, str(list(entry.shape)), entry.dtype, format_bytes(entry.nbytes), *location]
        )
    header = ("name", "shape", "dtype", "size", *location_columns)
    return format_table(rows, header, {"size"}, columns, optional=OPTIONAL_COLUMNS)


def _compute_stats(
    contents: CheckpointContents, entries: Sequence[TensorEntry], ui: Ui
) -> list[TensorStats | None]:
    progress = ui.progress()
    progress.begin("inspect", sum(map(stored_nbytes, entries)))
    try:
        with open_blobs(contents.byte_sources) as files:
            return [compute_stats(entry, files, progress.advance) for entry in entries]
    finally:
        progress.end()


def _stats_table(
    entries: Sequence[TensorEntry], statistics: Sequence[TensorStats | None], columns: int | None
) -> str:
    header = ("name", "shape", "dtype", "min", "max", "mean", "nan", "inf", "zeros")
    rows: list[list[Cell]] = []
    for entry, entry_stats in zip(entries, statistics):
        values: list[Cell] = ["-"] * 6
        if entry_stats is not None:
            moments = (entry_stats.minimum, entry_stats.maximum, entry_stats.mean)
            values = [
                *map(_value_text, moments),
                entry_stats.nan,
                entry_stats.inf,
                entry_stats.zeros,
            ]
        rows.append([entry.name, str(list(entry.shape)), entry.dtype, *values])
    return format_table(rows, header, set(header[3:]), columns, optional=("shape",))


def _stats_fields(statistics: TensorStats | None) -> dict[str, Any] | None:
    if statistics is None:
        return None
    counts = {"nan": statistics.nan, "inf": statistics.inf, "zeros": statistics.zeros}
    return {"min": statistics.minimum, "max": statistics.maximum, "mean": statistics.mean, **counts}


def _value_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


# Shards


def _shards_report(
    request: InspectRequest, contents: CheckpointContents, fields: Mapping[str, Any]
) -> Report:
    mesh_text = contents.manifest.mesh if request.mesh is None else request.mesh
    if mesh_text is None:
        why = f"{contents.display_name} has no mesh in its manifest"
        raise usage_error("`--shards` requires a mesh", why, "for example `--mesh 1,2,4`")
    mesh = parse_mesh(mesh_text)
    name = shlex.quote(contents.display_name)
    # The tree of other formats has the names of tensors, which a conversion maps to leaves.
    names_command = (
        f"prep inspect {name} --tree"
        if contents.kind == "orbax"
        else f"prep save-init {name} --dry-run -v"
    )
    leaf = find_leaf(
        logical_leaves(contents),
        request.shards or "",
        contents.display_name,
        names_command=names_command,
    )
    rules = merge_rules(contents.manifest.rules)
    spec = leaf_spec(
        leaf.path, leaf.dims, leaf.shape, mesh=mesh, rules=rules, checkpoint=contents.display_name
    )
    is_drawn = mesh.n_devices <= MAX_DRAWN_DEVICES
    drawing = (draw_shard_map if is_drawn else summarize_sharding)(
        leaf.name, leaf.shape, leaf.dtype, spec, mesh
    )
    shards = {
        "leaf": leaf.name,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "mesh": str(mesh),
        "spec": str(spec),
        "shard": shard_shape(spec, leaf.shape),
        "copies": num_replicas(spec, mesh),
        "devices": device_boxes(spec, mesh, leaf.shape) if is_drawn else None,
    }
    return Report("\n".join([drawing, *map(str, spec.fallbacks)]), {**fields, "shards": shards})


# Comparison with another checkpoint


def _diff_report(
    request: InspectRequest,
    a: CheckpointContents,
    b: CheckpointContents,
    fields: Mapping[str, Any],
    ui: Ui,
) -> Report:
    """Compare names, shapes and dtypes.

    List tensors in the order of `a`, then the tensors only in `b`.
    """
    a_shapes, b_shapes = (_shapes_by_name(contents, a.kind != b.kind) for contents in (a, b))
    matches = _match_names(
        {*a_shapes, *b_shapes}, request.pattern, f"{a.display_name} and {b.display_name}"
    )
    names = [name for name in dict.fromkeys([*a_shapes, *b_shapes]) if name in matches]
    differences = [
        (name, a_shapes.get(name), b_shapes.get(name))
        for name in names
        if a_shapes.get(name) != b_shapes.get(name)
    ]
    difference_fields = [
        {"name": name, "a": shape_fields(a_shape), "b": shape_fields(b_shape)}
        for name, a_shape, b_shape in differences
    ]
    if not differences:
        return Report(
            "no difference in names, shapes and dtypes",
            {**fields, "differences": difference_fields},
        )
    max_rows = len(differences) if ui.level >= LEAVES else MAX_ROWS
    lines = [
        difference_line(name, a_shape, b_shape, a_name=a.display_name, b_name=b.display_name)
        for name, a_shape, b_shape in differences[:max_rows]
    ]
    text = _append_omitted_line("\n".join(lines), len(differences) - max_rows)
    counts = f"{len(differences)} of {count_text(len(names), 'tensor')}"
    error = PrepError(f"{a.display_name} and {b.display_name} differ in {counts}")
    return Report(text, {**fields, "differences": difference_fields}, error=error)


def _shapes_by_name(contents: CheckpointContents, as_hf_tensors: bool) -> dict[str, ShapeAndDtype]:
    """Return each tensor's shape and dtype; of an Orbax checkpoint, optionally as Hugging Face tensors."""
    if not as_hf_tensors or contents.kind in ("safetensors", "torch", "meta", "adapter"):
        return {entry.name: (entry.shape, entry.dtype) for entry in contents.entries}
    located = replace(locate(str(contents.folder)), display_name=contents.display_name)
    source = open_source(located)
    return {
        source.names.full_name(tensor.name): (tensor.shape, tensor.dtype)
        for tensor in source.tensors
    }
