"""Tokenize the files of a store in several processes. The store has the same bytes as with one process.

Each process makes the stores of its shards, with a journal each. The last one to finish appends them
in order to the final store. A killed process is started again with the same number, or its shards
are made by another division of the processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.core.errors import PrepError
from trainer.data import store
from trainer.data.cache_records import Stamp, file_stamps, paths_digest, stamps_digest
from trainer.data.examples import FileStart, ReadPosition
from trainer.data.fields import compile_fields
from trainer.data.files import DataFile, Note
from trainer.data.find_files import resolve_type
from trainer.data.readers import READERS
from trainer.data.shard_plan import (
    MAX_SHARDS,
    PLAN_FILE,
    FoundFile,
    ShardPlan,
    check_settings,
    make_plan,
    planned_data_files,
    read_plan,
    write_plan,
)
from trainer.data.store_writer import TokenWriter, build_store, lock_cache
from trainer.data.tokenize import (
    TokenizeConfig,
    TokenizeProgress,
    build_token_store,
    checked_identity,
    find_config_files,
    hash_files,
    ids_dtype,
    map_new_tokens,
    read_valid_meta,
    store_identity,
    tokenize_files,
    write_identity,
)
from trainer.data.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ShardedTokens:
    """The state of a store after the work of a process.

    Attributes:
        folder: Folder of the store, also of a missing one.
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
class ShardJob:
    """The plan of a store, and the files of this process."""

    folder: Path
    config: TokenizeConfig
    plan: ShardPlan
    files: tuple[DataFile, ...]
    tokenizer: TextTokenizer
    stamps: list[Stamp]

    @property
    def store_folder(self) -> Path:
        """Folder of the final store."""
        return self.config.cache / self.plan.identity

    def shard_folder(self, shard: int) -> Path:
        """Return the folder of a shard's store. Its parent has a lock for this shard alone.

        An only shard is the store itself.
        """
        if self.plan.n_shards == 1:
            return self.store_folder
        files = self.files[self.plan.shard_files(shard)]
        identity = store_identity(self.config, files, self.tokenizer.digest)
        return self.folder / f"{shard:05d}" / identity


def tokenize_share(
    config: TokenizeConfig,
    process: int,
    of: int,
    *,
    progress: TokenizeProgress,
    note: Note,
) -> ShardedTokens:
    """Make every `of`-th shard of a store, starting at shard `process`. The last process makes the store.

    One process makes the store without shards, unless others have begun it. With a scratch folder, a missing store
    is made there.

    Args:
        config: Files, tokenizer and cache. The cache is shared by all processes.
        process: Index of this process, from 0.
        of: Number of processes.
        progress: Called with the bytes tokenized so far, the total bytes, and the tokens so far.
        note: Called with messages for the user.

    Raises:
        PrepError: The files or settings differ from the plan of the other processes, or the tokens
            cannot be made.
    """
    scratch_dir = config.scratch_dir
    if scratch_dir is not None or (of == 1 and not _plan_folder(config).exists()):
        tokens = tokenize_files(config, progress=progress, note=note)
        folder = config.cache / tokens.identity
        if scratch_dir is not None and (scratch_dir / tokens.identity).exists():
            folder = scratch_dir / tokens.identity
        meta = store.read_meta(folder, checks_digests=False)
        return ShardedTokens(folder, 1, 0, meta, tokens, is_described=True)
    return _make_share(open_shards(config, note), process, of, progress=progress, note=note)


def tokenize_alone(
    config: TokenizeConfig, *, progress: TokenizeProgress, note: Note
) -> store.MappedTokens:
    """Return the tokens of all files. Shards of the same files and settings are continued.

    Args:
        config: Files, tokenizer and cache.
        progress: Called with the bytes tokenized so far, the total bytes, and the tokens so far.
        note: Called with messages for the user.

    Raises:
        PrepError: The tokens cannot be made.
    """
    if _plan_folder(config).exists():
        try:
            job = open_shards(config, note)
        except PrepError as error:
            # E.g. a recipe with another tokenizer, the same data and the same cache. Its processes may
            # still run.
            note(f"no unfinished shards are used: {error.what} ({error.why})")
        else:
            tokens = _make_share(job, 0, 1, progress=progress, note=note).tokens
            if tokens is not None:
                return tokens
    return tokenize_files(config, progress=progress, note=note)


