"""The tokenizer of a GGUF file as `tokenizer.json`, where the metadata describes it exactly.

The metadata has the tokens, their types and the merges of a BPE tokenizer, and the name of its pre-tokenizer, which
llama.cpp has as code. Sources: `llama_vocab::impl::load` of llama.cpp (src/llama-vocab.cpp), and the tokenizers that
transformers 5.24 builds for GPT-2, LLaMA 3 and Qwen2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prepcli.formats.gguf import GgufArray
from prepcli.planning.plan import SmallFile

TOKENIZER_PREFIX = "tokenizer.ggml"
BPE_MODEL = "gpt2"
CONTROL_TYPE = 3
USER_DEFINED_TYPE = 4
# Rows of the embedding without a token.
UNUSED_TYPE = 5
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
    """Return `tokenizer.json` and `tokenizer_config.json`.

    Args:
        metadata: Metadata of a GGUF file.

    Raises:
        ValueError: The metadata does not describe the tokenizer exactly.
    """
    model = metadata.get(f"{TOKENIZER_PREFIX}.model")
    if model != BPE_MODEL:
        raise ValueError(f"its tokenizer is {model!r:.40}, and only BPE of bytes is converted")
    name = metadata.get(f"{TOKENIZER_PREFIX}.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"its pre-tokenizer is {name!r:.40}, and {known} are converted")
    pre_tokenizer = PRE_TOKENIZERS[name]
    tokens = _strings(metadata, "tokens")
    types = _array(metadata, "token_type").numbers().tolist()
    merges = [merge.split(" ") for merge in _strings(metadata, "merges")]
    _check_tokens(tokens, types, merges)
    vocab: dict[str, int] = {}
    for number, (token, token_type) in enumerate(zip(tokens, types)):
        if token_type != UNUSED_TYPE:
            vocab[token] = number
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "NFC"} if pre_tokenizer.is_normalized else None,
        "pre_tokenizer": _pre_tokenizer(pre_tokenizer),
        "post_processor": _post_processor(metadata, tokens, pre_tokenizer),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.ignores_merges,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return (
        SmallFile("tokenizer.json", _encode(document)),
        SmallFile("tokenizer_config.json", _encode(_settings(metadata, tokens))),
    )


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def _array(metadata: Mapping[str, Any], key: str) -> GgufArray:
    value = metadata.get(f"{TOKENIZER_PREFIX}.{key}")
    if not isinstance(value, GgufArray):
        raise ValueError(f"it has no `{TOKENIZER_PREFIX}.{key}`")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    try:
        return _array(metadata, key).strings()
    except UnicodeError as error:
        raise ValueError(f"`{TOKENIZER_PREFIX}.{key}` is not UTF-8") from error


def _check_tokens(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[Sequence[str]]
) -> None:
    """Raise ValueError if tokens are not unique, or merges are not pairs of tokens."""
    known = {*tokens}
    if len(known) != len(tokens) or len(types) != len(tokens):
        raise ValueError("its tokens are not unique, or have no types")
    for merge in merges:
        if len(merge) != 2 or not known.issuperset((*merge, "".join(merge))):
            raise ValueError(f"{' '.join(merge)!r:.60} is not a merge of two tokens")


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Return the tokens that are found in texts before words are split."""
    added: list[dict[str, Any]] = []
    for number, (token, token_type) in enumerate(zip(tokens, types)):
        if token_type in (CONTROL_TYPE, USER_DEFINED_TYPE):
            added.append(
                {
                    "id": number,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": token_type == CONTROL_TYPE,
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


def _pre_tokenizer(pre_tokenizer: PreTokenizer) -> dict[str, Any]:
    if not pre_tokenizer.pattern:
        return _byte_level(use_regex=True)
    split = {
        "type": "Split",
        "pattern": {"Regex": pre_tokenizer.pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


def _post_processor(
    metadata: Mapping[str, Any], tokens: Sequence[str], pre_tokenizer: PreTokenizer
) -> dict[str, Any] | None:
    """Return the template that adds BOS and EOS to texts, or None without them."""
    begin = _special_token(metadata, tokens, "bos", pre_tokenizer.adds_bos)
    end = _special_token(metadata, tokens, "eos", False)
    if not begin and not end:
        return None
    special_tokens: dict[str, Any] = {}
    for token in filter(None, (begin, end)):
        number = tokens.index(token)
        special_tokens[token] = {"id": token, "ids": [number], "tokens": [token]}
    return {
        "type": "TemplateProcessing",
        "single": _template(begin, end, "A", 0),
        "pair": [*_template(begin, end, "A", 0), *_template(begin, end, "B", 1)],
        "special_tokens": special_tokens,
    }


def _template(begin: str, end: str, sequence: str, type_id: int) -> list[dict[str, Any]]:
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
    return _token(metadata, tokens, key)


def _token(metadata: Mapping[str, Any], tokens: Sequence[str], key: str) -> str:
    """Return a token by the key of its number, e.g. `bos`, or an empty string without one."""
    number = metadata.get(f"{TOKENIZER_PREFIX}.{key}_token_id")
    if number is None:
        return ""
    if type(number) is not int or not 0 <= number < len(tokens):
        raise ValueError(f"`{TOKENIZER_PREFIX}.{key}_token_id` is {number!r:.40}")
    return tokens[number]


def _settings(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key, setting in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        token = _token(metadata, tokens, key)
        if token:
            settings[setting] = token
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return settings
