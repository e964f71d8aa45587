"""Tokens in a job of several processes: made once for all processes that see the same cache."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.files import Note, io_error
from trainer.data.store import MappedTokens
from trainer.data.store_writer import make_cache
from trainer.data.tokenize import (
    TokenizeConfig,
    TokenizeProgress,
    open_tokens,
    tokenize_files,
)
from trainer.distributed.hosts import writes_shared_folder
from trainer.distributed.process_group import ProcessGroup
from trainer.models.errors import PrepError


def tokenize_in_group(
    config: TokenizeConfig, group: ProcessGroup, *, progress: TokenizeProgress, note: Note
) -> MappedTokens:
    """Return the tokens of the configured files.

    All processes call it together. Process 0 makes the tokens, and the first process of each host
    that does not see its cache. All other processes wait, then open the tokens without reading the data
    files. With a scratch folder, each process makes the tokens that are missing in the cache.

    Args:
        config: Files, tokenizer and cache.
        group: The processes of the job.
        progress: Called with the bytes tokenized so far, the total bytes, and the tokens so far.
        note: Called with messages for the user.

    Raises:
        PrepError: The tokens cannot be made, or the hosts have different data files.
    """
    if group.count == 1 or config.scratch_dir is not None:
        return tokenize_files(config, progress=progress, note=note)
    if group.index == 0:
        _make_cache(config)
    tokens = None
    if writes_shared_folder(config.cache, group):
        tokens = tokenize_files(config, progress=progress, note=note)
    # Process 0 waits here until all tokens are complete. Other processes wait in the broadcast below.
    identities = group.gather("tokens", tokens.identity if tokens else "")
    if group.index == 0:
        _check_equal(identities)
    identity = group.broadcast("identity of the tokens", tokens.identity if tokens else "")
    return tokens or open_tokens(config, identity, note=note)


def _make_cache(config: TokenizeConfig) -> None:
    try:
        make_cache(config.cache)
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
        what = f"the data of process {other} differs from that of process 0"
        why = f"its tokens are {identities[other]}, those of process 0 {identities[0]}"
        raise PrepError(
            what, why, "the same files in `data.path` on all hosts, or on a shared file system"
        )
