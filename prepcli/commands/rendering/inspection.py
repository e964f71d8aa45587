"""Views of a checkpoint as text and JSON."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.operations.inspect import (
    LeafShards,
    SelectedTensors,
    ShapeAndDtype,
    ShapeComparison,
    SourceSummary,
    compare_shapes,
    select_tensors,
    shape_text,
    shard_leaves,
)
from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.json_values import json_fields
from prepcli.core.observer import LEAVES
from prepcli.core.tables import Block, Cell, Paragraph, Table
from prepcli.formats.orbax import item_metadata_file
from prepcli.formats.registry import FORMATS
from prepcli.inspection.contents import (
    AdapterSummary,
    CheckpointContents,
    TreeNode,
    build_tree,
    count_nodes,
    num_chunks,
    tree_fields,
    tree_rows,
)
from prepcli.inspection.logical_leaves import logical_leaves, missing_parameter, nbytes_below
from prepcli.inspection.shard_map import MAX_DRAWN_DEVICES, draw_shard_map, summarize_sharding
from prepcli.inspection.tensor_stats import TensorStats, stats_cells
from prepcli.models.mesh import parse_mesh
from prepcli.models.parameters import VERBATIM
from prepcli.models.partition import device_boxes, num_replicas, shard_shape
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.planning.item_storage import LEVANTER_METADATA_FILE
from prepcli.planning.tensors import OPT_STATE, PARAMS
from prepcli.sources.references import CONFIG
from prepcli.sources.source import SourceTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prepcli.commands.operations.inspection_options import InspectOptions, ViewOptions
    from prepcli.commands.pages.inspection_page import (
        ShardedModel,
    )


# Rows of a table. A malicious header may list millions of tensors.
MAX_ROWS = 2000
# Columns that a narrow terminal leaves out, the first one first. The size follows from the shape and the dtype.
OPTIONAL_COLUMNS = ("offset", "chunks", "file", "chunk", "size")
# Lines about entries other than arrays. A malformed index may list any number of them.
MAX_NON_ARRAYS = 24


# Titles of storage formats. The title of any other format is its name.
def tensors_report(selected: SelectedTensors, ui: Ui, *, tree: bool = False) -> Report:
    """Return the table of tensors, or their tree or statistics."""
    checkpoint = selected.checkpoint
    contents = checkpoint.contents
    entries = selected.entries
    fields: dict[str, object] = {"source": checkpoint.summary, "tensors": []}
    if ui.as_json:
        # A checkpoint may have millions of tensors. The text needs only the first ones.
        fields["tensors"] = _tensor_fields(selected)
    max_rows = len(entries) if ui.level >= LEAVES else MAX_ROWS
    num_rows = len(entries)
    if tree:
        nodes = build_tree(entries)
        num_rows = count_nodes(nodes)
        table = _tree_table(nodes, max_rows)
        fields["tree"] = [tree_fields(node) for node in nodes] if ui.as_json else []
    elif selected.statistics is not None:
        table = _stats_table(entries[:max_rows], selected.statistics)
    else:
        table = _entry_table(contents, entries[:max_rows])
    blocks: list[Block] = [*map(Paragraph, header_lines(contents, checkpoint.summary)), "", table]
    blocks += _omitted_line(num_rows - max_rows)
    if selected.is_selection:
        blocks.append(count_line(contents, entries))
    return Report(blocks, fields)


def shards_report(sharded: LeafShards) -> Report:
    """Return the drawing of a leaf's shards, or a summary for a large mesh."""
    leaf = sharded.leaf
    spec = sharded.spec
    mesh = sharded.mesh
    draw = summarize_sharding
    devices = None
    if mesh.n_devices <= MAX_DRAWN_DEVICES:
        draw = draw_shard_map
        devices = device_boxes(spec, mesh, leaf.shape)
    drawing = draw(leaf.name, leaf.shape, leaf.dtype, spec, mesh)
    shards = {
        "leaf": leaf.name,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "mesh": str(mesh),
        "spec": str(spec),
        "shard": shard_shape(spec, leaf.shape),
        "copies": num_replicas(spec, mesh),
        "devices": devices,
    }
    text = "\n".join([drawing, *map(str, spec.fallbacks)])
    return Report(text, {"source": sharded.checkpoint.summary, "shards": shards})


