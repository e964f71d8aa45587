"""Read the headers of safetensors files and the index of a folder.

The engine reads the payloads. Headers and indexes are untrusted: everything that the safetensors library rejects is
rejected, and also duplicate names and unknown fields. Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias, TypeGuard

import xxhash

from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject, JsonValue, parse_json, quote_name
from prepcli.formats.model_files import (
    FileHeader,
    ModelFiles,
    check_numbered_files,
    damage_hint,
    download_again_hint,
    list_weight_files,
    other_format_error,
    read_model_files,
    shard_name,
)
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.tensors import array_bits
from prepcli.stores.files import list_folder, open_regular_file, stat_file, unreadable_error
from prepcli.stores.paths import AnyPath

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # names of PEFT
ADAPTER_HINT = text(
    "{} adds a LoRA adapter to its base; PEFT's `merge_and_unload()` merges others",
    Command("merge", "ADAPTER", "BASE"),
)
SUFFIX = "safetensors"
METADATA_KEY = "__metadata__"
# A file starts with the little-endian length of its header.
LENGTH_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000  # limit of the safetensors library
# Limit of one tensor's entry, and of all metadata.
MAX_ENTRY_NBYTES = 4 << 20
MAX_DIMS = 64  # limit of NumPy

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn", "F4": "float4_e2m1fn",
}  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

# Format: https://github.com/huggingface/safetensors#format. A file with w = float32 [2]:
#   38 00 00 00 00 00 00 00    length of the header, 0x38 = 56
#   {"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} and two spaces
#   <8 bytes>                  payload, at offset 8 + 56 = 64
# `data_offsets` count from the start of the payload. The tensors must cover it without holes, so
# the length of a file follows from its header, and a file that is cut short is noticed.
_ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}
# The header is split into entries by regular expressions, and each entry is parsed alone: a
# malicious header of 100 MB as one JSON value would take many times its size in memory.
# Possessive quantifiers (`*+`, Python 3.11) never backtrack, so the time is linear in the input.
_SPACE = r"[ \t\r\n]*+"
_STRING = r'"(?>[^"\\]++|\\.)*+"'
_FLAT_OBJECT = rf'\{{(?>[^"{{}}]++|{_STRING})*+\}}'  # an object without nested objects
_OPENING_BRACE = re.compile(rf"{_SPACE}\{{".encode())
_EMPTY_OBJECT = re.compile(rf"{_SPACE}\{{{_SPACE}\}}{_SPACE}".encode())
_BLANK = re.compile(_SPACE.encode())
_ENTRY = re.compile(
    rf"{_SPACE}({_STRING}{_SPACE}:{_SPACE}{_FLAT_OBJECT}){_SPACE}([,}}])".encode(), re.DOTALL
)
_NUMBER = rb"(?:0|[1-9][0-9]{0,17})"
# An entry as libraries write it: no escapes in the name, fields in this order.
_COMMON_ENTRY = re.compile(
    rb'[ \t\r\n]*+"([^"\\\x00-\x1f]++)"[ ]*+:[ ]*+\{[ ]*+"dtype"[ ]*+:[ ]*+"([A-Z0-9_]++)"[ ]*+,'
    rb'[ ]*+"shape"[ ]*+:[ ]*+\[((?:%b(?:,[ ]*+%b)*+)?+)\][ ]*+,'
    rb'[ ]*+"data_offsets"[ ]*+:[ ]*+\[(%b),[ ]*+(%b)\][ ]*+\}[ \t\r\n]*+([,}])' % ((_NUMBER,) * 4)
)
# The safetensors library reads it as no metadata.
_NULL_METADATA = re.compile(
    rf'{_SPACE}"{METADATA_KEY}"{_SPACE}:{_SPACE}null{_SPACE}([,}}])'.encode()
)
PAGE_NBYTES = 4096
ALIGN_NBYTES = 8
LayoutEntry: TypeAlias = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, nbytes
# File name, entries in layout order, page offset.
ShardContents: TypeAlias = tuple[str, Sequence[LayoutEntry], int | None]


def read_safetensors_header(path: AnyPath, file_number: int) -> FileHeader:
    """Read the header of a safetensors file.

    Raises:
        PrepError: The file is unreadable or invalid. No other exception is raised, whatever the file holds.
    """
    file_stat = stat_file(path)
    try:
        with open_regular_file(path) as stream:
            first_bytes = stream.read(64)
            nbytes = int.from_bytes(first_bytes[:LENGTH_NBYTES], "little")
            if len(first_bytes) < LENGTH_NBYTES or not 0 < nbytes <= MAX_HEADER_NBYTES:
                if format_error := other_format_error(path, first_bytes, "safetensors"):
                    raise format_error
                if len(first_bytes) < LENGTH_NBYTES:
                    count = count_text(len(first_bytes), "byte")
                    why = f"it has {count}, the length of its header alone takes {LENGTH_NBYTES}"
                    raise DamagedError(f"{path.name} is cut short", why, download_again_hint(path))
                why = f"its header length is {nbytes:,} bytes, valid: 1 to {MAX_HEADER_NBYTES:,}"
                raise DamagedError(f"{path.name} is not a safetensors file", why, GET_AGAIN_HINT)
            stream.seek(0)
            header_bytes = stream.read(min(LENGTH_NBYTES + nbytes, file_stat.st_size))
    except OSError as error:
        raise unreadable_error(path, error) from error
    if len(header_bytes) < LENGTH_NBYTES + nbytes:
        raise _wrong_size_error(path, LENGTH_NBYTES + nbytes, len(header_bytes))
    try:
        metadata: tuple[tuple[str, str], ...] = ()
        tensors: list[Array] = []
        names: set[str] = set()
        for name, entry in _iter_entries(header_bytes):
            if name in names:
                raise ValueError(f"it has {quote_name(name)} twice")
            names.add(name)
            if name != METADATA_KEY:
                tensors.append(_parse_tensor(name, entry, file_number, len(header_bytes)))
                continue
            for key, value in entry.items():
                if not isinstance(value, str):
                    raise ValueError(f"its {METADATA_KEY} must hold only text")
                # Python's JSON accepts half of a surrogate pair, other parsers do not.
                value.encode()
                metadata += ((key, value),)
        tensors.sort(key=operator.attrgetter("offset", "nbytes"))
        end = len(header_bytes)
        for tensor in tensors:
            if tensor.offset != end:
                problem = "hole" if tensor.offset > end else "overlap"
                raise ValueError(
                    f"{problem}: {quote_name(tensor.name)} starts at byte {tensor.offset:,}, not {end:,}"
                )
            end += tensor.nbytes
    except ValueError as error:
        raise DamagedError(
            f"{path.name} has a broken header", str(error), damage_hint(path, error)
        ) from error
    if end != file_stat.st_size:
        raise _wrong_size_error(path, end, file_stat.st_size)
    digest = xxhash.xxh3_128_hexdigest(header_bytes)
    return FileHeader(path, end, file_stat.st_mtime_ns, digest, tuple(tensors), metadata=metadata)


def select_safetensors_files(names: Iterable[str]) -> list[str]:
    """Return the file names that hold a model's tensors: the index, else model.safetensors, else all *.safetensors."""
    visible = [
        name
        for name in names
        if name == INDEX_FILE or (name.endswith(f".{SUFFIX}") and name[0] != ".")
    ]
    return next(([name] for name in (INDEX_FILE, SINGLE_FILE) if name in visible), visible)


