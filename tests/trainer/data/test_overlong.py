"""Documents that are longer than a sequence: cut, dropped and counted, for any batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.encode import EncodedBatch, OverlongRule, fit_documents
from trainer.recipe.text_fields import Overlong

CHOICES: tuple[Overlong, ...] = ("split", "truncate", "truncate_prompt", "drop")
# A token id, and whether it has loss.
Document = list[tuple[int, bool]]
documents = st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), max_size=6)


def make_batch(parts: list[Document], *, has_weights: bool) -> EncodedBatch:
    """Return a batch of documents."""
    tokens = [token for part in parts for token in part]
    weights = None
    if has_weights:
        weights = np.array([loss for _, loss in tokens], np.float32)
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return EncodedBatch(
        np.array([token for token, _ in tokens], np.uint32), weights, ends, {"a": 1}
    )


def fit(part: Document, choice: Overlong, limit: int, bos_id: int | None) -> Document | None:
    """Return what stays of a document, one token at a time. None for a dropped one."""
    if len(part) <= limit or choice == "split":
        return part
    if choice == "drop":
        return None
    part = part.copy()
    if choice == "truncate_prompt":
        begin = part[:1] if part[0][0] == bos_id and not part[0][1] else []
        rest = part[len(begin) :]
        while len(begin) + len(rest) > limit and rest and not rest[0][1]:
            rest.pop(0)
        part = begin + rest
    return part[:limit]


def test_answer_after_a_prompt_of_one_token_keeps_its_start():
    batch = make_batch([[(3, False), (5, True), (6, True)]], has_weights=True)
    fitted = fit_documents(batch, OverlongRule("truncate_prompt", 2, bos_id=3))
    assert fitted.ids.tolist() == [3, 5]


@given(
    documents,
    st.sampled_from(CHOICES),
    st.integers(2, 6),
    st.booleans(),
    st.sampled_from([None, 3]),
)
def test_documents_fit_as_one_by_one(
    parts: list[Document], choice: Overlong, limit: int, has_weights: bool, bos_id: int | None
):
    if not has_weights:
        parts = [[(token, True) for token, _ in part] for part in parts]
    parts = [part for part in parts if part]
    fitted = fit_documents(
        make_batch(parts, has_weights=has_weights), OverlongRule(choice, limit, bos_id)
    )
    kept = [
        part for part in (fit(part, choice, limit, bos_id) for part in parts) if part is not None
    ]
    expected = make_batch(kept, has_weights=has_weights)
    assert fitted.ids.tolist() == expected.ids.tolist()
    assert fitted.ends.tolist() == expected.ends.tolist()
    if has_weights:
        assert fitted.weights is not None
        assert expected.weights is not None
        assert fitted.weights.tolist() == expected.weights.tolist()
    n_long = sum(len(part) > limit for part in parts)
    counts = {"drop": {"dropped_documents": n_long}, "split": {}}
    changed = counts.get(choice, {"cut_documents": n_long})
    assert fitted.ignored == {"a": 1, **(changed if n_long else {})}


@pytest.mark.parametrize("choice", CHOICES)
def test_empty_documents_stay(choice: Overlong):
    batch = EncodedBatch(np.arange(6, dtype=np.uint32), None, np.array([0, 5, 5, 6]), {})
    fitted = fit_documents(batch, OverlongRule(choice, 3))
    n_empty = sum(length == 0 for length in np.diff(fitted.ends, prepend=0))
    assert n_empty == 2
