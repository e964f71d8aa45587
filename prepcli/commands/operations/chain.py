"""Show by recorded digests from which checkpoints an output was made, back to the first ones."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.checkpoint_options import (
    CommonOptions,
    common_options,
    open_checkpoint,
)
from prepcli.commands.operations.compared_settings import (
    CONFIG_KIND,
    file_digests,
    setting_differences,
)
from prepcli.commands.operations.inspection_options import ChainOptions
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.results import Chain, ChainLink, LinkStatus
from prepcli.commands.operations.tokens import ADD, REMOVE, recorded_additions
from prepcli.commands.operations.verify_sources import check_checksum_file
from prepcli.core.errors import (
    GET_AGAIN_HINT,
    DamagedError,
    Option,
    PrepError,
    text,
    usage_error,
)
from prepcli.core.formatting import count_text, join_names
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike, recorded_words
from prepcli.engine.digest import algorithm_of, tensor_digest_of_zeros
from prepcli.formats.added_tokens import RECORD_FILE
from prepcli.formats.lock_file import Lock, read_lock
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import QUANTIZATION, split_name
from prepcli.restore.digest_checks import (
    RecordedDigests,
    num_rows,
    recorded_streams,
    row_stream,
    sample_digest,
    stored_scale,
    stream_digests,
)
from prepcli.sources.dropped_tensors import with_recorded_text_part, without_recorded_drops
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.mapped import is_read_through_map
from prepcli.sources.model_family import PROCESSOR_FILES, as_verbatim
from prepcli.sources.openers.tensor_files import ADAPTER_FAMILY
from prepcli.sources.recorded_sources import (
    MERGE,
    TRAIN,
    RecordedSource,
    apply_lock,
    find_source,
    recorded_sources,
)
from prepcli.sources.references import HubRepo, parse_reference
from prepcli.sources.side_files import matches_any
from prepcli.sources.source import Source, SourceTensor, use_averaged_params
from prepcli.stores.addresses import is_url
from prepcli.stores.paths import AnyPath

MAX_NAMES = 3
MAPPED = "read through a map"
CAST = "cast from"
FROM_START = "read from the start model"
NEW_ROWS = "new rows"
# What happened -> the names of the parts, e.g. `left out` -> names of tensors.
Parts = dict[str, list[str]]


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
                link = _Link(output, source, recorded)
                self.links.append(link.compare(self.common.memory_nbytes, self.observer))
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
        commit = checkpoint.located.files.commit
        is_first = not recorded_sources(checkpoint.manifest)
        if is_first:
            self.origins.append(checkpoint.name + (f" at commit {commit}" if commit else ""))
        try:
            if is_first and self.lock is not None and source.family is not ADAPTER_FAMILY:
                self.has_locked_origin = True
                source = apply_lock(source, self.lock, self.lock_name, commit)
            check_checksum_file(source)
            streams: list[Stream] = []
            for tensor in source.all_tensors:
                if source.manifest and tensor.nbytes and not tensor.digests:
                    name = source.display_names()[tensor.name]
                    raise DamagedError(f"{name} has rows without a digest", "", GET_AGAIN_HINT)
                streams += recorded_streams(tensor)
            stream_digests(
                source,
                streams,
                self.common.memory_nbytes,
                progress=self.observer.progress(),
                task=f"verify {source.display_name}",
            )
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


@dataclass(slots=True)
class _Link:
    """Comparison of an output with one of its sources.

    Attributes:
        equal: Parts with equal digests, e.g. `21 tensors`.
        changed: Recorded changes.
        not_shown: Changes with new content, which no digest of the source shows.
        differences: Parts that should be equal and are not.
        is_identified: Whether a digest shows that it is the recorded source.
    """

    output: _Checkpoint
    source: _Checkpoint
    recorded: RecordedSource
    equal: list[str] = field(default_factory=list)
    changed: Parts = field(default_factory=lambda: defaultdict(list))
    not_shown: set[str] = field(default_factory=set)
    differences: Parts = field(default_factory=lambda: defaultdict(list))
    is_identified: bool = False

    def compare(self, memory_nbytes: int, observer: Observer) -> ChainLink:
        """Compare all recorded digests, and return the link."""
        try:
            self._compare_identity()
            if not self.differences:
                self._compare_content(memory_nbytes, observer.progress())
        except PrepError as error:
            self.differences[_reason(error)] = []
        link = replace(
            self.output.link(self.source.name, "proven", ""),
            proof=", ".join(self.equal),
            changed=_parts_text(self.changed),
            not_shown="; ".join(sorted(self.not_shown)),
        )
        if self.differences:
            return replace(link, status="failed", reason=_parts_text(self.differences))
        if self.not_shown:
            link = replace(link, status="holds", check=self._check_command())
        if not self.is_identified:
            reason = "no recorded digest shows that it is the source"
            link = replace(link, status="not proven", reason=reason)
        return link

    def _add(self, name: str, change: str | None, difference: str = "") -> None:
        """Add a part with new content that no digest shows. Without a recorded change it is a difference."""
        if change is None:
            self.differences[difference].append(name)
        else:
            self.changed[change].append(name)
            self.not_shown.add(change)

    def _compare_identity(self) -> None:
        """Compare manifest and commit of the source, or the first rows of a start model without them."""
        source = self.source
        if source.root in source.outputs:
            self.differences[f"{self.output.name} records itself as source"] = []
        present = {"manifest": source.manifest.digest, "commit": source.located.files.commit}
        for key, value in present.items():
            expected = self.recorded.origin.get(key)
            if expected is not None and value == expected:
                self.equal.append(key)
            elif expected is not None:
                difference = f"the {key} of {source.name} is {value or 'missing'}, not {expected}"
                self.differences[difference] = []
        self.is_identified = bool(self.equal)
        expected = self.recorded.origin.get("sample_digest")
        if expected is not None and sample_digest(source.source) == expected:
            self.equal.append("first rows of each tensor")
        elif expected is not None:
            self.differences[f"{source.name} has other values than the start model"] = []

    def _compare_content(self, memory_nbytes: int, progress: Progress) -> None:
        """Compare the tensors and the small files, as far as digests can show them."""
        output = self.output.source
        source = self.source.source
        manifest = self.output.manifest
        if self.recorded.is_adapter:
            self._add("its sums with the base", "merged")
            return
        if is_read_through_map(output, source):
            self._add("all tensors", MAPPED)
            return
        if not output.family.is_verbatim:
            source = with_recorded_text_part(source, manifest)
        if manifest.command == TRAIN:
            self._add("the parameters", "trained")
        else:
            self._compare_tensors(output, source, memory_nbytes, progress)
            # All values of the source are in the output, or left out.
            self.is_identified |= self.not_shown <= {NEW_ROWS}
        # An output without the dropped tensors of its source has a config without them.
        self._compare_settings(output, without_recorded_drops(source, manifest))

    def _compare_tensors(
        self, output: Source, source: Source, memory_nbytes: int, progress: Progress
    ) -> None:
        """Compare the digests of the tensors.

        Digests that the source does not record are computed from its bytes: for a checkpoint of another program, for
        other ranges of rows, and for another algorithm.
        """
        if "--ema" in _requested_options(self.output.manifest):
            source = use_averaged_params(source)
        families = (output.family, source.family)
        # The families of an adapter and of a run with LoRA have other bare names.
        if ADAPTER_FAMILY in families or any(family.is_verbatim for family in families):
            output = as_verbatim(output)
            source = as_verbatim(source)
        # Name of a dropped tensor or slot -> its dropped rows, or None.
        dropped = {
            str(entry.get("name")): entry.get("rows") for entry in self.output.manifest.dropped
        }
        names = source.display_names()
        originals = {_common_name(tensor): tensor for tensor in source.all_tensors}
        recorded = RecordedDigests(source)
        unrecorded: list[tuple[SourceTensor, str, Stream]] = []
        for tensor in output.all_tensors:
            original = originals.pop(_common_name(tensor), None)
            if original is None:
                self._add_changed_form(tensor, None, is_resized=False)
                continue
            num_common = _num_common_rows(original, dropped.get(names[original.name]))
            is_same_row = (original.dtype, original.shape[1:]) == (tensor.dtype, tensor.shape[1:])
            if num_rows(tensor) < num_common or not is_same_row:
                self._add_changed_form(tensor, original, is_resized=names[original.name] in dropped)
                continue
            for low, high, digest in tensor.digests:
                stream = row_stream(original, (low, high), algorithm_of(digest))
                if low >= num_common:
                    self._compare_new_rows(tensor, stream, digest)
                elif recorded.find(stream) or high > num_rows(original):
                    self._compare_digest(tensor, digest, recorded.find(stream))
                else:
                    unrecorded.append((tensor, digest, stream))
        digests = stream_digests(
            source,
            [stream for _, _, stream in unrecorded],
            memory_nbytes,
            progress=progress,
            task=f"read {source.display_name}",
        )
        for (tensor, digest, _), computed in zip(unrecorded, digests):
            self._compare_digest(tensor, digest, computed.read)
        for original in originals.values():
            self._add_missing(original, source, dropped)
        unequal = set[str]().union(*self.changed.values(), *self.differences.values())
        num_equal = sum(_common_name(tensor) not in unequal for tensor in output.all_tensors)
        if num_equal:
            self.equal.append(count_text(num_equal, "tensor"))

    @property
    def _is_recoded(self) -> bool:
        """Whether one of both checkpoints has quantised weights, and the other one their values."""
        source = self.source
        settings = source.source.quantization or source.manifest.quantization
        return bool(self.output.manifest.quantization) != bool(settings)

    def _add_changed_form(
        self, tensor: SourceTensor, original: SourceTensor | None, *, is_resized: bool
    ) -> None:
        """Report a tensor missing in the source, or with another dtype or shape there."""
        change: str | None = None
        difference = f"not in {self.source.name}"
        if original is not None:
            difference = f"another dtype or shape than in {self.source.name}"
            casts = {(entry["from"], entry["to"]) for entry in self.output.manifest.casts}
            if (original.dtype, tensor.dtype) in casts:
                change = f"{CAST} {original.dtype} to {tensor.dtype}"
            elif is_resized:
                change = "resized"
        if self._is_recoded:
            change = "decoded or encoded"
        elif tensor in self.output.source.tower_tensors and not self.source.source.tower_tensors:
            # A training step has no towers. Its export reads them from the start model.
            change = FROM_START
        self._add(_common_name(tensor), change, difference)

    def _compare_new_rows(self, tensor: SourceTensor, stream: Stream, digest: str) -> None:
        """Compare new rows of a vocabulary with zeros. Rows of tokens, and other fillings, are recorded changes."""
        manifest = self.output.manifest
        vocabulary = manifest.vocab or {}
        is_of_tokens = manifest.command == ADD and stream.rows[1] <= vocabulary.get("true", 0)
        is_filled = vocabulary.get("init", "zeros") != "zeros"
        if digest != tensor_digest_of_zeros(stream.nbytes, stream.digest_algorithm):
            change = NEW_ROWS if is_of_tokens or is_filled else None
            rows = ":".join(map(str, stream.rows))
            self._add(_common_name(tensor), change, f"rows {rows} are not the recorded padding")

    def _compare_digest(self, tensor: SourceTensor, digest: str, source_digest: str | None) -> None:
        """Compare two digests. Only a merge or the scale of a layout changes the values of a dtype."""
        if digest == source_digest:
            return
        change: str | None = None
        if stored_scale(self.output.source, tensor.name) is not None:
            change = "scaled"
        elif self.output.manifest.command == MERGE:
            change = "merged"
        self._add(_common_name(tensor), change, f"other values than in {self.source.name}")

    def _add_missing(
        self, original: SourceTensor, source: Source, dropped: Collection[str]
    ) -> None:
        """Report a tensor of the source without a counterpart in the output."""
        slot, state_name = split_name(original.name)
        name = source.display_names()[original.name]
        # A state is recorded by its slots, e.g. `opt_state.0.mu`. Earlier versions gave modules of multi-token
        # prediction the prefix of the family.
        spellings = {name, original.name, slot or state_name, source.family.prefix + name}
        if recorded := spellings.intersection(dropped):
            self.changed["left out"].append(min(recorded))
        elif not self._is_recoded:
            self.differences[f"missing tensors of {self.source.name}"].append(name)

    def _compare_settings(self, output: Source, source: Source) -> None:
        """Compare the config, the tokenizer and the other small files."""
        manifest = self.output.manifest
        # A recipe and an adapter may bring a tokenizer and settings.
        brings_settings = manifest.command in (TRAIN, MERGE)
        requested = _requested_options(manifest)
        has_option = not {"--config", "--layers"}.isdisjoint(requested)
        differences = [d for d in setting_differences(output, source) if d["kind"] == CONFIG_KIND]
        for difference in differences:
            what = f"config.json differs from the one of {source.display_name}"
            parts = self.changed if brings_settings or has_option else self.differences
            parts[what].append(f"`{difference['key']}`")
        has_adapter = ADAPTER_FAMILY in (output.family, source.family)
        if not differences and not has_adapter:
            self.equal.append("config")
        digests = file_digests(output)
        source_digests = file_digests(source, copied=digests)
        edits = _recorded_edits(output, source)
        excluded = [value for word, value in pairwise(requested) if word == "--exclude"]
        num_equal = 0
        for name in sorted(digests.keys() | source_digests.keys()):
            before, after = source_digests.get(name), digests.get(name)
            if before == after:
                num_equal += 1
            elif edits and (name == RECORD_FILE or edits.get(name) == (before, after)):
                self._add(name, "edited for tokens")
            elif before is None or brings_settings:
                self._add(name, "other files")
            elif after is not None:
                self.differences[f"other content than in {source.display_name}"].append(name)
            elif has_adapter or (name in PROCESSOR_FILES and not output.is_multimodal):
                # An adapter has only its own files, and a text model has no processor.
                self.changed["left out"].append(name)
            elif matches_any(name, excluded):
                self.changed["left out"].append(name)
            else:
                self.differences[f"missing files of {source.display_name}"].append(name)
        if num_equal:
            self.equal.append(count_text(num_equal, "file"))

    def _check_command(self) -> str:
        """Return the command line that compares what no digest shows. Empty for training, which is not repeated."""
        manifest = self.output.manifest
        if manifest.command == TRAIN:
            return ""
        if manifest.command in (MERGE, ADD, REMOVE) or self.not_shown & {NEW_ROWS, MAPPED}:
            again = shlex.join(["prep", "verify", self.output.name, "AGAIN", "--strict"])
            return f"{manifest.request} --out AGAIN && {again}"
        other = self.source.name
        if FROM_START in self.not_shown:
            other = str((self.source.manifest.towers or {}).get("path", other))
        words = ["prep", "verify", self.output.name, other]
        if any(change.startswith(CAST) for change in self.not_shown):
            words += ["--tolerance", "NUMBER"]
        return shlex.join(words)


def _reason(error: PrepError) -> str:
    return f"{error.what}: {error.why}" if error.why else str(error.what)


def _parts_text(parts: Parts) -> str:
    """Return e.g. `left out: opt_state.adam.mu, step; new rows: lm_head.weight`."""
    texts: list[str] = []
    for what, names in parts.items():
        shown = join_names(list(dict.fromkeys(names)), max_names=MAX_NAMES)
        texts.append(f"{what}: {shown}" if names else what)
    return "; ".join(texts)


def _requested_options(manifest: Manifest) -> list[str]:
    """Return the recorded options of the command of an output, as words. Empty if they are malformed."""
    return recorded_words(manifest.request, manifest.command or "", manifest.source_name)


def _common_name(tensor: SourceTensor) -> str:
    """Return the name of a tensor in an output and in its source. A decoded checkpoint keeps scales in a slot."""
    slot, name = split_name(tensor.name)
    return name if slot == QUANTIZATION else tensor.name


def _num_common_rows(original: SourceTensor, dropped_rows: object) -> int:
    """Return the rows of a tensor before the first removed or replaced one."""
    if isinstance(dropped_rows, list) and dropped_rows and isinstance(dropped_rows[0], int):
        return min(num_rows(original), dropped_rows[0])
    return num_rows(original)


def _recorded_edits(output: Source, source: Source) -> dict[str, tuple[str, str]]:
    """Return the recorded digests of the files that `add-tokens` or `remove-tokens` edited: before and after."""
    command = (output.manifest or NO_MANIFEST).command
    if command not in (ADD, REMOVE):
        return {}
    edits: dict[str, tuple[str, str]] = {}
    for addition in recorded_additions(output if command == ADD else source)[-1:]:
        for name, edit in addition.files.items():
            before, after = edit.before, edit.after
            edits[name] = (before, after) if command == ADD else (after, before)
    return edits