def _make_share(
    job: ShardJob, process: int, of: int, *, progress: TokenizeProgress, note: Note
) -> ShardedTokens:
    """Make the shards of a process, and the store if it has all shards."""
    was_complete = is_complete(job)
    if not was_complete:
        make_shards(job, process, of, progress=progress, note=note)
    made = complete_shards(job, progress=progress, note=note)
    # An only shard is the store, and process 0 makes it.
    has_made_first = process == 0 and (was_complete or job.plan.n_shards == 1)
    return replace(made, is_described=made.is_described or has_made_first)


def is_complete(job: ShardJob) -> bool:
    """Return whether the store has its name. Its digests are checked by `complete_shards`."""
    return job.store_folder.exists()


def complete_shards(job: ShardJob, *, progress: TokenizeProgress, note: Note) -> ShardedTokens:
    """Append the shards to the store, if it is missing and all of them are made.

    Raises:
        PrepError: The tokens cannot be written, or do not fit the model.
    """
    n_shards = job.plan.n_shards
    missing: list[int] = []
    if not is_complete(job):
        missing = [shard for shard in range(n_shards) if not job.shard_folder(shard).exists()]
    # Another process may have made the store and removed the shards since the first check.
    if missing and not is_complete(job):
        return ShardedTokens(job.store_folder, n_shards, len(missing))
    meta = read_valid_meta(job.store_folder, note)
    if meta is None and is_complete(job):
        # The store was damaged after its shards were removed. That is rare, so the first process to
        # find the damage makes the whole store. The others wait for the lock.
        meta = build_token_store(
            job.store_folder, job.config, job.files, job.tokenizer, progress=progress, note=note
        )
    is_merged = False
    if meta is None:
        meta, is_merged = _merge_shards(job, progress=progress, note=note)
    _remove_plan(job.folder)
    # Errors of the whole data, such as too few tokens, are those of one process.
    tokens = map_new_tokens(job.store_folder, meta, job.config, job.tokenizer, note)
    if stamps_digest(job.stamps) == job.plan.stamps:
        # Other stamps are of files that another process has tokenized before a change, or of copies.
        write_identity(
            job.config, job.files, job.tokenizer, stamps=job.stamps, identity=job.plan.identity
        )
    return ShardedTokens(job.store_folder, n_shards, 0, meta, tokens, is_described=is_merged)


def _plan_folder(config: TokenizeConfig) -> Path:
    """Return the folder of a plan.

    It is the same for all contents of the files and all settings. Processes with other ones find the
    plan and fail. The stores of a recipe have separate plans, also if they have the same
    files.
    """
    store_name = f"{config.source} {config.is_evaluation}"
    return config.cache / f"shards-{paths_digest(config.paths, config.selection, store_name)}"


def open_shards(config: TokenizeConfig, note: Note) -> ShardJob:
    """Read the plan of a store, or write it if this is the first process.

    Args:
        config: Files, tokenizer and cache.
        note: Called with messages for the user.

    Raises:
        PrepError: The files or settings differ from the plan.
    """
    folder = _plan_folder(config)
    tokenizer = load_tokenizer(config.tokenizer)
    config, found = find_config_files(config, tokenizer, note)
    settings = store_identity(config, (), tokenizer.digest)
    stamps = file_stamps(found)
    # The lock saves work: on a file system with locks, only the first process reads all files for
    # their digests.
    with lock_cache(config.cache, note):
        plan = read_plan(folder)
        if plan is not None and (config.cache / plan.identity).exists():
            # A kill between the publication of a store and the end of the removal leaves the plan.
            _remove_plan(folder)
            plan = None
        if plan is None:
            plan = _make_plan(folder, config, found, tokenizer, stamps=stamps, note=note)
    check_settings(folder, plan, settings)
    files = planned_data_files(folder, plan, found)
    return ShardJob(folder, config, plan, files, tokenizer, stamps)


def _make_plan(
    folder: Path,
    config: TokenizeConfig,
    found: Sequence[FoundFile],
    tokenizer: TextTokenizer,
    *,
    stamps: list[Stamp],
    note: Note,
) -> ShardPlan:
    """Read all files for their digests, and return the plan of the first process to write one."""
    files = hash_files(found, note)
    identity = checked_identity(config, files, tokenizer, note)
    settings = store_identity(config, (), tokenizer.digest)
    # These limits count the records of all files, so one process must read them in order.
    max_shards = MAX_SHARDS
    if config.max_examples or config.bad_lines:
        max_shards = 1
    # The digest of a companion is checked after both files are read, so one process reads both.
    companion_suffix = READERS[resolve_type(files, config.type)].companion_suffix
    plan = make_plan(
        settings,
        identity,
        files,
        stamps=stamps_digest(stamps),
        max_shards=max_shards,
        companion_suffix=companion_suffix,
    )
    if (config.cache / identity).exists():
        return plan
    write_plan(folder, plan)
    return read_plan(folder) or plan


