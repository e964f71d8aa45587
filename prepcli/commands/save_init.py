"""`prep save-init` and `prep reshard`: write an Orbax checkpoint, laid out for a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.commands.conflicts import check_needs
from prepcli.commands.conversion import (
    CommonOptions,
    PlannedConversion,
    check_allow_overflow,
    format_command_line,
    output_config,
    run_conversion,
)
from prepcli.commands.pad_vocab import check_seed, make_fill
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Report, Ui
from prepcli.errors import PrepError, usage_error
from prepcli.execution.compress import METHOD, parse_compress
from prepcli.formats.manifest import ADAPTER_KEYS, PREP_KEYS, STATE_ITEM, find_manifest_folder, read_manifest
from prepcli.formats.orbax import find_item
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS, MatchOptions
from prepcli.planning.plan import DroppedTensor, Plan
from prepcli.planning.vocabulary import Vocabulary, check_padded_size
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import HF_FOLDER, Source, match_source_tensors, source_rows
from prepcli.targets.hf_folder import copied_small_files, settings_files
from prepcli.targets.orbax_item import OrbaxItemLayout, Partitioning, item_streams, make_item
from prepcli.targets.streams import OPT_STATE_RULE, VocabResize, dropped_state, vocab_tensor_names
from trainer.models.axis_map import Row
from trainer.models.mesh import folder_suffix, parse_mesh
from trainer.models.partition import vocab_multiple
from trainer.models.rule_text import merge_rules
from trainer.models.rules import check_leaf_rules

DEVICES_PER_HOST = 4  # of a TPU host and of many GPU hosts; for the estimate of the bytes that a host reads
MAX_MULTIPLE_DIGITS = 18  # of `--pad-vocab`


@dataclass(frozen=True, slots=True)
class SaveInitRequest:
    """Request of `prep save-init` or `prep reshard`; None means the source's value, or else the default."""

    common: CommonOptions
    mesh: str | None = None
    rules: tuple[str, ...] = ()  # of `--rule`
    scan: bool | None = None  # stack the layers
    scan_axis: int | None = None
    pad_vocab: str = "no"  # `no`, `auto` (to fit the mesh) or a multiple
    init: str = "zeros"  # values of new rows
    seed: int | None = None  # of `init="normal"`
    true_vocab: int | None = None  # unpadded size of the vocabulary
    match_options: MatchOptions = DEFAULT_MATCH_OPTIONS
    params_only: bool = False  # drop the optimizer state
    dtype: str | None = None  # None: no cast
    compress: str | None = None  # `zstd` or `zstd:LEVEL`


def save_init(request: SaveInitRequest, ui: Ui) -> Report:
    """Convert a Hugging Face checkpoint to an Orbax checkpoint.

    Args:
        request: Source, output, mesh, padding and dtype.
        ui: Receives notes, warnings and progress.

    Returns:
        Report with the output's path, its leaves and its mesh.

    Raises:
        PrepError: The options conflict, the source does not fit its family or the mesh, or the conversion failed.
    """
    _check_padding_options(request)
    check_allow_overflow(request.common, request.dtype)
    return run_conversion(request.common, ui, lambda source, located: plan_orbax_item(request, source, located))


def reshard(request: SaveInitRequest, ui: Ui) -> Report:
    """Lay out an Orbax checkpoint for another mesh; see `save_init`."""

    def make_plan(source: Source, located: LocatedCheckpoint) -> PlannedConversion:
        return plan_orbax_item(request, source, located, command="reshard")

    return run_conversion(request.common, ui, make_plan, _is_unresharded)


def _check_padding_options(request: SaveInitRequest) -> None:
    """Raise UsageError for padding options without effect."""
    if request.pad_vocab == "no":
        why = "it sets the values of the padding"
        check_needs("--init", request.init if request.init != "zeros" else None, "--pad-vocab", why)
        check_needs("--seed", request.seed, "--pad-vocab", why)
    if request.mesh is None:
        auto = "auto" if request.pad_vocab == "auto" else None
        check_needs("--pad-vocab auto", auto, "--mesh", "auto pads to a size that the mesh divides")
    check_seed(request.init, request.seed)


def _is_unresharded(folder: Path) -> bool:
    """Return whether the folder is an Orbax checkpoint that `prep reshard` did not write."""
    manifest = read_manifest(find_manifest_folder(folder))
    return find_item(folder) is not None and bool(manifest) and manifest.get("command") != "reshard"


@dataclass(frozen=True, slots=True)
class _ItemLayout:
    """Layout of the output, after the defaults of the request are filled in from the source."""

    partitioning: Partitioning
    scan: bool
    scan_axis: int
    vocabulary: Vocabulary
    vocab_rows: int  # rows of the padded vocabulary
    rules: tuple[str, ...]  # of `--rule`, or of the source
    source_manifest: Mapping[str, Any]  # empty if prep did not write the source
    is_training_step: bool  # the output is a training step, with its optimizer state


