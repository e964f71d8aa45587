"""The tokenizer of a source with added tokens: its vocabulary, its files, and the files from before, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, PrepError, text, usage_error
from prepcli.core.formatting import join_names
from prepcli.core.json_values import JsonObject, JsonValue, load_json, parse_json
from prepcli.engine.digest import record_digest
from prepcli.formats.added_tokens import (
    AddedToken,
    Addition,
    FileEdit,
    find_value,
    insert_members,
    remove_insertion,
)
from prepcli.formats.manifest import NO_MANIFEST, again_hint, recorded_xxh3
from prepcli.formats.tokenizer_files import (
    MAX_TOKENIZER_NBYTES,
    SENTENCEPIECE_FILES,
    SENTENCEPIECE_SUFFIX,
    SETTINGS_FILE,
    SPACE,
    TOKENIZER_FILE,
    VOCABULARY_FILES,
    VocabularyTokenizer,
    encode_pieces,
    parse_tokenizer,
)
from prepcli.sources.side_files import resolve_small_file
from prepcli.sources.source import Source
from prepcli.stores.files import io_error, read_regular_file
from prepcli.stores.paths import AnyPath

SPECIAL_TOKENS = "special_tokens_map.json"
TOKEN_IDS = "added_tokens.json"
# Keys with a list of special tokens: transformers 4 and 5.
SPECIAL_KEYS = ("additional_special_tokens", "extra_special_tokens")

# Keys from the root to an object or list, and its new members.
Insertion = tuple[tuple[str, ...], JsonObject | list[JsonValue]]
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


# --- The tokenizer


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

        Raises:
            PrepError: The content is no tokenizer.
        """
        return replace(self, tokenizer=parse_tokenizer(path, data))


def open_tokenizer(source: Source) -> SourceTokenizer:
    """Load the tokenizer.json of a source, or its SentencePiece model.

    Raises:
        UsageError: The source has no such tokenizer, or its settings add tokens after the pieces.
        PrepError: The tokenizer is damaged, or the extra `sentencepiece` is missing.
    """
    file_name = tokenizer_file(source)
    data = None if file_name is None else read_side_file(source, file_name)
    if file_name is not None and data is not None:
        opened = SourceTokenizer(file_name, parse_tokenizer(source.root / file_name, data))
        if opened.is_sentencepiece:
            _check_settings(source, opened)
        return opened
    names = [file.name for file in source.side_files]
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
    """Return tokens with the settings of their entries in a tokenizer."""
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


def _check_settings(source: Source, opened: SourceTokenizer) -> None:
    """Raise UsageError if the settings of a SentencePiece model add tokens after its pieces."""
    size = opened.tokenizer.size
    settings = _read_object(source, SETTINGS_FILE)
    tokenizer_class = settings.get("tokenizer_class")
    is_t5 = tokenizer_class in T5_CLASSES
    if tokenizer_class is None:
        is_t5 = source.config.get("model_type") in T5_MODELS
    extra_ids = settings.get("extra_ids", T5_EXTRA_IDS)
    ids = [*_read_object(source, TOKEN_IDS).values()]
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        ids += [int(key) for key in decoder if key.isdecimal()]
    later = [token_id for token_id in ids if isinstance(token_id, int) and token_id >= size]
    if is_t5 and extra_ids:
        why = f"T5Tokenizer puts {extra_ids} sentinels after the pieces of {opened.file_name}"
    elif later:
        why = f"the ids from {min(later):,} on follow the {size:,} pieces of {opened.file_name}"
    else:
        return
    what = f"the tokenizer of {source.display_name} has tokens outside of its SentencePiece model"
    raise usage_error(what, why, SAVE_HINT)


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


# --- Its files


def read_side_file(source: Source, name: str) -> bytes | None:
    """Return the content of a small file of a source, or None if the source has no such file.

    Raises:
        DamagedError: The content differs from its digest in the source's manifest.
        PrepError: The file cannot be read, or is a link to another folder.
    """
    side_file = next((file for file in source.side_files if file.name == name), None)
    if side_file is None:
        return None
    path = side_file.path
    real_path = resolve_small_file(path, source.root)
    try:
        data = read_regular_file(real_path, MAX_TOKENIZER_NBYTES)
    except OSError as error:
        raise io_error(real_path, error) from error
    recorded = recorded_xxh3(path, source.root, source.manifest or NO_MANIFEST)
    if recorded and recorded != record_digest(data):
        why = "its bytes differ from the digest in its manifest"
        raise DamagedError(f"{path} is damaged", why, again_hint(source.manifest))
    return data


def tokenizer_file(source: Source) -> str | None:
    """Return the name of the tokenizer: tokenizer.json or a SentencePiece model. None for a source without one."""
    names = {file.name for file in source.side_files}
    # Readers prefer a tokenizer.json to a model.
    for name in (TOKENIZER_FILE, *SENTENCEPIECE_FILES):
        if name in names:
            return name
    return None


