"""Measure the memory of tokenizing generated files of two sizes and several types.

    python -m bench.data_memory --work FOLDER [--sizes 100,1000] [--types txt,jsonl.gz,parquet]

A file of N MB has N million characters, in documents of about 1,500. The tokenizer has one token per word, so that the
reader is a large part of the work. A row has the peak of anonymous memory of the process that tokenizes the file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.evidence import log
from bench.meter import measure
from prepcli.core.tables import format_table
from trainer.data.examples import ExampleSettings
from trainer.data.tokenize import tokenize_files
from trainer.data.tokenize_config import TokenizeConfig

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ate")
DOCUMENT_WORDS = 400
TABLE_ROWS = 20_000  # rows of a row group of Parquet
MIB = 1 << 20
TOKENIZER = "tokenizer.json"


def generate_documents(nbytes: int) -> Iterator[str]:
    """Yield random documents with this number of characters in all."""
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(WORDS, DOCUMENT_WORDS)) for _ in range(500)]
    size = 0
    while size < nbytes:
        for document in documents:
            size += len(document)
            yield document


def write_data(path: Path, suffix: str, nbytes: int) -> None:
    """Write documents in a file of the type that a suffix tells."""
    documents = generate_documents(nbytes)
    if suffix == "parquet":
        write_parquet(path, documents)
    elif suffix == "txt":
        with path.open("w") as file:
            file.writelines(f"{document}\n" for document in documents)
    else:
        with gzip.open(path, "wt", compresslevel=1) as file:
            file.writelines(json.dumps({"text": document}) + "\n" for document in documents)


def write_parquet(path: Path, documents: Iterator[str]) -> None:
    """Write documents as the column `text`."""
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetWriter(
        path, pa.schema([("text", pa.string())]), use_dictionary=False
    ) as writer:
        rows: list[str] = []
        for document in documents:
            rows.append(document)
            if len(rows) == TABLE_ROWS:
                writer.write_table(pa.table({"text": rows}))
                rows = []
        writer.write_table(pa.table({"text": rows}))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per word."""
    vocab = {word: number for number, word in enumerate(("[unknown]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[unknown]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / TOKENIZER))


def tokenize(path: Path) -> None:
    """Tokenize a file."""
    config = TokenizeConfig(
        type="auto",
        paths=(str(path),),
        examples=ExampleSettings(fields="text"),
        seq_length=1024,
        tokenizer=path.parent / TOKENIZER,
        vocab=len(WORDS) + 1,
        cache=path.parent / "cache",
    )
    print(tokenize_files(config, progress=lambda *counts: None, note=log).n_tokens)


def measure_file(folder: Path, suffix: str, megabytes: int) -> Sequence[str]:
    """Return the row of a file."""
    folder.mkdir(parents=True)
    try:
        write_tokenizer(folder)
        path = folder / f"data.{suffix}"
        write_data(path, suffix, megabytes * 1_000_000)
        cost = measure(
            [sys.executable, "-m", "bench.data_memory", "--tokenize", path], period_s=0.1
        )
        if cost.exit_code:
            raise SystemExit(cost.stderr)
        sizes = (f"{megabytes:,}", f"{path.stat().st_size / 1e6:,.0f}", f"{int(cost.stdout):,}")
        return (suffix, *sizes, f"{cost.wall_s:.0f}", f"{cost.peak_nbytes / MIB:.0f}")
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("bench-data"))
    parser.add_argument("--sizes", default="100,1000")
    parser.add_argument("--types", default="txt,jsonl.gz,parquet")
    parser.add_argument("--tokenize", type=Path)
    options = parser.parse_args()
    if options.tokenize:
        tokenize(options.tokenize)
        return
    header = ("type", "MB of text", "MB of file", "tokens", "seconds", "peak MiB")
    cases = [
        (suffix, int(size))
        for suffix in options.types.split(",")
        for size in options.sizes.split(",")
    ]
    rows = [measure_file(options.work / f"{suffix}-{size}", suffix, size) for suffix, size in cases]
    print(format_table(rows, header, right_aligned=header[1:]))


if __name__ == "__main__":
    main()
