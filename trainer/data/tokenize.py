"""Tokenize data files into a token store, once per content, fields and tokenizer.

Later runs use the store again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from prepcli.core.errors import Key, PrepError, join_texts, text, usage_error
from prepcli.core.formatting import count_text
from trainer.data import shards, store
from trainer.data.cache_records import (
    FileRecord,
    Stamp,
    file_stamps,
    paths_digest,
    read_record,
    write_record,
)
from trainer.data.document_rows import open_rows, stored_rows
from trainer.data.example_settings import ExampleSettings
from trainer.data.fields import ExampleBuilder, compile_fields
from trainer.data.files import DataFile, EmptyFileError, Note, check_not_empty, hash_file
from trainer.data.find_files import NO_REMOTE_FILES, find_data_files, resolve_type, with_companions
from trainer.data.ignored_parts import describe_ignored
from trainer.data.overlong import OverlongRule
from trainer.data.readers import READERS
from trainer.data.records import RecordSettings, divide_files
from trainer.data.remote_files import WHOLE, RemoteFiles, Selection
from trainer.data.shards import (
    MAX_SHARDS,
    StoreJob,
    TokenizeProgress,
    complete_store,
    dtype_for,
    make_shards,
    read_valid_meta,
)
from trainer.data.store_checks import (
    check_has_block,
    check_has_loss,
    check_has_source_target_pair,
    check_has_token,
)
from trainer.data.token_changes import IdentityChange, RecordedTokens
from trainer.data.token_samples import count_samples
from trainer.data.tokenizer import TextTokenizer, load_tokenizer
from trainer.recipe.text_fields import (
    CONCATENATED,
    DEFAULT_FIELDS,
    DEFAULT_IDS_DTYPE,
    DEFAULT_MAX_DOCUMENT_NBYTES,
    WHOLE_TOKENS,
    DataType,
    FileType,
    Overlong,
    Packing,
)

# Settings that put tokens around a document.
ADDED_TOKENS = ("add_bos", "add_eos", "prepend_text")
MAX_EMPTY_NOTES = 3
# Part of a store's identity. Raise it when the same files give other tokens.
TOKENS_VERSION = 1
# Version of the objects in rows of tables, which chat templates see. Also a part of the identity.
ROW_VALUES_VERSION = 1
TABLE_TYPES = ("parquet", "arrow")


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """The inputs of the tokens of a dataset, and their folder.

    Attributes:
        type: Type of the data files.
        paths: Files, folders, globs and URLs, as `find_data_files` takes them.
        examples: Settings of the examples of records.
        seq_length: Tokens of a block, or maximum tokens of a target.
        tokenizer: A tokenizer.json, or a folder with one.
        vocab: Size of the model's vocabulary without padding.
        cache: Folder of token stores.
        scratch_dir: Folder for a new store, if `cache` must not be written to.
        source_length: Maximum tokens of a source.
        max_examples: Maximum number of records, or of documents of data without columns. 0 for all.
        selection: Part of a dataset.
        bad_lines: Maximum number of invalid records to skip.
        ids_dtype: Dtype of token ids in files without a recorded dtype.
        max_document_nbytes: Maximum bytes of a line, a row or a value.
        remote: Finds the files of URLs.
        source: Name of the source in a mixture. Empty for the only source of a run.
        is_evaluation: Whether the data is for evaluation.
        packing: The recipe's `data.packing`. Ignored with an encoder.
        overlong: What becomes of records longer than a sequence.
        checks_digests: Read all data files and tokens for their digests. If False, files with the
            sizes and times of an earlier call, and their tokens, are trusted.
        recorded: The tokens with which a resumed run began. Others are an error, before they are made.
            None if there is no such run.
    """

    type: DataType
    paths: tuple[str, ...]
    examples: ExampleSettings
    seq_length: int
    tokenizer: Path
    vocab: int
    cache: Path
    scratch_dir: Path | None = None
    source_length: int = 0
    max_examples: int = 0
    selection: Selection = WHOLE
    bad_lines: int = 0
    ids_dtype: str = DEFAULT_IDS_DTYPE
    max_document_nbytes: int = DEFAULT_MAX_DOCUMENT_NBYTES
    remote: RemoteFiles = NO_REMOTE_FILES
    source: str = ""
    is_evaluation: bool = False
    packing: Packing = CONCATENATED
    overlong: Overlong = WHOLE_TOKENS
    checks_digests: bool = True
    recorded: RecordedTokens | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether documents are concatenated and cut into blocks."""
        return self.packing == CONCATENATED

    @property
    def overlong_rule(self) -> OverlongRule:
        """The rule for documents that are longer than a sequence."""
        return OverlongRule(self.overlong, self.seq_length, self.examples.bos_id)

    @property
    def encoder_length(self) -> int:
        """Maximum tokens of a source. 0 without an encoder."""
        return self.source_length if self.examples.has_encoder else 0

    @property
    def has_rows(self) -> bool:
        """Whether documents are arranged in rows."""
        return not self.has_blocks and not self.examples.has_encoder


