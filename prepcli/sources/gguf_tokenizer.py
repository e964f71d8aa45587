"""The tokenizer of a GGUF file as `tokenizer.json`, where the metadata describes it exactly.

The metadata has the tokens and their types. A BPE tokenizer of bytes has merges, and the name of a pre-tokenizer of
llama.cpp's code. A SentencePiece tokenizer has scores: the two neighbours with the highest score of their concatenation
are merged first, and a character without a token becomes the tokens of its bytes. A space is added before each text,
and after each special token, unless `add_space_prefix` is false.

Sources: `llama_vocab::impl::load` and `llm_tokenizer_spm_session` of llama.cpp (src/llama-vocab.cpp), the tokenizers of
transformers 5.24 for GPT-2, LLaMA 3 and Qwen2, and the published `tokenizer.json` of LLaMA 2.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from prepcli.formats.gguf import GgufArray
from prepcli.planning.plan import SmallFile

TOKENIZER_PREFIX = "tokenizer.ggml"
BPE_MODEL = "gpt2"
SENTENCEPIECE_MODEL = "llama"
NORMAL_TYPE = 1
UNKNOWN_TYPE = 2
CONTROL_TYPE = 3
USER_DEFINED_TYPE = 4
# Rows of the embedding without a token.
UNUSED_TYPE = 5
BYTE_TYPE = 6
# SentencePiece writes spaces as this character.
SPACE = "\u2581"
# SentencePiece trains pieces of 16 characters by default. A hostile token may have any length.
MAX_PIECE_LENGTH = 128
# LLaMA 2 has 2 merges per token. Hostile tokens may have as many as characters.
MERGES_PER_PIECE = 8
# Models from which llama.cpp removes the spaces after special tokens. The metadata does not say so.
STRIPPED_ARCHITECTURE = "phi3"
STRIPPED_NAMES = ("phi-3", "phi3")
# Normalizations of SentencePiece, which llama.cpp does not apply to such a tokenizer.
NORMALIZATIONS = ("remove_extra_whitespaces", "precompiled_charsmap")
# Setting of tokenizer_config.json by the key of a token's number.
TOKEN_SETTINGS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}
# Numbers of special tokens without a key in the metadata.
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
NO_PADDING = {"version": "1.0", "truncation": None, "padding": None}
BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Rules to split texts into words, for one value of the metadata key `tokenizer.ggml.pre`.

    Attributes:
        pattern: Regular expression of words, or empty for the one of GPT-2.
        is_normalized: Whether text is normalized to NFC.
        ignores_merges: Whether a word that is a token is not merged from its bytes.
        adds_bos: Whether texts begin with the BOS token, unless the metadata says otherwise.
    """

    pattern: str = ""
    is_normalized: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "llama-bpe": PreTokenizer(
        rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignores_merges=True, adds_bos=True
    ),
    "qwen2": PreTokenizer(rf"{_WORDS}|\p{{N}}|{_REST}", is_normalized=True),
}


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[SmallFile, ...]:
    """Return `tokenizer.json`, to make when it is written, and `tokenizer_config.json`."""
    name = str(metadata.get("general.name", "")).lower()
    is_stripped = metadata.get("general.architecture") == STRIPPED_ARCHITECTURE
    if is_stripped or any(stripped in name for stripped in STRIPPED_NAMES):
        raise ValueError("spaces after special tokens of Phi-3 are removed, which is not supported")
    # Check the metadata. The merges take most of the time, and a dry run does not need them.
    _tokenizer_document(metadata, has_merges=False)
    tokens = _metadata_strings(metadata, "tokens")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key, setting in TOKEN_SETTINGS.items():
        token = _metadata_token(metadata, tokens, key)
        if token:
            settings[setting] = token
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return (
        SmallFile("tokenizer.json", make=partial(_tokenizer_json, metadata)),
        SmallFile("tokenizer_config.json", _encode_json(settings)),
    )


def _tokenizer_json(metadata: Mapping[str, Any]) -> bytes:
    """Return the content of `tokenizer.json`."""
    return _encode_json(_tokenizer_document(metadata, has_merges=True))


