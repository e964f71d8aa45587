"""How a model generates text by default: its end tokens and rules, as the files of a model name them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig, JsonValue
from prepcli.sources.source import read_config
from prepcli.stores.paths import AnyPath

GENERATION_CONFIG_FILE = "generation_config.json"
# Fields that change the tokens of transformers' greedy search, and are not supported, with the values that have no
# effect.
UNSUPPORTED_FIELDS: Mapping[str, tuple[JsonValue, ...]] = {
    "constraints": (None, []),
    "diversity_penalty": (None, 0.0),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "force_words_ids": (None, []),
    "guidance_scale": (None, 1.0),
    "max_time": (None,),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0.0),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}

# Devices count in int32. No text has as many tokens, so a larger count has the same effect.
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The rules of a model's generation_config.json that change which token is chosen. Defaults change nothing."""

    # Divisor of the positive logits, and factor of the negative logits, of all tokens of the prompt and the text so
    # far.
    repetition_penalty: float = 1.0
    # Number of tokens that may not occur twice in sequence. 0 means no rule.
    no_repeat_ngram_size: int = 0
    min_length: int = 0  # Minimum tokens of the prompt and the text before an end token.
    min_new_tokens: int = 0  # Minimum new tokens before an end token.
    suppress_tokens: tuple[int, ...] = ()  # Tokens that are never chosen.
    # Tokens that are not chosen as the first new token.
    begin_suppress_tokens: tuple[int, ...] = ()
    # Sequences of tokens, and the number that is added to the logit of the last token after the others.
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    # Sequences of tokens of which the last one is never chosen after the others.
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_bos_token_id: int | None = None  # Token that follows a prompt of one token.
    # Tokens of which one is the last of the maximum number of new tokens.
    forced_eos_token_id: tuple[int, ...] = ()
    # Number of new tokens after which end tokens become more likely, and the factor per further token.
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False  # Replace NaN and infinite logits by finite ones.


