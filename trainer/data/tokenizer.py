"""Tokenizers with deterministic encoding.

A tokenizer is a tokenizer.json, a SentencePiece model, or a folder that transformers reads. Long texts are cut where
the tokens of the parts, joined, are exactly the tokens of the whole text: the `tokenizers` library needs about 100
bytes for each byte of a text that it encodes at once. A row or a line of 60 MiB would take 6 GB.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.core.errors import Key, Option, PrepError, Text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject, JsonValue, load_json
from prepcli.formats.tokenizer_files import (
    MAX_TOKENIZER_NBYTES,
    SENTENCEPIECE_FILES,
    SENTENCEPIECE_SUFFIX,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILES,
    LibraryTokenizer,
    library_errors,
    load_fast_tokenizer,
    load_sentencepiece,
)
from prepcli.stores.files import not_regular_error, open_regular_file, read_regular_file
from trainer.data.files import io_error

TokenIds: TypeAlias = npt.NDArray[np.uint32]
# Characters of a part at least. Texts up to this length are not cut.
PART_CHARS = 1 << 18
# A newline between two visible characters: ASCII, letters, digits, and punctuation of Chinese and
# Japanese. Every Unicode version and every library agrees that none of them is a space.
VISIBLE = r"[!-~\w\u3001-\u303f\uff01-\uff60]"
CUT = re.compile(rf"(?<={VISIBLE})\n(?={VISIBLE})")
# Pre-tokenizers split a text before a model sees it, so a cut between two of their pieces changes no
# token. A match of these expressions that has a newline before a visible character ends at the
# newline: no alternative takes a visible character after it, and none looks back. E.g. "a!\nb" has
# the pieces "a", "!", "\n", "b" or "a", "!\n", "b", and so has "a!\n" followed by "b". The
# expression of GPT-4o is not one of them: its `[\r\n/]*` takes the newline and the slash of "!\n/".
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# A normalizer of NFC composes no character with a newline before it.
SAFE_NORMALIZERS = (None, "NFC")


def allows_cuts(tokenizer_json: bytes) -> bool:
    """Return whether `cut_text` keeps the tokens of a tokenizer, for a valid tokenizer.json."""
    tokenizer = json.loads(tokenizer_json)
    normalizer = tokenizer.get("normalizer") or {}
    return (
        normalizer.get("type") in SAFE_NORMALIZERS
        and _splits_at_newlines(tokenizer.get("pre_tokenizer") or {})
        # An added token may depend on characters on both sides of a newline.
        and not any(
            token.get("lstrip")
            or token.get("rstrip")
            or token.get("single_word")
            or "\n" in token["content"]
            for token in tokenizer.get("added_tokens") or ()
        )
    )


def _splits_at_newlines(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer splits texts at each newline before a visible character."""
    steps = [pre_tokenizer]
    if pre_tokenizer.get("type") == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    # The step without an expression maps bytes to characters. A space before each part would change
    # its first token.
    *splits, byte_level = steps
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return False
    if not splits:
        # Missing in files of old versions, which always split by the expression of GPT-2.
        return byte_level.get("use_regex", True)
    split = splits[0]
    return (
        len(splits) == 1
        and not byte_level.get("use_regex", True)
        and split.get("type") == "Split"
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
        and split.get("pattern") in ({"Regex": LLAMA_3}, {"Regex": QWEN_2})
    )


def cut_text(text: str) -> Iterator[str]:
    """Yield a text in parts of PART_CHARS characters or a little more.

    A text without a newline between visible characters stays whole.
    """
    start = 0
    while cut := CUT.search(text, start + PART_CHARS):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


