"""Compare an output with one of its sources, for `verify_chain`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from prepcli.algebra.boxes import Range
from prepcli.commands.operations.chain_tokens import ADD, TokenChange
from prepcli.commands.operations.compared_settings import compared_config
from prepcli.commands.operations.conversion import PlannedConversion
from prepcli.core.counts import count_text
from prepcli.core.json_types import HFConfig
from prepcli.core.lists import join_names
from prepcli.core.option_spec import recorded_words
from prepcli.core.progress import Progress
from prepcli.engine.casts import parse_stream_digest
from prepcli.engine.digest import digest_of_zeros, digest_pieces
from prepcli.formats.file_records import is_settings_file, record_file
from prepcli.formats.manifest import NO_MANIFEST, Manifest
from prepcli.formats.safetensors import ADAPTER_CONFIG, INDEX_FILE
from prepcli.formats.torch_dcp import METADATA_FILE
from prepcli.models.prediction import PREDICTION_FIELDS
from prepcli.planning.layout_scales import LayoutScale
from prepcli.planning.plan import Stream
from prepcli.planning.state_names import split_name
from prepcli.planning.tensors import FLOAT_DTYPES
from prepcli.planning.vocabulary import TRUE_VOCAB_SIZE_KEY, VOCAB_SIZE_KEY
from prepcli.restore.digest_checks import num_rows, row_stream, stream_digests, tensor_digests
from prepcli.restore.scaled_digests import stored_scale, written_digests, written_stream
from prepcli.sources.averages import use_averaged_params
from prepcli.sources.dequantized import decode_alike
from prepcli.sources.model_family import as_verbatim
from prepcli.sources.openers.peft_folder import ADAPTER_FAMILY
from prepcli.sources.source import CONFIG, HF_FOLDER, Source, SourceTensor

DTYPE_KEY = "dtype"
# Its name before version 5 of transformers.
OLD_DTYPE_KEY = "torch_dtype"
VOCABULARY_KEYS = {VOCAB_SIZE_KEY, TRUE_VOCAB_SIZE_KEY}
TYING_KEY = "tie_word_embeddings"
QUANTIZATION_KEY = "quantization_config"
# Keys of config.json by the command or option that writes them. An export takes off the padding of the vocabulary.
WRITTEN_CONFIG_KEYS: dict[str, set[str]] = {
    "pad-vocab": VOCABULARY_KEYS,
    "add-tokens": VOCABULARY_KEYS,
    "remove-tokens": VOCABULARY_KEYS,
    "export": VOCABULARY_KEYS,
    "train": {DTYPE_KEY},
    "--pad-vocab": VOCABULARY_KEYS,
    "--true-vocab": VOCABULARY_KEYS,
    "--dtype": {DTYPE_KEY},
    "--quantized": {QUANTIZATION_KEY},
    "--text-only": {*PREDICTION_FIELDS},
    "--drop": {*PREDICTION_FIELDS},
}
# Keys that a recipe may change.
RECIPE_CONFIG_KEYS = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
}
# Files with other content in each output.
MADE_FILES = (CONFIG, INDEX_FILE, ADAPTER_CONFIG, METADATA_FILE)
# Tensors in a reason.
MAX_NAMES = 3


@dataclass(slots=True)
class LinkReport:
    """Result of the comparison of an output with its source.

    Attributes:
        is_identified: Whether the source is known to be the recorded one, by its manifest, its commit, or by the values
            of all tensors.
        proven: Compared and equal parts, e.g. `21 tensors`.
        unproven: Parts without a comparison. A link with such a part is not proven.
        differences: Different parts.
    """

    is_identified: bool = False
    proven: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a tensor of the output with their recorded digest, and the tensor of the source.

    With a scale, the digest is of the scaled values.
    """

    name: str
    rows: Range
    digest: str
    dtype: str
    source_tensor: SourceTensor
    scale: LayoutScale | None = None


