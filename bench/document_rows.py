"""Time, memory and disk of arranging documents in rows, at the first start of a run and at later ones.

    python -m bench.document_rows --work FOLDER [--documents 8000000] [--seq-length 2048] [--packing documents]
    python -m bench.document_rows --work FOLDER --kinds chat --documents 1000000000

Token stores are synthetic: the ends of documents are real, the ids are holes of a sparse file. Each start is measured
in a process of its own: wall and CPU seconds of the rows alone, milliseconds to find the pieces of the 64 rows of a
shuffled step, bytes of the stored rows, and peak anonymous memory beyond that before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.meter import anonymous_nbytes, measure
from trainer.data.document_packing import DocumentRows
from trainer.data.document_rows import stored_rows
from trainer.data.order import SampleOrder
from trainer.data.store import DOCUMENTS_FILE, META_FILE, TOKENS_FILE, map_tokens, read_meta
from trainer.data.store_files import file_digest

# Median and spread of log-normal lengths in tokens, and the shortest length
LENGTHS = {"chat": (80, 0.8, 4), "web": (450, 1.1, 8), "books": (6000, 1.2, 64)}
BLOCK = 1 << 20
BATCH_SIZE = 64
MIB = 1 << 20


def main() -> None:
    """Measure each kind of lengths, or one start in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=8_000_000)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--packing", default="documents")
    parser.add_argument("--kinds", default=",".join(LENGTHS))
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.store is not None:
        print(json.dumps(measure_start(args.store, args.packing, args.seq_length)))
        return
    for kind in args.kinds.split(","):
        folder = args.work / f"rows-{kind}"
        write_store(folder, kind, args.documents)
        command = [
            sys.executable,
            "-m",
            "bench.document_rows",
            "--work",
            str(args.work),
            "--store",
            str(folder),
        ]
        command += ["--packing", args.packing, "--seq-length", str(args.seq_length)]
        for start in ("first", "second"):
            cost = measure(command)
            if cost.exit_code:
                raise SystemExit(cost.stderr)
            result = json.loads(cost.stdout)
            peak_mb = round((cost.peak_nbytes - result.pop("anonymous_before")) / 1e6, 1)
            print(
                json.dumps({"lengths": kind, "start": start, **result, "anonymous_mb": peak_mb}),
                flush=True,
            )
        shutil.rmtree(folder)


def write_store(folder: Path, kind: str, n_documents: int) -> None:
    """Write a synthetic token store in the layout of earlier versions, a single shard."""
    folder.mkdir(parents=True)
    n_tokens = 0
    with (folder / DOCUMENTS_FILE).open("wb") as file:
        for low in range(0, n_documents, BLOCK):
            ends = n_tokens + np.cumsum(
                document_lengths(kind, min(BLOCK, n_documents - low), seed=low)
            )
            ends.astype("<u8").tofile(file)
            n_tokens = int(ends[-1])
    with (folder / TOKENS_FILE).open("wb") as file:
        file.truncate(2 * n_tokens)
    values = {
        "identity": folder.name,
        "dtype": "uint16",
        "n_tokens": n_tokens,
        "n_documents": n_documents,
        "max_id": 0,
    }
    digests = {DOCUMENTS_FILE: file_digest(folder / DOCUMENTS_FILE)}
    (folder / META_FILE).write_text(json.dumps({**values, "digests": digests}))


def document_lengths(kind: str, count: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Return random lengths of documents."""
    median, spread, shortest = LENGTHS[kind]
    return shortest + np.random.default_rng(seed).lognormal(np.log(median), spread, count).astype(
        np.int64
    )


def measure_start(folder: Path, packing: str, seq_length: int) -> dict[str, float]:
    """Open the rows of a store, or make them, and return their time, and the memory before."""
    meta = read_meta(folder)
    tokens = map_tokens(folder, meta, seq_length)
    before = anonymous_nbytes(os.getpid())
    started_s = time.monotonic()
    started_cpu_s = time.process_time()
    rows = stored_rows(folder, meta, tokens, packing, target=folder, note=lambda text: None)
    seconds = time.monotonic() - started_s
    cpu_s = time.process_time() - started_cpu_s
    (index,) = [path for path in folder.iterdir() if path.is_dir()]
    return {
        "rows": rows.n_rows,
        "efficiency": round(rows.fraction_with_token, 4),
        "index_mib": round(sum(path.stat().st_size for path in index.iterdir()) / MIB, 1),
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "documents_per_s": round(meta.n_documents / seconds),
        **time_step(rows),
        "anonymous_before": before,
    }


def time_step(rows: DocumentRows) -> dict[str, float]:
    """Find the pieces of the rows of a shuffled step in the middle of an epoch, and return the wall and CPU time."""
    order = SampleOrder(rows.n_rows, BATCH_SIZE, seed=0, shuffle=True)
    started_s = time.monotonic()
    started_cpu_s = time.process_time()
    for row in order.rows(rows.n_rows // BATCH_SIZE // 2).tolist():
        rows.pieces(row)
    return {
        "step_ms": round(1000 * (time.monotonic() - started_s), 1),
        "step_cpu_ms": round(1000 * (time.process_time() - started_cpu_s), 1),
    }


if __name__ == "__main__":
    main()
