"""What becomes of documents that are longer than a sequence: their tokens are cut, or they are dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prepcli.core.json_values import JsonValue
from trainer.data.encoded_batch import EncodedBatch
from trainer.data.ignored_parts import CUT_DOCUMENTS, DROPPED_DOCUMENTS
from trainer.recipe.text_fields import WHOLE_TOKENS, Overlong


@dataclass(frozen=True, slots=True)
class OverlongRule:
    """How long documents are made to fit.

    Attributes:
        choice: The recipe's `data.overlong`.
        seq_length: Maximum tokens of a document.
        bos_id: The beginning-of-sequence token, which stays at the start of a document. None without one.
    """

    choice: Overlong
    seq_length: int
    bos_id: int | None = None

    def identity_inputs(self) -> list[JsonValue] | None:
        """Return the inputs of a store's identity. None if the store has all tokens."""
        if self.choice == WHOLE_TOKENS:
            return None
        return [self.choice, self.seq_length, self.bos_id]


def fit_documents(batch: EncodedBatch, rule: OverlongRule) -> EncodedBatch:
    """Return a batch without the tokens that are too many, and count what is cut and dropped.

    >>> batch = EncodedBatch(np.arange(7), None, np.array([5, 7]), {})
    >>> fit_documents(batch, OverlongRule("truncate", 3)).ids.tolist()
    [0, 1, 2, 5, 6]

    Args:
        batch: Tokens of whole documents.
        rule: The rule for those with more tokens than a sequence.
    """
    starts = np.concatenate([[0], batch.ends[:-1]])
    lengths = batch.ends - starts
    too_long = np.flatnonzero(lengths > rule.seq_length)
    if rule.choice == WHOLE_TOKENS or not len(too_long):
        return batch
    keeps = np.ones(len(batch.ids), bool)
    for document in too_long.tolist():
        part = slice(int(starts[document]), int(batch.ends[document]))
        weights = None
        if batch.weights is not None:
            weights = batch.weights[part]
        keeps[part] = _kept_tokens(batch.ids[part], weights, rule)
    # E.g. documents of 5 and 2 tokens of which 3 and 2 stay have the ends [3, 5].
    ends = np.concatenate([[0], np.cumsum(keeps)])[batch.ends]
    weights = batch.weights
    if weights is not None:
        weights = weights[keeps]
    name = CUT_DOCUMENTS
    if rule.choice == "drop":
        name = DROPPED_DOCUMENTS
        ends = np.delete(ends, too_long)
    ignored = {**batch.ignored, name: len(too_long)}
    return EncodedBatch(batch.ids[keeps], weights, ends, ignored)


def _kept_tokens(
    ids: npt.NDArray[np.uint32], weights: npt.NDArray[np.float32] | None, rule: OverlongRule
) -> npt.NDArray[np.bool_]:
    """Return which tokens of a long document stay [T]."""
    keeps = np.zeros(len(ids), bool)
    if rule.choice == "drop":
        return keeps
    first = 0
    n_kept = rule.seq_length
    if rule.choice == "truncate_prompt" and weights is not None:
        # The prompt is what precedes the first token with loss. Its start is cut, without its
        # beginning-of-sequence token, and the end of the document only if the rest does not fit alone.
        n_prompt = int(np.argmax(weights > 0)) if weights.any() else len(ids)
        if n_prompt and ids[0] == rule.bos_id:
            keeps[0] = True
            n_kept -= 1
        first = min(n_prompt, len(ids) - n_kept)
    keeps[first : first + n_kept] = True
    return keeps
