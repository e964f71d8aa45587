"""The checkpoints of `prep verify`: their tensors and names, the parts that both have, and accepted changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.algebra.boxes import Range
from prepcli.commands.operations.checkpoint_options import CommonOptions
from prepcli.commands.operations.verification_results import (
    AcceptedChange,
    LeftOutTensor,
    OldAndNew,
    TensorDifference,
)
from prepcli.core.errors import Command, DamagedError, Option, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes, join_names
from prepcli.core.observer import Observer
from prepcli.formats.checksums import read_checksum_bytes
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    NO_MANIFEST,
    STATE_ITEM,
    again_hint,
    encode_manifest,
    find_manifest_folder,
    is_settings_file,
    manifest_digest,
    parse_manifest,
    read_manifest,
    record_file,
)
from prepcli.models.text_part import TIED_FIELD
from prepcli.models.truncation import UNRECORDED_RULE
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import DroppedTensor, Stream
from prepcli.planning.tensors import split_name
from prepcli.restore.digest_checks import num_rows, row_stream
from prepcli.sources.dequantized import decode_alike
from prepcli.sources.dropped_tensors import without_recorded_drops
from prepcli.sources.mapped import in_one_form, with_family
from prepcli.sources.model_family import TEXT_ONLY_RULE, as_verbatim, towers_title, without_towers
from prepcli.sources.openers.tensor_files import ADAPTER_FAMILY
from prepcli.sources.references import CONFIG, LocalPath, RunStep, parse_reference
from prepcli.sources.source import (
    HF_FOLDER,
    Source,
    SourceTensor,
    TensorLabel,
    label_tensors,
    match_source_tensors,
    read_config,
    stored_rows,
)
from prepcli.sources.tensor_match import DEFAULT_MATCH_OPTIONS, TensorMatch
from prepcli.sources.vocabulary_tensors import vocabulary_names
from prepcli.stores.files import io_error, read_small_file, write_file
from prepcli.targets.planner import with_tied_head


@dataclass(frozen=True, slots=True)
class VerifiedModel:
    """Source with the tensors to verify."""

    source: Source
    match: TensorMatch
    tensors: dict[str, SourceTensor]  # the tensors of the model and of its training state, by name
    labels: dict[str, TensorLabel]  # names in messages
    vocab_tensors: frozenset[str]  # names of the tensors with a vocabulary axis
    true_vocab: int  # rows without padding

    def difference(self, name: str, what: str) -> TensorDifference:
        """Return a difference of a tensor, e.g. `is not in MODEL`."""
        label = self.labels[name]
        return {"leaf": label.leaf, "tensor": label.tensor, "what": what}

    def unpadded_rows(self, tensor: SourceTensor) -> Range:
        """Return the rows of a tensor without padding."""
        return (0, self.true_vocab) if tensor.name in self.vocab_tensors else (0, num_rows(tensor))

    def unpadded_shape(self, tensor: SourceTensor) -> tuple[int, ...]:
        """Return the shape of a tensor without padding rows."""
        if tensor.name not in self.vocab_tensors:
            return tensor.shape
        return (self.true_vocab, *tensor.shape[1:])

    def stream(self, name: str) -> Stream:
        """Return the stream of the rows of a tensor without padding."""
        tensor = self.tensors[name]
        return row_stream(tensor, self.unpadded_rows(tensor))


def collect_model(source: Source, other: Source | None = None) -> VerifiedModel:
    """Return the tensors to verify. Ignored tensors, such as buffers, are omitted."""
    if source.family is ADAPTER_FAMILY:
        return _collect_adapter(source)
    if other is not None:
        source = without_recorded_drops(source, other.manifest or NO_MANIFEST)
    match = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS)
    matched = [t for t in source.tensors if t.name in match.uses]
    tensors = {t.name: t for t in (*matched, *source.tower_tensors, *source.state_tensors)}
    vocabulary = source.vocabulary()
    return VerifiedModel(
        source,
        match=match,
        tensors=tensors,
        labels=label_tensors(source, match.uses),
        vocab_tensors=vocabulary_names(source, match, vocabulary),
        true_vocab=vocabulary.true_size,
    )


def unused_tensors(model: VerifiedModel, other: VerifiedModel) -> Iterator[LeftOutTensor]:
    """Yield the tensors outside of the model, such as buffers, without a counterpart in the other checkpoint."""
    other_names = {tensor.name for tensor in other.source.tensors}
    duplicates = {check.name for check in model.match.checks}
    source = model.source
    for tensor in model.match.dropped:
        if tensor.name not in other_names | duplicates:
            # Tensors that the source itself drops have their names in the file.
            name = tensor.name
            if tensor not in source.dropped:
                name = source.names.display_name(name)
            yield {"tensor": name, "checkpoint": source.display_name, "why": tensor.rule}


def _collect_adapter(source: Source) -> VerifiedModel:
    """Return the tensors of an adapter. Their leaves and vocabulary are unknown without the base model."""
    tensors = {tensor.name: tensor for tensor in source.tensors}
    return VerifiedModel(
        source,
        match=TensorMatch(uses={}, dropped=(), checks=(), is_tied=False),
        tensors=tensors,
        labels={name: TensorLabel("", name) for name in tensors},
        vocab_tensors=frozenset(),
        true_vocab=0,
    )


# --- Tensors that both checkpoints have


def comparable_sources(
    source: Source, against_source: Source, observer: Observer
) -> tuple[Source, Source, list[LeftOutTensor]]:
    """Return two checkpoints without the kinds of tensors that one of them leaves out on purpose.

    Both are decoded if one is. The observer gets a line per ignored kind. The result has the towers and the multi-token
    prediction left out of one.
    """
    source, against_source = decode_alike(source, against_source)
    if not (source.state_tensors and against_source.state_tensors):
        for one in (source, against_source):
            why = "only parameters are compared"
            _note_ignored(one, "training state", one.state_tensors, why, observer)
        source = replace(source, state_tensors=())
        against_source = replace(against_source, state_tensors=())
    compared = _without_absent_slots(source, against_source, observer)
    against_source = _without_absent_slots(against_source, source, observer)
    source = compared
    families = (source.family, against_source.family)
    # The adapter of a run has the family of its base, and an adapter in PEFT's format has none.
    is_adapter_alone = (source.family is ADAPTER_FAMILY) != (
        against_source.family is ADAPTER_FAMILY
    )
    if is_adapter_alone or any(family.is_verbatim for family in families):
        return *_with_file_names(source, against_source), []
    left_out: list[LeftOutTensor] = []
    pair: list[Source] = []
    for one, other in ((source, against_source), (against_source, source)):
        towers = _left_out_towers(one, other, observer)
        left_out += towers
        pair.append(without_towers(one) if towers else one)
    if source.family.name == against_source.family.name:
        pair = [*_with_equal_parameters(pair[0], pair[1])]
    return pair[0], pair[1], left_out


def _with_equal_parameters(source: Source, against_source: Source) -> tuple[Source, Source]:
    """Return two checkpoints of one family with the same parameters, each in the same tensors."""
    heads = (_with_own_head(source, against_source), _with_own_head(against_source, source))
    return in_one_form(*heads)


def _with_own_head(source: Source, other: Source) -> Source:
    """Return a checkpoint with its tied head as a parameter, if the head of the other one is not tied."""
    is_tied, other_is_tied = (
        one.family.is_tied(one.config, {tensor.name for tensor in one.tensors})
        for one in (source, other)
    )
    if not is_tied or other_is_tied:
        return source
    untied = {TIED_FIELD: False, **source.family.tying.untied_fields(source.config)}
    return replace(with_tied_head(source), config={**source.config, **untied})


def _with_file_names(source: Source, against_source: Source) -> tuple[Source, Source]:
    """Return two checkpoints with the names of their files, of which one has no family.

    Files with other names or shapes may have the same elements in another form, or padding, which only a family
    describes.
    """
    # A file has the same tensors, whether its family has rows for them or not.
    by_file = (as_verbatim(source), as_verbatim(against_source))
    # Of a padded vocabulary, only a family knows the rows of padding.
    shapes, other_shapes = ({t.name: t.shape for t in one.tensors} for one in by_file)
    has_adapter = ADAPTER_FAMILY in (source.family, against_source.family)
    if shapes != other_shapes and not has_adapter:
        by_family = (with_family(source), with_family(against_source))
        if all(not one.family.is_verbatim for one in by_family):
            return _with_equal_parameters(*by_family)
    return by_file


def _left_out_towers(source: Source, other: Source, observer: Observer) -> list[LeftOutTensor]:
    """Return the towers of a source if the other checkpoint leaves them out on purpose.

    A training step never has towers, and `--text-only` is recorded. Any other checkpoint of the same model without them
    has lost them.
    """
    if not source.tower_tensors or other.tower_tensors:
        return []
    rules = {entry.get("rule") for entry in (other.manifest or NO_MANIFEST).dropped}
    recorded = other.tree_manifest.towers or {}
    is_text_model = source.is_multimodal and other.wrapper is None
    is_step = other.tree_manifest.is_training_step or "path" in recorded
    if not (is_text_model or is_step or TEXT_ONLY_RULE in rules):
        return []
    what = "the text part" if source.is_multimodal else "the model without it"
    why = f"only {what} is compared"
    _note_ignored(source, towers_title(source), source.tower_tensors, why, observer)
    tensors: list[LeftOutTensor] = []
    for tensor in source.tower_tensors:
        name = source.file_name(tensor)
        tensors.append({"tensor": name, "checkpoint": source.display_name, "why": why})
    return tensors


def note_unrecorded_drops(source: Source, other: Source, observer: Observer) -> None:
    """Print a note if an earlier version of prep left multi-token prediction out of the other checkpoint."""
    tensors = [tensor for tensor in source.dropped if tensor.rule == UNRECORDED_RULE]
    why = (
        f"{other.display_name} is of an earlier version of prep, which left it out without a record"
    )
    _note_ignored(source, "multi-token prediction", tensors, why, observer)


def check_contents(source: Source, against_source: Source) -> None:
    """Raise PrepError if one checkpoint has adapters and the other one a model: they share no tensor."""
    if _has_adapters(source) == _has_adapters(against_source):
        return
    adapters, model = (
        (source, against_source) if _has_adapters(source) else (against_source, source)
    )
    what = f"{adapters.display_name} has only adapters, and {model.display_name} is a model"
    hint = text(
        "compare with the result of {}; {} writes the adapter of a run",
        Command("merge", "ADAPTER", "BASE"),
        Command("export", "RUN"),
    )
    raise PrepError(what, "they have no tensor in common", hint)


def _has_adapters(source: Source) -> bool:
    """Return whether a checkpoint has the adapters of a model without their base."""
    return source.family is ADAPTER_FAMILY or source.tree_manifest.is_adapter


def _without_absent_slots(source: Source, other: Source, observer: Observer) -> Source:
    """Return a checkpoint without the slots absent from the training state of another framework.

    E.g. Tunix has no place for the averages of a run.
    """
    if other.training_record is None:
        return source
    slots = {_slot_or_leaf(tensor) for tensor in other.state_tensors}
    kept: list[SourceTensor] = []
    ignored = defaultdict[str, list[SourceTensor]](list)
    for tensor in source.state_tensors:
        slot = _slot_or_leaf(tensor)
        if slot in slots:
            kept.append(tensor)
        else:
            ignored[slot].append(tensor)
    for slot, tensors in ignored.items():
        _note_ignored(source, slot, tensors, f"{other.display_name} has none", observer)
    return replace(source, state_tensors=tuple(kept))


def _slot_or_leaf(tensor: SourceTensor) -> str:
    """Return the slot of a tensor in a training state, or the name of a leaf outside of slots."""
    slot, name = split_name(tensor.name)
    return slot or name


def _note_ignored(
    source: Source,
    kind: str,
    tensors: Sequence[SourceTensor | DroppedTensor],
    why: str,
    observer: Observer,
) -> None:
    """Print a note about the ignored tensors of a kind, if there are any."""
    if tensors:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        size = format_bytes(nbytes)
        observer.note(f"{kind} of {source.display_name} ({size}) ignored: {why}")


# --- Maps


def is_output(checkpoint: str | None) -> bool:
    """Return whether prep wrote a local checkpoint."""
    if checkpoint is None or "://" in checkpoint:
        return False
    path = Path(checkpoint).expanduser()
    return path.exists() and (find_manifest_folder(path) / MANIFEST_FILE).exists()


def first_options(common: CommonOptions, against: str | None) -> CommonOptions:
    """Return the options of the first checkpoint of a comparison.

    A map is for the second checkpoint, or for the first one if prep wrote the second one.
    """
    if common.tensor_map is None:
        return common
    if against is not None and is_output(against):
        return mapped_options(
            common, read_manifest(find_manifest_folder(Path(against).expanduser()))
        )
    if against is None:
        option = Option("map")
        what = text("{} requires a second checkpoint", option)
        why = "the digests of an output are those of the mapped tensors"
        raise usage_error(what, why, text("remove {}, or name the second checkpoint", option))
    return replace(common, tensor_map=None)


def mapped_options(common: CommonOptions, output: Manifest | None) -> CommonOptions:
    """Return the options of a checkpoint with a map: its weights are decoded if those of the output were."""
    if common.tensor_map is not None and output is not None and output.quantization:
        return replace(common, quantized="decode")
    return common


# --- Checksums


def check_checksum_file(source: Source) -> None:
    """Compare `prep-checksums.bin` with its digest in the manifest. A checkpoint may have no such file.

    Raises:
        DamagedError: The file differs from the digest.
        PrepError: The file cannot be read, or has an unsupported format.
    """
    try:
        read_checksum_bytes(source.root, source.manifest or NO_MANIFEST)
    except DamagedError as error:
        # Its hint is for commands with an option to read without checks.
        raise error.with_texts(hint=again_hint(source.manifest)) from error.__cause__


# --- Files changed on purpose


# Path of the config in a Hugging Face folder, in an init and in a training step.
MODEL_CONFIGS = (
    CONFIG,
    f"{HF_FOLDER}/{CONFIG}",
    f"{STATE_ITEM}/{HF_FOLDER}/{CONFIG}",
)
MAX_SHOWN = 6


@dataclass(frozen=True, slots=True)
class AcceptedFiles:
    """New records of changed files, not written yet.

    Attributes:
        folder: Folder of the manifest.
        data: Bytes of the manifest with the new records.
        changes: The name of each file with its old and new size and digest, and the changed keys of a config.
    """

    folder: Path
    data: bytes
    changes: list[AcceptedChange]

    def write(self, observer: Observer) -> None:
        """Write the manifest, and note each change. Raise PrepError if it cannot be written."""
        path = self.folder / MANIFEST_FILE
        try:
            write_file(path, self.data)
        except OSError as error:
            raise io_error(path, error) from error
        for change in self.changes:
            observer.note(_describe_change(change))


def accept_files(checkpoint: str, files: Sequence[str]) -> AcceptedFiles:
    """Return a copy of an output's manifest with the current size and digest of the given files.

    The record of a removed file is deleted. A changed config.json replaces `config` in the manifest.

    Raises:
        UsageError: The checkpoint is not a local output that records its files, or it lists no such file.
        PrepError: A file cannot be read.
    """
    folder = _output_folder(checkpoint)
    stored = parse_manifest(folder / MANIFEST_FILE, read_small_file(folder / MANIFEST_FILE))
    if "files" not in stored:
        why = (
            "it was written by an earlier version of prep, which recorded no digests of small files"
        )
        what = text("{} has no effect for {}", Option("accept"), checkpoint)
        raise usage_error(what, why, text("remove {}", Option("accept")))
    names = [_recorded_name(folder, stored, file) for file in files]
    # A copy, because its records change.
    manifest = {**stored, "files": dict(stored.files)}
    changes = [_accept_file(folder, manifest, name) for name in dict.fromkeys(names)]
    return AcceptedFiles(folder, encode_manifest(manifest), changes)


def _output_folder(checkpoint: str) -> Path:
    """Return the folder with the manifest of a local output."""
    reference = parse_reference(checkpoint)
    if not isinstance(reference, LocalPath | RunStep):
        what = text("{} needs a local output, not {}", Option("accept"), checkpoint)
        raise usage_error(what, "it changes the manifest", "name a folder")
    folder = find_manifest_folder(reference.path)
    if not (folder / MANIFEST_FILE).is_file():
        what = text("{} has no effect for {}", Option("accept"), checkpoint)
        why = f"it has no {MANIFEST_FILE}"
        raise usage_error(what, why, text("remove {}", Option("accept")))
    return folder


def _recorded_name(folder: Path, manifest: Manifest, file: str) -> str:
    """Return the recorded name of a settings file, given by its path or by the end of it."""
    # Without files of tensors and metadata of an Orbax item
    names = [MANIFEST_FILE]
    names += [n for n, record in manifest.files.items() if "xxh3" in record and is_settings_file(n)]
    path = Path(file).absolute()
    if path.is_relative_to(folder.absolute()):
        file = path.relative_to(folder.absolute()).as_posix()
    if file in names:
        return file
    # With the slash, `config.json` matches `hf/config.json` but not `generation_config.json`.
    candidates = [name for name in names if f"/{name}".endswith(f"/{file}")]
    hint = text("{} with one of these names", Option("accept"))
    if not candidates:
        why = f"its settings and tokenizer files are {join_names(names[1:], max_names=MAX_SHOWN)}"
        raise usage_error(f"{folder} records no file `{file}`", why, hint)
    if len(candidates) > 1:
        why = f"they are {join_names(candidates, max_names=MAX_SHOWN)}"
        raise usage_error(f"`{file}` is the name of several files of {folder}", why, hint)
    return candidates[0]


def _accept_file(folder: Path, manifest: dict[str, Any], name: str) -> AcceptedChange:
    """Change the record of one file, and return the changes."""
    # The user edited the manifest itself. `encode_manifest` computes its digest again.
    if name == MANIFEST_FILE:
        old_digest = manifest["digest"]
        new_digest = manifest_digest(manifest)
        return {"file": name, "xxh3": {"old": old_digest, "new": new_digest}}
    records = manifest["files"]
    old = records[name]
    if not (folder / name).exists():
        del records[name]
        return {
            "file": name,
            "bytes": {"old": old["bytes"], "new": None},
            "xxh3": {"old": old["xxh3"], "new": None},
        }
    new = record_file(folder / name)
    records[name] = new
    sizes: OldAndNew = {"old": old["bytes"], "new": new["bytes"]}
    digests: OldAndNew = {"old": old["xxh3"], "new": new.get("xxh3")}
    if name not in MODEL_CONFIGS:
        return {"file": name, "bytes": sizes, "xxh3": digests}
    config = read_config(folder / name)
    recorded = manifest["config"]
    # A key with the value None differs from an absent key.
    missing = object()
    keys = [
        key
        for key in {*recorded, *config}
        if recorded.get(key, missing) != config.get(key, missing)
    ]
    manifest["config"] = config
    return {"file": name, "keys": sorted(keys), "bytes": sizes, "xxh3": digests}


def _describe_change(change: AcceptedChange) -> str:
    """Describe an accepted file: `accepted hf/config.json: 612 -> 613 bytes, xxh3 1c… -> 8f…; changed: rope_theta`."""
    name = change["file"]
    digests = change["xxh3"]
    sizes = change.get("bytes")
    if digests["new"] is None:
        return f"accepted {name}: it was removed, and is no longer recorded"
    if digests["old"] == digests["new"]:
        return f"accepted {name}: it is unchanged"
    size = f"{sizes['old']:,} -> {sizes['new']:,} bytes, " if sizes else ""
    keys = change.get("keys", ())
    suffix = f"; changed: {join_names(keys, max_names=MAX_SHOWN)}" if keys else ""
    return f"accepted {name}: {size}xxh3 {digests['old']:.32} -> {digests['new']}{suffix}"
