"""Show by recorded digests from which checkpoints an output was made, back to the first ones."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from prepcli.algebra.boxes import Range
from prepcli.commands.operations.chain_link import (
    ADD,
    CAST,
    FROM_START,
    NEW_ROWS,
    REMOVE,
    LinkReport,
    Parts,
    compare_settings,
    compare_tensors,
)
from prepcli.commands.operations.checksum_file import check_checksum_file
from prepcli.commands.operations.conflicts import check_mutually_exclusive, reject_without
from prepcli.commands.operations.inspection_options import (
    ChainCommandOptions,
    ChainOptions,
    VerifyOptions,
)
from prepcli.commands.operations.opening import CommonOptions, common_options, open_checkpoint
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import SourceOptions
from prepcli.commands.operations.results import Chain, ChainLink, LinkStatus
from prepcli.core.errors import (
    GET_AGAIN_HINT,
    DamagedError,
    Option,
    PrepError,
    text,
    usage_error,
)
from prepcli.core.formatting import join_names
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.formats.lock_file import Lock, read_lock
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.planning.manifest_fields import Manifest
from prepcli.restore.digest_checks import sample_digest, tensor_digests
from prepcli.sources.dropped_tensors import with_recorded_text_part, without_recorded_drops
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.locked import apply_lock
from prepcli.sources.mapped import is_read_through_map
from prepcli.sources.openers.peft_folder import ADAPTER_FAMILY
from prepcli.sources.recorded_sources import (
    MERGE,
    TRAIN,
    RecordedSource,
    find_source,
    recorded_sources,
)
from prepcli.sources.references import HubRepo, parse_reference
from prepcli.sources.source import Source, SourceTensor
from prepcli.stores.object_url import is_url
from prepcli.stores.paths import AnyPath

MAX_NAMES = 3
MAPPED = "read through a map"


@public
def verify_chain(
    checkpoint: PathLike | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[ChainOptions],
) -> Chain:
    """Show by digests from which checkpoints an output was made, back to the first ones.

    Each output is compared with its manifest, and the digests of its manifest with those of its source. Values that a
    command changed on purpose are listed and not computed again.

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
    search: list[Path] = []
    for name in options["search"]:
        search.append(Path(name).expanduser())
        if not search[-1].is_dir():
            what = text("{} is not a folder", Option("search", str(name)))
            raise usage_error(what, "checkpoints are searched below it", "")
    observer = observer_of(progress)
    # Every checkpoint is read as it is stored, and the lock applies to the first model.
    common = common_options(checkpoint, None, options)
    lock = None if common.lock is None else read_lock(common.lock)
    common = replace(common, lock=None, quantized="stored", verbatim=None)
    located, source = open_checkpoint(common, observer, allow_adapters=True, kept_scales="rounded")
    if source.manifest is None:
        why = "it has no prep-manifest.json with the source of an output"
        raise usage_error(f"{source.display_name} has no chain", why, "name an output of prep")
    walk = _Walk(common, observer, search, lock, str(options["lock"]))
    walk.follow(_Checkpoint(source, located))
    return Chain(
        links=tuple(walk.links),
        origins=tuple(walk.origins),
        allows_unproven=options["allow_unproven"],
        seconds=time.monotonic() - started_s,
    )


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """An opened checkpoint of the chain, and the folders of the outputs that were made from it."""

    source: Source
    located: LocatedCheckpoint
    outputs: tuple[AnyPath, ...] = ()

    @property
    def name(self) -> str:
        return self.source.display_name

    @property
    def root(self) -> AnyPath:
        return self.source.root.resolve()

    @property
    def manifest(self) -> Manifest:
        return self.source.manifest or NO_MANIFEST

    @property
    def commit(self) -> str | None:
        return self.located.files.commit

    def link(self, source_name: str, status: LinkStatus, reason: str) -> ChainLink:
        """Return a link to a source without a comparison."""
        return ChainLink(self.name, source_name, self.manifest.command or "", status, reason=reason)


