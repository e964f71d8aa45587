"""Tokenize data files into a token store, once per content, fields and tokenizer.

Later runs use the store again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.core.errors import Key, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.core.process_group import ProcessGroup
from trainer.data import shards
from trainer.data.document_rows import open_rows, stored_rows
from trainer.data.examples import CUT_DOCUMENTS, DROPPED_DOCUMENTS, describe_ignored
from trainer.data.fields import compile_fields
from trainer.data.files import (
    OPENED_PREFIX,
    DataFile,
    DigestRecord,
    Note,
    file_stamps,
    hash_files,
    io_error,
    path_of,
    read_record,
    remove_shared_digests,
    share_digests,
    write_record,
)
from trainer.data.find_files import resolve_type
from trainer.data.readers import READERS
from trainer.data.records import divide_files
from trainer.data.shards import (
    MAX_SHARDS,
    StoreJob,
    TokenizeProgress,
    complete_store,
    dtype_for,
    make_shards,
    read_valid_meta,
)
from trainer.data.store import MappedTokens, StoreMeta, is_complete, map_tokens, read_meta
from trainer.data.token_samples import count_samples
from trainer.data.tokenize_config import (
    RecordedTokens,
    TokenizeConfig,
    checked_identity,
    find_config_files,
    record_key,
    record_settings,
    store_identity,
)
from trainer.data.tokenizer import TextTokenizer, load_tokenizer
from trainer.distributed.agreement import folder_processes


@dataclass(frozen=True, slots=True)
class TokenizedShare:
    """The state of a store after the work of a process."""

    folder: Path  # Folder of the store, also of an incomplete one
    n_shards: int  # Number of shards
    n_missing: int  # Number of shards left to other processes
    meta: StoreMeta | None = None  # Metadata of the store. None if shards are missing.
    tokens: MappedTokens | None = None  # The mapped store. None if shards are missing.
    # Whether this process describes the store to the user: the one that completed it, or process 0 if it was complete
    # before
    is_described: bool = False


@dataclass(frozen=True, slots=True)
class DataInputs:
    """The data files of a config, and the identity of their tokens."""

    config: TokenizeConfig  # The config, with the type of the files and the tokenizer's prefix
    tokenizer: TextTokenizer  # Its tokenizer
    files: Sequence[DataFile]  # The files with their digests, without empty ones
    identity: str  # Identity of the tokens

    @property
    def folder(self) -> Path:
        """Folder of the tokens in the cache."""
        return self.config.cache / self.identity


def tokenize_files(
    config: TokenizeConfig, *, progress: TokenizeProgress, note: Note
) -> MappedTokens:
    """Return the tokens of the configured files, from the cache or tokenized now.

    All files are read once for their digests. Tokens in the cache are read once to check their
    digests, and rebuilt if damaged. See `TokenizeConfig.checks_digests`.

    Args:
        config: Files, tokenizer and cache.
        progress: Called with the bytes tokenized so far, the total bytes, and the tokens so far.
        note: Called with messages for the user: the store, its size, and the number of dropped
            tokens.

    Raises:
        PrepError: Files are missing, empty or invalid, the tokenizer does not fit the model, the
            tokens do not fill one block, or a resumed run began with others.
    """
    tokens = tokenize_share(config, 0, 1, progress=progress, note=note).tokens
    assert tokens is not None
    return tokens


def tokenize_share(
    config: TokenizeConfig,
    process: int,
    of: int,
    *,
    progress: TokenizeProgress,
    note: Note,
) -> TokenizedShare:
    """Make the missing shards in a share of a store. The last process completes the store.

    With a scratch folder, a missing store is made there. All processes share the cache.

    Raises:
        PrepError: The tokens cannot be made, or do not fit the model. See `tokenize_files`.
    """
    if not config.checks_digests and (known := _open_known(config, note)) is not None:
        return known
    inputs = read_inputs(config, note, process, of)
    meta = read_valid_meta(inputs.folder, note, reopens=config.scratch_dir is None)
    if meta is not None:
        if of == 1:
            note(f"using the tokens of an earlier run: {inputs.folder}")
        return _finish(inputs, inputs.folder, meta, note, is_described=process == 0)
    job = store_job(inputs)
    make_shards(job, job.share(process, of), progress=progress, note=note)
    if missing := job.missing_shards():
        return TokenizedShare(job.folder, job.layout.n_shards, len(missing))
    meta = complete_store(job, progress=progress, note=note)
    return _finish(inputs, job.folder, meta, note, is_described=True)


def _finish(
    inputs: DataInputs, folder: Path, meta: StoreMeta, note: Note, *, is_described: bool
) -> TokenizedShare:
    """Map a complete store with checked digests."""
    tokens = map_new_tokens(folder, meta, inputs.config, inputs.tokenizer, note)
    return TokenizedShare(folder, len(meta.shards), 0, meta, tokens, is_described=is_described)


def _open_known(config: TokenizeConfig, note: Note) -> TokenizedShare | None:
    """Return the complete tokens of files with the sizes and times of an earlier call. None if there are none."""
    tokenizer = load_tokenizer(config.tokenizer)
    typed, found = find_config_files(config, tokenizer, note)
    record = read_record(typed.cache, record_key(typed, tokenizer), file_stamps(found))
    if record is None or not is_complete(typed.cache / record.identity):
        return None
    folder = typed.cache / record.identity
    meta = read_meta(folder, checks_digests=False)
    tokens = open_tokens(typed, record.identity, note=note)
    return TokenizedShare(folder, len(meta.shards), 0, meta, tokens, is_described=True)


def read_inputs(config: TokenizeConfig, note: Note, process: int = 0, of: int = 1) -> DataInputs:
    """Find the data files and read them for their digests.

    Several processes trust digests recorded by other processes for files of the same sizes and times. The
    readers compare them.

    Raises:
        PrepError: Files are missing, empty or invalid, or a resumed run began with other tokens.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    config, found = find_config_files(config, tokenizer, note)
    key = record_key(config, tokenizer)
    stamps = file_stamps(found)
    digests: Sequence[str] = ()
    if of > 1:
        record = read_record(config.cache, key, stamps)
        if record is not None and record.digests is not None:
            digests = record.digests
        else:
            digests = share_digests(found, config.cache, key, stamps, process=process, of=of)
    files = hash_files(found, note, digests)
    identity = checked_identity(config, files, tokenizer, note)
    # A resumed run that keeps the tokens of an earlier version has another identity.
    if config.scratch_dir is None and identity == store_identity(config, files, tokenizer.digest):
        by_path = {str(file.path): file.digest for file in files}
        digests = [by_path.get(path_of(file), "") for file in found]
        write_record(config.cache, key, stamps, DigestRecord(identity, digests))
        remove_shared_digests(config.cache, key)
    return DataInputs(config, tokenizer, files, identity)


