"""The walk of `verify_chain` from an output back to its first checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from prepcli.algebra.boxes import Range
from prepcli.commands.operations.chain_link import (
    LinkReport,
    compare_config,
    compare_files,
    compare_sums,
    compare_values,
    requested_options,
)
from prepcli.commands.operations.chain_tokens import token_change
from prepcli.commands.operations.checksum_file import check_checksum_file
from prepcli.commands.operations.conversion import (
    CommonOptions,
    checkpoint_access,
    open_checkpoint,
)
from prepcli.commands.operations.export_towers import UnreadableTowersError, select_parts
from prepcli.commands.operations.merge import plan_merge
from prepcli.commands.operations.options import ExportOptions, MergeOptions
from prepcli.commands.operations.results import ChainLink
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.lists import join_names
from prepcli.core.observer import Observer
from prepcli.core.option_spec import with_defaults
from prepcli.formats.lock_file import Lock
from prepcli.formats.manifest import NO_MANIFEST, Manifest
from prepcli.planning.manifest_fields import OriginRecord
from prepcli.remote.object_store import is_url
from prepcli.restore.digest_checks import num_rows, sample_digest, tensor_digests
from prepcli.sources.dropped_tensors import with_recorded_text_part
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.locked import apply_lock
from prepcli.sources.mapped import is_read_through_map
from prepcli.sources.model_family import truncate_layers
from prepcli.sources.multimodal import text_model
from prepcli.sources.openers.peft_folder import ADAPTER_FAMILY, is_adapter
from prepcli.sources.recorded_sources import (
    MERGE,
    TRAIN,
    RecordedSource,
    find_source,
    recorded_sources,
)
from prepcli.sources.references import HubRepo, parse_reference
from prepcli.sources.source import Source, SourceTensor

# Parts of a link in its reason.
MAX_PARTS = 3


class BrokenChainError(Exception):
    """A link has failed. It is the last one of the walk."""


@dataclass(frozen=True, slots=True)
class ChainCheckpoint:
    """An opened checkpoint of the chain."""

    source: Source
    located: LocatedCheckpoint

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.source.display_name

    @property
    def root(self) -> Path:
        """Its folder or file, without symbolic links."""
        return self.source.root.resolve()

    @property
    def manifest(self) -> Manifest:
        """Its manifest. Empty for a checkpoint of another program."""
        return self.source.manifest or NO_MANIFEST


@dataclass(slots=True)
class ChainWalk:
    """The way from an output back to its first checkpoints.

    Attributes:
        common: Options to open checkpoints with.
        observer: Receives notes and progress.
        search: Folders with further checkpoints.
        lock: Lock of the first model, or None.
        lock_name: Name of the lock file.
        links: The links so far.
        origins: The first checkpoints so far.
        merged_adapters: Folders of adapters with proven sums.
        checked: Roots of the checkpoints with compared digests.
        source_roots: Root of each output -> the roots of its sources.
        has_locked_origin: Whether a first checkpoint was compared with the lock.
    """

    common: CommonOptions
    observer: Observer
    search: Sequence[Path]
    lock: Lock | None
    lock_name: str
    links: list[ChainLink] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    merged_adapters: set[Path] = field(default_factory=set)
    checked: set[Path] = field(default_factory=set)
    source_roots: dict[Path, set[Path]] = field(default_factory=dict)
    has_locked_origin: bool = False

    def follow(self, checkpoint: ChainCheckpoint) -> None:
        """Check the links of an output, and then the ones of its sources. End at the first failed link."""
        with suppress(BrokenChainError):
            self._check_bytes(checkpoint)
            waiting = [checkpoint]
            while waiting:
                waiting += self._check_sources(waiting.pop(0))
            self._check_lock(checkpoint)

    def _check_sources(self, output: ChainCheckpoint) -> list[ChainCheckpoint]:
        """Check the links of an output to its sources. Return its new sources."""
        new_sources: list[ChainCheckpoint] = []
        pairs: list[tuple[RecordedSource, ChainCheckpoint]] = []
        for recorded in recorded_sources(output.manifest):
            source = self._open_source(output, recorded)
            if source is None:
                continue
            pairs.append((recorded, source))
            self._check_cycle(output, source)
            # The base of an adapter is also the source of the merged model.
            if source.root not in self.checked:
                self._check_bytes(source)
                new_sources.append(source)
        # The sums of a merge are compared when the bytes of both of its sources are known to be the recorded ones.
        for recorded, source in pairs:
            self._check_link(output, source, recorded)
        return new_sources

    def _check_cycle(self, output: ChainCheckpoint, source: ChainCheckpoint) -> None:
        """Add a failed link if a source was made from its own output."""
        self.source_roots.setdefault(output.root, set()).add(source.root)
        # A cycle has no first checkpoint, so nothing would be compared with the lock.
        reached: set[Path] = set()
        waiting = [source.root]
        while waiting:
            root = waiting.pop()
            if root not in reached:
                reached.add(root)
                waiting += self.source_roots.get(root, ())
        if output.root in reached:
            link = _make_link(output, source.name)
            reason = f"{output.name} records itself as source"
            if source.root != output.root:
                reason += f", through {source.name}"
            self._add(replace(link, status="failed", reason=reason))

    def _check_lock(self, output: ChainCheckpoint) -> None:
        """Add a failed link if no first checkpoint was compared with the lock."""
        if self.lock is not None and not self.has_locked_origin:
            reason = "the lock was compared with no checkpoint"
            self._add(replace(_make_link(output, ""), status="failed", reason=reason))

    def _add(self, link: ChainLink) -> None:
        """Append a link. Raise BrokenChainError if it failed."""
        self.links.append(link)
        if link.status == "failed":
            raise BrokenChainError

    def _check_bytes(self, checkpoint: ChainCheckpoint) -> None:
        """Compare a checkpoint with the digests of its manifest, and a first checkpoint with the lock."""
        self.checked.add(checkpoint.root)
        try:
            source = checkpoint.source
            if not recorded_sources(checkpoint.manifest):
                source = self._begin(checkpoint)
            check_checksum_file(source, checkpoint.located)
            self._check_digests(source)
        except PrepError as error:
            command = checkpoint.manifest.command or ""
            self._add(ChainLink(checkpoint.name, "", command, "failed", "", _reason(error)))

    def _begin(self, checkpoint: ChainCheckpoint) -> Source:
        """Add a first checkpoint. Return it with the digests of the lock, if there is one."""
        commit = checkpoint.located.local_files.commit
        origin = checkpoint.name
        if commit is not None:
            origin += f" at commit {commit}"
        self.origins.append(origin)
        source = checkpoint.source
        if self.lock is None or source.family is ADAPTER_FAMILY:
            return source
        self.has_locked_origin = True
        return apply_lock(source, self.lock, self.lock_name, commit)

    def _check_digests(self, source: Source) -> None:
        """Compare all tensors of a checkpoint with their recorded digests. Raise DamagedError if one differs."""
        pieces: list[tuple[SourceTensor, Range]] = []
        for tensor in source.all_tensors:
            if source.manifest is not None and not _covers_rows(tensor):
                name = source.display_names()[tensor.name]
                why = "a change of these rows would not be noticed"
                raise DamagedError(f"{name} has rows without a digest", why, GET_AGAIN_HINT)
            for low, high, _ in tensor.digests:
                pieces.append((tensor, (low, high)))
        tensor_digests(
            source,
            pieces,
            self.common.memory_nbytes,
            progress=self.observer.progress(),
            task=f"verify {source.display_name}",
        )

    def _open_source(
        self, output: ChainCheckpoint, recorded: RecordedSource
    ) -> ChainCheckpoint | None:
        """Find and open a source of an output. Add a link and return None if it cannot be opened."""
        link = _make_link(output, recorded.name)
        if not recorded.name:
            self._add(replace(link, reason="its manifest records no source"))
            return None
        name = self._source_name(output, recorded)
        try:
            return self._open(name, recorded.origin)
        except DamagedError as error:
            self._add(replace(link, source=name, status="failed", reason=_reason(error)))
        except PrepError as error:
            self._add(replace(link, reason=_reason(error)))
        return None

    def _check_link(
        self, output: ChainCheckpoint, source: ChainCheckpoint, recorded: RecordedSource
    ) -> None:
        """Compare an output with one of its sources, and add the link."""
        report = LinkReport()
        try:
            self._compare(output, source, recorded, report)
        except PrepError as error:
            report.differences.append(_reason(error))
        link = replace(_make_link(output, source.name), proof=", ".join(report.proven))
        if report.differences:
            reason = join_names(report.differences, max_names=MAX_PARTS, separator="; ")
            self._add(replace(link, status="failed", reason=reason))
        if report.unproven:
            reason = f"not compared: {join_names(report.unproven, max_names=MAX_PARTS)}"
            link = replace(link, reason=reason)
        elif report.is_identified:
            link = replace(link, status="proven")
        self._add(link)

    def _source_name(self, output: ChainCheckpoint, recorded: RecordedSource) -> str:
        """Return the name to open a source by: the folder of `find_source`, else the recorded name."""
        if is_url(recorded.name):
            return recorded.name
        found = find_source(recorded, output.located.local_files.path, self.search)
        return recorded.name if found is None else found

    def _open(self, name: str, origin: OriginRecord) -> ChainCheckpoint:
        """Open a source. A model of the hub is read at the recorded commit."""
        common = replace(self.common, checkpoint=name, revision=None, step=None, config=None)
        if isinstance(parse_reference(name), HubRepo):
            common = replace(common, revision=origin.get("commit"))
        # `_with_requested_parts` may find a text part without the tensors that the output dropped.
        located, source = open_checkpoint(
            common, self.observer, allow_adapters=True, notes_names=False
        )
        return ChainCheckpoint(source, located)

    def _compare(
        self,
        output: ChainCheckpoint,
        source: ChainCheckpoint,
        recorded: RecordedSource,
        report: LinkReport,
    ) -> None:
        """Compare the identity of a source, and all values and files taken from it."""
        _compare_identity(source, recorded.origin, report)
        if report.differences:
            return
        if recorded.is_adapter:
            if source.source.root in self.merged_adapters:
                report.is_identified = True
                report.proven.append("the sums with the base")
            return
        if is_read_through_map(output.source, source.source):
            report.unproven.append("the tensors, which a map has replaced")
            return
        source = _with_requested_parts(output, source, report)
        compare_config(output.source, source.source, report)
        change = token_change(output.source, source.source)
        compare_files(output.source, source.source, report, change=change)
        if output.manifest.command == MERGE:
            self._compare_merge(output, source, report)
        elif output.manifest.command != TRAIN:
            compare_values(
                output.source,
                self._add_towers_of_start(output, source),
                self.common.memory_nbytes,
                self.observer.progress(),
                report,
                change=change,
            )

    def _add_towers_of_start(self, output: ChainCheckpoint, source: ChainCheckpoint) -> Source:
        """Return a training step with the towers of its export, read from the start model of the run.

        Without the start model the towers stay unproven.
        """
        if not output.source.tower_tensors or source.source.tower_tensors:
            return source.source
        try:
            return select_parts(
                with_defaults(ExportOptions, {}),
                source.source,
                checkpoint_access(self.common, self.observer),
                check_digest=True,
            )
        except UnreadableTowersError:
            return source.source

    def _compare_merge(
        self, output: ChainCheckpoint, base: ChainCheckpoint, report: LinkReport
    ) -> None:
        """Compute a merge again from headers and matrices, and compare every tensor."""
        adapters = [source for source in recorded_sources(output.manifest) if source.is_adapter]
        if not adapters:
            report.differences.append("its manifest records no adapter")
            return
        folder = Path(self._source_name(output, adapters[0]))
        if not is_adapter(folder):
            report.unproven.append(f"the sums with {folder}")
            return
        planned = plan_merge(
            folder,
            base.source,
            base.located,
            with_defaults(MergeOptions, {}),
            access=checkpoint_access(self.common, self.observer),
            check_base=False,
        )
        compare_sums(
            output.source,
            planned,
            self.common.memory_nbytes,
            self.observer.progress(),
            report,
        )
        if report.is_identified and not report.differences:
            self.merged_adapters.add(folder)


def _covers_rows(tensor: SourceTensor) -> bool:
    """Return whether the recorded digests of a tensor cover all of its rows, one range after another."""
    next_row = 0
    for first, stop, _ in tensor.digests:
        if first != next_row:
            return False
        next_row = stop
    return next_row == num_rows(tensor) or tensor.nbytes == 0


def _with_requested_parts(
    output: ChainCheckpoint, source: ChainCheckpoint, report: LinkReport
) -> ChainCheckpoint:
    """Return a source with the requested parts: its text part alone, or its first layers."""
    options = requested_options(output.manifest)
    if not output.source.family.is_verbatim:
        source = replace(source, source=with_recorded_text_part(source.source, output.manifest))
    is_multimodal = source.source.wrapper is not None or source.manifest.towers is not None
    if "--text-only" in options and is_multimodal and not source.source.family.is_verbatim:
        report.proven.append("the text part")
        return replace(source, source=text_model(source.source))
    if "--layers" not in options:
        return source
    words = options[options.index("--layers") + 1 :]
    if not words or not words[0].isdecimal():
        report.unproven.append("the layers")
        return source
    truncated, _ = truncate_layers(source.source, int(words[0]))
    report.proven.append(f"the first {words[0]} layers")
    return replace(source, source=truncated)


def _compare_identity(source: ChainCheckpoint, origin: OriginRecord, report: LinkReport) -> None:
    """Compare the manifest and the commit of a source, and the first rows of a start model without a manifest."""
    present: dict[str, str | None] = {
        "manifest": source.manifest.digest,
        "commit": source.located.local_files.commit,
    }
    for key, value in present.items():
        expected = origin.get(key)
        if expected is None:
            continue
        report.is_identified = True
        if value == expected:
            report.proven.append(key)
        else:
            difference = f"the {key} of {source.name} is {value or 'missing'}, not {expected}"
            report.differences.append(difference)
    expected = origin.get("sample_digest")
    if expected is None:
        return
    if sample_digest(source.source) == expected:
        report.proven.append("first rows of each tensor")
    else:
        report.differences.append(f"{source.name} has other values than the start model")
    if not report.is_identified:
        report.unproven.append("the other rows")


def _make_link(output: ChainCheckpoint, source: str) -> ChainLink:
    """Return a link without a proof."""
    command = output.manifest.command or ""
    return ChainLink(output.name, source, command, "not proven", "", "")


def _reason(error: PrepError) -> str:
    return f"{error.what}: {error.why}" if error.why else str(error.what)
