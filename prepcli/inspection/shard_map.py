"""Drawing in text of the devices that hold each slice of a leaf. Needs no devices."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from prepcli.algebra.boxes import Box
from prepcli.core.formatting import count_text, format_bytes, number_runs
from prepcli.models.mesh import Mesh
from prepcli.models.partition import Spec, device_boxes, num_replicas, shard_shape
from prepcli.planning.tensors import array_bits

WIDTH = 80
MAX_CELLS = 64
MAX_CELL_WIDTH = 20
# The box of every device is computed, also of the devices in omitted cells.
MAX_DRAWN_DEVICES = 1 << 14

# (row, column) -> devices, empty for omitted cells.
CellDevices = dict[tuple[int | None, int | None], list[int]]


@dataclass(frozen=True, slots=True)
class _PictureSide:
    """One side of the drawing: the dim it shows (None: none) and its number of parts."""

    dim: int | None
    n_parts: int
    elided: bool = False

    @property
    def drawn_parts(self) -> list[int | None]:
        if self.elided:
            return [0, None, self.n_parts - 1]
        return list(range(self.n_parts))

    def label(self, part: int | None, shard: Sequence[int]) -> str:
        """Return the index range of a part, or the number of omitted parts."""
        if part is None:
            return f"× {self.n_parts - 2}"
        if self.dim is None:
            return ""
        return f"{part * shard[self.dim]}:{(part + 1) * shard[self.dim]}"


def draw_shard_map(name: str, shape: Sequence[int], dtype: str, spec: Spec, mesh: Mesh) -> str:
    """Draw the shards of a leaf with box characters, at most 80 columns wide.

    Each cell is a slice with the numbers of the devices that hold it. The last two partitioned dims are drawn,
    and only the first part of a third dim. Many cells are shortened to the first and the last ones.

    Returns:
        Lines of the header, the legend and the drawing.
    """
    shard = shard_shape(spec, shape)
    cut = [i for i, parts in enumerate(spec.shards_per_dim) if parts > 1][-2:]
    only_last = len(cut) == 1 and 0 < cut[0] == len(spec.shards_per_dim) - 1
    dims = [None, *cut] if only_last else [*cut, None, None]
    down = _picture_side(spec, dims[0])
    across = _picture_side(spec, dims[1])
    longest = max(len(across.label(part, shard)) for part in across.drawn_parts)
    if _cell_width(down, across, shard) <= max(longest, 3):
        across = _elide_parts(across)
    # Each pass shortens the longer side to 3 parts. The loop ends at 3 x 3 cells at the latest.
    while len(down.drawn_parts) * len(across.drawn_parts) > MAX_CELLS:
        if len(across.drawn_parts) > len(down.drawn_parts):
            across = _elide_parts(across)
        else:
            down = _elide_parts(down)
    holders: CellDevices = {}
    drawn = (down.dim, across.dim)
    for device, box in enumerate(device_boxes(spec, mesh, shape)):
        if all(low == 0 for i, (low, _) in enumerate(box) if i not in drawn):
            cell = (_part_number(box, down.dim, shard), _part_number(box, across.dim, shard))
            holders.setdefault(cell, []).append(device)
    lines = [
        *_header_lines(name, shape, dtype, spec, mesh),
        *_legend_lines(spec, down, across, shard),
    ]
    width = _cell_width(down, across, shard)
    header = "".join(
        f" {_clip_text(across.label(part, shard), width):<{width}}" for part in across.drawn_parts
    ).rstrip()
    rule = ["─" * width] * len(across.drawn_parts)
    grid = [f"┌{'┬'.join(rule)}┐"]
    for row in down.drawn_parts:
        cells = (
            _format_devices(holders.get((row, column), []), width - 2)
            for column in across.drawn_parts
        )
        label = _clip_text(down.label(row, shard), WIDTH)
        line = "".join(f"│ {cell:<{width - 1}}" for cell in cells)
        grid += [f"{line}│  {label}".rstrip(), f"├{'┼'.join(rule)}┤"]
    grid[-1] = f"└{'┴'.join(rule)}┘"
    if header:
        grid.insert(0, header)
    return "\n".join(lines + grid)


def summarize_sharding(name: str, shape: Sequence[int], dtype: str, spec: Spec, mesh: Mesh) -> str:
    """Return the header of `draw_shard_map`, and why there is no drawing: the mesh has too many devices."""
    reason = f"not drawn: the mesh has {mesh.n_devices:,} devices, a drawing at most {MAX_DRAWN_DEVICES:,}"
    return "\n".join([*_header_lines(name, shape, dtype, spec, mesh), reason])


def _picture_side(spec: Spec, dim: int | None) -> _PictureSide:
    if dim is None:
        return _PictureSide(None, 1)
    return _PictureSide(dim, spec.shards_per_dim[dim])


def _elide_parts(side: _PictureSide) -> _PictureSide:
    return _PictureSide(side.dim, side.n_parts, side.n_parts > 3)


def _cell_width(down: _PictureSide, across: _PictureSide, shard: Sequence[int]) -> int:
    # A line is `│ cell` per part, `│`, two spaces and the label. A label of 6 characters and 4 parts:
    # (80 - 8 - 1) // 4 - 1 = 16 columns for a cell.
    label_width = max(len(down.label(part, shard)) for part in down.drawn_parts) + 2
    return min(MAX_CELL_WIDTH, (WIDTH - label_width - 1) // len(across.drawn_parts) - 1)


def _part_number(box: Box, dim: int | None, shard: Sequence[int]) -> int:
    if dim is None:
        return 0
    return box[dim][0] // shard[dim]


def _header_lines(name: str, shape: Sequence[int], dtype: str, spec: Spec, mesh: Mesh) -> list[str]:
    shard_nbytes = format_bytes(array_bits(dtype, shard_shape(spec, shape)) / 8)
    n_copies = num_replicas(spec, mesh)
    copied = count_text(n_copies, "copy", "copies")
    return _wrap_phrases(
        [name, f"{list(shape)} {dtype}", str(spec), f"{shard_nbytes} per device, {copied}"], "  "
    )


def _legend_lines(
    spec: Spec, down: _PictureSide, across: _PictureSide, shard: Sequence[int]
) -> list[str]:
    """Return lines that name the drawn dims and the remaining ones.

    Empty if no dim is partitioned.
    """
    drawn = (down.dim, across.dim)
    notes: list[str] = []
    if down.dim is not None:
        notes.append(f"{spec.dim_names[down.dim]} down")
    if across.dim is not None:
        notes.append(f"{spec.dim_names[across.dim]} across")
    undrawn = [i for i in range(len(shard)) if i not in drawn]
    for i in undrawn:
        if spec.shards_per_dim[i] > 1:
            axes = " x ".join(spec.mesh_axes[i])
            notes.append(
                f"{spec.dim_names[i]} in {spec.shards_per_dim[i]} parts over {axes}, this is 0:{shard[i]}"
            )
    whole = [spec.dim_names[i] or "1" for i in undrawn if spec.shards_per_dim[i] == 1]
    if not notes:
        return []
    if whole:
        notes.append(f"whole: {', '.join(whole)}")
    return _wrap_phrases(notes, "; ")


def _wrap_phrases(phrases: Sequence[str], separator: str) -> list[str]:
    """Return lines of at most 80 columns, broken between phrases where possible."""
    # `textwrap` breaks at spaces, but not at no-break spaces: the phrases stay whole.
    text = separator.join(phrase.replace(" ", "\N{NO-BREAK SPACE}") for phrase in phrases)
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _format_devices(numbers: Sequence[int], width: int) -> str:
    """Format as `0-7`, `0,8,16` or, if there is no room, `0…248 ×32`. An omitted cell is `…`."""
    if not numbers:
        return "…"
    text = ",".join(number_runs(numbers, "-"))
    if len(text) <= width:
        return text
    return _clip_text(f"{numbers[0]}…{numbers[-1]} ×{len(numbers)}", width)


def _clip_text(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return text[: width - 1] + "…"
