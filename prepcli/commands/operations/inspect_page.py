"""Write the tree, shards, statistics and differences of a checkpoint as a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prepcli.commands.operations.inspect import (
    SelectedTensors,
    ShapeComparison,
    SourceSummary,
    compare_shapes,
    select_tensors,
    shape_text,
    shard_leaves,
)
from prepcli.commands.operations.inspection_options import InspectOptions, ViewOptions
from prepcli.commands.pages.html_page import check_page_path
from prepcli.commands.pages.inspection_page import (
    InspectionPage,
    ShardedModel,
    write_inspection_page,
)
from prepcli.core.formatting import format_bytes
from prepcli.core.observer import Observer
from prepcli.inspection.checkpoint_contents import CheckpointContents
from prepcli.inspection.logical_leaves import logical_leaves
from prepcli.models.mesh import parse_mesh


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
    options: InspectOptions,
    *,
    pattern: str | None,
    view: ViewOptions,
) -> WrittenPage:
    """Write the page of a checkpoint. Only `stats` reads data.

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
        facts=list(_summary_rows(inspected.summary)),
        entries=selected.entries,
        statistics=selected.statistics,
        sharded=_shard_model(inspected.contents, view["mesh"]),
        against=view["diff"],
        differences=list(_differences(comparison)),
    )
    write_inspection_page(path, page)
    observer.note(f"wrote {path}")
    return WrittenPage(path, selected, comparison)


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


def _shard_model(contents: CheckpointContents, mesh_text: str | None) -> ShardedModel | None:
    """Shard the leaves of a model by a mesh. Return None if neither the user nor the manifest names a mesh."""
    mesh_text = mesh_text or contents.manifest.mesh
    if mesh_text is None:
        return None
    mesh = parse_mesh(mesh_text)
    leaves = list(logical_leaves(contents).values())
    specs = shard_leaves(contents, leaves, mesh)
    return ShardedModel(mesh, list(zip(leaves, specs)))


def _differences(comparison: ShapeComparison | None) -> Iterator[tuple[str, str, str]]:
    if comparison is None:
        return
    for name, first, second in comparison.differences:
        yield name, shape_text(first), shape_text(second)
