"""Contents of a checkpoint as stored: names, shapes, dtypes and locations, without weights or a known family.

`TreeNode` is a view of the names as a tree, with sizes summed by branch and equal layers merged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TypedDict

from prepcli.algebra.grids import FilePosition, StoredRange
from prepcli.core.errors import Command, PrepError, text
from prepcli.core.formatting import format_bytes, number_runs
from prepcli.core.json_values import HFConfig
from prepcli.engine.blobs import DerivedArrays
from prepcli.formats.codecs import CODECS
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.model_files import ModelFiles
from prepcli.formats.orbax import read_item
from prepcli.formats.orbax_chunks import dotted_name
from prepcli.formats.registry import FORMATS, Kind
from prepcli.models.parameters import VERBATIM, Family
from prepcli.models.registry import FAMILIES
from prepcli.models.text_part import TextPart
from prepcli.planning.arrays import location_copies, whole_array
from prepcli.planning.manifest_fields import Manifest
from prepcli.quantized.decoder import Decoder
from prepcli.quantized.formats import QuantizedWeights, without_quantization
from prepcli.quantized.gguf_blocks import FLOAT_TYPES, GgufDecoder
from prepcli.sources.dequantized import (
    DECODED_DTYPE,
    cast_decoded,
    cast_decoders,
    decoder_of_tensor,
    find_stored_weights,
)
from prepcli.sources.detect import (
    model_quantization,
    not_quantized_error,
    quantization_file,
    unused_quantization_note,
)
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.maps import TensorMap
from prepcli.sources.model_family import find_text_part, multimodal_wrapper_prefix
from prepcli.sources.openers.orbax_item import find_config, stored_leaves
from prepcli.sources.opening import check_recorded_files, open_source, read_source
from prepcli.sources.references import CONFIG, NO_HINTS, SourceHints
from prepcli.sources.source import (
    Source,
    SourceTensor,
    check_headers,
    file_stamps,
    read_config,
    stored_tensor,
)
from prepcli.stores.buffers import Blob
from prepcli.stores.paths import AnyPath, path_in_folder

MAX_PATH_PARTS = 32  # a hostile name may have millions of dots


def name_path(tensor: SourceTensor) -> tuple[str, ...]:
    """Return the parts of the name of a stored tensor or leaf, at most MAX_PATH_PARTS."""
    path = tuple(map(str, tensor.placement[0].array.path[: MAX_PATH_PARTS - 1]))
    if not path:
        return tuple(tensor.name.split(".", MAX_PATH_PARTS - 1))
    rest = tensor.placement[0].array.path[MAX_PATH_PARTS - 1 :]
    return (*path, ".".join(map(str, rest))) if rest else path


def first_element(tensor: SourceTensor) -> FilePosition:
    """Return the file number and the offset of the first element of a tensor."""
    first = tensor.placement[0]
    if first.is_contiguous or not tensor.nbytes:
        return first.position
    copy = next(location_copies(tensor.placement, ((0, 1),) * len(tensor.shape)))
    return copy.file, copy.file_offset


def num_chunks(tensor: SourceTensor) -> int:
    """Return the number of stored chunks of a tensor."""
    return sum(math.prod(location.array.grid.chunk_counts) for location in tensor.placement)


class AdapterSummary(TypedDict):
    """Settings of an adapter, and the name of its base."""

    rank: int
    alpha: float
    use_rslora: bool
    scaling: float
    base: str | None


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The stored tensors of a checkpoint and its metadata.

    Attributes:
        display_name: Name of the checkpoint in messages.
        kind: Format.
        folder: Folder or file.
        entries: Tensors as they are stored, in the order of the files.
        files: Data files.
        config: The model's config.json, empty if there is none. Of a multimodal model, the config of its text part.
        manifest: The manifest that prep wrote, empty if there is none.
        non_arrays: Descriptions of entries other than arrays.
        blobs: Byte sources of the tensors, if these are not `files`.
        encoded_places: File in `files` and offset of the first chunk of each encoded tensor, by name. None for a chunk
            inline in an index, or not stored.
        codecs: Names of the compression codecs.
        adapter: Settings of an adapter, None for a model.
        decoders: Decoders of quantised weights.
        text_part: The text part of a multimodal model in a Hugging Face folder.
        wrapper_type: `model_type` of a multimodal model, else empty.
        wrapper_prefix: Prefix that a wrapper gave to all names of a multimodal model, e.g. `_orig_mod.`. The names in
            `entries` have it, the names in `text_part` do not.
    """

    display_name: str
    kind: Kind
    folder: AnyPath
    entries: tuple[SourceTensor, ...]
    files: tuple[AnyPath, ...]
    config: HFConfig
    manifest: Manifest
    non_arrays: tuple[str, ...] = ()
    blobs: tuple[AnyPath | Blob, ...] = ()
    encoded_places: Mapping[str, FilePosition | None] = field(default_factory=dict)
    codecs: tuple[str, ...] = ()
    adapter: AdapterSummary | None = None
    decoders: tuple[Decoder, ...] = ()
    text_part: TextPart | None = None
    wrapper_type: str = ""
    wrapper_prefix: str = ""

    @property
    def byte_sources(self) -> tuple[AnyPath | Blob, ...]:
        """Files and blobs, in the order of the file numbers of the chunks."""
        return self.blobs or self.files

    @property
    def is_verbatim(self) -> bool:
        """Whether prep wrote the checkpoint with the names of its source."""
        return self.manifest.family == VERBATIM

    @property
    def family(self) -> Family | None:
        """The model family. None if it is unknown, or if the names are kept as in the source."""
        if self.is_verbatim:
            return None
        if self.text_part is not None:
            return self.text_part.family
        return FAMILIES.get(str(self.config.get("model_type")))

    @property
    def num_chunks(self) -> int:
        """Number of stored chunks of all tensors."""
        return sum(map(num_chunks, self.entries))

    def first_place(self, tensor: SourceTensor) -> tuple[str, int] | None:
        """Return file name and offset of a tensor's first chunk as stored, or None if it is inline or not stored."""
        if tensor.name in self.encoded_places:
            position = self.encoded_places[tensor.name]
            if position is None:
                return None
            file: AnyPath | Blob = self.files[position[0]]
        else:
            position = first_element(tensor)
            file = self.byte_sources[position[0]]
        if isinstance(file, AnyPath) and self.folder.is_dir():
            return str(path_in_folder(file, self.folder) or file.name), position[1]
        return file.name, position[1]