def compare_values(
    output: Source,
    source: Source,
    memory_nbytes: int,
    progress: Progress,
    report: LinkReport,
    *,
    change: TokenChange | None = None,
) -> None:
    """Compare the recorded digests of an output's tensors with the tensors of its source.

    Digests of the source's manifest are used as they are: its bytes are compared with them elsewhere. Other tensors are
    read. Casts and scales are computed again.

    Args:
        output: The output, with a manifest.
        source: One of its sources.
        memory_nbytes: Memory limit.
        progress: Receives the bytes read.
        report: Receives the result.
        change: Added or removed tokens, or None.
    """
    manifest = output.manifest or NO_MANIFEST
    num_unproven = len(report.unproven)
    output, source = _with_common_names(output, source, manifest)
    source_tensors = _tensors_by_name(source)
    pieces: list[_Piece] = []
    new_rows = 0
    token_rows = 0
    output_tensors = _digested_tensors(output, memory_nbytes, progress)
    for name, tensor in output_tensors.items():
        source_tensor = source_tensors.get(name)
        if source_tensor is None:
            _add_unmatched(output, source, tensor, name, report)
            continue
        if tensor.shape[1:] != source_tensor.shape[1:]:
            shapes = f"{list(tensor.shape)}, not {list(source_tensor.shape)}"
            report.differences.append(f"{name} has the shape {shapes}")
            continue
        num_common = num_rows(source_tensor)
        added_rows: Range = (num_common, num_common)
        # Only a vocabulary tensor has several digests. Its rows after the common tokens are made by the command, also
        # where the source has other rows.
        if change and num_rows(tensor) == change.vocab_rows and len(tensor.digests) > 1:
            added_rows = change.added_rows
            num_common = added_rows[0]
        for low, high, digest in tensor.digests:
            if low < num_common or low == high:
                scale = stored_scale(output, name)
                pieces.append(_Piece(name, (low, high), digest, tensor.dtype, source_tensor, scale))
            elif (low, high) == added_rows:
                token_rows += high - low
            elif _is_filled_as_recorded(tensor, (low, high), digest, manifest):
                new_rows += high - low
            else:
                report.differences.append(f"{name} rows {low}:{high} are not the recorded padding")
    changed = _changed_names(pieces, source, memory_nbytes, progress)
    if changed:
        names = join_names(sorted(changed), max_names=MAX_NAMES)
        report.differences.append(f"other values than in {source.display_name}: {names}")
    _compare_names(output_tensors, source, manifest, report)
    if len(report.unproven) == num_unproven:
        report.is_identified = True
    num_equal = len({piece.name for piece in pieces} - changed)
    report.proven.append(count_text(num_equal, "tensor"))
    if token_rows:
        report.proven.append(f"{count_text(token_rows, 'row')} made for new tokens")
    if new_rows:
        report.proven.append(f"{count_text(new_rows, 'row')} of padding")


def compare_sums(
    output: Source,
    planned: PlannedConversion,
    memory_nbytes: int,
    progress: Progress,
    report: LinkReport,
) -> None:
    """Compare the recorded digests of a merged model with new sums of base and adapter.

    Args:
        output: The merged model.
        planned: Plan of the same merge.
        memory_nbytes: Memory limit.
        progress: Receives the bytes read.
        report: Receives the result.
    """
    assert planned.source_view is not None
    recorded: dict[tuple[str, Range], str] = {}
    for tensor in output.all_tensors:
        for low, high, digest in tensor.digests:
            recorded[tensor.name, (low, high)] = digest
    written = [stream for stream in planned.plan.streams if stream.writes]
    streams = [replace(stream, writes=()) for stream in written]
    digests = stream_digests(
        planned.source_view, streams, memory_nbytes, progress=progress, task="merge"
    )
    changed: set[str] = set()
    for stream, digest in zip(streams, digests):
        expected = recorded.pop((stream.name, stream.rows), None)
        if parse_stream_digest(digest).written != expected:
            changed.add(stream.name)
    changed |= {name for name, _ in recorded}
    if changed:
        names = join_names(sorted(changed), max_names=MAX_NAMES)
        report.differences.append(f"other values than the sums of base and adapter: {names}")
        return
    report.proven.append(f"{len({stream.name for stream in streams})} tensors of the sum")
    report.is_identified = True


def _with_common_names(output: Source, source: Source, manifest: Manifest) -> tuple[Source, Source]:
    """Return an output and its source with equal names of equal tensors, and with values of the same kind."""
    if "--ema" in requested_options(manifest):
        source = use_averaged_params(source)
    output, source = decode_alike(output, source)
    # The families of an adapter and of a run with LoRA have other bare names.
    has_adapters = ADAPTER_FAMILY in (output.family, source.family)
    if has_adapters or output.family.is_verbatim or source.family.is_verbatim:
        output = as_verbatim(output)
        source = as_verbatim(source)
    return output, source


def requested_options(manifest: Manifest) -> list[str]:
    """Return the recorded options of the command of an output, as words. Empty if they are malformed."""
    return recorded_words(manifest.request, manifest.command or "", manifest.source_name)


def _digested_tensors(
    output: Source, memory_nbytes: int, progress: Progress
) -> dict[str, SourceTensor]:
    """Return the tensors of an output by name, all with digests.

    The manifest of a quantised output has digests of its codes and scales. The decoded values are read.
    """
    tensors = _tensors_by_name(output)
    decoded = [tensor for tensor in tensors.values() if not tensor.digests]
    pieces = [(tensor, (0, num_rows(tensor))) for tensor in decoded]
    digests = tensor_digests(output, pieces, memory_nbytes, progress=progress, task="decode")
    for tensor, digest in zip(decoded, digests):
        record = (0, num_rows(tensor), digest)
        tensors[tensor.name] = replace(tensor, digests=(record,))
    return tensors