def shape_comparison_report(comparison: ShapeComparison, ui: Ui) -> Report:
    """Return the report of a comparison of shapes. It has an error if there are differences."""
    a_name = comparison.checkpoint.contents.display_name
    b_name = comparison.against.contents.display_name
    differences = comparison.differences
    fields: dict[str, object] = {
        "source": comparison.checkpoint.summary,
        "against": comparison.against.summary,
        "differences": [
            {"name": name, "a": shape_fields(a_shape), "b": shape_fields(b_shape)}
            for name, a_shape, b_shape in differences
        ],
    }
    if not differences:
        return Report("no difference in names, shapes and dtypes", fields)
    max_rows = len(differences) if ui.level >= LEAVES else MAX_ROWS
    lines: list[str] = []
    for name, a_shape, b_shape in differences[:max_rows]:
        if a_shape and b_shape:
            line = f"differs  {name}  {shape_text(a_shape)} -> {shape_text(b_shape)}"
        elif a_shape:
            line = f"only in {a_name}  {name}  {shape_text(a_shape)}"
        else:
            line = f"only in {b_name}  {name}  {shape_text(b_shape)}"
        lines.append(line)
    lines += _omitted_line(len(differences) - max_rows)
    counts = f"{len(differences)} of {count_text(comparison.num_compared, 'tensor')}"
    return Report(lines, fields, error=PrepError(f"{a_name} and {b_name} differ in {counts}"))


def page_report(
    checkpoint: str,
    path: Path,
    ui: Ui,
    options: InspectOptions,
    *,
    pattern: str | None,
    view: ViewOptions,
) -> Report:
    """Write the page of a checkpoint. Only `stats` reads data. The report has an error if the page shows differences.

    Raises:
        UsageError: The mesh does not divide a leaf.
        PrepError: No name matches, the checkpoint cannot be read, or the page cannot be written.
    """
    from prepcli.commands.pages.html_page import check_page_path
    from prepcli.commands.pages.inspection_page import (
        InspectionPage,
        ShardedModel,
        write_inspection_page,
    )

    check_page_path(path)
    selected = select_tensors(
        checkpoint,
        ui,
        options,
        pattern=pattern,
        sort=view["sort"],
        stats=view["stats"],
        dequantize=view["quantized"] == "dequantize",
    )
    contents = selected.checkpoint.contents
    summary = selected.checkpoint.summary
    report = Report(count_line(contents, selected.entries), {"source": summary})
    differences: list[tuple[str, str, str]] = []
    if view["diff"] is not None:
        comparison = compare_shapes(checkpoint, view["diff"], ui, options, pattern=pattern)
        report = shape_comparison_report(comparison, ui)
        for name, first, second in comparison.differences:
            differences.append((name, shape_text(first), shape_text(second)))
    sharded: ShardedModel | None = None
    mesh_text = view["mesh"] or contents.manifest.mesh
    if mesh_text is not None:
        mesh = parse_mesh(mesh_text)
        leaves = list(logical_leaves(contents).values())
        specs = shard_leaves(contents, leaves, mesh)
        sharded = ShardedModel(mesh, list(zip(leaves, specs)))
    nodes = build_tree(selected.entries)
    statistics: Table | None = None
    if selected.statistics is not None:
        statistics = _stats_table(selected.entries[:MAX_ROWS], selected.statistics)
    page = InspectionPage(
        name=contents.display_name,
        facts=list(_summary_rows(summary)),
        entries=selected.entries,
        tree=_tree_table(nodes, MAX_ROWS),
        num_nodes=count_nodes(nodes),
        statistics=statistics,
        sharded=sharded,
        against=view["diff"],
        differences=differences,
    )
    write_inspection_page(path, page)
    ui.note(f"wrote {path}")
    return replace(report, fields={**report.fields, "output": str(path)})


