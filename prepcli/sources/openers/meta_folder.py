"""Opener for Meta's own LLaMA checkpoints: `params.json` and one file per model-parallel rank.

Mistral's own checkpoints (`consolidated.safetensors`) have the same tensors in one file.

Each file stores a slice of the rows or of the columns of each matrix, so a tensor is a tree leaf whose chunks are in
different files. The rows of the query and key projections are permuted: Meta's rotary embedding pairs neighbouring
dims, the order of Hugging Face pairs the two halves of a head.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.grids import ChunkGrid, ChunkIndex, ChunkTable, FilePosition
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.json_values import HFConfig, parse_json, quote_name
from prepcli.formats.meta_llama_config import (
    is_dense_mistral,
    is_small_llama_3_2,
    mistral_to_hf_config,
    to_hf_config,
)
from prepcli.formats.model_files import FileHeader
from prepcli.formats.safetensors import (
    LayoutEntry,
    read_safetensors_header,
    split_into_shards,
)
from prepcli.formats.torch_files import (
    CONSOLIDATED_FILE,
    META_PARAMS_FILE,
    MISTRAL_FILE,
    read_torch_header,
)
from prepcli.models.layouts import META_NAMES, TORCHTITAN_LAYOUT
from prepcli.models.parameters import Family
from prepcli.models.registry import FAMILIES
from prepcli.planning.arrays import Array, Location, MappedArray, whole_array
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.model_family import FolderModel
from prepcli.sources.openers.tensor_files import assign_blobs, make_source, read_folder
from prepcli.sources.references import CONFIG, SourceHints
from prepcli.sources.side_files import SideFile, find_side_files, matches_any
from prepcli.sources.source import Source, SourceTensor, file_stamps
from prepcli.sources.tensor_match import detect_names
from prepcli.stores.files import list_folder, read_bytes, stat_file
from prepcli.stores.paths import map_files

LLAMA = FAMILIES["llama"]
MAX_PARAMS_NBYTES = 1 << 20
# Size of the safetensors files that `pad-vocab` writes from Meta's files.
OUTPUT_SHARD_NBYTES = 5 * 10**9
META_SIDE_FILES = {META_PARAMS_FILE, "checklist.chk"}
EMBEDDING = "tok_embeddings.weight"
LM_HEAD = "output.weight"
ROPE_FREQUENCIES = "rope.freqs"
# Families whose models are published with Meta's names of tensors.
NATIVE_FAMILIES = (LLAMA.name, "mistral")


_LAYER = "layers.{layers}."
# Dim of each of Meta's tensors that is sharded over files. None if each file has the whole tensor.
_SHARD_AXES: Mapping[str, int | None] = {
    EMBEDDING: 1,
    f"{_LAYER}attention_norm.weight": None,
    f"{_LAYER}attention.wq.weight": 0,
    f"{_LAYER}attention.wk.weight": 0,
    f"{_LAYER}attention.wv.weight": 0,
    f"{_LAYER}attention.wo.weight": 1,
    f"{_LAYER}ffn_norm.weight": None,
    f"{_LAYER}feed_forward.w1.weight": 0,
    f"{_LAYER}feed_forward.w2.weight": 1,
    f"{_LAYER}feed_forward.w3.weight": 0,
    "norm.weight": None,
    LM_HEAD: 0,
}


# Axis map of each of Meta's tensors, with Meta's dims on the left and the dims of Hugging Face on the right. The state
# dict of torchtitan has the same tensors.
_ROWS: Mapping[str, str] = {
    name: LLAMA.layouts[TORCHTITAN_LAYOUT].parameters[META_NAMES.get(name, name)].row
    for name in _SHARD_AXES
}

_LAYER_TENSOR = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(.+)")


def read(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the headers and the config of Meta's or Mistral's files. No pickled code is run."""
    path = located.files.path
    if hints.verbatim and (path / MISTRAL_FILE).exists():
        return read_folder(replace(located, kind="safetensors"), hints)
    ranks = [name for name in list_folder(path) if CONSOLIDATED_FILE.fullmatch(name)]
    expected = [f"consolidated.{number:02d}.pth" for number in range(len(ranks))]
    if missing := [name for name in expected if name not in ranks]:
        why = f"{path} has {len(ranks)} such files, up to {ranks[-1]}"
        raise PrepError(
            f"{missing[0]} is missing", why, "copy all files: each has a part of the model"
        )
    headers = map_files(read_torch_header, [path / name for name in ranks], range(len(ranks)))
    headers = headers or [read_safetensors_header(path / MISTRAL_FILE, 0)]
    config = _load_config(located, hints, headers)
    family = FAMILIES[str(config["model_type"])]
    sharded = _ShardedTensors(headers, config, family)
    tensors = tuple(tensor for _, tensor in sorted(sharded.tensors(), key=lambda pair: pair[0]))
    entries: list[LayoutEntry] = []
    for tensor in tensors:
        name = tensor.name
        # A tensor that only Meta has keeps its name.
        if name not in (*family.unprefixed, ROPE_FREQUENCIES):
            name = family.prefix + name
        entries.append((name, tensor.dtype, tensor.shape, tensor.nbytes))
    file_names: list[str] = []
    for file_name, shard_entries in split_into_shards(entries, OUTPUT_SHARD_NBYTES):
        file_names += [file_name] * len(shard_entries)
    side_files = find_side_files(path, hints.copied_files)
    # Meta's own side files describe other weights, and are copied on request.
    copied: list[SideFile] = []
    for file in side_files.copied:
        if file.name not in META_SIDE_FILES or matches_any(file.name, hints.copied_files):
            copied.append(file)
    names = detect_names(family, config, full_names=[name for name, *_ in entries])
    side_files = replace(side_files, copied=tuple(copied))
    source = make_source(
        replace(located, manifest=None),
        FolderModel(None, config, family, names, side_files),
        tensors,
        [header.path for header in headers],
        file_stamps(headers),
    )
    return replace(source, tensor_file_names=tuple(file_names), blobs=sharded.blobs)


