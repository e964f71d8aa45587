"""Prove by digests from which checkpoint an output was made, back to the first one."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.chain_walk import ChainCheckpoint, ChainWalk
from prepcli.commands.operations.conflicts import reject_without
from prepcli.commands.operations.conversion import common_options, open_checkpoint
from prepcli.commands.operations.inspection_options import (
    ChainCommandOptions,
    ChainOptions,
    VerifyOptions,
)
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import SourceOptions
from prepcli.commands.operations.results import Chain
from prepcli.core.errors import Option, text, usage_error
from prepcli.core.observer import Observer, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.core.progress import Progress
from prepcli.formats.lock_file import Lock, read_lock


@public
def verify_chain(
    checkpoint: PathLike | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[ChainOptions],
) -> Chain:
    """Prove by digests from which checkpoints an output was made, back to the first ones.

    Each output is compared with its manifest, and each recorded source with the digests in the manifest of the output.
    Moved, cast and added values are compared. Training is not repeated: for a training step the identity of its start
    model is proven.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL of an output of prep. Default: the only one in the
            working directory.
        progress: Receives the bytes read. Default: none. See `Progress`.
        **options: See `ChainOptions`.

    Returns:
        The links. A broken link is not an exception: the result is False in a condition.

    Raises:
        UsageError: An argument is invalid, or `checkpoint` has no manifest.
        DamagedError: A file of `checkpoint` is missing, cut short or malformed.
        PrepError: `checkpoint` cannot be read.

    Example:
        chain = prep.verify_chain("my-run-hf")
        print(chain.links[-1].source, chain.broken_link)
    """
    started_s = time.monotonic()
    search = _search_folders(options["search"])
    observer = observer_of(progress)
    # Every checkpoint is read as it is stored, and the lock applies to the first model.
    common = common_options(checkpoint, None, options)
    lock: Lock | None = None
    if common.lock is not None:
        lock = read_lock(common.lock)
    common = replace(common, lock=None, quantized="stored", verbatim=None)
    located, source = open_checkpoint(common, observer, allow_adapters=True, kept_scales="rounded")
    if source.manifest is None:
        why = "it has no prep-manifest.json with the source of an output"
        hint = "name an output of prep"
        raise usage_error(f"{source.display_name} has no chain", why, hint)
    walk = ChainWalk(
        common,
        observer,
        search=search,
        lock=lock,
        lock_name=str(options["lock"]),
    )
    walk.follow(ChainCheckpoint(source, located))
    return Chain(
        links=tuple(walk.links),
        origins=tuple(walk.origins),
        allows_unproven=options["allow_unproven"],
        seconds=time.monotonic() - started_s,
    )


def _search_folders(names: Sequence[PathLike]) -> tuple[Path, ...]:
    """Return the folders of `--search`. Raise UsageError if one does not exist."""
    folders: list[Path] = []
    for name in names:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            option = text("{}", Option("search", str(name)))
            raise usage_error(f"{option} is not a folder", "checkpoints are searched below it", "")
        folders.append(folder)
    return tuple(folders)


def check_chain_command(
    against: str | None, options: VerifyOptions, chain_options: ChainCommandOptions
) -> None:
    """Raise UsageError for options of `prep verify` excluded by a chain, or without effect outside of one."""
    chain = Option("chain", True)
    if not chain_options["chain"]:
        why = "only a chain has sources to find"
        reject_without(Option("search"), chain_options["search"] or None, chain, why)
        reject_without(Option("allow_unproven"), chain_options["allow_unproven"], chain, why)
        return
    if against is not None:
        what = text("{} takes one checkpoint", chain)
        why = "the other checkpoints of a chain are recorded"
        raise usage_error(what, why, text("remove {} or {}", against, chain))
    for name in ("quick", "tolerance", "accept", "config", "strict"):
        if options[name] not in (None, False, (), []):
            what = text("{} and {} exclude each other", chain, Option(name))
            why = "a chain compares all bytes with the recorded digests"
            raise usage_error(what, why, "remove one of them")


def chain_options_of(options: VerifyOptions, chain_options: ChainCommandOptions) -> ChainOptions:
    """Return the options of `verify_chain` among the options of `prep verify`."""
    selected = {name: options[name] for name in SourceOptions.__annotations__ if name in options}
    return ChainOptions(
        **selected,
        search=chain_options["search"],
        allow_unproven=chain_options["allow_unproven"],
    )
