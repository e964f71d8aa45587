"""`prep pad-vocab`: add rows to the vocabulary of a Hugging Face folder so that a mesh divides it."""

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
from prepcli.errors import invalid_config_error, usage_error
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS, MatchOptions, vocab_tensors
from prepcli.planning.plan import Contiguous, Fill, Plan
from prepcli.planning.slabs import PAGE
from prepcli.planning.vocabulary import Vocabulary, check_padded_size
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, source_rows
from prepcli.targets.hf_folder import (
    FileGroup,
    copied_small_files,
    header_entries,
    lay_out_weight_files,
    settings_files,
)
from prepcli.targets.streams import TensorTarget, VocabResize, build_streams, dropped_padding, output_rows
from trainer.models.mesh import parse_mesh
from trainer.models.rules import PARAM_RULES, format_rule

FILL_KINDS = ("zeros", "mean", "normal")
SEED_LIMIT = 1 << 64
DEFAULT_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class PadVocabRequest:
    """Request of `prep pad-vocab`; at most one of `multiple`, `size` and `mesh` is set."""

    common: CommonOptions
    multiple: int | None = None  # None: DEFAULT_MULTIPLE, if size and mesh are None too
    size: int | None = None  # rows
    mesh: str | None = None  # pad to a size that this mesh divides
    init: str = "zeros"  # values of the new rows, one of FILL_KINDS
    seed: int | None = None  # of `init="normal"`
    true_vocab: int | None = None  # unpadded size of the vocabulary; None: from the source
    match_options: MatchOptions = DEFAULT_MATCH_OPTIONS


def pad_vocab(request: PadVocabRequest, ui: Ui) -> Report:
    """Write a copy of a Hugging Face folder with a padded vocabulary.

    Args:
        request: Source, output, and size of the vocabulary.
        ui: Receives notes, warnings and progress.

    Returns:
        Report with the output's path and the sizes of the vocabulary.

    Raises:
        PrepError: The options conflict, the source is not a Hugging Face folder, or the conversion failed.
    """
    check_mutually_exclusive({"--multiple": request.multiple, "--size": request.size, "--mesh": request.mesh})
    check_seed(request.init, request.seed)
    return run_conversion(request.common, ui, lambda source, located: plan_pad_vocab(request, source, located))


def padded_size(request: PadVocabRequest, vocabulary: Vocabulary) -> int:
    """Return the requested number of rows; raise UsageError if it is too small or too large."""
    if request.size is not None:
        if request.size < vocabulary.true_size:
            why = f"the true vocabulary has {vocabulary.true_size} rows"
            raise usage_error(f"`--size {request.size}` is too small", why, f"`--size {vocabulary.true_size}` or more")
        return check_padded_size(request.size, f"--size {request.size}")
    if request.mesh is not None:
        mesh = parse_mesh(request.mesh)
        return vocabulary.padded_size(math.lcm(*(mesh.size(axis) for axis in PARAM_RULES["vocab"][0])))
    multiple = request.multiple or DEFAULT_MULTIPLE
    return check_padded_size(vocabulary.padded_size(multiple), f"--multiple {multiple}")


def check_seed(init: str, seed: int | None) -> None:
    """Raise UsageError for a seed without random values."""
    if init != "normal":
        check_needs("--seed", seed, "--init normal", "zeros and mean are not random")


def make_fill(init: str, seed: int | None, source: Source) -> Fill:
    """Return the fill of new rows.

    Args:
        init: Kind of values, one of FILL_KINDS.
        seed: Seed of `normal`, below 2**64; None: 0.
        source: Source whose config has the standard deviation of `normal` (`initializer_range`, default 0.02).

    Raises:
        PrepError: The kind is unknown, the seed is out of range, or `initializer_range` is invalid.
    """
    if init not in FILL_KINDS:
        raise usage_error(f"unknown `--init {init}`", f"it takes {', '.join(FILL_KINDS)}")
    if init != "normal":
        return Fill(init)
    seed = seed or 0
    if seed >= SEED_LIMIT:
        raise usage_error(f"`--seed {seed}` is too large", f"it must be less than {SEED_LIMIT:,}")
    std = source.config.get("initializer_range", 0.02)
    if not isinstance(std, int | float) or not 0 <= std < math.inf:
        raise invalid_config_error(f"initializer_range is {std!r}, it must be a finite number >= 0")
    return Fill(init, seed, float(std))


