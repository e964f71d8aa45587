"""Find the texts that end a generated text, as `stop_strings` of transformers does."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.incremental_decoder import REPLACEMENT, IncrementalDecoder
from trainer.data.tokenizer import TextTokenizer


class StopFinder:
    """Finds the token with which the first stop text ends.

    A stop text may be spread over several tokens, also of the prompt, or be the text of a special token.

    Attributes:
        has_stopped: Whether a stop text has ended.
    """

    def __init__(
        self, stop_texts: Sequence[str], tokenizer: TextTokenizer, preceding_ids: Sequence[int]
    ) -> None:
        """Start before the first new token.

        Args:
            stop_texts: The texts, none of them empty.
            tokenizer: Tokenizer of the tokens.
            preceding_ids: Token ids of the prompt.
        """
        self.has_stopped = False
        codec = tokenizer.codec
        self._texts = tuple(stop_texts)
        # Decoding skips special tokens, such as `<|im_end|>`.
        self._ids = {codec.token_id(text) for text in stop_texts}
        self._decoder = IncrementalDecoder(codec.decode, codec.token, preceding_ids)
        # A stop text that begins before the next piece begins in this many characters.
        self._kept_chars = max(map(len, stop_texts)) - 1
        self._tail = self._last_chars(tokenizer.decode(preceding_ids))

    def __call__(self, token: int) -> bool:
        """Take the next token, and return whether a stop text ends with it."""
        # Characters that were complete before this token.
        num_seen = len(self._tail) + len(self._decoder.finish().rstrip(REPLACEMENT))
        text = self._tail + self._decoder.push([token])
        self._tail = self._last_chars(text)
        # The decoder holds text back that may change, e.g. spaces at the end.
        text += self._decoder.finish()
        if token in self._ids:
            self.has_stopped = True
        for stop in self._texts:
            # A text of the prompt does not end the text: the stop text ends after the seen characters.
            if stop in text[max(0, num_seen - len(stop) + 1) :]:
                self.has_stopped = True
        return self.has_stopped

    def _last_chars(self, text: str) -> str:
        return text[max(0, len(text) - self._kept_chars) :]
