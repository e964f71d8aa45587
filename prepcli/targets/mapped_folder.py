"""Layout of a folder with the tensors of a user's map: the way back from a model to the names of another trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prepcli.core.errors import Option, PrepError, text
from prepcli.formats.safetensors_layout import LayoutEntry, split_into_shards
from prepcli.planning.arrays import Array, Location, Locations
from prepcli.planning.composed_locations import compose_location
from prepcli.planning.map_file import TensorMap
from prepcli.planning.map_rows import MapCoverage, MapRow
from prepcli.planning.plan import OutputFile, SmallFile
from prepcli.planning.tensor_match import TensorInfo
from prepcli.planning.tensors import array_bits
from prepcli.sources.mapped import bind_model_map, misfit_error
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.hf_folder import index_files, lay_out_weight_files


@dataclass(frozen=True, slots=True)
class MappedFolder:
    """Layout of the files.

    Attributes:
        files: The data files.
        locations: Locations of each tensor of the model, by name.
        index: The index of several files, otherwise empty.
    """

    files: tuple[OutputFile, ...]
    locations: Mapping[str, Locations]
    index: tuple[SmallFile, ...]


def lay_out_mapped_folder(
    source: Source,
    tensors: Sequence[SourceTensor],
    tensor_map: TensorMap,
    *,
    row_counts: Mapping[str, int],
    vocab_rows: int,
    shard_nbytes: int,
) -> MappedFolder:
    """Lay out the tensors of a model under the names of a map.

    Args:
        source: The opened source.
        tensors: The tensors to write, with the dtypes of the output.
        tensor_map: The map, from the output to the model.
        row_counts: Rows of each tensor in the output.
        vocab_rows: Rows of the vocabulary in the output.
        shard_nbytes: Largest size of a file.

    Raises:
        PrepError: The map does not fit the model.
    """
    rows = _rows_of_model(source, tensor_map, vocab_rows)
    by_name = {source.file_name(tensor): tensor for tensor in tensors}
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
    locations = {
        by_name[name].name: parts for name, parts in _locations(rows, infos, places).items()
    }
    return MappedFolder(files, locations, index_files(layouts))


def _rows_of_model(source: Source, tensor_map: TensorMap, vocab_rows: int) -> list[MapRow]:
    """Return the rows with the sizes of a model.

    Raises:
        PrepError: The map is for another family, or a row is invalid.
    """
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
    """Return the tensors of the output in the order of the rows.

    Raises:
        PrepError: A tensor would have two dtypes.
    """
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


def _locations(
    rows: Sequence[MapRow], infos: Mapping[str, TensorInfo], places: Mapping[str, Array]
) -> dict[str, Locations]:
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