def store_job(inputs: DataInputs) -> StoreJob:
    """Return the inputs of a missing store."""
    config = inputs.config
    builder = compile_fields(config.examples, vocab=config.vocab)
    settings = record_settings(config)
    file_type = resolve_type(inputs.files, config.type)
    folder = (config.scratch_dir or config.cache) / inputs.identity
    # The limit counts the records of all files, so one shard has them.
    max_shards = 1 if config.max_examples else MAX_SHARDS
    layout = divide_files(
        inputs.files, file_type, min_nbytes=shards.SHARD_NBYTES, max_shards=max_shards
    )
    # The dtype is fixed before the first id is known, so it holds every possible id.
    max_id = max(inputs.tokenizer.max_id, builder.max_extra_token_id)
    if READERS[file_type].has_ids:
        max_id = max(max_id, config.vocab - 1)
    return StoreJob(
        folder,
        inputs.files,
        file_type,
        builder,
        inputs.tokenizer,
        settings,
        config.overlong_rule,
        dtype_for(max_id),
        layout,
    )


def map_new_tokens(
    folder: Path,
    meta: StoreMeta,
    config: TokenizeConfig,
    tokenizer: TextTokenizer,
    note: Note,
) -> MappedTokens:
    """Map a complete store with checked digests, and store its rows of documents.

    Raises:
        PrepError: The tokens do not fit the model, or do not fill one block.
    """
    tokens = _map_token_store(folder, meta, config, tokenizer, note)
    if not config.has_rows:
        return tokens
    target = config.scratch_dir or folder
    return replace(
        tokens, rows=stored_rows(folder, meta, tokens, config.packing, target=target, note=note)
    )