def select_safetensors_downloads(names: Iterable[str]) -> list[str]:
    """Return the files of a model in a repository. With an index, these are all files that it may name."""
    files = [name for name in names if name == INDEX_FILE or name.endswith(f".{SUFFIX}")]
    if SINGLE_FILE in files and INDEX_FILE not in files:
        return [SINGLE_FILE]
    return files


def read_safetensors_folder(folder: AnyPath) -> ModelFiles:
    """Read the headers of a model's files, in the order of file names. Links are followed.

    The files and tensors are the ones in the index, else model.safetensors, else all *.safetensors. An index that does
    not name the existing model.safetensors is left over from an earlier save.
    """
    names, weight_map = list_weight_files(folder, select_safetensors_files(list_folder(folder)))
    if weight_map is None:
        if not names:
            raise PrepError(
                f"{folder} has no safetensors files",
                "no name ends with .safetensors",
                "pass the folder that contains them",
            )
        if ADAPTER_FILE in names:
            why = f"{ADAPTER_FILE} has only the weights that are added to a base model"
            raise PrepError(f"{folder} is an adapter, not a model", why, ADAPTER_HINT)
        check_numbered_files(folder, names)
    paths = [folder / name for name in names]
    return read_model_files(folder, paths, read_safetensors_header, weight_map)


def read_adapter_files(folder: AnyPath) -> ModelFiles:
    """Read the header of an adapter's tensors."""
    path = folder / ADAPTER_FILE
    if not path.is_file():
        hint = "PEFT's `save_pretrained` writes it; `adapter_model.bin` is not supported"
        why = "the tensors of an adapter are read from it"
        raise PrepError(f"{folder} has no {ADAPTER_FILE}", why, hint)
    return read_model_files(folder, (path,), read_safetensors_header)