@dataclass(frozen=True, slots=True)
class TokenizedShare:
    """The state of a store after the work of a process.

    Attributes:
        folder: Folder of the store, also of an incomplete one.
        n_shards: Number of shards.
        n_missing: Number of shards left to other processes.
        meta: Metadata of the store. None if shards are missing.
        tokens: The mapped store. None if shards are missing.
        is_described: Whether this process describes the store to the user: the one that completed it, or process
            0 if it was complete before.
    """

    folder: Path
    n_shards: int
    n_missing: int
    meta: store.StoreMeta | None = None
    tokens: store.MappedTokens | None = None
    is_described: bool = False


@dataclass(frozen=True, slots=True)
class DataInputs:
    """The data files of a config, and the identity of their tokens.

    Attributes:
        config: The config, with the type of the files and the tokenizer's prefix.
        tokenizer: Its tokenizer.
        files: The files with their digests, without empty ones.
        identity: Identity of the tokens.
    """

    config: TokenizeConfig
    tokenizer: TextTokenizer
    files: Sequence[DataFile]
    identity: str

    @property
    def folder(self) -> Path:
        """Folder of the tokens in the cache."""
        return self.config.cache / self.identity


def tokenize_files(
    config: TokenizeConfig, *, progress: TokenizeProgress, note: Note
) -> store.MappedTokens:
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

    With a scratch folder, a missing store is made there.

    Args:
        config: Files, tokenizer and cache. The cache is shared by all processes.
        process: Index of this process, from 0.
        of: Number of processes.
        progress: Called with the bytes tokenized so far, the total bytes, and the tokens so far.
        note: Called with messages for the user.

    Raises:
        PrepError: The tokens cannot be made, or do not fit the model. See `tokenize_files`.
    """
    if not config.checks_digests and (known := _open_known(config, note)) is not None:
        return known
    inputs = read_inputs(config, note, trusts_stamps=of > 1)
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
    inputs: DataInputs, folder: Path, meta: store.StoreMeta, note: Note, *, is_described: bool
) -> TokenizedShare:
    """Map a complete store with checked digests."""
    tokens = map_new_tokens(folder, meta, inputs.config, inputs.tokenizer, note)
    return TokenizedShare(folder, len(meta.shards), 0, meta, tokens, is_described=is_described)


def _open_known(config: TokenizeConfig, note: Note) -> TokenizedShare | None:
    """Return the complete tokens of files with the sizes and times of an earlier call. None if there are none."""
    tokenizer = load_tokenizer(config.tokenizer)
    typed, found = find_config_files(config, tokenizer, note)
    record = read_record(typed.cache, record_key(typed, tokenizer), file_stamps(found))
    if record is None or not store.is_complete(typed.cache / record.identity):
        return None
    folder = typed.cache / record.identity
    meta = store.read_meta(folder, checks_digests=False)
    tokens = open_tokens(typed, record.identity, note=note)
    return TokenizedShare(folder, len(meta.shards), 0, meta, tokens, is_described=True)


def read_inputs(config: TokenizeConfig, note: Note, *, trusts_stamps: bool) -> DataInputs:
    """Find the data files and read them for their digests.

    Args:
        config: Files, tokenizer and cache.
        note: Called with messages for the user.
        trusts_stamps: Use the digests of an earlier call for files with the same sizes and times. The readers
            compare them.

    Raises:
        PrepError: Files are missing, empty or invalid, or a resumed run began with other tokens.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    config, found = find_config_files(config, tokenizer, note)
    key = record_key(config, tokenizer)
    stamps = file_stamps(found)
    files = None
    if trusts_stamps:
        files = _recorded_files(found, stamps, read_record(config.cache, key, stamps))
    if files is None:
        files = hash_files(found, note)
    identity = checked_identity(config, files, tokenizer, note)
    # A resumed run that keeps the tokens of an earlier version has another identity.
    if config.scratch_dir is None and identity == store_identity(config, files, tokenizer.digest):
        by_path = {file.path: file.digest for file in files}
        digests = [by_path.get(_path_of(file), "") for file in found]
        write_record(config.cache, key, stamps, FileRecord(identity, digests))
    return DataInputs(config, tokenizer, files, identity)


