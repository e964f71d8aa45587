"""`prep pad-vocab`: rows added to the vocabulary, so that it can be sharded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prepcli.commands.conflicts import check_mutually_exclusive, check_needs
from prepcli.commands.conversion import (
    CommonOptions,
    PlannedConversion,
    format_command_line,
    output_config,
    run_conversion,
)
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Report, Ui
from prepcli.errors import PrepError, usage_error
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS, MatchOptions, vocab_tensors
from prepcli.planning.plan import Contiguous, Fill, Plan
from prepcli.planning.slabs import PAGE
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, source_rows
from prepcli.targets.hf_folder import FileGroup, copied_files, header_entries, lay_out_weight_files, settings_files
from prepcli.targets.streams import TensorTarget, VocabResize, build_streams, dropped_padding, output_rows
from trainer.models.mesh import DEFAULT_RULES, format_rule, parse_mesh

FILL_KINDS = ("zeros", "mean", "normal")
SEED_LIMIT = 1 << 64
DEFAULT_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class PadVocabRequest:
    """To a multiple, to a size, or to what a mesh divides; `init` is what the new rows hold."""

    common: CommonOptions
    multiple: int | None = None  # 8, where neither a size nor a mesh is given
    size: int | None = None
    mesh: str | None = None
    init: str = "zeros"
    seed: int | None = None
    true_vocab: int | None = None
    match_options: MatchOptions = DEFAULT_MATCH_OPTIONS


def pad_vocab(request: PadVocabRequest, ui: Ui) -> Report:
    """Pad the vocabulary of a Hugging Face folder into a new one."""
    check_mutually_exclusive({"--multiple": request.multiple, "--size": request.size, "--mesh": request.mesh})
    check_seed(request.init, request.seed)
    return run_conversion(request.common, ui, lambda source, located: plan_pad_vocab(request, source, located))


def padded_size(request: PadVocabRequest, vocabulary: Vocabulary) -> int:
    """The rows that are asked for; usage PrepError where that is fewer than there are true ones."""
    if request.size is not None:
        if request.size < vocabulary.true_size:
            why = f"the true vocabulary has {vocabulary.true_size} rows"
            raise usage_error(f"`--size {request.size}` would cut the vocabulary", why, "a size at least as large")
        return request.size
    if request.mesh is not None:
        mesh = parse_mesh(request.mesh)
        return vocabulary.padded_size(math.lcm(*(mesh.size(axis) for axis in DEFAULT_RULES["vocab"][0])))
    return vocabulary.padded_size(request.multiple or DEFAULT_MULTIPLE)


def check_seed(init: str, seed: int | None) -> None:
    """Raise a usage PrepError for a seed that nothing is drawn with."""
    if init != "normal":
        check_needs("--seed", seed, "--init normal", "zeros and mean draw nothing")


def make_fill(init: str, seed: int | None, source: Source) -> Fill:
    """What new rows are made of; PrepError, mostly of usage, for what cannot be made."""
    if init not in FILL_KINDS:
        raise usage_error(f"`--init {init}` is not known", f"it takes {', '.join(FILL_KINDS)}")
    if init != "normal":
        return Fill(init)
    seed = seed or 0
    if seed >= SEED_LIMIT:
        raise usage_error(f"`--seed {seed}` is too large", f"it has to be below {SEED_LIMIT:,}")
    std = source.config.get("initializer_range", 0.02)
    if not isinstance(std, int | float) or not 0 <= std < math.inf:
        raise PrepError("config.json makes no sense", f"initializer_range is {std!r}, it has to be a number from 0 on")
    return Fill(init, seed, float(std))


def plan_pad_vocab(request: PadVocabRequest, source: Source, located: LocatedCheckpoint) -> PlannedConversion:
    """Every tensor as it is, in the same files, those of the vocabulary with more rows."""
    if not source.tensor_file_names:
        hint = "`prep save-init --pad-vocab N` pads on the way; `prep export` makes a Hugging Face folder"
        raise usage_error(f"{source.display_name} is an Orbax checkpoint", "pad-vocab pads Hugging Face folders", hint)
    vocabulary = source.vocabulary(request.true_vocab)
    size = padded_size(request, vocabulary)
    found = match_source_tensors(source, source_rows(source), request.match_options)
    wanted = {d.name for d in found.dropped if d.rule == "--drop"}
    cut = VocabResize(vocabulary, vocab_tensors(found), make_fill(request.init, request.seed, source))
    rows = output_rows(source.tensors, cut.tensors, size)
    kept = [(file, t) for file, t in zip(source.tensor_file_names, source.tensors) if t.name not in wanted]
    files, places, layouts = lay_out_weight_files(_file_groups(source, kept, rows))
    targets = {t.name: TensorTarget((places[source.names.full_name(t.name)],), rows[t.name]) for _, t in kept}
    config = output_config(source, Vocabulary(vocabulary.true_size, size), found.is_tied)
    made = Plan(
        command="pad-vocab",
        request=_command_line(request, source),
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=build_streams(source, targets, cut),
        files=files,
        small_files=settings_files(config, layouts, copied_files(source.small_files, source.root)),
        dropped=(*(d for d in found.dropped if d.name in wanted), *dropped_padding(source, targets, cut)),
        checks=found.checks,
        settings={
            "name": f"{_base_name(located)}-padded",
            "kind": "hf",
            "family": source.family.name,
            "vocab": {"true": vocabulary.true_size, "padded": size, "init": request.init},
            "prefixed": source.names.is_prefixed,
            "tied": found.is_tied,
            "config": config,
        },
        display_names={t.name: source.names.full_name(t.name) for t in source.tensors},
    )
    fields = {
        "vocab": {"true": vocabulary.true_size, "padded": size, "multiple": _effective_multiple(request), "init": request.init}
    }
    lines = (_vocabulary_line(source, cut, vocabulary, size, request.init, found.is_tied),)
    options = _save_init_options(request, source)
    return PlannedConversion(
        made, f"{_base_name(located)}-padded", lines, fields, lambda out: f"prep save-init {out}{options}"
    )


def _save_init_options(request: PadVocabRequest, source: Source) -> str:
    """The options with which `save-init` lays the padded model out for the mesh that it was padded for."""
    if request.mesh is None:
        return ""
    mesh, sizes = parse_mesh(request.mesh), source.family.sizes(source.config)
    whole = [
        format_rule(dim, (axes, ()))
        for dim, (axes, *others) in DEFAULT_RULES.items()
        if dim != "vocab" and not others and sizes.get(dim, 0) % math.prod(map(mesh.size, axes))
    ]
    return "".join([f" --mesh {request.mesh}", *(f" --rule '{rule}'" for rule in whole)])


def _effective_multiple(request: PadVocabRequest) -> int | None:
    """The multiple that decides; None where a size or a mesh does."""
    return (request.multiple or DEFAULT_MULTIPLE) if request.size is None and request.mesh is None else None


def _base_name(located: LocatedCheckpoint) -> str:
    return located.model_name.removesuffix("-padded")


def _file_groups(source: Source, tensors: list[tuple[str, SourceTensor]], row_counts: dict[str, int]) -> list[FileGroup]:
    """The source's files, each tensor in its place, as deep in a page as it was."""
    groups: list[FileGroup] = []
    for file in dict.fromkeys(name for name, _ in tensors):
        inside = [t for name, t in tensors if name == file]
        first = inside[0].placement[0]
        lead = first.offset % PAGE if isinstance(first, Contiguous) else None
        groups.append((file, header_entries(source, inside, row_counts), lead))
    return groups


def _command_line(request: PadVocabRequest, source: Source) -> str:
    options = [
        ("--multiple", _effective_multiple(request)),
        ("--size", request.size),
        ("--mesh", request.mesh),
        ("--init", request.init if request.init != "zeros" else None),
        ("--seed", request.seed or None),
        ("--true-vocab", request.true_vocab),
        ("--drop", request.match_options.drop),
        ("--config", request.common.config),
        ("--untie", request.match_options.untie),
    ]
    return format_command_line("pad-vocab", source, options)


def _vocabulary_line(source: Source, cut: VocabResize, vocabulary: Vocabulary, size: int, init: str, is_tied: bool) -> str:
    tensor = next(t for t in source.tensors if t.name in cut.tensors)
    added = size - vocabulary.stored_size
    row = tensor.nbytes // tensor.shape[0]
    tie = "   embedding and head are tied: padded once" if is_tied else ""
    if added <= 0:
        return f"vocabulary {vocabulary.stored_size} -> {size}: nothing to add{tie}"
    return f"vocabulary {vocabulary.stored_size} -> {size} (+{added} rows of {init}, {format_bytes(added * row)}){tie}"
