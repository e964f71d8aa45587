"""Opener for a GGUF file: names of llama.cpp become those of Hugging Face, and blocks are decoded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import HFConfig, JsonObject, quote_name
from prepcli.engine.blobs import DerivedArrays
from prepcli.formats.gguf import GgufArray, GgufHeader, GgufTensor, part_names, read_gguf_header
from prepcli.models.registry import family_of
from prepcli.planning.arrays import Location, Locations, MappedArray, whole_array
from prepcli.planning.tensors import array_bits
from prepcli.quantized.gguf_blocks import BLOCK_TYPES, FLOAT_TYPES, GgufDecoder
from prepcli.sources.dequantized import DECODED_DTYPE
from prepcli.sources.gguf_architectures import (
    ARCHITECTURES,
    EXPERT_TENSORS,
    LAYERS_OF_27B,
    MIXTRAL,
    VECTORS_OF_MATRICES,
    GgufArchitecture,
    needs_config_reason,
    query_divisor,
)
from prepcli.sources.gguf_tokenizer import tokenizer_files
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.model_family import FolderModel
from prepcli.sources.openers.tensor_files import make_source
from prepcli.sources.references import CONFIG, SourceHints
from prepcli.sources.side_files import NO_SIDE_FILES
from prepcli.sources.source import MadeFiles, Source, SourceTensor, file_stamps, read_config
from prepcli.sources.tensor_match import TensorNames, detect_names
from prepcli.stores.paths import map_files

ARCHITECTURE_KEY = "general.architecture"
SPLIT_KEY = "split.count"
SPLIT_NUMBER_KEY = "split.no"
SPLIT_TENSORS_KEY = "split.tensors.count"
# The name of the weights in a Hugging Face folder, which an export uses.
FILE_NAME = "model.safetensors"
# Each expert becomes a tensor. A hostile shape may have any number of empty ones.
MAX_EXPERTS = 1 << 14
CONFIG_HINT = text("{}: a folder with the model's {}", Option("config", "FOLDER"), CONFIG)
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")


@dataclass(frozen=True, slots=True)
class _NamedDecoder:
    """A decoder of a GGUF tensor, and the names of the tensors in its output.

    The output of most decoders is one tensor. A stack of experts is decoded into one tensor per expert.

    Attributes:
        decoder: The decoder.
        names: Names of the tensors, in the order of the output.
        shape: Shape of each tensor.
        axis_map: Relates the only tensor in `names` to the output. None if the output has the tensors' elements in
            C order.
    """

    decoder: GgufDecoder
    names: tuple[str, ...]
    shape: tuple[int, ...]
    axis_map: AxisMap | None = None

    def location(self, file: int, start: int, number: int) -> Location:
        """Return where tensor `number` of `names` is in the blob `file`, in which the decoder starts at `start`."""
        name = self.names[number]
        dtype = self.decoder.dtype
        if self.axis_map is None:
            offset = start + number * array_bits(dtype, self.shape) // 8
            return whole_array(name, dtype, self.shape, (file, offset))
        leaf = whole_array(name, dtype, self.axis_map.leaf_shape, (file, start))
        return MappedArray(self.axis_map, (), leaf)


def read(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the header of a GGUF file, or the headers of all parts."""
    path = located.files.path
    display_name = located.display_name
    # All parts of `m-00001-of-00003.gguf`, or the file itself.
    paths = tuple(path.with_name(name) for name in part_names(path.name))
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise PrepError(
            f"{display_name} is a part of a model",
            f"it has {count_text(len(paths), 'part')}, and {missing[0]} is missing",
            "put all parts into one folder",
        )
    headers = map_files(read_gguf_header, paths)
    header = _join_parts(headers, display_name)
    name = header.metadata.get(ARCHITECTURE_KEY)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise PrepError(
            f"the architecture {name!r:.40} of {display_name} is not supported",
            f"GGUF files are read of {', '.join(ARCHITECTURES)}",
            "use the safetensors files that it was converted from",
        )
    architecture = ARCHITECTURES[name]
    # Mixtral has the architecture of LLaMA.
    if name == "llama" and header.metadata.get("llama.expert_count"):
        architecture = MIXTRAL
    if hints.config_path is None:
        config = _config_of_metadata(header, architecture, display_name)
    else:
        config = read_config(hints.resolve_config_path(path.parent, display_name))
    family = family_of(config)
    named: list[_NamedDecoder] = []
    for file, part in enumerate(headers):
        named += _tensor_decoders(part, architecture, family.sizes(config), file)
    blob = DerivedArrays(display_name, tuple(each.decoder for each in named), paths)
    names = detect_names(family, config, full_names=[name for each in named for name in each.names])
    tensors = _source_tensors(named, blob, names)
    model = FolderModel(None, config, family, names, NO_SIDE_FILES)
    source = make_source(
        replace(located, manifest=None), model, tensors, paths, file_stamps(headers)
    )
    type_names = sorted({tensor.type.name for tensor in header.tensors})
    return replace(
        source,
        tensor_file_names=(FILE_NAME,) * len(tensors),
        blobs=(*paths, blob),
        quantization={"quant_method": "gguf", "types": type_names},
        made_files=MadeFiles(partial(tokenizer_files, header.metadata), "the tokenizer"),
    )


