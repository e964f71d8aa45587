"""Tokenize data files into a token store, once per content, fields and tokenizer; later runs use the store again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from trainer.data import store
from trainer.data.documents import read_text_chunks
from trainer.data.files import DataFile, find_files, hash_file
from trainer.data.readers.reader import TextChunk
from trainer.data.readers.text_file import TEXT_CHUNK_NBYTES
from trainer.data.seq2seq import count_truncated
from trainer.data.tokenizer import TextTokenizer, load_tokenizer
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import DEFAULT_FIELDS, DataType, TextFields, parse_fields

TOKENS_VERSION = 1  # part of a store's identity; raised when the same files give other tokens
# Bytes of text that are encoded at once: a chunk for every core. Encoding takes about 100 times as much memory.
ENCODE_BATCH_NBYTES = TEXT_CHUNK_NBYTES * min(max(os.cpu_count() or 1, 8), 64)

TokenizeProgress = Callable[[int, int], None]  # bytes done, total bytes
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """Everything that determines the tokens of a dataset, and where they are stored.

    Attributes:
        type: Type of the data files.
        paths: Files, folders and globs, as `files.find_files` takes them.
        fields: For types with columns: those of the text, or of a source and a target, as `parse_fields` takes them.
        seq_length: Tokens of a block, or maximum tokens of a target.
        tokenizer: A tokenizer.json, or a folder that contains one.
        eos_id: Token appended to each document; None for none.
        vocab: Size of the model's vocabulary without padding.
        cache: Folder of token stores.
        scratch_dir: Folder for a new store, if `cache` must not be written to.
        source_length: Maximum tokens of a source.
        prefix: Text put before each source.
    """

    type: DataType
    paths: tuple[str, ...]
    fields: str
    seq_length: int
    tokenizer: Path
    eos_id: int | None
    vocab: int
    cache: Path
    scratch_dir: Path | None = None
    source_length: int = 0
    prefix: str = ""

    @property
    def parsed_fields(self) -> TextFields:
        """The columns to read from each object; empty for types without columns."""
        return parse_fields(self.fields) if self.type in DEFAULT_FIELDS else TextFields(())


def tokenize_files(config: TokenizeConfig, *, progress: TokenizeProgress, note: Note) -> store.MappedTokens:
    """Return the tokens of the configured files, from the cache or freshly tokenized in bounded memory.

    All files are read once for their digests. Tokens in the cache are read once for theirs; damaged ones are made
    again.

    Args:
        config: Files, tokenizer and cache.
        progress: Called with the bytes tokenized so far and the total bytes.
        note: Called with messages for the user: which store is used, its size, and how many tokens are dropped.

    Raises:
        PrepError: Files are missing, empty or invalid, the tokenizer does not fit the model, or the tokens do not fill
            one block.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    _check_eos_id(config)
    files = [hash_file(path) for path in find_files(config.paths, config.type)]
    identity = _store_identity(config, files, tokenizer)
    folder = config.cache / identity
    meta = _read_valid_meta(folder, note)
    if meta is not None:
        note(f"using the tokens of an earlier run: {folder}")
    else:
        folder = (config.scratch_dir or config.cache) / identity
        meta = _build_store(folder, config, files, tokenizer, progress=progress, note=note)
    return _map_tokens(folder, meta, config, tokenizer, note)


def open_tokens(config: TokenizeConfig, identity: str, *, note: Note) -> store.MappedTokens:
    """Return tokens in the cache that another process made, or whose digests it checked.

    Args:
        config: Tokenizer and cache; the data files are not read.
        identity: Identity of the tokens.
        note: Called with messages for the user.

    Raises:
        PrepError: The tokens are missing or cut off, or do not fit the model.
    """
    folder = config.cache / identity
    meta = store.read_meta(folder, checks_digests=False)
    return _map_tokens(folder, meta, config, load_tokenizer(config.tokenizer), note)


def _map_tokens(
    folder: Path, meta: store.StoreMeta, config: TokenizeConfig, tokenizer: TextTokenizer, note: Note
) -> store.MappedTokens:
    """Map a store; raise PrepError if it does not fit the model or has no row."""
    tokenizer.check_in_vocab(meta.max_id, config.vocab)
    has_source = bool(config.parsed_fields.source)
    _check_has_pairs(meta) if has_source else _check_has_block(meta, config.seq_length)
    tokens = store.map_tokens(folder, meta, config.seq_length)
    note(_seq2seq_summary(tokens, config.source_length) if has_source else _packed_summary(tokens))
    return tokens


def _check_eos_id(config: TokenizeConfig) -> None:
    if config.eos_id is not None and not 0 <= config.eos_id < config.vocab:
        why = f"the vocabulary without padding has {config.vocab:,} tokens"
        raise PrepError(f"eos_token_id {config.eos_id:,} is out of range", why)


