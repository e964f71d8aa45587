"""Datasets of an encoder-decoder model: padded pairs of a source and a target, stored or made by span corruption.

Span corruption moves random spans from source to target. A sentinel token takes the place of each span in the source,
and comes before it in the target (T5, arXiv:1910.10683, section 3.1.4). E.g. "a b c d e" with the spans "b" and "d e"
has the source "a <0> c <1>" and the target "<0> b <1> d e". The spans are a function of the seed, the epoch and the
row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import Key, PrepError, text
from prepcli.core.formatting import count_text
from trainer.data.order import permute, round_keys
from trainer.data.packing import Arrays, ColumnSpecs, RowIndices, fill_batch, packed_columns
from trainer.data.store import MappedTokens
from trainer.data.tokenizer import TextTokenizer
from trainer.recipe.data_table import SpanSizes


@dataclass(frozen=True, slots=True)
class Seq2SeqDataset:
    """Pairs of a token store: the source of each pair, then its target."""

    tokens: MappedTokens  # The token store
    source_length: int  # Maximum tokens of a source
    decoder_start_id: int  # First decoder input token
    # Replaces the last token of a truncated source or target. None keeps the last token.
    eos_id: int | None
    first_row: int  # Index in the store of the first pair
    n_rows: int  # Number of pairs

    @property
    def seq_length(self) -> int:
        """Maximum tokens of a target."""
        return self.tokens.seq_length

    @property
    def columns(self) -> ColumnSpecs:
        """Length and dtype of each array of a row, by name."""
        return seq2seq_columns(self.source_length, self.seq_length)

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        """Return a batch of pairs, which are the same in every epoch.

        Returns:
            `source`, int32 [B, source_length], `present`, bool [B, source_length]: True where
            `source` is not padding, `tokens`, int32 [B, seq_length]: decoder inputs, the targets
            shifted right, `targets`, int32 [B, seq_length], and `weights`, float32 [B, seq_length]:
            the loss weight of the target, 0 without a target. E.g. targets [7, 8, 1] have tokens
            [decoder_start_id, 7, 8]. All are 0 in padding rows.
        """
        return fill_batch(self, rows, self._fill_row)

    def _fill_row(self, arrays: Arrays, row: int, epoch: int) -> None:
        # The source of pair p is document 2p of the store, its target is document 2p + 1.
        document = 2 * (self.first_row + row)
        source = self._truncated_ids(document, self.source_length)
        target = self._truncated_ids(document + 1, self.seq_length)
        low, _ = self._document_span(document + 1)
        weights = self.tokens.read_weights(low, low + len(target))
        _fill_pair(arrays, source, target, weights, self.decoder_start_id)

    def target_ids(self, row: int) -> npt.NDArray[np.int32]:
        """Return all tokens with loss of a pair's target, before truncation."""
        low, high = self._document_span(2 * (self.first_row + row) + 1)
        ids = np.array(self.tokens.ids[low:high], np.int32)
        return ids[self.tokens.read_weights(low, high) > 0]

    def _truncated_ids(self, document: int, max_length: int) -> npt.NDArray[np.int32]:
        """Return the ids of a document, cut to `max_length`. A cut document ends with `eos_id`."""
        low, high = self._document_span(document)
        ids = np.array(self.tokens.ids[low : min(high, low + max_length)], np.int32)
        if high - low > max_length and self.eos_id is not None:
            ids[-1] = self.eos_id
        return ids

    def _document_span(self, document: int) -> tuple[int, int]:
        """Return the start and end of a document in the store's tokens."""
        # The first document starts at 0.
        bounds = [0, *self.tokens.ends[max(document - 1, 0) : document + 1].tolist()]
        return bounds[-2], bounds[-1]


def seq2seq_dataset(
    tokens: MappedTokens, source_length: int, *, decoder_start_id: int, eos_id: int | None
) -> Seq2SeqDataset:
    """Return the dataset of all pairs of a token store."""
    return Seq2SeqDataset(
        tokens=tokens,
        source_length=source_length,
        decoder_start_id=decoder_start_id,
        eos_id=eos_id,
        first_row=0,
        n_rows=tokens.n_documents // 2,
    )


def _fill_pair(
    arrays: Arrays,
    source: npt.NDArray[np.int32],
    target: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
    decoder_start_id: int,
) -> None:
    """Write a pair into the arrays of a row, which are zeros."""
    arrays["source"][: len(source)] = source
    arrays["present"][: len(source)] = True
    # The inputs are the targets, shifted right.
    arrays["tokens"][: len(target)] = [decoder_start_id, *target][: len(target)]
    arrays["targets"][: len(target)] = target
    arrays["weights"][: len(target)] = weights


def seq2seq_columns(source_length: int, seq_length: int) -> ColumnSpecs:
    """Return length and dtype of each array of a row, by name."""
    return {
        "source": (source_length, np.dtype(np.int32)),
        "present": (source_length, np.dtype(np.bool_)),
        **packed_columns(seq_length),
    }


Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SpanCorruptionTokenIds:
    """The token ids added by span corruption."""

    sentinels: Int32Array  # Sentinel of the first span, of the second and so on, int32
    eos: int  # Last token of each source and target
    decoder_start: int  # First decoder input token


