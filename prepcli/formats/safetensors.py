"""safetensors, read: what a file's header and a folder's index say of their tensors.

Only headers pass through here; payload bytes are the engine's. Headers and indexes come from strangers, so all that
the safetensors library refuses is refused, and more: names that occur twice, fields that nobody defined.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from prepcli.errors import PrepError
from prepcli.formats.shard_index import (
    check_index_matches_files,
    check_numbered_files,
    download_again_hint,
    list_indexed_files,
    map_tensors_to_files,
    read_weight_map,
)
from prepcli.formats.untrusted import list_folder, parse_json, quote_name, stat_file, unreadable_error
from prepcli.planning.tensors import FileTensor, array_bits

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
SUFFIX = "safetensors"
METADATA_KEY = "__metadata__"
LENGTH_NBYTES = 8  # the little-endian length that a file begins with
MAX_HEADER_NBYTES = 100_000_000  # the safetensors library's limit
MAX_ENTRY_NBYTES = 4 << 20  # of one tensor's entry, and of all metadata
MAX_DIMS = 64  # NumPy's limit

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn", "F4": "float4_e2m1fn",
}  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

_FIELDS = {"dtype", "shape", "data_offsets"}
_SPACE = r"[ \t\r\n]*+"
_STRING = r'"(?>[^"\\]++|\\.)*+"'
_FLAT = rf'\{{(?>[^"{{}}]++|{_STRING})*+\}}'  # an object with no object inside
_OPENING = re.compile(rf"{_SPACE}\{{".encode())
_EMPTY = re.compile(rf"{_SPACE}\{{{_SPACE}\}}{_SPACE}".encode())
_BLANK = re.compile(_SPACE.encode())
_ENTRY = re.compile(rf"{_SPACE}({_STRING}{_SPACE}:{_SPACE}{_FLAT}){_SPACE}([,}}])".encode(), re.DOTALL)
_NUMBER = rb"(?:0|[1-9][0-9]{0,17})"
_USUAL = re.compile(  # an entry as libraries write it: no escapes in its name, its fields in this order
    rb'[ \t\r\n]*+"([^"\\\x00-\x1f]++)"[ ]*+:[ ]*+\{[ ]*+"dtype"[ ]*+:[ ]*+"([A-Z0-9_]++)"[ ]*+,'
    rb'[ ]*+"shape"[ ]*+:[ ]*+\[((?:%b(?:,[ ]*+%b)*+)?+)\][ ]*+,'
    rb'[ ]*+"data_offsets"[ ]*+:[ ]*+\[(%b),[ ]*+(%b)\][ ]*+\}[ \t\r\n]*+([,}])' % ((_NUMBER,) * 4)
)
_FOREIGN = (  # how it begins, what it is, why it is not ours, a hint (none: download it again)
    (b"version https://git-lfs", "a Git LFS pointer", "it only names the file that should be here", "`git lfs pull`"),
    ((b"<!", b"<h", b"<H", b"<?"), "a web page", "an error page was saved under this name", ""),
    (b"PK\x03\x04", "a zip archive", "PyTorch writes its checkpoints so", "if it is one, name it *.bin"),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04"), "a pickle", "PyTorch wrote so once", "if it is one, name it *.bin"),
    (b"GGUF", "a GGUF file", "its weights are quantised", "take the safetensors files that it was made from"),
    (b"\x89HDF", "an HDF5 file", "Keras writes its weights so", "take the model's safetensors files"),
    (b"{", "bare JSON", "the length of a header must come first", ""),
)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A safetensors file without its payload; tensors in layout order, offsets from the first byte of the file."""

    file_name: str
    size: int  # bytes of the whole file
    data_start: int
    tensors: tuple[FileTensor, ...]
    metadata: tuple[tuple[str, str], ...]
    digest: str  # XXH3-128 of the first data_start bytes, in hexadecimal
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """The safetensors files of one model; tensors in (file, offset) order, `file` being an index into `headers`."""

    path: Path
    headers: tuple[SafetensorsHeader, ...]
    tensors: tuple[FileTensor, ...]
    has_index: bool


