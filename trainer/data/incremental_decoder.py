"""Decode a text while its tokens arrive, and find the texts that end it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trainer.data.tokenizer import TextTokenizer

# Decoders return this character for bytes without the rest of their character.
REPLACEMENT = "\ufffd"
# Byte-fallback tokens, e.g. `<0xE2>`: some tokenizers spell unknown characters byte by byte.
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class IncrementalDecoder:
    """Decoder of one text, token by token.

    `push` returns the text piece by piece. All pieces, joined, are the text of all tokens.

    A token is decoded together with the tokens of the piece before it: tokenizers strip the first
    space of a text. Text is held back if later tokens may change it: characters without all of their
    bytes, runs of single-byte tokens, and trailing spaces, which some tokenizers strip.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        token: Callable[[int], str | None],
        preceding_ids: Sequence[int] = (),
    ) -> None:
        """Start a text after some ids. `token` returns the spelling of a token, or None for an unknown id."""
        self._decode = decode
        self._token = token
        self._ids = list(preceding_ids)
        # Index in `_ids` of the first token of the last piece, and of the next one.
        self._context_start = 0
        self._start = len(self._ids)
        self._first = self._start

    def push(self, ids: Sequence[int]) -> str:
        """Add token ids and return the next piece of text. It is empty if all text is held back."""
        self._ids += ids
        if self._start == len(self._ids) or self._ends_with_byte():
            return ""
        piece = self._pending_text()
        if not piece.strip() or piece.endswith(REPLACEMENT):
            return ""
        self._context_start = self._start
        self._start = len(self._ids)
        return piece

    def finish(self) -> str:
        """Return the held-back text."""
        return self._pending_text()

    def _ends_with_byte(self) -> bool:
        """Return whether the last token with a text is a single byte. More bytes may follow."""
        for token_id in reversed(self._ids[self._start :]):
            if _BYTE_TOKEN.fullmatch(self._token(token_id) or ""):
                return True
            if self._decode([token_id]):
                return False
        return False

    def _pending_text(self) -> str:
        """Decode the ids after the last piece."""
        context = self._decode(self._ids[self._context_start : self._start])
        text = self._decode(self._ids[self._context_start :])
        if text.startswith(context):
            return text[len(context) :]
        if self._start != self._first:
            # The tokenizer changed the last piece.
            return ""
        # The preceding ids end within a character: the text is decoded without them, as
        # `TextTokenizer.decode` does
        return self._decode(self._ids[self._first :])


class StopFinder:
    """Finds the token with which the first stop text ends.

    A stop text may be spread over several tokens, also of the prompt, or be the text of a special token.

    Attributes:
        has_stopped: Whether a stop text has ended.
    """

    def __init__(
        self, stop_texts: Sequence[str], tokenizer: TextTokenizer, preceding_ids: Sequence[int]
    ) -> None:
        """Start before the first new token. The texts are not empty, and may begin in the prompt."""
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