def read_contents(
    located: LocatedCheckpoint, config_path: Path | None = None, *, dequantize: bool = False
) -> CheckpointContents:
    """Read the headers or the index of a located checkpoint.

    Args:
        located: Result of `locate`.
        config_path: The user's config.json, or a folder with one, if any.
        dequantize: Return quantised weights decoded, without their scales. Those of GGUF always are.

    Raises:
        UsageError: `dequantize` is set, and no weight is quantised.
        PrepError: The checkpoint is broken or not supported.
    """
    check_recorded_files(located)
    row = FORMATS[located.kind]
    if located.kind == "gguf":
        source = cast_decoded(read_source(located, SourceHints(config_path)), DECODED_DTYPE)
        names = [source.names.display_name(tensor.name) for tensor in source.tensors]
        decoders: dict[str, GgufDecoder] = {}
        places: dict[str, FilePosition | None] = {}
        for tensor, name in zip(source.tensors, names):
            decoder = decoder_of_tensor(source, tensor)
            assert isinstance(decoder, GgufDecoder)
            places[name] = decoder.stored[0].position
            if decoder.type_name not in FLOAT_TYPES:
                decoders[decoder.name] = decoder
        return replace(
            _source_contents(located, source, names),
            config={**source.config, "quantization_config": dict(source.quantization)},
            encoded_places=places,
            decoders=tuple(decoders.values()),
        )
    if located.item is not None:
        contents = _orbax_contents(located, located.item)
    elif row.read_files is not None:
        contents = _stored_contents(located, row.read_files(located.files.path))
    else:
        # The tensors are those of Hugging Face, each assembled from the shards.
        source = read_source(located, NO_HINTS)
        names = [source.names.display_name(tensor.name) for tensor in source.tensors]
        contents = _source_contents(located, source, names)
    if config_path is not None:
        hints = SourceHints(config_path)
        config = read_config(hints.resolve_config_path(contents.folder, located.display_name))
        contents = replace(contents, config=config)
    if dequantize:
        return _with_text_part(_decoded(contents))
    return _with_text_part(_with_decoders(contents, located))