TOKENIZER_HINT = Text(Key("data.tokenizer", "PATH", is_override=True))
FILE_HINT = "correct it, or get the files of the tokenizer again"
# Files that decide the ids of a tokenizer that transformers builds
TRANSFORMERS_FILES = (
    *(SETTINGS_FILE, *VOCABULARY_FILES, "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "config.json"),
)
# Lists of special tokens in the settings of a tokenizer.
EXTRA_TOKENS_KEYS = ("additional_special_tokens", "extra_special_tokens")
# Tokens that a note names.
MAX_NAMES = 5
# A text that is encoded to see the tokens around it.
PROBE = "a"
# Tokens that are tried if the tokenizer does not have the letter.
MAX_PROBES = 1000
# Smallest part of the vocabulary that the tokenizer of a model has.
LEAST_USED_VOCABULARY = 0.9
# Parts of a long text that are encoded at once: one for every core.
PARTS_AT_ONCE = min(max(os.cpu_count() or 1, 4), 64)
# Tokenizer classes of transformers with `add_bos_token` or `add_eos_token` on by default.
BEGINS_PROMPTS = ("CodeLlamaTokenizer",)
ENDS_PROMPTS = ("T5Tokenizer",)


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer of one of the libraries."""

    path: Path  # Its file, or its folder
    digest: str  # XXH3-128 of its files
    max_id: int  # Its largest token id
    codec: LibraryTokenizer  # Its library
    allows_cuts: bool = False  # Whether the parts of `cut_text` have the tokens of the whole text
    # Special tokens that its tokenizer_config.json lists and its tokenizer.json does not have
    missing_tokens: tuple[str, ...] = ()

    def notes(self) -> Iterator[str]:
        """Yield a line for the user if transformers encodes some texts in another way."""
        if self.missing_tokens:
            names = ", ".join(f"{token!r:.40}" for token in self.missing_tokens[:MAX_NAMES])
            if len(self.missing_tokens) > MAX_NAMES:
                names += ", …"
            yield (
                f"{SETTINGS_FILE} lists special tokens that {TOKENIZER_FILE} does not have ({names}): "
                "a text that spells one is split, where transformers has one token"
            )

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode each text by itself, without adding special tokens.

        Texts are spread over threads. Order and ids do not depend on the number of threads, nor on
        TOKENIZERS_PARALLELISM. A special token spelled out in a text becomes its id, except in a
        SentencePiece model.

        Raises:
            PrepError: The tokenizer fails.
        """
        if not self.allows_cuts or all(len(text) <= PART_CHARS for text in texts):
            return self._encode_at_once(texts)
        encoded: list[TokenIds] = []
        for text in texts:
            # A long text takes the memory of a few of its parts. The first array is for one without tokens.
            ids = [np.array([], np.uint32)]
            parts = cut_text(text)
            while group := list(itertools.islice(parts, PARTS_AT_ONCE)):
                ids += self._encode_at_once(group)
            encoded.append(np.concatenate(ids))
        return encoded

    def _encode_at_once(self, texts: Sequence[str]) -> list[TokenIds]:
        with library_errors(f"{self.path} cannot encode the data", TOKENIZER_HINT):
            return self.codec.encode(texts)

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[TokenIds, npt.NDArray[np.int64]]]:
        """Encode each text as `encode` does: its ids [T], and start and end of each token in characters [T, 2].

        Raises:
            PrepError: The tokenizer fails.
        """
        with library_errors(f"{self.path} cannot encode the data", TOKENIZER_HINT):
            return self.codec.encode_with_offsets(texts)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt, with added special tokens.

        A begin token that the text spells out, as the text of a chat template does, is not added again.

        Raises:
            PrepError: The tokenizer fails.
        """
        hint = Text(Option("tokens", "1,2,3"), " needs none")
        with library_errors(f"{self.path} cannot encode a prompt", hint):
            ids = self.codec.encode_prompt(text)
            if len(ids) > 1 and ids[0] == ids[1]:
                # E.g. `<s>a` is [1, 5], and the tokenizer makes [1, 1, 5, 2] of it.
                (plain,) = self.codec.encode([text])
                if ids[1 : 1 + len(plain)] == plain.tolist():
                    return ids[1:]
        return ids

    def prefix_ids(self) -> tuple[int, ...]:
        """Return the ids that the tokenizer puts before a text, e.g. of `<s>`. Raise PrepError if it fails."""
        # Most tokenizers add nothing.
        added = self.encode_prompt("")
        if not added:
            return ()
        # A letter, else a single token: one that the tokenizer does not add.
        tokens = map(
            self.decode, ([token_id] for token_id in range(min(self.max_id + 1, MAX_PROBES)))
        )
        for probe in itertools.chain([PROBE], filter(None, tokens)):
            (plain,) = self.encode([probe])
            # With the unknown token as `<s>`, `<s> a` is [0, 0], and the first 0 looks like the text.
            if not len(plain) or not {*added}.isdisjoint(plain.tolist()):
                continue
            ids = self.encode_prompt(probe)
            # E.g. `<s> a </s>` is [1, 5, 2], and `a` is [5]: the prefix is [1].
            for start in range(len(ids) - len(plain) + 1):
                if ids[start : start + len(plain)] == plain.tolist():
                    return tuple(ids[:start])
        return ()

    def decode(self, ids: Sequence[int], preceding_ids: Sequence[int] = ()) -> str:
        """Decode ids to text, without special tokens.

        Tokenizers strip a leading space. To keep it, the ids are decoded together with the preceding ids.

        Raises:
            PrepError: The tokenizer fails.
        """
        with library_errors(
            f"{self.path} cannot decode {count_text(len(ids), 'token')}", TOKENIZER_HINT
        ):
            prefix = self.codec.decode(preceding_ids)
            text = self.codec.decode([*preceding_ids, *ids])
            if text.startswith(prefix):
                return text[len(prefix) :]
            # The preceding ids end within a character, so their text is not a prefix of the whole
            # text.
            return self.codec.decode(ids)

    def special_ids(self, ids: Collection[int]) -> set[int]:
        """Return the ids of special tokens among `ids`, and the ids that the tokenizer does not have."""
        known = {token_id for token_id in ids if self.codec.token(token_id) is not None}
        return {*ids} - known | self.codec.special_ids(known)

    def spelling(self, token_id: int) -> str:
        """Return the spelling of a token, e.g. `<s>`, or `<|9|>` for an id that the tokenizer does not have."""
        return self.codec.token(token_id) or f"<|{token_id}|>"

    def check_in_vocab(self, token_id: int, vocab_size: int) -> None:
        """Raise PrepError unless an id is below the model's vocabulary size without padding."""
        if token_id < vocab_size:
            return
        token = self.codec.token(token_id)
        what = f"id {token_id:,} ({token!r}) of {self.path} is not in the model's vocabulary"
        why = f"the vocabulary without padding has {vocab_size:,} tokens; the tokenizer has ids up to {self.max_id:,}"
        hint = Text(*TOKENIZER_HINT.parts, " with the tokenizer of the model")
        raise PrepError(what, why, hint)

    def smaller_vocabulary_note(self, vocab_size: int) -> str | None:
        """Return a note if the tokenizer has far fewer tokens than the model: it is probably that of another model."""
        if self.max_id + 1 >= vocab_size * LEAST_USED_VOCABULARY:
            return None
        return (
            f"the tokenizer {self.path} has ids up to {self.max_id:,}, and the model's vocabulary "
            f"{vocab_size:,} tokens: is it the tokenizer of this model?"
        )