# The config


def _load_config(
    located: LocatedCheckpoint, hints: SourceHints, headers: Sequence[FileHeader]
) -> HFConfig:
    """Read the user's config.json or the one in the folder. Convert params.json if there is none."""
    path = located.files.path
    display_name = located.display_name
    if hints.config_path is not None or (path / CONFIG).is_file():
        config = located.read_config(hints.resolve_config_path(path, display_name))
        model_type = config.get("model_type")
        if model_type not in NATIVE_FAMILIES:
            why = f"its config.json says `{model_type!s:.40}`, such files contain `{LLAMA.name}`"
            hint = text(
                "{}: a folder with the {} of these weights", Option("config", "FOLDER"), CONFIG
            )
            raise PrepError(f"{display_name} has the wrong model_type", why, hint)
        return config
    params_path = path / META_PARAMS_FILE
    if not params_path.exists():
        why = "the number of heads is not known without it"
        hint = text(
            "put Meta's {} next to the files, or {} names the model's {}",
            META_PARAMS_FILE,
            Option("config"),
            CONFIG,
        )
        raise PrepError(f"{display_name} has no {META_PARAMS_FILE}", why, hint)
    try:
        if stat_file(params_path).st_size > MAX_PARAMS_NBYTES:
            raise ValueError(f"it is larger than {MAX_PARAMS_NBYTES:,} bytes")
        params: Any = parse_json(read_bytes(params_path))
    except ValueError as error:
        raise DamagedError(f"{params_path} is broken", str(error), GET_AGAIN_HINT) from error
    try:
        # Meta's files of LLaMA 3.2 1B and 3B store the head although it is the embedding.
        has_head = any(tensor.name == LM_HEAD for tensor in headers[0].tensors)
        if is_dense_mistral(params):
            return mistral_to_hf_config(params, _vocab_size(params, headers), not has_head)
        is_tied = is_small_llama_3_2(params) or not has_head
        return to_hf_config(params, _vocab_size(params, headers), is_tied)
    except ValueError as error:
        hint = text("{} names a {} instead", Option("config"), CONFIG)
        raise PrepError(f"{params_path} is invalid", str(error), hint) from error


