"""An Orbax checkpoint of parameters as an output: leaves, chunks for a mesh, and where each tensor goes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prepcli.accounting import Account
from prepcli.errors import PrepError
from prepcli.grids import Grid
from prepcli.moves import Region
from prepcli.placing import Layout, Want, place
from prepcli.plan import Flat, Leaf, OutFile
from prepcli.sources import Source, SourceTensor
from prepcli.tensors import ITEM_BITS, itemsize
from trainer.axes import AxisMap, Row, bind
from trainer.host_reads import amplification, reads_per_host
from trainer.mesh import Mesh, Rules, Spec, chunk_shape, spec

ROOT = "params"


@dataclass(frozen=True, slots=True)
class Item:
    """The leaves, the data files, the regions of every tensor, and the dims that a mesh could not split as asked."""

    leaves: tuple[Leaf, ...]
    files: tuple[OutFile, ...]
    regions: Mapping[str, tuple[Region, ...]]
    specs: Mapping[str, Spec]  # by path of the leaf; none without a mesh

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """A line for each dim that is not split as its rule would have it first."""
        return tuple(dict.fromkeys(str(fallback) for found in self.specs.values() for fallback in found.fallbacks))

    def device_nbytes(self) -> int:
        """Bytes of parameters that one device of the mesh holds."""
        return sum(leaf.nbytes // math.prod(self.specs[leaf.name].parts) for leaf in self.leaves)

    def host_reads(self, mesh: Mesh, devices: int) -> float:
        """Bytes that a host of so many devices reads for each that it needs, on the worst host."""
        return amplification(
            reads_per_host(x.grid.shape, x.grid.chunk, itemsize(x.dtype), self.specs[x.name], mesh, devices)
            for x in self.leaves
        )


@dataclass(frozen=True, slots=True)
class Split:
    """For which mesh chunks are made (None: for none in particular), by which rules."""

    mesh: Mesh | None
    rules: Rules


@dataclass(frozen=True, slots=True)
class _Stored:
    """How a leaf is stored, and how the mesh splits it, where there is one."""

    dtype: str
    grid: Grid
    spec: Spec | None


def make_item(source: Source, counted: Account, table: Mapping[str, Row], vocab: int, split: Split) -> Item:
    """Lay out the leaves of `table` with `vocab` rows of vocabulary. PrepError for dtypes that do not fit together,
    usage for a dim that the mesh does not divide."""
    sizes = source.family.sizes(source.config) | {"vocab": vocab}
    bound = {path: bind(row, sizes) for path, row in table.items()}
    leaves: dict[str, _Stored] = {}
    wants: list[tuple[str, Want]] = []
    for tensor in source.tensors:
        for use in counted.uses.get(tensor.name, ()):
            row = bound[use.parameter]
            if use.path not in leaves:
                leaves[use.path] = _stored(source, row, tensor, split)
            leaf = leaves[use.path]
            if leaf.dtype != tensor.dtype:
                why = f"{source.names.shown(tensor.name)} is {tensor.dtype}, tensors before it are {leaf.dtype}"
                raise PrepError(f"the leaf {use.path} would have two dtypes", why, "`--no-scan` keeps layers apart")
            wants.append((tensor.name, Want(use.path, row, use.at, leaf.grid, itemsize(leaf.dtype), _offset(tensor))))
    layout = place(want for _, want in wants)
    regions: dict[str, tuple[Region, ...]] = {}
    for (name, _), region in zip(wants, layout.regions):
        regions[name] = (*regions.get(name, ()), region)
    specs = {f"{ROOT}.{path}": leaf.spec for path, leaf in leaves.items() if leaf.spec}
    return Item(tuple(_leaves(layout, leaves)), _files(layout), regions, specs)


def _stored(source: Source, row: AxisMap, tensor: SourceTensor, split: Split) -> _Stored:
    if ITEM_BITS[tensor.dtype] % 8:
        why = "its elements are smaller than a byte, which zarr does not store"
        raise PrepError(f"{source.names.shown(tensor.name)} is {tensor.dtype}", why)
    dims, shape, mesh = [tuple(f.atom for f in dim) for dim in row.leaf], row.leaf_shape, split.mesh
    chosen = spec(dims, shape, mesh, split.rules, source.name) if mesh else None
    chunk = chunk_shape(dims, shape, mesh, split.rules, itemsize(tensor.dtype))
    return _Stored(tensor.dtype, Grid(shape, chunk), chosen)


def _offset(tensor: SourceTensor) -> int:
    first = tensor.side[0]
    return first.offset if isinstance(first, Flat) else 0


def _leaves(layout: Layout, leaves: Mapping[str, _Stored]) -> Iterator[Leaf]:
    for path, leaf in leaves.items():
        yield Leaf((ROOT, *path.split(".")), leaf.dtype, leaf.grid, tuple(layout.placed[path]))


def _files(layout: Layout) -> tuple[OutFile, ...]:
    """Data files as OCDBT names them: 32 hexadecimal digits, here a function of the file's number."""
    names = (hashlib.md5(f"prep data file {i}".encode(), usedforsecurity=False) for i in range(len(layout.sizes)))
    return tuple(OutFile(f"d/{name.hexdigest()}", size) for name, size in zip(names, layout.sizes))