def make_shards(
    job: ShardJob, process: int, of: int, *, progress: TokenizeProgress, note: Note
) -> None:
    """Make every `of`-th missing shard, starting at shard `process`. The arguments are as for `tokenize_share`.

    Raises:
        PrepError: A shard cannot be made.
    """
    shards = range(process, job.plan.n_shards, of)
    total_nbytes = sum(_shard_nbytes(job, shard) for shard in shards)
    done_nbytes = 0
    done_tokens = 0

    def report(nbytes: int, _: int, n_tokens: int) -> None:
        progress(done_nbytes + nbytes, total_nbytes, done_tokens + n_tokens)

    for shard in shards:
        if is_complete(job):
            # Another process with the same shards has made the store and removed them.
            return
        # The merge checks the digests.
        meta = _make_shard(job, shard, progress=report, note=note, checks_digests=False)
        done_nbytes += _shard_nbytes(job, shard)
        done_tokens += meta.n_tokens


def _shard_nbytes(job: ShardJob, shard: int) -> int:
    return sum(file.nbytes for file in job.files[job.plan.shard_files(shard)])


def _make_shard(
    job: ShardJob,
    shard: int,
    *,
    progress: TokenizeProgress,
    note: Note,
    checks_digests: bool = True,
) -> store.StoreMeta:
    """Return the store of a shard. Make a missing one, or continue the one of a killed process."""
    folder = job.shard_folder(shard)
    meta = read_valid_meta(folder, note, checks_digests=checks_digests)
    if meta is not None:
        return meta
    files = job.files[job.plan.shard_files(shard)]
    try:
        return build_token_store(
            folder, job.config, files, job.tokenizer, progress=progress, note=note
        )
    except PrepError:
        # Another process with the same number has made the store and removed the shards.
        meta = read_valid_meta(job.store_folder)
        if meta is None:
            raise
        return meta


def _merge_shards(
    job: ShardJob, *, progress: TokenizeProgress, note: Note
) -> tuple[store.StoreMeta, bool]:
    """Append the stores of all shards to the final store.

    The second result is False if another process has done it in the meantime.
    """
    builder = compile_fields(job.config.examples, vocab=job.config.vocab)
    with lock_cache(job.config.cache, note):
        meta = read_valid_meta(job.store_folder)
        if meta is not None:
            return meta, False
        # A damaged shard is made again here.
        metas = [
            _make_shard(job, shard, progress=progress, note=note)
            for shard in range(job.plan.n_shards)
        ]

        def fill(writer: TokenWriter) -> None:
            _append_shards(writer, job, metas)

        dtype = ids_dtype(job.config, job.tokenizer, builder)
        build_store(job.store_folder, dtype, fill, has_weights=builder.has_weights)
        return store.read_meta(job.store_folder, checks_digests=False), True


def _append_shards(writer: TokenWriter, job: ShardJob, metas: Sequence[store.StoreMeta]) -> None:
    """Append the shards to a writer. It may have the first part of the store from a killed process."""
    first_token = first_document = nbytes = 0
    for shard, meta in enumerate(metas):
        nbytes += _shard_nbytes(job, shard)
        end_token = first_token + meta.n_tokens
        end_document = first_document + meta.n_documents
        if writer.n_tokens < end_token or writer.n_documents < end_document:
            # One process and several write the same bytes, so it does not matter who wrote the first
            # part of this shard.
            writer.append_documents(
                store.map_tokens(job.shard_folder(shard), meta, seq_length=1),
                max_id=meta.max_id,
                first_token=max(writer.n_tokens - first_token, 0),
                first_document=max(writer.n_documents - first_document, 0),
            )
            # The examples of a shard are not counted. At the start of a file they need not be: a
            # process that continues alone reads the next file from its start.
            writer.commit(ReadPosition(0, nbytes, FileStart(job.plan.shard_ends[shard])))
        first_token = end_token
        first_document = end_document
    # A killed merge has recorded a part of them.
    writer.ignored = {}
    for meta in metas:
        writer.count_ignored(meta.ignored)


def _remove_plan(folder: Path) -> None:
    """Remove the shards and the plan of a complete store. The plan goes last."""
    # A kill in between leaves the plan, by which the next process finds the complete store. Other
    # processes may remove the folder at the same time, or still look for a shard in it.
    with suppress(FileNotFoundError):
        for path in [*folder.iterdir()]:
            if path.name != PLAN_FILE:
                shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
