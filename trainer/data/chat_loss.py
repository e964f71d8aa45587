"""Which turns of a conversation have loss, and how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject, JsonValue, json_type_name
from trainer.data.chat_marks import ASSISTANT
from trainer.data.column_values import LINE_HINT

# The choices of turns that are not roles: the last turn of the assistant, and all text.
LAST = ("last",)
ALL = ("all",)
# Keys of a message with its loss weight, a number, or with whether it has loss, in the formats of several trainers.
WEIGHT_KEYS = ("loss_weight", "weight")
TRAIN_KEYS = ("loss", "train", "training")
WEIGHT_HINT = "a number from 0 to 1, or true or false"


@dataclass(frozen=True, slots=True)
class LossRule:
    """The parts of conversations with loss.

    Attributes:
        turns: Roles of the turns, or `LAST` or `ALL`.
        has_reasoning: Whether the reasoning of a turn has loss.
    """

    turns: tuple[str, ...] = (ASSISTANT,)
    has_reasoning: bool = True

    @property
    def is_default(self) -> bool:
        """Whether all text that the assistant writes has loss, and nothing else."""
        return self.turns == (ASSISTANT,) and self.has_reasoning

    @property
    def roles(self) -> tuple[str, ...] | None:
        """Roles whose turns may have loss. None for all text."""
        if self.turns == ALL:
            return None
        if self.turns == LAST:
            return (ASSISTANT,)
        return self.turns

    def select(self, messages: Sequence[JsonObject]) -> list[int]:
        """Return the indices of the messages whose turns have loss, if their weight is not 0."""
        roles = self.roles
        indices = [
            index
            for index, message in enumerate(messages)
            if roles is None or message["role"] in roles
        ]
        if self.turns == LAST:
            return indices[-1:]
        return indices

    def identity_inputs(self) -> list[JsonValue] | None:
        """Return the inputs of a store's identity. None for the default."""
        if self.is_default:
            return None
        return [[*self.turns], self.has_reasoning]


DEFAULT_LOSS = LossRule()


def message_weight(message: Mapping[str, JsonValue], place: str) -> float:
    """Return the loss weight of a message: 1 without a key for it.

    >>> message_weight({"role": "assistant", "train": False}, "a.jsonl:1")
    0.0

    Args:
        message: The message. If several keys give a weight, the least one counts.
        place: File and line, for error messages.

    Raises:
        PrepError: A value is not a weight.
    """
    weight = 1.0
    for key in (*WEIGHT_KEYS, *TRAIN_KEYS):
        value = message.get(key)
        if value is None:
            continue
        # A boolean is a number, and a NaN fails the comparison.
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            shown = value if isinstance(value, int | float) else json_type_name(value)
            raise PrepError(f"{place}: `{key}` of a message is {shown}", WEIGHT_HINT, LINE_HINT)
        weight = min(weight, float(value))
    return weight
