"""How a model generates text by default: its end tokens and rules, as the files of a model name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from prepcli.errors import PrepError
from prepcli.sources.source import read_config
from trainer.models.json_types import HFConfig, JsonValue
from trainer.models.token_rules import NO_RULES, TokenRules

GENERATION_CONFIG_FILE = "generation_config.json"
# Fields that change the tokens of transformers' greedy search, and are not supported, with the values that have no
# effect.
UNSUPPORTED_FIELDS: Mapping[str, tuple[JsonValue, ...]] = {
    "bad_words_ids": (None, []),
    "constraints": (None, []),
    "diversity_penalty": (None, 0.0),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0.0),
    "remove_invalid_values": (None, False),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, []),
    "watermarking_config": (None,),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The defaults of a model for generation.

    Attributes:
        eos_token_ids: Tokens that end a text.
        rules: Rules that change which token is chosen.
        notes: Lines for the user about the rules, and about fields that are not supported.
    """

    eos_token_ids: tuple[int, ...]
    rules: TokenRules
    notes: tuple[str, ...]


def folder_generation_defaults(config: HFConfig, folder: Path, vocab: int) -> GenerationDefaults:
    """Return the defaults of a model whose generation_config.json, if it has one, is in a folder."""
    file = folder / GENERATION_CONFIG_FILE
    return generation_defaults(config, file if file.is_file() else None, vocab)


def generation_defaults(
    config: HFConfig, generation_config: Path | None, vocab: int
) -> GenerationDefaults:
    """Return the defaults of a model for generation.

    Ids outside of the vocabulary are dropped, e.g. [2, 99] -> (2,) in a vocabulary of 8 tokens.

    Args:
        config: The model's config.json. It has the fields if there is no generation_config.json, as in transformers.
        generation_config: Its generation_config.json. None if it has none.
        vocab: Vocabulary size.

    Raises:
        PrepError: A field has an invalid value.
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
    rules = _parse_rules(values, name, vocab)
    notes = tuple(_rule_notes(values, rules, name))
    if not isinstance(eos, list):
        eos = [eos]
    return GenerationDefaults(_known_ids(eos, vocab), rules, notes)


def _known_ids(listed: Sequence[object], vocab: int) -> tuple[int, ...]:
    """Return the token ids of a list that are in the vocabulary."""
    # `type` instead of `isinstance`: True is not a token id.
    return tuple(token for token in listed if type(token) is int and 0 <= token < vocab)


def _parse_rules(values: Mapping[str, JsonValue], name: str, vocab: int) -> TokenRules:
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
    )


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


def _rule_notes(values: Mapping[str, JsonValue], rules: TokenRules, name: str) -> Iterator[str]:
    """Yield a line about the rules that change tokens, and one about the fields that are not supported."""
    used: list[str] = []
    for field in fields(TokenRules):
        value = getattr(rules, field.name)
        if value != getattr(NO_RULES, field.name):
            used.append(f"{field.name} {value}")
    if used:
        yield f"by {name}, tokens are chosen with {', '.join(used)}"
    unused: list[str] = []
    for key, neutral in UNSUPPORTED_FIELDS.items():
        if values.get(key) not in neutral:
            unused.append(f"`{key}`")
    if unused:
        yield f"not supported in {name}, where transformers may choose other tokens: {', '.join(unused)}"