def _tensors_by_name(source: Source) -> dict[str, SourceTensor]:
    return {tensor.name: tensor for tensor in source.all_tensors}


def _add_unmatched(
    output: Source, source: Source, tensor: SourceTensor, name: str, report: LinkReport
) -> None:
    """Report a tensor without a counterpart in the source."""
    if tensor in output.tower_tensors and not source.tower_tensors:
        # A training step has no towers. Its export reads them from the start model.
        report.unproven.append(f"tower {name}")
    else:
        report.differences.append(f"{name} is not in {source.display_name}")


def _compare_names(
    output_tensors: Mapping[str, SourceTensor],
    source: Source,
    manifest: Manifest,
    report: LinkReport,
) -> None:
    """Report missing tensors and rows of a source in its output."""
    dropped = _dropped_names(manifest, has_rows=False)
    shortened = _dropped_names(manifest, has_rows=True)
    display_names = source.display_names()
    missing: list[str] = []
    num_dropped = 0
    for tensor in source.all_tensors:
        display_name = display_names[tensor.name]
        if tensor.name in output_tensors:
            first = num_rows(output_tensors[tensor.name])
            if first < num_rows(tensor) and display_name not in shortened:
                report.unproven.append(f"{display_name} rows {first}:{num_rows(tensor)}")
            continue
        slot, state_name = split_name(tensor.name)
        # A state is recorded by its slots, e.g. `opt_state.0.mu`. Earlier versions gave modules of multi-token
        # prediction the prefix of the family.
        prefixed_name = source.family.prefix + display_name
        if dropped.isdisjoint({display_name, slot or state_name, prefixed_name}):
            missing.append(display_name)
        else:
            num_dropped += 1
    if missing:
        names = join_names(sorted(missing), max_names=MAX_NAMES)
        report.differences.append(f"tensors of {source.display_name} are missing: {names}")
    if num_dropped:
        report.proven.append(f"{num_dropped} tensors left out")


def _dropped_names(manifest: Manifest, *, has_rows: bool) -> set[str]:
    """Return the recorded names of dropped tensors and state slots, or of tensors with dropped rows or columns."""
    names: set[str] = set()
    for entry in manifest.dropped:
        name = entry.get("name")
        is_part = entry.get("rows") is not None or entry.get("columns") is not None
        if isinstance(name, str) and is_part == has_rows:
            names.add(name)
    return names


def _is_filled_as_recorded(
    tensor: SourceTensor, rows: Range, digest: str, manifest: Manifest
) -> bool:
    """Return whether new rows of a vocabulary are zeros, unless the request has other new rows."""
    # `--init` of add-tokens is for the rows of tokens. Its padding is zeros.
    if "--init" in requested_options(manifest) and manifest.command != ADD:
        return True
    return digest == digest_of_zeros(row_stream(tensor, rows).nbytes)


def _changed_names(
    pieces: list[_Piece], source: Source, memory_nbytes: int, progress: Progress
) -> set[str]:
    """Return the names of the tensors with other digests than the rows of the source."""
    changed: set[str] = set()
    computed: list[_Piece] = []
    for piece in pieces:
        recorded_digest = _recorded_digest(piece)
        if recorded_digest is None and _can_be_computed(piece):
            computed.append(piece)
        elif recorded_digest != piece.digest:
            changed.add(piece.name)
    streams: list[Stream] = []
    for piece in computed:
        streams.append(written_stream(piece.source_tensor, piece.rows, piece.dtype, piece.scale))
    digests = written_digests(source, streams, memory_nbytes, progress=progress, task="compare")
    for piece, digest in zip(computed, digests):
        if digest != piece.digest:
            changed.add(piece.name)
    return changed


def _recorded_digest(piece: _Piece) -> str | None:
    """Return the digest of the same rows in the source's manifest. None if they were changed or divided otherwise."""
    tensor = piece.source_tensor
    if piece.scale or piece.dtype != tensor.dtype:
        return None
    recorded = {(low, high): digest for low, high, digest in tensor.digests}
    return recorded.get(piece.rows)


def _can_be_computed(piece: _Piece) -> bool:
    """Return whether the source has the rows, in the dtype of the output or in one with a cast to it."""
    tensor = piece.source_tensor
    if piece.rows[1] > num_rows(tensor):
        return False
    return piece.dtype == tensor.dtype or tensor.dtype in FLOAT_DTYPES


