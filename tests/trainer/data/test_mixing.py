"""The order of rows of several sources: exact shares, and each row once in each epoch of its source."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import mixing
from trainer.data.mixing import ConcatenatedDataset, MixedOrder, mix_by_weight, pattern_counts
from trainer.data.packing import Arrays, ColumnSpecs, RowIndices

WEIGHTS = st.lists(st.integers(1, 40) | st.decimals("0.01", 9, places=2).map(float), min_size=1, max_size=6)


@st.composite
def orders(draw: st.DrawFn) -> MixedOrder:
    weights = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return MixedOrder(
        source_rows=tuple(draw(st.integers(1, 20)) for _ in weights),
        mixture=mix_by_weight(weights),
        batch_size=draw(st.integers(1, 30)),
        seed=draw(st.integers(0, 2**32 - 1)),
        shuffle=draw(st.booleans()),
    )


def rows_by_source(order: MixedOrder, count: int) -> list[list[int]]:
    """Return the first rows of a run by source, numbered from 0 in each."""
    rows = np.concatenate([order.rows(step) for step in range(-(-count // order.batch_size))])[:count]
    ends = np.cumsum(order.source_rows)
    return [(rows[(rows >= end - n) & (rows < end)] - end + n).tolist() for end, n in zip(ends, order.source_rows)]


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
def test_pattern_has_the_shares_of_the_weights(weights: list[float]):
    counts, exact = pattern_counts(weights), [Fraction(repr(weight)) for weight in weights]
    assert math.gcd(*counts) == 1
    for count, weight in zip(counts, exact):
        assert Fraction(count, sum(counts)) == weight / sum(exact)


def test_shares_that_need_a_long_pattern_are_rounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mixing, "MAX_PERIOD", 100)
    assert pattern_counts([1e-9, 0.3333, 0.6666669]) == [1, 33, 66]


@given(WEIGHTS, st.lists(st.integers(0, 10**12), min_size=1, max_size=5))
@settings(deadline=None)
def test_position_is_located_without_those_before_it(weights: list[float], positions: list[int]):
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
def test_epoch_of_a_source_has_each_of_its_rows_once(order: MixedOrder):
    for rows, n_rows in zip(rows_by_source(order, 400), order.source_rows):
        for start in range(0, len(rows) - n_rows + 1, n_rows):
            assert sorted(rows[start : start + n_rows]) == list(range(n_rows))


@given(orders(), st.integers(1, 30))
@settings(deadline=None)
def test_order_does_not_depend_on_batch_size(order: MixedOrder, batch_size: int):
    other = replace(order, batch_size=batch_size)
    assert rows_by_source(order, 200) == rows_by_source(other, 200)


@given(orders(), st.integers(0, 10**9), st.data())
@settings(deadline=None)
def test_mixed_order_slices_a_step(order: MixedOrder, step: int, data: st.DataObject):
    low = data.draw(st.integers(0, order.batch_size))
    high = data.draw(st.integers(low, order.batch_size))
    assert order.rows(step, low, high).tolist() == order.rows(step)[low:high].tolist()


@given(orders(), st.integers(0, 60))
@settings(deadline=None)
def test_source_counts_are_those_of_the_rows(order: MixedOrder, steps: int):
    rows = rows_by_source(order, steps * order.batch_size) if steps else [[] for _ in order.source_rows]
    assert order.source_counts(steps) == [len(part) for part in rows]


def test_sources_of_equal_size_have_different_orders():
    order = MixedOrder((50, 50), mix_by_weight([1, 1]), 100, seed=3, shuffle=True)
    first, second = rows_by_source(order, 100)
    assert first != second
    unshuffled = replace(order, shuffle=False)
    assert rows_by_source(unshuffled, 100) == [list(range(50))] * 2


class Numbers:
    """A dataset whose rows are consecutive numbers."""

    first_row, seq_length = 0, 1

    def __init__(self, first: int, n_rows: int) -> None:
        self.first, self.n_rows = first, n_rows

    @property
    def columns(self) -> ColumnSpecs:
        return {"tokens": (1, np.dtype(np.int32))}

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        return {"tokens": np.array([[self.first + row] for row in rows], np.int32)}


def test_concatenated_dataset_has_the_rows_of_its_parts():
    dataset = ConcatenatedDataset({"a": Numbers(100, 3), "b": Numbers(200, 2)})
    assert dataset.n_rows == 5
    assert dataset.get_batch([4, 0, -1, 2, 3])["tokens"].ravel().tolist() == [201, 100, 0, 102, 200]
    with pytest.raises(IndexError):
        dataset.get_batch([5])