def iter_folder_tensors(folder: AnyPath) -> Iterator[Array]:
    """Yield the tensors of a model's files, of the index if there is one. A file is read when its first one is needed.

    Raises:
        PrepError: As `read_safetensors_folder`. Tensors that are missing from the files are not noticed.
    """
    names, weight_map = list_weight_files(folder, select_safetensors_files(list_folder(folder)))
    for file_number, name in enumerate(names):
        for tensor in read_safetensors_header(folder / name, file_number).tensors:
            if weight_map is None or weight_map.get(tensor.name) == name:
                yield tensor


# Functions for a single file


def _iter_entries(raw: bytes) -> Iterator[tuple[str, JsonObject]]:
    """Yield name and content of each entry, parsed one by one to bound the memory of malicious headers."""
    if _EMPTY_OBJECT.fullmatch(raw, LENGTH_NBYTES):
        return
    opening_brace = _OPENING_BRACE.match(raw, LENGTH_NBYTES)
    if opening_brace is None:
        raise ValueError("it is not a JSON object")
    offset = opening_brace.end()
    separator = b","
    while separator == b",":
        common_match = _COMMON_ENTRY.match(raw, offset)
        if common_match is not None and common_match.end() - offset <= MAX_ENTRY_NBYTES:
            offset = common_match.end()
            separator = common_match[6]
            # The JSON parser takes three times as long for these entries, which are nearly all.
            name, code, shape, start, stop, _ = common_match.groups()
            try:
                decoded_name = name.decode()
            except UnicodeError as error:
                raise ValueError("its text is not UTF-8") from error
            extents: list[JsonValue] = []
            if shape:
                extents += map(int, shape.split(b","))
            yield (
                decoded_name,
                {
                    "dtype": code.decode(),
                    "shape": extents,
                    "data_offsets": [int(start), int(stop)],
                },
            )
            continue
        if null_match := _NULL_METADATA.match(raw, offset):
            yield METADATA_KEY, {}
            offset = null_match.end()
            separator = null_match[1]
            continue
        entry_match = _ENTRY.match(raw, offset)
        if entry_match is None or entry_match.end(1) - entry_match.start(1) > MAX_ENTRY_NBYTES:
            raise ValueError(
                f"the text at byte {offset:,} is not the entry of a tensor, or has more than 4 MiB"
            )
        document = parse_json(b"{" + entry_match[1] + b"}")
        assert isinstance(document, dict)
        for name, entry in document.items():
            # The pattern matches only objects.
            assert isinstance(entry, dict)
            yield name, entry
        offset = entry_match.end()
        separator = entry_match[2]
    if not _BLANK.fullmatch(raw, offset):
        raise ValueError(f"text follows its end at byte {offset:,}")


def _parse_tensor(name: str, entry: JsonObject, file_number: int, data_start: int) -> Array:
    """Check a tensor's entry in a header, and return the tensor. Raise ValueError if the entry is invalid."""
    if entry.keys() != _ENTRY_FIELDS:
        raise ValueError(
            f"{quote_name(name)} must have dtype, shape and data_offsets, nothing else"
        )
    code = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"the dtype of {quote_name(name)} is not one of {', '.join(DTYPES)}")
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise ValueError(
            f"shape or data_offsets of {quote_name(name)} are not whole numbers from 0 to 2^63 - 1"
        )
    # Libraries reject overflow next to a 0 too.
    extents = [dim or 1 for dim in shape] if 0 in shape else shape
    if array_bits(DTYPES[code], tuple(extents)) >= 1 << 63:
        raise ValueError(f"{quote_name(name)} has a shape of 2^63 bits or more")
    start, stop = offsets
    bits = array_bits(DTYPES[code], tuple(shape))
    if bits != 8 * (stop - start):
        raise ValueError(
            f"{quote_name(name)} {code} {shape} takes {bits:,} bits, its data_offsets {8 * (stop - start):,}"
        )
    return whole_array(name, DTYPES[code], tuple(shape), (file_number, data_start + start))


def _are_counts(values: object) -> TypeGuard[list[int]]:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        return False
    # `type`, not `isinstance`: bool is a subclass of int.
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _wrong_size_error(path: AnyPath, expected_nbytes: int, actual_nbytes: int) -> PrepError:
    if actual_nbytes < expected_nbytes:
        what = f"{path.name} is cut short"
        hint = download_again_hint(path)
    else:
        what = f"{path.name} is too long"
        hint = GET_AGAIN_HINT
    why = f"its header promises {expected_nbytes:,} bytes, the file has {actual_nbytes:,}"
    return DamagedError(what, why, hint)


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """Layout of a file to write: `header`, then tensors without gaps. `size` bytes in total."""

    name: str
    header: bytes
    tensors: tuple[Array, ...]
    size: int