def _with_text_part(contents: CheckpointContents) -> CheckpointContents:
    """Return the contents with the text part of a multimodal model, if it has a supported one."""
    if contents.manifest.is_tree:
        wrapper_type = (contents.manifest.towers or {}).get("model_type", "")
        # A model with multi-token prediction is no other type than its parameters.
        if wrapper_type == contents.manifest.config.get("model_type"):
            return contents
        return replace(contents, wrapper_type=str(wrapper_type))
    if not FORMATS[contents.kind].has_hf_names or contents.family or contents.is_verbatim:
        return contents
    full_names = [entry.name for entry in contents.entries]
    prefix = multimodal_wrapper_prefix(contents.config, full_names)
    part = find_text_part(contents.config, (name.removeprefix(prefix) for name in full_names))
    if part is None:
        return contents
    wrapper_type = str(contents.config.get("model_type"))
    return replace(
        contents,
        config=part.config,
        text_part=part,
        wrapper_type=wrapper_type,
        wrapper_prefix=prefix,
    )


def _with_decoders(contents: CheckpointContents, located: LocatedCheckpoint) -> CheckpointContents:
    """Return the contents with the decoders of quantised weights. A fault becomes one of `non_arrays`."""
    if not FORMATS[contents.kind].is_hf_folder:
        return contents
    if not model_quantization(contents.config, contents.folder):
        # The settings in the folder count, also if the user has named another config.
        remark = unused_quantization_note(located.config_in_folder, contents.folder)
        return replace(contents, non_arrays=(*contents.non_arrays, *filter(None, [remark])))
    try:
        weights, _ = _find_weights(contents)
    except PrepError as error:
        remark = f"{error.what}: {error.why}"
        return replace(contents, non_arrays=(*contents.non_arrays, remark))
    return replace(contents, decoders=weights.decoders)


def _find_weights(
    contents: CheckpointContents,
) -> tuple[QuantizedWeights, tuple[AnyPath | Blob, ...]]:
    """Return the quantised weights, and the files and blobs that their tensors are read from."""
    return find_stored_weights(
        model_quantization(contents.config, contents.folder),
        {entry.name: entry for entry in contents.entries},
        contents.byte_sources,
        quantization_file(contents.config, contents.folder),
        display_name=contents.display_name,
    )


def _decoded(contents: CheckpointContents) -> CheckpointContents:
    """Return the contents with decoded weights in place of their codes, and without scales."""
    if not model_quantization(contents.config, contents.folder):
        raise not_quantized_error(contents.display_name, contents.folder)
    if not FORMATS[contents.kind].is_hf_folder:
        hint = text("save the model as safetensors")
        if contents.kind == "orbax":
            hint = text("{} writes them", Command("export", contents.display_name))
        why = "inspect decodes quantised weights in folders of safetensors and PyTorch files only"
        raise PrepError(f"{contents.display_name} cannot be decoded", why, hint)
    weights, files = _find_weights(contents)
    operations = cast_decoders(weights.decoders, DECODED_DTYPE)
    blob = DerivedArrays(contents.display_name, operations, files)
    number = len(files)
    stored = {entry.name: entry for entry in contents.entries}
    decoded: dict[str, SourceTensor] = {}
    places: dict[str, FilePosition | None] = {}
    for decoder, start in zip(weights.decoders, blob.offsets):
        values = whole_array(decoder.name, DECODED_DTYPE, decoder.shape, (number, start))
        codes = decoder.stored[0]
        decoded[codes.name] = stored_tensor(values)
        places[decoder.name] = first_element(stored[codes.name])
    stored_names = weights.stored_names | weights.activation_scales
    entries: list[SourceTensor] = []
    for entry in contents.entries:
        if entry.name in decoded:
            entries.append(decoded[entry.name])
        elif entry.name not in stored_names:
            entries.append(entry)
    return replace(
        contents,
        entries=tuple(entries),
        config=without_quantization(contents.config),
        blobs=(*files, blob),
        encoded_places=places,
    )