def plan_pad_vocab(request: PadVocabRequest, source: Source, located: LocatedCheckpoint) -> PlannedConversion:
    """Plan a copy of every tensor to the same file, with more rows in the vocabulary's tensors.

    Args:
        request: Size and fill of the new rows.
        source: Opened source.
        located: Located source; its model name determines the output's default name.

    Returns:
        Plan with the notes and fields of its report.

    Raises:
        PrepError: The source is an Orbax checkpoint, or does not match the request or its family.
    """
    if not source.tensor_file_names:
        hint = "`prep save-init --pad-vocab N` also pads; `prep export` writes a Hugging Face folder"
        raise usage_error(f"{source.display_name} is an Orbax checkpoint", "pad-vocab pads Hugging Face folders", hint)
    vocabulary = source.vocabulary(request.true_vocab)
    size = padded_size(request, vocabulary)
    match = match_source_tensors(source, source_rows(source), request.match_options)
    dropped_by_option = {d.name for d in match.dropped if d.rule == "--drop"}
    resize = VocabResize(vocabulary, vocab_tensors(match), make_fill(request.init, request.seed, source))
    row_counts = output_rows(source.tensors, resize.tensors, vocab_size=size)
    tensors = [
        (file, t) for file, t in zip(source.tensor_file_names, source.tensors) if t.name not in dropped_by_option
    ]
    files, locations, layouts = lay_out_weight_files(_file_groups(source, tensors, row_counts))
    targets = {
        t.name: TensorTarget((locations[source.names.full_name(t.name)],), row_counts[t.name]) for _, t in tensors
    }
    config = output_config(source, Vocabulary(vocabulary.true_size, size), match.is_tied)
    plan = Plan(
        command="pad-vocab",
        request=_command_line(request, source),
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=build_streams(source, targets, resize=resize),
        files=files,
        small_files=settings_files(config, layouts, extra_files=copied_small_files(source)),
        dropped=(
            *(d for d in match.dropped if d.name in dropped_by_option),
            *dropped_padding(source, targets, resize=resize),
        ),
        checks=match.checks,
        settings={
            "name": f"{_base_name(located)}-padded",
            "kind": "hf",
            "family": source.family.name,
            "vocab": {"true": vocabulary.true_size, "padded": size, "init": request.init},
            "prefixed": source.names.is_prefixed,
            "tied": match.is_tied,
            "config": config,
        },
        display_names={t.name: source.names.full_name(t.name) for t in source.tensors},
    )
    vocab_fields = {"true": vocabulary.true_size, "padded": size}
    fields = {"vocab": {**vocab_fields, "multiple": _effective_multiple(request), "init": request.init}}
    note = _vocabulary_line(source, resize, vocabulary=vocabulary, size=size, init=request.init, is_tied=match.is_tied)
    save_init_options = _save_init_options(request, source)
    return PlannedConversion(
        plan,
        f"{_base_name(located)}-padded",
        notes=(note,),
        fields=fields,
        next_command=lambda out: f"prep save-init {out}{save_init_options}",
    )


def _save_init_options(request: PadVocabRequest, source: Source) -> str:
    """Return the options of `save-init` for the mesh of the padding; dims that it does not divide are not split."""
    if request.mesh is None:
        return ""
    mesh, sizes = parse_mesh(request.mesh), source.family.sizes(source.config)
    rules = [
        format_rule(dim, (axes, ()))
        for dim, (axes, *alternatives) in PARAM_RULES.items()
        if dim != "vocab" and not alternatives and sizes.get(dim, 0) % math.prod(map(mesh.size, axes))
    ]
    return "".join([f" --mesh {request.mesh}", *(f" --rule '{rule}'" for rule in rules)])


def _effective_multiple(request: PadVocabRequest) -> int | None:
    """Return the multiple that determines the size, or None if a size or a mesh does."""
    return (request.multiple or DEFAULT_MULTIPLE) if request.size is None and request.mesh is None else None


def _base_name(located: LocatedCheckpoint) -> str:
    return located.model_name.removesuffix("-padded")


def _file_groups(
    source: Source, tensors: list[tuple[str, SourceTensor]], row_counts: dict[str, int]
) -> list[FileGroup]:
    """Group the tensors by the source's files, in their order and with the same offset within a page."""
    groups: list[FileGroup] = []
    for file in dict.fromkeys(name for name, _ in tensors):
        file_tensors = [t for name, t in tensors if name == file]
        first = file_tensors[0].placement[0]
        page_offset = first.offset % PAGE if isinstance(first, Contiguous) else None
        groups.append((file, header_entries(source, file_tensors, rows=row_counts), page_offset))
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


def _vocabulary_line(
    source: Source, resize: VocabResize, *, vocabulary: Vocabulary, size: int, init: str, is_tied: bool
) -> str:
    tensor = next(t for t in source.tensors if t.name in resize.tensors)
    added_rows = size - vocabulary.stored_size
    row_nbytes = tensor.nbytes // tensor.shape[0]
    if added_rows <= 0:
        nbytes = format_bytes(sum(t.nbytes for t in source.tensors))
        return f"vocabulary {vocabulary.stored_size} -> {size}: nothing to add, the output is a full copy of {nbytes}"
    tie_note = "   embedding and head are tied: padded once" if is_tied else ""
    added = f"+{added_rows} rows of {init}, {format_bytes(added_rows * row_nbytes)}"
    return f"vocabulary {vocabulary.stored_size} -> {size} ({added}){tie_note}"
