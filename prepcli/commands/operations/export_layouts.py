"""Layout of the weight files of `prep export`, for each layout and format."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prepcli.commands.operations.options import ExportOptions
from prepcli.core.errors import Command, Option, text, usage_error
from prepcli.core.json_types import HFConfig
from prepcli.formats.manifest import EXPORTED_STEP
from prepcli.formats.safetensors_layout import split_into_shards
from prepcli.planning.arrays import Locations
from prepcli.planning.item_storage import LEVANTER, OCDBT, ORBAX_STORAGES, ItemStorage
from prepcli.planning.layout_scales import LayoutScale
from prepcli.planning.libraries import (
    DCP_FORMAT,
    HF_LAYOUT,
    LIBRARIES_BY_LAYOUT,
    ORBAX_FORMAT,
    TENSORSTORE_FORMAT,
    find_library,
)
from prepcli.planning.map_file import TensorMap
from prepcli.planning.plan import OutputFile, OutputLeaf, SmallFile
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import HF_FOLDER, Source, SourceTensor
from prepcli.targets.dcp_folder import lay_out_dcp_folder, lay_out_dcp_tree
from prepcli.targets.flax_folder import lay_out_flax_folder
from prepcli.targets.hf_folder import (
    config_files,
    copied_small_files,
    header_entries,
    index_files,
    lay_out_weight_files,
    model_files,
)
from prepcli.targets.layout_leaves import find_layout_scales
from prepcli.targets.mapped_folder import lay_out_mapped_folder
from prepcli.targets.orbax_item import OrbaxItemLayout
from prepcli.targets.trainer_item import lay_out_trainer_item

# Payloads start at a page boundary, like chunks, so that whole pages are copied.
PAYLOAD_PAGE_OFFSET = 0


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Layout of the weight files.

    Attributes:
        files: The data files.
        locations: Locations of each tensor, by name.
        index: The index of several files or the metadata of DCP, otherwise empty.
        leaves: Leaves of an Orbax item, otherwise empty.
        folder: Folder of the item in the output, otherwise empty.
        empty_nodes: Paths of nodes without leaves in an Orbax item.
    """

    files: tuple[OutputFile, ...]
    locations: Mapping[str, Locations]
    index: tuple[SmallFile, ...] = ()
    leaves: tuple[OutputLeaf, ...] = ()
    folder: str = ""
    empty_nodes: tuple[tuple[str | int, ...], ...] = ()


def item_files(
    item: OrbaxItemLayout, folder: str, empty_nodes: tuple[tuple[str | int, ...], ...] = ()
) -> WeightFiles:
    """Return the files of an Orbax item in a folder of the output."""
    return WeightFiles(
        item.files, item.regions, leaves=item.leaves, folder=folder, empty_nodes=empty_nodes
    )


def file_format(options: ExportOptions) -> str:
    """Return the format of the files: the requested one, or the default of a known layout."""
    return find_library(options["layout"], options["format"]).file_format


def written_storage(options: ExportOptions) -> ItemStorage:
    """Return the storage of the arrays of an item."""
    if file_format(options) == TENSORSTORE_FORMAT:
        return LEVANTER
    return ORBAX_STORAGES[options["storage"]]


def check_storage(options: ExportOptions) -> None:
    """Raise UsageError if a storage is requested for a layout without an Orbax item."""
    layout = options["layout"]
    is_default = ORBAX_STORAGES[options["storage"]] == OCDBT
    if is_default or find_library(layout).file_format == ORBAX_FORMAT:
        return
    layouts = [
        name for name in LIBRARIES_BY_LAYOUT if find_library(name).file_format == ORBAX_FORMAT
    ]
    option = Option("storage", options["storage"])
    raise usage_error(
        text("{} is not supported with {}", option, Option("layout", layout)),
        f"it is about Orbax items, the layouts {', '.join(layouts)}",
        text("remove {}, or use {} for prep's own tree", option, Command("save-init")),
    )


