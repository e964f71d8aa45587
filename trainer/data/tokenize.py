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
from trainer.data.documents import PIECE_NBYTES, Piece, pieces
from trainer.data.files import DataFile, Type, examine, find
from trainer.data.seq2seq import cut_counts
from trainer.data.tokenizer import Encoder, load
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import Fields, parse

VERSION = 1  # of the tokens that a request gives; another number, and none is used again
BATCH_NBYTES = PIECE_NBYTES * min(max(os.cpu_count() or 1, 8), 64)  # pieces for every core; takes 100 times that

Progress = Callable[[int, int], None]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What tokens are wanted.

    `paths`: files, folders and globs (`files.find` says what they stand for); `fields`: for `json` what holds the text,
    or a source and a target (`fields.parse`), `prefix`: put before each source; `source_length`: tokens of a source at
    most, of a target `seq_length`; `tokenizer`: a tokenizer.json, or a folder that has one; `eos_id`: appended to each
    document; `vocab`: the model's true vocabulary, padding apart; `cache`: the folder of stores; `spare`: another one,
    where tokens are made that the cache lacks, so that nothing is written to it.
    """

    type: Type
    paths: tuple[str, ...]
    fields: str
    seq_length: int
    tokenizer: Path
    eos_id: int | None
    vocab: int
    cache: Path
    spare: Path | None = None
    source_length: int = 0
    prefix: str = ""

    @property
    def read(self) -> Fields:
        """What is read of each object."""
        return parse(self.fields) if self.type == "json" else Fields(())


def prepare(request: Request, progress: Progress, note: Note) -> store.Tokens:
    """The tokens of a request, made in bounded memory, or mapped at once if the cache has them already.

    The files are read once for their digests in any case, and tokens that the cache has for theirs: damaged ones are
    made again. `progress`: bytes tokenised, of how many; `note` is told
    what is used, how much it is, and what the last block leaves over, or what of pairs is cut. PrepError for files that
    are missing, empty or not what their type says; for a tokenizer that does not fit; for fewer tokens than one block.
    """
    encoder = load(request.tokenizer)
    _check_end_of_text(request)
    files = [examine(path) for path in find(request.paths, request.type)]
    identity = _identity(request, files, encoder)
    folder = request.cache / identity
    meta = _stored(folder, note)
    if meta is not None:
        note(f"tokens of an earlier run are used: {folder}")
    else:
        folder = (request.spare or request.cache) / identity
        meta = _build(folder, request, files, encoder, progress, note)
    encoder.check(meta.max_id, request.vocab)
    has_pairs = bool(request.read.source)
    _check_pairs(meta) if has_pairs else _check_length(meta, request.seq_length)
    tokens = store.map_tokens(folder, meta, request.seq_length)
    note(_summary_of_pairs(tokens, request.source_length) if has_pairs else _summary(tokens))
    return tokens


def _check_end_of_text(request: Request) -> None:
    if request.eos_id is not None and not 0 <= request.eos_id < request.vocab:
        why = f"the true vocabulary, padding apart, is {request.vocab:,}"
        raise PrepError(f"end-of-text id {request.eos_id:,} is not in the model's vocabulary", why)


def _identity(request: Request, files: Sequence[DataFile], encoder: Encoder) -> str:
    """What the ids depend on: neither where the files are, nor how the ids are grouped."""
    facts = {
        "version": VERSION,
        "type": request.type,
        "fields": request.fields if request.type == "json" else None,
        "eos_id": request.eos_id,
        "tokenizer": encoder.digest,
        "files": [[file.nbytes, file.digest] for file in files],
    }
    facts |= {"prefix": request.prefix} if request.prefix else {}
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())


def _build(
    folder: Path, request: Request, files: Sequence[DataFile], encoder: Encoder, progress: Progress, note: Note
) -> store.Meta:
    with store.locked(folder.parent, note):
        if (meta := _stored(folder)) is not None:  # another process has just made it
            return meta
        dtype = store.dtype_for(max(encoder.max_id, request.eos_id or 0))
        store.build(folder, dtype, lambda writer: _fill(writer, request, files, encoder, progress))
        return store.read_meta(folder)


def _stored(folder: Path, note: Note = lambda text: None) -> store.Meta | None:
    """Read what a store says of itself; None where it is missing or damaged, which `note` is told."""
    try:
        return store.read_meta(folder) if folder.exists() else None
    except store.Damaged as error:
        note(f"{error.what} ({error.why}): they are made again")
        return None


def _fill(
    writer: store.Writer, request: Request, files: Sequence[DataFile], encoder: Encoder, progress: Progress
) -> None:
    done, total = 0, sum(file.nbytes for file in files)
    found = (piece for file in files for piece in pieces(file, request.type, request.read, request.prefix))
    for batch in batched(found):
        for piece, ids in zip(batch, encoder.encode([piece.text for piece in batch])):
            writer.add(ids)
            if piece.ends_document:
                _end_document(writer, request.eos_id)
        encoder.check(writer.max_id, request.vocab)
        done += sum(piece.nbytes for piece in batch)
        progress(done, total)


def _end_document(writer: store.Writer, eos_id: int | None) -> None:
    if eos_id is not None:
        writer.add(np.array([eos_id], np.uint32))
    writer.end_document()


def batched(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in order, in groups of at most BATCH_NBYTES; one that is larger is a group by itself."""
    batch: list[Piece] = []
    nbytes = 0
    for piece in found:
        if batch and nbytes + piece.nbytes > BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += piece.nbytes
    if batch:
        yield batch


def _check_pairs(meta: store.Meta) -> None:
    if not meta.n_tokens:
        raise PrepError("the data has no pair", "looked for objects, found blank lines")


def _check_length(meta: store.Meta, seq_length: int) -> None:
    if meta.n_tokens < seq_length:
        why = f"{_count(meta.n_tokens, 'token')} in {_count(meta.n_documents, 'document')}, a block has {seq_length:,}"
        hint = f"more text, or `--set data.seq_length={meta.n_tokens}`" if meta.n_tokens > 1 else "more text"
        raise PrepError("the data is shorter than one block", why, hint)


def _summary(tokens: store.Tokens) -> str:
    left = tokens.n_tokens % tokens.seq_length
    held = f"{_count(tokens.n_tokens, 'token')} in {_count(tokens.n_documents, 'document')}"
    blocks = f"{_count(tokens.n_blocks, 'block')} of {tokens.seq_length:,}"
    return f"{held}: {blocks}, {_count(left, 'token')} left over and dropped"


def _summary_of_pairs(tokens: store.Tokens, source_length: int) -> str:
    sources, targets = cut_counts(tokens, source_length)
    held = f"{_count(tokens.n_tokens, 'token')} in {_count(tokens.n_documents // 2, 'pair')}"
    cut = f"{_count(sources, 'source')} of more than {source_length:,}, {_count(targets, 'target')} of more than"
    return f"{held}: {cut} {tokens.seq_length:,} tokens are cut"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
