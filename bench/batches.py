"""Tokens per second of `prep.batches` and of Grain, over the same token store.

    python -m bench.batches --work FOLDER [--megabytes 200] [--rounds 5]

Both read shuffled blocks of 1024 tokens from one memory-mapped file, in batches of 64, and make inputs, targets and
weights. Grain (`pip install grain`) reads them through a data source with random access and its `MapDataset`, in this
process. Systems alternate. The result is a ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from prepcli.core.tables import format_table
from trainer.data.batches import Batches
from trainer.data.order import SampleOrder
from trainer.data.packing import Arrays, PackedDataset
from trainer.data.store import MappedTokens

SEQ_LENGTH = 1024
BATCH_SIZE = 64
VOCAB = 50_000
MEGABYTE = 1_000_000


def main() -> None:
    """Write the tokens, and read them with each system."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    path = write_tokens(args.work, args.megabytes * MEGABYTE)
    print(compare(path, args.rounds))


def write_tokens(folder: Path, nbytes: int) -> Path:
    """Write random token ids, and return their file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, VOCAB, nbytes // 2, np.uint16).tofile(path)
    return path


def read_prep(path: Path) -> Iterator[Arrays]:
    """Return the batches of one epoch with prep."""
    ids = np.memmap(path, np.uint16, "r")
    tokens = MappedTokens(ids, np.array([len(ids)], "<u8"), "tokens", SEQ_LENGTH)
    dataset = PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks)
    order = SampleOrder(dataset.n_rows, BATCH_SIZE, seed=0, shuffle=True)
    steps = dataset.n_rows // BATCH_SIZE
    return Batches(dataset, order, steps=steps, identity="tokens", reopen=never_reopen)


def never_reopen() -> NoReturn:
    """Raise an error: nothing copies these batches."""
    raise AssertionError


class TokenBlocks:
    """A data source of Grain: blocks of a memory-mapped file."""

    def __init__(self, path: Path) -> None:
        ids = np.memmap(path, np.uint16, "r")
        n_blocks = len(ids) // SEQ_LENGTH
        self._blocks = ids[: n_blocks * SEQ_LENGTH].reshape(n_blocks, SEQ_LENGTH)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the ids of a block."""
        return self._blocks[index]


def make_example(block: np.ndarray) -> Arrays:
    """Return the arrays of a block, as `PackedDataset` makes them."""
    tokens = block.astype(np.int32)
    targets = np.zeros_like(tokens)
    targets[:-1] = tokens[1:]
    weights = np.ones(SEQ_LENGTH, np.float32)
    weights[-1] = 0
    return {"tokens": tokens, "targets": targets, "weights": weights}


def read_grain(path: Path) -> Iterator[Arrays]:
    """Return the batches of one epoch with Grain."""
    import grain  # type: ignore[import-not-found]

    source: Any = TokenBlocks(path)
    dataset = grain.MapDataset.source(source).shuffle(seed=0).map(make_example)
    return iter(dataset.batch(BATCH_SIZE, drop_remainder=True).to_iter_dataset())


SYSTEMS: Mapping[str, Callable[[Path], Iterator[Arrays]]] = {
    "prep": read_prep,
    "grain": read_grain,
}


def tokens_per_s(batches: Iterator[Arrays]) -> float:
    """Read all batches, and return the rate."""
    n_tokens = 0
    started_s = time.perf_counter()
    for batch in batches:
        n_tokens += batch["tokens"].size
    return n_tokens / (time.perf_counter() - started_s)


def compare(path: Path, rounds: int) -> str:
    """Return a table of the median rates, and their ratio to the rate of prep."""
    rates: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(rounds):
        for name, read in SYSTEMS.items():
            rates[name].append(tokens_per_s(read(path)))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    rows = [
        (name, f"{rate / 1e6:.1f}", f"{rate / medians['prep']:.2f}")
        for name, rate in medians.items()
    ]
    header = ("system", "million tokens/s", "ratio to prep")
    return format_table(rows, header, right_aligned=header[1:])


if __name__ == "__main__":
    main()