def load_tokenizer(path: Path) -> TextTokenizer:
    """Load a tokenizer, with truncation and padding turned off.

    Args:
        path: A tokenizer.json, a SentencePiece model with the suffix `.model`, or a folder. In a
            folder the first of these is used, or else the files of a tokenizer that transformers
            builds.

    Raises:
        PrepError: The file is missing, invalid, or encodes nondeterministically, or its library is
            not installed.
    """
    found = find_tokenizer(path)
    if found is None:
        raise _missing_tokenizer_error(path)
    if found.is_dir():
        return _load_from_transformers(found)
    try:
        data = read_regular_file(found, MAX_TOKENIZER_NBYTES)
    except FileNotFoundError:
        raise _missing_tokenizer_error(path) from None
    except OSError as error:
        raise io_error(found, error) from error
    if found.suffix == SENTENCEPIECE_SUFFIX:
        settings = read_settings(found.parent / SETTINGS_FILE)
        with library_errors(f"{found} is not a SentencePiece model", TOKENIZER_HINT):
            # The settings say which tokens are around a prompt.
            class_name = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
            adds_bos = bool(settings.get("add_bos_token", class_name in BEGINS_PROMPTS))
            adds_eos = bool(settings.get("add_eos_token", class_name in ENDS_PROMPTS))
            codec = load_sentencepiece(found, data, adds_bos=adds_bos, adds_eos=adds_eos)
            return TextTokenizer(found, xxhash.xxh3_128_hexdigest(data), codec.max_id, codec)
    with library_errors(f"{found} is not a valid tokenizer", TOKENIZER_HINT):
        codec = load_fast_tokenizer(found, data)
        digest = xxhash.xxh3_128_hexdigest(data)
        missing_tokens = _missing_tokens(found, codec)
        return TextTokenizer(
            found,
            digest,
            codec.max_id,
            codec,
            allows_cuts=allows_cuts(data),
            missing_tokens=missing_tokens,
        )