def encode_header(tensors: Sequence[LayoutEntry], page_offset: int | None = 0) -> bytes:
    """Return the length and the JSON header that precede the payload, padded to align the payload.

    Args:
        tensors: Entries in layout order. Their payloads follow each other without gaps.
        page_offset: Offset of the payload in a page, modulo 4096. None, or an offset that is not a multiple of 8,
            aligns the payload to the next multiple of 8.

    Raises:
        ValueError: A name occurs twice.
        PrepError: The dtype or shape of a tensor does not match its size, its name is reserved for metadata, or the
            header is too large.
    """
    ends = list(accumulate((nbytes for *_, nbytes in tensors), initial=0))
    header_entries: dict[str, dict[str, object]] = {}
    for (name, dtype, shape, nbytes), start, stop in zip(tensors, ends, ends[1:]):
        if array_bits(dtype, shape) != 8 * nbytes:
            bits = f"{array_bits(dtype, shape):,} bits"
            why = f"{dtype} {list(shape)} takes {bits}, its entry has {nbytes:,} bytes"
            hint = "this is a bug in prep: nothing was written"
            raise PrepError(f"{name} cannot be stored as safetensors", why, hint)
        if dtype not in DTYPE_CODES:
            why = "safetensors has no such dtype"
            raise PrepError(f"{name} is {dtype}", why, text("{} keeps it", Command("reshard")))
        header_entries[name] = {
            "dtype": DTYPE_CODES[dtype],
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
    if len(header_entries) != len(tensors):
        raise ValueError("a tensor name occurs twice")
    if METADATA_KEY in header_entries:
        raise PrepError(
            f"no tensor of a safetensors file has the name {METADATA_KEY}",
            "the format reserves it for metadata",
            "rename the tensor in the source",
        )
    content = {METADATA_KEY: {"format": "pt"}, **header_entries}
    header = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    # A payload with the same page offset as its source can be copied by whole pages without the CPU.
    if page_offset is not None and page_offset % ALIGN_NBYTES == 0:
        alignment = PAGE_NBYTES
        target_offset = page_offset
    else:
        alignment = ALIGN_NBYTES
        target_offset = 0
    # Spaces after the JSON move the payload: to a multiple of 8, or to the page offset of the
    # source. e.g. page 4096, offset 64 in the page, header of 100: 100 + pad + 8 = 4160
    header += b" " * ((target_offset - LENGTH_NBYTES - len(header)) % alignment)
    if len(header) > MAX_HEADER_NBYTES:
        why = f"its header takes {len(header):,} bytes, the limit is {MAX_HEADER_NBYTES:,}"
        raise PrepError(
            f"{len(tensors):,} tensors are too many for one safetensors file",
            why,
            "write smaller files",
        )
    return len(header).to_bytes(LENGTH_NBYTES, "little") + header


def lay_out_files(files: Sequence[ShardContents]) -> tuple[SafetensorsLayout, ...]:
    """Return the layout of each file with the offsets of its tensors. Raises the errors of `encode_header`."""
    layouts: list[SafetensorsLayout] = []
    for number, (name, entries, page_offset) in enumerate(files):
        header = encode_header(entries, page_offset)
        offsets = list(accumulate((nbytes for *_, nbytes in entries), initial=len(header)))
        tensors: list[Array] = []
        for (tensor, dtype, shape, _), offset in zip(entries, offsets):
            tensors.append(whole_array(tensor, dtype, shape, (number, offset)))
        layouts.append(SafetensorsLayout(name, header, tuple(tensors), offsets[-1]))
    return tuple(layouts)


def split_into_shards(
    entries: Sequence[LayoutEntry],
    max_shard_nbytes: int,
    stem: str = "model",
    suffix: str = "safetensors",
) -> list[tuple[str, list[LayoutEntry]]]:
    """Split entries into files of at most `max_shard_nbytes` of payload. A larger tensor gets a separate file.

    Returns:
        File name and entries of each file, in order.
    """
    groups: list[list[LayoutEntry]] = [[]]
    group_nbytes = 0
    for entry in entries:
        nbytes = entry[3]
        if groups[-1] and group_nbytes + nbytes > max_shard_nbytes:
            groups.append([])
            group_nbytes = 0
        groups[-1].append(entry)
        group_nbytes += nbytes
    if len(groups) == 1:
        return [(f"{stem}.{suffix}", groups[0])]
    return [(shard_name(stem, i, len(groups), suffix), group) for i, group in enumerate(groups, 1)]


def encode_index(layouts: Sequence[SafetensorsLayout]) -> bytes:
    """Return the content of model.safetensors.index.json for these files."""
    weight_map: dict[str, str] = {}
    total_nbytes = 0
    for layout in layouts:
        for tensor in layout.tensors:
            weight_map[tensor.name] = layout.name
            total_nbytes += tensor.nbytes
    index = {
        "metadata": {"total_size": total_nbytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
