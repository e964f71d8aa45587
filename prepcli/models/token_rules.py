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
        sequence_bias: Sequences of tokens, and the number that is added to the logit of the last token after the
            others.
        bad_words_ids: Sequences of tokens of which the last one is never chosen after the others.
        forced_bos_token_id: Token that follows a prompt of one token.
        forced_eos_token_id: Tokens of which one is the last of the maximum number of new tokens.
        exponential_decay_length_penalty: Number of new tokens after which end tokens become more likely, and the
            factor per further token.
        remove_invalid_values: Replace NaN and infinite logits by finite ones.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False


NO_RULES = TokenRules()