def compare_files(
    output: Source, source: Source, report: LinkReport, *, change: TokenChange | None = None
) -> None:
    """Compare the recorded digests of an output's tokenizer and other small files with the files of its source.

    Another file is a difference, unless the recipe or an adapter brings its own tokenizer, or only tokens were added or
    removed.
    """
    manifest = output.manifest or NO_MANIFEST
    token_files = change.files if change is not None else frozenset[str]()
    source_digests = _file_digests(source)
    # `--copy` adds them to an output.
    other_files = {file.name: file.path for file in source.left_files}
    output_files: set[str] = set()
    num_equal = 0
    for path, record in manifest.files.items():
        name = _side_file_name(path, manifest)
        if "xxh3" not in record or name in MADE_FILES or not is_settings_file(path):
            continue
        output_files.add(name)
        if name in token_files:
            num_equal += 1
            continue
        digest = source_digests.get(name)
        if digest is None and name in other_files:
            digest = record_file(other_files[name]).get("xxh3")
        if digest is None:
            report.unproven.append(name)
        elif digest == record["xxh3"]:
            num_equal += 1
        elif _brings_tokenizer(manifest):
            report.unproven.append(name)
        else:
            report.differences.append(f"{name} differs from the one of {source.display_name}")
    # An adapter has no files but its own.
    if output.family is not ADAPTER_FAMILY and not _brings_tokenizer(manifest):
        for name in sorted(source_digests.keys() - output_files - token_files):
            report.differences.append(f"{name} of {source.display_name} is missing")
    if num_equal:
        report.proven.append(count_text(num_equal, "file"))


def _side_file_name(path: str, manifest: Manifest) -> str:
    """Return the name of a listed file within the folder of the model."""
    if not (manifest.is_tree or manifest.is_for_trainer):
        return path
    _, separator, name = f"/{path}".partition(f"/{HF_FOLDER}/")
    return name if separator else Path(path).name


def _file_digests(source: Source) -> dict[str, str]:
    """Return the XXH3-128 of the copied small files of a source, by name."""
    digests: dict[str, str] = {}
    for side_file in source.small_files:
        if side_file.name not in MADE_FILES:
            digests[side_file.name] = record_file(side_file.path).get("xxh3", "")
    # A GGUF file has its tokenizer in the metadata.
    for file in source.made_files.files:
        digests[Path(file.path).name] = digest_pieces([file.read_content()])
    return digests


def _brings_tokenizer(manifest: Manifest) -> bool:
    """Return whether an output may have another tokenizer than its source."""
    if manifest.merged is not None:
        return True
    try:
        recipe = tomllib.loads(manifest.recipe)
    except ValueError:
        return False
    data = recipe.get("data")
    return isinstance(data, dict) and "tokenizer" in data


def compare_config(output: Source, source: Source, report: LinkReport) -> None:
    """Compare the config of an output with the one of its source, except for keys written by its command."""
    config = compared_config(output, source)
    source_config = compared_config(source, output)
    differing = differing_keys(config, source_config) - _written_keys(output, source)
    if differing and "--config" in requested_options(output.manifest or NO_MANIFEST):
        keys = join_names([f"`{key}`" for key in sorted(differing)], max_names=MAX_NAMES)
        report.unproven.append(f"{keys} of the other config")
        return
    for key in sorted(differing):
        report.differences.append(f"config.json has another `{key}` than {source.display_name}")
    report.proven.append("config")


def differing_keys(config: HFConfig, source_config: HFConfig) -> set[str]:
    """Return the keys with other values in two configs. `torch_dtype` is the same key as `dtype`."""
    config = _with_new_dtype_key(config)
    source_config = _with_new_dtype_key(source_config)
    keys = {*config, *source_config}
    return {key for key in keys if config.get(key) != source_config.get(key)}


def _with_new_dtype_key(config: HFConfig) -> HFConfig:
    if OLD_DTYPE_KEY not in config:
        return config
    renamed = dict(config)
    dtype = renamed.pop(OLD_DTYPE_KEY)
    renamed.setdefault(DTYPE_KEY, dtype)
    return renamed


def _written_keys(output: Source, source: Source) -> set[str]:
    """Return the keys of config.json written by the command of an output."""
    manifest = output.manifest or NO_MANIFEST
    keys: set[str] = set()
    for word in (manifest.command or "", *requested_options(manifest)):
        keys |= WRITTEN_CONFIG_KEYS.get(word, set())
    if manifest.is_training_step:
        keys |= RECIPE_CONFIG_KEYS
    if source.quantization or source.tree_manifest.quantization:
        # Decoded weights have no such key, and the export of an init gives it back.
        keys.add(QUANTIZATION_KEY)
    tying = output.family.tying
    has_head = any(tensor.name == tying.head_tensor for tensor in output.tensors)
    if has_head and output.config.get(TYING_KEY) is False:
        # A config of tied weights is corrected for a model with a head of its own.
        keys |= {TYING_KEY, *tying.untied_fields(source.config)}
    return keys
