"""Read mutated data files with every reader, in child processes: an error, or data, never a signal or a hang.

    python -m tests.helpers.reader_fuzz NAME FOLDER FIRST END        # the child: reads the mutations of some seeds

An outcome is an error with a message, data equal to that of the original file, other data, an error of another type (a
bug), a signal, or a hang of more than 10 minutes. Only the files of gzip and zstd have checksums. Readers of the other
formats cannot tell other data from a mutation. The child is started again after a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import io
import json
import os
import random
import resource
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from prepcli.core.errors import PrepError
from prepcli.engine.blobs import DerivedArrays
from prepcli.formats.gguf import GgufArray, read_gguf_header
from prepcli.formats.safetensors import read_safetensors_header
from prepcli.formats.torch_dcp import METADATA_FILE, read_dcp_folder
from prepcli.sources.dequantized import find_stored_weights
from prepcli.sources.locate import locate
from prepcli.sources.open_folder import Access
from prepcli.sources.opening import open_source
from prepcli.sources.source import SourceTensor
from prepcli.stores.buffers import Blob
from trainer.data.dataset_layout import WHOLE, Selection, dataset_files, read_metadata, select_files
from trainer.data.files import hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import IdsChunk, ReadOptions, Record, TextChunk
from trainer.recipe.text_fields import FileType

# A checkpoint of two ranks.
DCP_FOLDER = Path(__file__).parents[1] / "golden" / "torch_dcp"
N_ROWS = 40
MIB = 1 << 20
HANG_S = 600.0
MAX_DOCUMENT_NBYTES = 16 * MIB
ERROR, EQUAL, OTHER, BUG, SIGNAL, HANG = "errors", "equal", "other data", "bugs", "signals", "hangs"
OUTCOMES = (ERROR, EQUAL, OTHER, BUG, SIGNAL, HANG)
INTERESTING = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    ord('"'),
    ord("["),
    ord("{"),
    ord("\n"),
    ord("\\"),
    ord("\r"),
)


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file to mutate.

    Attributes:
        name: Name of the file.
        make: Returns the content of a valid file.
        read: Returns a fingerprint of the data of a file.
    """

    name: str
    make: Callable[[], bytes]
    read: Callable[[Path], str]


def make_rows() -> list[dict[str, Any]]:
    """Return rows with texts, numbers, lists and structs."""
    return [
        {
            "id": str(number),
            "text": f"the cat {number} \u00e9 " * (number % 5 + 1),
            "ids": [number, number + 1],
            "messages": [{"role": "user", "content": f"hello {number}"}],
        }
        for number in range(N_ROWS)
    ]


def make_arrow(*, is_file: bool = False, compression: str | None = None) -> bytes:
    """Return an Arrow file of several record batches, with a dictionary."""
    import pyarrow as pa
    from pyarrow import ipc

    table = pa.Table.from_pylist(make_rows())
    table = table.append_column("name", table["id"].dictionary_encode())
    buffer = io.BytesIO()
    options = ipc.IpcWriteOptions(compression=compression)
    new_writer = ipc.new_file if is_file else ipc.new_stream
    with new_writer(buffer, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=15)
    return buffer.getvalue()


def make_parquet(compression: str) -> bytes:
    """Return a Parquet file of several row groups."""
    import pyarrow as pa
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(
        pa.Table.from_pylist(make_rows()), buffer, row_group_size=15, compression=compression
    )
    return buffer.getvalue()


def make_json() -> bytes:
    """Return JSON Lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in make_rows())


def make_csv(delimiter: str) -> bytes:
    """Return rows with quotes and line breaks in fields."""
    lines = [delimiter.join(("id", "text"))]
    lines += [f'{row["id"]}{delimiter}"{row["text"]}\n""quoted"""' for row in make_rows()]
    return "\n".join(lines).encode() + b"\n"


def make_text() -> bytes:
    """Return lines of text."""
    return "".join(f"{row['text']}\n" for row in make_rows()).encode()


