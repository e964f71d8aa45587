"""`prep inspect`: what a checkpoint holds, as a table, a tree, statistics, a picture of shards, or against another."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from prepcli.commands.conflicts import check_stream
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import LEAVES, Cell, Report, Ui, format_table
from prepcli.engine.blobs import Blob, open_blobs
from prepcli.errors import PrepError, usage_error
from prepcli.inspection.contents import CheckpointContents, TensorEntry, count_parameters, nbytes_below, read_contents
from prepcli.inspection.logical_leaves import find_leaf, logical_leaves
from prepcli.inspection.name_tree import build_tree, count_nodes, tree_fields, tree_rows
from prepcli.inspection.shard_map import MAX_DRAWN_DEVICES, draw_shard_map, summarize_sharding
from prepcli.inspection.tensor_stats import TensorStats, compute_stats, stored_nbytes
from prepcli.planning.state_names import OPT_STATE, PARAMS
from prepcli.planning.vocabulary import VOCAB_SIZE_KEY, Vocabulary, read_vocabulary
from prepcli.remote.retries import retry_policy_from_env
from prepcli.sources.locate import LocatedCheckpoint, locate
from prepcli.sources.opening import open_source
from trainer.models.mesh import device_boxes, merge_rules, num_replicas, parse_mesh, partition_spec, shard_shape
from trainer.models.suggest import suggest

SortKey = Literal["name", "size", "file"]
ShapeAndDtype = tuple[tuple[int, ...], str]  # with the dtype
FORMAT_TITLES = {
    "torch": "PyTorch",
    "meta": "PyTorch as Meta lays it out",
    "flax": "Flax msgpack",
    "easylm": "EasyLM stream",
}  # what a kind is called, if not by its own name

MAX_ROWS = 2000  # of a view; more than people read, and a hostile header may name millions
MAX_EXTRA_ENTRIES = 24  # shown; a strange index may have any number


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """At most one of `tree`, `stats`, `shards` (a leaf, split over `mesh`) and `diff` (another checkpoint)."""

    checkpoint: str
    pattern: str | None = None
    sort: SortKey = "file"
    tree: bool = False
    stats: bool = False
    shards: str | None = None
    mesh: str | None = None
    diff: str | None = None
    offline: bool = False
    revision: str | None = None
    stream: bool = False  # from the hub, without a copy here


def inspect(request: InspectRequest, ui: Ui) -> Report:
    """Look at a checkpoint; only `stats` reads its data. The report of `diff` carries an error if there are any."""
    _check_request(request)
    located, contents = _read_checkpoint(request, request.checkpoint, request.revision, ui)
    source = {"source": _source_fields(contents, located, ui)}
    if request.diff is None:
        check_stream(request.stream, located)
    if request.shards is not None:
        return _shards_report(request, contents, source)
    if request.diff is not None:
        where, other = _read_checkpoint(request, request.diff, None, ui)
        check_stream(request.stream, located, where)
        return _diff_report(request, contents, other, source | {"against": _source_fields(other, where, ui)}, ui)
    wanted = _match_names([entry.name for entry in contents.entries], request.pattern, contents.display_name)
    chosen = _sort_entries([entry for entry in contents.entries if entry.name in wanted], request.sort)
    text, fields = _render_view(request, contents, chosen, ui)
    count = [_count_line(contents, chosen)] if request.pattern else []
    return Report("\n".join([*_header_lines(contents, source["source"]), "", text, *count]), source | fields)


def _check_request(request: InspectRequest) -> None:
    views = {"--tree": request.tree, "--stats": request.stats, "--shards": request.shards, "--diff": request.diff}
    asked = [flag for flag, value in views.items() if value not in (None, False)]
    if len(asked) > 1:
        raise usage_error(
            f"{' and '.join(asked)} are different views", "inspect shows one at a time", f"`{asked[0]}` alone"
        )
    if request.mesh is not None and request.shards is None:
        raise usage_error("`--mesh` is for `--shards`", "it says over which devices a leaf is split", "`--shards LEAF`")
    if request.sort != "file" and (request.shards is not None or request.diff is not None):
        raise usage_error(f"`--sort {request.sort}` has no effect", "it orders tables and trees", "remove `--sort`")
    if request.pattern is not None and request.shards is not None:
        raise usage_error(f"`{request.pattern}` is one argument too many", "`--shards` names the leaf")


def _read_checkpoint(
    request: InspectRequest, checkpoint: str, revision: str | None, ui: Ui
) -> tuple[LocatedCheckpoint, CheckpointContents]:
    located = locate(
        checkpoint,
        revision,
        request.offline,
        progress=ui.progress(),
        warn=ui.warn,
        stream=request.stream,
        allow_remote=True,
        retry_policy=retry_policy_from_env(os.environ, ui.note),
    )
    return located, read_contents(located, located.hub_id or checkpoint)


def _match_names(names: Collection[str], pattern: str | None, checkpoint: str) -> set[str]:
    """Those that the pattern names; PrepError, with a guess, where that is none."""
    found = {name for name in names if pattern is None or fnmatchcase(name, pattern)}
    if pattern is None or found:
        return found
    inside = f"*{pattern.strip('*')}*"
    meant = inside if any(fnmatchcase(name, inside) for name in names) else suggest(pattern, names)
    raise PrepError(f"no tensor of {checkpoint} matches `{pattern}`", "", f"did you mean `{meant}`?" if meant else "")


def _sort_entries(entries: list[TensorEntry], sort: SortKey) -> list[TensorEntry]:
    """By name, by size with the largest first, or as they come."""
    if sort == "name":
        return sorted(entries, key=lambda entry: entry.name)
    return sorted(entries, key=lambda entry: -entry.nbytes) if sort == "size" else entries


# What is said of the whole checkpoint


def _source_fields(contents: CheckpointContents, located: LocatedCheckpoint, ui: Ui) -> dict[str, Any]:
    manifest, vocabulary = contents.manifest, _read_vocabulary_or_warn(contents, ui)
    dtypes: dict[str, int] = {}
    for entry in contents.entries:
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + entry.nbytes
    return {
        "name": contents.display_name,
        "revision": located.revision,
        "files": len(contents.files),
        "bytes": sum(path.stat().st_size for path in contents.files),
        "format": contents.kind,
        "family": contents.family.name if contents.family else None,
        "tensors": len(contents.entries),
        "chunks": contents.num_chunks,
        "values": sum(math.prod(entry.shape) for entry in contents.entries),
        "parameters": count_parameters(contents),
        "step": manifest.get("step"),
        "optimizer_bytes": nbytes_below(contents, OPT_STATE),
        "vocab": {"true": vocabulary.true_size, "padded": vocabulary.stored_size} if vocabulary else None,
        "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1])),
        **{key: manifest.get(key) for key in ("layout", "mesh", "scan", "scan_axis")},
        "others": contents.non_arrays,
    }


def _read_vocabulary_or_warn(contents: CheckpointContents, ui: Ui) -> Vocabulary | None:
    """What the config says; a config that makes no sense is no reason not to look at the tensors."""
    if contents.config.get(VOCAB_SIZE_KEY) is None:
        return None
    try:
        return read_vocabulary(contents.config, 0)
    except PrepError as error:
        ui.warn(f"{error.what}: {error.why}")
        return None


def _header_lines(contents: CheckpointContents, source: Mapping[str, Any]) -> list[str]:
    """Two lines: what model it is, and how it lies on disk; and one for each of the first things that are no array."""
    counted = f"{source['parameters']:,} parameters" if source["parameters"] else f"{source['values']:,} values"
    size = f"{format_bytes(sum(entry.nbytes for entry in contents.entries))} {', '.join(source['dtypes'])}".rstrip()
    model = "  ".join([source["name"], _family_text(contents), counted, size])
    kind = FORMAT_TITLES.get(contents.kind, contents.kind)
    stored = [f"{kind}, {_count_text(source['files'], 'file')}, {_count_text(source['tensors'], 'tensor')}"]
    if contents.kind == "orbax":
        leaves = f"{_count_text(source['tensors'], 'leaf', 'leaves')} in {_count_text(source['chunks'], 'chunk')}"
        codecs = f" ({', '.join(contents.codecs)})" if contents.codecs else ""
        stored = [f"Orbax{codecs}, {_count_text(source['files'], 'data file')}, {leaves}"]
        stored += [f"mesh {source['mesh']}"] if source["mesh"] else []
        stored += [_layout_text(source)] if source["layout"] else []
        stored += [_step_text(contents)] if source["step"] is not None else []
    if vocab := source["vocab"]:
        true = f" ({vocab['true']} true)" if vocab["true"] != vocab["padded"] else ""
        stored.append(f"vocabulary {vocab['padded']}{true}")
    more = len(contents.non_arrays) - MAX_EXTRA_ENTRIES
    asides = [
        *contents.non_arrays[:MAX_EXTRA_ENTRIES],
        *([f"and {more:,} more that are no arrays"] if more > 0 else []),
    ]
    return [model, "; ".join(stored), *asides]


def _family_text(contents: CheckpointContents) -> str:
    if contents.family is not None:
        return contents.family.name
    said = contents.config.get("model_type")
    return f"{said} (not a family that prep knows)" if isinstance(said, str) else "of no known family"


def _layout_text(source: Mapping[str, Any]) -> str:
    stacked = f"layers stacked on axis {source['scan_axis']}" if source["scan"] else "a leaf for each layer"
    return f"layout {source['layout']}, {stacked}"


def _step_text(contents: CheckpointContents) -> str:
    params, state = (format_bytes(nbytes_below(contents, root)) for root in (PARAMS, OPT_STATE))
    return f"step {contents.manifest['step']}: parameters {params}, optimizer state {state}"


def _count_text(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _count_line(contents: CheckpointContents, entries: Sequence[TensorEntry]) -> str:
    size = format_bytes(sum(entry.nbytes for entry in entries))
    return f"{len(entries):,} of {len(contents.entries):,} tensors, {size}"


# Table, statistics and tree


def _render_view(
    request: InspectRequest, contents: CheckpointContents, entries: list[TensorEntry], ui: Ui
) -> tuple[str, dict[str, Any]]:
    names = [_file_name(contents, each) for each in contents.byte_sources]
    listed = [_entry_fields(contents, entry, names) for entry in entries] if ui.as_json else []
    most = len(entries) if ui.level >= LEAVES else MAX_ROWS
    if request.tree:
        nodes = build_tree(entries)
        rows = list(itertools.islice(tree_rows(nodes), most))
        text = format_table(rows, ("name", "shape", "dtype", "size"), {"size"}, ui.columns)
        fields = {"tensors": listed, "tree": [tree_fields(node) for node in nodes] if ui.as_json else []}
        return _append_omitted_line(text, count_nodes(nodes) - len(rows)), fields
    rest = len(entries) - most
    if request.stats:
        found = _compute_stats(contents, entries, ui)
        for fields, each in zip(listed, found):
            fields["stats"] = _stats_fields(each)
        return _append_omitted_line(_stats_table(entries[:most], found, ui.columns), rest), {"tensors": listed}
    return _append_omitted_line(_entry_table(contents, entries[:most], names, ui.columns), rest), {"tensors": listed}


def _append_omitted_line(text: str, num_omitted: int) -> str:
    """Add a line for rows that are not shown."""
    return f"{text}\nand {num_omitted:,} more rows; `-v` shows all, a PATTERN those that match" if num_omitted > 0 else text


def _file_name(contents: CheckpointContents, file: Path | Blob) -> str:
    """What a file or a blob is called within the checkpoint."""
    if isinstance(file, Path) and contents.folder.is_dir():
        return str(file.relative_to(contents.folder))
    return file.name


def _entry_fields(contents: CheckpointContents, entry: TensorEntry, file_names: Sequence[str]) -> dict[str, Any]:
    """An entry for JSON; file and offset are those of its first chunk."""
    first = entry.first_chunk
    fields: dict[str, Any] = {"name": entry.name, "shape": entry.shape, "dtype": entry.dtype, "bytes": entry.nbytes}
    fields |= {"file": file_names[first.file] if first else None, "offset": first.offset if first else None}
    return fields | ({"chunk": entry.chunk_shape, "chunks": len(entry.chunks)} if contents.kind == "orbax" else {})


def _entry_table(
    contents: CheckpointContents, entries: Sequence[TensorEntry], file_names: Sequence[str], columns: int | None
) -> str:
    last = ("chunk", "chunks") if contents.kind == "orbax" else ("file", "offset")
    rows: list[list[Cell]] = []
    for entry in entries:
        first = entry.first_chunk
        place: list[Cell] = [file_names[first.file], first.offset] if first else ["", ""]
        place = [str(list(entry.chunk_shape)), len(entry.chunks)] if contents.kind == "orbax" else place
        rows.append([entry.name, str(list(entry.shape)), entry.dtype, format_bytes(entry.nbytes), *place])
    return format_table(rows, ("name", "shape", "dtype", "size", *last), {"size"}, columns)


def _compute_stats(contents: CheckpointContents, entries: Sequence[TensorEntry], ui: Ui) -> list[TensorStats | None]:
    progress = ui.progress()
    progress.begin("inspect", sum(map(stored_nbytes, entries)))
    try:
        with open_blobs(contents.byte_sources) as files:
            return [compute_stats(entry, files, progress.advance) for entry in entries]
    finally:
        progress.end()


def _stats_table(entries: Sequence[TensorEntry], statistics: Sequence[TensorStats | None], columns: int | None) -> str:
    head = ("name", "shape", "dtype", "min", "max", "mean", "nan", "inf", "zeros")
    rows: list[list[Cell]] = []
    for entry, each in zip(entries, statistics):
        known: list[Cell] = ["-"] * 6
        if each is not None:
            known = [*map(_value_text, (each.minimum, each.maximum, each.mean)), each.nan, each.inf, each.zeros]
        rows.append([entry.name, str(list(entry.shape)), entry.dtype, *known])
    return format_table(rows, head, set(head[3:]), columns)


def _stats_fields(statistics: TensorStats | None) -> dict[str, Any] | None:
    if statistics is None:
        return None
    counts = {"nan": statistics.nan, "inf": statistics.inf, "zeros": statistics.zeros}
    return {"min": statistics.minimum, "max": statistics.maximum, "mean": statistics.mean, **counts}


def _value_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


# Shards


def _shards_report(request: InspectRequest, contents: CheckpointContents, fields: Mapping[str, Any]) -> Report:
    asked = contents.manifest.get("mesh") if request.mesh is None else request.mesh
    if asked is None:
        why = f"{contents.display_name} was not laid out for one"
        raise usage_error("no mesh was named to split the leaf over", why, "for example `--mesh 1,2,4`")
    mesh = parse_mesh(asked)
    leaf = find_leaf(logical_leaves(contents), request.shards or "", contents.display_name)
    rules = merge_rules(contents.manifest.get("rules", ()))
    found = partition_spec(leaf.dims, leaf.shape, mesh, rules, contents.display_name)
    is_drawn = mesh.n_devices <= MAX_DRAWN_DEVICES
    picture = (draw_shard_map if is_drawn else summarize_sharding)(leaf.name, leaf.shape, leaf.dtype, found, mesh)
    shards = {
        "leaf": leaf.name,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "mesh": str(mesh),
        "spec": str(found),
        "shard": shard_shape(found, leaf.shape),
        "copies": num_replicas(found, mesh),
        "devices": device_boxes(found, mesh, leaf.shape) if is_drawn else None,
    }
    return Report("\n".join([picture, *map(str, found.fallbacks)]), {**fields, "shards": shards})


# Against another checkpoint


def _diff_report(
    request: InspectRequest, a: CheckpointContents, b: CheckpointContents, fields: Mapping[str, Any], ui: Ui
) -> Report:
    """Without reading data; tensors in the order of the first one, then those that only the other has."""
    x, y = (_shapes_by_name(contents, a.kind != b.kind) for contents in (a, b))
    wanted = _match_names({*x, *y}, request.pattern, f"{a.display_name} and {b.display_name}")
    names = [name for name in dict.fromkeys([*x, *y]) if name in wanted]
    found = [(name, x.get(name), y.get(name)) for name in names if x.get(name) != y.get(name)]
    listed = [{"name": n, "a": _shape_fields(shape), "b": _shape_fields(other)} for n, shape, other in found]
    if not found:
        return Report("no difference in names, shapes and dtypes", {**fields, "differences": listed})
    most = len(found) if ui.level >= LEAVES else MAX_ROWS
    lines = [
        _difference_line(name, shape, other, a.display_name, b.display_name) for name, shape, other in found[:most]
    ]
    text = _append_omitted_line("\n".join(lines), len(found) - most)
    error = PrepError(f"{a.display_name} and {b.display_name} differ in {len(found)} of {_count_text(len(names), 'tensor')}")
    return Report(text, {**fields, "differences": listed}, error=error)


def _shapes_by_name(contents: CheckpointContents, as_hf_tensors: bool) -> dict[str, ShapeAndDtype]:
    """Name -> shape and dtype; `as_tensors`: of the Hugging Face tensors that an Orbax checkpoint holds."""
    if not as_hf_tensors or contents.kind in ("safetensors", "torch", "meta"):
        return {entry.name: (entry.shape, entry.dtype) for entry in contents.entries}
    source = open_source(contents.folder, contents.display_name)
    return {source.names.full_name(tensor.name): (tensor.shape, tensor.dtype) for tensor in source.tensors}


def _shape_fields(shape: ShapeAndDtype | None) -> dict[str, Any] | None:
    return {"shape": shape[0], "dtype": shape[1]} if shape else None


def _difference_line(name: str, a_shape: ShapeAndDtype | None, b_shape: ShapeAndDtype | None, a_name: str, b_name: str) -> str:
    if a_shape and b_shape:
        return f"differs  {name}  {_shape_text(a_shape)} -> {_shape_text(b_shape)}"
    return f"only in {a_name}  {name}  {_shape_text(a_shape)}" if a_shape else f"only in {b_name}  {name}  {_shape_text(b_shape)}"


def _shape_text(shape: ShapeAndDtype | None) -> str:
    return f"{list(shape[0])} {shape[1]}" if shape else ""
