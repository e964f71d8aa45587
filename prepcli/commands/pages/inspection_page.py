"""A checkpoint as a self-contained HTML page: its tree, bytes per device, shards, statistics, differences and lock."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from prepcli.commands.pages.charts import shard_map_svg
from prepcli.commands.pages.html_page import (
    Bar,
    html_blocks,
    html_table,
    legend,
    stacked_bar,
    write_html_page,
)
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.tables import Table
from prepcli.formats.lock_file import Lock, encode_lock
from prepcli.inspection.logical_leaves import LogicalLeaf
from prepcli.inspection.shard_map import MAX_DRAWN_DEVICES, draw_shard_map
from prepcli.models.mesh import Mesh
from prepcli.models.partition import Spec, device_boxes, num_replicas, shard_shape
from prepcli.planning.tensors import array_bits
from prepcli.sources.source import SourceTensor

# Nodes of the tree and rows of a table. A malicious header may list millions of tensors.
MAX_ROWS = 2000
# Drawings of shards: the largest kinds of leaves.
MAX_DRAWINGS = 12
# Cells of a picture. The device numbers of more cells do not fit, so these leaves are drawn as text.
MAX_PICTURE_CELLS = 64
# Parts of a bar. The smaller ones are joined.
MAX_PARTS = 6
OTHERS = "others"

STYLE = """
.tree td:first-child { white-space: pre; font-family: monospace }
pre { overflow-x: auto; font-size: 12px; line-height: 1.2 }
.shards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: 0 1.5rem }
.shards section { min-width: 0 }
"""


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """The leaves of a model with their sharding on a mesh."""

    mesh: Mesh
    leaves: Sequence[tuple[LogicalLeaf, Spec]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionPage:
    """Contents of the page of a checkpoint.

    Attributes:
        name: The checkpoint as the user typed it.
        facts: Description of the model and its storage: name and text of each fact.
        entries: The tensors.
        tree: The first rows of the tree, with equal layers merged.
        num_nodes: Number of all rows of the tree.
        statistics: Statistics of the first tensors, or None if they were not computed.
        sharded: The sharded leaves, or None without a mesh.
        against: Name of the checkpoint to compare with, or None.
        differences: Name of each different tensor, and its shape and dtype in both checkpoints, empty if it is missing.
    """

    name: str
    facts: Sequence[tuple[str, str]]
    entries: Sequence[SourceTensor]
    tree: Table
    num_nodes: int
    statistics: Table | None = None
    sharded: ShardedModel | None = None
    against: str | None = None
    differences: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True, slots=True)
class _LeafKind:
    """Leaves of one shape, dtype and sharding, such as the query of every layer."""

    leaf: LogicalLeaf
    spec: Spec
    names: list[str]

    @property
    def title(self) -> str:
        """The first name, and how many others follow."""
        first, *others = self.names
        return f"{first} and {len(others):,} more" if others else first


def write_inspection_page(path: Path, page: InspectionPage) -> None:
    """Write the page of a checkpoint.

    Raises:
        PrepError: The file cannot be written, or the path is something other than a page of prep.
    """
    write_html_page(path, f"prep inspect {page.name}", _page_body(page), style=STYLE)


def _page_body(page: InspectionPage) -> Iterator[str]:
    yield f"<h1>{escape(page.name)}</h1>"
    yield from html_table(Table(["checkpoint", ""], page.facts))
    nbytes_of: Counter[str] = Counter()
    for entry in page.entries:
        nbytes_of[entry.dtype] += entry.nbytes
    yield "<h2>Bytes by dtype</h2>"
    yield from _byte_shares(nbytes_of, "bytes of each dtype")
    if page.against is not None:
        yield f"<h2>Differences to {escape(page.against)}</h2>"
        if page.differences:
            yield from _first_rows(Table(["tensor", "first", "second"], page.differences))
        else:
            yield "<p>No difference in names, shapes and dtypes.</p>"
    if page.sharded is not None:
        yield from _device_section(page.sharded)
    if page.statistics is not None:
        yield "<h2>Statistics</h2>"
        yield from html_blocks([page.statistics])
        yield from _omitted_line(len(page.entries))
    yield '<h2>Tree</h2><div class="tree">'
    yield from html_blocks([page.tree])
    yield "</div>"
    yield from _omitted_line(page.num_nodes)


def _byte_shares(nbytes_of: Mapping[str, int], title: str) -> Iterator[str]:
    """Yield a bar of the largest parts of a total, and their names and sizes."""
    parts = _largest_parts(nbytes_of)
    yield stacked_bar(parts, title)
    yield legend([f"{part.name}: {part.text}" for part in parts])


def _largest_parts(nbytes_of: Mapping[str, int]) -> list[Bar]:
    """Return the largest parts of a total, and the sum of the others.

    >>> [part.name for part in _largest_parts({name: 1 for name in "abcdefgh"})]
    ['a', 'b', 'c', 'd', 'e', 'others']
    """
    by_size = sorted(nbytes_of.items(), key=lambda part: -part[1])
    if len(by_size) > MAX_PARTS:
        rest = sum(nbytes for _, nbytes in by_size[MAX_PARTS - 1 :])
        by_size = [*by_size[: MAX_PARTS - 1], (OTHERS, rest)]
    return [Bar(name, nbytes, format_bytes(nbytes)) for name, nbytes in by_size]


def _device_section(sharded: ShardedModel) -> Iterator[str]:
    """Yield the bytes of a device, a table of the kinds of leaves, and drawings of the largest kinds."""
    mesh = sharded.mesh
    # The shards of a leaf have equal shapes, so every device holds the same number of bytes.
    nbytes_of: Counter[str] = Counter()
    for leaf, spec in sharded.leaves:
        nbytes_of[_part_of(leaf)] += _shard_nbytes(leaf, spec)
    total = sum(_leaf_nbytes(leaf) for leaf, _ in sharded.leaves)
    each = format_bytes(sum(nbytes_of.values()))
    devices = count_text(mesh.n_devices, "device")
    yield f"<h2>Parameters on {devices}</h2>"
    yield f"<p>Mesh {escape(str(mesh))}. Each device holds {each} of {format_bytes(total)}.</p>"
    yield from _byte_shares(nbytes_of, "bytes of the parameters on each device")
    kinds = _leaf_kinds(sharded)
    rows: list[list[str]] = []
    for kind in kinds:
        shape = f"{list(kind.leaf.shape)} {kind.leaf.dtype}"
        shard = format_bytes(_shard_nbytes(kind.leaf, kind.spec))
        copies = str(num_replicas(kind.spec, mesh))
        rows.append([kind.title, shape, str(kind.spec), shard, copies])
    header = ("leaf", "shape", "sharding", "per device", "copies")
    yield from _first_rows(Table(header, rows, right_aligned=header[3:]))
    split = [kind for kind in kinds if max(kind.spec.shards_per_dim, default=1) > 1]
    if mesh.n_devices > MAX_DRAWN_DEVICES or not split:
        return
    yield '<h2>Shards</h2><div class="shards">'
    for kind in split[:MAX_DRAWINGS]:
        yield f"<section><h3>{escape(kind.title)}</h3>{_drawing(kind, mesh)}</section>"
    yield "</div>"


def _part_of(leaf: LogicalLeaf) -> str:
    """Return the part of the model that a leaf belongs to.

    The number of a layer is left out: `layers.3.attn.q` and `layers.attn.q` belong to `layers.attn`.
    """
    words = [word for word in leaf.path.split(".") if not word.isdigit()]
    return ".".join(words[:2])


def _leaf_nbytes(leaf: LogicalLeaf) -> int:
    return math.ceil(array_bits(leaf.dtype, leaf.shape) / 8)


def _shard_nbytes(leaf: LogicalLeaf, spec: Spec) -> int:
    return math.ceil(array_bits(leaf.dtype, shard_shape(spec, leaf.shape)) / 8)


def _leaf_kinds(sharded: ShardedModel) -> list[_LeafKind]:
    """Return the kinds of leaves, those with the most bytes in one leaf first."""
    kinds: dict[tuple[object, ...], _LeafKind] = {}
    for leaf, spec in sharded.leaves:
        key = (_part_of(leaf), leaf.dims, leaf.shape, leaf.dtype, spec)
        kind = kinds.setdefault(key, _LeafKind(leaf, spec, []))
        kind.names.append(leaf.path)
    return sorted(kinds.values(), key=lambda kind: -_leaf_nbytes(kind.leaf))


def _drawing(kind: _LeafKind, mesh: Mesh) -> str:
    """Draw the shards as a picture of one matrix, or as text if it has many cells or a third split dim."""
    shape = kind.leaf.shape
    spec = kind.spec
    split_dims = [dim for dim, parts in enumerate(spec.shards_per_dim) if parts > 1]
    is_matrix = len(split_dims) <= 2 <= len(shape)
    if not is_matrix or math.prod(spec.shards_per_dim) > MAX_PICTURE_CELLS:
        text = draw_shard_map(kind.leaf.name, shape, kind.leaf.dtype, spec, mesh)
        return f"<pre>{escape(text)}</pre>"
    down, across = _picture_dims(split_dims, len(shape))
    boxes = [(box[down], box[across]) for box in device_boxes(spec, mesh, shape)]
    names = f"{spec.dim_names[down] or '1'} down, {spec.dim_names[across] or '1'} across"
    picture = shard_map_svg((shape[down], shape[across]), boxes, f"shards of {kind.leaf.path}")
    return f"<p>{escape(names)}</p>{picture}"


def _picture_dims(split_dims: Sequence[int], num_dims: int) -> tuple[int, int]:
    """Return the dims that a picture shows down and across: the split ones, or else the last ones of the leaf.

    >>> _picture_dims([1], 3), _picture_dims([0, 2], 3)
    ((1, 2), (0, 2))
    """
    shown = list(split_dims)
    for dim in reversed(range(num_dims)):
        if len(shown) < 2 and dim not in shown:
            shown.append(dim)
    down, across = sorted(shown)
    return down, across


def _first_rows(table: Table) -> Iterator[str]:
    """Yield the first rows of a table, and the number of the other ones."""
    yield from html_table(replace(table, rows=table.rows[:MAX_ROWS]))
    yield from _omitted_line(len(table.rows))


def _omitted_line(num_rows: int) -> Iterator[str]:
    if num_rows > MAX_ROWS:
        yield f"<p>and {num_rows - MAX_ROWS:,} more</p>"


def write_lock_page(path: Path, lock: Lock) -> None:
    """Write the page of a lock file.

    Raises:
        PrepError: The file cannot be written, or the path is something other than a page of prep.
    """
    write_html_page(path, f"prep lock {lock.source}", _lock_body(lock))


def _lock_body(lock: Lock) -> Iterator[str]:
    file_nbytes = sum(file.bytes for file in lock.files.values())
    yield f"<h1>{escape(lock.source)}</h1>"
    facts = [
        ("revision", lock.revision or "-"),
        ("files", f"{len(lock.files):,}"),
        ("bytes", f"{file_nbytes:,}"),
        ("tensors", f"{len(lock.tensors):,}"),
        # The page shows which lock file it describes, as `sha256sum` prints it.
        ("SHA-256 of the lock file", hashlib.sha256(encode_lock(lock)).hexdigest()),
    ]
    yield from html_table(Table(["lock", ""], facts))
    yield "<h2>Files</h2>"
    rows: list[list[str | int]] = []
    for name, file in lock.files.items():
        rows.append([name, file.bytes, file.digest or "-"])
    yield from html_table(Table(["file", "bytes", "SHA-256"], rows))
    yield "<h2>Tensors by dtype</h2>"
    yield from html_table(Table(["dtype", "tensors", "bytes"], _lock_dtype_rows(lock)))
    yield "<p>The lock file has the XXH3-128 of each tensor.</p>"


def _lock_dtype_rows(lock: Lock) -> list[list[str | int]]:
    """Return dtype, number of tensors and bytes, the dtype with the most bytes first."""
    sizes: dict[str, list[int]] = {}
    for tensor in lock.tensors.values():
        nbytes = math.ceil(array_bits(tensor.dtype, tensor.shape) / 8)
        sizes.setdefault(tensor.dtype, []).append(nbytes)
    by_size = sorted(sizes, key=lambda name: -sum(sizes[name]))
    return [[dtype, len(sizes[dtype]), sum(sizes[dtype])] for dtype in by_size]
