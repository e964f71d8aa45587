"""A picture in text of which device holds which slice of a leaf. Needs no device. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from prepcli.console.formatting import format_bytes
from prepcli.planning.tensors import array_bits
from trainer.models.mesh import Box, Mesh, Spec, device_boxes, num_replicas, shard_shape

WIDTH = 80
MAX_CELLS = 64
MAX_CELL_WIDTH = 20
MAX_DRAWN_DEVICES = 1 << 14

CellDevices = dict[tuple[int | None, int | None], list[int]]  # (row, column) -> devices; none where elided


@dataclass(frozen=True, slots=True)
class _PictureSide:
    """One side of the picture: the dim it shows (None: nothing is cut that way) and the parts that are drawn."""

    dim: int | None
    n_parts: int
    elided: bool = False

    @property
    def drawn_parts(self) -> list[int | None]:
        """Part numbers; None stands for all that are left out."""
        return [0, None, self.n_parts - 1] if self.elided else list(range(self.n_parts))

    def label(self, part: int | None, shard: Sequence[int]) -> str:
        """The range of a part, or how many parts are left out."""
        if part is None:
            return f"× {self.n_parts - 2}"
        return "" if self.dim is None else f"{part * shard[self.dim]}:{(part + 1) * shard[self.dim]}"


def draw_shard_map(name: str, shape: Sequence[int], dtype: str, spec: Spec, mesh: Mesh) -> str:
    """Box drawing of at most 80 columns: a cell is a slice, in it the numbers of the devices that hold it.

    The last two dims that are split are drawn, of a third only its first part; of many cells the first and the last.
    """
    shard = shard_shape(spec, shape)
    down, across = _sides(spec, shard)
    holders = _cell_devices(down, across, shard, device_boxes(spec, mesh, shape))
    lines = [*_header(name, shape, dtype, spec, mesh), *_legend(spec, down, across, shard)]
    return "\n".join(lines + _draw_grid(down, across, shard, holders))


def summarize_sharding(name: str, shape: Sequence[int], dtype: str, spec: Spec, mesh: Mesh) -> str:
    """Return the lines above the drawing, for a mesh of more devices than can be looked at."""
    why = f"not drawn: the mesh has {mesh.n_devices:,} devices, a drawing at most {MAX_DRAWN_DEVICES:,}"
    return "\n".join([*_header(name, shape, dtype, spec, mesh), why])


def _sides(spec: Spec, shard: Sequence[int]) -> tuple[_PictureSide, _PictureSide]:
    """What runs down and what across: the last two dims that are split; a single one across if it is a row's last."""
    cut = [i for i, parts in enumerate(spec.shards_per_dim) if parts > 1][-2:]
    only_last = len(cut) == 1 and 0 < cut[0] == len(spec.shards_per_dim) - 1
    dims = [None, *cut] if only_last else [*cut, None, None]
    down, across = (_PictureSide(dim, 1 if dim is None else spec.shards_per_dim[dim]) for dim in dims[:2])
    if not _fits(down, across, shard):
        across = _elide(across)
    while len(down.drawn_parts) * len(across.drawn_parts) > MAX_CELLS:
        if len(across.drawn_parts) > len(down.drawn_parts):
            across = _elide(across)
        else:
            down = _elide(down)
    return down, across


def _elide(side: _PictureSide) -> _PictureSide:
    return _PictureSide(side.dim, side.n_parts, side.n_parts > 3)


def _fits(down: _PictureSide, across: _PictureSide, shard: Sequence[int]) -> bool:
    longest = max(len(across.label(part, shard)) for part in across.drawn_parts)
    return _cell_width(down, across, shard) > max(longest, 3)


def _cell_width(down: _PictureSide, across: _PictureSide, shard: Sequence[int]) -> int:
    beside = max(len(down.label(part, shard)) for part in down.drawn_parts) + 2
    return min(MAX_CELL_WIDTH, (WIDTH - beside - 1) // len(across.drawn_parts) - 1)


def _cell_devices(down: _PictureSide, across: _PictureSide, shard: Sequence[int], boxes: Sequence[Box]) -> CellDevices:
    """Devices of each cell; where a third dim is split, those of its first part."""
    holders: CellDevices = {}
    drawn = (down.dim, across.dim)
    for device, box in enumerate(boxes):
        if all(low == 0 for i, (low, _) in enumerate(box) if i not in drawn):
            row, column = (0 if dim is None else box[dim][0] // shard[dim] for dim in drawn)
            holders.setdefault((row, column), []).append(device)
    return holders


def _header(name: str, shape: Sequence[int], dtype: str, spec: Spec, mesh: Mesh) -> list[str]:
    held = format_bytes(array_bits(dtype, shard_shape(spec, shape)) / 8)
    n_copies = num_replicas(spec, mesh)
    copied = f"{n_copies} {'copy' if n_copies == 1 else 'copies'}"
    return _wrap([name, f"{list(shape)} {dtype}", str(spec), f"{held} a device, {copied}"], "  ")


def _legend(spec: Spec, down: _PictureSide, across: _PictureSide, shard: Sequence[int]) -> list[str]:
    """Which dims are drawn, and what becomes of the others; nothing where none is split."""
    drawn = (down.dim, across.dim)
    notes = [f"{spec.dim_names[d]} {way}" for d, way in zip(drawn, ("down", "across")) if d is not None]
    rest = [i for i in range(len(shard)) if i not in drawn]
    for i in rest:
        if spec.shards_per_dim[i] > 1:
            over = " x ".join(spec.mesh_axes[i])
            notes.append(f"{spec.dim_names[i]} in {spec.shards_per_dim[i]} parts over {over}, this is 0:{shard[i]}")
    whole = [spec.dim_names[i] or "1" for i in rest if spec.shards_per_dim[i] == 1]
    return _wrap(notes + [f"whole: {', '.join(whole)}"] * bool(whole), "; ") if notes else []


def _wrap(phrases: Sequence[str], separator: str) -> list[str]:
    """Lines of at most 80 columns, broken between phrases where possible."""
    text = separator.join(phrase.replace(" ", "\N{NO-BREAK SPACE}") for phrase in phrases)
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _draw_grid(down: _PictureSide, across: _PictureSide, shard: Sequence[int], holders: CellDevices) -> list[str]:
    width = _cell_width(down, across, shard)
    heads = "".join(f" {_clip(across.label(part, shard), width):<{width}}" for part in across.drawn_parts).rstrip()
    rule = ["─" * width] * len(across.drawn_parts)
    lines = [f"┌{'┬'.join(rule)}┐"]
    for row in down.drawn_parts:
        cells = (_format_devices(holders.get((row, column), []), width - 2) for column in across.drawn_parts)
        beside = _clip(down.label(row, shard), WIDTH)
        line = "".join(f"│ {cell:<{width - 1}}" for cell in cells)
        lines += [f"{line}│  {beside}".rstrip(), f"├{'┼'.join(rule)}┤"]
    lines[-1] = f"└{'┴'.join(rule)}┘"
    return [heads, *lines] if heads else lines


def _format_devices(numbers: Sequence[int], width: int) -> str:
    """`0-7`, `0,8,16` or, where there is no room, `0…248 ×32`; `…` for a cell that is left out."""
    if not numbers:
        return "…"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return text if len(text) <= width else _clip(f"{numbers[0]}…{numbers[-1]} ×{len(numbers)}", width)


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