def lay_out_weights(
    options: ExportOptions,
    source: Source,
    tensors: Sequence[SourceTensor],
    row_counts: Mapping[str, int],
    *,
    vocab_rows: int,
    shard_nbytes: int,
    tensor_map: TensorMap | None = None,
) -> WeightFiles:
    """Lay out the weight files of the requested layout or map. `row_counts` has the output rows of each tensor."""
    if tensor_map is not None:
        mapped = lay_out_mapped_folder(
            source,
            tensors,
            tensor_map,
            row_counts=row_counts,
            vocab_rows=vocab_rows,
            shard_nbytes=shard_nbytes,
        )
        return WeightFiles(mapped.files, mapped.locations, mapped.index)
    if options["layout"] == HF_LAYOUT:
        entries = header_entries(source, tensors, rows=row_counts)
        if file_format(options) == DCP_FORMAT:
            dcp = lay_out_dcp_folder(entries, shard_nbytes)
            places = {t.name: (dcp.locations[source.file_name(t)],) for t in tensors}
            return WeightFiles(dcp.files, places, (dcp.metadata,))
        groups = split_into_shards(entries, shard_nbytes)
        files, locations, layouts = lay_out_weight_files(
            [(name, group, PAYLOAD_PAGE_OFFSET) for name, group in groups]
        )
        return WeightFiles(
            files,
            {t.name: (locations[source.file_name(t)],) for t in tensors},
            index_files(layouts),
        )
    place = find_library(options["layout"]).item
    if place is not None:
        item = _lay_out_trainer_item(options, source, tensors, vocab_rows)
        return item_files(item, place.folder(EXPORTED_STEP))
    if file_format(options) == DCP_FORMAT:
        dcp, places = lay_out_dcp_tree(
            source,
            tensors,
            layout=options["layout"],
            vocab_size=vocab_rows,
            shard_nbytes=shard_nbytes,
        )
        return WeightFiles(dcp.files, places, (dcp.metadata,))
    output = lay_out_flax_folder(
        source,
        tensors,
        layout=options["layout"],
        container=file_format(options),
        vocab_size=vocab_rows,
        shard_nbytes=shard_nbytes,
    )
    return WeightFiles(output.files, output.locations, output.index)


def _lay_out_trainer_item(
    options: ExportOptions, source: Source, tensors: Sequence[SourceTensor], vocab_rows: int
) -> OrbaxItemLayout:
    return lay_out_trainer_item(
        source,
        tensors,
        layout=options["layout"],
        vocab_size=vocab_rows,
        storage=written_storage(options),
    )


def layout_scales(
    options: ExportOptions, source: Source, tensors: Sequence[SourceTensor]
) -> dict[str, LayoutScale]:
    """Return the scale of each tensor with one in the layout, such as MaxText's queries.

    Args:
        options: Options of the export.
        source: The opened source.
        tensors: The tensors with the dtypes of the output.

    Returns:
        Name of the tensor -> scale.
    """
    layout = options["layout"]
    if layout == HF_LAYOUT:
        return {}
    scales = find_layout_scales(source, layout, tensors)
    read_dtypes = {tensor.dtype for tensor in source.tensors if tensor.name in scales}
    written_dtypes = {tensor.dtype for tensor in tensors if tensor.name in scales}
    significant = ""
    # The way back rounds all tensors to one dtype: a leaf may stack the queries of all layers.
    if len(read_dtypes) == len(written_dtypes) == 1:
        (read,) = read_dtypes
        (written,) = written_dtypes
        if itemsize(read) < itemsize(written):
            significant = read
    return {name: replace(scale, significant=significant) for name, scale in scales.items()}


def small_files(
    source: Source, config: HFConfig, weight_files: WeightFiles
) -> tuple[SmallFile, ...]:
    """Return the files other than the weights. In an Orbax item they are in a folder of their own."""
    if not weight_files.leaves:
        return model_files(source, config, weight_files.index)
    prefix = f"{HF_FOLDER}/"
    model_item = weight_files.leaves[0].item
    if model_item is not None:
        prefix = f"{model_item}/{prefix}"
    return *config_files(source, config, prefix), *copied_small_files(source, prefix)
