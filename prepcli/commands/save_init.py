"""`prep save-init` and `prep reshard`: an Orbax checkpoint of parameters, laid out for a mesh."""

from __future__ import annotations

import dataclasses
import math
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
from prepcli.formats.manifest import PREP_KEYS, STATE_ITEM, find_manifest_folder, read_manifest
from prepcli.formats.orbax import find_item
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS, MatchOptions
from prepcli.planning.plan import DroppedTensor, Plan
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import HF_FOLDER, Source, match_source_tensors, source_rows
from prepcli.targets.hf_folder import copied_files, settings_files
from prepcli.targets.orbax_item import OrbaxItemLayout, Partitioning, item_streams, make_item
from prepcli.targets.streams import OPT_STATE_RULE, VocabResize, dropped_state, vocab_tensor_names
from trainer.models.mesh import folder_suffix, merge_rules, parse_mesh

DEVICES_PER_HOST = 4  # of a TPU host, and of many GPU ones: for the line that tells what a host reads


@dataclass(frozen=True, slots=True)
class SaveInitRequest:
    """What the checkpoint is laid out for: None where the source's own layout, or the default, holds."""

    common: CommonOptions
    mesh: str | None = None
    rules: tuple[str, ...] = ()
    scan: bool | None = None
    scan_axis: int | None = None
    pad_vocab: str = "no"
    init: str = "zeros"
    seed: int | None = None
    true_vocab: int | None = None
    match_options: MatchOptions = DEFAULT_MATCH_OPTIONS
    params_only: bool = False
    dtype: str | None = None
    compress: str | None = None  # zstd, or zstd:LEVEL


def save_init(request: SaveInitRequest, ui: Ui) -> Report:
    """A Hugging Face folder into an Orbax checkpoint, ready for every host."""
    _check_padding_options(request)
    check_allow_overflow(request.common, request.dtype)
    return run_conversion(request.common, ui, lambda source, located: plan_orbax_item(request, source, located))


def reshard(request: SaveInitRequest, ui: Ui) -> Report:
    """An Orbax checkpoint laid out anew for another mesh."""
    return run_conversion(request.common, ui, lambda s, where: plan_orbax_item(request, s, where, "reshard"), _is_unresharded)


def _check_padding_options(request: SaveInitRequest) -> None:
    """Raise a usage PrepError for options about padding that would have no effect."""
    if request.pad_vocab == "no":
        why = "it fills the rows that padding adds"
        check_needs("--init", request.init if request.init != "zeros" else None, "--pad-vocab", why)
        check_needs("--seed", request.seed, "--pad-vocab", why)
    if request.mesh is None:
        needing = "auto" if request.pad_vocab == "auto" else None
        check_needs("--pad-vocab auto", needing, "--mesh", "auto pads to what the mesh divides")
    check_seed(request.init, request.seed)


def _is_unresharded(folder: Path) -> bool:
    """An Orbax checkpoint that is not itself a reshard of another."""
    manifest = read_manifest(find_manifest_folder(folder))
    return find_item(folder) is not None and bool(manifest) and manifest.get("command") != "reshard"


@dataclass(frozen=True, slots=True)
class _ItemLayout:
    """What is laid out, with the source's own layout where the request says nothing."""

    split: Partitioning
    scan: bool
    scan_axis: int
    vocabulary: Vocabulary
    vocab_rows: int  # of vocabulary
    rules: tuple[str, ...]  # `--rule`, or those that the source was laid out by
    source_manifest: Mapping[str, Any]  # the source's manifest, where it is a checkpoint of this kind
    is_training_step: bool  # of a training run, and stays one


def plan_orbax_item(
    request: SaveInitRequest, source: Source, located: LocatedCheckpoint, command: str = "save-init"
) -> PlannedConversion:
    """Every tensor into the leaves of its rows, in chunks for the mesh. PrepError where that does not add up."""
    _check_source_kind(command, source)
    level = parse_compress(request.compress)
    keeps_state = not request.params_only and source.tree_manifest.get("kind") == "train"
    off = () if keeps_state else tuple(dropped_state(source))
    source = source if keeps_state else dataclasses.replace(source, state_tensors=())
    layout = _resolve_layout(request, source)
    table = source_rows(source, layout.scan, layout.scan_axis)
    found = match_source_tensors(source, table, request.match_options)
    item = make_item(source, found, table, layout.vocab_rows, layout.split, request.dtype)
    cut = VocabResize(
        layout.vocabulary, vocab_tensor_names(source, found), make_fill(request.init, request.seed, source)
    )
    config = output_config(source, Vocabulary(layout.vocabulary.true_size, layout.vocab_rows), found.is_tied, request.dtype)
    made = Plan(
        command=command,
        request=_command_line(command, request, source),
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=item_streams(source, found, item, layout.vocab_rows, cut),
        files=item.files,
        small_files=settings_files(
            config, (), copied_files(source.small_files, source.root, f"{HF_FOLDER}/"), f"{HF_FOLDER}/"
        ),
        leaves=item.leaves,
        dropped=(*found.dropped, *off),
        checks=found.checks,
        settings={
            **_manifest_settings(source, located, layout),
            **({"compress": f"{METHOD}:{level}"} if level else {}),
            "tied": found.is_tied,
            "config": config,
        },
        display_names=source.display_names(),
        item=STATE_ITEM if layout.is_training_step else "",
        zstd_level=level,
    )
    mesh = layout.split.mesh
    suffix = folder_suffix(mesh) if mesh and command == "reshard" else "init"
    meshes = {"from": layout.source_manifest.get("mesh"), "to": str(mesh) if mesh else None}
    fields = {"leaves": len(item.leaves), "layout": "native", "mesh": meshes}
    lines = (*_layout_lines(layout, item), *_dropped_state_lines(off))
    return PlannedConversion(made, f"{located.model_name}-{suffix}", lines, fields, lambda out: _next_command(command, out))