def files_with_tokens(
    source: Source, tokenizer_file: str, tokens: Sequence[AddedToken], first_id: int
) -> tuple[dict[str, bytes], dict[str, FileEdit]]:
    """Return the new content of each file changed by new tokens, and its record."""
    contents: dict[str, bytes] = {}
    edits: dict[str, FileEdit] = {}
    for name in (tokenizer_file, SETTINGS_FILE, SPECIAL_TOKENS, TOKEN_IDS):
        data = read_side_file(source, name)
        if data is None:
            continue
        if name in SENTENCEPIECE_FILES:
            new_data = data + encode_pieces([token["content"] for token in tokens])
            contents[name] = new_data
            edits[name] = FileEdit(
                inserted=((len(data), len(new_data)),),
                before=record_digest(data),
                after=record_digest(new_data),
            )
            continue
        document = _parse_object(source.root / name, data)
        insertions = _insertions(name, document, tokens, first_id)
        if insertions:
            contents[name], edits[name] = _edit(source.root / name, data, insertions)
    return contents, edits


def files_without_tokens(source: Source, addition: Addition) -> dict[str, bytes]:
    """Return the content of each changed file from before an addition.

    Raises:
        PrepError: A file is missing, or was changed since, or another file is the tokenizer now.
    """
    contents: dict[str, bytes] = {}
    for name, edit in addition.files.items():
        data = read_side_file(source, name)
        if data is None or record_digest(data) != edit.after:
            what = f"{source.root / name} " + ("is missing" if data is None else "was changed")
            command = Command("add-tokens")
            why = text("tokens can only be removed from the file that {} wrote", command)
            raise PrepError(what, why, "put back the file, or start from the model without tokens")
        for low, high in reversed(edit.inserted):
            # A hostile record could double the text with each range that ends before its start.
            if not low <= high <= len(data):
                why = f"it has the byte range {low}:{high} of {len(data):,} bytes"
                raise DamagedError(f"the record of {name} is damaged", why, GET_AGAIN_HINT)
            data = remove_insertion(data, (low, high))
        if record_digest(data) != edit.before:
            why = "without the added tokens, its digest differs from the recorded one"
            raise DamagedError(f"the record of {name} is damaged", why, GET_AGAIN_HINT)
        contents[name] = data
    tokenizer = tokenizer_file(source)
    if tokenizer not in contents:
        # Its tokens would have no rows.
        what = f"{source.root / (tokenizer or TOKENIZER_FILE)} has no record of added tokens"
        why = text("it is another tokenizer than the one changed by {}", Command("add-tokens"))
        raise PrepError(what, why, "remove the file, or start from the model without tokens")
    return contents


def _insertions(
    name: str, document: JsonObject, tokens: Sequence[AddedToken], first_id: int
) -> list[Insertion]:
    """Return the members of a file for new tokens."""
    by_id = {first_id + number: token for number, token in enumerate(tokens)}
    special: list[JsonValue] = [token["content"] for token in tokens if token["special"]]
    match name:
        case "tokenizer.json":
            entries: list[JsonValue] = []
            for token_id, token in by_id.items():
                entries.append({"id": token_id, **cast(JsonObject, token)})
            return [(("added_tokens",), entries)]
        case "added_tokens.json":
            return [((), {token["content"]: token_id for token_id, token in by_id.items()})]
        case "tokenizer_config.json":
            insertions = _special_insertions(document, special)
            if isinstance(document.get("added_tokens_decoder"), dict):
                settings: JsonObject = {}
                for token_id, token in by_id.items():
                    settings[str(token_id)] = cast(JsonObject, token)
                insertions.append((("added_tokens_decoder",), settings))
            return insertions
        case _:
            insertions = _special_insertions(document, special)
            if special and not any(key in document for key in SPECIAL_KEYS):
                insertions.append(((), {SPECIAL_KEYS[0]: special}))
            return insertions


def _special_insertions(document: JsonObject, special: list[JsonValue]) -> list[Insertion]:
    """Return the members for the lists of special tokens in a file."""
    insertions: list[Insertion] = []
    for key in SPECIAL_KEYS:
        if special and isinstance(document.get(key), list):
            insertions.append(((key,), special))
    return insertions


def _edit(path: AnyPath, data: bytes, insertions: Sequence[Insertion]) -> tuple[bytes, FileEdit]:
    """Insert members into a file."""
    before = record_digest(data)
    ranges: list[tuple[int, int]] = []
    for keys, members in insertions:
        try:
            data, inserted = insert_members(data, keys, members)
        except ValueError as error:
            what = f"{path} is not supported"
            raise PrepError(
                what, str(error), "save the tokenizer again with transformers"
            ) from None
        ranges.append(inserted)
    return data, FileEdit(inserted=tuple(ranges), before=before, after=record_digest(data))


def _parse_object(path: AnyPath, data: bytes) -> JsonObject:
    try:
        document = parse_json(data)
        # A byte order mark is no JSON, but some parsers skip it.
        find_value(data.decode(), ())
    except ValueError as error:
        raise PrepError(f"{path} is not JSON", str(error), GET_AGAIN_HINT) from None
    if not isinstance(document, dict):
        raise PrepError(f"{path} is not a JSON object", f"it is {document!r:.60}", GET_AGAIN_HINT)
    return document