def read_safetensors_header(path: Path, file_number: int) -> SafetensorsHeader:
    """The header of a safetensors file, its tensors marked as being in file number `file`.

    Raises PrepError, and nothing else, whatever is under that name.
    """
    found, raw = _read_raw(path)
    try:
        metadata, tensors = _described(raw, file_number)
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
        end = _end_of(tensors, len(raw))
    except ValueError as error:
        raise PrepError(f"{path.name} has a broken header", str(error), download_again_hint(path)) from error
    if end != found.st_size:
        raise _wrong_size(path, end, found.st_size)
    digest = xxhash.xxh3_128_hexdigest(raw)
    return SafetensorsHeader(path.name, end, len(raw), tuple(tensors), metadata, digest, found.st_mtime_ns)


def has_safetensors(folder: Path) -> bool:
    """Whether `read_folder` would find something to read there, be it broken or an adapter."""
    return folder.is_dir() and (INDEX_FILE in list_folder(folder) or bool(_unindexed(folder)))


def read_safetensors_folder(folder: Path) -> SafetensorsFolder:
    """The headers of a model's files: those that the index names, else model.safetensors, else all *.safetensors.

    Files are in the order of their names; links are followed.
    Raises PrepError for a folder that cannot be read, lacks a file or contradicts itself.
    """
    indexed = INDEX_FILE in list_folder(folder)
    if indexed:
        weight_map = read_weight_map(folder / INDEX_FILE, SUFFIX)
        names = list_indexed_files(folder, weight_map)
    else:
        weight_map, names = None, _unindexed(folder)
        _check_model(folder, names)
    headers = tuple(read_safetensors_header(folder / name, file) for file, name in enumerate(names))
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    holders = map_tensors_to_files(folder, ((tensor.name, names[tensor.file]) for tensor in tensors))
    if weight_map is not None:
        check_index_matches_files(folder, weight_map, holders)
    return SafetensorsFolder(folder, headers, tensors, indexed)


# One file


def _read_raw(path: Path) -> tuple[os.stat_result, bytes]:
    """The file's stat, and its bytes up to the payload: the length and the header's text."""
    found = stat_file(path)
    try:
        with path.open("rb") as stream:
            start = stream.read(64)
            nbytes = int.from_bytes(start[:LENGTH_NBYTES], "little")
            if len(start) < LENGTH_NBYTES or not 0 < nbytes <= MAX_HEADER_NBYTES:
                raise _foreign(path, start, nbytes)
            stream.seek(0)
            raw = stream.read(min(LENGTH_NBYTES + nbytes, found.st_size))
    except OSError as error:
        raise unreadable_error(path, error) from error
    if len(raw) < LENGTH_NBYTES + nbytes:
        raise _wrong_size(path, LENGTH_NBYTES + nbytes, len(raw))
    return found, raw


def _foreign(path: Path, start: bytes, nbytes: int) -> PrepError:
    """The error for a file whose first 8 bytes cannot be the length of a header."""
    for magic, kind, meaning, hint in _FOREIGN:
        if start.lstrip().startswith(magic):
            return PrepError(
                f"{path.name} is {kind}, not a safetensors file", meaning, hint or download_again_hint(path)
            )
    if len(start) < LENGTH_NBYTES:
        why = f"it has {len(start)} bytes, the length of its header alone takes {LENGTH_NBYTES}"
        return PrepError(f"{path.name} is cut short", why, download_again_hint(path))
    why = f"it promises a header of {nbytes:,} bytes, allowed are 1 to {MAX_HEADER_NBYTES:,}"
    return PrepError(f"{path.name} is not a safetensors file", why, download_again_hint(path))


def _described(raw: bytes, file: int) -> tuple[tuple[tuple[str, str], ...], list[FileTensor]]:
    """Metadata and tensors as the header lists them. This and what it calls raise ValueError with the reason."""
    metadata: tuple[tuple[str, str], ...] = ()
    tensors: list[FileTensor] = []
    names: set[str] = set()
    for name, entry in _entries(raw):
        if name in names:
            raise ValueError(f"it names {quote_name(name)} twice")
        names.add(name)
        if name == METADATA_KEY:
            metadata = _texts(entry)
        else:
            tensors.append(_tensor(name, entry, file, len(raw)))
    return metadata, tensors