def make_npy() -> bytes:
    """Return an array of ids."""
    buffer = io.BytesIO()
    np.save(buffer, np.arange(600, dtype=np.int32).reshape(30, 20))
    return buffer.getvalue()


def make_zstd(data: bytes) -> bytes:
    """Return two frames with checksums."""
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    return compressor.compress(data[:1000]) + compressor.compress(data[1000:])


def make_state() -> bytes:
    """Return the list of files of a saved dataset."""
    names = [f"data-{number:05d}-of-00020.arrow" for number in range(20)]
    return json.dumps(
        {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    ).encode()


def make_readme() -> bytes:
    """Return the README of a dataset on the hub."""
    config = "- config_name: c{0}\n  data_files:\n  - split: train\n    path: c{0}/*.jsonl\n"
    configs = "".join(config.format(number) for number in range(9))
    return f"---\nlicense: mit\nconfigs:\n{configs}---\n# A dataset\n".encode()


def make_gguf() -> bytes:
    """Return a GGUF file with metadata of several types and quantised tensors."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    words = [f"word{number}" for number in range(N_ROWS)]
    entries = [
        string("general.architecture") + struct.pack("<I", 8) + string("llama"),
        string("general.alignment") + struct.pack("<II", 4, 32),
        string("llama.rope.freq_base") + struct.pack("<If", 6, 10000.0),
        string("llama.attention.head_count") + struct.pack("<II", 4, 2),
        string("llama.attention.head_count_kv") + struct.pack("<II", 4, 2),
        string("test.flag") + struct.pack("<IB", 7, 1),
        string("tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, 8, len(words))
        + b"".join(map(string, words)),
        string("tokenizer.ggml.scores")
        + struct.pack(f"<IIQ{N_ROWS}f", 9, 6, N_ROWS, *map(float, range(N_ROWS))),
    ]
    # 2 rows of 256 values of type Q4_K, and 8 rows of 2 values of type F32.
    tables = [
        string("token_embd.weight") + struct.pack("<IQQIQ", 2, 256, 2, 12, 0),
        string("blk.0.attn_q.weight") + struct.pack("<IQQIQ", 2, 2, 8, 0, 288),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tables), len(entries))
    head += b"".join(entries) + b"".join(tables)
    return head + bytes(-len(head) % 32) + bytes(288 + 64)


def quantized_tensors() -> dict[str, tuple[str, list[int], int]]:
    """Return code, shape and bytes of the tensors of a weight in each quantised format."""
    return {
        "a.weight": ("F8_E4M3", [32, 32], 1024),
        "a.weight_scale_inv": ("F32", [2, 2], 16),
        "b.weight_packed": ("I32", [8, 4], 128),
        "b.weight_scale": ("BF16", [8, 2], 32),
        "b.weight_shape": ("I64", [2], 16),
        "b.weight_zero_point": ("I32", [1, 2], 8),
        "c.qweight": ("I32", [4, 32], 512),
        "c.qzeros": ("I32", [2, 4], 32),
        "c.scales": ("F16", [2, 32], 128),
        "c.g_idx": ("I32", [32], 128),
        "g.qweight": ("I32", [32, 4], 512),
        "g.qzeros": ("I32", [2, 4], 32),
        "g.scales": ("F16", [2, 32], 128),
        "d_blocks": ("U8", [4, 2, 16], 128),
        "d_scales": ("U8", [4, 2], 8),
        "e.weight": ("I8", [8, 8], 64),
        "e.SCB": ("F32", [8], 32),
        "f.weight": ("U8", [64, 1], 64),
        "f.weight.absmax": ("F32", [2], 8),
        "f.weight.quant_map": ("F32", [16], 64),
        "f.weight.quant_state.bitsandbytes__nf4": ("U8", [len(QUANT_STATE)], len(QUANT_STATE)),
    }


QUANT_STATE = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 16]}'
# By the first letter of the names of their tensors.
QUANTIZATION_CONFIGS = {
    "a": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "b": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}},
    },
    "c": {"quant_method": "gptq", "bits": 4, "group_size": 16},
    "d": {"quant_method": "mxfp4"},
    "e": {"quant_method": "bitsandbytes"},
    "f": {"quant_method": "bitsandbytes"},
    "g": {"quant_method": "awq", "bits": 4, "group_size": 16},
}


def make_quantized() -> bytes:
    """Return a safetensors file with the tensors of a weight in each quantised format, and with their configs."""
    header: dict[str, Any] = {"__metadata__": {"configs": json.dumps(QUANTIZATION_CONFIGS)}}
    data = b""
    for name, (code, shape, nbytes) in quantized_tensors().items():
        payload = bytes(nbytes)
        if name.endswith("nf4"):
            payload = QUANT_STATE
        elif name == "b.weight_shape":
            payload = struct.pack("<qq", 8, 32)
        header[name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [len(data), len(data) + nbytes],
        }
        data += payload
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read_quantized(path: Path) -> str:
    """Decode the first and the last row of each quantised weight, with each config of the file."""
    header = read_safetensors_header(path, 0)
    try:
        configs = json.loads(dict(header.metadata).get("configs", "{}"))
    except ValueError as error:
        raise PrepError("the configs are broken", str(error)) from error
    if not isinstance(configs, dict):
        raise PrepError("the configs are broken")
    decoded: list[str] = []
    errors: list[PrepError] = []
    for letter, settings in configs.items():
        if not isinstance(settings, dict):
            continue
        tensors: dict[str, SourceTensor] = {}
        for array in header.tensors:
            if array.name.startswith(letter):
                tensors[array.name] = SourceTensor(array.name, array.dtype, array.shape, (array,))
        try:
            weights, blobs = find_stored_weights(
                settings, tensors, (path,), path.name, display_name=path.name
            )
            blob = DerivedArrays(path.name, weights.decoders, blobs)
            decoded.append(decode_start(blob))
        except PrepError as error:
            errors.append(error)
    if not decoded and errors:
        raise errors[0]
    return str(decoded)


def read_gguf(path: Path) -> str:
    """Return metadata and tensors of a GGUF file, and the values of its weights."""
    header = read_gguf_header(path)
    for value in header.metadata.values():
        if isinstance(value, GgufArray):
            try_decode_array(value)
    decoded = ""
    with contextlib.suppress(PrepError):
        source = open_source(locate(str(path), access=Access(allow_gguf=True)))
        decoded = decode_start(source.blobs[-1])
    return f"{header.metadata} {header.tensors} {decoded}"


def decode_start(blob: Path | Blob) -> str:
    """Return a fingerprint of the first MiB of decoded weights."""
    assert isinstance(blob, DerivedArrays)
    values = np.empty(min(blob.offsets[-1], MIB), np.uint8)
    with contextlib.closing(blob.open()) as reader:
        reader.read_at(0, values)
    return xxhash.xxh3_128_hexdigest(values.tobytes())


def try_decode_array(array: GgufArray) -> None:
    """Decode the items of an array. Items that are not UTF-8 are no error of the header."""
    with contextlib.suppress(ValueError):
        array.strings()
    with contextlib.suppress(ValueError):
        array.numbers()


def read_dcp(path: Path) -> str:
    """Return the boxes of a torch distributed checkpoint with this metadata."""
    for file in DCP_FOLDER.glob("*.distcp"):
        shutil.copyfile(file, path.parent / file.name)
    return str(read_dcp_folder(path.parent).tensors)


def read_records(path: Path, file_type: FileType) -> str:
    """Read a file to its end, with all values, and return a fingerprint of them.

    Raises:
        PrepError: The file, or at least one of its rows, is invalid.
    """
    state = xxhash.xxh3_128()
    errors: list[PrepError] = []
    options = ReadOptions(errors.append, max_document_nbytes=MAX_DOCUMENT_NBYTES)
    for piece in READERS[file_type].read(hash_file(path), options):
        try:
            state.update(_piece_bytes(piece))
        except PrepError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return state.hexdigest()


def _piece_bytes(piece: Record | TextChunk | IdsChunk) -> bytes:
    if isinstance(piece, Record):
        return repr({key: piece.values[key] for key in piece.values}).encode(errors="surrogatepass")
    if isinstance(piece, TextChunk):
        return piece.text.encode()
    return piece.ids.tobytes() + bytes([piece.ends_document])


def read_dataset_list(path: Path) -> str:
    """Return the files of a saved dataset."""
    return str([file.name for file in dataset_files(path.parent, WHOLE) or ()])


def read_readme(path: Path) -> str:
    """Return the files of a configuration of a dataset on the hub."""
    names = [f"c{number}/{part}.jsonl" for number in range(9) for part in range(3)]
    files = select_files(
        "o/n", names, read_metadata(path), Selection("c3", "train"), accepts=lambda name: True
    )
    return str(files)


def records_of(file_type: FileType) -> Callable[[Path], str]:
    """Return a function that reads the records of files of a type."""
    return lambda path: read_records(path, file_type)


FORMATS: Mapping[str, Format] = {
    "arrow-file": Format("a.arrow", lambda: make_arrow(is_file=True), records_of("arrow")),
    "arrow-stream": Format("a.arrow", make_arrow, records_of("arrow")),
    "arrow-zstd": Format("a.arrow", lambda: make_arrow(compression="zstd"), records_of("arrow")),
    "parquet": Format("a.parquet", lambda: make_parquet("none"), records_of("parquet")),
    "parquet-snappy": Format("a.parquet", lambda: make_parquet("snappy"), records_of("parquet")),
    "parquet-zstd": Format("a.parquet", lambda: make_parquet("zstd"), records_of("parquet")),
    "jsonl": Format("a.jsonl", make_json, records_of("json")),
    "jsonl.gz": Format(
        "a.jsonl.gz", lambda: gzip.compress(make_json(), mtime=0), records_of("json")
    ),
    "jsonl.zst": Format("a.jsonl.zst", lambda: make_zstd(make_json()), records_of("json")),
    "csv": Format("a.csv", lambda: make_csv(","), records_of("csv")),
    "tsv": Format("a.tsv", lambda: make_csv("\t"), records_of("csv")),
    "csv.gz": Format("a.csv.gz", lambda: gzip.compress(make_csv(","), mtime=0), records_of("csv")),
    "txt": Format("a.txt", make_text, records_of("text")),
    "txt.zst": Format("a.txt.zst", lambda: make_zstd(make_text()), records_of("text")),
    "npy": Format("a.npy", make_npy, records_of("ids")),
    "bin": Format("a.bin", lambda: np.arange(600, dtype="<u2").tobytes(), records_of("ids")),
    "state.json": Format("state.json", make_state, read_dataset_list),
    "gguf": Format("a.gguf", make_gguf, read_gguf),
    "dcp": Format(METADATA_FILE, (DCP_FOLDER / METADATA_FILE).read_bytes, read_dcp),
    "quantized": Format("model.safetensors", make_quantized, read_quantized),
    "README.md": Format("README.md", make_readme, read_readme),
}


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return a copy of the bytes with 1 to 8 changes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        start = rng.randrange(len(changed) or 1)
        rng.choice(MUTATIONS)(changed, start, rng)
    return bytes(changed)


def _flip(data: bytearray, start: int, rng: random.Random) -> None:
    if data:
        data[start] ^= 1 << rng.randrange(8)


def _replace(data: bytearray, start: int, rng: random.Random) -> None:
    data[start : start + 1] = bytes([rng.choice(INTERESTING)])


def _write_number(data: bytearray, start: int, rng: random.Random) -> None:
    width = rng.choice((2, 4, 8))
    largest = (1 << 8 * width) - 1
    number = rng.choice(
        (0, 1, rng.randint(0, largest), largest, largest >> 1, largest >> 2, len(data) & largest)
    )
    data[start : start + width] = number.to_bytes(width, rng.choice(("little", "big")))


def _delete(data: bytearray, start: int, rng: random.Random) -> None:
    del data[start : start + rng.choice((1, 4, 16, 1 << 20))]


def _insert(data: bytearray, start: int, rng: random.Random) -> None:
    data[start:start] = rng.choice(
        (rng.randbytes(4), bytes([rng.choice(INTERESTING)]) * rng.choice((1, 64, 5000)))
    )


def _copy(data: bytearray, start: int, rng: random.Random) -> None:
    source = rng.randrange(len(data) or 1)
    data[start:start] = data[source : source + rng.randrange(64)]


MUTATIONS = (_flip, _flip, _replace, _write_number, _delete, _insert, _copy)


def read_mutations(name: str, folder: Path, seeds: Sequence[int]) -> Iterator[str]:
    """Yield the outcome of each mutation of a file."""
    kind = FORMATS[name]
    original, path = kind.make(), folder / kind.name
    path.write_bytes(original)
    expected = kind.read(path)
    for seed in seeds:
        path.write_bytes(mutate(original, random.Random(f"{name} {seed}")))
        try:
            yield EQUAL if kind.read(path) == expected else OTHER
        except PrepError:
            yield ERROR
        except Exception as error:  # the bugs that this program looks for
            print(f"{name} {seed}: {error!r:.200}", file=sys.stderr)
            yield BUG


def run_child(name: str, folder: Path, first: int, end: int) -> None:
    """Print the outcome of each mutation, then the peak memory."""
    for outcome in read_mutations(name, folder, range(first, end)):
        print(outcome, flush=True)
    from prepcli.core import sandbox

    gc.collect()
    sandbox.stop_idle()
    peak = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(f"peak {peak * 1024}", flush=True)


@dataclass(slots=True)
class Result:
    """Outcomes of the mutations of a format.

    Attributes:
        counts: Number of mutations by outcome.
        peak_nbytes: Peak resident memory of the processes.
        faults: Seeds of the mutations that ended a process.
    """

    counts: Counter[str] = field(default_factory=Counter)
    peak_nbytes: int = 0
    faults: list[str] = field(default_factory=list)


def fuzz_format(name: str, mutations: int, *, seed: int = 0) -> Result:
    """Read mutations of a format in child processes.

    Args:
        name: The format.
        mutations: Number of mutations.
        seed: The first seed.
    """
    result = Result()
    done = 0
    while done < mutations:
        with tempfile.TemporaryDirectory(prefix="prep-fuzz-") as folder:
            command = [sys.executable, "-m", "tests.helpers.reader_fuzz", name, folder]
            command += [str(seed + done), str(seed + mutations)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE)
            done += collect(child, result, name, seed + done)
    return result


def collect(child: subprocess.Popen[bytes], result: Result, name: str, first: int) -> int:
    """Count the outcomes of a child, and return the number of mutations that it has read."""
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    selector = selectors.DefaultSelector()
    selector.register(child.stdout, selectors.EVENT_READ)
    text, is_hanging = b"", False
    while not is_hanging:
        if not selector.select(HANG_S):
            is_hanging = True
            break
        block = child.stdout.read()
        if not block:
            break
        text += block
    if is_hanging:
        child.kill()
    _, status, usage = os.wait4(child.pid, 0)
    lines = text.decode().splitlines()
    outcomes = [line for line in lines if line in OUTCOMES]
    peaks = [int(line.removeprefix("peak ")) for line in lines if line.startswith("peak ")]
    result.peak_nbytes = max(result.peak_nbytes, usage.ru_maxrss * 1024, *peaks)
    result.counts.update(outcomes)
    if peaks:
        return len(outcomes)
    if not os.WIFSIGNALED(status):
        raise SystemExit(
            f"the process that reads {name} ended with exit code {os.waitstatus_to_exitcode(status)}"
        )
    fault = HANG if is_hanging else SIGNAL
    result.counts[fault] += 1
    result.faults.append(
        f"{name} {first + len(outcomes)}: {fault} {signal.Signals(os.WTERMSIG(status)).name}"
    )
    return len(outcomes) + 1


def main() -> None:
    """Read the mutations of some seeds as a child process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=FORMATS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    arguments = parser.parse_args()
    run_child(arguments.name, arguments.folder, arguments.first, arguments.end)


if __name__ == "__main__":
    main()
