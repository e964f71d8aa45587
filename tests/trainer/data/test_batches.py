"""Batches for any number of processes and any schedule of restarts: a pure function of the step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import UsageError
from trainer.data.batches import BatchDigest, Batches
from trainer.data.order import RowOrder, mix_by_weight
from trainer.data.packing import (
    Arrays,
    ConcatenatedDataset,
    Dataset,
    PackedDataset,
    RowIndices,
    document_dataset,
)
from trainer.data.store import MappedTokens

STEPS = 12
BATCH_SIZE = 64
LENGTH = 8


@dataclass(frozen=True)
class Run:
    """A dataset and the order of its rows."""

    dataset: Dataset
    order: RowOrder

    def open(self, process: int = 0, of: int = 1, start: int = 0) -> Batches:
        return Batches(
            self.dataset,
            self.order,
            steps=STEPS,
            identity="tokens",
            reopen=never_reopened,
            process=process,
            of=of,
            start=start,
        )


def never_reopened() -> NoReturn:
    raise AssertionError


def make_tokens(seed: int, n_documents: int) -> MappedTokens:
    """Return documents of 1 to 20 random tokens."""
    random = np.random.default_rng(seed)
    ends = np.cumsum(random.integers(1, 20, n_documents)).astype("<u8")
    ids = random.integers(0, 9000, int(ends[-1])).astype("<u2")
    return MappedTokens(ids=ids, ends=ends, identity="tokens", seq_length=LENGTH)


def blocks(seed: int, n_documents: int) -> PackedDataset:
    tokens = make_tokens(seed, n_documents)
    return PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks)


def make_runs(batch_size: int = BATCH_SIZE) -> dict[str, Run]:
    """Return a run with each kind of rows. Each has several epochs, and one ends inside of a batch."""
    concatenated = blocks(0, 300)
    documents = document_dataset(make_tokens(1, 300), "documents")
    parts = {"a": blocks(2, 60), "b": blocks(3, 400)}
    source_rows = tuple(part.n_rows for part in parts.values())
    return {
        "concatenate": Run(concatenated, RowOrder(concatenated.n_rows, batch_size, 5, True)),
        "documents": Run(documents, RowOrder(documents.n_rows, batch_size, 5, True)),
        "mixture": Run(
            ConcatenatedDataset(parts),
            RowOrder(sum(source_rows), batch_size, 5, True, source_rows, mix_by_weight([3, 1])),
        ),
    }


RUNS = make_runs()
SMALL_RUNS = make_runs(batch_size=8)
RUN_NAMES = sorted(RUNS)


def join_shares(shares: list[Arrays]) -> Arrays:
    return {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}


def sha256(batches: list[Arrays]) -> str:
    """Return a digest of batches without code of prep."""
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            digest.update(name.encode() + batch[name].tobytes())
    return digest.hexdigest()


def batch_digests(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """Return the digest of each batch of one process."""
    return {name: [sha256([batch]) for batch in run.open()] for name, run in runs.items()}


WHOLE_DIGESTS = batch_digests(RUNS)
SMALL_DIGESTS = batch_digests(SMALL_RUNS)


@pytest.mark.parametrize("name", RUN_NAMES)
def test_batches_are_equal_for_1_to_64_processes(name: str):
    for of in (1, 2, 3, 5, 8, 21, 63, 64):
        shares = [RUNS[name].open(process, of) for process in range(of)]
        # A step of a later epoch
        batch = join_shares([share.batch(STEPS - 1) for share in shares])
        assert sha256([batch]) == WHOLE_DIGESTS[name][STEPS - 1], of


@pytest.mark.parametrize("name", RUN_NAMES)
def test_rows_come_from_the_order_of_the_run(name: str):
    run = RUNS[name]
    for step, batch in enumerate(run.open()):
        expected = run.dataset.get_batch(run.order.rows(step), run.order.epochs(step))
        assert sha256([batch]) == sha256([expected])


# A restart continues at any earlier step, with any number of processes.
RESTARTS = st.lists(
    st.tuples(st.integers(0, STEPS), st.integers(0, 3), st.integers(1, 8)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(RUN_NAMES), RESTARTS)
def test_restarts_change_no_batch(name: str, restarts: list[tuple[int, int, int]]):
    """Each restart takes some steps after the last saved one. The rest is of one process."""
    run = SMALL_RUNS[name]
    saved_step = 0
    for requested_start, n_steps, of in restarts:
        start = min(requested_start, saved_step)
        shares = [run.open(process, of, start) for process in range(of)]
        for step in range(start, min(start + n_steps, STEPS)):
            batch = join_shares([next(share) for share in shares])
            assert sha256([batch]) == SMALL_DIGESTS[name][step]
            saved_step = max(saved_step, step + 1)


@pytest.mark.parametrize("of", [3, 64])
@pytest.mark.parametrize("name", RUN_NAMES)
def test_digests_of_shares_add_up_to_the_digest_of_the_run(name: str, of: int):
    total = BatchDigest()
    for process in reversed(range(of)):
        share = RUNS[name].open(process, of)
        digest = BatchDigest()
        for step in range(STEPS):
            digest.update(share.batch(step), step, share.first_row)
        total.merge(digest)
    assert RUNS[name].open(1, of).digest(0, 2) == RUNS[name].open().digest(0, 2)
    assert total.hexdigest() == RUNS[name].open().digest()


@pytest.mark.parametrize("change", ["value", "dtype", "step", "row", "name"])
def test_digest_depends_on_every_part_of_a_row(change: str):
    batch = RUNS["documents"].open().batch(3)
    before = BatchDigest()
    before.update(batch, 3)
    step = 3
    first_row = 0
    if change == "value":
        batch["tokens"][63, 7] += 1
    elif change == "dtype":
        batch["tokens"] = batch["tokens"].astype(np.uint32)
    elif change == "name":
        batch["labels"] = batch.pop("targets")
    elif change == "step":
        step = 4
    else:
        first_row = 1
    after = BatchDigest()
    after.update(batch, step, first_row)
    assert after.hexdigest() != before.hexdigest()


def test_share_sizes_differ_by_at_most_one_row():
    sizes = [RUNS["documents"].open(process, 60).n_rows for process in range(60)]
    assert sum(sizes) == BATCH_SIZE
    assert {*sizes} == {1, 2}


def test_thousand_processes_share_a_batch():
    dataset = blocks(0, 400)
    order = RowOrder(dataset.n_rows, 1000, 5, True)
    run = Run(dataset, order)
    shares = [run.open(process, 1000, start=7) for process in range(1000)]
    batch = join_shares([next(share) for share in shares])
    assert sha256([batch]) == sha256([run.open().batch(7)])


def test_start_reads_no_earlier_row(monkeypatch: pytest.MonkeyPatch):
    """A start far into a run touches the rows of its step only."""
    run = RUNS["concatenate"]
    read: list[int] = []
    get_batch = PackedDataset.get_batch

    def record_rows(dataset: PackedDataset, rows: RowIndices, epochs: RowIndices) -> Arrays:
        read.extend(np.asarray(rows).tolist())
        return get_batch(dataset, rows, epochs)

    monkeypatch.setattr(PackedDataset, "get_batch", record_rows)
    next(run.open(start=STEPS - 1))
    assert read == run.order.rows(STEPS - 1).tolist()


def test_iterator_ends_after_the_last_step():
    batches = RUNS["mixture"].open(start=STEPS - 2)
    assert len(batches) == 2
    assert len(list(batches)) == 2
    assert batches.step == STEPS
    assert list(RUNS["mixture"].open(start=STEPS)) == []
    with pytest.raises(IndexError):
        batches.batch(STEPS)


@pytest.mark.parametrize(
    ("process", "of", "start", "message"),
    [
        (2, 2, 0, "`process` is 2 - `of` is 2 - 0 to 1"),
        (0, 65, 0, "`of` is 65 - a batch has 64 sequences"),
        (0, 1, STEPS + 1, "`start` is 13 - the run has 12 steps"),
    ],
)
def test_values_out_of_range_are_errors(process: int, of: int, start: int, message: str):
    with pytest.raises(UsageError) as caught:
        RUNS["documents"].open(process, of, start)
    assert str(caught.value).startswith(message)