def _recorded_files(
    found: Sequence[Path | DataFile], stamps: Sequence[Stamp], record: FileRecord | None
) -> list[DataFile] | None:
    """Return the files that are not empty with recorded digests. None if there are none."""
    if record is None or record.digests is None:
        return None
    files: list[DataFile] = []
    for file, stamp, digest in zip(found, stamps, record.digests):
        if isinstance(file, DataFile):
            file = replace(file, digest=digest)
        else:
            file = DataFile(file, stamp[1], digest)
        if digest:
            files.append(file)
    return files


def _path_of(file: Path | DataFile) -> Path | str:
    if isinstance(file, DataFile):
        return file.path
    return file


def store_job(inputs: DataInputs) -> StoreJob:
    """Return the inputs of a missing store."""
    config = inputs.config
    builder = compile_fields(config.examples, vocab=config.vocab)
    settings = _record_settings(config)
    file_type = resolve_type(inputs.files, config.type)
    folder = (config.scratch_dir or config.cache) / inputs.identity
    # The limit counts the records of all files, so one shard has them.
    max_shards = 1 if config.max_examples else MAX_SHARDS
    layout = divide_files(
        inputs.files, file_type, min_nbytes=shards.SHARD_NBYTES, max_shards=max_shards
    )
    return StoreJob(
        folder,
        inputs.files,
        file_type,
        builder,
        inputs.tokenizer,
        settings,
        config.overlong_rule,
        ids_dtype(config, inputs.tokenizer, builder),
        layout,
    )


def record_key(config: TokenizeConfig, tokenizer: TextTokenizer) -> str:
    """Return the key of the record of a config's tokens."""
    settings = store_identity(config, (), tokenizer.digest)
    return paths_digest(config.paths, config.selection, settings)


def find_config_files(
    config: TokenizeConfig, tokenizer: TextTokenizer, note: Note
) -> tuple[TokenizeConfig, tuple[Path | DataFile, ...]]:
    """Return a config with the type of its files and the tokenizer's prefix, and the files.

    Local files are not read yet.

    Raises:
        PrepError: There are no files, or the config does not fit them.
    """
    check_eos_id(config)
    found = find_data_files(
        config.paths, config.type, config.selection, remote=config.remote, note=note
    )
    file_type = resolve_type(found, config.type)
    config = set_file_type(config, file_type)
    if READERS[file_type].has_ids:
        check_unused_settings(config, note)
        return config, with_companions(found, file_type)
    if not config.is_evaluation:
        for line in tokenizer.notes():
            note(line)
    if config.examples.chat_template is not None:
        # Templates may end a turn with the start of the next one.
        tokens = [tokenizer.codec.token(token) for token in config.examples.stop_ids]
        stop_texts = tuple(token for token in tokens if token)
        config = replace(config, examples=replace(config.examples, stop_texts=stop_texts))
    elif config.examples.add_bos is None:
        config = _with_prefix(config, tokenizer, note)
    return config, with_companions(found, file_type)


def _with_prefix(config: TokenizeConfig, tokenizer: TextTokenizer, note: Note) -> TokenizeConfig:
    """Return a config that begins documents as the tokenizer begins a text. The training data reports it."""
    examples = replace(config.examples, prefix_ids=tokenizer.prefix_ids())
    begin_ids = examples.used_begin_ids
    if begin_ids and not config.is_evaluation:
        tokens = " ".join(tokenizer.codec.token(token) or str(token) for token in begin_ids)
        note(
            f"each document begins with {tokens}, as the tokenizer begins a text: `data.add_bos = false` omits it"
        )
    return replace(config, examples=examples)


def map_new_tokens(
    folder: Path,
    meta: store.StoreMeta,
    config: TokenizeConfig,
    tokenizer: TextTokenizer,
    note: Note,
) -> store.MappedTokens:
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


def hash_files(found: Sequence[Path | DataFile], note: Note) -> list[DataFile]:
    """Return files with their digests. Empty ones are skipped with a note.

    Raises:
        PrepError: A file cannot be read, or all are empty.
    """
    files: list[DataFile] = []
    empty: list[EmptyFileError] = []
    for file in found:
        try:
            files.append(check_not_empty(file) if isinstance(file, DataFile) else hash_file(file))
        except EmptyFileError as error:
            empty.append(error)
    if empty and not files:
        raise empty[0]
    for error in empty[:MAX_EMPTY_NOTES]:
        note(f"skipped: {error.what}")
    if len(empty) > MAX_EMPTY_NOTES:
        note(f"skipped {len(empty):,} empty files in all")
    return files


