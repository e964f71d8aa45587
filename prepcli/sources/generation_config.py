"""How a model generates text by default: its end tokens and rules, as the files of a model name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig, JsonValue
from prepcli.models.token_rules import NO_RULES, TokenRules
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

    Args:
        config: The model's config.json. It has the fields if there is no generation_config.json, as in transformers.
        generation_config: Its generation_config.json. None if it has none.
        vocab: Vocabulary size.
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
    rules = _parse_rules(values, name, vocab, eos_ids)
    stop_texts = _stop_texts(values, name)
    notes = tuple(_rule_notes(values, rules, stop_texts, name))
    return GenerationDefaults(eos_ids, rules, stop_texts, notes)


def _known_ids(listed: Sequence[object], vocab: int) -> tuple[int, ...]:
    """Return the token ids of a list that are in the vocabulary."""
    # `type` instead of `isinstance`: True is not a token id.
    return tuple(token for token in listed if type(token) is int and 0 <= token < vocab)


def _parse_rules(
    values: Mapping[str, JsonValue], name: str, vocab: int, eos_ids: tuple[int, ...]
) -> TokenRules:
    """Return the rules of a file. Raise PrepError if one is invalid."""
    penalty = values.get("repetition_penalty")
    if penalty is None:
        penalty = 1.0
    if not isinstance(penalty, int | float) or not penalty > 0:
        raise _field_error("repetition_penalty", penalty, name)
    # As in transformers, `min_new_tokens` takes precedence, also if it is 0.
    min_length = 0
    if values.get("min_new_tokens") is None:
        min_length = _count(values, "min_length", name)
    return TokenRules(
        repetition_penalty=float(penalty),
        no_repeat_ngram_size=_count(values, "no_repeat_ngram_size", name),
        min_length=min_length,
        min_new_tokens=_count(values, "min_new_tokens", name),
        suppress_tokens=_token_list(values, "suppress_tokens", name, vocab=vocab),
        begin_suppress_tokens=_token_list(values, "begin_suppress_tokens", name, vocab=vocab),
        sequence_bias=_sequence_bias(values, name, vocab),
        bad_words_ids=_bad_words(values, name, vocab, eos_ids),
        forced_bos_token_id=next(
            iter(_forced_ids(values, "forced_bos_token_id", name, vocab)), None
        ),
        forced_eos_token_id=_forced_ids(values, "forced_eos_token_id", name, vocab),
        exponential_decay_length_penalty=_length_penalty(values, name),
        remove_invalid_values=values.get("remove_invalid_values") is True,
    )


def _sequence(value: JsonValue, vocab: int) -> tuple[int, ...] | None:
    """Return a sequence of token ids, or None for another value."""
    if not isinstance(value, list) or not value:
        return None
    ids = _known_ids(value, vocab)
    if len(ids) != len(value):
        return None
    return ids


def _sequence_bias(
    values: Mapping[str, JsonValue], name: str, vocab: int
) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Return the sequences of `sequence_bias`, a list such as `[[[5, 6], -2.0]]`."""
    listed = values.get("sequence_bias")
    # An empty dict is how transformers writes none.
    if not listed:
        return ()
    biases: list[tuple[tuple[int, ...], float]] = []
    for entry in listed if isinstance(listed, list) else [None]:
        ids = None
        bias = None
        if isinstance(entry, list) and len(entry) == 2:
            ids = _sequence(entry[0], vocab)
            bias = entry[1]
        if ids is None or not isinstance(bias, int | float) or isinstance(bias, bool):
            raise _field_error("sequence_bias", listed, name)
        biases.append((ids, float(bias)))
    return tuple(biases)


def _bad_words(
    values: Mapping[str, JsonValue], name: str, vocab: int, eos_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of `bad_words_ids`. As in transformers, an end token alone is not one."""
    listed = values.get("bad_words_ids")
    if not listed:
        return ()
    words: list[tuple[int, ...]] = []
    for entry in listed if isinstance(listed, list) else [None]:
        ids = _sequence(entry, vocab)
        if ids is None:
            raise _field_error("bad_words_ids", listed, name)
        if not (len(ids) == 1 and ids[0] in eos_ids):
            words.append(ids)
    return tuple(words)


def _forced_ids(
    values: Mapping[str, JsonValue], key: str, name: str, vocab: int
) -> tuple[int, ...]:
    """Return the token, or the tokens, of a field."""
    value = values.get(key)
    if value is None:
        return ()
    ids = _sequence(value if isinstance(value, list) else [value], vocab)
    if ids is None:
        raise _field_error(key, value, name)
    return ids


def _length_penalty(values: Mapping[str, JsonValue], name: str) -> tuple[int, float] | None:
    """Return the start and the factor of `exponential_decay_length_penalty`."""
    key = "exponential_decay_length_penalty"
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        start, factor = value
        if type(start) is int and start >= 0 and isinstance(factor, int | float):
            return start, float(factor)
    raise _field_error(key, value, name)


def _stop_texts(values: Mapping[str, JsonValue], name: str) -> tuple[str, ...]:
    """Return the texts of `stop_strings`: a text, or a list of texts."""
    value = values.get("stop_strings")
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    texts = tuple(text for text in listed if isinstance(text, str) and text)
    if len(texts) != len(listed):
        raise _field_error("stop_strings", value, name)
    return texts


def _count(values: Mapping[str, JsonValue], key: str, name: str) -> int:
    """Return a number of tokens, or 0 if the field is absent."""
    value = values.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or value < 0:
        raise _field_error(key, value, name)
    return value


def _token_list(
    values: Mapping[str, JsonValue], key: str, name: str, *, vocab: int
) -> tuple[int, ...]:
    """Return the tokens of a list that are in the vocabulary, or none if the field is absent."""
    value = values.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _field_error(key, value, name)
    return _known_ids(value, vocab)


def _field_error(key: str, value: JsonValue, name: str) -> PrepError:
    why = f"`{key}` is {value!r:.60}"
    return PrepError(f"{name} is invalid", why, "correct it, or remove the field")


def _rule_notes(
    values: Mapping[str, JsonValue], rules: TokenRules, stop_texts: Sequence[str], name: str
) -> Iterator[str]:
    """Yield a line about the rules that change tokens, and one about the fields that are not supported."""
    used: list[str] = []
    for field in fields(TokenRules):
        value = getattr(rules, field.name)
        if value != getattr(NO_RULES, field.name):
            used.append(f"{field.name} {value!s:.60}")
    if stop_texts:
        used.append(f"stop_strings {list(stop_texts)!s:.60}")
    if used:
        yield f"by {name}, tokens are chosen with {', '.join(used)}"
    unused: list[str] = []
    for key, neutral in UNSUPPORTED_FIELDS.items():
        if values.get(key) not in neutral:
            unused.append(f"`{key}`")
    if unused:
        yield f"not supported in {name}, where transformers may choose other tokens: {', '.join(unused)}"
