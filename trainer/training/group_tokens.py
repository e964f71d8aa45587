"""Tokens that the processes of a job make together, or wait for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from prepcli.core.errors import PrepError
from prepcli.core.process_group import ProcessGroup
from trainer.data.files import OPENED_PREFIX, Note, io_error
from trainer.data.shards import TokenizeProgress, complete_store, make_shards, read_valid_meta
from trainer.data.store import MappedTokens, is_complete
from trainer.data.tokenize import (
    map_new_tokens,
    open_tokens,
    read_inputs,
    store_job,
    tokenize_files,
)
from trainer.data.tokenize_config import RecordedTokens, TokenizeConfig
from trainer.distributed.hosts import folder_processes

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
    config = replace(config, recorded=_share_recorded(config.recorded, group))
    if config.scratch_dir is not None:
        return tokenize_files(config, progress=progress, note=note)
    if group.count == 1:
        return tokenize_files(config, progress=progress, note=note)
    if group.index == 0:
        _make_cache(config)
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


def _share_recorded(recorded: RecordedTokens | None, group: ProcessGroup) -> RecordedTokens | None:
    """Return the recorded tokens of process 0. Another process may not see the run that has recorded them."""
    encoded = group.broadcast(RECORDED_TOKENS, recorded.encode() if recorded else "")
    return RecordedTokens.decode(encoded) if encoded else None


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


def _make_cache(config: TokenizeConfig) -> None:
    try:
        config.cache.mkdir(parents=True, exist_ok=True)
        (config.cache / OPENED_PREFIX).touch()
    except OSError as error:
        raise io_error(config.cache, error) from error


def _check_equal(identities: Sequence[str]) -> None:
    """Raise PrepError if two hosts made different tokens.

    Args:
        identities: Identity of the tokens by process. Empty for a process that made none.
    """
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
