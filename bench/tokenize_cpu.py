"""Fraction of the CPU time of tokenizing that is spent in the `tokenizers` library.

    python -m bench.tokenize_cpu --work FOLDER [--megabytes 20] [--kinds web,short,prompts,text]

The corpus of `bench.tokenize` is written as documents of several kinds. Each kind is tokenized by a process of its own,
with encoding in one thread. The library's time has the encoding and the conversion of its ids to Python's integers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.meter import measure
from bench.tokenize import CORPUS, STORES, TOKENIZER, VOCAB, cpu_seconds, write_corpus
from prepcli.core.json_values import JsonObject
from prepcli.core.tables import format_table
from trainer.data.codecs import FastCodec
from trainer.data.example_settings import ExampleSettings
from trainer.data.tokenize import tokenize_files
from trainer.data.tokenize_config import TokenizeConfig


def web_records(texts: Iterator[str]) -> Iterator[JsonObject]:
    """Yield a record per document of about 2,500 bytes."""
    for text in texts:
        yield {"text": text}


def short_records(texts: Iterator[str]) -> Iterator[JsonObject]:
    """Yield a record per two sentences, of about 170 bytes."""
    for text in texts:
        sentences = text.split(". ")
        for first, second in zip(sentences[::2], sentences[1::2]):
            yield {"text": f"{first}. {second}."}


def prompt_records(texts: Iterator[str]) -> Iterator[JsonObject]:
    """Yield a record per two sentences. The first one is a prompt without loss."""
    for text in texts:
        sentences = text.split(". ")
        for first, second in zip(sentences[::2], sentences[1::2]):
            yield {"question": first, "text": second}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of documents.

    Attributes:
        file: Name of the data file.
        fields: The recipe's `data.fields`.
        records: Returns the records of texts. None writes the texts of a text file.
    """

    file: str
    fields: str
    records: Callable[[Iterator[str]], Iterator[JsonObject]] | None


KINDS = {
    "web": Kind("web.jsonl", "text", web_records),
    "short": Kind("short.jsonl", "text", short_records),
    "prompts": Kind("prompts.jsonl", "[question], text", prompt_records),
    "text": Kind("text.txt", "", None),
}


def main() -> None:
    """Write and measure each kind of documents, or tokenize one in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        print(json.dumps(measure_kind(args.work, KINDS[args.run])))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    write_corpus(args.work, args.megabytes * 1_000_000)
    rows = [run_kind(args.work, name) for name in args.kinds.split(",")]
    header = ("documents", "MB", "number", "CPU s", "MB per CPU s", "library %")
    print(format_table(rows, header, right_aligned=header[1:]))


def run_kind(folder: Path, name: str) -> Sequence[str]:
    """Write a kind of documents, tokenize it in another process, and return its row."""
    kind = KINDS[name]
    write_kind(folder, kind)
    command = [sys.executable, "-m", "bench.tokenize_cpu", "--work", str(folder), "--run", name]
    run = measure(command, period_s=1.0)
    if run.exit_code:
        raise SystemExit(run.stderr)
    cost = json.loads(run.stdout)
    megabytes = (folder / kind.file).stat().st_size / 1e6
    cpu_s = cost["cpu_s"]
    return (
        name,
        f"{megabytes:.0f}",
        f"{cost['n_documents']:,}",
        f"{cpu_s:.1f}",
        f"{megabytes / cpu_s:.2f}",
        f"{100 * cost['library_s'] / cpu_s:.1f}",
    )


def write_kind(folder: Path, kind: Kind) -> None:
    """Write the data file of a kind of documents."""
    with (folder / CORPUS).open() as corpus, (folder / kind.file).open("w") as file:
        texts = (json.loads(line)["text"] for line in corpus)
        if kind.records is None:
            file.writelines(f"{text}\n" for text in texts)
        else:
            file.writelines(json.dumps(record) + "\n" for record in kind.records(texts))


def measure_kind(folder: Path, kind: Kind) -> dict[str, float]:
    """Tokenize a kind of documents in this process, and return its costs."""
    # With one thread, the calls of the library compute in the thread that is timed.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    library_s: list[float] = []
    time_library(library_s)
    shutil.rmtree(folder / STORES, ignore_errors=True)
    config = TokenizeConfig(
        type="auto",
        paths=(str(folder / kind.file),),
        examples=ExampleSettings(fields=kind.fields),
        seq_length=1024,
        tokenizer=folder / TOKENIZER,
        vocab=VOCAB,
        cache=folder / STORES,
    )
    started_s = cpu_seconds()
    tokens = tokenize_files(config, progress=lambda *counts: None, note=lambda text: None)
    cpu_s = cpu_seconds() - started_s
    return {"n_documents": tokens.n_documents, "cpu_s": cpu_s, "library_s": sum(library_s)}


def time_library(seconds: list[float]) -> None:
    """Append the CPU time of each call of the library to a list."""
    encode_batch = FastCodec.encode_batch

    def timed_encode_batch(self: FastCodec, texts: list[str]) -> list[list[int]]:
        started_s = time.thread_time()
        encoded = encode_batch(self, texts)
        seconds.append(time.thread_time() - started_s)
        return encoded

    FastCodec.encode_batch = timed_encode_batch


if __name__ == "__main__":
    main()