def _vocab_size(document: Any, headers: Sequence[FileHeader]) -> int:
    """Return the vocabulary size of params.json, or the one of the tensors where params.json has -1."""
    params = document.get("model", document) if isinstance(document, Mapping) else {}
    vocab_size = params.get("vocab_size") if isinstance(params, Mapping) else None
    if type(vocab_size) is int and vocab_size > 0:
        return vocab_size
    shapes = {tensor.name: tensor.shape for tensor in headers[0].tensors}
    if len(shape := shapes.get(LM_HEAD, ())) == 2:
        return shape[0] * len(headers)
    if len(shape := shapes.get(EMBEDDING, ())) == 2:
        # LLaMA 3 shards the rows of the embedding: each file has its full width, and a part of the
        # vocabulary. LLaMA 1 and 2 shard its columns.
        if shape[1] == params.get("dim"):
            return shape[0] * len(headers)
        return shape[0]
    raise ValueError(f"it has no vocab_size, and {headers[0].file_name} has no {EMBEDDING}")


# The tensors


class _ShardedTensors:
    """Tensors of all files, grouped by Meta's names and mapped to Hugging Face tensors."""

    def __init__(self, headers: Sequence[FileHeader], config: HFConfig, family: Family) -> None:
        sizes = family.sizes(config)
        self._sizes = sizes | {"two": 2, "half": sizes["head_dim"] // 2}
        self._headers = headers
        self._axis_maps: dict[str, AxisMap] = {}
        tensors: list[Array] = []
        for header in headers:
            tensors.extend(header.tensors)
        blob_numbers, self.blobs = assign_blobs(tensors, [header.path for header in headers])
        # Each shard with its blob number.
        self._shards_by_name: dict[str, list[tuple[Array, int]]] = {}
        for tensor, blob in zip(tensors, blob_numbers):
            self._shards_by_name.setdefault(tensor.name, []).append((tensor, blob))

    def tensors(self) -> Iterator[tuple[int, SourceTensor]]:
        """Yield the Hugging Face tensors, each with the offset of its shard in the first file.

        A tensor without a rule keeps its name.
        """
        for name, shards in self._shards_by_name.items():
            if len(shards) != len(self._headers):
                files_with_shard = {tensor.file for tensor, _ in shards}
                numbers = range(len(self._headers))
                first = next(number for number in numbers if number not in files_with_shard)
                raise PrepError(
                    f"{self._headers[first].file_name} lacks {quote_name(name)}",
                    "each file of Meta's has a part of each tensor",
                    GET_AGAIN_HINT,
                )
            if len(dtypes := {tensor.dtype for tensor, _ in shards}) > 1:
                why = f"their dtypes are {' and '.join(sorted(dtypes))}"
                raise PrepError(f"the parts of {quote_name(name)} differ", why, GET_AGAIN_HINT)
            match = _LAYER_TENSOR.fullmatch(name)
            pattern = _LAYER + match[2] if match else name
            first, blob = shards[0]
            if pattern not in _ROWS:
                yield (
                    first.offset,
                    SourceTensor(name, first.dtype, first.shape, (first.in_file(blob),)),
                )
                continue
            if pattern not in self._axis_maps:
                self._axis_maps[pattern] = bind_row(parse_row(_ROWS[pattern]), self._sizes)
            axis_map = self._axis_maps[pattern]
            indices = {"layers": int(match[1])} if match else {}
            placement = (self._placement(pattern, axis_map, indices, shards),)
            yield (
                first.offset,
                SourceTensor(
                    axis_map.tensor_name(indices), first.dtype, axis_map.source_shape, placement
                ),
            )

    def _placement(
        self,
        pattern: str,
        axis_map: AxisMap,
        indices: Mapping[str, int],
        shards: Sequence[tuple[Array, int]],
    ) -> Location:
        """Return where a tensor is stored: its location in a single file, else one chunk per file."""
        axis = _SHARD_AXES[pattern]
        # LLaMA 1 and 2 shard the columns of the embedding, LLaMA 3 its rows.
        if pattern == EMBEDDING and shards[0][0].shape[1:] == axis_map.leaf_shape[1:]:
            axis = 0
        num_files = len(self._headers)
        for atom in ("heads", "kv_heads"):
            if self._sizes[atom] % num_files:
                why = f"{self._sizes[atom]} {atom} are not divisible by {num_files} files"
                raise PrepError(
                    "attention heads are split across files",
                    why,
                    "check that no `consolidated.*.pth` is missing",
                )
        shape = list(axis_map.leaf_shape)
        if axis is not None:
            shape[axis] //= num_files
        chunk_shape = tuple(shape)
        for tensor, _ in shards:
            if tensor.shape != chunk_shape:
                raise self._shape_error(tensor, axis_map, axis, chunk_shape)
        # E.g. (heads half two) and (heads two half): equal shapes, and another order of the rows.
        meta_factors = itertools.chain(*axis_map.leaf_dims)
        hf_factors = itertools.chain(*(dim.factors for dim in axis_map.source_dims))
        has_hf_order = [each.atom for each in meta_factors] == [each.atom for each in hf_factors]
        if chunk_shape == axis_map.leaf_shape and has_hf_order:
            first, blob = shards[0]
            position = (blob, first.offset)
            return whole_array(
                first.name, first.dtype, axis_map.source_shape, position, first.strides
            )
        if any(tensor.strides for tensor, _ in shards):
            why = "its rows are not contiguous in the file"
            hint = "with PyTorch: `.contiguous()` and save again"
            raise PrepError(f"{quote_name(shards[0][0].name)} is a view", why, hint)
        parts = shards if axis is not None else shards[:1]
        places: dict[ChunkIndex, FilePosition] = {}
        for i, (tensor, blob) in enumerate(parts):
            # E.g. shard 3 of a matrix that is sharded on axis 1 is the chunk (0, 3).
            chunk_index = [0] * len(chunk_shape)
            if axis is not None:
                chunk_index[axis] = i
            places[tuple(chunk_index)] = blob, tensor.offset
        first_index = (0,) * len(chunk_shape)
        grid = ChunkGrid(axis_map.leaf_shape, chunk_shape)
        chunks = ChunkTable.from_positions(first_index, grid.chunk_counts, places)
        first = parts[0][0]
        array = Array(first.name, first.dtype, axis_map.leaf_shape, chunk_shape, chunks)
        return MappedArray(axis_map, tuple(indices.items()), array)

    def _shape_error(
        self, tensor: Array, axis_map: AxisMap, axis: int | None, expected: tuple[int, ...]
    ) -> PrepError:
        num_files = len(self._headers)
        file_name = self._headers[tensor.file].file_name
        what = f"{quote_name(tensor.name)} in {file_name} has shape {list(tensor.shape)}"
        why = f"the config implies {list(expected)} in each of {num_files} files"
        if axis is not None and len(tensor.shape) == len(expected) and tensor.shape[axis]:
            count, remainder = divmod(axis_map.leaf_shape[axis], tensor.shape[axis])
            if not remainder and count != num_files:
                return PrepError(
                    what,
                    why,
                    f"a shard of this shape belongs to a checkpoint of {count} files: check that none is missing",
                )
        return PrepError(what, why, f"are {META_PARAMS_FILE} and the weights of one model?")
