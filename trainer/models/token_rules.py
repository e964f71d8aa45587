"""The rules of a model's generation_config.json that change which token is chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The rules. Defaults change nothing.

    Attributes:
        repetition_penalty: Divisor of the positive logits, and factor of the negative logits, of all tokens of the
            prompt and the text so far.
        no_repeat_ngram_size: Number of tokens that may not occur twice in sequence. 0 means no rule.
        min_length: Minimum tokens of the prompt and the text before an end token.
        min_new_tokens: Minimum new tokens before an end token.
        suppress_tokens: Tokens that are never chosen.
        begin_suppress_tokens: Tokens that are not chosen as the first new token.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()


NO_RULES = TokenRules()
