"""Write the tree, shards, statistics and differences of a checkpoint as a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prepcli.console.formatting import format_bytes
from prepcli.console.observer import Observer
from prepcli.inspection.contents import CheckpointContents
from prepcli.inspection.logical_leaves import logical_leaves, partition_rules
from prepcli.operations.inspect import (
    SelectedTensors,
    ShapeAndDtype,
    ShapeComparison,
    SourceSummary,
    compare_shapes,
    logical_leaf_spec,
    select_tensors,
)
from prepcli.operations.inspection_options import ViewOptions
from prepcli.operations.options import SourceOptions
from prepcli.pages.html_page import check_page_path
from prepcli.pages.inspection_page import (
    InspectionPage,
    ShapeDifference,
    ShardedModel,
    write_inspection_page,
)
from trainer.models.mesh import parse_mesh
from trainer.models.rule_text import merge_rules


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """The page of a checkpoint.

    Attributes:
        path: The HTML file.
        selected: The tensors in it.
        comparison: Comparison with another checkpoint, or None.
    """

    path: Path
    selected: SelectedTensors
    comparison: ShapeComparison | None


def write_page(
    checkpoint: str,
    path: Path,
    observer: Observer,
    options: SourceOptions,
    *,
    pattern: str | None,
    view: ViewOptions,
) -> WrittenPage:
    """Write the page of a checkpoint. Only `stats` reads data.

    Args:
        checkpoint: Folder, alias, hub id or URL.
        path: The HTML file.
        observer: Receives warnings and progress.
        options: How the checkpoint is read.
        pattern: Shell pattern of tensor names. None selects all.
        view: Mesh, order, statistics and comparison of the page. Without a mesh, the mesh of the manifest is used.

    Raises:
        UsageError: The mesh does not divide a leaf.
        PrepError: No name matches, the checkpoint cannot be read, or the page cannot be written.
    """
    check_page_path(path)
    selected = select_tensors(
        checkpoint,
        observer,
        options,
        pattern=pattern,
        sort=view["sort"],
        stats=view["stats"],
        dequantize=view["quantized"] == "dequantize",
    )
    comparison = None
    if view["diff"] is not None:
        comparison = compare_shapes(checkpoint, view["diff"], observer, options, pattern=pattern)
    inspected = selected.checkpoint
    page = InspectionPage(
        name=inspected.contents.display_name,
        facts=list(_facts(inspected.summary)),
        entries=selected.entries,
        statistics=selected.statistics,
        sharded=_shard_model(inspected.contents, view["mesh"]),
        against=view["diff"],
        differences=list(_differences(comparison)),
    )
    write_inspection_page(path, page)
    observer.note(f"wrote {path}")
    return WrittenPage(path, selected, comparison)


def _facts(summary: SourceSummary) -> Iterator[tuple[str, str]]:
    """Yield name and text of the facts that a checkpoint has."""
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


def _shard_model(contents: CheckpointContents, mesh_text: str | None) -> ShardedModel | None:
    """Shard the leaves of a model by a mesh. Return None if neither the user nor the manifest names a mesh."""
    mesh_text = mesh_text or contents.manifest.mesh
    if mesh_text is None:
        return None
    mesh = parse_mesh(mesh_text)
    rules = merge_rules(partition_rules(contents))
    leaves = []
    for leaf in logical_leaves(contents).values():
        leaves.append((leaf, logical_leaf_spec(contents, leaf, mesh, rules)))
    return ShardedModel(mesh, leaves)


def _differences(comparison: ShapeComparison | None) -> Iterator[ShapeDifference]:
    if comparison is None:
        return
    for name, first, second in comparison.differences:
        yield ShapeDifference(name, _shape_text(first), _shape_text(second))


def _shape_text(shape_and_dtype: ShapeAndDtype | None) -> str:
    if shape_and_dtype is None:
        return ""
    shape, dtype = shape_and_dtype
    return f"{list(shape)} {dtype}"