def set_file_type(config: TokenizeConfig, file_type: FileType) -> TokenizeConfig:
    """Return a config for files of a type. Types without columns have no fields.

    Raises:
        UsageError: The recipe names columns, and the files have none.
    """
    if file_type in DEFAULT_FIELDS:
        return replace(config, type=file_type)
    if config.overlong != WHOLE_TOKENS:
        what = text("{}", Key("data.overlong", config.overlong))
        why = f"files of type {file_type} have no records, whose tokens can be cut"
        raise usage_error(what, why, "remove it")
    settings = config.examples
    if (
        settings.fields_from_example
        or settings.chat_template
        or settings.fields not in ("", *DEFAULT_FIELDS.values())
    ):
        fields = settings.fields or settings.fields_from_example
        raise usage_error(
            text('{} is "{:.60}"', Key("data.fields"), fields),
            f"files of type {file_type} have no columns",
            text("{} sets the type of the files", Key("data.type")),
        )
    return replace(config, type=file_type, examples=replace(settings, fields=""))


def check_unused_settings(config: TokenizeConfig, note: Note) -> None:
    """Raise UsageError for settings of added tokens with data of token ids.

    In a mixture the settings may be meant for another source, so they are only reported.
    """
    names = [name for name in ADDED_TOKENS if getattr(config.examples, name)]
    if not names:
        return
    keys = join_texts(", ", [text("{}", Key(f"data.{name}")) for name in names])
    if not config.source:
        why = "token ids in data files are stored unchanged"
        raise usage_error(
            text("{} cannot be used with token ids", keys),
            why,
            "remove it, and add the tokens to the files",
        )
    note(f"token ids are stored as they are, without {keys}")


def open_tokens(config: TokenizeConfig, identity: str, *, note: Note) -> store.MappedTokens:
    """Return tokens in the cache, made or checked by another process.

    Args:
        config: Tokenizer and cache. The data files are not read.
        identity: Identity of the tokens.
        note: Called with messages for the user.

    Raises:
        PrepError: The tokens are missing or cut off, or do not fit the model.
    """
    folder = config.cache / identity
    meta = store.read_meta(folder, checks_digests=False)
    tokens = _map_token_store(folder, meta, config, load_tokenizer(config.tokenizer), note)
    if not config.has_rows:
        return tokens
    return replace(tokens, rows=open_rows(folder, meta, tokens, config.packing))


def _map_token_store(
    folder: Path,
    meta: store.StoreMeta,
    config: TokenizeConfig,
    tokenizer: TextTokenizer,
    note: Note,
) -> store.MappedTokens:
    """Map a store. Raise PrepError if it does not fit the model or has no row."""
    tokenizer.check_in_vocab(meta.max_id, config.vocab)
    if remark := tokenizer.smaller_vocabulary_note(config.vocab):
        note(remark)
    if config.examples.has_encoder:
        check_has_source_target_pair(meta)
    elif config.has_blocks:
        check_has_block(meta, config.seq_length)
    else:
        check_has_token(meta)
    tokens = store.map_tokens(folder, meta, config.seq_length)
    check_has_loss(tokens, meta)
    note(_dataset_summary(tokens, config))
    for line in describe_ignored(meta.ignored):
        note(line)
    return tokens


def check_eos_id(config: TokenizeConfig) -> None:
    """Raise PrepError if the end-of-sequence token is not in the vocabulary."""
    eos_id = config.examples.eos_id
    if eos_id is not None and not 0 <= eos_id < config.vocab:
        why = f"the vocabulary without padding has {config.vocab:,} tokens"
        hint = (
            "correct eos_token_id in the config.json of the source checkpoint, and convert it again"
        )
        raise PrepError(f"eos_token_id {eos_id:,} is out of range", why, hint)


def checked_identity(
    config: TokenizeConfig, files: Sequence[DataFile], tokenizer: TextTokenizer, note: Note
) -> str:
    """Return the identity of a store.

    A run that began with an earlier version keeps its tokens, if they are in the cache.

    Raises:
        PrepError: A resumed run began with other tokens.
    """
    identity = store_identity(config, files, tokenizer.digest)
    recorded = config.recorded
    if recorded is None or identity in recorded.identities:
        return identity

    def identify(add_bos: bool | None, without: Collection[IdentityChange]) -> str:
        begun = replace(config, examples=_examples_with_bos(config, files, tokenizer, add_bos))
        return store_identity(begun, files, tokenizer.digest, without=without)

    add_bos = config.examples.add_bos
    cause = recorded.find_cause(add_bos, identify)
    missing: Path | None = None
    if cause is not None:
        # A damaged store cannot be made again: this version makes other tokens.
        begun = config.cache / cause.identity
        missing = begun if read_valid_meta(begun) is None else None
        if missing is None and cause.add_bos == add_bos:
            note(f"the run keeps the tokens of the earlier version: {cause.description}")
            return cause.identity
    raise recorded.change_error(identity, add_bos, cause, missing=missing)


