"""New tokens of prompts, decoded while they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.data.incremental_decoder import IncrementalDecoder


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The next tokens of a prompt.

    Attributes:
        prompt: Number of the prompt, from 0.
        tokens: The token ids; empty for text that had to wait for the last token.
        text: The next piece of the text. The pieces of a prompt add up to its text: a character without all of its
            bytes waits for them. Without a tokenizer, token ids with commas.
    """

    prompt: int
    tokens: tuple[int, ...]
    text: str


class TokenStream:
    """Passes on the new tokens of prompts with their texts.

    Attributes:
        texts: The text of each prompt so far.
    """

    def __init__(self, decoders: Sequence[IncrementalDecoder], on_tokens: Callable[[NewTokens], None]) -> None:
        """Start before the first token.

        Args:
            decoders: Decoder of each prompt's text.
            on_tokens: Called with the next tokens of a prompt.
        """
        self._decoders, self._on_tokens = decoders, on_tokens
        self.texts = [""] * len(decoders)

    def push(self, first_prompt: int, new_tokens: Sequence[Sequence[int]]) -> None:
        """Pass on the next tokens of the prompts from number `first_prompt` on."""
        for prompt, tokens in enumerate(new_tokens, first_prompt):
            if tokens:
                self._pass_on(prompt, tokens, self._decoders[prompt].push(tokens))

    def finish(self, first_prompt: int, last_prompt: int) -> None:
        """Pass on the text that was held back for prompts `first_prompt:last_prompt`."""
        for prompt in range(first_prompt, last_prompt):
            if text := self._decoders[prompt].finish():
                self._pass_on(prompt, (), text)

    def _pass_on(self, prompt: int, tokens: Sequence[int], text: str) -> None:
        self.texts[prompt] += text
        self._on_tokens(NewTokens(prompt, tuple(tokens), text))
