"""Rate of `prep tokenize` with several processes, and the bytes of its store.

    python -m bench.tokenize_processes --work FOLDER [--megabytes 2000] [--processes 1,2,4] [--threads 1]

The corpus of `bench.tokenize` is divided into 16 files. The processes of a round start together, each with `--threads`
encoding threads. The time is from the first start to the complete store, imports included. Every store must have the
digests of the first one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench.tokenize import CORPUS, STORES, TOKENIZER, VOCAB, write_corpus
from prepcli.console.ui import format_table
from trainer.data.example_settings import ExampleSettings
from trainer.data.store import StoreMeta, read_meta
from trainer.data.token_shards import tokenize_share
from trainer.data.tokenize import TokenizeConfig

N_FILES = 16
FILES = "files"


def main() -> None:
    """Measure each number of processes, or do the share of one process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--share", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        of, process = map(int, args.share.split("/"))
        make_share(args.work, process, of)
        return
    write_files(args.work, args.megabytes * 1_000_000)
    counts = [int(count) for count in args.processes.split(",")]
    print(measure_processes(args.work, counts, args.threads))


def write_files(folder: Path, nbytes: int) -> None:
    """Write the corpus as files of consecutive lines."""
    shutil.rmtree(folder / FILES, ignore_errors=True)
    (folder / FILES).mkdir(parents=True)
    write_corpus(folder, nbytes)
    with (folder / CORPUS).open() as corpus:
        for index in range(N_FILES):
            with (folder / FILES / f"{index:02d}.jsonl").open("w") as file:
                while file.tell() < nbytes / N_FILES and (line := corpus.readline()):
                    file.write(line)
    (folder / CORPUS).unlink()


def make_share(folder: Path, process: int, of: int) -> StoreMeta | None:
    """Do the share of a process, and return the metadata of a complete store."""
    config = TokenizeConfig(
        type="json",
        paths=(str(folder / FILES),),
        examples=ExampleSettings(fields="text"),
        seq_length=1024,
        tokenizer=folder / TOKENIZER,
        vocab=VOCAB,
        cache=folder / STORES,
    )
    return tokenize_share(
        config, process, of, progress=lambda *counts: None, note=lambda text: None
    ).meta


def measure_processes(folder: Path, counts: list[int], threads: int) -> str:
    """Return a table of rates. Raise SystemExit if a store differs from the first one."""
    megabytes = sum(path.stat().st_size for path in (folder / FILES).iterdir()) / 1e6
    rates: list[float] = []
    metas: list[StoreMeta] = []
    for of in counts:
        shutil.rmtree(folder / STORES, ignore_errors=True)
        seconds = run_processes(folder, of, threads)
        rates.append(megabytes / seconds)
        metas.append(read_store_meta(folder))
    if any(meta != metas[0] for meta in metas):
        raise SystemExit("the stores differ")
    rows = [(of, f"{rate:.2f}", f"{rate / rates[0]:.2f}") for of, rate in zip(counts, rates)]
    header = ("processes", "MB/s", f"ratio to {counts[0]}")
    return format_table(rows, header, right_aligned=header)


def run_processes(folder: Path, of: int, threads: int) -> float:
    """Run the processes of a round, and return its seconds."""
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "bench.tokenize_processes", "--work", str(folder), "--share"]
    started_s = time.perf_counter()
    running = [
        subprocess.Popen([*command, f"{of}/{process}"], env=environment) for process in range(of)
    ]
    exit_codes = [child.wait() for child in running]
    if any(exit_codes):
        raise SystemExit("a process failed")
    return time.perf_counter() - started_s


def read_store_meta(folder: Path) -> StoreMeta:
    """Return the metadata of the only store, with checked digests."""
    (store,) = [path for path in (folder / STORES).iterdir() if path.is_dir()]
    return read_meta(store)


if __name__ == "__main__":
    main()