@dataclass(slots=True)
class _Walk:
    """The way from an output back to its first checkpoints."""

    common: CommonOptions
    observer: Observer
    search: Sequence[Path]
    lock: Lock | None
    lock_name: str
    links: list[ChainLink] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    has_locked_origin: bool = False

    def follow(self, checkpoint: _Checkpoint) -> None:
        """Check an output and its links, and then its sources."""
        waiting = [checkpoint]
        reached = {checkpoint.root}
        while waiting:
            output = waiting.pop(0)
            self._check_bytes(output)
            for recorded in recorded_sources(output.manifest):
                source = self._open_source(output, recorded)
                if source is None:
                    continue
                self.links.append(self._compare(output, source, recorded))
                # The base of an adapter is also the source of the merged model.
                if source.root not in reached:
                    reached.add(source.root)
                    waiting.append(source)
        if self.lock is not None and not self.has_locked_origin:
            reason = "the lock was compared with no checkpoint"
            self.links.append(checkpoint.link("", "failed", reason))

    def _check_bytes(self, checkpoint: _Checkpoint) -> None:
        """Compare a checkpoint with the digests of its manifest, and a first checkpoint with the lock."""
        source = checkpoint.source
        commit = checkpoint.commit
        is_first = not recorded_sources(checkpoint.manifest)
        if is_first:
            self.origins.append(checkpoint.name + (f" at commit {commit}" if commit else ""))
        try:
            if is_first and self.lock is not None and source.family is not ADAPTER_FAMILY:
                self.has_locked_origin = True
                source = apply_lock(source, self.lock, self.lock_name, commit)
            check_checksum_file(source)
            pieces: list[tuple[SourceTensor, Range]] = []
            for tensor in source.all_tensors:
                if source.manifest and tensor.nbytes and not tensor.digests:
                    name = source.display_names()[tensor.name]
                    raise DamagedError(f"{name} has rows without a digest", "", GET_AGAIN_HINT)
                pieces += [(tensor, (low, high)) for low, high, _ in tensor.digests]
            task = f"verify {source.display_name}"
            progress = self.observer.progress()
            memory_nbytes = self.common.memory_nbytes
            tensor_digests(source, pieces, memory_nbytes, progress=progress, task=task)
        except PrepError as error:
            self.links.append(checkpoint.link("", "failed", _reason(error)))

    def _open_source(self, output: _Checkpoint, recorded: RecordedSource) -> _Checkpoint | None:
        """Find and open a source of an output. Add a link and return None if it cannot be opened."""
        name = recorded.name
        if not name:
            reason = "its manifest records no source"
            self.links.append(output.link("", "not proven", reason))
            return None
        if not is_url(name):
            name = find_source(recorded, output.located.files.path, self.search) or name
        common = replace(self.common, checkpoint=name, revision=None, step=None, config=None)
        try:
            # A model of the hub is read at the recorded commit.
            if isinstance(parse_reference(name), HubRepo):
                common = replace(common, revision=recorded.origin.get("commit"))
            located, source = open_checkpoint(
                common, self.observer, allow_adapters=True, notes_names=False
            )
        except PrepError as error:
            status = "failed" if isinstance(error, DamagedError) else "not proven"
            self.links.append(output.link(name, status, _reason(error)))
            return None
        return _Checkpoint(source, located, (*output.outputs, output.root))

    def _compare(
        self, output: _Checkpoint, source: _Checkpoint, recorded: RecordedSource
    ) -> ChainLink:
        """Return the link of an output to one of its sources."""
        report = LinkReport()
        is_identified = False
        try:
            is_identified = self._compare_digests(output, source, recorded, report)
        except PrepError as error:
            report.differences[_reason(error)] = []
        link = replace(
            output.link(source.name, "proven", ""),
            proof=", ".join(report.equal),
            changed=_parts_text(report.changed),
            not_shown="; ".join(sorted(report.not_shown)),
        )
        if report.differences:
            return replace(link, status="failed", reason=_parts_text(report.differences))
        if report.not_shown:
            link = replace(link, status="holds", check=_check_of(output, source, report))
        if not is_identified:
            reason = "no recorded digest shows that it is the source"
            link = replace(link, status="not proven", reason=reason)
        return link

    def _compare_digests(
        self,
        output: _Checkpoint,
        source: _Checkpoint,
        recorded: RecordedSource,
        report: LinkReport,
    ) -> bool:
        """Compare all recorded digests. Return whether they show the recorded source."""
        if source.root in source.outputs:
            report.differences[f"{output.name} records itself as source"] = []
        is_identified = _compare_identity(source, recorded, report)
        original = source.source
        if report.differences:
            return False
        if recorded.is_adapter:
            report.add("its sums with the base", "merged")
            return is_identified
        if is_read_through_map(output.source, original):
            report.add("all tensors", MAPPED)
            return is_identified
        if not output.source.family.is_verbatim:
            original = with_recorded_text_part(original, output.manifest)
        if output.manifest.command == TRAIN:
            report.add("the parameters", "trained")
        else:
            progress = self.observer.progress()
            memory_nbytes = self.common.memory_nbytes
            if compare_tensors(output.source, original, memory_nbytes, progress, report):
                is_identified = True
        # An output without the dropped tensors of its source has a config without them.
        compare_settings(output.source, without_recorded_drops(original, output.manifest), report)
        return is_identified