def _stored_contents(located: LocatedCheckpoint, stored: ModelFiles) -> CheckpointContents:
    """Return the contents of files in which each tensor is one array."""
    path = located.files.path
    folder = path if path.is_dir() else path.parent
    manifest = NO_MANIFEST
    # Not each file near a manifest is a part of an output.
    if FORMATS[located.kind].has_recorded_headers and path.is_dir():
        manifest = located.manifest or NO_MANIFEST
        check_headers(folder, manifest, file_stamps(stored.headers))
    contents = CheckpointContents(
        display_name=located.display_name,
        kind=located.kind,
        folder=path,
        entries=tuple(map(stored_tensor, stored.tensors)),
        files=stored.files,
        config={},
        manifest=manifest,
        non_arrays=stored.others,
    )
    if located.kind == "adapter":
        from prepcli.sources.openers.peft_settings import read_settings

        try:
            settings = read_settings(contents.folder)
        except PrepError as error:
            # An adapter with unsupported settings can be shown, but not merged.
            return replace(contents, non_arrays=(f"{error.what}: {error.why}",))
        lora = settings.lora_config()
        summary: AdapterSummary = {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "use_rslora": lora.use_rslora,
            "scaling": lora.scaling,
            "base": settings.base_model_name_or_path,
        }
        return replace(contents, adapter=summary)
    if (folder / CONFIG).exists():
        return replace(contents, config=located.read_config(folder / CONFIG))
    return contents


def _orbax_contents(located: LocatedCheckpoint, folder: AnyPath) -> CheckpointContents:
    """Return the contents of an Orbax checkpoint with an item in a folder."""
    path = located.files.path
    item = read_item(folder)
    manifest = located.manifest or NO_MANIFEST
    config_path = find_config(item.folder, path)
    near_config = read_config(config_path) if config_path else {}
    blobs, leaves = stored_leaves(item)
    places: dict[str, FilePosition | None] = {}
    for array in item.arrays:
        # Other leaves are read as they are stored.
        if leaves[array.name] is not array:
            _, first = next(array.stored_chunks(), (None, b""))
            is_in_file = isinstance(first, StoredRange)
            places[array.name] = (first.file, first.offset) if is_in_file else None
    names = dict.fromkeys(chain.from_iterable(array.codecs for array in item.arrays))
    # A checksum compresses nothing.
    codecs = [name for name in names if not CODECS[name].is_checksum]
    others: list[str] = []
    for entry in item.non_arrays:
        value = f"the text {entry.text!r}" if entry.is_string else f"an empty {entry.value_type}"
        others.append(f"{dotted_name(entry.path)} is {value}")
    others += [f"{name} is in the index, but not in the tree" for name in item.unlisted_names]
    return CheckpointContents(
        display_name=located.display_name,
        kind="orbax",
        folder=item.folder,
        entries=tuple(map(stored_tensor, leaves.values())),
        files=item.files,
        config=manifest.config or near_config,
        manifest=manifest,
        non_arrays=tuple(others),
        blobs=blobs,
        encoded_places=places,
        codecs=tuple(codecs),
    )


def read_mapped_contents(
    located: LocatedCheckpoint,
    config_path: Path | None,
    tensor_map: TensorMap | None,
    layout: str | None = None,
) -> CheckpointContents:
    """Return the contents of a checkpoint with the targets of a map or a layout as its tensors."""
    source = open_source(located, config_path, verbatim=None, tensor_map=tensor_map, layout=layout)
    # The names and shapes are those of a Hugging Face folder, in whatever format they are stored.
    located = replace(located, kind="safetensors")
    contents = _source_contents(located, source, map(source.file_name, source.tensors))
    return replace(contents, folder=source.root)


def _source_contents(
    located: LocatedCheckpoint, source: Source, names: Iterable[str]
) -> CheckpointContents:
    """Return the contents of a source with these names of its parameters."""
    entries: list[SourceTensor] = []
    for tensor, name in zip(source.tensors, names, strict=True):
        entries.append(replace(tensor, name=name, digests=()))
    return CheckpointContents(
        display_name=located.display_name,
        kind=located.kind,
        folder=located.files.path,
        entries=tuple(entries),
        files=source.files,
        config=source.config,
        manifest=NO_MANIFEST,
        blobs=source.blobs,
    )


