"""From files to tokens: made once for what they are made from, and used again by whoever asks for the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from trainer.data import store
from trainer.data.documents import TEXT_CHUNK_NBYTES, TextChunk, read_text_chunks
from trainer.data.files import DataFile, FileType, find_files, hash_file
from trainer.data.seq2seq import count_truncated
from trainer.data.tokenizer import TextTokenizer, load_tokenizer
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import TextFields, parse_fields

TOKENS_VERSION = 1  # of the tokens that a request gives; another number, and none is used again
ENCODE_BATCH_NBYTES = TEXT_CHUNK_NBYTES * min(
    max(os.cpu_count() or 1, 8), 64
)  # pieces for every core; takes 100 times that

TokenizeProgress = Callable[[int, int], None]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """What tokens are wanted.

    `paths`: files, folders and globs (`files.find` says what they stand for); `fields`: for `json` what holds the text,
    or a source and a target (`fields.parse`), `prefix`: put before each source; `source_length`: tokens of a source at
    most, of a target `seq_length`; `tokenizer`: a tokenizer.json, or a folder that has one; `eos_id`: appended to each
    document; `vocab`: the model's true vocabulary, padding apart; `cache`: the folder of stores; `spare`: another one,
    where tokens are made that the cache lacks, so that nothing is written to it.
    """

    type: FileType
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
        """What is read of each object."""
        return parse_fields(self.fields) if self.type == "json" else TextFields(())


def tokenize_files(config: TokenizeConfig, progress: TokenizeProgress, note: Note) -> store.MappedTokens:
    """The tokens of a request, made in bounded memory, or mapped at once if the cache has them already.

    The files are read once for their digests in any case, and tokens that the cache has for theirs: damaged ones are
    made again. `progress`: bytes tokenised, of how many; `note` is told
    what is used, how much it is, and what the last block leaves over, or what of pairs is cut. PrepError for files that
    are missing, empty or not what their type says; for a tokenizer that does not fit; for fewer tokens than one block.
    """
    encoder = load_tokenizer(config.tokenizer)
    _check_eos_id(config)
    files = [hash_file(path) for path in find_files(config.paths, config.type)]
    identity = _store_identity(config, files, encoder)
    folder = config.cache / identity
    meta = _read_valid_meta(folder, note)
    if meta is not None:
        note(f"tokens of an earlier run are used: {folder}")
    else:
        folder = (config.scratch_dir or config.cache) / identity
        meta = _build_store(folder, config, files, encoder, progress, note)
    encoder.check_in_vocab(meta.max_id, config.vocab)
    has_pairs = bool(config.parsed_fields.source)
    _check_has_pairs(meta) if has_pairs else _check_has_block(meta, config.seq_length)
    tokens = store.map_tokens(folder, meta, config.seq_length)
    note(_seq2seq_summary(tokens, config.source_length) if has_pairs else _packed_summary(tokens))
    return tokens


def _check_eos_id(config: TokenizeConfig) -> None:
    if config.eos_id is not None and not 0 <= config.eos_id < config.vocab:
        why = f"the true vocabulary, padding apart, is {config.vocab:,}"
        raise PrepError(f"end-of-text id {config.eos_id:,} is not in the model's vocabulary", why)


def _store_identity(config: TokenizeConfig, files: Sequence[DataFile], tokenizer: TextTokenizer) -> str:
    """What the ids depend on: neither where the files are, nor how the ids are grouped."""
    facts = {
        "version": TOKENS_VERSION,
        "type": config.type,
        "fields": config.fields if config.type == "json" else None,
        "eos_id": config.eos_id,
        "tokenizer": tokenizer.digest,
        "files": [[file.nbytes, file.digest] for file in files],
    }
    facts |= {"prefix": config.prefix} if config.prefix else {}
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())


def _build_store(
    folder: Path,
    config: TokenizeConfig,
    files: Sequence[DataFile],
    tokenizer: TextTokenizer,
    progress: TokenizeProgress,
    note: Note,
) -> store.StoreMeta:
    with store.lock_cache(folder.parent, note):
        if (meta := _read_valid_meta(folder)) is not None:  # another process has just made it
            return meta
        dtype = store.dtype_for(max(tokenizer.max_id, config.eos_id or 0))
        store.build_store(folder, dtype, lambda writer: _write_tokens(writer, config, files, tokenizer, progress))
        return store.read_meta(folder)


def _read_valid_meta(folder: Path, note: Note = lambda text: None) -> store.StoreMeta | None:
    """Read what a store says of itself; None where it is missing or damaged, which `note` is told."""
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
    done, total = 0, sum(file.nbytes for file in files)
    found = (
        piece for file in files for piece in read_text_chunks(file, config.type, config.parsed_fields, config.prefix)
    )
    for batch in batch_chunks(found):
        for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch])):
            writer.append(ids)
            if piece.ends_document:
                _end_document(writer, config.eos_id)
        tokenizer.check_in_vocab(writer.max_id, config.vocab)
        done += sum(piece.nbytes for piece in batch)
        progress(done, total)


def _end_document(writer: store.TokenWriter, eos_id: int | None) -> None:
    if eos_id is not None:
        writer.append(np.array([eos_id], np.uint32))
    writer.end_document()


def batch_chunks(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    """Pieces in order, in groups of at most BATCH_NBYTES; one that is larger is a group by itself."""
    batch: list[TextChunk] = []
    nbytes = 0
    for piece in chunks:
        if batch and nbytes + piece.nbytes > ENCODE_BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += piece.nbytes
    if batch:
        yield batch


def _check_has_pairs(meta: store.StoreMeta) -> None:
    if not meta.n_tokens:
        raise PrepError("the data has no pair", "looked for objects, found blank lines")


def _check_has_block(meta: store.StoreMeta, seq_length: int) -> None:
    if meta.n_tokens < seq_length:
        why = f"{_count_text(meta.n_tokens, 'token')} in {_count_text(meta.n_documents, 'document')}, a block has {seq_length:,}"
        hint = f"more text, or `--set data.seq_length={meta.n_tokens}`" if meta.n_tokens > 1 else "more text"
        raise PrepError("the data is shorter than one block", why, hint)


def _packed_summary(tokens: store.MappedTokens) -> str:
    left = tokens.n_tokens % tokens.seq_length
    held = f"{_count_text(tokens.n_tokens, 'token')} in {_count_text(tokens.n_documents, 'document')}"
    blocks = f"{_count_text(tokens.n_blocks, 'block')} of {tokens.seq_length:,}"
    return f"{held}: {blocks}, {_count_text(left, 'token')} left over and dropped"


def _seq2seq_summary(tokens: store.MappedTokens, source_length: int) -> str:
    sources, targets = count_truncated(tokens, source_length)
    held = f"{_count_text(tokens.n_tokens, 'token')} in {_count_text(tokens.n_documents // 2, 'pair')}"
    cut = f"{_count_text(sources, 'source')} of more than {source_length:,}, {_count_text(targets, 'target')} of more than"
    return f"{held}: {cut} {tokens.seq_length:,} tokens are cut"


def _count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
