"""Parts of conversations that have no effect on their tokens, counted so that a run can name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trainer.data.examples import TokenIds

# Names of the parts, in the order of their notes. Stores record them.
TOOLS = "tools"
HIDDEN_REASONING = "hidden_reasoning"
NO_STOP_TOKEN = "no_stop_token"
NO_LOSS = "no_loss"
EMPTY_TURN = "empty_turn"
CUT_DOCUMENTS = "cut_documents"
DROPPED_DOCUMENTS = "dropped_documents"

TOOLS_COLUMN = "tools"


def lacks_stop_token(
    ids: TokenIds, weights: npt.NDArray[np.float32], stop_ids: Sequence[int]
) -> bool:
    """Return whether tokens have loss, but none of them ends a text when a model generates.

    Args:
        ids: Tokens of a conversation [T].
        weights: Their loss weights [T].
        stop_ids: Tokens that end a text. Without any, nothing is lacking.
    """
    loss_ids = ids[weights > 0]
    return bool(len(stop_ids) and len(loss_ids) and not np.isin(loss_ids, stop_ids).any())


def describe_ignored(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a line about each ignored part of a store."""
    texts = {
        TOOLS: "{} `tools` that the chat template does not show",
        HIDDEN_REASONING: '{} reasoning that the template leaves out: `data.chat_template = "training"` shows it',
        NO_LOSS: "{} no token with loss",
        EMPTY_TURN: "{} no text, only the token that ends the turn has loss",
        CUT_DOCUMENTS: "{} cut to the length of a sequence",
        DROPPED_DOCUMENTS: "{} dropped, because of more tokens than a sequence",
        NO_STOP_TOKEN: "{} no loss on a token that ends a text: the model does not learn to stop",
    }
    nouns = {
        TOOLS: ("conversation has", "conversations have"),
        HIDDEN_REASONING: ("turn of the assistant has", "turns of the assistant have"),
        NO_LOSS: ("conversation has", "conversations have"),
        EMPTY_TURN: ("turn of the assistant has", "turns of the assistant have"),
        CUT_DOCUMENTS: ("document is", "documents are"),
        DROPPED_DOCUMENTS: ("document is", "documents are"),
        NO_STOP_TOKEN: ("conversation has", "conversations have"),
    }
    for name, line in texts.items():
        count = counts.get(name, 0)
        if count:
            singular, plural = nouns[name]
            noun = plural
            if count == 1:
                noun = singular
            yield line.format(f"{count:,} {noun}")