def plan_orbax_item(
    request: SaveInitRequest, source: Source, located: LocatedCheckpoint, *, command: str = "save-init"
) -> PlannedConversion:
    """Plan the copy of every tensor to its leaf, in chunks for the mesh.

    Args:
        request: Mesh, scan axis, padding, dtype and compression.
        source: Opened source.
        located: Located source; its model name determines the output's default name.
        command: `save-init` or `reshard`.

    Returns:
        Plan with the notes and fields of its report.

    Raises:
        PrepError: The source is of the wrong kind, or does not match the request, its family or the mesh.
    """
    _check_source_kind(command, source)
    level = parse_compress(request.compress)
    keeps_state = not request.params_only and source.tree_manifest.get("kind") == "train"
    dropped_state_tensors = () if keeps_state else tuple(dropped_state(source))
    source = source if keeps_state else dataclasses.replace(source, state_tensors=())
    layout = _resolve_layout(request, source)
    rows = source_rows(source, layout.scan, layout.scan_axis)
    match = match_source_tensors(source, rows, request.match_options)
    _check_leaf_rules(layout, source, rows, is_tied=match.is_tied)
    item = make_item(
        source, match, table=rows, vocab_size=layout.vocab_rows, partitioning=layout.partitioning, dtype=request.dtype
    )
    resize = VocabResize(
        layout.vocabulary, vocab_tensor_names(source, match), make_fill(request.init, request.seed, source)
    )
    config = output_config(
        source, Vocabulary(layout.vocabulary.true_size, layout.vocab_rows), match.is_tied, request.dtype
    )
    plan = Plan(
        command=command,
        request=_command_line(command, request, source),
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=item_streams(source, match, item=item, vocab_size=layout.vocab_rows, resize=resize),
        files=item.files,
        small_files=settings_files(
            config,
            (),
            extra_files=copied_small_files(source, f"{HF_FOLDER}/"),
            path_prefix=f"{HF_FOLDER}/",
        ),
        leaves=item.leaves,
        dropped=(*match.dropped, *dropped_state_tensors),
        checks=match.checks,
        settings={
            **_manifest_settings(source, located, layout),
            **({"compress": f"{METHOD}:{level}"} if level else {}),
            "tied": match.is_tied,
            "config": config,
        },
        display_names=source.display_names(),
        item=STATE_ITEM if layout.is_training_step else "",
        zstd_level=level,
    )
    mesh = layout.partitioning.mesh
    suffix = folder_suffix(mesh) if mesh and command == "reshard" else "init"
    meshes = {"from": layout.source_manifest.get("mesh"), "to": str(mesh) if mesh else None}
    fields = {"leaves": len(item.leaves), "layout": "native", "mesh": meshes}
    notes = (*_layout_lines(layout, item), *_dropped_state_lines(dropped_state_tensors))
    return PlannedConversion(
        plan,
        f"{located.model_name}-{suffix}",
        notes=notes,
        fields=fields,
        next_command=lambda out: _next_command(command, out),
    )


def _resolve_layout(request: SaveInitRequest, source: Source) -> _ItemLayout:
    source_manifest = source.tree_manifest
    mesh_text = source_manifest.get("mesh") if request.mesh is None else request.mesh
    mesh = None if mesh_text is None else parse_mesh(mesh_text)
    if mesh is not None and -1 in mesh.sizes:
        raise usage_error(
            f"`--mesh {request.mesh}` has an axis of size -1", "conversions use no devices", "give it a number"
        )
    rules = request.rules or tuple(source_manifest.get("rules", ()))
    partitioning = Partitioning(mesh, merge_rules(rules))
    vocabulary = source.vocabulary(request.true_vocab)
    scan = source_manifest.get("scan", True) if request.scan is None else request.scan
    if not scan:
        check_needs("--scan-axis", request.scan_axis, "--scan", "unstacked layers have no layer axis")
    return _ItemLayout(
        partitioning=partitioning,
        scan=scan,
        scan_axis=source_manifest.get("scan_axis", 0) if request.scan_axis is None else request.scan_axis,
        vocabulary=vocabulary,
        vocab_rows=_vocab_rows(request, source, vocabulary=vocabulary, partitioning=partitioning),
        rules=rules,
        source_manifest=source_manifest,
        is_training_step=source_manifest.get("kind") == "train" and not request.params_only,
    )


def _check_leaf_rules(layout: _ItemLayout, source: Source, rows: Mapping[str, Row], *, is_tied: bool) -> None:
    """Raise UsageError for a rule of leaves that is not used, or is for another number of dims."""
    tied_leaf = source.family.tying.head_leaf if is_tied else None
    leaves = {path: row.leaf_dims for path, row in rows.items() if path != tied_leaf}
    check_leaf_rules(layout.partitioning.rules, leaves)


