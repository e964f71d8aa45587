"""Layout of a torch distributed checkpoint: the archive of each tensor, and `.metadata`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prepcli.algebra.axis_map import LAYERS
from prepcli.algebra.strided_copies import ChunkedLocation
from prepcli.core.errors import Option, PrepError, text
from prepcli.formats.safetensors_layout import LayoutEntry, split_into_shards
from prepcli.formats.torch_dcp import MAX_METADATA_OPCODES, METADATA_FILE
from prepcli.formats.torch_dcp_metadata import DATA_FILE, DcpEntry, encode_metadata
from prepcli.formats.torch_pickle import MAX_NBYTES, SUPPORTED_DTYPES, PickledValue, StoredTensor
from prepcli.formats.torch_zip import encode_object
from prepcli.planning.plan import Contiguous, Locations, OutputFile, SmallFile
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.layout_leaves import find_layout_leaves, whole_leaf_location

# A tensor takes up to 77 opcodes of `.metadata`: a moment has four keys.
MAX_TENSORS = MAX_METADATA_OPCODES // 80
ZERO_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """Layout of a checkpoint: its data files, the location of each tensor by its full name, and its metadata."""

    files: tuple[OutputFile, ...]
    locations: Mapping[str, Contiguous]
    metadata: SmallFile


@dataclass(frozen=True, slots=True)
class DcpConstant:
    """A small value in the state dict, with its keys and its complete archive."""

    path: tuple[str | int, ...]
    value: PickledValue

    def entry(self, file: str, offset: int, length: int) -> DcpEntry:
        """Return the entry in the metadata."""
        name = ".".join(map(str, self.path))
        dtype = ""
        shape: tuple[int, ...] = ()
        if isinstance(self.value, StoredTensor):
            dtype = self.value.dtype
            shape = self.value.shape
        return DcpEntry(name, dtype, shape, file, offset, length, self.path)


def lay_out_dcp_folder(
    entries: Sequence[LayoutEntry],
    shard_nbytes: int,
    *,
    paths: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    constants: Sequence[DcpConstant] = (),
) -> DcpLayout:
    """Lay out tensors in the files of a torch distributed checkpoint.

    Args:
        entries: Name, dtype, shape and size of each tensor, in the order of the files.
        shard_nbytes: Largest payload of a file.
        paths: Keys of tensors in the nested state dict, by name. The name alone for other tensors.
        constants: Small values. They have a file of their own.

    Raises:
        PrepError: DCP does not support a dtype, or there are too many tensors for one `.metadata`.
    """
    files: list[OutputFile] = []
    locations: dict[str, Contiguous] = {}
    dcp_entries: list[DcpEntry] = []
    for number, (_, group) in enumerate(split_into_shards(entries, shard_nbytes)):
        file_name = DATA_FILE.format(number)
        ranges: list[tuple[int, bytes]] = []
        offset = 0
        for name, dtype, shape, _ in group:
            _check_dtype(name, dtype)
            archive = encode_object(StoredTensor("0", dtype, shape))
            ranges += [(offset + start, data) for start, data in archive.constant_ranges]
            locations[name] = Contiguous(number, offset + archive.offsets["0"])
            path = paths.get(name, ())
            dcp_entries.append(
                DcpEntry(name, dtype, shape, file_name, offset, archive.nbytes, path)
            )
            offset += archive.nbytes
        files.append(OutputFile(file_name, offset, constant_ranges=tuple(ranges)))
    if constants:
        file, constant_entries = _constant_file(DATA_FILE.format(len(files)), constants)
        files.append(file)
        dcp_entries += constant_entries
    metadata = SmallFile(METADATA_FILE, encode_metadata(dcp_entries))
    if len(dcp_entries) > MAX_TENSORS or len(metadata.content) > MAX_NBYTES:
        why = f"prep reads the metadata of up to {MAX_TENSORS:,} tensors in {MAX_NBYTES >> 20} MiB"
        hint = text("use {}", Option("format", "safetensors"))
        raise PrepError(f"{len(dcp_entries):,} tensors are too many for DCP", why, hint)
    return DcpLayout(tuple(files), locations, metadata)


def _constant_file(
    name: str, constants: Sequence[DcpConstant]
) -> tuple[OutputFile, list[DcpEntry]]:
    """Return a file of complete archives, and their entries."""
    content = bytearray()
    entries: list[DcpEntry] = []
    for constant in constants:
        ((_, archive),) = encode_object(constant.value).constant_ranges
        entries.append(constant.entry(name, len(content), len(archive)))
        content += archive
    return OutputFile(name, len(content), constant_ranges=((0, bytes(content)),)), entries


def lay_out_dcp_tree(
    source: Source,
    tensors: Sequence[SourceTensor],
    *,
    layout: str,
    vocab_size: int,
    shard_nbytes: int,
) -> tuple[DcpLayout, dict[str, Locations]]:
    """Lay out tensors under the names and shapes of another library.

    Args:
        source: The opened source.
        tensors: The tensors to write, with the dtypes of the output.
        layout: Name of the layout.
        vocab_size: Vocabulary rows in the output.
        shard_nbytes: Largest payload of a file.

    Returns:
        The layout of the files, and the locations of each tensor by its name in the source.

    Raises:
        PrepError: A tensor has no leaf in the layout, or a leaf has no tensor.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    leaves = find_layout_leaves(source, layout, by_name, vocab_size=vocab_size)
    entries: dict[str, LayoutEntry] = {}
    for name, uses in leaves.items():
        dtype = by_name[name].dtype
        for path, axis_map, _ in uses:
            nbytes = math.prod(axis_map.leaf_shape) * itemsize(dtype)
            entries[path] = (path, dtype, axis_map.leaf_shape, nbytes)
    constants = _zero_leaves(source, layout)
    dcp = lay_out_dcp_folder([*entries.values()], shard_nbytes, constants=constants)
    locations: dict[str, Locations] = {}
    for name, uses in leaves.items():
        regions: list[ChunkedLocation] = []
        for use in uses:
            place = dcp.locations[use[0]]
            dtype = by_name[name].dtype
            region = whole_leaf_location(use, file=place.file, offset=place.offset, dtype=dtype)
            regions.append(region)
        locations[name] = tuple(regions)
    return dcp, locations


def _zero_leaves(source: Source, layout: str) -> list[DcpConstant]:
    """Return the leaves of a layout without a tensor."""
    sizes = source.family.sizes(source.config)
    constants: list[DcpConstant] = []
    for path, dims in source.family.layouts[layout].zero_leaves.items():
        shape = tuple(sizes[dim] for dim in dims)
        zeros = bytes(math.prod(shape) * itemsize(ZERO_DTYPE))
        for layer in range(sizes[LAYERS]):
            value = StoredTensor("0", ZERO_DTYPE, shape, zeros)
            constants.append(DcpConstant((path.format(**{LAYERS: layer}),), value))
    return constants


def _check_dtype(name: str, dtype: str) -> None:
    """Raise PrepError if a torch distributed checkpoint cannot store the dtype."""
    if dtype not in SUPPORTED_DTYPES:
        hint = text("{} casts it", Option("dtype", "bfloat16"))
        raise PrepError(f"{name} is {dtype}", "prep writes no such tensor in DCP", hint)