@dataclass(frozen=True, slots=True)
class SpanCorruptionDataset:
    """Pairs of a source and a target, made of the blocks of a token store."""

    tokens: MappedTokens  # The token store. Its `seq_length` is the length of a block.
    sizes: SpanSizes  # Numbers of tokens, noise tokens and spans of each block
    # Ids of the special tokens in sources and targets, e.g. the sentinels of spans.
    special_ids: SpanCorruptionTokenIds
    source_length: int  # Maximum length of a source
    seq_length: int  # Maximum length of a target
    seed: int  # Seed of the spans
    first_row: int  # Index in the store of the first block
    n_rows: int  # Number of blocks

    @property
    def columns(self) -> ColumnSpecs:
        """Length and dtype of each array of a row, by name."""
        return seq2seq_columns(self.source_length, self.seq_length)

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        """Return a batch of pairs with the columns of a `Seq2SeqDataset`. Each epoch has other spans."""
        return fill_batch(self, rows, self._fill_row, epochs)

    def _fill_row(self, arrays: Arrays, row: int, epoch: int) -> None:
        # The index in the store: a held-out row has the same spans in every split.
        row += self.first_row
        low = row * self.sizes.block_length
        block = self.tokens.ids[low : low + self.sizes.block_length].astype(np.int32)
        is_noise = noise_mask(self.sizes, f"{self.seed} {epoch} {row}")
        # In the source the noise is replaced, in the target everything else (figure 2 of the T5
        # paper). E.g. block [5, 6, 7, 8], noise [0, 1, 0, 1] and sentinels [99, 98]: the source is
        # [5, 99, 7, 98, eos], the target [99, 6, 98, 8, eos].
        sentinels = self.special_ids.sentinels
        eos = np.int32(self.special_ids.eos)
        source = np.append(replace_runs(block, is_noise, sentinels), eos)
        target = np.append(replace_runs(block, ~is_noise, sentinels), eos)
        weights = np.ones(len(target), np.float32)
        _fill_pair(arrays, source, target, weights, self.special_ids.decoder_start)


def noise_mask(sizes: SpanSizes, name: str) -> BoolArray:
    """Return whether each token of a block is noise, bool [block_length], with random lengths of a seed `name`.

    A block begins with a run of kept tokens, then spans of noise and kept runs alternate. E.g. kept
    runs [2, 1] and spans [1, 2] -> [0, 0, 1, 0, 1, 1].

    Spans and the runs between them have random lengths of at least 1, as in
    `random_spans_noise_mask` in t5/data/preprocessors.py of
    google-research/text-to-text-transfer-transformer.
    """
    n_kept = sizes.block_length - sizes.n_noise
    kept_lengths = _split_randomly(n_kept, sizes.n_spans, f"others {name}")
    noise_lengths = _split_randomly(sizes.n_noise, sizes.n_spans, f"noise {name}")
    # Kept [2, 1] and noise [1, 2] become the run lengths [2, 1, 1, 2].
    run_lengths = np.stack([kept_lengths, noise_lengths], axis=1).reshape(-1)
    return np.repeat(np.tile([False, True], sizes.n_spans), run_lengths)


def _split_randomly(total: int, n_parts: int, name: str) -> npt.NDArray[np.int64]:
    """Split `total` into `n_parts` positive integers. All splits have the same probability."""
    # A split is a choice of n_parts - 1 of the total - 1 gaps between tokens, without replacement:
    # the first images of a random permutation of the gaps are such a choice. E.g. total 5, cuts [1,
    # 3] -> parts [1, 2, 2].
    cuts = 1 + np.sort(permute(np.arange(n_parts - 1), total - 1, round_keys(name)))
    return np.diff(cuts, prepend=0, append=total)


def replace_runs(ids: Int32Array, is_replaced: BoolArray, sentinels: Int32Array) -> Int32Array:
    """Replace each run of marked tokens by the next sentinel.

    E.g. ids [5, 6, 7, 8], marked [0, 1, 1, 0] and sentinels [99, 98] -> [5, 99, 8].
    """
    # The first token of a run is replaced by the sentinel, and the rest of the run is left out.
    is_first = is_replaced & ~np.concatenate([[False], is_replaced[:-1]])
    replaced = ids.copy()
    replaced[is_first] = sentinels[: is_first.sum()]
    return replaced[is_first | ~is_replaced]


def sentinel_ids(tokenizer: TextTokenizer, n_spans: int, vocab: int) -> Int32Array:
    """Return the ids of the sentinels `<extra_id_0>`, `<extra_id_1>` and so on of T5 tokenizers.

    Raises:
        PrepError: The tokenizer lacks a sentinel, or one is not in the model's vocabulary.
    """
    ids: list[int] = []
    for i in range(n_spans):
        name = f"<extra_id_{i}>"
        token_id = tokenizer.codec.token_id(name)
        if token_id is None:
            why = f"span corruption has {count_text(n_spans, 'span')} per sequence, and a sentinel token for each"
            hint = text(
                "a smaller {}, or {} with the tokenizer of a T5 model",
                Key("data.source_length"),
                Key("data.tokenizer", "PATH", is_override=True),
            )
            raise PrepError(f"{tokenizer.path} has no token {name}", why, hint)
        tokenizer.check_in_vocab(token_id, vocab)
        ids.append(token_id)
    return np.array(ids, np.int32)