def _join_parts(headers: Sequence[GgufHeader], display_name: str) -> GgufHeader:
    """Return the first header with the tensors of all parts.

    Raise DamagedError if the files are not the parts of one model, in their order.
    """
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        count = header.metadata.get(SPLIT_KEY, 1)
        position = header.metadata.get(SPLIT_NUMBER_KEY, 0)
        if (count, position) != (len(headers), number):
            raise DamagedError(
                f"{header.file_name} is not part {number + 1} of {len(headers)} of {display_name}",
                f"the key `{SPLIT_KEY}` is {count!r:.40}, and `{SPLIT_NUMBER_KEY}` is {position!r:.40}",
                GET_AGAIN_HINT,
            )
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise DamagedError(
                    f"{header.file_name} has the tensor {quote_name(tensor.name)} of another part",
                    "each tensor is in one part",
                    GET_AGAIN_HINT,
                )
            tensors[tensor.name] = tensor
    expected = headers[0].metadata.get(SPLIT_TENSORS_KEY)
    if len(headers) > 1 and expected is not None and expected != len(tensors):
        raise DamagedError(
            f"{display_name} has {count_text(len(tensors), 'tensor')}",
            f"the key `{SPLIT_TENSORS_KEY}` is {expected!r:.40}",
            GET_AGAIN_HINT,
        )
    return replace(headers[0], tensors=tuple(tensors.values()))


# The config


def _config_of_metadata(
    header: GgufHeader, architecture: GgufArchitecture, display_name: str
) -> HFConfig:
    """Return a config.json with the facts of the metadata."""
    prefix = str(header.metadata[ARCHITECTURE_KEY])
    names = {tensor.name for tensor in header.tensors}
    reason = needs_config_reason(header.metadata, prefix, names)
    if reason:
        raise PrepError(f"the metadata of {display_name} is not complete", reason, CONFIG_HINT)
    config: JsonObject = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "torch_dtype": DECODED_DTYPE,
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": _vocab_size(header, display_name),
        **architecture.defaults,
    }
    for key, field in architecture.config_keys.items():
        value = header.metadata.get(f"{prefix}.{key}")
        if value is None:
            continue
        if isinstance(value, GgufArray):
            raise PrepError(
                f"per-layer values of `{prefix}.{key}` are not supported",
                f"{display_name} has {value.count:,} of them",
                CONFIG_HINT,
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DamagedError(
                f"{display_name} has a broken header",
                f"the key `{prefix}.{key}` is not a number",
                GET_AGAIN_HINT,
            )
        config[field] = _shortest_float(value)
        # llama.cpp writes 0 for a model without a window.
        if field == "sliding_window" and value == 0:
            config[field] = None
    if prefix in LAYERS_OF_27B:
        config["query_pre_attn_scalar"] = query_divisor(header.metadata, prefix)
    for bias_field, modules in architecture.bias_fields.items():
        # llama.cpp adds a bias where one is stored.
        stored = {_split_layer(tensor.name)[0] for tensor in header.tensors}
        biases = [module for module in modules if f"{module}.bias" in stored]
        if biases and len(biases) < len(modules):
            missing = next(module for module in modules if module not in biases)
            raise PrepError(
                f"the biases of {header.file_name} are not supported",
                f"it has `{biases[0]}.bias` and no `{missing}.bias`; {architecture.class_name} has both or none",
                "use the safetensors files that it was converted from",
            )
        if biases:
            config[bias_field] = True
    for key in ("bos", "eos"):
        token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token_id) is int:
            config[f"{key}_token_id"] = token_id
    return config


def _shortest_float(value: float) -> float:
    """Return a number of float32 with its fewest digits: 9.999999747378752e-06 -> 1e-05."""
    shortest = float(str(np.float32(value)))
    if isinstance(value, float) and np.float32(shortest) == value:
        return shortest
    return value


def _vocab_size(header: GgufHeader, display_name: str) -> int:
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[0]
    raise DamagedError(
        f"{display_name} has no `token_embd.weight`",
        "it is the embedding, whose rows are the vocabulary",
        GET_AGAIN_HINT,
    )


# The tensors