def open_tokens(config: TokenizeConfig, identity: str, *, note: Note) -> MappedTokens:
    """Return tokens in the cache, made or checked by another process. The data files are not read.

    Raises:
        PrepError: The tokens are missing or cut off, or do not fit the model.
    """
    folder = config.cache / identity
    meta = read_meta(folder, checks_digests=False)
    tokens = _map_token_store(folder, meta, config, load_tokenizer(config.tokenizer), note)
    if not config.has_rows:
        return tokens
    return replace(tokens, rows=open_rows(folder, meta, tokens, config.packing))


def _map_token_store(
    folder: Path,
    meta: StoreMeta,
    config: TokenizeConfig,
    tokenizer: TextTokenizer,
    note: Note,
) -> MappedTokens:
    """Map a store. Raise PrepError if it does not fit the model or has no row."""
    tokenizer.check_in_vocab(meta.max_id, config.vocab)
    if remark := tokenizer.smaller_vocabulary_note(config.vocab):
        note(remark)
    _check_size(meta, config)
    tokens = map_tokens(folder, meta, config.seq_length)
    if not tokens.count_loss() and tokens.n_tokens:
        what = "the data has no token to train on"
        _check_overlong(meta, what)
        why = "all its tokens are in fields in brackets, or none is in a turn of the assistant"
        hint = text("set another {}, or for conversations {}", Key("data.fields"), Key("data.loss"))
        raise PrepError(what, why, hint)
    note(_dataset_summary(tokens, config))
    for line in describe_ignored(meta.ignored):
        note(line)
    return tokens


def _dataset_summary(tokens: MappedTokens, config: TokenizeConfig) -> str:
    """Return the sizes of a store in one line."""
    if config.examples.has_encoder:
        counts = count_samples(tokens, source_length=config.source_length, has_blocks=False)
        size = f"{count_text(tokens.n_tokens, 'token')} in {count_text(counts.samples, 'pair')}"
        sources = (
            f"{count_text(counts.cut_sources, 'source')} of more than {config.source_length:,}"
        )
        targets = f"{count_text(counts.cut_targets, 'target')} of more than {tokens.seq_length:,}"
        return f"{size}: {sources}, {targets} tokens are cut"
    size = f"{count_text(tokens.n_tokens, 'token')} in {count_text(tokens.n_documents, 'document')}"
    if tokens.weight_codes is not None:
        size += f", {100 * tokens.count_loss() / tokens.n_tokens:.0f} % with loss"
    if not config.has_blocks:
        return size
    blocks = f"{count_text(tokens.n_blocks, 'block')} of {tokens.seq_length:,}"
    n_dropped = tokens.n_tokens % tokens.seq_length
    return f"{size}: {blocks}, {count_text(n_dropped, 'token')} left over and dropped"


def _check_size(meta: StoreMeta, config: TokenizeConfig) -> None:
    """Raise PrepError if a store has no token, or does not fill one block."""
    hint = text("set another {}", Key("data.path"))
    if config.examples.has_encoder:
        if not meta.n_tokens:
            why = "all lines are blank, or all their texts are empty"
            raise PrepError("the data has no source-target pair", why, hint)
    elif not config.has_blocks:
        if not meta.n_tokens:
            what = "the data has no token"
            _check_overlong(meta, what)
            raise PrepError(what, "all its documents are empty", hint)
    elif meta.n_tokens < config.seq_length:
        what = "the data is shorter than one block"
        _check_overlong(meta, what)
        size = f"{count_text(meta.n_tokens, 'token')} in {count_text(meta.n_documents, 'document')}"
        hint = "add more text"
        if config.source_length:
            # Only span corruption has it here. It decides the length of a block.
            hint = text("{}, or a smaller {}", hint, Key("data.source_length"))
        elif meta.n_tokens > 1:
            hint = text("{}, or {}", hint, Key("data.seq_length", meta.n_tokens, is_override=True))
        raise PrepError(what, f"{size}, a block has {config.seq_length:,}", hint)


def _check_overlong(meta: StoreMeta, what: str) -> None:
    """Raise PrepError if long documents were cut or dropped, which explains that tokens are missing."""
    overlong = {name: meta.ignored.get(name, 0) for name in (CUT_DOCUMENTS, DROPPED_DOCUMENTS)}
    if any(overlong.values()):
        hint = text("a larger {}, or another {}", Key("data.seq_length"), Key("data.overlong"))
        raise PrepError(what, ", ".join(describe_ignored(overlong)), hint)


# Tokens that the processes of a job make together, or wait for.

