"""Generate the targets of a dataset of pairs from their sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.data.order import eval_batches
from trainer.data.packing import Dataset
from trainer.data.tokenizer import TextTokenizer
from trainer.generation.generator import Generator


@dataclass(frozen=True, slots=True)
class GeneratedTarget:
    """The text generated for a source, and the reference: the target in the data."""

    text: str
    reference: str


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
        limit: Number of pairs, from the first; 0 for all.
    """
    for rows in eval_batches(dataset.n_rows, batch_size, limit=limit):
        present = rows[rows >= 0]
        batch = dataset.get_batch(present)
        sources = [ids[mask].tolist() for ids, mask in zip(batch["source"], batch["present"])]
        references = [ids[mask > 0].tolist() for ids, mask in zip(batch["targets"], batch["weights"])]
        outputs = generator.generate(
            [[decoder_start_id]] * len(present), sources, first_row=int(np.min(present)), min_rows=batch_size
        )
        for output, reference in zip(outputs, references, strict=True):
            yield GeneratedTarget(tokenizer.decode(output), tokenizer.decode(reference))