def _compare_identity(source: _Checkpoint, recorded: RecordedSource, report: LinkReport) -> bool:
    """Compare manifest and commit of a source, or the first rows of a start model without them."""
    present = {"manifest": source.manifest.digest, "commit": source.commit}
    for key, value in present.items():
        expected = recorded.origin.get(key)
        if expected is not None and value == expected:
            report.equal.append(key)
        elif expected is not None:
            difference = f"the {key} of {source.name} is {value or 'missing'}, not {expected}"
            report.differences[difference] = []
    is_identified = bool(report.equal)
    expected = recorded.origin.get("sample_digest")
    if expected is not None and sample_digest(source.source) == expected:
        report.equal.append("first rows of each tensor")
    elif expected is not None:
        report.differences[f"{source.name} has other values than the start model"] = []
    return is_identified


def _reason(error: PrepError) -> str:
    return f"{error.what}: {error.why}" if error.why else str(error.what)


def _parts_text(parts: Parts) -> str:
    """Return e.g. `left out: opt_state.adam.mu, step; new rows: lm_head.weight`."""
    texts: list[str] = []
    for what, names in parts.items():
        shown = join_names(list(dict.fromkeys(names)), max_names=MAX_NAMES)
        texts.append(f"{what}: {shown}" if names else what)
    return "; ".join(texts)


def _check_of(output: _Checkpoint, source: _Checkpoint, report: LinkReport) -> str:
    """Return the command line that compares what no digest shows. Empty for training, which is not repeated."""
    command = output.manifest.command
    if command == TRAIN:
        return ""
    if command in (MERGE, ADD, REMOVE) or report.not_shown & {NEW_ROWS, MAPPED}:
        again = shlex.join(["prep", "verify", output.name, "AGAIN", "--strict"])
        return f"{output.manifest.request} --out AGAIN && {again}"
    other = source.name
    if FROM_START in report.not_shown:
        other = str((source.manifest.towers or {}).get("path", other))
    words = ["prep", "verify", output.name, other]
    if any(change.startswith(CAST) for change in report.not_shown):
        words += ["--tolerance", "NUMBER"]
    return shlex.join(words)


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
        check_mutually_exclusive({"chain": True, name: options[name] or None})


def chain_options_of(options: VerifyOptions, chain_options: ChainCommandOptions) -> ChainOptions:
    """Return the options of `verify_chain` among the options of `prep verify`."""
    selected = {name: options[name] for name in SourceOptions.__annotations__ if name in options}
    return ChainOptions(
        **selected,
        search=chain_options["search"],
        allow_unproven=chain_options["allow_unproven"],
    )