def _summary_rows(summary: SourceSummary) -> Iterator[tuple[str, str]]:
    """Yield label and text of each row of the summary."""
    yield "family", summary["family"] or "unknown"
    if summary["parameters"] is not None:
        yield "parameters", f"{summary['parameters']:,}"
    yield "format", summary["format"]
    yield "files", f"{summary['files']:,}"
    yield "bytes", format_bytes(summary["bytes"])
    yield "tensors", f"{summary['tensors']:,}"
    if summary["vocab"] is not None:
        yield "vocabulary", f"{summary['vocab']['true']:,} of {summary['vocab']['padded']:,} rows"
    if summary["layout"] is not None:
        yield "layout", summary["layout"]
    if summary["step"] is not None:
        yield "step", f"{summary['step']:,}"
    if summary["revision"] is not None:
        yield "revision", summary["revision"]


def _tensor_fields(selected: SelectedTensors) -> list[dict[str, object]]:
    """Return the JSON fields of each tensor."""
    contents = selected.checkpoint.contents
    tensors = [_entry_fields(contents, entry) for entry in selected.entries]
    for fields, statistics in zip(tensors, selected.statistics or ()):
        fields["stats"] = None
        if statistics is not None:
            numbers = json_fields(statistics, "mean", "nan", "inf", "zeros")
            fields["stats"] = {"min": statistics.minimum, "max": statistics.maximum, **numbers}
    return tensors


def _omitted_line(num_omitted: int) -> list[str]:
    """Return a line with the number of omitted rows, if there are any."""
    if num_omitted <= 0:
        return []
    return [f"and {count_text(num_omitted, 'more row')}; `-v` shows all, PATTERN selects some"]


def _entry_fields(contents: CheckpointContents, entry: SourceTensor) -> dict[str, object]:
    """Return an entry's JSON fields. File and offset are of its first chunk."""
    file_name, offset = contents.first_place(entry) or (None, None)
    fields: dict[str, object] = {
        "name": entry.name,
        "shape": entry.shape,
        "dtype": entry.dtype,
        "bytes": entry.nbytes,
    }
    fields |= {"file": file_name, "offset": offset}
    if contents.kind == "orbax":
        chunk_shape = entry.placement[0].array.chunk_shape
        fields |= {"chunk": chunk_shape, "chunks": num_chunks(entry)}
    return fields


def _entry_table(contents: CheckpointContents, entries: Sequence[SourceTensor]) -> Table:
    location_columns = ("chunk", "chunks") if contents.kind == "orbax" else ("file", "offset")
    rows: list[list[Cell]] = []
    for entry in entries:
        location: list[Cell] = [*(contents.first_place(entry) or ("", ""))]
        if contents.kind == "orbax":
            chunk_shape = entry.placement[0].array.chunk_shape
            location = [str(list(chunk_shape)), num_chunks(entry)]
        rows.append(
            [entry.name, str(list(entry.shape)), entry.dtype, format_bytes(entry.nbytes), *location]
        )
    header = ("name", "shape", "dtype", "size", *location_columns)
    return Table(header, rows, ["size"], optional=OPTIONAL_COLUMNS)


def _tree_table(nodes: Sequence[TreeNode], max_rows: int) -> Table:
    """Return the first rows of a tree."""
    # Only the shown rows are built, because a malicious header may have millions.
    rows = list(itertools.islice(tree_rows(nodes), max_rows))
    return Table(("name", "shape", "dtype", "size"), rows, ["size"])


def _stats_table(
    entries: Sequence[SourceTensor], statistics: Sequence[TensorStats | None]
) -> Table:
    """Return the statistics of each tensor."""
    header = ("name", "shape", "dtype", "min", "max", "mean", "nan", "inf", "zeros")
    rows: list[list[Cell]] = []
    for entry, entry_stats in zip(entries, statistics):
        rows.append([entry.name, str(list(entry.shape)), entry.dtype, *stats_cells(entry_stats)])
    return Table(header, rows, header[3:], optional=["shape"])


