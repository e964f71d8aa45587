"""Compare the recorded digests of an output and its source, for `verify_chain`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from prepcli.commands.operations.compared_settings import CONFIG as CONFIG_KIND
from prepcli.commands.operations.compared_settings import setting_differences
from prepcli.commands.operations.tokens import recorded_additions
from prepcli.core.formatting import count_text
from prepcli.core.observer import Progress
from prepcli.core.option_spec import recorded_words
from prepcli.engine.digest import digest_of_zeros, digest_pieces
from prepcli.formats.added_tokens import RECORD_FILE
from prepcli.formats.file_records import is_settings_file, record_file
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.safetensors import ADAPTER_CONFIG, INDEX_FILE
from prepcli.formats.torch_dcp import METADATA_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.quantization_leaves import QUANTIZATION
from prepcli.planning.state_names import split_name
from prepcli.restore.digest_checks import num_rows, row_stream, stored_scale, tensor_digests
from prepcli.sources.averages import use_averaged_params
from prepcli.sources.model_family import as_verbatim
from prepcli.sources.multimodal import PROCESSOR_FILES
from prepcli.sources.openers.peft_folder import ADAPTER_FAMILY
from prepcli.sources.recorded_sources import MERGE, TRAIN
from prepcli.sources.source import CONFIG, HF_FOLDER, Source, SourceTensor

ADD = "add-tokens"
REMOVE = "remove-tokens"
CAST = "cast from"
FROM_START = "read from the start model"
NEW_ROWS = "new rows"
# Files with other content in each output. The config is compared by its keys.
MADE_FILES = (CONFIG, INDEX_FILE, ADAPTER_CONFIG, METADATA_FILE)

Parts = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Result of the comparison of an output with its source.

    Attributes:
        equal: Parts with equal digests, e.g. `21 tensors`.
        changed: Recorded changes, e.g. `left out` -> names of tensors.
        not_shown: Changes with new content, which no digest of the source shows.
        differences: Parts that should be equal and are not, in the form of `changed`.
    """

    equal: list[str] = field(default_factory=list)
    changed: Parts = field(default_factory=lambda: defaultdict(list))
    not_shown: set[str] = field(default_factory=set)
    differences: Parts = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, change: str | None, difference: str = "") -> None:
        """Add a part with new content that no digest shows. Without a recorded change it is a difference."""
        if change is None:
            self.differences[difference].append(name)
        else:
            self.changed[change].append(name)
            self.not_shown.add(change)


def compare_tensors(
    output: Source, source: Source, memory_nbytes: int, progress: Progress, report: LinkReport
) -> bool:
    """Compare the recorded digests of the tensors of an output and its source.

    Digests that the source does not record are computed from its bytes: for a checkpoint of another program, and for
    other ranges of rows. Return whether all values of the source are in the output, or left out.
    """
    output, source = _with_common_names(output, source)
    pair = _Pair(output, source, report)
    originals = {_common_name(tensor): tensor for tensor in source.all_tensors}
    unrecorded: list[tuple[SourceTensor, SourceTensor, int, int, str]] = []
    for tensor in output.all_tensors:
        original = originals.pop(_common_name(tensor), None)
        if original is None or not pair.has_form_of(original, tensor):
            pair.add_changed_form(tensor, original)
            continue
        recorded = {(low, high): digest for low, high, digest in original.digests}
        for low, high, digest in tensor.digests:
            if low >= pair.num_common_rows(original):
                pair.compare_new_rows(tensor, low, high, digest)
            elif (low, high) in recorded or high > num_rows(original):
                pair.compare_digest(tensor, digest, recorded.get((low, high), ""))
            else:
                unrecorded.append((tensor, original, low, high, digest))
    pieces = [(original, (low, high)) for _, original, low, high, _ in unrecorded]
    task = f"read {source.display_name}"
    digests = tensor_digests(source, pieces, memory_nbytes, progress=progress, task=task)
    for (tensor, *_, digest), source_digest in zip(unrecorded, digests):
        pair.compare_digest(tensor, digest, source_digest)
    for original in originals.values():
        pair.add_missing(original)
    unequal = set[str]().union(*report.changed.values(), *report.differences.values())
    num_equal = sum(_common_name(tensor) not in unequal for tensor in output.all_tensors)
    if num_equal:
        report.equal.append(count_text(num_equal, "tensor"))
    return report.not_shown <= {NEW_ROWS}


