"""The result of a conversation in the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.core.json_values import JsonObject


@dataclass(frozen=True)
class ChatResult:
    """A conversation with a model.

    Attributes:
        messages: Its messages, with the answers of the model.
        num_tokens: Tokens of all answers, also of stopped ones and of those before a reset.
        mesh: Mesh of the devices. None means one device.
        dtype: Dtype of the computation.
        seconds: Duration of the conversation in seconds.
    """

    messages: tuple[JsonObject, ...]
    num_tokens: int
    mesh: str | None
    dtype: str
    seconds: float