def _manifest_settings(source: Source, located: LocatedCheckpoint, layout: _ItemLayout) -> dict[str, Any]:
    step_fields = {key: value for key, value in layout.source_manifest.items() if key not in PREP_KEYS or key == "step"}
    return {
        **(step_fields if layout.is_training_step else {}),
        **{key: value for key, value in layout.source_manifest.items() if key in ADAPTER_KEYS},
        "name": located.model_name,
        "kind": "train" if layout.is_training_step else "init",
        "family": source.family.name,
        "vocab": {"true": layout.vocabulary.true_size, "padded": layout.vocab_rows},
        "layout": "native",
        "mesh": str(layout.partitioning.mesh) if layout.partitioning.mesh else None,
        "rules": layout.rules,
        "scan": layout.scan,
        "scan_axis": layout.scan_axis,
        "prefixed": source.names.is_prefixed,
    }


def _check_source_kind(command: str, source: Source) -> None:
    if command == "save-init" and source.tree_manifest:
        name = source.display_name
        hint = f"`prep reshard {name} --mesh …` changes its mesh, `prep export {name}` writes a Hugging Face folder"
        raise usage_error(f"{name} is already an Orbax checkpoint", "save-init reads Hugging Face folders", hint)
    if command == "reshard" and source.tensor_file_names:
        hint = f"`prep save-init {source.display_name} --mesh …`"
        raise usage_error(f"{source.display_name} is a Hugging Face folder", "reshard reads Orbax checkpoints", hint)


def _vocab_rows(request: SaveInitRequest, source: Source, *, vocabulary: Vocabulary, partitioning: Partitioning) -> int:
    """Return the rows of the output's vocabulary."""
    if request.pad_vocab == "no":
        return vocabulary.stored_size
    if request.pad_vocab == "auto":
        dims = {path: row.leaf_dims for path, row in source_rows(source).items()}
        num_shards = vocab_multiple(dims, partitioning.mesh, partitioning.rules)
        return -(-vocabulary.stored_size // num_shards) * num_shards
    option = f"--pad-vocab {request.pad_vocab}"
    is_number = request.pad_vocab.isdecimal() and len(request.pad_vocab) <= MAX_MULTIPLE_DIGITS
    if not is_number or int(request.pad_vocab) < 1:
        raise usage_error(f"invalid `{option}`", "it takes no, auto, or a multiple")
    padded = check_padded_size(vocabulary.padded_size(int(request.pad_vocab)), option)
    if padded < vocabulary.stored_size:
        why = f"the tensors have {vocabulary.stored_size} rows, {vocabulary.true_size} of them true"
        raise PrepError(f"`{option}` would remove rows", why, "`prep export` removes padding")
    return padded


def _layout_lines(layout: _ItemLayout, item: OrbaxItemLayout) -> Iterator[str]:
    stored_rows, mesh = layout.vocabulary.stored_size, layout.partitioning.mesh
    if layout.vocab_rows != stored_rows:
        yield f"vocabulary {stored_rows} -> {layout.vocab_rows} (+{layout.vocab_rows - stored_rows} rows)"
    if mesh is not None:
        axes = " x ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.sizes))
        source_mesh = layout.source_manifest.get("mesh")
        devices_per_host = DEVICES_PER_HOST if mesh.n_devices % DEVICES_PER_HOST == 0 else mesh.n_devices
        num_hosts = mesh.n_devices // devices_per_host
        amplification = item.read_amplification(mesh, devices_per_host)
        hosts = f"{num_hosts} host{'s' if num_hosts > 1 else ''} of {devices_per_host}"
        size = format_bytes(item.device_nbytes())
        change = f"{source_mesh} -> {axes}" if source_mesh else axes
        yield (
            f"mesh {change} = {mesh.n_devices} devices; {size} per device;"
            f" {hosts} read {amplification:.2f} x their bytes"
        )
    yield from item.fallbacks


def _dropped_state_lines(dropped: tuple[DroppedTensor, ...]) -> Iterator[str]:
    if nbytes := sum(tensor.nbytes for tensor in dropped if tensor.rule == OPT_STATE_RULE):
        yield f"optimizer state ({format_bytes(nbytes)}) dropped"


def _next_command(command: str, out: Path) -> str:
    return f"prep verify {out}" if command == "reshard" else f"prep reshard {out} --mesh DP,FSDP,MP"


def _command_line(command: str, request: SaveInitRequest, source: Source) -> str:
    options = [
        ("--mesh", request.mesh),
        ("--rule", request.rules),
        ("--scan", request.scan or None),
        ("--no-scan", request.scan is False),
        ("--scan-axis", request.scan_axis),
        ("--params-only", request.params_only),
        ("--compress", request.compress),
        ("--pad-vocab", request.pad_vocab if request.pad_vocab != "no" else None),
        ("--init", request.init if request.init != "zeros" else None),
        ("--seed", request.seed or None),
        ("--true-vocab", request.true_vocab),
        ("--drop", request.match_options.drop),
        ("--config", request.common.config),
        ("--untie", request.match_options.untie),
        ("--dtype", request.dtype),
    ]
    return format_command_line(command, source, options)