NO_RULES = TokenRules()


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The defaults of a model for generation.

    Attributes:
        eos_token_ids: Tokens that end a text.
        rules: Rules that change which token is chosen.
        stop_texts: Texts that end a text.
        notes: Lines for the user about the rules, and about fields that are not supported.
    """

    eos_token_ids: tuple[int, ...]
    rules: TokenRules
    stop_texts: tuple[str, ...]
    notes: tuple[str, ...]


def folder_generation_defaults(config: HFConfig, folder: AnyPath, vocab: int) -> GenerationDefaults:
    """Return the defaults of a model whose generation_config.json, if it has one, is in a folder."""
    file = folder / GENERATION_CONFIG_FILE
    return generation_defaults(config, file if file.is_file() else None, vocab)


def generation_defaults(
    config: HFConfig, generation_config: AnyPath | None, vocab: int
) -> GenerationDefaults:
    """Return the defaults of a model for generation.

    Ids outside of the vocabulary are dropped, e.g. [2, 99] -> (2,) in a vocabulary of 8 tokens.

    Without a generation_config.json, the config has the fields, as in transformers.
    """
    name = "config.json"
    values: Mapping[str, JsonValue] = config
    # The order of transformers' `generate`. The end of a chat turn is often an id that only
    # generation_config.json lists.
    eos = config.get("eos_token_id")
    if generation_config is not None:
        name = GENERATION_CONFIG_FILE
        values = read_config(generation_config)
        eos = values.get("eos_token_id", eos)
    if not isinstance(eos, list):
        eos = [eos]
    eos_ids = _known_ids(eos, vocab)
    fields = _Fields(values, name, vocab)
    rules = fields.rules(eos_ids)
    stop_texts = fields.stop_texts()
    rule_notes: list[str] = []
    used: list[str] = []
    for field in dataclasses.fields(TokenRules):
        value = getattr(rules, field.name)
        if value != getattr(NO_RULES, field.name):
            used.append(f"{field.name} {value!s:.60}")
    if stop_texts:
        used.append(f"stop_strings {list(stop_texts)!s:.60}")
    if used:
        rule_notes.append(f"by {name}, tokens are chosen with {', '.join(used)}")
    unused: list[str] = []
    for key, neutral in UNSUPPORTED_FIELDS.items():
        if values.get(key) not in neutral:
            unused.append(f"`{key}`")
    if unused:
        rule_notes.append(
            f"not supported in {name}, where transformers may choose other tokens: {', '.join(unused)}"
        )
    notes = tuple(rule_notes)
    return GenerationDefaults(eos_ids, rules, stop_texts, notes)


def _known_ids(listed: Sequence[object], vocab: int) -> tuple[int, ...]:
    """Return the token ids of a list that are in the vocabulary."""
    # `type` instead of `isinstance`: True is not a token id.
    return tuple(token for token in listed if type(token) is int and 0 <= token < vocab)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a file with this name. A method raises PrepError for an invalid value."""

    values: Mapping[str, JsonValue]
    name: str
    vocab: int

    def error(self, key: str) -> PrepError:
        why = f"`{key}` is {self.values.get(key)!r:.60}"
        return PrepError(f"{self.name} is invalid", why, "correct it, or remove the field")

    def rules(self, eos_ids: tuple[int, ...]) -> TokenRules:
        penalty = self.values.get("repetition_penalty")
        if penalty is None:
            penalty = 1.0
        if not isinstance(penalty, int | float) or not penalty > 0:
            raise self.error("repetition_penalty")
        # As in transformers, `min_new_tokens` takes precedence, also if it is 0.
        min_length = 0
        if self.values.get("min_new_tokens") is None:
            min_length = self.count("min_length")
        return TokenRules(
            repetition_penalty=self.number("repetition_penalty", penalty),
            no_repeat_ngram_size=self.count("no_repeat_ngram_size"),
            min_length=min_length,
            min_new_tokens=self.count("min_new_tokens"),
            suppress_tokens=self.tokens("suppress_tokens"),
            begin_suppress_tokens=self.tokens("begin_suppress_tokens"),
            sequence_bias=self.sequence_bias(),
            bad_words_ids=self.bad_words(eos_ids),
            forced_bos_token_id=next(iter(self.forced_ids("forced_bos_token_id")), None),
            forced_eos_token_id=self.forced_ids("forced_eos_token_id"),
            exponential_decay_length_penalty=self.length_penalty(),
            remove_invalid_values=self.values.get("remove_invalid_values") is True,
        )

    def count(self, key: str) -> int:
        """Return a number of tokens, or 0 if the field is absent."""
        value = self.values.get(key)
        if value is None:
            return 0
        if not isinstance(value, int) or value < 0:
            raise self.error(key)
        return min(value, MAX_COUNT)

    def number(self, key: str, value: float) -> float:
        """Return a number in a field as a float. An integer of JSON may be too large for one."""
        try:
            return float(value)
        except OverflowError:
            raise self.error(key) from None

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return the tokens of a list within the vocabulary, or none if the field is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.error(key)
        return _known_ids(value, self.vocab)

    def sequence(self, key: str, value: JsonValue) -> tuple[int, ...]:
        """Return a sequence of token ids in a field."""
        if isinstance(value, list) and value:
            ids = _known_ids(value, self.vocab)
            if len(ids) == len(value):
                return ids
        raise self.error(key)

    def entries(self, key: str) -> list[JsonValue]:
        """Return the entries of a list. An empty dict is how transformers writes none."""
        listed = self.values.get(key)
        if not listed:
            return []
        if not isinstance(listed, list):
            raise self.error(key)
        return listed

    def sequence_bias(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        """Return the sequences of a list such as `[[[5, 6], -2.0]]`."""
        biases: list[tuple[tuple[int, ...], float]] = []
        for entry in self.entries("sequence_bias"):
            if not isinstance(entry, list) or len(entry) != 2:
                raise self.error("sequence_bias")
            ids, bias = entry
            if not isinstance(bias, int | float) or isinstance(bias, bool):
                raise self.error("sequence_bias")
            number = self.number("sequence_bias", bias)
            biases.append((self.sequence("sequence_bias", ids), number))
        return tuple(biases)

    def bad_words(self, eos_ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of `bad_words_ids`. As in transformers, an end token alone is not one."""
        words = [self.sequence("bad_words_ids", entry) for entry in self.entries("bad_words_ids")]
        return tuple(ids for ids in words if not (len(ids) == 1 and ids[0] in eos_ids))

    def forced_ids(self, key: str) -> tuple[int, ...]:
        """Return the token, or the tokens, of a field."""
        value = self.values.get(key)
        if value is None:
            return ()
        return self.sequence(key, value if isinstance(value, list) else [value])

    def length_penalty(self) -> tuple[int, float] | None:
        """Return the start and the factor of `exponential_decay_length_penalty`."""
        key = "exponential_decay_length_penalty"
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 2:
            start, factor = value
            if type(start) is int and start >= 0 and isinstance(factor, int | float):
                return min(start, MAX_COUNT), self.number(key, factor)
        raise self.error(key)

    def stop_texts(self) -> tuple[str, ...]:
        """Return the texts of `stop_strings`: a text, or a list of texts."""
        value = self.values.get("stop_strings")
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        texts = tuple(text for text in listed if isinstance(text, str) and text)
        if len(texts) != len(listed):
            raise self.error("stop_strings")
        return texts