def _missing_tokens(file: Path, codec: LibraryTokenizer) -> tuple[str, ...]:
    """Return the special tokens that only the settings beside a tokenizer.json list, in their order."""
    try:
        settings = read_settings(file.parent / SETTINGS_FILE)
    except PrepError:
        # No text needs this file. The commands that do report it.
        return ()
    added = settings.get("added_tokens_decoder")
    listed: list[JsonValue] = []
    if isinstance(added, dict):
        listed += added.values()
    for key in EXTRA_TOKENS_KEYS:
        extra = settings.get(key)
        if isinstance(extra, list):
            listed += extra
    known = {*codec.added_contents}
    missing: dict[str, None] = {}
    for token in listed:
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content and content not in known:
            missing[content] = None
    return tuple(missing)


def find_tokenizer(path: Path) -> Path | None:
    """Return the file or folder that `load_tokenizer` reads for a path, or None."""
    if not path.is_dir():
        if path.is_file():
            return path
        return None
    files = (path / name for name in (TOKENIZER_FILE, *SENTENCEPIECE_FILES))
    if (file := next((file for file in files if file.is_file()), None)) is not None:
        return file
    if any((path / name).is_file() for name in VOCABULARY_FILES):
        return path
    return None


def check_tokenizer_exists(path: Path) -> None:
    """Raise PrepError unless the path is a file, or a folder that contains a tokenizer."""
    if find_tokenizer(path) is None:
        raise _missing_tokenizer_error(path)


def _load_from_transformers(folder: Path) -> TextTokenizer:
    """Load the tokenizer that transformers builds."""
    # The version of transformers is part of its digest, because another version may encode otherwise.
    for name in (*TRANSFORMERS_FILES, "chat_template.jinja"):
        path = folder / name
        # transformers would wait for a FIFO without end
        if path.exists() and not path.is_file():
            raise not_regular_error(path)
    if importlib.util.find_spec("transformers") is None:
        what = f"cannot read the tokenizer of {folder}"
        raise PrepError(what, "transformers is not installed", "`pip install 'prepcli[hf]'`")
    with library_errors(f"transformers cannot read the tokenizer of {folder}", TOKENIZER_HINT):
        # transformers opens the files by itself.
        for path in sorted(folder.iterdir()):
            if path.is_file():
                open_regular_file(path).close()
        name = "trainer.data.transformers_codec:TransformersCodec"
        codec = LibraryTokenizer(name, os.path.abspath(folder))
    digest = xxhash.xxh3_128(f"transformers {version('transformers')}".encode())
    for name in TRANSFORMERS_FILES:
        if (folder / name).is_file():
            data = read_regular_file(folder / name, MAX_TOKENIZER_NBYTES)
            digest.update(f"{name} {len(data)} ".encode() + data)
    return TextTokenizer(folder, digest.hexdigest(), codec.max_id, codec)


def _missing_tokenizer_error(path: Path) -> PrepError:
    hint = TOKENIZER_HINT
    if not path.is_dir():
        why = f"looked for a {TOKENIZER_FILE} or a SentencePiece model, or a folder that has one"
        return PrepError(f"no tokenizer at {path}", why, hint)
    names = sorted(file.name for file in path.glob("*token*"))
    looked_for = f"looked for {TOKENIZER_FILE}, {', '.join(SENTENCEPIECE_FILES)}, {' and '.join(VOCABULARY_FILES)}"
    why = looked_for
    if names:
        why += f"; found {', '.join(names)}"
    return PrepError(f"{path} has no tokenizer", why, hint)


# The added tokens of some tokenizers take megabytes.
MAX_SETTINGS_NBYTES = 64_000_000


def read_settings(path: Path) -> JsonObject:
    """Return the object in a settings file of a tokenizer. A missing file gives an empty one.

    Raises:
        PrepError: The file is not a regular file, is too large, or is not a JSON object.
    """
    text = read_text_file(path, MAX_SETTINGS_NBYTES)
    try:
        value = {}
        if text is not None:
            value = load_json(text.encode())
    except ValueError as error:
        raise PrepError(f"{path} is not JSON", str(error), FILE_HINT) from None
    if not isinstance(value, dict):
        raise PrepError(f"{path} is not a JSON object", f"it is {value!r:.60}", FILE_HINT)
    return cast(JsonObject, value)


def read_text_file(path: Path, max_nbytes: int) -> str | None:
    """Return the text of a small file, or None if it does not exist.

    Raises:
        PrepError: The file is not a regular file, is too large, cannot be read, or is not UTF-8.
    """
    try:
        return read_regular_file(path, max_nbytes).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise io_error(path, error) from error
    except UnicodeDecodeError as error:
        raise PrepError(f"{path} is not UTF-8", str(error), FILE_HINT) from None