class _Pair:
    """An output and its source, with equal names of equal tensors."""

    def __init__(self, output: Source, source: Source, report: LinkReport) -> None:
        self._output = output
        self._source = source
        self._report = report
        self._manifest = output.manifest or NO_MANIFEST
        self._source_names = source.display_names()
        self._casts = {(entry["from"], entry["to"]) for entry in self._manifest.casts}
        # Name of a dropped tensor or slot -> its dropped rows, or None.
        self._dropped: dict[str, object] = {}
        for entry in self._manifest.dropped:
            self._dropped[str(entry.get("name"))] = entry.get("rows")
        settings = source.quantization or (source.manifest or NO_MANIFEST).quantization
        self._is_recoded = bool(self._manifest.quantization) != bool(settings)

    def has_form_of(self, original: SourceTensor, tensor: SourceTensor) -> bool:
        """Return whether the digests of two tensors can be equal."""
        if num_rows(tensor) < self.num_common_rows(original):
            return False
        return (original.dtype, original.shape[1:]) == (tensor.dtype, tensor.shape[1:])

    def add_changed_form(self, tensor: SourceTensor, original: SourceTensor | None) -> None:
        """Report a tensor missing in the source, or with another dtype or shape there."""
        change: str | None = None
        difference = f"not in {self._source.display_name}"
        if original is not None:
            difference = f"another dtype or shape than in {self._source.display_name}"
            if (original.dtype, tensor.dtype) in self._casts:
                change = f"{CAST} {original.dtype} to {tensor.dtype}"
            elif self._source_names[original.name] in self._dropped:
                change = "resized"
        if self._is_recoded:
            change = "decoded or encoded"
        elif tensor in self._output.tower_tensors and not self._source.tower_tensors:
            # A training step has no towers. Its export reads them from the start model.
            change = FROM_START
        self._report.add(_common_name(tensor), change, difference)

    def num_common_rows(self, original: SourceTensor) -> int:
        """Return the rows of a tensor before the first removed or replaced one."""
        dropped = self._dropped.get(self._source_names[original.name])
        if isinstance(dropped, list) and dropped and isinstance(dropped[0], int):
            return min(num_rows(original), dropped[0])
        return num_rows(original)

    def compare_new_rows(self, tensor: SourceTensor, low: int, high: int, digest: str) -> None:
        """Compare new rows of a vocabulary with zeros. Rows of tokens, and other fillings, are recorded changes."""
        vocabulary = self._manifest.vocab or {}
        is_of_tokens = self._manifest.command == ADD and high <= vocabulary.get("true", 0)
        is_filled = vocabulary.get("init", "zeros") != "zeros"
        if digest != digest_of_zeros(row_stream(tensor, (low, high)).nbytes):
            change = NEW_ROWS if is_of_tokens or is_filled else None
            difference = f"rows {low}:{high} are not the recorded padding"
            self._report.add(_common_name(tensor), change, difference)

    def compare_digest(self, tensor: SourceTensor, digest: str, source_digest: str) -> None:
        """Compare two digests. Only a merge or the scale of a layout changes the values of a dtype."""
        if digest == source_digest:
            return
        change: str | None = None
        if stored_scale(self._output, tensor.name) is not None:
            change = "scaled"
        elif self._manifest.command == MERGE:
            change = "merged"
        difference = f"other values than in {self._source.display_name}"
        self._report.add(_common_name(tensor), change, difference)

    def add_missing(self, original: SourceTensor) -> None:
        """Report a tensor of the source without a counterpart in the output."""
        slot, state_name = split_name(original.name)
        name = self._source_names[original.name]
        # A state is recorded by its slots, e.g. `opt_state.0.mu`. Earlier versions gave modules of multi-token
        # prediction the prefix of the family.
        spellings = {name, original.name, slot or state_name, self._source.family.prefix + name}
        if recorded := spellings.intersection(self._dropped):
            self._report.changed["left out"].append(min(recorded))
        elif not self._is_recoded:
            difference = f"missing tensors of {self._source.display_name}"
            self._report.differences[difference].append(name)