def _entries(raw: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and content of each entry, parsed one by one: hostile text never becomes many objects at once."""
    if _EMPTY.fullmatch(raw, LENGTH_NBYTES):
        return
    opening = _OPENING.match(raw, LENGTH_NBYTES)
    if opening is None:
        raise ValueError("it is not a JSON object")
    at, after = opening.end(), b","
    while after == b",":
        usual = _USUAL.match(raw, at)
        if usual is not None and usual.end() - at <= MAX_ENTRY_NBYTES:
            at, after = usual.end(), usual[6]
            yield _usual_entry(usual)
            continue
        entry = _ENTRY.match(raw, at)
        if entry is None or entry.end(1) - entry.start(1) > MAX_ENTRY_NBYTES:
            raise ValueError(f"the text at byte {at:,} is not the entry of a tensor, or has over 4 MiB")
        yield from parse_json(b"{" + entry[1] + b"}").items()
        at, after = entry.end(), entry[2]
    if not _BLANK.fullmatch(raw, at):
        raise ValueError(f"it goes on after its end at byte {at:,}")


def _usual_entry(found: re.Match[bytes]) -> tuple[str, dict[str, Any]]:
    """Name and content of an entry without a JSON parser, which takes three times as long."""
    name, code, shape, low, high, _ = found.groups()
    try:
        text = name.decode()
    except UnicodeError as error:
        raise ValueError("its text is not UTF-8") from error
    counts = [*map(int, shape.split(b","))] if shape else []
    return text, {"dtype": code.decode(), "shape": counts, "data_offsets": [int(low), int(high)]}


def _texts(entry: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    if not all(isinstance(value, str) for value in entry.values()):
        raise ValueError(f"its {METADATA_KEY} must hold only text")
    "".join(entry.values()).encode()  # half of a surrogate pair passes Python's JSON, and no other
    return tuple(entry.items())


def _tensor(name: str, entry: dict[str, Any], file: int, data_start: int) -> FileTensor:
    if entry.keys() != _FIELDS:
        raise ValueError(f"{quote_name(name)} must have dtype, shape and data_offsets, nothing else")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"the dtype of {quote_name(name)} is not one of {', '.join(DTYPES)}")
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise ValueError(f"shape or data_offsets of {quote_name(name)} are not whole numbers from 0 to 2^63 - 1")
    sides = [dim or 1 for dim in shape] if 0 in shape else shape  # libraries refuse it beside a 0 as well
    if array_bits(DTYPES[code], tuple(sides)) >= 1 << 63:
        raise ValueError(f"{quote_name(name)} has a shape of 2^63 bits or more")
    low, high = offsets
    bits = array_bits(DTYPES[code], tuple(shape))
    if bits != 8 * (high - low):
        raise ValueError(
            f"{quote_name(name)} {code} {shape} takes {bits:,} bits, its data_offsets {8 * (high - low):,}"
        )
    return FileTensor(name, DTYPES[code], tuple(shape), file, data_start + low, high - low)


def _are_counts(values: object) -> bool:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        return False
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)  # True is an int, but no count


def _end_of(tensors: Sequence[FileTensor], data_start: int) -> int:
    """Where tensors in layout order end, each beginning where the last one ended."""
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            kind = "hole" if tensor.offset > end else "overlap"
            raise ValueError(f"{kind}: {quote_name(tensor.name)} begins at byte {tensor.offset:,}, not {end:,}")
        end += tensor.nbytes
    return end


# A folder


def _unindexed(folder: Path) -> list[str]:
    """The names that count where there is no index."""
    names = [name for name in list_folder(folder) if name.endswith(f".{SUFFIX}") and not name.startswith(".")]
    return [SINGLE_FILE] if SINGLE_FILE in names else names


def _check_model(folder: Path, names: Sequence[str]) -> None:
    """All that can be known without an index: it is a model, and no file is missing of those that are numbered."""
    if not names:
        raise PrepError(f"{folder} holds no safetensors files")
    if ADAPTER_FILE in names:
        why = f"{ADAPTER_FILE} holds only what is added to a base model"
        raise PrepError(f"{folder} is an adapter, not a model", why, "merge it first: PEFT's `merge_and_unload()`")
    check_numbered_files(folder, names)


def _wrong_size(path: Path, promised: int, size: int) -> PrepError:
    what = f"{path.name} is cut short" if size < promised else f"{path.name} is too long"
    return PrepError(what, f"its header promises {promised:,} bytes, the file has {size:,}", download_again_hint(path))