# Without leading zeros: `int` and `str` must give the label back. 9 digits bound the conversion.
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
MAX_RUNS = 4  # runs of numbers that are listed
# A tensor whose name is also a prefix of other names.
SELF_LABEL = "(itself)"


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A branch, or a leaf for `tensors` tensors of one shape and dtype.

    Attributes:
        labels: Parts of the name. Branches with a single child are joined, e.g. `layers`,
            `{0..31}`.
        tensors: Number of tensors in the node.
        nbytes: Bytes of all tensors in the node.
        dtype: Dtype of a leaf, empty for a branch.
        shape: Shape of each tensor of a leaf.
        children: Nodes of a branch.
    """

    labels: tuple[str, ...]
    tensors: int
    nbytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    children: tuple[TreeNode, ...] = ()

    @property
    def name(self) -> str:
        """The labels, joined by dots."""
        return ".".join(self.labels)


@dataclass(slots=True)
class _TreeBuilder:
    entry: SourceTensor | None = None
    children: dict[str, _TreeBuilder] = field(default_factory=dict)


def build_tree(entries: Iterable[SourceTensor]) -> tuple[TreeNode, ...]:
    """Build the tree of the entries, in their order."""
    root = _TreeBuilder()
    for entry in entries:
        builder = root
        for part in name_path(entry):
            builder = builder.children.setdefault(part, _TreeBuilder())
        builder.entry = entry
    tree = _to_node(root)
    if tree.labels:
        return (tree,)
    return tree.children


def tree_rows(nodes: Sequence[TreeNode], depth: int = 0) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, shape, dtype, size) of each node, with names indented by depth."""
    for node in nodes:
        times = f"{node.tensors} x " if node.tensors > 1 else ""
        shape = f"{times}{list(node.shape)}" if node.dtype else ""
        yield f"{'  ' * depth}{node.name}", shape, node.dtype, format_bytes(node.nbytes)
        yield from tree_rows(node.children, depth + 1)


def count_nodes(nodes: Sequence[TreeNode]) -> int:
    """Return the number of rows that `tree_rows` yields."""
    return sum(1 + count_nodes(node.children) for node in nodes)


def tree_fields(node: TreeNode) -> dict[str, object]:
    """Return a node for JSON: a leaf has shape and dtype, a branch has children."""
    common: dict[str, object] = {"name": node.name, "tensors": node.tensors, "bytes": node.nbytes}
    if node.dtype:
        return common | {"shape": node.shape, "dtype": node.dtype}
    return common | {"children": [tree_fields(child) for child in node.children]}


def _to_node(builder: _TreeBuilder) -> TreeNode:
    """Convert a builder to a node. Its parent adds its label. A branch with a single child is replaced by the child."""
    # The depth of the recursion is at most MAX_PATH_PARTS.
    frozen = {label: _to_node(child) for label, child in builder.children.items()}
    numbers = sorted(int(label) for label in frozen if _NUMBER.fullmatch(label))
    # A frozen TreeNode is hashed by its content, so equal layers are one key: 32 layers give one group.
    groups: dict[TreeNode, list[int]] = {}
    for number in numbers:
        groups.setdefault(_sort_children(frozen[str(number)]), []).append(number)
    merged: list[TreeNode] = []
    for equal in groups.values():
        node = _multiply_counts(frozen[str(equal[0])], len(equal))
        texts = number_runs(equal, "..")
        if len(texts) > MAX_RUNS:
            texts[MAX_RUNS - 1 : -1] = ["…"]
        label = texts[0] if len(equal) == 1 else f"{{{','.join(texts)}}}"
        merged.append(replace(node, labels=(label, *node.labels)))
    # The merged layers take the place of the first one.
    nodes: list[TreeNode] = []
    for label, child in frozen.items():
        if not _NUMBER.fullmatch(label):
            nodes.append(replace(child, labels=(label, *child.labels)))
        elif merged:
            nodes += merged
            merged = []
    children = tuple(nodes)
    entry = builder.entry
    if entry is None:
        if len(children) == 1:
            return children[0]
        return _make_branch(children)
    leaf = TreeNode((), 1, entry.nbytes, entry.dtype, entry.shape)
    if children:
        return _make_branch((replace(leaf, labels=(SELF_LABEL,)), *children))
    return leaf


def _make_branch(children: tuple[TreeNode, ...]) -> TreeNode:
    tensors = 0
    nbytes = 0
    for child in children:
        tensors += child.tensors
        nbytes += child.nbytes
    return TreeNode((), tensors, nbytes, children=children)


def _sort_children(node: TreeNode) -> TreeNode:
    """Return the node with its children sorted by label.

    Layers with the same tensors in another order then compare equal. The order differs in layers split between files.
    """
    children = sorted(map(_sort_children, node.children), key=lambda child: child.labels)
    return replace(node, children=tuple(children))


def _multiply_counts(node: TreeNode, count: int) -> TreeNode:
    children = tuple(_multiply_counts(child, count) for child in node.children)
    return replace(
        node, tensors=node.tensors * count, nbytes=node.nbytes * count, children=children
    )