def _source_tensors(
    named: Sequence[_NamedDecoder], blob: DerivedArrays, names: TensorNames
) -> tuple[SourceTensor, ...]:
    """Return the tensors of decoders. Several decoders may have parts of one tensor."""
    tensors: dict[str, SourceTensor] = {}
    for each, start in zip(named, blob.offsets):
        for number, full_name in enumerate(each.names):
            name = names.bare_name(full_name)
            location = each.location(len(blob.stored), start, number)
            placement: Locations = (location,)
            other = tensors.get(name)
            if other is not None:
                if other.dtype != each.decoder.dtype:
                    raise PrepError(
                        f"parts of {quote_name(full_name)} have two types",
                        f"they are {other.dtype} and {each.decoder.dtype} when decoded",
                        "use a file of another quantisation of the same model",
                    )
                placement = (*other.placement, location)
            tensors[name] = SourceTensor(
                name, each.decoder.dtype, each.shape, placement, default_dtype=DECODED_DTYPE
            )
    return tuple(tensors.values())


def _tensor_decoders(
    header: GgufHeader, architecture: GgufArchitecture, sizes: Mapping[str, int], file: int
) -> Iterator[_NamedDecoder]:
    """Yield the decoders of all tensors, in the order of the file. A tensor without a row keeps its name."""
    for tensor in header.tensors:
        if tensor.type.name not in BLOCK_TYPES:
            raise _unsupported_type_error(tensor, BLOCK_TYPES)
        name, layer = _split_layer(tensor.name)
        hf_name = architecture.tensor_names.get(name, "")
        decoder = _tensor_decoder(tensor, architecture, name, sizes, file)
        shape = tensor.shape
        if name in architecture.rows:
            row = architecture.rows[name].format(layer=layer)
            axis_map = bind_row(parse_row(row), sizes)
            if shape != axis_map.leaf_shape:
                raise DamagedError(
                    f"{quote_name(tensor.name)} has shape {[*shape]}",
                    f"the config needs {[*axis_map.leaf_shape]}",
                    GET_AGAIN_HINT,
                )
            ((full_name, _),) = axis_map.tensors()
            yield _NamedDecoder(decoder, (full_name,), axis_map.source_shape, axis_map)
            continue
        if name in VECTORS_OF_MATRICES and len(shape) == 1:
            shape = (1, *shape)
        if name in EXPERT_TENSORS and hf_name and len(shape) == 3:
            if shape[0] > MAX_EXPERTS:
                raise DamagedError(
                    f"{quote_name(tensor.name)} has {count_text(shape[0], 'expert')}",
                    f"at most {MAX_EXPERTS:,} are supported",
                    GET_AGAIN_HINT,
                )
            hf_names = tuple(hf_name.format(layer=layer, expert=i) for i in range(shape[0]))
            yield _NamedDecoder(decoder, hf_names, shape[1:])
            continue
        if name in architecture.transposed:
            shape = shape[::-1]
        yield _NamedDecoder(decoder, (hf_name.format(layer=layer) or tensor.name,), shape)


def _unsupported_type_error(tensor: GgufTensor, types: Iterable[str]) -> PrepError:
    return PrepError(
        f"the type {tensor.type.name} of {quote_name(tensor.name)} is not supported",
        f"GGUF types that are decoded for such a tensor: {', '.join(types)}",
        "use a file of another quantisation of the same model",
    )


def _split_layer(name: str) -> tuple[str, str]:
    """Return a name without its layer, and the layer: `blk.3.ffn_up.weight` -> `blk.ffn_up.weight`, `3`."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return name, ""
    return f"blk.{match[2]}", match[1]


def _tensor_decoder(
    tensor: GgufTensor,
    architecture: GgufArchitecture,
    name: str,
    sizes: Mapping[str, int],
    file: int,
) -> GgufDecoder:
    """Return the decoder of a tensor, which undoes the changes of llama.cpp."""
    shape = tensor.shape
    is_transposed = name in architecture.transposed and len(shape) == 2
    interleaved_rows = 0
    if name in architecture.interleaved and shape:
        heads = sizes["heads" if "attn_q" in name else "kv_heads"]
        interleaved_rows = max(shape[0] // heads, 1)
        if shape[0] % (2 * heads):
            raise DamagedError(
                f"{quote_name(tensor.name)} has {shape[0]} rows",
                f"{heads} heads of the config need an even number of rows each",
                GET_AGAIN_HINT,
            )
        if len(shape) == 1:
            if tensor.type.name not in FLOAT_TYPES:
                raise _unsupported_type_error(tensor, FLOAT_TYPES)
            # Values of a bias are rows of one column.
            shape = (*shape, 1)
    if is_transposed:
        shape = shape[::-1]
    offset = 0.0
    if architecture.norm_offset and name.endswith("norm.weight"):
        offset = -architecture.norm_offset
    row_values = tensor.shape[-1] if tensor.shape else 1
    stored_columns = shape[-1] if interleaved_rows else row_values
    row_nbytes = stored_columns // tensor.type.values * tensor.type.nbytes
    rows = tensor.nbytes // row_nbytes if row_nbytes else 0
    stored = whole_array(tensor.name, "uint8", (rows, row_nbytes), (file, tensor.offset))
    return GgufDecoder(
        stored,
        tensor.type.name,
        shape or (1,),
        is_transposed=is_transposed,
        interleaved_rows=interleaved_rows,
        offset=offset,
    )
