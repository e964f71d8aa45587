"""Layouts of folders with safetensors files: of transformers, of PEFT, and of a user's map.

transformers loads the files without options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from prepcli.core.errors import Option, PrepError, text
from prepcli.formats.safetensors import (
    ADAPTER_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    LayoutEntry,
    SafetensorsLayout,
    encode_index,
    lay_out_files,
    split_into_shards,
)
from prepcli.planning.arrays import Array, Location, Locations
from prepcli.planning.manifest_fields import Manifest, VocabularyRecord
from prepcli.planning.plan import OutputFile, SmallFile
from prepcli.planning.slabs import PAGE
from prepcli.planning.tensors import array_bits
from prepcli.sources.mapped import bind_model_map, misfit_error
from prepcli.sources.maps import MapCoverage, MapRow, TensorMap, compose_location
from prepcli.sources.source import Source, SourceTensor
from prepcli.sources.tensor_match import TensorInfo
from prepcli.targets.planner import Draft, Placed

# Payloads start at a page boundary, like chunks, so that whole pages are copied.
PAYLOAD_PAGE_OFFSET = 0
# File name, entries in order, page offset of the first tensor
FileGroup = tuple[str, Sequence[LayoutEntry], int | None]


def place_safetensors(draft: Draft, shard_nbytes: int) -> Placed:
    """Place the tensors of a draft in safetensors files of at most `shard_nbytes`."""
    entries = header_entries(draft.source, draft.tensors, rows=draft.row_counts)
    groups = split_into_shards(entries, shard_nbytes)
    return _place_groups(draft, [(name, group, PAYLOAD_PAGE_OFFSET) for name, group in groups])


def place_adapter(draft: Draft) -> Placed:
    """Place the tensors of an adapter in the file of PEFT."""
    entries = header_entries(draft.source, draft.tensors, rows=draft.row_counts)
    files, places, _ = lay_out_weight_files([(ADAPTER_FILE, entries, None)])
    return Placed(files=files, locations=_locations_of(draft, places))


def place_in_source_files(draft: Draft) -> Placed:
    """Place each tensor of a Hugging Face folder in the file of the same name.

    The index comes before the side files: the digest of the plan depends on their order.
    """
    source = draft.source
    rows = draft.row_counts
    by_file: dict[str, list[SourceTensor]] = {}
    for file_name, tensor in zip(source.tensor_file_names, draft.tensors, strict=True):
        by_file.setdefault(file_name, []).append(tensor)
    groups: list[FileGroup] = []
    for file_name, tensors in by_file.items():
        first = tensors[0].placement[0]
        # With equal offsets within a page of 4096 bytes, direct I/O writes whole pages as they were read.
        page_offset = first.array.offset % PAGE if first.is_contiguous else None
        groups.append((file_name, header_entries(source, tensors, rows=rows), page_offset))
    vocab: VocabularyRecord = {
        "true": draft.vocabulary.true_size,
        "padded": draft.vocabulary.stored_size,
        "init": draft.resize.fill.kind,
    }
    placed = _place_groups(draft, groups)
    return replace(placed, has_index_first=True, settings=Manifest(vocab=vocab))


def _place_groups(draft: Draft, groups: Sequence[FileGroup]) -> Placed:
    files, places, layouts = lay_out_weight_files(groups)
    return Placed(files=files, locations=_locations_of(draft, places), index=index_files(layouts))


def _locations_of(draft: Draft, places: Mapping[str, Array]) -> dict[str, Locations]:
    """Return the locations by name of the tensor, given the places by its name in files."""
    return {tensor.name: (places[draft.source.file_name(tensor)],) for tensor in draft.tensors}


def resized_shape_and_nbytes(tensor: SourceTensor, rows: int) -> tuple[tuple[int, ...], int]:
    """Return shape and bytes of a tensor with `rows` rows. A 0-d tensor is unchanged."""
    if not tensor.shape:
        return (), tensor.nbytes
    # Computed from the bytes and not from the dtype, because elements may be smaller than a byte.
    row_nbytes = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
    return (rows, *tensor.shape[1:]), row_nbytes * rows


def header_entries(
    source: Source, tensors: Iterable[SourceTensor], *, rows: Mapping[str, int]
) -> list[LayoutEntry]:
    """Return the header entries of the tensors, each with its rows in the output."""
    entries: list[LayoutEntry] = []
    for tensor in tensors:
        name = source.file_name(tensor)
        shape, nbytes = resized_shape_and_nbytes(tensor, rows[tensor.name])
        entries.append((name, tensor.dtype, shape, nbytes))
    return entries


def lay_out_weight_files(
    groups: Sequence[FileGroup],
) -> tuple[tuple[OutputFile, ...], dict[str, Array], tuple[SafetensorsLayout, ...]]:
    """Lay out tensors in safetensors files."""
    layouts = lay_out_files(groups)
    files = tuple(OutputFile(layout.name, layout.size, layout.header) for layout in layouts)
    places: dict[str, Array] = {}
    for layout in layouts:
        places |= {tensor.name: tensor for tensor in layout.tensors}
    return files, places, layouts


def index_files(layouts: Sequence[SafetensorsLayout]) -> tuple[SmallFile, ...]:
    """Return the safetensors index. A single file named SINGLE_FILE needs no index."""
    # transformers opens SINGLE_FILE by its name, and a file of another name only if an index lists it.
    if len(layouts) > 1 or any(layout.name != SINGLE_FILE for layout in layouts):
        return (SmallFile(INDEX_FILE, encode_index(layouts)),)
    return ()


# A user's map


def place_mapped(draft: Draft, tensor_map: TensorMap, shard_nbytes: int) -> Placed:
    """Place the tensors of a model under the names of a map: the way back to the names of another trainer."""
    source = draft.source
    row_counts = draft.row_counts
    rows = _rows_of_model(source, tensor_map, draft.vocabulary.stored_size)
    by_name = {source.file_name(tensor): tensor for tensor in draft.tensors}
    infos: dict[str, TensorInfo] = {}
    for name, tensor in by_name.items():
        shape = (row_counts[tensor.name], *tensor.shape[1:]) if tensor.shape else ()
        infos[name] = TensorInfo(tensor.dtype, shape, array_bits(tensor.dtype, shape) // 8)
    coverage = MapCoverage([row.reversed for row in rows], infos)
    coverage.check_elements()
    coverage.check_unused(())
    if coverage.problems:
        raise misfit_error(tensor_map, source, coverage.problems)
    entries = _written_tensors(rows, infos, tensor_map, source)
    files, places, layouts = lay_out_weight_files(
        [(name, group, 0) for name, group in split_into_shards(entries, shard_nbytes)]
    )
    locations = {by_name[name].name: parts for name, parts in _locations(rows, places).items()}
    return Placed(files=files, locations=locations, index=index_files(layouts))


def _rows_of_model(source: Source, tensor_map: TensorMap, vocab_rows: int) -> list[MapRow]:
    """Return the rows with the sizes of a model."""
    family = None if source.family.is_verbatim else source.family
    expected = family.name if family else ""
    if tensor_map.family != expected:
        what = f"the map {tensor_map.name} does not fit {source.display_name}"
        why = f"it has the line `family {tensor_map.family}`"
        if not tensor_map.family:
            why = "it has no `family` line"
        hint = text("{} writes the names of Hugging Face", Option("layout", "hf"))
        raise PrepError(what, f"{why}, and the model is {source.family.name}", hint)
    rows, problems = bind_model_map(tensor_map, family, source.config, vocab_rows)
    if problems:
        raise misfit_error(tensor_map, source, problems)
    return rows


def _written_tensors(
    rows: Sequence[MapRow], infos: Mapping[str, TensorInfo], tensor_map: TensorMap, source: Source
) -> list[LayoutEntry]:
    """Return the tensors of the output in the order of the rows."""
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for row in rows:
        for target, name, _ in row.pairs():
            dtype = infos[target].dtype
            if dtypes.setdefault(name, dtype) != dtype:
                problem = f"line {row.line}: {name} would be {dtypes[name]} and {dtype}"
                raise misfit_error(tensor_map, source, [problem])
            shapes[name] = row.source.source_shape
    return [
        (name, dtypes[name], shape, array_bits(dtypes[name], shape) // 8)
        for name, shape in shapes.items()
    ]


def _locations(rows: Sequence[MapRow], places: Mapping[str, Array]) -> dict[str, Locations]:
    """Return where each tensor of the model is written, by its full name."""
    locations: dict[str, Locations] = {}
    for row in rows:
        for target, name, indices in row.pairs():
            location: Location | None = places[name]
            if not row.is_copy:
                location = compose_location(row, indices, places[name])
            assert location is not None, "a tensor of safetensors is stored in one part"
            locations[target] = (*locations.get(target, ()), location)
    return locations
