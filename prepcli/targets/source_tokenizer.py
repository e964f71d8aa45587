"""The tokenizer of a source for new tokens: a tokenizer.json, or a SentencePiece model alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, usage_error
from prepcli.core.json_types import JsonObject
from prepcli.core.json_values import load_json
from prepcli.core.lists import join_names
from prepcli.formats.token_list import AddedToken
from prepcli.formats.tokenizer_names import (
    SENTENCEPIECE_FILES,
    SENTENCEPIECE_SUFFIX,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILES,
)
from prepcli.sources.json_tokenizer import parse_tokenizer
from prepcli.sources.sentencepiece_tokenizer import SPACE, parse_sentencepiece
from prepcli.sources.source import Source
from prepcli.stores.paths import AnyPath
from prepcli.targets.token_files import TOKEN_IDS, read_side_file, tokenizer_file

SAVE_HINT = (
    "save it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
T5_CLASSES = ("T5Tokenizer", "T5TokenizerFast", "MT5Tokenizer", "MT5TokenizerFast")
T5_MODELS = ("t5", "mt5", "umt5")
# Sentinels such as `<extra_id_0>` that T5Tokenizer puts after the pieces, unless its settings say otherwise.
T5_EXTRA_IDS = 100
NUL = "\0"
# Settings of a token without a counterpart in a SentencePiece model.
SPACE_FLAGS = ("single_word", "lstrip", "rstrip")


class VocabularyTokenizer(Protocol):
    """A tokenizer with a readable vocabulary."""

    @property
    def size(self) -> int:
        """Largest id plus one."""
        ...

    @property
    def added_contents(self) -> list[str]:
        """Texts found before the other text is split."""
        ...

    def token_id(self, content: str) -> int | None:
        """Return the id of a token, or None for an unknown text."""
        ...

    def normalize(self, content: str) -> str:
        """Return the text of a token as it is searched."""
        ...

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ids of each text, without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class SourceTokenizer:
    """A tokenizer with the name of its file."""

    file_name: str
    tokenizer: VocabularyTokenizer

    @property
    def is_sentencepiece(self) -> bool:
        """Whether the file is a SentencePiece model."""
        return self.file_name in SENTENCEPIECE_FILES

    def changed(self, path: AnyPath, data: bytes) -> SourceTokenizer:
        """Return the tokenizer of a changed file.

        Args:
            path: The file, for messages.
            data: Its content.

        Raises:
            PrepError: The content is no tokenizer.
        """
        return replace(self, tokenizer=_parse(path, data))


def open_tokenizer(source: Source) -> SourceTokenizer:
    """Load the tokenizer.json of a source, or its SentencePiece model.

    Raises:
        UsageError: The source has no such tokenizer, or its settings add tokens after the pieces.
        PrepError: The tokenizer is damaged, or the extra `sentencepiece` is missing.
    """
    file_name = tokenizer_file(source)
    data = None if file_name is None else read_side_file(source, file_name)
    if file_name is not None and data is not None:
        opened = SourceTokenizer(file_name, _parse(source.root / file_name, data))
        if opened.is_sentencepiece:
            _check_settings(source, opened)
        return opened
    names = [file.name for file in source.small_files]
    others = [
        name for name in names if name.endswith(SENTENCEPIECE_SUFFIX) or name in VOCABULARY_FILES
    ]
    known = join_names([TOKENIZER_FILE, *SENTENCEPIECE_FILES])
    if others:
        what = f"the tokenizer of {source.display_name} is not supported"
        why = f"it has {join_names(others)}; tokens are added to {known}"
        raise usage_error(what, why, SAVE_HINT)
    what = f"{source.display_name} has no tokenizer"
    raise usage_error(what, f"tokens are added to {known}", "copy the model's into its folder")


def tokens_for(opened: SourceTokenizer, tokens: Sequence[AddedToken]) -> tuple[AddedToken, ...]:
    """Return tokens with the settings of their entries in a tokenizer.

    Raises:
        UsageError: A SentencePiece model cannot have one of the tokens.
    """
    if not opened.is_sentencepiece:
        return tuple(tokens)
    for token in tokens:
        content = token["content"]
        flags = [name for name in SPACE_FLAGS if token[name]]
        if flags:
            what = f"the token {content!r} is not supported"
            why = f"a piece of {opened.file_name} has no `{flags[0]}`"
            raise usage_error(what, why, f"remove `{flags[0]}`, or {SAVE_HINT}")
        if NUL in content:
            what = f"the token {content!r} has the character U+0000"
            hint = "use another text"
            raise usage_error(what, f"{opened.file_name} cannot have such a piece", hint)
        # SentencePiece finds `a b` as `a<U+2581>b`, and transformers does not.
        if SPACE in content or any(char.isspace() for char in content):
            what = f"the token {content!r} has a space"
            why = f"SentencePiece and transformers search a piece of {opened.file_name} differently"
            raise usage_error(what, why, f"use a text without spaces, or {SAVE_HINT}")
    return tuple({**token, "normalized": False} for token in tokens)


def _parse(path: AnyPath, data: bytes) -> VocabularyTokenizer:
    if path.name in SENTENCEPIECE_FILES:
        return parse_sentencepiece(path, data)
    return parse_tokenizer(path, data)


def _check_settings(source: Source, opened: SourceTokenizer) -> None:
    """Raise UsageError if the settings of a SentencePiece model add tokens after its pieces."""
    size = opened.tokenizer.size
    settings = _read_object(source, SETTINGS_FILE)
    tokenizer_class = settings.get("tokenizer_class")
    is_t5 = tokenizer_class in T5_CLASSES
    if tokenizer_class is None:
        is_t5 = source.config.get("model_type") in T5_MODELS
    extra_ids = settings.get("extra_ids", T5_EXTRA_IDS)
    ids = [*_read_object(source, TOKEN_IDS).values(), *_decoder_ids(settings)]
    later = [token_id for token_id in ids if isinstance(token_id, int) and token_id >= size]
    if is_t5 and extra_ids:
        why = f"T5Tokenizer puts {extra_ids} sentinels after the pieces of {opened.file_name}"
    elif later:
        why = f"the ids from {min(later):,} on follow the {size:,} pieces of {opened.file_name}"
    else:
        return
    what = f"the tokenizer of {source.display_name} has tokens outside of its SentencePiece model"
    raise usage_error(what, why, SAVE_HINT)


def _decoder_ids(settings: JsonObject) -> Iterator[int]:
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        for key in decoder:
            if key.isdecimal():
                yield int(key)


def _read_object(source: Source, name: str) -> JsonObject:
    """Return the JSON object in a small file of a source. Empty if the source has no such file."""
    data = read_side_file(source, name)
    if data is None:
        return {}
    path = source.root / name
    try:
        document = load_json(data)
    except ValueError as error:
        raise DamagedError(f"{path} is not JSON", str(error), GET_AGAIN_HINT) from error
    if not isinstance(document, dict):
        raise DamagedError(
            f"{path} is not a JSON object", f"it is {document!r:.60}", GET_AGAIN_HINT
        )
    return document
