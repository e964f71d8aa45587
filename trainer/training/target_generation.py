"""Generate the targets of a dataset of pairs from their sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.data.order import eval_batches
from trainer.data.packing import Arrays, Dataset, RowIndices
from trainer.data.seq2seq import Seq2SeqDataset
from trainer.data.tokenizer import TextTokenizer
from trainer.generation.generator import Generator


@dataclass(frozen=True, slots=True)
class GeneratedTarget:
    """The text generated for a source, and the reference.

    Attributes:
        text: The generated text, of at most as many tokens as a sequence has.
        reference: The whole target in the data.
        is_longer: Whether the reference has more tokens than a sequence, end token excluded.
    """

    text: str
    reference: str
    is_longer: bool


def generate_targets(
    generator: Generator,
    dataset: Dataset,
    tokenizer: TextTokenizer,
    *,
    decoder_start_id: int,
    batch_size: int,
    limit: int = 0,
) -> Iterator[GeneratedTarget]:
    """Generate a target for each pair of a dataset, in order.

    Args:
        generator: The model, which has an encoder.
        dataset: The pairs.
        tokenizer: Decodes the generated and the reference tokens.
        decoder_start_id: First token of the decoder.
        batch_size: Pairs per batch.
        limit: Number of pairs, from the first. 0 means all.
    """
    end_id: int | None = None
    if isinstance(dataset, Seq2SeqDataset):
        end_id = dataset.eos_id
    for rows in eval_batches(dataset.n_rows, batch_size, limit=limit):
        present = rows[rows >= 0]
        batch = dataset.get_batch(present)
        sources = [ids[mask].tolist() for ids, mask in zip(batch["source"], batch["present"])]
        references = _reference_ids(dataset, present, batch)
        outputs = generator.generate(
            [[decoder_start_id]] * len(present),
            sources,
            first_row=int(np.min(present)),
            min_rows=batch_size,
        )
        for output, reference in zip(outputs, references, strict=True):
            is_longer = len(reference) - (reference[-1:] == [end_id]) > dataset.seq_length
            yield GeneratedTarget(tokenizer.decode(output), tokenizer.decode(reference), is_longer)


def _reference_ids(dataset: Dataset, rows: RowIndices, batch: Arrays) -> list[list[int]]:
    """Return the tokens of references: whole targets, also of pairs that are cut in a batch."""
    if isinstance(dataset, Seq2SeqDataset):
        return [dataset.target_ids(int(row)).tolist() for row in rows]
    return [ids[mask > 0].tolist() for ids, mask in zip(batch["targets"], batch["weights"])]