def _examples_with_bos(
    config: TokenizeConfig,
    files: Sequence[DataFile],
    tokenizer: TextTokenizer,
    add_bos: bool | None,
) -> ExampleSettings:
    """Return the settings of examples with another `data.add_bos`."""
    prefix_ids: tuple[int, ...] = ()
    has_ids = READERS[resolve_type(files, config.type)].has_ids
    if config.examples.chat_template is None and not has_ids:
        prefix_ids = tokenizer.prefix_ids()
    return replace(config.examples, add_bos=add_bos, prefix_ids=prefix_ids)


def store_identity(
    config: TokenizeConfig,
    files: Sequence[DataFile],
    tokenizer_digest: str,
    *,
    without: Collection[IdentityChange] = (),
) -> str:
    """Return a digest of all inputs of the ids and weights.

    File paths and `seq_length` are not among them.

    Args:
        config: Settings of the tokens.
        files: The files with their digests.
        tokenizer_digest: Digest of the tokenizer.
        without: Changes that an earlier version did not have.
    """
    settings = config.examples
    fields = settings.fields if config.type in DEFAULT_FIELDS else None
    inputs = {
        "version": TOKENS_VERSION,
        "type": config.type,
        "fields": fields,
        "eos_id": settings.end_id,
        "tokenizer": tokenizer_digest,
        "files": [[file.nbytes, file.digest] for file in files],
    }
    # A setting is an input only if it differs from its default. Stores of earlier versions, which
    # did not have the setting, therefore keep their identity. The order of keys is part of the
    # digest.
    inputs |= settings.identity_inputs(without)
    has_row_values = settings.chat_template is not None and config.type in TABLE_TYPES
    if has_row_values and IdentityChange.TABLE_ROWS not in without:
        inputs["row_values"] = ROW_VALUES_VERSION
    if rule := config.overlong_rule.identity_inputs():
        inputs["overlong"] = rule
    inputs |= _record_settings(config).identity_inputs(config.type, without)
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())


def _record_settings(config: TokenizeConfig) -> RecordSettings:
    """Return the settings of reading records."""
    return RecordSettings(
        vocab=config.vocab,
        eos_id=config.examples.eos_id,
        bad_lines=config.bad_lines,
        ids_dtype=config.ids_dtype,
        max_document_nbytes=config.max_document_nbytes,
        limit=config.max_examples,
    )


def ids_dtype(config: TokenizeConfig, tokenizer: TextTokenizer, builder: ExampleBuilder) -> str:
    """Return the dtype of a store. It is fixed before the first id is known, so it holds every possible id."""
    max_id = max(tokenizer.max_id, builder.max_extra_token_id)
    if READERS[resolve_type((), config.type)].has_ids:
        max_id = max(max_id, config.vocab - 1)
    return dtype_for(max_id)


def _dataset_summary(tokens: store.MappedTokens, config: TokenizeConfig) -> str:
    """Return the sizes of a store in one line."""
    if config.examples.has_encoder:
        return _seq2seq_summary(tokens, config.source_length)
    size = f"{count_text(tokens.n_tokens, 'token')} in {count_text(tokens.n_documents, 'document')}"
    if tokens.weight_codes is not None:
        size += f", {100 * tokens.count_loss() / tokens.n_tokens:.0f} % with loss"
    if not config.has_blocks:
        return size
    return f"{size}: {_block_summary(tokens)}"


def _block_summary(tokens: store.MappedTokens) -> str:
    n_dropped = tokens.n_tokens % tokens.seq_length
    blocks = f"{count_text(tokens.n_blocks, 'block')} of {tokens.seq_length:,}"
    return f"{blocks}, {count_text(n_dropped, 'token')} left over and dropped"


def _seq2seq_summary(tokens: store.MappedTokens, source_length: int) -> str:
    counts = count_samples(tokens, source_length=source_length, has_blocks=False)
    size = f"{count_text(tokens.n_tokens, 'token')} in {count_text(counts.samples, 'pair')}"
    sources = f"{count_text(counts.cut_sources, 'source')} of more than {source_length:,}"
    targets = (
        f"{count_text(counts.cut_targets, 'target')} of more than {tokens.seq_length:,} tokens"
    )
    return f"{size}: {sources}, {targets} are cut"
