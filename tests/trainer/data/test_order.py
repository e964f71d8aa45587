"""The order of rows and the batches of any number of processes: pure functions of step and seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import UsageError
from tests.helpers.slow_cases import slow_except
from trainer.data.batches import BatchDigest, Batches
from trainer.data.order import (
    RowOrder,
    eval_batches,
    mix_by_weight,
    num_eval_batches,
    pattern_counts,
    permute,
)
from trainer.data.packing import (
    Arrays,
    ConcatenatedDataset,
    Dataset,
    PackedDataset,
    RowIndices,
    document_dataset,
)
from trainer.data.store import MappedTokens

# The order of rows: a pure function of step and seed.

KEYS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8)

ORDERS = st.builds(
    RowOrder,
    n_rows=st.integers(1, 60),
    batch_size=st.integers(1, 90),
    seed=st.integers(0, 2**80),
    shuffle=st.booleans(),
)


@given(st.integers(1, 3000), KEYS)
def test_permute_is_a_permutation(n: int, keys: list[int]):
    assert sorted(permute(np.arange(n), n, keys)) == list(range(n))


@given(st.integers(1, 2**40), KEYS, st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_permute_is_injective_for_large_n(n: int, keys: list[int], values: list[int]):
    indices = np.unique(np.array(values) % n)
    images = permute(indices, n, keys)
    assert len(np.unique(images)) == len(indices)
    assert ((images >= 0) & (images < n)).all()


@given(ORDERS, st.integers(0, 50))
def test_sample_order_epoch_has_every_row_once(order: RowOrder, epoch: int):
    first = epoch * order.n_rows
    steps = range(first // order.batch_size, (first + order.n_rows - 1) // order.batch_size + 1)
    rows = np.concatenate([order.rows(step) for step in steps])
    skipped = first - steps[0] * order.batch_size
    assert sorted(rows[skipped : skipped + order.n_rows]) == list(range(order.n_rows))


def test_sample_order_without_shuffle_keeps_row_order():
    order = RowOrder(n_rows=5, batch_size=3, seed=1, shuffle=False)
    assert [order.rows(step).tolist() for step in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_sample_order_is_stable_across_versions():
    """A run that resumes with another version of the code must see the same rows."""
    small = RowOrder(n_rows=10, batch_size=10, seed=0, shuffle=True)
    assert small.rows(0).tolist() == [4, 0, 8, 2, 6, 9, 7, 3, 1, 5]
    large = RowOrder(n_rows=10**12, batch_size=3, seed=7, shuffle=True)
    assert large.rows(10**11).tolist() == [344461739884, 626274651494, 307170921615]


def test_sample_order_differs_by_epoch_and_seed():
    orders = {
        tuple(RowOrder(n_rows=50, batch_size=50, seed=seed, shuffle=True).rows(epoch).tolist())
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(orders) == 400


@pytest.mark.parametrize(
    ("epochs", "n_rows", "batch_size", "steps"),
    [(1, 10, 5, 2), (1, 11, 5, 3), (0.1, 30, 1, 3), (0.001, 10, 5, 1)],
)
def test_steps_for_epochs_rounds_up_to_whole_steps(
    epochs: float, n_rows: int, batch_size: int, steps: int
):
    order = RowOrder(n_rows=n_rows, batch_size=batch_size, seed=0, shuffle=True)
    assert order.steps_for_epochs(epochs) == steps


def test_steps_per_epoch_is_rows_per_batch_size():
    assert RowOrder(n_rows=10, batch_size=4, seed=0, shuffle=True).steps_per_epoch == 2.5


@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 60))
def test_eval_batches_cover_each_row_once(n_rows: int, batch_size: int, limit: int):
    batches = [rows.tolist() for rows in eval_batches(n_rows, batch_size, limit=limit)]
    rows = [row for batch in batches for row in batch]
    count = min(n_rows, limit or n_rows)
    assert len(batches) == num_eval_batches(n_rows, batch_size, limit=limit)
    assert all(len(batch) == batch_size for batch in batches)
    assert rows == [*range(count), *[-1] * (-count % batch_size)]


WEIGHTS = st.lists(
    st.integers(1, 40) | st.decimals("0.01", 9, places=2).map(float), min_size=1, max_size=6
)


@st.composite
def orders(draw: st.DrawFn) -> RowOrder:
    weights = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    source_rows = tuple(draw(st.integers(1, 20)) for _ in weights)
    return RowOrder(
        n_rows=sum(source_rows),
        batch_size=draw(st.integers(1, 30)),
        seed=draw(st.integers(0, 2**32 - 1)),
        shuffle=draw(st.booleans()),
        source_rows=source_rows,
        mixture=mix_by_weight(weights),
    )


def first_rows(order: RowOrder, count: int) -> npt.NDArray[np.int64]:
    """Return the first rows of a run."""
    n_steps = -(-count // order.batch_size)
    return np.concatenate([order.rows(step) for step in range(n_steps)])[:count]


def rows_by_source(order: RowOrder, count: int) -> list[list[int]]:
    """Return the first rows of a run by source, numbered from 0 in each."""
    rows = first_rows(order, count)
    ends = np.cumsum(order.source_rows)
    return [
        (rows[(rows >= end - n) & (rows < end)] - end + n).tolist()
        for end, n in zip(ends, order.source_rows)
    ]


@given(WEIGHTS)
def test_every_prefix_has_exact_shares_to_less_than_one_row(weights: list[float]):
    mixture = mix_by_weight(weights)
    period = len(mixture.pattern)
    one_hot = np.eye(len(weights), dtype=np.int64)[mixture.pattern]
    prefixes = np.concatenate([np.zeros((1, len(weights)), np.int64), one_hot.cumsum(axis=0)])
    deviation = prefixes * period - np.arange(period + 1)[:, None] * mixture.counts
    assert np.abs(deviation).max() < period
    assert (prefixes[-1] == mixture.counts).all()


@given(WEIGHTS)
def test_pattern_counts_are_proportional_to_weights(weights: list[float]):
    counts, exact = pattern_counts(weights), [Fraction(repr(weight)) for weight in weights]
    assert math.gcd(*counts) == 1
    for count, weight in zip(counts, exact):
        assert Fraction(count, sum(counts)) == weight / sum(exact)


def test_weights_that_need_a_long_pattern_are_rounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.order.MAX_PERIOD", 100)
    assert pattern_counts([1e-9, 0.3333, 0.6666669]) == [1, 33, 66]


@given(WEIGHTS, st.lists(st.integers(0, 10**12), min_size=1, max_size=5))
def test_position_is_located_without_earlier_positions(weights: list[float], positions: list[int]):
    mixture = mix_by_weight(weights)
    sources, ranks = mixture.locate(np.array(positions))
    for position, source, rank in zip(positions, sources.tolist(), ranks.tolist()):
        assert mixture.rows_before(position)[source] == rank
        assert mixture.rows_before(position).sum() == position
        assert (mixture.rows_before(position + 1) - mixture.rows_before(position)).tolist() == [
            int(other == source) for other in range(len(weights))
        ]


@given(orders())
def test_epoch_of_a_source_has_each_of_its_rows_once(order: RowOrder):
    for rows, n_rows in zip(rows_by_source(order, 400), order.source_rows):
        for start in range(0, len(rows) - n_rows + 1, n_rows):
            assert sorted(rows[start : start + n_rows]) == list(range(n_rows))


@given(ORDERS | orders(), st.integers(1, 30))
def test_order_does_not_depend_on_batch_size(order: RowOrder, batch_size: int):
    other = replace(order, batch_size=batch_size)
    assert first_rows(order, 200).tolist() == first_rows(other, 200).tolist()


@given(ORDERS | orders(), st.integers(0, 10**9), st.data())
def test_order_slices_a_step(order: RowOrder, step: int, data: st.DataObject):
    low = data.draw(st.integers(0, order.batch_size))
    high = data.draw(st.integers(low, order.batch_size))
    assert order.rows(step, low, high).tolist() == order.rows(step)[low:high].tolist()
    assert order.rows(step, low).tolist() == order.rows(step)[low:].tolist()


@given(orders(), st.integers(0, 60))
def test_source_counts_equal_counts_of_the_rows(order: RowOrder, steps: int):
    rows = (
        rows_by_source(order, steps * order.batch_size)
        if steps
        else [[] for _ in order.source_rows]
    )
    assert order.source_counts(steps) == [len(part) for part in rows]


def test_sources_of_equal_size_have_different_orders():
    order = RowOrder(100, 100, 3, True, (50, 50), mix_by_weight([1, 1]))
    first, second = rows_by_source(order, 100)
    assert first != second
    unshuffled = replace(order, shuffle=False)
    assert rows_by_source(unshuffled, 100) == [list(range(50))] * 2


# Batches for any number of processes and any schedule of restarts: a pure function of the step.

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


@pytest.mark.parametrize("of", slow_except([3, 64], [3]))
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