def _store_identity(config: TokenizeConfig, files: Sequence[DataFile], tokenizer: TextTokenizer) -> str:
    """Return a digest of all inputs of the ids; file paths and `seq_length` are not among them."""
    inputs = {
        "version": TOKENS_VERSION,
        "type": config.type,
        "fields": config.fields if config.type in DEFAULT_FIELDS else None,
        "eos_id": config.eos_id,
        "tokenizer": tokenizer.digest,
        "files": [[file.nbytes, file.digest] for file in files],
    }
    inputs |= {"prefix": config.prefix} if config.prefix else {}
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())


def _build_store(
    folder: Path,
    config: TokenizeConfig,
    files: Sequence[DataFile],
    tokenizer: TextTokenizer,
    *,
    progress: TokenizeProgress,
    note: Note,
) -> store.StoreMeta:
    with store.lock_cache(folder.parent, note):
        if (meta := _read_valid_meta(folder)) is not None:  # another process built it while this one waited
            return meta
        dtype = store.dtype_for(max(tokenizer.max_id, config.eos_id or 0))
        store.build_store(folder, dtype, lambda writer: _write_tokens(writer, config, files, tokenizer, progress))
        return store.read_meta(folder)


def _read_valid_meta(folder: Path, note: Note = lambda text: None) -> store.StoreMeta | None:
    """Return a store's metadata; None if the store is missing, or damaged, which is reported to `note`."""
    try:
        return store.read_meta(folder) if folder.exists() else None
    except store.DamagedStoreError as error:
        note(f"{error.what} ({error.why}): they are made again")
        return None


def _write_tokens(
    writer: store.TokenWriter,
    config: TokenizeConfig,
    files: Sequence[DataFile],
    tokenizer: TextTokenizer,
    progress: TokenizeProgress,
) -> None:
    done_nbytes, total_nbytes = 0, sum(file.nbytes for file in files)
    chunks = (
        chunk
        for file in files
        for chunk in read_text_chunks(file, config.type, fields=config.parsed_fields, prefix=config.prefix)
    )
    for batch in batch_chunks(chunks):
        for chunk, ids in zip(batch, tokenizer.encode([chunk.text for chunk in batch])):
            writer.append(ids)
            if chunk.ends_document:
                _end_document(writer, config.eos_id)
        tokenizer.check_in_vocab(writer.max_id, config.vocab)
        done_nbytes += sum(chunk.nbytes for chunk in batch)
        progress(done_nbytes, total_nbytes)


def _end_document(writer: store.TokenWriter, eos_id: int | None) -> None:
    if eos_id is not None:
        writer.append(np.array([eos_id], np.uint32))
    writer.end_document()


def batch_chunks(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    """Group chunks in order, up to ENCODE_BATCH_NBYTES per group; a larger chunk is a group by itself."""
    batch: list[TextChunk] = []
    nbytes = 0
    for chunk in chunks:
        if batch and nbytes + chunk.nbytes > ENCODE_BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(chunk)
        nbytes += chunk.nbytes
    if batch:
        yield batch


def _check_has_pairs(meta: store.StoreMeta) -> None:
    if not meta.n_tokens:
        raise PrepError("the data has no source-target pair", "all lines are blank, or all their texts are empty")


def _check_has_block(meta: store.StoreMeta, seq_length: int) -> None:
    if meta.n_tokens < seq_length:
        size = f"{_count_text(meta.n_tokens, 'token')} in {_count_text(meta.n_documents, 'document')}"
        hint = f"more text, or `--set data.seq_length={meta.n_tokens}`" if meta.n_tokens > 1 else "more text"
        raise PrepError("the data is shorter than one block", f"{size}, a block has {seq_length:,}", hint)


def _packed_summary(tokens: store.MappedTokens) -> str:
    n_dropped = tokens.n_tokens % tokens.seq_length
    size = f"{_count_text(tokens.n_tokens, 'token')} in {_count_text(tokens.n_documents, 'document')}"
    blocks = f"{_count_text(tokens.n_blocks, 'block')} of {tokens.seq_length:,}"
    return f"{size}: {blocks}, {_count_text(n_dropped, 'token')} left over and dropped"


def _seq2seq_summary(tokens: store.MappedTokens, source_length: int) -> str:
    n_sources, n_targets = count_truncated(tokens, source_length)
    size = f"{_count_text(tokens.n_tokens, 'token')} in {_count_text(tokens.n_documents // 2, 'pair')}"
    sources = f"{_count_text(n_sources, 'source')} of more than {source_length:,}"
    targets = f"{_count_text(n_targets, 'target')} of more than {tokens.seq_length:,} tokens"
    return f"{size}: {sources}, {targets} are cut"


def _count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
