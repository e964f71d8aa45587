"""The order of rows: a pure function of step and seed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.slow_cases import slow_except
from trainer.data.order import (
    RowOrder,
    eval_batches,
    mix_by_weight,
    pattern_counts,
    permute,
)

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


@given(ORDERS, st.integers(0, 10**9), st.data())
def test_sample_order_slices_a_step(order: RowOrder, step: int, data: st.DataObject):
    low = data.draw(st.integers(0, order.batch_size))
    high = data.draw(st.integers(low, order.batch_size))
    assert order.rows(step, low, high).tolist() == order.rows(step)[low:high].tolist()
    assert order.rows(step, low).tolist() == order.rows(step)[low:].tolist()


@given(ORDERS, st.integers(1, 20))
def test_sample_order_does_not_depend_on_batch_size(order: RowOrder, batch_size: int):
    other_order = replace(order, batch_size=batch_size)
    rows = np.concatenate([order.rows(step) for step in range(math.ceil(100 / order.batch_size))])
    other_rows = np.concatenate(
        [other_order.rows(step) for step in range(math.ceil(100 / batch_size))]
    )
    assert rows[:100].tolist() == other_rows[:100].tolist()


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


@pytest.mark.parametrize("n", slow_except((5, 6, 17), (6,)))
def test_sample_order_is_uniform(n: int):
    """Chi-square of (position, row) over 2000 epochs is at most 4.5 standard deviations above its mean."""
    order = RowOrder(n_rows=n, batch_size=n, seed=3, shuffle=True)
    counts = Counter(
        pair for epoch in range(2000) for pair in enumerate(order.rows(epoch).tolist())
    )
    expected = 2000 / n
    chi_square = sum(
        (counts[i, row] - expected) ** 2 / expected for i in range(n) for row in range(n)
    )
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


def test_sample_order_separates_neighbouring_rows():
    rows = RowOrder(n_rows=1000, batch_size=1000, seed=0, shuffle=True).rows(0)
    # For random rows the expected number is 2.
    assert (np.abs(np.diff(rows)) == 1).sum() < 12


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


def rows_by_source(order: RowOrder, count: int) -> list[list[int]]:
    """Return the first rows of a run by source, numbered from 0 in each."""
    rows = np.concatenate([order.rows(step) for step in range(-(-count // order.batch_size))])[
        :count
    ]
    ends = np.cumsum(order.source_rows)
    return [
        (rows[(rows >= end - n) & (rows < end)] - end + n).tolist()
        for end, n in zip(ends, order.source_rows)
    ]


@given(WEIGHTS)
@settings(deadline=None)
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
@settings(deadline=None)
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
@settings(deadline=None)
def test_epoch_of_a_source_has_each_of_its_rows_once(order: RowOrder):
    for rows, n_rows in zip(rows_by_source(order, 400), order.source_rows):
        for start in range(0, len(rows) - n_rows + 1, n_rows):
            assert sorted(rows[start : start + n_rows]) == list(range(n_rows))


@given(orders(), st.integers(1, 30))
@settings(deadline=None)
def test_order_does_not_depend_on_batch_size(order: RowOrder, batch_size: int):
    other = replace(order, batch_size=batch_size)
    assert rows_by_source(order, 200) == rows_by_source(other, 200)


@given(orders(), st.integers(0, 10**9), st.data())
@settings(deadline=None)
def test_mixed_order_slices_a_step(order: RowOrder, step: int, data: st.DataObject):
    low = data.draw(st.integers(0, order.batch_size))
    high = data.draw(st.integers(low, order.batch_size))
    assert order.rows(step, low, high).tolist() == order.rows(step)[low:high].tolist()


@given(orders(), st.integers(0, 60))
@settings(deadline=None)
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