def header_lines(contents: CheckpointContents, source: SourceSummary) -> list[str]:
    """Describe the model and its storage in one line each, and the first entries other than arrays."""
    size_in_values = (
        f"{source['parameters']:,} parameters"
        if source["parameters"]
        else f"{source['values']:,} values"
    )
    size = f"{format_bytes(sum(entry.nbytes for entry in contents.entries))} {', '.join(source['dtypes'])}".rstrip()
    model = "  ".join([source["name"], _family_text(contents), size_in_values, size])
    kind = FORMATS[source["format"]].title
    stored = [
        f"{kind}, {count_text(source['files'], 'file')}, {count_text(source['tensors'], 'tensor')}"
    ]
    if contents.kind == "orbax":
        leaves = f"{count_text(source['tensors'], 'leaf', 'leaves')} in {count_text(source['chunks'], 'chunk')}"
        codecs = f" ({', '.join(contents.codecs)})" if contents.codecs else ""
        title = (
            "Levanter" if item_metadata_file(contents.folder) == LEVANTER_METADATA_FILE else "Orbax"
        )
        stored = [f"{title}{codecs}, {count_text(source['files'], 'data file')}, {leaves}"]
        stored += [f"mesh {source['mesh']}"] if source["mesh"] else []
        stacked = f"layers stacked on axis {source['scan_axis']}"
        if not source["scan"]:
            stacked = "one leaf per layer"
        stored += [f"layout {source['layout']}, {stacked}"] if source["layout"] else []
        stored += [_step_text(contents)] if source["step"] is not None else []
    if vocab := source["vocab"]:
        true_text = f" ({vocab['true']} true)" if vocab["true"] != vocab["padded"] else ""
        stored.append(f"vocabulary {vocab['padded']}{true_text}")
    if quantization := source.get("quantization"):
        weights = count_text(quantization["weights"], "quantised weight")
        stored.append(f"{weights} ({quantization['method']}), {quantization['dtype']} when decoded")
    if contents.adapter:
        stored.append(_adapter_text(contents.adapter))
    num_omitted = len(contents.non_arrays) - MAX_NON_ARRAYS
    extra_lines = [
        *contents.non_arrays[:MAX_NON_ARRAYS],
        *([f"and {num_omitted:,} more that are not arrays"] if num_omitted > 0 else []),
    ]
    if missing := missing_parameter(contents):
        extra_lines.append(f"not the tensors of {_family_text(contents)}: {missing} is missing")
    if contents.is_verbatim or (contents.family is None and "model_type" in contents.config):
        extra_lines.append(CANNOT_TRAIN)
    return [model, "; ".join(stored), *extra_lines]


def _adapter_text(adapter: AdapterSummary) -> str:
    """Return the settings of an adapter, such as `LoRA adapter, rank 8, alpha 16, scaled by 2`."""
    base = f" of {adapter['base']:.100}" if adapter["base"] else ""
    return f"LoRA adapter{base}, rank {adapter['rank']}, alpha {adapter['alpha']:g}, scaled by {adapter['scaling']:g}"


def _family_text(contents: CheckpointContents) -> str:
    if contents.kind == "adapter":
        return "adapter"
    if contents.family is not None and contents.wrapper_type:
        return f"{contents.family.name} in {contents.wrapper_type:.60}"
    if contents.family is not None:
        return contents.family.name
    if contents.is_verbatim:
        return VERBATIM
    model_type = contents.config.get("model_type")
    if isinstance(model_type, str):
        return f"{model_type} (unknown family)"
    # Files of Flax are often copied without the config that they need.
    needs_config = contents.kind in ("flax", "easylm") and not contents.config
    return f"unknown family (no {CONFIG}: `--config PATH`)" if needs_config else "unknown family"


def _step_text(contents: CheckpointContents) -> str:
    params, state = (format_bytes(nbytes_below(contents, root)) for root in (PARAMS, OPT_STATE))
    return f"step {contents.manifest.step}: parameters {params}, optimizer state {state}"


def count_line(contents: CheckpointContents, entries: Sequence[SourceTensor]) -> str:
    """Describe how many tensors a pattern selected, and their size."""
    size = format_bytes(sum(entry.nbytes for entry in entries))
    return f"{len(entries):,} of {len(contents.entries):,} tensors, {size}"


def shape_fields(shape: ShapeAndDtype | None) -> dict[str, object] | None:
    """Return a shape and dtype for the JSON object."""
    return {"shape": shape[0], "dtype": shape[1]} if shape else None