def _resolve_layout(request: SaveInitRequest, source: Source) -> _ItemLayout:
    before = source.tree_manifest
    asked = before.get("mesh") if request.mesh is None else request.mesh
    mesh = None if asked is None else parse_mesh(asked)
    if mesh is not None and -1 in mesh.sizes:
        raise usage_error(
            f"`--mesh {request.mesh}` leaves an axis open", "no devices are looked at here", "give it a number"
        )
    rule_texts = request.rules or tuple(before.get("rules", ()))
    split = Partitioning(mesh, merge_rules(rule_texts))
    vocabulary = source.vocabulary(request.true_vocab)
    scan = before.get("scan", True) if request.scan is None else request.scan
    if not scan:
        check_needs("--scan-axis", request.scan_axis, "--scan", "a leaf for each layer has no axis of layers")
    return _ItemLayout(
        split,
        scan,
        before.get("scan_axis", 0) if request.scan_axis is None else request.scan_axis,
        vocabulary,
        _vocab_rows(request, vocabulary, split),
        rule_texts,
        before,
        before.get("kind") == "train" and not request.params_only,
    )


def _manifest_settings(source: Source, located: LocatedCheckpoint, layout: _ItemLayout) -> dict[str, Any]:
    of_step = {key: value for key, value in layout.source_manifest.items() if key not in PREP_KEYS or key == "step"}
    return {
        **(of_step if layout.is_training_step else {}),
        "name": located.model_name,
        "kind": "train" if layout.is_training_step else "init",
        "family": source.family.name,
        "vocab": {"true": layout.vocabulary.true_size, "padded": layout.vocab_rows},
        "layout": "native",
        "mesh": str(layout.split.mesh) if layout.split.mesh else None,
        "rules": layout.rules,
        "scan": layout.scan,
        "scan_axis": layout.scan_axis,
        "prefixed": source.names.is_prefixed,
    }


def _check_source_kind(command: str, source: Source) -> None:
    if command == "save-init" and source.tree_manifest:
        hint = f"`prep reshard {source.display_name} --mesh …` lays it out anew, `prep export {source.display_name}` goes back"
        raise usage_error(
            f"{source.display_name} is an Orbax checkpoint already", "save-init reads Hugging Face folders", hint
        )
    if command == "reshard" and source.tensor_file_names:
        hint = f"`prep save-init {source.display_name} --mesh …`"
        raise usage_error(f"{source.display_name} is a Hugging Face folder", "reshard reads Orbax checkpoints", hint)


def _vocab_rows(request: SaveInitRequest, vocabulary: Vocabulary, split: Partitioning) -> int:
    if request.pad_vocab == "no":
        return vocabulary.stored_size
    if request.pad_vocab == "auto":
        axes = split.rules["vocab"][0]
        parts = math.prod(split.mesh.size(a) for a in axes) if split.mesh else 1
        return -(-vocabulary.stored_size // parts) * parts
    if not request.pad_vocab.isdecimal() or int(request.pad_vocab) < 1:
        raise usage_error(f"`--pad-vocab {request.pad_vocab}` is not understood", "it takes no, auto, or a multiple")
    padded = vocabulary.padded_size(int(request.pad_vocab))
    if padded < vocabulary.stored_size:
        why = f"the tensors have {vocabulary.stored_size} rows, {vocabulary.true_size} of them true"
        raise PrepError(
            f"`--pad-vocab {request.pad_vocab}` would take rows off", why, "`prep export` takes padding off"
        )
    return padded


def _layout_lines(layout: _ItemLayout, item: OrbaxItemLayout) -> Iterator[str]:
    stored, mesh = layout.vocabulary.stored_size, layout.split.mesh
    if layout.vocab_rows != stored:
        yield f"vocabulary {stored} -> {layout.vocab_rows} (+{layout.vocab_rows - stored} rows)"
    if mesh is not None:
        axes = " x ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.sizes))
        before = layout.source_manifest.get("mesh")
        a_host = DEVICES_PER_HOST if mesh.n_devices % DEVICES_PER_HOST == 0 else mesh.n_devices
        hosts = mesh.n_devices // a_host
        reads = f"{hosts} host{'s' if hosts > 1 else ''} of {a_host} read {item.read_amplification(mesh, a_host):.2f} x their bytes"
        size = format_bytes(item.device_nbytes())
        yield f"mesh {f'{before} -> ' if before else ''}{axes} = {mesh.n_devices} devices; {size} a device; {reads}"
    yield from item.fallbacks


def _dropped_state_lines(dropped: tuple[DroppedTensor, ...]) -> Iterator[str]:
    if nbytes := sum(each.nbytes for each in dropped if each.rule == OPT_STATE_RULE):
        yield f"optimizer state ({format_bytes(nbytes)}) left out"


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