def _tokenizer_document(metadata: Mapping[str, Any], *, has_merges: bool) -> dict[str, Any]:
    """Return `tokenizer.json` as a document.

    Without `has_merges`, the merges of scores are only checked.
    """
    model = metadata.get(f"{TOKENIZER_PREFIX}.model")
    if model == BPE_MODEL:
        name = metadata.get(f"{TOKENIZER_PREFIX}.pre")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise ValueError(f"its pre-tokenizer is {name!r:.40}, and {known} are converted")
        pre_tokenizer = PRE_TOKENIZERS[name]
        tokens = _metadata_strings(metadata, "tokens")
        types = _metadata_array(metadata, "token_type").numbers().tolist()
        merges = [merge.split(" ") for merge in _metadata_strings(metadata, "merges")]
        _check_tokens(tokens, types)
        known = {*tokens}
        for merge in merges:
            if len(merge) != 2 or not known.issuperset((*merge, "".join(merge))):
                raise ValueError(f"{' '.join(merge)!r:.60} is not a merge of two tokens")
        if not pre_tokenizer.pattern:
            pre_tokenization = _byte_level(use_regex=True)
        else:
            split = {
                "type": "Split",
                "pattern": {"Regex": pre_tokenizer.pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            pre_tokenization = {
                "type": "Sequence",
                "pretokenizers": [split, _byte_level(use_regex=False)],
            }
        return {
            **NO_PADDING,
            "added_tokens": _added_tokens(tokens, types, (CONTROL_TYPE, USER_DEFINED_TYPE)),
            "normalizer": {"type": "NFC"} if pre_tokenizer.is_normalized else None,
            "pre_tokenizer": pre_tokenization,
            "post_processor": _post_processor(metadata, tokens, adds_bos=pre_tokenizer.adds_bos),
            "decoder": _byte_level(use_regex=True),
            "model": {
                **BPE,
                "ignore_merges": pre_tokenizer.ignores_merges,
                "vocab": _token_ids(tokens, types),
                "merges": merges,
            },
        }
    if model == SENTENCEPIECE_MODEL:
        return _sentencepiece_document(metadata, has_merges=has_merges)
    raise ValueError(f"its tokenizer is {model!r:.40}, and BPE and SentencePiece are converted")


def _sentencepiece_document(metadata: Mapping[str, Any], *, has_merges: bool) -> dict[str, Any]:
    """Return the tokenizer.json of a SentencePiece tokenizer. See `_tokenizer_document`."""
    for key in NORMALIZATIONS:
        if metadata.get(f"{TOKENIZER_PREFIX}.{key}"):
            raise ValueError(f"`{TOKENIZER_PREFIX}.{key}` is not supported")
    tokens = _metadata_strings(metadata, "tokens")
    types = _metadata_array(metadata, "token_type").numbers().tolist()
    scores = _metadata_array(metadata, "scores").numbers()
    _check_tokens(tokens, types)
    byte_tokens = {token for token, token_type in zip(tokens, types) if token_type == BYTE_TYPE}
    for value in range(256):
        if f"<0x{value:02X}>" not in byte_tokens:
            raise ValueError(f"it has no token of the byte 0x{value:02X}")
    if len(scores) != len(tokens) or not np.isfinite(scores).all():
        raise ValueError("its tokens have no scores")
    pieces: dict[str, float] = {}
    for token, token_type, score in zip(tokens, types, scores.tolist()):
        if len(token) > MAX_PIECE_LENGTH:
            raise ValueError(f"a token has {len(token):,} characters")
        if token_type == USER_DEFINED_TYPE and SPACE in token:
            raise ValueError(f"the spaces of {token!r} are escaped")
        if token_type == NORMAL_TYPE:
            pieces[token] = score
    merges: list[tuple[str, str]] = []
    # If all scores differ and pieces are short, `_merges_of_scores` raises no error.
    num_splits = sum(map(len, pieces)) - len(pieces)
    has_ties = len({*pieces.values()}) < len(pieces)
    if has_merges or has_ties or num_splits > MERGES_PER_PIECE * len(pieces):
        merges = _merges_of_scores(pieces)
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers: list[dict[str, Any]] = [replace_spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.get(f"{TOKENIZER_PREFIX}.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    special_types = (UNKNOWN_TYPE, CONTROL_TYPE, USER_DEFINED_TYPE)
    return {
        **NO_PADDING,
        "added_tokens": _added_tokens(tokens, types, special_types),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, tokens, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **BPE,
            "byte_fallback": True,
            "vocab": _token_ids(tokens, types),
            "merges": merges,
        },
    }


def _merges_of_scores(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merges of vocabulary pieces, the one with the highest score first.

    SentencePiece merges neighbours with equal scores from left to right. Merges are in an order. Raises ValueError if
    the two may give other tokens.

    >>> _merges_of_scores({"a": -3.0, "b": -4.0, "ab": -1.0, "aab": -2.0})
    [('a', 'b'), ('a', 'ab')]
    """
    max_merges = MERGES_PER_PIECE * len(pieces)
    merges: list[tuple[str, str]] = []
    for _, tokens in groupby(sorted(pieces, key=lambda token: -pieces[token]), key=pieces.get):
        pairs_by_token = {token: _mergeable_pairs(token, pieces) for token in tokens}
        # The order of tied merges has no effect if two of them never share a piece of a text, and no merge of an equal
        # or higher score takes a token that they make. E.g. with `ab` and `cd`, all neighbours a b and c d are merged
        # in any order. With `ab` and `bc` the text abc becomes ab c from left to right, and a bc in the other order.
        tied = {token for token, pairs in pairs_by_token.items() if pairs}
        if len(tied) > 1:
            tokens_by_left: dict[str, set[str]] = {}
            for token in tied:
                for left, _ in pairs_by_token[token]:
                    tokens_by_left.setdefault(left, set()).add(token)
            for token in tied:
                for left, right in pairs_by_token[token]:
                    if {left, right} & tied or tokens_by_left.get(right, set()) - {token}:
                        raise ValueError(
                            f"the order of merges to {token!r} and others with its score is unknown"
                        )
            for left, right in merges:
                if left in tied or right in tied:
                    raise ValueError(
                        f"{left + right!r} has a higher score than its parts with equal scores"
                    )
        for pairs in pairs_by_token.values():
            merges += pairs
            if len(merges) > max_merges:
                raise ValueError(f"its tokens have more than {MERGES_PER_PIECE} merges each")
    return merges


def _mergeable_pairs(token: str, pieces: Collection[str]) -> list[tuple[str, str]]:
    """Return all ways to split a token into two pieces of the vocabulary."""
    pairs: list[tuple[str, str]] = []
    for stop in range(1, len(token)):
        left = token[:stop]
        right = token[stop:]
        if left in pieces and right in pieces:
            pairs.append((left, right))
    return pairs


def _token_ids(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Return the number of each token. Rows without a token have none."""
    vocab: dict[str, int] = {}
    for number, (token, token_type) in enumerate(zip(tokens, types)):
        if token_type != UNUSED_TYPE:
            vocab[token] = number
    return vocab


def _encode_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def _metadata_array(metadata: Mapping[str, Any], key: str) -> GgufArray:
    value = metadata.get(f"{TOKENIZER_PREFIX}.{key}")
    if not isinstance(value, GgufArray):
        raise ValueError(f"it has no `{TOKENIZER_PREFIX}.{key}`")
    return value


def _metadata_strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    try:
        return _metadata_array(metadata, key).strings()
    except UnicodeError as error:
        raise ValueError(f"`{TOKENIZER_PREFIX}.{key}` is not UTF-8") from error


def _check_tokens(tokens: Sequence[str], types: Sequence[int]) -> None:
    """Raise ValueError if tokens are not unique, or have no types."""
    if len({*tokens}) != len(tokens) or len(types) != len(tokens):
        raise ValueError("its tokens are not unique, or have no types")


def _added_tokens(
    tokens: Sequence[str], types: Sequence[int], added_types: Collection[int]
) -> list[dict[str, Any]]:
    """Return the tokens to find in texts before words are split."""
    added: list[dict[str, Any]] = []
    for number, (token, token_type) in enumerate(zip(tokens, types)):
        if token_type in added_types:
            added.append(
                {
                    "id": number,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": token_type != USER_DEFINED_TYPE,
                }
            )
    return added


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _post_processor(
    metadata: Mapping[str, Any], tokens: Sequence[str], *, adds_bos: bool
) -> dict[str, Any] | None:
    """Return the template that adds BOS and EOS to texts, or None without them."""
    begin = _special_token(metadata, tokens, "bos", adds_bos)
    end = _special_token(metadata, tokens, "eos", False)
    if not begin and not end:
        return None
    special_tokens: dict[str, Any] = {}
    for token in filter(None, (begin, end)):
        number = tokens.index(token)
        special_tokens[token] = {"id": token, "ids": [number], "tokens": [token]}
    return {
        "type": "TemplateProcessing",
        "single": _template_parts(begin, end, "A", 0),
        "pair": [*_template_parts(begin, end, "A", 0), *_template_parts(begin, end, "B", 1)],
        "special_tokens": special_tokens,
    }


def _template_parts(begin: str, end: str, sequence: str, type_id: int) -> list[dict[str, Any]]:
    """Return the parts of one text."""
    parts: list[dict[str, Any]] = []
    if begin:
        parts.append({"SpecialToken": {"id": begin, "type_id": type_id}})
    parts.append({"Sequence": {"id": sequence, "type_id": type_id}})
    if end:
        parts.append({"SpecialToken": {"id": end, "type_id": type_id}})
    return parts


def _special_token(
    metadata: Mapping[str, Any], tokens: Sequence[str], key: str, is_added: bool
) -> str:
    """Return the BOS or EOS token if it is added to texts, or an empty string."""
    if not metadata.get(f"{TOKENIZER_PREFIX}.add_{key}_token", is_added):
        return ""
    return _metadata_token(metadata, tokens, key)


def _metadata_token(metadata: Mapping[str, Any], tokens: Sequence[str], key: str) -> str:
    """Return the text of a special token, such as that of the key `bos`, or an empty string without it."""
    default: int | None = None
    if metadata.get(f"{TOKENIZER_PREFIX}.model") == SENTENCEPIECE_MODEL:
        default = SENTENCEPIECE_IDS.get(key)
    number = metadata.get(f"{TOKENIZER_PREFIX}.{key}_token_id", default)
    if number is None:
        return ""
    if type(number) is not int or not 0 <= number < len(tokens):
        raise ValueError(f"`{TOKENIZER_PREFIX}.{key}_token_id` is {number!r:.40}")
    return tokens[number]
