"""New tokens of prompts, decoded while they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prepcli.commands.operations.results import NewTokens

if TYPE_CHECKING:
    from trainer.data.incremental_decoder import IncrementalDecoder


class TokenStream:
    """Stream of the new tokens of prompts and their texts to a callback."""

    def __init__(
        self, decoders: Sequence[IncrementalDecoder], on_tokens: Callable[[NewTokens], None]
    ) -> None:
        """Start before the first token.

        Args:
            decoders: Decoder of each prompt's text.
            on_tokens: Called with the next tokens of a prompt.
        """
        self._decoders = decoders
        self._on_tokens = on_tokens

    def push(self, first_prompt: int, new_tokens: Sequence[Sequence[int]]) -> None:
        """Pass on the next tokens of the prompts from number `first_prompt` on."""
        for prompt, tokens in enumerate(new_tokens, first_prompt):
            if tokens:
                self._pass_on_text(prompt, tokens, self._decoders[prompt].push(tokens))

    def finish(self, first_prompt: int, last_prompt: int) -> None:
        """Pass on the held-back text of prompts `first_prompt:last_prompt`."""
        for prompt in range(first_prompt, last_prompt):
            # A character may need several tokens, so the decoder holds incomplete ones back. No further token completes
            # them now.
            if text := self._decoders[prompt].finish():
                self._pass_on_text(prompt, (), text)

    def _pass_on_text(self, prompt: int, tokens: Sequence[int], text: str) -> None:
        self._on_tokens(NewTokens(prompt, tuple(tokens), text))