# Names of exchanges between processes.
MISSING_TOKENS = "tokens are missing"
TOKEN_SHARDS = "token shards"
RECORDED_TOKENS = "recorded tokens"


def tokenize_in_group(
    config: TokenizeConfig, group: ProcessGroup, *, progress: TokenizeProgress, note: Note
) -> MappedTokens:
    """Return the tokens of the configured files.

    All processes call it together. If the hosts share the cache, the first process of each host
    makes a share of the tokens. Otherwise process 0 makes them, and the first process of each host
    without the cache of process 0. All other processes wait, then open the tokens without reading
    the data files. With a scratch folder, each process makes the tokens that are missing in the
    cache.

    Args:
        config: Files, tokenizer and cache. All processes use the recorded tokens of process 0.
        group: The processes of the job.
        progress: Called with the bytes tokenized so far, the total bytes, and the tokens so far.
        note: Called with messages for the user.

    Raises:
        PrepError: The tokens cannot be made, or the hosts have different data files.
    """
    encoded = group.broadcast(RECORDED_TOKENS, config.recorded.encode() if config.recorded else "")
    # Another process may not see the run that has recorded the tokens.
    config = replace(config, recorded=RecordedTokens.decode(encoded) if encoded else None)
    if config.scratch_dir is not None:
        return tokenize_files(config, progress=progress, note=note)
    if group.count == 1:
        return tokenize_files(config, progress=progress, note=note)
    if group.index == 0:
        try:
            config.cache.mkdir(parents=True, exist_ok=True)
            (config.cache / OPENED_PREFIX).touch()
        except OSError as error:
            raise io_error(config.cache, error) from error
    tokens = None
    processes = folder_processes(config.cache, group)
    if processes.is_shared and len(processes.host_leaders) > 1:
        tokens = _tokenize_on_hosts(
            config, group, processes.host_leaders, progress=progress, note=note
        )
    elif group.index in processes.writers:
        tokens = tokenize_files(config, progress=progress, note=note)
    # Process 0 waits here until all tokens are complete. Other processes wait in the broadcast below.
    identities = group.gather("tokens", tokens.identity if tokens else "")
    if group.index == 0:
        _check_equal(identities)
    identity = group.broadcast("identity of the tokens", tokens.identity if tokens else "")
    return tokens or open_tokens(config, identity, note=note)


def _tokenize_on_hosts(
    config: TokenizeConfig,
    group: ProcessGroup,
    leaders: Sequence[int],
    *,
    progress: TokenizeProgress,
    note: Note,
) -> MappedTokens | None:
    """Return the tokens on process 0, and None elsewhere. The first process of each host makes a share."""
    if group.index > 0:
        has_work = group.broadcast(MISSING_TOKENS, "") == str(True)
        if has_work and group.index in leaders:
            # A host without the data files makes no share. Process 0 makes what is missing in the
            # end, and reports the error of invalid data.
            with suppress(PrepError):
                place = leaders.index(group.index)
                job = store_job(read_inputs(config, note, place, len(leaders)))
                share = job.share(place, len(leaders))
                make_shards(job, share, progress=progress, note=note)
        group.barrier(TOKEN_SHARDS)
        return None
    # Process 0 reads all files for their digests. The others find its record.
    inputs = read_inputs(config, note)
    job = store_job(inputs)
    has_work = not is_complete(job.folder)
    group.broadcast(MISSING_TOKENS, str(has_work))
    if has_work:
        share = job.share(0, len(leaders))
        make_shards(job, share, progress=progress, note=note)
    group.barrier(TOKEN_SHARDS)
    meta = read_valid_meta(job.folder, note, reopens=True)
    if meta is None:
        make_shards(job, range(job.layout.n_shards), progress=progress, note=note)
        meta = complete_store(job, progress=progress, note=note)
    return map_new_tokens(job.folder, meta, inputs.config, inputs.tokenizer, note)


def _check_equal(identities: Sequence[str]) -> None:
    """Raise PrepError if two hosts made different tokens."""
    other = next(
        (index for index, identity in enumerate(identities) if identity not in ("", identities[0])),
        None,
    )
    if other is not None:
        what = f"the data of process {other} differs from the data of process 0"
        why = f"its tokens are {identities[other]}, process 0 has {identities[0]}"
        raise PrepError(
            what,
            why,
            "use the same files in `data.path` on all hosts, or put them on a shared file system",
        )
