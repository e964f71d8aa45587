"""The same records in files of every type that the trainer reads."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import zstandard

Rows = Sequence[Mapping[str, str]]


def write_json_files(folder: Path, rows: Rows) -> list[Path]:
    """Write JSON Lines, plain and compressed: with two members of gzip, and two frames of zstd. Write lists, too."""
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    first, second = b"".join(lines[: len(lines) // 2]), b"".join(lines[len(lines) // 2 :])
    contents = {
        "plain.jsonl": first + second,
        "two.jsonl.gz": gzip.compress(first) + gzip.compress(second),
        "two.jsonl.zst": zstandard.compress(first) + zstandard.compress(second),
        "list.json": json.dumps(rows, indent=2).encode(),
        "list.json.gz": gzip.compress(json.dumps(rows).encode()),
        "other.json": first + second,
    }
    return [_write(folder / name, data) for name, data in contents.items()]


def write_csv_files(folder: Path, rows: Rows) -> list[Path]:
    """Write a CSV, a TSV and a compressed CSV file."""
    paths = [folder / "a.csv", folder / "a.tsv"]
    for path in paths:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, [*rows[0]], delimiter="\t" if path.suffix == ".tsv" else ","
            )
            writer.writeheader()
            writer.writerows(rows)
    return [*paths, _write(folder / "b.csv.gz", gzip.compress(paths[0].read_bytes()))]


def write_arrow_files(folder: Path, rows: Rows) -> list[Path]:
    """Write Parquet files with several row groups, and Arrow IPC files of both formats."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    table = pa.Table.from_pylist([dict(row) for row in rows])
    paths = [folder / name for name in ("a.parquet", "file.arrow", "stream.arrow")]
    parquet.write_table(table, paths[0], row_group_size=7)
    with ipc.new_file(str(paths[1]), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    with ipc.new_stream(str(paths[2]), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return paths


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
