"""Parts of conversations that have no effect on their tokens, counted so that a run can name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trainer.data.examples import TokenIds
from trainer.models.json_types import JsonObject

# Names of the parts, in the order of their notes. Stores record them.
TOOLS = "tools"
UNTRAINED_TURNS = "untrained_turns"
NO_STOP_TOKEN = "no_stop_token"

TOOLS_COLUMN = "tools"
# Keys of a message that turn off its loss with false, in the formats of several trainers. Also `weight`, with 0.
TRAIN_KEYS = ("train", "loss", "training")


def ignored_parts(values: Mapping[str, object], messages: Sequence[JsonObject]) -> Iterator[str]:
    """Yield the name of each part of a conversation that its tokens do not show.

    Args:
        values: Columns of the record.
        messages: Its messages.
    """
    if values.get(TOOLS_COLUMN):
        yield TOOLS
    for message in messages:
        if message["role"] == "assistant" and _is_untrained(message):
            yield UNTRAINED_TURNS


def _is_untrained(message: JsonObject) -> bool:
    """Return whether a message is marked to have no loss."""
    weight = message.get("weight")
    has_no_weight = isinstance(weight, int | float) and weight == 0
    return has_no_weight or any(message.get(key) is False for key in TRAIN_KEYS)


def lacks_stop_token(
    ids: TokenIds, weights: npt.NDArray[np.uint8], stop_ids: Sequence[int]
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
        TOOLS: "{} `tools`: the chat template does not get them, so the text does not show them",
        UNTRAINED_TURNS: "{} marked to have no loss (by `weight`, `train`, `loss` or `training`), and have loss",
        NO_STOP_TOKEN: "{} no loss on a token that ends a text: the model does not learn to stop",
    }
    nouns = {
        TOOLS: ("conversation has", "conversations have"),
        UNTRAINED_TURNS: ("turn of the assistant is", "turns of the assistant are"),
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