def _with_common_names(output: Source, source: Source) -> tuple[Source, Source]:
    """Return an output and its source with equal names of equal tensors."""
    if "--ema" in _requested_options(output.manifest or NO_MANIFEST):
        source = use_averaged_params(source)
    families = (output.family, source.family)
    # The families of an adapter and of a run with LoRA have other bare names.
    if ADAPTER_FAMILY in families or any(family.is_verbatim for family in families):
        return as_verbatim(output), as_verbatim(source)
    return output, source


def _requested_options(manifest: Manifest) -> list[str]:
    """Return the recorded options of the command of an output, as words. Empty if they are malformed."""
    return recorded_words(manifest.request, manifest.command or "", manifest.source_name)


def _common_name(tensor: SourceTensor) -> str:
    """Return the name of a tensor in an output and in its source. A decoded checkpoint keeps scales in a slot."""
    slot, name = split_name(tensor.name)
    return name if slot == QUANTIZATION else tensor.name


def compare_settings(output: Source, source: Source, report: LinkReport) -> None:
    """Compare the config, the tokenizer and the other small files of an output and its source."""
    manifest = output.manifest or NO_MANIFEST
    # A recipe and an adapter may bring a tokenizer and settings.
    brings_settings = manifest.command in (TRAIN, MERGE)
    options = {"--config", "--layers"}.intersection(_requested_options(manifest))
    differences = [d for d in setting_differences(output, source) if d["kind"] == CONFIG_KIND]
    for difference in differences:
        what = f"config.json differs from the one of {source.display_name}"
        parts = report.changed if brings_settings or options else report.differences
        parts[what].append(f"`{difference['key']}`")
    has_adapter = ADAPTER_FAMILY in (output.family, source.family)
    if not differences and not has_adapter:
        report.equal.append("config")
    digests = file_digests(output)
    source_digests = file_digests(source, copied=digests)
    edits = _recorded_edits(output, source)
    num_equal = 0
    for name in sorted(digests.keys() | source_digests.keys()):
        before, after = source_digests.get(name), digests.get(name)
        if before == after:
            num_equal += 1
        elif edits and (name == RECORD_FILE or edits.get(name) == (before, after)):
            report.add(name, "edited for tokens")
        elif before is None or brings_settings:
            report.add(name, "other files")
        elif after is not None:
            report.differences[f"other content than in {source.display_name}"].append(name)
        elif has_adapter or (name in PROCESSOR_FILES and not output.is_multimodal):
            # An adapter has only its own files, and a text model has no processor.
            report.changed["left out"].append(name)
        else:
            report.differences[f"missing files of {source.display_name}"].append(name)
    if num_equal:
        report.equal.append(count_text(num_equal, "file"))


def file_digests(source: Source, copied: Collection[str] = ()) -> dict[str, str]:
    """Return the XXH3-128 of the small files of a checkpoint, by name. `--copy` copies further ones."""
    digests: dict[str, str] = {}
    for path, record in (source.manifest or NO_MANIFEST).files.items():
        if "xxh3" in record and is_settings_file(path):
            name = f"/{path}".rpartition(f"/{HF_FOLDER}/")[2].removeprefix("/")
            digests[name] = record["xxh3"]
    if not digests:
        for file in (*source.small_files, *source.left_files):
            if file in source.small_files or file.name in copied:
                digests[file.name] = record_file(file.path).get("xxh3", "")
        # A GGUF file has its tokenizer in the metadata.
        for made_file in source.made_files.files:
            digests[Path(made_file.path).name] = digest_pieces([made_file.read_content()])
    return {name: digest for name, digest in digests.items() if name not in MADE_FILES}


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
